"""Serves a run's metrics to Prometheus, from the process that trains."""

from __future__ import annotations

import errno
import os
import threading
import time
import weakref
from contextlib import suppress
from functools import cache
from typing import Any

from hilbert_monitor.runs.exposition import CollectorRegistry, Exposition, RunSamples, Samples, start_http_server

from .guard import tell

PORTS = 100
"""How many ports are tried."""
NAMELESS = 10.0
"""Seconds for which the run's log may take to give the run its name; then it is scraped without."""


class Exporter:
    """Serves the samples of one run at /metrics, in threads of its own.

    Args:
        samples: of the run.
        port: where; if it is taken, the next that is free. 0 for any, None to serve nothing: the registry is the
            user's then.
        address: to listen at.
        tls: certificate and key files, for https.
        registry: to register with; by default one of its own.
        linger: seconds to stay, at most, after the run has ended, for one more scrape. Nobody waits for a Prometheus
            that never came.
    """

    def __init__(
        self,
        samples: RunSamples,
        *,
        port: int | None = 0,
        address: str = "127.0.0.1",
        tls: tuple[str, str] | None = None,
        registry: CollectorRegistry | None = None,
        linger: float = 30.0,
    ) -> None:
        self.samples, self.linger, self._born = samples, linger, time.monotonic()
        self._scraped = self._ended = False
        self._seen = threading.Event()
        self._registry = CollectorRegistry() if registry is None else registry
        self._collector = Exposition(self._samples)
        self._server: Any = None
        self.port: int | None = None
        """Where it listens."""
        if port is not None:
            self._server = _start(port, address, tls, self._registry)
            self.port = self._server.server_port
            _watch_forks()
            _servers.add(self._server)
        self._registry.register(self._collector)

    def end(self, status: str) -> None:
        """Tell how the run ended, wait for a last scrape in a thread of its own, and go."""
        self.samples.end(status)
        self._ended = True
        if not self._scraped:
            self.stop()
        else:  # no daemon: the process waits for it
            threading.Thread(target=self._linger, name="hilbert-monitor last scrape").start()

    def stop(self) -> None:
        """Go: the run's series are no more."""
        self._seen.set()
        with suppress(KeyError):
            self._registry.unregister(self._collector)
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()

    def _linger(self) -> None:
        self._seen.wait(self.linger)
        time.sleep(0.2 if self._server is not None else 0.0)  # for the answer to be sent
        self.stop()

    def _samples(self) -> list[Samples]:
        found = self.samples.samples()
        nameless = not found.info.id and time.monotonic() - self._born < NAMELESS
        if nameless and not self._ended:
            return []
        self._scraped = True
        if self._ended:
            self._seen.set()
        return [found]


def _start(port: int, address: str, tls: tuple[str, str] | None, registry: CollectorRegistry) -> Any:
    """Serve a registry at a port, or at the next that is free."""
    certificate, key = tls or (None, None)
    for wanted in range(port, min(port + PORTS, 65536)):
        try:
            server, _ = start_http_server(wanted, address, registry, certificate, key)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or port == 0:
                raise
            continue
        if wanted != port:
            tell(f"port {port} is taken: the metrics are at port {wanted}", stacklevel=4)
        return server
    raise OSError(errno.EADDRINUSE, f"ports {port} to {port + PORTS - 1} of {address} are taken: give another")


# A forked loader worker would keep the port of a killed parent, and answer nobody


_servers: weakref.WeakSet[Any] = weakref.WeakSet()


@cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=_let_go)


def _let_go() -> None:
    for server in _servers:
        with suppress(OSError):
            server.socket.close()

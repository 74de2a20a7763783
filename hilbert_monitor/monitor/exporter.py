"""Serves a run's metrics to Prometheus, from the process that trains."""

from __future__ import annotations

import errno
import math
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hilbert_monitor.runs.exposition import CollectorRegistry, Exposition, RunSamples, Samples
from hilbert_monitor.runs.process_bound import ProcessBound
from hilbert_monitor.runs.reader import STALLED_AFTER

from .metrics_server import MetricsServer, tls_context
from .runtime import warn_user

PORTS = 100
"""How many ports are tried."""
LAST_WORD = 2.0
"""Seconds that the metrics stay, at most, after a stop that was asked for: a cluster kills what takes long."""
NAMELESS = 10.0
"""Seconds that the run's log has to give the run its name; then it is scraped without one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prometheus:
    """How Prometheus gets at a run's metrics.

    Example:
        ``HilbertMonitor(prometheus=Prometheus(port=9464, address="0.0.0.0"))``
    """

    port: int | None = None
    """Serve /metrics at this port, from rank zero; at the next free one if it is taken. 0 for any, None for none."""
    address: str = "127.0.0.1"
    """To listen at; "0.0.0.0" for a Prometheus on another machine."""
    tls: tuple[str, str] | None = None
    """Files of a certificate and its key, for https."""
    registry: Any = None
    """Register the metrics with this CollectorRegistry; without a port, that is all."""
    stalled_after: float = STALLED_AFTER
    """Seconds without a step or validation after which the run counts as stalled, unless twenty of its steps, or
    twice its longest pause in the last hundred, take longer. The same as `stalled_after` of the monitor."""
    linger: float = 30.0
    """Seconds that the metrics stay, at most, after the end of the run, for one more scrape. A run that was never
    scraped waits for nobody, and one that was asked to stop waits two seconds at most."""

    def __post_init__(self) -> None:
        if self.port is not None and not (isinstance(self.port, int) and 0 <= self.port <= 65535):
            raise ValueError(f"a Prometheus port is between 0, for any that is free, and 65535, got {self.port!r}")
        if self.tls is not None and (isinstance(self.tls, str) or len(self.tls) != 2):
            raise ValueError(f"tls is a pair of files, a certificate and its key, got {self.tls!r}")
        if self.port is None and self.registry is None:
            raise ValueError("Prometheus needs a port=... to serve the metrics at, or a registry=... to add them to")
        for name in ("stalled_after", "linger"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is a number of seconds, zero or more, got {getattr(self, name)}")
        if self.linger > threading.TIMEOUT_MAX:
            raise ValueError(
                f"linger is a number of seconds that the process waits at its end, and Python waits for"
                f" {threading.TIMEOUT_MAX:.0f} at most, got {self.linger}: give a little more than the time between two"
                " scrapes, such as 30.0"
            )


class Exporter(ProcessBound):
    """Serves the samples of one run at /metrics, in threads of its own. A forked child cannot use it.

    Args:
        samples: of the run.
        settings: where and for how long.
    """

    def __init__(self, samples: RunSamples, settings: Prometheus) -> None:
        self.samples, self.settings, self._born = samples, settings, time.monotonic()
        self._scraped = self._ended = False
        self.bind_to_process()
        self._seen = threading.Event()
        registry = CollectorRegistry() if settings.registry is None else settings.registry
        self._server: MetricsServer | None = None
        self.port: int | None = None
        """Where it listens."""
        self._leave = _join(registry, self._samples)
        if settings.port is not None:
            try:
                self._server = _start(settings.port, settings.address, settings.tls, registry)
            except BaseException:
                self._leave()
                raise
            self.port = self._server.server_port

    def end(self, status: str) -> None:
        """Export how the run ended; stop after one more scrape, for which a thread of its own waits."""
        if self.inherited:
            return
        self.samples.end(status)
        self._ended = True
        if not self._scraped:
            self.stop()
        else:  # no daemon: the process waits for it
            patience = min(self.settings.linger, LAST_WORD if status == "stopped" else math.inf)
            threading.Thread(target=self._linger, args=(patience,), name="hilbert-monitor last scrape").start()

    def stop(self) -> None:
        """Stop serving, and take the run's series out of the registry."""
        if self.inherited:
            return
        self._seen.set()
        self._leave()
        server, self._server = self._server, None
        if server is not None:
            server.stop()

    def _linger(self, patience: float) -> None:
        self._seen.wait(patience)
        time.sleep(0.2 if self._server is not None else 0.0)  # for the answer to be sent
        self.stop()

    def on_fork(self) -> None:
        """Free the lock of the registries, which runs of the child take too."""
        global _joining
        _joining = threading.Lock()

    def _samples(self) -> list[Samples]:
        if self.inherited:
            return []
        samples = self.samples.samples()
        nameless = not samples.info.id and time.monotonic() - self._born < NAMELESS
        if nameless and not self._ended:
            return []
        self._scraped = True
        if self._ended:
            self._seen.set()
        return [samples]


def _start(port: int, address: str, tls: tuple[str, str] | None, registry: CollectorRegistry) -> MetricsServer:
    """Serve a registry at a port, or at the next that is free."""
    context = None if tls is None else tls_context(*tls)
    for wanted in range(port, min(port + PORTS, 65536)):
        try:
            server = MetricsServer(wanted, address, registry, context)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or port == 0:
                raise
            continue
        if wanted != port:
            warn_user(f"port {port} is taken: the metrics are at port {wanted}", stacklevel=4)
        return server
    last = min(port + PORTS, 65536) - 1
    raise OSError(errno.EADDRINUSE, f"ports {port} to {last} of {address} are taken: give another")


# A registry takes each metric from one collector only. So runs that share a registry, such as a run that lingers and
# the next one, share a collector.


class _RunsCollector(Exposition):
    """Collects all runs that share a registry."""

    def __init__(self) -> None:
        self.sources: list[Callable[[], list[Samples]]] = []
        super().__init__(lambda: [samples for source in tuple(self.sources) for samples in source()])


_collectors: weakref.WeakKeyDictionary[CollectorRegistry, _RunsCollector] = weakref.WeakKeyDictionary()
_joining = threading.Lock()


def _join(registry: CollectorRegistry, source: Callable[[], list[Samples]]) -> Callable[[], None]:
    """Add a run to what a registry collects; return a function that takes it out again."""
    with _joining:
        collector = _collectors.get(registry)
        if collector is None:
            collector = _RunsCollector()
            registry.register(collector)
            _collectors[registry] = collector
        collector.sources.append(source)

    def leave() -> None:
        with _joining:
            if source in collector.sources:
                collector.sources.remove(source)
                if not collector.sources:
                    registry.unregister(_collectors.pop(registry))

    return leave

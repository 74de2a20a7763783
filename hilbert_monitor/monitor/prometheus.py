"""Serve a run's metrics to Prometheus from the process that trains."""

from __future__ import annotations

import errno
import logging
import socket
import ssl
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass
from socketserver import TCPServer
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from hilbert_monitor.runs.exposition import Exposition, RunSamples, Samples
from hilbert_monitor.runs.process_bound import ProcessBound

from .runtime import warn_user

PORTS = 100  # to try
CONNECTIONS = 100  # to serve at once
TIMEOUT = 5.0  # seconds of a TLS handshake, or of one read or write
STOP_LINGER = 2.0  # most seconds to linger after a requested stop: a cluster kills slow processes
NAME_WAIT = 10.0  # seconds that the log has to name the run; until then scrapes are empty


@dataclass(frozen=True, kw_only=True, slots=True)
class Prometheus:
    """Settings of the export: ``HilbertMonitor(prometheus=Prometheus(port=9464, address="0.0.0.0"))``."""

    port: int | None = None
    """Port of /metrics on rank zero, or the next free one if it is taken. 0 for any free port, None for no server."""
    address: str = "127.0.0.1"
    """Address to listen at; "0.0.0.0" for a Prometheus on another machine."""
    tls: tuple[str, str] | None = None
    """Files of a certificate and its key, for https."""
    registry: Any = None
    """A CollectorRegistry to add the metrics to. It takes one run at a time."""
    linger: float = 30.0
    """Longest time in seconds that the metrics stay after the run, for one more scrape. A run that was never scraped
    does not wait, and one that was asked to stop waits for two seconds at most."""

    def __post_init__(self) -> None:
        if self.port is not None and not (isinstance(self.port, int) and 0 <= self.port <= 65535):
            raise ValueError(f"a Prometheus port is between 0, for any that is free, and 65535, got {self.port!r}")
        if self.tls is not None and (isinstance(self.tls, str) or len(self.tls) != 2):
            raise ValueError(f"tls is a pair of files, a certificate and its key, got {self.tls!r}")
        if self.port is None and self.registry is None:
            raise ValueError("Prometheus needs a port=... to serve the metrics at, or a registry=... to add them to")
        most = threading.TIMEOUT_MAX
        if not 0 <= self.linger <= most:
            raise ValueError(f"linger is a number of seconds, from zero to {most:.0f}, such as 30, got {self.linger}")


class Exporter(ProcessBound, Exposition):
    """Exports the samples of one run until `stop`. A forked child cannot use it."""

    def __init__(self, samples: RunSamples, settings: Prometheus) -> None:
        super().__init__(self._present)
        self.samples, self.settings, self._started = samples, settings, time.monotonic()
        self._scraped = self._ended = False
        self._last_scrape = threading.Event()
        self._server: MetricsServer | None = None
        self._registry = CollectorRegistry() if settings.registry is None else settings.registry
        self.bind_to_process()
        for other in tuple(_exporters):
            if other._registry is self._registry and other._ended:
                other.stop()
        try:
            self._registry.register(self)
        except ValueError as error:
            raise ValueError("the registry has another run or metrics of these names: give each its own") from error
        _exporters.add(self)
        try:
            self._server = None if settings.port is None else _serve(settings, self._registry)
        except BaseException:
            self.stop()
            raise
        self.port = None if self._server is None else self._server.server_port

    def end(self, status: str) -> None:
        """Export how the run ended, and stop after one more scrape. Returns before that."""
        if self.inherited:
            return
        self.samples.end(status)
        self._ended = True
        if not self._scraped:
            self.stop()
            return
        seconds = min(self.settings.linger, STOP_LINGER) if status == "stopped" else self.settings.linger
        threading.Thread(target=self._linger, args=(seconds,), name="hilbert-monitor last scrape").start()  # no daemon

    def stop(self) -> None:
        """Stop serving, and remove the run from the registry."""
        if self.inherited:
            return
        self._last_scrape.set()
        with suppress(KeyError):  # no longer registered
            self._registry.unregister(self)
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def on_fork(self) -> None:
        """Close the socket in the child. It would hold the port of a killed parent and never answer."""
        if self._server is not None:
            self._server.socket.close()

    def _linger(self, seconds: float) -> None:
        self._last_scrape.wait(seconds)
        time.sleep(0.2)  # to send the answer
        self.stop()

    def _present(self) -> list[Samples]:
        if self.inherited:
            return []
        samples = self.samples.samples()
        if not (samples.info.id or self._ended or time.monotonic() > self._started + NAME_WAIT):
            return []
        self._scraped = True
        if self._ended:
            self._last_scrape.set()
        return [samples]


_exporters: weakref.WeakSet[Exporter] = weakref.WeakSet()


class MetricsServer(ThreadingWSGIServer):
    """Serves a registry. Each connection has its own thread, so a silent client delays neither others nor the end."""

    def __init__(self, port: int, address: str, registry: CollectorRegistry, tls: ssl.SSLContext | None) -> None:
        self.address_family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
        self._tls, self._free = tls, threading.BoundedSemaphore(CONNECTIONS)
        super().__init__((address, port), _Handler)
        self.set_app(make_wsgi_app(registry))
        self.socket.setblocking(False)  # a client may leave before `accept`
        threading.Thread(target=self.serve_forever, args=(0.1,), name="hilbert-monitor metrics", daemon=True).start()

    def server_bind(self) -> None:
        """Bind without the parent's `getfqdn`, in which DNS may take half a minute."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def get_request(self) -> tuple[Any, Any]:
        """Accept a connection. The first read, in its own thread, makes the TLS handshake."""
        request, client = super().get_request()
        request.settimeout(TIMEOUT)
        if self._tls is not None:
            request = self._tls.wrap_socket(request, server_side=True, do_handshake_on_connect=False)
        return request, client

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer a connection, or close it if too many are open."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log what went wrong with a client."""
        logging.getLogger("hilbert_monitor").debug("metrics for %s failed", client_address, exc_info=True)


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Log no requests."""


def _serve(settings: Prometheus, registry: CollectorRegistry) -> MetricsServer:
    tls, first = None if settings.tls is None else _tls_context(*settings.tls), settings.port or 0
    for port in range(first, min(first + PORTS, 65536)):
        try:
            server = MetricsServer(port, settings.address, registry, tls)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or first == 0:
                raise
        else:
            if port != first:
                warn_user(f"port {first} is taken: the metrics are at port {port}", stacklevel=4)
            return server
    raise OSError(errno.EADDRINUSE, f"port {first} and the next {PORTS - 1} are taken: give another")


def _tls_context(certificate: str, key: str) -> ssl.SSLContext:
    def refuse() -> str:  # OpenSSL would ask at the terminal, and the run would wait
        raise ValueError("the key has a password")

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key, password=refuse)
    except (OSError, ValueError) as error:
        files = f"tls=({certificate!r}, {key!r})"
        raise ValueError(f"{files} takes two PEM files, the key without a password: {error}") from error
    return context

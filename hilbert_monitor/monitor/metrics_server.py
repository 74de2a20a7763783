"""An HTTP server for metrics that no client can hold up.

The thread that accepts connections does nothing else. TLS handshake, request and answer each happen in a thread of
their connection, with a time limit, so a client that connects and stays silent delays nobody: not the other clients,
and not the end of the run.
"""

from __future__ import annotations

import logging
import socket
import ssl
import threading
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from hilbert_monitor.runs.exposition import CollectorRegistry, make_wsgi_app
from hilbert_monitor.runs.process_bound import ProcessBound

PATIENCE = 5.0
"""Seconds that a handshake, and each read or write of a connection, may take."""
CONNECTIONS = 100
"""Connections that are served at once; further ones are closed."""
STOPPING = 2.0
"""Seconds after which `stop` returns, whatever the server is doing."""


class MetricsServer(ProcessBound, ThreadingMixIn, WSGIServer):
    """Serves a registry at an address, from the moment it is made until `stop`.

    Args:
        port: where to listen; 0 for any that is free.
        address: where to listen.
        registry: what to serve, at every path.
        tls: makes connections secure; None for plain http.
    """

    daemon_threads = True

    def __init__(self, port: int, address: str, registry: CollectorRegistry, tls: ssl.SSLContext | None = None) -> None:
        info = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family = info[0][0]
        self._tls, self._free = tls, threading.BoundedSemaphore(CONNECTIONS)
        super().__init__((str(info[0][4][0]), port), _Handler)
        self.set_app(make_wsgi_app(registry))
        self.bind_to_process()
        self.socket.setblocking(False)  # a client may be gone again before it is accepted
        threading.Thread(target=self.serve_forever, args=(0.1,), name="hilbert-monitor metrics", daemon=True).start()

    def on_fork(self) -> None:
        """Close the socket in the child, which would keep the port of a killed parent and answer nothing."""
        self.socket.close()

    def stop(self) -> None:
        """Listen no more. Returns within `STOPPING` seconds; connections end by themselves."""
        end = threading.Thread(target=self._end, name="hilbert-monitor metrics end", daemon=True)
        end.start()
        end.join(STOPPING)

    def _end(self) -> None:
        self.shutdown()
        self.server_close()

    def server_bind(self) -> None:
        """Bind, without asking DNS for the host's full name, as the parent class does: that can take half a minute."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread of its own, unless too many are open."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection, in its own thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Shake hands, if the connection is to be secure, then read the request and answer it."""
        request.settimeout(PATIENCE)
        if self._tls is None:
            super().finish_request(request, client_address)
            return
        secure = self._tls.wrap_socket(request, server_side=True)
        try:
            super().finish_request(secure, client_address)
        finally:
            self.shutdown_request(secure)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log what went wrong with a client, at a level that nobody sees by default."""
        logging.getLogger("hilbert_monitor").debug("metrics for %s failed", client_address, exc_info=True)


class _Handler(WSGIRequestHandler):
    """Answers one request, and prints nothing."""

    timeout = PATIENCE

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


def tls_context(certificate: str, key: str) -> ssl.SSLContext:
    """Read a certificate and its key.

    Raises:
        ValueError: if one of them cannot be used; the message names both files.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"tls=({certificate!r}, {key!r}): cannot read the certificate or its key ({error}): give two PEM files,"
            " the key without a password"
        ) from error
    return context


def _no_password() -> str:
    """Refuse: OpenSSL would otherwise ask at the terminal, and the run would wait for an answer."""
    raise ValueError("the key has a password")

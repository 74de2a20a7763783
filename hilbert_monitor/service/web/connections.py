"""Connections to the service: how many there may be, and how long a request may take to arrive.

A connection waits until a whole request has come. It may do so for some seconds. If there are too many connections, the
one that has waited longest is closed, so that clients that say nothing lock nobody out. A connection whose request is
being answered, such as a stream of events, is left alone.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from hilbert_monitor.service.following.cache import MAPPED

PATIENCE = 10.0
"""Seconds that a request may take to arrive, its body included."""
ACCEPTED = 16
"""Connections that are accepted in one turn of the event loop. For a few turns there are so many beyond the limit."""
RESERVED = 96
"""Files for everything but connections and cached tables: logs, sockets, and connections that come and go."""
FEWEST = 16
"""Connections that there may be on a machine that allows hardly any files."""
MOST = 1 << 16
"""Connections that there may be where files are not limited."""
SILENCE = 60.0
"""Seconds in which the same warning is given once."""
UNFINISHED = (h11.IDLE, h11.SEND_BODY)
"""States of a client that has not sent a whole request."""

_log = logging.getLogger(__name__)


def connection_limit() -> int:
    """How many connections there may be, by the files that this process may have open."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(FEWEST, int((1 - MAPPED) * files) - RESERVED) if files >= 0 else MOST


class Connections:
    """The open connections of a server.

    Args:
        limit: how many there may be.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._open: set[Connection] = set()
        self._waiting: dict[Connection, None] = {}
        """Those without a whole request, in the order in which they began to wait."""

    def add(self, connection: Connection) -> bool:
        """Take a new connection, and close the one that has waited longest if there are too many; say if it was taken.

        It is not if all others are being answered.
        """
        if len(self._open) >= self.limit:
            _log.warning(
                "%d connections are open, the most for the files that this process may have (ulimit -n): those that"
                " have waited longest for a request are closed",
                len(self._open),
            )
            longest = next(iter(self._waiting), None)
            if longest is None:
                return False
            self.remove(longest)
            longest.transport.abort()
        self._open.add(connection)
        self._waiting[connection] = None
        return True

    def remove(self, connection: Connection) -> None:
        """Forget a connection."""
        self._open.discard(connection)
        self._waiting.pop(connection, None)

    def wait(self, connection: Connection, waits: bool) -> None:
        """Note whether a connection waits for a request."""
        if not waits:
            self._waiting.pop(connection, None)
        elif connection in self._open:
            self._waiting.setdefault(connection)


class Connection(H11Protocol):
    """A connection that is closed if its request does not arrive in time.

    Args:
        pool: the connections that it is one of.
        arguments: those of uvicorn.
    """

    def __init__(self, *, pool: Connections, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._pool = pool
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Begin to wait for a request."""
        super().connection_made(transport)
        if self._pool.add(self):
            self._wait()
        else:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        self._arrived()
        self._pool.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take a part of a request."""
        super().data_received(data)
        if self.conn.their_state in UNFINISHED:
            self._wait()
        else:
            self._arrived()

    def on_response_complete(self) -> None:
        """Wait for the next request, for which uvicorn has a time limit of its own until its first byte."""
        super().on_response_complete()
        if self.conn.their_state in UNFINISHED:
            self._pool.wait(self, True)

    def _wait(self) -> None:
        """Give the request some seconds to arrive, from its beginning on."""
        is_being_answered = self.conn.their_state is h11.SEND_BODY and not self.cycle.response_complete
        self._pool.wait(self, not is_being_answered)
        if self._timer is None and not self.transport.is_closing():
            self._timer = self.loop.call_later(PATIENCE, self.transport.abort)

    def _arrived(self) -> None:
        self._pool.wait(self, False)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class OnceAMinute(logging.Filter):
    """Lets the same warning through once in a while: clients can provoke any number of them."""

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is logged. Those of exceptions always are."""
        if record.exc_info:
            return True
        now, last = time.monotonic(), self._last.get(record.msg)
        if last is not None and now - last < SILENCE:
            return False
        self._last[record.msg] = now
        return True


_once_a_minute = OnceAMinute()


def quiet(*loggers: str) -> None:
    """Have loggers say the same thing once a minute, at most."""
    for name in (__name__, *loggers):
        logging.getLogger(name).addFilter(_once_a_minute)


def on_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log what went wrong in the event loop; that there are no files for a connection, in one line."""
    if "out of system resource" in context.get("message", ""):
        _log.warning("a connection has to wait: this process may not open more files (ulimit -n)")
    else:
        loop.default_exception_handler(context)

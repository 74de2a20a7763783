"""A cache of answers: each is worked out once, however many clients ask for it."""

from __future__ import annotations

import gzip
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import cached_property

SMALL = 1024
"""Bytes that are not worth compressing."""
OVERHEAD = 4096
"""Bytes that an entry takes besides its answer."""


class Body:
    """The bytes of an answer. They are compressed once, when a client first accepts that."""

    def __init__(self, content: bytes, level: int = 1) -> None:
        self.content, self._level, self._lock = content, level, threading.Lock()

    @cached_property
    def _gzipped(self) -> bytes:
        return gzip.compress(self.content, self._level, mtime=0)

    @property
    def gzipped(self) -> bytes | None:
        """The compressed bytes; None for an answer that is too short for it."""
        if len(self.content) < SMALL:
            return None
        with self._lock:
            return self._gzipped


class _Entry:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.body: Body | None = None
        self.counted = 0


class ResponseCache:
    """The answers that were asked for last.

    Args:
        room: bytes that the answers may take; compressed copies are not counted.
    """

    def __init__(self, room: int = 64 << 20) -> None:
        self._room, self._taken = room, 0
        self._lock = threading.Lock()
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], bytes]) -> Body:
        """The answer to a key. Of clients that ask at the same time, one works it out and the others wait for it."""
        with self._lock:
            entry = self._entries.setdefault(key, _Entry())
            self._entries.move_to_end(key)
        with entry.lock:
            if entry.body is not None:
                return entry.body
            try:
                entry.body = Body(make())
            except BaseException:
                self._drop(key, entry)
                raise
            self._keep(key, entry, entry.body)
            return entry.body

    def _drop(self, key: Hashable, entry: _Entry) -> None:
        with self._lock:
            if self._entries.get(key) is entry:
                del self._entries[key]

    def _keep(self, key: Hashable, entry: _Entry, body: Body) -> None:
        """Count a new answer, and drop the oldest ones if there is no room."""
        with self._lock:
            if self._entries.get(key) is not entry:
                return
            entry.counted = len(body.content) + OVERHEAD
            self._taken += entry.counted
            while self._taken > self._room and (old := self._oldest(entry)) is not None:
                self._taken -= self._entries.pop(old).counted

    def _oldest(self, but: _Entry) -> Hashable | None:
        return next((key for key, entry in self._entries.items() if entry.counted and entry is not but), None)

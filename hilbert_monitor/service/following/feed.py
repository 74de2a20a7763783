"""Events about runs for any number of listeners: a ring buffer of events with ids, written by one thread.

A listener that reconnects with the id of the last event it had gets the events it missed, each once. One that was away
for longer than the buffer reaches back, or has an id of another server, gets the event "reset".
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import msgspec

from hilbert_monitor.runs.files import to_json

REMEMBERED = 16 << 20
"""Bytes of events that are stored for listeners that reconnect."""
PING = 2.0
"""Seconds without an event after which a listener gets a "ping": its silence tells that the service has stopped."""


class Event(NamedTuple):
    """A message about something that changed."""

    id: str
    name: str
    data: str
    """JSON."""


class Feed:
    """A ring buffer of events.

    Args:
        remembered: bytes of events that are stored.
        ping: seconds without an event after which a listener gets a "ping".
    """

    def __init__(self, remembered: int = REMEMBERED, ping: float = PING) -> None:
        self.epoch = secrets.token_hex(4)
        self.listeners = 0
        """How many listeners are connected."""
        self._remembered, self._size, self._count = remembered, 0, 0
        self._ping = ping
        self._events: deque[Event] = deque()
        self._lock = threading.Lock()
        self._bells: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()
        self._closed = False

    def publish(self, name: str, data: Any) -> None:
        """Send an event to all listeners, from any thread."""
        text = msgspec.json.encode(to_json(data)).decode()
        with self._lock:
            self._count += 1
            self._events.append(Event(self._id(self._count), name, text))
            self._size += len(text)
            while self._size > self._remembered and len(self._events) > 1:
                self._size -= len(self._events.popleft().data)
        self._ring()

    def close(self) -> None:
        """Disconnect all listeners, from any thread."""
        self._closed = True
        self._ring()

    async def listen(self, after: str | None = None) -> AsyncIterator[Event]:
        """Yield events from now on, or those after the event with an id, until the feed is closed.

        The first event is "hello". It is "reset" for an id that is not known any more: the listener has to fetch
        everything anew. While nothing happens there is a "ping" every two seconds.
        """
        bell = (asyncio.get_running_loop(), asyncio.Event())
        with self._lock:
            self._bells.add(bell)
            self.listeners += 1
        try:
            place = None if after is None else self._place(after)
            if place is None:
                place = self._count
                yield Event(self._id(place), "hello" if after is None else "reset", "{}")
            while not self._closed:
                bell[1].clear()
                missed = self._since(place)
                if missed is None:
                    place = self._count
                    yield Event(self._id(place), "reset", "{}")
                    continue
                for event in missed:
                    place += 1
                    yield event
                if not missed and not await self._rings(bell[1]):
                    yield Event(self._id(place), "ping", "{}")
        finally:
            with self._lock:
                self._bells.discard(bell)
                self.listeners -= 1

    async def _rings(self, bell: asyncio.Event) -> bool:
        """Wait for a bell; return whether it rang before a ping is due."""
        try:
            async with asyncio.timeout(self._ping):
                return await bell.wait()
        except TimeoutError:
            return False

    def _id(self, place: int) -> str:
        return f"{self.epoch}-{place}"

    def _place(self, id: str) -> int | None:
        """The place of an event by its id; None for an id that is not of this feed."""
        epoch, _, number = id.partition("-")
        if epoch != self.epoch or not number.isdecimal() or len(number) > 18 or int(number) > self._count:
            return None
        return int(number)

    def _since(self, place: int) -> list[Event] | None:
        """Events after a place; None if some of them are no longer stored."""
        with self._lock:
            new = self._count - place
            return None if new > len(self._events) else [self._events[i] for i in range(-new, 0)]

    def _ring(self) -> None:
        with self._lock:
            for loop, bell in self._bells:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(bell.set)

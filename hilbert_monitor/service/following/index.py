"""The index of all runs of a folder, which one thread keeps up to date.

Each log is read on from where the last look ended. New records are published at once. Long logs that are not read yet
are read in between, the shortest first, so that a long log does not delay the news of a live run.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from hilbert_monitor.runs.log import News

from .cache import Cache
from .feed import Feed
from .follower import RunFollower
from .snapshot import RunSnapshot, summary

CACHE = ".hilbert-monitor"
"""Folder of cached tables, beside the runs."""
PIECE = 200
"""Records that an event carries, at most."""
SLICE = 0.3
"""Seconds that reading long logs may take between two looks at the live runs."""
RESTED = 1.0
"""Seconds between two looks at a run that has ended."""
REMEMBERED = 600.0
"""Seconds for which a run whose folder is gone is still listed."""
BEHIND = 1 << 20
"""Unread bytes from which on a log counts as long, and is read in between."""


class Index:
    """The runs of a folder.

    Args:
        root: folder of the runs; it may be created later.
        cache: folder for cached tables, which make the next start quick; None for none.
        every: seconds between two looks.
    """

    def __init__(self, root: Path, *, cache: Path | None = None, every: float = 0.2) -> None:
        self.root, self.every, self.feed = root, every, Feed()
        self.runs: Mapping[str, RunSnapshot] = MappingProxyType({})
        """The runs by id. The mapping is replaced and never changed: an answer reads it once and is consistent."""
        self.version = 0
        """Grows with every change of any run."""
        self.progress = 0.0
        """Share of all logs that was read."""
        self._cache = Cache(cache) if cache is not None else None
        self._followed: dict[str, RunFollower] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._pass = threading.Lock()

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._follow, name="hilbert-monitor index", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Disconnect the listeners and end the thread."""
        self._stop.set()
        self.feed.close()
        if self._thread is not None:
            self._thread.join()

    def refresh(self, budget: float = math.inf, *, rested: float = 0.0) -> None:
        """Look once at every run, and read on in long logs.

        Args:
            budget: seconds that reading long logs may take.
            rested: seconds for which a run that has ended is not looked at again.
        """
        with self._pass:
            self._look_for_runs()
            now = time.time()
            for followed in list(self._followed.values()):
                if followed.behind <= BEHIND and (not followed.ended or now - followed.looked >= rested):
                    self._advance(followed, now)
            self._catch_up(budget)
            self._note_progress()

    def _follow(self) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            self.refresh(SLICE, rested=RESTED)
            idle = self.every - (time.monotonic() - began)
            self._stop.wait(0.001 if self.progress < 1 else max(idle, 0.02))

    # Which runs there are

    def _look_for_runs(self) -> None:
        """Start to follow new folders, and forget those that have been gone for long."""
        names = set(_folders(self.root))
        for name in sorted(names - self._followed.keys()):
            self._followed[name] = RunFollower(self.root / name, self.root, self._cache)
        for name in self._followed.keys() - names:
            gone = self._followed[name]
            if gone.snapshot is None or time.time() - (gone.gone_since or math.inf) > REMEMBERED:
                del self._followed[name]
                self._publish(gone.id, None)

    def _catch_up(self, budget: float) -> None:
        deadline = time.monotonic() + budget
        for followed in sorted(self._followed.values(), key=lambda one: one.behind):
            if followed.behind > BEHIND and time.monotonic() < deadline and not self._stop.is_set():
                self._advance(followed, time.time(), deadline)

    def _advance(self, followed: RunFollower, now: float, deadline: float = math.inf) -> None:
        """Read on in a run's log, and publish what changed."""
        known, news = followed.snapshot, list[News]()
        current = known is not None and known.indexed == 1.0
        if not followed.advance(now, deadline, news if current else None):
            return
        run = followed.snapshot
        assert run is not None
        self._publish(followed.id, run)
        for piece in _pieces(run, news, whole=current):
            self.feed.publish("records", piece)
        for alert in followed.new_alerts if known is not None else ():
            source = {"run": run.id, "name": run.info.name, "status": run.status}
            self.feed.publish("alert", {**source, "alert": msgspec.structs.asdict(alert)})
        self.feed.publish("run", {"id": run.id, "version": run.version, "summary": summary(run)})

    def _publish(self, id: str, run: RunSnapshot | None) -> None:
        """Put a snapshot into the index; None takes the run out."""
        known = self.runs
        if run is not None:
            self.runs = MappingProxyType({**known, id: run})
        elif id in known:
            self.runs = MappingProxyType({name: other for name, other in known.items() if name != id})
            self.feed.publish("gone", {"id": id})
        self.version += 1

    def _note_progress(self) -> None:
        size = sum(one.size for one in self._followed.values())
        left = sum(one.behind for one in self._followed.values() if one.behind > BEHIND)
        progress = 1.0 - left / size if left else 1.0
        if progress != self.progress and (progress == 1.0 or abs(progress - self.progress) > 0.01):
            self.progress = progress
            self.feed.publish("progress", {"progress": progress})


def _folders(root: Path) -> Iterator[str]:
    try:
        with os.scandir(root) as entries:
            for entry in entries:
                if not entry.name.startswith(".") and entry.is_dir():
                    yield entry.name
    except OSError:
        return


def _pieces(run: RunSnapshot, news: list[News], *, whole: bool) -> Iterator[dict[str, Any]]:
    """Events with the new records of a log; one that asks to reload, if they are too many."""
    if not whole or sum(len(one.records) for one in news) > PIECE:
        if run.indexed == 1.0:
            yield {"run": run.id, "reload": True}
        return
    for one in news:
        if one.records or one.attempts:
            yield {"run": run.id, "keep": one.keep, "records": [msgspec.to_builtins(record) for record in one.records]}

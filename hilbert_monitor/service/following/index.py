"""The index of all runs of a folder, which one thread keeps up to date.

Each log is read on from where the last look ended. New records are published at once. Logs that are not read yet are
read in between, so that they do not delay the news of a live run: folders that are new, then long logs, the shortest
first. Of the runs at which nothing happens any more, a few are looked at in each pass, all within seconds.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from hilbert_monitor.runs.reader import Batch, RunReader
from hilbert_monitor.runs.record import Alert, StepRecord
from hilbert_monitor.runs.run import Run

from .cache import Cache
from .feed import Feed
from .follower import RunFollower

PIECE = 200
"""Records that an event carries, at most."""
SLICE = 0.3
"""Seconds that reading what is not read yet may take between two looks at the live runs."""
LOOKS = 320
"""Runs at rest that are looked at in a pass, at most: with five passes a second, 10,000 of them take six seconds."""
LISTED_FOR = 10.0
"""Seconds after which the folder of the runs is listed again although its time of change is the same."""
SETTLED = 2.0
"""Seconds after which a folder's time of change tells whether it has changed since: clocks of disks are coarse."""
REMEMBERED = 600.0
"""Seconds for which a run whose folder is gone is still listed."""
BEHIND = 1 << 20
"""Unread bytes from which on a log counts as long, and is read in between."""
STUCK = 120.0
"""Seconds without a sign of the thread after which it counts as stuck, as on a disk that does not answer."""

_log = logging.getLogger(__name__)


class _Change(NamedTuple):
    """A new snapshot, and what its events tell."""

    run: Run
    summary: dict[str, Any]
    news: list[Batch[StepRecord]]
    is_whole: bool
    """Whether the listeners have all records before the news."""
    alerts: list[Alert]


class Index:
    """The runs of a folder.

    Args:
        root: folder of the runs, or of one run; it may be created later.
        cache: folder for cached tables, which make the next start quick; None for none.
        every: seconds between two looks.
    """

    def __init__(self, root: Path, *, cache: Path | None = None, every: float = 0.2) -> None:
        self.given, self.every, self.feed = root, every, Feed()
        """The folder that was given."""
        is_run = bool(RunReader(root).attempts)
        self.root = root.resolve().parent if is_run else root
        """The folder in which runs are looked for."""
        self._only = root.resolve().name if is_run else None
        """The name of the only run that is followed, if it is one."""
        self.runs: Mapping[str, Run] = MappingProxyType({})
        """The runs by id. The mapping is replaced and never changed: an answer reads it once and is consistent."""
        self.version = 0
        """Grows with every change of any run."""
        self.progress = 0.0
        """Share of all logs that was read."""
        self._cache = Cache.open(cache) if cache is not None else None
        self._followed: dict[str, RunFollower] = {}
        self._new: deque[RunFollower] = deque()
        """Folders that were not looked at yet."""
        self._awake: dict[str, RunFollower] = {}
        self._resting: OrderedDict[str, RunFollower] = OrderedDict()
        """In the order in which they are looked at."""
        self._listed, self._listed_at = -1, -math.inf
        self._changes: list[_Change] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._pass = threading.Lock()
        self._sign = 0.0

    def start(self) -> None:
        """Start the thread."""
        self._sign = time.monotonic()
        self._thread = threading.Thread(target=self._follow, name="hilbert-monitor index", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Disconnect the listeners and end the thread."""
        self._stop.set()
        self.feed.close()
        if self._thread is not None:
            self._thread.join()

    @property
    def problem(self) -> str:
        """Why the runs are not followed, in a sentence; empty if they are, or if the thread was never started."""
        if self._thread is None or self._stop.is_set():
            return ""
        if not self._thread.is_alive():
            return "The thread that reads the runs has ended: restart the service; its output says why."
        silence = time.monotonic() - self._sign
        return f"The runs have not been read for {silence:.0f} s: does their disk answer?" if silence > STUCK else ""

    def refresh(self, budget: float = math.inf, *, rested: bool = True) -> None:
        """Look once at every run, and read on in long logs.

        Args:
            budget: seconds that reading long logs may take.
            rested: whether to look at all runs at rest too; otherwise only at the next few.
        """
        with self._pass:
            self._look_for_runs()
            now = time.time()
            for followed in list(self._awake.values()):
                if followed.behind <= BEHIND:
                    self._advance(followed, now)
            self._wake(now, rested)
            self._tell()
            self._read_new(max(budget, SLICE))
            self._catch_up(budget)
            self._tell()
            self._note_progress()

    def _follow(self) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                self.refresh(SLICE, rested=False)
                self._sign = time.monotonic()
            except Exception:
                _log.exception("looking at the runs failed; it is tried again")
                self._stop.wait(1.0)
            idle = self.every - (time.monotonic() - began)
            self._stop.wait(0.001 if self.progress < 1 else max(idle, 0.02))

    # Which runs there are

    def _look_for_runs(self) -> None:
        """Start to follow new folders, and forget those that have been gone for long."""
        now = time.time()
        try:
            changed = os.stat(self.root).st_mtime_ns
        except OSError:
            changed = -1
        recent = abs(now - changed / 1e9) < SETTLED
        if changed == self._listed and not recent and now - self._listed_at < LISTED_FOR:
            return
        self._listed, self._listed_at = changed, now
        names = set(_folders(self.root))
        if self._only is not None:
            names &= {self._only}
        for name in sorted(names - self._followed.keys()):
            followed = self._followed[name] = RunFollower(self.root / name, self.root, self._cache)
            self._new.append(followed)
        for name in self._followed.keys() - names:
            gone = self._followed[name]
            if gone.gone_since is None:
                self._rouse(name)
            elif gone.snapshot is None or now - gone.gone_since > REMEMBERED:
                self._drop(name)
        for name, followed in self._followed.items():
            if followed.gone_since is not None and name in names:
                self._rouse(name)
        if self._cache is not None and names:
            self._cache.keep_only(names | self._followed.keys())

    def _rouse(self, name: str) -> None:
        """Look at a run in this pass, whether it rests or not."""
        if self._resting.pop(name, None) is not None:
            self._awake[name] = self._followed[name]

    def _drop(self, name: str) -> None:
        """Forget a run."""
        gone = self._followed.pop(name)
        for place in (self._awake, self._resting):
            place.pop(name, None)
        if gone.id in self.runs:
            self.runs = MappingProxyType({id: run for id, run in self.runs.items() if id != gone.id})
            self.version += 1
            self.feed.publish("gone", {"id": gone.id})

    def _wake(self, now: float, everything: bool) -> None:
        """Look at runs at rest, each in its turn."""
        for _ in range(len(self._resting) if everything else min(len(self._resting), LOOKS)):
            name, followed = self._resting.popitem(last=False)
            if everything or followed.stirs(now):
                self._advance(followed, now)
            else:
                self._resting[name] = followed

    def _read_new(self, budget: float) -> None:
        """Look for the first time at folders, as far as the time allows."""
        deadline = time.monotonic() + budget
        while self._new and time.monotonic() < deadline and not self._stop.is_set():
            followed = self._new.popleft()
            if self._followed.get(followed.folder.name) is not followed:
                continue
            self._awake[followed.folder.name] = followed
            followed.open()
            if followed.behind <= BEHIND:
                self._advance(followed, time.time())

    def _catch_up(self, budget: float) -> None:
        deadline = time.monotonic() + budget
        for followed in sorted(self._awake.values(), key=lambda one: one.behind):
            if followed.behind > BEHIND and time.monotonic() < deadline and not self._stop.is_set():
                self._advance(followed, time.time(), deadline)

    def _advance(self, followed: RunFollower, now: float, deadline: float = math.inf) -> None:
        """Read on in a run's log, and note what changed."""
        self._sign = time.monotonic()
        known, news = followed.snapshot, list[Batch[StepRecord]]()
        current = known is not None and known.indexed == 1.0
        if followed.advance(now, deadline, news if current else None):
            run, alerts = followed.snapshot, followed.new_alerts if known is not None else []
            assert run is not None
            self._changes.append(_Change(run, followed.summary, news, current, alerts))
            if len(self._changes) >= LOOKS:
                self._tell()
        name = followed.folder.name
        if followed.rests:
            self._awake.pop(name, None)
            self._resting[name] = followed
        else:
            self._awake[name] = followed

    # What changed

    def _tell(self) -> None:
        """Put new snapshots into the index, then publish their events."""
        changes, self._changes = self._changes, []
        if not changes:
            return
        self.runs = MappingProxyType({**self.runs, **{change.run.id: change.run for change in changes}})
        self.version += len(changes)
        for change in changes:
            for name, data in _events(change):
                self.feed.publish(name, data)

    def _note_progress(self) -> None:
        left = sum(one.behind for one in self._awake.values() if one.behind > BEHIND)
        size = sum(one.size for one in self._followed.values()) if left else 1
        progress = (1.0 - left / size) * (1.0 - len(self._new) / max(len(self._followed), 1))
        if progress != self.progress and (progress == 1.0 or abs(progress - self.progress) > 0.01):
            self.progress = progress
            self.feed.publish("progress", {"progress": progress})


def _folders(root: Path) -> Iterator[str]:
    """Names of the folders in a folder, also of those that cannot be opened. Links to nowhere are left out."""
    try:
        with os.scandir(root) as entries:
            for entry in entries:
                if not entry.name.startswith(".") and _is_folder(entry):
                    yield entry.name
    except OSError:
        return


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except PermissionError:
        return True  # a link into a folder of somebody else: it is shown that it cannot be read
    except OSError:
        return False


def _events(change: _Change) -> Iterator[tuple[str, dict[str, Any]]]:
    """The events of a change: new records, new alerts, the run's line."""
    run = change.run
    for piece in _pieces(run, change.news, whole=change.is_whole):
        yield "records", piece
    for alert in change.alerts:
        source = {"run": run.id, "name": run.info.name, "status": run.status}
        yield "alert", {**source, "alert": msgspec.structs.asdict(alert)}
    yield "run", {"id": run.id, "version": run.version, "summary": change.summary}


def _pieces(run: Run, news: list[Batch[StepRecord]], *, whole: bool) -> Iterator[dict[str, Any]]:
    """Events with the new records of a log; one that asks to reload, if they are too many."""
    if not whole or sum(len(one.records) for one in news) > PIECE:
        if run.indexed == 1.0:
            yield {"run": run.id, "reload": True}
        return
    for one in news:
        if one.records or one.keep is not None:
            yield {"run": run.id, "keep": one.keep, "records": [msgspec.to_builtins(record) for record in one.records]}

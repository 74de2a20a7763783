"""One run that is followed: how far its log was read, and what is wrong with it."""

from __future__ import annotations

import math
import os
import stat
import time
from pathlib import Path

from hilbert_monitor.runs.json_values import clean
from hilbert_monitor.runs.log import ALERTS, END, INFO, STEPS, News, RunReader, RunState
from hilbert_monitor.runs.record import Alert, RunInfo
from hilbert_monitor.runs.states import ENDED, LIVE

from .cache import Cache, Cached
from .columns import Columns
from .snapshot import UNKNOWN, RunSnapshot

FILES = (INFO, STEPS, ALERTS, END)
ASK_AGAIN: dict[str, float] = {"running": 1.0, "stalled": 1.0, "killed": 10.0}
"""Seconds after which a run's state is asked again although nothing was written, where it may change by itself."""
YOUNG = 5.0
"""Seconds that a run has to say what it is."""
GROWTH = 1.2
"""Factor by which a table grows before its columns are kept again."""

Look = tuple[int, int, int] | None
"""What distinguishes a file from what it was: number, size and time of change; None if there is none."""


class Trouble(Exception):
    """Why a folder is not read, in a sentence."""


class RunFollower:
    """A run's folder, and what was read of it.

    Args:
        folder: of the run.
        root: out of which no link may lead.
        cache: for its columns.
    """

    def __init__(self, folder: Path, root: Path, cache: Cache | None = None) -> None:
        self.folder, self.root, self.id = folder, root, clean(folder.name)
        self.snapshot: RunSnapshot | None = None
        """What is known of it; None as long as it is no run."""
        self.size = 0
        """Bytes of the log of its steps."""
        self.new_alerts: list[Alert] = []
        """Those that the last look found."""
        self.gone_since: float | None = None
        self.looked = -math.inf
        """When it was last looked at, in seconds since the epoch."""
        self._reader, self._cache = RunReader(folder), cache
        self._paths = [os.path.join(folder, name) for name in FILES]  # made once: they are looked at all the time
        self._columns, self._offset, self._end, self._torn, self._kept_rows = Columns(), 0, 0, 0, 0
        self._alerts: tuple[Alert, ...] = ()
        self._alerts_offset = self._alerts_torn = 0
        self._attempts: tuple[RunInfo, ...] = ()
        self._seen: tuple[Look, ...] = (None,) * len(FILES)
        self._asked, self._began = -math.inf, time.time()
        try:
            self._look()
            self._recall()
        except (OSError, Trouble):
            pass  # it is said when the run is looked at

    @property
    def ended(self) -> bool:
        """Whether the run has finished or failed, as far as is known."""
        return self.snapshot is not None and self.snapshot.status in ENDED

    @property
    def behind(self) -> int:
        """Bytes that are not read yet."""
        return max(0, self.size - self._end)

    def advance(self, now: float, deadline: float = math.inf, news: list[News] | None = None) -> bool:
        """Read on until a moment of the monotonic clock; whether there is another snapshot.

        Args:
            now: seconds since the epoch.
            deadline: by the monotonic clock.
            news: where to put what the log has new.
        """
        self.looked, self.new_alerts = now, []
        changed, problem = 0, ""
        try:
            seen = self._look()
            self.gone_since = None
            quiet = seen == self._seen and not self.behind
            if quiet and now - self._asked < self._patience:
                return False
            changed = self._read(seen, deadline, news)
            problem = self._foreign(now)
        except Trouble as trouble:
            problem = str(trouble)
        except (OSError, MemoryError) as error:
            problem = f"it cannot be read: {getattr(error, 'strerror', None) or error}"
        return self._make(now, problem, changed > 0)

    @property
    def _patience(self) -> float:
        """Seconds for which a run of which nothing is new need not be looked at more closely."""
        if self.snapshot is None or self.snapshot.problem:
            return 0.0
        return ASK_AGAIN.get(self.snapshot.status, math.inf)

    # Reading

    def _look(self) -> tuple[Look, ...]:
        """What the files are like now. Raises Trouble for what is not to be read."""
        if not self.folder.is_dir():
            self.gone_since = self.gone_since or time.time()
            raise Trouble("its folder is gone: it was moved or deleted")
        _refuse_link(self.folder, self.root)
        found = tuple(self._look_at(path) for path in self._paths)
        self.size = found[1][1] if found[1] else 0
        return found

    def _look_at(self, path: str) -> Look:
        try:
            about = os.lstat(path)
            if stat.S_ISLNK(about.st_mode):
                _refuse_link(Path(path), self.root)
                about = os.stat(path)
        except FileNotFoundError:
            return None
        if not stat.S_ISREG(about.st_mode):
            raise Trouble(f"its {os.path.basename(path)} is not a plain file: it is not read")
        return about.st_ino, about.st_size, about.st_mtime_ns

    def _read(self, seen: tuple[Look, ...], deadline: float, news: list[News] | None) -> int:
        """Read what is new; return how many times the columns changed."""
        changed, known = 0, self._attempts
        if seen[0] != self._seen[0] or not known:
            self._attempts = tuple(self._reader.attempts)
        if self.size < self._offset or _another(known, self._attempts):
            self._columns, self._offset, self._end, self._torn, changed = Columns(), 0, 0, 0, 1
            self._alerts, self._alerts_offset, self._alerts_torn, self._kept_rows = (), 0, 0, 0
        if self.behind:
            size = self.size
            for part in self._reader.follow(self._offset):
                self._columns.take(part)
                self._offset, self._torn, changed = part.offset, self._torn + part.torn, changed + 1
                if news is not None:
                    news.append(part)
                if time.monotonic() > deadline:
                    size = self._offset
                    break
            self._end = max(size, self._offset)
        if seen[2] != self._seen[2]:
            self._read_alerts()
        self._seen = seen
        return changed

    def _read_alerts(self) -> None:
        known = set(self._alerts)
        for part in self._reader.follow_alerts(self._alerts_offset):
            self._alerts = (*part.left_of(list(self._alerts)), *part.alerts)
            self._alerts_offset, self._alerts_torn = part.offset, self._alerts_torn + part.torn
        self.new_alerts = [alert for alert in self._alerts if alert not in known]

    def _foreign(self, now: float) -> str:
        """What keeps the files from being a run, or nothing."""
        info, steps = self._seen[:2]
        if self._attempts:
            return "" if steps else f"its {STEPS} is gone: it was moved or deleted"
        if info is None and (steps is None or now - self._began < YOUNG):
            return ""
        if info and info[1]:
            return f"its {INFO} is not one of ours"
        return f"its {INFO}, which says what run it is, is missing or empty"

    # Publishing

    def _make(self, now: float, problem: str, changed: bool) -> bool:
        """Make the snapshot anew, if there is anything new."""
        if not problem and not self._attempts:
            return False  # no run, or not yet
        old, state = self.snapshot, UNKNOWN if problem else self._state(now)
        if changed:
            self._keep(state)
        made = RunSnapshot(
            id=self.id,
            info=self._attempts[-1] if self._attempts else RunInfo(id=self.id),
            attempts=self._attempts,
            state=state,
            problem=problem,
            table=self._columns.table if changed or old is None else old.table,
            alerts=self._alerts,
            torn=self._torn + self._alerts_torn,
            heartbeat=self._seen[1][2] / 1e9 if self._seen[1] else 0.0,
            indexed=1.0 - self.behind / self.size if self.behind else 1.0,
            version=old.version + 1 if old else 1,
        )
        if old is not None and not changed and _told(old) == _told(made):
            return False
        self.snapshot = made
        return True

    def _state(self, now: float) -> RunState:
        self._asked = now
        return self._reader.state(now)

    # Columns on disk

    def _recall(self) -> None:
        found = self._cache.load(self.folder.name, self.folder / STEPS) if self._cache is not None else None
        if found is not None:
            self._columns, self._offset, self._torn = Columns(found.table), found.offset, found.torn
            self._end, self._kept_rows = found.offset, len(found.table)

    def _keep(self, state: RunState) -> None:
        """Keep columns that have grown, and from then on use those on the disk: they need no memory of ours."""
        rows = len(self._columns.table)
        enough = GROWTH * max(self._kept_rows, 1000) if state.status in LIVE else self._kept_rows
        if self._cache is None or self.behind or rows <= enough:
            return
        self._kept_rows = rows
        if self._cache.save(
            self.folder.name, self.folder / STEPS, Cached(self._columns.table, self._offset, self._torn)
        ):
            self._recall()


def _refuse_link(path: Path, root: Path) -> None:
    if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root)):
        raise Trouble(f"{path.name} is a link that leads out of the folder of runs: it is not followed")


def _another(known: tuple[RunInfo, ...], now: tuple[RunInfo, ...]) -> bool:
    """Whether another run has taken the place of one that was known."""
    return bool(known and now) and known[0].started != now[0].started


def _told(run: RunSnapshot) -> tuple[object, ...]:
    """What is told of a run beside its table."""
    return run.info, run.attempts, run.state, run.problem, run.alerts, run.torn, run.heartbeat, run.indexed

"""Follows one run: reads on in its log, and makes snapshots of what is known."""

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

from .cache import Cache, CachedTable
from .columns import Columns
from .snapshot import UNKNOWN, RunSnapshot

FILES = (INFO, STEPS, ALERTS, END)
ASK_AGAIN: dict[str, float] = {"running": 1.0, "stalled": 1.0, "killed": 10.0}
"""Seconds after which a run's state is determined again although nothing was written, as it may change by itself."""
YOUNG = 5.0
"""Seconds that a run has after its folder appears until its files must be complete."""
GROWTH = 1.2
"""Factor by which a table grows before it is cached again."""

Look = tuple[int, int, int] | None
"""Inode, size and time of change of a file, by which a change is noticed; None if there is no file."""


class Trouble(Exception):
    """A reason for which a folder is not read, in a sentence."""


class RunFollower:
    """Follows the log of one run.

    Args:
        folder: of the run.
        root: folder of the runs; links that lead out of it are not followed.
        cache: for its table.
    """

    def __init__(self, folder: Path, root: Path, cache: Cache | None = None) -> None:
        self.folder, self.root, self.id = folder, root, clean(folder.name)
        self.snapshot: RunSnapshot | None = None
        """What is known of the run; None while the folder is no run."""
        self.size = 0
        """Bytes of the log of its steps."""
        self.new_alerts: list[Alert] = []
        """Alerts that the last call of `advance` read."""
        self.gone_since: float | None = None
        self.looked = -math.inf
        """When `advance` was last called, in seconds since the epoch."""
        self._reader, self._cache = RunReader(folder), cache
        self._paths = [os.path.join(folder, name) for name in FILES]  # joined once: they are checked all the time
        self._columns, self._offset, self._end, self._torn, self._cached_rows = Columns(), 0, 0, 0, 0
        self._alerts: tuple[Alert, ...] = ()
        self._alerts_offset = self._alerts_torn = 0
        self._attempts: tuple[RunInfo, ...] = ()
        self._seen: tuple[Look, ...] = (None,) * len(FILES)
        self._asked, self._began = -math.inf, time.time()
        try:
            self._look()
            self._load()
        except (OSError, Trouble):
            pass  # `advance` reports it

    @property
    def ended(self) -> bool:
        """Whether the run is known to have finished or failed."""
        return self.snapshot is not None and self.snapshot.status in ENDED

    @property
    def behind(self) -> int:
        """Bytes that are not read yet."""
        return max(0, self.size - self._end)

    def advance(self, now: float, deadline: float = math.inf, news: list[News] | None = None) -> bool:
        """Read on in the log; return whether there is a new snapshot.

        Args:
            now: seconds since the epoch.
            deadline: when to stop, by the monotonic clock.
            news: a list to append what was read to.
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
        return self._publish(now, problem, changed > 0)

    @property
    def _patience(self) -> float:
        """Seconds for which a run without new lines is left alone."""
        if self.snapshot is None or self.snapshot.problem:
            return 0.0
        return ASK_AGAIN.get(self.snapshot.status, math.inf)

    # Reading

    def _look(self) -> tuple[Look, ...]:
        """Inode, size and time of change of each file. Raises Trouble for files that must not be read."""
        if not self.folder.is_dir():
            self.gone_since = self.gone_since or time.time()
            raise Trouble("its folder is gone: it was moved or deleted")
        _refuse_link(self.folder, self.root)
        looks = tuple(self._look_at(path) for path in self._paths)
        self.size = looks[1][1] if looks[1] else 0
        return looks

    def _look_at(self, path: str) -> Look:
        try:
            status = os.lstat(path)
            if stat.S_ISLNK(status.st_mode):
                _refuse_link(Path(path), self.root)
                status = os.stat(path)
        except FileNotFoundError:
            return None
        if not stat.S_ISREG(status.st_mode):
            raise Trouble(f"its {os.path.basename(path)} is not a plain file: it is not read")
        return status.st_ino, status.st_size, status.st_mtime_ns

    def _read(self, seen: tuple[Look, ...], deadline: float, news: list[News] | None) -> int:
        """Read new lines; return how many times the columns changed."""
        changed, known = 0, self._attempts
        if seen[0] != self._seen[0] or not known:
            self._attempts = tuple(self._reader.attempts)
        if self.size < self._offset or _another(known, self._attempts):
            self._columns, self._offset, self._end, self._torn, changed = Columns(), 0, 0, 0, 1
            self._alerts, self._alerts_offset, self._alerts_torn, self._cached_rows = (), 0, 0, 0
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
        """A sentence that says why the files are no run; empty if they are one, or may become one."""
        info, steps = self._seen[:2]
        if self._attempts:
            return "" if steps else f"its {STEPS} is gone: it was moved or deleted"
        if info is None and (steps is None or now - self._began < YOUNG):
            return ""
        if info and info[1]:
            return f"its {INFO} is not one of ours"
        return f"its {INFO}, which says what run it is, is missing or empty"

    # Publishing

    def _publish(self, now: float, problem: str, changed: bool) -> bool:
        """Make a new snapshot if anything changed; return whether it did."""
        if not problem and not self._attempts:
            return False  # no run, or not yet
        old, state = self.snapshot, UNKNOWN if problem else self._state(now)
        if changed:
            self._save(state)
        new = RunSnapshot(
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
        if old is not None and not changed and _apart_from_table(old) == _apart_from_table(new):
            return False
        self.snapshot = new
        return True

    def _state(self, now: float) -> RunState:
        self._asked = now
        return self._reader.state(now)

    # The table on disk

    def _load(self) -> None:
        """Take the cached table, if there is one."""
        cached = self._cache.load(self.folder.name, self.folder / STEPS) if self._cache is not None else None
        if cached is not None:
            self._columns, self._offset, self._torn = Columns(cached.table), cached.offset, cached.torn
            self._end, self._cached_rows = cached.offset, len(cached.table)

    def _save(self, state: RunState) -> None:
        """Cache a table that has grown, and use the columns on the disk from then on: they need no memory here."""
        rows = len(self._columns.table)
        enough = GROWTH * max(self._cached_rows, 1000) if state.status in LIVE else self._cached_rows
        if self._cache is None or self.behind or rows <= enough:
            return
        self._cached_rows = rows
        if self._cache.save(
            self.folder.name, self.folder / STEPS, CachedTable(self._columns.table, self._offset, self._torn)
        ):
            self._load()


def _refuse_link(path: Path, root: Path) -> None:
    if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root)):
        raise Trouble(f"{path.name} is a link that leads out of the folder of runs: it is not followed")


def _another(known: tuple[RunInfo, ...], now: tuple[RunInfo, ...]) -> bool:
    """Whether the folder now holds another run than before."""
    return bool(known and now) and known[0].started != now[0].started


def _apart_from_table(run: RunSnapshot) -> tuple[object, ...]:
    """The parts of a snapshot that can change while the table stays the same."""
    return run.info, run.attempts, run.state, run.problem, run.alerts, run.torn, run.heartbeat, run.indexed

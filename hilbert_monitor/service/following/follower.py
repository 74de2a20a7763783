"""Follows one run: reads on in its log, and makes snapshots of what is known."""

from __future__ import annotations

import math
import os
import random
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from hilbert_monitor.runs.files import replace_surrogates
from hilbert_monitor.runs.reader import ALERTS, END, ENDED, HEARTBEAT, INFO, LIVE, STEPS, Batch, RunReader, RunState
from hilbert_monitor.runs.record import Alert, RunInfo, StepRecord
from hilbert_monitor.runs.run import UNKNOWN, Run
from hilbert_monitor.runs.table import TableBuilder
from hilbert_monitor.service.following.summary import summary

from .cache import Cache, CachedTable
from .text import clip

FILES = (INFO, STEPS, ALERTS, END)
ASK_AGAIN = 1.0
"""Seconds after which the state of a live run is determined again although nothing was written."""
YOUNG = 5.0
"""Seconds that a run has after its folder appears until its files must be complete."""
AWAKE = 60.0
"""Seconds for which a run that was killed, or a folder that is no run yet, is still looked at all the time."""
REST, LONGEST_REST = 2.0, 120.0
"""Seconds between two full looks at a run that rests: the longer for one that has ended, of which only the log is
looked at in between; else a tenth of the time for which it has been at rest, within these."""
GROWTH = 1.2
"""Factor by which a table grows before it is cached again."""
SHORT = 1 << 15
"""Bytes of a log that is read again sooner than its table is loaded: it is not cached."""
LONG = 1 << 20
"""Unread bytes from which on room for all records of a log is reserved at once."""

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
        self.folder, self.root, self.id = folder, root, replace_surrogates(folder.name)
        self.snapshot: Run | None = None
        """What is known of the run; None while the folder is no run."""
        self.size = 0
        """Bytes of the log of its steps."""
        self.summary: dict[str, Any] = {}
        """The snapshot's line in a table of runs."""
        self.new_alerts: list[Alert] = []
        """Alerts that the last call of `advance` read."""
        self.gone_since: float | None = None
        self._reader, self._cache = RunReader(folder), cache
        self._place = os.fspath(folder)
        self._paths = [os.path.join(folder, name) for name in FILES]  # joined once: they are checked all the time
        self._heartbeat = os.path.join(folder, HEARTBEAT)
        self._attempts: tuple[RunInfo, ...] = ()
        self._asked, self._began = -math.inf, time.time()
        self._changed = 0.0
        """When a file was last added to the folder, or removed from it."""
        self._rests_since: float | None = None
        self._wakes = 0.0
        self._beat: Look = None
        self._forget()

    def _forget(self) -> None:
        """Begin again at the start of the log."""
        self._columns, self._offset, self._end, self._torn, self._cached_rows = TableBuilder(), 0, 0, 0, 0
        self._alerts: tuple[Alert, ...] = ()
        self._alerts_offset = self._alerts_torn = 0
        self._seen: tuple[Look, ...] = (None,) * len(FILES)

    @property
    def behind(self) -> int:
        """Bytes that are not read yet."""
        return max(0, self.size - self._end)

    def open(self) -> None:
        """Look how long the log is, and load its cached table. `advance` says what is wrong with it."""
        look = _shortly(self._paths[1])
        self.size = look[1] if look else 0
        if self._cache is not None and self.size >= SHORT:
            with suppress(OSError, Trouble):
                self._look()
                self._load()

    def advance(self, now: float, deadline: float = math.inf, news: list[Batch[StepRecord]] | None = None) -> bool:
        """Read on in the log; return whether there is a new snapshot.

        Whatever is wrong with a run becomes its `problem`, and is no other run's.

        Args:
            now: seconds since the epoch.
            deadline: when to stop, by the monotonic clock.
            news: a list to append what was read to.
        """
        self.new_alerts, began = [], time.monotonic()
        try:
            is_new = self._advance(now, deadline, news)
        except Trouble as trouble:
            is_new = self._publish(str(trouble))
        except (OSError, MemoryError) as error:
            is_new = self._publish(f"it cannot be read: {getattr(error, 'strerror', None) or error}")
        except Exception as error:  # anything may be in a log: it must not end the index
            self._forget()
            is_new = self._publish(clip(f"it cannot be read: {type(error).__name__}: {error}", 500))
        self._rest(now, time.monotonic() - began)
        return is_new

    def _advance(self, now: float, deadline: float, news: list[Batch[StepRecord]] | None) -> bool:
        seen = self._look()
        self.gone_since = None
        if seen == self._seen and not self.behind and now - self._asked < self._patience(now):
            return False
        changed = self._read(seen, deadline, news)
        if problem := self._foreign(now):
            return self._publish(problem, changed=changed > 0)
        if not self._attempts:
            return False  # no run, or not yet
        self._asked = now
        return self._publish("", self._reader.state(now, self._attempts[-1]), changed > 0)

    def _patience(self, now: float) -> float:
        """Seconds for which a run without new lines is left alone."""
        if self.snapshot is None or self.snapshot.problem:
            return 0.0
        if self.snapshot.status in LIVE:
            return ASK_AGAIN
        return max(10.0, (now - self.snapshot.state.ended) / 10) if self.snapshot.status == "killed" else math.inf

    # Runs that rest

    @property
    def rests(self) -> bool:
        """Whether nothing is expected to happen to the run soon, so that a short look now and then will do."""
        return self._rests_since is not None

    def stirs(self, now: float) -> bool:
        """Look shortly at a run that rests: whether it is time for `advance`.

        Whatever resumes a run writes to its log at once, and a process that was taken for killed has a heartbeat.
        """
        if now >= self._wakes:
            return True
        if self.snapshot is not None and self.snapshot.problem:
            return False
        if _shortly(self._paths[1]) != self._seen[1]:
            return True
        return self._beat is not None and _shortly(self._heartbeat) != self._beat

    def _rest(self, now: float, cost: float = 0.0) -> None:
        """Note whether the run rests from now on, and for how long at most."""
        run, is_over, is_killed = self.snapshot, False, False
        if run is None:
            rests = now - self._changed > AWAKE
        else:
            is_killed = run.status == "killed"
            is_over = is_killed or run.status in ENDED
            unread = self.behind > 0 and not run.problem
            rests = run.status not in LIVE and not (is_killed and now - run.state.ended < AWAKE) and not unread
        if not rests:
            self._rests_since = None
            return
        self._rests_since = self._rests_since or now
        self._beat = _shortly(self._heartbeat) if is_killed else None
        rest = LONGEST_REST if is_over else min(max(REST, (now - self._rests_since) / 10), LONGEST_REST)
        self._wakes = now + max(rest * random.uniform(0.5, 1.0), 20 * cost)  # not all of them at the same time

    # Reading

    def _look(self) -> tuple[Look, ...]:
        """Inode, size and time of change of each file. Raises Trouble for files that must not be read."""
        try:
            status = os.lstat(self._place)
            if stat.S_ISLNK(status.st_mode):
                _refuse_link(self.folder, self.root)
                status = os.stat(self._place)
            is_gone, self._changed = not stat.S_ISDIR(status.st_mode), status.st_mtime
        except FileNotFoundError:
            is_gone = True
        if is_gone:
            self.gone_since = self.gone_since or time.time()
            raise Trouble("its folder is gone: it was moved or deleted")
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
        return _look_of(status)

    def _read(self, seen: tuple[Look, ...], deadline: float, news: list[Batch[StepRecord]] | None) -> int:
        """Read new lines; return how many times the columns changed."""
        changed, known = 0, self._attempts
        if seen[0] != self._seen[0] or not known:
            self._attempts = tuple(self._reader.attempts)
        if self.size < self._offset or _another(known, self._attempts):
            self._forget()
            changed = 1
        if self.behind:
            size = self.size
            for part in self._reader.follow(self._offset):
                self._torn += self._columns.append(part, self._expected_rows())
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

    def _expected_rows(self) -> int:
        """Rows that a long log will have, if its lines go on as they began."""
        rows = self._columns.rows
        return int(1.05 * rows * self.size / self._offset) if self.size - self._offset > LONG and self._offset else 0

    def _read_alerts(self) -> None:
        known = set(self._alerts)
        for part in self._reader.follow_alerts(self._alerts_offset):
            self._alerts = (*part.kept(self._alerts), *part.records)
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

    def _publish(self, problem: str, state: RunState = UNKNOWN, changed: bool = False) -> bool:
        """Make a new snapshot if anything changed; return whether it did."""
        old = self.snapshot
        if changed:
            self._save(state)
        new = Run(
            id=self.id,
            info=self._attempts[-1] if self._attempts else RunInfo(id=self.id),
            attempts=self._attempts,
            state=state,
            problem=problem,
            table=self._columns.table if changed or old is None else old.table,
            curves={} if changed or old is None else old.curves,
            alerts=self._alerts,
            torn=self._torn + self._alerts_torn,
            heartbeat=self._seen[1][2] / 1e9 if self._seen[1] else 0.0,
            indexed=1.0 - self.behind / self.size if self.behind and not problem else 1.0,
            version=old.version + 1 if old else 1,
        )
        if old is not None and not changed and _apart_from_table(old) == _apart_from_table(new):
            return False
        self.summary, self.snapshot = summary(new), new
        return True

    # The table on disk

    def _load(self) -> None:
        """Take the cached table, if there is one."""
        if self._cache is None or self.size < SHORT:
            return
        cached = self._cache.load(self.folder.name, self.folder / STEPS)
        if cached is not None:
            self._columns, self._offset, self._torn = TableBuilder(cached.table), cached.offset, cached.torn
            self._end, self._cached_rows = cached.offset, len(cached.table)

    def _save(self, state: RunState) -> None:
        """Cache a table that has grown, and use the columns on the disk from then on: they need no memory here."""
        rows = len(self._columns.table)
        enough = GROWTH * max(self._cached_rows, 1000) if state.status in LIVE else self._cached_rows
        if self._cache is None or self.behind or rows <= enough or self.size < SHORT:
            return
        self._cached_rows = rows
        read = CachedTable(self._columns.table, self._offset, self._torn)
        table = self._cache.save(self.folder.name, self.folder / STEPS, read)
        if table is not None:
            self._columns = TableBuilder(table)


def _look_of(status: os.stat_result) -> Look:
    return status.st_ino, status.st_size, status.st_mtime_ns


def _shortly(path: str) -> Look:
    """A look at a file by one call, which follows no link."""
    try:
        return _look_of(os.lstat(path))
    except OSError:
        return None


def _refuse_link(path: Path, root: Path) -> None:
    if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root)):
        raise Trouble(f"{path.name} is a link that leads out of the folder of runs: it is not followed")


def _another(known: tuple[RunInfo, ...], now: tuple[RunInfo, ...]) -> bool:
    """Whether the folder now holds another run than before."""
    return bool(known and now) and known[0].started != now[0].started


def _apart_from_table(run: Run) -> tuple[object, ...]:
    """The parts of a snapshot that can change while the table stays the same."""
    return run.info, run.attempts, run.state, run.problem, run.alerts, run.torn, run.heartbeat, run.indexed

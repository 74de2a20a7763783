"""Reads a run's folder: the records that count, and the state of the run.

A run that is resumed from a checkpoint begins a further attempt. Records of earlier attempts beyond the step it goes on
from no longer count.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import socket
import time
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from ._heartbeat import Heartbeat
from ._lines import LONGEST, Line, Marker, Step, blocks, is_locked, items, process_exists, tail
from .json_values import clean
from .record import Alert, RunInfo, StepRecord
from .states import LOST_AFTER, STALLED_AFTER, Status, patience

INFO, STEPS, ALERTS, END, HEARTBEAT = "info.jsonl", "steps.jsonl", "alerts.jsonl", "end.jsonl", "heartbeat"


class End(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How an attempt ended: normally, because it was asked to, or with an exception."""

    attempt: int
    time: float
    error: str = ""
    """Class of the exception, or empty."""
    message: str = ""
    stopped: str = ""
    """What asked it to stop ("SIGTERM", "SIGINT"), or empty."""

    @property
    def status(self) -> Status:
        """The state of a run that ended so."""
        return "stopped" if self.stopped else "failed" if self.error else "finished"


class _Step(Struct, gc=False):
    step: Step


as_info, as_end = msgspec.json.Decoder(RunInfo, strict=False), msgspec.json.Decoder(End, strict=False)
as_record, as_alert = msgspec.json.Decoder(StepRecord, strict=False), msgspec.json.Decoder(Alert, strict=False)
as_step = msgspec.json.Decoder(_Step, strict=False)


class RunState(Struct, frozen=True, kw_only=True):
    """The state of a run at one moment."""

    status: Status
    step: int | None
    """The last step that counts."""
    time: float
    """When that step was made; without one, when the attempt began."""
    ended: float = 0.0
    """When it said that it ended, or last had a heartbeat before it was killed; 0 while it is there."""
    error: str = ""
    """Class of the exception, if it failed."""
    message: str = ""


class News(Struct, frozen=True, kw_only=True):
    """New records of a log. A reader drops its records beyond `keep`, then takes these; of one step the last counts."""

    records: list[StepRecord]
    attempts: list[Marker]
    torn: int
    """Lines that were skipped because they were not whole."""
    offset: int
    """Where to read on."""

    @property
    def keep(self) -> int | None:
        """The last earlier step that still counts; None if all do."""
        return _keep(self.attempts)


class AlertNews(Struct, frozen=True, kw_only=True):
    """New alerts of a log."""

    alerts: list[Alert]
    keep: int | None
    """The last step whose earlier alerts still count; None if all do."""
    torn: int
    """Lines that were skipped because they were not whole."""
    offset: int
    """Where to read on."""

    def left_of(self, earlier: list[Alert]) -> list[Alert]:
        """The earlier alerts that still count."""
        keep = self.keep
        return earlier if keep is None else [alert for alert in earlier if alert.step <= keep]


class Progress(NamedTuple):
    """How far a run is."""

    step: int | None
    """Its last step, if it has made one."""
    time: float
    """When it made that, or when it began, in seconds since the epoch."""
    patience: float = 0.0
    """Seconds of silence that are nothing new in it."""


class RunReader:
    """Reads a run's folder, also while it is written. It changes nothing there and keeps no file open.

    Args:
        folder: ROOT/RUN.
        lost_after: seconds without a heartbeat after which a process counts as gone, on whichever host.
        stalled_after: seconds without a step after which a run counts as stalled, unless it says so itself, or is slow.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        lost_after: float = LOST_AFTER,
        stalled_after: float = STALLED_AFTER,
    ) -> None:
        self.folder = Path(folder)
        self.lost_after, self.stalled_after = lost_after, stalled_after
        self._torn = {STEPS: 0, ALERTS: 0}
        self._heartbeat = Heartbeat(self.folder / HEARTBEAT)
        self._progress: tuple[Any, Progress] | None = None  # what it was read from, and what it is

    @property
    def attempts(self) -> list[RunInfo]:
        """The RunInfo of each attempt, the oldest first; empty if the folder is no run, or not yet."""
        infos = {info.attempt: info for info in self._small(INFO, as_info) if info.id}
        return [infos[attempt] for attempt in sorted(infos)]

    @property
    def info(self) -> RunInfo:
        """The RunInfo of the newest attempt."""
        return next(reversed(self.attempts), RunInfo(id=clean(self.folder.name)))

    @property
    def end(self) -> End | None:
        """How the newest attempt ended; None if it has not said so."""
        return self._end_of(self.info)

    @property
    def torn(self) -> int:
        """Lines that the last steps() and alerts() skipped because they were not whole."""
        return sum(self._torn.values())

    def steps(self) -> Iterator[StepRecord]:
        """The records that count, in the order in which they were written.

        Of several records of one step the last counts. The log is read twice, first for the numbers of the steps alone,
        so that it need not fit into memory.
        """
        return self._at(self._visible())

    def alerts(self) -> list[Alert]:
        """The alerts that count."""
        alerts: list[Alert] = []
        self._torn[ALERTS] = 0
        for news in self.follow_alerts():
            alerts = [*news.left_of(alerts), *news.alerts]
            self._torn[ALERTS] += news.torn
        return alerts

    def follow_alerts(self, offset: int = 0) -> Iterator[AlertNews]:
        """Read the alerts written since a byte offset, in parts."""
        for end, block in blocks(self.folder / ALERTS, offset):
            lines = items(block, as_alert)
            alerts: list[Alert] = []
            for item in lines:
                if isinstance(item, Marker):
                    alerts = [alert for alert in alerts if alert.step <= item.first_step]
                elif item is not None:
                    alerts.append(item)
            yield AlertNews(alerts=alerts, keep=_keep(lines), torn=lines.count(None), offset=end)

    def follow(self, offset: int = 0) -> Iterator[News]:
        """Read the records written since a byte offset, in parts."""
        for end, block in blocks(self.folder / STEPS, offset):
            lines = items(block, as_record)
            yield News(
                records=_counting(lines),
                attempts=[item for item in lines if isinstance(item, Marker)],
                torn=lines.count(None),
                offset=end,
            )

    def state(self, now: float | None = None, info: RunInfo | None = None) -> RunState:
        """The state of the run at `now`, in seconds since the epoch. No other code decides it.

        Args:
            now: by default, the present.
            info: that of the newest attempt, if the caller has read it already.
        """
        now, info = time.time() if now is None else now, self.info if info is None else info
        progress = self._read_progress(info)
        here: dict[str, Any] = {"step": progress.step, "time": progress.time}
        end = self._end_of(info)
        if end is not None:
            return RunState(status=end.status, error=end.error, message=end.message, ended=end.time, **here)
        if self._only_seems_to_live(now, info):
            return RunState(status="killed", ended=here["time"], message=self._of_its_clock(info), **here)
        if not self.lives(now, info):
            return RunState(status="killed", ended=max(self._heartbeat.time, 0.0), **here)
        least = self.stalled_after if info.stalled_after is None else info.stalled_after
        is_stalled = self._age(STEPS, now) > max(least, progress.patience)
        return RunState(status="stalled" if is_stalled else "running", **here)

    def lives(self, now: float, info: RunInfo | None = None) -> bool:
        """Whether a process writes the run now.

        A lock shows that at once, but only on its own host: others may not see it. Where there are no locks the process
        is looked up by its number. On whichever host, a process without a heartbeat is gone. One whose heartbeat is
        ahead of our clock may be there: nobody else should write its run.
        """
        info = self.info if info is None else info
        if self._heartbeat.age(now) > self._patience(info):
            return False
        if info.host != socket.gethostname():
            return True
        locked = is_locked(self.folder / STEPS)
        return process_exists(info.pid) if locked is None else locked

    @property
    def silence_of_a_lost(self) -> float:
        """Seconds without a heartbeat after which the run's process counts as gone."""
        return self._patience(self.info)

    def _patience(self, info: RunInfo) -> float:
        return max(self.lost_after, 4 * info.heartbeat)

    def _only_seems_to_live(self, now: float, info: RunInfo) -> bool:
        """Whether its heartbeat is far ahead of our clock and does not move, and nothing else tells of its process."""
        return info.host != socket.gethostname() and self._heartbeat.is_ahead(now, self._patience(info))

    def _of_its_clock(self, info: RunInfo) -> str:
        """What is wrong with the heartbeat of a run that only seems to live."""
        try:
            moment = datetime.fromtimestamp(self._heartbeat.time, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        except (OverflowError, ValueError, OSError):
            moment = "a time that no calendar has"
        return (
            f"its heartbeat is from the future ({moment}) and has not been seen to change: set the clock of"
            f" '{clean(info.host)}' or of its disk"
        )

    def _end_of(self, info: RunInfo) -> End | None:
        return next((end for end in reversed(self._small(END, as_end)) if end.attempt == info.attempt), None)

    def _age(self, name: str, now: float) -> float:
        return now - self._changed(name)

    def _changed(self, name: str) -> float:
        """When a file last changed, in seconds since the epoch; minus infinity if there is none."""
        try:
            return (self.folder / name).stat().st_mtime
        except OSError:
            return -math.inf

    def _small(self, name: str, decoder: msgspec.json.Decoder[Line]) -> list[Line]:
        with contextlib.suppress(OSError):
            parts = itertools.takewhile(lambda part: part[0] <= LONGEST, blocks(self.folder / name))
            whole = b"".join(block for _, block in parts)
            return [item for item in items(whole, decoder) if item is not None and not isinstance(item, Marker)]
        return []

    def _read_progress(self, info: RunInfo) -> Progress:
        """How far an attempt is, by the end of its log, which is read again only if it has changed."""
        with contextlib.suppress(OSError):
            file = (self.folder / STEPS).stat()
            source = file.st_ino, file.st_size, file.st_mtime_ns, info.attempt
            if self._progress is None or self._progress[0] != source:
                self._progress = source, _progress(items(tail(self.folder / STEPS), as_record), info)
            return self._progress[1]
        return Progress(step=None, time=info.started)

    def _visible(self) -> array[int]:
        """Numbers of the lines of the log of steps that count."""
        steps, lines, first, torn = array("q"), array("q"), 0, 0
        for _, block in blocks(self.folder / STEPS):
            block_items = items(block, as_step)
            for line, item in enumerate(block_items, first):
                if isinstance(item, Marker):
                    rest = bisect_right(steps, item.first_step)
                    del steps[rest:], lines[rest:]
                elif item is None:
                    torn += 1
                elif not steps or item.step > steps[-1]:
                    steps.append(item.step)
                    lines.append(line)
                else:
                    place = bisect_left(steps, item.step)
                    if steps[place] == item.step:
                        del steps[place], lines[place]
                    steps.insert(place, item.step)
                    lines.insert(place, line)
            first += len(block_items)
        self._torn[STEPS] = torn
        return array("q", sorted(lines))

    def _at(self, lines: array[int]) -> Iterator[StepRecord]:
        """The records of lines with these numbers."""
        wanted, first = iter(lines), 0
        line = next(wanted, None)
        for _, block in blocks(self.folder / STEPS):
            block_items = items(block, as_record)
            while line is not None and line < first + len(block_items):
                item = block_items[line - first]
                if isinstance(item, StepRecord):
                    yield item
                else:
                    self._torn[STEPS] += 1
                line = next(wanted, None)
            first += len(block_items)


def find_runs(root: str | os.PathLike[str], **limits: float) -> list[RunReader]:
    """Readers of the runs in a folder, sorted by id. Folders that are no runs, or not yet, are left out.

    Args:
        root: folder of the runs.
        limits: keyword arguments of RunReader.
    """
    try:
        folders = sorted(Path(root).iterdir())
    except OSError:
        return []
    readers = (RunReader(folder, **limits) for folder in folders)
    return [reader for reader in readers if reader.attempts]


def _progress(lines: list[StepRecord | Marker | None], info: RunInfo) -> Progress:
    """How far an attempt is, by the last lines of the log of steps."""
    records = sorted(_counting(lines), key=lambda record: record.step)
    if not records:
        resumed = min((item.first_step for item in lines if isinstance(item, Marker)), default=0)
        return Progress(step=resumed or None, time=info.started)
    times = [record.time for record in records if record.step > info.first_step]
    return Progress(step=records[-1].step, time=records[-1].time, patience=patience(times, 0.0))


def _keep(lines: Iterable[object]) -> int | None:
    """The earliest step that an attempt among some lines goes on from; None without an attempt."""
    return min((item.first_step for item in lines if isinstance(item, Marker)), default=None)


def _counting(lines: list[StepRecord | Marker | None]) -> list[StepRecord]:
    """The records of some lines that count."""
    records: dict[int, StepRecord] = {}
    for item in lines:
        if isinstance(item, Marker):
            records = {step: record for step, record in records.items() if step <= item.first_step}
        elif item is not None:
            records[item.step] = item
    return list(records.values())

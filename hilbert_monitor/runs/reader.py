"""Reads a run's folder: the records that count, and the state of the run.

A run that is resumed from a checkpoint begins a further attempt. Records of earlier attempts beyond the step it goes on
from no longer count.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Generic, Literal, NamedTuple, TypeVar, get_args

import msgspec
from msgspec import Struct

from .files import LONGEST, Heartbeat, Line, Marker, decode_lines, is_locked, read_blocks, replace_surrogates
from .record import Alert, LayerRecord, RunInfo, StepRecord

INFO, STEPS, ALERTS, LAYERS, PANEL, END, HEARTBEAT = (
    "info.jsonl",
    "steps.jsonl",
    "alerts.jsonl",
    "layers.jsonl",
    "panel.json",
    "end.jsonl",
    "heartbeat",
)
Status = Literal["running", "stalled", "failed", "killed", "stopped", "finished"]
STATUSES: tuple[Status, ...] = get_args(Status)
"""The states of a run, in the order in which they are listed."""
LIVE: tuple[Status, ...] = ("running", "stalled")
"""States of a run whose process is alive."""
ENDED: tuple[Status, ...] = ("finished", "stopped", "failed")
"""States of a run that wrote how it ended."""

STALLED_AFTER, STALLED_STEPS, STALLED_PAUSES = 300.0, 20.0, 2.0
"""A run is stalled if it has been silent for all of these: this number of seconds, the time of this number of its
steps, and this number of times its longest recent pause, which may have been a validation."""
RECENT_STEPS = 100
"""The last steps of a run that its stall limit follows from."""
LOST_AFTER = 60.0
"""Seconds without a heartbeat after which a process is gone."""
TAIL = 1 << 16
"""Bytes at the end of a log that its state follows from."""

as_info = msgspec.json.Decoder(RunInfo, strict=False)
as_record = msgspec.json.Decoder(StepRecord, strict=False)
as_alert = msgspec.json.Decoder(Alert, strict=False)
as_layers = msgspec.json.Decoder(LayerRecord, strict=False)
Record = TypeVar("Record", StepRecord, Alert, LayerRecord)


def stall_limit(times: Sequence[float], least: float = STALLED_AFTER) -> float:
    """Return the seconds without a step after which a run is stalled.

    Args:
        times: of the last RECENT_STEPS steps of its present attempt, in seconds.
        least: what it has asked for.
    """
    gaps = [after - before for before, after in pairwise(times[-RECENT_STEPS:]) if 0 < after - before < math.inf]
    return max(least, STALLED_STEPS * median(gaps), STALLED_PAUSES * max(gaps)) if gaps else least


class End(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The end of an attempt: normal, requested, or by an exception."""

    attempt: int
    time: float
    error: str = ""
    """Class of the exception, or empty."""
    message: str = ""
    stopped: str = ""
    """The signal that asked it to stop, such as "SIGTERM", or empty."""

    @property
    def status(self) -> Status:
        """The state of a run that ended so."""
        return "stopped" if self.stopped else "failed" if self.error else "finished"


as_end = msgspec.json.Decoder(End, strict=False)


class RunState(Struct, frozen=True, kw_only=True):
    """The state of a run at one moment."""

    status: Status
    step: int | None
    """The last step that counts."""
    time: float
    """Time of that step; without one, of the start of the attempt."""
    ended: float = 0.0
    """Time of its end, or of its last heartbeat before it was killed; 0 while it is alive."""
    error: str = ""
    """Class of the exception, if it failed."""
    message: str = ""


class Batch(Struct, Generic[Record], frozen=True, kw_only=True):
    """New records of a log. Of the records before it, those beyond `keep` no longer count."""

    records: list[Record]
    keep: int | None
    """The last step whose earlier records still count; None if all do."""
    torn: int
    """Lines that were skipped because they were not whole."""
    offset: int
    """Byte offset to read on from."""

    def kept(self, earlier: Sequence[Record]) -> list[Record]:
        """Return the earlier records that still count."""
        return [record for record in earlier if self.keep is None or record.step <= self.keep]


class Progress(NamedTuple):
    """The last step of a run, its time (without one, the time of the start), and the usual silence in seconds."""

    step: int | None
    time: float
    usual_silence: float = 0.0


class RunReader:
    """Reads a run's folder, also while it is written. It changes nothing there and keeps no file open."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.torn = 0
        """Lines that the last call of steps(), alerts() or layers() skipped because they were not whole."""
        self.heartbeat = Heartbeat(self.folder / HEARTBEAT)
        self._progress: tuple[Any, Progress] | None = None  # the state of the file, and the result

    @property
    def attempts(self) -> list[RunInfo]:
        """The RunInfo of each attempt, the oldest first; empty if the folder is not a run, or not yet."""
        infos = {info.attempt: info for info in self._read_whole(INFO, as_info) if info.id}
        return [infos[attempt] for attempt in sorted(infos)]

    @property
    def info(self) -> RunInfo:
        """The RunInfo of the newest attempt."""
        return next(reversed(self.attempts), RunInfo(id=replace_surrogates(self.folder.name)))

    @property
    def end(self) -> End | None:
        """The end of the newest attempt; None if it has not written one."""
        return self._end_of(self.info)

    def steps(self) -> list[StepRecord]:
        """Return the records that count. Of several records of one step the last counts."""
        records: dict[int, StepRecord] = {}
        for record in self._collect(STEPS, as_record):
            records.pop(record.step, None)
            records[record.step] = record
        return list(records.values())

    def alerts(self) -> list[Alert]:
        """Return the alerts that count."""
        return self._collect(ALERTS, as_alert)

    def layers(self) -> list[LayerRecord]:
        """Return the records of layers that count; none for a run that does not measure them."""
        return self._collect(LAYERS, as_layers)

    def follow(self, offset: int = 0) -> Iterator[Batch[StepRecord]]:
        """Read the steps written since a byte offset, in batches."""
        for batch in self._follow(STEPS, as_record, offset):
            yield msgspec.structs.replace(batch, records=[*{record.step: record for record in batch.records}.values()])

    def follow_alerts(self, offset: int = 0) -> Iterator[Batch[Alert]]:
        """Read the alerts written since a byte offset, in batches."""
        return self._follow(ALERTS, as_alert, offset)

    def state(self, now: float | None = None, info: RunInfo | None = None) -> RunState:
        """Return the state of the run at `now`, in seconds since the epoch. No other code decides it.

        Args:
            now: by default, the present.
            info: of the newest attempt, if the caller has read it already.
        """
        now, info = time.time() if now is None else now, self.info if info is None else info
        progress = self._read_progress(info)
        known: dict[str, Any] = {"step": progress.step, "time": progress.time}
        end = self._end_of(info)
        if end is not None:
            return RunState(status=end.status, error=end.error, message=end.message, ended=end.time, **known)
        if not self._is_alive(now, info):
            return RunState(status="killed", ended=max(self.heartbeat.time, 0.0), **known)
        least = STALLED_AFTER if info.stalled_after is None else info.stalled_after
        is_stalled = self._age_of_steps(now) > max(least, progress.usual_silence)
        return RunState(status="stalled" if is_stalled else "running", **known)

    def _is_alive(self, now: float, info: RunInfo) -> bool:
        """Return True if a process writes the run now.

        A held lock proves it. On this machine a free lock proves the opposite; without locks a missing process does. A
        process on another machine is alive while its heartbeat is seen to change.
        """
        locked = is_locked(self.folder / STEPS)
        if locked:
            return True
        with contextlib.suppress(OSError):
            owner = self.heartbeat.owner
            if (owner.is_on_this_machine and locked is False) or owner.is_gone:
                self.heartbeat.silence(now)
                return False
        return self.heartbeat.is_fresh(now, max(LOST_AFTER, 4 * info.heartbeat))

    def _age_of_steps(self, now: float) -> float:
        """Return the seconds since the last step or validation. The two files have their times from one clock."""
        silence = self.heartbeat.silence(now)
        try:
            changed = (self.folder / STEPS).stat().st_mtime
        except OSError:
            return math.inf
        return silence + (self.heartbeat.time - changed if self.heartbeat.time > 0 else now - changed)

    def _end_of(self, info: RunInfo) -> End | None:
        return next((end for end in reversed(self._read_whole(END, as_end)) if end.attempt == info.attempt), None)

    def _read_whole(self, name: str, decoder: msgspec.json.Decoder[Line]) -> list[Line]:
        """Return the lines of a short file."""
        with contextlib.suppress(OSError):
            parts = itertools.takewhile(lambda part: part[0] <= LONGEST, read_blocks(self.folder / name))
            whole = b"".join(block for _, block in parts)
            return [line for line in decode_lines(whole, decoder) if line is not None and not isinstance(line, Marker)]
        return []

    def _collect(self, name: str, decoder: msgspec.json.Decoder[Record]) -> list[Record]:
        records: list[Record] = []
        self.torn = 0
        for batch in self._follow(name, decoder):
            if batch.keep is not None:
                records = batch.kept(records)
            records += batch.records
            self.torn += batch.torn
        return records

    def _follow(self, name: str, decoder: msgspec.json.Decoder[Record], offset: int = 0) -> Iterator[Batch[Record]]:
        for end, block in read_blocks(self.folder / name, offset):
            yield _batch(decode_lines(block, decoder), end)

    def _read_progress(self, info: RunInfo) -> Progress:
        """Return the progress of an attempt by the end of its log, which is read again only if it has changed."""
        with contextlib.suppress(OSError):
            file = (self.folder / STEPS).stat()
            source = file.st_ino, file.st_size, file.st_mtime_ns, info.attempt
            if self._progress is None or self._progress[0] != source:
                blocks = read_blocks(self.folder / STEPS, max(file.st_size - TAIL, 0))
                lines = [line for _, block in blocks for line in decode_lines(block, as_record)]
                self._progress = source, _progress(lines, info)
            return self._progress[1]
        return Progress(None, info.started)


def find_runs(root: str | os.PathLike[str]) -> list[RunReader]:
    """Return readers of the runs in a folder, sorted by id. Folders that are not runs, or not yet, are left out."""
    try:
        folders = sorted(Path(root).iterdir())
    except OSError:
        return []
    return [reader for reader in map(RunReader, folders) if reader.attempts]


def _batch(lines: list[Record | Marker | None], offset: int = 0) -> Batch[Record]:
    """Return the records of some lines that count."""
    batch = Batch[Record](records=[], keep=None, torn=0, offset=offset)
    records, keep = batch.records, batch.keep
    for line in lines:
        if isinstance(line, Marker):
            keep = line.first_step if keep is None else min(keep, line.first_step)
            records = [record for record in records if record.step <= line.first_step]
        elif line is not None:
            records.append(line)
    return Batch(records=records, keep=keep, torn=lines.count(None), offset=offset)


def _progress(lines: list[StepRecord | Marker | None], info: RunInfo) -> Progress:
    """Return the progress of an attempt by the last lines of the log of steps."""
    batch = _batch(lines)
    records = sorted({record.step: record for record in batch.records}.values(), key=lambda record: record.step)
    if not records:
        return Progress(batch.keep or None, info.started)
    times = [record.time for record in records if record.step > info.first_step]
    return Progress(records[-1].step, records[-1].time, stall_limit(times, 0.0))

"""The run log: the files that a run leaves on disk. One process writes them, any may read them.

ROOT/RUN/info.jsonl     one RunInfo an attempt; a later line for the same attempt replaces the earlier one
         steps.jsonl    the StepRecords; each attempt begins with a line like {"attempt": 2, "first_step": 120}
         alerts.jsonl   the Alerts, in the same form
         layers.jsonl   the LayerRecords, in the same form, if layers are measured
         panel.json     the validation panel
         end.jsonl      how each attempt ended; no line for one that was killed
         heartbeat      the process; it sets the time of change every few seconds
         reserve        32 KiB that are freed for the last line if the disk is full

Only closing forces the records to the disk: a machine that loses its power may lose the last seconds. The process that
holds the lock on steps.jsonl is the one that writes; without locks, the one that `heartbeat` names.
"""

from __future__ import annotations

import itertools
import os
import re
import socket
import threading
import time
import warnings
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any, Self

import msgspec
from msgspec import Struct

from .files import BROKEN, Heartbeat, LineFile, Marker, Owner, encode_line, replace_surrogates, safe_repr
from .reader import ALERTS, END, HEARTBEAT, INFO, LAYERS, PANEL, STEPS, End, RunReader
from .record import Alert, LayerRecord, RunInfo, StepRecord
from .secrets import mask_message
from .stops import requested_stop

RESERVE = "reserve"
FILES = {INFO, STEPS, ALERTS, LAYERS, PANEL, END, HEARTBEAT, RESERVE}
ROOM, MESSAGE = 1 << 15, 4000
"""Bytes of the reserve, and characters of an error's message, which fit into them in any encoding."""
NEWEST = 32
"""Runs of one name that are checked, the newest first, for one that is not finished and can be resumed."""
BEATS, SETTLE = 2.5, 0.5
"""Without locks: heartbeats for which a run that may be alive is watched before it is resumed, and seconds after which
a process that has taken it checks that no other has."""


class RunWriter:
    """Writes a run's folder. It is a sink, and may be used from several threads.

    A record that cannot be written raises OSError and is lost; the writer stays usable, and writes again when there is
    room. A process forked from this one cannot use it.
    """

    def __init__(self, folder: Path, info: RunInfo, steps: LineFile, owner: Owner) -> None:
        self.folder, self.info, self._steps, self._owner = folder, info, steps, owner
        self._closing = threading.Event()
        self._marker, about = encode_line(Marker(info.attempt, info.first_step)), _readable(info)
        self._layers: LineFile | None = None
        with ExitStack() as self._files:
            self._files.callback(steps.close)
            self._alerts, self._info, self._end = map(self._open, (ALERTS, INFO, END))
            for file in (steps, self._alerts):
                file.append(self._marker)
            if (folder / LAYERS).exists():  # an earlier attempt's, of which some may no longer count
                self._layers = self._open(LAYERS)
                self._layers.append(self._marker)
            self._info.append(about)  # last: now it is a run
            with suppress(OSError):
                (folder / RESERVE).write_bytes(b"\0" * ROOM)
            threading.Thread(target=self._beat, name=f"hilbert-monitor {self.id}", daemon=True).start()
            self._files = self._files.pop_all()

    @classmethod
    def open(
        cls,
        root: str | os.PathLike[str],
        info: RunInfo,
        *,
        first_step: int = 0,
        strict: bool = False,
        private: bool = False,
        heartbeat: float = 5.0,
    ) -> Self:
        """Begin a run, or a further attempt at the run of this name if its process is gone.

        Raises OSError if the disk is full; the call may then be repeated. On a file system without locks it may take
        some heartbeats to see that the process of an earlier attempt is gone.

        Args:
            root: folder of the runs.
            info: the run's description. Its id, attempt, time and process are filled in here.
            first_step: the step that a checkpoint goes on from. With 0, a finished run of this name is not resumed.
            strict: raise if another process is writing a run of this name, instead of giving this one a number.
            private: let no other user read the folder. By default its mode follows the umask, so that a service of
                another user can read it.
            heartbeat: seconds between two heartbeats.
        """
        if first_step < 0 or heartbeat <= 0:
            raise ValueError(
                f"a run goes on from step 0 or later and has a heartbeat of some seconds, not first_step={first_step}"
                f" and heartbeat={heartbeat}: leave them out for a new run"
            )
        _readable(info)  # before there is a folder
        with ExitStack() as undo:
            folder, steps, owner = _choose_folder(Path(root).absolute(), info, first_step, strict, undo)
            if private:
                folder.chmod(0o700)
            attempts = RunReader(folder).attempts
            attempt = attempts[-1].attempt + 1 if attempts else 1
            process = {"started": time.time(), "host": socket.gethostname(), "pid": os.getpid(), "heartbeat": heartbeat}
            known = msgspec.structs.replace(info, id=folder.name, attempt=attempt, first_step=first_step, **process)
            writer = cls(folder, known, steps, owner)
            undo.pop_all()
            return writer

    @property
    def id(self) -> str:
        """Name of the run's folder."""
        return self.info.id

    def write(self, record: StepRecord) -> None:
        """Add a step's record. One for a step that was written before replaces it."""
        line = _readable(record)
        try:
            self._steps.append(line)
        except OSError:
            with suppress(OSError):
                self.progress()  # a run with a full disk is not stalled
            raise

    def alert(self, alert: Alert) -> None:
        """Add an alert."""
        self._alerts.append(_readable(alert))

    def layers(self, record: LayerRecord) -> None:
        """Add the layers of a step."""
        if self._layers is None and not self._steps.closed:
            self._layers = self._open(LAYERS, head=self._marker)
        (self._layers or self._steps).append(_readable(record))

    def panel(self, saved: bytes) -> None:
        """Write the panel, as JSON. Does nothing in a forked process, or once the run is closed."""
        if self._steps.closed:
            return
        unfinished = self.folder / f".{PANEL}"
        unfinished.write_bytes(saved)
        unfinished.replace(self.folder / PANEL)

    def describe(self, **changes: Any) -> None:
        """Write new values of fields of the run's RunInfo."""
        if fixed := {"id", "name", "attempt", "first_step", "host", "pid"} & changes.keys():
            raise ValueError(f"{', '.join(sorted(fixed))} of a run cannot change while it is written: leave it out")
        info = msgspec.structs.replace(self.info, **changes)
        self._info.append(_readable(info))
        self.info = info

    def progress(self) -> None:
        """Note that training is busy although it makes no step, as in a long validation."""
        self._steps.touch()

    def close(self, error: BaseException | None = None, *, stopped: str = "") -> None:
        """Write how the run ended, and close its files. Does nothing the second time, or in a forked process.

        Args:
            error: what ended it, if it did not end by itself.
            stopped: the signal that asked it to end, such as "SIGTERM", if the error does not show that.
        """
        if self._steps.closed or self._closing.is_set():
            return
        self._closing.set()
        asked = requested_stop(error)
        end = End(attempt=self.info.attempt, time=time.time(), stopped=stopped or asked)
        if error is not None and not asked:
            end = msgspec.structs.replace(end, error=type(error).__name__, message=_message(error))
        with self._files:
            with suppress(OSError):
                (self.folder / RESERVE).unlink()
            self._end.append(encode_line(end))

    def _open(self, name: str, head: bytes = b"") -> LineFile:
        return self._files.enter_context(closing(LineFile(self.folder / name, head)))

    def _beat(self) -> None:
        heartbeat = Heartbeat(self.folder / HEARTBEAT)
        while not self._closing.wait(self.info.heartbeat):
            if not heartbeat.beat(self._owner):
                self._closing.set()
                for file in (*filter(None, [self._layers]), self._end, self._info, self._alerts, self._steps):
                    with suppress(OSError):
                        file.close("is now written by another process: give this run a name that no other run has")


def _message(error: BaseException) -> str:
    try:
        return mask_message(safe_repr(str(error), MESSAGE))
    except Exception:
        return safe_repr(error)


def _readable(record: Struct) -> bytes:
    """Encode a record, and make sure that a reader can decode it."""
    line = encode_line(record)
    try:
        msgspec.json.decode(line, type=type(record), strict=False)
    except BROKEN as error:
        raise TypeError(f"a {type(record).__name__} cannot be read back ({error}): give it plain values") from None
    return line


# The folder of a run


def _choose_folder(
    root: Path, info: RunInfo, first_step: int, strict: bool, undo: ExitStack
) -> tuple[Path, LineFile, Owner]:
    """Choose the folder of a run and take it for this process. `undo` closes its log again."""
    busy, owner = "", Owner.new()
    for folder in _candidates(root, info):
        if not _suits(folder, info, first_step):
            continue
        new = not RunReader(folder).attempts
        if new and busy and strict:
            raise RuntimeError(f"run '{busy}' is being written by another process: give this run a name of its own")
        root.mkdir(parents=True, exist_ok=True)
        is_mine = False
        with suppress(FileExistsError):
            folder.mkdir()
            is_mine = True
        steps = undo.enter_context(closing(LineFile(folder / STEPS)))
        if not _take(folder, steps, owner, is_mine):
            busy = busy or folder.name
        elif _suits(folder, info, first_step):  # it may have changed before it was locked
            if new and busy:
                warnings.warn(
                    f"run '{busy}' is being written by another process: this is '{folder.name}'", stacklevel=3
                )
            return folder, steps, owner
        steps.close()
    raise AssertionError("numbers have run out")


def _take(folder: Path, steps: LineFile, owner: Owner, is_mine: bool) -> bool:
    """Take a run by a lock, or without locks by its heartbeat. Return False if another process has it.

    `is_mine` says that this process has created the folder, as only one can.
    """
    locked, heartbeat = steps.lock(), Heartbeat(folder / HEARTBEAT)
    if locked is None:
        warnings.warn(f"no locks in '{folder}': only a heartbeat tells whether a run is being written", stacklevel=4)
    if locked is False or (locked is None and not is_mine and _is_alive(folder, heartbeat)):
        return False
    heartbeat.path.write_bytes(encode_line(owner))
    if locked is None and not is_mine:
        time.sleep(SETTLE)
    return heartbeat.owner == owner


def _is_alive(folder: Path, heartbeat: Heartbeat) -> bool:
    """Watch the heartbeat of a run on a file system without locks; return True if it changes."""
    reader = RunReader(folder)
    if reader.attempts and reader.end is not None:
        return False
    with suppress(OSError):
        if heartbeat.owner.is_gone:
            return False
    heartbeat.silence(time.time())
    before, deadline = heartbeat.time, time.monotonic() + 2 * SETTLE + BEATS * reader.info.heartbeat
    while time.monotonic() < deadline:
        time.sleep(0.05)
        heartbeat.silence(time.time())
        if heartbeat.time != before:
            return True
    return False


def _candidates(root: Path, info: RunInfo) -> Iterator[Path]:
    """Folders to try: the newest runs of that id or name, unfinished ones first, then numbers that are free.

    The root is never listed, so that a run begins as fast among 10,000 others as in an empty folder. Runs of one name
    have the numbers 1, 2, 3 and so on. A number that is free, because its run was deleted, counts as the end.
    """
    wanted = _id(info)

    def numbered(n: int) -> Path:
        return root / (wanted if n == 1 else f"{wanted}-{n}")

    def is_free(n: int) -> bool:
        return not os.path.lexists(numbered(n))

    free = 1  # the last number is found in about 2 log2(last) lookups
    while not is_free(free):
        free *= 2
    last = free // 2 + bisect_left(range(free // 2 + 1, free), True, key=is_free)
    if info.id and last:
        yield numbered(1)  # an id says exactly which run is meant
    newest = (n for n in range(last, max(last - NEWEST, 0), -1) if n > 1 or not info.id)
    yield from sorted((numbered(n) for n in newest if not is_free(n)), key=_is_finished)
    yield from map(numbered, itertools.count(last + 1))


def _suits(folder: Path, info: RunInfo, first_step: int) -> bool:
    """Return True if a run may be written there: the folder is free, or holds the same run and that is not finished."""
    attempts = RunReader(folder).attempts
    if attempts:
        same = attempts[-1].name == replace_surrogates(info.name) or folder.name == info.id
        return same and (first_step > 0 or not _is_finished(folder))
    return FILES.issuperset(os.listdir(folder)) if folder.is_dir() else not os.path.lexists(folder)


def _is_finished(folder: Path) -> bool:
    end = RunReader(folder).end
    return end is not None and end.status == "finished"


def _id(info: RunInfo) -> str:
    """Return a file name from the run's id or name; without one, from the time, optimizer, seed and random digits.

    It is safe on any file system and has at most 80 characters.
    """
    moment, seed = time.strftime("%Y%m%d-%H%M%S"), "" if info.seed is None else f"seed{info.seed}"
    unnamed = "-".join(filter(None, (moment, info.head_optimizer[:30], seed, os.urandom(3).hex())))
    text = info.id or info.name or unnamed
    return re.sub(r"[^A-Za-z0-9._=+-]+", "-", text)[:80].strip("-.") or "run"

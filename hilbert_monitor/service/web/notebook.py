"""What people say about runs: notes, tags, whether a run is archived, and which alerts somebody has acknowledged.

DATA/notebook.json   of all runs of one folder of runs, in the service's own data folder and never beside the runs

A change is on the disk before it is answered, and another service on the same runs sees it. Remarks belong to a run by
its id and its beginning: another run in a folder of the same name has none.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec import Struct

from hilbert_monitor.runs.files import replace_surrogates
from hilbert_monitor.runs.record import Alert
from hilbert_monitor.runs.run import Run
from hilbert_monitor.service.following.private_folder import PrivateFolder, place_of

VARIABLE = "HILBERT_MONITOR_DATA"
"""Environment variable with the folder in which notebooks are."""
FILE, LOCK = "notebook.json", "notebook.lock"
FORMAT = 1

_log = logging.getLogger(__name__)


class Acknowledgement(Struct, frozen=True, kw_only=True):
    """That somebody has seen to an alert."""

    step: int
    kind: str
    time: float | None
    """Of the alert; None if it has none that is a number."""
    by: str = ""
    """Who, if that is known."""
    at: float
    """When, in seconds since the epoch."""


class Remarks(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What people say about one run."""

    began: float = 0.0
    """When the run began."""
    note: str = ""
    tags: tuple[str, ...] = ()
    archived: bool = False
    acknowledged: tuple[Acknowledgement, ...] = ()

    def by_alert(self) -> dict[tuple[Any, ...], Acknowledgement]:
        """The acknowledgements by the `alert_key` of their alerts."""
        return {alert_key(one): one for one in self.acknowledged}

    @property
    def is_empty(self) -> bool:
        """Whether nothing is said."""
        return not (self.note or self.tags or self.archived or self.acknowledged)


NOTHING = Remarks()


class _Book(Struct, frozen=True, kw_only=True):
    format: int
    runs: dict[str, Remarks]


def data_folder(root: Path, chosen: Path | None = None) -> Path | None:
    """The folder for the notebook of a folder of runs; None if the user has no folder at all.

    Args:
        root: folder of the runs.
        chosen: folder in which notebooks are; by default what the environment says, or else `hilbert-monitor` in the
            user's data folder.
    """
    if chosen is None and os.environ.get(VARIABLE):
        chosen = Path(os.environ[VARIABLE])
    if chosen is None:
        data = os.environ.get("XDG_DATA_HOME", "")
        if not os.path.isabs(data):
            data = os.path.expanduser("~/.local/share")
        if not os.path.isabs(data):
            return None
        chosen = Path(data) / "hilbert-monitor"
    return chosen / place_of(root)


class Notebook:
    """The remarks about the runs of a folder, for any number of threads.

    Args:
        path: folder to keep them in; None for nowhere.
        problem: why they are kept nowhere, in a part of a sentence.
    """

    def __init__(self, path: Path | None = None, problem: str = "no folder was given to keep them in") -> None:
        self.problem = problem if path is None else ""
        """Why nothing can be kept, in a part of a sentence; empty if it can."""
        self.version = 0
        """Grows with every change."""
        self._lock, self._look = threading.Lock(), (0, 0, 0)
        self._runs: Mapping[str, Remarks] = MappingProxyType({})
        self._folder: PrivateFolder | None = None
        if path is None:
            return
        try:
            self._folder = PrivateFolder(path)
            self._read()
        except OSError as error:
            self._folder = None
            self.problem = f"'{path}' cannot be used ({getattr(error, 'strerror', None) or error})"
            _log.warning("notes, tags and acknowledgements are not offered: %s; --data names another", self.problem)

    def of(self, run: Run) -> Remarks:
        """What is said about a run."""
        remarks = self._runs.get(run.id)
        return NOTHING if remarks is None or remarks.began != _began(run) else remarks

    def archived(self, runs: Mapping[str, Run]) -> set[str]:
        """The ids of those runs that are archived."""
        return {id for id in self._runs if id in runs and self.of(runs[id]).archived}

    def refresh(self) -> None:
        """Read what another service has written since."""
        if self._folder is not None and (self._folder.look(FILE) or (0, 0, 0)) != self._look:
            with self._lock, suppress(OSError):
                self._read()

    def change(self, runs: Iterable[Run], changed: Callable[[Run, Remarks], Remarks]) -> None:
        """Change what is said about some runs. OSError if it cannot be kept: then nothing has changed.

        Args:
            runs: those runs.
            changed: the new remarks of a run, from the old ones.
        """
        if self._folder is None:
            raise OSError(self.problem)
        with self._lock, self._folder.locked(LOCK):
            self._read()
            book = dict(self._runs)
            for run in runs:
                remarks = msgspec.structs.replace(changed(run, self.of(run)), began=_began(run))
                book.pop(run.id, None)
                if not remarks.is_empty:
                    book[run.id] = remarks
            with self._folder.replacing(FILE, sync=True) as file:
                file.write(msgspec.json.encode(_Book(format=FORMAT, runs=book)))
            self._take(book)

    def _read(self) -> None:
        """Take what is on the disk. OSError if that is no notebook of ours."""
        assert self._folder is not None
        look = self._folder.look(FILE)
        if look is None or look == self._look:
            return
        with self._folder.open(FILE) as file:
            content = file.read()
        try:
            book = msgspec.json.decode(content, type=_Book)
        except msgspec.MsgspecError as error:
            raise OSError(f"{FILE} there is no notebook: {error}") from None
        if book.format != FORMAT:
            raise OSError(f"{FILE} there is of another version, {book.format}")
        self._take(book.runs)

    def _take(self, book: dict[str, Remarks]) -> None:
        assert self._folder is not None
        self._runs, self._look = MappingProxyType(book), self._folder.look(FILE) or (0, 0, 0)
        self.version += 1


def tidy(text: str) -> str:
    """Text as it is kept: without blanks around it and without characters that UTF-8 cannot hold."""
    return replace_surrogates(text).replace("\x00", "").strip()


def acknowledge(
    remarks: Remarks, alerts: Iterable[Alert], *, by: str = "", at: float = 0.0, undo: bool = False
) -> Remarks:
    """Remarks in which alerts are acknowledged, or are no longer. Those that already are stay as they are."""
    chosen = {alert_key(alert): alert for alert in alerts}
    kept = [one for one in remarks.acknowledged if not (undo and alert_key(one) in chosen)]
    if not undo:
        known = {alert_key(one) for one in kept}
        kept += [
            Acknowledgement(step=alert.step, kind=alert.kind, time=_number(alert.time), by=by, at=at)
            for key, alert in chosen.items()
            if key not in known
        ]
    return msgspec.structs.replace(remarks, acknowledged=tuple(kept))


def alert_key(alert: Alert | Acknowledgement) -> tuple[Any, ...]:
    """What an alert is known by: a run that is resumed may have another of its step and kind."""
    return alert.step, alert.kind, _number(alert.time)


def _number(time: float | None) -> float | None:
    return time if time is not None and math.isfinite(time) else None


def _began(run: Run) -> float:
    return (_number(run.attempts[0].started) or 0.0) if run.attempts else 0.0

"""Where records go: anything with `write(record)`."""

from __future__ import annotations

import os
import queue
import threading
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import msgspec

from hilbert_monitor.runs.log import RunWriter
from hilbert_monitor.runs.process_bound import ProcessBound, end_child
from hilbert_monitor.runs.record import Alert, LayerRecord, RunInfo, StepRecord

from .runtime import describe, warn_user

T = TypeVar("T", contravariant=True)


@runtime_checkable
class Sink(Protocol[T]):
    """Takes records. A sink may raise and may be slow: it costs records, never the run.

    A record of a step that it has already been given replaces that one: more has become known, as the validation loss.
    """

    def write(self, record: T) -> None:
        """Take one record."""


class QueuedSink(ProcessBound, Generic[T]):
    """A sink behind a bounded queue and a thread of its own: whoever writes never waits. A forked child cannot use it.

    Args:
        sink: what the records are for.
        name: what it is called in warnings.
        room: records that may wait; beyond them new ones are dropped and counted.
    """

    def __init__(self, sink: Sink[T], *, name: str = "", room: int = 1024) -> None:
        self.sink, self.name = sink, name or type(sink).__name__
        self.failures = self.dropped = 0
        self._waiting: queue.Queue[T | None] = queue.Queue(room)
        self._last: Callable[[], None] | None = None
        self._thread = threading.Thread(target=self._work, name=f"hilbert-monitor {self.name}", daemon=True)
        self.bind_to_process()
        self._thread.start()

    def write(self, record: T) -> None:
        """Hand a record over, or drop it if the sink has fallen behind."""
        if self.inherited:
            return
        try:
            self._waiting.put_nowait(record)
        except queue.Full:
            self.dropped += 1
            if self.dropped == 1:
                warn_user(f"{self.name} has fallen behind, records are dropped")

    def close(self, timeout: float = 5.0, *, last: Callable[[], None] | None = None) -> None:
        """Wait up to `timeout` seconds until all records are written and `last` was called, in the sink's thread."""
        if self.inherited:
            return
        deadline = time.monotonic() + timeout
        self.end(last)
        with suppress(queue.Full):
            self._waiting.put(None, timeout=timeout)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            warn_user(f"{self.name} is still busy at the end of the run, its last records may be lost")

    def end(self, last: Callable[[], None] | None = None) -> None:
        """Take no more records, and call `last` once those that wait are written."""
        if self.inherited:
            return
        self._last = self._last or last
        with suppress(queue.Full):
            self._waiting.put_nowait(None)

    def _work(self) -> None:
        while (record := self._waiting.get()) is not None:
            self._guarded(lambda record=record: self.sink.write(record))  # type: ignore[misc]
        if self._last is not None:
            self._guarded(self._last)

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:  # a panic or SystemExit of the user's code; signals go to the main thread
            if self.inherited:
                end_child(error)
            self.failures += 1
            if self.failures == 1:
                warn_user(f"{self.name} failed ({describe(error)}); training goes on", stacklevel=1)
        if self.inherited:
            end_child()


class Progress:
    """Says that a run is doing something, though it makes no step."""


class RunLog:
    """The run's folder on disk. The first item is the RunInfo, which opens it, or as soon as the disk allows.

    Args:
        root: folder of the runs.
        first_step: the step that a checkpoint goes on from.
        strict: raise if another process is writing a run of this name.
        private: let no other user read the folder.
    """

    def __init__(
        self, root: str | os.PathLike[str], *, first_step: int = 0, strict: bool = False, private: bool = False
    ) -> None:
        self.root, self._open = root, partial(RunWriter.open, first_step=first_step, strict=strict, private=private)
        self.writer: RunWriter | None = None
        self._info = RunInfo()

    @property
    def id(self) -> str:
        """Name of the run's folder, once it is open."""
        return "" if self.writer is None else self.writer.id

    @property
    def folder(self) -> Path | None:
        """The run's folder, once it is open."""
        return None if self.writer is None else self.writer.folder

    def write(self, record: StepRecord | Alert | LayerRecord | RunInfo | Progress) -> None:
        """Write what is known of the run, a step, an alert, the layers of a step, or a sign of life."""
        if isinstance(record, RunInfo):
            known, self._info = self._info, record
            if self.writer is not None:
                self.writer.describe(**_changes(known, record))
        if self.writer is None:
            self.writer = self._open(self.root, self._info)
        if isinstance(record, StepRecord):
            self.writer.write(record)
        elif isinstance(record, Alert):
            self.writer.alert(record)
        elif isinstance(record, LayerRecord):
            self.writer.layers(record)
        elif isinstance(record, Progress):
            self.writer.progress()

    def close(self, error: BaseException | None = None, *, stopped: str = "") -> None:
        """Say how the run ended."""
        if self.writer is not None:
            self.writer.close(error, stopped=stopped)


def _changes(old: RunInfo, new: RunInfo) -> dict[str, Any]:
    before, after = (msgspec.structs.asdict(info) for info in (old, new))
    return {name: value for name, value in after.items() if value != before[name]}


class Webhook:
    """Posts alerts as JSON: a "text", as Slack and others take it, and the alert itself.

    Args:
        url: where to.
        run: what the run is called in the text.
        timeout: seconds that a post may take.
    """

    def __init__(self, url: str, *, run: Callable[[], str] = lambda: "", timeout: float = 10.0) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"a webhook is an http or https address, got {url!r}")
        self.url, self.run, self.timeout = url, run, timeout

    def write(self, record: Alert) -> None:
        """Post one alert; raise if the address does not accept it."""
        run = self.run()
        text = f"hilbert-monitor: {f'run {run}, ' if run else ''}step {record.step}: {record.message}"
        body = msgspec.json.encode({"text": text, "run": run, "alert": record})
        request = urllib.request.Request(self.url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=self.timeout):
            pass

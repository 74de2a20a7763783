"""Where rank zero writes a run: its log, the metrics that Prometheus scrapes, and the user's sinks."""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from hilbert_monitor.runs.exposition import RunSamples
from hilbert_monitor.runs.reader import STALLED_AFTER
from hilbert_monitor.runs.record import Alert, LayerRecord, RunInfo, StepRecord

from .exporter import Exporter, Prometheus
from .runtime import Guard
from .sinks import Progress, QueuedSink, RunLog
from .token_texts import SinkWithTexts, TokenTexts

ALIVE = 10.0
"""Seconds between two signs of life while no step is made."""


class Outputs:
    """The outputs of one run. Each has a thread of its own: training never waits for one.

    Args:
        guard: for what fails.
        sinks: of the user.
        run_dir: folder of the run logs; None for no log.
        private: let no other user read the run's folder.
        prometheus: how the metrics are exported.
        texts: adds the texts of tokens to what the log and the sinks get.
    """

    def __init__(
        self,
        guard: Guard,
        *,
        sinks: Iterable[Any] = (),
        run_dir: str | None = None,
        private: bool = False,
        prometheus: Prometheus | None = None,
        texts: TokenTexts | None = None,
    ) -> None:
        self.guard, self.run_dir, self.private, self.prometheus = guard, run_dir, private, prometheus
        self.texts = texts or TokenTexts(None, guard)
        self.log: RunLog | None = None
        self._log_queue: QueuedSink[Any] | None = None
        self._queues = [self._queue(sink, type(sink).__name__) for sink in sinks]
        self._exporter: Exporter | None = None
        self._info, self._alive = RunInfo(), 0.0

    @property
    def id(self) -> str:
        """Name of the run's folder, once there is one."""
        return self.log.id if self.log is not None else ""

    @property
    def folder(self) -> Path | None:
        """The run's folder, once there is one."""
        return self.log.folder if self.log is not None else None

    def open(self, info: RunInfo, *, first_step: int) -> None:
        """Open the log and the exporter, and write what is known of the run."""
        if self.run_dir is not None:
            self.log = RunLog(self.run_dir, first_step=first_step, strict=self.guard.strict, private=self.private)
        else:
            self._info = info = _own_name(info)
        with self.guard("exporter"):
            if self.prometheus is not None:
                info = self._export(info, self.prometheus)
        if self.log is not None:
            if self.guard.strict:
                self.log.write(info)
            self._log_queue = self._queue(self.log, "the run log", room=8192)
            self._log_queue.write(info)

    def describe(self, info: RunInfo) -> None:
        """Write what has become known of the run since."""
        if self._exporter is not None:
            info = self._with_place(info, self._exporter)
        if self._log_queue is not None:
            self._log_queue.write(info)

    def write(self, record: StepRecord, alerts: Sequence[Alert] = ()) -> None:
        """Write a step's record and its alerts. A later record of the same step replaces it."""
        self.texts.ask(record)
        items: tuple[StepRecord | Alert, ...] = (record, *alerts)
        for item in items:
            if self._exporter is not None:
                self._exporter.samples.write(item)
            if self._log_queue is not None:
                self._log_queue.write(item)
        for sink in self._queues:
            sink.write(record)

    def write_layers(self, record: LayerRecord) -> None:
        """Write the layers of a step."""
        if self._log_queue is not None:
            self._log_queue.write(record)

    def alive(self) -> None:
        """Say that the run is doing something, though it makes no step."""
        if time.monotonic() > self._alive + ALIVE:
            self._alive = time.monotonic()
            if self._exporter is not None:
                self._exporter.samples.alive()
            if self._log_queue is not None:
                self._log_queue.write(Progress())

    def close(
        self, error: BaseException | None = None, also: Sequence[QueuedSink[Any]] = (), *, stopped: str = ""
    ) -> None:
        """Say how the run ended, and give all outputs, and those in `also`, a few seconds to finish writing.

        Args:
            error: what ended the run, if it did not end by itself.
            also: further sinks to end.
            stopped: the signal that asked the run to end.
        """
        log, deadline = self.log, time.monotonic() + 5
        if self._log_queue is not None and log is not None:
            self._log_queue.end(lambda: log.close(error, stopped=stopped))
        if self._exporter is not None:
            with self.guard("exporter"):
                self._exporter.end("stopped" if stopped else "failed" if error is not None else "finished")
        sinks = [*([self._log_queue] if self._log_queue else []), *self._queues, *also]
        for sink in sinks:
            sink.end()
        for sink in sinks:
            sink.close(max(0.1, deadline - time.monotonic()))

    def about(self) -> RunInfo:
        """What is known of the run: what its log has filled in, where there is a log."""
        writer = self.log.writer if self.log is not None else None
        return writer.info if writer is not None else self._info

    def failures(self) -> Counter[str]:
        """What failed or was dropped so far, by part or sink."""
        failures = Counter(self.guard.failures)
        for sink in (*([self._log_queue] if self._log_queue else []), *self._queues):
            failures[sink.name] += sink.failures + sink.dropped
        return failures

    def _queue(self, sink: Any, name: str, *, room: int = 1024) -> QueuedSink[Any]:
        """Give a sink its queue, its thread and the texts of tokens."""
        return QueuedSink(SinkWithTexts(sink, self.texts), name=name, room=room)

    def _export(self, info: RunInfo, settings: Prometheus) -> RunInfo:
        """Begin to export; return the info with the port in it."""
        patience = STALLED_AFTER if info.stalled_after is None else info.stalled_after
        samples = RunSamples(self.about, failures=self.failures, stalled_after=patience)
        self._exporter = Exporter(samples, settings)
        return self._with_place(info, self._exporter)

    def _with_place(self, info: RunInfo, exporter: Exporter) -> RunInfo:
        """The info with the place of the metrics in it."""
        if exporter.port is None:
            return info
        settings = exporter.settings
        scheme = "http" if settings.tls is None else "https"
        return msgspec.structs.replace(info, port=exporter.port, address=settings.address, scheme=scheme)


def _own_name(info: RunInfo) -> RunInfo:
    """The info with a name and a time, for a run that has no log to fill them in."""
    host, pid = socket.gethostname(), os.getpid()
    id = info.id or info.name or f"{host}-{pid}"
    return msgspec.structs.replace(info, id=id, host=host, pid=pid, started=time.time())

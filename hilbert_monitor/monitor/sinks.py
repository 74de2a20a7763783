"""Where records go: anything with `write(record)`."""

from __future__ import annotations

import queue
import threading
import warnings
from typing import Protocol, runtime_checkable

from hilbert_monitor.runs.record import StepRecord


@runtime_checkable
class Sink(Protocol):
    """Takes records. A sink may raise and may be slow: it costs records, never the run."""

    def write(self, record: StepRecord) -> None:
        """Take one record."""


class QueuedSink:
    """A sink behind a bounded queue and a thread of its own: whoever writes never waits.

    Args:
        sink: what the records are for.
        name: what it is called in warnings.
        room: records that may wait; beyond them new ones are dropped and counted.
    """

    def __init__(self, sink: Sink, *, name: str = "", room: int = 1024) -> None:
        self.sink, self.name = sink, name or type(sink).__name__
        self.failures = self.dropped = 0
        self._waiting: queue.Queue[StepRecord | None] = queue.Queue(room)
        self._thread = threading.Thread(target=self._work, name=f"hilbert-monitor {self.name}", daemon=True)
        self._thread.start()

    def write(self, record: StepRecord) -> None:
        """Hand a record over, or drop it if the sink has fallen behind."""
        try:
            self._waiting.put_nowait(record)
        except queue.Full:
            self.dropped += 1
            if self.dropped == 1:
                warnings.warn(f"hilbert_monitor: {self.name} has fallen behind, records are dropped", stacklevel=2)

    def close(self, timeout: float = 5.0) -> None:
        """Wait up to `timeout` seconds for what is waiting to be written."""
        try:
            self._waiting.put(None, timeout=timeout)
        except queue.Full:
            return
        self._thread.join(timeout)

    def _work(self) -> None:
        while (record := self._waiting.get()) is not None:
            try:
                self.sink.write(record)
            except Exception as error:
                self.failures += 1
                if self.failures == 1:
                    said = f"{type(error).__name__}: {error}"
                    warnings.warn(f"hilbert_monitor: {self.name} failed ({said}); training goes on", stacklevel=1)

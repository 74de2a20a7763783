"""Several heads of one model, as multi-token prediction has them: one monitor each, which share what there is once."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hilbert_monitor.runs.process_bound import ProcessBound

from .options import MonitorOptions


class SharedSink(ProcessBound):
    """A sink that several monitors write to, each from a thread of its own: one after the other.

    The runs of a forked child write to it too, as its options are the parent's.

    Args:
        sink: the user's.
    """

    def __init__(self, sink: Any) -> None:
        self.sink, self._lock = sink, threading.Lock()
        self.bind_to_process()

    def on_fork(self) -> None:
        """Free the lock, which a thread of the parent may have."""
        self._lock = threading.Lock()
        self.bind_to_process()

    def write(self, record: Any) -> None:
        """Write a record when nobody else does."""
        with self._lock:
            self.sink.write(record)


def check_heads(heads: Sequence[Any]) -> list[str]:
    """Return the names of several heads; refuse anything else."""
    if not heads or not all(isinstance(head, str) for head in heads) or len(set(heads)) < len(heads):
        raise ValueError(f"several heads are given as a list of different names, got {heads!r}")
    return list(heads)


def options_of_each(options: MonitorOptions, heads: Sequence[str]) -> list[MonitorOptions]:
    """Return the options of one monitor for each head.

    Each has a run of its own, whose name ends with that of the head, and its records say which head they are of. The
    user's sinks get the records of all of them. Their metrics are at the given port and the next free ones.
    """
    sinks = tuple(map(SharedSink, options.sinks))
    made = []
    for number, head in enumerate(heads):
        made.append(
            replace(
                options,
                head=head,
                named=True,
                layers=options.layers and number == 0,
                run_name=_run_name(options, head),
                sinks=sinks,
            )
        )
    return made


def _run_name(options: MonitorOptions, head: str) -> str | None:
    """A name for each run; none for those whose folders get one of their own."""
    if options.run_name is not None:
        return f"{options.run_name}-{head}"
    return head if options.run_dir is None else None

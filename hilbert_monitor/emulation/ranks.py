"""Ranks that share a matrix, each a thread with an emulated device of its own: what one of them does and receives."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hilbert_monitor.geometry._ranks import Ranks
from hilbert_monitor.geometry.shards import RowRuns, RowShards

from .counts import Count, Counts
from .device import DeviceTensor, EmulatedDevice

PATIENCE = 120.0
"""Seconds after which a rank that does not come counts as lost."""


@dataclass(frozen=True, slots=True)
class RankWork:
    """What one rank did."""

    result: Any
    counts: Counts
    collectives: int
    received: int
    """Bytes from the other ranks."""


class _Meeting:
    """Where the ranks leave what they have for the others."""

    def __init__(self, number: int) -> None:
        self.number, self.barrier = number, threading.Barrier(number)
        self.tables: list[Tensor | None] = [None] * number

    def exchange(self, place: int, table: Tensor) -> list[Tensor]:
        self.tables[place] = table
        self.barrier.wait(PATIENCE)
        tables = [x for x in self.tables if x is not None]
        self.barrier.wait(PATIENCE)  # nobody leaves the next one before all have read this
        return tables


class _EmulatedRanks(Ranks):
    """Ranks whose collectives are one kernel each on every device; nobody waits for them but the devices."""

    def __init__(self, meeting: _Meeting, place: int, device: torch.device) -> None:
        super().__init__([], device)
        self.meeting, self.place, self.number, self.alone = meeting, place, meeting.number, False

    def _gathered(self, table: Tensor) -> Tensor:
        out = torch.cat(self._exchanged(table))
        self._note("all_gather", out.nbytes)
        self._count(out.numel() * (self.number - 1) // self.number)
        return DeviceTensor(out)

    def _all_reduce(self, numbers: Tensor, operation: dist.ReduceOp.RedOpType) -> None:
        parts = torch.stack(self._exchanged(numbers))
        assert isinstance(numbers, DeviceTensor)
        numbers.host.copy_(parts.sum(0) if operation == dist.ReduceOp.SUM else parts.amax(0))
        self._note("all_reduce", 2 * numbers.nbytes)
        self._count(2 * numbers.nbytes * (self.number - 1) // self.number)

    def _exchanged(self, table: Tensor) -> list[Tensor]:
        assert isinstance(table, DeviceTensor)
        return self.meeting.exchange(self.place, table.host.clone())

    def _note(self, name: str, size: int) -> None:
        if (mode := EmulatedDevice.current()) is not None:
            mode.note(name, Count(kernels=1, bytes=size))


def in_emulated_ranks(number: int, S: Tensor, measure: Callable[[Tensor | RowShards, Any], Any]) -> list[RankWork]:
    """Measure a matrix that some ranks share, each on its own emulated device, in threads.

    The rows are split as those of a head that every rank has whole: the ranks take runs of them in turn.

    Args:
        number: of ranks; one measures a plain tensor.
        S: (V, d) on the CPU.
        measure: called on every rank with its rows and its device, as `measure(rows, device)`.
    """
    meeting = _Meeting(number)
    precision = torch.backends.fp32_precision  # type: ignore[attr-defined]

    def run(place: int) -> RankWork:
        try:
            with EmulatedDevice() as device:
                if number == 1:
                    return RankWork(measure(device.tensor(S), device), device.counts, 0, 0)
                runs, ranks = RowRuns(len(S), number, place), _EmulatedRanks(meeting, place, device.device)
                shards = RowShards(device.tensor(runs.of(S)), device.tensor(runs.ids(S.device)), len(S), ranks)
                with device.counted() as counts:
                    result = measure(shards, device)
                return RankWork(result, counts, ranks.collectives, ranks.bytes)
        except BaseException:
            meeting.barrier.abort()
            raise

    try:
        with ThreadPoolExecutor(number) as pool:
            return list(pool.map(run, range(number)))
    finally:
        torch.backends.fp32_precision = precision  # type: ignore[attr-defined]

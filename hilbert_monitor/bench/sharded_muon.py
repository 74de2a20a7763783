"""Counts and times what a step of Muon on sharded matrices costs a rank, beside gathering all of them on every rank."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from hilbert_monitor.doctor.ranks import in_ranks
from hilbert_monitor.optim import Muon

from .measure import BenchResult

_PATIENCE = 1800.0
Cost = tuple[float, int, int]
"""Seconds of a step, bytes that a rank sends and receives, and collectives."""


def sharded_muon(width: int, blocks: int, *, worlds: Sequence[int], repeat: int = 5) -> Iterator[BenchResult]:
    """Measure a step on the row-sharded matrices of some SwiGLU blocks, in processes of one thread each."""
    for world in worlds:
        ranks = in_ranks(_costs, width, blocks, repeat, world=world, backend="gloo", patience=_PATIENCE)
        (ours, sent, collectives), (theirs, gathered, _) = (_of_all([rank[i] for rank in ranks]) for i in range(2))
        case = f"Muon, {blocks} blocks of width {width}, {world} ranks"
        opponent = "a full gather on every rank"
        note = f"sent and received by the busiest rank, in {collectives} collectives"
        yield BenchResult("optimizer traffic", case, "Muon.step", sent, opponent, gathered, note, "B")
        yield BenchResult("optimizer step", case, "Muon.step", ours, opponent, theirs, f"best of {repeat}, in turn")


def _of_all(costs: Sequence[Cost]) -> Cost:
    """Return the most that any rank took, sent and entered."""
    seconds, moved, collectives = zip(*costs, strict=True)
    return max(seconds), max(moved), max(collectives)


def _costs(rank: int, world: int, width: int, blocks: int, repeat: int) -> list[Cost]:
    """Return the costs of our step, and of one that gathers every matrix."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.set_num_threads(1)
    mesh, draw = init_device_mesh("cpu", (world,)), torch.Generator().manual_seed(0)
    shapes = ([(width, width)] * 4 + [(4 * width, width)] * 2 + [(width, 4 * width)]) * blocks

    def sharded(shape: tuple[int, int]) -> Tensor:
        return distribute_tensor(torch.randn(shape, generator=draw) * 0.02, mesh, [Shard(0)], src_data_rank=None)

    params = [Parameter(sharded(shape)) for shape in shapes]
    for p in params:
        p.grad = sharded((p.shape[0], p.shape[1]))
    optimizer = Muon(params)
    wholes = [Parameter(_gathered(p.detach())) for p in params]
    everywhere = Muon(wholes, distributed=False)

    def gather_all() -> None:
        for whole, p in zip(wholes, params, strict=True):
            whole.grad = _gathered(p.grad)
        everywhere.step()

    optimizer.step()  # which learns where the shards are
    return _measured([optimizer.step, gather_all], repeat)


def _gathered(t: Any) -> Tensor:
    whole: Tensor = t.full_tensor()
    return whole


def _measured(calls: Sequence[Callable[[], Any]], repeat: int) -> list[Cost]:
    """Return what each call costs this rank. They take turns, and all ranks begin together."""
    best = [math.inf for _ in calls]
    for _ in range(repeat):
        for i, call in enumerate(calls):
            dist.barrier()
            start = time.perf_counter()
            call()
            best[i] = min(best[i], time.perf_counter() - start)
    costs = []
    for call, seconds in zip(calls, best, strict=True):
        with _Traffic() as traffic:
            call()
        costs.append((seconds, traffic.bytes, traffic.collectives))
    return costs


class _Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts collectives, and the bytes that this rank sends and receives in them; gathers as a ring moves them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = self.collectives = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rank, world = dist.get_rank(), dist.get_world_size()
        name = str(function)
        if "alltoall_base_" in name:
            inputs, received, sent = args[1], args[3], args[4]
            numbers = sum(received) - received[rank] + sum(sent) - sent[rank]
            self.collectives, self.bytes = self.collectives + 1, self.bytes + numbers * inputs.element_size()
        elif "all_gather_into_tensor" in name:
            self.collectives += 1
            self.bytes += 2 * (world - 1) * args[0].numel() * args[0].element_size()
        return function(*args, **(kwargs or {}))

"""A step of RowNorm against fused AdamW; of Muon against a plain loop, torch.optim.Muon and, sharded, a full gather."""

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

from hilbert_monitor.optim import Muon, RowNorm

from .measure import Result, collect, in_ranks, paired_seconds, peak_bytes, seconds

Cost = tuple[float, int, int]
"""Seconds of a step, bytes that a rank sends and receives, and collectives."""


def run(*, quick: bool) -> list[Result]:
    """Measure RowNorm on a head, Muon on the matrices of some SwiGLU blocks, and sharded Muon."""
    return collect(_results(quick))


def _results(quick: bool) -> Iterator[Result]:
    yield from rownorm(*((4096, 64) if quick else (50_257, 512)))
    for width, blocks in [(32, 2)] if quick else [(64, 16), (256, 4), (512, 2)]:
        yield from muon(width, blocks)
    width, blocks, worlds = (32, 1, [2]) if quick else (512, 4, [2, 4])
    for world in worlds:
        yield from sharded_muon(width, blocks, world)


def rownorm(V: int, d: int) -> Iterator[Result]:
    """Measure a step of RowNorm on a (V, d) head and of fused AdamW on the same matrix: time, and memory with state."""
    case, baseline = f"RowNorm ({V:,} x {d})", "fused AdamW"
    ours = RowNorm([with_gradient(V, d)], lr=1e-3)
    adamw = torch.optim.AdamW([with_gradient(V, d)], lr=1e-3, fused=True)
    memory = peak_bytes(ours.step), peak_bytes(adamw.step)
    times = paired_seconds(ours.step, adamw.step, repeat=31)
    yield Result("optimizer step", case, times[0], baseline, times[1])
    note = "the most held at once in the first step, with its state"
    yield Result("optimizer memory", case, memory[0], baseline, memory[1], "B", note)


def muon(width: int, blocks: int) -> Iterator[Result]:
    """Time a step of Muon on the matrices of some SwiGLU blocks, of a plain loop and of torch.optim.Muon."""
    matrices = [[with_gradient(*shape) for shape in _shapes(width, blocks)] for _ in range(3)]
    ours, torchs = Muon(matrices[0]), torch.optim.Muon(matrices[1], lr=8e-3)
    buffers = [torch.zeros_like(p) for p in matrices[2]]
    times = paired_seconds(ours.step, lambda: muon_loop(matrices[2], buffers), repeat=7)
    case = f"Muon, {blocks} blocks of width {width}"
    yield Result("optimizer step", case, times[0], "matrix by matrix, fp32", times[1])
    if width <= 256:  # its bf16 products take minutes on a CPU beyond that
        yield Result("optimizer step", case, times[0], "torch.optim.Muon", seconds(torchs.step, repeat=1))


def muon_loop(params: Sequence[Tensor], buffers: Sequence[Tensor], *, lr: float = 8e-3, decay: float = 0.1) -> None:
    """Make one Muon step, matrix by matrix, with the plain Newton-Schulz loop in fp32."""
    a, b, c = 3.4445, -4.7750, 2.0315
    with torch.no_grad():
        for p, M in zip(params, buffers, strict=True):
            assert p.grad is not None
            M.mul_(0.95).add_(p.grad)
            X = p.grad + 0.95 * M
            tall = p.shape[0] > p.shape[1]
            X = X.T if tall else X
            X = X / (X.norm() + 1e-5)
            for _ in range(5):
                A = X @ X.T
                X = a * X + (b * A + c * A @ A) @ X
            p.mul_(1 - lr * decay)
            p.add_(X.T if tall else X, alpha=-lr * max(1, p.shape[0] / p.shape[1]) ** 0.5)


def sharded_muon(width: int, blocks: int, world: int, *, repeat: int = 5) -> Iterator[Result]:
    """Measure a step on the row-sharded matrices of some SwiGLU blocks, in processes of one thread each."""
    ranks = in_ranks(_costs, width, blocks, repeat, world=world)
    (ours, sent, collectives), (gather, gathered, _) = (
        [max(values) for values in zip(*(rank[i] for rank in ranks), strict=True)] for i in range(2)
    )
    case = f"Muon, {blocks} blocks of width {width}, {world} ranks"
    baseline = "full gather on every rank"
    note = f"sent and received by the busiest rank, in {collectives:.0f} collectives"
    yield Result("optimizer traffic", case, sent, baseline, gathered, "B", note)
    yield Result("optimizer step", case, ours, baseline, gather, note=f"shortest of {repeat} in turn")


def _costs(rank: int, world: int, width: int, blocks: int, repeat: int) -> list[Cost]:
    """Return the costs of our step, and of one that gathers every matrix."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh, draw = init_device_mesh("cpu", (world,)), torch.Generator().manual_seed(0)

    def sharded(shape: Sequence[int]) -> Any:
        whole = torch.randn(*shape, generator=draw) * 0.02
        return distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)

    params = [Parameter(sharded(shape)) for shape in _shapes(width, blocks)]
    for p in params:
        p.grad = sharded(p.shape)
    optimizer = Muon(params)
    wholes = [Parameter(p.detach().full_tensor()) for p in params]  # type: ignore[attr-defined]
    everywhere = Muon(wholes, distributed=False)

    def gather_all() -> None:
        for whole, p in zip(wholes, params, strict=True):
            whole.grad = p.grad.full_tensor()  # type: ignore[union-attr]
        everywhere.step()

    optimizer.step()  # which learns where the shards are
    return _measured([optimizer.step, gather_all], repeat)


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
    for call, shortest in zip(calls, best, strict=True):
        with _Traffic() as traffic:
            call()
        costs.append((shortest, traffic.bytes, traffic.collectives))
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


def _shapes(width: int, blocks: int) -> list[tuple[int, int]]:
    return ([(width, width)] * 4 + [(4 * width, width)] * 2 + [(width, 4 * width)]) * blocks


def with_gradient(*shape: int) -> Parameter:
    """Return a random parameter with a random gradient."""
    draw = torch.Generator().manual_seed(0)
    p = Parameter(torch.randn(*shape, generator=draw) * 0.02)
    p.grad = torch.randn(*shape, generator=draw) * 1e-3
    return p

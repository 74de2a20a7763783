"""Times one step of the optimizers against torch's own and a plain loop."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import Parameter

from hilbert_monitor.optim import Muon, RowNorm
from hilbert_monitor.optim._chunks import ChunkTrials

from .measure import BenchResult, paired_seconds, peak_bytes, seconds
from .opponents import muon_loop


def rownorm(V: int, d: int) -> Iterator[BenchResult]:
    """Measure a step of RowNorm on a (V, d) head beside fused AdamW on the same matrix: time, and memory with state."""
    case = f"RowNorm ({V:,} x {d})"
    ours = RowNorm([_with_gradient(V, d)], lr=1e-3)
    opponent, theirs = "AdamW(fused=True)", torch.optim.AdamW([_with_gradient(V, d)], lr=1e-3, fused=True)
    memory = peak_bytes(ours.step), peak_bytes(theirs.step)
    for _ in range(ChunkTrials.CALLS):  # until RowNorm has found its chunks
        ours.step()
        theirs.step()
    times = paired_seconds(ours.step, theirs.step, repeat=31)
    yield BenchResult("optimizer step", case, "RowNorm.step", times[0], opponent, times[1])
    note = "the most held at once in the first step, with its state"
    yield BenchResult("optimizer memory", case, "RowNorm.step", memory[0], opponent, memory[1], note, "B")


def muon(width: int, blocks: int) -> Iterator[BenchResult]:
    """Time a step of Muon on the matrices of some SwiGLU blocks beside a plain loop and torch.optim.Muon."""
    shapes = ([(width, width)] * 4 + [(4 * width, width)] * 2 + [(width, 4 * width)]) * blocks
    matrices = [[_with_gradient(*shape) for shape in shapes] for _ in range(3)]
    ours, theirs = Muon(matrices[0]), torch.optim.Muon(matrices[1], lr=8e-3)
    buffers = [torch.zeros_like(p) for p in matrices[2]]
    times = paired_seconds(ours.step, lambda: muon_loop(matrices[2], buffers), repeat=7)
    case = f"Muon, {blocks} blocks of width {width}"
    yield BenchResult("optimizer step", case, "Muon.step", times[0], "one by one, fp32", times[1])
    if width <= 256:  # its bf16 products take minutes on a CPU beyond that
        slow = seconds(theirs.step, repeat=1)
        yield BenchResult("optimizer step", case, "Muon.step", times[0], "torch.optim.Muon", slow)


def _with_gradient(*shape: int) -> Parameter:
    draw = torch.Generator().manual_seed(0)
    p = Parameter(torch.randn(*shape, generator=draw) * 0.02)
    p.grad = torch.randn(*shape, generator=draw) * 1e-3
    return p

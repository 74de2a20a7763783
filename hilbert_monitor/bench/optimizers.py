"""One step of the optimizers, against torch's own and a plain loop."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import Parameter

from hilbert_monitor.optim import Muon, RowNorm

from .measure import Comparison, paired_seconds, peak_bytes, seconds
from .opponents import muon_loop


def rownorm(V: int, d: int) -> Iterator[Comparison]:
    """A step of RowNorm on a (V, d) head against fused AdamW on the same matrix: time, and memory with its state."""
    case = f"RowNorm ({V:,} x {d})"
    ours, theirs = _with_gradient(V, d), _with_gradient(V, d)
    opponent = "AdamW(fused=True)"
    mine, adamw = RowNorm([ours], lr=1e-3), torch.optim.AdamW([theirs], lr=1e-3, fused=True)
    memory = peak_bytes(mine.step), peak_bytes(adamw.step)
    times = paired_seconds(mine.step, adamw.step, repeat=31)
    yield Comparison("optimizer step", case, "RowNorm.step", times[0], opponent, times[1])
    note = "most held at once by a first step, its state included"
    yield Comparison("optimizer memory", case, "RowNorm.step", memory[0], opponent, memory[1], note, "B")


def muon(width: int, blocks: int) -> Iterator[Comparison]:
    """A step of Muon on the matrices of some SwiGLU blocks against one matrix at a time, and torch.optim.Muon."""
    shapes = ([(width, width)] * 4 + [(4 * width, width)] * 2 + [(width, 4 * width)]) * blocks
    ours, loop, theirs = ([_with_gradient(*shape) for shape in shapes] for _ in range(3))
    buffers = [torch.zeros_like(p) for p in loop]
    mine, torchs = Muon(ours), torch.optim.Muon(theirs, lr=8e-3)
    times = paired_seconds(mine.step, lambda: muon_loop(loop, buffers), repeat=7)
    case = f"Muon, {blocks} blocks of width {width}"
    yield Comparison("optimizer step", case, "Muon.step", times[0], "one by one, fp32", times[1])
    if width <= 256:  # its bf16 products take minutes on a CPU beyond that
        slow = seconds(torchs.step, repeat=1)
        yield Comparison("optimizer step", case, "Muon.step", times[0], "torch.optim.Muon", slow)


def _with_gradient(*shape: int) -> Parameter:
    draw = torch.Generator().manual_seed(0)
    p = Parameter(torch.randn(*shape, generator=draw) * 0.02)
    p.grad = torch.randn(*shape, generator=draw) * 1e-3
    return p

"""The bracket of the best descent T(G): its gap upper / lower with more time, against the gaps of simpler bounds.

T(G) is the best descent, to first order, of a step S with D(S) <= 1 against the gradient G. The simpler lower bound is
projected RowNorm, stretched to D(S) = 1; the simpler upper bounds are Jung's ball and the product flow over all pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hilbert_monitor.doctor.samples import NextTokens, SampleIncrement
from hilbert_monitor.geometry import (
    center_rows,
    jung_ratio,
    projected_row_norm,
    row_diameter,
    row_norm,
    tension_bracket,
)

from .data import softmax_gradient
from .measure import Result, collect

_ALL_PAIRS = 8192  # rows up to which the product flow is summed pair by pair


def run(*, quick: bool, increments: Sequence[SampleIncrement] = ()) -> list[Result]:
    """Bound the tension of the given matrices, or of synthetic gradients, at several sizes and time budgets."""
    return collect(_results(quick, increments))


def _results(quick: bool, increments: Sequence[SampleIncrement]) -> Iterator[Result]:
    V, d, budgets = (2048, 32, (0.0, 0.2)) if quick else (50_257, 256, (0.0, 1.0, 5.0, 20.0))
    matrices = {increment.name: increment.S for increment in increments} or {
        "gradient": head_gradient(V, d),
        "scattered gradient": scattered_gradient(V, d),
    }
    for name, G in matrices.items():
        for size in [size for size in (1024, 8192) if 2 * size <= len(G)] + [len(G)]:
            yield from gaps(name, center_rows(G[:: len(G) // size][:size].contiguous()), budgets)


def gaps(name: str, G: Tensor, budgets: Sequence[float]) -> Iterator[Result]:
    """Bound T(G) for centred rows with every time budget. Bounds in the notes are shares of the sum of row norms."""
    total = float(G.double().norm(dim=1).sum())
    stretched = total / row_diameter(projected_row_norm(G)).value
    jung = total / (2 * jung_ratio(min(G.shape[1], len(G) - 1)))
    baselines = {"projected RowNorm, Jung's ball": jung / stretched}
    if len(G) <= _ALL_PAIRS:
        baselines["projected RowNorm, product flow"] = product_flow_length(G) / stretched
    for budget in budgets:
        b = tension_bracket(G, budget_seconds=budget)
        note = f"[{b.lower / total:.4f}, {b.upper / total:.4f}], {b.iterations} improvements in {b.seconds:.1f} s"
        case = f"{name} ({len(G):,} x {G.shape[1]}), {budget:g} s"
        for baseline, gap in baselines.items():
            yield Result("gap of the bracket of T(G)", case, b.gap, baseline, gap, "", note)


def head_gradient(V: int, d: int, *, steps: int = 8, batch: int = 512, seed: int = 0) -> Tensor:
    """Gradient (V, d) of a softmax head after a few steps of RowNorm on synthetic next tokens."""
    draw = torch.Generator().manual_seed(seed)
    data = NextTokens(V, d, draw, decay=0.5, shuffled=False)
    U, gradient = 0.02 * torch.randn(V, d, generator=draw), torch.zeros(V, d)
    for _ in range(steps):
        gradient = softmax_gradient(U, *data.sample(batch))
        U -= row_norm(gradient) / d
    return gradient


def scattered_gradient(V: int, d: int, *, batch: int = 2048, seed: int = 0) -> Tensor:
    """Gradient (V, d) of a softmax head with logits of order one, at hidden states without a common direction.

    The hardest to bracket: each token of the batch is a heavy row with a direction of its own. Targets follow Zipf's
    law.
    """
    draw = torch.Generator().manual_seed(seed)
    U, h = torch.randn(V, d, generator=draw) / d**0.5, torch.randn(batch, d, generator=draw)
    frequency = 1.0 / torch.arange(1, V + 1)
    return softmax_gradient(U, h, torch.multinomial(frequency, batch, replacement=True, generator=draw))


def product_flow_length(G: Tensor) -> float:
    """Length of the flow y_ij = (|g_j| g_i - |g_i| g_j) / sum |g|, pair by pair: V^2 d / 2 multiplications."""
    norms = G.double().norm(dim=1)
    unit = row_norm(G).double()
    parts = zip(torch.split(norms, 512), torch.split(unit, 512), strict=True)
    length = sum(float(weights @ torch.cdist(rows, unit) @ norms) for weights, rows in parts)
    return length / (2 * float(norms.sum()))

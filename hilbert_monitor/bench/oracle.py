"""Bounds on the minimum total tension T(G): how their gap shrinks with time, beside the gaps of simpler bounds.

T(G) is the best descent, to first order, of a step S with D(S) <= 1 against the gradient G.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from hilbert_monitor.emulation.synthetic import NextTokens, softmax_gradient
from hilbert_monitor.geometry import (
    center_rows,
    check_flow,
    check_potential,
    jung_ratio,
    projected_row_norm,
    row_diameter,
    row_norm,
    tension_bracket,
)

_ALL_PAIRS = 8192  # rows up to which the product flow is summed pair by pair


@dataclass(frozen=True, slots=True)
class Gap:
    """Bounds lower <= T(G) <= upper as fractions of sum |g_i|, and the gaps upper / lower of simpler bounds."""

    case: str
    rows: int
    width: int
    budget_seconds: float
    seconds: float
    lower: float
    upper: float
    gap: float
    jung_gap: float
    """Gap between projected RowNorm, stretched to D(S) = 1, and Jung's ball."""
    product_gap: float | None
    """Gap between the same step and the product flow over all pairs; None where there are too many pairs."""
    violation: float
    """By what share the bounds claim more than the checker of their certificates finds proved; zero if they hold."""

    def as_dict(self) -> dict[str, Any]:
        """Plain types, for JSON."""
        return asdict(self)


def head_gradient(V: int, d: int, *, steps: int = 8, batch: int = 512, seed: int = 0) -> Tensor:
    """Gradient (V, d) of a softmax head after a few steps of RowNorm on synthetic next tokens."""
    draw = torch.Generator().manual_seed(seed)
    data = NextTokens(V, d, draw, decay=0.5, shuffled=False)
    U, gradient = 0.02 * torch.randn(V, d, generator=draw), torch.zeros(V, d)
    for _ in range(steps):
        gradient = softmax_gradient(U, *data.sample(batch))
        U -= row_norm(gradient) / d
    return gradient


def scattered_gradient(V: int, d: int, *, batch: int = 2048, zipf: bool = True, seed: int = 0) -> Tensor:
    """Gradient (V, d) of a softmax head with logits of order one, at hidden states without a common direction.

    The hardest to bracket: each token of the batch is a heavy row with a direction of its own. Targets follow Zipf's
    law, or are uniform.
    """
    draw = torch.Generator().manual_seed(seed)
    U, h = torch.randn(V, d, generator=draw) / d**0.5, torch.randn(batch, d, generator=draw)
    frequency = 1.0 / torch.arange(1, V + 1) if zipf else torch.ones(V)
    return softmax_gradient(U, h, torch.multinomial(frequency, batch, replacement=True, generator=draw))


def gaps(name: str, G: Tensor, sizes: Sequence[int], budgets: Sequence[float]) -> Iterator[Gap]:
    """Bound T(G) for evenly spaced rows of G, at every size and with every time budget."""
    for size in sizes:
        rows = center_rows(G[:: len(G) // size][:size].contiguous())
        total = float(rows.double().norm(dim=1).sum())
        stretched = total / row_diameter(projected_row_norm(rows)).value
        jung = total / (2 * jung_ratio(min(rows.shape[1], size - 1)))
        product = product_flow_length(rows) / stretched if size <= _ALL_PAIRS else None
        for budget in budgets:
            b = tension_bracket(rows, budget_seconds=budget)
            violation = max(
                check_potential(rows, b.potential).violation(b.lower), check_flow(rows, b.flow).violation(b.upper)
            )
            ends = b.lower / total, b.upper / total, b.gap
            yield Gap(name, size, rows.shape[1], budget, b.seconds, *ends, jung / stretched, product, violation)


def product_flow_length(G: Tensor) -> float:
    """Length of the flow y_ij = (|g_j| g_i - |g_i| g_j) / sum |g|, pair by pair: V^2 d / 2 multiplications."""
    norms = G.double().norm(dim=1)
    unit = row_norm(G).double()
    parts = zip(torch.split(norms, 512), torch.split(unit, 512), strict=True)
    length = sum(float(weights @ torch.cdist(rows, unit) @ norms) for weights, rows in parts)
    return length / (2 * float(norms.sum()))


def show(results: Sequence[Gap], console: Console) -> None:
    """Print the gaps as a table."""
    table = Table(
        title="Bounds on T(G) as fractions of the sum of row norms; gap = upper / lower, PRN = projected RowNorm",
        title_justify="left",
    )
    table.add_column("case")
    for name in ("V x d", "budget", "took", "lower", "upper", "gap", "PRN + Jung", "PRN + product flow", "violation"):
        table.add_column(name, justify="right", no_wrap=name in ("V x d", "gap"))
    for r in results:
        product = "" if r.product_gap is None else f"{r.product_gap:.3f}"
        figures = (
            f"{r.lower:.4f}",
            f"{r.upper:.4f}",
            f"[bold]{r.gap:.3f}",
            f"{r.jung_gap:.3f}",
            product,
            f"{r.violation:.0e}",
        )
        table.add_row(r.case, f"{r.rows:,} x {r.width}", f"{r.budget_seconds:g} s", f"{r.seconds:.1f} s", *figures)
    console.print(table)

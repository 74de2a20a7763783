"""The bracket of the minimum total tension: its gap against the time it is given, beside what was known before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import normalize

from hilbert_monitor.geometry import (
    center_rows,
    jung_ratio,
    projected_row_norm,
    row_diameter,
    row_norm,
    tension_bracket,
)

_BRUTE = 8192  # rows up to which the product flow is summed pair by pair


@dataclass(frozen=True, slots=True)
class Gap:
    """One bracket lower <= T(G) <= upper, in parts of sum |g_i|, and the gaps upper / lower of its opponents."""

    case: str
    rows: int
    width: int
    budget_seconds: float
    seconds: float
    lower: float
    upper: float
    gap: float
    jung_gap: float
    """Of stretched projected RowNorm and Jung's ball."""
    product_gap: float | None
    """Of stretched projected RowNorm and the product flow, summed over all pairs; None where they are too many."""

    def as_dict(self) -> dict[str, Any]:
        """Plain types, for JSON."""
        return asdict(self)


def head_gradient(V: int, d: int, *, steps: int = 8, batch: int = 512, seed: int = 0) -> Tensor:
    """Gradient (V, d) of a softmax head after a few steps of RowNorm on next tokens that follow Zipf's law."""
    draw = torch.Generator().manual_seed(seed)
    spectrum = torch.arange(1, d + 1) ** -0.5
    embedding, mean = (torch.randn(n, d, generator=draw) * spectrum for n in (V, 1))
    frequency = 1.0 / torch.arange(1, V + 1)
    U, gradient = 0.02 * torch.randn(V, d, generator=draw), torch.zeros(V, d)
    for _ in range(steps):
        target = torch.multinomial(frequency, batch, replacement=True, generator=draw)
        h = normalize(embedding[target] + mean + torch.randn(batch, d, generator=draw) * spectrum, dim=1) * d**0.5
        residual = (h @ U.T).softmax(1)
        residual[torch.arange(batch), target] -= 1
        gradient = residual.T @ h / batch
        U -= row_norm(gradient) / d
    return gradient


def gaps(name: str, G: Tensor, sizes: Sequence[int], budgets: Sequence[float]) -> Iterator[Gap]:
    """Bracket evenly thinned rows of G at every size, with every budget."""
    for size in sizes:
        rows = center_rows(G[:: len(G) // size][:size].contiguous())
        total = float(rows.double().norm(dim=1).sum())
        stretched = total / row_diameter(projected_row_norm(rows)).value
        jung = total / (2 * jung_ratio(min(rows.shape[1], size - 1)))
        product = product_flow_length(rows) / stretched if size <= _BRUTE else None
        for budget in budgets:
            b = tension_bracket(rows, budget_seconds=budget)
            ends = b.lower / total, b.upper / total, b.gap
            yield Gap(name, size, rows.shape[1], budget, b.seconds, *ends, jung / stretched, product)


def product_flow_length(G: Tensor) -> float:
    """Length of the flow y_ij = (|g_j| g_i - |g_i| g_j) / sum |g|, pair by pair: V^2 d / 2 multiplications."""
    norms = G.double().norm(dim=1)
    unit = row_norm(G).double()
    far = sum(float(norms[a : a + 512] @ torch.cdist(unit[a : a + 512], unit) @ norms) for a in range(0, len(G), 512))
    return far / (2 * float(norms.sum()))


def show(results: Sequence[Gap], console: Console) -> None:
    """Print the gaps."""
    table = Table(
        title="T(G) in parts of the sum of row norms; gap is upper / lower, and so for the opponents",
        title_justify="left",
    )
    table.add_column("case")
    for name in ("V x d", "budget", "took", "lower", "upper", "gap", "PRN + Jung", "PRN + product flow"):
        table.add_column(name, justify="right", no_wrap=name in ("V x d", "gap"))
    for r in results:
        product = "" if r.product_gap is None else f"{r.product_gap:.3f}"
        figures = (f"{r.lower:.4f}", f"{r.upper:.4f}", f"[bold]{r.gap:.3f}", f"{r.jung_gap:.3f}", product)
        table.add_row(r.case, f"{r.rows:,} x {r.width}", f"{r.budget_seconds:g} s", f"{r.seconds:.1f} s", *figures)
    console.print(table)

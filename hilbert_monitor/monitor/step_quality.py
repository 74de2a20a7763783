"""What a step is worth, measured as rarely as the panel is, on the rank that writes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hilbert_monitor.geometry import (
    Interval,
    center_rows,
    first_order_decrease,
    gauge_waste,
    row_diameter_bracket,
    spectral_norm,
    step_efficiency,
    tension_bracket,
    uniform_backward_bound,
)

BUDGET = 1.0
"""Seconds in which the tension of a gradient is bracketed."""
MOMENTS = ("exp_avg", "momentum_buffer")
"""Where optimizers keep the average of their gradients."""


def of_increment(S: Tensor) -> dict[str, float]:
    """What can be said of the increment by itself. S: (V, d)."""
    return {"gauge_waste": gauge_waste(S), "spectral_norm": spectral_norm(S)}


def head_diameter(U: Tensor, S: Tensor) -> float:
    """The smaller of D(U) and D(U - S), from above: U is the head after the step, without its decay before it."""
    return min(row_diameter_bracket(U).upper, row_diameter_bracket(U - S).upper)


def backward(diameter: float, head: float, hidden_norm: float) -> float:
    """The uniform bound on what the step changes of the gradient at a hidden state."""
    norm = torch.tensor(hidden_norm, dtype=torch.float64)
    bound = uniform_backward_bound(norm, diameter_step=diameter, diameter_head=head, diameter_updated=head)
    return float(bound)


def efficiencies(
    S: Tensor, gradient: Tensor | None, state: dict[str, Any], diameter: Interval, *, budget: float = BUDGET
) -> Iterator[tuple[str, float]]:
    """Bounds of the step's efficiency, for the batch's gradient and for the optimizer's moment, by field of a record.

    Both are ratios in which the scale of the gradient cancels, so that no bias of a moment has to be corrected.

    Args:
        S: (V, d) increment.
        gradient: (V, d) of the batch.
        state: the optimizer's, of the weight.
        diameter: bounds of D(S).
        budget: seconds for each.
    """
    moment = next((state[name] for name in MOMENTS if isinstance(state.get(name), Tensor)), None)
    for prefix, G in (("", gradient), ("moment_", moment)):
        if G is None or not bool(torch.isfinite(G).all()):
            continue
        G = center_rows(G[: len(S)])  # what softmax sees of it
        tension = tension_bracket(G, budget_seconds=budget)
        decrease = first_order_decrease(G, S)
        found = step_efficiency(decrease, diameter=diameter, tension=Interval(tension.lower, tension.upper))
        if found is not None:
            yield f"{prefix}efficiency_lower", found.lower
            yield f"{prefix}efficiency_upper", found.upper

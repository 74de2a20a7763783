"""How good a step is: what part of it reaches the predictions, and how much descent it makes of its diameter.

Measured as rarely as the panel is. The efficiency is that of a whole matrix: a sharded head has none.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hilbert_monitor.geometry import (
    Interval,
    RowShards,
    RowSource,
    centred_decrease,
    row_statistics,
    spectral_norm,
    step_efficiency,
    tension_bracket,
    uniform_backward_bound,
)

from .formulas import state_of
from .head import WatchedHead
from .head_rows import Matrix
from .measurement import DiameterBounds, StepQuality

BUDGET = 1.0
"""Seconds in which the tension of a gradient is bracketed."""
MOMENTS = ("exp_avg", "momentum_buffer")
"""Where optimizers keep their moment, the running average of their gradients."""


def head_quality(head: WatchedHead, S: Matrix, bounds: DiameterBounds | None) -> StepQuality:
    """Measure a step of the head, and bracket its efficiency if the bounds of its diameter are given.

    With a bias no gradient has the shape of S, and there is no efficiency.
    """
    quality = increment_quality(S)
    if bounds is None or head.bias is not None or head.rows.sharded:
        return quality
    assert isinstance(S, Tensor)
    state = {} if head.transposed or head.effective is not None else state_of(head.source.optimizer, head.weight)
    diameter = Interval(bounds.diameter_lower, bounds.diameter_upper)
    G = head.gradient()
    assert not isinstance(G, RowShards)
    return step_quality(S, G, state, diameter, quality=quality)


def increment_quality(S: Matrix) -> StepQuality:
    """Measure what can be said of an increment (V, d) by itself."""
    return StepQuality(gauge_waste=row_statistics(S).gauge_waste, spectral_norm=spectral_norm(S).upper)


def step_quality(
    S: Tensor,
    gradient: Tensor | None,
    state: dict[str, Any],
    diameter: Interval,
    *,
    quality: StepQuality | None = None,
    budget: float = BUDGET,
) -> StepQuality:
    """Measure the increment, and bracket its efficiency for the batch's gradient and for the optimizer's moment.

    An efficiency is a ratio in which the scale of the gradient cancels, so a moment needs no bias correction.

    Args:
        S: (V, d) increment.
        gradient: (V, d) of the batch.
        state: the optimizer's, of the weight.
        diameter: bounds of D(S).
        quality: what has been measured of the increment by itself.
        budget: seconds for each of the two.
    """
    moment = next((state[name] for name in MOMENTS if isinstance(state.get(name), Tensor)), None)
    for_gradient, for_moment = (_efficiency(S, G, diameter, budget) for G in (gradient, moment))
    return replace(
        quality or increment_quality(S),
        efficiency_lower=for_gradient.lower if for_gradient else None,
        efficiency_upper=for_gradient.upper if for_gradient else None,
        moment_efficiency_lower=for_moment.lower if for_moment else None,
        moment_efficiency_upper=for_moment.upper if for_moment else None,
    )


def _efficiency(S: Tensor, gradient: Tensor | None, diameter: Interval, budget: float) -> Interval | None:
    """Bracket the descent of a step over the best of its diameter; None where there is no finite gradient."""
    if gradient is None or not bool(torch.isfinite(gradient).all()):
        return None
    G = gradient[: len(S)]  # in its own dtype: a centred copy in bf16 would be another gradient
    tension = tension_bracket(G, budget_seconds=budget)
    decrease = centred_decrease(G, S)  # softmax sees the centred rows alone
    return step_efficiency(decrease, diameter=diameter, tension=Interval(tension.lower, tension.upper))


def heads_around(head: WatchedHead, S: Matrix) -> list[Matrix]:
    """Form U, the head after the step, and U - S, before it but for decay. (V, d) both; nothing is sent."""
    U = head.logit_matrix(S.rows.dtype if isinstance(S, RowShards) else S.dtype)
    return [U, _difference(U, S)]


def _difference(A: Matrix, B: Matrix) -> Matrix:
    if isinstance(A, RowShards) and isinstance(B, RowShards):
        return replace(A, rows=RowSource(A.rows, B.rows, form=torch.sub))
    assert isinstance(A, Tensor)
    assert isinstance(B, Tensor)
    return A - B


def backward_bound(diameter: float, head: float, hidden_norm: float) -> float:
    """Bound what a step changes of the gradient at a hidden state, for every target.

    Args:
        diameter: D(S), from above.
        head: D of the head, from above; see `heads_around`.
        hidden_norm: largest norm of a hidden state.
    """
    norm = torch.tensor(hidden_norm, dtype=torch.float64)
    bound = uniform_backward_bound(norm, diameter_step=diameter, diameter_head=head, diameter_updated=head)
    return float(bound)

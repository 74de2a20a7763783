"""The efficiency of a step, and its gauge waste.

A step S lowers the loss by -<G, S> to first order. The best step of the same diameter lowers it by D(S) T(G), with T(G)
the minimum total tension of the gradient. The quotient of the two is the efficiency of S. A common shift of all rows
changes no probability; its share of |S|^2 is the gauge waste.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .arithmetic import check_real, compute_dtype, full_precision
from .shards import RowShards, row_shards


class Interval(NamedTuple):
    """Lower and upper bound of a number."""

    lower: float
    upper: float


def step_efficiency(decrease: float | Interval, *, diameter: Interval, tension: Interval) -> Interval | None:
    """Return bounds of the efficiency -<G, S> / (D(S) T(G)), or None if a bound is zero or not finite.

    Args:
        decrease: -<G, S> of the centred gradient, or bounds of it (see `centred_decrease`).
        diameter: bounds of D(S).
        tension: bounds of T(G).
    """
    low, high = decrease if isinstance(decrease, Interval) else (decrease, decrease)
    least, most = diameter.lower * tension.lower, diameter.upper * tension.upper
    if not (least > 0 and math.isfinite(most) and math.isfinite(low) and math.isfinite(high)):
        return None
    return Interval(min(low / most, low / least), max(high / most, high / least))


@full_precision
def gauge_waste(S: Tensor | RowShards) -> float:
    """Return the share V |mean row|^2 / |S|^2 of S that is a common row shift; nan for S = 0.

    Args:
        S: (V, d); rows may be on several ranks. Those in bf16 or fp16 are copied to fp32.
    """
    if shards := row_shards(S):
        return _sharded_waste(shards)
    assert not isinstance(S, RowShards)
    check_real("S", S)
    S = S.to(compute_dtype(S))
    shift = S.mean(0, dtype=torch.float64).norm() / torch.linalg.vector_norm(S, dtype=torch.float64)
    return len(S) * float(shift) ** 2


def _sharded_waste(shards: RowShards) -> float:
    def sums() -> Tensor:
        rows = shards.rows.to(compute_dtype(shards.rows))
        size = torch.linalg.vector_norm(rows, dtype=torch.float64).square()
        return torch.cat([rows.sum(0, dtype=torch.float64), size[None]])

    numbers = shards.ranks.sum(sums, shards.shape[1] + 1)
    shift = (numbers[:-1] / shards.number).norm() / numbers[-1].sqrt()
    return shards.number * float(shift) ** 2

"""The efficiency of a step, and two measures of the step alone: its gauge waste and its spectral norm.

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


class Interval(NamedTuple):
    """Lower and upper bound of a number."""

    lower: float
    upper: float


def step_efficiency(decrease: float, *, diameter: Interval, tension: Interval) -> Interval | None:
    """Return bounds of the efficiency -<G, S> / (D(S) T(G)), or None if a bound is zero or not finite.

    Args:
        decrease: -<G, S>, of the centred gradient.
        diameter: bounds of D(S).
        tension: bounds of T(G).
    """
    least, most = diameter.lower * tension.lower, diameter.upper * tension.upper
    if not (least > 0 and math.isfinite(most) and math.isfinite(decrease)):
        return None
    ends = decrease / most, decrease / least
    return Interval(min(ends), max(ends))


@full_precision
def gauge_waste(S: Tensor) -> float:
    """Return the share V |mean row|^2 / |S|^2 of S that is a common row shift; nan for S = 0.

    Args:
        S: (V, d). Rows in bf16 or fp16 are copied to fp32.
    """
    check_real("S", S)
    S = S.to(compute_dtype(S))
    shift = S.mean(0, dtype=torch.float64).norm() / torch.linalg.vector_norm(S, dtype=torch.float64)
    return len(S) * float(shift) ** 2


@full_precision
def spectral_norm(S: Tensor, *, vectors: int = 4, iterations: int = 16) -> float:
    """Return a lower estimate of the largest singular value of S, by power iteration on a few vectors.

    The iteration starts from the longest rows, so it draws no random number. The host waits once, for the result.
    Takes a copy of S as scratch.

    Args:
        S: (V, d).
        vectors: iterated together, which makes up for singular values that lie close.
        iterations: each takes two passes over S.
    """
    check_real("S", S)
    S = S.to(compute_dtype(S))
    scale = S.abs().amax().clamp_min(torch.finfo(S.dtype).tiny)
    S = S / scale  # squares stay in range
    longest = torch.linalg.vector_norm(S, dim=1).topk(min(vectors, *S.shape)).indices
    Q = S[longest].mT  # (d, k)
    for _ in range(iterations):
        Q, _ = torch.linalg.qr(Q)
        Q = S.mT @ (S @ Q)
    Q, _ = torch.linalg.qr(Q)
    SQ = S @ Q
    gram = SQ.mT @ SQ  # (k, k), whose largest eigenvalue a high power of it brings out
    tiny = torch.finfo(S.dtype).tiny
    power = gram
    for _ in range(16):
        power = power / power.norm().clamp_min(tiny)
        power = power @ power
    largest = (gram @ power).norm() / power.norm().clamp_min(tiny)
    return float(largest.sqrt() * scale)

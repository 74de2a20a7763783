"""What a step is worth: how much of what its diameter allows it turns into descent, and how much of it does nothing.

A step S lowers the loss by -<G, S> to first order. Among all steps of its diameter the best lowers it by D(S) T(G),
with T(G) the minimum total tension of the gradient; the quotient is the step's efficiency. A common shift of all rows
changes no probability; its share of |S|^2 is wasted on the gauge.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .arithmetic import check_real, compute_dtype, full_precision


class Interval(NamedTuple):
    """A number that is known to lie between two others."""

    lower: float
    upper: float


def step_efficiency(decrease: float, *, diameter: Interval, tension: Interval) -> Interval | None:
    """Return -<G, S> / (D(S) T(G)) as an interval; None where it is 0 / 0.

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
    """Return V |mean row|^2 / |S|^2, the share of S that is a common row shift; nan for S = 0. S: (V, d)."""
    check_real("S", S)
    S = S.to(compute_dtype(S))
    shift = S.mean(0, dtype=torch.float64).norm() / torch.linalg.vector_norm(S, dtype=torch.float64)
    return len(S) * float(shift) ** 2


@full_precision
def spectral_norm(S: Tensor, *, vectors: int = 4, iterations: int = 16) -> float:
    """Return the largest singular value of S, from below, by power iteration on a few vectors.

    It begins with the longest rows, so that no random number is drawn, and looks at nothing on the way, so that the
    host waits once.

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

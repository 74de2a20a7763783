"""The largest row diameter an optimizer can make, where there is a theorem."""

from __future__ import annotations

import math

from torch.optim import Adam, Optimizer

from hilbert_monitor.optim import RowNorm

from .formulas import steps_as
from .head_step import HeadStep


def diameter_ceiling(optimizer: Optimizer, step: HeadStep, *, count: float, width: int) -> float | None:
    """Return a bound on D(S) that holds whatever the gradients were, or None for an optimizer without one.

    RowNorm: every row has norm at most lr, so 2 lr. Adam and AdamW: by Cauchy-Schwarz an entry of m is at most
    sqrt(v sum_k (b1^2/b2)^k) (1 - b1) / sqrt(1 - b2), which with bias correction gives 2 lr sqrt(d) times a factor that
    is 1 at the first step and 7.27 in the limit for the usual betas. A subclass with a step of its own has none.

    Args:
        optimizer: the one that moves the head.
        step: its last step.
        count: Adam's own count of steps, the last one included.
        width: d.
    """
    if step.lr is None:
        return None
    if type(optimizer) is RowNorm:
        return 2 * step.lr
    if not steps_as(optimizer, Adam):
        return None
    b1, b2 = (float(b) for b in step.options["betas"])
    factor = adam_factor(b1, b2, count)
    return 2 * step.lr * math.sqrt(width) * factor if math.isfinite(factor) else None


def adam_factor(b1: float, b2: float, t: float) -> float:
    """Largest entry of Adam's step number `t` over lr, for all gradients: 1 at t = 1, infinite if b2 = 0 < b1."""
    if b2 == 0 and b1 > 0 and t > 1:
        return math.inf
    ratio = b1 * b1 / b2 if b2 else 0.0
    series: float = t if ratio == 1 else (1 - ratio**t) / (1 - ratio)
    largest: float = (1 - b1) / (1 - b1**t)
    return largest * math.sqrt((1 - b2**t) / (1 - b2) * series)

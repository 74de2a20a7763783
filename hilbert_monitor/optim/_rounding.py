"""The update of a weight, and compensation for its rounding to a dtype below fp32.

A step far below the spacing of the weights is lost when the sum is rounded to the nearest number: the weight stays
where it is, at every step. Compensated rounding adds what was lost at the next step (Kahan).
"""

from __future__ import annotations

import torch
from torch import Tensor

from hilbert_monitor.geometry import compute_dtype

ROUNDINGS = ("nearest", "compensated")
"""Choices of the hyperparameter `rounding`."""


def shrink_and_add(
    u: Tensor,
    s: Tensor,
    *,
    scale: Tensor | None = None,
    shrink: float | Tensor = 1.0,
    lost: Tensor | None = None,
) -> None:
    """Set u to shrink u + scale s in place, rounded once to u's dtype.

    Args:
        u: the weights, or a chunk of their rows.
        s: their step.
        scale: factors (rows, 1) of the step.
        shrink: factor of the weights.
        lost: the rounding errors of earlier steps, in u's dtype; added here, and updated in place.
    """
    target = u.to(compute_dtype(u))
    if lost is not None:
        target.add_(lost.to(target.dtype))  # cast first: a mixed sum is slow on a CPU
    if isinstance(shrink, Tensor) or shrink != 1:  # a comparison with a tensor would synchronize
        target.mul_(shrink)
    if scale is None:
        target.add_(s)
    else:
        target.addcmul_(s, scale)
    if target is not u:
        u.copy_(target)
        if lost is not None:
            lost.copy_(target.sub_(u.to(target.dtype)))

"""Bounds on how a head update changes the gradient that reaches the hidden states.

Write p = softmax(U h), q = softmax((U + S) h) and delta = H(q, p). The gradient at h under cross entropy with
target c moves from b = U'(p - e_c) to b+ = (U + S)'(q - e_c), and b+ - b splits in two ways:

    S'(q - e_c) + U'(q - p)   and   S'(p - e_c) + (U + S)'(q - p).

Every vector in brackets sums to zero, and |A'r| <= D(A) |r|_1 / 2 for those.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .arithmetic import check_nonnegative, check_real, check_vectors, compute_dtype, full_precision
from .simplex import tv_bound


@dataclass(frozen=True, slots=True)
class BackwardBound:
    """Bound on |b+ - b|, and the two decompositions it is the smaller of."""

    value: Tensor
    after: Tensor
    """D(S)(1 - q_c) + D(U) tanh(delta/4)."""
    before: Tensor
    """D(S)(1 - p_c) + D(U+S) tanh(delta/4)."""


@full_precision
def fixed_cotangent_bound(diameter: float | Tensor, r: Tensor) -> Tensor:
    """Bound |S'r| <= D(S) |r|_1 / 2 for a logit gradient r held fixed.

    Args:
        diameter: D(S).
        r: (..., V), summing to zero over its last dimension. What rounding leaves of the sum is not bounded; an r of
            nearly one sign is refused.

    Returns:
        (...), fp32 or better.
    """
    check_vectors("r", r)
    check_nonnegative("diameter", diameter)
    r = r.to(compute_dtype(r))
    mass = r.abs().sum(-1)
    if bool((r.sum(-1).abs() > 0.9 * mass).any()):  # rounding alone can take half of a small mass
        raise ValueError("r must sum to zero over its last dimension: the bound holds for softmax gradients only")
    return diameter * mass / 2


@full_precision
def backward_bound(
    p_target: Tensor,
    q_target: Tensor,
    delta: Tensor,
    *,
    diameter_step: float | Tensor,
    diameter_head: float | Tensor,
    diameter_updated: float | Tensor,
) -> BackwardBound:
    """Bound the complete change |b+ - b| of the gradient at h, softmax's own change included.

    Args:
        p_target: (...) target probability p_c before the update.
        q_target: (...) target probability q_c after it.
        delta: (...) Hilbert perturbation at h.
        diameter_step: D(S).
        diameter_head: D(U).
        diameter_updated: D(U + S).

    Returns:
        the bound and both decompositions, each (...), fp32 or better.
    """
    for name, x in (("p_target", p_target), ("q_target", q_target), ("delta", delta)):
        check_real(name, x)
        check_nonnegative(name, x)
        if name != "delta" and bool((x > 1).any()):
            raise ValueError(f"{name} must be a probability, got {float(x.max()):g}")
    for name, d in (
        ("diameter_step", diameter_step),
        ("diameter_head", diameter_head),
        ("diameter_updated", diameter_updated),
    ):
        check_nonnegative(name, d)
    dtype = compute_dtype(p_target, q_target, delta)
    variation = tv_bound(delta.to(dtype))
    after = diameter_step * (1 - q_target.to(dtype)) + diameter_head * variation
    before = diameter_step * (1 - p_target.to(dtype)) + diameter_updated * variation
    return BackwardBound(value=torch.minimum(after, before), after=after, before=before)


@full_precision
def uniform_backward_bound(
    h_norm: Tensor,
    *,
    diameter_step: float | Tensor,
    diameter_head: float | Tensor,
    diameter_updated: float | Tensor,
) -> Tensor:
    """Bound |b+ - b| <= D(S) + min(D(U), D(U+S)) tanh(D(S)|h|/4) for every target.

    The dependence on the head is unavoidable: no bound in D(S) alone exists.

    Args:
        h_norm: (...) norms |h| of the hidden states.
        diameter_step: D(S).
        diameter_head: D(U).
        diameter_updated: D(U + S).

    Returns:
        (...), fp32 or better.
    """
    check_real("h_norm", h_norm)
    for name, x in (
        ("h_norm", h_norm),
        ("diameter_step", diameter_step),
        ("diameter_head", diameter_head),
        ("diameter_updated", diameter_updated),
    ):
        check_nonnegative(name, x)
    h_norm = h_norm.to(compute_dtype(h_norm))
    zero = torch.zeros((), dtype=h_norm.dtype, device=h_norm.device)
    smaller = torch.minimum(zero + diameter_head, zero + diameter_updated)
    return diameter_step + smaller * tv_bound(diameter_step * h_norm)

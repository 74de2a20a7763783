"""Hilbert's projective distance on the probability simplex, and the changes that it bounds.

For p = softmax(z) and q = softmax(z') the distance is the variation seminorm of z - z': the largest change of any
pairwise log-odds. It bounds the change of the cross entropy for every target at once, and the total variation.

The gradient that reaches the hidden states changes too. Write p = softmax(U h), q = softmax((U + S) h) and
delta = H(q, p). Under cross entropy with target c it moves from b = U'(p - e_c) to b+ = (U + S)'(q - e_c), and b+ - b
splits in two ways:

    S'(q - e_c) + U'(q - p)   and   S'(p - e_c) + (U + S)'(q - p).

Every vector in brackets sums to zero, and |A'r| <= D(A) |r|_1 / 2 for those.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .numerics import check_nonnegative, check_real, check_vectors, compute_dtype, full_precision


@full_precision
def variation_seminorm(x: Tensor) -> Tensor:
    """Variation seminorm max_i x_i - min_i x_i over the last dimension.

    Zero exactly on constant vectors, and blind to a common shift. Takes (..., V), returns (...) in fp32 or better.
    """
    check_vectors("x", x)
    low, high = torch.aminmax(x.to(compute_dtype(x)), dim=-1)
    return high - low


@full_precision
def hilbert_distance(p: Tensor, q: Tensor, *, logits: bool = False) -> Tensor:
    """Hilbert distance max_i log(p_i/q_i) - min_i log(p_i/q_i) over the last dimension.

    Distributions with the same support are compared on it; with different supports the distance is infinite; if both
    have no mass it is nan. Only the direction of p and q matters: neither needs to sum to one.

    Args:
        p: (..., V) probabilities, or logits with ``logits=True``.
        q: the same, broadcastable against p.
        logits: take p and q as logits z and z', whose distance is ``variation_seminorm(z - z')``.

    Returns:
        (...), fp32 or better.
    """
    check_vectors("p", p)
    check_vectors("q", q)
    if p.shape[-1] != q.shape[-1]:
        raise ValueError(f"p and q must be over one vocabulary, got {p.shape[-1]} and {q.shape[-1]} entries")
    dtype = compute_dtype(p, q)
    p, q = p.to(dtype), q.to(dtype)
    if not logits:
        if bool((p < 0).any()) or bool((q < 0).any()):
            raise ValueError("p and q must be probabilities, got a negative entry: pass logits=True for logits")
        p, q = p.log(), q.log()
    ratio = p - q
    outside = (p == -torch.inf) & (q == -torch.inf)
    high = ratio.masked_fill(outside, -torch.inf).amax(-1)
    low = ratio.masked_fill(outside, torch.inf).amin(-1)
    return (high - low).masked_fill(outside.all(-1), torch.nan)


@full_precision
def tv_bound(delta: Tensor) -> Tensor:
    """Largest total variation tanh(delta/4) of two distributions at Hilbert distance delta; some pairs attain it."""
    check_real("delta", delta)
    check_nonnegative("delta", delta)
    return torch.tanh(delta.to(compute_dtype(delta)) / 4)


@full_precision
def cross_entropy_change_bound(p: Tensor, q: Tensor, *, logits: bool = False) -> Tensor:
    """Bound on |log q_c - log p_c| that holds for every target c at once: the Hilbert distance itself."""
    return hilbert_distance(p, q, logits=logits)


# The gradient at the hidden states


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
        r: (..., V), summing to zero over its last dimension but for rounding. The bound leaves out what rounding adds
            to S'r, at most |sum of r| times the longest row of S. A sum that rounding does not explain is refused.

    Returns:
        (...), fp32 or better.
    """
    check_vectors("r", r)
    check_nonnegative("diameter", diameter)
    wide = r.to(compute_dtype(r))
    mass, total = wide.abs().sum(-1), wide.sum(-1).abs()
    # An unlikely target's gradient balances to the precision of r. That of a likely one, s (p - e_c) with p_c near one,
    # errs by about s |z| eps for logits z, and its mass 2 s (1 - p_c) may be little more. The factor s, a loss scale or
    # one over the number of tokens, is at least the largest entry of the batch, and otherwise unknown. So a share of
    # the mass is tolerated too. Entries below the range of r's dtype are lost.
    share = 2.0**-20 if r.dtype == torch.float64 else 2.0**-3
    likely = 32 * torch.finfo(wide.dtype).eps * wide.abs().amax() if wide.numel() else 0.0
    lost = r.shape[-1] * torch.finfo(r.dtype).smallest_normal * torch.finfo(r.dtype).eps
    unbalanced = total > share * mass + likely + lost
    if bool(unbalanced.any()):
        raise ValueError(
            "r must sum to zero over its last dimension, as the gradient of a softmax does, got a sum of"
            f" {float(total[unbalanced][0]):.3g} for absolute values that sum to {float(mass[unbalanced][0]):.3g}"
        )
    return diameter * mass / 2


def _check_diameters(step: float | Tensor, head: float | Tensor, updated: float | Tensor) -> None:
    for name, diameter in (("step", step), ("head", head), ("updated", updated)):
        check_nonnegative(f"diameter_{name}", diameter)


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
    """
    _check_diameters(diameter_step, diameter_head, diameter_updated)
    for name, x in (("p_target", p_target), ("q_target", q_target), ("delta", delta)):
        check_real(name, x)
        check_nonnegative(name, x)
        if name != "delta" and bool((x > 1).any()):
            raise ValueError(f"{name} must be a probability, got {float(x.max()):g}")
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
    The norms |h| of the hidden states are (...), the diameters D(S), D(U) and D(U+S).
    """
    check_real("h_norm", h_norm)
    check_nonnegative("h_norm", h_norm)
    _check_diameters(diameter_step, diameter_head, diameter_updated)
    h_norm = h_norm.to(compute_dtype(h_norm))
    zero = torch.zeros((), dtype=h_norm.dtype, device=h_norm.device)
    smaller = torch.minimum(zero + diameter_head, zero + diameter_updated)
    return diameter_step + smaller * tv_bound(diameter_step * h_norm)

"""Hilbert's projective distance on the probability simplex, and the changes that it bounds.

For p = softmax(z) and q = softmax(z') the distance is the variation seminorm of z - z': the largest change
of any pairwise log-odds. It bounds the change of the cross entropy for every target at once, and, through
tanh(H/4), the total variation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .numerics import check_nonnegative, check_real, check_vectors, compute_dtype, full_precision


def _same_length(p_name: str, p: Tensor, q_name: str, q: Tensor) -> None:
    check_vectors(p_name, p)
    check_vectors(q_name, q)
    if p.shape[-1] != q.shape[-1]:
        raise ValueError(
            f"{p_name} and {q_name} must be over one vocabulary, got {p.shape[-1]} and {q.shape[-1]} entries"
        )


@full_precision
def variation_seminorm(x: Tensor) -> Tensor:
    """Variation seminorm max_i x_i - min_i x_i over the last dimension.

    Zero exactly on constant vectors, and blind to a common shift.

    Args:
        x: (..., V).

    Returns:
        (...), fp32 or better.
    """
    check_vectors("x", x)
    low, high = torch.aminmax(x.to(compute_dtype(x)), dim=-1)
    return high - low


@full_precision
def hilbert_distance(p: Tensor, q: Tensor, *, logits: bool = False) -> Tensor:
    """Hilbert distance max_i log(p_i/q_i) - min_i log(p_i/q_i) over the last dimension.

    Zero probabilities are allowed. Distributions with the same support are compared on it; with different supports the
    distance is infinite; if both have no mass it is nan. Only the direction of p and q matters, so neither needs
    to sum to one.

    Args:
        p: (..., V) probabilities, or logits with ``logits=True``.
        q: the same, broadcastable against p.
        logits: take p and q as logits z and z', whose distance is ``variation_seminorm(z - z')``.

    Returns:
        (...), fp32 or better.
    """
    _same_length("p", p, "q", q)
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
    """Largest total variation tanh(delta/4) of two distributions at Hilbert distance delta.

    Sharp: two-point distributions with likelihood ratios exp(-delta/2) and exp(delta/2) attain it.
    """
    check_real("delta", delta)
    check_nonnegative("delta", delta)
    return torch.tanh(delta.to(compute_dtype(delta)) / 4)


@full_precision
def cross_entropy_change_bound(p: Tensor, q: Tensor, *, logits: bool = False) -> Tensor:
    """Bound on |log q_c - log p_c| that holds for every target c at once: the Hilbert distance itself.

    The losses' changes range over an interval of exactly this length that contains zero.
    """
    return hilbert_distance(p, q, logits=logits)

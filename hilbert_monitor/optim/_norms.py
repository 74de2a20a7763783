"""Norms of rows and matrices whose squares may leave the range of their dtype.

In fp32 the square of a row above 1.8e19 is infinite, and that of a row below 1e-23 is zero. Divided by such a norm, the
one would not move at all, and the other too far.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import vector_norm


class _Range(NamedTuple):
    """Norms from `low` to `high` have squares in range. Times `up` or `down`, all others have too."""

    low: float
    high: float
    up: float
    down: float


_SINGLE = _Range(low=2.0**-45, high=2.0**60, up=2.0**100, down=2.0**-80)
_RANGES = {
    torch.float16: _Range(low=2.0**-12, high=2.0**14, up=2.0**12, down=2.0**-14),
    torch.bfloat16: _SINGLE,
    torch.float32: _SINGLE,
    torch.float64: _Range(low=2.0**-480, high=2.0**500, up=2.0**600, down=2.0**-600),
}


def stable_norms(X: Tensor, dim: int | tuple[int, ...], eps: float) -> tuple[Tensor, Tensor, Tensor | float]:
    """Return X, its Euclidean norms and eps, where vectors out of range have all three times a power of two.

    X / (norm + eps) is the same with or without the power. Norms far below eps are not looked at: they do not matter
    beside it. On a CPU the usual case costs one look at the norms. Elsewhere a look would wait for the device, so X is
    copied and its norms are taken twice.

    Args:
        X: any real floating-point dtype.
        dim: dimensions of a vector; they stay as dimensions of size one.
        eps: what the caller will add to the norms.
    """
    norm = vector_norm(X, dim=dim, keepdim=True)
    limits = _RANGES[X.dtype]
    low = limits.low if eps < limits.low else 0.0
    if X.numel() == 0 or (X.device.type == "cpu" and _within(norm, low, limits.high)):
        return X, norm, eps
    power = torch.ones_like(norm).masked_fill_(norm > limits.high, limits.down).masked_fill_(norm < low, limits.up)
    X = X * power
    return X, vector_norm(X, dim=dim, keepdim=True), power * eps


def _within(norm: Tensor, low: float, high: float) -> bool:
    """Return whether all norms are in [low, high]; false for a nan."""
    return bool(norm.amax() <= high) and (low == 0 or bool(norm.amin() >= low))

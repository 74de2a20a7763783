"""Norms of rows and matrices whose squares may leave the range of their dtype.

In fp32 the square of a row above 1.8e19 is infinite, and that of a row below 1e-23 is zero. Divided by such a norm, the
one would not move at all, and the other too far.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
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
    power = _power(norm, _RANGES[X.dtype], eps)
    if power is None:
        return X, norm, eps
    X = X * power
    return X, vector_norm(X, dim=dim, keepdim=True), power * eps


def norms_over_ranks(chunks: Iterable[Tensor], groups: Iterable[dist.ProcessGroup]) -> Tensor:
    """Return the norms of rows whose columns are on several ranks, (rows, 1) in fp64, by one all-reduce a group.

    The sum of squares is in fp64, where squares of fp32 are in range. Those of fp64 may not be, so there the sum goes
    with two more, of squares times a power of two.

    Args:
        chunks: the columns of this rank, a few rows at a time.
        groups: the ranks that have the other columns.
    """
    squares = torch.cat([_squares(chunk) for chunk in chunks])
    for group in groups:
        dist.all_reduce(squares, group=group)
    norms = squares.sqrt_()
    if norms.shape[1] == 1:
        return norms
    norm, huge, tiny = torch.split(norms, 1, dim=1)
    limits = _RANGES[norm.dtype]
    return norm.where(norm <= limits.high, huge / limits.down).where(~(norm < limits.low), tiny / limits.up)


def in_range(X: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor | float]:
    """Return X, its norms and eps as `stable_norms` does, where X has only some columns of what the norms are of.

    Args:
        X: (m, n).
        norm: (m, 1) in fp64, of whole rows; left as it is.
        eps: what the caller will add to the norms.
    """
    power = _power(norm, _RANGES[X.dtype], eps)
    if power is None:
        return X, norm.to(X.dtype, copy=True), eps
    return X * power.to(X.dtype), (norm * power).to(X.dtype), power.to(X.dtype) * eps


def _squares(X: Tensor) -> Tensor:
    """Return the sum of squares of each row in fp64, (rows, 1); for fp64 (rows, 3), with those times powers of two."""
    limits = _RANGES[X.dtype]
    powers = (1.0, limits.down, limits.up) if X.dtype == torch.float64 else (1.0,)
    norms = [vector_norm(X if p == 1 else X * p, dim=1, keepdim=True, dtype=torch.float64) for p in powers]
    return torch.cat(norms, dim=1).square_()


def _power(norm: Tensor, limits: _Range, eps: float) -> Tensor | None:
    """Return the power of two that brings each norm into range, or None where all are known to be."""
    low = limits.low if eps < limits.low else 0.0
    if norm.numel() == 0 or (norm.device.type == "cpu" and _within(norm, low, limits.high)):
        return None
    return torch.ones_like(norm).masked_fill_(norm > limits.high, limits.down).masked_fill_(norm < low, limits.up)


def _within(norm: Tensor, low: float, high: float) -> bool:
    """Return whether all norms are in [low, high]; false for a nan."""
    return bool(norm.amax() <= high) and (low == 0 or bool(norm.amin() >= low))

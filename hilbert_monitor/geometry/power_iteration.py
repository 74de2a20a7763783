"""A lower bound of the spectral norm that follows a matrix from step to step: one power iteration, started warm.

For any unit vector u, |A'u| is at most the largest singular value. From the direction of the last step the bound is
close after two passes over A, where A changes slowly: `spectral_norm` is tight whatever A does, and costs d times as
much.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .numerics import check_real, compute_dtype, full_precision


class LeadingDirection(NamedTuple):
    """A lower bound of the spectral norm, and where to look next time."""

    norm: Tensor
    """(...) at most |A|_2, up to rounding; zero for A = 0, nan where A is not finite."""
    right: Tensor
    """(..., n) unit vector close to a leading right singular vector, for the next call."""


@full_precision
def leading_direction(A: Tensor, start: Tensor | None = None) -> LeadingDirection:
    """Bound the largest singular value of a matrix, or of each of a stack, from below.

    Draws no random number.

    Cost: two passes over A, and none on several ranks' rows: give each rank the whole matrix.

    Args:
        A: (..., m, n).
        start: (..., n) what the last call returned, for a matrix that has moved a little since. Without it, the mean
            of the longest row and a fixed vector.
    """
    check_real("A", A)
    if A.ndim < 2 or 0 in A.shape[-2:]:
        raise ValueError(f"A must be a matrix or a stack of them, with rows and columns, got shape {tuple(A.shape)}")
    A = A.to(compute_dtype(A))
    v = first_direction(A) if start is None else start.to(A.dtype)
    u = _unit((A @ v[..., None])[..., 0])
    w = (A.mT @ u[..., None])[..., 0]
    norm = torch.linalg.vector_norm(w, dim=-1)
    found = norm > 0
    return LeadingDirection(norm, torch.where(found[..., None], _unit(w), v))


def first_direction(A: Tensor) -> Tensor:
    """Return unit vectors (..., n) to start from: between the longest row and one that no structure of A knows."""
    n = A.shape[-1]
    fixed = torch.cos(torch.arange(1, n + 1, device=A.device, dtype=A.dtype) ** 2)
    fixed = fixed / torch.linalg.vector_norm(fixed)
    norms = torch.linalg.vector_norm(A, dim=-1)  # (..., m)
    at = norms.argmax(-1)[..., None, None].expand(*A.shape[:-2], 1, n)
    longest = _unit(A.gather(-2, at)[..., 0, :])
    start: Tensor = longest + 0.5 * fixed
    return _unit(start)


def _unit(x: Tensor) -> Tensor:
    """Return vectors of norm one; one that is zero stays zero."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    unit: Tensor = x / norm.where(norm != 0, 1.0)
    return unit

"""The span of a gradient's rows, and Jung's constant at its dimension k, the rank of the centred gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ._gradient_rows import CentredGradient
from .oracle import jung_ratio

_NEGLIGIBLE = 1e-10  # of the largest eigenvalue of a sample's Gram matrix


@dataclass(frozen=True)
class GradientSpan:
    """A subspace of k dimensions that holds the rows of P G, but for what `outside` allows for.

    With Pi the projection onto it, T(G) <= T(G Pi) + J_d sum |g_i - Pi g_i|, and Jung's theorem in k dimensions bounds
    T(G Pi) by J_k sum |Pi g_i|, J_k = sqrt(k / (2 (k + 1))). It bounds the part of a flow too that its edges leave
    over: projected, its edges are no longer.
    """

    rank: int
    closing: float
    """J_k: T(R) <= J_k sum |r_i| for rows R in the subspace."""
    outside: float
    """J_d sum |g_i - Pi g_i|, in units of the scaled rows: rounding, where the rank is below min(d, V - 1)."""

    @classmethod
    def of(cls, rows: CentredGradient, unit: Tensor) -> GradientSpan:
        """Find the span of the heaviest rows, and use it where it holds all others to rounding.

        Cost: d^3, and a pass with 2 V d k multiplications where the heaviest rows do not span everything.
        """
        V, d = unit.shape
        full = max(1, min(d, V - 1))
        sample = unit[rows.norms.topk(min(V, 2 * d)).indices].double()
        size, direction = torch.linalg.eigh(sample.T @ sample)
        k = max(1, int((size > _NEGLIGIBLE * size[-1]).sum()))
        if k < full:
            basis = direction[:, -k:]
            outside = sum(
                float(torch.linalg.vector_norm(g - (g @ basis) @ basis.T, dim=1).sum()) for _, g in rows.chunks()
            )
            if outside <= 1e-5 * rows.total:
                return cls(k, _radius(k), _radius(full) * outside * (1 + 2.0**-40))
        return cls(full, _radius(full), 0.0)


def _radius(k: int) -> float:
    """Return Jung's radius sqrt(k / (2 (k + 1))) of a set of diameter one in k dimensions, rounded up."""
    return (1 + 2.0**-50) / (2 * jung_ratio(k))

"""The centred rows of a gradient, scaled to a safe range, in fp64, a chunk at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from .arithmetic import MAX_BYTES, check_rows, power_of_two_scale, row_chunks

Amount = TypeVar("Amount", float, Tensor)


def blocks(n: int, size: int = 4096) -> Iterator[slice]:
    """Yield slices of at most `size` that cover n rows."""
    for start in range(0, n, size):
        yield slice(start, min(start + size, n))


@dataclass(frozen=True)
class CentredGradient:
    """Rows g_i of P G, times a power of two that brings the largest entry near one, so that squares stay in range.

    Each row is centred as (g_i - g_0) - mean_j (g_j - g_0). Rows that lie close have exact differences, so rounding is
    relative to the distances between rows, however large a shift they have in common.
    """

    G: Tensor
    origin: Tensor
    """(d,) fp64: the first of the scaled rows, g_0."""
    mean: Tensor
    """(d,) fp64: mean of the scaled rows, less the origin."""
    scale: float
    norms: Tensor
    """(V,) fp64 norms of the rows; exactly zero where a row is the mean but for rounding."""
    total: float
    """Sum of |g_i|, with the rows whose norm counts as zero."""
    shifted: bool
    """Whether the mean was more than rounding to G's dtype explains."""
    max_bytes: int

    @classmethod
    def of(cls, G: Tensor, max_bytes: int = MAX_BYTES) -> CentredGradient:
        """Centre and scale the rows of G. Raise ValueError if an entry is not finite."""
        check_rows("G", G)
        largest = float(G.abs().amax())
        if not math.isfinite(largest):
            raise ValueError("G must be finite, got an infinity or a nan: skip this step, or look for what made it")
        scale = power_of_two_scale(largest) if largest else 1.0
        origin = G[0].double() * scale
        rows = cls(G, origin, torch.zeros_like(origin), scale, origin, 0.0, False, max_bytes)
        mean = torch.stack([chunk.sum(0) for _, chunk in rows.chunks()]).sum(0) / len(G)
        rows = replace(rows, mean=mean)
        norms = torch.cat([torch.linalg.vector_norm(chunk, dim=1) for _, chunk in rows.chunks()])
        total = float(norms.sum())
        norms[norms <= 2.0**-48 * torch.linalg.vector_norm(mean)] = 0.0
        noise = 8 * torch.finfo(G.dtype).eps / math.sqrt(len(G))  # of the mean, if the exact rows sum to zero
        shifted = float(torch.linalg.vector_norm(origin + mean)) > noise * float(norms.max())
        return replace(rows, norms=norms, total=total, shifted=shifted)

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield slices and their rows (n, d) in fp64."""
        for at, chunk in row_chunks(self.G, torch.float64, self.max_bytes, copies=4):
            yield at, (chunk * self.scale).sub_(self.origin).sub_(self.mean)

    @property
    def rounding(self) -> float:
        """Return a bound on the error of <g, x> for |x_i| <= 1: rounding of the mean and of fp64 sums."""
        entries = self.G.numel() + 64
        return entries * 2.0**-52 * (self.total + len(self.G) * float(torch.linalg.vector_norm(self.mean)))

    def bounds(self, lower: float, upper: float) -> tuple[float, float]:
        """Convert bounds in units of the scaled rows to bounds in units of G, rounded outwards; zero stays zero."""
        least, most = self.unscaled(lower), self.unscaled(upper)
        return math.nextafter(least, 0.0), math.nextafter(most, math.inf) if upper else most

    def unscaled(self, amount: Amount) -> Amount:
        """Convert an amount in units of the scaled rows to one in units of G."""
        return amount / self.scale

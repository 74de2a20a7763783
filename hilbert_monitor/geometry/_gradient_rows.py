"""The rows of a gradient, centred, scaled and in fp64, a chunk at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from .arithmetic import MAX_BYTES, check_rows, row_chunks

Amount = TypeVar("Amount", float, Tensor)


def blocks(n: int, size: int = 4096) -> Iterator[slice]:
    """Yield slices that cover n rows."""
    for start in range(0, n, size):
        yield slice(start, min(start + size, n))


@dataclass(frozen=True)
class Centred:
    """Rows g_i of P G times a power of two that brings the largest entry near one, so that squares stay in range."""

    G: Tensor
    mean: Tensor
    """(d,) fp64, of the scaled rows."""
    scale: float
    norms: Tensor
    """(V,) fp64 norms of the rows; exactly zero where a row is the mean but for rounding."""
    shifted: bool
    """Whether the mean was more than the rounding of G's own dtype."""
    max_bytes: int

    @classmethod
    def of(cls, G: Tensor, max_bytes: int = MAX_BYTES) -> Centred:
        """Centre the rows of G. ValueError, if an entry is not finite."""
        check_rows("G", G)
        largest = float(G.abs().amax())
        if not math.isfinite(largest):
            raise ValueError("G must be finite, got an infinity or a nan: skip this step, or look for what made it")
        scale = 2.0 ** max(-1000, min(1000, -math.frexp(largest)[1])) if largest else 1.0
        total = torch.zeros(G.shape[1], dtype=torch.float64, device=G.device)
        for _, chunk in row_chunks(G, torch.float64, max_bytes):
            total += (chunk * scale).sum(0)
        mean = total / len(G)
        bare = cls(G, mean, scale, total, False, max_bytes)
        norms = torch.cat([torch.linalg.vector_norm(chunk, dim=1) for _, chunk in bare.chunks()])
        size = float(torch.linalg.vector_norm(mean))
        norms[norms <= 2.0**-48 * size] = 0.0
        noise = 8 * torch.finfo(G.dtype).eps / math.sqrt(len(G))  # what rounded rows leave of a sum of zero
        return cls(G, mean, scale, norms, len(G) * size > noise * len(G) * float(norms.max()), max_bytes)

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield the rows (n, d) in fp64."""
        for at, chunk in row_chunks(self.G, torch.float64, self.max_bytes, copies=4):
            yield at, (chunk * self.scale).sub_(self.mean)

    @property
    def total(self) -> float:
        """Sum of the norms."""
        return float(self.norms.sum())

    @property
    def rounding(self) -> float:
        """Bound on what rounding, of the mean and of fp64 sums over all entries, does to <g, x> with |x_i| <= 1."""
        entries = self.G.numel() + 64
        return entries * 2.0**-52 * (self.total + len(self.G) * float(torch.linalg.vector_norm(self.mean)))

    def raw(self, amount: Amount) -> Amount:
        """Convert an amount of the scaled rows to one of the rows of G."""
        return amount / self.scale

"""Chunks of rows that fit a processor's cache."""

from __future__ import annotations

import torch
from torch import Tensor

CACHE_BYTES = 4 * 2**20
"""Size of a chunk on a CPU: what one operation writes, the next one finds in the cache.

Tried and dropped for RowNorm, at 50,257 x 512 on two cores: a thread for each half of the rows, a scratch chunk in
place of the buffer, squares and sums in place of norms, huge pages. All were slower or no faster.
"""

ACCELERATOR_BYTES = 256 * 2**20
"""Size of a chunk elsewhere, where a launch costs more than a second read; it bounds the scratch of bf16 parameters."""


def cache_chunks(A: Tensor, like: Tensor | None = None) -> tuple[Tensor, ...]:
    """Split the rows of `A` into chunks that fit the cache.

    Args:
        A: (m, n).
        like: a matrix whose row size in bytes decides the length of a chunk, so that several matrices split alike;
            by default `A` itself.

    Returns:
        views of consecutive rows.
    """
    like = A if like is None else like
    budget = CACHE_BYTES if A.device.type == "cpu" else ACCELERATOR_BYTES
    row_bytes = like[:1].numel() * like.element_size()
    return torch.split(A, max(1, budget // max(1, row_bytes)))

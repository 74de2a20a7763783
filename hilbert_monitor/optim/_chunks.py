"""Chunks of rows that fit a processor's cache, and trials that find their best size on the machine at hand."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

CACHE_BYTES = 4 * 2**20
"""Size of a chunk on a CPU: what one operation writes, the next one finds in the cache.

Tried and dropped for RowNorm, at 50,257 x 512 on two cores: a thread for each half of the rows, a scratch chunk in
place of the buffer, squares and sums, dot products or norms of parts in place of norms, huge pages. All were slower or
no faster. So were other operations that find row norms on the way: of rows in the cache, `vector_norm` takes 2.7 ms in
all, a sampled product with a diagonal mask 3.5, weight norm 4.5, `cdist` 13, layer norm 21, and numpy's `vecdot` 2.8 on
one thread. torch.compile of the step in place fails in torch 2.13 (a KeyError of inductor, where loops over rows are
fused), into new memory it takes eight times as long as fused AdamW, and average and norms alone, without the update,
take as long as all of AdamW. What is left is one native loop over the rows.
"""

ACCELERATOR_BYTES = 256 * 2**20
"""Size of a chunk elsewhere, where a launch costs more than a second read; it bounds the scratch of bf16 parameters."""


def cache_chunks(A: Tensor, like: Tensor | None = None, *, size: int | None = None) -> tuple[Tensor, ...]:
    """Split the rows of `A` into chunks that fit the cache.

    Args:
        A: (m, n).
        like: a matrix whose row size in bytes decides the length of a chunk, so that several matrices split alike;
            by default `A` itself.
        size: bytes of a chunk of it; by default what suits most machines.

    Returns:
        views of consecutive rows.
    """
    like = A if like is None else like
    budget = size or _usual(A)
    row_bytes = like[:1].numel() * like.element_size()
    return torch.split(A, max(1, budget // max(1, row_bytes)))


class ChunkTrials:
    """Finds the fastest size of chunks for a computation on large matrices, while it is done anyway.

    Which size is fastest depends on the caches, the memory and the threads: with 260 MB of cache, no chunks at all were
    1.4 times as fast as those of 4 MiB that were best with 32 MB. So the first calls for a shape try the sizes in turn,
    and later ones take the size of the shortest call. Results must not depend on the size. No clock is read for small
    matrices, for several dtypes, where a cast takes scratch of a chunk's size, on other devices than the CPU, and in
    compiled code: they have the usual size.
    """

    SIZES = (2**20, CACHE_BYTES, 2**24, 2**62)
    """Bytes of a chunk; the last one is the whole matrix."""
    ROUNDS = 4
    """How often each is tried. The first round, which also gets memory from the system, is not counted."""
    LARGE = 2**25
    """Bytes of a matrix from which trials are made."""
    CALLS = len(SIZES) * ROUNDS
    """Calls until the size is known."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[object, ...], list[float]] = {}
        self._best: dict[tuple[object, ...], int] = {}

    @contextmanager
    def size(self, A: Tensor, *others: Tensor) -> Iterator[int]:
        """Give the size of chunks for a computation on rows of `A` and others: the body of a with statement, timed."""
        large = A.device.type == "cpu" and A.numel() * A.element_size() >= self.LARGE
        if not large or any(B.dtype != A.dtype for B in others) or torch.compiler.is_compiling():
            yield _usual(A)
            return
        case = A.shape, A.dtype, torch.get_num_threads()
        if case in self._best:
            yield self._best[case]
            return
        seconds = self._seconds.setdefault(case, [])
        size = self.SIZES[len(seconds) % len(self.SIZES)]
        start = time.perf_counter()
        yield size
        seconds.append(time.perf_counter() - start)
        if len(seconds) >= self.CALLS:
            counted = seconds[len(self.SIZES) :]
            self._best[case] = self.SIZES[counted.index(min(counted)) % len(self.SIZES)]
            del self._seconds[case]


def _usual(A: Tensor) -> int:
    return CACHE_BYTES if A.device.type == "cpu" else ACCELERATOR_BYTES

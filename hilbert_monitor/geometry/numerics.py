"""Arithmetic that all functions of `hilbert_monitor.geometry` share: precision, checks of inputs, chunks of rows.

Two names are for other packages too, and `hilbert_monitor.geometry` exports them: `compute_dtype`, the precision that
results have, and `full_precision`, a decorator for a function that must compute in it. The rest is for this package.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")

MAX_BYTES = 256 * 2**20
"""Default bound on scratch memory, in bytes."""


@contextmanager
def _ieee_matmul() -> Iterator[None]:
    """Run fp32 matrix products in true fp32, whatever precision the process has set for its training."""
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    reduced = [(b, b.fp32_precision) for b in backends if b.fp32_precision not in ("none", "ieee")]
    inherited = torch.backends.fp32_precision  # type: ignore[attr-defined]  # what a backend without its own reads as
    try:
        for backend, _ in reduced:
            backend.fp32_precision = "ieee"
        yield
    finally:
        for backend, precision in reduced:
            backend.fp32_precision = "none" if precision == inherited else precision


def full_precision(function: Callable[P, T]) -> Callable[P, T]:
    """Make a function compute in full precision: no graph, no autocast, no TF32 or bf16 inside fp32 matrix products.

    The device whose autocast is switched off is that of the first tensor among the arguments.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        parts = (
            getattr(a, "rows", a) for a in (*args, *kwargs.values())
        )  # of rows on several ranks, those of this one
        tensors = [part for part in parts if isinstance(part, Tensor)]
        device = tensors[0].device.type if tensors else "cpu"
        with torch.no_grad(), torch.autocast(device, enabled=False), _ieee_matmul():
            return function(*args, **kwargs)

    return run


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """Return fp64 when any of `tensors` is fp64, else fp32."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def times_power_of_two(x: Tensor, exponents: Tensor) -> Tensor:
    """Return `x` times two to `exponents`, in two steps: `ldexp` of torch 2.9 forms the power, which can overflow."""
    half = (exponents // 2).to(x.dtype)
    return torch.ldexp(torch.ldexp(x, half), exponents - half)


def check_real(name: str, A: Tensor) -> None:
    """Raise TypeError unless A is a dense real floating-point tensor."""
    if not isinstance(A, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(A).__name__}: convert it with torch.as_tensor")
    if A.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"{name} must be a real floating-point tensor, got {A.dtype}: convert it with .float()")
    if A.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got layout {A.layout}: convert it with .to_dense()")


def check_vectors(name: str, x: Tensor) -> None:
    """Raise unless x is a real tensor with entries in its last dimension."""
    check_real(name, x)
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"{name} must have at least one entry in its last dimension, got shape {tuple(x.shape)}")


def check_nonnegative(name: str, x: float | Tensor) -> None:
    """Raise ValueError for a negative number. A nan passes: the result will be nan too."""
    smallest = float(torch.as_tensor(x).amin()) if not isinstance(x, Tensor) or x.numel() else 0.0
    if smallest < 0:
        raise ValueError(f"{name} must be zero or positive, got {smallest:g}")


def check_rows(name: str, A: Tensor) -> None:
    """Raise unless A is a non-empty (V, d) matrix of token rows."""
    check_real(name, A)
    if A.ndim != 2:
        raise ValueError(f"{name} must be a (V, d) matrix with one row a token, got shape {tuple(A.shape)}")
    if A.numel() == 0:
        raise ValueError(f"{name} must have at least one row and one column, got shape {tuple(A.shape)}")


def chunk_length(row_bytes: int, max_bytes: int, *, share: int = 1, longest: int = 4096) -> int:
    """Return how many rows to take at a time.

    Args:
        row_bytes: scratch that one row needs.
        max_bytes: bound on scratch memory; ValueError if it is too small for one row.
        share: the chunk may use one part in `share` of max_bytes.
        longest: most rows in a chunk, so that it stays in a processor's cache.
    """
    need = share * row_bytes
    if max_bytes < need:
        raise ValueError(f"max_bytes={max_bytes} is less than the {need} bytes this input needs: raise max_bytes")
    return min(longest, max_bytes // max(need, 1))


def row_chunks(A: Tensor, dtype: torch.dtype, max_bytes: int, *, copies: int = 2) -> Iterator[tuple[slice, Tensor]]:
    """Yield the rows of `A` in `dtype`, a cache-sized chunk at a time, each with its slice.

    Args:
        A: (V, d).
        dtype: of the chunks.
        max_bytes: bound on scratch memory.
        copies: how many chunks are in memory at once, this one and those that the caller makes of it.
    """
    length = chunk_length(copies * A.shape[1] * dtype.itemsize, max_bytes)
    for start in range(0, A.shape[0], length):
        at = slice(start, min(start + length, A.shape[0]))
        yield at, A[at].to(dtype)


def power_of_two_scale(x: float) -> float:
    """Return a power of two that brings x near one when multiplied, as far as fp64 holds it."""
    return 2.0 ** max(-1000, min(1000, -math.frexp(x)[1]))


def row_mean(A: Tensor, max_bytes: int = MAX_BYTES) -> Tensor:
    """Return the mean of the rows (d,), in fp32 or better, summed in fp64."""
    return (row_sum(A, max_bytes) / A.shape[0]).to(compute_dtype(A))


def row_sum(A: Tensor, max_bytes: int = MAX_BYTES) -> Tensor:
    """Return the sum of the rows (d,) in fp64."""
    total = torch.zeros(A.shape[1], dtype=torch.float64, device=A.device)
    for _, chunk in row_chunks(A, torch.float64, max_bytes):
        total += chunk.sum(0)
    return total


def nonfinite(A: Tensor, max_bytes: int = MAX_BYTES) -> Tensor:
    """Return which rows (V,) hold an infinity or a nan."""
    bad = torch.empty(A.shape[0], dtype=torch.bool, device=A.device)
    for at, chunk in row_chunks(A, A.dtype, max_bytes):
        bad[at] = ~torch.isfinite(chunk).all(1)
    return bad

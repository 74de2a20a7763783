"""Precision, and checks of inputs, that all functions of `hilbert_monitor.geometry` share."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")

MAX_BYTES = 256 * 2**20
"""Default bound on scratch memory, in bytes."""
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of the matrices that the geometry measures."""


class Interval(NamedTuple):
    """Lower and upper bound of a number."""

    lower: float
    upper: float


_lock = threading.Lock()
_users = 0
_saved: list[tuple[Any, str]] = []


@contextmanager
def _ieee_matmul() -> Iterator[None]:
    """Run fp32 matrix products in true fp32, whatever precision the process has set.

    The settings belong to the process: the first thread that enters changes them, the last one that leaves restores
    them, and products of other threads run in true fp32 for as long.
    """
    global _users
    with _lock:
        _users += 1
        if _users == 1:
            inherited = torch.backends.fp32_precision  # type: ignore[attr-defined]
            for backend in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul):  # type: ignore[attr-defined]
                if (precision := backend.fp32_precision) not in ("none", "ieee"):
                    # a backend without a setting of its own shows the inherited one
                    _saved.append((backend, "none" if precision == inherited else precision))
                    backend.fp32_precision = "ieee"
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            while not _users and _saved:
                backend, precision = _saved.pop()
                backend.fp32_precision = precision


def full_precision(function: Callable[P, T]) -> Callable[P, T]:
    """Make a function compute in full precision: no graph, no autocast, no TF32 or bf16 inside fp32 matrix products."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        device = next((a.device.type for a in (*args, *kwargs.values()) if hasattr(a, "device")), "cpu")
        with torch.no_grad(), torch.autocast(device, enabled=False), _ieee_matmul():
            return function(*args, **kwargs)

    return run


def compute_dtype(*tensors: Any) -> torch.dtype:
    """Return fp64 when any of `tensors` is fp64, else fp32."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def times_power_of_two(x: Tensor, exponents: Tensor) -> Tensor:
    """Return `x` times two to `exponents`, in two steps: `ldexp` of torch 2.9 forms the power, which can overflow."""
    half = (exponents // 2).to(x.dtype)
    return torch.ldexp(torch.ldexp(x, half), exponents - half)


def power_of_two_scale(x: float) -> float:
    """Return a power of two that brings x near one when multiplied, as far as fp64 holds it."""
    return 2.0 ** max(-1000, min(1000, -math.frexp(x)[1]))


def on_host(x: Any) -> bool:
    """Return True if `x` is on the CPU, where caches are small and reading a number costs nothing."""
    return bool(x.device.type == "cpu")


def check_real(name: str, A: Tensor) -> None:
    """Raise TypeError unless A is a dense real floating-point tensor."""
    if not isinstance(A, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(A).__name__}: convert it with torch.as_tensor")
    if A.dtype not in DTYPES:
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
    check_matrix(name, tuple(A.shape))


def check_matrix(name: str, shape: tuple[int, ...]) -> None:
    """Raise unless a shape is that of a matrix with rows and columns."""
    if len(shape) != 2:
        raise ValueError(f"{name} must be a (V, d) matrix with one row per token, got shape {shape}")
    if 0 in shape:
        raise ValueError(f"{name} must have at least one row and one column, got shape {shape}")

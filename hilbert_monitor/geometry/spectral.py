"""The spectral norm |S|_2 of a step, its largest singular value, between certified bounds.

|S|_2^2 is the largest eigenvalue of the Gram matrix A = S'S, which is only (d, d). A is summed in fp64. High powers of
it bring out a leading vector v, and v'Av / v'v is a lower bound. From above, a number m is proved to be a bound by a
Cholesky factorisation of m I - A: it exists only if no eigenvalue of A exceeds m.

Both bounds have slack for rounding. With u the unit roundoff of fp64, a sum of V products errs in spectral norm by at
most (V + 2) u |S|_F^2. A factorisation that succeeds proves that m I - A has no eigenvalue below -2 (d + 2) u d m.

The host reads the result alone: on an accelerator it waits once. So the number of powers is fixed, and all margins of m
over the lower bound are tried, from 1e-9 to 3 percent.

Tried and dropped: power iteration on four vectors that starts from the longest rows. It finds nothing where these rows
are orthogonal to the leading direction, has no bound from above, and took two to three times as long on a CPU at V =
50,257 and d = 512 to 1,024: a product with four columns is bound by memory. An eigenvalue solver in place of powers and
factorisations took longer than the sum of A.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .numerics import MAX_BYTES, check_rows, full_precision, power_of_two_scale, row_chunks
from .sharding import RowShards, row_shards
from .tension import Interval

_UNIT = 2.0**-53
_SQUARINGS = 16
_MARGINS = (2.0**-30, 2.0**-25, 2.0**-20, 2.0**-15, 2.0**-10, 2.0**-5)


@full_precision
def spectral_norm(S: Tensor | RowShards, *, max_bytes: int = MAX_BYTES) -> Interval:
    """Bracket the largest singular value of S: lower <= |S|_2 <= upper.

    The bounds agree to about eight digits, and to four where the largest singular values nearly tie. Draws no random
    number.

    Cost: V d^2 multiplications in fp64, about d / N of the product with a panel of N positions.

    Args:
        S: (V, d), any real floating-point dtype; rows may be on several ranks, which then sum (d, d) numbers.
        max_bytes: bound on scratch memory beyond three matrices of min(V, d)^2 entries in fp64.

    Returns:
        both bounds, nan if S has an infinity or a nan.
    """
    if shards := row_shards(S):
        scale, A = _sharded_gram(shards, max_bytes)
    else:
        assert not isinstance(S, RowShards)
        check_rows("S", S)
        scale = _scale(S)
        A = _gram(S if len(S) >= S.shape[1] else S.mT, scale, max_bytes)
    estimate = _rayleigh_quotient(A)
    margins = [margin + 32 * len(A) ** 2 * _UNIT for margin in _MARGINS]
    failures = [_excess(A, estimate * (1 + margin)) for margin in margins]
    trace, value, *failed = torch.stack([A.trace(), estimate, *failures]).tolist()  # the trace is |S|_F^2
    if not math.isfinite(trace):
        return Interval(math.nan, math.nan)
    if trace == 0:
        return Interval(0.0, 0.0)
    proved = [value * (1 + margin) for margin, failure in zip(margins, failed, strict=True) if not failure]
    bound = min([*proved[:1], trace]) * (1 + 2 * (len(A) + 2) * len(A) * _UNIT)
    lost = (max(S.shape) + 2 + len(A)) * _UNIT * trace
    least = max(0.0, value - lost - 2 * (len(A) + 2) * _UNIT * trace)
    down, up = math.sqrt(least) * (1 - 2.0**-50), math.sqrt(bound + lost) * (1 + 2.0**-50)
    return Interval(max(0.0, math.nextafter(down / scale, -math.inf)), math.nextafter(up / scale, math.inf))


def _scale(S: Tensor) -> float:
    """Return a power of two that keeps squares of S in the range of fp64; one for all narrower dtypes."""
    if S.dtype != torch.float64:
        return 1.0
    largest = float(S.abs().amax())
    return power_of_two_scale(largest) if math.isfinite(largest) else 1.0


def _gram(S: Tensor, scale: float, max_bytes: int) -> Tensor:
    """Return the Gram matrix S'S (d, d) of the scaled rows, in fp64."""
    A = torch.zeros(S.shape[1], S.shape[1], dtype=torch.float64, device=S.device)
    for _, chunk in row_chunks(S, torch.float64, max_bytes):
        rows = chunk if scale == 1 else chunk * scale
        A.addmm_(rows.mT, rows)
    return A


def _sharded_gram(shards: RowShards, max_bytes: int) -> tuple[float, Tensor]:
    """Return the scale, and the Gram matrix (d, d) of all ranks' rows."""
    d, scale = shards.shape[1], 1.0
    if shards.rows.dtype == torch.float64:
        largest = float(shards.ranks.max(lambda: _largest(shards.rows), 1))
        scale = power_of_two_scale(largest) if math.isfinite(largest) else 1.0
    return scale, shards.ranks.sum(lambda: _gram(shards.rows, scale, max_bytes), d, d)


def _largest(rows: Tensor) -> Tensor:
    """Return the largest magnitude (1,) of an entry, infinite where one is not finite."""
    return rows.abs().nan_to_num(torch.inf).amax()[None] if len(rows) else rows.new_zeros(1)


def _rayleigh_quotient(A: Tensor) -> Tensor:
    """Estimate the largest eigenvalue of A from below, by the vector that high powers of A bring out.

    After k squarings the estimate is within a factor d^(2^-k) of the eigenvalue, whatever the spectrum.
    """
    power = A / A.trace()
    for _ in range(_SQUARINGS):
        power = power @ power
        power /= power.trace()
    v = power.index_select(1, power.diagonal().argmax(0, keepdim=True)).squeeze(1)
    return (v @ (A @ v)) / (v @ v)


def _excess(A: Tensor, bound: Tensor) -> Tensor:
    """Return zero if a factorisation proves that no eigenvalue of A exceeds the bound, another number otherwise."""
    shifted = A.neg()
    shifted.diagonal().add_(bound)
    info: Tensor = torch.linalg.cholesky_ex(shifted).info
    return info.double()

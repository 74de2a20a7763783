"""Row norms, RowNorm and its projection, statistics of rows, and the spectral norm."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from .numerics import MAX_BYTES, Interval, check_real, compute_dtype, full_precision, power_of_two_scale
from .sharding import RowShards, RowSource, as_shards, is_dtensor, like

_UNIT = 2.0**-53
_SQUARINGS = 16
_MARGINS = (2.0**-30, 2.0**-25, 2.0**-20, 2.0**-15, 2.0**-10, 2.0**-5)


@full_precision
def center_rows(A: Tensor, *, max_bytes: int = MAX_BYTES) -> Tensor:
    """Subtract the mean row, which changes neither D(A) nor softmax(A h): P A with P = I - 11'/V.

    Args:
        A: (V, d); a DTensor may be sharded by rows. The result has its dtype and placements.
        max_bytes: bound on scratch memory beyond the result.
    """
    shards = as_shards(A, name="A")
    mean = _mean_row(shards, max_bytes)
    out = torch.empty(shards.rows.shape, dtype=A.dtype, device=A.device)
    for at, chunk in shards.rows.chunks(max_bytes, dtype=compute_dtype(A)):
        out[at] = chunk - mean
    return like(A, out)


def _mean_row(shards: RowShards, max_bytes: int) -> Tensor:
    """Return the mean (d,) of the rows of all ranks, summed in fp64."""

    def total() -> Tensor:
        total = torch.zeros(shards.shape[1], dtype=torch.float64, device=shards.device)
        for _, chunk in shards.rows.chunks(max_bytes, dtype=torch.float64):
            total += chunk.sum(0)
        return total

    return (shards.ranks.sum(total, shards.shape[1]) / shards.number).to(compute_dtype(shards.rows))


@full_precision
def row_norm(A: Tensor, *, eps: float = 0.0, max_bytes: int = MAX_BYTES) -> Tensor:
    """Divide each row by its Euclidean norm: RN(A), or its stabilised form a_i / (|a_i| + eps).

    With ``eps=0`` every nonzero row comes out with norm one, however small, and a zero row stays zero.

    Args:
        A: (V, d); a DTensor may be sharded by rows. The result has its dtype and placements.
        eps: stabiliser added to each norm; zero for the exact map.
        max_bytes: bound on scratch memory beyond the result.
    """
    _check_eps(eps)
    rows = as_shards(A, name="A").rows
    out = torch.empty(rows.shape, dtype=A.dtype, device=rows.device)
    for at, chunk in rows.chunks(max_bytes, dtype=compute_dtype(A), copies=4):
        out[at] = _unit_rows(chunk, eps)
    return like(A, out)


def _check_eps(eps: float) -> None:
    if not eps >= 0:
        raise ValueError(f"eps must be zero or positive, got {eps}")


def _unit_rows(rows: Tensor, eps: float) -> Tensor:
    """Return a_i / (|a_i| + eps) for rows a_i (n, d); a zero row stays zero."""
    largest = rows.abs().amax(1, keepdim=True)  # scaling by it keeps squares in range
    unit: Tensor = rows / largest.where(largest != 0, 1.0)
    norm = torch.linalg.vector_norm(unit, dim=1, keepdim=True)
    if eps > 0:  # of the two equal forms, the one that stays in range
        return torch.where(largest > 1, unit / (norm + eps / largest), rows / (norm * largest + eps))
    return unit.div_(norm.where(norm != 0, 1.0))


@full_precision
def projected_row_norm(A: Tensor, *, eps: float = 0.0, max_bytes: int = MAX_BYTES) -> Tensor:
    """Projected RowNorm PRN(A) = P RN(P A), the O(Vd) steepest descent of the paper.

    ``-eta/2 * projected_row_norm(G)`` minimises <G, S> over all centred S whose rows fit in one ball of
    radius eta/2; its row diameter is at most eta.

    Args:
        A: (V, d); a DTensor may be sharded by rows. The result has its dtype and placements.
        eps: stabiliser of the row norms; zero for the exact map.
        max_bytes: bound on scratch memory beyond the result and, in fp32 or better, the rows of RN(P A).
    """
    _check_eps(eps)
    shards = as_shards(A, name="A")
    mean = _mean_row(shards, max_bytes)
    unit = torch.empty(shards.rows.shape, dtype=mean.dtype, device=A.device)
    for at, chunk in shards.rows.chunks(max_bytes, dtype=mean.dtype, copies=4):
        unit[at] = _unit_rows(chunk - mean, eps)
    unit -= _mean_row(replace(shards, rows=RowSource(unit)), max_bytes)
    return like(A, unit.to(A.dtype))


class RowStatistics(NamedTuple):
    """Norms of the rows of a matrix, and of their mean."""

    longest_norm: float
    longest_row: int
    mean_norm: float
    """Mean of the norms of the rows."""
    rms_norm: float
    """Root mean square of the norms of the rows."""
    norm_of_mean: float
    """Norm of the mean row. Softmax does not see the mean row of a head."""

    @property
    def balance(self) -> float:
        """|sum of the rows| / sum of their norms: zero for the gradient of a softmax, one for equal rows."""
        return self.norm_of_mean / self.mean_norm if self.mean_norm else math.nan

    @property
    def gauge_waste(self) -> float:
        """Share V |mean row|^2 / |A|^2 of the matrix that is a common row shift; nan for zero."""
        return (self.norm_of_mean / self.rms_norm) ** 2 if self.rms_norm else math.nan


@full_precision
def row_statistics(
    A: Tensor | RowSource | RowShards, *, tokens: int | None = None, max_bytes: int = MAX_BYTES
) -> RowStatistics:
    """Measure the norms of the rows, in one pass.

    The longest row is searched among the first `tokens` only; the others are padding. All rows count elsewhere.
    """
    shards = as_shards(A, name="A")
    (V, d), rows, ids = shards.shape, shards.rows, shards.ids

    def sums() -> list[Tensor]:
        """Return the largest norm and its id, the sums of norms and their squares, and the sum of the rows, in fp64."""
        norms = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
        total = torch.zeros(d, dtype=torch.float64, device=rows.device)
        for at, chunk in rows.chunks(max_bytes, dtype=compute_dtype(rows), copies=4):
            torch.linalg.vector_norm(chunk, dim=1, dtype=torch.float64, out=norms[at])
            total += chunk.sum(0, dtype=torch.float64)
        counted = norms if tokens is None else norms.masked_fill(ids >= tokens, -1.0)
        none = ids.new_full((1,), -1)  # for a rank without rows
        longest, place = torch.cat([counted, none.double()]).max(0, keepdim=True)
        row = torch.cat([ids, none]).index_select(0, place)
        return [torch.cat([longest, row.double(), torch.stack([norms.sum(), norms.square().sum()]), total])]

    (table,) = shards.ranks.gather(sums, ((d + 4,), torch.float64))
    longest = table[:, :2].index_select(0, table[:, 0].argmax(0, keepdim=True))[0]
    total = table[:, 2:].sum(0) / V
    size = torch.linalg.vector_norm(total[2:])[None]
    norm, row, mean, square, of_mean = torch.cat([longest, total[:2], size]).tolist()  # the device is read once
    return RowStatistics(norm, int(row), mean, math.sqrt(square), of_mean)


@full_precision
def spectral_norm(S: Tensor | RowSource | RowShards, *, max_bytes: int = MAX_BYTES) -> Interval:
    """Bracket the largest singular value of S: lower <= |S|_2 <= upper; nan if S has an infinity or a nan.

    |S|_2^2 is the largest eigenvalue of the Gram matrix A = S'S (d, d), summed in fp64. High powers of A bring out a
    leading vector v, and v'Av / v'v is a lower bound. From above, a number m is proved to be a bound by a Cholesky
    factorisation of m I - A, which exists only if no eigenvalue of A exceeds m. The host reads only the result: so the
    number of powers is fixed, and all margins of m over the lower bound are tried, from 1e-9 to 3 percent.

    Both bounds have slack for rounding. With u the unit roundoff of fp64, a sum of V products errs in spectral norm by
    at most (V + 2) u |S|_F^2. A factorisation that succeeds proves that m I - A has no eigenvalue below
    -2 (d + 2) u d m. The bounds agree to about eight digits, to four where the largest singular values nearly tie.

    Cost: V d^2 multiplications in fp64, about d / N of the product with a panel of N positions.

    `max_bytes` does not count three matrices of min(V, d)^2 entries in fp64.
    """
    if isinstance(S, Tensor) and not is_dtensor(S) and S.ndim == 2 and S.shape[0] < S.shape[1]:
        S = S.mT  # the smaller Gram matrix
    shards = as_shards(S)
    scale, A = _gram(shards, max_bytes)
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
    lost = (max(shards.shape) + 2 + len(A)) * _UNIT * trace
    least = max(0.0, value - lost - 2 * (len(A) + 2) * _UNIT * trace)
    down, up = math.sqrt(least) * (1 - 2.0**-50), math.sqrt(bound + lost) * (1 + 2.0**-50)
    return Interval(max(0.0, math.nextafter(down / scale, -math.inf)), math.nextafter(up / scale, math.inf))


def _gram(shards: RowShards, max_bytes: int) -> tuple[float, Tensor]:
    """Return a power of two that keeps squares of S in the range of fp64, and S'S (d, d) of the scaled rows."""
    d, rows, scale = shards.shape[1], shards.rows, 1.0

    def largest() -> Tensor:
        parts = [chunk.abs().amax() for _, chunk in rows.chunks(max_bytes)]
        return torch.stack([*parts, torch.zeros((), dtype=rows.dtype, device=rows.device)]).nan_to_num(torch.inf).amax()

    if rows.dtype == torch.float64:  # squares of narrower dtypes are in range
        size = float(shards.ranks.max(largest, 1))
        scale = power_of_two_scale(size) if math.isfinite(size) else 1.0

    def gram() -> Tensor:
        A = torch.zeros(d, d, dtype=torch.float64, device=rows.device)
        for _, chunk in rows.chunks(max_bytes, dtype=torch.float64):
            x = chunk if scale == 1 else chunk * scale
            A.addmm_(x.mT, x)
        return A

    return scale, shards.ranks.sum(gram, d, d)


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


class LeadingDirection(NamedTuple):
    """A lower bound of the spectral norm, and where to look next time."""

    norm: Tensor
    """(...) at most |A|_2, up to rounding; zero for A = 0, nan where A is not finite."""
    right: Tensor
    """(..., n) unit vector close to a leading right singular vector, for the next call."""


@full_precision
def leading_direction(A: Tensor, start: Tensor | None = None) -> LeadingDirection:
    """Bound the largest singular value of a matrix, or of each of a stack, from below.

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
    v = _first_direction(A) if start is None else start.to(A.dtype)
    u = _unit((A @ v[..., None])[..., 0])
    w = (A.mT @ u[..., None])[..., 0]
    norm = torch.linalg.vector_norm(w, dim=-1)
    found = norm > 0
    return LeadingDirection(norm, torch.where(found[..., None], _unit(w), v))


def _first_direction(A: Tensor) -> Tensor:
    """Return unit vectors (..., n) to start from: between the longest row and one that no structure of A knows."""
    n = A.shape[-1]
    fixed = _unit(torch.cos(torch.arange(1, n + 1, device=A.device, dtype=A.dtype) ** 2))
    longest = torch.linalg.vector_norm(A, dim=-1).argmax(-1)[..., None, None].expand(*A.shape[:-2], 1, n)
    return _unit(_unit(A.gather(-2, longest)[..., 0, :]) + 0.5 * fixed)


def _unit(x: Tensor) -> Tensor:
    """Return vectors of norm one; one that is zero stays zero."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    unit: Tensor = x / norm.where(norm != 0, 1.0)
    return unit

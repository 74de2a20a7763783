"""Row operations of the LM head: centering, row normalisation, projected RowNorm, and the share of a common shift."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .numerics import MAX_BYTES, check_real, check_rows, compute_dtype, full_precision, row_chunks, row_mean, row_sum
from .sharding import RowShards, like, row_shards


@full_precision
def center_rows(A: Tensor, *, max_bytes: int = MAX_BYTES) -> Tensor:
    """Subtract the mean row: P A with P = I - 11'/V.

    Changes neither D(A) nor softmax(A h).

    Args:
        A: (V, d); a DTensor may be sharded by rows.
        max_bytes: bound on scratch memory beyond the result.

    Returns:
        (V, d) in A's dtype, with the placements of A.
    """
    if shards := row_shards(A):
        return like(A, _less(shards.rows, _mean(shards, max_bytes), max_bytes))
    check_rows("A", A)
    return _less(A, row_mean(A, max_bytes), max_bytes)


def _less(A: Tensor, mean: Tensor, max_bytes: int) -> Tensor:
    out = torch.empty_like(A, memory_format=torch.contiguous_format)
    for at, chunk in row_chunks(A, mean.dtype, max_bytes):
        out[at] = chunk - mean
    return out


def _mean(shards: RowShards, max_bytes: int) -> Tensor:
    """Return the mean row (d,) of all ranks' rows."""
    total = shards.ranks.sum(lambda: row_sum(shards.rows, max_bytes), shards.shape[1])
    return (total / shards.number).to(compute_dtype(shards.rows))


class RowSummary(NamedTuple):
    """The longest row of a matrix, and how far its rows are from summing to zero."""

    norm: float
    row: int
    balance: float
    """|sum of the rows| / sum of their norms: zero for the gradient of a softmax, one for equal rows."""


@torch.no_grad()
def summarize_rows(A: Tensor | RowShards, *, number: int | None = None) -> RowSummary:
    """Find the longest row of a matrix, and the balance of its rows.

    Cost: two passes; rows on several ranks also one gather of d + 3 numbers from each.

    Args:
        A: (V, d); its rows may be on several ranks.
        number: the longest row is one of the first so many; all of them count for the balance.
    """
    if shards := row_shards(A):
        make = lambda: [_summary(shards.rows, shards.ids, number)]  # noqa: E731
        (parts,) = shards.ranks.gather(make, ((shards.shape[1] + 3,), torch.float64))
    else:
        assert not isinstance(A, RowShards)
        check_rows("A", A)
        parts = _summary(A, torch.arange(len(A), device=A.device), number)[None]
    longest = parts[:, :2].index_select(0, parts[:, 0].argmax(0, keepdim=True))[0]
    total = parts[:, 2:].sum(0)
    norm, row, shift, norms = torch.cat([longest, torch.linalg.vector_norm(total[1:])[None], total[:1]]).tolist()
    return RowSummary(norm, int(row), shift / norms if norms else math.nan)  # read in one piece: a device waits once


def _summary(rows: Tensor, ids: Tensor, number: int | None) -> Tensor:
    """Return, in fp64, the largest norm of some rows and its id, the sum of their norms, and the sum of the rows."""
    A = rows.to(compute_dtype(rows))
    norms = torch.linalg.vector_norm(A, dim=1)  # (n,)
    counted = norms if number is None else norms.masked_fill(ids >= number, -1.0)
    longest, place = counted.max(0, keepdim=True) if len(counted) else (norms.new_tensor([-1.0]), None)
    row = norms.new_tensor([-1.0]) if place is None else ids.index_select(0, place)
    return torch.cat([longest.double(), row.double(), norms.double().sum(0, keepdim=True), A.sum(0).double()])


@full_precision
def row_norm(A: Tensor, *, eps: float = 0.0, max_bytes: int = MAX_BYTES) -> Tensor:
    """Divide each row by its Euclidean norm: RN(A), or its stabilised form a_i / (|a_i| + eps).

    With ``eps=0`` every nonzero row comes out with norm one, however small, and a zero row stays zero.

    Args:
        A: (V, d).
        eps: stabiliser added to each norm; zero for the exact map.
        max_bytes: bound on scratch memory beyond the result.

    Returns:
        (V, d) in A's dtype.
    """
    check_rows("A", A)
    if not eps >= 0:
        raise ValueError(f"eps must be zero or positive, got {eps}")
    out = torch.empty_like(A, memory_format=torch.contiguous_format)
    for at, chunk in row_chunks(A, compute_dtype(A), max_bytes, copies=4):
        largest = chunk.abs().amax(1, keepdim=True)  # scaling by it keeps squares in range
        unit = chunk / largest.where(largest != 0, 1.0)
        norm = torch.linalg.vector_norm(unit, dim=1, keepdim=True)
        if eps > 0:  # of the two equal forms, the one that stays in range
            out[at] = torch.where(largest > 1, unit / (norm + eps / largest), chunk / (norm * largest + eps))
        else:
            out[at] = unit / norm.where(norm != 0, 1.0)
    return out


@full_precision
def projected_row_norm(A: Tensor, *, eps: float = 0.0, max_bytes: int = MAX_BYTES) -> Tensor:
    """Projected RowNorm PRN(A) = P RN(P A), the O(Vd) steepest descent of the paper.

    ``-eta/2 * projected_row_norm(G)`` minimises <G, S> over all centred S whose rows fit in one ball of
    radius eta/2; its row diameter is at most eta.

    Args:
        A: (V, d).
        eps: stabiliser of the row norms; zero for the exact map.
        max_bytes: bound on scratch memory beyond the results of its three steps.

    Returns:
        (V, d) in A's dtype.
    """
    check_rows("A", A)
    centred = center_rows(A.to(compute_dtype(A)), max_bytes=max_bytes)
    unit = row_norm(centred, eps=eps, max_bytes=max_bytes)
    return center_rows(unit, max_bytes=max_bytes).to(A.dtype)


@full_precision
def gauge_waste(S: Tensor | RowShards) -> float:
    """Return the share V |mean row|^2 / |S|^2 of S that is a common row shift; nan for S = 0.

    Args:
        S: (V, d); rows may be on several ranks. Those in bf16 or fp16 are copied to fp32.
    """
    if shards := row_shards(S):
        return _sharded_waste(shards)
    assert not isinstance(S, RowShards)
    check_real("S", S)
    S = S.to(compute_dtype(S))
    shift = S.mean(0, dtype=torch.float64).norm() / torch.linalg.vector_norm(S, dtype=torch.float64)
    return len(S) * float(shift) ** 2


def _sharded_waste(shards: RowShards) -> float:
    def sums() -> Tensor:
        rows = shards.rows.to(compute_dtype(shards.rows))
        size = torch.linalg.vector_norm(rows, dtype=torch.float64).square()
        return torch.cat([rows.sum(0, dtype=torch.float64), size[None]])

    numbers = shards.ranks.sum(sums, shards.shape[1] + 1)
    shift = (numbers[:-1] / shards.number).norm() / numbers[-1].sqrt()
    return shards.number * float(shift) ** 2

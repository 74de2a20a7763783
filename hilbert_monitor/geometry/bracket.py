"""Certified bounds of the row diameter D(S) in two passes over S, and a form of them that never waits for the device.

The first pass finds the rows farthest from the centre. Among those and their farthest partners in an even sample, the
longest pair gives a midpoint. The second pass finds the rows farthest from that midpoint. The lower bound is the
longest pair of all these rows. The upper bound is the sum of the two largest distances from the centre, or from the
midpoint, whichever is smaller.

All of it is queued on the device of S without a look at a result, and ends in a few numbers. Whoever has them on the
host resolves them, now or a step later. The same numbers tell whether the rows were finite, and in a range whose
squares are safe. Rows that were not need another look, which is rare. A launch costs more than what most of these
kernels do, so the host does what it can with the numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ._cloud import PointCloud, column_extremes, in_safe_range, on_host, rounding
from ._sharded_survey import Survey, ordered, survey
from .arithmetic import MAX_BYTES, check_rows, full_precision, nonfinite
from .shards import RowShards, row_shards

OUTER = 16
"""Rows that a bracket walks from."""


@dataclass(frozen=True, slots=True)
class DiameterBracket:
    """Certified bounds lower <= D(S) <= upper.

    If S has non-finite entries, the bounds are nan if any entry is nan and inf otherwise, and `pair` holds the first
    such row and another one.
    """

    lower: float
    upper: float
    pair: tuple[int, int]
    """Token ids i < j with |s_i - s_j| = lower; (0, 0) for a single row."""
    nonfinite_rows: int
    """How many rows hold an infinity or a nan."""


@dataclass(frozen=True, slots=True)
class PendingBracket:
    """Bounds of D(S) that are still numbers on a device. It holds nothing of S.

    Example:
        >>> pending = pending_bracket(S)  # queues kernels, and waits for none
        >>> bracket = pending.resolve(pending.numbers.tolist()) or row_diameter_bracket(S)
    """

    numbers: Tensor
    """Up to 55 numbers in fp64, on the device of S: all that the host needs to know."""
    shape: tuple[int, int]
    """V and d."""
    dtype: torch.dtype
    """Of the arithmetic: fp32 or fp64."""
    scales: tuple[float, float] | None = None
    """Powers of two that bring the rows into a safe range; None if the numbers tell whether they are in it."""

    def resolve(self, numbers: list[float]) -> DiameterBracket | None:
        """Return the bounds; None if S needs another look, by `row_diameter_bracket`.

        It needs one where its rows are equal, very small, very large or not finite.

        Args:
            numbers: those of this bracket, as `tolist` gives them.
        """
        V, d = self.shape
        most = min(2, V)
        (length, place, centre), from_centre, from_midpoint = (
            numbers[:3],
            numbers[3:][:most],
            numbers[3 + most :][:most],
        )
        walk = numbers[3 + 2 * most :]
        if self.scales is None and not in_safe_range(from_centre[0], centre, d, self.dtype):
            return None
        pre, post = self.scales or (1.0, 1.0)
        reach = min(sum(from_centre), sum(from_midpoint))
        upper = max(length * fp64_rounding(d), reach * (1 + rounding(d, self.dtype)))
        pair = ordered(*(int(walk[k]) for k in divmod(int(place), len(walk))))
        return DiameterBracket(length / post / pre, rounded_up(upper / post / pre), pair, 0)


@full_precision
def pending_bracket(S: Tensor, *, max_bytes: int = MAX_BYTES) -> PendingBracket:
    """Queue the work of `row_diameter_bracket` on the device of S, and wait for none of it.

    Args:
        S: (V, d) update rows, whole, any real floating-point dtype.
        max_bytes: bound on scratch memory.

    Returns:
        numbers on the device, and how to make bounds of them once they are on the host.
    """
    check_rows("S", S)
    cloud = PointCloud.unscaled(S, max_bytes)
    return _pending(replace(cloud, centre=cloud.centre.nan_to_num(0.0, 0.0, 0.0)), None)


@full_precision
def row_diameter_bracket(S: Tensor | RowShards, *, max_bytes: int = MAX_BYTES) -> DiameterBracket:
    """Bracket D(S) in O(Vd): two passes over S, and little else.

    The upper bound is at most twice the lower bound (but for rounding), and within a few percent of it where the rows
    fill a ball, as RowNorm's do. The docstring of `bracket.py` explains the method.

    Args:
        S: (V, d) update rows, any real floating-point dtype.
        max_bytes: bound on scratch memory.

    Returns:
        lower and upper bound, and the pair that attains the lower one.
    """
    if shards := row_shards(S):
        return _sharded_bracket(shards, max_bytes)
    assert not isinstance(S, RowShards)
    pending = pending_bracket(S, max_bytes=max_bytes)
    if bracket := pending.resolve(pending.numbers.tolist()):
        return bracket
    low, high = column_extremes(S)
    if ends := trivial_diameter(S, low, high, max_bytes):
        return DiameterBracket(*ends)
    cloud = PointCloud.in_range(S, low, high, max_bytes)
    pending = _pending(cloud, (cloud.pre_scale, cloud.post_scale))
    bracket = pending.resolve(pending.numbers.tolist())
    assert bracket is not None
    return bracket


def _pending(cloud: PointCloud, scales: tuple[float, float] | None) -> PendingBracket:
    """Queue the two passes. Rows that are not finite, or out of range, spoil no more than the bounds."""
    norms = cloud.norms()
    outer = norms.topk(min(OUTER, len(cloud)))
    walk = torch.cat([outer.indices, _partners(cloud, outer.indices, norms)])
    _, place = _longest(cloud, walk)
    far = cloud.recentred(_pairs(walk).index_select(1, place)[:, 0]).norms().topk(len(walk) // 2)
    walk = torch.cat([walk, far.indices])
    length, place = _longest(cloud, walk)
    size = torch.linalg.vector_norm(cloud.centre, ord=math.inf)[None]
    sizes = torch.cat([size, outer.values[:2], far.values[:2]]).double()
    counts = torch.cat([place, walk]).double()
    numbers = torch.cat([length, counts[:1], sizes, counts[1:]])
    return PendingBracket(numbers, (len(cloud), cloud.width), cloud.dtype, scales)


def _partners(cloud: PointCloud, rows: Tensor, norms: Tensor) -> Tensor:
    """Return, for each of some rows, the index of the row farthest from it in an even sample."""
    at = cloud.sample
    far = torch.addmm(norms[at].square(), cloud.points(rows), cloud.points(at).T, alpha=-2)
    return far.argmax(1).mul_(at.step)


def _longest(cloud: PointCloud, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the fp64 length (1,) of the longest pair among n rows, and its place (1,) in the n^2 pairs of them."""
    x = cloud.given_rows(rows)
    if not on_host(x):
        length, place = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist").view(1, -1).max(1)
        return length, place
    y = x - x[0]  # a product has the longest pair sooner, and then its length needs its own look
    norm2 = y.square().sum(1)
    place = torch.addmm(norm2 + norm2[:, None], y, y.T, alpha=-2).view(1, -1).argmax(1)
    i, j = (x.index_select(0, end) for end in (place // len(x), place % len(x)))
    return torch.linalg.vector_norm(i - j, dim=1), place


def _pairs(rows: Tensor) -> Tensor:
    """Return all pairs (2, n^2) of n rows."""
    shape = (len(rows), len(rows))
    return torch.stack([rows[:, None].expand(shape), rows.expand(shape)]).view(2, -1)


def _sharded_bracket(shards: RowShards, max_bytes: int) -> DiameterBracket:
    found = survey(shards, max_bytes)
    if not isinstance(found, Survey):
        return DiameterBracket(*found)
    cloud, length = found.cloud, found.length
    upper = max(length * fp64_rounding(shards.shape[1]), found.reach * (1 + cloud.rounding))
    return DiameterBracket(cloud.row_length(length), rounded_up(cloud.row_length(upper)), ordered(*found.pair), 0)


def fp64_rounding(d: int) -> float:
    """Return by what factor a length of d entries may exceed its fp64 value, from differences or a Gram product."""
    return 1 + (d + 8) * 2.0**-51


def rounded_up(x: float) -> float:
    """Return the next larger number."""
    return math.nextafter(x, math.inf)


def trivial_diameter(
    S: Tensor, low: Tensor, high: Tensor, max_bytes: int
) -> tuple[float, float, tuple[int, int], int] | None:
    """Return bounds of D(S), a pair and the number of non-finite rows, if no search is needed; None otherwise.

    No search is needed for a single row, equal rows, and rows that are not finite.

    Args:
        S: (V, d).
        low: (d,) smallest entry of each column.
        high: (d,) largest entry of each column.
        max_bytes: bound on scratch memory.
    """
    other = min(1, len(S) - 1)
    extremes = torch.stack([low, high])
    if not bool(extremes.isfinite().all()):
        bad = nonfinite(S, max_bytes)
        value = float("nan") if bool(extremes.isnan().any()) else float("inf")
        worst = int(bad.int().argmax())
        return value, value, ordered(worst, 0 if worst else other), int(bad.sum())
    if bool((low == high).all()):
        return 0.0, 0.0, (0, other), 0
    return None

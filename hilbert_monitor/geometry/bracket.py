"""Certified bounds of the row diameter D(S) in one pass over S, and a form of them that never waits for the device.

By the triangle inequality the two largest distances from any point add up to an upper bound. A good point is close to
the centre of the smallest ball around the rows. It is estimated from an even sample: start at the mean, and average it
with the row that is farthest from the average so far, five times (Badoiu and Clarkson). Then one pass measures the
distance of every row from it.

The lower bound is the longest pair among the farthest rows and the sampled rows that are farthest from those. As the
centre is an average of sampled rows, one of them is at least as far from the farthest row as the centre is. So upper is
at most twice lower.

On one rank all work is queued on the device of S and ends in a few numbers, which the caller reads now or a step later.
They also show whether the rows were finite, and in a range whose squares are safe. Other rows are rare, and are
measured again.

Tried and dropped: the sample's mean as the only centre (upper is 1.9 times D on RowNorm increments); twelve averages,
two percent tighter on these for 28 more kernels; a second pass about the midpoint of the longest known pair.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .numerics import MAX_BYTES, compute_dtype, full_precision
from .points import (
    CentredRows,
    Scales,
    Trivial,
    from_sample,
    in_safe_range,
    mean_row,
    ordered,
    rounding,
    sample_step,
    scales_of,
)
from .sharding import RowShards, RowSource, as_shards

OUTLIERS = 16
"""Rows far from the centre, of all ranks together, that are compared with each other."""
AVERAGED, MEAN_WEIGHT = 5, 3
"""Rows that the estimate of the ball's centre averages with the mean, and how often the mean counts among them."""


@dataclass(frozen=True, slots=True)
class DiameterBracket:
    """Certified bounds lower <= D(S) <= upper: nan if an entry is nan, else inf if one is not finite."""

    lower: float
    upper: float
    pair: tuple[int, int]
    """Token ids i < j with |s_i - s_j| = lower, or the first row that is not finite and another one."""
    nonfinite_rows: int
    """Number of rows that hold an infinity or a nan."""


@dataclass(frozen=True, slots=True)
class DeferredBracket:
    """Bounds of D(S) that are still numbers on a device. It holds no row of S.

    Example:
        >>> deferred = deferred_bracket(S)  # queues kernels and does not synchronize
        >>> bracket = deferred.resolve(deferred.numbers.tolist()) or row_diameter_bracket(S)
    """

    numbers: Tensor
    """Up to 6 numbers in fp64, on the device of S."""
    shape: tuple[int, int]
    """V and d."""
    scales: Scales
    """Of the points."""

    def resolve(self, numbers: list[float]) -> DiameterBracket | None:
        """Return the bounds; None if `row_diameter_bracket` has to measure S again.

        That is so where its rows are equal, very small, very large or not finite.

        Args:
            numbers: those of this bracket, as `tolist` returns them.
        """
        if not in_safe_range(numbers[4], numbers[3], self.shape[1], self.scales.dtype):
            return None
        return self.bounds(numbers)

    def bounds(self, numbers: list[float]) -> DiameterBracket:
        """Return the bounds, for rows that are known to be in a safe range."""
        d, (length, i, j, _, *largest) = self.shape[1], numbers
        upper = max(length * fp64_rounding(d), sum(largest) * (1 + rounding(d, self.scales.dtype)))
        lower, upper = self.scales.of_rows(length), math.nextafter(self.scales.of_rows(upper), math.inf)
        return DiameterBracket(lower, upper, ordered(int(i), int(j)), 0)


@full_precision
def deferred_bracket(S: Tensor | RowSource, *, max_bytes: int = MAX_BYTES) -> DeferredBracket:
    """Queue the work of `row_diameter_bracket` on the device of S, without reading a result."""
    shards = as_shards(S)
    return _deferred(shards, Scales(compute_dtype(shards.rows)), max_bytes)


@full_precision
def row_diameter_bracket(S: Tensor | RowSource | RowShards, *, max_bytes: int = MAX_BYTES) -> DiameterBracket:
    """Bracket D(S) in O(Vd): one pass over S, and little else.

    The upper bound is at most twice the lower bound (but for rounding), and within a few percent of it where the rows
    fill a ball, as RowNorm's do. The docstring of `bracket.py` explains the method.
    """
    shards = as_shards(S)
    deferred = _deferred(shards, Scales(compute_dtype(shards.rows)), max_bytes)
    if bracket := deferred.resolve(deferred.numbers.tolist()):
        return bracket
    scales = scales_of(shards, max_bytes)
    if isinstance(scales, Trivial):  # equal rows, or rows that are not finite
        return DiameterBracket(*scales[:4])
    deferred = _deferred(shards, scales, max_bytes)
    return deferred.bounds(deferred.numbers.tolist())


def _deferred(shards: RowShards, scales: Scales, max_bytes: int) -> DeferredBracket:
    """Queue the pass. Rows that are not finite, or out of range, spoil nothing but the numbers."""
    centre = from_sample(shards, scales, max_bytes, ball_centre, shards.shape[1])
    points = CentredRows(shards.rows, centre, scales, max_bytes)
    largest, rows, ids = _outliers(shards, points)
    partners, partner_ids = _partners(shards, points, rows)
    rows, ids = torch.cat([rows, partners]), torch.cat([ids, partner_ids])
    length, ends = longest_pair(rows, ids, scales)
    size = torch.linalg.vector_norm(centre, ord=math.inf)[None]
    numbers = torch.cat([length, ids.index_select(0, ends), size, largest])  # in fp64, as the length is
    return DeferredBracket(numbers, shards.shape, scales)


def ball_centre(rows: Tensor) -> Tensor:
    """Estimate the centre (d,) of the smallest ball around rows (n, d): an average of some of them and their mean."""
    mean = mean_row(rows)
    x = rows - mean
    far = square = x.square().sum(1)  # squared distances from the average so far, less a constant
    chosen: list[Tensor] = []
    for k in range(AVERAGED):
        chosen.append(x.index_select(0, far.argmax(0, keepdim=True)))
        far = far.lerp(torch.addmv(square, x, chosen[-1][0], alpha=-2), 1 / (MEAN_WEIGHT + k + 1))
    return mean + torch.cat(chosen).sum(0) / (MEAN_WEIGHT + AVERAGED)


def _outliers(shards: RowShards, points: CentredRows) -> tuple[Tensor, Tensor, Tensor]:
    """Measure all rows from the centre.

    Returns:
        the two largest distances of all ranks, and rows (m, d) and ids (m,) of the largest ones.
    """
    k = max(2, -(-OUTLIERS // shards.ranks.number))

    def make() -> Sequence[Tensor]:
        values, places = points.norms().topk(min(k, len(points)))
        return [*shards.take(places, k), torch.cat([values, values.new_zeros(k - len(values))])]

    rows, ids, values = shards.ranks.gather(
        make, ((k, shards.shape[1]), shards.rows.dtype), ((k,), torch.int64), ((k,), points.dtype)
    )
    largest = values.flatten().topk(min(2, shards.number)).values  # of a missing row it is zero
    return largest, rows.flatten(0, 1), ids.flatten()


def _partners(shards: RowShards, points: CentredRows, outliers: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows of an even sample, and their ids, that are the farthest from one of the outliers (m, d)."""
    k = max(1, -(-OUTLIERS // shards.ranks.number))
    step = sample_step(shards, points.dtype, points.max_bytes)

    def choose() -> Tensor:
        x, sample = points.points(outliers), points.points(shards.rows.chunk(0, len(points), step))
        far = torch.addmm(sample.square().sum(1), x, sample.T, alpha=-2)
        if not far.shape[1]:
            return shards.ids[:0]
        if len(far) <= k:
            return far.argmax(1) * step
        values, places = far.add_(x.square().sum(1)[:, None]).max(1)  # the farthest of all
        return places[values.topk(k).indices] * step

    return shards.gather(choose, k)


def longest_pair(rows: Tensor, ids: Tensor, scales: Scales) -> tuple[Tensor, Tensor]:
    """Return the fp64 length (1,) of the longest pair of rows (n, d), in units of the points, and its places (2,).

    A product finds the pair; its length is measured from the rows as given. A row with the id -1 is missing.
    """
    x = rows.double()
    if scales.pre != 1.0 or scales.post != 1.0:
        x = x * scales.pre * scales.post
    y = x - x[0]
    size = y.square().sum(1).masked_fill_(ids < 0, -torch.inf)
    _, place = torch.addmm(size + size[:, None], y, y.T, alpha=-2).view(1, -1).max(1)
    ends = torch.cat([place // len(x), place % len(x)])
    a, b = x.index_select(0, ends)
    return torch.linalg.vector_norm(a - b)[None], ends


def fp64_rounding(d: int) -> float:
    """Return the factor by which a length of d entries may exceed its fp64 value."""
    return 1 + (d + 8) * 2.0**-51

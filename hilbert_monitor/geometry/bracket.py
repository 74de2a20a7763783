"""Certified bounds of the row diameter D(S) in two passes over S, and a form of them that never waits for the device.

1. The first pass finds the rows farthest from the centre. The longest pair among those, and rows of an even sample that
   are far from them, has a midpoint.
2. The second pass finds the rows farthest from that midpoint.

The lower bound is the longest pair of all these rows. The upper bound is the sum of the two largest distances from the
centre, or from the midpoint, whichever is smaller: by the triangle inequality any point serves.

Every rank runs this on its own rows; a plain tensor is a shard on one rank. There all of it is queued on the device
of S without a look at a result, and ends in a few numbers. Whoever has them on the host resolves them, now or a step
later. The same numbers tell whether the rows were finite, and in a range whose squares are safe. Rows that were not are
measured again, which is rare.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ._cloud import PointCloud, centred, in_range, in_safe_range, on_host, ordered, padded, points, rounding
from .numerics import MAX_BYTES, check_rows, compute_dtype, full_precision
from .sharding import RowShards, row_shards

OUTLIERS = 16
"""Outlying rows that all ranks together show each other at a time."""
SAMPLE = 2048
"""Rows among which partners of the outlying ones are looked for."""


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
    """Up to 8 numbers in fp64, on the device of S: all that the host needs to know."""
    shape: tuple[int, int]
    """V and d."""
    dtype: torch.dtype
    """Of the arithmetic: fp32 or fp64."""
    scales: tuple[float, float] | None = None
    """Powers of two that bring the rows into a safe range; None if the numbers tell whether they are in it."""

    def resolve(self, numbers: list[float]) -> DiameterBracket | None:
        """Return the bounds; None if S has to be measured again, by `row_diameter_bracket`.

        That is so where its rows are equal, very small, very large or not finite.

        Args:
            numbers: those of this bracket, as `tolist` gives them.
        """
        d, (length, i, j, centre, *largest) = self.shape[1], numbers
        from_centre, from_midpoint = largest[: len(largest) // 2], largest[len(largest) // 2 :]
        if self.scales is None and not in_safe_range(from_centre[0], centre, d, self.dtype):
            return None
        pre, post = self.scales or (1.0, 1.0)
        reach = min(sum(from_centre), sum(from_midpoint))
        upper = max(length * fp64_rounding(d), reach * (1 + rounding(d, self.dtype)))
        return DiameterBracket(length / post / pre, rounded_up(upper / post / pre), ordered(int(i), int(j)), 0)


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
    return _unscaled(RowShards.whole(S), max_bytes)


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
    shards = row_shards(S)
    if shards is None:
        assert not isinstance(S, RowShards)
        check_rows("S", S)
        shards = RowShards.whole(S)
    pending = _unscaled(shards, max_bytes)
    if bracket := pending.resolve(pending.numbers.tolist()):
        return bracket
    cloud = in_range(shards, max_bytes)
    if not isinstance(cloud, PointCloud):  # equal rows, or rows that are not finite
        return DiameterBracket(*cloud[:4])
    pending = _pending(shards, cloud, (cloud.pre_scale, cloud.post_scale))
    bracket = pending.resolve(pending.numbers.tolist())
    assert bracket is not None
    return bracket


def _unscaled(shards: RowShards, max_bytes: int) -> PendingBracket:
    """Queue the two passes on rows as they are. Rows that are not finite, or out of range, spoil the numbers alone."""
    cloud = centred(shards, compute_dtype(shards.rows), 1.0, 1.0, max_bytes)
    return _pending(shards, replace(cloud, centre=cloud.centre.nan_to_num(0.0, 0.0, 0.0)), None)


def _pending(shards: RowShards, cloud: PointCloud, scales: tuple[float, float] | None) -> PendingBracket:
    """Queue the two passes."""
    norms, from_centre, rows, ids = _outliers(shards, cloud)
    more, more_ids = _partners(shards, cloud, norms, rows)
    rows, ids = torch.cat([rows, more]), torch.cat([ids, more_ids])
    some_missing = not shards.ranks.is_single or shards.number < OUTLIERS
    _, ends = longest_pair(rows, ids, cloud, some_missing=some_missing)
    midpoint = (rows.index_select(0, ends).to(cloud.dtype) * cloud.pre_scale).mean(0)
    _, from_midpoint, more, more_ids = _outliers(shards, replace(cloud, centre=midpoint))
    rows, ids = torch.cat([rows, more]), torch.cat([ids, more_ids])
    length, ends = longest_pair(rows, ids, cloud, some_missing=some_missing)
    size = torch.linalg.vector_norm(cloud.centre, ord=math.inf)[None]
    sizes = torch.cat([size, from_centre, from_midpoint]).double()
    numbers = torch.cat([length, ids.index_select(0, ends).double(), sizes])
    return PendingBracket(numbers, shards.shape, cloud.dtype, scales)


def _outliers(shards: RowShards, cloud: PointCloud) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Measure all rows from the centre: one pass.

    Returns:
        norms (n,) of this rank's points, the two largest of all ranks, and rows (m, d) and ids (m,) of the largest.
    """
    k = max(2, -(-OUTLIERS // shards.ranks.number))
    local = []

    def make() -> Sequence[Tensor]:
        norms = cloud.norms()
        local.append(norms)
        values, places = norms.topk(min(k, len(norms)))
        return padded(shards, places, k, values)

    rows, ids, values = shards.ranks.gather(
        make, ((k, shards.shape[1]), shards.rows.dtype), ((k,), torch.int64), ((k,), cloud.dtype)
    )
    largest = values.flatten().topk(min(2, shards.number)).values  # of a missing row it is zero
    return local[0], largest, rows.flatten(0, 1), ids.flatten()


def _partners(shards: RowShards, cloud: PointCloud, norms: Tensor, outliers: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows of an even sample, and their ids, that are the farthest from one of the outliers (m, d)."""
    k = max(1, -(-OUTLIERS // shards.ranks.number))
    step = -(-shards.number // SAMPLE)

    def make() -> Sequence[Tensor]:
        x = points(cloud, outliers)
        far = torch.addmm(norms[::step].square(), x, cloud.points(slice(None, None, step)).T, alpha=-2)
        if not far.shape[1]:
            return padded(shards, shards.ids[:0], k)
        if len(far) > k:  # the farthest of all, by their whole distance
            far, places = far.add_(x.square().sum(1)[:, None]).max(1)
            places = places[far.topk(k).indices]
        else:
            places = far.argmax(1)
        return padded(shards, places * step, k)

    rows, ids = shards.ranks.gather(make, ((k, shards.shape[1]), shards.rows.dtype), ((k,), torch.int64))
    return rows.flatten(0, 1), ids.flatten()


def longest_pair(rows: Tensor, ids: Tensor, cloud: PointCloud, *, some_missing: bool = True) -> tuple[Tensor, Tensor]:
    """Return the fp64 length (1,), in the units of the cloud, of the longest pair of rows (n, d), and its places (2,).

    Args:
        rows: as they were given.
        ids: (n,) which rows of the matrix they are; -1 where a row is missing.
        cloud: has the scales.
        some_missing: False where no id can be -1, which saves a few kernels.
    """
    x = rows.double()
    if cloud.pre_scale != 1.0:
        x = x * cloud.pre_scale * cloud.post_scale
    if on_host(x):  # a product finds the longest pair sooner, and its length is measured by itself
        y = x - x[0]
        norm2 = y.square().sum(1)
        apart = torch.addmm(norm2 + norm2[:, None], y, y.T, alpha=-2)
    else:
        apart = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist")
    if some_missing:
        missing = ids < 0
        apart = apart.masked_fill_(missing | missing[:, None], 0.0)
    length, place = apart.view(1, -1).max(1)
    ends = torch.cat([place // len(x), place % len(x)])
    if on_host(x):
        a, b = x.index_select(0, ends)
        length = torch.linalg.vector_norm(a - b)[None]
    return length, ends


def fp64_rounding(d: int) -> float:
    """Return by what factor a length of d entries may exceed its fp64 value, from differences or a Gram product."""
    return 1 + (d + 8) * 2.0**-51


def rounded_up(x: float) -> float:
    """Return the next larger number."""
    return math.nextafter(x, math.inf)

"""The bracket of the row diameter where rows are on several ranks: two passes over them.

No rank sees all rows. Each surveys its own, and tells the others the sum of a sample, then a few outlying rows, three
times. Every rank sees the same tables and comes to the same decisions, so that all make the same collectives and return
the same answer. Bounds and slacks are those of `diameter.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from ._cloud import SAMPLE, PointCloud, column_extremes, scales
from .arithmetic import compute_dtype, nonfinite
from .shards import RowShards

OUTER = 16
"""Outlying rows that all ranks together show each other at a time."""

Ends = tuple[float, float, tuple[int, int], int]
"""Bounds of D(S), a pair, the number of rows that are not finite."""


@dataclass
class Outliers:
    """Rows that all ranks know."""

    rows: Tensor
    """(n, d) as they were given."""
    ids: Tensor
    """(n,)."""

    def joined(self, other: Outliers) -> Outliers:
        """Return these and others."""
        return Outliers(torch.cat([self.rows, other.rows]), torch.cat([self.ids, other.ids]))

    def longest(self, cloud: PointCloud) -> tuple[float, tuple[int, int]]:
        """Return the length of their longest pair in fp64, in the units of the cloud, and its places."""
        x = points(cloud.double(), self.rows)
        norm2 = x.square().sum(1)
        far = int(torch.addmm(norm2 + norm2[:, None], x, x.T, alpha=-2).argmax())
        i, j = far // len(x), far % len(x)
        a, b = (self.rows[k].double() * cloud.pre_scale for k in (i, j))
        return float(torch.linalg.vector_norm((a - b) * cloud.post_scale)), (i, j)


@dataclass
class Survey:
    """What the bracket is made of."""

    cloud: PointCloud
    """The rows of this rank."""
    length: float
    """Of the longest pair among the outliers, in the units of the cloud."""
    pair: tuple[int, int]
    reach: float
    """Sum of the two largest distances from the centre, or from the midpoint of that pair, whichever is smaller."""


def ordered(i: int, j: int) -> tuple[int, int]:
    """Return a pair of ids, the smaller one first."""
    return (i, j) if i < j else (j, i)


def points(cloud: PointCloud, rows: Tensor) -> Tensor:
    """Return rows (n, d) of any rank as points of a cloud."""
    return (rows.to(cloud.dtype) * cloud.pre_scale - cloud.centre) * cloud.post_scale


def survey(shards: RowShards, max_bytes: int) -> Survey | Ends:
    """Make the two passes of the bracket; or return the answer where no search is needed."""
    cloud = centred(shards, compute_dtype(shards.rows), 1.0, 1.0, max_bytes)
    norms, top, outer = _outliers(shards, cloud)
    if not cloud.needs_no_scale(top):
        answer = in_range(shards, max_bytes)
        if not isinstance(answer, PointCloud):
            return answer
        cloud = answer
        norms, top, outer = _outliers(shards, cloud)
    walk = outer.joined(_partners(shards, cloud, norms, outer))
    _, ends = walk.longest(cloud)
    midpoint = (walk.rows[list(ends)].to(cloud.dtype) * cloud.pre_scale).mean(0)
    _, from_midpoint, more = _outliers(shards, replace(cloud, centre=midpoint))
    walk = walk.joined(more)
    length, (i, j) = walk.longest(cloud)
    reach = min(float(two.double().sum()) for two in (top, from_midpoint))
    return Survey(cloud, length, (int(walk.ids[i]), int(walk.ids[j])), reach)


def centred(shards: RowShards, dtype: torch.dtype, pre: float, post: float, max_bytes: int) -> PointCloud:
    """Return the rows of this rank as points about the mean of an even sample of all ranks' rows."""

    def total() -> Tensor:
        sample = sample_of(shards, dtype, max_bytes)
        sample = sample if pre == 1.0 else sample.double() * pre  # a copy costs more than the sum
        total = sample.sum(0, dtype=torch.float64)
        return torch.cat([total, total.new_tensor([len(sample)])])

    numbers = shards.ranks.sum(total, shards.shape[1] + 1)
    return PointCloud(shards.rows, (numbers[:-1] / numbers[-1]).to(dtype), pre, post, max_bytes)


def sample_of(shards: RowShards, dtype: torch.dtype, max_bytes: int) -> Tensor:
    """Return an even sample of this rank's rows: its share of one of all rows."""
    return shards.rows[:: sample_step(shards, dtype, max_bytes)]


def sample_step(shards: RowShards, dtype: torch.dtype, max_bytes: int) -> int:
    """Return of how many rows one is in a sample that fits the memory bound with room to work on it in a dtype."""
    V, d = shards.shape
    size = min(SAMPLE, max(1, max_bytes // (16 * d * dtype.itemsize)))
    return -(-V // size)


def _outliers(shards: RowShards, cloud: PointCloud) -> tuple[Tensor, Tensor, Outliers]:
    """Return the norms of this rank's points, the two largest of all ranks, and the rows of the largest."""
    k = max(2, -(-OUTER // shards.ranks.number))
    local = []

    def make() -> Sequence[Tensor]:
        norms = cloud.norms()
        local.append(norms)
        values, places = norms.topk(min(k, len(norms)))
        return padded(shards, places, k, values)

    rows, ids, values = shards.ranks.gather(
        make, ((k, shards.shape[1]), shards.rows.dtype), ((k,), torch.int64), ((k,), cloud.dtype)
    )
    shown = ids >= 0
    return local[0], values[shown].topk(min(2, int(shown.sum()))).values, Outliers(rows[shown], ids[shown])


def padded(shards: RowShards, places: Tensor, k: int, *columns: Tensor) -> Sequence[Tensor]:
    """Return k rows, their ids, and columns beside them; an id of -1 means that there is none."""
    missing = k - len(places)
    rows = pad(shards.rows.index_select(0, places), (0, 0, 0, missing))
    return [rows, pad(shards.ids[places], (0, missing), value=-1), *(pad(c, (0, missing)) for c in columns)]


def _partners(shards: RowShards, cloud: PointCloud, norms: Tensor, outer: Outliers) -> Outliers:
    """Return rows of each rank's sample that are farthest from an outlier."""
    k = max(1, -(-OUTER // shards.ranks.number))
    V, d = shards.shape

    def make() -> Sequence[Tensor]:
        step = -(-V // SAMPLE)
        x = points(cloud, outer.rows)
        far = torch.addmm(norms[::step].square(), x, cloud.points(slice(None, None, step)).T, alpha=-2)
        farthest = (far + x.square().sum(1)[:, None]).amax(0)
        return padded(shards, farthest.topk(min(k, len(farthest))).indices * step, k)

    rows, ids = shards.ranks.gather(make, ((k, d), shards.rows.dtype), ((k,), torch.int64))
    return Outliers(rows[ids >= 0], ids[ids >= 0])


def in_range(shards: RowShards, max_bytes: int, dtype: torch.dtype | None = None) -> PointCloud | Ends:
    """Centre and scale rows by the extremes of their columns; or return the answer where no search is needed."""
    V, d = shards.shape

    def extremes() -> Tensor:
        rows = shards.rows if len(shards.rows) else shards.rows.new_full((1, d), -torch.inf)
        low, high = column_extremes(rows)
        low = low if len(shards.rows) else -low
        has_nan = (low.isnan() | high.isnan()).any()
        return torch.cat(
            [
                high.double().nan_to_num(0.0, torch.inf, -torch.inf),
                -low.double().nan_to_num(0.0, torch.inf, -torch.inf),
                has_nan[None].double(),
            ]
        )

    numbers = shards.ranks.max(extremes, 2 * d + 1)
    high, low, has_nan = numbers[:d], -numbers[d:-1], bool(numbers[-1])
    other = min(1, V - 1)
    if has_nan or not bool(numbers.isfinite().all()):

        def bad_rows() -> Sequence[Tensor]:
            ids = shards.ids[nonfinite(shards.rows, max_bytes)]
            return [torch.stack([ids.new_tensor(len(ids)), ids.amin() if len(ids) else ids.new_tensor(V)])]

        (bad,) = shards.ranks.gather(bad_rows, ((2,), torch.int64))
        worst, value = int(bad[:, 1].amin()), math.nan if has_nan else math.inf
        return value, value, ordered(worst, 0 if worst else other), int(bad[:, 0].sum())
    if bool((low == high).all()):
        return 0.0, 0.0, (0, other), 0
    return centred(shards, *scales(low, high, dtype or compute_dtype(shards.rows)), max_bytes)

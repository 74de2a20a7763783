"""The row diameter D(S) = max_{i<j} |s_i - s_j|: an O(Vd) bracket, and the exact value with its proof.

An all-pairs search costs V^2 d / 2 multiplications. The exact search here grows about as V d on the
increments that optimizers make, because almost every pair can be *proved* shorter than one that is known:

1. Survey. Centre the rows and keep, for each, its norm r_i and its coordinates z_i along a few leading
   directions. What the directions leave out has norm rho_i = sqrt(r_i^2 - |z_i|^2), so
   |s_i - s_j|^2 <= r_i^2 + r_j^2 - 2 z_i.z_j + 2 rho_i rho_j.
2. Walk. Go from outlying rows to their farthest partners in the survey. The longest pair met has length L.
3. Hubs. A pair of length L has one end with r_i >= L/2, a hub, and the other with r_j >= L - r_max. The mean
   of an increment's rows sits in the mass of rare tokens, so hubs are few.
4. Screen. The bound of step 1 is one matrix product of hubs against partners. Hubs and partners that never
   reach L are dropped; the rest are screened again with more directions.
5. Prove. Hubs that are left, the most promising first, meet their partners in full; pairs that come within
   rounding of L are measured in fp64.

Every comparison has a slack for rounding, so a dropped pair is shorter than L in exact arithmetic. One part of the
slack was measured, not proved: how far the directions are from orthonormal (at most half of what the slack allows).
Where nothing can be dropped (points on a sphere) the search gives a screen up after a sample of hubs, and step 5 is a
tiled all-pairs search.

Tried and dropped: no distinction between hubs and partners, which drops almost no row where one outlier is far from
everything; and one slack for all pairs, scaled by the largest norm, which keeps two to nine times the hubs that a slack
by the pair's own norms keeps. Not built: a tiling of the rows, which could drop blocks of pairs where hubs are many, as
late in training with a small vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ._cloud import PointCloud, column_extremes
from ._screen import largest_bounds, screen_tables
from ._sharded_search import ShardedSearch, search
from ._sharded_survey import Survey, ordered, survey
from .arithmetic import MAX_BYTES, check_rows, full_precision, nonfinite
from .shards import RowShards, row_shards


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
class RowDiameter(DiameterBracket):
    """The exact row diameter: `value` is the fp64 length of `pair`, `upper` differs by fp64 rounding alone."""

    pairs_screened: int
    """Bounds computed along leading directions; a pair that is screened again counts again."""
    pairs_computed: int
    """Distances computed in all d dimensions; a pair that is computed twice counts twice."""

    @property
    def value(self) -> float:
        """D(S)."""
        return self.lower


_OUTER = 16  # rows that a bracket walks from
_SURVEY_RANK = 16
_SCREEN_RANKS = (8, 16, 64)
_ROW_BYTES = 96  # scratch a row of S needs beside its coordinates
_MEET_ROWS, _MEET_COLUMNS = 2048, 1024  # the largest tile of full distances
_MANY_HUBS = 2048  # from here on a screen is tried on a sample first
_SMALL = 512  # up to this many rows, all pairs cost less than a survey
_FEW = 4096  # up to this many near-longest pairs of a tile are measured one by one


@full_precision
def row_diameter_bracket(S: Tensor | RowShards, *, max_bytes: int = MAX_BYTES) -> DiameterBracket:
    """Bracket D(S) in O(Vd): two passes over S, and little else.

    The first pass finds the rows farthest from the centre. Among those and their farthest partners in an even sample,
    the longest pair gives a midpoint. The second pass finds the rows farthest from that midpoint. The lower bound is
    the longest pair of all these rows. The upper bound is the sum of the two largest distances from the centre, or from
    the midpoint, whichever is smaller. It is at most twice the lower bound (but for rounding), and within a few percent
    of it where the rows fill a ball, as RowNorm's do.

    Args:
        S: (V, d) update rows, any real floating-point dtype.
        max_bytes: bound on scratch memory.

    Returns:
        lower and upper bound, and the pair that attains the lower one.
    """
    if shards := row_shards(S):
        return _sharded_bracket(shards, max_bytes)
    assert not isinstance(S, RowShards)
    check_rows("S", S)
    cloud = PointCloud.unscaled(S, max_bytes)
    from_centre = cloud.norms()
    if not cloud.needs_no_scale(from_centre):
        low, high = column_extremes(S)
        if ends := trivial_diameter(S, low, high, max_bytes):
            return DiameterBracket(*ends)
        cloud = PointCloud.in_range(S, low, high, max_bytes)
        from_centre = cloud.norms()
    outer = from_centre.topk(min(_OUTER, len(S))).indices
    walk = torch.cat([outer, _partners(cloud, outer, from_centre)])
    from_midpoint = cloud.recentred(*_longest(cloud, walk)).norms()
    i, j = _longest(cloud, torch.cat([walk, from_midpoint.topk(min(_OUTER, len(S))).indices]))
    reach = torch.stack([norms.topk(2).values.double().sum() for norms in (from_centre, from_midpoint)]).amin()
    length, reach_value, *pair = torch.stack(
        [cloud.pair_lengths(i[None], j[None])[0], reach, i.double(), j.double()]
    ).tolist()
    lower, upper = length, max(length * _fp64_rounding(S), reach_value * (1 + cloud.rounding))
    return DiameterBracket(cloud.row_length(lower), _up(cloud.row_length(upper)), ordered(*map(int, pair)), 0)


@full_precision
def row_diameter(S: Tensor | RowShards, *, max_bytes: int = MAX_BYTES) -> RowDiameter:
    """Compute D(S) = max_{i<j} |s_i - s_j| exactly, with a pair that attains it.

    Where several pairs tie, any one of them is returned. The cost grows about as V d on optimizers' increments, and is
    that of an all-pairs search at worst; the docstring of `diameter.py` explains the method.

    Args:
        S: (V, d) update rows, any real floating-point dtype.
        max_bytes: bound on scratch memory.

    Returns:
        the value (fp64, from the rows as given), the pair, and how many pairs were screened and computed.
    """
    if shards := row_shards(S):
        return _sharded_diameter(shards, max_bytes)
    assert not isinstance(S, RowShards)
    check_rows("S", S)
    low, high = column_extremes(S)
    if ends := trivial_diameter(S, low, high, max_bytes):
        return RowDiameter(*ends, 0, 0)
    found = _Search(PointCloud.in_range(S, low, high, max_bytes))
    found.run()
    value = found.cloud.row_length(found.length)
    return RowDiameter(value, _up(value * _fp64_rounding(S)), found.pair, 0, found.screened, found.computed)


def _sharded_bracket(shards: RowShards, max_bytes: int) -> DiameterBracket:
    found = survey(shards, max_bytes)
    if not isinstance(found, Survey):
        return DiameterBracket(*found)
    cloud, length = found.cloud, found.length
    upper = max(length * _fp64_rounding(shards.rows), found.reach * (1 + cloud.rounding))
    return DiameterBracket(cloud.row_length(length), _up(cloud.row_length(upper)), ordered(*found.pair), 0)


def _sharded_diameter(shards: RowShards, max_bytes: int) -> RowDiameter:
    found = search(shards, max_bytes)
    if not isinstance(found, ShardedSearch):
        return RowDiameter(*found, 0, 0)
    value = found.cloud.row_length(found.length)
    upper = _up(value * _fp64_rounding(shards.rows))
    return RowDiameter(value, upper, ordered(*found.pair), 0, found.screened, found.computed)


def _fp64_rounding(S: Tensor) -> float:
    """Return the factor by which a length may exceed its fp64 value, from differences or from a Gram product."""
    return 1 + (S.shape[1] + 8) * 2.0**-51


def _up(x: float) -> float:
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


def _partners(cloud: PointCloud, rows: Tensor, norms: Tensor) -> Tensor:
    """Return, for each of some rows, the index of the row farthest from it in an even sample."""
    at = cloud.sample
    far = torch.addmm(norms[at].square(), cloud.points(rows), cloud.points(at).T, alpha=-2)
    return far.argmax(1).mul_(at.step)


def _longest(cloud: PointCloud, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices of the longest pair among a few rows, as scalar tensors on their device."""
    x = cloud.points(rows).double()
    norm2 = x.square().sum(1)
    longest = torch.addmm(norm2 + norm2[:, None], x, x.T, alpha=-2).argmax()
    i, j = rows[torch.stack([longest // len(rows), longest % len(rows)])]  # rows[longest // n] would wait for it
    return i, j


class _Search:
    """Branch and bound for the longest pair. After `_sort` a row is identified by its rank in decreasing norm."""

    def __init__(self, cloud: PointCloud) -> None:
        self.cloud = cloud
        self.length = 0.0  # of the longest pair so far, in the cloud's units
        self.pair = (0, 1)
        self.screened = 0
        self.computed = 0

    def run(self) -> None:
        cloud = self.cloud
        ranks = self._ranks()
        rank = max([k for k in ranks if k <= _SURVEY_RANK], default=0)
        norms, coordinates = cloud.survey(cloud.leading_directions(rank))
        norm2 = norms.square_()
        self._walk(norm2, coordinates)
        self._sort(norm2)
        hubs = (self.radius >= self.length / 2).nonzero().squeeze(1)
        partners = torch.arange(len(self.order), device=norm2.device)
        bounds = torch.full_like(self.radius[hubs], torch.inf)
        for k in ranks:
            if k <= rank:
                z = [coordinates.index_select(0, self.order[side])[:, :k] for side in (hubs, partners)]
            elif len(hubs) * len(partners) <= k * (len(hubs) + len(partners)):
                break  # to compute the remaining pairs costs less than to project their rows
            else:
                directions = cloud.leading_directions(k)
                z = [cloud.survey(directions, self.order[side])[1] for side in (hubs, partners)]
            hubs, partners, bounds = self._screen(hubs, partners, bounds, *z)
        self._prove(hubs, partners, bounds)

    def _ranks(self) -> list[int]:
        """Return the numbers of directions to screen along: none for few rows, and only what fits the memory bound."""
        V, d = self.cloud.S.shape
        row_bytes = 2 * self.cloud.budget // V
        if row_bytes < _ROW_BYTES:
            need = 2 * _ROW_BYTES * V
            raise ValueError(f"max_bytes={self.cloud.max_bytes} is too little for {V} rows: give at least {need}")
        affordable = (row_bytes - _ROW_BYTES) // (8 * self.cloud.dtype.itemsize)
        return [k for k in _SCREEN_RANKS if k <= min(affordable, d // 2)] if V > _SMALL else []

    def _offer(self, i: Tensor, j: Tensor) -> None:
        """Measure pairs of rows in fp64 and keep the longest."""
        self.computed += len(i)
        lengths = self.cloud.pair_lengths(i, j)
        longest, best = lengths.max(0, keepdim=True)
        length, a, b = torch.cat([longest, i[best].double(), j[best].double()]).tolist()
        if length > self.length:
            self.length, self.pair = length, ordered(int(a), int(b))

    def _walk(self, norm2: Tensor, z: Tensor) -> None:
        """Find a long pair: go from outlying rows to their farthest partners in the survey, twice."""
        outer = norm2.topk(min(8, len(norm2))).indices
        seeds = torch.cat([outer, z[:, :8].argmax(0), z[:, :8].argmin(0)])
        for _ in range(2):
            estimate = torch.addmm(norm2, z[seeds], z.T, alpha=-2)  # (seeds, V), less a constant in each row
            partners = estimate.topk(min(4, len(norm2)), dim=1).indices
            self._offer(seeds.repeat_interleave(partners.shape[1]), partners.flatten())
            seeds = partners[:, 0]

    def _sort(self, norm2: Tensor) -> None:
        """Sort the rows that can be an end of a longer pair by decreasing norm. Norms are rounded up."""
        self.norm2 = norm2
        radius = norm2.sqrt().mul_(1 + self.cloud.rounding)
        able = (radius >= self.length - radius.max()).nonzero().squeeze(1)
        self.radius, order = radius[able].sort(descending=True)
        self.order = able[order]

    def _ranges(self, hubs: Tensor, partners: Tensor) -> list[list[int]]:
        """Return, for each hub, the range of later partners that could be far enough by norms: [starts, ends]."""
        start = torch.searchsorted(partners, hubs, right=True)
        reach = self.radius[hubs] - self.length
        end = torch.searchsorted(-self.radius[partners], reach, right=True)
        return torch.stack([start, end]).tolist()

    def _screen(
        self, hubs: Tensor, partners: Tensor, bounds: Tensor, z_hubs: Tensor, z_partners: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Drop hubs and partners whose every pair is too short along k directions, given their coordinates."""
        left, right = screen_tables(self.radius[hubs], z_hubs, self.radius[partners], z_partners, self.cloud.rounding)
        if len(hubs) > _MANY_HUBS:
            sample = torch.arange(0, len(hubs), len(hubs) // 64, device=hubs.device)
            sampled, _ = self._bounds(hubs[sample], partners, left[sample], right)
            if float((sampled >= self.length**2).double().mean()) > 0.5:
                return hubs, partners, bounds
        bounds, reached = self._bounds(hubs, partners, left, right)
        open_hubs = ~(bounds < self.length**2)
        return hubs[open_hubs], partners[~(reached < self.length**2)], bounds[open_hubs]

    def _bounds(self, hubs: Tensor, partners: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest bound on a squared distance of each hub to a partner, and of each partner to a hub."""
        starts, ends = self._ranges(hubs, partners)
        by_hub, by_partner, screened = largest_bounds(left, right, starts, ends, self.cloud.budget)
        self.screened += screened
        return by_hub, by_partner

    def _prove(self, hubs: Tensor, partners: Tensor, bounds: Tensor) -> None:
        """Compute the pairs that the screens did not drop, the most promising hubs first."""
        if 2 * len(hubs) < len(self.order):  # otherwise keep their order, in which each pair is computed once
            bounds, order = bounds.sort(descending=True)
            hubs = hubs[order]
        most = max(1, min(_MEET_ROWS, self.cloud.budget // (4 * self.cloud.width * self.cloud.dtype.itemsize)))
        size = min(32, most)
        while len(hubs):
            batch, hubs, bounds = hubs[:size], hubs[size:], bounds[size:]
            starts, ends = self._ranges(batch, partners)
            self._meet(batch, partners[min(starts) : max(ends)])
            open_hubs = ~(bounds < self.length**2)
            hubs, bounds = hubs[open_hubs], bounds[open_hubs]
            size = min(2 * size, most)

    def _meet(self, hubs: Tensor, partners: Tensor) -> None:
        """Compute the distances of hubs to partners in full; measure in fp64 those that rounding leaves open."""
        cloud = self.cloud
        rows, columns = self.order[hubs], self.order[partners]
        up = 1 + 3 * cloud.rounding  # makes r_i^2 + r_j^2 - 2 x_i.x_j an upper bound
        x, x2 = cloud.points(rows).mul_(-2), self.norm2[rows] * up
        scratch = x.new_empty(0)
        for at, y in cloud.chunks(columns, extra=2 * len(hubs) * cloud.dtype.itemsize, longest=_MEET_COLUMNS):
            scratch = scratch if scratch.numel() else x.new_empty(len(x) * len(y))
            tile = scratch[: len(x) * len(y)].view(len(x), len(y))
            torch.addmm(self.norm2[columns[at]] * up, x, y.T, out=tile)
            self.computed += tile.numel()
            if float((tile.amax(1) + x2).max()) >= self.length**2:
                top = tile.add_(x2[:, None]).argmax()
                self._offer(rows[(top // len(y))[None]], columns[at][(top % len(y))[None]])
                self._settle(tile >= self.length**2, rows, columns[at])

    def _settle(self, near: Tensor, rows: Tensor, columns: Tensor) -> None:
        """Measure in fp64 the pairs that rounding cannot tell from the longest; in bulk if there are many (ties)."""
        if int(near.sum()) <= _FEW:
            i, j = near.nonzero(as_tuple=True)
            if len(i):
                self._offer(rows[i], columns[j])
            return
        rows, columns = rows[near.any(1)], columns[near.any(0)]
        cloud = self.cloud.double()
        x = cloud.points(rows)
        x2 = x.square().sum(1, keepdim=True)
        for at, y in cloud.chunks(columns, extra=16 * len(rows)):
            tile = torch.addmm(y.square().sum(1), x, y.T, alpha=-2).add_(x2)
            top = tile.argmax()
            self._offer(rows[(top // len(y))[None]], columns[at][(top % len(y))[None]])

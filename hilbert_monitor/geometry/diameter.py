"""The row diameter D(S) = max_{i<j} |s_i - s_j|: the exact value with its proof.

All pairs cost V^2 d / 2 multiplications. This search costs about V d on optimizers' increments: bounds rule out almost
every pair.

1. Project.   Centre the rows. Keep each row's norm r and its coordinates z along a few leading directions.
2. Guess.     Compare outlying rows with the rows that seem farthest from them. The longest pair has length L.
3. Long rows. By the triangle inequality a pair longer than L has one end with r >= L/2 (a long row) and one with
              r >= L - r_max (a partner).
4. Screen.    With rho the norm of the part of a row outside the directions,
              |x_i - x_j|^2 <= r_i^2 + r_j^2 - 2 z_i.z_j + 2 rho_i rho_j. Drop rows whose every bound is below L^2.
              If many are left, project them along more directions and screen again.
5. Prove.     Compute the remaining pairs in full; measure in fp64 what rounding leaves open.

Every rank runs these steps on its own rows; a plain matrix is a shard on one rank. Long rows are a table that all ranks
share, partners are rows of one rank. Decisions depend only on what all ranks share. Every comparison has a slack for
rounding, so that no dropped pair is longer than `upper`. Where nothing can be dropped (points on a sphere), step 5 is a
tiled all-pairs search.

Tried and dropped: one test of the norm for both ends of a pair, which drops almost no row if one outlier is far from
everything; one slack for all pairs, scaled by the largest norm, which keeps two to nine times the rows that a
slack by the pair's own norms keeps; `torch.unique` to find equal rows, nine times slower than to compare neighbours in
a sort.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .bracket import DiameterBracket, fp64_rounding, longest_pair
from .numerics import MAX_BYTES, compute_dtype, full_precision, on_host
from .points import (
    CentredRows,
    Scales,
    Trivial,
    from_sample,
    in_safe_range,
    leading_directions,
    mean_row,
    ordered,
    scales_of,
    slant,
)
from .sharding import RowShards, RowSource, as_shards

PROJECTED, SCREENED = 16, 64
"""Directions along which all rows are projected; and along which long rows are, if many are left."""
SMALL = 512
"""Rows of S up to which all pairs cost less than a projection."""
OUTLIERS, PARTNERS = 8, 96
"""Rows of the guess: the longest ones and the two extreme rows along as many directions; and rows far from those."""
MANY_EQUAL, MANY = 64, 2048
"""Long rows from which the search looks for equal rows, and from which a screen is tried on a sample first."""
FIRST_BATCH, LARGEST_BATCH, TILE_COLUMNS = 128, 1024, 1024
"""Long rows that are computed in full at a time, and partners in a tile of them, on a CPU."""
ROW_BYTES = 96
"""Scratch that a row of S needs next to its coordinates."""
_TILE, _TILE_ROWS = 2**20, 128  # a tile of bounds that stays in a CPU's cache


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


@full_precision
def row_diameter(S: Tensor | RowSource | RowShards, *, max_bytes: int = MAX_BYTES) -> RowDiameter:
    """Compute D(S) = max_{i<j} |s_i - s_j| exactly, with a pair that attains it.

    Where several pairs tie, any one of them is returned. The cost grows about as V d on optimizers' increments, and is
    that of an all-pairs search at worst; the docstring of `diameter.py` explains the method.
    """

    def check_memory() -> tuple[int]:
        if max_bytes < (least := 2 * ROW_BYTES * S.shape[0]):
            raise ValueError(f"max_bytes={max_bytes} is too little for {S.shape[0]} rows: give at least {least}")
        return (max_bytes,)

    shards = as_shards(S, agree_on=check_memory)
    search = DiameterSearch(shards, Scales(compute_dtype(shards.rows)), max_bytes)
    search.guess()
    if not search.range_is_safe:
        scales = scales_of(shards, max_bytes)
        if isinstance(scales, Trivial):  # equal rows, or rows that are not finite
            return RowDiameter(*scales[:4], 0, 0)
        search = DiameterSearch(shards, scales, max_bytes)
        search.guess()
    search.run()
    value = search.scales.of_rows(search.length)
    upper = math.nextafter(value * fp64_rounding(shards.shape[1]), math.inf)
    return RowDiameter(value, upper, search.pair, 0, *search.work)


class Rows(NamedTuple):
    """Some rows and what is known of them: the long rows of all ranks, or the partners on one rank."""

    row: Tensor
    """(n,) numbers of long rows in S; of partners, their places among the rows of the rank."""
    radius: Tensor
    """(n,) norm, rounded up."""
    z: Tensor
    """(n, k) coordinates."""
    bound: Tensor
    """(n,) largest squared distance to another row that is still possible."""

    def at(self, which: Tensor | slice) -> Rows:
        """Return some of the rows."""
        return Rows(*(x[which] for x in self))

    def still_open(self, length: float) -> Rows:
        """Return the rows that can still be an end of a pair longer than `length`. A nan keeps its row."""
        return self.at((~(self.bound < length**2)).nonzero().squeeze(1))


class DiameterSearch:
    """Branch and bound for the longest pair. `length` and `pair` are the longest known, equal on all ranks."""

    def __init__(self, shards: RowShards, scales: Scales, max_bytes: int) -> None:
        self.shards, self.ranks, self.scales, self.max_bytes = shards, shards.ranks, scales, max_bytes
        self.own_work, self.work = [0, 0], [0, 0]  # pairs screened and computed: by this rank, by all
        self.mostly_ties = False
        self.on_host = on_host(shards)
        V, d = shards.shape
        affordable = (max_bytes // (2 * V) - ROW_BYTES) // (8 * scales.dtype.itemsize)  # coordinates of every row
        most = min(d // 2, affordable) if V > SMALL else 0
        self.dims = [k for k in (min(PROJECTED, d // 2), SCREENED) if 8 <= k <= most]
        centre, self.directions, self.slant = self._basis(self.dims[0] if self.dims else 0)
        self.points = CentredRows(shards.rows, centre, scales, max_bytes)

    def run(self) -> None:
        """Find the longest pair, and prove that there is no longer one."""
        long_rows = self._long_rows()
        few = FIRST_BATCH if self.ranks.is_single else LARGEST_BATCH  # these are computed in full sooner
        for k in self.dims:
            if k == SCREENED:
                if len(long_rows.row) <= few:
                    break
                long_rows = self._project_along(long_rows, k)
            long_rows = self._screen(long_rows)
        self._prove(long_rows)

    # 1. Project

    def _basis(self, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the centre (d,) and k leading directions (d, k) of an even sample, and the directions' slant."""

        def columns(rows: Tensor) -> Tensor:
            centre = mean_row(rows)
            if not k:
                return centre[:, None]
            directions = leading_directions((rows - centre) * self.scales.post, k)
            return torch.cat([centre[:, None], pad(directions, (0, k - directions.shape[1]))], 1)

        table = from_sample(self.shards, self.scales, self.max_bytes, columns, self.shards.shape[1], k + 1)
        centre, directions = table[:, 0].contiguous(), table[:, 1:].contiguous()
        return centre, directions, slant(directions)

    # 2. Guess

    def guess(self) -> None:
        """Project all rows, and find a long pair among outlying rows and the rows that seem farthest from them."""
        number = max(1, OUTLIERS // self.ranks.number)
        along = min(number, self.directions.shape[1])

        def outlying() -> Tensor:
            self.norms, self.z = self.points.project(self.directions)
            places, z = self.norms.topk(min(number, len(self.norms))).indices, self.z[:, :along]
            return torch.cat([places, z.argmax(0), z.argmin(0)]) if len(z) else places

        rows, ids = self.shards.gather(outlying, number + 2 * along)
        far = max(4, PARTNERS // self.ranks.number)

        def partners() -> Tensor:
            x = self.points.points(rows)
            estimate = torch.addmm(self.norms.square(), x @ self.directions, self.z.T, alpha=-2)  # (outliers, n)
            size = x.square().sum(1, keepdim=True).masked_fill(ids[:, None] < 0, -torch.inf)
            values, places = estimate.add_(size).topk(min(4, estimate.shape[1]), dim=1)
            best = values.flatten().topk(min(far, values.numel())).indices
            return places.flatten()[best]

        more, more_ids = self.shards.gather(partners, far)
        rows, ids = torch.cat([rows, more]), torch.cat([ids, more_ids])
        length, ends = longest_pair(rows, ids, self.scales)
        self.own_work[1] = len(rows) * (len(rows) - 1) // 2
        up = 1 + self.points.rounding

        def sizes() -> Sequence[Tensor]:
            largest = self.norms.amax()[None] if len(self.norms) else self.norms.new_zeros(1)
            long = (self.norms * up >= length * (0.5 - 2.0**-40)).sum()[None]  # other ranks may round `length`
            return [torch.cat([largest, long, length, ids[ends]])]

        (table,) = self.ranks.gather(sizes, ((5,), torch.float64))
        length = table[0, 2:3]  # and its pair: those of the first rank
        largest = table[:, 0].amax()[None]  # a nan stays one
        able = (self.norms * up >= length - largest * up**2).sum()[None]
        centre = self.points.centre.abs().amax()[None]
        numbers = torch.cat([table[0, 2:], largest, centre, able, table[:, 1]])
        self.length, i, j, norm, size, count, *long = numbers.tolist()  # the device is read once
        self.pair, self.able = ordered(int(i), int(j)), int(count)
        self.most_long = int(max(long)) if math.isfinite(self.length) else 0
        self.range_is_safe = in_safe_range(norm, size, self.shards.shape[1], self.points.dtype)

    # 3. Long rows

    def _long_rows(self) -> Rows:
        """Keep the rows of this rank that can be an end of a longer pair, and tell all ranks which of them are long."""
        n, k, dtype = self.most_long, self.z.shape[1], self.points.dtype

        def own() -> Sequence[Tensor]:
            radius, places = (self.norms * (1 + self.points.rounding)).topk(self.able)
            if n > MANY_EQUAL and len(places) > 1:
                radius, places = self._distinct(radius, places)
            self.partners = Rows(places, radius, self.z[places], radius)
            missing = max(0, n - len(places))
            ids = self.shards.ids[places[:n]]
            z = pad(self.partners.z[:n], (0, 0, 0, missing))
            return [pad(radius[:n], (0, missing), value=-1.0), z, pad(ids, (0, missing))]

        table = self.ranks.gather(own, ((n,), dtype), ((n, k), dtype), ((n,), torch.int64))
        radius, z, ids = (x.flatten(0, 1) for x in table)
        self.z = z[:0]  # free the coordinates of the other rows
        radius, order = radius.sort(descending=True, stable=True)
        number = int((radius >= self.length / 2).sum())
        radius, order = radius[:number], order[:number]
        return Rows(ids[order], radius, z[order], torch.full_like(radius, torch.inf))

    def _distinct(self, radius: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Keep one of the rows that occur many times. Equal rows are neighbours in a sort by norm."""
        at = torch.arange(0, len(places) - 1, -(-len(places) // 1024), device=places.device)
        one, other = (self.shards.rows.take(places[at + k]) for k in (0, 1))
        if 64 * int((one == other).all(1).sum()) <= len(at):
            return radius, places
        distinct = self.points.distinct(places, radius[0])
        return radius[distinct], places[distinct]

    # 4. Screen

    def _project_along(self, long_rows: Rows, k: int) -> Rows:
        """Project the long rows, and the partners of this rank, along k directions."""
        _, self.directions, self.slant = self._basis(k)

        def coordinates(places: Tensor) -> Tensor:
            z = self.points.project(self.directions, self.partners.row)[1]
            self.partners = self.partners._replace(z=z)
            return self.points.project(self.directions, places)[1]

        return long_rows._replace(z=self.shards.from_owners(long_rows.row, coordinates, k, self.points.dtype))

    def _screen(self, long_rows: Rows) -> Rows:
        """Drop long rows, and partners of this rank, whose every bound is too short along some directions."""
        if len(long_rows.row) > MANY and self.ranks.is_single:  # on several ranks a collective costs more
            bound, _ = self._bounds(long_rows.at(slice(None, None, len(long_rows.row) // 64)))
            if float((bound >= self.length**2).double().mean()) > 0.5:
                return long_rows

        def make() -> Tensor:
            by_row, by_partner = self._bounds(long_rows)
            self.partners = self.partners._replace(bound=by_partner).still_open(self.length)
            return by_row.nan_to_num_(torch.inf, torch.inf, -torch.inf)  # a nan keeps its row, on all ranks

        bound = self.ranks.max(make, len(long_rows.row), dtype=self.points.dtype)
        return long_rows._replace(bound=bound).still_open(self.length)

    def _bounds(self, long_rows: Rows) -> tuple[Tensor, Tensor]:
        """Return the largest bound of each of some long rows, and that of each partner of this rank."""
        tables = screen_tables(long_rows, self.partners, self.points.rounding, self.slant)
        by_row, by_partner, number = largest_bounds(*tables, *self._ranges(long_rows.radius), self.points.budget)
        self.own_work[0] += number
        return by_row, by_partner

    def _ranges(self, radius: Tensor) -> tuple[list[int], list[int]]:
        """Return, for each long row, the first and last partner that is no longer and could be far enough by norm."""
        if not self.on_host:
            return [0] * len(radius), [len(self.partners.row)] * len(radius)
        start = torch.searchsorted(-self.partners.radius, -radius)
        end = torch.searchsorted(-self.partners.radius, radius - self.length, right=True)
        return start.tolist(), torch.maximum(start, end).tolist()

    # 5. Prove

    def _prove(self, long_rows: Rows) -> None:
        """Compare the long rows that are left with the partners of all ranks, the most promising first."""
        d = self.shards.shape[1]
        if 4 * len(long_rows.row) < self.shards.number:  # otherwise the order by norm computes each pair once, on a CPU
            long_rows = long_rows.at(long_rows.bound.argsort(descending=True, stable=True))
        affordable = self.points.budget // (8 * (d + 2) * self.points.dtype.itemsize)
        most = max(1, min(LARGEST_BATCH if self.on_host else len(long_rows.row), affordable))
        size = min(FIRST_BATCH, most) if self.on_host and self.ranks.is_single else most
        while True:  # once at least: there the ranks add up their work
            batch, long_rows = long_rows.at(slice(None, size)), long_rows.at(slice(size, None))
            self._compute_on_all_ranks(batch)
            if not len(long_rows.row):
                return
            long_rows = long_rows.still_open(self.length)
            size = min(2 * size, most)

    def _compute_on_all_ranks(self, batch: Rows) -> None:
        """Compare some rows with the partners of each rank, then adopt the longest pair of any rank."""
        d, dtype = self.shards.shape[1], self.shards.rows.dtype
        rows = self.shards.from_owners(batch.row, self.shards.rows.take, d, dtype)

        def make() -> Sequence[Tensor]:
            self._compute_in_full(batch, rows)
            return [torch.tensor([self.length, *self.pair, *self.own_work], dtype=torch.float64)]

        (table,) = self.ranks.gather(make, ((5,), torch.float64))
        self.length, i, j = max(table[:, :3].tolist(), key=lambda row: row[0])  # of equal ones that of the first rank
        self.pair, self.work = (int(i), int(j)), table[:, 3:].sum(0).long().tolist()

    def _compute_in_full(self, batch: Rows, rows: Tensor) -> None:
        """Compute distances of some rows to partners of this rank; measure those that may be longer than `length`.

        A tile has r_i^2 + r_j^2 - 2 x_i.x_j. Its product of d + 2 columns errs by at most the relative rounding e of a
        dot product times the sum of the magnitudes, which is below 2 (r_i^2 + r_j^2).
        """
        starts, ends = self._ranges(batch.radius)
        own, points = self.partners.at(slice(min(starts, default=0), max(ends, default=0))), self.points
        if self.mostly_ties:
            return self._measure(batch.row, rows, own.row)

        def sizes(radius: Tensor) -> list[Tensor]:
            size = radius.square().mul_(1 + 2 * points.rounding)
            return [size, torch.ones_like(size)]

        left = torch.column_stack([points.points(rows).mul_(-2), *sizes(batch.radius)])
        extra = (2 * len(left) + rows.shape[1] + 2) * points.dtype.itemsize
        for at, y in points.chunks(own.row, extra=extra, longest=TILE_COLUMNS if self.on_host else 0):
            tile = left @ torch.column_stack([y, *reversed(sizes(own.radius[at]))]).T
            self.own_work[1] += tile.numel()
            if self.on_host and float(tile.max()) < self.length**2:
                continue
            near = tile >= self.length**2
            i, j = (near.any(dim).nonzero().squeeze(1) for dim in (1, 0))
            if len(i):
                self.mostly_ties = 2 * len(i) * len(j) > tile.numel()  # then later batches go to fp64 at once
                self._measure(batch.row[i], rows[i], own.row[at][j])

    def _measure(self, ids: Tensor, rows: Tensor, own: Tensor) -> None:
        """Compute the distances of some rows to rows of this rank in fp64; keep the longest pair of each tile.

        A product in fp64 errs by less than `upper` allows for. So of many ties it is enough to measure one, from the
        rows as they were given.
        """
        points, (_, pre, post) = self.points.double(), self.scales
        for some in torch.split(torch.arange(len(rows), device=rows.device), LARGEST_BATCH):
            x = points.points(rows[some])
            x2 = x.square().sum(1)[:, None]
            for at, y in points.chunks(own, extra=24 * len(x), longest=TILE_COLUMNS):
                tile = torch.addmm(y.square().sum(1), x, y.T, alpha=-2).add_(x2)
                self.own_work[1] += tile.numel()
                top = tile.amax(1).argmax()[None]  # ten times faster on a CPU than an argmax of the tile
                i, j = some[top], own[at][tile[top].argmax()[None]]
                apart = rows[i].double().mul_(pre).sub_(self.shards.rows.take(j).double().mul_(pre)).mul_(post)
                ends = torch.cat([ids[i], self.shards.ids[j]]).double()
                length, first, second = torch.cat([torch.linalg.vector_norm(apart, dim=1), ends]).tolist()
                if length > self.length:
                    self.length, self.pair = length, ordered(int(first), int(second))


# Tables whose products are bounds


def screen_tables(long_rows: Rows, partners: Rows, rounding: float, slant: Tensor) -> tuple[Tensor, Tensor]:
    """Return tables (rows, k + 4) and (partners, k + 4) whose product bounds squared distances from above.

    With e the relative rounding of a dot product, the k computed coordinates of a row are off by at most
    eta = sqrt(k) e of its norm. Products of coordinates differ from those of projections by the slant s of the
    directions. So the squared distance of i and j is at most

        (1 + 2e)(r_i^2 + r_j^2) - 2 z_i.z_j + 2 rho_i rho_j + (5 eta + 2 s) r_i r_j

    with rho_i^2 = r_i^2 - |z_i|^2 rounded up by (e + 3 eta + s) r_i^2.
    """
    eta = math.sqrt(long_rows.z.shape[1]) * rounding
    slant = slant.to(long_rows.z.dtype)

    def parts(rows: Rows) -> tuple[Tensor, Tensor]:
        norm2 = rows.radius.square()
        rest2 = (norm2 - rows.z.square().sum(1)).clamp_min_(0).add_(norm2 * (rounding + 3 * eta + slant))
        return rest2.sqrt_(), norm2.mul_(1 + 2 * rounding)

    rest, size = parts(long_rows)
    cross = (5 * eta + 2 * slant) * long_rows.radius
    left = torch.column_stack([-2 * long_rows.z, 2 * rest, cross, size, torch.ones_like(size)])
    rest, size = parts(partners)
    return left, torch.column_stack([partners.z, rest, partners.radius, torch.ones_like(size), size])


def largest_bounds(
    left: Tensor, right: Tensor, starts: Sequence[int], ends: Sequence[int], budget: int
) -> tuple[Tensor, Tensor, int]:
    """Return the largest bound of each long row and of each partner, and how many bounds were computed.

    Of each row (rows, k + 4) `starts` has the first partner (partners, k + 4), and `ends` one after the last; the
    longest come first. A tile of bounds stays in a CPU's cache; elsewhere it is the largest that fits.
    """
    entries = budget // left.element_size()
    if on_host(left):
        rows, columns = _TILE_ROWS, max(1, min(_TILE, entries) // _TILE_ROWS)
    else:
        columns = max(1, min(len(right), entries))
        rows = max(1, min(len(left), entries // columns))
    by_row = left.new_full((len(left),), -torch.inf)
    by_partner = right.new_full((len(right),), -torch.inf)
    scratch = left.new_empty(columns * rows)
    screened = 0
    for a in range(0, len(left), rows):
        block = slice(a, min(a + rows, len(left)))
        for start in range(starts[a], ends[a], columns):
            at = slice(start, min(start + columns, ends[a]))
            shape = (block.stop - a, at.stop - start)
            tile = torch.mm(left[block], right[at].T, out=scratch[: shape[0] * shape[1]].view(shape))
            screened += tile.numel()
            torch.maximum(by_row[block], tile.amax(1), out=by_row[block])
            torch.maximum(by_partner[at], tile.amax(0), out=by_partner[at])
    return by_row, by_partner, screened

"""The row diameter D(S) = max_{i<j} |s_i - s_j|: the exact value with its proof.

All pairs cost V^2 d / 2 multiplications. This search costs about V d on optimizers' increments: bounds rule out almost
every pair.

1. Project.   Centre the rows. Keep each row's norm r and its coordinates z along a few leading directions.
2. Guess.     Compare outlying rows with the rows that seem farthest from them. The longest pair has length L.
3. Long rows. By the triangle inequality a pair longer than L has one end with r >= L/2 (a long row) and one with
              r >= L - r_max (a partner).
4. Screen.    With rho the norm of the part of a row outside the directions,
              |x_i - x_j|^2 <= r_i^2 + r_j^2 - 2 z_i.z_j + 2 rho_i rho_j. Drop rows whose every bound is below L^2.
5. Prove.     Compute the remaining pairs in full; measure in fp64 those that rounding leaves open.

Every rank runs these steps on its own rows; a plain matrix is a shard on one rank. Decisions depend only on tables that
all ranks share. Every comparison has a slack for rounding, so that no dropped pair is longer than `upper`. Where
nothing can be dropped (points on a sphere), step 5 is a tiled all-pairs search.

Tried and dropped: one test of the norm for both ends of a pair, which drops almost no row if one outlier is far from
everything; one slack for all pairs, scaled by the largest norm, which keeps two to nine times the rows that a
slack by the pair's own norms keeps; `torch.unique` to find equal rows, nine times slower than to compare neighbours in
a sort.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from .bracket import DiameterBracket, fp64_rounding, longest_pair, rounded_up
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
from .sharding import Form, RowShards, RowSource, as_shards

PROJECTED, SCREENS = 16, (8, 16, 64)
"""Directions along which all rows are projected, and along which long rows are screened."""
SMALL = 512
"""Rows of S up to which all pairs cost less than a projection."""
OUTLIERS, PARTNERS = 8, 96
"""Rows of the guess: the longest ones and the two extreme rows along as many directions; and rows far from those."""
MANY = 2048
"""Long rows from which a screen is tried on a sample first."""
FIRST_BATCH, LARGEST_BATCH, TILE_COLUMNS = 128, 1024, 1024
"""Long rows that are computed in full at a time, and partners in a tile of them, on a CPU."""
FEW_TIES = 4096
"""Near-longest pairs of a tile that are measured one by one."""
ROW_BYTES = 96
"""Scratch that a row of S needs next to its coordinates."""
MANY_EQUAL = 64
"""Long rows from which the search looks for equal rows."""
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

    Args:
        S: (V, d) update rows, any real floating-point dtype: a tensor, a DTensor, a source, or shards.
        max_bytes: bound on scratch memory.

    Returns:
        the value (fp64, from the rows as given), the pair, and how many pairs were screened and computed.
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
    value = search.points.length_of_rows(search.length)
    upper = rounded_up(value * fp64_rounding(shards.shape[1]))
    return RowDiameter(value, upper, search.pair, 0, *search.work)


@dataclass
class LongRows:
    """Rows of all ranks that can be the longer end of a longest pair: the same table on every rank."""

    owner: Tensor
    """(n,) rank that has the row."""
    place: Tensor
    """(n,) index into `order` of that rank."""
    radius: Tensor
    """(n,) norm, rounded up."""
    z: Tensor
    """(n, k) coordinates."""
    bound: Tensor
    """(n,) largest squared distance that is still possible."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.owner)

    def at(self, index: Tensor | slice) -> LongRows:
        """Return some of the rows."""
        return LongRows(*(x[index] for x in (self.owner, self.place, self.radius, self.z, self.bound)))


class DiameterSearch:
    """Branch and bound for the longest pair. `length` and `pair` are the longest known, equal on all ranks.

    Args:
        shards: the rows of this rank.
        scales: of the points, see `CentredRows`.
        max_bytes: bound on scratch memory.
    """

    def __init__(self, shards: RowShards, scales: Scales, max_bytes: int) -> None:
        self.shards, self.ranks, self.scales, self.max_bytes = shards, shards.ranks, scales, max_bytes
        self.own_work, self.work = [0, 0], [0, 0]  # pairs screened and computed: by this rank, by all
        self.mostly_ties = False
        V, d = shards.shape
        self.on_host = on_host(shards)
        affordable = (max_bytes // (2 * V) - ROW_BYTES) // (8 * scales.dtype.itemsize)  # coordinates of every row
        dims = [k for k in SCREENS if k <= min(d // 2, affordable)] if V > SMALL else []
        self.dims = dims if self.on_host else dims[1:]  # elsewhere the first screen costs more than it saves
        self.few = [k for k in self.dims if k <= PROJECTED]
        centre, self.directions, self.slant = self._basis(max(self.few, default=0))
        self.points = CentredRows(shards.rows, centre, scales, max_bytes)

    def run(self) -> None:
        """Find the longest pair, and prove that there is no longer one."""
        long_rows = self._long_rows()
        if self.few:
            long_rows = self._screen(long_rows, self.few)
        for k in self.dims[len(self.few) :]:
            if len(long_rows) > (FIRST_BATCH if self.ranks.is_single else LARGEST_BATCH):  # fewer are computed in full
                long_rows = self._screen(self._project_along(long_rows, k), [k])
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

        table = from_sample(self.shards, self.scales, self.max_bytes, columns, k + 1)
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
            largest = (self.norms.amax() if len(self.norms) else self.norms.new_zeros(())).double()[None]
            long = (
                (self.norms * up >= length * (0.5 - 2.0**-40)).sum().double()[None]
            )  # `length` may differ by a rounding
            return [torch.cat([largest, long, length, ids[ends].double()])]

        (table,) = self.ranks.gather(sizes, ((5,), torch.float64))
        length = table[0, 2:3]  # and its pair: those of the first rank
        largest = table[:, 0].amax()[None]  # a nan stays one
        able = (self.norms * up >= length - largest * up**2).sum().double()[None]
        centre = self.points.centre.abs().amax().double()[None]
        numbers = torch.cat([table[0, 2:], largest, centre, able, table[:, 1]])
        self.length, i, j, norm, size, count, *long = numbers.tolist()  # the device is read once
        self.pair, self.able = ordered(int(i), int(j)), int(count)
        self.most_long = int(max(long)) if math.isfinite(self.length) else 0
        self.range_is_safe = in_safe_range(norm, size, self.shards.shape[1], self.points.dtype)

    # 3. Long rows

    def _long_rows(self) -> LongRows:
        """Sort the rows of this rank that can be an end of a longer pair, and tell all ranks which of them are long."""
        n, k, dtype = self.most_long, self.z.shape[1], self.points.dtype

        def own() -> Sequence[Tensor]:
            self.radius, self.order = (self.norms * (1 + self.points.rounding)).topk(self.able)
            if self.most_long > MANY_EQUAL and len(self.order) > 1:
                self._drop_equal_rows()
            self.partners = torch.arange(len(self.order), device=self.order.device)
            radius, z = self.radius[:n], self.z[self.order[:n]]
            return [pad(radius, (0, n - len(radius)), value=-1.0), pad(z, (0, 0, 0, n - len(z)))]

        radius, z = (x.flatten(0, 1) for x in self.ranks.gather(own, ((n,), dtype), ((n, k), dtype)))
        radius, order = radius.sort(descending=True, stable=True)
        order = order[: int((radius >= self.length / 2).sum())]
        radius = radius[: len(order)]
        return LongRows(order // max(n, 1), order % max(n, 1), radius, z[order], torch.full_like(radius, torch.inf))

    def _drop_equal_rows(self) -> None:
        """Keep one of the rows that occur many times. Equal rows are neighbours in a sort by norm."""
        at = torch.arange(0, len(self.order) - 1, -(-len(self.order) // 1024), device=self.order.device)
        one, other = (self.shards.rows.take(self.order[at + k]) for k in (0, 1))
        if 64 * int((one == other).all(1).sum()) > len(at):
            distinct = self.points.distinct(self.order, self.radius[0])
            self.radius, self.order = self.radius[distinct], self.order[distinct]

    # 4. Screen

    def _project_along(self, long_rows: LongRows, k: int) -> LongRows:
        """Project the long rows, and the partners of this rank, along k directions."""
        _, self.directions, self.slant = self._basis(k)

        def coordinates(rows: Tensor) -> Sequence[Tensor]:
            self.z = self.z.new_empty(0, k)  # free the former coordinates first
            partners, self.z = self.order[self.partners], self.norms.new_zeros(len(self.norms), k)
            self.z[partners] = self.points.project(self.directions, partners)[1]
            return [self.points.project(self.directions, rows)[1]]

        (z,) = self._from_owners(long_rows, coordinates, ((k,), self.points.dtype))
        return replace(long_rows, z=z)

    def _screen(self, long_rows: LongRows, dims: Sequence[int]) -> LongRows:
        """Drop long rows, and partners of this rank, whose every bound is too short along some directions."""
        if len(long_rows) > MANY and self.ranks.is_single:  # on several ranks a collective costs more
            some = torch.arange(0, len(long_rows), len(long_rows) // 64, device=long_rows.owner.device)
            bound, _ = self._bounds(long_rows.at(some), dims)
            if float((bound >= self.length**2).double().mean()) > 0.5:
                return long_rows
        bound, self.partners = self._bounds(long_rows, dims)
        return _still_open(replace(long_rows, bound=bound), self.length)

    def _bounds(self, long_rows: LongRows, dims: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the largest bound of each long row over all ranks, and the partners of this rank that are left."""
        left = [self.partners]

        def make() -> Tensor:
            bound = torch.full_like(long_rows.radius, torch.inf)
            rows, partners = torch.arange(len(long_rows), device=bound.device), self.partners
            for k in dims:
                radius, own = long_rows.radius[rows], self.radius[partners]
                z = self.z[self.order[partners], :k]
                tables = screen_tables(radius, long_rows.z[rows, :k], own, z, self.points.rounding, self.slant)
                starts, ends = self._ranges(radius, own)
                by_row, by_partner, number = largest_bounds(*tables, starts, ends, self.points.budget)
                self.own_work[0] += number
                bound[rows] = by_row
                open_rows, open_partners = ~(by_row < self.length**2), ~(by_partner < self.length**2)
                counts = torch.stack([open_rows.sum(), open_partners.sum()]).tolist()
                rows, partners = rows[_places(open_rows, counts[0])], partners[_places(open_partners, counts[1])]
            left[0] = partners
            return bound.nan_to_num_(torch.inf, torch.inf, -torch.inf)  # a nan keeps its row, on all ranks

        return self.ranks.max(make, len(long_rows), dtype=self.points.dtype), left[0]

    def _ranges(self, radius: Tensor, partners: Tensor) -> list[list[int]]:
        """Return, for each long row, the first and last partner that is no longer and could be far enough by norm."""
        if not self.on_host:
            return [[0] * len(radius), [len(partners)] * len(radius)]
        start = torch.searchsorted(-partners, -radius)
        end = torch.searchsorted(-partners, radius - self.length, right=True)
        return torch.stack([start, torch.maximum(start, end)]).tolist()

    # 5. Prove

    def _prove(self, long_rows: LongRows) -> None:
        """Compare the long rows that are left with the partners of all ranks, the most promising first."""
        d = self.shards.shape[1]
        if 4 * len(long_rows) < self.shards.number:  # otherwise the order by norm computes each pair once, on a CPU
            long_rows = long_rows.at(long_rows.bound.argsort(descending=True, stable=True))
        affordable = self.points.budget // (8 * (d + 2) * self.points.dtype.itemsize)
        most = max(1, min(LARGEST_BATCH if self.on_host else len(long_rows), affordable))
        size = min(FIRST_BATCH, most) if self.on_host and self.ranks.is_single else most
        while True:  # once at least: there the ranks add up their work
            batch, long_rows = long_rows.at(slice(None, size)), long_rows.at(slice(size, None))
            rows, ids = self._from_owners(
                batch,
                lambda rows: [self.shards.rows.take(rows), self.shards.ids[rows]],
                ((d,), self.shards.rows.dtype),
                ((), torch.int64),
            )
            self._compute_on_all_ranks(batch, rows, ids)
            long_rows = _still_open(long_rows, self.length) if len(long_rows) else long_rows
            if not len(long_rows):
                return
            size = min(2 * size, most)

    def _compute_on_all_ranks(self, batch: LongRows, rows: Tensor, ids: Tensor) -> None:
        """Compare some rows with the partners of each rank, then adopt the longest pair of any rank."""

        def make() -> Sequence[Tensor]:
            self._compute_in_full(batch, rows, ids)
            numbers = [self.length, *self.pair, *self.own_work]
            return [torch.tensor(numbers, dtype=torch.float64, device=self.ranks.device)]

        if self.ranks.is_single:  # nothing to read back
            self._compute_in_full(batch, rows, ids)
            self.work = self.own_work
            return
        (table,) = self.ranks.gather(make, ((5,), torch.float64))
        best = max(table.tolist(), key=lambda row: row[0])  # of equal ones that of the first rank
        self.length, self.pair = best[0], (int(best[1]), int(best[2]))
        self.work = [int(number) for number in table[:, 3:].sum(0).tolist()]

    def _compute_in_full(self, batch: LongRows, rows: Tensor, ids: Tensor) -> None:
        """Compute distances of some rows to partners of this rank; measure in fp64 those that rounding leaves open."""
        points, radius = self.points, self.radius[self.partners]
        starts, ends = self._ranges(batch.radius, radius)
        reached = slice(min(starts, default=0), max(ends, default=0))
        own, radius = self.order[self.partners[reached]], radius[reached]
        if self.mostly_ties:
            return self._measure_ties(rows, ids, own)
        x = distance_table(points.points(rows), batch.radius, points.rounding, left=True)
        extra = (2 * len(x) + rows.shape[1] + 2) * points.dtype.itemsize
        for at, y in points.chunks(own, extra=extra, longest=TILE_COLUMNS if self.on_host else 0):
            tile = x @ distance_table(y, radius[at], points.rounding, left=False).T
            self.own_work[1] += tile.numel()
            if self.on_host and float(tile.max()) < self.length**2:
                continue
            near = tile >= self.length**2
            number = int(near.sum())
            if number > FEW_TIES:
                self.mostly_ties = 2 * number > tile.numel()  # then later batches go to fp64 at once
                self._measure_ties(rows[near.any(1)], ids[near.any(1)], own[at][near.any(0)])
            elif number:
                i, j = torch.nonzero_static(near, size=number).unbind(1)
                self._measure(rows, ids, i, own[at][j])

    def _measure_ties(self, rows: Tensor, ids: Tensor, own: Tensor) -> None:
        """Compute the distances of many pairs in fp64, and measure the longest if it is longer than what is known.

        A product in fp64 errs by less than the certificate allows for, so that measuring the longest is enough.
        """
        points = self.points.double()
        for some in torch.split(torch.arange(len(rows), device=rows.device), LARGEST_BATCH):
            x = points.points(rows[some])
            x2 = x.square().sum(1)[:, None]
            for at, y in points.chunks(own, extra=24 * len(x), longest=TILE_COLUMNS):
                tile = torch.addmm(y.square().sum(1), x, y.T, alpha=-2).add_(x2)
                self.own_work[1] += tile.numel()
                if float(tile.max()) > self.length**2 * fp64_rounding(x.shape[1]):
                    top = tile.argmax()[None]
                    self._measure(rows, ids, some[top // len(y)], own[at][top % len(y)])

    def _measure(self, rows: Tensor, ids: Tensor, i: Tensor, own: Tensor) -> None:
        """Measure pairs of `rows[i]` and rows of this rank in fp64, as they were given, and keep the longest."""
        _, pre, post = self.scales
        self.own_work[1] += len(i)
        affordable = max(1, self.points.budget // (32 * rows.shape[1]))
        for part in torch.split(torch.arange(len(i), device=i.device), affordable):
            a, b = rows[i[part]].double(), self.shards.rows.take(own[part]).double()
            apart = a.mul_(pre).sub_(b.mul_(pre)).mul_(post)
            length, k = torch.linalg.vector_norm(apart, dim=1).max(0, keepdim=True)
            ends = torch.cat([ids[i[part[k]]], self.shards.ids[own[part[k]]]])
            longest, first, second = torch.cat([length, ends.double()]).tolist()
            if longest > self.length:
                self.length, self.pair = longest, ordered(int(first), int(second))

    def _from_owners(
        self, long_rows: LongRows, make: Callable[[Tensor], Sequence[Tensor]], *forms: Form
    ) -> list[Tensor]:
        """Return what the owners of long rows make of these rows."""
        if self.ranks.is_single:
            return list(make(self.order[long_rows.place]))
        return self.ranks.from_owners(long_rows.owner, lambda mine: make(self.order[long_rows.place[mine]]), *forms)


# Tables whose products are bounds and distances


def screen_tables(
    row_radius: Tensor, row_z: Tensor, partner_radius: Tensor, partner_z: Tensor, rounding: float, slant: Tensor
) -> tuple[Tensor, Tensor]:
    """Return tables (rows, k + 4) and (partners, k + 4) whose product bounds squared distances from above.

    With e the relative rounding of a dot product, the k computed coordinates of a row are off by at most
    eta = sqrt(k) e of its norm. Products of coordinates differ from those of projections by the slant s of the
    directions. So the squared distance of i and j is at most

        (1 + 2e)(r_i^2 + r_j^2) - 2 z_i.z_j + 2 rho_i rho_j + (5 eta + 2 s) r_i r_j

    with rho_i^2 = r_i^2 - |z_i|^2 rounded up by (e + 3 eta + s) r_i^2.

    Args:
        row_radius: (rows,) norms, rounded up.
        row_z: (rows, k) coordinates.
        partner_radius: (partners,).
        partner_z: (partners, k).
        rounding: relative error of a dot product.
        slant: of the directions: how far they are from orthonormal.
    """
    eta = math.sqrt(row_z.shape[1]) * rounding
    slant = slant.to(row_z.dtype)

    def parts(radius: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        norm2 = radius.square()
        rest2 = (norm2 - z.square().sum(1)).clamp_min_(0).add_(norm2 * (rounding + 3 * eta + slant))
        return rest2.sqrt_(), norm2.mul_(1 + 2 * rounding)

    rest, size = parts(row_radius, row_z)
    cross = (5 * eta + 2 * slant) * row_radius
    left = torch.column_stack([-2 * row_z, 2 * rest, cross, size, torch.ones_like(size)])
    rest, size = parts(partner_radius, partner_z)
    return left, torch.column_stack([partner_z, rest, partner_radius, torch.ones_like(size), size])


def distance_table(x: Tensor, radius: Tensor, rounding: float, *, left: bool) -> Tensor:
    """Return a table (n, d + 2) of points; the product of a left one and a right one has their squared distances.

    It has r_i^2 + r_j^2 - 2 x_i.x_j, rounded up. A sum of d + 2 products errs by at most e times the sum of their
    magnitudes, which is below 2 (r_i^2 + r_j^2).

    Args:
        x: (n, d), which is overwritten.
        radius: (n,) norms, rounded up.
        rounding: relative error of a dot product.
        left: whether the table is for the left side.
    """
    size = radius.square().mul_(1 + 2 * rounding)
    ones = torch.ones_like(size)
    return torch.column_stack([x.mul_(-2), size, ones] if left else [x, ones, size])


def largest_bounds(
    left: Tensor, right: Tensor, starts: Sequence[int], ends: Sequence[int], budget: int
) -> tuple[Tensor, Tensor, int]:
    """Return the largest bound of each long row and of each partner, and how many bounds were computed.

    Args:
        left: (rows, k + 4), the longest row first.
        right: (partners, k + 4), the longest partner first.
        starts: the first partner of each row.
        ends: one after the last.
        budget: bytes of scratch.
    """
    by_row = left.new_full((len(left),), -torch.inf)
    by_partner = right.new_full((len(right),), -torch.inf)
    rows, columns = _tile_shape(left, right, budget)
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


def _tile_shape(left: Tensor, right: Tensor, budget: int) -> tuple[int, int]:
    """Return rows and columns of a tile: one that stays in a CPU's cache, and elsewhere the largest that fits."""
    if on_host(left):
        return _TILE_ROWS, max(1, min(_TILE, budget // left.element_size()) // _TILE_ROWS)
    columns = max(1, min(len(right), budget // left.element_size()))
    return max(1, min(len(left), budget // left.element_size() // columns)), columns


def _still_open(long_rows: LongRows, length: float) -> LongRows:
    """Return the long rows that can still be an end of a pair longer than `length`."""
    open_rows = ~(long_rows.bound < length**2)  # a nan keeps its row
    return long_rows.at(_places(open_rows, int(open_rows.sum())))


def _places(mask: Tensor, number: int) -> Tensor:
    """Return the indices where a mask (n,) holds, given their number: with it known, the device is not read."""
    places: Tensor = torch.nonzero_static(mask, size=number).squeeze(1)
    return places

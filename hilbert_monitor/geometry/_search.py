"""The exact search for the row diameter of a whole matrix: branch and bound, step by step as `diameter.py` tells it.

The host decides from few numbers, which it reads in one piece after each step: on an accelerator every read waits for
all that is queued. Tiles are cache-sized on a CPU, and as large as the memory bound allows elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from ._cloud import PointCloud, in_safe_range, on_host
from ._screen import distance_table, largest_bounds, screen_tables
from ._sharded_survey import ordered
from .bracket import fp64_rounding

_SURVEY_RANK = 16
_SCREEN_RANKS = (8, 16, 64)
_ROW_BYTES = 96  # scratch a row of S needs beside its coordinates
_MEET_ROWS, _MEET_COLUMNS = 512, 1024  # the largest tile of full distances on a CPU
_SIFT_ROWS, _SIFT_COLUMNS, _GROUP = 256, 2048, 16  # a tile of bounds whose pairs are told one by one, and its groups
_MANY_HUBS = 2048  # from here on a screen is tried on a sample first
_SMALL = 512  # up to this many rows, all pairs cost less than a survey
_FEW = 4096  # up to this many near-longest pairs of a tile are measured one by one
_MANY_EQUAL = 64  # from so many hubs on, equal rows are looked for


class Search:
    """Branch and bound for the longest pair. After `_sort` a row is identified by its rank in decreasing norm."""

    def __init__(self, cloud: PointCloud) -> None:
        self.cloud = cloud
        self.length = 0.0  # of the longest pair so far, in the cloud's units
        self.pair = (0, 1)
        self.screened = 0
        self.computed = 0
        self._waits = not on_host(cloud.S)  # whether a read costs more than the work it saves
        self._ties = False

    def run(self, *, in_range: bool = False) -> bool:
        """Find the longest pair, and prove that there is no longer one.

        Args:
            in_range: the rows are known to be finite, not equal, and scaled into a safe range.

        Returns:
            False if the rows are in no such range, and nothing was found.
        """
        ranks = self._ranks()
        rank = max([k for k in ranks if k <= _SURVEY_RANK], default=0)
        norms, self.z = self.cloud.survey(self.cloud.leading_directions(rank))
        able, long, largest, centre = self._walk(norms)
        if not in_range and not in_safe_range(largest, centre, self.cloud.width, self.cloud.dtype):
            return False
        hubs, partners = self._sort(norms, int(able), int(long))
        bounds = torch.full_like(self.radius[: len(hubs)], torch.inf)
        for k in ranks:
            if k > rank and len(hubs) * len(partners) <= k * (len(hubs) + len(partners)):
                break  # to compute the remaining pairs costs less than to project their rows
            hubs, partners, bounds = self._screen(hubs, partners, bounds, k)
        self._prove(hubs, partners, bounds, ranks)
        return True

    def _ranks(self) -> list[int]:
        """Return the numbers of directions to screen along: none for few rows, and only what fits the memory bound."""
        V, d = self.cloud.S.shape
        row_bytes = 2 * self.cloud.budget // V
        if row_bytes < _ROW_BYTES:
            need = 2 * _ROW_BYTES * V
            raise ValueError(f"max_bytes={self.cloud.max_bytes} is too little for {V} rows: give at least {need}")
        affordable = (row_bytes - _ROW_BYTES) // (8 * self.cloud.dtype.itemsize)
        ranks = _SCREEN_RANKS[1:] if self._waits else _SCREEN_RANKS
        return [k for k in ranks if k <= min(affordable, d // 2)] if V > _SMALL else []

    def _walk(self, norms: Tensor) -> list[float]:
        """Find a long pair: go from outlying rows to their farthest partners in the survey, twice.

        Returns:
            how many rows can be an end of a longer pair, and how many its longer end; the largest norm, and the
            largest entry of the centre.
        """
        cloud, z, norm2 = self.cloud, self.z, norms.square()
        seeds = torch.cat([norm2.topk(min(8, len(norm2))).indices, z[:, :8].argmax(0), z[:, :8].argmin(0)])
        i, j = [], []
        for _ in range(2):
            estimate = torch.addmm(norm2, z[seeds], z.T, alpha=-2)  # (seeds, V), less a constant in each row
            partners = estimate.topk(min(4, len(norm2)), dim=1).indices
            i.append(seeds[:, None].expand_as(partners).flatten())
            j.append(partners.flatten())
            seeds = partners[:, 0]
        first, second = torch.cat(i), torch.cat(j)
        self.computed += len(first)
        lengths = cloud.pair_lengths(first, second)
        best = lengths.argmax(0, keepdim=True)
        length = lengths[best]
        largest = norms.amax()
        reach = length.to(norms.dtype) / (1 + cloud.rounding)
        able, long = (norms >= reach - largest).sum(), (norms >= reach / 2).sum()
        numbers = torch.stack([able, long, first[best][0], second[best][0]])
        sizes = torch.stack([largest, cloud.centre.abs().amax()])
        self.length, *counts = torch.cat([length, numbers.double(), sizes.double()]).tolist()
        self.pair = ordered(int(counts[2]), int(counts[3]))
        return [*counts[:2], *counts[4:]]

    def _sort(self, norms: Tensor, able: int, long: int) -> tuple[Tensor, Tensor]:
        """Sort the rows that can be an end of a longer pair by decreasing norm, rounded up; of equal rows keep one.

        Returns:
            ranks of the hubs and of their partners.
        """
        self.radius, self.order = norms.mul_(1 + self.cloud.rounding).topk(able)
        if long > _MANY_EQUAL and self._repeats():
            distinct = self.cloud.distinct(self.order)
            self.radius, self.order = self.radius[distinct], self.order[distinct]
            long = int((self.radius >= self.length / 2).sum())
        partners = torch.arange(len(self.order), device=self.order.device)
        return partners[:long], partners

    def _repeats(self) -> bool:
        """Return whether many rows seem to stand more than once: equal ones are neighbours in a sort by norm."""
        at = torch.arange(0, len(self.order) - 1, -(-len(self.order) // 1024), device=self.order.device)
        one, other = (self.cloud.S.index_select(0, self.order[at + k]) for k in (0, 1))
        return 64 * int((one == other).all(1).sum()) > len(at)

    def _offer(self, i: Tensor, j: Tensor) -> None:
        """Measure pairs of rows in fp64 and keep the longest."""
        self.computed += len(i)
        lengths = self.cloud.pair_lengths(i, j)
        longest, best = lengths.max(0, keepdim=True)
        self._keep(*torch.cat([longest, i[best].double(), j[best].double()]).tolist())

    def _keep(self, length: float, i: float, j: float) -> None:
        if length > self.length:
            self.length, self.pair = length, ordered(int(i), int(j))

    def _ranges(self, hubs: Tensor, partners: Tensor) -> tuple[list[int], list[int]]:
        """Return, for each hub, the range of later partners that could be far enough by norms: starts and ends."""
        if self._waits:
            return [0] * len(hubs), [len(partners)] * len(hubs)
        start = torch.searchsorted(partners, hubs, right=True)
        reach = self.radius[hubs] - self.length
        end = torch.searchsorted(-self.radius[partners], reach, right=True)
        starts, ends = torch.stack([start, end]).tolist()
        return starts, ends

    def _tables(self, hubs: Tensor, partners: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return tables whose product has upper bounds of squared distances, from k coordinates."""
        rows = [self.order[side] for side in (hubs, partners)]
        if k <= self.z.shape[1]:
            z = [self.z.index_select(0, side)[:, :k] for side in rows]
        else:
            directions = self.cloud.leading_directions(k)
            z = [self.cloud.survey(directions, side)[1] for side in rows]
        return screen_tables(self.radius[hubs], z[0], self.radius[partners], z[1], self.cloud.rounding)

    def _screen(self, hubs: Tensor, partners: Tensor, bounds: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """Drop hubs and partners whose every pair is too short along k directions."""
        left, right = self._tables(hubs, partners, k)
        if len(hubs) > _MANY_HUBS:
            sample = torch.arange(0, len(hubs), len(hubs) // 64, device=hubs.device)
            sampled, _ = self._bounds(hubs[sample], partners, left[sample], right)
            if float((sampled >= self.length**2).double().mean()) > 0.5:
                return hubs, partners, bounds
        bounds, reached = self._bounds(hubs, partners, left, right)
        open_hubs, open_partners = (largest >= self.length**2 for largest in (bounds, reached))
        some, others = torch.stack([open_hubs.sum(), open_partners.sum()]).tolist()
        kept = _places(open_hubs, some)
        return hubs[kept], partners[_places(open_partners, others)], bounds[kept]

    def _bounds(self, hubs: Tensor, partners: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest bound on a squared distance of each hub to a partner, and of each partner to a hub."""
        starts, ends = self._ranges(hubs, partners)
        by_hub, by_partner, screened = largest_bounds(left, right, starts, ends, self.cloud.budget)
        self.screened += screened
        return by_hub, by_partner

    def _prove(self, hubs: Tensor, partners: Tensor, bounds: Tensor, ranks: Sequence[int]) -> None:
        """Compute the pairs that the screens did not drop, the most promising hubs first."""
        if 2 * len(hubs) < len(self.order):  # otherwise keep their order, in which each pair is computed once
            bounds, order = bounds.sort(descending=True)
            hubs = hubs[order]
        budget, row_bytes = self.cloud.budget, (self.cloud.width + 2) * self.cloud.dtype.itemsize
        most = max(1, min(len(hubs) if self._waits else _MEET_ROWS, budget // (8 * row_bytes)))
        size = most if self._waits else min(32, most)
        table = None
        while len(hubs):
            batch, hubs, bounds = hubs[:size], hubs[size:], bounds[size:]
            starts, ends = self._ranges(batch, partners)
            at = slice(min(starts), max(ends))
            if self._ties:
                self._settle_ties(self.order[batch], self.order[partners[at]])
            else:
                self._meet(batch, partners[at], None if table is None else table[at])
            if not len(hubs):
                return
            open_hubs = bounds >= self.length**2
            kept = _places(open_hubs, int(open_hubs.sum()))
            hubs, bounds = hubs[kept], bounds[kept]
            if table is None and len(hubs) > _MEET_ROWS and not self._waits and not self._ties:
                if k := self._sieve(hubs, partners, ranks):
                    return self._sift(hubs.sort().values, partners, k)
                if size == most and len(partners) * row_bytes <= budget // 2:  # every batch would load them again
                    table = distance_table(
                        self.cloud.points(self.order[partners]), self.radius[partners], self.cloud.rounding, left=False
                    )
            size = min(2 * size, most)

    def _sieve(self, hubs: Tensor, partners: Tensor, ranks: Sequence[int]) -> int:
        """Return by how many coordinates to tell the pairs to measure; 0 if to compute all of them costs no more.

        Costs are in columns of a product, as measured on a CPU: of passes over a tile, and of a pair.
        """
        least, best = 0.75 * (self.cloud.width + 6), 0
        few, many = hubs[:: -(-len(hubs) // 32)], partners[:: -(-len(partners) // 4096)]
        for k in ranks:
            left, right = self._tables(few, many, k)
            share = float((left @ right.T >= self.length**2).double().mean())
            cost = k + 16 + share * 200 * self.cloud.width
            if cost < least:
                least, best = cost, k
        return best

    def _sift(self, hubs: Tensor, partners: Tensor, k: int) -> None:
        """Measure each pair whose bound along k directions reaches the longest.

        Where almost every hub has some such pair, the pairs are still few. They are told from the others in groups of
        16 hubs: a comparison of every bound would cost more than the bounds.
        """
        starts, ends = self._ranges(hubs, partners)
        left, right = self._tables(hubs, partners, k)
        rows, columns = self.order[pad(hubs, (0, -len(hubs) % _GROUP))], self.order[partners]
        left = pad(left, (0, 0, 0, -len(hubs) % _GROUP))  # bounds of zero
        scratch = left.new_empty(_SIFT_ROWS * _SIFT_COLUMNS)
        for a in range(0, len(hubs), _SIFT_ROWS):
            block = left[a : a + _SIFT_ROWS]
            for start in range(starts[a], ends[a], _SIFT_COLUMNS):
                part = right[start : min(start + _SIFT_COLUMNS, ends[a])]
                tile = torch.mm(block, part.T, out=scratch[: len(block) * len(part)].view(len(block), len(part)))
                self.screened += tile.numel()
                groups = tile.view(-1, _GROUP, len(part))
                group, column = (groups.amax(1) >= self.length**2).nonzero(as_tuple=True)
                place, lane = (groups[group, :, column] >= self.length**2).nonzero(as_tuple=True)
                if len(place):
                    self._offer(rows[a + _GROUP * group[place] + lane], columns[start + column[place]])

    def _meet(self, hubs: Tensor, partners: Tensor, table: Tensor | None) -> None:
        """Compute the distances of hubs to partners in full; measure in fp64 those that rounding leaves open."""
        cloud, rows, columns = self.cloud, self.order[hubs], self.order[partners]
        x = distance_table(cloud.points(rows), self.radius[hubs], cloud.rounding, left=True)
        scratch = x.new_empty(0)
        for at, y in self._chunks(partners, columns, len(x)) if table is None else _slices(table):
            scratch = scratch if scratch.numel() else x.new_empty(len(x) * len(y))
            tile = torch.mm(x, y.T, out=scratch[: len(x) * len(y)].view(len(x), len(y)))
            self.computed += tile.numel()
            if self._waits or float(tile.max()) >= self.length**2:
                self._settle(tile, rows, columns[at])

    def _chunks(self, partners: Tensor, columns: Tensor, hubs: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield the table of some partners a chunk at a time, each with its slice."""
        cloud = self.cloud
        extra = (2 * hubs + cloud.width + 2) * cloud.dtype.itemsize
        for at, y in cloud.chunks(columns, extra=extra, longest=None if self._waits else _MEET_COLUMNS):
            yield at, distance_table(y, self.radius[partners[at]], cloud.rounding, left=False)

    def _settle(self, tile: Tensor, rows: Tensor, columns: Tensor) -> None:
        """Measure the longest pair of a tile in fp64, then those that rounding cannot tell from it."""
        top = tile.argmax()[None]
        i, j = rows[top // len(columns)], columns[top % len(columns)]
        length = self.cloud.pair_lengths(i, j)
        number = (tile >= length.clamp_min(self.length).square().to(tile.dtype)).count_nonzero()[None]
        *pair, near = torch.cat([length, i.double(), j.double(), number.double()]).tolist()
        self._keep(*pair)
        if near > _FEW:
            self._ties = 2 * near > tile.numel()  # then all that follows is settled in fp64 at once
            mask = tile >= self.length**2
            self._settle_ties(rows[mask.any(1)], columns[mask.any(0)])
        elif near:
            places = _places((tile >= self.length**2).flatten(), int(near))
            self._offer(rows[places // len(columns)], columns[places % len(columns)])

    def _settle_ties(self, rows: Tensor, columns: Tensor) -> None:
        """Compute the distances of many pairs in fp64, and measure the longest that is longer than what is known.

        A product of fp64 errs by less than the certificate allows for: no more pairs need to be measured than exceed
        the longest by that.
        """
        cloud = self.cloud.double()
        x = cloud.points(rows)
        x2 = x.square().sum(1)
        x = torch.column_stack([x.mul_(-2), x2, torch.ones_like(x2)])
        for at, y in cloud.chunks(
            columns, extra=16 * len(rows) + 8 * cloud.width, longest=None if self._waits else _MEET_COLUMNS
        ):
            y2 = y.square().sum(1)
            tile = x @ torch.column_stack([y, torch.ones_like(y2), y2]).T
            self.computed += tile.numel()
            if float(tile.max()) > self.length**2 * fp64_rounding(cloud.width):
                top = tile.argmax()[None]
                self._offer(rows[top // len(y)], columns[at][top % len(y)])


def _slices(table: Tensor) -> Iterator[tuple[slice, Tensor]]:
    for start in range(0, len(table), _MEET_COLUMNS):
        at = slice(start, start + _MEET_COLUMNS)
        yield at, table[at]


def _places(mask: Tensor, number: int) -> Tensor:
    """Return where a mask (n,) holds, which is in so many places: with the number known, nobody waits for it."""
    places: Tensor = torch.nonzero_static(mask, size=number).squeeze(1)
    return places

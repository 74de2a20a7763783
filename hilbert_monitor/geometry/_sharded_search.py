"""The exact search for the row diameter where rows are on several ranks.

Its steps, bounds and slacks are those of `diameter.py`, and so is its work, of which a rank with 1/W of the rows does
about that share. The leading directions come from all-reduced products with a sample. In a walk the ranks show each
other how far their farthest rows are, and then the rows that are farthest of all. Then the ranks show each other the
coordinates of the hubs, the rows that are long enough to be one end of a longest pair. Each rank screens all hubs
against its own rows, and the largest bounds are all-reduced. Hubs that no screen drops go to all ranks as whole rows,
the most promising first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from ._cloud import PointCloud
from ._screen import largest_bounds, screen_tables
from ._sharded_survey import Ends, centred, in_range, ordered, points, sample_of
from .arithmetic import chunk_length, compute_dtype
from .shards import RowShards

SMALL = 512
"""Up to so many rows, all pairs cost less than a survey."""
SURVEY_RANK, SCREEN_RANKS = 16, (8, 16, 64)
LONGEST, ALONG, PARTNERS = 8, 8, 4
"""Rows that the walk starts from: the longest, and the two ends of leading directions. Partners that each has."""
MANY_HUBS = 2048
"""From here on a screen is tried on a sample first."""
FIRST_BATCH, LARGEST_BATCH = 32, 2048
"""Hubs that meet all rows at a time."""
FEW = 4096
"""Near-longest pairs of a tile that are measured one by one."""


@dataclass
class Shown:
    """A few rows of any rank, the same on every rank."""

    owner: Tensor
    """(n,) ranks."""
    place: Tensor
    """(n,) on their rank."""
    ids: Tensor
    """(n,) which rows of the matrix they are."""


@dataclass
class Hubs:
    """Rows of all ranks that can be the longer end of a longest pair, the same on every rank."""

    owner: Tensor
    """(n,) ranks."""
    place: Tensor
    """(n,) in the order of their rank."""
    radius: Tensor
    """(n,) norms, rounded up."""
    bounds: Tensor
    """(n,) upper bounds of their largest squared distance."""

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.owner)

    def at(self, which: Tensor | slice) -> Hubs:
        """Return some of them."""
        return Hubs(self.owner[which], self.place[which], self.radius[which], self.bounds[which])


def search(shards: RowShards, max_bytes: int) -> ShardedSearch | Ends:
    """Find the longest pair, and prove that there is no longer one; or return the answer where no search is needed."""
    found = ShardedSearch(shards, centred(shards, compute_dtype(shards.rows), 1.0, 1.0, max_bytes))
    if not found.cloud.needs_no_scale(found.largest):
        cloud = in_range(shards, max_bytes)
        if not isinstance(cloud, PointCloud):
            return cloud
        found = ShardedSearch(shards, cloud)
    found.run()
    return found


class ShardedSearch:
    """Branch and bound for the longest pair. It begins with a survey of all rows."""

    def __init__(self, shards: RowShards, cloud: PointCloud) -> None:
        self.shards, self.ranks, self.cloud = shards, shards.ranks, cloud
        self.length, self.pair = 0.0, (0, min(1, shards.number - 1))  # the longest so far, in the cloud's units
        self.screened = self.computed = 0  # of all ranks
        self._local = [0, 0]
        V, d = shards.shape
        self.screen_ranks = [k for k in SCREEN_RANKS if k <= d // 2] if V > SMALL else []
        self.rank = max([k for k in self.screen_ranks if k <= SURVEY_RANK], default=0)
        self.directions = self._directions(self.rank)
        self.seeds, self.largest = self._survey()

    def run(self) -> None:
        """Find the longest pair, and prove that there is no longer one."""
        for _ in range(2):
            self._walk()
        hubs, directions = self._hubs(), self.directions
        for k in self.screen_ranks:
            if k > self.rank:
                if len(hubs) <= k:
                    break  # to meet all rows costs them no more than to be projected
                directions = self._directions(k)
            hubs = self._screen(hubs, k, None if k <= self.rank else directions)
        self._prove(hubs)

    def _survey(self) -> tuple[Shown, Tensor]:
        """Survey all rows, in one pass. Return those that the walk starts from, and the largest norm."""
        along = min(ALONG, self.rank)

        def make() -> Sequence[Tensor]:
            self.norms, self.z = self.cloud.survey(self.directions)
            n, z = len(self.norms), self.z[:, :along]
            longest = self.norms.topk(min(LONGEST, n))
            ends = torch.cat([z, -z], 1).max(0) if n else (z.new_empty(0), self.shards.ids[:0])
            missing = LONGEST + 2 * along - len(longest.values) - len(ends[0])
            values = torch.cat([longest.values, z.new_full((missing,), -torch.inf), ends[0]])
            places = torch.cat([longest.indices, longest.indices.new_zeros(missing), ends[1]])
            return [values, places, self.shards.ids[places] if n else places]

        size = (LONGEST + 2 * along,)
        values, places, ids = self.ranks.gather(
            make, (size, self.cloud.dtype), (size, torch.int64), (size, torch.int64)
        )
        longest = values[:, :LONGEST].flatten().topk(min(LONGEST, self.shards.number))
        owner = torch.cat([longest.indices // LONGEST, values[:, LONGEST:].argmax(0)])
        column = torch.cat([longest.indices % LONGEST, torch.arange(LONGEST, size[0], device=owner.device)])
        return Shown(owner, places[owner, column], ids[owner, column]), longest.values[0]

    def _directions(self, k: int) -> Tensor:
        """Estimate the k leading directions (d, k) of all ranks' points, by subspace iteration on a sample."""
        d, dtype = self.shards.shape[1], self.cloud.dtype
        if not k:
            return self.cloud.centre.new_empty(d, 0)
        samples = []

        def start() -> Tensor:
            sample = points(self.cloud, sample_of(self.shards, dtype, self.cloud.max_bytes))
            samples.append(sample)
            mine = range(self.ranks.place, k, self.ranks.number)  # columns that this rank fills
            basis = sample.new_zeros(d, k)
            if len(sample) and len(mine):
                basis[:, list(mine)] = sample[torch.linspace(0, len(sample) - 1, len(mine)).long()].T
            return basis

        basis = _orthonormal(self.ranks.sum(start, d, k, dtype=dtype))
        for _ in range(2):
            basis = _orthonormal(self.ranks.sum(partial(_squared, samples, basis), d, k, dtype=dtype))
        gram = self.ranks.sum(lambda: (samples[0] @ basis).T @ (samples[0] @ basis), k, k, dtype=dtype)
        directions: Tensor = basis @ torch.linalg.eigh(_finite(gram))[1].flip(1)
        return directions

    def _walk(self) -> None:
        """Go from the seeds to their farthest partners by coordinates. The farthest are the new seeds."""
        seeds, n = self.seeds, len(self.seeds.ids)
        rows = self._shown(seeds.owner, seeds.place, lambda at: self.shards.rows.index_select(0, at), self.cloud.width)

        def partners() -> Sequence[Tensor]:
            z = points(self.cloud, rows) @ self.directions
            estimate = torch.addmm(self.norms.square(), z, self.z.T, alpha=-2)  # less a constant in each row
            far = estimate.topk(min(PARTNERS, len(self.norms)), dim=1)
            missing = (0, PARTNERS - far.values.shape[1])
            ids = self.shards.ids[far.indices]
            return [pad(far.values, missing, value=-torch.inf), pad(far.indices, missing), pad(ids, missing)]

        size = (n, PARTNERS)
        tables = self.ranks.gather(partners, (size, self.cloud.dtype), (size, torch.int64), (size, torch.int64))
        values, places, ids = (table.transpose(0, 1).flatten(1) for table in tables)
        far = values.topk(PARTNERS, dim=1).indices if self.shards.number >= PARTNERS else values.argmax(1)[:, None]
        owner, places, ids = far // PARTNERS, places.gather(1, far), ids.gather(1, far)

        def measure() -> Sequence[Tensor]:
            seed, column = (owner == self.ranks.place).nonzero(as_tuple=True)
            if len(seed):
                self._measure(rows, seeds.ids, seed, places[seed, column])
            return [self._summary()]

        self._agree(*self.ranks.gather(measure, ((5,), torch.float64)))
        self.seeds = Shown(owner[:, 0], places[:, 0], ids[:, 0])

    def _measure(self, rows: Tensor, ids: Tensor, i: Tensor, places: Tensor) -> None:
        """Measure pairs of given rows and rows of this rank in fp64, in the units of the cloud, and keep the longest.

        Args:
            rows: (n, d) as they were given.
            ids: (n,) which rows of the matrix they are.
            i: (pairs,) index into them.
            places: (pairs,) places on this rank.
        """
        cloud = self.cloud
        lengths = torch.empty(len(i), dtype=torch.float64, device=rows.device)
        step = chunk_length(6 * cloud.width * 8, cloud.max_bytes, share=4)
        for start in range(0, len(i), step):
            part = slice(start, start + step)
            a, b = rows[i[part]].double(), self.shards.rows.index_select(0, places[part]).double()
            apart = a.mul_(cloud.pre_scale).sub_(b.mul_(cloud.pre_scale)).mul_(cloud.post_scale)
            lengths[part] = torch.linalg.vector_norm(apart, dim=1)
        self._local[1] += len(i)
        longest = int(lengths.argmax())
        if float(lengths[longest]) > self.length:
            self.length = float(lengths[longest])
            self.pair = ordered(int(ids[i[longest]]), int(self.shards.ids[places[longest]]))

    def _summary(self) -> Tensor:
        return torch.tensor([self.length, *self.pair, *self._local], dtype=torch.float64, device=self.ranks.device)

    def _agree(self, ends: Tensor) -> None:
        """Take over the longest pair of all ranks, the same on each: of equal ones that of the first rank."""
        length, i, j, *_ = ends[int(ends[:, 0].argmax())].tolist()
        self.length, self.pair = length, (int(i), int(j))
        self.screened, self.computed = (int(number) for number in ends[:, 3:].sum(0).tolist())

    def _hubs(self) -> Hubs:
        """Sort the rows of this rank that can be an end of a longer pair, and find the hubs of all ranks."""

        def make() -> Sequence[Tensor]:
            radius = self.norms * (1 + self.cloud.rounding)
            reach = self.largest * (1 + self.cloud.rounding)
            able = (radius >= self.length - reach).nonzero().squeeze(1)
            self.radius, order = radius[able].sort(descending=True)
            self.order = able[order]
            self.partners = torch.arange(len(order), device=order.device)
            return [(self.radius >= self.length / 2).sum()]

        (counts,) = self.ranks.gather(make, ((), torch.int64))
        owner = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
        place = torch.cat([torch.arange(n, device=counts.device) for n in counts.tolist()])
        radius = self._shown(owner, place, lambda at: self.radius[at, None], 1, self.cloud.dtype)[:, 0]
        order = radius.argsort(descending=True, stable=True)
        return Hubs(owner[order], place[order], radius[order], torch.full_like(radius, torch.inf))

    def _shown(
        self, owner: Tensor, place: Tensor, of: Callable[[Tensor], Tensor], width: int, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return numbers (n, width) of rows, which their owners make from the rows' places."""
        dtype = dtype or compute_dtype(self.shards.rows)
        counts = torch.bincount(owner, minlength=self.ranks.number)
        most = int(counts.max()) if len(owner) else 0
        mine = owner == self.ranks.place
        if self.ranks.number * most > 2 * len(owner):  # uneven: a sum moves less than padded tables

            def table() -> Tensor:
                numbers = torch.zeros(len(owner), width, dtype=dtype, device=self.ranks.device)
                numbers[mine] = of(place[mine]).to(dtype)
                return numbers

            return self.ranks.sum(table, len(owner), width, dtype=dtype)
        (tables,) = self.ranks.gather(
            lambda: [pad(of(place[mine]).to(dtype), (0, 0, 0, most - int(mine.sum())))], ((most, width), dtype)
        )
        numbers = tables.new_empty(len(owner), width)
        for rank, count in enumerate(counts.tolist()):
            numbers[owner == rank] = tables[rank, :count]
        return numbers

    def _screen(self, hubs: Hubs, k: int, directions: Tensor | None) -> Hubs:
        """Drop hubs, and rows of this rank, whose every pair is too short along k directions."""

        def coordinates(places: Tensor) -> Tensor:
            rows = self.order[places]
            return self.z[rows, :k] if directions is None else self.cloud.survey(directions, rows)[1]

        if len(hubs) > MANY_HUBS:
            sample = hubs.at(torch.arange(0, len(hubs), len(hubs) // 64, device=hubs.owner.device))
            bounds, _ = self._bounds(sample, k, coordinates)
            if float((bounds >= self.length**2).double().mean()) > 0.5:
                return hubs
        bounds, reached = self._bounds(hubs, k, coordinates)
        self.partners = self.partners[~(reached < self.length**2)]
        return replace(hubs, bounds=bounds).at((~(bounds < self.length**2)).nonzero().squeeze(1))

    def _bounds(self, hubs: Hubs, k: int, coordinates: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Return the largest bound of each hub to a row of any rank, and of each row of this rank to a hub."""
        local = []
        z_hubs = self._shown(hubs.owner, hubs.place, coordinates, k, self.cloud.dtype)

        def make() -> Tensor:
            z = coordinates(self.partners)
            left, right = screen_tables(hubs.radius, z_hubs, self.radius[self.partners], z, self.cloud.rounding)
            starts, ends = self._ranges(hubs.radius)
            by_hub, by_partner, screened = largest_bounds(left, right, starts, ends, self.cloud.budget)
            self._local[0] += screened
            local.append(by_partner)
            return by_hub

        return self.ranks.max(make, len(hubs)).to(self.cloud.dtype), local[0]

    def _ranges(self, radius: Tensor) -> list[list[int]]:
        """Return, for each hub, the range of partners that are no longer than it and could be far enough by norms."""
        partners = -self.radius[self.partners]
        start = torch.searchsorted(partners, -radius)
        end = torch.searchsorted(partners, radius - self.length, right=True)
        return torch.stack([start, torch.maximum(start, end)]).tolist()

    def _prove(self, hubs: Hubs) -> None:
        """Let the hubs that no screen dropped meet the rows of all ranks, the most promising first."""
        d = self.shards.shape[1]
        hubs = hubs.at(hubs.bounds.argsort(descending=True, stable=True))
        most = max(1, min(LARGEST_BATCH, self.cloud.budget // (4 * d * self.cloud.dtype.itemsize)))
        size = min(FIRST_BATCH, most)
        while len(hubs):
            batch, hubs = hubs.at(slice(None, size)), hubs.at(slice(size, None))
            who = batch.owner, batch.place
            rows = self._shown(*who, lambda at: self.shards.rows.index_select(0, self.order[at]), d)
            ids = self._shown(*who, lambda at: self.shards.ids[self.order[at]][:, None], 1, torch.float64)
            meet = partial(self._meet, batch.radius, rows, ids[:, 0].long())
            (ends,) = self.ranks.gather(meet, ((5,), torch.float64))
            self._agree(ends)
            hubs = hubs.at((~(hubs.bounds < self.length**2)).nonzero().squeeze(1))
            size = min(2 * size, most)

    def _meet(self, radius: Tensor, rows: Tensor, ids: Tensor) -> Sequence[Tensor]:
        """Compute the distances of hubs to rows of this rank in full; measure in fp64 what rounding leaves open."""
        cloud, up = self.cloud, 1 + 3 * self.cloud.rounding
        starts, ends = self._ranges(radius)
        places = self.order[self.partners[min(starts) : max(ends)]]
        x = points(cloud, rows)
        x2 = x.square().sum(1) * up
        for at, y in cloud.chunks(places, extra=2 * len(x) * cloud.dtype.itemsize, longest=1024):
            y2 = y.square().sum(1) * up
            tile = torch.addmm(y2, x, y.T, alpha=-2).add_(x2[:, None])
            self._local[1] += tile.numel()
            if float(tile.max()) < self.length**2:
                continue
            i, j = (tile >= self.length**2).nonzero(as_tuple=True)
            if len(i) > FEW:  # ties: the longest in fp64 stands for all of them
                i, j = torch.unique(i), torch.unique(j)
                x64, y64 = (points(cloud.double(), part) for part in (rows[i], self.shards.rows[places[at][j]]))
                tile64 = torch.addmm(y64.square().sum(1), x64, y64.T, alpha=-2).add_(x64.square().sum(1)[:, None])
                top = int(tile64.argmax())
                i, j = i[top // len(y64)][None], j[top % len(y64)][None]
            self._measure(rows, ids, i, places[at][j])
        return [self._summary()]


def _squared(samples: Sequence[Tensor], basis: Tensor) -> Tensor:
    """Return A'A Q for the rows A of a sample."""
    return samples[0].T @ (samples[0] @ basis)


def _finite(x: Tensor) -> Tensor:
    """Return x with zeros where it is not finite: rows out of range get directions of no use, and then a scale."""
    return x.nan_to_num(0.0, 0.0, 0.0)


def _orthonormal(x: Tensor) -> Tensor:
    q: Tensor = torch.linalg.qr(_finite(x))[0]
    return q

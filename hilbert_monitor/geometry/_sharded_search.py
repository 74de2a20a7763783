"""The exact search for the row diameter where rows are on several ranks.

Its steps, bounds and slacks are those of `diameter.py`, and so is its work, of which a rank with 1/W of the rows does
about that share. What ranks tell each other costs more than what they compute where rows are short, so they speak
seldom: eight times where few hubs are left after the screen, as in the increments that optimizers make.

1. They agree that they measure one matrix (`shards.py`).
2. Directions. Each shows the mean and the axes of a sample of its rows (`_sharded_directions.py`).
3. Survey. Each shows the coordinates of its outlying rows.
4. Walk. Each looks among its own rows for those farthest from the outlying ones of all, and shows some of both as
   whole rows, with its largest norms. So all know a long pair, and how many hubs each has: rows that are long enough to
   be one end of a longer pair.
5. Each shows the coordinates of its hubs.
6. Screen. Each bounds the distances of all hubs to its own rows. The largest bounds are all-reduced.
7. Hubs that no screen drops are shown as whole rows, the most promising first.
8. Prove. Each lets them meet its own rows, and shows the longest pair.

Where more than a batch of hubs is left, a screen along more directions takes four collectives, and each batch two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from ._cloud import PointCloud
from ._ranks import Form
from ._screen import largest_bounds, screen_tables
from ._sharded_directions import SampleScatter, Scales
from ._sharded_survey import Ends, Outliers, in_range, ordered, padded, points
from .arithmetic import chunk_length, compute_dtype
from .shards import RowShards

SMALL = 512
"""Up to so many rows, all pairs cost less than a survey."""
SURVEY_RANK, SCREEN_RANKS = 16, (8, 16, 64)
LONGEST, ALONG = 8, 8
"""Rows that the walk starts from: the longest, and the two ends of leading directions."""
PARTNERS, LEAST_PARTNERS = 32, 4
"""Rows far from one of those: of all ranks together, and of a rank."""
RADII, LEAST_RADII = 4096, 256
"""Norms that all ranks together show each other, and a rank."""
MANY_HUBS = 4096
"""From here on a screen is tried on a sample first."""
FIRST_BATCH, LARGEST_BATCH = 256, 2048
"""Hubs that meet all rows at a time."""
FEW = 4096
"""Near-longest pairs of a tile that are measured one by one."""


@dataclass
class Seeds:
    """A few rows of any rank that the walk starts from, the same on every rank."""

    owner: Tensor
    """(n,) ranks."""
    place: Tensor
    """(n,) on their rank."""
    norm: Tensor
    """(n,)."""
    z: Tensor
    """(n, k) coordinates."""


@dataclass
class Hubs:
    """Rows of all ranks that can be the longer end of a longest pair, the same on every rank, the longest first."""

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
    found = ShardedSearch(shards, (compute_dtype(shards.rows), 1.0, 1.0), max_bytes)
    if not found.cloud.needs_no_scale(found.largest):
        cloud = in_range(shards, max_bytes)
        if not isinstance(cloud, PointCloud):
            return cloud
        found = ShardedSearch(shards, (cloud.dtype, cloud.pre_scale, cloud.post_scale), max_bytes)
    found.run()
    return found


class ShardedSearch:
    """Branch and bound for the longest pair. It begins with a survey of all rows."""

    def __init__(self, shards: RowShards, scales: Scales, max_bytes: int) -> None:
        self.shards, self.ranks, self.scales, self.max_bytes = shards, shards.ranks, scales, max_bytes
        self.length, self.pair = 0.0, (0, min(1, shards.number - 1))  # the longest so far, in the cloud's units
        self.screened = self.computed = 0  # of all ranks
        self._local = [0, 0]
        V, d = shards.shape
        self.screen_ranks = [k for k in SCREEN_RANKS if k <= d // 2] if V > SMALL else []
        self.rank = max([k for k in self.screen_ranks if k <= SURVEY_RANK], default=0)
        scatter = SampleScatter(shards, self.rank, scales, max_bytes)
        self.cloud = scatter.cloud
        self.seeds, self.largest = self._survey(scatter)

    def run(self) -> None:
        """Find the longest pair, and prove that there is no longer one."""
        hubs = self._hubs(self._walk())
        surveyed = [k for k in self.screen_ranks if k <= self.rank]
        if surveyed:
            hubs = self._screen(hubs, surveyed, lambda places: self.z[places])
        for k in self.screen_ranks[len(surveyed) :]:
            if len(hubs) > FIRST_BATCH:  # fewer meet all rows in one batch, which is four collectives less
                hubs = self._screen(hubs, [k], self._projection(k))
        self._prove(hubs)

    def _projection(self, k: int) -> Callable[[Tensor], Tensor]:
        """Return coordinates along k directions as a function of the places of rows."""
        scatter = SampleScatter(self.shards, k, self.scales, self.max_bytes)
        scatter.agree(*self.ranks.gather(lambda: [scatter.checksum()], ((), torch.int64)))
        return lambda places: self.cloud.survey(scatter.directions, places)[1]

    def _survey(self, scatter: SampleScatter) -> tuple[Seeds, Tensor]:
        """Survey all rows, in one pass. Return those that the walk starts from, and the largest norm."""
        along, dtype = min(ALONG, self.rank), self.cloud.dtype
        size = LONGEST + 2 * along

        def make() -> Sequence[Tensor]:
            self.norms, self.z = self.cloud.survey(scatter.directions)
            n, z = len(self.norms), self.z[:, :along]
            longest = self.norms.topk(min(LONGEST, n))
            ends = torch.cat([z, -z], 1).max(0) if n else (z.new_empty(0), self.shards.ids[:0])
            missing = size - len(longest.values) - len(ends[0])
            values = torch.cat([longest.values, z.new_full((missing,), -torch.inf), ends[0]])
            places = torch.cat([longest.indices, longest.indices.new_zeros(missing), ends[1]])
            beside = [self.norms[places], self.z[places]] if n else [values, z.new_zeros(size, self.rank)]
            return [scatter.checksum(), values, places, *beside]

        checksums, values, places, norms, z = self.ranks.gather(
            make,
            ((), torch.int64),
            ((size,), dtype),
            ((size,), torch.int64),
            ((size,), dtype),
            ((size, self.rank), dtype),
        )
        if not scatter.agree(checksums):
            return self._survey(scatter)
        longest = values[:, :LONGEST].flatten().topk(min(LONGEST, self.shards.number))
        owner = torch.cat([longest.indices // LONGEST, values[:, LONGEST:].argmax(0)])
        column = torch.cat([longest.indices % LONGEST, torch.arange(LONGEST, size, device=owner.device)])
        at = owner, column
        return Seeds(owner, places[at], norms[at], z[at]), longest.values[0]

    def _walk(self) -> Tensor:
        """Find a long pair among the seeds and rows far from them. Return the largest norms of each rank, rounded up.

        Returns:
            (ranks, n) norms, -1 where a rank has fewer rows.
        """
        seeds, d = self.seeds, self.shards.shape[1]
        here = int(torch.bincount(seeds.owner).max())
        far = max(LEAST_PARTNERS, -(-PARTNERS // self.ranks.number))
        n = max(LEAST_RADII, -(-RADII // self.ranks.number))

        def make() -> Sequence[Tensor]:
            far2 = torch.addmm(self.norms.square(), seeds.z, self.z.T, alpha=-2).add_(seeds.norm.square()[:, None])
            partners = far2.amax(0).topk(min(far, len(self.norms))).indices
            places = torch.cat([seeds.place[seeds.owner == self.ranks.place], partners])
            radius = self._rounded_up(self.norms.topk(min(n, len(self.norms))).values)
            return [*padded(self.shards, places, here + far), pad(radius, (0, n - len(radius)), value=-1.0)]

        rows, ids, radii = self.ranks.gather(
            make, ((here + far, d), self.shards.rows.dtype), ((here + far,), torch.int64), ((n,), self.cloud.dtype)
        )
        walk = Outliers(rows[ids >= 0], ids[ids >= 0])
        self.length, (i, j) = walk.longest(self.cloud)
        self.pair = ordered(int(walk.ids[i]), int(walk.ids[j]))
        self._local[1] += len(walk.ids) * (len(walk.ids) - 1) // 2
        return radii

    def _rounded_up(self, norms: Tensor) -> Tensor:
        return norms * (1 + self.cloud.rounding)

    @cached_property
    def order(self) -> Tensor:
        """Places (n,) of this rank's rows that can be an end of a longer pair, the longest first."""
        radius = self._rounded_up(self.norms)
        able = (radius >= self.length - self._rounded_up(self.largest)).nonzero().squeeze(1)
        return able[radius[able].argsort(descending=True)]

    @cached_property
    def radius(self) -> Tensor:
        """Their norms (n,), rounded up."""
        return self._rounded_up(self.norms[self.order])

    @cached_property
    def partners(self) -> Tensor:
        """Indices of those rows that no screen has dropped."""
        return torch.arange(len(self.order), device=self.order.device)

    def _hubs(self, radii: Tensor) -> Hubs:
        """Find the hubs of all ranks by their largest norms (ranks, n). If these are too few, the ranks show more."""
        half = self.length / 2
        if bool((radii[:, -1] >= half).any()):
            (counts,) = self.ranks.gather(lambda: [(self.radius >= half).sum()], ((), torch.int64))
            n = int(counts.max())
            (radii,) = self.ranks.gather(
                lambda: [pad(self.radius[:n], (0, max(0, n - len(self.radius))), value=-1.0)], ((n,), self.cloud.dtype)
            )
        owner, place = (radii >= half).nonzero(as_tuple=True)
        radius, order = radii[owner, place].sort(descending=True, stable=True)
        return Hubs(owner[order], place[order], radius, torch.full_like(radius, torch.inf))

    def _shown(self, hubs: Hubs, of: Callable[[Tensor], Sequence[Tensor]], *forms: Form) -> list[Tensor]:
        """Return what the owners of hubs make of the hubs' places."""
        return self.ranks.shown(hubs.owner, lambda mine: of(self.order[hubs.place[mine]]), *forms)

    def _screen(self, hubs: Hubs, ranks: Sequence[int], coordinates: Callable[[Tensor], Tensor]) -> Hubs:
        """Drop hubs, and rows of this rank, whose every pair is too short along some directions.

        Args:
            hubs: those that are left.
            ranks: along how many directions, one number after the other.
            coordinates: of rows of this rank, from their places, along as many as the last number.
        """
        if len(hubs) > MANY_HUBS:
            sample = hubs.at(torch.arange(0, len(hubs), len(hubs) // 64, device=hubs.owner.device))
            bounds, _ = self._bounds(sample, ranks, coordinates)
            if float((bounds >= self.length**2).double().mean()) > 0.5:
                return hubs
        bounds, self.partners = self._bounds(hubs, ranks, coordinates)
        return replace(hubs, bounds=bounds).at((~(bounds < self.length**2)).nonzero().squeeze(1))

    def _bounds(
        self, hubs: Hubs, ranks: Sequence[int], coordinates: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return the largest bound of each hub to a row of any rank, and the rows of this rank that reach a hub.

        A hub too far from being far from any row of this rank is not screened again here, whatever the others find.
        """
        left = []
        (z_hubs,) = self._shown(hubs, lambda places: [coordinates(places)], ((ranks[-1],), self.cloud.dtype))

        def make() -> Tensor:
            bounds, near = torch.full_like(hubs.radius, torch.inf), torch.arange(len(hubs), device=z_hubs.device)
            partners = self.partners
            z = coordinates(self.order[partners])
            for k in ranks:
                radius, partner_radius = hubs.radius[near], self.radius[partners]
                tables = screen_tables(radius, z_hubs[near, :k], partner_radius, z[:, :k], self.cloud.rounding)
                starts, ends = self._ranges(radius, partner_radius)
                by_hub, by_partner, screened = largest_bounds(*tables, starts, ends, self.cloud.budget)
                self._local[0] += screened
                bounds[near] = by_hub
                near = near[~(by_hub < self.length**2)]
                reached = ~(by_partner < self.length**2)
                partners, z = partners[reached], z[reached]
            left.append(partners)
            return bounds

        return self.ranks.max(make, len(hubs), dtype=self.cloud.dtype), left[0]

    def _ranges(self, radius: Tensor, partners: Tensor) -> list[list[int]]:
        """Return, for each hub, the range of partners that are no longer than it and could be far enough by norms."""
        start = torch.searchsorted(-partners, -radius)
        end = torch.searchsorted(-partners, radius - self.length, right=True)
        return torch.stack([start, torch.maximum(start, end)]).tolist()

    def _prove(self, hubs: Hubs) -> None:
        """Let the hubs that no screen dropped meet the rows of all ranks, the most promising first."""
        d, dtype = self.shards.shape[1], self.shards.rows.dtype
        hubs = hubs.at(hubs.bounds.argsort(descending=True, stable=True))
        most = max(1, min(LARGEST_BATCH, self.cloud.budget // (4 * d * self.cloud.dtype.itemsize)))
        size = min(FIRST_BATCH, most)
        while True:
            batch, hubs = hubs.at(slice(None, size)), hubs.at(slice(size, None))
            rows, ids = self._shown(
                batch,
                lambda places: [self.shards.rows.index_select(0, places), self.shards.ids[places]],
                ((d,), dtype),
                ((), torch.int64),
            )
            self._agree(*self.ranks.gather(partial(self._meet, batch.radius, rows, ids), ((5,), torch.float64)))
            hubs = hubs.at((~(hubs.bounds < self.length**2)).nonzero().squeeze(1))
            if not len(hubs):
                return
            size = min(2 * size, most)

    def _meet(self, radius: Tensor, rows: Tensor, ids: Tensor) -> Sequence[Tensor]:
        """Compute the distances of hubs to rows of this rank in full; measure in fp64 what rounding leaves open."""
        cloud, up = self.cloud, 1 + 3 * self.cloud.rounding
        starts, ends = self._ranges(radius, self.radius[self.partners])
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

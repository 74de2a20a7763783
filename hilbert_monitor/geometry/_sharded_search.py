"""The exact search for the row diameter where rows are on several ranks, from what the bracket has surveyed.

The leading directions come from all-reduced products with a sample. Then the ranks show each other the coordinates of
the hubs, the rows that are long enough to be one end of a longest pair. Each rank screens all hubs against its own
rows, and the largest bounds are all-reduced. Hubs that no screen drops go to all ranks as whole rows, the most
promising first. Bounds, slacks and the order of the steps are those of `diameter.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from ._screen import largest_bounds, screen_tables
from ._sharded_survey import Outliers, Survey, ordered, padded, points, sample_of
from .arithmetic import chunk_length, compute_dtype
from .shards import RowShards

SMALL = 512
"""Up to so many rows, all pairs cost less than a survey."""
SURVEY_RANK, SCREEN_RANKS = 16, (8, 16, 64)
MANY_HUBS = 2048
"""From here on a screen is tried on a sample first."""
FIRST_BATCH, LARGEST_BATCH = 32, 2048
"""Hubs that meet all rows at a time."""
FEW = 4096
"""Near-longest pairs of a tile that are measured one by one."""


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


class ShardedSearch:
    """Branch and bound for the longest pair, from what the bracket has surveyed."""

    def __init__(self, shards: RowShards, found: Survey) -> None:
        self.shards, self.ranks, self.cloud = shards, shards.ranks, found.cloud
        self.norms, self.seeds = found.norms, found.outliers
        self.length, self.pair = found.length, found.pair
        self.largest = found.longest * (1 + self.cloud.rounding)
        self.screened = self.computed = 0  # of all ranks
        self._local = [0, 0]

    def run(self) -> None:
        """Find the longest pair, and prove that there is no longer one."""
        V, d = self.shards.shape
        ranks = [k for k in SCREEN_RANKS if k <= d // 2] if V > SMALL else []
        rank = max([k for k in ranks if k <= SURVEY_RANK], default=0)
        directions = self._directions(rank)
        self.z = self.norms.new_empty(len(self.norms), 0)
        for _ in range(2):
            self._walk(directions)
        hubs = self._hubs()
        for k in ranks:
            if k > rank:
                if len(hubs) <= k:
                    break  # to meet all rows costs them no more than to be projected
                directions = self._directions(k)
            hubs = self._screen(hubs, k, None if k <= rank else directions)
        self._prove(hubs)

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

        basis, _ = torch.linalg.qr(self.ranks.sum(start, d, k, dtype=dtype))
        for _ in range(2):
            product = self.ranks.sum(partial(_squared, samples, basis), d, k, dtype=dtype)
            basis, _ = torch.linalg.qr(product)
        gram = self.ranks.sum(lambda: (samples[0] @ basis).T @ (samples[0] @ basis), k, k, dtype=dtype)
        directions: Tensor = basis @ torch.linalg.eigh(gram)[1].flip(1)
        return directions

    def _walk(self, directions: Tensor) -> None:
        """Go from the seeds to their farthest partners by coordinates, on each rank. The farthest are the new seeds."""

        def make() -> Sequence[Tensor]:
            if directions.shape[1] and not self.z.shape[1]:
                _, self.z = self.cloud.survey(directions)
            if not len(self.norms):
                return [*padded(self.shards, self.shards.ids, 2), self._summary()]
            x = points(self.cloud, self.seeds.rows)
            estimate = torch.addmm(self.norms.square(), x @ directions, self.z.T, alpha=-2)
            partners = estimate.topk(min(4, len(self.norms)), dim=1).indices
            seed = torch.arange(len(x), device=x.device).repeat_interleave(partners.shape[1])
            lengths = self._measure(self.seeds.rows, self.seeds.ids, seed, partners.flatten())
            far = lengths.topk(min(2, len(lengths))).indices
            return [*padded(self.shards, partners.flatten()[far], 2), self._summary()]

        d = self.shards.shape[1]
        rows, ids, ends = self.ranks.gather(
            make, ((2, d), self.shards.rows.dtype), ((2,), torch.int64), ((5,), torch.float64)
        )
        self.seeds = Outliers(rows[ids >= 0], ids[ids >= 0])
        self._agree(ends)

    def _measure(self, rows: Tensor, ids: Tensor, i: Tensor, places: Tensor) -> Tensor:
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
        return lengths

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
            able = (radius >= self.length - self.largest).nonzero().squeeze(1)
            self.radius, order = radius[able].sort(descending=True)
            self.order = able[order]
            self.partners = torch.arange(len(order), device=order.device)
            return [(self.radius >= self.length / 2).sum()]

        (counts,) = self.ranks.gather(make, ((), torch.int64))
        owner = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
        place = torch.cat([torch.arange(n, device=counts.device) for n in counts.tolist()])
        hubs = Hubs(owner, place, owner.new_zeros(len(owner), dtype=self.cloud.dtype), torch.empty(0))
        radius = self._shown(hubs, lambda places: self.radius[places, None], 1)[:, 0]
        order = radius.argsort(descending=True, stable=True)
        return Hubs(owner[order], place[order], radius[order], torch.full_like(radius, torch.inf))

    def _shown(
        self, hubs: Hubs, of: Callable[[Tensor], Tensor], width: int, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return (hubs, width) numbers of hubs, which their owners make from the hubs' places in their order."""
        dtype = dtype or self.cloud.dtype
        counts = torch.bincount(hubs.owner, minlength=self.ranks.number)
        most = int(counts.max()) if len(hubs) else 0
        mine = hubs.place[hubs.owner == self.ranks.place]
        if self.ranks.number * most > 2 * len(hubs):  # uneven: a sum moves less than padded tables

            def table() -> Tensor:
                numbers = torch.zeros(len(hubs), width, dtype=dtype, device=self.ranks.device)
                numbers[hubs.owner == self.ranks.place] = of(mine).to(dtype)
                return numbers

            return self.ranks.sum(table, len(hubs), width, dtype=dtype)
        (tables,) = self.ranks.gather(
            lambda: [pad(of(mine).to(dtype), (0, 0, 0, most - len(mine)))], ((most, width), dtype)
        )
        numbers = tables.new_empty(len(hubs), width)
        for rank, count in enumerate(counts.tolist()):
            numbers[hubs.owner == rank] = tables[rank, :count]
        return numbers

    def _screen(self, hubs: Hubs, k: int, directions: Tensor | None) -> Hubs:
        """Drop hubs, and rows of this rank, whose every pair is too short along k directions."""

        def coordinates(places: Tensor) -> Tensor:
            rows = self.order[places]
            return self.z[rows, :k] if directions is None else self.cloud.survey(directions, rows)[1]

        if len(hubs) > MANY_HUBS:
            sample = hubs.at(torch.arange(0, len(hubs), len(hubs) // 64, device=hubs.owner.device))
            bounds, _ = self._bounds(sample, self._shown(sample, coordinates, k), coordinates)
            if float((bounds >= self.length**2).double().mean()) > 0.5:
                return hubs
        bounds, reached = self._bounds(hubs, self._shown(hubs, coordinates, k), coordinates)
        self.partners = self.partners[~(reached < self.length**2)]
        return replace(hubs, bounds=bounds).at((~(bounds < self.length**2)).nonzero().squeeze(1))

    def _bounds(self, hubs: Hubs, z_hubs: Tensor, coordinates: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Return the largest bound of each hub to a row of any rank, and of each row of this rank to a hub."""
        local = []

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
        dtype = compute_dtype(self.shards.rows)
        hubs = hubs.at(hubs.bounds.argsort(descending=True, stable=True))
        most = max(1, min(LARGEST_BATCH, self.cloud.budget // (4 * d * self.cloud.dtype.itemsize)))
        size = min(FIRST_BATCH, most)
        while len(hubs):
            batch, hubs = hubs.at(slice(None, size)), hubs.at(slice(size, None))
            rows = self._shown(batch, lambda places: self.shards.rows.index_select(0, self.order[places]), d, dtype)
            ids = self._shown(batch, lambda places: self.shards.ids[self.order[places]][:, None], 1, torch.float64)
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

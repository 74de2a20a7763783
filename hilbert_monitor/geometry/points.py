"""Rows as points about a centre, scaled so that squares stay in range, and loaded chunk by chunk."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from .numerics import compute_dtype, on_host, power_of_two_scale
from .sharding import RowShards, RowSource

SAMPLE = 512
"""Rows of the even sample from which centres and directions are estimated. More rows give no better ones."""
_RANGE = {torch.float32: (1e-12, 1e12), torch.float64: (1e-100, 1e100)}
"""Smallest spread and largest magnitude of rows whose squares stay in the range of the dtype."""
_GOLDEN = (math.sqrt(5) - 1) / 2


class Scales(NamedTuple):
    """Dtype of the points, and the powers of two that rows are multiplied by before and after they are centred."""

    dtype: torch.dtype
    pre: float = 1.0
    post: float = 1.0

    def of_rows(self, length: Any) -> Any:
        """Convert lengths among points to lengths among the rows as given."""
        return length / self.post / self.pre


@dataclass(frozen=True)
class CentredRows:
    """Points x_i = (s_i * pre - centre) * post, in fp32 or fp64.

    A good centre makes norms small, and with them the rounding of distances. The scales are one, unless squares of the
    rows would leave the range of the dtype.
    """

    rows: RowSource
    centre: Tensor
    """(d,), in units of the rows times pre."""
    scales: Scales
    max_bytes: int
    """Bound on scratch memory."""

    @property
    def budget(self) -> int:
        """Bytes for one chunk of points and what the caller makes of it: a quarter of all."""
        return self.max_bytes // 4

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the points."""
        return self.scales.dtype

    @property
    def rounding(self) -> float:
        """Relative error of a dot product of two points."""
        return rounding(self.rows.shape[1], self.dtype)

    def __len__(self) -> int:
        """Return the number of points."""
        return len(self.rows)

    def moved_by(self, z: Tensor) -> CentredRows:
        """Return the same points about another centre, at z (d,) in their units."""
        return replace(self, centre=(self.centre.double() + z.double() / self.scales.post).to(self.centre.dtype))

    def double(self) -> CentredRows:
        """Return the same points in fp64."""
        return replace(self, centre=self.centre.double(), scales=self.scales._replace(dtype=torch.float64))

    def points(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """Centre and scale rows (n, d), which may be another rank's; into `out` if it is given and has room."""
        rows = _times(rows.to(self.dtype), self.scales.pre)
        rows = torch.sub(rows, self.centre, out=None if out is None else out[: len(rows)])
        return rows if self.scales.post == 1.0 else rows.mul_(self.scales.post)

    def chunks(
        self, index: Tensor | None = None, *, extra: int = 0, longest: int = 0
    ) -> Iterator[tuple[slice, Tensor]]:
        """Yield slices and their points, all or those of `index`. The next chunk overwrites the last one's memory.

        Args:
            index: (n,) rows to load.
            extra: bytes of scratch that the caller needs for each point.
            longest: most points in a chunk, in place of what fits the cache.
        """
        rows, d = self.rows, self.rows.shape[1]
        if index is not None:
            rows = RowSource(index, form=self.rows.take, width=d, dtype=self.rows.dtype)
        memory = None
        for at, chunk in rows.chunks(self.max_bytes, share=4, dtype=self.dtype, copies=3, extra=extra, longest=longest):
            if on_host(rows) and not rows.shares_memory(chunk):
                memory = chunk
            elif memory is None and len(chunk) < len(rows):
                memory = self.centre.new_empty(len(chunk), d)
            yield at, self.points(chunk, memory)

    def project(self, directions: Tensor, index: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return norms (n,) and coordinates (n, k) along directions (d, k), of all points or of some."""
        n = len(self) if index is None else len(index)
        norms = torch.empty(n, dtype=self.dtype, device=self.rows.device)
        coordinates = torch.empty(n, directions.shape[1], dtype=self.dtype, device=self.rows.device)
        for at, x in self.chunks(index):
            torch.linalg.vector_norm(x, dim=1, out=norms[at])
            if directions.shape[1]:
                torch.mm(x, directions, out=coordinates[at])
        return norms, coordinates

    def norms(self, index: Tensor | None = None) -> Tensor:
        """Return the distances (n,) of all points, or of some, from the centre: one pass."""
        S = self.rows.tensor
        if index is None and S is not None and not on_host(S) and self.scales == Scales(S.dtype):
            # Writes nothing but the result. On a CPU it takes half as long again as the two steps of `project`.
            return torch.cdist(S, self.centre[None], compute_mode="donot_use_mm_for_euclid_dist")[:, 0]
        return self.project(self.centre.new_empty(len(self.centre), 0), index)[0]

    def distinct(self, index: Tensor, size: Tensor) -> Tensor:
        """Return places (n,) in `index`, in increasing order, of rows that are all different: one of each kind.

        Sorts rows by their distance from a point at about `size` from the centre, and compares neighbours. A different
        row at the same distance, to the last bit, can separate equal rows: then both stay.
        """
        d = self.rows.shape[1]
        about = torch.arange(1, d + 1, device=index.device).to(self.dtype).mul_(_GOLDEN).frac_().sub_(0.5)
        about.mul_(size * (2 / math.sqrt(d)))
        order = self.moved_by(about).norms(index).argsort()
        rows = index[order]
        new = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
        step = max(1, min(4096, self.budget // (5 * d * 8)))
        for at in range(1, len(rows), step):
            one, other = (self.rows.take(rows[at - k : at - k + step]) for k in (0, 1))
            new[at : at + step] = (one != other[: len(one)]).any(1)
        return order[new].sort().values


def _times(rows: Tensor, scale: float) -> Tensor:
    return rows if scale == 1.0 else rows * scale


def rounding(d: int, dtype: torch.dtype) -> float:
    """Return the relative error (d + 8) u of a dot product of length d, with u the unit roundoff.

    |fl(x.y) - x.y| <= d u |x| |y|. The other eight units are for points, square roots, and numbers cast to fp32.
    """
    return (d + 8) * torch.finfo(dtype).eps / 2


def ordered(i: int, j: int) -> tuple[int, int]:
    """Return a pair of ids, the smaller one first."""
    return (i, j) if i < j else (j, i)


# Centres and directions, from a sample of all ranks' rows


def from_sample(
    shards: RowShards, scales: Scales, max_bytes: int, make: Callable[[Tensor], Tensor], *shape: int
) -> Tensor:
    """Return on all ranks what the first rank makes of an even sample of all rows. Entries not finite become zero.

    Args:
        shards: rows of this rank.
        scales: of the points.
        max_bytes: bound on scratch memory.
        make: function from sampled rows (n, d), times `scales.pre`, to a tensor of this shape.
        shape: of the result.
    """
    d, dtype = shards.shape[1], scales.dtype
    step = sample_step(shards, dtype, max_bytes)
    sizes = [-(-count // step) for count in shards.counts]

    def own() -> Sequence[Tensor]:
        rows = _times(shards.rows.chunk(0, len(shards.rows), step).to(dtype), scales.pre)
        missing = max(sizes) - len(rows)
        return [pad(rows, (0, 0, 0, missing)) if missing else rows]

    (tables,) = shards.ranks.gather(own, ((max(sizes), d), dtype))

    def first() -> Tensor:
        if shards.ranks.rank:
            return torch.zeros(shape, dtype=dtype)  # adding zero changes no bit
        sample = torch.cat([table[:size] for table, size in zip(tables, sizes, strict=True)])
        return make(sample).nan_to_num(0.0, 0.0, 0.0)

    return shards.ranks.sum(first, *shape, dtype=dtype)


def sample_step(shards: RowShards, dtype: torch.dtype, max_bytes: int, most: int = SAMPLE) -> int:
    """Return the stride of an even sample that fits the memory bound with room to work on it in a dtype."""
    V, d = shards.shape
    return -(-V // min(most, max(1, max_bytes // (16 * d * dtype.itemsize))))


def mean_row(rows: Tensor) -> Tensor:
    """Return the mean (d,) of rows (n, d), exact where they are equal."""
    return rows[0] + (rows - rows[0]).mean(0)


def leading_directions(sample: Tensor, k: int) -> Tensor:
    """Estimate the k leading directions (d, k) of rows (n, d), orthonormal, by subspace iteration.

    Starts from rows of the sample, so it draws no random numbers. Rows that are not finite, or whose squares are not,
    give useless directions. The leading ones come first, but only nearly.
    """
    k = min(k, *sample.shape)
    start = sample[torch.linspace(0, len(sample) - 1, k, device=sample.device).long()]
    basis: Tensor = normalize(start, dim=1).T
    for _ in range(2):
        basis, _ = torch.linalg.qr(sample.T @ (sample @ basis))
    return basis


def slant(directions: Tensor) -> Tensor:
    """Return a bound on how far products of coordinates are from those of projections, relative to the norms.

    With E = Q'Q - I of the directions Q (d, k), the projection of x has the form z'(I + E)^-1 z in its coordinates
    z = Q'x, and (I + E)^-1 differs from I by at most |E| / (1 - |E|). Columns of zeros are no directions.
    """
    gram = directions.T.double() @ directions.double()
    unit = torch.diag_embed((gram.diagonal() > 0.5).double())
    size = torch.linalg.matrix_norm(gram - unit)
    return torch.where(size < 0.5, size * (1 + size) / (1 - size), torch.inf)


# The range of the rows


class Trivial(NamedTuple):
    """The answer for rows that need no search: equal ones, and rows that are not finite."""

    lower: float
    upper: float
    pair: tuple[int, int]
    nonfinite_rows: int
    first_nonfinite: int = 0
    """The first row that is not finite."""


def in_safe_range(largest: float, centre: float, d: int, dtype: torch.dtype) -> bool:
    """Return True if points (n, d) are finite, certainly not all equal, and their squares in the range of the dtype.

    They are judged by their largest norm, and the largest entry of their centre.
    """
    narrow, wide = _RANGE[dtype]
    least = math.sqrt(d) * max(2 * narrow, 4 * torch.finfo(dtype).eps * centre)  # a centre is rounded
    return least <= largest and largest + centre <= wide  # false for a nan


def scales_of(shards: RowShards, max_bytes: int, dtype: torch.dtype | None = None) -> Scales | Trivial:
    """Return scales that keep squares of the rows in range, for points of a dtype; or the answer that is known."""
    V, d = shards.shape
    dtype, other = dtype or compute_dtype(shards.rows), min(1, V - 1)

    def extremes() -> Tensor:
        """Return the largest entries of the columns of S and of -S, and whether there is a nan: (2 d + 1,)."""
        highest = torch.full((2, d), -torch.inf, dtype=torch.float64, device=shards.device)
        nan = torch.zeros(1, dtype=torch.bool, device=shards.device)
        for _, rows in shards.rows.chunks(max_bytes):
            ends = torch.stack([rows.amax(0), -rows.amin(0)]).double()  # ten times faster than aminmax on a CPU
            nan |= ends.isnan().any()
            torch.maximum(highest, ends.nan_to_num(0.0, torch.inf, -torch.inf), out=highest)
        return torch.cat([highest.flatten(), nan.double()])

    numbers = shards.ranks.max(extremes, 2 * d + 1)
    high, low = numbers[:d], -numbers[d:-1]
    largest, spread = torch.maximum(low.abs(), high.abs()).max(), (high * 0.5 - low * 0.5).max()
    equal = (low == high).all().double()
    size, half, same, nan = torch.stack([largest, spread, equal, numbers[-1]]).tolist()  # the device is read once
    if nan or not math.isfinite(size):

        def bad_rows() -> Sequence[Tensor]:
            bad = [~torch.isfinite(rows).all(1) for _, rows in shards.rows.chunks(max_bytes)]
            ids = shards.ids[torch.cat([*bad, shards.ids[:0].bool()])]
            return [torch.stack([ids.new_tensor(len(ids)), ids.amin() if len(ids) else ids.new_tensor(V)])]

        (table,) = shards.ranks.gather(bad_rows, ((2,), torch.int64))
        first, value = int(table[:, 1].amin()), math.nan if nan else math.inf
        return Trivial(value, value, ordered(first, 0 if first else other), int(table[:, 0].sum()), first)
    if same:
        return Trivial(0.0, 0.0, (0, other), 0)
    narrow, wide = _RANGE[dtype]
    if narrow <= half and size <= wide:
        return Scales(dtype)
    pre = power_of_two_scale(size)
    return Scales(torch.float64, pre, power_of_two_scale(half * pre))


def about_mean(shards: RowShards, scales: Scales, max_bytes: int) -> CentredRows:
    """Return the rows of this rank as points about the mean of an even sample of all ranks' rows."""
    centre = from_sample(shards, scales, max_bytes, mean_row, shards.shape[1])
    return CentredRows(shards.rows, centre, scales, max_bytes)

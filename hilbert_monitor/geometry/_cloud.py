"""The rows of an update as points about a centre, in a range where squares are safe, loaded a chunk at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from .numerics import chunk_length, compute_dtype, nonfinite, power_of_two_scale
from .sharding import RowShards

CENTRE_SAMPLE = 512
"""Rows of whose mean the centre is. Any centre gives valid bounds, and more rows give no better ones."""
SAMPLE = 2048
"""Rows from which the centre and the leading directions are estimated."""

_CHUNK_BYTES, _PAIR_BYTES = 2**22, 2**18
_GOLDEN = (math.sqrt(5) - 1) / 2
_RANGE = {torch.float32: (1e-12, 1e12), torch.float64: (1e-100, 1e100)}
"""Smallest spread and largest magnitude of rows whose squares stay in the range of the dtype."""


@dataclass(frozen=True)
class PointCloud:
    """Points x_i = (s_i * pre_scale - centre) * post_scale, in fp32 or fp64.

    Distances between points do not depend on the centre, but their rounding does: a good centre makes norms small. The
    scales are powers of two, and one unless squares of the rows would leave the range of the dtype.
    """

    S: Tensor
    """(V, d)."""
    centre: Tensor
    """(d,), in units of S times pre_scale."""
    pre_scale: float
    post_scale: float
    max_bytes: int
    """Bound on scratch memory. A quarter is for one chunk of points and what the caller makes of it."""

    @classmethod
    def in_range(
        cls, S: Tensor, low: Tensor, high: Tensor, max_bytes: int, dtype: torch.dtype | None = None
    ) -> PointCloud:
        """Centre and scale finite rows S, given their columnwise extremes."""
        dtype, pre, post = scales(low, high, dtype or compute_dtype(S))
        return cls(S, _centre(S, dtype, pre, max_bytes), pre, post, max_bytes)

    @classmethod
    def unscaled(cls, S: Tensor, max_bytes: int) -> PointCloud:
        """Centre rows without a look at their range; check afterwards with `needs_no_scale`."""
        return cls(S, _centre(S, compute_dtype(S), 1.0, max_bytes), 1.0, 1.0, max_bytes)

    def needs_no_scale(self, norms: Tensor) -> bool:
        """Return whether points of these norms (V,) are finite, certainly not all equal, and need no scale."""
        largest, size = torch.stack([norms.amax(), self.centre.abs().amax()]).tolist()
        return in_safe_range(largest, size, self.width, self.dtype)

    @property
    def budget(self) -> int:
        """Bytes for one chunk of points and what the caller makes of it."""
        return self.max_bytes // 4

    @property
    def sample(self) -> slice:
        """Rows of an even sample."""
        return _even_sample(self.S, self.dtype, self.budget)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the points."""
        return self.centre.dtype

    def __len__(self) -> int:
        """Return the number of rows V."""
        return self.S.shape[0]

    @property
    def width(self) -> int:
        """Number of columns d."""
        return self.S.shape[1]

    def points(self, at: slice | Tensor, out: Tensor | None = None) -> Tensor:
        """Load points (n, d), into `out` if it is given and has room."""
        rows = self.S[at] if isinstance(at, slice) else self.S.index_select(0, at)  # much faster than S[at]
        rows = rows.to(self.dtype)
        rows = _times(rows, self.pre_scale)
        rows = torch.sub(rows, self.centre, out=None if out is None else out[: len(rows)])
        return rows if self.post_scale == 1.0 else rows.mul_(self.post_scale)

    def chunks(
        self, index: Tensor | None = None, *, extra: int = 0, longest: int | None = None
    ) -> Iterator[tuple[slice, Tensor]]:
        """Yield all points, or those of `index`, a chunk at a time, each chunk with its slice.

        Chunks share their memory, which costs more to get than to fill: each is gone when the next is asked for.

        Args:
            index: (n,) rows to load.
            extra: bytes of scratch that the caller needs for each point.
            longest: most points in a chunk; by default as many as stay in cache.
        """
        row_bytes = 3 * self.width * self.dtype.itemsize + extra
        cached = max(64, _CHUNK_BYTES // row_bytes) if on_host(self.S) else len(self)  # else calls cost more
        length = chunk_length(row_bytes, self.max_bytes, share=4, longest=longest or cached)
        n = len(self) if index is None else len(index)
        memory = self.centre.new_empty(min(length, n), self.width) if 0 < length < n else None
        for start in range(0, n, length):
            at = slice(start, start + length)
            yield at, self.points(at if index is None else index[at], memory)

    def given_rows(self, at: Tensor) -> Tensor:
        """Load rows (n, d) as they were given, in fp64: scaled, but not centred, so that differences are exact."""
        rows = self.S.index_select(0, at).to(torch.float64)
        return rows if self.pre_scale == self.post_scale == 1.0 else rows.mul_(self.pre_scale).mul_(self.post_scale)

    def pair_lengths(self, i: Tensor, j: Tensor) -> Tensor:
        """Return distances |x_i - x_j| (n,) of index pairs, in fp64 from the rows as they were given."""
        out = torch.empty(len(i), dtype=torch.float64, device=self.S.device)
        cached = max(64, _PAIR_BYTES // (8 * self.width)) if on_host(self.S) else len(i)
        step = max(1, chunk_length(6 * self.width * 8, self.max_bytes, share=4, longest=cached))
        for at in range(0, len(i), step):
            part = slice(at, at + step)
            a, b = (self.given_rows(k[part]) for k in (i, j))
            torch.linalg.vector_norm(a.sub_(b), dim=1, out=out[part])
        return out

    def survey(self, directions: Tensor, index: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return norms (n,) and coordinates (n, k) along orthonormal directions (d, k), of all points or of some."""
        n = len(self) if index is None else len(index)
        norms = torch.empty(n, dtype=self.dtype, device=self.S.device)
        coordinates = torch.empty(n, directions.shape[1], dtype=self.dtype, device=self.S.device)
        for at, x in self.chunks(index):
            torch.linalg.vector_norm(x, dim=1, out=norms[at])
            torch.mm(x, directions, out=coordinates[at])
        return norms, coordinates

    @property
    def _is_as_given(self) -> bool:
        """Whether points are rows less the centre, on an accelerator."""
        return not on_host(self.S) and self.S.dtype == self.dtype and self.pre_scale == self.post_scale == 1.0

    def norms(self, about: Tensor | None = None) -> Tensor:
        """Return the distances (V,) of all points from the centre, or from a point (d,) relative to it."""
        if self._is_as_given:
            # One pass, and nothing is written but the result. On a CPU it takes half as long again as two.
            centre = self.centre if about is None else self.centre + about
            return torch.cdist(self.S, centre[None], compute_mode="donot_use_mm_for_euclid_dist")[:, 0]
        if about is None:
            return self.survey(self.centre.new_empty(self.width, 0))[0]
        norms = torch.empty(len(self), dtype=self.dtype, device=self.S.device)
        for at, x in self.chunks():
            torch.linalg.vector_norm(x.sub_(about), dim=1, out=norms[at])
        return norms

    def measured_from(self, about: Tensor) -> Tensor:
        """Return the point (d,), relative to the centre and in fp64, that `norms` of this one are really about."""
        return (self.centre + about).double() - self.centre.double() if self._is_as_given else about.double()

    def distinct(self, index: Tensor) -> Tensor:
        """Return places (n,) in `index`, in increasing order, of rows that are all different: one of each kind.

        Rows are sorted by their distance from some point. Equal ones come to stand side by side, unless a different
        row at the same distance, to the last bit, gets between them: then both stay.
        """
        about = torch.arange(1, self.width + 1, device=self.S.device).to(self.dtype).mul_(_GOLDEN).frac_().sub_(0.5)
        order = self.norms(about.mul_(self.post_scale))[index].argsort()
        rows = index[order]
        new = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
        step = chunk_length(3 * self.width * self.S.element_size(), self.max_bytes, share=4)
        for at in range(1, len(rows), step):
            one, other = (self.S.index_select(0, rows[at - k : at - k + step]) for k in (0, 1))
            new[at : at + step] = (one != other[: len(one)]).any(1)
        return order[new].sort().values

    def recentred(self, rows: Tensor) -> PointCloud:
        """Return the same points about the mean of some rows, given by their indices (n,)."""
        chosen = self.S.index_select(0, rows).to(self.dtype)
        return replace(self, centre=_times(chosen, self.pre_scale).mean(0))

    def double(self) -> PointCloud:
        """Return the same points in fp64."""
        return replace(self, centre=self.centre.double())

    def leading_directions(self, k: int) -> Tensor:
        """Estimate the k leading directions (d, k) of the points, orthonormal."""
        return leading_directions(self.points(self.sample), k)

    def row_length(self, length: float) -> float:
        """Convert a length among points to one among the rows of S."""
        return length / self.post_scale / self.pre_scale

    @property
    def rounding(self) -> float:
        """Relative error of a dot product of two points."""
        return rounding(self.width, self.dtype)


def rounding(d: int, dtype: torch.dtype) -> float:
    """Return the relative error (d + 8) u of a dot product of length d, with u the unit roundoff.

    |fl(x.y) - x.y| <= d u |x| |y|. The other eight units are for the rounding of the points themselves, of square
    roots, and of numbers cast to fp32.
    """
    return (d + 8) * torch.finfo(dtype).eps / 2


def in_safe_range(largest: float, centre: float, d: int, dtype: torch.dtype) -> bool:
    """Return whether points are finite, certainly not all equal, and their squares in the range of the dtype.

    Args:
        largest: norm of a point.
        centre: largest entry of their centre, in magnitude.
        d: number of columns.
        dtype: of the points.
    """
    narrow, wide = _RANGE[dtype]
    least = math.sqrt(d) * max(2 * narrow, 4 * torch.finfo(dtype).eps * centre)  # a centre is rounded
    return least <= largest and largest + centre <= wide  # false for a nan


def on_host(x: Tensor) -> bool:
    """Return whether a tensor is on the CPU: there caches are small and reads free, elsewhere neither."""
    return x.device.type == "cpu"


def scales(low: Tensor, high: Tensor, dtype: torch.dtype) -> tuple[torch.dtype, float, float]:
    """Return dtype, pre_scale and post_scale that keep squares of finite rows in range, by their columns' extremes."""
    low, high = low.double(), high.double()
    largest, spread = torch.stack([torch.maximum(low.abs(), high.abs()).max(), (high * 0.5 - low * 0.5).max()]).tolist()
    narrow, wide = _RANGE[dtype]
    if narrow <= spread and largest <= wide:
        return dtype, 1.0, 1.0
    pre = power_of_two_scale(largest)
    return torch.float64, pre, power_of_two_scale(spread * pre)


def column_extremes(S: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest entry of each column, (d,) each; nan where a column has one."""
    return S.amin(0), S.amax(0)  # ten times faster than torch.aminmax(S, dim=0) on a CPU


def _centre(S: Tensor, dtype: torch.dtype, pre: float, max_bytes: int) -> Tensor:
    """Return the mean (d,) of an even sample of rows, exact where they are equal."""
    sample = _times(S[_even_sample(S, dtype, max_bytes // 4)].to(dtype), pre)
    return sample[0] + (sample - sample[0]).mean(0)


def _times(rows: Tensor, scale: float) -> Tensor:
    return rows if scale == 1.0 else rows * scale


def _even_sample(S: Tensor, dtype: torch.dtype, budget: int) -> slice:
    """Return the slice of an even sample of rows that fits the budget with room to work on it."""
    size = min(SAMPLE, max(1, budget // (4 * S.shape[1] * dtype.itemsize)))
    return slice(None, None, -(-len(S) // size))


def leading_directions(sample: Tensor, k: int) -> Tensor:
    """Estimate the k leading directions (d, k) of rows (n, d), orthonormal, by subspace iteration.

    Starts from rows of the sample, so no random numbers are drawn. Rows that are not finite, or whose squares are not,
    give directions of no use. On a CPU the leading ones come first, elsewhere nearly so: a factorisation takes longer
    there than all else, and whoever uses all k does not need their order.
    """
    k = min(k, *sample.shape)
    start = sample[torch.linspace(0, len(sample) - 1, k, device=sample.device).long()]
    basis = torch.linalg.qr(start.T).Q if on_host(sample) else normalize(start, dim=1).T
    for _ in range(2):
        basis, _ = torch.linalg.qr(sample.T @ (sample @ basis))
    if not on_host(sample):
        return basis
    coordinates = sample @ basis
    _, order = torch.linalg.eigh((coordinates.T @ coordinates).nan_to_num(0.0, 0.0, 0.0))  # or it would raise
    directions: Tensor = basis @ order.flip(1)
    return directions


def slant(directions: Tensor) -> Tensor:
    """Return a bound on how far products of coordinates are from those of projections, relative to the norms.

    With E = Q'Q - I of the directions Q (d, k), the projection of x has the form z'(I + E)^-1 z in its coordinates
    z = Q'x, and (I + E)^-1 differs from I by at most |E| / (1 - |E|). Columns of zeros are no directions.
    """
    gram = directions.T.double() @ directions.double()
    unit = torch.diag_embed((gram.diagonal() > 0.5).double())
    size = torch.linalg.matrix_norm(gram - unit)
    return torch.where(size < 0.5, size * (1 + size) / (1 - size), torch.inf)


# Rows of several ranks


class Trivial(NamedTuple):
    """The answer for rows that need no search: equal ones, and rows that are not finite."""

    lower: float
    upper: float
    pair: tuple[int, int]
    nonfinite_rows: int
    first_nonfinite: int = 0
    """The first row that is not finite."""


def ordered(i: int, j: int) -> tuple[int, int]:
    """Return a pair of ids, the smaller one first."""
    return (i, j) if i < j else (j, i)


def points(cloud: PointCloud, rows: Tensor) -> Tensor:
    """Return rows (n, d) of any rank as points of a cloud."""
    return _times(_times(rows.to(cloud.dtype), cloud.pre_scale) - cloud.centre, cloud.post_scale)


def centred(shards: RowShards, dtype: torch.dtype, pre: float, post: float, max_bytes: int) -> PointCloud:
    """Return the rows of this rank as points about the mean of an even sample of all ranks' rows."""
    step = -(-shards.number // CENTRE_SAMPLE)

    def total() -> Tensor:
        sample = shards.rows[::step]
        sample = sample if pre == 1.0 else sample.double() * pre  # a copy costs more than the sum
        return sample.sum(0, dtype=torch.float64)

    if shards.ranks.is_single:
        centre = total() / -(-shards.number // step)
    else:
        number = shards.ids[::step].new_tensor(len(shards.ids[::step]), dtype=torch.float64)
        numbers = shards.ranks.sum(lambda: torch.cat([total(), number[None]]), shards.shape[1] + 1)
        centre = numbers[:-1] / numbers[-1]
    return PointCloud(shards.rows, centre.to(dtype), pre, post, max_bytes)


def sample_step(shards: RowShards, dtype: torch.dtype, max_bytes: int) -> int:
    """Return of how many rows one is in a sample that fits the memory bound with room to work on it in a dtype."""
    V, d = shards.shape
    size = min(SAMPLE, max(1, max_bytes // (16 * d * dtype.itemsize)))
    return -(-V // size)


def padded(shards: RowShards, places: Tensor, k: int, *columns: Tensor) -> Sequence[Tensor]:
    """Return k rows, their ids, and columns beside them; an id of -1 means that there is none."""
    rows, ids, missing = shards.rows.index_select(0, places), shards.ids.index_select(0, places), k - len(places)
    if not missing:
        return [rows, ids, *columns]
    return [pad(rows, (0, 0, 0, missing)), pad(ids, (0, missing), value=-1), *(pad(c, (0, missing)) for c in columns)]


def in_range(shards: RowShards, max_bytes: int, dtype: torch.dtype | None = None) -> PointCloud | Trivial:
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
    high, low, other = numbers[:d], -numbers[d:-1], min(1, V - 1)
    flags = torch.stack([numbers[-1] > 0, numbers.isfinite().all(), (low == high).all()])  # the device is read once
    has_nan, are_finite, are_equal = flags.tolist()
    if has_nan or not are_finite:

        def bad_rows() -> Sequence[Tensor]:
            ids = shards.ids[nonfinite(shards.rows, max_bytes)]
            return [torch.stack([ids.new_tensor(len(ids)), ids.amin() if len(ids) else ids.new_tensor(V)])]

        (bad,) = shards.ranks.gather(bad_rows, ((2,), torch.int64))
        worst, value = int(bad[:, 1].amin()), math.nan if has_nan else math.inf
        return Trivial(value, value, ordered(worst, 0 if worst else other), int(bad[:, 0].sum()), worst)
    if are_equal:
        return Trivial(0.0, 0.0, (0, other), 0)
    return centred(shards, *scales(low, high, dtype or compute_dtype(shards.rows)), max_bytes)

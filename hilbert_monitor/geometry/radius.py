"""A certified bracket of the covering radius rad(S) = min_z max_i |s_i - z|, the radius of the smallest enclosing ball.

RowNorm limits the radius of a step; the Hilbert distance sees its diameter. Jung's theorem ties the two:

    D(S) <= 2 rad(S) <= 2 J_k D(S),    J_k = sqrt(k / (2 (k + 1))),    k = min(d, V - 1).

To find the smallest ball is a convex problem in which few rows matter, a core set. Any centre z proves an upper bound,
max_i |s_i - z|. Any convex weights w on some rows prove a lower bound:

    rad(S)^2 >= sum_i w_i |s_i|^2 - |sum_i w_i s_i|^2,

with equality for the best weights, whose mean sum_i w_i s_i is the best centre. So:

1. Solve the problem for an even sample of rows, and the diameter's pair if it is known: a first centre.
2. Measure all rows from that centre (first pass over S). The farthest of them join the rows that carry weight.
3. Solve again: the final centre. Measure all rows from it (second pass): the upper bound.
4. Solve again with the rows that are now farthest: the lower bound.

The sample is what makes two passes enough. RowNorm's rows lie on a sphere. The rows farthest from a point inside it are
all on one side, and the ball of those alone misses the other sides. The sample's rows with weight hold them.

Where rows are on several ranks, each solves the problems of steps 1, 3 and 4 for its own rows and those that all know.
It shows the others those of its rows that get weight, and all solve the problem of what was shown, from the mean of
their weights.

Without the sample, from the mean row or the midpoint of the longest pair, upper exceeded lower by up to 93 %.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from .bracket import DiameterBracket
from .numerics import MAX_BYTES, compute_dtype, full_precision
from .points import CentredRows, Scales, Trivial, about_mean, in_safe_range, sample_step, scales_of
from .sharding import RowShards, RowSource, as_shards
from .tension import jung_ratio

_SAMPLE = 2048  # rows that give the first centre
_FAR_ROWS = 512  # that join the core set after a pass
_NEW_ROWS = 32  # that join the active set in a round of the solver
_ROUNDS = 200  # of the solver, at most
_SAMPLE_TOLERANCE, _TOLERANCE = 3e-2, 3e-3  # of squared radii; a third of it halves the gap for twice the time
_RIDGE, _TINY = 1e-10, 1e-300


@dataclass(frozen=True, slots=True)
class RadiusBracket:
    """Certified bounds lower <= rad(S) <= upper, with their certificates.

    If S has non-finite entries, bounds and centre are nan if any entry is nan and inf otherwise; there is no support.
    """

    lower: float
    upper: float
    center: Tensor
    """(d,) fp64, on the device of this rank's rows: centre of a ball that holds all rows, to the rounding of fp64."""
    ball_radius: float
    """Radius of that ball. It is `upper`, unless Jung's bound is smaller."""
    support: Tensor
    """(n,) rows that prove `lower`, on the CPU."""
    weights: Tensor
    """(n,) fp64: their convex weights w."""
    nonfinite_rows: int
    """How many rows hold an infinity or a nan."""


@full_precision
def covering_radius(
    S: Tensor | RowSource | RowShards, *, diameter: DiameterBracket | None = None, max_bytes: int = MAX_BYTES
) -> RadiusBracket:
    """Bracket rad(S) = min_z max_i |s_i - z|, the radius of the smallest ball that holds all rows.

    The bounds hold in exact arithmetic, and are within a percent of each other on optimizers' increments.

    Cost: two passes over S, and small problems solved on the CPU.

    The pair of a `diameter`, as `row_diameter` or `row_diameter_bracket` finds it for these rows, starts the search: so
    lower >= diameter.lower / 2. And upper is at most Jung's J_k diameter.upper.
    """
    pair = () if diameter is None else diameter.pair

    def check_pair() -> tuple[int, ...]:
        if pair and not 0 <= pair[0] <= pair[1] < S.shape[0]:
            raise ValueError(f"diameter must be that of S, got one with rows {pair} where S has {S.shape[0]}")
        return pair

    shards = as_shards(S, agree_on=check_pair)
    search = _Search(shards, about_mean(shards, Scales(compute_dtype(shards.rows)), max_bytes), pair)
    search.measure()
    if not search.in_safe_range:
        scales = scales_of(shards, max_bytes)
        if isinstance(scales, Trivial):
            return _trivial(shards, scales)
        search = _Search(shards, about_mean(shards, scales, max_bytes), pair)
        search.measure()
    search.widen(_TOLERANCE)
    search.measure()
    search.widen(_TOLERANCE)
    return search.bracket(diameter)


def _trivial(shards: RowShards, answer: Trivial) -> RadiusBracket:
    """Return the bracket of equal rows (zero), or of rows that are not finite (inf or nan)."""
    value, support = answer.lower, torch.zeros(1 if answer.lower == 0 else 0, dtype=torch.long)
    center = torch.full(shards.shape[1:], value, dtype=torch.float64, device=shards.device)
    if len(support):
        center = _rows_of(shards, support)[0]
    weights = torch.ones(len(support), dtype=torch.float64)
    return RadiusBracket(value, value, center, value, support, weights, answer.nonfinite_rows)


def _rows_of(shards: RowShards, ids: Tensor) -> Tensor:
    """Return a few rows (n, d) in fp64, whichever rank has them."""
    rows = shards.from_owners(ids.to(shards.device), shards.rows.take, shards.shape[1], shards.rows.dtype)
    return rows.double()


@dataclass(frozen=True)
class _CoreSet:
    """A few rows with convex weights, on the CPU and in fp64."""

    rows: Tensor
    """(n,) which rows of S they are."""
    points: Tensor
    """(n, d)."""
    weights: Tensor
    """(n,) that sum to one."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.rows)

    @property
    def center(self) -> Tensor:
        """Weighted mean (d,): the best centre, where the weights are the best."""
        return self.weights @ self.points

    @property
    def radius(self) -> float:
        """Lower bound on the radius of all rows: sqrt(sum w_i |x_i - z|^2) with z the weighted mean, rounded down."""
        square = float(self.weights @ (self.points - self.center).square().sum(1))
        return math.sqrt(square) * (1 - (sum(self.points.shape) + 16) * 2.0**-51)

    def support(self) -> _CoreSet:
        """Return the rows that carry weight."""
        index = (self.weights > 0).nonzero().squeeze(1)
        weights = self.weights[index]
        return _CoreSet(self.rows[index], self.points[index], weights / weights.sum())

    def joined(self, rows: Tensor, points: Tensor) -> _CoreSet:
        """Return the core set with more rows, which carry no weight yet."""
        weights = torch.cat([self.weights, self.weights.new_zeros(len(rows))])
        return _CoreSet(torch.cat([self.rows, rows]), torch.cat([self.points, points]), weights)

    def solved(self, tolerance: float) -> _CoreSet:
        """Return the same rows with nearly the best weights, zero for those inside the smallest ball.

        In rounds: find the best weights of a few rows, then let the farthest of all rows join them, until no row is
        outside the ball, to the tolerance of its squared radius. Where several new rows are all dropped again the
        farthest comes alone: then it always gets weight, and the bound grows.
        """
        square = self.points.square().sum(1)
        active = (self.weights > 0).nonzero().squeeze(1)
        weights, bound = self.weights[active], 0.0
        if not len(active):  # nobody carries weight yet: the first row does
            active = torch.arange(min(1, len(self)))
            weights = self.weights.new_ones(len(active))
        for _ in range(_ROUNDS):
            weights = _best_weights(self.points[active], weights)
            active, weights = active[weights > 0], weights[weights > 0]
            center = weights @ self.points[active]
            previous, bound = bound, float(weights @ square[active] - center.square().sum())
            distance = torch.addmv(square, self.points, center, alpha=-2)  # squared, less |z|^2
            number = _NEW_ROWS if bound > previous * (1 + 1e-9) else 1
            far = distance.topk(min(number, len(distance)))
            if not float(far.values[0] + center.square().sum()) > (1 + tolerance) * bound:
                break
            new = far.indices[~torch.isin(far.indices, active)]
            active, weights = torch.cat([active, new]), torch.cat([weights, weights.new_zeros(len(new))])
        solution = torch.zeros_like(self.weights)
        solution[active] = weights
        return _CoreSet(self.rows, self.points, solution)


def _best_weights(points: Tensor, weights: Tensor) -> Tensor:
    """Return the convex weights (n,) of points (n, d) that maximise sum w_i |x_i|^2 - |sum w_i x_i|^2.

    An active-set method. With K the Gram matrix of the points and b its diagonal, the best weights of either sign solve
    2 K w = b - lambda 1 and sum w_i = 1. The weights move there until one of them is zero, its point is dropped, and so
    on, until all are positive. K is singular about the mean, for duplicates, and for more points than dimensions. A
    constant added to it, which changes nothing since sum w_i = 1, and a small ridge make it regular.
    """
    x = points - weights @ points
    gram = x @ x.T
    square = gram.diagonal().clone()
    largest = float(square.max())
    if not 0 < largest < math.inf:  # equal points, or some that are not finite
        return weights
    gram.add_(largest).diagonal().add_(_RIDGE * largest)
    weights, active = weights.clone(), torch.arange(len(weights))
    for _ in range(len(weights)):
        factor = torch.linalg.cholesky(gram[active][:, active])
        right = torch.stack([square[active], torch.ones_like(square[active])], 1)
        u, v = torch.cholesky_solve(right, factor).unbind(1)
        current, target = weights[active], (u - (u.sum() - 2) / v.sum() * v) / 2
        ratio = torch.where(target > 0, math.inf, current / (current - target).clamp_min(_TINY))
        step = ratio.min().clamp_max(1.0)
        blocked = ratio <= step
        weights[active] = torch.where(blocked, 0.0, current + step * (target - current))
        if not bool(blocked.any()):
            break
        active = active[~blocked]
    return weights / weights.sum()


class _Search:
    """Two passes over the rows, each followed by problems of a few hundred rows."""

    def __init__(self, shards: RowShards, points: CentredRows, pair: Sequence[int]) -> None:
        self.shards, self.points, self.width = shards, points, shards.shape[1]
        self.reach, self.best = math.inf, points  # largest distance from the best centre so far, and that centre
        ids = torch.tensor(pair, dtype=torch.long)
        known = points.double().points(_rows_of(shards, ids)).cpu() if pair else torch.empty(0, self.width).double()
        self.core = _CoreSet(ids, known, torch.full_like(known[:, 0], 1 / max(1, len(pair))))
        step = sample_step(shards, torch.float64, points.max_bytes, _SAMPLE)
        self._grow(lambda: torch.arange(0, len(points), step, device=points.rows.device), _SAMPLE_TOLERANCE)

    def measure(self) -> None:
        """Measure all rows from the centre of the core set: one pass."""
        self.moved = self.points.moved_by(self.core.center.to(self.points.centre.device))

        def make() -> Sequence[Tensor]:
            self.distances = self.moved.norms()
            return [torch.cat([self.distances, self.moved.centre.new_zeros(1)]).amax()]

        (largest,) = self.shards.ranks.gather(make, ((), self.points.dtype))
        self.largest, size = torch.stack([largest.amax(), self.moved.centre.abs().amax()]).tolist()
        self.in_safe_range = in_safe_range(self.largest, size, self.width, self.points.dtype)

    def widen(self, tolerance: float) -> None:
        """Keep the ball of the last pass if it is the smallest so far, and add the rows farthest from its centre."""
        reach = self.largest * (1 + self.points.rounding)
        if reach < self.reach:
            self.reach, self.best = reach, self.moved
        most = min(_FAR_ROWS, max(1, self.points.budget // (4 * 8 * self.width)))
        self._grow(lambda: self.distances.topk(min(most, len(self.points))).indices, tolerance)

    def _grow(self, choose: Callable[[], Tensor], tolerance: float) -> None:
        """Let rows join the core set: of those that each rank chooses, by their places, those that get weight there."""
        ranks, points, local = self.shards.ranks, self.points.double(), []

        def grown(places: Tensor) -> _CoreSet:
            own = points.points(self.shards.rows.take(places))
            return self.core.joined(self.shards.ids[places].cpu(), own.cpu()).solved(tolerance)

        if ranks.is_single:
            self.core = grown(choose()).support()
            return

        def solve() -> Sequence[Tensor]:
            places = choose()
            weights = grown(places).weights
            known, own = weights[: len(self.core)], weights[len(self.core) :]
            heavy = (own > 0).nonzero().squeeze(1)
            local.append((places[heavy.to(places.device)], *(w.to(places.device) for w in (own[heavy], known))))
            return [torch.tensor(len(heavy), device=places.device)]

        (counts,) = ranks.gather(solve, ((), torch.int64))
        most, (heavy, own, known) = int(counts.amax()), local[0]
        rows, ids, own, known = ranks.gather(
            lambda: [*self.shards.take(heavy, most), pad(own, (0, most - len(own))), known],
            ((most, self.width), self.shards.rows.dtype),
            ((most,), torch.int64),
            ((most,), torch.float64),
            ((len(self.core),), torch.float64),
        )
        new = ids >= 0
        core = self.core.joined(ids[new].cpu(), points.points(rows[new]).cpu())
        weights = torch.cat([known.sum(0), own[new]]).cpu()
        self.core = _CoreSet(core.rows, core.points, weights / weights.sum()).solved(tolerance).support()

    def bracket(self, diameter: DiameterBracket | None) -> RadiusBracket:
        """Return the bounds in units of the rows."""
        lower = max(0.0, math.nextafter(self.points.scales.of_rows(self.core.radius), 0.0))
        upper = radius = math.nextafter(self.points.scales.of_rows(self.reach), math.inf)
        if diameter is not None:
            jung = diameter.upper / (2 * jung_ratio(min(self.width, self.shards.number - 1)))
            jung = math.nextafter(jung * (1 + 2.0**-50), math.inf)
            if jung < lower:
                raise ValueError(f"diameter must be that of S, got at most {diameter.upper:g} for rows farther apart")
            upper = min(upper, jung)
        center = self.best.centre.double() / self.points.scales.pre
        return RadiusBracket(lower, upper, center, radius, self.core.rows, self.core.weights, 0)

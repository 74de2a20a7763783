"""What `tension.py` brackets T(G) with: centred rows, groups of rows, a convex program, and potentials.

Read it in this order. `CentredGradient` has the rows g_i, and J with T(G) <= J sum |g_i|. `row_groups` makes groups of
them. `TensionProgram` finds points and a flow for the groups. `flow_length` says what the flow proves from above.
`placed_points` and `body_points` make potentials, which prove bounds from below.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import normalize

from .numerics import MAX_BYTES, check_rows, compute_dtype, power_of_two_scale
from .points import leading_directions
from .sharding import RowSource

Tick = Callable[[], None]
"""Called in long loops; raises where there is no time left."""

_TINY = 1e-30


def blocks(n: int, size: int = 4096) -> Iterator[slice]:
    """Yield slices of at most `size` that cover n rows."""
    return (slice(start, min(start + size, n)) for start in range(0, n, size))


# The rows


@dataclass(frozen=True)
class CentredGradient:
    """Rows g_i of P G in fp64, times a power of two that brings the largest entry near one.

    Each row is centred as (g_i - g_0) - mean_j (g_j - g_0): differences of close rows are exact, whatever their shift.
    """

    G: Tensor
    """(V, d) as it was given."""
    origin: Tensor
    """(d,) fp64: the first of the scaled rows, g_0."""
    mean: Tensor
    """(d,) fp64: mean of the scaled rows, less the origin."""
    scale: float
    norms: Tensor
    """(V,) fp64: |g_i|; exactly zero where a row is the mean but for rounding."""
    total: float
    """Sum of |g_i|, with the rows whose norm counts as zero."""
    shifted: bool
    """Whether the mean was more than rounding to G's dtype explains."""
    max_bytes: int

    @classmethod
    def of(cls, G: Tensor, max_bytes: int = MAX_BYTES) -> CentredGradient:
        """Centre and scale the rows of G. Raise ValueError if an entry is not finite."""
        check_rows("G", G)
        largest = float(G.abs().amax())
        if not math.isfinite(largest):
            raise ValueError("G must be finite, got an infinity or a nan: skip this step, or look for what made it")
        scale = power_of_two_scale(largest) if largest else 1.0
        origin = G[0].double() * scale
        rows = cls(G, origin, torch.zeros_like(origin), scale, origin, 0.0, False, max_bytes)
        mean = torch.stack([chunk.sum(0) for _, chunk in rows.chunks()]).sum(0) / len(G)
        rows = replace(rows, mean=mean)
        norms = torch.cat([torch.linalg.vector_norm(chunk, dim=1) for _, chunk in rows.chunks()])
        total = float(norms.sum())
        norms[norms <= 2.0**-48 * torch.linalg.vector_norm(mean)] = 0.0
        noise = 8 * torch.finfo(G.dtype).eps / math.sqrt(len(G))  # of the mean, if the exact rows sum to zero
        shifted = float(torch.linalg.vector_norm(origin + mean)) > noise * float(norms.max())
        return replace(rows, norms=norms, total=total, shifted=shifted)

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield slices and their rows (n, d) in fp64."""
        for at, chunk in RowSource(self.G).chunks(self.max_bytes, dtype=torch.float64, copies=4):
            yield at, (chunk * self.scale).sub_(self.origin).sub_(self.mean)

    def directions(self) -> Tensor:
        """Return u_i = g_i / |g_i| (V, d), in fp32 or better; zero for a zero row."""
        unit = torch.empty_like(self.G, dtype=compute_dtype(self.G), memory_format=torch.contiguous_format)
        norms = self.norms.where(self.norms > 0, torch.inf)
        for at, chunk in self.chunks():
            unit[at] = chunk / norms[at, None]
        return unit

    @property
    def rounding(self) -> float:
        """Return a bound on the error of <g, x> for |x_i| <= 1: rounding of the mean and of fp64 sums."""
        entries = self.G.numel() + 64
        return entries * 2.0**-52 * (self.total + len(self.G) * float(torch.linalg.vector_norm(self.mean)))

    def bounds(self, lower: float, upper: float) -> tuple[float, float]:
        """Convert bounds in units of the scaled rows to bounds in units of G, rounded outwards; zero stays zero."""
        least, most = lower / self.scale, upper / self.scale
        return math.nextafter(least, 0.0), math.nextafter(most, math.inf) if upper else most

    def jung(self, unit: Tensor) -> tuple[float, float]:
        """Return J and a rest with T(R) <= J sum |r_i| + rest for R = P G, or what a flow leaves of it.

        J = J_k, with k the dimension of the span of the heaviest rows; the rest is J_d times the sum of all rows' parts
        outside it. Where that is more than rounding, k is min(d, V - 1).
        """
        V, d = unit.shape
        full = max(1, min(d, V - 1))
        sample = unit[self.norms.topk(min(V, 2 * d)).indices].double()
        size, direction = torch.linalg.eigh(sample.T @ sample)
        k = max(1, int((size > 1e-10 * size[-1]).sum()))
        if k < full:
            basis = direction[:, -k:]  # (d, k)
            parts = (g - (g @ basis) @ basis.T for _, g in self.chunks())
            outside = sum(float(torch.linalg.vector_norm(part, dim=1).sum()) for part in parts)
            if outside <= 1e-5 * self.total:
                return jung_radius(k), jung_radius(full) * outside * (1 + 2.0**-40)
        return jung_radius(full), 0.0


def jung_radius(k: int) -> float:
    """Return sqrt(k / (2 (k + 1))), rounded up: the radius of a ball for any k-dimensional set of diameter one."""
    return math.sqrt(k / (2 * (k + 1))) * (1 + 2.0**-50)


# Groups of rows


@dataclass(frozen=True)
class RowGroups:
    """Rows in K groups: heavy rows each alone, the others by direction. All in fp64."""

    group: Tensor
    """(V,) group of each row; -1 for a zero row."""
    load: Tensor
    """(K, d) g_A: sums of the rows of each group."""
    weight: Tensor
    """(K,) W_A: sums of the rows' norms, positive."""
    spread: Tensor
    """(K,) s_A = sqrt(W_A^2 - |g_A|^2), zero for a single row."""


def row_groups(rows: CentredGradient, unit: Tensor, number: int, light: int) -> RowGroups:
    """Make up to `light` groups of light rows by two passes of k-means, and up to `number` groups in all."""
    nonzero = int((rows.norms > 0).sum())
    order = rows.norms.argsort(descending=True, stable=True)[:nonzero]
    alone = nonzero if number >= nonzero else number - light
    group = order.new_full((len(rows.norms),), -1)
    group[order[:alone]] = torch.arange(alone, device=order.device)
    rest = order[alone:]
    if len(rest):
        weight, nearest = rows.norms[rest].to(unit.dtype), torch.empty_like(rest)
        centres = unit[rest[torch.linspace(0, len(rest) - 1, light, device=rest.device).long()]]  # (light, d)
        for _ in range(2):
            sums = torch.zeros_like(centres)
            for at in blocks(len(rest)):
                part = unit.index_select(0, rest[at])
                nearest[at] = (part @ centres.T).argmax(1)
                sums.index_add_(0, nearest[at], part.mul_(weight[at, None]))
            centres = normalize(sums, dim=1)
        group[rest] = alone + torch.unique(nearest, return_inverse=True)[1]
    inside = group >= 0
    K, d = int(group.max()) + 1, unit.shape[1]
    load = torch.zeros(K, d, dtype=torch.float64, device=group.device)
    for at, chunk in rows.chunks():
        load.index_add_(0, group[at][inside[at]], chunk[inside[at]])
    total = load.new_zeros(K).index_add_(0, group[inside], rows.norms[inside])
    members = torch.bincount(group[inside], minlength=K)
    lost = (members + d) * 2.0**-50  # for nearly parallel rows the difference is all rounding
    spread = (total.square() * (1 + lost) - load.square().sum(1)).clamp_min_(0).sqrt_()
    return RowGroups(group, load, total, spread.where(members > 1, 0.0))


# The program


@dataclass(frozen=True)
class TensionFlow:
    """A flow among K groups of rows; the docstring of `tension.py` says how it becomes a flow among rows.

    Groups A and B exchange lambda_AB (x_A - x_B). Of its spread, A sends B the share
    tau_AB = lambda_AB / sum_C lambda_AC, and keeps tau_AA.
    """

    group: Tensor
    """(V,) group of each row; -1 for a zero row."""
    points: Tensor
    """(K, d) fp64: x_A."""
    tension: Tensor
    """(K, K) fp64, symmetric: lambda_AB."""


def flow_length(groups: RowGroups, flow: TensionFlow, jung: float) -> float:
    """Return the length of the balanced flow among rows that a flow among groups becomes: T(G) is at most that.

    That is sum_{A<B} |(Y_AB, tau_AB s_A, tau_BA s_B)| + J sum_A |(R_A, tau_AA s_A)|, as `tension.py` has it.
    """
    x, K = flow.points, len(flow.points)
    degree = flow.tension.sum(1, keepdim=True)  # (K, 1)
    share = (flow.tension / degree).where(degree > 0, torch.eye(K, dtype=x.dtype, device=x.device))
    sent = share * groups.spread[:, None]  # (K, K) tau_AB s_A
    between = flow.tension.clone().fill_diagonal_(0)
    left = torch.addmm(groups.load - between.sum(1, keepdim=True) * x, between, x)  # (K, d)
    size = x.square().sum(1)
    rounding = (x.shape[1] + 8) * 2.0**-50  # of a squared distance, in parts of the squared norms
    square = torch.addmm((1 + rounding) * (size + size[:, None]), x, x.T, alpha=-2).clamp_min_(0)  # |x_A - x_B|^2
    lengths = square.mul_(between.square()).add_(sent.square()).add_(sent.T.square()).sqrt_()
    closed = (left.square().sum(1) + sent.diagonal().square()).sqrt().sum()
    slack = 1 + (K * K / 2 + 64) * 2.0**-50  # what fp64 may have lost in its sums
    return float(lengths.triu(1).sum() + jung * closed) * slack


class TensionProgram:
    """The convex program whose value is T(G) for groups of one row, and at least T(G) otherwise.

        maximise    sum_A <g_A, x_A> + s_A a_A     over points x_A and radii a_A >= 0
        subject to  |x_A - x_B|^2 + a_A^2 + a_B^2 <= 1,   |x_A|^2 + a_A^2 <= J^2

    The ball of radius J loses nothing: it holds any points of diameter one, and the loads sum to zero. An augmented
    Lagrangian has a multiplier (the tension lambda_AB) and a quadratic penalty for each pair of points; projection
    keeps the ball. Its steps are Nesterov's, with the diagonal of the Hessian as the metric. The penalty of a pair is
    the product of its weights; for an exact solution, which is computed in fp64, their harmonic mean, which also holds
    two light rows together.
    """

    def __init__(self, groups: RowGroups, jung: float, *, exact: bool) -> None:
        self.groups, self._jung = groups, jung
        dtype = torch.float64 if exact else torch.float32
        self._total = float(groups.weight.sum())
        parts = (groups.load, groups.weight, groups.spread)
        self._load, self._weight, self._spread = ((part / self._total).to(dtype) for part in parts)
        self._weight.clamp_min_(1e-12)  # the lightest groups keep some stiffness
        start = 0.9 * jung / self._weight
        self.points, self.radii = self._in_ball(start[:, None] * self._load, start * self._spread)  # (K, d), (K,)
        self._ahead, self._momentum = (self.points, self.radii), 1.0
        w = self._weight
        self._pair_weight = torch.outer(w, w)  # (K, K)
        if exact:
            self._pair_weight.div_((w + w[:, None]) * (len(w) / 2))
        self._multiplier = self._tension = torch.zeros_like(self._pair_weight)
        self._round = 0

    def improve(self, steps: int, tick: Tick) -> None:
        """Take at least so many steps, in rounds that minimise roughly and then set the multipliers.

        Later rounds are longer and have larger penalties.
        """
        while steps > 0:
            stage = min(self._round // 16, 8)
            for _ in range(8 * 2**stage):
                tick()
                self._step(40.0 * 3.0**stage)
            self._multiplier, self._momentum = self._tension, 1.0
            self._round += 1
            steps -= 8 * 2**stage

    def _step(self, penalty: float) -> None:
        """Take one step: 2 K^2 d multiplications."""
        x, a = self._ahead
        size = x.square().sum(1) + a.square()
        excess = torch.addmm(size + (size - 1)[:, None], x, x.T, alpha=-2)  # |x_A - x_B|^2 + a_A^2 + a_B^2 - 1
        excess.mul_(self._pair_weight).mul_(penalty / 2)
        self._tension = excess.add_(self._multiplier).clamp_min_(0).fill_diagonal_(0)
        degree = self._tension.sum(1)
        active = torch.linalg.vecdot(self._tension.sign(), self._pair_weight)  # of pairs that pull; faster than `where`
        stiffness = 2 * degree + 2 * penalty * active + 0.05 * self._weight
        force = torch.addmm(self._load - degree[:, None] * x, self._tension, x)
        points, radii = self._in_ball(x + force / stiffness[:, None], a + (self._spread - degree * a) / stiffness)
        moved, grown = points - self.points, radii - self.radii
        if float((((x - points) * moved).sum(1) * stiffness).sum()) > 0:  # uphill: begin again without momentum
            self._momentum = 1.0
        following = (1 + math.sqrt(1 + 4 * self._momentum**2)) / 2
        beyond = (self._momentum - 1) / following
        self._ahead = points + beyond * moved, (radii + beyond * grown).clamp_min(0)
        self.points, self.radii, self._momentum = points, radii, following

    def _in_ball(self, x: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        a = a.clamp_min(0)
        factor = (self._jung / (x.square().sum(1) + a.square()).sqrt().clamp_min(_TINY)).clamp_max(1)
        return x * factor[:, None], a * factor

    def flow(self) -> TensionFlow:
        """Return the tensions as a flow. The ball's share of a load is the share tau_AA that a group keeps."""
        x, a = self.points.double(), self.radii.double()
        tension = (self._tension + self._tension.T).double() / 2  # symmetric to the last bit
        degree = tension.sum(1)
        left = self._load.double() - degree[:, None] * x + tension @ x
        inward = (left * x).sum(1) + (self._spread.double() - degree * a) * a
        tension.diagonal().copy_((inward / (x.square().sum(1) + a.square()).clamp_min(_TINY)).clamp_min(0))
        return TensionFlow(self.groups.group, x, tension * self._total)

    def row_points(self, unit: Tensor) -> Tensor:
        """Return a point for each row (V, d): its group's, moved by the group's radius along u_i - g_A / W_A.

        The origin is the mean of the light groups' points, where zero rows are.
        """
        points = torch.empty_like(unit)
        mean = (self.groups.load / self.groups.weight[:, None]).to(unit.dtype)
        light = self._weight.where(self._spread > 0, 0.0)
        centre = (light @ self.points) / light.sum().clamp_min(_TINY)
        x, a = (self.points - centre).to(unit.dtype), self.radii.to(unit.dtype)
        for at in blocks(len(unit)):
            group = self.groups.group[at].clamp_min(0)
            points[at] = torch.addcmul(x[group], a[group, None], normalize(unit[at] - mean[group], dim=1))
        points[self.groups.group < 0] = 0
        return points


# Potentials


def placed_points(points: Tensor, norms: Tensor, free: int, tick: Tick) -> tuple[Tensor, float]:
    """Move points (V, d), in place, towards zero until any two are within one; return them and a bound of the diameter.

    The heaviest rows, by their norms (V,), are free: each moves until it is within one of those before it. The others
    move into the ball of radius 1/2, where they are within one of each other, and until they are within one of all free
    rows. Cost: V free d multiplications.
    """
    order = norms.argsort(descending=True, stable=True)
    heavy = points[order[:free]]
    far = torch.linalg.vector_norm(heavy, dim=1)  # how far along its direction a row goes
    direction = heavy / far.clamp_min(_TINY)[:, None]
    far.clamp_max_(1.0)
    cosine = direction @ direction.T
    for k in range(1, len(heavy)):
        if k % 256 == 0:
            tick()
        reach = _reach(cosine[k, :k] * far[:k], 1 - far[:k].square()).amin()
        far[k] = torch.minimum(far[k], reach)
    placed = direction * far[:, None]
    points[order[:free]] = placed
    room = 1 - far.square()
    for at in blocks(len(order) - len(heavy), 1024):
        tick()
        index = order[free:][at]
        part = points[index]
        far = torch.linalg.vector_norm(part, dim=1)
        part /= far.clamp_min(_TINY)[:, None]
        points[index] = part * torch.minimum(far.clamp_max(0.5), _reach(part @ placed.T, room).amin(1))[:, None]
    return points, 1 + 4 * (points.shape[1] + 16) * torch.finfo(points.dtype).eps


def _reach(along: Tensor, room: Tensor) -> Tensor:
    """Return the larger t with |t u - y| = 1, given <u, y> and 1 - |y|^2, |u| = 1."""
    return along.square().add_(room).clamp_min_(0).sqrt_().add_(along).clamp_min_(0)


def body_points(unit: Tensor, norms: Tensor) -> tuple[Tensor, float]:
    """Return for each row the farthest point along it of a body of diameter one (V, d), and a bound of the diameter.

    Then <G, Phi> = sum |g_i| h(u_i), with h the support function of the body. The ball h = 1/2 gives projected RowNorm.
    Another body of constant width, h(u) + h(-u) = 1, does better where directions are spread differently on opposite
    sides, as a gradient's are: it pushes all rare tokens one way, and each token of the batch its own way. The body is
    round about an axis, the leading direction of the rows; t is the angle to it. The point of a row is
    h cos t - h' sin t along the axis and h sin t + h' cos t across it: on the body even where the angle is inexact.
    The rows have directions `unit` (V, d), d > 1, and `norms` (V,) in fp64.
    """
    heavy = norms.topk(min(2048, len(unit))).indices
    sample = unit[heavy] * norms[heavy].sqrt().to(unit.dtype)[:, None]
    start = leading_directions(sample, 1)[:, 0]
    axis, weight = start, norms.to(unit.dtype)
    for _ in range(4):
        axis = normalize((weight * (unit @ axis)) @ unit, dim=0)
    angles = [_angles(unit, axis) for axis in (start, axis)]
    supports = [_best_support(angle, norms) for angle in angles]
    best = max((0, 1), key=lambda number: float((norms * supports[number][0]).sum()))
    t, (h, slope), axis = angles[best], supports[best], (start, axis)[best].double()
    axis /= torch.linalg.vector_norm(axis)
    points = torch.empty_like(unit)
    for at in blocks(len(unit)):
        u = unit[at].double()
        across = u - torch.outer(u @ axis, axis)
        across -= torch.outer(across @ axis, axis)  # again: a row along the axis leaves little but rounding
        across /= torch.linalg.vector_norm(across, dim=1, keepdim=True).clamp_min(2.0**-40)
        along = h[at] * t[at].cos() - slope[at] * t[at].sin()
        points[at] = torch.outer(along, axis).addcmul_((h[at] * t[at].sin() + slope[at] * t[at].cos())[:, None], across)
    points[norms == 0] = 0  # inside the body
    return points, 1 + 1e-9


def _angles(unit: Tensor, axis: Tensor) -> Tensor:
    """Return the angles (V,) of the rows to the axis, fp64."""
    along = unit @ axis
    across = torch.empty_like(along)
    for at in blocks(len(unit)):
        torch.linalg.vector_norm(torch.addmm(unit[at], along[at, None], axis[None], alpha=-1), dim=1, out=across[at])
    return torch.atan2(across, along).double()


def _best_support(angle: Tensor, weight: Tensor, cells: int = 4096) -> tuple[Tensor, Tensor]:
    """Return h and h' at angles (V,) to the axis, of the body with the largest sum of weight * h.

    With t the angle to the axis,

        h(t) = 1/2 + f(t),  f(pi - t) = -f(t),  f(t) = integral_0^t sin(t - r) sigma(r) dr  up to a shift of the body.

    The body is convex if |sigma| <= 1/2, and smooth across the equator if integral_0^{pi/2} cos(r) sigma(r) dr = 0. The
    sum is linear in sigma, which is constant in each cell of a grid: so it is +1/2 or -1/2, by a threshold that sorting
    finds.
    """
    grid = torch.linspace(0, math.pi / 2, cells + 1, dtype=torch.float64, device=angle.device)
    side = torch.where(angle <= math.pi / 2, 1.0, -1.0).double()
    near = torch.minimum(angle, math.pi - angle).clamp_min_(0)  # angle to the nearer pole
    cell = (near * (2 * cells / math.pi)).long().clamp_(max=cells - 1)
    sine, cosine = (
        grid.new_zeros(cells).index_add_(0, cell, side * weight * part).flip(0).cumsum(0).flip(0)
        for part in (near.sin(), near.cos())
    )  # (cells,) sums over the rows beyond each cell
    gain = sine - cosine * ((grid[1:] + grid[:-1]) / 2).tan()  # from sigma in a cell, over the cosine of its angle
    room = grid.sin().diff()
    order = gain.argsort(descending=True)
    filled = room[order].cumsum(0)
    sigma = torch.empty_like(room)
    sigma[order] = ((0.5 - filled + room[order]) / room[order]).clamp(0, 1) - 0.5  # half of the room is +1/2
    zero = grid.new_zeros(1)
    C = torch.cat([zero, (sigma * room).cumsum(0)])[cell] + sigma[cell] * (near.sin() - grid[cell].sin())
    S = torch.cat([zero, (-sigma * grid.cos().diff()).cumsum(0)])[cell] - sigma[cell] * (near.cos() - grid[cell].cos())
    return 0.5 + side * (near.sin() * C - near.cos() * S), near.cos() * C + near.sin() * S

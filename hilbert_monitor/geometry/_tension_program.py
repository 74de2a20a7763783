"""The convex program of the minimum total tension T(G), among groups of rows, and its solver.

In the paper's mechanical picture the gradient's rows are forces that pull points apart, and no two points may be more
than one apart. Point A stands for one row of G, or for a group of rows. Its load g_A is the sum of the group's rows,
and its spread is s_A = sqrt(W_A^2 - |g_A|^2), with W_A the sum of the rows' norms; a single row has spread zero. The
program is

    maximise  sum_A <g_A, x_A> + s_A a_A   over points x_A and radii a_A
    subject to  |x_A - x_B|^2 + a_A^2 + a_B^2 <= 1,  and  2 a_A^2 <= 1 for a group.

Its value is T(G) where every point is one row, and at least T(G) otherwise: a flow among groups extends to a flow
among their rows, no longer than `flow_length` says (`tension.py` has the argument).

The method of multipliers solves it, with Newton steps by conjugate gradients inside. The multiplier lambda_AB of a
constraint is the tension of the edge AB, which carries the vector lambda_AB (x_A - x_B). Where these vectors balance
the loads, they are a balanced flow.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

Vector = tuple[Tensor, Tensor]
"""A change of points (K, d) and of radii (K,)."""


@dataclass(frozen=True)
class GroupLoads:
    """The forces on K groups of rows, all in fp64."""

    load: Tensor
    """(K, d) sums of the rows of each group."""
    spread: Tensor
    """(K,) sqrt(weight^2 - |load|^2), zero for a single row."""
    weight: Tensor
    """(K,) sums of the rows' norms, positive."""

    def scaled(self, factor: float) -> GroupLoads:
        """Return the same loads times a positive number."""
        return GroupLoads(self.load * factor, self.spread * factor, self.weight * factor)


@dataclass(frozen=True)
class EdgeFlow:
    """A flow among K groups, along the E edges that carry tension. An edge may join a group to itself."""

    point: Tensor
    """(K, d)."""
    radius: Tensor
    """(K,)."""
    i: Tensor
    """(E,) group where an edge starts."""
    j: Tensor
    """(E,) group where it ends, j >= i."""
    tension: Tensor
    """(E,) positive."""

    def vectors(self) -> Tensor:
        """Return the flow along each edge, tension (x_i - x_j), (E, d)."""
        return self.tension[:, None] * (self.point.index_select(0, self.i) - self.point.index_select(0, self.j))


def objective(loads: GroupLoads, points: Tensor, radii: Tensor) -> float:
    """Return sum <g_A, x_A> + s_A a_A, which the program maximises."""
    return float((loads.load * points).sum() + (loads.spread * radii).sum())


def longest_edge(points: Tensor, radii: Tensor) -> float:
    """Return the length of the longest edge, between two groups or from a group to itself."""
    return float(_squared_lengths(points, radii).max().clamp_min(0).sqrt())


def pull_together(points: Tensor, weight: Tensor) -> Tensor:
    """Move each point towards the weighted mean until it is within one of all heavier points.

    Heavy points stay, and light ones give direction.
    """
    order = weight.argsort(descending=True)
    x = points[order] - (weight @ points) / weight.sum()
    size, cross = x.square().sum(1), x @ x.T
    factor = torch.ones_like(size)
    near = size.new_zeros(len(x))  # squared norms of the points that are done
    for k in range(len(x)):
        if k and float(size[k]) > 0:
            along = factor[:k] * cross[k, :k]
            reach = ((along.square() + size[k] * (1 - near[:k])).clamp_min_(0).sqrt_() + along) / size[k]
            factor[k] = reach.min().clamp(0, 1)
        near[k] = size[k] * factor[k].square()
    closer = torch.empty_like(x)
    closer[order] = x * factor[:, None]
    return closer


def flow_length(loads: GroupLoads, edges: EdgeFlow, closing: float = 2**-0.5) -> float:
    """Return the length of the balanced flow that extends the edges' own: an upper bound on T(G), but for rounding.

    Edge AB carries Y_AB = lambda_AB (x_A - x_B), and the share tau_AB = lambda_AB / (sum over A's edges) of A's spread;
    an edge from a group to itself counts at both ends. Its length is |(Y_AB, tau_AB s_A, tau_BA s_B)|. A group keeps
    the share tau_AA of its spread, all of it where it has no edge, and the remainder r_A of its load. Both together are
    closed by a flow among all rows, no longer than `closing` times sum_A |(r_A, tau_AA s_A)|. Cost: K^2 d in fp64.

    Args:
        loads: of the groups.
        edges: among them.
        closing: J with T(R) <= J sum |r_i| for all R of G's rank: 1 / sqrt(2), or less by Jung's theorem.
    """
    x, K = edges.point, len(edges.point)
    tension = x.new_zeros(K, K).index_put_((edges.i, edges.j), edges.tension, accumulate=True)
    tension = tension + tension.T
    degree = tension.sum(1)
    sent = tension * (loads.spread / degree.where(degree > 0, 1.0))[:, None]
    kept = sent.diagonal().where(degree > 0, loads.spread)
    tension.fill_diagonal_(0)
    left = torch.addmm(loads.load - tension.sum(1)[:, None] * x, tension, x)
    closed = (left.square().sum(1) + kept.square()).sqrt().sum()
    size = x.square().sum(1)
    rounding = (x.shape[1] + 8) * 2.0**-50  # of a squared distance, in parts of the squared norms
    square = torch.addmm((1 + rounding) * (size + size[:, None]), x, x.T, alpha=-2).clamp_min_(0)
    square.mul_(tension.square()).add_(sent.square()).add_(sent.T.square()).sqrt_()
    return float(square.triu(1).sum() + closing * closed)


def solve(loads: GroupLoads, *, tol: float, deadline: float, stall: float = 0.0) -> tuple[EdgeFlow, Tensor] | None:
    """Solve until the flow's length is within `tol` of the value, or time.monotonic() passes the deadline.

    Args:
        loads: of the groups.
        tol: relative difference between the flow's length and the value.
        deadline: in the time of time.monotonic().
        stall: stop as well when a round shortens the flow by less than this share of it.

    Returns:
        the shortest flow, which more time never makes longer, and the points with the largest objective for their
        diameter (not always those of the flow); None if there was no time for a first flow.
    """
    total = float(loads.weight.sum())
    method = _MultiplierMethod(loads.scaled(1 / total), deadline)
    flow = method.run(tol, stall)
    return (replace(flow, tension=flow.tension * total), method.best_points) if flow else None


def _sum_at_ends(K: int, edges: EdgeFlow, amount: Tensor) -> Tensor:
    """Add the amount of each edge (E,) at both its ends: sums (K,)."""
    return amount.new_zeros(K).index_add_(0, edges.i, amount).index_add_(0, edges.j, amount)


def _divergence(K: int, edges: EdgeFlow, flow: Tensor) -> Tensor:
    """Return the net flow out of each point (K, d), given the flow along each edge (E, d)."""
    return flow.new_zeros(K, flow.shape[1]).index_add_(0, edges.i, flow).index_add_(0, edges.j, flow, alpha=-1)


def _squared_lengths(points: Tensor, radii: Tensor) -> Tensor:
    """Return the squared lengths (K, K) of all edges; the diagonal has those from a group to itself."""
    size = points.square().sum(1) + radii.square()
    square = torch.addmm(size + size[:, None], points, points.T, alpha=-2)
    square.diagonal().copy_(2 * radii.square())
    return square


class _MultiplierMethod:
    """The method of multipliers, on loads whose weights sum to one.

    The penalty of a pair is rho times the harmonic mean of its weights, so that the stiffness of a point grows with its
    load. Tried and dropped: the product of the weights. It leaves light points without stiffness, and took five times
    as long on loads of very different weights.
    """

    def __init__(self, loads: GroupLoads, deadline: float) -> None:
        self.loads, self.deadline = loads, deadline
        w = loads.weight.clamp_min(float(loads.weight.max()) * 1e-9)  # the lightest points keep some stiffness
        self.w, self.pair_weight = w, torch.outer(w, w) / (w + w[:, None]) * (2 / len(w))
        self.x, self.a = 0.5 * loads.load / w[:, None], 0.5 * loads.spread / w
        self.multiplier = torch.zeros_like(self.pair_weight)
        self.single = loads.spread <= 0
        self.rho = 16.0
        self.best_points = self.x

    @property
    def late(self) -> bool:
        return time.monotonic() > self.deadline

    def run(self, tol: float, stall: float, rounds: int = 100) -> EdgeFlow | None:
        best, shortest, lower, accuracy, before = None, float("inf"), 0.0, 1e-2, float("inf")
        for _ in range(rounds):
            tension = self._minimise(accuracy)
            if tension is None:
                break
            flow = self._edge_flow(tension)
            length, reach = flow_length(self.loads, flow), longest_edge(self.x, self.a)
            if (bound := objective(self.loads, self.x, self.a) / reach) > lower:
                self.best_points, lower = self.x, bound
            if bool(self.single.all()):
                closer = pull_together(self.x, self.w)
                if (bound := objective(self.loads, closer, self.a) / max(longest_edge(closer, self.a), 1.0)) > lower:
                    self.best_points, lower = closer, bound
            stalled = length > (1 - stall) * shortest
            if length < shortest:
                best, shortest = flow, length
            if shortest - lower <= tol * lower or (stall > 0 and stalled):
                break
            self.multiplier = tension
            if reach - 1 > 0.25 * before:
                self.rho *= 4
            before, accuracy = reach - 1, max(accuracy / 3, 1e-11)
        return best

    def _edge_flow(self, tension: Tensor) -> EdgeFlow:
        i, j = tension.triu().nonzero(as_tuple=True)
        return EdgeFlow(self.x, self.a, i, j, tension[i, j])

    def _merit(self, x: Tensor, a: Tensor) -> tuple[float, Tensor]:
        """Return the augmented Lagrangian, and the tensions max(0, multiplier + penalty (length^2 - 1) / 2)."""
        excess = _squared_lengths(x, a).sub_(1).mul_(self.pair_weight)
        tension = excess.mul_(self.rho / 2).add_(self.multiplier).clamp_min_(0)
        tension.diagonal()[self.single] = 0
        energy = tension.square().div_(self.pair_weight)
        stored = float(energy.sum() + energy.diagonal().sum()) / (4 * self.rho)
        return stored - objective(self.loads, x, a), tension

    def _minimise(self, accuracy: float) -> Tensor | None:
        """Minimise by damped Newton steps until the flow balances all but `accuracy` of the loads; None if late."""
        merit, tension = self._merit(self.x, self.a)
        for _ in range(60):
            if self.late:
                return None
            degree = tension.sum(1)
            gx = torch.addmm(degree[:, None] * self.x - self.loads.load, tension, self.x, alpha=-1)
            ga = (degree + tension.diagonal()) * self.a - self.loads.spread
            size = float(torch.linalg.vector_norm(gx, dim=1).sum() + ga.abs().sum())
            if size <= accuracy:
                break
            dx, da = self._newton_step(tension, (gx, ga), min(0.3, size**0.5))
            slope = float((gx * dx).sum() + (ga * da).sum())
            step = 1.0
            while True:
                x, a = self.x + step * dx, self.a + step * da
                new, new_tension = self._merit(x, a)
                if new <= merit + 1e-4 * step * slope or step * -slope < 1e-14:
                    break
                step /= 2
            if step * -slope < 1e-14 and new > merit:  # the remaining gain is below rounding
                break
            self.x, self.a, merit, tension = x, a, new, new_tension
        return tension

    def _newton_step(self, tension: Tensor, gradient: Vector, forcing: float) -> Vector:
        """Solve Hessian times step = -gradient by preconditioned conjugate gradients."""
        stiff = torch.where(tension > 0, self.pair_weight * self.rho, 0.0)
        degree = tension.sum(1) + tension.diagonal()
        square = _squared_lengths(self.x, torch.zeros_like(self.a)).clamp_min_(0)
        damp = 1e-7 * self.w
        along_x = (degree + (stiff * square).sum(1) / self.x.shape[1] + damp)[:, None]
        along_a = degree + stiff.sum(1) * self.a.square() + damp
        sparse = 32 * int((tension > 0).sum()) < 2 * tension.numel()
        times = self._sparse_hessian(tension, stiff) if sparse else self._dense_hessian(tension, stiff)
        step = (torch.zeros_like(gradient[0]), torch.zeros_like(gradient[1]))
        residual = (-gradient[0], -gradient[1])
        conditioned = (residual[0] / along_x, residual[1] / along_a)
        direction = (conditioned[0].clone(), conditioned[1].clone())
        size = first = _dot(residual, conditioned)
        for _ in range(300):
            hx, ha = times(direction[0], direction[1])
            hx.addcmul_(damp[:, None], direction[0])
            ha.addcmul_(damp, direction[1])
            length = size / _dot(direction, (hx, ha))
            for s, w, r, h in zip(step, direction, residual, (hx, ha), strict=True):
                s.add_(w, alpha=length)
                r.sub_(h, alpha=length)
            conditioned = (residual[0] / along_x, residual[1] / along_a)
            before, size = size, _dot(residual, conditioned)
            if size <= forcing**2 * first or self.late:
                break
            for w, c in zip(direction, conditioned, strict=True):
                w.mul_(size / before).add_(c)
        return step

    def _dense_hessian(self, tension: Tensor, stiff: Tensor) -> Callable[[Tensor, Tensor], Vector]:
        degree, x, a = tension.sum(1), self.x, self.a
        own = tension.diagonal()

        def times(dx: Tensor, da: Tensor) -> Vector:
            cross = x @ dx.T
            each = cross.diagonal() + a * da
            m = (each + each[:, None]).sub_(cross).sub_(cross.T).mul_(stiff)
            total = m.sum(1)
            hx = degree[:, None] * dx + total[:, None] * x
            hx.addmm_(tension, dx, alpha=-1).addmm_(m, x, alpha=-1)
            return hx, (degree + own) * da + (total + m.diagonal()) * a

        return times

    def _sparse_hessian(self, tension: Tensor, stiff: Tensor) -> Callable[[Tensor, Tensor], Vector]:
        c, a, K = self._edge_flow(tension), self.a, len(self.a)
        span = self.x.index_select(0, c.i) - self.x.index_select(0, c.j)
        degree, penalty, ai, aj = _sum_at_ends(K, c, c.tension), stiff[c.i, c.j], a[c.i], a[c.j]

        def times(dx: Tensor, da: Tensor) -> Vector:
            change = dx.index_select(0, c.i) - dx.index_select(0, c.j)
            m = penalty * ((span * change).sum(1) + ai * da[c.i] + aj * da[c.j])
            flow = change.mul_(c.tension[:, None]).addcmul_(span, m[:, None])
            return _divergence(K, c, flow), degree * da + _sum_at_ends(K, c, m) * a

        return times


def _dot(u: Vector, v: Vector) -> float:
    return float((u[0] * v[0]).sum() + (u[1] * v[1]).sum())

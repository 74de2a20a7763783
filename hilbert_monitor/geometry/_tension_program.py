"""The convex program behind the oracle and the bracket: points that loads pull apart, held by cables of length one.

Point A stands for one row of G, or for a group of rows. It has a load g_A (the sum of the group's rows) and a spread
s_A = sqrt(W_A^2 - |g_A|^2), with W_A the sum of the rows' norms; the spread of a single row is zero. The program is

    maximise  sum_A <g_A, x_A> + s_A a_A   over points x_A and radii a_A
    subject to  |x_A - x_B|^2 + a_A^2 + a_B^2 <= 1,  and  2 a_A^2 <= 1 for a group.

Its value is T(G) where every point is one row, and never less than T(G) otherwise: a flow among groups spreads to a
flow among their rows, no longer than `flow_length` says (`tension.py` has the argument).

It is solved by the method of multipliers, with Newton steps by conjugate gradients inside. A multiplier is the
tension of a cable: cable AB pulls with lambda_AB (x_A - x_B), and where the pulls balance the loads they are a flow.
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
class Loads:
    """What pulls the points apart: loads (K, d), spreads (K,), and sums of norms (K,) that are positive; all fp64."""

    load: Tensor
    spread: Tensor
    weight: Tensor

    def scaled(self, factor: float) -> Loads:
        """Return the same loads times a positive number."""
        return Loads(self.load * factor, self.spread * factor, self.weight * factor)


@dataclass(frozen=True)
class Cables:
    """Points (K, d), radii (K,), and the cables under tension: their ends i <= j (E,) and their tensions (E,)."""

    point: Tensor
    radius: Tensor
    i: Tensor
    j: Tensor
    tension: Tensor

    def pulls(self) -> Tensor:
        """Return the flow along each cable (E, d)."""
        return self.tension[:, None] * (self.point.index_select(0, self.i) - self.point.index_select(0, self.j))


def value(loads: Loads, points: Tensor, radii: Tensor) -> float:
    """Return what the program maximises."""
    return float((loads.load * points).sum() + (loads.spread * radii).sum())


def longest(points: Tensor, radii: Tensor) -> float:
    """Return the largest length of a cable between two points, or from a group to itself."""
    return float(_squares(points, radii).max().clamp_min(0).sqrt())


def drawn_in(points: Tensor, weight: Tensor) -> Tensor:
    """Draw each point towards the middle until it is within one of all heavier points, so that light ones give way."""
    order = weight.argsort(descending=True)
    x = points[order] - (weight @ points) / weight.sum()
    size, cross = x.square().sum(1), x @ x.T
    factor = torch.ones_like(size)
    near = size.new_zeros(len(x))  # squared norms of the points already drawn in
    for k in range(len(x)):
        if k and float(size[k]) > 0:
            along = factor[:k] * cross[k, :k]
            reach = ((along.square() + size[k] * (1 - near[:k])).clamp_min_(0).sqrt_() + along) / size[k]
            factor[k] = reach.min().clamp(0, 1)
        near[k] = size[k] * factor[k].square()
    drawn = torch.empty_like(x)
    drawn[order] = x * factor[:, None]
    return drawn


def shares(loads: Loads, cables: Cables) -> tuple[Tensor, Tensor]:
    """Return which share of its spread a group sends along each cable, from either end (2, E), and keeps (K,).

    A cable from a group to itself counts at both ends. A group that no cable holds keeps everything.
    """
    ends = torch.stack([cables.i, cables.j])
    held = _at_ends(len(loads.load), cables, cables.tension)
    return cables.tension / held.where(held > 0, 1.0)[ends], (held <= 0).double()


def flow_length(loads: Loads, cables: Cables) -> float:
    """Length of the balanced flow that the cables carry: an upper bound on T(G), but for the rounding of this sum.

    Along the cables flows Y_AB = lambda_AB (x_A - x_B). What that leaves of the loads, r_A, flows from all points to
    all as (|r_B| r_A - |r_A| r_B) / sum |r|, which is no longer than sum |r| / sqrt(2). With tau_AB the share of its
    spread that a group sends along a cable, cable AB is |(Y_AB, tau_AB s_A, tau_BA s_B)| long, and a group's cable to
    itself tau_AA s_A / sqrt(2).
    """
    share, kept = shares(loads, cables)
    sent = share * loads.spread[torch.stack([cables.i, cables.j])]
    own = cables.i == cables.j
    pulls = cables.pulls()
    across = (pulls.square().sum(1) + sent.square().sum(0)).sqrt()
    within = sent[:, own].sum() + (kept * loads.spread).sum()
    rest = torch.linalg.vector_norm(loads.load - _divergence(len(loads.load), cables, pulls), dim=1)
    return float(across[~own].sum() + (within + rest.sum()) / 2**0.5)


def solve(loads: Loads, *, tol: float, deadline: float, stall: float = 0.0) -> tuple[Cables, Tensor] | None:
    """Solve until the flow's length is within `tol` of the value, or time.monotonic() passes the deadline.

    Args:
        loads: what pulls.
        tol: relative difference between the flow's length and the value.
        deadline: in the time of time.monotonic().
        stall: stop as well when a round shortens the flow by less than this share of it.

    Returns:
        the cables with the shortest flow, which more time never makes longer, and the points with the largest value
        for their reach (not always those of the cables); None if there was no time for any.
    """
    total = float(loads.weight.sum())
    method = _Multipliers(loads.scaled(1 / total), deadline)
    found = method.run(tol, stall)
    return (replace(found, tension=found.tension * total), method.widest) if found else None


def _at_ends(K: int, cables: Cables, amount: Tensor) -> Tensor:
    """Sum an amount of each cable (E,) over both its ends (K,)."""
    return amount.new_zeros(K).index_add_(0, cables.i, amount).index_add_(0, cables.j, amount)


def _divergence(K: int, cables: Cables, flow: Tensor) -> Tensor:
    """Sum what leaves each point (K, d), given the flow along each cable (E, d)."""
    return flow.new_zeros(K, flow.shape[1]).index_add_(0, cables.i, flow).index_add_(0, cables.j, flow, alpha=-1)


def _squares(points: Tensor, radii: Tensor) -> Tensor:
    """Squared lengths (K, K) of all cables; on the diagonal those of groups to themselves."""
    size = points.square().sum(1) + radii.square()
    square = torch.addmm(size + size[:, None], points, points.T, alpha=-2)
    square.diagonal().copy_(2 * radii.square())
    return square


class _Multipliers:
    """The method of multipliers, on loads whose weights sum to one.

    A pair's penalty is rho times the harmonic mean of its weights: the stiffness of a point should go with its load.
    Their product instead leaves light points limp, and took five times as long on loads of very different weights.
    """

    def __init__(self, loads: Loads, deadline: float) -> None:
        self.loads, self.deadline = loads, deadline
        w = loads.weight.clamp_min(float(loads.weight.max()) * 1e-9)  # keeps the lightest points from being numb
        self.w, self.pair_weight = w, torch.outer(w, w) / (w + w[:, None]) * (2 / len(w))
        self.x, self.a = 0.5 * loads.load / w[:, None], 0.5 * loads.spread / w
        self.multiplier = torch.zeros_like(self.pair_weight)
        self.single = loads.spread <= 0
        self.rho = 16.0
        self.widest = self.x

    @property
    def late(self) -> bool:
        return time.monotonic() > self.deadline

    def run(self, tol: float, stall: float, rounds: int = 100) -> Cables | None:
        best, shortest, lower, accuracy, before = None, float("inf"), 0.0, 1e-2, float("inf")
        for _ in range(rounds):
            tension = self._minimise(accuracy)
            if tension is None:
                break
            now = self._cables(tension)
            length, reach = flow_length(self.loads, now), longest(self.x, self.a)
            if (width := value(self.loads, self.x, self.a) / reach) > lower:
                self.widest, lower = self.x, width
            if bool(self.single.all()):
                drawn = drawn_in(self.x, self.w)
                if (width := value(self.loads, drawn, self.a) / max(longest(drawn, self.a), 1.0)) > lower:
                    self.widest, lower = drawn, width
            stalled = length > (1 - stall) * shortest
            if length < shortest:
                best, shortest = now, length
            if shortest - lower <= tol * lower or (stall > 0 and stalled):
                break
            self.multiplier = tension
            if reach - 1 > 0.25 * before:
                self.rho *= 4
            before, accuracy = reach - 1, max(accuracy / 3, 1e-11)
        return best

    def _cables(self, tension: Tensor) -> Cables:
        i, j = tension.triu().nonzero(as_tuple=True)
        return Cables(self.x, self.a, i, j, tension[i, j])

    def _merit(self, x: Tensor, a: Tensor) -> tuple[float, Tensor]:
        """The augmented Lagrangian, and the tensions max(0, multiplier + penalty (length^2 - 1) / 2)."""
        excess = _squares(x, a).sub_(1).mul_(self.pair_weight)
        tension = excess.mul_(self.rho / 2).add_(self.multiplier).clamp_min_(0)
        tension.diagonal()[self.single] = 0
        energy = tension.square().div_(self.pair_weight)
        stored = float(energy.sum() + energy.diagonal().sum()) / (4 * self.rho)
        return stored - value(self.loads, x, a), tension

    def _minimise(self, accuracy: float) -> Tensor | None:
        """Minimise by damped Newton steps until pulls and loads differ by `accuracy` of the loads; None if late."""
        merit, tension = self._merit(self.x, self.a)
        for _ in range(60):
            if self.late:
                return None
            held = tension.sum(1)
            gx = torch.addmm(held[:, None] * self.x - self.loads.load, tension, self.x, alpha=-1)
            ga = (held + tension.diagonal()) * self.a - self.loads.spread
            size = float(torch.linalg.vector_norm(gx, dim=1).sum() + ga.abs().sum())
            if size <= accuracy:
                break
            dx, da = self._newton_step(tension, (gx, ga), min(0.3, size**0.5))
            slope = float((gx * dx).sum() + (ga * da).sum())
            step = 1.0
            while True:
                x, a = self.x + step * dx, self.a + step * da
                new, pulled = self._merit(x, a)
                if new <= merit + 1e-4 * step * slope or step * -slope < 1e-14:
                    break
                step /= 2
            if step * -slope < 1e-14 and new > merit:  # rounding hides what is left to gain
                break
            self.x, self.a, merit, tension = x, a, new, pulled
        return tension

    def _newton_step(self, tension: Tensor, gradient: Vector, forcing: float) -> Vector:
        """Solve Hessian times step = -gradient by preconditioned conjugate gradients."""
        stiff = torch.where(tension > 0, self.pair_weight * self.rho, 0.0)
        held = tension.sum(1) + tension.diagonal()
        square = _squares(self.x, torch.zeros_like(self.a)).clamp_min_(0)
        damp = 1e-7 * self.w
        along_x = (held + (stiff * square).sum(1) / self.x.shape[1] + damp)[:, None]
        along_a = held + stiff.sum(1) * self.a.square() + damp
        few = 32 * int((tension > 0).sum()) < 2 * tension.numel()
        times = self._sparse_hessian(tension, stiff) if few else self._dense_hessian(tension, stiff)
        step = (torch.zeros_like(gradient[0]), torch.zeros_like(gradient[1]))
        rest = (-gradient[0], -gradient[1])
        conditioned = (rest[0] / along_x, rest[1] / along_a)
        way = (conditioned[0].clone(), conditioned[1].clone())
        size = first = _dot(rest, conditioned)
        for _ in range(300):
            hx, ha = times(way[0], way[1])
            hx.addcmul_(damp[:, None], way[0])
            ha.addcmul_(damp, way[1])
            length = size / _dot(way, (hx, ha))
            for s, w, r, h in zip(step, way, rest, (hx, ha), strict=True):
                s.add_(w, alpha=length)
                r.sub_(h, alpha=length)
            conditioned = (rest[0] / along_x, rest[1] / along_a)
            before, size = size, _dot(rest, conditioned)
            if size <= forcing**2 * first or self.late:
                break
            for w, c in zip(way, conditioned, strict=True):
                w.mul_(size / before).add_(c)
        return step

    def _dense_hessian(self, tension: Tensor, stiff: Tensor) -> Callable[[Tensor, Tensor], Vector]:
        held, x, a = tension.sum(1), self.x, self.a
        own = tension.diagonal()

        def times(dx: Tensor, da: Tensor) -> Vector:
            cross = x @ dx.T
            each = cross.diagonal() + a * da
            m = (each + each[:, None]).sub_(cross).sub_(cross.T).mul_(stiff)
            total = m.sum(1)
            hx = held[:, None] * dx + total[:, None] * x
            hx.addmm_(tension, dx, alpha=-1).addmm_(m, x, alpha=-1)
            return hx, (held + own) * da + (total + m.diagonal()) * a

        return times

    def _sparse_hessian(self, tension: Tensor, stiff: Tensor) -> Callable[[Tensor, Tensor], Vector]:
        c, a, K = self._cables(tension), self.a, len(self.a)
        span = self.x.index_select(0, c.i) - self.x.index_select(0, c.j)
        held, penalty, ai, aj = _at_ends(K, c, c.tension), stiff[c.i, c.j], a[c.i], a[c.j]

        def times(dx: Tensor, da: Tensor) -> Vector:
            change = dx.index_select(0, c.i) - dx.index_select(0, c.j)
            m = penalty * ((span * change).sum(1) + ai * da[c.i] + aj * da[c.j])
            flow = change.mul_(c.tension[:, None]).addcmul_(span, m[:, None])
            return _divergence(K, c, flow), held * da + _at_ends(K, c, m) * a

        return times


def _dot(u: Vector, v: Vector) -> float:
    return float((u[0] * v[0]).sum() + (u[1] * v[1]).sum())

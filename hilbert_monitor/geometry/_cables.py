"""The convex program behind the oracle and the bracket: points that loads pull apart, held by cables of length one.

Point A stands for one row of G, or for a group of rows. It has a load g_A (the sum of the group's rows) and a spread
s_A = sqrt(W_A^2 - |g_A|^2), with W_A the sum of the rows' norms; the spread of a single row is zero. The program is

    maximise  sum_A <g_A, x_A> + s_A a_A   over points x_A and radii a_A
    subject to  |x_A - x_B|^2 + a_A^2 + a_B^2 <= 1,  and  2 a_A^2 <= 1 for a group.

Its value is T(G) where every point is one row, and never less than T(G) otherwise: a flow among groups spreads to a
flow among rows that is at most as long (`flow_length` has the formula, `tension.py` the argument).

It is solved by the method of multipliers, with a Newton step by conjugate gradients inside. A multiplier is the
tension of a cable: cable AB pulls with lambda_AB (x_A - x_B), and where the pulls balance the loads they are a flow.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Loads:
    """What pulls the points apart: loads (K, d), spreads (K,), and the sums of norms (K,), all fp64."""

    load: Tensor
    spread: Tensor
    weight: Tensor

    def scaled(self, factor: float) -> Loads:
        """Return the same loads times a positive number."""
        return Loads(self.load * factor, self.spread * factor, self.weight * factor)


@dataclass(frozen=True)
class Cables:
    """Points, radii, and the cables under tension: (K, d), (K,), and for each cable its ends and its tension (E,)."""

    point: Tensor
    radius: Tensor
    i: Tensor
    j: Tensor
    tension: Tensor

    def scaled(self, factor: float) -> Cables:
        """Return the same cables with their tensions times a positive number."""
        return replace(self, tension=self.tension * factor)

    def slack(self) -> Tensor:
        """Spans |x_i - x_j| (E, d) of the cables."""
        return self.point.index_select(0, self.i) - self.point.index_select(0, self.j)


def value(loads: Loads, points: Tensor, radii: Tensor) -> Tensor:
    """Return what the program maximises."""
    return (loads.load * points).sum() + (loads.spread * radii).sum()


def longest(points: Tensor, radii: Tensor) -> float:
    """Largest length of a cable between any two points, or from a group to itself."""
    return float(_squares(points, radii).max().clamp_min(0).sqrt())


def flow_length(loads: Loads, cables: Cables) -> float:
    """Length of the balanced flow that the cables carry: an upper bound on T(G), but for the rounding of this sum.

    The flow is Y_AB = lambda_AB (x_A - x_B), and what it leaves of the loads, r_A, goes from all points to all as
    (|r_B| r_A - |r_A| r_B) / sum |r|, which is no longer than sum |r| / sqrt(2). A group sends the share
    tau_AB = lambda_AB / sum_B lambda_AB of what its rows differ by along cable AB (2 lambda_AA counts for itself), so
    cable AB is |(Y_AB, tau_AB s_A, tau_BA s_B)| long, and a group's own cables tau_AA s_A / sqrt(2).
    """
    i, j, tension = cables.i, cables.j, cables.tension
    K = len(loads.load)
    held = _gather(K, i, j, tension)
    share = tension / held.where(held > 0, 1.0)[torch.stack([i, j])]
    spread = share * loads.spread[torch.stack([i, j])]
    own = i == j
    pull = tension[:, None] * cables.slack()
    across = (pull.square().sum(1) + spread.square().sum(0)).sqrt()
    length = across[~own].sum() + spread[:, own].sum() / 2**0.5
    length += loads.spread[held <= 0].sum() / 2**0.5
    rest = loads.load.clone().index_add_(0, i, pull, alpha=-1).index_add_(0, j, pull)
    return float(length + torch.linalg.vector_norm(rest, dim=1).sum() / 2**0.5)


def solve(loads: Loads, *, tol: float, deadline: float, start: Cables | None = None) -> Cables:
    """Solve the program until the flow's length is within `tol` of the value, or time.monotonic() passes `deadline`."""
    total = float(loads.weight.sum())
    method = _Multipliers(loads.scaled(1 / total), start.scaled(1 / total) if start else None)
    return method.run(tol, deadline).scaled(total)


def _gather(K: int, i: Tensor, j: Tensor, amount: Tensor) -> Tensor:
    """Sum an amount of each cable over both its ends."""
    return amount.new_zeros(K).index_add_(0, i, amount).index_add_(0, j, amount)


def _squares(points: Tensor, radii: Tensor) -> Tensor:
    """Squared lengths (K, K) of all cables."""
    size = points.square().sum(1) + radii.square()
    square = torch.addmm(size + size[:, None], points, points.T, alpha=-2)
    square.diagonal().copy_(2 * radii.square())
    return square


class _Multipliers:
    """The method of multipliers, on loads whose norms sum to one.

    Each pair has a penalty rho w_A w_B, so that a row's stiffness goes with its load.
    """

    def __init__(self, loads: Loads, start: Cables | None) -> None:
        self.loads = loads
        K = len(loads.load)
        w = loads.weight.clamp_min(float(loads.weight.max()) * 1e-12)
        self.w = w
        if start is None:
            self.x, self.a = 0.5 * loads.load / w[:, None], 0.5 * loads.spread / w
            self.multiplier = w.new_zeros(K, K)
        else:
            self.x, self.a = start.point.clone(), start.radius.clone()
            self.multiplier = w.new_zeros(K, K)
            self.multiplier[start.i, start.j] = start.tension
            self.multiplier[start.j, start.i] = start.tension
        self.single = loads.spread <= 0
        self.a[self.single] = 0
        self.rho = 4.0

    def penalty(self) -> Tensor:
        return self.rho * torch.outer(self.w, self.w) / self.w.sum()

    def tensions(self, x: Tensor, a: Tensor) -> Tensor:
        """max(0, multiplier + penalty * (length^2 - 1) / 2), zero for a single row with itself."""
        t = _squares(x, a).sub_(1).mul_(self.penalty()).mul_(0.5).add_(self.multiplier).clamp_min_(0)
        t.diagonal()[self.single] = 0
        return t

    def merit(self, x: Tensor, a: Tensor) -> tuple[float, Tensor]:
        t = self.tensions(x, a)
        energy = t.square().div_(self.penalty())
        return float(0.25 * (energy.sum() + energy.diagonal().sum()) - value(self.loads, x, a)), t

    def cables(self, t: Tensor, x: Tensor, a: Tensor) -> Cables:
        i, j = t.triu().nonzero(as_tuple=True)
        return Cables(x, a, i, j, t[i, j])

    def run(self, tol: float, deadline: float) -> Cables:
        best, shortest = None, float("inf")
        lower = 0.0
        inner = 1e-2
        last = float("inf")
        for _ in range(200):
            t = self.inner(inner, deadline)
            now = self.cables(t, self.x, self.a)
            upper = flow_length(self.loads, now)
            reach = longest(self.x, self.a)
            lower = max(lower, float(value(self.loads, self.x, self.a)) / max(reach, 1e-300))
            if upper < shortest:
                best, shortest = now, upper
            self.trace = (upper, lower, reach)
            if VERBOSE:
                print(f"  outer up {upper:.8f} low {lower:.8f} reach {reach:.6f} rho {self.rho:.3g} edges {len(now.i)} cg {self.cg_count} newton {self.newton_count}")
            if shortest - lower <= tol * lower or time.monotonic() > deadline:
                break
            self.multiplier = t
            over = reach - 1
            if over > 0.25 * last:
                self.rho *= 4
            last = over
            inner = max(inner / 3, 1e-10)
        return best

    cg_count = 0
    newton_count = 0

    def inner(self, accuracy: float, deadline: float) -> Tensor:
        """Minimise the merit by damped Newton steps until the pulls balance the loads to `accuracy` of their sum."""
        merit, t = self.merit(self.x, self.a)
        for _ in range(50):
            c = self.cables(t, self.x, self.a)
            span = c.slack()
            gx, ga = self._gradient(c, span)
            size = float(torch.linalg.vector_norm(gx, dim=1).sum() + ga.abs().sum())
            if size <= accuracy or time.monotonic() > deadline:
                break
            dx, da = self._newton(c, span, gx, ga, min(0.3, size**0.5), deadline)
            slope = float((gx * dx).sum() + (ga * da).sum())
            step = 1.0
            self.newton_count += 1
            while step > 1e-8:
                new = self.merit(self.x + step * dx, self.a + step * da)
                if new[0] <= merit + 1e-4 * step * slope or abs(step * slope) < 1e-15:
                    break
                step /= 2
            self.x, self.a = self.x + step * dx, self.a + step * da
            merit, t = new
        return t

    def _gradient(self, c: Cables, span: Tensor) -> tuple[Tensor, Tensor]:
        pull = c.tension[:, None] * span
        gx = self.loads.load.neg().index_add_(0, c.i, pull).index_add_(0, c.j, pull, alpha=-1)
        ga = _gather(len(self.a), c.i, c.j, c.tension) * self.a - self.loads.spread
        ga[self.single] = 0
        return gx, ga

    def _newton(
        self, c: Cables, span: Tensor, gx: Tensor, ga: Tensor, forcing: float, deadline: float
    ) -> tuple[Tensor, Tensor]:
        """Solve H (dx, da) = -(gx, ga) by preconditioned conjugate gradients."""
        K, d = self.x.shape
        stiff = self.rho * self.w[c.i] * self.w[c.j] / self.w.sum()
        held = _gather(K, c.i, c.j, c.tension)
        damp = 1e-6 * self.w
        ai, aj = self.a[c.i], self.a[c.j]
        bend = _gather(K, c.i, c.j, stiff * span.square().sum(1))
        along_x = held + bend / d + damp
        along_a = held + _gather(K, c.i, c.j, stiff) * self.a.square() + damp

        def times(x: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
            dx = x.index_select(0, c.i) - x.index_select(0, c.j)
            m = stiff * ((span * dx).sum(1) + ai * a[c.i] + aj * a[c.j])
            pull = dx.mul_(c.tension[:, None]).add_(span * m[:, None])
            hx = (damp[:, None] * x).index_add_(0, c.i, pull).index_add_(0, c.j, pull, alpha=-1)
            ha = (damp + held) * a + _gather(K, c.i, c.j, m) * self.a
            ha[self.single] = 0
            return hx, ha

        x, a = torch.zeros_like(gx), torch.zeros_like(ga)
        rx, ra = -gx, -ga
        zx, za = rx / along_x[:, None], ra / along_a
        px, pa = zx.clone(), za.clone()
        rz = float((rx * zx).sum() + (ra * za).sum())
        first = rz
        for _ in range(300):
            hx, ha = times(px, pa)
            self.cg_count += 1
            alpha = rz / float((px * hx).sum() + (pa * ha).sum())
            x.add_(px, alpha=alpha), a.add_(pa, alpha=alpha)
            rx.sub_(hx, alpha=alpha), ra.sub_(ha, alpha=alpha)
            zx, za = rx / along_x[:, None], ra / along_a
            previous, rz = rz, float((rx * zx).sum() + (ra * za).sum())
            if rz <= forcing**2 * first or time.monotonic() > deadline:
                break
            px.mul_(rz / previous).add_(zx), pa.mul_(rz / previous).add_(za)
        return x, a

VERBOSE = False

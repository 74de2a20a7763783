"""The program of the minimum total tension among up to 2,048 groups, solved roughly by first-order steps in fp32.

The program is that of `_tension_program.py`, with every point in Jung's ball too,

    maximise  sum_A <g_A, x_A> + s_A a_A
    subject to  |x_A - x_B|^2 + a_A^2 + a_B^2 <= 1,  and  |x_A|^2 + a_A^2 <= J^2,

which loses nothing: rows of diameter one lie in a ball of that radius, and G does not see where its centre is. The
pairs have multipliers lambda_AB and a quadratic penalty, the ball is kept by projection. Steps are Nesterov's, with the
diagonal of the Hessian as the metric. One step takes two products of K^2 d multiplications, where a Newton step takes
dozens in fp64: it is the way to a few percent among 1,024 heavy rows in a second or two. What it proves is computed in
fp64 afterwards.

The penalty of a pair is the product of its weights, so that all points have the same stiffness for their weight. Tried
and dropped: the harmonic mean of the weights, which `_tension_program.py` has. A heavy group then pulls at each light
row too weakly, and half of the loads were not balanced after a hundred steps.
"""

from __future__ import annotations

import math
import time

import torch
from torch import Tensor

from ._tension_program import EdgeFlow, GroupLoads

_PENALTY = 40.0
_STEPS_A_ROUND = 8  # between two updates of the multipliers


class CoreProgram:
    """Points (K, d) and radii (K,) of groups, and tensions (K, K) of their pairs, that steps improve. All fp32.

    Args:
        loads: of the groups.
        ball: radius J of Jung's ball.
    """

    def __init__(self, loads: GroupLoads, ball: float) -> None:
        self.total = float(loads.weight.sum())
        self._load, self._spread, self._weight = (
            (part / self.total).float() for part in (loads.load, loads.spread, loads.weight)
        )
        self._ball = ball
        direction = loads.load / loads.weight[:, None]
        self.points, self.radii = self._in_ball(
            0.9 * ball * direction.float(), 0.9 * ball * self._spread / self._weight
        )
        self._ahead, self._momentum = (self.points, self.radii), 1.0
        self._multiplier = torch.zeros(len(self._weight), len(self._weight), device=self._weight.device)
        self.tension = self._multiplier
        self.steps = 0

    def step(self) -> None:
        """Take one step: 2 K^2 d multiplications."""
        x, a = self._ahead
        active = self._pull(x, a)
        degree = self.tension.sum(1)
        stiffness = 2 * degree + 2 * _PENALTY * self._weight * active + 0.05 * self._weight
        force = torch.addmm(self._load - degree[:, None] * x, self.tension, x)
        points, radii = self._in_ball(x + force / stiffness[:, None], a + (self._spread - degree * a) / stiffness)
        moved, grown = points - self.points, radii - self.radii
        self.steps += 1
        if self.steps % _STEPS_A_ROUND == 0:
            self._multiplier = self.tension.clone()
            self._momentum = 1.0
        elif float((((x - points) * moved).sum(1) * stiffness).sum()) > 0:  # uphill
            self._momentum = 1.0
        following = (1 + math.sqrt(1 + 4 * self._momentum**2)) / 2
        beyond = (self._momentum - 1) / following
        self._ahead = points + beyond * moved, (radii + beyond * grown).clamp_min(0)
        self.points, self.radii, self._momentum = points, radii, following

    def flow(self) -> EdgeFlow:
        """Return the tensions of all pairs as a flow, and those of the ball as a group's edges to itself."""
        x, tension = self.points.double(), self.tension.double()
        left = self._load.double() - tension.sum(1)[:, None] * x + tension @ x
        left_spread = self._spread.double() - tension.sum(1) * self.radii.double()
        radii = self.radii.double()
        inward = (left * x).sum(1) + left_spread * radii
        ball = (inward / (x.square().sum(1) + radii.square()).clamp_min(1e-30)).clamp_min(0)
        ball[self._spread <= 0] = 0  # one row has nothing to send to itself
        own = (ball > 0).nonzero().squeeze(1)
        i, j = tension.triu(1).nonzero(as_tuple=True)
        strength = torch.cat([tension[i, j], ball[own] / 2]) * self.total  # an edge to itself counts at both ends
        return EdgeFlow(x, radii, torch.cat([i, own]), torch.cat([j, own]), strength)

    def _pull(self, x: Tensor, a: Tensor) -> Tensor:
        """Set the tensions of all pairs, and return for each point the share (K,) of the weight that it pulls at."""
        size = x.square().sum(1) + a.square()
        excess = torch.addmm(size + (size - 1)[:, None], x, x.T, alpha=-2)
        excess.mul_(self._weight).mul_((_PENALTY / 2) * self._weight[:, None])
        self.tension = excess.add_(self._multiplier).clamp_min_(0)
        self.tension.fill_diagonal_(0)
        return (self.tension > 0).to(x.dtype) @ self._weight

    def _in_ball(self, x: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        a = a.clamp_min(0)
        factor = (self._ball / (x.square().sum(1) + a.square()).sqrt().clamp_min(1e-30)).clamp_max(1)
        return x * factor[:, None], a * factor


def improve(program: CoreProgram, steps: int, deadline: float) -> None:
    """Take steps until their number is reached, or time.monotonic() passes the deadline."""
    for _ in range(steps):
        if time.monotonic() > deadline:
            return
        program.step()

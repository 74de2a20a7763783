"""Bodies of constant width one that are round about an axis, and the best of them for given rows.

A potential with D <= 1 can be had from any convex body of diameter one: give row i the point of the body that is
farthest along g_i. Then <G, Phi> = sum |g_i| h(u_i), with u_i the row's direction and h the body's support function.
The ball of diameter one makes this projected RowNorm. A body of constant width, h(u) + h(-u) = 1, can do better where
directions are not spread alike on opposite sides, as in a gradient: rare tokens all pushed one way, seen ones each its
own. Round about an axis, with t the angle to it,

    h(t) = 1/2 + f(t),  f(pi - t) = -f(t),  f(t) = integral_0^t sin(t - r) sigma(r) dr  up to a shift of the body,

and the body is convex if |sigma| <= 1/2, and smooth across the equator if integral_0^{pi/2} cos(r) sigma(r) dr = 0.
What is to be maximised is linear in sigma, so the best sigma is +1/2 or -1/2 by a threshold, found by sorting.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_CELLS = 4096


@dataclass(frozen=True)
class Profile:
    """sigma on a grid of angles from zero to pi/2, with its integrals against cos and sin up to each of them."""

    angle: Tensor
    sigma: Tensor
    cosine: Tensor
    sine: Tensor

    def support(self, angle: Tensor) -> tuple[Tensor, Tensor]:
        """Return h and its derivative at angles (n,) to the axis, from zero to pi."""
        side, near, cell = _folded(angle)
        sigma, start = self.sigma[cell], self.angle[cell]
        c = self.cosine[cell] + sigma * (near.sin() - start.sin())
        s = self.sine[cell] - sigma * (near.cos() - start.cos())
        f, slope = near.sin() * c - near.cos() * s, near.cos() * c + near.sin() * s
        return 0.5 + side * f, slope


def best_profile(angle: Tensor, weight: Tensor) -> Profile:
    """Return the profile with the largest sum of weight * h, for rows with these angles and weights (V,), fp64."""
    grid = torch.linspace(0, math.pi / 2, _CELLS + 1, dtype=torch.float64, device=angle.device)
    middle = (grid[1:] + grid[:-1]) / 2
    side, near, cell = _folded(angle)
    weight = side * weight
    beyond = [
        grid.new_zeros(_CELLS).index_add_(0, cell, weight * part).flip(0).cumsum(0).flip(0)
        for part in (near.sin(), near.cos())
    ]
    gain = beyond[0] - beyond[1] * middle.tan()  # of sigma in a cell, over cos
    room = grid.sin().diff()
    order = gain.argsort(descending=True)
    filled = room[order].cumsum(0)
    sigma = torch.full_like(middle, -0.5)
    sigma[order] = ((0.5 - filled + room[order]) / room[order]).clamp(0, 1) - 0.5  # half of the room is +1/2
    zero = grid.new_zeros(1)
    cosine = torch.cat([zero, (sigma * room).cumsum(0)])
    sine = torch.cat([zero, (-sigma * grid.cos().diff()).cumsum(0)])
    return Profile(grid, sigma, cosine, sine)


def _folded(angle: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the side of the equator (+1, -1), the angle to the nearer pole, and its cell."""
    side = torch.where(angle <= math.pi / 2, 1.0, -1.0).double()
    near = torch.minimum(angle, math.pi - angle).clamp_min_(0)
    return side, near, (near * (2 * _CELLS / math.pi)).long().clamp_(max=_CELLS - 1)

"""Bodies of constant width: convex bodies of diameter one that give a potential Phi, and the best one for given rows.

"Width" here is the geometric width of a body in a direction, h(u) + h(-u), with h its support function; elsewhere in
this package it is the number of columns d. A ball has constant width, and so has a Reuleaux triangle.

Any convex body of diameter one gives a potential with D <= 1: row i gets the point of the body that is farthest along
g_i. Then <G, Phi> = sum |g_i| h(u_i), with u_i the row's direction. The ball of diameter one gives projected RowNorm.
Another body of constant width one, h(u) + h(-u) = 1, can do better where directions are spread differently on opposite
sides. They are in a gradient: it pushes all rare tokens one way, and each token of the batch its own way. For a body
that is round about an axis, with t the angle to the axis,

    h(t) = 1/2 + f(t),  f(pi - t) = -f(t),  f(t) = integral_0^t sin(t - r) sigma(r) dr  up to a shift of the body,

and the body is convex if |sigma| <= 1/2, and smooth across the equator if integral_0^{pi/2} cos(r) sigma(r) dr = 0.
The objective is linear in sigma, so the best sigma is +1/2 or -1/2, by a threshold that sorting finds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_CELLS = 4096


@dataclass(frozen=True)
class ConstantWidthBody:
    """A constant-width body that is round about an axis, given by sigma on a grid of angles from zero to pi/2."""

    angle: Tensor
    """(cells + 1,) the grid."""
    sigma: Tensor
    """(cells,) sigma between grid points."""
    cosine: Tensor
    """(cells + 1,) integral of cos(r) sigma(r) from zero to each grid point."""
    sine: Tensor
    """(cells + 1,) integral of sin(r) sigma(r) from zero to each grid point."""

    def support(self, angle: Tensor) -> tuple[Tensor, Tensor]:
        """Return the support function h and its derivative at angles (n,) to the axis, from zero to pi."""
        side, near, cell = _folded(angle)
        sigma, start = self.sigma[cell], self.angle[cell]
        c = self.cosine[cell] + sigma * (near.sin() - start.sin())
        s = self.sine[cell] - sigma * (near.cos() - start.cos())
        f, slope = near.sin() * c - near.cos() * s, near.cos() * c + near.sin() * s
        return 0.5 + side * f, slope


def best_body(angle: Tensor, weight: Tensor) -> ConstantWidthBody:
    """Return the body with the largest sum of weight * h(angle), for rows with these angles and weights (V,), fp64."""
    grid = torch.linspace(0, math.pi / 2, _CELLS + 1, dtype=torch.float64, device=angle.device)
    middle = (grid[1:] + grid[:-1]) / 2
    side, near, cell = _folded(angle)
    weight = side * weight
    beyond = [
        grid.new_zeros(_CELLS).index_add_(0, cell, weight * part).flip(0).cumsum(0).flip(0)
        for part in (near.sin(), near.cos())
    ]
    gain = beyond[0] - beyond[1] * middle.tan()  # from sigma in a cell, over cos
    room = grid.sin().diff()
    order = gain.argsort(descending=True)
    filled = room[order].cumsum(0)
    sigma = torch.full_like(middle, -0.5)
    sigma[order] = ((0.5 - filled + room[order]) / room[order]).clamp(0, 1) - 0.5  # half of the room is +1/2
    zero = grid.new_zeros(1)
    cosine = torch.cat([zero, (sigma * room).cumsum(0)])
    sine = torch.cat([zero, (-sigma * grid.cos().diff()).cumsum(0)])
    return ConstantWidthBody(grid, sigma, cosine, sine)


def _folded(angle: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the side of the equator (+1, -1), the angle to the nearer pole, and its cell."""
    side = torch.where(angle <= math.pi / 2, 1.0, -1.0).double()
    near = torch.minimum(angle, math.pi - angle).clamp_min_(0)
    return side, near, (near * (2 * _CELLS / math.pi)).long().clamp_(max=_CELLS - 1)

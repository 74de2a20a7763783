"""The screen of the diameter's search: upper bounds of the distances of hubs to partners, from few coordinates.

With e the relative rounding of a dot product, a row's k coordinates err together by sqrt(k) e of its norm, in computing
and through the directions' own rounding. So the squared distance of i and j is at most

    (1 + 2e)(r_i^2 + r_j^2) - 2 z_i.z_j + 2 rho_i rho_j + 8 sqrt(k) e r_i r_j,

with rho_i^2 rounded up by (1 + 4 sqrt(k)) e r_i^2: a product of k + 4 columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ._cloud import on_host

_TILE, _ROWS = 2**20, 128  # a tile of bounds that stays in cache


def screen_tables(
    hub_radius: Tensor, hub_z: Tensor, partner_radius: Tensor, partner_z: Tensor, rounding: float
) -> tuple[Tensor, Tensor]:
    """Return tables (hubs, k + 4) and (partners, k + 4) whose product has the bounds.

    Args:
        hub_radius: (hubs,) norms, rounded up.
        hub_z: (hubs, k) coordinates along orthonormal directions.
        partner_radius: (partners,).
        partner_z: (partners, k).
        rounding: relative error of a dot product.
    """
    err = math.sqrt(hub_z.shape[1]) * rounding
    rest, size = _parts(hub_radius, hub_z, rounding)
    left = torch.column_stack([-2 * hub_z, 2 * rest, 8 * err * hub_radius, size, torch.ones_like(size)])
    rest, size = _parts(partner_radius, partner_z, rounding)
    return left, torch.column_stack([partner_z, rest, partner_radius, torch.ones_like(size), size])


def distance_table(x: Tensor, radius: Tensor, rounding: float, *, left: bool) -> Tensor:
    """Return a table (n, d + 2) of points; the product of a left one and a right one has their squared distances.

    It has r_i^2 + r_j^2 - 2 x_i.x_j, rounded up. A sum of d + 2 products errs by at most e times the sum of their
    magnitudes, which is below 2 (r_i^2 + r_j^2).

    Args:
        x: (n, d).
        radius: (n,) norms, rounded up.
        rounding: relative error of a dot product.
        left: whether the table is for the left side.
    """
    size = radius.square().mul_(1 + 2 * rounding)
    ones = torch.ones_like(size)
    return torch.column_stack([x.mul_(-2), size, ones] if left else [x, ones, size])


def largest_bounds(
    left: Tensor, right: Tensor, starts: Sequence[int], ends: Sequence[int], budget: int
) -> tuple[Tensor, Tensor, int]:
    """Return the largest bound of each hub and of each partner, and how many bounds were computed.

    Args:
        left: (hubs, k + 4), the longest hub first.
        right: (partners, k + 4), the longest partner first.
        starts: the first partner that each hub meets.
        ends: one after the last.
        budget: bytes of scratch.
    """
    by_hub = left.new_full((len(left),), -torch.inf)
    by_partner = right.new_full((len(right),), -torch.inf)
    rows, columns = _tile(left, right, budget)
    scratch = left.new_empty(columns * rows)
    screened = 0
    for a in range(0, len(left), rows):
        block = slice(a, min(a + rows, len(left)))
        for start in range(starts[a], ends[a], columns):
            at = slice(start, min(start + columns, ends[a]))
            shape = (block.stop - a, at.stop - start)
            tile = torch.mm(left[block], right[at].T, out=scratch[: shape[0] * shape[1]].view(shape))
            screened += tile.numel()
            torch.maximum(by_hub[block], tile.amax(1), out=by_hub[block])
            torch.maximum(by_partner[at], tile.amax(0), out=by_partner[at])
    return by_hub, by_partner, screened


def _tile(left: Tensor, right: Tensor, budget: int) -> tuple[int, int]:
    """Return rows and columns of a tile: one that stays in a CPU's cache, and elsewhere the largest that fits."""
    if on_host(left):
        return _ROWS, max(1, min(_TILE, budget // left.element_size()) // _ROWS)
    columns = max(1, min(len(right), budget // left.element_size()))
    return max(1, min(len(left), budget // left.element_size() // columns)), columns


def _parts(radius: Tensor, z: Tensor, e: float) -> tuple[Tensor, Tensor]:
    """Return the norms of rows' parts outside the directions of z, and their squared norms; both rounded up."""
    norm2 = radius.square()
    rest2 = (norm2 - z.square().sum(1)).clamp_min_(0).add_(norm2, alpha=(1 + 4 * math.sqrt(z.shape[1])) * e)
    return rest2.sqrt_(), norm2.mul_(1 + 2 * e)

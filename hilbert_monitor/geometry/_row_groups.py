"""Rows put into groups, heavy rows each alone and the others by direction, and the loads of the groups."""

from __future__ import annotations

import torch
from torch import Tensor

from ._gradient_rows import CentredGradient, blocks
from ._tension_program import GroupLoads

_MEANS = 4  # passes of k-means


def row_groups(unit: Tensor, norms: Tensor, number: int, alone: int) -> Tensor:
    """Return the group (V,) of each row: the heaviest rows alone, the others by direction; -1 for a zero row.

    Args:
        unit: (V, d) directions of the rows.
        norms: (V,) of the rows.
        number: of groups, at most.
        alone: how many rows are each a group of their own; all of them where there are no more than groups.
    """
    nonzero = int((norms > 0).sum())
    order = norms.argsort(descending=True, stable=True)[:nonzero]
    group = order.new_full((len(norms),), -1)
    alone = nonzero if number >= nonzero else alone
    group[order[:alone]] = torch.arange(alone, device=unit.device)
    rest = order[alone:]
    if len(rest):
        weight = norms[rest].to(unit.dtype)
        seeds = rest[torch.linspace(0, len(rest) - 1, number - alone, device=rest.device).long()]
        centres, nearest = unit[seeds], torch.empty_like(rest)
        for _ in range(_MEANS):
            sums = torch.zeros_like(centres)
            for at in blocks(len(rest)):
                part = unit.index_select(0, rest[at])
                nearest[at] = (part @ centres.T).argmax(1)
                sums.index_add_(0, nearest[at], part.mul_(weight[at, None]))
            centres = sums / torch.linalg.vector_norm(sums, dim=1, keepdim=True).clamp_min(1e-30)
        group[rest] = alone + torch.unique(nearest, return_inverse=True)[1]
    return group


def group_loads(rows: CentredGradient, group: Tensor) -> GroupLoads:
    """Return load, spread and weight of each group."""
    K = int(group.max()) + 1
    load = torch.zeros(K, rows.G.shape[1], dtype=torch.float64, device=group.device)
    for at, chunk in rows.chunks():
        inside = group[at] >= 0
        load.index_add_(0, group[at][inside], chunk[inside])
    inside = group >= 0
    weight = load.new_zeros(K).index_add_(0, group[inside], rows.norms[inside])
    members = torch.bincount(group[inside], minlength=K)
    lost = (members + rows.G.shape[1]) * 2.0**-50  # for nearly parallel rows the difference is all rounding
    spread = (weight.square() * (1 + lost) - load.square().sum(1)).clamp_min_(0).sqrt_()
    spread[members == 1] = 0
    return GroupLoads(load, spread, weight)

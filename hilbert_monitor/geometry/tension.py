"""A certified bracket of the minimum total tension T(G) for a vocabulary of any size.

From below: a potential Phi with D(Phi) <= 1 proves T(G) >= <G, Phi>. There are two candidates: projected RowNorm,
scaled to diameter one; and the best constant-width body that is round about an axis (`_constant_width_body.py`). The
axis is improved while there is time.

From above: a balanced flow proves T(G) <= sum |y_ij|. Rows are put into groups, heavy rows each alone and the rest by
direction, and `_tension_program.py` solves the program for the groups. Row i has the share alpha_i = |g_i| / W_A of the
weight W_A of its group A, and differs from its share of the load by r_i = g_i - alpha_i g_A. A flow Y among groups
becomes a flow among rows:

    y_ij = alpha_i alpha_j Y_AB + tau_AB alpha_j r_i - tau_BA alpha_i r_j        i in A, j in B,
    y_ij = tau_AA (alpha_j r_i - alpha_i r_j)                                    i, j in A,

with sum_B tau_AB = 1. It balances G because the alpha of a group sum to one and its r to zero. By Cauchy and Schwarz,
with sum_i |r_i|^2 / alpha_i = W_A^2 - |g_A|^2 = s_A^2, the flow between the rows of A and B has a total length of at
most |(Y_AB, tau_AB s_A, tau_BA s_B)|, and the flow inside A of at most tau_AA s_A / sqrt(2). So the bound needs no
pair of rows. More groups make it tighter; one group gives sum |g_i| / sqrt(2), nearly Jung's bound.

Tried and dropped: a potential from the groups' points, copied to their rows and moved together where rows are too far
apart, heaviest rows first. It proved less than projected RowNorm on real increments.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ._cloud import leading_directions
from ._constant_width_body import best_body
from ._gradient_rows import CentredGradient, blocks
from ._tension_program import GroupLoads, flow_length, solve
from .arithmetic import MAX_BYTES, compute_dtype, full_precision
from .diameter import row_diameter, row_diameter_bracket
from .oracle import jung_ratio

_GROUPS = (32, 128, 256, 512, 1024)  # in turn, while there is time
_ALONE = 0.75  # share of the groups that are one heavy row each, up to 128 groups; half beyond
_STALL = 2e-3
_POWER_STEPS = 8
_SAMPLE = 2048
_BODY_ROUNDING = 1e-9  # of the diameter of a body's points in fp64; rounding to their dtype comes on top
_UPPER_SHARE = 0.75  # of the time


@dataclass(frozen=True, slots=True)
class TensionFlow:
    """A balanced flow among groups of rows; the docstring of `tension.py` says how it becomes one among rows."""

    group: Tensor
    """(V,) group of each row; -1 for a row of P G that is zero."""
    points: Tensor
    """(K, d) fp64: the groups' points, between which the edges run."""
    i: Tensor
    """(E,) group where an edge starts."""
    j: Tensor
    """(E,) group where it ends; i itself for flow among a group's own rows."""
    tension: Tensor
    """(E,) fp64: edge AB carries tension * (point_A - point_B), and tau_AB = tension / (sum over A's edges). The
    remainder of the groups' loads flows between all pairs of groups, as `flow_length` describes."""


@dataclass(frozen=True, slots=True)
class TensionBracket:
    """Certified bounds lower <= T(G) <= upper, each with its certificate."""

    lower: float
    upper: float
    potential: Tensor
    """Certificate of `lower`: (V, d), with <P G, potential> / D(potential) >= lower. D is at most one, but for rounding
    to its dtype."""
    flow: TensionFlow | None
    """Certificate of `upper`: a balanced flow no longer than it; None where `upper` is Jung's bound
    sum |g_i| sqrt(k / (2 (k + 1)))."""
    shifted: bool
    """Whether the rows of G did not sum to zero, so that the bounds are those of P G."""
    seconds: float
    """Time spent."""

    @property
    def gap(self) -> float:
        """Return upper / lower, or one if both are zero."""
        return self.upper / self.lower if self.lower > 0 else (1.0 if self.upper == 0 else math.inf)


@full_precision
def tension_bracket(G: Tensor, *, budget_seconds: float = 5.0, max_bytes: int = MAX_BYTES) -> TensionBracket:
    """Bracket the minimum total tension T(G), the largest first-order decrease of a step of diameter one.

    Args:
        G: (V, d) gradient or moment, any real floating-point dtype, on any device. Its rows should sum to zero.
        budget_seconds: time in which both bounds improve. With zero it takes a few passes over G.
        max_bytes: bound on scratch memory beyond three matrices of G's size and the tables of at most 1,024 groups.

    Returns:
        both bounds, with slack for rounding, and a certificate of each.
    """
    began = time.monotonic()
    if not budget_seconds >= 0:
        raise ValueError(f"budget_seconds must be zero or positive, got {budget_seconds}")
    rows = CentredGradient.of(G, max_bytes)
    if int((rows.norms > 0).sum()) < 2:
        zero = torch.zeros_like(G, dtype=compute_dtype(G))
        bounds = rows.bounds(0.0, _jung_bound(rows))  # zero for equal rows
        return TensionBracket(*bounds, zero, None, rows.shifted, time.monotonic() - began)
    unit = _unit_rows(rows)
    lower, potential = _potential(rows, unit, began + (1 - _UPPER_SHARE) * budget_seconds)
    upper, flow, points = _flow(rows, unit, began + budget_seconds)
    if points is not None and (candidate := _certified(rows, points, row_diameter(points).upper))[0] > lower:
        lower, potential = candidate
    return TensionBracket(*rows.bounds(lower, upper), potential, flow, rows.shifted, time.monotonic() - began)


def _unit_rows(rows: CentredGradient) -> Tensor:
    """Directions of the rows (V, d), in fp32 or better."""
    unit = torch.empty_like(rows.G, dtype=compute_dtype(rows.G), memory_format=torch.contiguous_format)
    norms = rows.norms.where(rows.norms > 0, torch.inf)
    for at, chunk in rows.chunks():
        unit[at] = chunk / norms[at, None]
    return unit


# From below


def _potential(rows: CentredGradient, unit: Tensor, deadline: float) -> tuple[float, Tensor]:
    """Return the largest certified lower bound, in units of the scaled rows, and its potential."""
    if rows.G.shape[1] == 1:
        return _row_norm_potential(rows, unit)
    heavy = rows.norms.topk(min(_SAMPLE, len(unit))).indices
    sample = unit[heavy] * rows.norms[heavy].sqrt().to(unit.dtype)[:, None]
    axis = _improved_axis(unit, rows.norms, leading_directions(sample, 1)[:, 0], deadline)
    best = _certified(rows, _body_points(unit, rows.norms, axis), 1 + _BODY_ROUNDING)
    if rows.total / row_diameter_bracket(unit, max_bytes=rows.max_bytes).lower > best[0]:
        best = max(best, _row_norm_potential(rows, unit), key=lambda candidate: candidate[0])
    return best


def _row_norm_potential(rows: CentredGradient, unit: Tensor) -> tuple[float, Tensor]:
    """Return the lower bound of projected RowNorm, scaled to diameter one, and its potential."""
    return _certified(rows, unit, row_diameter(unit, max_bytes=rows.max_bytes).upper)


def _certified(rows: CentredGradient, points: Tensor, diameter: float) -> tuple[float, Tensor]:
    """Divide points by a bound on their diameter; return <g, potential>, rounded down, and this potential."""
    eps = torch.finfo(rows.G.dtype if rows.G.dtype == torch.float64 else torch.float32).eps
    potential = torch.empty_like(points, dtype=compute_dtype(rows.G))
    pairing = size = 0.0
    for at, chunk in rows.chunks():
        potential[at] = points[at] / diameter
        part = potential[at].double()
        pairing += float((chunk * part).sum())
        size = max(size, float(torch.linalg.vector_norm(part, dim=1).max()))
    reach = 1 + 4 * eps * size  # the cast, the division and the next cast round every row
    return max(0.0, (pairing - rows.rounding * max(size, 1.0)) / reach * (1 - 2.0**-45)), potential


def _angles(unit: Tensor, axis: Tensor) -> Tensor:
    """Angles (V,) of the rows to the axis, fp64."""
    along = unit @ axis
    across = torch.empty_like(along)
    for at in blocks(len(unit)):
        torch.linalg.vector_norm(torch.addmm(unit[at], along[at, None], axis[None], alpha=-1), dim=1, out=across[at])
    return torch.atan2(across, along).double()


def _improved_axis(unit: Tensor, norms: Tensor, heavy_axis: Tensor, deadline: float) -> Tensor:
    """Return an axis whose best body proves more: gradient ascent on the sphere, until it stalls or the deadline.

    The start is the better of the leading direction of the heaviest rows and that of all of them.
    """
    axis, weight = heavy_axis, norms.to(unit.dtype)
    for _ in range(_POWER_STEPS):
        axis = torch.nn.functional.normalize((weight * (unit @ axis)) @ unit, dim=0)
    starts = [(*_gain(unit, norms, start), start) for start in (heavy_axis, axis)]
    gain, angle, slope, axis = max(starts, key=lambda start: start[0])
    step = 0.2
    while step > 1e-3 and time.monotonic() < deadline:
        uphill = -((slope * norms / angle.sin().clamp_min(1e-3)).to(unit.dtype) @ unit)
        uphill -= (uphill @ axis) * axis
        new_axis = torch.nn.functional.normalize(axis + step * torch.nn.functional.normalize(uphill, dim=0), dim=0)
        new = _gain(unit, norms, new_axis)
        if new[0] > gain:
            axis, step = new_axis, 1.5 * step
            gain, angle, slope = new
        else:
            step /= 3
    return axis


def _gain(unit: Tensor, norms: Tensor, axis: Tensor) -> tuple[float, Tensor, Tensor]:
    """Return sum |g_i| h(u_i) of the best body about an axis, the rows' angles to it, and the slopes h' there."""
    angle = _angles(unit, axis)
    h, slope = best_body(angle, norms).support(angle)
    return float((norms * h).sum()), angle, slope


def _body_points(unit: Tensor, norms: Tensor, axis: Tensor) -> Tensor:
    """Return for each row the point of the best body about the axis that is farthest along it: (V, d).

    A row and its point lie in one plane with the axis. The part of the point along the axis is h cos t - h' sin t, the
    part across it h sin t + h' cos t. In fp64, so that the point is on the body even where the angle is inexact. The
    diameter is then one by construction. To measure it would take an all-pairs search: opposite points of a
    constant-width body are all at distance one.
    """
    angle = _angles(unit, axis)
    h, slope = best_body(angle, norms).support(angle)
    axis = axis.double() / torch.linalg.vector_norm(axis.double())
    points = torch.empty_like(unit)
    for at in blocks(len(unit)):
        u, t = unit[at].double(), angle[at]
        across = u - torch.outer(u @ axis, axis)
        across -= torch.outer(across @ axis, axis)  # again: a row along the axis leaves little but rounding
        across /= torch.linalg.vector_norm(across, dim=1, keepdim=True).clamp_min(2.0**-40)
        out = torch.outer(h[at] * t.cos() - slope[at] * t.sin(), axis)
        points[at] = out.addcmul_((h[at] * t.sin() + slope[at] * t.cos())[:, None], across)
    points[norms == 0] = 0  # inside the body
    return points


# From above


def _flow(rows: CentredGradient, unit: Tensor, deadline: float) -> tuple[float, TensionFlow | None, Tensor | None]:
    """Return the smallest certified upper bound, in units of the scaled rows, and its flow.

    Where every row is its own group the program is exact. Then its points (V, d) are returned too: they are a
    potential.
    """
    V, d = unit.shape
    nonzero = rows.norms > 0
    count = int(nonzero.sum())
    best, flow, points = _jung_bound(rows), None, None
    for number in _stages(count):
        first = number <= _GROUPS[0]
        if not first and time.monotonic() > deadline:
            break
        group = _groups(unit, rows.norms, number)
        loads = _loads(rows, group)
        stall = _STALL if number < count else 0.0
        solution = solve(loads, tol=_STALL, stall=stall, deadline=math.inf if first else deadline)
        if not solution:
            break
        edges, group_points = solution
        if number == count:
            points = group_points.mean(0).expand(V, d).clone()  # a zero row may be anywhere within one of all others
            points[nonzero] = group_points[group[nonzero]]
        length = _rounded_up(rows, flow_length(loads, edges), len(edges.i))
        if length < best:
            best, flow = length, TensionFlow(group, edges.point, edges.i, edges.j, rows.unscaled(edges.tension))
    return best, flow, points


def _jung_bound(rows: CentredGradient) -> float:
    """Return Jung's upper bound sum |g_i| sqrt(k / (2 (k + 1))), in units of the scaled rows; zero for equal rows."""
    V, d = rows.G.shape
    return _rounded_up(rows, rows.total / (2 * jung_ratio(max(1, min(d, V - 1)))), 0)


def _stages(rows: int) -> Iterator[int]:
    """Yield numbers of groups to try in turn, up to one for each row."""
    for number in _GROUPS:
        yield min(number, rows)
        if number >= rows:
            return


def _rounded_up(rows: CentredGradient, length: float, edges: int) -> float:
    """Round a length up by what fp64 may have lost in its sums."""
    return length * (1 + (edges + 64) * 2.0**-50) + rows.rounding


def _groups(unit: Tensor, norms: Tensor, number: int) -> Tensor:
    """Return the group (V,) of each row: the heaviest rows alone, the others by direction; -1 for a zero row."""
    nonzero = int((norms > 0).sum())
    order = norms.argsort(descending=True, stable=True)[:nonzero]
    group = order.new_full((len(norms),), -1)
    alone = nonzero if number >= nonzero else int(number * (_ALONE if number <= 128 else 0.5))
    group[order[:alone]] = torch.arange(alone, device=unit.device)
    rest = order[alone:]
    if len(rest):
        weight = norms[rest].to(unit.dtype)
        seeds = rest[torch.linspace(0, len(rest) - 1, number - alone, device=rest.device).long()]
        centres, nearest = unit[seeds], torch.empty_like(rest)
        for _ in range(4):
            sums = torch.zeros_like(centres)
            for at in blocks(len(rest)):
                part = unit.index_select(0, rest[at])
                nearest[at] = (part @ centres.T).argmax(1)
                sums.index_add_(0, nearest[at], part.mul_(weight[at, None]))
            centres = sums / torch.linalg.vector_norm(sums, dim=1, keepdim=True).clamp_min(1e-30)
        group[rest] = alone + torch.unique(nearest, return_inverse=True)[1]
    return group


def _loads(rows: CentredGradient, group: Tensor) -> GroupLoads:
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

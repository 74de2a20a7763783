"""A certified bracket of the minimum total tension T(G) for a vocabulary of any size.

From below: a potential Phi with D(Phi) <= 1 gives <G, Phi> <= T(G). Tried are projected RowNorm stretched to its exact
diameter, and the best body of constant width that is round about an axis (`_width.py`), whose axis is then turned
uphill while there is time.

From above: a balanced flow gives sum |y_ij| >= T(G). Rows are put into groups, heavy rows each alone and the rest by
direction, and the program of `_cables.py` is solved for the groups. With alpha_i = |g_i| / W_A the share of row i in
the weight W_A of its group A, and r_i = g_i - alpha_i g_A what it differs by, a flow Y among groups becomes one among
rows:

    y_ij = alpha_i alpha_j Y_AB + tau_AB alpha_j r_i - tau_BA alpha_i r_j        i in A, j in B,
    y_ij = tau_AA (alpha_j r_i - alpha_i r_j)                                    i, j in A,

with sum_B tau_AB = 1. It balances G because the alpha of a group sum to one and its r to zero. By Cauchy and Schwarz,
with sum_i |r_i|^2 / alpha_i = W_A^2 - |g_A|^2 = s_A^2, the pairs between A and B are no longer than
|(Y_AB, tau_AB s_A, tau_BA s_B)|, and those in A than tau_AA s_A / sqrt(2). So no pair of rows is ever looked at.
More groups make a tighter bound; one group gives sum |g_i| / sqrt(2), nearly Jung's.

Tried and dropped: spreading the groups' points to rows and shrinking those that are too far apart, heaviest rows first,
which ended below projected RowNorm on real increments.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ._cloud import leading_directions
from ._constant_width import best_profile
from ._gradient_rows import Centred, blocks
from ._tension_program import Loads, flow_length, solve
from .arithmetic import MAX_BYTES, compute_dtype, full_precision
from .diameter import row_diameter, row_diameter_bracket
from .oracle import jung_ratio

_GROUPS = (32, 128, 256, 512, 1024)  # in turn, while there is time
_ALONE = 0.75  # share of the groups that are one heavy row each, up to 128 groups; half beyond
_STALL = 2e-3
_POWER_STEPS = 8
_SAMPLE = 2048
_BODY_ROUNDING = 1e-9  # of the diameter of a body's points in fp64; what their dtype rounds comes on top
_UPPER_SHARE = 0.75  # of the time


@dataclass(frozen=True, slots=True)
class TensionFlow:
    """A balanced flow among groups of rows; `tension.py` says how it spreads to the rows."""

    group: Tensor
    """(V,) group of each row; -1 for a row of P G that is zero."""
    points: Tensor
    """(K, d) fp64: where the groups' cables end."""
    i: Tensor
    """(E,) group where a cable starts."""
    j: Tensor
    """(E,) group where it ends; i itself for a group's own rows."""
    tension: Tensor
    """(E,) fp64: cable AB carries tension * (point_A - point_B), and the share tension / (sum over A's cables) of what
    A's rows differ by. What the cables miss of the groups' loads goes from all groups to all, as in `_cables.py`."""


@dataclass(frozen=True, slots=True)
class TensionBracket:
    """lower <= T(G) <= upper, with what proves either side."""

    lower: float
    upper: float
    potential: Tensor
    """(V, d) with D <= 1 but for the rounding of its dtype: <P G, potential> / D(potential) >= lower."""
    flow: TensionFlow | None
    """A balanced flow no longer than upper; None where upper is Jung's sum |g_i| sqrt(k / (2 (k + 1)))."""
    shifted: bool
    """Whether the rows of G did not sum to zero, so that P G stands in its place."""
    seconds: float
    """How long it took."""

    @property
    def gap(self) -> float:
        """Return upper / lower; one where both are zero."""
        return self.upper / self.lower if self.lower > 0 else (1.0 if self.upper == 0 else math.inf)


@full_precision
def tension_bracket(G: Tensor, *, budget_seconds: float = 5.0, max_bytes: int = MAX_BYTES) -> TensionBracket:
    """Bracket T(G), the largest first-order decrease of a step of diameter one.

    Args:
        G: (V, d) gradient or moment, any real floating-point dtype, on any device. Its rows should sum to zero.
        budget_seconds: time in which both sides go on improving. Zero does what takes a few passes over G.
        max_bytes: bound on scratch memory beyond three matrices of G's size and the tables of at most 1,024 groups.

    Returns:
        both bounds, sound in floating point, and a certificate of each.
    """
    began = time.monotonic()
    if not budget_seconds >= 0:
        raise ValueError(f"budget_seconds must be zero or positive, got {budget_seconds}")
    rows = Centred.of(G, max_bytes)
    if int((rows.norms > 0).sum()) < 2:
        zero = torch.zeros_like(G, dtype=compute_dtype(G))
        return TensionBracket(0.0, 0.0, zero, None, rows.shifted, time.monotonic() - began)
    unit = _unit_rows(rows)
    lower, potential = _potential(rows, unit, began + (1 - _UPPER_SHARE) * budget_seconds)
    upper, flow, points = _flow(rows, unit, began + budget_seconds)
    if points is not None and (alone := _certified(rows, points, row_diameter(points).upper))[0] > lower:
        lower, potential = alone
    return TensionBracket(rows.raw(lower), rows.raw(upper), potential, flow, rows.shifted, time.monotonic() - began)


def _unit_rows(rows: Centred) -> Tensor:
    """Directions of the rows (V, d), in fp32 or better."""
    unit = torch.empty_like(rows.G, dtype=compute_dtype(rows.G), memory_format=torch.contiguous_format)
    norms = rows.norms.where(rows.norms > 0, torch.inf)
    for at, chunk in rows.chunks():
        unit[at] = chunk / norms[at, None]
    return unit


# From below


def _potential(rows: Centred, unit: Tensor, deadline: float) -> tuple[float, Tensor]:
    """Return the largest certified lower bound, of the scaled rows, and its potential."""
    if rows.G.shape[1] == 1:
        return _stretched(rows, unit)
    heavy = rows.norms.topk(min(_SAMPLE, len(unit))).indices
    sample = unit[heavy] * rows.norms[heavy].sqrt().to(unit.dtype)[:, None]
    axis = _turned(unit, rows.norms, leading_directions(sample, 1)[:, 0], deadline)
    found = _certified(rows, _round_body(unit, rows.norms, axis), 1 + _BODY_ROUNDING)
    if rows.total / row_diameter_bracket(unit, max_bytes=rows.max_bytes).lower > found[0]:
        found = max(found, _stretched(rows, unit), key=lambda each: each[0])
    return found


def _stretched(rows: Centred, unit: Tensor) -> tuple[float, Tensor]:
    """Return the bound of projected RowNorm, stretched to diameter one."""
    return _certified(rows, unit, row_diameter(unit, max_bytes=rows.max_bytes).upper)


def _certified(rows: Centred, points: Tensor, diameter: float) -> tuple[float, Tensor]:
    """Divide points by a bound on their diameter, and return <g, points> rounded down, and the points."""
    eps = torch.finfo(rows.G.dtype if rows.G.dtype == torch.float64 else torch.float32).eps
    potential = torch.empty_like(points, dtype=compute_dtype(rows.G))
    gained = size = 0.0
    for at, chunk in rows.chunks():
        potential[at] = points[at] / diameter
        kept = potential[at].double()
        gained += float((chunk * kept).sum())
        size = max(size, float(torch.linalg.vector_norm(kept, dim=1).max()))
    reach = 1 + 4 * eps * size  # the cast, the division and the next cast round every row
    return max(0.0, (gained - rows.rounding * max(size, 1.0)) / reach * (1 - 2.0**-45)), potential


def _angles(unit: Tensor, axis: Tensor) -> Tensor:
    """Angles (V,) of the rows to the axis, fp64."""
    along = unit @ axis
    across = torch.empty_like(along)
    for at in blocks(len(unit)):
        torch.linalg.vector_norm(torch.addmm(unit[at], along[at, None], axis[None], alpha=-1), dim=1, out=across[at])
    return torch.atan2(across, along).double()


def _turned(unit: Tensor, norms: Tensor, heavy_axis: Tensor, deadline: float) -> Tensor:
    """Turn an axis uphill until that gains nothing, or until the deadline.

    The start is the better of the leading direction of the heaviest rows and that of all of them.
    """
    axis, weight = heavy_axis, norms.to(unit.dtype)
    for _ in range(_POWER_STEPS):
        axis = torch.nn.functional.normalize((weight * (unit @ axis)) @ unit, dim=0)
    starts = [(*_gain(unit, norms, start), start) for start in (heavy_axis, axis)]
    gain, angle, slope, axis = max(starts, key=lambda found: found[0])
    step = 0.2
    while step > 1e-3 and time.monotonic() < deadline:
        way = -((slope * norms / angle.sin().clamp_min(1e-3)).to(unit.dtype) @ unit)
        way -= (way @ axis) * axis
        turned = torch.nn.functional.normalize(axis + step * torch.nn.functional.normalize(way, dim=0), dim=0)
        new = _gain(unit, norms, turned)
        if new[0] > gain:
            axis, step = turned, 1.5 * step
            gain, angle, slope = new
        else:
            step /= 3
    return axis


def _gain(unit: Tensor, norms: Tensor, axis: Tensor) -> tuple[float, Tensor, Tensor]:
    """Return what the best body about an axis gains, with the rows' angles to it and the slopes of its support."""
    angle = _angles(unit, axis)
    h, slope = best_profile(angle, norms).support(angle)
    return float((norms * h).sum()), angle, slope


def _round_body(unit: Tensor, norms: Tensor, axis: Tensor) -> Tensor:
    """Points (V, d) of the best body about the axis, farthest along the rows, to within the rounding of their dtype.

    Row and point are in one plane with the axis, and have their parts along and across it. In fp64, so that a point is
    on the body, whatever became of its angle, and the diameter is one by construction: to measure it would take a
    search of all pairs, because as many as there can be are at distance one.
    """
    angle = _angles(unit, axis)
    h, slope = best_profile(angle, norms).support(angle)
    axis = axis.double() / torch.linalg.vector_norm(axis.double())
    points = torch.empty_like(unit)
    for at in blocks(len(unit)):
        u, t = unit[at].double(), angle[at]
        across = u - torch.outer(u @ axis, axis)
        across -= torch.outer(across @ axis, axis)  # again: a row along the axis leaves little but rounding
        across /= torch.linalg.vector_norm(across, dim=1, keepdim=True).clamp_min(2.0**-40)
        out = torch.outer(h[at] * t.cos() - slope[at] * t.sin(), axis)
        points[at] = out.addcmul_((h[at] * t.sin() + slope[at] * t.cos())[:, None], across)
    points[norms == 0] = 0  # the pole's own direction: inside
    return points


# From above


def _flow(rows: Centred, unit: Tensor, deadline: float) -> tuple[float, TensionFlow | None, Tensor | None]:
    """Return the smallest certified upper bound, of the scaled rows, and its flow.

    Where all rows are alone, which makes the program exact, their points come too: they are a potential.
    """
    V, d = unit.shape
    pulled = rows.norms > 0
    count = int(pulled.sum())
    best, flow, points = _up(rows, rows.total / (2 * jung_ratio(min(d, V - 1))), 0), None, None
    for number in _stages(count):
        first = number <= _GROUPS[0]
        if not first and time.monotonic() > deadline:
            break
        group = _groups(unit, rows.norms, number)
        loads = _loads(rows, group)
        stall = _STALL if number < count else 0.0
        found = solve(loads, tol=_STALL, stall=stall, deadline=math.inf if first else deadline)
        if not found:
            break
        cables, widest = found
        if number == count:
            points = widest.mean(0).expand(V, d).clone()  # a row of zero is as good anywhere in reach of all
            points[pulled] = widest[group[pulled]]
        length = _up(rows, flow_length(loads, cables), len(cables.i))
        if length < best:
            best, flow = length, TensionFlow(group, cables.point, cables.i, cables.j, rows.raw(cables.tension))
    return best, flow, points


def _stages(rows: int) -> Iterator[int]:
    for number in _GROUPS:
        yield min(number, rows)
        if number >= rows:
            return


def _up(rows: Centred, length: float, cables: int) -> float:
    """Round a length up by what fp64 can have lost in it."""
    return length * (1 + (cables + 64) * 2.0**-50) + rows.rounding


def _groups(unit: Tensor, norms: Tensor, number: int) -> Tensor:
    """Group (V,) of each row: the heaviest rows alone, the others by direction; -1 for a row of zero."""
    pulled = int((norms > 0).sum())
    order = norms.argsort(descending=True, stable=True)[:pulled]
    group = order.new_full((len(norms),), -1)
    alone = pulled if number >= pulled else int(number * (_ALONE if number <= 128 else 0.5))
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


def _loads(rows: Centred, group: Tensor) -> Loads:
    """Sum the rows of each group."""
    K = int(group.max()) + 1
    load = torch.zeros(K, rows.G.shape[1], dtype=torch.float64, device=group.device)
    for at, chunk in rows.chunks():
        inside = group[at] >= 0
        load.index_add_(0, group[at][inside], chunk[inside])
    inside = group >= 0
    weight = load.new_zeros(K).index_add_(0, group[inside], rows.norms[inside])
    members = torch.bincount(group[inside], minlength=K)
    lost = (members + rows.G.shape[1]) * 2.0**-50  # where rows are nearly parallel the difference is all rounding
    spread = (weight.square() * (1 + lost) - load.square().sum(1)).clamp_min_(0).sqrt_()
    spread[members == 1] = 0
    return Loads(load, spread, weight)

"""A certified bracket of the minimum total tension T(G) for a vocabulary of any size.

From below: a potential Phi with D(Phi) <= 1 proves T(G) >= <G, Phi>. There are three candidates: projected RowNorm,
scaled to diameter one; the best constant-width body that is round about an axis (`_body_potential.py`); and the points
of a core program of the heaviest rows, with all other rows placed about them (`_core_program.py`, `_placed_rows.py`).
The first two are best where rows share directions, the last where heavy rows each have their own.

From above: a balanced flow proves T(G) <= sum |y_ij|. Rows are put into groups, heavy rows each alone and the rest by
direction, and the program is solved for the groups: exactly by `_tension_program.py`, for few groups or few rows, and
roughly by `_core_program.py`. Row i has the share alpha_i = |g_i| / W_A of the weight W_A of its group A, and differs
from its share of the load by r_i = g_i - alpha_i g_A. A flow Y among groups becomes a flow among rows:

    y_ij = alpha_i alpha_j Y_AB + tau_AB alpha_j r_i - tau_BA alpha_i r_j        i in A, j in B,

with sum_B tau_AB = 1 - tau_AA. By Cauchy and Schwarz, with sum_i |r_i|^2 / alpha_i = W_A^2 - |g_A|^2 = s_A^2, the flow
between the rows of A and B has a total length of at most |(Y_AB, tau_AB s_A, tau_BA s_B)|. What it leaves of the rows
of A, alpha_i R_A + tau_AA r_i with R_A the remainder of the load, has norms that sum to at most |(R_A, tau_AA s_A)|.
Jung's theorem closes it: T of the remainder is at most sqrt(k / (2 (k + 1))) times their sum, k the rank of G
(`_gradient_span.py`). So the bound needs no pair of rows. No flow at all leaves Jung's bound.

Where rows have nearly opposite partners among thousands, the upper side is still loose: it would take as many groups as
there are such pairs.

Tried and dropped: the exact diameter of projected RowNorm where rows are many, with directions of their own. It is an
all-pairs search that no budget stops, and the core proves more.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from ._body_potential import BODY_ROUNDING, body_potential
from ._core_program import CoreProgram, improve
from ._gradient_rows import CentredGradient, blocks
from ._gradient_span import GradientSpan
from ._placed_rows import best_scale, placed_rows, placing_slack
from ._row_groups import group_loads, row_groups
from ._tension_program import EdgeFlow, GroupLoads, flow_length, solve
from .arithmetic import MAX_BYTES, compute_dtype, full_precision
from .bracket import row_diameter_bracket
from .diameter import row_diameter

_GROUPS = (32, 128, 256, 512, 1024)  # in turn, while there is time; the first alone where there are more rows
_ALONE = 0.75  # share of the groups that are one heavy row each
_STALL = 2e-3
_LOWER_SHARE = 0.1  # of the time, for the axis of a body
_CORE_ROWS = (256, 2048)  # groups of the first core, and of the largest
_LIGHT_GROUPS = 128
_TRIAL_STEPS, _FEWEST_STEPS, _MOST_STEPS = 24, 48, 240
_LENGTH_STEPS = 8  # what the length of a flow takes, in fp64
_PLACING_SHARE = 0.4  # of the time of cores
_SCALES = (1.0, 0.97, 0.94, 0.91, 0.88, 0.85, 0.82, 0.79, 0.76, 0.73)
_ALL_PAIRS = 2**33  # multiplications up to which the diameter of projected RowNorm is found exactly


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
    """(E,) fp64: edge AB carries tension * (point_A - point_B), and tau_AB = tension / (sum over A's edges), an edge to
    itself counted twice. Jung's theorem closes what is left over, as `flow_length` describes."""


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
        max_bytes: bound on scratch memory beyond three matrices of G's size and ten tables of at most 2,048 groups.

    Returns:
        both bounds, with slack for rounding, and a certificate of each.
    """
    began = time.monotonic()
    if not budget_seconds >= 0:
        raise ValueError(f"budget_seconds must be zero or positive, got {budget_seconds}")
    rows = CentredGradient.of(G, max_bytes)
    if int((rows.norms > 0).sum()) < 2:
        zero = torch.zeros_like(G, dtype=compute_dtype(G))
        bounds = rows.bounds(0.0, rows.total + rows.rounding)  # zero for equal rows
        return TensionBracket(*bounds, zero, None, rows.shifted, time.monotonic() - began)
    unit = _unit_rows(rows)
    passed = time.monotonic() - began
    span = GradientSpan.of(rows, unit)
    deadline = began + budget_seconds
    lower, potential = _round_potential(rows, unit, began + _LOWER_SHARE * budget_seconds)
    flows = _Flows(rows, span, span.closing * rows.total * (1 + 2.0**-44) + rows.rounding + span.outside)
    points = _exact_flow(rows, unit, flows, deadline)
    candidates = [(lower, potential)]
    if points is not None:
        candidates.append(_certified(rows, points, row_diameter(points).upper))
    elif core := _core_flow(rows, unit, flows, deadline - passed):
        candidates.append(_placed_potential(rows, unit, core, deadline - passed))
    lower, potential = max(candidates, key=lambda candidate: candidate[0])
    bounds = rows.bounds(lower, flows.length)
    return TensionBracket(*bounds, potential, flows.flow, rows.shifted, time.monotonic() - began)


def _unit_rows(rows: CentredGradient) -> Tensor:
    """Directions of the rows (V, d), in fp32 or better."""
    unit = torch.empty_like(rows.G, dtype=compute_dtype(rows.G), memory_format=torch.contiguous_format)
    norms = rows.norms.where(rows.norms > 0, torch.inf)
    for at, chunk in rows.chunks():
        unit[at] = chunk / norms[at, None]
    return unit


# From below


def _round_potential(rows: CentredGradient, unit: Tensor, deadline: float) -> tuple[float, Tensor]:
    """Return the lower bound and potential of projected RowNorm or of the best body, whichever proves more."""
    if rows.G.shape[1] == 1:
        return _certified(rows, unit, row_diameter(unit, max_bytes=rows.max_bytes).upper)
    best = _certified(rows, body_potential(unit, rows.norms, deadline), 1 + BODY_ROUNDING)
    bracket = row_diameter_bracket(unit, max_bytes=rows.max_bytes)
    if rows.total / bracket.lower > best[0]:
        few = len(unit) ** 2 * unit.shape[1] <= _ALL_PAIRS
        diameter = row_diameter(unit, max_bytes=rows.max_bytes).upper if few else bracket.upper
        best = max(best, _certified(rows, unit, diameter), key=lambda candidate: candidate[0])
    return best


def _placed_potential(rows: CentredGradient, unit: Tensor, core: _Core, deadline: float) -> tuple[float, Tensor]:
    """Return the lower bound that the points of a core prove, all rows placed about the centre of its light groups."""
    group, program, loads = core.group, core.program, core.loads
    light = (loads.spread > 0).to(loads.weight) * loads.weight
    centre = (light @ program.points.double()) / light.sum().clamp_min(1e-300)
    points = _row_points(unit, core) - centre.to(unit.dtype)
    points[group < 0] = 0
    heavy = rows.norms.argsort(descending=True, stable=True)[: int((loads.spread <= 0).sum())]  # each its own group
    gain = rows.norms[heavy].to(unit.dtype) * (unit[heavy] * torch.nn.functional.normalize(points[heavy], dim=1)).sum(1)
    points *= best_scale(points[heavy], gain, _SCALES)
    placed = placed_rows(points, rows.norms, deadline)
    return _certified(rows, placed, 1 + placing_slack(placed))


def _row_points(unit: Tensor, core: _Core) -> Tensor:
    """Return where the core wants each row (V, d): at its group's point, and the group's radius off it by direction."""
    points = torch.empty_like(unit)
    mean = (core.loads.load / core.loads.weight[:, None]).to(unit.dtype)
    x, a = core.program.points.to(unit.dtype), core.program.radii.to(unit.dtype)
    for at in blocks(len(unit)):
        group = core.group[at].clamp_min(0)
        own = torch.nn.functional.normalize(unit[at] - mean[group], dim=1)
        points[at] = torch.addcmul(x[group], a[group, None], own)
    return points


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


# From above


@dataclass
class _Flows:
    """The shortest flow so far, its length in units of the scaled rows."""

    rows: CentredGradient
    span: GradientSpan
    length: float
    flow: TensionFlow | None = None

    def add(self, group: Tensor, loads: GroupLoads, edges: EdgeFlow) -> None:
        length = flow_length(loads, edges, self.span.closing)
        slack = 1 + (len(edges.i) + 64) * 2.0**-50  # what fp64 may have lost in its sums
        length = length * slack + self.rows.rounding + self.span.outside
        if length < self.length:
            tension = self.rows.unscaled(edges.tension)
            self.length, self.flow = length, TensionFlow(group, edges.point, edges.i, edges.j, tension)


@dataclass(frozen=True)
class _Core:
    """A program on heavy rows and groups of the others, with the time that a step takes."""

    group: Tensor
    loads: GroupLoads
    program: CoreProgram
    seconds: float


def _exact_flow(rows: CentredGradient, unit: Tensor, flows: _Flows, deadline: float) -> Tensor | None:
    """Shorten the flow among more and more groups, up to one for each row: then the program is exact.

    Its points (V, d) are returned where it comes to that: they are a potential.
    """
    V, d = unit.shape
    nonzero = rows.norms > 0
    count = int(nonzero.sum())
    numbers = _GROUPS if count <= _GROUPS[-1] else _GROUPS[:1]
    for number in sorted({min(number, count) for number in numbers}):
        first = number <= _GROUPS[0]
        if not first and time.monotonic() > deadline:
            break
        group = row_groups(unit, rows.norms, number, int(_ALONE * number))
        loads = group_loads(rows, group)
        stall = _STALL if number < count else 0.0
        solution = solve(loads, tol=_STALL, stall=stall, deadline=math.inf if first else deadline)
        if not solution:
            break
        edges, group_points = solution
        flows.add(group, loads, edges)
        if number == count:
            points = group_points.mean(0).expand(V, d).clone()  # a zero row may be anywhere within one of all others
            points[nonzero] = group_points[group[nonzero]]
            return points
    return None


def _core_flow(rows: CentredGradient, unit: Tensor, flows: _Flows, deadline: float) -> _Core | None:
    """Shorten the flow among heavy rows and groups of the others: few of them, then as many as there is time for.

    Returns the last program, with time left to place all rows by its points; None if there was no time at all.
    """
    if (now := time.monotonic()) > deadline:
        return None
    deadline -= _PLACING_SHARE * (deadline - now)
    core = _core(rows, unit, flows, _CORE_ROWS[0], _TRIAL_STEPS, deadline)
    number = _core_size(core, deadline - time.monotonic())
    if number > 1.5 * len(core.loads.weight):
        return _core(rows, unit, flows, number, _MOST_STEPS, deadline)
    improve(core.program, _MOST_STEPS, deadline)
    flows.add(core.group, core.loads, core.program.flow())
    return core


def _core(rows: CentredGradient, unit: Tensor, flows: _Flows, number: int, steps: int, deadline: float) -> _Core:
    group = row_groups(unit, rows.norms, number, number - min(number // 4, _LIGHT_GROUPS))
    loads = group_loads(rows, group)
    program = CoreProgram(loads, flows.span.closing)
    began = time.monotonic()
    improve(program, 4, math.inf)
    core = _Core(group, loads, program, (time.monotonic() - began) / program.steps)
    improve(program, steps, deadline - _LENGTH_STEPS * core.seconds)
    flows.add(group, loads, program.flow())
    return core


def _core_size(core: _Core, left: float) -> int:
    """Return the largest number of groups, in steps of 128, for which there is time for enough steps.

    A step takes time in proportion to the square of the number.
    """
    K = len(core.loads.weight)
    steps = left / core.seconds
    sizes = range(_CORE_ROWS[1], K, -128)
    return next((number for number in sizes if (_FEWEST_STEPS + _LENGTH_STEPS) * (number / K) ** 2 <= steps), K)

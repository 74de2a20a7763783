"""T(G), the best first-order descent of a step of row diameter one, and how much of it a step makes.

Among all steps S with D(S) <= eta the largest decrease -<G, S> of the linearised loss is eta T(G). The minimum total
tension T(G) is the length sum |y_ij| of the shortest flow between tokens that balances G: sum_j y_ij = g_i for every
row of P G. `diameter_oracle` solves for it exactly where rows are few; `tension_bracket` bounds it for any vocabulary.

From below: a potential Phi with D(Phi) <= 1 proves T(G) >= <G, Phi>. There are three: projected RowNorm scaled to
diameter one, a body of constant width, and the points of a convex program with all rows placed about them.

From above: a balanced flow proves T(G) <= sum |y_ij|. Rows are put into groups, heavy rows each alone and the others by
direction, and the program is solved for the groups. Row i has the share alpha_i = |g_i| / W_A of the weight W_A of its
group A, and differs from its share of the load by r_i = g_i - alpha_i g_A. A flow Y among groups becomes one of rows:

    y_ij = alpha_i alpha_j Y_AB + tau_AB alpha_j r_i - tau_BA alpha_i r_j        i in A, j in B,

with sum_B tau_AB = 1. By Cauchy and Schwarz, with sum_i |r_i|^2 / alpha_i = W_A^2 - |g_A|^2 = s_A^2, the flow between
the rows of A and B has a total length of at most |(Y_AB, tau_AB s_A, tau_BA s_B)|. What it leaves of the rows of A,
alpha_i R_A + tau_AA r_i with R_A the remainder of the load, has norms that sum to at most |(R_A, tau_AA s_A)|. Jung's
theorem closes it: T of the remainder is at most sqrt(k / (2 (k + 1))) times their sum, k the rank of G.

Where rows have nearly opposite partners among thousands, the upper side is loose.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ._tension_solver import (
    CentredGradient,
    TensionFlow,
    TensionProgram,
    Tick,
    blocks,
    body_points,
    flow_length,
    jung_radius,
    placed_points,
    row_groups,
)
from .bracket import row_diameter_bracket
from .diameter import row_diameter
from .numerics import MAX_BYTES, Interval, check_nonnegative, check_rows, compute_dtype, full_precision

_MOST_ROWS = 2048  # of the oracle: (V, V) tables in fp64
_MOST_ROUNDS = 128  # of 48 steps or more, for an exact solution
_STEPS = 48  # of a program between two bounds
_FEWEST, _MOST = 256, 2048  # groups
_LIGHT = 64  # groups that are not one row
_HEAVY = 2.0  # times the mean of the norms: rows that have a group each in the second program
_FREE = 1024  # rows that `placed_points` places one by one, or as many as there are groups
_CLOSED = 1e-5  # a bracket with upper <= (1 + _CLOSED) lower is not improved
_ALL_PAIRS = 2**33  # multiplications up to which the diameter of projected RowNorm is found exactly


# A step against the best one


def jung_ratio(k: int) -> float:
    """Return the share sqrt((k + 1) / (2 k)) of the best first-order decrease that projected RowNorm guarantees.

    -eta/2 PRN(G) decreases the loss by eta/2 sum |g_i|. With k the rank of G, by Jung's theorem no step of diameter eta
    decreases it by more than eta sqrt(k / (2 (k + 1))) sum |g_i|. The vertices of a regular simplex attain the ratio.
    Any upper bound on k, such as min(d, V - 1), gives a smaller share.
    """
    if k < 1:
        raise ValueError(f"k must be a rank of at least one, got {k}")
    return math.sqrt((k + 1) / (2 * k))


@full_precision
def first_order_decrease(G: Tensor, S: Tensor) -> float:
    """Return the decrease -<G, S> of the linearised loss by the step S, summed in fp64.

    If the rows of G (V, d) do not sum to zero, a common shift of the rows of S (V, d) counts too.
    """
    check_rows("G", G)
    _check_step(G, S)
    return -sum(float((G[at].double() * S[at].double()).sum()) for at in blocks(len(G)))


@full_precision
def centred_decrease(G: Tensor, S: Tensor) -> Interval:
    """Bound the decrease -<P G, S> of the linearised loss: a common shift of the rows of G (V, d) does not count."""
    rows = CentredGradient.of(G)
    _check_step(G, S)
    pairing = longest = 0.0
    for at, g in rows.chunks():
        s = S[at].double()
        pairing += float((g * s).sum())
        longest = max(longest, float(torch.linalg.vector_norm(s, dim=1).max()))
    slack = rows.rounding * longest  # more than 32 units of rounding, so a few products with the bounds are covered too
    return Interval((-pairing - slack) / rows.scale, (-pairing + slack) / rows.scale)


def _check_step(G: Tensor, S: Tensor) -> None:
    check_rows("S", S)
    if G.shape != S.shape:
        raise ValueError(f"G and S must have one shape, got {tuple(G.shape)} and {tuple(S.shape)}")


def step_efficiency(decrease: float | Interval, *, diameter: Interval, tension: Interval) -> Interval | None:
    """Return bounds of the efficiency -<G, S> / (D(S) T(G)), or None if a bound is zero or not finite.

    Args:
        decrease: -<G, S> of the centred gradient, or bounds of it (see `centred_decrease`).
        diameter: bounds of D(S).
        tension: bounds of T(G).
    """
    low, high = decrease if isinstance(decrease, Interval) else (decrease, decrease)
    least, most = diameter.lower * tension.lower, diameter.upper * tension.upper
    if not (least > 0 and math.isfinite(most) and math.isfinite(low) and math.isfinite(high)):
        return None
    return Interval(min(low / most, low / least), max(high / most, high / least))


# Few rows: the exact solution


@dataclass(frozen=True, slots=True)
class OracleSolution:
    """The best step of diameter eta, and the flow that proves it."""

    S: Tensor
    """(V, d) fp64: centred, with D(S) <= eta."""
    i: Tensor
    """(E,) row where an edge of the flow starts; pairs that are not listed carry nothing."""
    j: Tensor
    """(E,) row where it ends."""
    flow: Tensor
    """(E, d) fp64: y_ij. To the accuracy of the gap it balances the rows, and s_i - s_j = -eta y_ij / |y_ij|. Jung's
    theorem bounds the rest, which counts in `upper`."""
    value: float
    """-<G, S>, which is eta T(G) to the accuracy of the gap."""
    lower: float
    """Lower bound of eta T(G): `value` less its rounding."""
    upper: float
    """Upper bound of eta T(G): eta times the flow's length, plus its rounding."""
    shifted: bool
    """Whether the rows of G did not sum to zero, so that this is the solution for P G."""

    @property
    def gap(self) -> float:
        """Return upper / lower, which is one for a perfect proof."""
        return _gap(self.lower, self.upper)


@full_precision
def diameter_oracle(G: Tensor, eta: float = 1.0, *, tolerance: float = 1e-6) -> OracleSolution:
    """Minimise <G, S> over the centred S with D(S) <= eta, with a proof: a gap of 1 + tolerance or less.

    Where rows differ by many orders of magnitude it may end before the tolerance is reached; `gap` says what was.

    Args:
        G: (V, d) gradient or moment, any real floating-point dtype, on any device. Its rows should sum to zero.
        eta: the diameter, zero or more.
        tolerance: of the gap, positive.
    """
    rows = CentredGradient.of(G)
    check_nonnegative("eta", eta)
    if not math.isfinite(eta):
        raise ValueError(f"eta must be finite, got {eta}")
    if not tolerance > 0:
        raise ValueError(f"tolerance must be positive, got {tolerance}")
    V = len(G)
    if V > _MOST_ROWS:
        raise ValueError(f"the oracle takes at most {_MOST_ROWS} rows, got {V}: bracket T(G) with tension_bracket")
    g = torch.cat([chunk for _, chunk in rows.chunks()])
    if int((rows.norms > 0).sum()) < 2:
        none = torch.zeros(0, dtype=torch.long, device=G.device)
        _, upper = rows.bounds(0.0, eta * (rows.total + rows.rounding))  # zero for equal rows
        return OracleSolution(torch.zeros_like(g), none, none, g[:0], 0.0, 0.0, upper, rows.shifted)
    unit = rows.directions().double()
    jung = jung_radius(min(V - 1, G.shape[1]))
    groups = row_groups(rows, unit, V, 0)
    program = TensionProgram(groups, jung, exact=True)
    pairing, length = 0.0, math.inf
    S, flow = torch.zeros_like(g), program.flow()
    for _ in range(_MOST_ROUNDS):
        program.improve(_STEPS, _no_limit)
        points, _ = placed_points(program.row_points(unit), rows.norms, V, _no_limit)
        points -= points.mean(0)
        points /= float(torch.pdist(points).max()) * (1 + 2.0**-40)
        if (new := float((g * points).sum())) > pairing:
            pairing, S = new, -eta * points
        if (new := flow_length(groups, candidate := program.flow(), jung)) < length:
            length, flow = new, candidate
        lower, upper = pairing - rows.rounding, length + rows.rounding
        if upper <= (1 + 0.9 * tolerance) * lower:
            break
    lower, upper = rows.bounds(eta * max(0.0, lower), eta * upper * (1 + 2.0**-50))
    a, b = flow.tension.triu(1).nonzero(as_tuple=True)  # (E,) groups, each one row
    row = groups.group.argsort(stable=True)[-len(flow.points) :]
    y = flow.tension[a, b, None] * (flow.points[a] - flow.points[b]) / rows.scale
    return OracleSolution(S, row[a], row[b], y, eta * pairing / rows.scale, lower, upper, rows.shifted)


def _gap(lower: float, upper: float) -> float:
    return upper / lower if lower > 0 else (1.0 if upper == 0 else math.inf)


def _no_limit() -> None:
    pass


# Any number of rows: the bracket


@dataclass(frozen=True, slots=True)
class TensionBracket:
    """Certified bounds lower <= T(G) <= upper, each with its certificate."""

    lower: float
    upper: float
    potential: Tensor
    """Certificate of `lower`: (V, d), of diameter one (but for rounding), with <P G, potential> >= lower."""
    flow: TensionFlow | None
    """Certificate of `upper`: a flow among groups of rows; None where `upper` is Jung's bound."""
    shifted: bool
    """Whether the rows of G did not sum to zero, so that the bounds are those of P G."""
    iterations: int
    """Improvements made. So many again give the same bracket, on the same machine with as many threads."""
    seconds: float
    """Time spent."""

    @property
    def gap(self) -> float:
        """Return upper / lower, or one if both are zero."""
        return _gap(self.lower, self.upper)


class _OutOfTimeError(Exception):
    """Raised where the time of a bracket is over, in an improvement that is then not used."""


@full_precision
def tension_bracket(
    G: Tensor, *, budget_seconds: float = 5.0, iterations: int | None = None, max_bytes: int = MAX_BYTES
) -> TensionBracket:
    """Bracket the minimum total tension T(G), the largest first-order decrease of a step of diameter one.

    The bounds are improved in a fixed sequence. The budget ends it, and has no other influence.

    Args:
        G: (V, d) gradient or moment, any real floating-point dtype, on any device. Its rows should sum to zero.
        budget_seconds: time after which no improvement is begun or finished, but for the first, which takes some ten
            passes over G.
        iterations: most improvements, at least one. With `budget_seconds=math.inf` the result does not depend on time.
        max_bytes: bound on scratch memory beyond three matrices of G's size and ten tables of at most 2,048 groups.
    """
    began = time.monotonic()
    if not budget_seconds >= 0:
        raise ValueError(f"budget_seconds must be zero or positive, got {budget_seconds}")
    if iterations is not None and iterations < 1:
        raise ValueError(f"iterations must be at least one, got {iterations}")
    rows = CentredGradient.of(G, max_bytes)
    if int((rows.norms > 0).sum()) < 2:
        zero = torch.zeros_like(G, dtype=compute_dtype(G))
        bounds = rows.bounds(0.0, rows.total + rows.rounding)  # zero for equal rows
        return TensionBracket(*bounds, zero, None, rows.shifted, 0, time.monotonic() - began)
    done = 0

    def tick() -> None:
        if done and time.monotonic() > began + budget_seconds:
            raise _OutOfTimeError

    states = _improvements(rows, tick)
    best = next(states)
    done = 1
    try:
        while iterations is None or done < iterations:
            tick()
            best = next(states)
            done += 1
    except (_OutOfTimeError, StopIteration):
        pass
    bounds = rows.bounds(best.lower, best.upper)
    flow = best.flow and replace(best.flow, tension=best.flow.tension / rows.scale)  # in units of G
    return TensionBracket(*bounds, best.potential, flow, rows.shifted, done, time.monotonic() - began)


class _Bounds(NamedTuple):
    """The best bounds so far, in units of the scaled rows, and their certificates."""

    lower: float
    potential: Tensor
    upper: float
    flow: TensionFlow | None

    def raised(self, lower: float, potential: Tensor) -> _Bounds:
        return self._replace(lower=lower, potential=potential) if lower > self.lower else self

    def lowered(self, upper: float, flow: TensionFlow) -> _Bounds:
        return self._replace(upper=upper, flow=flow) if upper < self.upper else self


def _improvements(rows: CentredGradient, tick: Tick) -> Iterator[_Bounds]:
    """Yield better and better bounds, in a sequence that depends on the rows alone.

    With as many groups as rows the program is exact: it is then solved in fp64, until the bounds meet.
    """
    unit = rows.directions()
    jung, outside = rows.jung(unit)
    lower, potential = _round_potential(rows, unit)
    best = _Bounds(lower, potential, jung * rows.total * (1 + 2.0**-44) + rows.rounding + outside, None)
    count = int((rows.norms > 0).sum())
    heavy = int((rows.norms > _HEAVY * rows.norms.mean()).sum())
    for number, times in ((_FEWEST, 1), (max(_FEWEST, min(_MOST, heavy + _LIGHT)), 8), (_MOST, 20)):
        tick()
        exact = number >= count
        if exact:
            unit, jung, outside = unit.double(), jung_radius(min(len(unit) - 1, unit.shape[1])), 0.0
        groups = row_groups(rows, unit, number, 0 if exact else _LIGHT)
        program = TensionProgram(groups, jung, exact=exact)
        for _ in range(_MOST_ROUNDS if exact else times):
            program.improve(_STEPS, tick)
            flow = program.flow()
            best = best.lowered(flow_length(groups, flow, jung) + rows.rounding + outside, flow)
            yield best
            points, diameter = placed_points(program.row_points(unit), rows.norms, max(number, _FREE), tick)
            best = best.raised(*_certified(rows, points, diameter))
            yield best
            if best.upper <= (1 + _CLOSED) * best.lower:
                return
        if exact:
            return


def _round_potential(rows: CentredGradient, unit: Tensor) -> tuple[float, Tensor]:
    """Return the lower bound and potential of projected RowNorm or of the best body, whichever proves more."""
    if unit.shape[1] == 1:
        return _certified(rows, unit.clone(), row_diameter(unit, max_bytes=rows.max_bytes).upper)
    best = _certified(rows, *body_points(unit, rows.norms))
    diameter = row_diameter_bracket(unit, max_bytes=rows.max_bytes)
    upper = diameter.upper
    if rows.total / diameter.lower > best[0] and len(unit) ** 2 * unit.shape[1] <= _ALL_PAIRS:
        upper = row_diameter(unit, max_bytes=rows.max_bytes).upper
    if rows.total / upper <= best[0]:  # sum <g_i, u_i> = sum |g_i|
        return best
    return max(best, _certified(rows, unit.clone(), upper), key=lambda candidate: candidate[0])


def _certified(rows: CentredGradient, points: Tensor, diameter: float) -> tuple[float, Tensor]:
    """Divide points in place by a bound on their diameter; return <g, potential>, rounded down, and this potential."""
    potential = points.div_(diameter).to(compute_dtype(rows.G))
    eps = torch.finfo(potential.dtype).eps
    pairing = size = 0.0
    for at, chunk in rows.chunks():
        part = potential[at].double()
        pairing += float((chunk * part).sum())
        size = max(size, float(torch.linalg.vector_norm(part, dim=1).max()))
    reach = 1 + 4 * eps * size  # the cast, the division and the next cast round every row
    return max(0.0, (pairing - rows.rounding * max(size, 1.0)) / reach * (1 - 2.0**-45)), potential

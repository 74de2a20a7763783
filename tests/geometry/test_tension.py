"""T(G) against a cone solver, exact arithmetic and its own certificates; the efficiency of a step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.oracle import scattered_gradient
from hilbert_monitor.geometry import (
    Interval,
    TensionBracket,
    center_rows,
    centred_decrease,
    diameter_oracle,
    first_order_decrease,
    jung_ratio,
    projected_row_norm,
    row_diameter,
    step_efficiency,
    tension_bracket,
)
from tests.support import oracle_checker as checker
from tests.support.draws import draws
from tests.support.gradients import gradient
from tests.support.references import regular_simplex

MANY_ROWS = [
    (gradient(1500, 24).float(), 4, 1.25),
    (scattered_gradient(1200, 48, batch=300), 4, 1.15),
    (gradient(1500, 24, rank=2).float(), 1, 1.2),
]


def independent_tension(G: Tensor) -> float:
    """T(G) by a second-order cone solver: maximise <G, Phi> with every pair at most one apart."""
    clarabel = pytest.importorskip("clarabel")
    sparse = pytest.importorskip("scipy.sparse")
    g = checker.centred(G)
    V, d = g.shape
    row, column, entry, bound, cones = [], [], [], [], []
    at = 0
    for i in range(V):
        for j in range(i + 1, V):
            bound += [1.0] + [0.0] * d
            for k in range(d):
                row += [at + 1 + k] * 2
                column += [i * d + k, j * d + k]
                entry += [-1.0, 1.0]
            cones.append(clarabel.SecondOrderConeT(d + 1))
            at += d + 1
    A = sparse.csc_matrix((entry, (row, column)), shape=(at, V * d))
    settings = clarabel.DefaultSettings()
    settings.verbose = False
    nothing = sparse.csc_matrix((V * d, V * d))
    solution = clarabel.DefaultSolver(nothing, -g.ravel(), A, np.array(bound), cones, settings).solve()
    return float(-solution.obj_val)


@pytest.mark.few(2)
@pytest.mark.parametrize(("V", "d"), [(2, 1), (5, 1), (12, 3), (25, 5)])
def test_the_oracle_agrees_with_a_cone_solver(V: int, d: int) -> None:
    G = gradient(V, d, seed=V)
    assert diameter_oracle(G).value == pytest.approx(independent_tension(G), rel=2e-6)


@pytest.mark.parametrize(("V", "d", "rank"), [(2, 3, None), (9, 2, None), (30, 8, 2), (60, 40, None)])
def test_the_proof_of_the_oracle_holds(V: int, d: int, rank: int | None) -> None:
    G, eta = gradient(V, d, rank=rank), 0.3
    solution = diameter_oracle(G, eta)
    assert solution.gap <= 1 + 1e-6
    assert row_diameter(solution.S).value <= eta
    assert solution.S.sum(0).abs().max() < 1e-12
    assert solution.value == pytest.approx(first_order_decrease(G, solution.S), rel=1e-12)
    assert eta * checker.proved_below(G, -solution.S) >= solution.lower
    assert eta * checker.proved_by_edges(G, solution.i, solution.j, solution.flow) <= solution.upper * (1 + 1e-9)


@pytest.mark.parametrize("k", [1, 2, 8])
def test_projected_rownorm_has_at_least_jungs_share_of_the_best_decrease_and_on_a_simplex_no_more(k: int) -> None:
    simplex = torch.cat([regular_simplex(k), torch.zeros(3, k, dtype=torch.float64)])
    for G, least, most in ((simplex, jung_ratio(k), jung_ratio(k)), (gradient(20, 8, k, rank=k), jung_ratio(k), 1.0)):
        share = first_order_decrease(G, -0.5 * projected_row_norm(G)) / diameter_oracle(G).value
        assert least * (1 - 1e-6) <= share <= most * (1 + 1e-6)


small = st.tuples(st.integers(2, 9), st.integers(1, 4), st.integers(0, 10**6))


@settings(max_examples=draws(10), deadline=None)
@given(small, st.floats(1e-20, 1e20), st.floats(0.01, 100), st.floats(-10, 10))
def test_the_value_scales_and_ignores_a_shift_the_order_of_rows_and_the_choice_of_axes(
    size: tuple[int, int, int], c: float, eta: float, shift: float
) -> None:
    G = gradient(*size)
    draw = torch.Generator().manual_seed(size[2])
    turn = torch.linalg.qr(torch.randn(size[1], size[1], generator=draw, dtype=torch.float64)).Q
    value, moved = diameter_oracle(G), G[torch.randperm(size[0], generator=draw)] @ turn
    shifted = diameter_oracle(G + shift)
    assert diameter_oracle(c * moved, eta).value == pytest.approx(c * eta * value.value, rel=1e-5)
    assert shifted.value == pytest.approx(value.value, rel=1e-5)
    assert shifted.shifted or abs(shift) <= 1e-3
    assert not value.shifted


@pytest.mark.parametrize("G", [torch.zeros(4, 3), torch.ones(1, 3), torch.full((5, 2), 0.3)])
def test_nothing_to_gain_is_zero_with_a_gap_of_one(G: Tensor) -> None:
    for result in (diameter_oracle(G), tension_bracket(G, budget_seconds=0)):
        assert (result.lower, result.upper, result.gap) == (0, 0, 1)
        assert result.shifted == bool(G.any())
    solution = diameter_oracle(gradient(6, 2), 0.0)
    assert solution.value == solution.upper == 0
    assert not solution.S.any()


def check_certificates(G: Tensor, bracket: TensionBracket) -> None:
    assert checker.proved_below(G, bracket.potential) >= bracket.lower
    assert row_diameter(bracket.potential).value <= 1 + 1e-6
    if bracket.flow is None:
        assert checker.closed(G, checker.centred(G)) <= bracket.upper * (1 + 1e-9)
    else:
        assert checker.proved_by_groups(G, bracket.flow) <= bracket.upper * (1 + 1e-9)


@pytest.mark.few(1)
@pytest.mark.parametrize(("G", "iterations", "gap"), MANY_ROWS, ids=["one mass", "scattered", "of rank two"])
def test_the_certificates_of_a_bracket_of_many_rows_prove_its_bounds(G: Tensor, iterations: int, gap: float) -> None:
    bracket = tension_bracket(G, budget_seconds=math.inf, iterations=iterations)
    assert bracket.iterations == iterations
    assert bracket.gap < gap
    check_certificates(G, bracket)


def test_a_bracket_of_few_rows_closes_with_time() -> None:
    assert tension_bracket(gradient(100, 10), budget_seconds=300).gap < 1 + 2e-5


def test_more_improvements_continue_the_same_sequence_and_never_make_a_bracket_wider() -> None:
    G = gradient(1500, 24).float()
    brackets = [tension_bracket(G, budget_seconds=math.inf, iterations=n) for n in (1, 2, 5, 5)]
    lowers, uppers = [bracket.lower for bracket in brackets], [bracket.upper for bracket in brackets]
    assert lowers == sorted(lowers)
    assert uppers == sorted(uppers, reverse=True)
    assert brackets[2].gap < brackets[0].gap
    assert torch.equal(brackets[2].potential, brackets[3].potential)


@pytest.mark.parametrize("budget", [0.0, 0.4])
def test_a_bracket_in_limited_time_is_that_of_as_many_improvements(budget: float) -> None:
    G = gradient(1500, 24).float()
    timed = tension_bracket(G, budget_seconds=budget)
    again = tension_bracket(G, budget_seconds=math.inf, iterations=timed.iterations)
    assert (timed.lower, timed.upper, timed.iterations) == (again.lower, again.upper, again.iterations)
    assert torch.equal(timed.potential, again.potential)
    assert budget > 0 or timed.iterations == 1


def test_a_bracket_of_a_real_shape_beats_projected_rownorm_and_jung() -> None:
    G = gradient(5000, 32).float()
    bracket = tension_bracket(G, budget_seconds=0)
    stretched = first_order_decrease(center_rows(G), -projected_row_norm(G)) / row_diameter(projected_row_norm(G)).value
    total = float(center_rows(G).double().norm(dim=1).sum())
    assert bracket.lower >= stretched * (1 - 1e-6)
    assert bracket.upper < total / (2 * jung_ratio(32))


@settings(max_examples=draws(20), deadline=None)
@given(
    st.integers(2, 25), st.integers(1, 6), st.integers(0, 10**6), st.sampled_from([0.0, 1e4]), st.floats(1e-30, 1e30)
)
def test_a_bracket_is_sound_at_any_scale_and_shift(V: int, d: int, seed: int, shift: float, scale: float) -> None:
    G = ((gradient(V, d, seed) + shift) * scale).float()
    exact, bracket = diameter_oracle(G), tension_bracket(G, budget_seconds=0)
    assert bracket.lower <= exact.upper
    assert bracket.upper >= exact.lower
    check_certificates(G, bracket)


def squared_tension(G: Tensor) -> Fraction:
    """T(G)^2 in rational arithmetic, for two rows or for one column."""
    rows = [[Fraction(entry) for entry in row] for row in G.double().tolist()]
    means = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
    centred = [[entry - mean for entry, mean in zip(row, means, strict=True)] for row in rows]
    if len(rows) == 2:
        return sum((entry**2 for entry in centred[0]), Fraction(0))
    return (sum((abs(row[0]) for row in centred), Fraction(0)) / 2) ** 2


near = st.tuples(st.integers(0, 10**6), st.integers(-60, 0), st.sampled_from([0.0, 1.0, -3e7, 1e-300, 1e300]))


@settings(max_examples=draws(25), deadline=None)
@given(st.sampled_from([(2, 1), (2, 5), (3, 1), (12, 1)]), near, st.sampled_from([torch.float64, torch.float32]))
def test_rows_that_lie_close_have_bounds_that_hold_in_exact_arithmetic(
    shape: tuple[int, int], near: tuple[int, int, float], dtype: torch.dtype
) -> None:
    seed, exponent, shift = near
    rows = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    G = ((rows * 2.0**exponent + 1) * shift if shift else rows * 2.0**exponent).to(dtype)
    if not G.isfinite().all():
        return
    square = squared_tension(G)
    for result in (tension_bracket(G, budget_seconds=0), diameter_oracle(G)):
        assert Fraction(result.lower) ** 2 <= square <= Fraction(result.upper) ** 2
        assert result.upper <= result.lower * (1 + 1e-5) or square < Fraction(1, 2**2000)


def test_rows_of_sixty_orders_of_magnitude_have_a_narrow_bracket() -> None:
    G = gradient(400, 6) * torch.logspace(0, -60, 400, dtype=torch.float64)[:, None]
    G[0] -= G.sum(0)
    bracket = tension_bracket(G, budget_seconds=math.inf, iterations=4)
    assert bracket.gap < 1.02
    check_certificates(G, bracket)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_every_dtype_is_taken_as_it_is(dtype: torch.dtype) -> None:
    G = gradient(20, 3).to(dtype)
    exact, bracket = diameter_oracle(G), tension_bracket(G, budget_seconds=0)
    assert exact.S.dtype == torch.float64
    assert bracket.potential.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert bracket.lower <= exact.upper <= bracket.upper * (1 + 1e-6)


@pytest.mark.parametrize("part", ["tension", "points", "group"])
def test_a_flow_that_was_changed_proves_less(part: str) -> None:
    G = gradient(300, 6)
    bracket = tension_bracket(G, budget_seconds=0)
    assert bracket.flow is not None
    value: Tensor = getattr(bracket.flow, part)
    changed = replace(bracket.flow, **{part: 0.5 * value if part == "tension" else value.roll(1, 0)})
    assert checker.proved_by_groups(G, changed) > bracket.upper * (1 + 1e-3)


def test_the_ends_swap_for_an_uphill_step_and_a_zero_step_has_no_efficiency() -> None:
    diameter, tension, nothing = Interval(1.0, 2.0), Interval(3.0, 5.0), Interval(0.0, 0.0)
    assert step_efficiency(6.0, diameter=diameter, tension=tension) == (0.6, 2.0)
    assert step_efficiency(-6.0, diameter=diameter, tension=tension) == (-2.0, -0.6)
    assert step_efficiency(0.0, diameter=nothing, tension=tension) is None
    assert step_efficiency(0.0, diameter=diameter, tension=nothing) is None
    assert step_efficiency(math.nan, diameter=diameter, tension=tension) is None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda G: diameter_oracle(G * math.nan), "G must be finite, got an infinity or a nan"),
        (lambda G: tension_bracket(G / 0), "G must be finite, got an infinity or a nan"),
        (lambda G: diameter_oracle(G, -1.0), "eta must be zero or positive, got -1"),
        (lambda G: diameter_oracle(G, math.inf), "eta must be finite, got inf"),
        (lambda G: diameter_oracle(G, tolerance=0.0), "tolerance must be positive, got 0"),
        (lambda G: diameter_oracle(torch.randn(3000, 2)), "at most 2048 rows, got 3000"),
        (lambda G: tension_bracket(G, budget_seconds=-1), "budget_seconds must be zero or positive, got -1"),
        (lambda G: tension_bracket(G, iterations=0), "iterations must be at least one, got 0"),
        (lambda G: first_order_decrease(G, G[:2]), "one shape"),
        (lambda G: centred_decrease(G, G[:2]), "one shape"),
        (lambda G: jung_ratio(0), "at least one, got 0"),
        (lambda G: diameter_oracle(G.tolist()), "torch.Tensor"),
    ],
)
def test_what_cannot_be_answered_is_refused_in_one_sentence(call: Callable[[Tensor], object], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        call(gradient(4, 2))

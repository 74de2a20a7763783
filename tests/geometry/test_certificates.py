"""The checker of certificates: what is sound passes, what is broken is told with its size."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
from torch import Tensor

from benchmarks.oracle import scattered_gradient
from hilbert_monitor.geometry import check_flow, check_potential, diameter_oracle, tension_bracket
from tests.support import oracle_checker
from tests.support.gradients import gradient

MODULES = ("tension", "_tension_program", "_core_program", "_placed_rows", "_body_potential")


def use_clock_of_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace time by a clock that goes on by ten milliseconds whenever somebody looks at it."""
    ticks = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: 0.01 * next(ticks))
    for module in MODULES:
        monkeypatch.setattr(f"hilbert_monitor.geometry.{module}.time", clock)


@pytest.mark.sweep
def test_the_certificates_of_a_bracket_with_a_core_prove_its_bounds() -> None:
    G = scattered_gradient(3000, 24, batch=400)
    bracket = tension_bracket(G, budget_seconds=1)
    potential, flow = check_potential(G, bracket.potential), check_flow(G, bracket.flow)
    assert potential.violation(bracket.lower) == 0
    assert potential.excess < 1e-6
    assert flow.violation(bracket.upper) < 1e-12
    assert bracket.lower <= flow.bound
    assert potential.bound <= bracket.upper


@pytest.mark.few(1)
@pytest.mark.parametrize(("V", "d"), [(6, 2), (40, 5), (60, 20)])
def test_the_checker_agrees_with_a_sum_over_all_pairs_of_rows(V: int, d: int) -> None:
    G = gradient(V, d)
    bracket, exact = tension_bracket(G, budget_seconds=0), diameter_oracle(G)
    assert check_potential(G, bracket.potential).bound == pytest.approx(
        oracle_checker.proved_below(G, bracket.potential), rel=1e-6
    )
    y = oracle_checker.spread(G, bracket.flow)
    assert oracle_checker.proved_with_jung(G, y) <= check_flow(G, bracket.flow).bound * (1 + 1e-12)
    checked = check_flow(G, exact)
    assert checked.bound == pytest.approx(exact.upper, rel=1e-9)
    assert checked.remainder < 1e-9 * checked.length


def test_an_empty_flow_proves_jungs_bound_at_the_rank_of_the_gradient() -> None:
    G = gradient(40, 12, rank=3)
    checked = check_flow(G, None)
    assert checked.rank == 3
    assert checked.bound == pytest.approx(float(G.norm(dim=1).sum()) * (3 / 8) ** 0.5, rel=1e-6)


def test_a_potential_that_is_too_wide_is_told_by_how_much_and_where() -> None:
    G = gradient(50, 6)
    bracket = tension_bracket(G, budget_seconds=0)
    wide = bracket.potential.clone()
    wide[7] += 3
    checked = check_potential(G, wide)
    assert checked.excess > 1
    assert 7 in checked.pair
    assert checked.violation(bracket.lower) > 0.1


@pytest.mark.parametrize("part", ["tension", "points", "group"])
def test_a_flow_that_was_changed_proves_less(part: str) -> None:
    G = gradient(200, 6)
    bracket = tension_bracket(G, budget_seconds=0)
    assert bracket.flow is not None
    value: Tensor = getattr(bracket.flow, part)
    changed = replace(bracket.flow, **{part: value.roll(1, 0) if part != "tension" else value * 0.5})
    assert check_flow(G, changed).violation(bracket.upper) > 1e-3


def test_a_potential_of_another_shape_is_refused_in_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"must have one shape, got \(4, 2\) and \(3, 2\)"):
        check_potential(gradient(4, 2), gradient(3, 2))


def test_the_rank_of_a_gradient_tightens_its_upper_bound() -> None:
    G = gradient(3000, 24, rank=2).float()
    bracket = tension_bracket(G, budget_seconds=0)
    total = float(G.double().norm(dim=1).sum())
    assert bracket.upper < total * (2 / 6) ** 0.5 * (1 + 1e-4)
    assert check_flow(G, bracket.flow).violation(bracket.upper) < 1e-9


@pytest.mark.sweep
@pytest.mark.parametrize("budget", [3.0, 8.0])
def test_a_budget_is_kept_by_a_clock_that_runs_when_it_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, budget: float
) -> None:
    use_clock_of_looks(monkeypatch)
    bracket = tension_bracket(scattered_gradient(3000, 24, batch=400), budget_seconds=budget)
    assert bracket.seconds <= max(1.2 * budget, budget + 0.3)


@pytest.mark.few(1)
@pytest.mark.parametrize("batch", [256, 1024])
def test_a_softmax_gradient_is_bracketed_narrowly_by_a_core_of_its_heavy_rows(
    monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    use_clock_of_looks(monkeypatch)
    G = scattered_gradient(4000, 128, batch=batch)
    bracket = tension_bracket(G, budget_seconds=4)
    assert bracket.gap < 1.15
    assert check_potential(G, bracket.potential).violation(bracket.lower) == 0
    assert check_flow(G, bracket.flow).violation(bracket.upper) < 1e-12

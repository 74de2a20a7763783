"""What a step is worth, against independent references, and in a real run."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hilbert_monitor import HilbertMonitor
from hilbert_monitor.geometry import center_rows, diameter_oracle, jung_ratio, projected_row_norm, row_diameter
from hilbert_monitor.geometry.efficiency import Interval, gauge_waste, spectral_norm, step_efficiency
from hilbert_monitor.monitor import step_quality
from tests.support.sinks import Recorder
from tests.support.training import Module, fit

sizes = st.tuples(st.integers(1, 40), st.integers(1, 12), st.integers(0, 10**6))


def cloud(size, offset=0.0):
    V, d, seed = size
    return torch.randn(V, d, generator=torch.Generator().manual_seed(seed)) + offset


@given(sizes, st.sampled_from([0.0, 1.0, 100.0]), st.sampled_from([1e-30, 1.0, 1e30]))
def test_gauge_waste_is_what_centring_takes_away(size, offset, scale):
    S = cloud(size, offset).double()
    expected = 1 - float(center_rows(S).square().sum() / S.square().sum())
    assert gauge_waste((S * scale).float()) == pytest.approx(expected, abs=1e-5)


def test_gauge_waste_of_nothing_is_undefined():
    assert math.isnan(gauge_waste(torch.zeros(5, 3)))
    assert gauge_waste(torch.ones(5, 3)) == pytest.approx(1.0)


@given(sizes, st.sampled_from([1e-30, 1.0, 1e30]))
def test_the_spectral_norm_is_that_of_the_singular_values_from_below(size, scale):
    S = cloud(size) * scale
    exact = float(torch.linalg.matrix_norm(S.double(), 2))
    found = spectral_norm(S)
    assert found <= exact * (1 + 1e-5)
    assert found >= exact * 0.98


def test_the_spectral_norm_of_nothing_is_zero_and_of_what_is_not_finite_nan():
    assert spectral_norm(torch.zeros(4, 3)) == 0
    for bad in (math.nan, math.inf):
        assert math.isnan(spectral_norm(torch.tensor([[bad, 0.0], [1.0, 2.0]])))


def test_the_ends_swap_where_a_step_goes_uphill_and_nothing_is_said_of_no_step():
    bounds = {"diameter": Interval(1.0, 2.0), "tension": Interval(3.0, 5.0)}
    assert step_efficiency(6.0, **bounds) == (0.6, 2.0)
    assert step_efficiency(-6.0, **bounds) == (-2.0, -0.6)
    assert step_efficiency(0.0, diameter=Interval(0.0, 0.0), tension=Interval(3.0, 5.0)) is None
    assert step_efficiency(0.0, diameter=Interval(1.0, 2.0), tension=Interval(0.0, 0.0)) is None
    assert step_efficiency(math.nan, **bounds) is None


@pytest.mark.parametrize("seed", range(3))
def test_projected_row_norm_has_at_least_the_efficiency_that_is_guaranteed(seed):
    G = center_rows(cloud((20, 4, seed)))
    S = -projected_row_norm(G)
    D = row_diameter(S)
    found = dict(step_quality.efficiencies(S, G, {}, Interval(D.lower, D.upper), budget=0.5))
    best = diameter_oracle(G, 1.0)
    exact = float((-G.double() * S.double()).sum()) / (D.value * best.value)
    assert found["efficiency_lower"] <= exact * (1 + 1e-6)
    assert found["efficiency_upper"] >= exact * (1 - 1e-6)
    assert found["efficiency_upper"] >= jung_ratio(4)


def test_a_scaled_gradient_has_the_same_efficiency():
    G, S = center_rows(cloud((30, 5, 1))), -cloud((30, 5, 1))
    D = row_diameter(S)
    bounds = Interval(D.lower, D.upper)
    one, other = (dict(step_quality.efficiencies(S, G * scale, {}, bounds, budget=0.0)) for scale in (1.0, 1e-6))
    assert one["efficiency_lower"] == pytest.approx(other["efficiency_lower"], rel=1e-3)


@pytest.mark.parametrize("make", ["adamw", "rownorm"])
def test_a_run_measures_what_its_steps_are_worth_where_its_panel_is(make):
    kept = Recorder()
    monitor = HilbertMonitor(
        panel_size=50, diameter_every=1, perturbation_every=4, sinks=[kept], run_dir=None, strict=True, efficiency=True
    )
    fit(Module(make), monitor)
    measured = [record for record in kept.records if record.perturbation_rms is not None]
    assert [record.step for record in measured] == [4, 8, 12]
    assert all(record.gauge_waste is None for record in kept.records if record.step % 4)
    for record in measured:
        assert 0 <= record.gauge_waste < 1
        assert record.spectral_norm > 0
        assert 0 < record.utilisation <= 1
        assert record.hidden_norm_rms <= record.hidden_norm
        assert record.backward_bound >= record.diameter
        assert -1 <= record.efficiency_lower <= record.efficiency_upper <= 1.001
        assert 0 < record.moment_efficiency_lower <= record.moment_efficiency_upper
        if make == "rownorm":
            assert record.moment_efficiency_upper >= jung_ratio(16) * 0.999


def test_without_being_asked_nothing_is_searched():
    kept = Recorder()
    fit(Module("adamw"), HilbertMonitor(panel_size=50, perturbation_every=4, sinks=[kept], run_dir=None, strict=True))
    assert all(record.efficiency_lower is None for record in kept.records)
    assert any(record.spectral_norm is not None for record in kept.records)

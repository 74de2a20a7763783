"""The quality of a step: its efficiency from a gradient and an increment, and its place in the records of a run."""

from fractions import Fraction

import pytest
import torch
from hilbert_monitor.monitor.step_quality import step_quality

from hilbert_monitor import HilbertMonitor
from hilbert_monitor.geometry import (
    Interval,
    center_rows,
    diameter_oracle,
    jung_ratio,
    projected_row_norm,
    row_diameter,
)
from tests.support.sinks import Recorder
from tests.support.training import Module, fit


def cloud(V, d, seed):
    return torch.randn(V, d, generator=torch.Generator().manual_seed(seed))


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(3))
def test_projected_row_norm_has_at_least_the_efficiency_that_is_guaranteed(seed):
    G = center_rows(cloud(20, 4, seed))
    S = -projected_row_norm(G)
    D = row_diameter(S)
    quality = step_quality(S, G, {}, Interval(D.lower, D.upper), budget=0.5)
    best = diameter_oracle(G, 1.0)
    exact = float((-G.double() * S.double()).sum()) / (D.value * best.value)
    assert quality.efficiency_lower <= exact * (1 + 1e-6)
    assert quality.efficiency_upper >= exact * (1 - 1e-6)
    assert quality.efficiency_upper >= jung_ratio(4)


def exact_efficiency(G, S):
    """-<P G, S> / (D(S) T(G)) of one column, in rational arithmetic: there T is half the sum of |P G|."""
    g, s = ([Fraction(entry) for entry in A.double().flatten().tolist()] for A in (G, S))
    centred = [entry - sum(g) / len(g) for entry in g]
    decrease = -sum(a * b for a, b in zip(centred, s, strict=True))
    return decrease / ((max(s) - min(s)) * sum(map(abs, centred)) / 2)


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shift", [0.0, 3.0])
def test_the_efficiency_of_one_column_is_within_its_bounds_in_exact_arithmetic(dtype, shift):
    for seed in range(5):
        G, S = (cloud(9, 1, seed).double() + shift).to(dtype), cloud(9, 1, seed + 100)
        D = row_diameter(S)
        quality = step_quality(S, G, {"exp_avg": G}, Interval(D.lower, D.upper), budget=0.0)
        exact = exact_efficiency(G, S)
        assert quality.efficiency_lower <= exact <= quality.efficiency_upper
        assert quality.moment_efficiency_lower <= exact <= quality.moment_efficiency_upper
        assert quality.efficiency_upper - quality.efficiency_lower < 1e-5


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_efficiency_for_a_gradient_in_low_precision_is_that_of_its_entries(dtype):
    for seed in range(4):
        G, S = (cloud(7, 2, seed) + 0.5).to(dtype), cloud(7, 2, seed + 100)
        D = row_diameter(S)
        quality = step_quality(S, G, {}, Interval(D.lower, D.upper), budget=0.2)
        best = diameter_oracle(G)
        exact = float((-center_rows(G.double()) * S.double()).sum()) / (D.value * best.value)
        assert quality.efficiency_lower - 1e-6 <= exact <= quality.efficiency_upper + 1e-6
        assert quality.efficiency_upper - quality.efficiency_lower < 0.01


def test_a_scaled_gradient_has_the_same_efficiency():
    G, S = center_rows(cloud(30, 5, 1)), -cloud(30, 5, 1)
    D = row_diameter(S)
    diameter = Interval(D.lower, D.upper)
    one, other = (step_quality(S, G * scale, {}, diameter, budget=0.0) for scale in (1.0, 1e-6))
    assert one.efficiency_lower == pytest.approx(other.efficiency_lower, rel=1e-3)


@pytest.mark.few(1)
@pytest.mark.parametrize("optimizer", ["adamw", "rownorm"])
def test_a_run_measures_the_quality_of_the_steps_that_its_panel_measures(optimizer):
    recorder = Recorder()
    monitor = HilbertMonitor(
        panel_size=50,
        diameter_every=1,
        perturbation_every=4,
        sinks=[recorder],
        run_dir=None,
        strict=True,
        efficiency=True,
    )
    fit(Module(optimizer), monitor)
    measured = [record for record in recorder.records if record.perturbation_rms is not None]
    assert [record.step for record in measured] == [4, 8, 12]
    assert all(record.gauge_waste is None for record in recorder.records if record.step % 4)
    for record in measured:
        assert 0 <= record.gauge_waste < 1
        assert record.spectral_norm > 0
        assert 0 < record.utilisation <= 1
        assert record.hidden_norm_rms <= record.hidden_norm
        assert record.backward_bound >= record.diameter
        assert -1 <= record.efficiency_lower <= record.efficiency_upper <= 1.001
        assert 0 < record.moment_efficiency_lower <= record.moment_efficiency_upper
        if optimizer == "rownorm":
            assert record.moment_efficiency_upper >= jung_ratio(16) * 0.999


def test_a_run_searches_for_no_efficiency_unless_asked():
    recorder = Recorder()
    monitor = HilbertMonitor(panel_size=50, perturbation_every=4, sinks=[recorder], run_dir=None, strict=True)
    fit(Module("adamw"), monitor)
    assert all(record.efficiency_lower is None for record in recorder.records)
    assert any(record.spectral_norm is not None for record in recorder.records)

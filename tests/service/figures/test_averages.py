"""Pointwise means and deviations, and the alignment of curves, against plain loops."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hilbert_monitor.runs.run import Curve
from hilbert_monitor.service.figures.averages import align, mean_curve, ratio_curve

VALUES = st.one_of(st.floats(-1e3, 1e3), st.sampled_from([math.nan, math.inf, -math.inf]))
CURVE = st.dictionaries(st.integers(1, 12), VALUES, max_size=12)


def series(values):
    """A curve from {step: value}. A step has ten tokens and takes a second."""
    steps = sorted(values)
    return Curve(steps, [10.0 * s for s in steps], [100.0 + s for s in steps], [values[s] for s in steps], 100.0)


@given(st.lists(CURVE, max_size=6), st.sampled_from(["updates", "tokens", "time"]))
def test_means_and_deviations_equal_those_of_a_loop(curves, axis):
    values_at = {}
    for curve in curves:
        for step, value in sorted(curve.items()):
            if math.isfinite(value):
                values_at.setdefault(step, []).append(value)
    means = mean_curve([series(curve) for curve in curves], axis)
    unit = {"updates": 1, "tokens": 10, "time": 1 / 3600}[axis]
    assert means.x.tolist() == pytest.approx([unit * step for step in sorted(values_at)])
    for row, step in enumerate(sorted(values_at)):
        values = values_at[step]
        assert means.runs[row] == len(values)
        assert means.mean[row] == pytest.approx(sum(values) / len(values), abs=1e-9)
        deviation = statistics.stdev(values) if len(values) > 1 else math.nan
        assert means.deviation[row] == pytest.approx(deviation, abs=1e-6, nan_ok=True)
        assert means.smallest[row] == min((v for v in values if v > 0), default=math.inf)


@given(st.lists(st.lists(st.integers(-20, 20), max_size=10), min_size=1, max_size=5))
def test_every_array_is_found_at_its_positions_among_all_keys(arrays):
    keys, positions = align([np.array(array, np.int64) for array in arrays])
    assert set(keys.tolist()) == {key for array in arrays for key in array}
    assert [keys[at].tolist() for at in positions] == arrays


# Over time


def run_of(values, pace, pause=()):
    """A curve from {step: value} of a run whose steps take `pace` seconds; (step, seconds) is a pause before a step."""
    steps = sorted(values)
    times = [100.0 + pace * step + sum(seconds for at, seconds in pause if step >= at) for step in steps]
    return Curve(steps, [], times, [values[step] for step in steps], 100.0)


def test_a_point_is_at_the_mean_time_of_its_step_also_where_one_run_measured_nothing():
    fast = run_of({step: 0.1 for step in range(1, 101, 2)}, pace=36.0)
    slow = run_of({step: 3.0 if step == 50 else 0.1 for step in range(2, 101, 2)}, pace=360.0)
    means = mean_curve([fast, slow], "time")
    inside = slice(1, -1)  # at the first and the last step only one run is under way
    assert means.x[inside].tolist() == pytest.approx([(0.01 + 0.1) / 2 * step for step in range(2, 100)])
    assert np.flatnonzero(means.breaks).tolist() == [1, 99]
    assert means.x[means.mean > 1].tolist() == pytest.approx([0.055 * 50])


def test_a_mean_is_broken_where_one_of_its_runs_paused_and_where_one_ended():
    steps = range(1, 41)
    paused = run_of(dict.fromkeys(steps, 1.0), pace=10.0, pause=[(21, 36_000.0)])
    others = [run_of(dict.fromkeys(steps, 1.0), pace=10.0), run_of(dict.fromkeys(range(1, 31), 1.0), pace=12.0)]
    means = mean_curve([paused, *others], "time")
    assert np.flatnonzero(means.breaks).tolist() == [20, 30]
    ratios = ratio_curve([(paused, others[0])], "time")
    assert np.flatnonzero(ratios.breaks).tolist() == [20]
    assert not mean_curve([paused, *others], "updates").breaks.any()


@pytest.mark.parametrize("axis", ["updates", "tokens", "time"])
def test_a_ratio_is_worked_out_once_as_long_as_no_curve_changes(axis):
    a, b, longer = series({1: 6.0, 2: 8.0}), series({1: 2.0, 2: 2.0}), series({1: 2.0, 2: 2.0, 3: 5.0})
    first = ratio_curve([(a, b)], axis)
    assert ratio_curve([(a, b)], axis) is first
    assert first.ratio.tolist() == [3.0, 4.0]
    assert ratio_curve([(a, longer)], axis) is not first
    assert ratio_curve([(a, b), (longer, b)], axis).ratio.tolist() == [2.0, 2.5]
    assert ratio_curve([(a, b)], axis, smooth=0.5).ratio.tolist() == pytest.approx([3.0, 11 / 3])
    assert ratio_curve([(a, b)], axis).ratio.tolist() == [3.0, 4.0]

"""Smoothing of curves, and the pauses in them."""

import numpy as np
import pytest

from hilbert_monitor.runs.run import Curve
from hilbert_monitor.service.figures.series import pauses, smoothed

# Smoothing


def test_a_long_curve_is_smoothed_like_a_short_one():
    values = np.random.default_rng(0).normal(size=4000)
    expected, total, weights = [], 0.0, 0.0
    for value in values.tolist():
        total, weights = 0.6 * total + value, 0.6 * weights + 1
        expected.append(total / weights)
    series = Curve(np.arange(4000), [], [], values)
    assert smoothed(series, 0.6).tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)


# Pauses


def paused_at(steps, hours):
    return np.flatnonzero(pauses(np.array(steps), np.array(hours))).tolist()


def test_a_pause_is_far_longer_than_its_steps_take():
    steps = np.arange(1, 101)
    hours = steps / 360
    assert paused_at(steps, hours) == []
    assert paused_at(steps, hours + 10 * (steps > 50)) == [50]
    assert paused_at(steps, hours + 10 * (steps > 50) + 10 * (steps > 60)) == [50, 60]


def test_seldom_measured_steps_are_no_pause():
    steps = np.array([1, 2, 3, 4, 500, 501])
    assert paused_at(steps, steps / 360) == []


def test_a_long_validation_in_a_long_run_is_no_pause():
    steps = np.arange(1, 10_001)
    assert paused_at(steps, steps / 3600 + (steps // 500) / 60) == []


def test_a_clock_that_goes_back_breaks_the_line():
    assert paused_at([1, 2, 3, 4], [0.1, 0.2, 0.1, 0.2]) == [2]


@pytest.mark.parametrize("hours", [[], [1.0], [1.0, 1.0], [1.0, 1.0, 1.0], [0.0, 5.0]])
def test_few_points_or_a_clock_that_stands_still_have_no_pause(hours):
    assert paused_at(range(len(hours)), hours) == []

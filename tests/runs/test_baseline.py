"""What is usual in a run: tails against scipy, bursts, and the learning rates that schedules lead to expect."""

import math
import random

import pytest
from scipy import stats
from scipy.integrate import quad

from hilbert_monitor.runs import baseline as rules
from hilbert_monitor.runs.baseline import Baseline, LearningRates, log_densities, survivals

LAWS = [
    (stats.norm, 0.0, 1.0),
    (stats.gumbel_r, rules.GUMBEL_MEAN, rules.GUMBEL_SPREAD),
    (stats.t(3), 0.0, rules.STUDENT_SPREAD),
]
"""The law, mean and spread of each shape, by scipy."""


@pytest.mark.parametrize("z", [0.0, 0.3, 1.0, 4.0, 12.0, 90.0, 300.0])
def test_survivals_are_those_of_scipy(z):
    expected = [law.sf(mean + spread * z) for law, mean, spread in LAWS]
    assert survivals(z) == pytest.approx(expected, rel=1e-3, abs=1e-13)


@pytest.mark.parametrize("shape", range(3))
def test_spreads_and_masses_are_those_of_the_shapes(shape):
    law, mean, spread = LAWS[shape]
    above = quad(lambda t: 2 * t * law.sf(mean + t), 0, rules.CLIP * spread)[0]
    below = quad(lambda t: 2 * t * (1 - law.sf(mean - t)), 0, rules.CLIP * spread)[0]
    assert law.mean() == pytest.approx(mean, abs=1e-9)
    assert above + below == pytest.approx(rules.CLIPPED_VARIANCE * spread**2, rel=1e-8)
    mass = quad(lambda z: math.exp(log_densities(z)[shape]), 0, rules.BODY)[0]
    assert rules.LOG_MASSES[shape] == pytest.approx(math.log(mass), abs=1e-4)
    ratio = law.pdf(mean + 2 * spread) / law.pdf(mean + spread)
    assert log_densities(2.0)[shape] - log_densities(1.0)[shape] == pytest.approx(math.log(ratio), abs=1e-9)


def step_limit(baseline):
    """How far above the usual a step may be."""
    value, _, usual = next(limit for limit in baseline.limits(1.0) if limit[1] == "step")
    return value - usual


def learned(values):
    baseline = Baseline()
    for step, value in enumerate(values):
        baseline.add(step, float(value), baseline.event(float(value), 1.0))
    return baseline


@pytest.mark.parametrize(("shape", "tolerance"), [(0, 0.1), (1, 0.15), (2, 0.25)])
def test_the_shape_of_a_tail_is_learned_from_the_body(shape, tolerance):
    """The spread and the level are learned too, from the last 400 and 100 values: hence the tolerances."""
    law, mean, _ = LAWS[shape]
    baseline = learned(law.rvs(size=6000, random_state=2))
    assert step_limit(baseline) == pytest.approx(law.isf(0.8e-4) - mean, rel=tolerance)


def bursty(sizes, between=300):
    draw = random.Random(4)
    for size in sizes:
        yield from (draw.gauss(0, 0.05) for _ in range(between))
        yield size


def test_bursts_raise_the_limit_to_just_above_the_largest_and_one_alone_by_no_more_than_usual():
    after = [0.0] * 30
    assert 1.1 < step_limit(learned([*bursty([0.5, 0.9, 0.6, 1.1, 0.7, 1.0, 0.8]), *after])) < 1.1 + math.log(1.3)
    one, two = (step_limit(learned([*bursty([3.0] * n), *after])) for n in (1, 2))
    assert math.log(4) < one < math.log(6)
    assert 3.0 < two < 3.3
    near = [*bursty([1.0]), 0.0, 2.0, 0.0, 1.5, *after]  # one burst, of the size of the largest
    assert step_limit(learned(near)) == pytest.approx(step_limit(learned([*bursty([2.0]), *after])), abs=0.1)


def rates_of(*values):
    rates = LearningRates()
    for step, lr in enumerate(values):
        rates.add(step, lr)
    return rates


def test_a_jump_is_cut_back_to_what_the_last_two_lead_to():
    assert rates_of(1e-3, 1e-3).expected_rate(2, 1.0, scheduled=False) == 1.0  # three are needed
    assert rates_of(0.0, 0.0, 0.0).expected_rate(3, 1.0, scheduled=True) == 1.0  # a warm-up begins
    rates = rates_of(0.0, 1.0, 2.0)
    assert rates.expected_rate(3, 3.0, scheduled=True) == 3.0
    assert rates.expected_rate(4, 4.0, scheduled=True) == 4.0  # a record was lost
    assert rates.expected_rate(3, 3.0 * LearningRates.ACCIDENT * 1.01, scheduled=True) == 3.0
    assert rates.expected_rate(3, 1e-9, scheduled=False) == 1e-9  # one that falls is always expected


def test_a_cycle_that_climbs_back_to_its_peak_is_expected():
    peak = 0.77667443392407  # over 1.5 and times 1.5 it is smaller than itself
    climb = [peak * 1.3**-n for n in range(20, 0, -1)]
    assert rates_of(peak, *climb).expected_rate(21, peak, scheduled=None) == peak

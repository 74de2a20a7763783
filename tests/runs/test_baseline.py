"""What is usual in a run: tails against scipy, bursts, and the learning rates that schedules lead to expect."""

import json
import math
import random

import pytest
from scipy import stats
from scipy.integrate import quad

from hilbert_monitor.runs.baseline import (
    BODY,
    CLIP,
    CLIPPED_VARIANCE,
    GUMBEL_MEAN,
    GUMBEL_SPREAD,
    LOG_MASSES,
    STUDENT_SPREAD,
    Baseline,
    LearningRates,
    log_densities,
    survivals,
)

LAWS = [(stats.norm, 0.0, 1.0), (stats.gumbel_r, GUMBEL_MEAN, GUMBEL_SPREAD), (stats.t(3), 0.0, STUDENT_SPREAD)]
"""The law, mean and spread of each shape, by scipy."""


@pytest.mark.parametrize("z", [0.0, 0.3, 1.0, 4.0, 12.0, 90.0, 300.0])
def test_survivals_are_those_of_scipy(z):
    expected = [law.sf(mean + spread * z) for law, mean, spread in LAWS]
    assert survivals(z) == pytest.approx(expected, rel=1e-3, abs=1e-13)


@pytest.mark.parametrize("shape", range(3))
def test_spreads_and_masses_are_those_of_the_shapes(shape):
    law, mean, spread = LAWS[shape]
    above = quad(lambda t: 2 * t * law.sf(mean + t), 0, CLIP * spread)[0]
    below = quad(lambda t: 2 * t * (1 - law.sf(mean - t)), 0, CLIP * spread)[0]
    assert law.mean() == pytest.approx(mean, abs=1e-9)
    assert above + below == pytest.approx(CLIPPED_VARIANCE * spread**2, rel=1e-8)
    mass = quad(lambda z: math.exp(log_densities(z)[shape]), 0, BODY)[0]
    assert LOG_MASSES[shape] == pytest.approx(math.log(mass), abs=1e-4)
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


def test_bursts_raise_the_limit_to_just_above_the_largest():
    sizes = [0.5, 0.9, 0.6, 1.1, 0.7, 1.0, 0.8]
    assert 1.1 < step_limit(learned([*bursty(sizes), *[0.0] * 30])) < 1.1 + math.log(1.3)


def test_one_burst_excuses_no_larger_one_than_usual_and_a_second_one_does():
    one, two = (step_limit(learned([*bursty([3.0] * n), *[0.0] * 30])) for n in (1, 2))
    assert math.log(4) < one < math.log(6)
    assert 3.0 < two < 3.3


def test_values_near_each_other_are_one_burst_of_the_size_of_the_largest():
    baseline = learned([*bursty([]), *bursty([1.0]), 0.0, 2.0, 0.0, 1.5, *bursty([])])
    assert len(baseline.bursts) == 1
    assert baseline.bursts[0][1] == pytest.approx(2.0, abs=0.05)


def test_bursts_excuse_nothing_after_a_long_silence():
    calm = [*bursty([0.0] * 40)]
    assert step_limit(learned([*bursty([3.0, 3.0], 40), *calm])) == pytest.approx(step_limit(learned(calm)), rel=0.2)


@pytest.mark.parametrize("cut", [5, 30, 500])
def test_a_baseline_that_was_saved_and_restored_goes_on_alike(cut):
    draw = random.Random(5)
    values = [draw.gauss(0, 0.1) + (1.0 if t % 97 == 0 else 0.0) for t in range(800)]
    whole, other = learned(values[:cut]), Baseline()
    other.restore(json.loads(json.dumps(whole.state())))
    for step, value in enumerate(values[cut:], cut):
        event = whole.event(value, 1.0)
        assert other.event(value, 1.0) == event
        whole.add(step, value, event)
        other.add(step, value, event)
    assert other.state() == whole.state()


# Learning rates


def rates_of(*values):
    rates = LearningRates()
    for step, lr in enumerate(values):
        rates.add(step, lr)
    return rates


def test_without_three_earlier_rates_every_rate_is_expected():
    assert rates_of(1e-3, 1e-3).expected_rate(2, 1.0, scheduled=False) == 1.0
    assert rates_of(0.0, 0.0, 0.0).expected_rate(3, 1.0, scheduled=True) == 1.0  # a warm-up begins


def test_a_jump_is_cut_back_to_what_the_last_two_lead_to():
    rates = rates_of(0.0, 1.0, 2.0)
    assert rates.expected_rate(3, 3.0, scheduled=True) == 3.0
    assert rates.expected_rate(4, 4.0, scheduled=True) == 4.0  # a record was lost
    assert rates.expected_rate(3, 3.0 * LearningRates.ACCIDENT * 1.01, scheduled=True) == 3.0
    assert rates.expected_rate(3, 1e-9, scheduled=False) == 1e-9  # one that falls is always expected


@pytest.mark.parametrize("span", LearningRates.SPANS)
def test_growth_is_seen_over_spans_of_different_lengths(span):
    pace = 3 ** (1 / span)
    rates = rates_of(*[1.0] * 2 * span, *(pace**n for n in range(1, span)))
    assert rates.expected_rate(3 * span, 3.0, scheduled=True) < 3.0 / LearningRates.ACCIDENT


def test_a_cycle_that_climbs_back_to_its_peak_is_expected():
    peak = 0.77667443392407  # over 1.5 and times 1.5 it is smaller than itself
    climb = [peak * 1.3**-n for n in range(20, 0, -1)]
    assert rates_of(peak, *climb).expected_rate(21, peak, scheduled=None) == peak


def test_what_follows_an_accident_is_compared_with_it():
    rates = rates_of(*[1.0] * 300)
    rates.add(300, 5.0, alerted=True)
    for step in range(301, 700):
        assert rates.expected_rate(step, 5.0, scheduled=False) == 5.0
        rates.add(step, 5.0)

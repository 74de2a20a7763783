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
    STUDENT_SPREADS,
    Baseline,
    LearningRates,
    TailModel,
    survivals,
)

P = 1e-4
LAWS = [
    (stats.norm, 0.0, 1.0),
    (stats.gumbel_r, GUMBEL_MEAN, GUMBEL_SPREAD),
    *((stats.t(n), 0.0, s) for n, s in STUDENT_SPREADS.items()),
]
"""The law, mean and spread of each shape, by scipy."""
LOG_CONSTANTS = [
    -0.5 * math.log(2 * math.pi),
    math.log(GUMBEL_SPREAD),
    *(stats.t(n).logpdf(0) + math.log(s) for n, s in STUDENT_SPREADS.items()),
]


# Tails


@pytest.mark.parametrize("z", [0.0, 0.3, 1.0, 4.0, 12.0, 90.0, 300.0])
def test_survivals_are_those_of_scipy(z):
    expected = [law.sf(mean + spread * z) for law, mean, spread in LAWS]
    assert survivals(z) == pytest.approx(expected, rel=1e-3, abs=1e-13)


@pytest.mark.parametrize("shape", range(4))
def test_spreads_and_masses_are_those_of_the_shapes(shape):
    law, mean, spread = LAWS[shape]
    above = quad(lambda t: 2 * t * law.sf(mean + t), 0, CLIP * spread)[0]
    below = quad(lambda t: 2 * t * (1 - law.sf(mean - t)), 0, CLIP * spread)[0]
    assert law.mean() == pytest.approx(mean, abs=1e-9)
    assert above + below == pytest.approx(CLIPPED_VARIANCE * spread**2, rel=1e-8)
    mass = math.log(law.sf(mean) - law.sf(mean + BODY * spread)) - LOG_CONSTANTS[shape]
    assert LOG_MASSES[shape] == pytest.approx(mass, abs=1e-4)


def learned(values):
    tail = TailModel()
    for value in values:
        tail.add(float(value))
    return tail


@pytest.mark.parametrize(("shape", "tolerance"), [(0, 0.05), (1, 0.1), (2, 0.15), (3, 0.15)])
def test_the_shape_of_a_tail_is_learned_without_its_extremes(shape, tolerance):
    law, mean, spread = LAWS[shape]
    tail = learned((law.rvs(size=8000, random_state=2) - mean) / spread)
    expected = float(law.isf(P) - mean) / spread
    assert tail.height(P, P, 8000, 1.0) == pytest.approx(expected, rel=tolerance)
    assert tail.chance(expected) == pytest.approx(P, rel=5 * tolerance)


def test_values_below_the_level_and_beyond_the_body_teach_no_shape():
    tail = TailModel()
    before = list(tail.scores)
    for z in (-0.5, -3.5, -50.0, BODY, 50.0):
        tail.add(z)
    assert tail.scores == before


def test_bursts_that_come_again_raise_the_height_to_theirs_and_one_alone_does_not():
    draw = random.Random(4)
    tail = learned(draw.gauss(0, 1) for _ in range(20_000))
    before = tail.height(P, P, 20_000, 0.05)
    tail.add_burst(100, 0.25)
    assert tail.height(P, P, 20_000, 0.05) == before
    for number in range(300, 18_000, 300):
        tail.add_burst(number, draw.uniform(0.4, 1.1))
    assert 20 < tail.height(P, P, 20_000, 0.05) < 25


def test_a_step_well_above_the_largest_burst_is_an_event_however_few_bursts_there_were():
    draw = random.Random(6)
    tail = learned(draw.gauss(0, 1) for _ in range(2000))
    for number, size in zip(range(100, 2000, 300), (0.5, 1.0, 0.6, 0.9, 0.7, 1.0, 0.8), strict=True):
        tail.add_burst(number, size)
    assert 1.0 < tail.height(P, P, 2000, 0.1) * 0.1 < 1.0 + math.log(1.3) + 1e-9


def test_values_near_each_other_are_one_burst():
    tail = TailModel()
    for number, size in ((100, 6.0), (104, 9.0), (108, 7.0), (300, 5.0)):
        tail.add_burst(number, size)
    assert tail.bursts == [(100, 9.0), (300, 5.0)]


def test_a_baseline_that_was_saved_and_restored_goes_on_alike():
    draw = random.Random(5)
    values = [draw.gauss(0, 0.1) + (1.0 if t % 97 == 0 else 0.0) for t in range(800)]
    for cut in (5, 30, 500):
        whole, other = Baseline(), Baseline()
        for value in values[:cut]:
            whole.add(value)
        other.restore(json.loads(json.dumps(whole.state())))
        for value in values[cut:]:
            assert other.event(value, P) == whole.event(value, P)
            whole.add(value)
            other.add(value)
        assert other.state() == whole.state()


# Learning rates


def rates_of(*values):
    rates = LearningRates()
    for step, lr in enumerate(values):
        rates.add(step, lr)
    return rates


def test_without_three_earlier_rates_every_rate_is_expected():
    assert LearningRates().expected_rate(0, 1.0, scheduled=None) == 1.0
    assert rates_of(1e-3, 1e-3).expected_rate(2, 1.0, scheduled=False) == 1.0
    assert rates_of(0.0, 0.0, 0.0).expected_rate(3, 1.0, scheduled=True) == 1.0  # a warm-up begins


def test_a_jump_is_cut_back_to_what_the_last_two_lead_to():
    rates = rates_of(0.0, 1.0, 2.0)
    assert rates.expected_rate(3, 3.0, scheduled=True) == 3.0
    assert rates.expected_rate(4, 4.0, scheduled=True) == 4.0  # a record was lost
    assert rates.expected_rate(3, 3.0 * LearningRates.ACCIDENT * 1.01, scheduled=True) == 3.0


def test_a_rate_that_falls_is_always_expected():
    assert rates_of(*[1.0] * 300).expected_rate(300, 1e-9, scheduled=False) == 1e-9


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


def test_rates_that_were_saved_and_restored_expect_the_same():
    rates, other = rates_of(*(1 + 0.01 * n for n in range(300))), LearningRates()
    other.restore(json.loads(json.dumps(rates.state())))
    for lr in (1.0, 4.02, 4.5, 9.0):
        assert other.expected_rate(300, lr, scheduled=False) == rates.expected_rate(300, lr, scheduled=False)

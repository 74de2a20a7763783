"""How rare a value is: against scipy, and what a tail learns."""

import json
import math
import random
from functools import partial

import pytest
from scipy import stats
from scipy.integrate import quad

from hilbert_monitor.runs.tails import (
    BODY,
    CLIP,
    CLIPPED_VARIANCE,
    GUMBEL_MEANS,
    GUMBEL_SPREADS,
    GUMBELS,
    STUDENT_SPREADS,
    STUDENTS,
    Tail,
    gumbel_survival,
    normal_survival,
    student_survival,
    survivals,
)

P = 1e-4


class Gumbel:
    """The distribution of -log of a gamma variable, by scipy."""

    def __init__(self, k):
        self.law = stats.loggamma(k)

    def sf(self, x):
        return self.law.cdf(-x)

    def isf(self, p):
        return -self.law.ppf(p)

    def mean(self):
        return -self.law.mean()


LAWS = [
    (normal_survival, stats.norm, 0.0, 1.0),
    *((partial(student_survival, n), stats.t(n), 0.0, s) for n, s in zip(STUDENTS, STUDENT_SPREADS, strict=True)),
    *(
        (partial(gumbel_survival, k), Gumbel(k), mean, s)
        for k, mean, s in zip(GUMBELS, GUMBEL_MEANS, GUMBEL_SPREADS, strict=True)
    ),
]
"""Our survival function, that of scipy, mean and spread of each shape."""


@pytest.mark.parametrize(("ours", "law", "mean", "spread"), LAWS)
def test_survival_is_that_of_scipy(ours, law, mean, spread):
    for t in (-6.0, -1.5, 0.0, 0.3, 1.0, 4.0, 12.0, 90.0, 300.0):
        assert ours(t) == pytest.approx(law.sf(t), rel=1e-3, abs=1e-13)


@pytest.mark.parametrize(("ours", "law", "mean", "spread"), LAWS)
def test_spreads_are_those_of_the_clipped_variance(ours, law, mean, spread):
    above = quad(lambda t: 2 * t * law.sf(mean + t), 0, CLIP * spread)[0]
    below = quad(lambda t: 2 * t * (1 - law.sf(mean - t)), 0, CLIP * spread)[0]
    assert law.mean() == pytest.approx(mean, abs=1e-9)
    assert above + below == pytest.approx(CLIPPED_VARIANCE * spread**2, rel=1e-8)


def test_survivals_are_in_the_order_of_the_shapes():
    assert survivals(2.5) == tuple(ours(mean + 2.5 * spread) for ours, _, mean, spread in LAWS)


def learned(draw, values=5000):
    tail = Tail()
    for _ in range(values):
        tail.add(draw())
    return tail


def test_a_normal_body_has_the_height_of_a_normal_distribution():
    draw = random.Random(1)
    assert learned(lambda: draw.gauss(0, 1)).height(P, P, 5000, 1.0) == pytest.approx(stats.norm.isf(P), rel=0.02)


@pytest.mark.parametrize("shape", [3, 5])
def test_a_heavy_body_is_recognised_without_its_extremes(shape):
    spread = STUDENT_SPREADS[STUDENTS.index(shape)]
    values = iter((stats.t(shape).rvs(8000, random_state=2) / spread).tolist())
    height = learned(lambda: next(values), 8000).height(P, P, 8000, 1.0)
    assert height * spread == pytest.approx(stats.t(shape).isf(P), rel=0.15)


@pytest.mark.parametrize("k", GUMBELS)
def test_an_exponential_tail_above_is_recognised_although_there_is_none_below(k):
    i = GUMBELS.index(k)
    values = iter(((-stats.loggamma(k).rvs(4000, random_state=3) - GUMBEL_MEANS[i]) / GUMBEL_SPREADS[i]).tolist())
    height = learned(lambda: next(values), 4000).height(P, P, 4000, 1.0)
    assert height == pytest.approx((Gumbel(k).isf(P) - GUMBEL_MEANS[i]) / GUMBEL_SPREADS[i], rel=0.1)
    draw = random.Random(1)
    assert height > 1.3 * learned(lambda: draw.gauss(0, 1), 4000).height(P, P, 4000, 1.0)


def test_what_lies_below_the_level_teaches_nothing():
    tail = Tail()
    scores = list(tail.scores)
    tail.add(-0.5)
    tail.add(-3.5)
    assert tail.scores == scores


def test_the_chance_of_a_height_is_the_probability_that_it_was_made_of():
    draw = random.Random(3)
    tail = learned(lambda: draw.gauss(0, 1))
    for probability in (1e-3, 1e-5):
        height = tail.height(probability, probability, 5000, 1.0)
        assert tail.chance(height, 5000, 1.0) == pytest.approx(probability, rel=0.5)


def test_bursts_that_come_again_raise_the_height_to_theirs_and_one_alone_does_not():
    draw = random.Random(4)
    tail = learned(lambda: draw.gauss(0, 1), 20_000)
    before = tail.height(P, P, 20_000, 0.05)
    tail.add_burst(100, 0.25)
    assert tail.height(P, P, 20_000, 0.05) == before
    for number in range(300, 18_000, 300):
        tail.add_burst(number, draw.uniform(0.4, 1.1))
    assert 20 < tail.height(P, P, 20_000, 0.05) < 24


def test_a_step_well_above_the_largest_burst_is_an_event_however_few_bursts_there_were():
    draw = random.Random(6)
    tail = learned(lambda: draw.gauss(0, 1), 2000)
    for number, size in zip(range(100, 2000, 300), (0.5, 1.0, 0.6, 0.9, 0.7, 1.0, 0.8), strict=True):
        tail.add_burst(number, size)
    assert 1.0 < tail.height(P, P, 2000, 0.1) * 0.1 < 1.0 + math.log(1.2) + 1e-9


def test_sizes_of_bursts_do_not_follow_the_spread():
    tail, wider = Tail(), Tail()
    for number in range(100, 6000, 300):
        tail.add_burst(number, 1.0)
        wider.add_burst(number, 1.0)
    assert tail.height(P, P, 6000, 0.1) * 0.1 == pytest.approx(wider.height(P, P, 6000, 0.11) * 0.11, rel=0.05)


def test_values_near_each_other_are_one_burst():
    tail = Tail()
    for number, z in ((100, 6.0), (104, 9.0), (108, 7.0), (300, 5.0)):
        tail.add_burst(number, z)
    assert tail.bursts == [(100, 9.0), (300, 5.0)]


def test_what_lies_beyond_the_body_teaches_nothing_about_it():
    tail = Tail()
    scores = list(tail.scores)
    tail.add(BODY)
    tail.add(-50.0)
    assert tail.scores == scores


def test_a_tail_that_was_saved_and_restored_is_the_same():
    draw = random.Random(5)
    tail, other = learned(lambda: draw.gauss(0, 1), 500), Tail()
    tail.add_burst(40, 7.0)
    other.restore(json.loads(json.dumps(tail.state())))
    assert other.state() == tail.state()
    assert other.height(P, P, 500, 1.0) == tail.height(P, P, 500, 1.0)


def test_what_an_earlier_version_saved_is_left_out():
    tail = Tail()
    tail.restore({"scores": [-1.0] * 7, "bursts": [[40, 7.0]]})
    assert tail.state() == Tail().state()

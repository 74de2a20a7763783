"""How rare a value is: against scipy, and what a tail learns."""

import json
import random

import pytest
from scipy import stats
from scipy.integrate import quad

from hilbert_monitor.runs.tails import BODY, CLIP, CLIPPED_VARIANCE, SHAPES, SPREADS, Tail, survival

P = 1e-4


def law(shape):
    return stats.norm if shape == SHAPES[0] else stats.t(shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_survival_is_that_of_scipy(shape):
    for t in (0.0, 0.3, 1.0, 4.0, 12.0, 90.0, 3000.0):
        assert survival(shape, t) == pytest.approx(law(shape).sf(t), rel=1e-3, abs=1e-13)


@pytest.mark.parametrize(("shape", "spread"), zip(SHAPES, SPREADS, strict=True))
def test_spreads_are_those_of_the_clipped_variance(shape, spread):
    clipped = quad(lambda t: 4 * t * law(shape).sf(t), 0, CLIP * spread)[0]
    assert clipped == pytest.approx(CLIPPED_VARIANCE * spread**2, rel=1e-8)


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
    rng = stats.t(shape).rvs(8000, random_state=2) / SPREADS[SHAPES.index(shape)]
    values = iter(rng.tolist())
    height = learned(lambda: next(values), 8000).height(P, P, 8000, 1.0)
    assert height * SPREADS[SHAPES.index(shape)] == pytest.approx(stats.t(shape).isf(P), rel=0.15)


def test_the_chance_of_a_height_is_the_probability_that_it_was_made_of():
    draw = random.Random(3)
    tail = learned(lambda: draw.gauss(0, 1))
    for probability in (1e-3, 1e-5):
        assert tail.chance(tail.height(probability, probability, 5000, 1.0), 5000) == pytest.approx(
            probability, rel=0.5
        )


def test_bursts_that_come_again_raise_the_height_to_theirs_and_one_alone_does_not():
    draw = random.Random(4)
    tail = learned(lambda: draw.gauss(0, 1), 20_000)
    before = tail.height(P, P, 20_000, 0.05)
    tail.add_burst(100, 5.0)
    assert tail.height(P, P, 20_000, 0.05) == before
    for number in range(300, 18_000, 300):
        tail.add_burst(number, draw.uniform(8, 22))
    assert 20 < tail.height(P, P, 20_000, 0.05) < 24


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

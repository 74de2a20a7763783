"""Learning rates: what could be foreseen. Whole schedules are in test_alerts.py."""

import json

import pytest

from hilbert_monitor.runs.rates import ACCIDENT, Rates


def rates_of(*values):
    rates = Rates()
    for step, lr in enumerate(values):
        rates.add(step, lr, foreseen=lr)
    return rates


def test_without_a_past_every_rate_is_foreseen():
    assert Rates().foreseen(0, 1.0, scheduled=None) == 1.0
    assert rates_of(1e-3).foreseen(1, 1.0, scheduled=False) == 1.0
    assert rates_of(0.0, 0.0).foreseen(2, 1.0, scheduled=True) == 1.0  # a warm-up begins


def test_a_jump_is_cut_back_to_what_the_last_two_lead_to():
    rates = rates_of(1.0, 2.0)
    assert rates.foreseen(2, 3.0, scheduled=True) == 3.0
    assert rates.foreseen(3, 4.0, scheduled=True) == 4.0  # a record was lost
    assert rates.foreseen(2, 3.0 * ACCIDENT * 1.01, scheduled=True) == 3.0


def test_a_rate_that_falls_is_always_foreseen():
    assert rates_of(*[1.0] * 300).foreseen(300, 1e-9, scheduled=False) == 1e-9


@pytest.mark.parametrize("span", [8, 32, 128])
def test_growth_is_seen_over_spans_of_different_lengths(span):
    pace = 3 ** (1 / span)
    rates = rates_of(*[1.0] * 2 * span, *(pace**n for n in range(1, span)))
    assert rates.foreseen(3 * span, 3.0, scheduled=True) < 3.0 / ACCIDENT


def test_a_cycle_that_climbs_back_to_its_peak_is_foreseen():
    peak = 0.77667443392407  # over 1.5 and times 1.5 it is smaller than itself
    climb = [peak * 1.3**-n for n in range(20, 0, -1)]
    assert rates_of(peak, *climb).foreseen(21, peak, scheduled=None) == peak


def test_what_follows_an_accident_is_compared_with_it():
    rates = rates_of(*[1.0] * 300)
    rates.add(300, 5.0, foreseen=rates.foreseen(300, 5.0, scheduled=False), told=True)
    for step in range(301, 700):
        assert rates.foreseen(step, 5.0, scheduled=False) == 5.0
        rates.add(step, 5.0, foreseen=5.0)


def test_rates_that_were_saved_and_restored_foresee_the_same():
    rates, other = rates_of(*(1 + 0.01 * n for n in range(300))), Rates()
    other.restore(json.loads(json.dumps(rates.state())))
    for lr in (1.0, 4.02, 4.5, 9.0):
        assert other.foreseen(300, lr, scheduled=False) == rates.foreseen(300, lr, scheduled=False)

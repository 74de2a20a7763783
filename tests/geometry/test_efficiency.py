"""The efficiency of a step, and its gauge waste, against independent references."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hilbert_monitor.geometry import Interval, center_rows, gauge_waste, step_efficiency

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


def test_the_ends_swap_for_an_uphill_step_and_a_zero_step_has_no_efficiency():
    bounds = {"diameter": Interval(1.0, 2.0), "tension": Interval(3.0, 5.0)}
    assert step_efficiency(6.0, **bounds) == (0.6, 2.0)
    assert step_efficiency(-6.0, **bounds) == (-2.0, -0.6)
    assert step_efficiency(0.0, diameter=Interval(0.0, 0.0), tension=Interval(3.0, 5.0)) is None
    assert step_efficiency(0.0, diameter=Interval(1.0, 2.0), tension=Interval(0.0, 0.0)) is None
    assert step_efficiency(math.nan, **bounds) is None


def test_autocast_around_the_call_changes_nothing():
    S = cloud((40, 12, 0))
    alone = gauge_waste(S)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert gauge_waste(S) == alone

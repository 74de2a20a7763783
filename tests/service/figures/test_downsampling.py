"""Downsampling keeps the ends, the extremes and the gaps of a curve."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hilbert_monitor.service.figures.downsampling import downsample, log_downsample


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=400), st.integers(4, 60))
def test_ends_and_extremes_are_kept_within_the_limit(values, points):
    rows = downsample([np.array(values)], points).tolist()
    assert len(rows) <= points
    assert (rows[0], rows[-1]) == (0, len(values) - 1)
    assert {min(values), max(values)} <= {values[i] for i in rows}
    assert rows == sorted(set(rows))


@given(
    st.lists(st.one_of(st.floats(), st.sampled_from([math.nan, math.inf, 0.0])), min_size=100, max_size=500),
    st.integers(20, 60),
)
def test_a_value_that_stands_out_of_its_surroundings_is_kept(values, points):
    column = np.array(values)
    rows = set(downsample([column, np.zeros(len(column))], points).tolist())
    stretch = math.ceil(len(column) / ((points - 2) // 4)) + 1  # no stretch is longer
    finite = np.where(np.isfinite(column), column, math.nan)
    for i in np.flatnonzero(np.isfinite(column)):
        others = np.delete(finite[max(i - stretch, 0) : i + stretch + 1], min(i, stretch))
        others = others[~np.isnan(others)]
        if (others < column[i]).all() or (others > column[i]).all():
            assert i in rows


def test_a_stretch_without_values_stays_a_gap():
    values = np.ones(20_000)
    values[5_000:10_000] = math.nan
    assert np.isnan(values[downsample([values])]).sum() > 100


def test_on_a_logarithmic_axis_every_doubling_has_its_points_and_no_spike_is_lost():
    x = np.arange(0.0, 100_000.0)
    y = np.where(np.isin(x, (3, 700, 99_000)), 5.0, 1.0)
    rows = log_downsample([y], x, 1000)
    assert len(rows) <= 1100
    assert {0, 1, 2, 3, 4, 5, 6, 7, 8, 700, 99_000, 99_999} <= {*rows.tolist()}
    counts = [int(((x[rows] >= 2**n) & (x[rows] < 2 ** (n + 1))).sum()) for n in range(7, 16)]
    assert min(counts) > 20
    assert rows.tolist() == sorted({*rows.tolist()})


@given(st.lists(st.floats(-10, 1e6), min_size=1, max_size=300), st.integers(4, 60))
def test_on_a_logarithmic_axis_both_ends_are_kept(places, points):
    x = np.sort(np.array(places))
    rows = log_downsample([x], x, points)
    assert (rows[0], rows[-1]) == (0, len(x) - 1)
    assert (np.diff(rows) > 0).all()

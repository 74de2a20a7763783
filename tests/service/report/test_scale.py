"""Scales of an axis: places and ticks."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hilbert_monitor.service.report.scale import Scale

finite = st.floats(allow_nan=False, allow_infinity=False)


@pytest.mark.parametrize(
    ("scale", "options", "expected"),
    [
        (Scale(0, 1), {}, ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
        (Scale(3.05, 3.66), {}, ["3.1", "3.2", "3.3", "3.4", "3.5", "3.6"]),
        (Scale(0, 1.05e9), {"letters": True}, ["0", "0.2B", "0.4B", "0.6B", "0.8B", "1B"]),
        (Scale(0.78, 0.96), {"percent": True}, ["80%", "85%", "90%", "95%"]),
        (Scale(1e-4, 0.2, log=True), {}, ["10^−4", "10^−3", "10^−2", "10^−1"]),  # noqa: RUF001
        (Scale(0.0015, 0.25, log=True), {}, ["0.002", "0.005", "0.01", "0.02", "0.05", "0.1", "0.2"]),
        (Scale(3e-6, 2.5e-5, log=True), {}, ["5×10^−6", "10^−5", "2×10^−5"]),  # noqa: RUF001
    ],
)
def test_ticks_are_round_numbers(scale, options, expected):
    ticks = scale.ticks(5, **options)
    assert [f"{tick.text}^{tick.exponent}" if tick.exponent else tick.text for tick in ticks] == expected


@given(st.lists(finite, min_size=1, max_size=8), st.booleans(), st.integers(2, 8))
def test_ticks_are_few_and_inside_and_all_values_have_a_place(values, to_zero, count):
    scale = Scale.of(values, to_zero=to_zero)
    ticks = [tick.value for tick in scale.ticks(count)]
    assert 1 <= len(ticks) <= 2 * count + 2
    assert ticks == sorted(ticks)
    assert all(-1e-6 <= scale.place(tick) <= 1 + 1e-6 for tick in ticks)
    assert all(math.isfinite(scale.place(value)) for value in values)


@given(st.lists(st.floats(min_value=5e-324, allow_infinity=False), min_size=1, max_size=8))
def test_a_logarithmic_scale_holds_any_positive_values(values):
    scale = Scale.of(values, log=True)
    assert 0 < scale.low < scale.high < math.inf
    assert 1 <= len(scale.ticks(5)) <= 12
    usual = [value for value in values if 1e-250 < value < 1e250]
    assert all(0 <= scale.place(value) <= 1 for value in usual)
    assert all(math.isfinite(scale.place(value)) for value in values)


def test_a_narrow_logarithmic_range_has_ticks_too():
    assert [tick.text for tick in Scale(2.1, 4.9, log=True).ticks(4)] == ["3", "4"]
    assert len(Scale(5.0000001e16, 5.00004e16, log=True).ticks(5)) >= 2

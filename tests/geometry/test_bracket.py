"""Bounds that stay on the device: they wait for nothing, and resolve to what the bracket is."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from hilbert_monitor.geometry import DeferredBracket, deferred_bracket, row_diameter_bracket
from tests.support import clouds
from tests.support.draws import draws
from tests.support.references import all_pairs_diameter

seeds = st.integers(0, 2**31)
shapes = st.tuples(st.integers(1, 60), st.integers(1, 20))


def resolved(S):
    deferred = deferred_bracket(S)
    return deferred.resolve(deferred.numbers.tolist())


@settings(max_examples=draws(60), deadline=None)
@given(seed=seeds, shape=shapes, kind=st.sampled_from(clouds.KINDS))
def test_deferred_bounds_hold_and_equal_the_bracket(seed, shape, kind):
    S = kind(*shape, seed)
    bracket = resolved(S)
    if bracket is None:
        assert all_pairs_diameter(S) == 0
    else:
        assert bracket == row_diameter_bracket(S)
        assert bracket.lower <= all_pairs_diameter(S) * (1 + 1e-12)
        assert bracket.upper >= all_pairs_diameter(S)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_deferred_bounds_wait_for_nothing_in_any_dtype(dtype):
    """A fake tensor has no entries: whatever asks for one, or for a size that depends on them, raises."""
    with FakeTensorMode():
        S = torch.empty(5000, 64, dtype=dtype)
        deferred = deferred_bracket(S)
        with pytest.raises(DataDependentOutputException):
            row_diameter_bracket(S)
    assert deferred.numbers.shape == (6,)
    assert deferred.numbers.dtype == torch.float64


@pytest.mark.parametrize("V", [2, 16, 17, 3000])
@pytest.mark.parametrize("x", [math.inf, -math.inf, math.nan])
def test_rows_that_are_not_finite_need_another_look(V, x):
    for scale in (1.0, 1e30):  # large rows are told from infinite ones
        S = scale * clouds.gaussian(V, 8, 0)
        for rows in ([0], [0, V - 1], range(V)):  # the first row is in the sample from which the centre is taken
            S[list(rows), 3] = x
            assert resolved(S) is None
            bracket = row_diameter_bracket(S)
            assert 0 in bracket.pair
            assert bracket.nonfinite_rows == len(rows)
            assert not math.isfinite(bracket.lower)


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e30])
def test_rows_that_need_another_look_are_not_resolved(scale):
    S = scale * clouds.gaussian(900, 8, 0)
    assert resolved(S) is None
    assert row_diameter_bracket(S).lower == pytest.approx(all_pairs_diameter(S), rel=0.5, abs=0)


def test_a_deferred_bracket_holds_nothing_of_the_rows():
    deferred = deferred_bracket(clouds.gaussian(900, 8, 0))
    tensors = [x for x in (getattr(deferred, name) for name in DeferredBracket.__slots__) if torch.is_tensor(x)]
    assert [x.untyped_storage().nbytes() for x in tensors] == [6 * 8]

"""The warm-started bound of the spectral norm is never above it, and comes close where the matrix moves slowly."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hilbert_monitor.geometry import leading_direction
from tests.support.draws import draws
from tests.support.references import normal

examples = settings(max_examples=draws(40), deadline=None)
shapes = st.tuples(st.integers(1, 20), st.integers(1, 20))


def exact(A):
    return torch.linalg.matrix_norm(A.double(), 2)


@examples
@given(shapes, st.integers(0, 10**6), st.sampled_from([1e-20, 1.0, 1e15]), st.integers(0, 4))
def test_the_bound_is_never_above_the_norm_whatever_it_starts_from(shape, seed, scale, passes):
    A = (normal(seed, *shape) * scale).float()
    found = leading_direction(A)
    for _ in range(passes):
        found = leading_direction(A, found.right)
    assert float(found.norm) <= float(exact(A)) * (1 + 1e-5)
    assert float(torch.linalg.vector_norm(found.right)) == pytest.approx(1.0, rel=1e-5)


@examples
@given(shapes, st.integers(0, 10**6))
def test_the_bound_grows_with_every_call_on_one_matrix(shape, seed):
    A, found = normal(seed, *shape), None
    norms = []
    for _ in range(5):
        found = leading_direction(A, None if found is None else found.right)
        norms.append(float(found.norm))
    assert all(b >= a * (1 - 1e-12) for a, b in pairwise(norms))


def test_a_matrix_that_moves_slowly_is_followed_closely():
    A, drift, right = normal(0, 40, 30), normal(1, 40, 30) * 0.01, None
    for _ in range(40):
        A = A + drift
        norm, right = leading_direction(A, right)
    assert float(norm) > 0.99 * float(exact(A))


def test_stacks_are_measured_one_by_one():
    A = normal(0, 2, 3, 8, 5)
    found = leading_direction(A)
    for i in range(2):
        for j in range(3):
            assert float(found.norm[i, j]) == pytest.approx(float(leading_direction(A[i, j]).norm), rel=1e-12)


def test_zero_stays_zero_and_keeps_its_direction_and_nan_is_told():
    found = leading_direction(torch.zeros(4, 3))
    assert float(found.norm) == 0
    assert bool(found.right.isfinite().all())
    assert math.isnan(float(leading_direction(torch.full((2, 2), torch.nan)).norm))


@pytest.mark.parametrize("shape", [(3,), (0, 3), (3, 0)])
def test_what_is_no_matrix_is_refused(shape):
    with pytest.raises(ValueError, match="matrix or a stack"):
        leading_direction(torch.ones(shape))

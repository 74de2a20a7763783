"""RowNorm and its projection, statistics of rows, and bounds of the spectral norm."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hilbert_monitor.geometry import (
    center_rows,
    leading_direction,
    projected_row_norm,
    row_norm,
    row_statistics,
    spectral_norm,
)
from tests.support.draws import draws
from tests.support.references import all_pairs_diameter, normal

examples = settings(max_examples=draws(30), deadline=None)
seeds = st.integers(0, 2**32 - 1)
heights = st.integers(1, 40)
widths = st.integers(1, 12)
scales = st.sampled_from([1e-30, 1e-3, 1.0, 1e3, 1e30])

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
OPERATIONS = [center_rows, row_norm, projected_row_norm]

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_operation = pytest.mark.parametrize("operation", OPERATIONS, ids=lambda f: f.__name__)


def projector(V):
    """P = I - 11'/V as a matrix."""
    return torch.eye(V, dtype=torch.float64) - 1 / V


def unit_row(row):
    """Divide by the Euclidean norm with no overflow or underflow: in Python floats, at exponent zero."""
    exponent = math.frexp(max(map(abs, row)))[1]
    row = [math.ldexp(a, -exponent) for a in row]
    return [a / math.hypot(*row) if any(row) else a for a in row]


def unit_rows(A):
    """RN(A) row by row, in fp64."""
    return torch.tensor([unit_row(row) for row in A.tolist()], dtype=torch.float64)


def close(actual, expected, atol):
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=atol)


# Centering


@examples
@given(seeds, heights, widths, scales)
def test_centering_is_multiplication_by_the_projector(seed, V, d, scale):
    A = normal(seed, V, d, scale=scale)
    close(center_rows(A), projector(V) @ A, 1e-14 * scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_centering_holds_to_the_end_of_the_range(dtype):
    A = torch.tensor([[2e38], [1e38], [2e38], [3e38]], dtype=dtype)
    close(center_rows(A) / 1e38, projector(4) @ (A.double() / 1e38), 1e-2)


# Row normalisation


# from rows whose squares underflow to rows whose squares overflow
SCALES_OF_DTYPE = {
    torch.float64: [1e-300, 1e-200, 1.0, 1e200, 1e307],
    torch.float32: [1e-30, 1.0, 1e30, 5e37],
    torch.bfloat16: [1e-30, 1.0, 1e30, 5e37],
    torch.float16: [1e-7, 1e-5, 1.0, 1e4],
}


@every_dtype
@examples
@given(seed=seeds, V=heights, d=widths)
def test_every_nonzero_row_comes_out_with_norm_one_whatever_its_scale(seed, V, d, dtype):
    scale = torch.tensor(SCALES_OF_DTYPE[dtype], dtype=torch.float64)
    picked = torch.randint(len(scale), (V, 1), generator=torch.Generator().manual_seed(seed))
    A = (normal(seed, V, d) * scale[picked]).to(dtype)
    assert A.isfinite().all()
    eps = torch.finfo(dtype).eps
    unit = row_norm(A)
    close(unit.double().norm(dim=1), (A != 0).any(1), 4 * eps)
    close(unit, unit_rows(A), 4 * eps)


@every_dtype
@pytest.mark.parametrize("operation", [row_norm, projected_row_norm], ids=lambda f: f.__name__)
def test_denormal_rows_are_normalised_like_any_others(operation, dtype):
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    A = torch.tensor([[3.0, 4.0], [-3.0, -4.0], [1.0, 0.0], [-1.0, 0.0]], dtype=dtype) * smallest
    close(operation(A), [[0.6, 0.8], [-0.6, -0.8], [1.0, 0.0], [-1.0, 0.0]], 4 * torch.finfo(dtype).eps)


@every_dtype
def test_a_zero_row_stays_zero_among_others_and_a_nan_stays_in_its_row(dtype):
    A = torch.tensor([[0.0, 0.0], [3.0, 4.0], [0.0, -2.0], [torch.nan, 5.0]], dtype=dtype)
    unit = row_norm(A)
    close(unit[:3], [[0.0, 0.0], [0.6, 0.8], [0.0, -1.0]], 2 * torch.finfo(dtype).eps)
    assert not unit[3, 1].abs() > 1
    for eps in (1e-8, 1.0):
        assert (row_norm(A, eps=eps)[0] == 0).all()


@examples
@given(seeds, heights, widths, st.sampled_from([1e-8, 1e-3, 1.0, 1e3]), st.sampled_from([1e-12, 1e-3, 1.0, 1e5]))
def test_stabilised_row_is_the_row_over_its_norm_plus_eps(seed, V, d, eps, scale):
    A = normal(seed, V, d, scale=scale)
    A[seed % V] = 0
    expected = A / (A.norm(dim=1, keepdim=True) + eps)
    torch.testing.assert_close(row_norm(A, eps=eps), expected, rtol=1e-13, atol=0)


# Projected RowNorm: steepest descent in a ball


@examples
@given(seeds, heights, widths, scales, st.sampled_from([0.0, 1e-8, 0.5]))
def test_projected_row_norm_centers_normalises_and_centers_again(seed, V, d, scale, eps):
    A = normal(seed, V, d, scale=scale)
    C = projector(V) @ A
    normalised = C / (C.norm(dim=1, keepdim=True) + eps) if eps else unit_rows(C)
    close(projected_row_norm(A, eps=eps), projector(V) @ normalised, 1e-12)


@examples
@given(seeds, st.integers(2, 40), widths, st.sampled_from([1e-3, 10.0]), st.sampled_from([1e-3, 0.1, 1.0, 10.0]))
def test_no_centered_step_with_rows_in_one_ball_descends_faster(seed, V, d, eta, noise):
    G = projector(V) @ normal(seed, V, d)
    step = -eta / 2 * projected_row_norm(G)
    best, row_norms = (G * step).sum(), G.norm(dim=1).sum()
    slack = 1e-13 * eta * row_norms
    assert abs(best + eta / 2 * row_norms) <= slack
    assert all_pairs_diameter(step) <= eta * (1 + 1e-13)
    for rival in range(10):
        towards = noise * normal(seed + 1 + rival, V, d) - unit_rows(G)  # near the optimum when the noise is small
        reach = torch.rand((V, 1), generator=torch.Generator().manual_seed(seed + rival), dtype=torch.float64)
        for radius in (eta / 2, eta / 2 * reach**0.1):  # on the sphere and inside
            S = projector(V) @ (normal(seed + 99, d, scale=eta) + radius * unit_rows(towards))
            assert (G * S).sum() >= best - slack


# How they compute


@every_operation
@every_dtype
def test_result_keeps_the_dtype_and_is_the_fp64_result_rounded(operation, dtype):
    A = (normal(3, 37, 5) + 2).to(dtype)
    result = operation(A)
    assert result.dtype == dtype
    assert result.shape == A.shape
    torch.testing.assert_close(result.double(), operation(A.double()), rtol=0, atol=8 * torch.finfo(dtype).eps)


@every_operation
@examples
@given(seed=seeds, V=heights, d=widths, rows_at_a_time=st.integers(1, 8))
def test_little_scratch_memory_gives_the_same_result(operation, seed, V, d, rows_at_a_time):
    A = normal(seed, V, d)
    max_bytes = rows_at_a_time * 4 * d * A.element_size()
    close(operation(A, max_bytes=max_bytes), operation(A), 1e-13)


@pytest.mark.parametrize("operation", [row_norm, projected_row_norm], ids=lambda f: f.__name__)
def test_a_negative_stabiliser_is_refused(operation):
    for eps in (-1e-8, math.nan):
        with pytest.raises(ValueError, match=r"\Aeps must be zero or positive.*\Z"):
            operation(torch.ones(3, 2), eps=eps)


@examples
@given(seeds, heights, widths, st.sampled_from([0.0, 1.0, 100.0]), scales)
def test_gauge_waste_is_what_centring_takes_away(seed, V, d, offset, scale):
    S = normal(seed, V, d) + offset
    expected = 1 - float(center_rows(S).square().sum() / S.square().sum())
    assert row_statistics((S * scale).float()).gauge_waste == pytest.approx(expected, abs=1e-5)
    assert math.isnan(row_statistics(0 * S).gauge_waste)


# The spectral norm


def singular_value(S):
    """|S|_2 by an fp64 decomposition, of a matrix that a power of two has brought near one."""
    largest = float(S.abs().max())
    if largest == 0:
        return 0.0
    half = 2.0 ** (math.frexp(largest)[1] // 2)
    return float(torch.linalg.matrix_norm(S.double() / half / half, 2)) * half * half


def check_spectral(S, tightness=1e-7):
    bounds, value = spectral_norm(S), singular_value(S)
    assert bounds.lower <= value * (1 + 1e-13)
    assert bounds.upper >= value * (1 - 1e-13)
    assert bounds.upper <= bounds.lower * (1 + tightness) + 1e-300


@examples
@given(seeds, heights, widths, st.integers(0, 4), st.sampled_from([1e-44, 1e-3, 1e30]), st.sampled_from([0.0, 100.0]))
def test_the_bounds_hold_the_largest_singular_value_at_any_rank_scale_and_shift(seed, V, d, rank, scale, shift):
    check_spectral(((normal(seed, V, rank) @ normal(seed + 1, rank, d) + shift) * scale).float(), 1e-3)
    check_spectral(normal(seed, V, d) + shift, 1e-3)
    for dtype in (torch.bfloat16, torch.float16):
        check_spectral(normal(seed, V, d).to(dtype), 1e-3)


@pytest.mark.parametrize(
    "values",
    [
        [1.0] * 12,
        [1.0, 1.0 - 1e-12] + [1e-9] * 10,
        [1.0 - 1e-3 * k for k in range(12)],
        [2.0**-k for k in range(12)],
        [1.0, 1e-160] + [0.0] * 10,
    ],
    ids=["equal", "tied", "close", "geometric", "far apart"],
)
def test_the_bounds_hold_for_spectra_that_mislead_an_iteration(values):
    left, right = torch.linalg.qr(normal(1, 40, 12)).Q, torch.linalg.qr(normal(2, 12, 12)).Q
    check_spectral(left * torch.tensor(values, dtype=torch.float64) @ right.T, 1e-4)


def test_longest_rows_that_are_orthogonal_to_the_leading_direction_do_not_hide_it():
    S = torch.zeros(14, 8)
    S[torch.arange(4), torch.arange(1, 5)] = 1.0
    S[4:, 0] = 0.9999  # ten rows in one direction, each shorter than those four
    check_spectral(S)


def test_fp64_rows_at_the_ends_of_the_range_are_bounded():
    for scale in (1e-320, 1e-200, 1e200, 1.7e308):
        bounds = spectral_norm(torch.eye(3, dtype=torch.float64) * scale)
        assert bounds.lower <= scale <= bounds.upper
    bounds = spectral_norm(torch.full((4, 4), 1.7e308, dtype=torch.float64))
    assert 1e308 < bounds.lower < bounds.upper == math.inf


def test_the_spectral_norm_of_nothing_is_zero_and_of_what_is_not_finite_nan():
    assert spectral_norm(torch.zeros(4, 3)) == (0, 0)
    for bad in (math.nan, math.inf):
        assert all(math.isnan(bound) for bound in spectral_norm(torch.tensor([[bad, 0.0], [1.0, 2.0]])))


# The leading direction


@examples
@given(seeds, heights, widths, st.sampled_from([1e-20, 1.0, 1e15]))
def test_the_bound_grows_with_every_call_on_one_matrix_and_is_never_above_the_norm(seed, V, d, scale):
    A, right, norms = normal(seed, V, d, scale=scale), None, []
    for _ in range(5):
        norm, right = leading_direction(A, right)
        norms.append(float(norm))
        assert float(right.norm()) == pytest.approx(1.0, rel=1e-5)
    assert all(b >= a * (1 - 1e-12) for a, b in pairwise(norms))
    assert norms[-1] <= float(torch.linalg.matrix_norm(A, 2)) * (1 + 1e-5)


def test_a_matrix_that_moves_slowly_is_followed_closely():
    A, drift, right = normal(0, 40, 30), normal(1, 40, 30) * 0.01, None
    for _ in range(40):
        A = A + drift
        norm, right = leading_direction(A, right)
    assert float(norm) > 0.99 * singular_value(A)


def test_stacks_are_measured_one_by_one_zero_keeps_its_direction_and_nan_is_told():
    A = normal(0, 2, 3, 8, 5)
    alone = [[float(leading_direction(matrix).norm) for matrix in row] for row in A]
    close(leading_direction(A).norm, alone, 1e-10)
    found = leading_direction(torch.zeros(4, 3))
    assert float(found.norm) == 0
    assert bool(found.right.isfinite().all())
    assert math.isnan(float(leading_direction(torch.full((2, 2), torch.nan)).norm))


def test_what_is_no_matrix_is_refused():
    for shape in ((3,), (0, 3), (3, 0)):
        with pytest.raises(ValueError, match="matrix or a stack"):
            leading_direction(torch.ones(shape))

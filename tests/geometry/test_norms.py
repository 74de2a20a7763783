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
from tests.support.references import all_pairs_diameter, normal, regular_simplex

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


@examples
@given(seeds, heights, widths, scales)
def test_centering_twice_is_centering_once(seed, V, d, scale):
    once = center_rows(normal(seed, V, d, scale=scale))
    close(center_rows(once), once, 1e-15 * scale)


@every_dtype
@examples
@given(seed=seeds, V=heights, d=widths, shift=st.sampled_from([0.0, 1.0, 30.0]))
def test_centered_columns_sum_to_zero(seed, V, d, shift, dtype):
    A = (normal(seed, V, d) + shift).to(dtype)
    centered = center_rows(A)
    per_row = torch.finfo(dtype).eps * centered.abs().max() + 4 * torch.finfo(torch.float32).eps * A.abs().max()
    if dtype == torch.float64:
        per_row = 4 * torch.finfo(dtype).eps * A.abs().max()
    assert (centered.double().sum(0).abs() <= V * per_row.double()).all()


@examples
@given(seeds, heights, widths, scales, st.sampled_from([1e-3, 1.0, 1e3]))
def test_centering_ignores_a_common_row_shift(seed, V, d, scale, ratio):
    A = normal(seed, V, d, scale=scale)
    shift = normal(seed + 1, d, scale=scale * ratio)
    close(center_rows(A + shift), center_rows(A), 1e-14 * scale * (1 + ratio))


@examples
@given(seeds, st.integers(2, 40), widths, scales)
def test_centering_keeps_the_row_diameter(seed, V, d, scale):
    A = normal(seed, V, d, scale=scale) + normal(seed + 1, d, scale=scale)
    assert all_pairs_diameter(center_rows(A)) == pytest.approx(all_pairs_diameter(A), rel=1e-13)


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
def test_a_zero_row_stays_zero_among_others(dtype):
    A = torch.tensor([[0.0, 0.0], [3.0, 4.0], [0.0, 0.0], [0.0, -2.0]], dtype=dtype)
    unit = torch.tensor([[0.0, 0.0], [0.6, 0.8], [0.0, 0.0], [0.0, -1.0]], dtype=dtype)
    close(row_norm(A), unit, 2 * torch.finfo(dtype).eps)
    for eps in (0.0, 1e-8, 1.0):
        assert (row_norm(A, eps=eps)[[0, 2]] == 0).all()
    assert torch.equal(row_norm(torch.zeros(3, 2, dtype=dtype)), torch.zeros(3, 2, dtype=dtype))


@examples
@given(seeds, heights, widths, st.integers(-60, 60))
def test_row_norm_ignores_a_positive_factor_on_each_row(seed, V, d, exponent):
    A = normal(seed, V, d).float()
    factor = 2.0 ** torch.randint(-60, 61, (V, 1), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(row_norm(A * factor), row_norm(A))
    assert torch.equal(row_norm(-A * 2.0**exponent), -row_norm(A))


@examples
@given(seeds, heights, widths, st.sampled_from([1e-8, 1e-3, 1.0, 1e3]), st.sampled_from([1e-12, 1e-3, 1.0, 1e5]))
def test_stabilised_row_is_the_row_over_its_norm_plus_eps(seed, V, d, eps, scale):
    A = normal(seed, V, d, scale=scale)
    A[seed % V] = 0
    expected = A / (A.norm(dim=1, keepdim=True) + eps)
    torch.testing.assert_close(row_norm(A, eps=eps), expected, rtol=1e-13, atol=0)


def test_no_entry_beside_a_nan_passes_for_a_coordinate_of_a_unit_row():
    unit = row_norm(torch.tensor([[torch.nan, 5.0], [3.0, 4.0]]))
    assert not unit[0, 1].abs() > 1
    close(unit[1], [0.6, 0.8], 1e-6)


# Projected RowNorm: steepest descent in a ball


@examples
@given(seeds, heights, widths, scales, st.sampled_from([0.0, 1e-8, 0.5]))
def test_projected_row_norm_centers_normalises_and_centers_again(seed, V, d, scale, eps):
    A = normal(seed, V, d, scale=scale)
    C = projector(V) @ A
    normalised = C / (C.norm(dim=1, keepdim=True) + eps) if eps else unit_rows(C)
    close(projected_row_norm(A, eps=eps), projector(V) @ normalised, 1e-12)


@examples
@given(seeds, st.integers(2, 40), widths, scales, st.sampled_from([1e-3, 1.0, 10.0]))
def test_descent_of_the_step_is_half_eta_times_the_sum_of_gradient_row_norms(seed, V, d, scale, eta):
    G = projector(V) @ normal(seed, V, d, scale=scale)
    step = -eta / 2 * projected_row_norm(G)
    row_norms = G.norm(dim=1).sum()
    assert float((G * step).sum()) == pytest.approx(float(-eta / 2 * row_norms), rel=1e-12)


@every_dtype
@examples
@given(seed=seeds, V=st.integers(2, 40), d=widths, eps=st.sampled_from([0.0, 1e-3]))
def test_row_diameter_of_the_step_direction_is_at_most_two(seed, V, d, eps, dtype):
    A = (normal(seed, V, d) + normal(seed + 1, d)).to(dtype)
    direction = projected_row_norm(A, eps=eps)
    rounding = 2 * torch.finfo(dtype).eps * math.sqrt(d)
    assert all_pairs_diameter(direction) <= 2 + 4 * rounding


def test_opposite_rows_step_by_the_full_diameter():
    A = torch.tensor([[3.0, 4.0], [-30.0, -40.0]], dtype=torch.float64)
    direction = projected_row_norm(A)
    close(direction, [[0.6, 0.8], [-0.6, -0.8]], 1e-15)
    assert all_pairs_diameter(direction) == pytest.approx(2.0, rel=1e-15)


@examples
@given(
    seeds,
    st.integers(2, 40),
    widths,
    st.sampled_from([1e-3, 1.0, 10.0]),
    st.sampled_from([1e-3, 0.1, 1.0, 10.0]),
)
def test_no_centered_step_with_rows_in_one_ball_descends_faster(seed, V, d, eta, noise):
    G = projector(V) @ normal(seed, V, d)
    step = -eta / 2 * projected_row_norm(G)
    best = (G * step).sum()
    slack = 1e-13 * eta * G.norm(dim=1).sum()
    for rival in range(10):
        towards = noise * normal(seed + 1 + rival, V, d) - unit_rows(G)  # near the optimum when the noise is small
        reach = torch.rand((V, 1), generator=torch.Generator().manual_seed(seed + rival), dtype=torch.float64)
        for radius in (eta / 2, eta / 2 * reach**0.1):  # on the sphere and inside
            S = projector(V) @ (normal(seed + 99, d, scale=eta) + radius * unit_rows(towards))
            assert (G * S).sum() >= best - slack


@examples
@given(st.integers(1, 12), st.sampled_from([1e-3, 1.0, 10.0]))
def test_regular_simplex_costs_projected_row_norm_exactly_the_factor_of_jung(k, eta):
    G = regular_simplex(k)
    steepest = -eta * G  # feasible, and optimal for the diameter constraint
    assert all_pairs_diameter(steepest) == pytest.approx(eta, rel=1e-12)
    descent = -(G * (-eta / 2 * projected_row_norm(G))).sum()
    ratio = float(descent / -(G * steepest).sum())
    assert ratio == pytest.approx(math.sqrt((k + 1) / (2 * k)), rel=1e-12)


@pytest.mark.parametrize("scale", [2.0**-24, 1.0, 3e4])
def test_projected_row_norm_of_fp16_agrees_with_fp32(scale):
    A = scale * torch.tensor([[1.0, 2.0], [2.0, -2.0], [-2.0, 1.0], [-2.0, 2.0]])
    close(projected_row_norm(A.half()), projected_row_norm(A), 1e-2)


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


# What they refuse


@pytest.mark.parametrize("operation", [row_norm, projected_row_norm], ids=lambda f: f.__name__)
@pytest.mark.parametrize("eps", [-1e-8, math.nan])
def test_a_negative_stabiliser_is_refused(operation, eps):
    with pytest.raises(ValueError, match=r"\Aeps must be zero or positive.*\Z"):
        operation(torch.ones(3, 2), eps=eps)


@examples
@given(seeds, heights, widths, st.sampled_from([0.0, 1.0, 100.0]), scales)
def test_gauge_waste_is_what_centring_takes_away(seed, V, d, offset, scale):
    S = normal(seed, V, d) + offset
    expected = 1 - float(center_rows(S).square().sum() / S.square().sum())
    assert row_statistics((S * scale).float()).gauge_waste == pytest.approx(expected, abs=1e-5)


def test_gauge_waste_of_nothing_is_undefined():
    assert math.isnan(row_statistics(torch.zeros(5, 3)).gauge_waste)
    assert row_statistics(torch.ones(5, 3)).gauge_waste == pytest.approx(1.0)


# The spectral norm

shapes = st.tuples(st.integers(1, 60), st.integers(1, 20))
squares = st.tuples(st.integers(1, 20), st.integers(1, 20))
small_seeds = st.integers(0, 10**6)
any_scale = st.sampled_from([1e-44, 1e-30, 1e-3, 1.0, 1e30])


def cloud(shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


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
@given(shapes, small_seeds, any_scale, st.sampled_from([0.0, 1.0, 100.0]))
def test_the_bounds_hold_the_largest_singular_value_at_any_scale_and_shift(shape, seed, scale, shift):
    check_spectral(((cloud(shape, seed) + shift) * scale).float(), 1e-3)


@examples
@given(
    shapes,
    small_seeds,
    st.integers(0, 4),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
)
def test_the_bounds_hold_in_every_dtype_and_at_every_rank(shape, seed, rank, dtype):
    S = cloud((shape[0], rank), seed) @ cloud((rank, shape[1]), seed + 1)
    before = S.to(dtype)
    S = before.clone()
    check_spectral(S, 1e-3)
    assert torch.equal(S, before)


@pytest.mark.parametrize(
    "values",
    [
        [1.0] * 12,
        [1.0, 1.0 - 1e-12] + [1e-9] * 10,
        [1.0 - 1e-3 * k for k in range(12)],
        [2.0**-k for k in range(12)],
        [1.0] + [0.0] * 11,
        [1.0, 1e-160] + [0.0] * 10,
    ],
    ids=["equal", "tied", "close", "geometric", "rank one", "far apart"],
)
def test_the_bounds_hold_for_spectra_that_mislead_an_iteration(values):
    left = torch.linalg.qr(cloud((40, 12), 1)).Q
    right = torch.linalg.qr(cloud((12, 12), 2)).Q
    check_spectral(left * torch.tensor(values, dtype=torch.float64) @ right.T, 1e-4)


def test_longest_rows_that_are_orthogonal_to_the_leading_direction_do_not_hide_it():
    S = torch.zeros(14, 8)
    S[torch.arange(4), torch.arange(1, 5)] = 1.0
    S[4:, 0] = 0.9999  # ten rows in one direction, each shorter than those four
    check_spectral(S)
    assert spectral_norm(S).lower == pytest.approx(0.9999 * math.sqrt(10), rel=1e-6)


@pytest.mark.parametrize("scale", [1e-320, 1e-200, 1e200, 1.7e308])
def test_fp64_rows_at_the_ends_of_the_range_are_bounded(scale):
    S = torch.eye(3, dtype=torch.float64) * scale
    bounds = spectral_norm(S)
    assert bounds.lower <= scale <= bounds.upper


def test_a_norm_beyond_the_range_of_fp64_has_a_finite_lower_bound():
    bounds = spectral_norm(torch.full((4, 4), 1.7e308, dtype=torch.float64))
    assert 1e308 < bounds.lower < bounds.upper == math.inf


def test_the_spectral_norm_of_nothing_is_zero_and_of_what_is_not_finite_nan():
    assert spectral_norm(torch.zeros(4, 3)) == (0, 0)
    for bad in (math.nan, math.inf):
        assert all(math.isnan(bound) for bound in spectral_norm(torch.tensor([[bad, 0.0], [1.0, 2.0]])))


# The leading direction


def singular(A):
    return torch.linalg.matrix_norm(A.double(), 2)


@examples
@given(squares, st.integers(0, 10**6), st.sampled_from([1e-20, 1.0, 1e15]), st.integers(0, 4))
def test_the_bound_is_never_above_the_norm_whatever_it_starts_from(shape, seed, scale, passes):
    A = (normal(seed, *shape) * scale).float()
    found = leading_direction(A)
    for _ in range(passes):
        found = leading_direction(A, found.right)
    assert float(found.norm) <= float(singular(A)) * (1 + 1e-5)
    assert float(torch.linalg.vector_norm(found.right)) == pytest.approx(1.0, rel=1e-5)


@examples
@given(squares, st.integers(0, 10**6))
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
    assert float(norm) > 0.99 * float(singular(A))


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

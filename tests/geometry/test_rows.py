"""Row operations: centering is the projection P, RowNorm is exact at any scale, and PRN descends steepest."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hilbert_monitor.geometry import center_rows, gauge_waste, projected_row_norm, row_norm
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
def test_input_is_left_unchanged_and_shares_no_memory_with_the_result(operation):
    A = normal(4, 20, 6)
    before = A.clone()
    operation(A).fill_(7.0)
    assert torch.equal(A, before)


@every_operation
def test_no_graph_is_built(operation):
    A = normal(5, 20, 6).requires_grad_()
    result = operation(A)
    assert not result.requires_grad
    assert result.grad_fn is None
    assert torch.equal(result, operation(A.detach()))


@every_operation
@every_dtype
def test_autocast_changes_nothing(operation, dtype):
    A = normal(6, 20, 6).to(dtype)
    plain = operation(A)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = operation(A)
    assert inside.dtype == dtype
    assert torch.equal(inside, plain)


@every_operation
@examples
@given(seed=seeds, V=heights, d=widths, rows_at_a_time=st.integers(1, 8))
def test_little_scratch_memory_gives_the_same_result(operation, seed, V, d, rows_at_a_time):
    A = normal(seed, V, d)
    max_bytes = rows_at_a_time * 4 * d * A.element_size()
    close(operation(A, max_bytes=max_bytes), operation(A), 1e-13)


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "view",
    [
        lambda A: A.T,
        lambda A: A[::3],
        lambda A: A[:, 1::2],
        lambda A: A[2:, :3],
        lambda A: A[:1].expand(5, -1),
        lambda A: A[:, :1].expand(-1, 5),
    ],
    ids=["transposed", "every-third-row", "every-second-column", "corner", "one-row", "one-column"],
)
@every_operation
def test_a_view_gives_what_its_copy_gives(operation, view):
    A = normal(7, 24, 10)
    result = operation(view(A))
    assert result.is_contiguous()
    close(result, operation(view(A).contiguous()), 1e-15)


# What they refuse


@every_operation
@pytest.mark.parametrize(
    ("error", "phrase", "A"),
    [
        (TypeError, "floating-point", torch.ones(3, 2, dtype=torch.long)),
        (TypeError, "floating-point", torch.ones(3, 2, dtype=torch.bool)),
        (TypeError, "floating-point", torch.ones(3, 2, dtype=torch.cfloat)),
        (TypeError, "dense", torch.ones(3, 2).to_sparse()),
        (TypeError, "torch.Tensor", [[1.0, 2.0]]),
        (ValueError, "one row a token", torch.ones(3)),
        (ValueError, "one row a token", torch.ones(3, 2, 1)),
        (ValueError, "at least one row and one column", torch.ones(0, 2)),
        (ValueError, "at least one row and one column", torch.ones(3, 0)),
    ],
)
def test_what_is_not_a_matrix_of_rows_is_refused_in_one_sentence(operation, error, phrase, A):
    with pytest.raises(error, match=rf"\A.*{phrase}.*\Z"):
        operation(A)


@pytest.mark.parametrize("operation", [row_norm, projected_row_norm], ids=lambda f: f.__name__)
@pytest.mark.parametrize("eps", [-1e-8, math.nan])
def test_a_negative_stabiliser_is_refused(operation, eps):
    with pytest.raises(ValueError, match=r"\Aeps must be zero or positive.*\Z"):
        operation(torch.ones(3, 2), eps=eps)


@every_operation
def test_too_little_scratch_memory_for_one_row_is_refused(operation):
    with pytest.raises(ValueError, match=r"\Amax_bytes=.*raise max_bytes\Z"):
        operation(torch.ones(3, 100), max_bytes=8)


def test_refusal_for_memory_names_the_bound_that_was_given():
    with pytest.raises(ValueError, match=r"\Amax_bytes=100 is less than the 128 bytes"):
        row_norm(torch.ones(4, 8), max_bytes=100)


@examples
@given(seeds, heights, widths, st.sampled_from([0.0, 1.0, 100.0]), scales)
def test_gauge_waste_is_what_centring_takes_away(seed, V, d, offset, scale):
    S = normal(seed, V, d) + offset
    expected = 1 - float(center_rows(S).square().sum() / S.square().sum())
    assert gauge_waste((S * scale).float()) == pytest.approx(expected, abs=1e-5)


def test_gauge_waste_of_nothing_is_undefined():
    assert math.isnan(gauge_waste(torch.zeros(5, 3)))
    assert gauge_waste(torch.ones(5, 3)) == pytest.approx(1.0)


def test_autocast_around_gauge_waste_changes_nothing():
    S = normal(0, 40, 12).float()
    alone = gauge_waste(S)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert gauge_waste(S) == alone

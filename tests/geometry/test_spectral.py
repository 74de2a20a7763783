"""The bounds of the spectral norm hold the singular value of an fp64 decomposition, whatever the spectrum."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hilbert_monitor.geometry import spectral_norm
from tests.support.draws import draws
from tests.support.precision import MatmulPrecision

examples = settings(max_examples=draws(40), deadline=None)
shapes = st.tuples(st.integers(1, 60), st.integers(1, 20))
seeds = st.integers(0, 10**6)
scales = st.sampled_from([1e-44, 1e-30, 1e-3, 1.0, 1e30])


def cloud(shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def exact(S):
    """|S|_2 by an fp64 decomposition, of a matrix that a power of two has brought near one."""
    largest = float(S.abs().max())
    if largest == 0:
        return 0.0
    half = 2.0 ** (math.frexp(largest)[1] // 2)
    return float(torch.linalg.matrix_norm(S.double() / half / half, 2)) * half * half


def check(S, tightness=1e-7):
    bounds, value = spectral_norm(S), exact(S)
    assert bounds.lower <= value * (1 + 1e-13)
    assert bounds.upper >= value * (1 - 1e-13)
    assert bounds.upper <= bounds.lower * (1 + tightness) + 1e-300


@examples
@given(shapes, seeds, scales, st.sampled_from([0.0, 1.0, 100.0]))
def test_the_bounds_hold_the_largest_singular_value_at_any_scale_and_shift(shape, seed, scale, shift):
    check(((cloud(shape, seed) + shift) * scale).float(), 1e-3)


@examples
@given(shapes, seeds, st.integers(0, 4), st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]))
def test_the_bounds_hold_in_every_dtype_and_at_every_rank(shape, seed, rank, dtype):
    S = cloud((shape[0], rank), seed) @ cloud((rank, shape[1]), seed + 1)
    before = S.to(dtype)
    S = before.clone()
    check(S, 1e-3)
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
    check(left * torch.tensor(values, dtype=torch.float64) @ right.T, 1e-4)


def test_longest_rows_that_are_orthogonal_to_the_leading_direction_do_not_hide_it():
    S = torch.zeros(14, 8)
    S[torch.arange(4), torch.arange(1, 5)] = 1.0
    S[4:, 0] = 0.9999  # ten rows in one direction, each shorter than those four
    check(S)
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


def test_no_reduced_precision_and_no_random_number_has_a_part_in_the_bounds():
    S = cloud((300, 12), 0).float()
    alone, state = spectral_norm(S), torch.get_rng_state()
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16), MatmulPrecision() as products:
            assert spectral_norm(S) == alone
    finally:
        torch.set_float32_matmul_precision("highest")
    assert {dtype for dtype, *_ in products.seen} <= {torch.float64}
    assert torch.equal(torch.get_rng_state(), state)

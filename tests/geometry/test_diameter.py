"""The exact diameter against all pairs in fp64: clouds of every kind, ties, equal rows, and a device far away."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import normalize

from benchmarks.measure import peak_bytes
from hilbert_monitor.doctor.samples import make_increment
from hilbert_monitor.geometry import diameter, points, row_diameter, row_diameter_bracket
from tests.support import clouds
from tests.support.draws import draws
from tests.support.references import all_pairs_diameter, blocked_diameter, length, regular_simplex

seeds = st.integers(0, 2**31)
shapes = st.tuples(st.integers(2, 60), st.integers(1, 20))
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def assert_exact(S, expected=None, **options):
    """The value is the pair's true length, agrees with all pairs, and lies in both brackets."""
    d = row_diameter(S, **options)
    expected = blocked_diameter(S) if expected is None else expected
    assert d.value == pytest.approx(expected, rel=1e-6, abs=0)
    assert d.value == pytest.approx(length(S.double(), d.pair), rel=1e-12, abs=0)
    assert d.pair[0] < d.pair[1]
    assert d.lower == d.value <= d.upper <= d.value * (1 + 1e-6)
    assert d.nonfinite_rows == 0
    b = row_diameter_bracket(S, **options)
    assert b.lower == pytest.approx(length(S.double(), b.pair), rel=1e-12, abs=0)
    assert b.lower <= d.upper
    assert b.upper >= d.lower
    assert b.upper <= 2.01 * b.lower
    return d


@pytest.mark.parametrize("kind", clouds.KINDS, ids=lambda kind: kind.__name__)
@settings(max_examples=draws(6), deadline=None)
@given(seed=seeds, V=st.integers(600, 2500), d=st.sampled_from([2, 17, 40, 160]), dtype=st.sampled_from(DTYPES))
def test_exact_on_every_kind_of_cloud_in_every_dtype(kind, seed, V, d, dtype):
    assert_exact(kind(V, d, seed).to(dtype))


@settings(max_examples=draws(60), deadline=None)
@given(seed=seeds, shape=shapes, kind=st.sampled_from(clouds.KINDS))
def test_exact_on_few_rows(seed, shape, kind):
    S = kind(*shape, seed)
    expected = all_pairs_diameter(S)
    if expected == 0:
        assert row_diameter(S).value == 0
    else:
        assert_exact(S, expected)


@pytest.mark.few(1)
@pytest.mark.parametrize("V", [1500, 10_000])
@pytest.mark.parametrize("head", ["adamw", "rownorm"])
def test_increments_of_optimizers_need_few_pairs(head, V):
    d = assert_exact(make_increment(head, V, 64, panel=1).S)
    assert d.pairs_computed < 0.02 * V * (V - 1) / 2


def test_a_common_shift_of_a_million_times_the_spread_changes_nothing():
    for kind in (clouds.gaussian, clouds.heavy_tailed, clouds.row_normalised):
        S = kind(3000, 32, 5)
        assert_exact(S / S.std() + 1e6 * clouds.gaussian(1, 32, 0))


def test_shift_in_one_column_does_not_drown_the_others():
    S = 1e-30 * clouds.gaussian(900, 3, 0)
    S[:, 0] = 1.0
    assert_exact(S, all_pairs_diameter(S))


FP32_SCALES = [(torch.float32, scale) for scale in (1e-44, 1e-38, 1e-20, 1e13, 1e20, 3e38)]
FP64_SCALES = [(torch.float64, scale) for scale in (1e-310, 1e-200, 1e200, 1e307)]


@pytest.mark.parametrize(("dtype", "scale"), FP32_SCALES + FP64_SCALES)
def test_exact_from_denormals_to_the_largest_floats(dtype, scale):
    for d in (8, 40):
        S = clouds.heavy_tailed(900, d, 2)
        S = (S / S.abs().max()).double().mul(scale).to(dtype)
        assert row_diameter(S).value == pytest.approx(all_pairs_diameter(S), rel=1e-6, abs=0)
        if dtype == torch.float32:
            assert_exact(S, all_pairs_diameter(S))


def test_the_upper_bound_holds_between_two_denormals():
    S = torch.tensor([[5e-324, 0.0], [0.0, 5e-324]], dtype=torch.float64)
    assert row_diameter(S).upper >= 2 * 5e-324
    assert row_diameter_bracket(S).upper >= 2 * 5e-324


def test_rows_at_both_ends_of_fp32_are_apart_by_more_than_fp32_holds():
    S = torch.full((5, 2), 3e38)
    S[3] = -3e38
    assert 3 in assert_exact(S, 6e38 * math.sqrt(2)).pair


def test_ties_everywhere():
    """Half a million pairs at exactly the diameter, which fp32 cannot tell apart; and regular simplices."""
    assert_exact(clouds.simplex_vertices(1200, 33, 0), 1.0)
    for k in (1, 2, 7, 100):
        assert_exact(regular_simplex(k), 1.0)


@pytest.mark.parametrize("V", [1, 2, 700, 5000])
def test_only_equal_rows_have_diameter_zero(V):
    S = torch.randn(1, 9, generator=torch.Generator().manual_seed(V)).expand(V, 9)
    d, b = row_diameter(S), row_diameter_bracket(S)
    assert d.value == d.upper == b.lower == b.upper == 0
    assert d.pair == b.pair == (0, min(1, V - 1))
    if V > 1:
        S = S.double().clone()
        S[V // 2, 3] += 2.0**-20
        assert row_diameter(S).value > 0


# Non-finite rows are reported, not hidden.


@pytest.mark.parametrize(
    ("bad", "value"),
    [([math.inf], math.inf), ([-math.inf, math.inf], math.inf), ([math.nan, math.inf], math.nan)],
)
@pytest.mark.parametrize(("V", "d"), [(1, 8), (2, 8), (3000, 8), (900, 40)])
def test_non_finite_rows_are_counted_and_named(V, d, bad, value):
    S = clouds.heavy_tailed(V, d, 0)
    where = [0, V // 2, V - 1][: len(bad)]
    S[where, 3] = torch.tensor(bad)
    for result in (row_diameter(S), row_diameter_bracket(S)):
        if V == 1:
            assert not math.isfinite(result.lower)
        else:
            assert result.lower == value or (math.isnan(value) and math.isnan(result.lower))
            assert result.nonfinite_rows == len(set(where))
            assert set(where) & set(result.pair)


# Hard rows


def assert_longest(S, expected):
    """The pair is as long as it is said to be, and no pair is longer than the upper bound."""
    found = row_diameter(S)
    assert found.value == pytest.approx(length(S.double(), found.pair), rel=1e-13, abs=0)
    assert found.value <= expected * (1 + 1e-13)
    assert found.upper >= expected
    assert found.upper <= found.value * (1 + 1e-12)
    assert found.pair[0] < found.pair[1]
    return found


def anisotropic(V, d, seed):
    """Unit rows whose spread falls slowly over the coordinates: almost every row is in some pair of a long bound."""
    return normalize(clouds.gaussian(V, d, seed) * torch.arange(1, d + 1) ** -0.5, dim=1)


@settings(max_examples=draws(10), deadline=None)
@given(seed=seeds, k=st.integers(11, 14), noise=st.sampled_from([0.0, 1e-9, 1e-7, 1e-5]))
def test_ties_of_different_rows_are_settled_in_fp64(seed, k, noise):
    """Vertices of a product of three simplices: most pairs have the largest distance, or one that fp32 takes for it."""
    S = clouds.simplex_product(1200, k, seed) + noise * clouds.gaussian(1200, 3 * k, seed)
    assert_longest(S, all_pairs_diameter(S))


@settings(max_examples=draws(10), deadline=None)
@given(
    seed=seeds,
    kinds=st.integers(2, 700),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    scale=st.sampled_from([1.0, 1e-9]),
)
def test_of_equal_rows_one_is_searched_and_named(seed, kinds, dtype, scale):
    distinct = (scale * clouds.gaussian(kinds, 24, seed)).to(dtype)
    at = torch.randint(kinds, (3000,), generator=torch.Generator().manual_seed(seed))
    S = distinct[at]
    found = assert_longest(S, all_pairs_diameter(distinct[at.unique()]))
    assert found.pairs_computed + found.pairs_screened <= 8 * kinds**2 + 50 * 3000


def test_rows_that_are_equal_but_for_one_are_all_different():
    S = clouds.sphere(40, 16, 0).repeat(100, 1)
    S[1234] *= 1.5
    assert 1234 in assert_longest(S, all_pairs_diameter(S)).pair


@pytest.mark.parametrize(("d", "row"), [(64, 6012), (64, 3500), (128, 3500)])
def test_the_longest_pair_is_found_where_the_guess_does_not_look(d, row):
    """The rows have almost equal norms. At d = 128 they are projected along more directions."""
    S = anisotropic(6013, d, 1)
    i, j = row_diameter(S).pair
    S = S[[k for k in range(6013) if k not in (i, j)]]
    hidden = torch.cat([S[:row], -S[17:18], S[row:]])
    assert row_diameter(hidden).value == pytest.approx(blocked_diameter(hidden), rel=1e-6)
    assert row_diameter(hidden, max_bytes=2**22).value == row_diameter(hidden).value


@pytest.mark.few(2)
@pytest.mark.parametrize("mebibytes", [4, 64])
@pytest.mark.parametrize("make", [anisotropic, clouds.repeated, lambda V, d, seed: clouds.simplex_product(V, 32, seed)])
def test_hard_cases_stay_within_the_memory_bound(make, mebibytes):
    S = make(8000, 96, 0)
    assert peak_bytes(lambda: row_diameter(S, max_bytes=mebibytes * 2**20)) <= mebibytes * 2**20


def test_directions_that_are_not_orthonormal_weaken_the_bounds_and_change_no_answer(monkeypatch):
    """The search measures how far Q'Q is from the identity; these columns are far from orthogonal."""
    real = diameter.leading_directions

    def skewed(sample, k):
        Q = real(sample, k)
        return Q + skew * Q[:, :1]

    monkeypatch.setattr(diameter, "leading_directions", skewed)
    for skew in (1e-3, 0.05, 0.7):  # noqa: B007
        for kind in (clouds.heavy_tailed, clouds.row_normalised, clouds.low_rank):
            S = kind(3000, 40, 4)
            assert_longest(S, all_pairs_diameter(S))


# The code paths of a device that is far away run here on the CPU; tests/emulated counts its kernels and waits.


@pytest.fixture
def far_away(monkeypatch):
    for module in (points, diameter):
        monkeypatch.setattr(module, "on_host", lambda x: False)


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", [*clouds.KINDS, clouds.simplex_vertices], ids=lambda kind: kind.__name__)
def test_a_device_finds_what_the_host_finds(far_away, kind):
    for V in (400, 2500):
        S = kind(V, 40, 5)
        assert row_diameter(S).value == pytest.approx(blocked_diameter(S), rel=1e-6)
        assert row_diameter(S, max_bytes=2**21).value == row_diameter(S).value

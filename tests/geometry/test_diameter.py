import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.measure import peak_bytes
from hilbert_monitor.doctor.samples import make_increment
from hilbert_monitor.geometry import center_rows, row_diameter, row_diameter_bracket
from tests.support import clouds
from tests.support.draws import draws
from tests.support.precision import MatmulPrecision
from tests.support.references import all_pairs_diameter, blocked_diameter, length, regular_simplex
from tests.support.warm import Program

seeds = st.integers(0, 2**31)
shapes = st.tuples(st.integers(2, 60), st.integers(1, 20))


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
@given(seed=seeds, V=st.integers(600, 2500), d=st.sampled_from([2, 17, 40, 160]))
def test_exact_on_every_kind_of_cloud(kind, seed, V, d):
    assert_exact(kind(V, d, seed))


@settings(max_examples=draws(60), deadline=None)
@given(seed=seeds, shape=shapes, kind=st.sampled_from(clouds.KINDS))
def test_exact_on_few_rows(seed, shape, kind):
    S = kind(*shape, seed)
    expected = all_pairs_diameter(S)
    if expected == 0:
        assert row_diameter(S).value == 0
    else:
        assert_exact(S, expected)


@pytest.mark.few(6)
@pytest.mark.parametrize("kind", clouds.KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_exact_in_every_dtype(kind, dtype):
    assert_exact(kind(1500, 48, 7).to(dtype))


@pytest.mark.sweep
def test_exact_on_12_000_points_of_a_sphere_within_its_memory():
    S = clouds.sphere(12_000, 24, 3)
    expected = blocked_diameter(S)
    peak = peak_bytes(lambda: assert_exact(S, expected, max_bytes=12 * 2**20))
    assert peak <= 12 * 2**20 + S.numel() * 8 / 100  # the check itself looks at a few rows


@pytest.mark.few(1)
@pytest.mark.parametrize("V", [1500, 10_000])
@pytest.mark.parametrize("head", ["adamw", "rownorm"])
def test_increments_of_optimizers_need_few_pairs(head, V):
    d = assert_exact(make_increment(head, V, 64, panel=1).S)
    assert d.pairs_computed < 0.02 * V * (V - 1) / 2


def test_a_common_shift_of_a_million_times_the_spread_changes_nothing():
    for kind in (clouds.gaussian, clouds.heavy_tailed, clouds.row_normalised):
        S = kind(3000, 32, 5)
        S = S / S.std()
        assert_exact(S + 1e6 * torch.randn(32, generator=torch.Generator().manual_seed(0)))


def test_shift_in_one_column_does_not_drown_the_others():
    S = 1e-30 * clouds.gaussian(900, 3, 0)
    S[:, 0] = 1.0
    assert_exact(S, all_pairs_diameter(S))


@pytest.mark.parametrize("scale", [1e-44, 1e-38, 1e-20, 1e-13, 1e13, 1e20, 1e37])
def test_exact_from_denormals_to_the_largest_floats(scale):
    S = clouds.heavy_tailed(900, 8, 2)
    S = (S / S.abs().max()).double().mul(scale).float()
    assert_exact(S, all_pairs_diameter(S))


@pytest.mark.parametrize("scale", [1e-310, 1e-200, 1e200, 1e307])
def test_exact_over_the_range_of_fp64(scale):
    S = clouds.gaussian(700, 8, 2).double()
    S = S / S.abs().max() * scale
    d = row_diameter(S)
    assert d.value == pytest.approx(all_pairs_diameter(S), rel=1e-6, abs=0)


def test_the_upper_bound_holds_between_two_denormals():
    S = torch.tensor([[5e-324, 0.0], [0.0, 5e-324]], dtype=torch.float64)
    assert row_diameter(S).upper >= 2 * 5e-324
    assert row_diameter_bracket(S).upper >= 2 * 5e-324


def test_rows_at_both_ends_of_fp32_are_apart_by_more_than_fp32_holds():
    S = torch.full((5, 2), 3e38)
    S[3] = -3e38
    d = row_diameter(S)
    assert d.value == pytest.approx(6e38 * math.sqrt(2))
    assert 3 in d.pair


@pytest.mark.parametrize("k", [1, 2, 7, 100])
def test_regular_simplex(k):
    assert_exact(regular_simplex(k), 1.0)


def test_ties_everywhere():
    """Half a million pairs at exactly the diameter, which fp32 cannot tell apart."""
    assert_exact(clouds.simplex_vertices(1200, 33, 0), 1.0)


@pytest.mark.parametrize("V", [1, 2, 3, 700, 5000])
def test_equal_rows_have_diameter_zero(V):
    S = torch.randn(1, 9, generator=torch.Generator().manual_seed(V)).expand(V, 9)
    d, b = row_diameter(S), row_diameter_bracket(S)
    assert d.value == d.upper == b.lower == b.upper == 0
    assert d.pair == b.pair == (0, min(1, V - 1))


def test_two_rows_and_one_column():
    assert_exact(torch.tensor([[1.0, 2.0], [4.0, 6.0]]), 5.0)
    assert_exact(torch.linspace(-1, 3, 5000)[torch.randperm(5000)][:, None], 4.0)


def test_views_give_what_their_copies_give():
    S = clouds.heavy_tailed(1200, 64, 0)
    for view in (S.T.contiguous().T, S[::2], S[:, ::3], S[100:900, 5:50], S.flip(0)[1:]):
        assert row_diameter(view) == row_diameter(view.clone(memory_format=torch.contiguous_format))


# D is a seminorm whose kernel is the common-row matrices.


@settings(max_examples=draws(40), deadline=None)
@given(seed=seeds, shape=shapes, factor=st.floats(-100, 100).filter(lambda x: abs(x) > 1e-3))
def test_diameter_scales_with_its_argument(seed, shape, factor):
    S = clouds.gaussian(*shape, seed).double()
    assert row_diameter(factor * S).value == pytest.approx(abs(factor) * row_diameter(S).value, rel=1e-12)


@settings(max_examples=draws(40), deadline=None)
@given(seed=seeds, shape=shapes)
def test_diameter_obeys_the_triangle_inequality(seed, shape):
    A, B = clouds.heavy_tailed(*shape, seed).double(), clouds.sphere(*shape, seed + 9).double()
    assert row_diameter(A + B).value <= (row_diameter(A).value + row_diameter(B).value) * (1 + 1e-12)


@settings(max_examples=draws(40), deadline=None)
@given(seed=seeds, shape=shapes)
def test_diameter_ignores_common_row_shift_permutation_and_rotation(seed, shape):
    S = clouds.gaussian(*shape, seed).double()
    V, d = shape
    value = row_diameter(S).value
    rotation, _ = torch.linalg.qr(clouds.gaussian(d, d, seed + 1).double())
    order = torch.randperm(V, generator=torch.Generator().manual_seed(seed))
    for same in (S + clouds.gaussian(1, d, seed + 2), S[order], S @ rotation, center_rows(S)):
        assert row_diameter(same).value == pytest.approx(value, rel=1e-9)


@settings(max_examples=draws(40), deadline=None)
@given(seed=seeds, shape=shapes)
def test_only_common_rows_have_diameter_zero(seed, shape):
    V, d = shape
    S = clouds.gaussian(1, d, seed).double().repeat(V, 1)
    assert row_diameter(S).value == 0
    S[seed % V, seed % d] += 2.0**-20
    assert row_diameter(S).value > 0


def test_the_pair_moves_with_its_rows():
    S = clouds.row_normalised(2000, 32, 4)
    order = torch.randperm(2000, generator=torch.Generator().manual_seed(1))
    i, j = row_diameter(S[order]).pair
    assert tuple(sorted(order[[i, j]].tolist())) == row_diameter(S).pair


# Non-finite rows are reported, not hidden.


@pytest.mark.parametrize(
    ("bad", "value"),
    [([math.inf], math.inf), ([-math.inf, math.inf], math.inf), ([math.nan, math.inf], math.nan)],
)
@pytest.mark.parametrize("V", [1, 2, 3000])
def test_non_finite_rows_are_counted_and_named(V, bad, value):
    S = clouds.gaussian(V, 8, 0)
    where = [0, V // 2, V - 1][: len(bad)]
    for row, x in zip(where, bad, strict=False):
        S[row, 3] = x
    for result in (row_diameter(S), row_diameter_bracket(S)):
        if V == 1:
            assert not math.isfinite(result.lower)
        else:
            assert result.lower == value or (math.isnan(value) and math.isnan(result.lower))
            assert result.nonfinite_rows == len(set(where))
            assert set(where) & set(result.pair)


@pytest.mark.parametrize("function", [row_diameter, row_diameter_bracket])
@pytest.mark.parametrize(
    ("S", "error", "words"),
    [
        (torch.zeros(0, 4), ValueError, "at least one row"),
        (torch.zeros(4, 0), ValueError, "at least one row"),
        (torch.zeros(4), ValueError, r"\(V, d\) matrix"),
        (torch.zeros(2, 3, 4), ValueError, r"\(V, d\) matrix"),
        (torch.zeros(3, 4, dtype=torch.int64), TypeError, "floating-point"),
        (torch.zeros(3, 4, dtype=torch.complex64), TypeError, "real"),
        (torch.zeros(3, 4).to(torch.float8_e5m2), TypeError, "float8_e5m2"),
        (torch.zeros(3, 4).to_sparse(), TypeError, "dense"),
        ([[1.0, 2.0]], TypeError, "torch.Tensor"),
    ],
    ids=["no rows", "no columns", "vector", "three dimensions", "integers", "complex", "float8", "sparse", "list"],
)
def test_bad_input_gets_one_sentence(function, S, error, words):
    with pytest.raises(error, match=words) as caught:
        function(S)
    assert "\n" not in str(caught.value)


# A measure that never touches what it measures.


@pytest.mark.parametrize("function", [row_diameter, row_diameter_bracket])
def test_leaves_input_graph_random_state_and_settings_alone(function):
    S = clouds.heavy_tailed(1500, 32, 0).requires_grad_()
    before, state = S.detach().clone(), torch.get_rng_state()
    torch.set_float32_matmul_precision("medium")
    try:
        function(S)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert torch.equal(S, before)
    assert torch.equal(torch.get_rng_state(), state)
    assert S.grad is None
    assert torch.is_grad_enabled()


def test_reduced_precision_around_the_call_does_not_leak_in():
    S = clouds.row_normalised(3000, 64, 0)
    expected, bracket = row_diameter(S), row_diameter_bracket(S)
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16), MatmulPrecision() as products:
            assert row_diameter(S) == expected
            assert row_diameter_bracket(S) == bracket
    finally:
        torch.set_float32_matmul_precision("highest")
    assert products.seen
    assert {setting for _, *settings in products.seen for setting in settings} == {"ieee"}
    assert {dtype for dtype, *_ in products.seen} <= {torch.float32, torch.float64}


@pytest.mark.few(2)
@pytest.mark.parametrize("function", [row_diameter, row_diameter_bracket])
@pytest.mark.parametrize("kind", [clouds.sphere, clouds.heavy_tailed, clouds.row_normalised])
@pytest.mark.parametrize("mebibytes", [3, 64])
def test_scratch_memory_stays_within_its_bound(function, kind, mebibytes):
    S = kind(12_000, 96, 0)
    assert peak_bytes(lambda: function(S, max_bytes=mebibytes * 2**20)) <= mebibytes * 2**20


def test_memory_bound_too_small_for_the_rows_is_refused():
    with pytest.raises(ValueError, match="max_bytes"):
        row_diameter(torch.randn(100_000, 4), max_bytes=2**20)


def test_memory_bound_changes_no_result():
    S = clouds.row_normalised(9000, 48, 2)
    assert row_diameter(S, max_bytes=2**21).value == row_diameter(S).value


def test_a_matmul_setting_that_is_inherited_stays_inherited():
    code = """if True:
        import torch
        from hilbert_monitor import row_diameter
        torch.backends.fp32_precision = "tf32"
        row_diameter(torch.randn(600, 8))
        print(torch.backends.cuda.matmul.fp32_precision)
        torch.backends.fp32_precision = "ieee"
        print(torch.backends.cuda.matmul.fp32_precision)
    """
    program = Program("-c", code)
    assert program.wait() == 0, program.output
    assert program.output.split() == ["tf32", "ieee"]

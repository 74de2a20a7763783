import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.measure import peak_bytes
from hilbert_monitor.doctor.samples import make_increment
from hilbert_monitor.geometry import hilbert_distance, hilbert_perturbation, row_diameter
from tests.support import clouds
from tests.support.draws import draws
from tests.support.precision import MatmulPrecision
from tests.support.references import deltas

seeds = st.integers(0, 2**31)


def panel(N, d, seed):
    """Hidden states after an RMS norm: one length, a common lean, and a decaying spectrum."""
    spectrum = torch.arange(1, d + 1) ** -1.0
    H = clouds.gaussian(N, d, seed) * spectrum + 0.3 * clouds.gaussian(1, d, seed + 1) * spectrum
    return H / H.square().mean(1, keepdim=True).sqrt()


def assert_exact(S, H, rel=2e-6, **options):
    """Every delta, the statistics, and the pair agree with the full product in fp64."""
    p = hilbert_perturbation(S, H, **options)
    expected = deltas(S, H)
    scale = float((S.double() - S.double().mean(0)).norm(dim=1).max() * H.double().norm(dim=1).max())
    torch.testing.assert_close(p.delta.double(), expected, rtol=rel, atol=rel * scale)
    assert p.rms == pytest.approx(float(expected.square().mean().sqrt()), rel=10 * rel)
    assert p.max == pytest.approx(float(expected.max()), rel=10 * rel)
    up, down = p.pair
    change = float((S[up].double() - S[down].double()) @ H[p.position].double())
    assert change == pytest.approx(p.max, rel=10 * rel)
    assert p.nonfinite_rows == p.nonfinite_positions == 0
    return p


@settings(max_examples=draws(60), deadline=None)
@given(
    seed=seeds,
    V=st.integers(1, 80),
    N=st.integers(1, 40),
    d=st.integers(1, 20),
    kind=st.sampled_from([clouds.gaussian, clouds.sphere, clouds.heavy_tailed, clouds.low_rank]),
)
def test_every_delta_is_the_variation_of_the_logit_change(seed, V, N, d, kind):
    assert_exact(kind(V, d, seed), panel(N, d, seed + 5))


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", clouds.KINDS, ids=lambda kind: kind.__name__)
def test_rows_that_are_dropped_would_have_changed_nothing(kind):
    """Large enough to be pruned: each kind of cloud against the full product."""
    p = assert_exact(kind(17_000, 64, 3), panel(540, 64, 4))
    assert p.products <= 1.2 * 17_000 * 540


@pytest.mark.few(1)
@pytest.mark.parametrize("sign", [1, -1])
def test_rows_that_matter_to_a_single_position_are_not_dropped_with_its_neighbours(sign):
    H = panel(600, 128, 0)
    S = 0.01 * clouds.sphere(17_000, 128, 1)
    S[2000:2600] += sign * (H - H.mean(0)) / H.norm(dim=1, keepdim=True)
    p = assert_exact(S, H)
    assert p.products < 0.5 * 17_000 * 600


@pytest.mark.sweep
@pytest.mark.parametrize("head", ["adamw", "rownorm"])
def test_increments_of_optimizers_need_few_products(head):
    increment = make_increment(head, 20_000, 128, panel=2048)
    p = assert_exact(increment.S, increment.H)
    assert p.products < 0.25 * 20_000 * 2048


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_every_dtype(dtype):
    S, H = clouds.heavy_tailed(900, 32, 0).to(dtype), panel(300, 32, 1).to(dtype)
    p = assert_exact(S, H, rel=1e-12 if dtype == torch.float64 else 2e-6)
    assert p.delta.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_update_and_states_may_differ_in_dtype():
    assert_exact(clouds.heavy_tailed(900, 32, 0), panel(300, 32, 1).bfloat16())
    assert_exact(clouds.heavy_tailed(900, 32, 0).bfloat16(), panel(300, 32, 1).double())
    assert_exact(clouds.heavy_tailed(17_000, 64, 0), panel(540, 64, 1).bfloat16())


@settings(max_examples=draws(40), deadline=None)
@given(seed=seeds, V=st.integers(2, 40), d=st.integers(1, 12))
def test_delta_is_the_hilbert_distance_of_the_two_predictions(seed, V, d):
    U, S = clouds.gaussian(V, d, seed).double(), clouds.heavy_tailed(V, d, seed + 1).double()
    H = clouds.gaussian(9, d, seed + 2).double()
    distance = hilbert_distance((H @ (U + S).T).softmax(-1), (H @ U.T).softmax(-1))
    torch.testing.assert_close(hilbert_perturbation(S, H).delta, distance, rtol=1e-6, atol=1e-6)


@settings(max_examples=draws(40), deadline=None)
@given(seed=seeds, V=st.integers(2, 40), d=st.integers(1, 12), radius=st.floats(1e-3, 1e3))
def test_supremum_over_a_ball_is_radius_times_diameter_and_is_attained(seed, V, d, radius):
    S = clouds.heavy_tailed(V, d, seed).double()
    D = row_diameter(S)
    i, j = D.pair
    inside = radius * torch.nn.functional.normalize(clouds.gaussian(64, d, seed + 1).double(), dim=1)
    along = radius * (S[i] - S[j]) / D.value
    p = hilbert_perturbation(S, torch.cat([inside, along[None]]))
    assert p.delta.max() <= radius * D.value * (1 + 1e-9)
    assert float(p.delta[-1]) == pytest.approx(radius * D.value, rel=1e-9)


def test_a_common_shift_changes_nothing():
    S, H = clouds.row_normalised(17_000, 64, 0), panel(540, 64, 1)
    shift = 30 * clouds.gaussian(1, 64, 2)
    expected = hilbert_perturbation(S, H)
    shifted = hilbert_perturbation(S + shift, H)
    torch.testing.assert_close(shifted.delta, expected.delta, rtol=1e-4, atol=0)


def test_equal_rows_move_nothing():
    p = hilbert_perturbation(torch.randn(1, 8).expand(500, 8), torch.randn(20, 8))
    assert p.rms == p.max == 0


@pytest.mark.parametrize("scale", [1e-42, 1e-30, 1e30])
def test_tiny_and_huge_updates(scale):
    S = clouds.heavy_tailed(800, 16, 0).double().mul(scale).float()
    assert_exact(S, panel(50, 16, 1), rel=1e-6)


@pytest.fixture(scope="module")
def pruned():
    """An increment and a panel that are large enough to be pruned, and their deltas."""
    S, H = make_increment("adamw", 17_000, 64, panel=600).S, panel(600, 64, 1)
    return S, H, deltas(S, H)


@pytest.mark.few(1)
@pytest.mark.parametrize("scale", [1e-40, 1e-25, 1e17, 1e30])
def test_tiny_and_huge_states(pruned, scale):
    S, H, expected = pruned
    p = hilbert_perturbation(S, H.double().mul(scale).float())
    torch.testing.assert_close(p.delta.double(), expected * scale, rtol=1e-2 if scale == 1e-40 else 1e-5, atol=0)


def test_one_exploding_position_spoils_no_other(pruned):
    S, H, expected = pruned
    factor = torch.ones(600, dtype=torch.float64)
    factor[7] = 2.0**60
    p = hilbert_perturbation(S, H * factor[:, None].float())
    torch.testing.assert_close(p.delta.double(), expected * factor, rtol=1e-5, atol=0)


def test_the_pair_is_right_under_a_large_common_shift():
    S = clouds.gaussian(2000, 64, 0) + 1e6 * clouds.gaussian(1, 64, 1)
    assert_exact(S, clouds.gaussian(8, 64, 2))


@pytest.mark.parametrize("scale", [1e-50, 1e50])
def test_states_in_fp64_keep_their_range(scale):
    S, H = clouds.gaussian(300, 8, 0), panel(20, 8, 1).double()
    p = hilbert_perturbation(S, H * scale)
    torch.testing.assert_close(p.delta, deltas(S, H) * scale, rtol=1e-12, atol=0)


def test_views_give_what_their_copies_give():
    S, H = clouds.heavy_tailed(600, 64, 0), panel(200, 64, 1)
    for s, h in ((S.T.contiguous().T, H), (S[::2], H[1::3]), (S[:, ::2], H[:, ::2])):
        copied = hilbert_perturbation(s.clone(memory_format=torch.contiguous_format), h.contiguous())
        torch.testing.assert_close(hilbert_perturbation(s, h).delta, copied.delta, rtol=1e-5, atol=0)


def test_non_finite_update_is_said():
    S, H = clouds.gaussian(300, 8, 0), panel(40, 8, 1)
    S[7, 2] = math.inf
    p = hilbert_perturbation(S, H)
    assert p.max == p.rms == math.inf
    assert (p.nonfinite_rows, p.pair) == (1, (7, 7))
    S[9] = math.nan
    p = hilbert_perturbation(S, H)
    assert math.isnan(p.max)
    assert math.isnan(p.rms)
    assert p.nonfinite_rows == 2


def test_non_finite_position_spoils_no_other():
    S, H = clouds.gaussian(300, 8, 0), panel(40, 8, 1)
    good = hilbert_perturbation(S, H)
    H[11, 3] = -math.inf
    p = hilbert_perturbation(S, H)
    assert math.isnan(p.delta[11])
    assert p.nonfinite_positions == 1
    rest = torch.arange(40) != 11
    assert torch.equal(p.delta[rest], good.delta[rest])
    assert not torch.isfinite(H[11]).all(), "the caller's states stay as they were"


@pytest.mark.parametrize(
    ("S", "H", "error", "words"),
    [
        (torch.zeros(4, 3), torch.zeros(5, 2), ValueError, "one width"),
        (torch.zeros(4, 3), torch.zeros(0, 3), ValueError, "H must have at least one row"),
        (torch.zeros(4, 3), torch.zeros(2, 5, 3), ValueError, r"H must be a \(V, d\) matrix"),
        (
            torch.zeros(4, 3, dtype=torch.int32),
            torch.zeros(5, 3),
            TypeError,
            "S must be a real floating-point",
        ),
        (torch.zeros(4, 3), torch.zeros(5, 3, device="meta"), ValueError, "one device"),
    ],
    ids=["widths", "empty panel", "three dimensions", "integers", "devices"],
)
def test_bad_input_gets_one_sentence(S, H, error, words):
    with pytest.raises(error, match=words) as caught:
        hilbert_perturbation(S, H)
    assert "\n" not in str(caught.value)


@pytest.mark.sweep
@pytest.mark.parametrize("mebibytes", [12, 40])
def test_scratch_memory_stays_within_its_bound(mebibytes):
    S, H = clouds.row_normalised(20_000, 128, 0), panel(2048, 128, 1)
    assert 20_000 * 2048 * 4 > 150 * 2**20, "the full product would show"
    assert peak_bytes(lambda: hilbert_perturbation(S, H, max_bytes=mebibytes * 2**20)) <= mebibytes * 2**20


def test_leaves_everything_alone_and_lets_no_reduced_precision_in():
    S, H = clouds.row_normalised(17_000, 64, 0).requires_grad_(), panel(540, 64, 1)
    expected, state, before = hilbert_perturbation(S, H), torch.get_rng_state(), H.clone()
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16), MatmulPrecision() as products:
            p = hilbert_perturbation(S, H)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert torch.equal(p.delta, expected.delta)
    assert not p.delta.requires_grad
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(H, before)
    assert {setting for _, *settings in products.seen for setting in settings} == {"ieee"}
    assert {dtype for dtype, *_ in products.seen} == {torch.float32}

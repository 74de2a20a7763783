"""The perturbation of a panel and its log-partition, against whole products in fp64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hilbert_monitor.doctor.samples import make_increment
from hilbert_monitor.geometry import hilbert_distance, hilbert_perturbation, log_partition, row_diameter, row_statistics
from hilbert_monitor.geometry.logits import NO_TARGET
from tests.support import clouds
from tests.support.draws import draws
from tests.support.ranks import in_ranks
from tests.support.references import bf16_losses, deltas, logit_numbers, normal
from tests.support.shards import sharded

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
def test_every_dtype_of_the_update_and_of_the_states(dtype):
    S, H = clouds.heavy_tailed(900, 32, 0), panel(300, 32, 1)
    for update, states in ((S.to(dtype), H.to(dtype)), (S, H.to(dtype)), (S.to(dtype), H)):
        p = assert_exact(update, states, rel=1e-12 if update.dtype == states.dtype == torch.float64 else 2e-6)
        assert p.delta.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


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


def test_equal_rows_move_nothing():
    p = hilbert_perturbation(torch.randn(1, 8).expand(500, 8), torch.randn(20, 8))
    assert p.rms == p.max == 0


@pytest.mark.parametrize("scale", [1e-42, 1e-30, 1e30])
def test_tiny_and_huge_updates(scale):
    S = clouds.heavy_tailed(800, 16, 0).double().mul(scale).float()
    assert_exact(S, panel(50, 16, 1), rel=1e-6)


@pytest.mark.few(1)
@pytest.mark.parametrize("scale", [1e-40, 1e-25, 1e17, 1e30])
def test_tiny_and_huge_states_and_one_that_explodes_spoils_no_other(scale):
    S, H = make_increment("adamw", 17_000, 64, panel=600).S, panel(600, 64, 1)
    factor = torch.full((600, 1), scale, dtype=torch.float64)
    factor[7] *= 2.0**20
    p = hilbert_perturbation(S, (H * factor).float())
    torch.testing.assert_close(
        p.delta.double(), deltas(S, H) * factor[:, 0], rtol=1e-2 if scale == 1e-40 else 1e-5, atol=0
    )
    few = hilbert_perturbation(S[:300], (H * factor**2).double())
    torch.testing.assert_close(few.delta, deltas(S[:300], H) * factor[:, 0] ** 2, rtol=1e-12, atol=0)


def test_the_pair_is_right_under_a_large_common_shift():
    S = clouds.gaussian(2000, 64, 0) + 1e6 * clouds.gaussian(1, 64, 1)
    assert_exact(S, clouds.gaussian(8, 64, 2))


def test_non_finite_update_is_said():
    S, H = clouds.gaussian(300, 8, 0), panel(40, 8, 1)
    S[7, 2] = math.inf
    p = hilbert_perturbation(S, H)
    assert p.max == p.rms == math.inf
    assert (p.nonfinite_rows, p.pair) == (1, (7, 7))
    S[9] = math.nan
    p = hilbert_perturbation(S, H)
    assert math.isnan(p.max + p.rms)
    assert p.nonfinite_rows == 2


def test_non_finite_position_spoils_no_other():
    S, H = clouds.gaussian(300, 8, 0), panel(40, 8, 1)
    good = hilbert_perturbation(S, H)
    H[11, 3] = -math.inf
    p = hilbert_perturbation(S, H)
    assert p.nonfinite_positions == 1
    assert math.isnan(p.delta[11])
    rest = torch.arange(40) != 11
    assert torch.equal(p.delta[rest], good.delta[rest])
    assert not torch.isfinite(H[11]).all(), "the caller's states stay as they were"


def test_states_that_do_not_fit_are_refused():
    for H, words in (
        (torch.zeros(5, 2), "one width"),
        (torch.zeros(0, 3), "H must have at least one row"),
        (torch.zeros(2, 5, 3), r"H must be a \(V, d\) matrix"),
        (torch.zeros(5, 3, device="meta"), "one device"),
    ):
        with pytest.raises(ValueError, match=rf"\A.*{words}.*\Z"):
            hilbert_perturbation(torch.zeros(4, 3), H)


# The log-partition

examples = settings(max_examples=draws(30), deadline=None)
sizes = st.tuples(st.integers(1, 1200), st.integers(1, 12), st.integers(1, 9))


def close(found, expected, scale):
    assert found.dtype == torch.float64
    assert float((found - expected).abs().max()) <= 3e-6 * scale


@examples
@given(sizes, seeds, st.sampled_from([1e-30, 1e-3, 1.0, 30.0]), st.sampled_from([None, 5.0]))
def test_numbers_are_those_of_the_whole_product(size, seed, scale, softcap):
    V, N, d = size
    U, H = normal(seed, V, d).float() * scale, normal(seed + 1, N, d).float()
    found = log_partition(U, H, softcap=softcap)
    mean, log_z, largest = logit_numbers(U, H, softcap)
    size = 1 + float(largest.max())
    close(found.mean, mean, size)
    close(found.log_z, log_z, size)
    close(found.largest, largest, size)
    close(found.centred, log_z - mean, size)
    assert bool((found.centred >= math.log(V) - 1e-5 * size).all())  # by convexity
    assert bool(found.target.isnan().all())


@examples
@given(sizes, seeds)
def test_targets_give_the_cross_entropy_and_a_permutation_changes_nothing(size, seed):
    V, N, d = size
    U, H = normal(seed, V, d), normal(seed + 1, N, d)
    draw = torch.Generator().manual_seed(seed)
    targets, order = torch.randint(V, (N,), generator=draw), torch.randperm(V, generator=draw)
    expected = torch.nn.functional.cross_entropy(H @ U.T, targets, reduction="none")
    assert torch.allclose(log_partition(U, H, targets).loss, expected, rtol=0, atol=1e-11)
    assert torch.allclose(log_partition(U[order], H, order.argsort()[targets]).loss, expected, rtol=0, atol=1e-11)
    targets[0] = NO_TARGET
    loss = log_partition(U, H, targets).loss
    assert bool(loss[0].isnan())
    assert torch.allclose(loss[1:], expected[1:], rtol=0, atol=1e-11)


@examples
@given(seeds, st.sampled_from([0.1, 1.0, 5.0]))
def test_losses_round_to_bf16_are_those_of_rounded_operands_and_logits(seed, scale):
    U, H = (normal(seed, 700, 16) * scale).float(), normal(seed + 1, 50, 16).float()
    targets = torch.randint(700, (50,), generator=torch.Generator().manual_seed(seed))
    found = log_partition(U, H, targets, round_to=torch.bfloat16).loss
    # sums in another order may round a logit the other way: by 2^-8 of its size, and rarely
    assert float((found - bf16_losses(U, H, targets)).abs().median()) <= 1e-4
    error = found - log_partition(U, H, targets).loss
    assert 0 < float(error.square().mean().sqrt()) < 0.1 * scale


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_or_a_state_that_is_not_finite_gives_nan_where_it_acts(bad):
    U, H = normal(0, 30, 3).float(), normal(1, 4, 3).float()
    H[2, 1] = bad
    found = log_partition(U, H, torch.zeros(4, dtype=torch.long))
    for numbers in (found.mean, found.log_z, found.largest, found.loss):
        assert numbers.isnan().tolist() == [False, False, True, False]
    U[7, 0] = bad
    assert bool(log_partition(U, H).log_z.isnan().all())


def test_targets_that_do_not_fit_are_refused():
    for targets, says in (([1], "one per state"), ([1.0, 2.0], "tokens"), ([0, 9], "below 9")):
        with pytest.raises(ValueError, match=says):
            log_partition(normal(0, 9, 3), normal(1, 2, 3), torch.tensor(targets))


# Rows on several ranks


def _measured_by_parts(rank, world):
    results = []
    for V, d in ((1001, 8), (3, 2), (1, 3)):
        U, H = normal(V, V, d).float(), normal(d, 20, d).float()
        targets = torch.arange(20) % (V + 1) - 1
        for entry in (0.5, math.nan):
            U[V // 2, 0] = entry
            for round_to in (None, torch.bfloat16):
                found = [log_partition(A, H, targets, round_to=round_to) for A in (sharded(U), U)]
                results.append([torch.cat([x.mean, x.log_z, x.largest, x.target]) for x in found])
            results.append([torch.tensor(row_statistics(A), dtype=torch.float64) for A in (sharded(U), U)])
    return results


def test_ranks_that_share_the_rows_find_what_one_finds(tmp_path):
    for (shared, whole), (other, _) in zip(*in_ranks(_measured_by_parts, tmp_path), strict=True):
        assert torch.allclose(shared, whole, rtol=1e-6, atol=1e-5, equal_nan=True)
        assert torch.equal(shared.nan_to_num(), other.nan_to_num())

"""Mean logit and log Z are those of the whole product in fp64, whatever the chunks, the scale and the ranks."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hilbert_monitor.geometry import log_partition, mean_row
from hilbert_monitor.geometry.log_partition import NO_TARGET
from tests.support.draws import draws
from tests.support.ranks import in_ranks
from tests.support.references import bf16_losses, logit_numbers, normal
from tests.support.shards import sharded

examples = settings(max_examples=draws(30), deadline=None)
sizes = st.tuples(st.integers(1, 1200), st.integers(1, 12), st.integers(1, 9))
seeds = st.integers(0, 10**6)


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
@given(sizes, seeds, st.sampled_from([0.0, 3.0, -100.0]))
def test_a_common_shift_of_the_rows_moves_the_mean_logit_alone(size, seed, shift):
    V, N, d = size
    U, H = normal(seed, V, d), normal(seed + 1, N, d)
    targets = torch.randint(V, (N,), generator=torch.Generator().manual_seed(seed))
    before, after = (log_partition(A, H, targets) for A in (U, U + shift))
    tolerance = 1e-11 * (1 + abs(shift)) * d
    assert torch.allclose(after.centred, before.centred, rtol=0, atol=tolerance)
    assert torch.allclose(after.loss, before.loss, rtol=0, atol=tolerance)
    assert torch.allclose(after.mean - before.mean, shift * H.sum(1), rtol=0, atol=tolerance)


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


def test_a_position_without_target_has_no_loss_and_the_others_have():
    U, H = normal(0, 40, 4), normal(1, 3, 4)
    loss = log_partition(U, H, torch.tensor([2, NO_TARGET, 39])).loss
    assert loss.isnan().tolist() == [False, True, False]


@examples
@given(seeds, st.sampled_from([0.1, 1.0, 5.0]))
def test_losses_through_bf16_are_those_of_rounded_operands_and_logits(seed, scale):
    U, H = (normal(seed, 700, 16) * scale).float(), normal(seed + 1, 50, 16).float()
    targets = torch.randint(700, (50,), generator=torch.Generator().manual_seed(seed))
    found = log_partition(U, H, targets, through=torch.bfloat16).loss
    # sums in another order may round a logit the other way: by 2^-8 of its size, and rarely
    assert float((found - bf16_losses(U, H, targets)).abs().median()) <= 1e-4
    error = found - log_partition(U, H, targets).loss
    assert 0 < float(error.square().mean().sqrt()) < 0.1 * scale


def test_larger_logits_cost_more_through_bf16_even_where_softmax_does_not_see_it():
    U, H = (normal(0, 500, 32) * 0.3).float(), normal(1, 400, 32).float()
    targets, direction = torch.arange(400), H.mean(0)

    def error(shift):
        A = U + shift * direction
        losses = [log_partition(A, H, targets, through=dtype).loss for dtype in (torch.bfloat16, None)]
        return float((losses[0] - losses[1]).square().mean().sqrt())

    assert error(40.0) > 2 * error(0.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_or_a_state_that_is_not_finite_gives_nan_where_it_acts(bad):
    U, H = normal(0, 30, 3).float(), normal(1, 4, 3).float()
    H[2, 1] = bad
    found = log_partition(U, H, torch.zeros(4, dtype=torch.long))
    for numbers in (found.mean, found.log_z, found.largest, found.loss):
        assert numbers.isnan().tolist() == [False, False, True, False]
    U[7, 0] = bad
    assert bool(log_partition(U, H).log_z.isnan().all())


def test_inputs_are_left_alone_and_scratch_memory_may_be_small():
    U, H = normal(0, 3000, 8).float(), normal(1, 20, 8).float()
    copies = U.clone(), H.clone()
    small = log_partition(U, H, max_bytes=4096)
    assert torch.allclose(small.log_z, log_partition(U, H).log_z, rtol=0, atol=1e-5)
    assert torch.equal(U, copies[0])
    assert torch.equal(H, copies[1])


@pytest.mark.parametrize(
    ("targets", "says"),
    [(torch.tensor([1]), "one a state"), (torch.tensor([1.0, 2.0]), "tokens"), (torch.tensor([0, 9]), "below 9")],
)
def test_targets_that_do_not_fit_are_refused(targets, says):
    with pytest.raises(ValueError, match=says):
        log_partition(normal(0, 9, 3), normal(1, 2, 3), targets)


@examples
@given(sizes, seeds, st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
def test_the_mean_row_is_no_longer_than_the_rows_are_on_average(size, seed, dtype):
    U = (normal(seed, size[0], size[2]) + 0.5).to(dtype)
    found = mean_row(U)
    assert found.norm == pytest.approx(float(U.double().mean(0).norm()), rel=1e-6)
    assert found.usual == pytest.approx(float(U.double().norm(dim=1).mean()), rel=1e-6)
    assert found.norm <= found.usual * (1 + 1e-9)


# Rows on several ranks

CASES = [(1001, 8), (3, 2), (1, 3)]


def _measured_by_parts(rank, world):
    results = []
    for V, d in CASES:
        U, H = normal(V, V, d).float(), normal(d, 20, d).float()
        targets = torch.arange(20) % (V + 1) - 1
        for matrix in (sharded(U), U):
            for through in (None, torch.bfloat16):
                found = log_partition(matrix, H, targets, through=through)
                results.append((found.mean, found.log_z, found.largest, found.target, tuple(mean_row(matrix))))
        U[V // 2, 0] = math.nan
        results.append(bool(log_partition(sharded(U), H).log_z.isnan().all()))
    return results


def test_ranks_that_share_the_rows_find_what_one_finds(tmp_path):
    first, second = in_ranks(_measured_by_parts, tmp_path)
    for case in range(len(CASES)):
        *found, is_nan = first[5 * case : 5 * case + 5]
        assert is_nan
        for shared, whole, other in zip(found[:2], found[2:], second[5 * case :], strict=False):
            for mine, alone, theirs in zip(shared, whole, other, strict=True):
                mine, alone, theirs = (torch.as_tensor(x, dtype=torch.float64) for x in (mine, alone, theirs))
                assert torch.allclose(mine, alone, rtol=1e-6, atol=1e-5, equal_nan=True)
                assert torch.equal(mine.nan_to_num(), theirs.nan_to_num())

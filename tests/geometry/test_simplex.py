"""Hilbert distance on the simplex, the bounds it gives, and the bounds of the backward pass."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hilbert_monitor.geometry import (
    backward_bound,
    cross_entropy_change_bound,
    fixed_cotangent_bound,
    hilbert_distance,
    tv_bound,
    uniform_backward_bound,
    variation_seminorm,
)
from tests.support.draws import draws
from tests.support.references import all_pairs_diameter, deltas, head_gradient, normal, total_variation

examples = settings(max_examples=draws(30), deadline=None)
seeds = st.integers(0, 2**32 - 1)
vocabularies = st.integers(1, 40)
scales = st.sampled_from([1e-6, 1e-2, 1.0, 5.0, 30.0])

LOW_AND_FULL = [torch.float32, torch.bfloat16, torch.float16]


def rounding(scale):
    """Room for the fp64 rounding of log probabilities whose logits have this scale."""
    return 1e-14 * (1 + scale)


def close(actual, expected, atol):
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=actual.dtype), rtol=1e-14, atol=atol)


# One distance, three definitions


@examples
@given(seeds, vocabularies, scales, st.floats(1e-50, 1e50))
def test_distance_is_the_range_of_log_ratios_the_largest_log_odds_change_and_the_variation_of_logits(
    seed, V, scale, factor
):
    z, z_after = normal(seed, 2, V, scale=scale)
    p, q = z.softmax(0), z_after.softmax(0)
    log_ratios = [math.log(a / b) for a, b in zip(p.tolist(), q.tolist(), strict=True)]
    log_odds_change = (p[:, None] / p).log() - (q[:, None] / q).log()  # (V, V)
    distance = hilbert_distance(p, q)
    close(distance, max(log_ratios) - min(log_ratios), rounding(scale))
    close(distance, log_odds_change.abs().max(), rounding(scale))
    close(distance, variation_seminorm(z - z_after), rounding(scale))
    close(distance, hilbert_distance(z, z_after, logits=True), rounding(scale))
    close(distance, hilbert_distance(q, factor * p), rounding(scale + abs(math.log(factor))))
    assert hilbert_distance(p, p) == 0


@examples
@given(seeds, vocabularies, st.integers(-(10**6), 10**6), st.integers(-(10**6), 10**6))
def test_common_logit_shift_changes_nothing(seed, V, shift, shift_after):
    z, z_after = (normal(seed, 2, V) * 2**20).round() / 2**20  # sums with integers are exact
    distance = hilbert_distance(z, z_after, logits=True)
    assert torch.equal(hilbert_distance(z + shift, z_after + shift_after, logits=True), distance)
    assert torch.equal(variation_seminorm(z + shift), variation_seminorm(z))


# Zero probabilities


@examples
@given(seeds, vocabularies, scales, st.sampled_from([1e-50, 1.0, 1e50]))
def test_distributions_with_one_support_compare_on_it(seed, V, scale, mass):
    p, q = normal(seed, 2, V, scale=scale).softmax(-1)
    p = mass * p  # every log ratio on the support far from the zero that stands outside it
    support = normal(seed + 1, V) > 0
    support[seed % V] = True
    on_support = hilbert_distance(p[support], q[support])
    assert torch.equal(hilbert_distance(p.where(support, 0.0), q.where(support, 0.0)), on_support)


@examples
@given(seeds, st.integers(2, 40))
def test_distributions_with_different_supports_are_infinitely_far_apart(seed, V):
    p, q = normal(seed, 2, V).softmax(-1)
    p_support, q_support = normal(seed + 1, 2, V) > 0
    first, second = torch.randperm(V, generator=torch.Generator().manual_seed(seed))[:2]
    p_support[first], q_support[first] = True, False
    q_support[second] = True
    p, q = p.where(p_support, 0.0), q.where(q_support, 0.0)
    assert hilbert_distance(p, q) == hilbert_distance(q, p) == torch.inf
    assert not hilbert_distance(0 * p, 0 * p) < 0


# What it bounds


@examples
@given(seeds, vocabularies, scales)
def test_distance_is_the_range_of_loss_changes_and_bounds_the_total_variation(seed, V, scale):
    z, z_after = normal(seed, 2, V, scale=scale)
    every_target = torch.arange(V)
    loss, loss_after = (
        torch.nn.functional.cross_entropy(x.expand(V, V), every_target, reduction="none") for x in (z, z_after)
    )
    change = loss - loss_after
    slack = rounding(scale)
    for bound in (
        cross_entropy_change_bound(z, z_after, logits=True),
        cross_entropy_change_bound(z.softmax(0), z_after.softmax(0)),
    ):
        assert (change.abs() <= bound + slack).all()
        close(change.max() - change.min(), bound, slack)
    p, q = z.softmax(0), z_after.softmax(0)
    assert total_variation(p, q) <= tv_bound(hilbert_distance(p, q)) + 1e-14


@examples
@given(seeds, st.integers(1, 10), st.integers(1, 10), st.floats(1e-3, 60.0))
def test_two_point_likelihood_ratio_attains_the_total_variation_bound(seed, n, m, delta):
    split = torch.cat([normal(seed, n).softmax(0), normal(seed + 1, m).softmax(0)])
    first = torch.arange(n + m) < n
    heavy, light = (torch.tensor(t, dtype=torch.float64).sigmoid() for t in (delta / 2, -delta / 2))
    p = split * heavy.where(first, light)  # q_i / p_i is exp(-delta/2) on the first point, exp(delta/2) on the other
    q = split * light.where(first, heavy)
    close(hilbert_distance(p, q), delta, rounding(delta))
    close(total_variation(p, q), math.tanh(delta / 4), 1e-14)
    close(tv_bound(hilbert_distance(p, q)), total_variation(p, q), 1e-14)
    assert tv_bound(torch.tensor([0.0, torch.inf])).tolist() == [0, 1]


# How it computes


@examples
@given(seeds, st.integers(1, 5), vocabularies, scales)
def test_each_distribution_of_a_batch_is_measured_on_its_own_and_broadcasts(seed, n, V, scale):
    p = normal(seed, n, V, scale=scale).softmax(-1)
    q = normal(seed + 1, V, scale=scale).softmax(-1)
    distances = hilbert_distance(p, q)
    assert distances.shape == (n,)
    assert torch.equal(distances, torch.stack([hilbert_distance(row, q) for row in p]))
    assert torch.equal(distances, hilbert_distance(q[None], p))
    assert torch.equal(variation_seminorm(p.log()), torch.stack([variation_seminorm(row.log()) for row in p]))


@pytest.mark.parametrize("dtype", LOW_AND_FULL)
def test_low_precision_input_is_measured_in_fp32(dtype):
    z, z_after = normal(0, 2, 100, scale=3.0).to(dtype)
    p, q = z.float().softmax(0).to(dtype), z_after.float().softmax(0).to(dtype)
    for measured, exact in (
        (hilbert_distance(p, q), hilbert_distance(p.double(), q.double())),
        (hilbert_distance(z, z_after, logits=True), variation_seminorm(z.double() - z_after.double())),
        (tv_bound(z.abs()), torch.tanh(z.abs().double() / 4)),
    ):
        assert measured.dtype == torch.float32
        torch.testing.assert_close(measured, exact.float(), rtol=1e-6, atol=1e-6)
    assert hilbert_distance(p, q.double()).dtype == hilbert_distance(z.double(), z, logits=True).dtype == torch.float64


def test_the_smallest_probability_keeps_its_logarithm_and_a_logit_of_minus_infinity_is_none():
    close(hilbert_distance(torch.tensor([2.0**-149, 1.0]), torch.ones(2)), 149 * math.log(2), 1e-4)
    z, w = torch.tensor([1.0, 3.0, -torch.inf]), torch.tensor([2.0, 2.0, -torch.inf])
    assert hilbert_distance(z, w, logits=True) == 2
    assert hilbert_distance(z, torch.zeros(3), logits=True) == torch.inf


# The gradient at the hidden states

tokens = st.integers(2, 12)
widths = st.integers(1, 8)
steps = st.sampled_from([1e-3, 0.1, 1.0, 10.0])
lengths = st.sampled_from([0.0, 1e-2, 1.0, 10.0])

ROUNDING = 1e-12


def diameters(U, S):
    """D(S), D(U) and D(U+S) by all pairs, as the bounds take them."""
    return {
        "diameter_step": all_pairs_diameter(S),
        "diameter_head": all_pairs_diameter(U),
        "diameter_updated": all_pairs_diameter(U + S),
    }


def change(U, S, h):
    """|b+ - b| for each target (V,), by autograd."""
    return torch.stack([(head_gradient(U + S, h, c) - head_gradient(U, h, c)).norm() for c in range(len(U))])


def bound_at(U, S, h):
    """The package's bound for each target (V,), from fp64 probabilities and the reference perturbation."""
    p, q = (U @ h).softmax(0), ((U + S) @ h).softmax(0)
    return backward_bound(p, q, deltas(S, h[None])[0], **diameters(U, S))


def head_step_state(seed, V, d, step, length):
    """A head, a step and a hidden state."""
    return normal(seed, V, d), normal(seed + 1, V, d, scale=step), normal(seed + 2, d, scale=length)


def close_to(actual, expected, rtol=1e-12, atol=0.0):
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=actual.dtype), rtol=rtol, atol=atol)


# A fixed logit gradient


@examples
@given(seeds, tokens, widths, steps)
def test_no_zero_sum_cotangent_is_carried_further_than_half_its_mass_times_the_diameter(seed, V, d, step):
    S = normal(seed, V, d, scale=step)
    r = (normal(seed + 1, 64, V) ** 3 * 2**20).round() / 2**20  # a few entries carry most of the mass
    r[:, -1] = -r[:, :-1].sum(-1)  # exact on this grid
    bound = fixed_cotangent_bound(all_pairs_diameter(S), r)
    rounding = 1e-14 * S.norm(dim=1).max()
    assert bound.shape == (64,)
    assert ((r @ S).norm(dim=-1) <= bound + rounding * r.abs().sum(-1)).all()


@examples
@given(seeds, tokens, widths, steps, st.floats(1e-3, 1e3))
def test_the_longest_pair_attains_the_bound_and_the_cross_entropy_has_mass_one_minus_p(seed, V, d, step, mass):
    S = normal(seed, V, d, scale=step)
    diameter = all_pairs_diameter(S)
    i, j = divmod(int((S[:, None] - S).norm(dim=-1).argmax()), V)
    r = torch.zeros(V, dtype=torch.float64)
    r[i], r[j] = mass, -mass
    close_to(fixed_cotangent_bound(diameter, r), (S.T @ r).norm())
    p = normal(seed + 1, V, scale=3.0).softmax(0)
    r = p - torch.eye(V, dtype=torch.float64)  # row c is p - e_c
    close_to(fixed_cotangent_bound(diameter, r), diameter * (1 - p), atol=1e-15 * diameter)
    assert fixed_cotangent_bound(diameter, 0 * p) == fixed_cotangent_bound(0.0, r[0]) == 0


@pytest.mark.parametrize(("dtype", "margin"), [(torch.float32, 18.0), (torch.bfloat16, 0.0), (torch.float16, 0.0)])
def test_gradients_of_the_cross_entropy_are_accepted_in_every_dtype(dtype, margin):
    z = normal(2, 64, 1000).to(dtype)
    z[:, 0] += margin  # with a margin the target is all but certain, and |r|_1 far below one
    z.requires_grad_()
    target = torch.zeros(64, dtype=torch.long)
    (r,) = torch.autograd.grad(torch.nn.functional.cross_entropy(z.float(), target, reduction="sum"), z)
    missing = 1 - z.detach().double().softmax(-1)[:, 0]
    info = torch.finfo(dtype)
    given = float(z.detach().abs().max()) * torch.finfo(torch.float32).eps  # by which r itself errs, through log p
    close_to(fixed_cotangent_bound(1.0, r), missing, rtol=info.eps, atol=given + 1000 * info.eps * info.smallest_normal)


@pytest.mark.parametrize(("V", "loss_scale"), [(50_000, 1.0), (1000, 2.0**16)])
def test_gradients_of_confident_targets_are_accepted_over_a_full_vocabulary_and_under_a_loss_scale(V, loss_scale):
    z = normal(2, 16, V).float()
    z[:, 0] += 18
    z[0, 0] += 4  # the gradient of this target is nothing but rounding
    z[1] = 0  # beside one that is not likely
    z.requires_grad_()
    target = torch.zeros(16, dtype=torch.long)
    loss = loss_scale * torch.nn.functional.cross_entropy(z, target, reduction="sum")
    (r,) = torch.autograd.grad(loss, z)
    close_to(fixed_cotangent_bound(1.0, r), r.double().abs().sum(-1) / 2, rtol=1e-5)


# The complete change


@examples
@given(seeds, tokens, widths, steps, lengths)
def test_both_decompositions_are_the_papers_and_bound_the_change_for_every_target(seed, V, d, step, length):
    U, S, h = head_step_state(seed, V, d, step, length)
    p, q = (U @ h).softmax(0), ((U + S) @ h).softmax(0)
    tanh = math.tanh(float((S @ h).max() - (S @ h).min()) / 4)
    bound = bound_at(U, S, h)
    close_to(bound.after, all_pairs_diameter(S) * (1 - q) + all_pairs_diameter(U) * tanh, atol=1e-14)
    close_to(bound.before, all_pairs_diameter(S) * (1 - p) + all_pairs_diameter(U + S) * tanh, atol=1e-14)
    assert torch.equal(bound.value, torch.minimum(bound.after, bound.before))
    assert (change(U, S, h) <= bound.value + ROUNDING * (1 + step)).all()


@examples
@given(st.floats(1e-2, 20.0))
def test_two_tokens_that_swap_their_odds_attain_each_decomposition(delta):
    U = torch.tensor([[delta / 2], [0.0]], dtype=torch.float64)
    S = torch.tensor([[-delta], [0.0]], dtype=torch.float64)  # log odds go from delta/2 to -delta/2
    h = torch.ones(1, dtype=torch.float64)
    close_to(bound_at(U, S, h).after[1], change(U, S, h)[1])
    close_to(bound_at(U + S, -S, h).before[1], change(U + S, -S, h)[1])  # the way back
    close_to(bound_at(U, S, h).value[1], change(U, S, h)[1])
    close_to(bound_at(U + S, -S, h).value[1], change(U + S, -S, h)[1])


def test_no_step_is_bounded_by_zero_and_states_of_any_length_by_a_number():
    p = torch.tensor([0.2, 0.8])
    sizes = {"diameter_step": 0.0, "diameter_head": 5.0, "diameter_updated": 5.0}
    assert (backward_bound(p, p, torch.zeros(2), **sizes).value == 0).all()
    uniform = uniform_backward_bound(torch.tensor([0.0, torch.inf]), **sizes | {"diameter_step": 2.0})
    assert uniform.tolist() == [2.0, 7.0]
    assert (uniform_backward_bound(torch.ones(2), **sizes) == 0).all()


# The uniform bound


@examples
@given(seeds, tokens, widths, steps, lengths)
def test_uniform_bound_is_the_papers_and_holds_for_every_target(seed, V, d, step, length):
    U, S, h = head_step_state(seed, V, d, step, length)
    eta, norm = all_pairs_diameter(S), float(h.norm())
    smaller = min(all_pairs_diameter(U), all_pairs_diameter(U + S))
    uniform = uniform_backward_bound(h.norm(), **diameters(U, S))
    close_to(uniform, eta + smaller * math.tanh(eta * norm / 4))
    assert (change(U, S, h) <= uniform + ROUNDING * (1 + step)).all()
    assert (bound_at(U, S, h).value <= uniform * (1 + ROUNDING)).all()


@examples
@given(st.floats(1e-3, 5.0), st.sampled_from([1.0, 1e2, 1e4, 1e6]))
def test_no_multiple_of_the_step_diameter_bounds_the_change_but_the_heads_diameter_does(eta, multiple):
    M = (multiple + 1) * eta / math.tanh(eta / 2)
    U = torch.tensor([[0.0, M], [0.0, -M]], dtype=torch.float64)
    S = torch.tensor([[eta / 2, 0.0], [-eta / 2, 0.0]], dtype=torch.float64)
    h = torch.tensor([1.0, 0.0], dtype=torch.float64)
    moved = change(U, S, h)
    assert all_pairs_diameter(S) == pytest.approx(eta)
    assert (moved >= M * math.tanh(eta / 2) * (1 - ROUNDING)).all()
    assert (moved > multiple * eta).all()
    assert (moved <= bound_at(U, S, h).value * (1 + ROUNDING)).all()
    assert (moved <= uniform_backward_bound(h.norm(), **diameters(U, S)) * (1 + ROUNDING)).all()


# How they compute


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_low_precision_input_is_bounded_in_fp32(dtype):
    p, q, x = normal(0, 3, 30).sigmoid().to(dtype)
    r = torch.tensor([0.75, -0.5, -0.25], dtype=dtype)
    sizes = {"diameter_step": 0.3, "diameter_head": 2.0, "diameter_updated": 1.7}
    low, exact = backward_bound(p, q, x, **sizes), backward_bound(p.double(), q.double(), x.double(), **sizes)
    for measured, reference in (
        (low.value, exact.value),
        (low.after, exact.after),
        (low.before, exact.before),
        (uniform_backward_bound(x, **sizes), uniform_backward_bound(x.double(), **sizes)),
        (fixed_cotangent_bound(0.3, r), fixed_cotangent_bound(0.3, r.double())),
    ):
        assert measured.dtype == torch.float32
        assert reference.dtype == torch.float64
        close_to(measured, reference, rtol=1e-6)


def test_diameters_may_be_tensors_and_broadcast_against_positions():
    p, q, delta = normal(0, 3, 4).sigmoid()
    per_step = torch.tensor([[0.1], [0.2]], dtype=torch.float64)  # two steps against four positions
    both = backward_bound(p, q, delta, diameter_step=per_step, diameter_head=2.0, diameter_updated=1.5)
    uniform = uniform_backward_bound(delta, diameter_step=per_step, diameter_head=2.0, diameter_updated=1.5)
    assert both.value.shape == uniform.shape == (2, 4)
    for row, step in enumerate((0.1, 0.2)):
        sizes = {"diameter_step": step, "diameter_head": 2.0, "diameter_updated": 1.5}
        close_to(both.value[row], backward_bound(p, q, delta, **sizes).value)
        close_to(uniform[row], uniform_backward_bound(delta, **sizes))


# What they refuse

HALF = torch.tensor([0.5, 0.5])
SIZES = {"diameter_step": 1.0, "diameter_head": 1.0, "diameter_updated": 1.0}


def full(p=HALF, q=HALF, delta=HALF, **sizes):
    return backward_bound(p, q, delta, **SIZES | sizes)


def fixed(*entries, dtype=torch.float32):
    return fixed_cotangent_bound(1.0, torch.tensor(entries, dtype=dtype))


MISUSE = [
    (ValueError, "negative entry", lambda: hilbert_distance(torch.tensor([-0.1, 1.1]), torch.ones(2))),
    (ValueError, "one vocabulary", lambda: hilbert_distance(torch.ones(3), torch.ones(1), logits=True)),
    (ValueError, "at least one entry", lambda: variation_seminorm(torch.ones(0))),
    (ValueError, "at least one entry", lambda: fixed_cotangent_bound(1.0, torch.ones(3, 0))),
    (TypeError, "floating-point", lambda: hilbert_distance(torch.ones(3), torch.ones(3, dtype=torch.long))),
    (TypeError, "floating-point", lambda: tv_bound(torch.tensor(1))),
    (TypeError, "floating-point", lambda: full(q=torch.tensor([0, 1]))),
    (TypeError, "torch.Tensor", lambda: hilbert_distance([0.5, 0.5], torch.ones(2))),
    (TypeError, "torch.Tensor", lambda: uniform_backward_bound(1.0, **SIZES)),
    (TypeError, "dense", lambda: variation_seminorm(torch.ones(3).to_sparse())),
    (ValueError, "zero or positive", lambda: tv_bound(torch.tensor(-1.0))),
    (ValueError, "a sum of 0.9 for abs.* to 1.1", lambda: fixed(1.0, -0.1)),
    (ValueError, "sum to zero", lambda: fixed(1.0, -0.75, dtype=torch.bfloat16)),
    (ValueError, "sum to zero", lambda: fixed(1e-9, -1e-10)),
    (ValueError, "sum to zero", lambda: fixed(1.0, -0.99999, dtype=torch.double)),
    (ValueError, "sum to zero", lambda: fixed([1.0, -1.0], [0.1, -0.01])),
    (ValueError, "diameter must be zero or positive", lambda: fixed_cotangent_bound(-1.0, HALF - 0.5)),
    (ValueError, "p_target must be zero or positive", lambda: full(p=-HALF)),
    (ValueError, "q_target must be a probability, got 3", lambda: full(q=6 * HALF)),
    (ValueError, "delta must be zero or positive", lambda: full(delta=-HALF)),
    (ValueError, "h_norm must be zero or positive", lambda: uniform_backward_bound(-HALF, **SIZES)),
]
for name in SIZES:
    sentence, sizes = f"{name} must be zero or positive", {name: torch.tensor(-1.0)}
    MISUSE.append((ValueError, sentence, lambda sizes=sizes: full(**sizes)))
    MISUSE.append((ValueError, sentence, lambda sizes=sizes: uniform_backward_bound(HALF, **SIZES | sizes)))


@pytest.mark.parametrize(("error", "phrase", "call"), MISUSE)
def test_misuse_is_refused_in_one_sentence(error, phrase, call):
    with pytest.raises(error, match=rf"\A.*{phrase}.*\Z"):
        call()

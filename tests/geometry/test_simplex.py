"""Hilbert distance on the simplex: one distance by three definitions, a metric, and the bounds it gives."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hilbert_monitor.geometry import (
    cross_entropy_change_bound,
    hilbert_distance,
    tv_bound,
    variation_seminorm,
)
from tests.support.draws import draws
from tests.support.references import all_pairs_diameter, normal, total_variation

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
@given(seeds, vocabularies, scales)
def test_distance_is_the_range_of_log_ratios_the_largest_log_odds_change_and_the_variation_of_logits(seed, V, scale):
    z, z_after = normal(seed, 2, V, scale=scale)
    p, q = z.softmax(0), z_after.softmax(0)
    log_ratios = [math.log(a / b) for a, b in zip(p.tolist(), q.tolist(), strict=True)]
    log_odds_change = (p[:, None] / p).log() - (q[:, None] / q).log()  # (V, V)
    distance = hilbert_distance(p, q)
    close(distance, max(log_ratios) - min(log_ratios), rounding(scale))
    close(distance, log_odds_change.abs().max(), rounding(scale))
    close(distance, variation_seminorm(z - z_after), rounding(scale))
    close(distance, hilbert_distance(z, z_after, logits=True), rounding(scale))


@examples
@given(seeds, st.integers(2, 40), scales)
def test_distance_bounds_every_probability_ratio_by_its_exponential(seed, V, scale):
    p, q = normal(seed, 2, V, scale=min(scale, 5.0)).softmax(-1)
    odds_change = (p[:, None] / p) / (q[:, None] / q)
    limit = hilbert_distance(p, q).exp() * (1 + rounding(scale))
    assert (odds_change <= limit).all()
    assert (odds_change >= 1 / limit).all()


# A metric on directions


@examples
@given(seeds, vocabularies, scales)
def test_distance_is_symmetric(seed, V, scale):
    z, z_after = normal(seed, 2, V, scale=scale)
    p, q = z.softmax(0), z_after.softmax(0)
    assert torch.equal(hilbert_distance(p, q), hilbert_distance(q, p))
    assert torch.equal(hilbert_distance(z, z_after, logits=True), hilbert_distance(z_after, z, logits=True))


@examples
@given(seeds, vocabularies, scales, scales)
def test_distance_satisfies_the_triangle_inequality(seed, V, scale, detour):
    z, z_after = normal(seed, 2, V, scale=scale)
    between = (z + z_after) / 2 + normal(seed + 1, V, scale=detour)
    p, m, q = z.softmax(0), between.softmax(0), z_after.softmax(0)
    slack = rounding(scale + detour)
    assert hilbert_distance(p, q) <= hilbert_distance(p, m) + hilbert_distance(m, q) + slack


@examples
@given(seeds, vocabularies, scales, st.floats(1e-50, 1e50))
def test_distance_is_zero_between_proportional_vectors(seed, V, scale, factor):
    p = normal(seed, V, scale=scale).softmax(0)
    assert hilbert_distance(p, p) == 0
    close(hilbert_distance(factor * p, p), 0.0, rounding(scale + abs(math.log(factor))))


@examples
@given(seeds, st.integers(2, 40), scales, st.floats(1e-6, 50.0), st.booleans())
def test_distance_is_the_log_of_a_factor_on_one_entry(seed, V, scale, log_factor, grow):
    p = normal(seed, V, scale=scale).softmax(0)
    q = p.clone()
    q[seed % V] *= math.exp(log_factor if grow else -log_factor)
    close(hilbert_distance(q, p), log_factor, rounding(scale + log_factor))


@examples
@given(seeds, vocabularies, st.integers(-(10**6), 10**6), st.integers(-(10**6), 10**6))
def test_common_logit_shift_changes_nothing(seed, V, shift, shift_after):
    z, z_after = (normal(seed, 2, V) * 2**20).round() / 2**20  # sums with integers are exact
    distance = hilbert_distance(z, z_after, logits=True)
    assert torch.equal(hilbert_distance(z + shift, z_after + shift_after, logits=True), distance)
    assert torch.equal(variation_seminorm(z + shift), variation_seminorm(z))


@examples
@given(seeds, vocabularies, scales, st.floats(-100.0, 100.0))
def test_variation_is_a_seminorm_that_vanishes_on_constant_vectors_only(seed, V, scale, factor):
    x, y = normal(seed, 2, V, scale=scale)
    assert variation_seminorm(torch.full_like(x, factor)) == 0
    assert (variation_seminorm(x) > 0) == (V > 1)
    assert variation_seminorm(x + y) <= variation_seminorm(x) + variation_seminorm(y) + rounding(scale)
    close(variation_seminorm(factor * x), abs(factor) * variation_seminorm(x), rounding(scale * abs(factor)))


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
    assert hilbert_distance(p, q) == torch.inf
    assert hilbert_distance(q, p) == torch.inf


@pytest.mark.parametrize(
    ("p", "q", "distance"),
    [
        ([1.0, 0.0], [0.0, 1.0], math.inf),
        ([1.0, 0.0], [0.5, 0.5], math.inf),
        ([0.5, 0.5], [1.0, 0.0], math.inf),
        ([0.0, 0.5, 0.5], [0.5, 0.0, 0.5], math.inf),
        ([0.0, 1.0], [0.0, 1.0], 0.0),
        ([0.0, 0.5, 0.5], [0.0, 0.8, 0.2], math.log(4)),
        ([0.0, 8.0, 2.0], [0.0, 0.5, 0.5], math.log(4)),  # every ratio above one
        ([0.0, 0.5, 0.5], [0.0, 8.0, 2.0], math.log(4)),  # every ratio below one
    ],
)
def test_zero_rule_on_small_distributions(p, q, distance):
    p, q = torch.tensor([p, q], dtype=torch.float64)
    close(hilbert_distance(p, q), distance, 1e-15)


def test_distance_is_never_negative_even_for_vectors_without_mass():
    assert not hilbert_distance(torch.zeros(3), torch.zeros(3)) < 0


# What it bounds


@examples
@given(seeds, vocabularies, scales)
def test_loss_changes_of_all_targets_fill_an_interval_around_zero_as_long_as_the_distance(seed, V, scale):
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
    assert change.min() <= slack
    assert change.max() >= -slack


@examples
@given(seeds, vocabularies, scales)
def test_total_variation_is_at_most_tanh_of_a_quarter_of_the_distance(seed, V, scale):
    p, q = normal(seed, 2, V, scale=scale).softmax(-1)
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


def test_total_variation_bound_runs_from_zero_to_one():
    delta = torch.tensor([0.0, 1e-3, 1.0, 10.0, torch.inf], dtype=torch.float64)
    bound = tv_bound(delta)
    assert bound[0] == 0
    assert bound[-1] == 1
    assert (bound.diff() > 0).all()


# The head update: the supremum over hidden states is H times the row diameter


@examples
@given(seeds, st.integers(2, 30), st.integers(1, 8), st.floats(1e-2, 10.0), st.sampled_from([1e-3, 0.1, 3.0]))
def test_no_hidden_state_in_a_ball_moves_the_distribution_past_radius_times_diameter(seed, V, d, radius, step):
    U, S = normal(seed, V, d), normal(seed + 1, V, d, scale=step)
    h = normal(seed + 2, 64, d)
    h = radius * h / h.norm(dim=1, keepdim=True).clamp(min=1.0)
    before, after = h @ U.T, h @ (U + S).T
    limit = radius * all_pairs_diameter(S)
    slack = rounding(20 * radius)
    assert (hilbert_distance(after, before, logits=True) <= limit + slack).all()
    assert (hilbert_distance(after.softmax(-1), before.softmax(-1)) <= limit + slack).all()


@examples
@given(seeds, st.integers(2, 30), st.integers(1, 8), st.floats(1e-2, 10.0), st.sampled_from([1e-3, 0.1, 3.0]))
def test_hidden_state_along_the_longest_row_difference_attains_radius_times_diameter(seed, V, d, radius, step):
    U, S = normal(seed, V, d), normal(seed + 1, V, d, scale=step)
    gaps = S[:, None] - S  # (V, V, d)
    longest = gaps.flatten(0, 1)[gaps.norm(dim=-1).argmax()]
    h = radius * longest / longest.norm()
    before, after = U @ h, (U + S) @ h
    limit = radius * all_pairs_diameter(S)
    slack = rounding(20 * radius)
    close(hilbert_distance(after, before, logits=True), limit, slack)
    close(hilbert_distance(after.softmax(0), before.softmax(0)), limit, slack)


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


def test_one_fp64_argument_makes_the_distance_fp64():
    p, q = normal(0, 2, 10).softmax(-1)
    assert hilbert_distance(p, q.float()).dtype == torch.float64
    assert hilbert_distance(p.float(), q, logits=True).dtype == torch.float64
    assert tv_bound(p).dtype == torch.float64


def test_probabilities_below_the_normal_range_keep_their_logarithm():
    p = torch.tensor([2.0**-149, 1.0])  # the smallest fp32
    close(hilbert_distance(p, torch.ones(2)), 149 * math.log(2), 1e-4)


def test_measuring_builds_no_graph_leaves_its_input_and_ignores_autocast():
    p, q = (x.softmax(0) for x in normal(0, 2, 50).float())
    p.requires_grad_()
    before = p.detach().clone()
    measures = (
        hilbert_distance,
        cross_entropy_change_bound,
        lambda p, q: variation_seminorm(p),
        lambda p, q: tv_bound(p),
    )
    for measure in measures:
        plain = measure(p, q)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = measure(p, q)
        assert not plain.requires_grad
        assert torch.equal(inside, plain)
        assert inside.dtype == plain.dtype
    assert torch.equal(p, before)


# What it refuses


@pytest.mark.parametrize(
    ("error", "phrase", "call"),
    [
        (ValueError, "negative entry", lambda: hilbert_distance(torch.tensor([-0.1, 1.1]), torch.ones(2))),
        (ValueError, "negative entry", lambda: hilbert_distance(torch.ones(2), torch.tensor([-0.1, 1.1]))),
        (ValueError, "one vocabulary", lambda: hilbert_distance(torch.ones(3), torch.ones(2))),
        (ValueError, "one vocabulary", lambda: hilbert_distance(torch.ones(3), torch.ones(1), logits=True)),
        (ValueError, "at least one entry", lambda: hilbert_distance(torch.ones(2, 0), torch.ones(2, 0))),
        (ValueError, "at least one entry", lambda: variation_seminorm(torch.ones(0))),
        (ValueError, "at least one entry", lambda: variation_seminorm(torch.tensor(1.0))),
        (TypeError, "floating-point", lambda: variation_seminorm(torch.arange(3))),
        (
            TypeError,
            "floating-point",
            lambda: hilbert_distance(torch.ones(3), torch.ones(3, dtype=torch.long)),
        ),
        (
            TypeError,
            "floating-point",
            lambda: hilbert_distance(torch.ones(3, dtype=torch.cfloat), torch.ones(3)),
        ),
        (TypeError, "floating-point", lambda: tv_bound(torch.tensor(1))),
        (TypeError, "torch.Tensor", lambda: tv_bound(1.0)),
        (TypeError, "torch.Tensor", lambda: hilbert_distance([0.5, 0.5], torch.ones(2))),
        (TypeError, "dense", lambda: variation_seminorm(torch.ones(3).to_sparse())),
        (ValueError, "zero or positive", lambda: tv_bound(torch.tensor(-1.0))),
    ],
)
def test_misuse_is_refused_in_one_sentence(error, phrase, call):
    with pytest.raises(error, match=rf"\A.*{phrase}.*\Z"):
        call()


def test_logits_of_minus_infinity_are_zero_probabilities():
    z, w = torch.tensor([1.0, 3.0, -torch.inf]), torch.tensor([2.0, 2.0, -torch.inf])
    assert hilbert_distance(z, w, logits=True) == 2
    assert hilbert_distance(z, torch.zeros(3), logits=True) == torch.inf

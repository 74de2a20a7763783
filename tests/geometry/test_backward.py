"""Backward bounds: they hold against autograd, they are attained, and none can do without the head."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hilbert_monitor.geometry import backward_bound, fixed_cotangent_bound, uniform_backward_bound
from tests.support.draws import draws
from tests.support.references import all_pairs_diameter, deltas, head_gradient, normal

examples = settings(max_examples=draws(30), deadline=None)
seeds = st.integers(0, 2**32 - 1)
vocabularies = st.integers(2, 12)
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


def close(actual, expected, rtol=1e-12, atol=0.0):
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=actual.dtype), rtol=rtol, atol=atol)


# A fixed logit gradient


@examples
@given(seeds, vocabularies, widths, steps)
def test_no_zero_sum_cotangent_is_carried_further_than_half_its_mass_times_the_diameter(seed, V, d, step):
    S = normal(seed, V, d, scale=step)
    r = (normal(seed + 1, 64, V) ** 3 * 2**20).round() / 2**20  # a few entries carry most of the mass
    r[:, -1] = -r[:, :-1].sum(-1)  # exact on this grid
    bound = fixed_cotangent_bound(all_pairs_diameter(S), r)
    rounding = 1e-14 * S.norm(dim=1).max()
    assert bound.shape == (64,)
    assert ((r @ S).norm(dim=-1) <= bound + rounding * r.abs().sum(-1)).all()


@examples
@given(seeds, vocabularies, widths, steps, st.floats(1e-3, 1e3))
def test_the_longest_pair_of_rows_attains_the_fixed_cotangent_bound(seed, V, d, step, mass):
    S = normal(seed, V, d, scale=step)
    i, j = divmod(int((S[:, None] - S).norm(dim=-1).argmax()), V)
    r = torch.zeros(V, dtype=torch.float64)
    r[i], r[j] = mass, -mass
    close(fixed_cotangent_bound(all_pairs_diameter(S), r), (S.T @ r).norm())


@examples
@given(seeds, vocabularies, widths, steps)
def test_the_cross_entropy_gradient_of_target_c_has_mass_one_minus_p_c(seed, V, d, step):
    S = normal(seed, V, d, scale=step)
    p = normal(seed + 1, V, scale=3.0).softmax(0)
    r = p - torch.eye(V, dtype=torch.float64)  # row c is p - e_c
    bound = fixed_cotangent_bound(all_pairs_diameter(S), r)
    rounding = 1e-14 * S.norm(dim=1).max()  # the probabilities sum to one up to rounding, however small |r|_1 is
    close(bound, all_pairs_diameter(S) * (1 - p), atol=1e-15 * all_pairs_diameter(S))
    assert ((r @ S).norm(dim=-1) <= bound + rounding).all()


def test_a_zero_cotangent_or_a_zero_step_is_bounded_by_zero():
    assert fixed_cotangent_bound(3.0, torch.zeros(5)) == 0
    assert fixed_cotangent_bound(0.0, torch.tensor([1.0, -1.0])) == 0


@pytest.mark.parametrize(
    ("dtype", "margin"),
    [(torch.float32, 0.0), (torch.float32, 18.0), (torch.bfloat16, 0.0), (torch.float16, 0.0)],
)
def test_gradients_of_the_cross_entropy_are_accepted_in_every_dtype(dtype, margin):
    z = normal(2, 64, 1000).to(dtype)
    z[:, 0] += margin  # with a margin the target is all but certain, and |r|_1 far below one
    z.requires_grad_()
    target = torch.zeros(64, dtype=torch.long)
    (r,) = torch.autograd.grad(torch.nn.functional.cross_entropy(z.float(), target, reduction="sum"), z)
    missing = 1 - z.detach().double().softmax(-1)[:, 0]
    info = torch.finfo(dtype)
    given = float(z.detach().abs().max()) * torch.finfo(torch.float32).eps  # by which r itself errs, through log p
    close(fixed_cotangent_bound(1.0, r), missing, rtol=info.eps, atol=given + 1000 * info.eps * info.smallest_normal)


def test_a_target_that_is_all_but_certain_is_accepted_beside_others():
    z = torch.zeros(2, 1000)
    z[0, 0] = 22.0  # the gradient of this target is nothing but rounding
    z.requires_grad_()
    loss = torch.nn.functional.cross_entropy(z, torch.zeros(2, dtype=torch.long))
    (r,) = torch.autograd.grad(loss, z)
    close(fixed_cotangent_bound(1.0, r)[1], 0.4995, rtol=1e-5)


@pytest.mark.parametrize(("V", "loss_scale"), [(50_000, 1.0), (1000, 2.0**16)])
def test_gradients_of_confident_targets_are_accepted_over_a_full_vocabulary_and_under_a_loss_scale(V, loss_scale):
    z = normal(2, 16, V).float()
    z[:, 0] += 18
    z.requires_grad_()
    target = torch.zeros(16, dtype=torch.long)
    loss = loss_scale * torch.nn.functional.cross_entropy(z, target, reduction="sum")
    (r,) = torch.autograd.grad(loss, z)
    close(fixed_cotangent_bound(1.0, r), r.double().abs().sum(-1) / 2, rtol=1e-5)


# The complete change


@examples
@given(seeds, vocabularies, widths, steps, lengths)
def test_both_decompositions_bound_the_change_of_the_gradient_for_every_target(seed, V, d, step, length):
    U, S, h = head_step_state(seed, V, d, step, length)
    bound = bound_at(U, S, h)
    moved = change(U, S, h)
    slack = ROUNDING * (1 + step)
    assert (moved <= bound.after + slack).all()
    assert (moved <= bound.before + slack).all()
    assert (moved <= bound.value + slack).all()


@examples
@given(seeds, vocabularies, widths, steps, lengths)
def test_decompositions_are_the_papers_and_the_value_is_the_smaller(seed, V, d, step, length):
    U, S, h = head_step_state(seed, V, d, step, length)
    p, q = (U @ h).softmax(0), ((U + S) @ h).softmax(0)
    tanh = math.tanh(float((S @ h).max() - (S @ h).min()) / 4)
    bound = bound_at(U, S, h)
    close(bound.after, all_pairs_diameter(S) * (1 - q) + all_pairs_diameter(U) * tanh, atol=1e-14)
    close(bound.before, all_pairs_diameter(S) * (1 - p) + all_pairs_diameter(U + S) * tanh, atol=1e-14)
    assert torch.equal(bound.value, torch.minimum(bound.after, bound.before))


def test_either_decomposition_can_be_the_smaller():
    p, q = torch.tensor([0.9, 0.1]), torch.tensor([0.1, 0.9])
    sizes = {"diameter_step": 1.0, "diameter_head": 1.0, "diameter_updated": 1.0}
    bound = backward_bound(p, q, torch.tensor(1.0), **sizes)
    assert bound.value[0] == bound.before[0] < bound.after[0]
    assert bound.value[1] == bound.after[1] < bound.before[1]


@examples
@given(st.floats(1e-2, 20.0))
def test_two_tokens_that_swap_their_odds_attain_each_decomposition(delta):
    U = torch.tensor([[delta / 2], [0.0]], dtype=torch.float64)
    S = torch.tensor([[-delta], [0.0]], dtype=torch.float64)  # log odds go from delta/2 to -delta/2
    h = torch.ones(1, dtype=torch.float64)
    close(bound_at(U, S, h).after[1], change(U, S, h)[1])
    close(bound_at(U + S, -S, h).before[1], change(U + S, -S, h)[1])  # the way back
    close(bound_at(U, S, h).value[1], change(U, S, h)[1])
    close(bound_at(U + S, -S, h).value[1], change(U + S, -S, h)[1])


def test_no_step_and_no_change_of_probability_is_bounded_by_zero():
    p = torch.tensor([0.2, 0.8])
    sizes = {"diameter_step": 0.0, "diameter_head": 5.0, "diameter_updated": 5.0}
    assert (backward_bound(p, p, torch.zeros(2), **sizes).value == 0).all()
    assert (uniform_backward_bound(torch.ones(2), **sizes) == 0).all()


# The uniform bound


@examples
@given(seeds, vocabularies, widths, steps, lengths)
def test_uniform_bound_holds_for_every_target_and_dominates_the_bound_at_each(seed, V, d, step, length):
    U, S, h = head_step_state(seed, V, d, step, length)
    uniform = uniform_backward_bound(h.norm(), **diameters(U, S))
    assert (change(U, S, h) <= uniform + ROUNDING * (1 + step)).all()
    assert (bound_at(U, S, h).value <= uniform * (1 + ROUNDING)).all()


@examples
@given(seeds, vocabularies, widths, steps, lengths)
def test_uniform_bound_is_the_papers_and_at_most_linear_in_the_step(seed, V, d, step, length):
    U, S, h = head_step_state(seed, V, d, step, length)
    eta, norm = all_pairs_diameter(S), float(h.norm())
    smaller = min(all_pairs_diameter(U), all_pairs_diameter(U + S))
    uniform = uniform_backward_bound(h.norm(), **diameters(U, S))
    close(uniform, eta + smaller * math.tanh(eta * norm / 4))
    assert uniform <= eta * (1 + norm * smaller / 4) * (1 + ROUNDING)


@pytest.mark.parametrize(("head", "updated"), [(1.0, 9.0), (9.0, 1.0)])
def test_uniform_bound_takes_the_smaller_of_the_heads(head, updated):
    h_norm = torch.tensor([0.0, 1.0, torch.inf], dtype=torch.float64)
    uniform = uniform_backward_bound(h_norm, diameter_step=2.0, diameter_head=head, diameter_updated=updated)
    close(uniform, [2.0, 2.0 + math.tanh(0.5), 3.0])


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
        close(measured, reference, rtol=1e-6)


def test_diameters_may_be_tensors_and_broadcast_against_positions():
    p, q, delta = normal(0, 3, 4).sigmoid()
    per_step = torch.tensor([[0.1], [0.2]], dtype=torch.float64)  # two steps against four positions
    both = backward_bound(p, q, delta, diameter_step=per_step, diameter_head=2.0, diameter_updated=1.5)
    uniform = uniform_backward_bound(delta, diameter_step=per_step, diameter_head=2.0, diameter_updated=1.5)
    assert both.value.shape == uniform.shape == (2, 4)
    for row, step in enumerate((0.1, 0.2)):
        sizes = {"diameter_step": step, "diameter_head": 2.0, "diameter_updated": 1.5}
        close(both.value[row], backward_bound(p, q, delta, **sizes).value)
        close(uniform[row], uniform_backward_bound(delta, **sizes))


def test_bounds_build_no_graph_leave_their_input_and_ignore_autocast():
    p = normal(0, 10).sigmoid().float().requires_grad_()
    r = (p - p.mean()).detach().requires_grad_()
    before = p.detach().clone()
    sizes = {
        "diameter_step": 0.3,
        "diameter_head": 2.0,
        "diameter_updated": torch.tensor(1.7, requires_grad=True),
    }
    for bound in (
        lambda: backward_bound(p, p, p, **sizes).value,
        lambda: uniform_backward_bound(p, **sizes),
        lambda: fixed_cotangent_bound(sizes["diameter_updated"], r),
    ):
        plain = bound()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = bound()
        assert not plain.requires_grad
        assert torch.equal(inside, plain)
        assert inside.dtype == plain.dtype
    assert torch.equal(p, before)


# What they refuse

HALF = torch.tensor([0.5, 0.5])


def full(p=HALF, q=HALF, delta=HALF, step=1.0, head=1.0, updated=1.0):
    return backward_bound(p, q, delta, diameter_step=step, diameter_head=head, diameter_updated=updated)


def uniform(h_norm=HALF, step=1.0, head=1.0, updated=1.0):
    return uniform_backward_bound(h_norm, diameter_step=step, diameter_head=head, diameter_updated=updated)


@pytest.mark.parametrize(
    ("error", "phrase", "call"),
    [
        (ValueError, "sum to zero", lambda: fixed_cotangent_bound(1.0, HALF)),
        (ValueError, "a sum of 0.9 for abs.* to 1.1", lambda: fixed_cotangent_bound(0.0, torch.tensor([1.0, -0.1]))),
        (ValueError, "sum to zero", lambda: fixed_cotangent_bound(1.0, torch.tensor([1.0, -0.75]).bfloat16())),
        (ValueError, "sum to zero", lambda: fixed_cotangent_bound(1.0, torch.tensor([1e-3, -1e-4]).half())),
        (ValueError, "sum to zero", lambda: fixed_cotangent_bound(1.0, torch.tensor([1e-9, -1e-10]))),
        (ValueError, "sum to zero", lambda: fixed_cotangent_bound(1.0, torch.tensor([1.0, -0.99999]).double())),
        (ValueError, "sum to zero", lambda: fixed_cotangent_bound(1.0, torch.tensor([[1.0, -1.0], [0.1, -0.01]]))),
        (
            ValueError,
            "sum to zero",
            lambda: fixed_cotangent_bound(1.0, torch.tensor([[1.0, -1.0], [1.0, -0.01]])),
        ),
        (ValueError, "diameter must be zero or positive", lambda: fixed_cotangent_bound(-1.0, HALF - 0.5)),
        (ValueError, "p_target must be zero or positive", lambda: full(p=-HALF)),
        (ValueError, "q_target must be a probability, got 3", lambda: full(q=6 * HALF)),
        (ValueError, "q_target must be zero or positive", lambda: full(q=-HALF)),
        (ValueError, "delta must be zero or positive", lambda: full(delta=-HALF)),
        (ValueError, "diameter_step must be zero or positive", lambda: full(step=-1.0)),
        (ValueError, "diameter_head must be zero or positive", lambda: full(head=-1.0)),
        (ValueError, "diameter_updated must be zero or positive", lambda: full(updated=torch.tensor(-1.0))),
        (ValueError, "h_norm must be zero or positive", lambda: uniform(h_norm=-HALF)),
        (TypeError, "floating-point", lambda: fixed_cotangent_bound(1.0, torch.tensor([1, -1]))),
        (TypeError, "floating-point", lambda: full(p=torch.tensor([0, 1]))),
        (TypeError, "floating-point", lambda: full(q=torch.tensor([0, 1]))),
        (TypeError, "floating-point", lambda: full(delta=torch.tensor([0, 1]))),
        (TypeError, "floating-point", lambda: uniform(h_norm=torch.tensor(1))),
        (TypeError, "torch.Tensor", lambda: fixed_cotangent_bound(1.0, [1.0, -1.0])),
        (TypeError, "torch.Tensor", lambda: full(p=0.5)),
        (TypeError, "torch.Tensor", lambda: uniform(h_norm=1.0)),
        (ValueError, "diameter_step must be zero or positive", lambda: uniform(step=-1.0)),
        (ValueError, "diameter_head must be zero or positive", lambda: uniform(head=-1.0)),
        (ValueError, "diameter_updated must be zero or positive", lambda: uniform(updated=-1.0)),
        (ValueError, "at least one entry", lambda: fixed_cotangent_bound(1.0, torch.ones(3, 0))),
        (ValueError, "zero or positive", lambda: full(p=torch.linspace(-1, 1, 100))),
    ],
)
def test_misuse_is_refused_in_one_sentence(error, phrase, call):
    with pytest.raises(error, match=rf"\A.*{phrase}.*\Z"):
        call()

"""Muon: the paper's step in stacks of one shape; then what Muon and RowNorm have in common."""

import math
from functools import partial
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import Parameter

from hilbert_monitor.optim import Muon, muon
from tests.support.draws import draws
from tests.support.optim_references import LRS, assert_walks_agree, close, gradients, muon_steps, rotation, walk
from tests.support.precision import MatmulPrecision
from tests.support.references import normal

examples = settings(max_examples=draws(20), deadline=None)
seeds = st.integers(0, 2**31)
sides = st.integers(1, 24)

SHAPES = [(12, 5), (5, 12), (8, 8), (4, 30), (30, 4), (1, 6), (6, 1)]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
double = partial(Muon, ns_dtype=torch.float64)


# The paper's step


@examples
@given(
    seed=seeds,
    shape=st.tuples(sides, sides),
    momentum=st.sampled_from([0.0, 0.5, 0.95]),
    weight_decay=st.sampled_from([0.0, 0.1]),
    nesterov=st.booleans(),
    ns_steps=st.integers(1, 7),
    eps=st.sampled_from([0.0, 1e-5, 1.0]),
)
def test_steps_are_the_papers(seed, shape, momentum, weight_decay, nesterov, ns_steps, eps):
    W, grads = normal(seed, *shape), gradients(seed + 1, shape)
    options = dict(momentum=momentum, weight_decay=weight_decay, nesterov=nesterov, ns_steps=ns_steps, eps=eps)
    assert_walks_agree(walk(double, W, grads, LRS, **options), muon_steps(W, grads, LRS, **options), 1e-10)


@every_shape
def test_steps_in_fp32_are_the_papers_to_rounding(shape):
    W, grads = normal(0, *shape).float(), gradients(1, shape, dtype=torch.float32)
    assert_walks_agree(walk(Muon, W, grads, LRS), muon_steps(W, grads, LRS), 2e-5)


def test_defaults_are_the_papers():
    p, G = Parameter(normal(0, 7, 5)), normal(1, 7, 5, scale=1e-5)  # small, so that eps shows
    p.grad = G
    optimizer = Muon([p], ns_dtype=torch.float64)
    expected = muon_steps(p.detach(), [G, G], 2 * [8e-3], momentum=0.95, weight_decay=0.1, ns_steps=5, eps=1e-5)
    optimizer.step()
    optimizer.step()
    close(p, expected[-1][0], 1e-14)


def test_each_group_steps_with_its_own_hyperparameters():
    recipes = [
        {"lr": 0.1},
        {"lr": 0.02, "momentum": 0.5, "weight_decay": 0.3},
        {"lr": 0.5, "eps": 3.0, "nesterov": False, "ns_steps": 2},
    ]
    start = [[normal(10 * i + j, *shape) for j, shape in enumerate(SHAPES)] for i in range(len(recipes))]
    params = [[Parameter(W.clone()) for W in group] for group in start]
    optimizer = double([{"params": p, **recipe} for p, recipe in zip(params, recipes, strict=True)], lr=9.0)
    grads = {p: gradients(100 * i, p.shape, steps=3) for i, p in enumerate(chain.from_iterable(params))}
    for t in range(3):
        for p, G in grads.items():
            p.grad = G[t].clone()
        optimizer.step()
    for group, W, recipe in zip(params, start, recipes, strict=True):
        options = {name: value for name, value in recipe.items() if name != "lr"}
        for p, w in zip(group, W, strict=True):
            close(p, muon_steps(w, grads[p], 3 * [recipe["lr"]], **options)[-1][0], 1e-11)


@pytest.mark.few(4)
@pytest.mark.parametrize("nesterov", [True, False])
@every_shape
def test_steps_in_bf16_are_those_of_torch_to_bf16_rounding(shape, nesterov):
    W, grads = normal(0, *shape).float(), gradients(1, shape, dtype=torch.float32)
    options = {"momentum": 0.95, "weight_decay": 0.1, "nesterov": nesterov, "eps": 1e-7, "ns_steps": 5}
    theirs = Parameter(W.clone())
    optimizer = torch.optim.Muon([theirs], lr=0.1, **options)
    ours = walk(partial(Muon, ns_dtype=torch.bfloat16), W, grads, 6 * [0.1], **options)
    for t, G in enumerate(grads):
        theirs.grad = G.clone()
        before = theirs.detach().clone()
        optimizer.step()
        scale = 0.1 * math.sqrt(max(1, shape[0] / shape[1]))
        close(ours[t][1], theirs.detach() - 0.99 * before, 32 * torch.finfo(torch.bfloat16).eps * scale)


@pytest.mark.few(4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@every_shape
def test_newton_schulz_runs_in_the_precision_that_was_asked_for(shape, dtype):
    with MatmulPrecision() as products:
        walk(Muon, normal(0, *shape).float(), [normal(1, *shape).float()], [0.1], ns_dtype=dtype)
    assert {seen for seen, *_ in products.seen} == {dtype}


# Stacks


def step_together(matrices, grads, **options):
    params = [Parameter(W.clone()) for W in matrices]
    for p, G in zip(params, grads, strict=True):
        p.grad = G.clone()
    Muon(params, lr=0.1, **options).step()
    return [p.detach() for p in params]


def directions(shape):
    """Gradients of one shape: ordinary, zero, of rank one, and badly conditioned."""
    m, n = shape
    k = min(shape)
    decay = 10 ** -torch.linspace(0, 9, k, dtype=torch.float64)
    steep = rotation(normal(1, m, m))[:, :k] * decay @ rotation(normal(2, n, n))[:k]
    rank_one = normal(3, m, 1) @ normal(4, 1, n)
    grads = [normal(5, m, n), torch.zeros(m, n), rank_one, steep, normal(6, m, n), normal(7, m, n), 1e-4 * steep]
    return [G.float() for G in grads]


@pytest.mark.parametrize("together", [1, 2, 3, 7, 100])
def test_matrices_in_stacks_step_as_they_do_one_by_one(together, monkeypatch):
    grads = [G for both in zip(*map(directions, SHAPES), strict=True) for G in both]  # shapes take turns
    matrices = [normal(i, *G.shape).float() for i, G in enumerate(grads)]
    monkeypatch.setattr(muon, "STACK_BYTES", {"cpu": together * 60 * 4})
    for p, W, G in zip(step_together(matrices, grads), matrices, grads, strict=True):
        close(p, muon_steps(W, [G], [0.1])[0][0], 1e-5)


@every_shape
def test_a_nan_in_one_gradient_leaves_the_other_matrices_as_they_would_be(shape):
    grads = directions(shape)
    matrices = [normal(i, *shape).float() for i in range(len(grads))]
    clean = step_together(matrices, grads)
    grads[4][0, 0] = torch.nan
    spoiled = step_together(matrices, grads)
    assert spoiled[4].isnan().any()
    assert all(torch.equal(a, b) for i, (a, b) in enumerate(zip(spoiled, clean, strict=True)) if i != 4)


@pytest.mark.parametrize("ns_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1e19, 1e30, 1e-25, 1e-35])
def test_matrices_whose_squares_leave_the_range_step_like_others(size, ns_dtype):
    G = normal(0, 6, 9).float()
    exponent = 2.0 ** round(math.log2(size))
    steps = [
        walk(Muon, torch.zeros(6, 9), [G * factor], [1.0], eps=0.0, ns_dtype=ns_dtype)[0][1]
        for factor in (1.0, exponent)
    ]
    torch.testing.assert_close(steps[1], steps[0], rtol=0, atol=1e-5)
    assert steps[0].norm() > 1


def test_matrices_without_gradient_do_not_shift_the_others():
    grads = directions((5, 12))
    matrices = [normal(i, 5, 12).float() for i in range(len(grads))]
    expected = step_together(matrices, grads)
    params = [Parameter(W.clone()) for W in matrices]
    for i, p in enumerate(params):
        p.grad = None if i in (0, 3) else grads[i]
    Muon(params, lr=0.1).step()
    for i, (p, W) in enumerate(zip(params, matrices, strict=True)):
        close(p, W if i in (0, 3) else expected[i], 1e-6)


def test_gradient_of_a_frozen_parameter_is_used_like_any_other():
    W, G = normal(0, 5, 12).float(), normal(1, 5, 12).float()
    p = Parameter(W.clone(), requires_grad=False)
    p.grad = G
    Muon([p], lr=0.1).step()
    close(p, step_together([W], [G])[0], 0.0)


# What it does not depend on


@examples
@given(seed=seeds, shape=st.tuples(sides, sides))
def test_frame_can_be_rotated_on_both_sides(seed, shape):
    left, right = (rotation(normal(seed + 98 + i, side, side)) for i, side in enumerate(shape))
    W, grads = normal(seed, *shape), gradients(seed + 1, shape)
    rotated = walk(double, left @ W @ right, [left @ G @ right for G in grads], LRS)
    assert_walks_agree(rotated, [(left @ U @ right, left @ S @ right) for U, S in walk(double, W, grads, LRS)], 1e-9)


@every_shape
def test_transposed_matrix_makes_the_transposed_step_but_for_the_scale(shape):
    m, n = shape
    W, grads = torch.zeros(shape), gradients(1, shape, dtype=torch.float32)
    scale = math.sqrt(max(1, m / n)) / math.sqrt(max(1, n / m))
    for (_, S), (_, T) in zip(walk(Muon, W, grads, LRS), walk(Muon, W.T, [G.T for G in grads], LRS), strict=True):
        close(S, scale * T.T, 1e-5)


@pytest.mark.few(4)
@every_shape
@pytest.mark.parametrize("exponent", [-30, 1, 30])
def test_scale_of_the_gradients_changes_no_bit_without_a_stabiliser(shape, exponent):
    W, grads = normal(0, *shape).float(), gradients(1, shape, dtype=torch.float32)
    plain = walk(Muon, W, grads, LRS, eps=0.0)
    assert_walks_agree(walk(Muon, W, [G * 2.0**exponent for G in grads], LRS, eps=0.0), plain)


@every_shape
def test_singular_values_of_the_step_are_near_the_scaled_learning_rate(shape):
    scale = 0.1 * math.sqrt(max(1, shape[0] / shape[1]))
    for _, S in walk(Muon, normal(0, *shape).float(), gradients(1, shape, dtype=torch.float32), 6 * [0.1]):
        singular_values = torch.linalg.svdvals(S) / scale
        assert singular_values.min() > 0.3
        assert singular_values.max() < 1.3

"""Muon: the paper's step, stacks of matrices, and Newton-Schulz against the plain loop."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import Parameter

from hilbert_monitor.optim import Muon
from hilbert_monitor.optim.muon import orthogonalize
from tests.support.draws import draws
from tests.support.optim_references import (
    LRS,
    assert_walks_agree,
    close,
    gradients,
    muon_steps,
    newton_schulz,
    rotation,
    walk,
)
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


def test_defaults_are_the_papers():
    p, G = Parameter(normal(0, 7, 5)), normal(1, 7, 5, scale=1e-5)  # small, so that eps shows
    p.grad = G
    optimizer = Muon([p], ns_dtype=torch.float64)
    expected = muon_steps(p.detach(), [G, G], 2 * [8e-3], momentum=0.95, weight_decay=0.1, ns_steps=5, eps=1e-5)
    optimizer.step()
    optimizer.step()
    close(p, expected[-1][0], 1e-14)


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


@pytest.mark.parametrize("together", [1, 3, 100])
def test_matrices_in_stacks_step_as_they_do_one_by_one(together, monkeypatch):
    grads = [G for both in zip(*map(directions, SHAPES), strict=True) for G in both]  # shapes take turns
    matrices = [normal(i, *G.shape).float() for i, G in enumerate(grads)]
    monkeypatch.setattr("hilbert_monitor.optim.muon.STACK_BYTES", {"cpu": together * 60 * 4})
    for p, W, G in zip(step_together(matrices, grads), matrices, grads, strict=True):
        close(p, muon_steps(W, [G], [0.1])[0][0], 1e-5)


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


# What it does not depend on


# Newton-Schulz

STACKED = [(1, 1), (1, 9), (5, 5), (6, 11), (6, 12), (7, 40), (24, 32)]
every_stacked = pytest.mark.parametrize("shape", STACKED, ids=str)


def badly_conditioned(seed, m, n):
    """Singular values from one down to 1e-9."""
    decay = 10 ** -torch.linspace(0, 9, m, dtype=torch.float64)
    return rotation(normal(seed, m, m)) * decay @ rotation(normal(seed + 1, n, n))[:m]


KINDS = {
    "generic": normal,
    "rank one": lambda seed, m, n: normal(seed, m, 1) @ normal(seed + 1, 1, n),
    "zero": lambda seed, m, n: torch.zeros(m, n, dtype=torch.float64),
    "badly conditioned": badly_conditioned,
    "repeated rows": lambda seed, m, n: normal(seed, 1, n).expand(m, n),
}


def one(N, steps=5, eps=1e-5):
    """Orthogonalise a single matrix, which is left as it is."""
    return orthogonalize(N.clone()[None], steps=steps, eps=eps)[0]


@every_stacked
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_result_is_the_plain_loops_after_any_number_of_steps(kind, shape):
    N = kind(3, *shape)
    for steps in range(1, 8):
        close(one(N, steps), newton_schulz(N, steps), 1e-12)
    close(one(N.float()), newton_schulz(N.float()), 1e-5)
    assert one(N.bfloat16()).dtype == torch.bfloat16
    assert torch.equal(one(-N), -one(N))


@every_stacked
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_stacked_matrices_do_not_see_each_other(shape, bad):
    stack = torch.stack([kind(seed, *shape).float() for seed in range(3) for kind in KINDS.values()])
    clean = orthogonalize(stack.clone(), steps=5, eps=1e-5)
    close(clean, torch.stack([one(N) for N in stack]), 1e-5)
    stack[2, -1, -1] = bad
    result = orthogonalize(stack, steps=5, eps=1e-5)
    others = [i for i in range(len(stack)) if i != 2]
    assert torch.equal(result[others], clean[others])
    assert result[2].isnan().any()


@pytest.mark.parametrize("shape", [(7, 9), (7, 40)], ids=str)
def test_newton_schulz_has_the_chosen_precision_and_no_graph_whatever_the_process_has_set(shape):
    N = normal(9, *shape).float()
    expected = one(N)
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16), MatmulPrecision() as products:
            result = one(N.requires_grad_())
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert torch.equal(result, expected)
    assert not result.requires_grad
    assert {setting for _, *settings in products.seen for setting in settings} == {"ieee"}
    assert {dtype for dtype, *_ in products.seen} == {torch.float32}
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        with MatmulPrecision() as products:
            walk(Muon, normal(0, *shape).float(), [normal(1, *shape).float()], [0.1], ns_dtype=dtype)
        assert {seen for seen, *_ in products.seen} == {dtype}

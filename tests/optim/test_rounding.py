"""How weights in bf16 and fp16 are rounded: the trajectory is kept, resumed and shared, and the step stays in fp32."""

import copy
import io

import pytest
import torch
from torch.nn import Parameter
from torch.nn.functional import cross_entropy

from hilbert_monitor.optim import ChainedOptimizer, Muon, RowNorm
from tests.support.references import normal

low = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
each = pytest.mark.parametrize("make", [RowNorm, Muon])
rounded = pytest.mark.parametrize("rounding", ["compensated"])


def steps(optimizer, p, count, seed=0):
    for t in range(count):
        p.grad = normal(seed + t, *p.shape).to(p.dtype)
        optimizer.step()
    return p.detach().clone()


def regression(dtype, rounding, start, count=500):
    """Weights and loss of a softmax regression after some steps of RowNorm at a small learning rate."""
    draw = torch.Generator().manual_seed(0)
    H = normal(1, 1024, 32) * 2 / 32**0.5
    y = torch.multinomial((H @ (start + 0.3 * normal(2, *start.shape)).T).softmax(1), 1, generator=draw)[:, 0]
    U = Parameter(start.to(dtype, copy=True))
    optimizer = RowNorm([U], lr=3e-4, rounding=rounding)
    for _ in range(count):
        rows = torch.randint(len(H), (128,), generator=draw)
        W = U.detach().to(torch.float64).requires_grad_()
        cross_entropy(H[rows] @ W.T, y[rows]).backward()
        U.grad = W.grad.to(dtype)
        optimizer.step()
    return U.detach().double(), float(cross_entropy(H @ U.detach().double().T, y))


@pytest.mark.sweep
def test_compensated_rounding_keeps_a_trajectory_that_rounding_to_nearest_loses():
    start = (0.5 * normal(0, 100, 32)).bfloat16().double()
    exact, exact_loss = regression(torch.float64, "nearest", start)
    first_loss = regression(torch.float64, "nearest", start, count=0)[1]
    distance, share = {}, {}
    for rounding in ("nearest", "compensated"):
        U, loss = regression(torch.bfloat16, rounding, start)
        distance[rounding] = float((U - exact).norm() / (exact - start).norm())
        share[rounding] = (first_loss - loss) / (first_loss - exact_loss)
    assert distance["nearest"] > 0.9
    assert share["nearest"] < 0.2
    assert distance["compensated"] < 0.1
    assert share["compensated"] == pytest.approx(1, abs=0.01)


@each
@rounded
@low
def test_the_increment_is_the_intended_step_in_fp32(make, rounding, dtype):
    p, twin = (Parameter(normal(0, 12, 5).to(dtype)) for _ in range(2))
    optimizer, plain = make([p], lr=0.1, rounding=rounding), make([twin], lr=0.1)
    for t in range(3):
        steps(optimizer, p, 1, seed=t)
        steps(plain, twin, 1, seed=t)
        assert torch.equal(optimizer.increment(p), plain.increment(twin))
        assert optimizer.increment(p).dtype == torch.float32


@each
@rounded
def test_a_saved_state_resumes_to_the_bit_in_a_chain_too(make, rounding):
    for chained in (False, True):
        p = Parameter(normal(0, 12, 5).bfloat16())
        optimizer = make([p], lr=1e-3, rounding=rounding)
        optimizer = ChainedOptimizer(optimizer) if chained else optimizer
        steps(optimizer, p, 3)
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        q = Parameter(p.detach().clone())
        other = make([q], lr=9.0)
        other = ChainedOptimizer(other) if chained else other
        other.load_state_dict(torch.load(file, weights_only=True))
        assert torch.equal(steps(other, q, 3, seed=50), steps(optimizer, p, 3, seed=50))
        if rounding == "compensated":
            assert other.state[q]["compensation"].dtype == torch.bfloat16
            assert torch.equal(other.state[q]["compensation"], optimizer.state[p]["compensation"])


@each
def test_a_state_that_was_saved_before_there_was_a_choice_of_rounding_loads(make):
    p = Parameter(normal(0, 12, 5).bfloat16())
    optimizer = make([p], lr=1e-3)
    steps(optimizer, p, 1)
    state = copy.deepcopy(optimizer.state_dict())
    del state["param_groups"][0]["rounding"]
    q = Parameter(p.detach().clone())
    other = make([q], lr=1e-3, rounding="compensated")
    other.load_state_dict(state)
    steps(other, q, 1)
    assert other.state[q]["compensation"].any()


@each
@pytest.mark.parametrize("rounding", ["nearest", "compensated"])
def test_the_global_random_numbers_are_left_alone_and_fp32_weights_are_as_without(make, rounding):
    state = torch.get_rng_state()
    p, q, half = (Parameter(normal(0, 12, 5).to(dtype)) for dtype in (torch.float32, torch.float32, torch.bfloat16))
    steps(make([half], lr=0.1, rounding=rounding), half, 2)
    assert torch.equal(steps(make([p], lr=0.1, rounding=rounding), p, 2), steps(make([q], lr=0.1), q, 2))
    assert torch.equal(torch.get_rng_state(), state)

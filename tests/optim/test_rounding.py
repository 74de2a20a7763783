"""How weights in bf16 and fp16 are rounded: the trajectory is kept, resumed and shared, and the step stays in fp32."""

import copy
import io

import pytest
import torch
from torch.nn import Parameter
from torch.nn.functional import cross_entropy

from hilbert_monitor.optim import ChainedOptimizer, Muon, RowNorm
from hilbert_monitor.optim._rounding import NEAREST, Rounding
from tests.support.ranks import in_ranks
from tests.support.references import normal

low = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
each = pytest.mark.parametrize("make", [RowNorm, Muon])
rounded = pytest.mark.parametrize("rounding", ["stochastic", "compensated"])


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
def test_stochastic_and_compensated_rounding_keep_a_trajectory_that_rounding_to_nearest_loses():
    start = (0.5 * normal(0, 100, 32)).bfloat16().double()
    exact, exact_loss = regression(torch.float64, "nearest", start)
    first_loss = regression(torch.float64, "nearest", start, count=0)[1]
    distance, share = {}, {}
    for rounding in ("nearest", "stochastic", "compensated"):
        U, loss = regression(torch.bfloat16, rounding, start)
        distance[rounding] = float((U - exact).norm() / (exact - start).norm())
        share[rounding] = (first_loss - loss) / (first_loss - exact_loss)
    assert distance["nearest"] > 0.9
    assert share["nearest"] < 0.2
    assert distance["stochastic"] < 0.5
    assert distance["compensated"] < 0.1
    assert share["stochastic"] == pytest.approx(1, abs=0.05)
    assert share["compensated"] == pytest.approx(1, abs=0.01)


@low
def test_stochastic_rounding_goes_to_a_neighbour_with_the_exact_number_as_mean(dtype):
    info = torch.finfo(dtype)
    numbers = torch.tensor([0.3, -0.3, 1.0, 0.0, 1.001, -1.001, info.max * 0.9999, info.smallest_normal / 7, -1e-3])
    target = numbers.repeat(20_000, 1)
    u = torch.empty_like(target, dtype=dtype)
    Rounding(generator=torch.Generator().manual_seed(0)).store(u, target.clone())
    for column, number in zip(u.T, numbers, strict=True):
        values = column.unique().double()
        assert len(values) <= 2
        assert values.min() <= number <= values.max()
        spacing = float(values.max() - values.min())
        assert float(column.double().mean()) == pytest.approx(float(number), abs=0.02 * spacing + 1e-12)
        if len(values) == 2:
            assert torch.nextafter(values.min().to(dtype), values.max().to(dtype)) == values.max()


@low
def test_stochastic_rounding_leaves_what_is_not_finite_as_it_is(dtype):
    target = torch.tensor([torch.inf, -torch.inf, torch.nan])
    u = torch.zeros(3, dtype=dtype)
    Rounding(generator=torch.Generator().manual_seed(0)).store(u, target)
    assert u[:2].tolist() == [torch.inf, -torch.inf]
    assert u[2].isnan()


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
@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "compensated"])
def test_the_global_random_numbers_are_left_alone_and_fp32_weights_are_as_without(make, rounding):
    state = torch.get_rng_state()
    p, q, half = (Parameter(normal(0, 12, 5).to(dtype)) for dtype in (torch.float32, torch.float32, torch.bfloat16))
    steps(make([half], lr=0.1, rounding=rounding), half, 2)
    assert torch.equal(steps(make([p], lr=0.1, rounding=rounding), p, 2), steps(make([q], lr=0.1), q, 2))
    assert torch.equal(torch.get_rng_state(), state)


def test_parameters_and_steps_draw_different_numbers():
    states = [{}, {}]
    p = torch.zeros(4, 4, dtype=torch.bfloat16)
    draws = [
        torch.rand(4, generator=Rounding.of(p, "stochastic", state, index).generator).tolist()
        for index, state in enumerate(states)
        for _ in range(2)
    ]
    assert len({tuple(row) for row in draws}) == 4
    assert Rounding.of(p.float(), "stochastic", {}, 0) is NEAREST


def rank_steps(rank, world):
    torch.manual_seed(rank)  # ranks may be at different places of their own streams
    p, q = (Parameter(normal(i, 12, 5).bfloat16()) for i in range(2))
    optimizer = ChainedOptimizer(Muon([p], rounding="stochastic"), RowNorm([q], lr=1e-3, rounding="stochastic"))
    for t in range(4):
        for i, parameter in enumerate((p, q)):
            parameter.grad = normal(10 * t + i, 12, 5).bfloat16()
        optimizer.step()
    return [p.detach().float().tolist(), q.detach().float().tolist()]


def test_all_ranks_round_alike(tmp_path):
    first, second = in_ranks(rank_steps, tmp_path / "ranks")
    assert first == second

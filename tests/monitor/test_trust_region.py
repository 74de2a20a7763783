"""TrustRegion: what is stored never has a larger diameter than the limit, and a step within it keeps its bits."""

import math
import warnings
from functools import cache, partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam, AdamW, RMSprop

from hilbert_monitor import ChainedOptimizer, Muon, RowNorm, TrustRegion
from hilbert_monitor.monitor.finite_gradients import NonFiniteGradients
from tests.support.draws import draws
from tests.support.ranks import in_ranks
from tests.support.ways import assert_same_way

V, D = 41, 8


class Stubborn(torch.optim.Optimizer):
    """An optimizer that nobody knows: it subtracts the gradient's sign."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad.sign())


OPTIMIZERS = {
    "AdamW": partial(AdamW, weight_decay=0.1),
    "fused AdamW": partial(AdamW, weight_decay=0.1, fused=True),
    "Adam": partial(Adam, weight_decay=0.1),
    "SGD": partial(SGD, momentum=0.9),
    "RMSprop": RMSprop,
    "RowNorm": partial(RowNorm, weight_decay=0.1),
    "Muon": Muon,
    "unknown": Stubborn,
}
DECOUPLED = {"AdamW", "fused AdamW", "RowNorm", "Muon"}


class Model(nn.Module):
    """An embedding and a head."""

    def __init__(self, *, bias=False, tied=False, scale=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.lm_head = nn.Embedding(V, D), nn.Linear(D, V, bias=bias)
        self.lm_head.weight.data.mul_(scale)
        if tied:
            self.lm_head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.lm_head(self.embedding(tokens))


def backward(model, seed, scale=1.0):
    tokens = torch.randint(V, (2, 16), generator=torch.Generator().manual_seed(seed))
    (scale * cross_entropy(model(tokens[0]).float(), tokens[1])).backward()


def diameter(S):
    """The reference: all pairs, in fp64, from differences."""
    S = S.double()
    return float((S[:, None] - S[None]).square().sum(2).amax().sqrt())


def stored_step(before, after, keep):
    """What was stored, without decay. A row that was put back to its old bits has not moved."""
    S = after.double() - keep * before.double()
    S[(before == after).all(1)] = 0.0
    return S


def keep_of(optimizer, name, weight):
    group = next(g for g in optimizer.param_groups if any(p is weight for p in g["params"]))
    return 1 - group["lr"] * group["weight_decay"] if name in DECOUPLED else 1.0


def head_optimizer(name, model, lr):
    """One optimizer for the head and plain SGD for the rest, chained."""
    rest = [p for p in model.parameters() if p is not model.lm_head.weight]
    head = OPTIMIZERS[name]([model.lm_head.weight], lr=lr)
    return ChainedOptimizer(head, SGD(rest, lr=1e-3)) if rest else head


@given(
    name=st.sampled_from(sorted(OPTIMIZERS)),
    how=st.sampled_from(["rows", "scale"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    magnitude=st.sampled_from([1e-3, 1.0, 1e6]),
    limit=st.sampled_from([1e-5, 2e-3, 0.05, 1.0]),
    scale=st.sampled_from([1e-2, 1.0, 30.0]),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=draws(75), deadline=None)
def test_diameter_of_what_is_stored_is_within_the_limit(name, how, dtype, magnitude, limit, scale, seed):
    model = Model(scale=scale).to(dtype)
    weight = model.lm_head.weight
    optimizer = OPTIMIZERS[name]([weight], lr=1e-2 * magnitude)
    for group in optimizer.param_groups:
        if "weight_decay" in group:
            group["weight_decay"] /= magnitude
    with TrustRegion(limit, how=how).watch(model, optimizer) as region, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(3):
            optimizer.zero_grad()
            backward(model, seed + number)
            before = weight.detach().clone()
            optimizer.step()
            S = stored_step(before, weight.detach(), keep_of(optimizer, name, weight))
            assert diameter(S) <= limit * (1 + 1e-6), region.last
            assert region.last.made_upper <= limit
            assert weight.isfinite().all()


@pytest.mark.few(6)
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
@pytest.mark.parametrize("how", ["rows", "scale"])
def test_steps_within_the_limit_keep_their_bits(name, how):
    weights = []
    for region in (None, TrustRegion(1e3, how=how)):
        model = Model(bias=True)
        optimizer = head_optimizer(name, model, 1e-2)
        if region is not None:
            region.attach(model, optimizer)
        for seed in range(4):
            optimizer.zero_grad()
            backward(model, seed)
            optimizer.step()
        weights.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*weights, strict=True))
    assert region.clipped == 0
    assert region.last.asked_lower > 0


def test_rows_in_the_ball_keep_their_bits_beside_one_that_is_held():
    model = Model()
    optimizer = SGD(model.parameters(), lr=1.0)
    model.lm_head.weight.grad = torch.full((V, D), 1e-3)
    model.lm_head.weight.grad[7] = 0.1
    twin = model.lm_head.weight.detach() - model.lm_head.weight.grad
    with TrustRegion(0.08).watch(model, optimizer) as region:
        optimizer.step()
    others = torch.arange(V) != 7
    assert torch.equal(model.lm_head.weight[others], twin[others])
    assert not torch.equal(model.lm_head.weight[7], twin[7])
    assert (region.last.held, region.last.rows, region.last.tokens) == (1, V, (7,))


def test_bounds_of_the_step_that_was_asked_for_hold():
    model = Model()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    with TrustRegion(1e-3).watch(model, optimizer) as region:
        twin = Model()
        other = AdamW(twin.parameters(), lr=1e-2)
        for one in (model, twin):
            backward(one, 3)
        optimizer.step()
        before = twin.lm_head.weight.detach().clone()
        other.step()
    asked = diameter(twin.lm_head.weight.detach() - (1 - 1e-4) * before.double())
    assert region.last.asked_lower <= asked * (1 + 1e-6)
    assert asked <= region.last.asked_upper * (1 + 1e-6)


def test_bias_extends_the_rows():
    model = Model(bias=True)
    optimizer = ChainedOptimizer(RowNorm([model.lm_head.weight], lr=1e-4), SGD([model.lm_head.bias], lr=10.0))
    with TrustRegion(0.01).watch(model, optimizer) as region:
        backward(model, 0)
        before = torch.cat([model.lm_head.weight, model.lm_head.bias[:, None]], 1).detach().clone()
        optimizer.step()
    after = torch.cat([model.lm_head.weight, model.lm_head.bias[:, None]], 1).detach()
    assert diameter(after - before) <= 0.01 * (1 + 1e-6)
    assert region.last.held


def test_tied_head_is_held_as_a_whole():
    model = Model(tied=True)
    optimizer = AdamW(model.parameters(), lr=1.0, weight_decay=0.0)
    with TrustRegion(0.01).watch(model, optimizer):
        backward(model, 0)
        before = model.lm_head.weight.detach().clone()
        optimizer.step()
    assert diameter(model.embedding.weight.detach() - before) <= 0.01 * (1 + 1e-6)


def test_logit_scale_counts():
    model = Model()
    optimizer = AdamW(model.parameters(), lr=1.0, weight_decay=0.0)
    with TrustRegion(0.01, logit_scale=10.0).watch(model, optimizer):
        backward(model, 0)
        before = model.lm_head.weight.detach().clone()
        optimizer.step()
    D = diameter(model.lm_head.weight.detach() - before)
    assert 0.0005 < D <= 0.001 * (1 + 1e-6)


def test_limit_may_be_a_function_of_the_step_and_a_zero_learning_rate_is_no_step():
    seen = []

    def limit(step):
        seen.append(step)
        return 0.0 if step == 1 else 0.01 / step

    model = Model()
    optimizer = AdamW(model.parameters(), lr=0.0)
    with TrustRegion(limit).watch(model, optimizer) as region:
        for step in (1, 2, 3):
            backward(model, step)
            optimizer.step()
            assert region.last.held == (0 if step == 1 else region.last.held)
            optimizer.param_groups[0]["lr"] = 1.0
    assert seen == [1, 2, 3]
    assert region.last.limit == 0.01 / 3
    assert region.clipped == 2


@pytest.mark.parametrize("limit", [-1.0, math.nan, "0.1", True])
def test_limit_that_is_none_is_refused(limit):
    with pytest.raises(ValueError, match="zero or a positive number"):
        TrustRegion(limit)


# In nats


class Normed(Model):
    """A norm before the head."""

    def __init__(self, norm, **options):
        super().__init__(**options)
        self.final_norm = norm

    def forward(self, tokens):
        return self.lm_head(self.final_norm(self.embedding(tokens)))


class PlusOneNorm(nn.Module):
    """An RMSNorm whose gain is one more than its weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.0, 2.0, D))

    def forward(self, x):
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + self.weight)


def norm_with_gain(norm, gain):
    nn.init.constant_(norm.weight, 1.0)
    norm.weight.data[3] = gain
    return norm


@pytest.mark.parametrize(
    ("norm", "largest"),
    [
        (nn.RMSNorm(D, elementwise_affine=False), 1.0),
        (norm_with_gain(nn.RMSNorm(D), -4.0), 4.0),
        (norm_with_gain(nn.LayerNorm(D), 2.0), 2.0),
        (PlusOneNorm(), 3.0),
    ],
)
def test_nats_bound_log_odds_at_any_state_behind_a_norm(norm, largest):
    model = Normed(norm)
    optimizer = SGD([model.lm_head.weight], lr=100.0)
    with TrustRegion(nats=0.5).watch(model, optimizer) as region:
        backward(model, 0)
        before = model.lm_head.weight.detach().clone()
        optimizer.step()
    assert region.last.limit == pytest.approx(0.5 / (D**0.5 * largest), rel=1e-6)
    assert region.last.held
    S = (model.lm_head.weight.detach() - before).double()
    states = norm(1e3 * torch.randn(500, D, generator=torch.Generator().manual_seed(1))).double()
    changes = states @ S.T
    assert (changes.amax(1) - changes.amin(1)).amax() <= 0.5 * (1 + 1e-6)


def test_nats_without_a_norm_take_the_largest_state_so_far():
    model = Model(bias=True)
    optimizer = SGD([*model.lm_head.parameters()], lr=100.0)
    region = TrustRegion(nats=0.5)
    with region.watch(model, optimizer):
        limits = []
        for scale in (1.0, 10.0, 0.1):
            model.embedding.weight.data.normal_(0.0, scale, generator=torch.Generator().manual_seed(0))
            model(torch.arange(V)).sum().backward()
            optimizer.step()
            limits.append(region.last.limit)
    norm = model.embedding.weight.detach().norm(dim=1).amax()  # of the last
    expected = [0.5 / math.hypot(float(norm) * factor, 1.0) for factor in (10, 100, 100)]
    assert limits == pytest.approx(expected, rel=1e-5)
    assert region.state_dict()["hidden_norm"] == pytest.approx(100 * float(norm), rel=1e-5)


def test_nats_of_a_head_that_is_never_called_are_refused():
    model = Model()
    optimizer = SGD([model.lm_head.weight], lr=1.0)
    model.lm_head.weight.grad = torch.ones(V, D)
    with TrustRegion(nats=0.5).watch(model, optimizer), pytest.raises(RuntimeError, match="hidden_norm="):
        optimizer.step()
    with TrustRegion(nats=0.5, hidden_norm=2.0).watch(model, optimizer) as region:
        optimizer.step()
    assert region.last.limit == 0.25


def test_limit_and_nats_exclude_each_other():
    for options in ({}, {"limit": 0.1, "nats": 0.5}):
        with pytest.raises(TypeError, match=r"limit=\.\.\. or nats=\.\.\."):
            TrustRegion(**options)


def test_soft_capped_and_computed_heads_are_refused():
    model = Model()
    model.config = SimpleNamespace(final_logit_softcapping=30.0)
    with pytest.raises(ValueError, match="soft-capped at 30"):
        TrustRegion(0.1).attach(model, SGD(model.parameters(), lr=1.0))
    model = Model()
    nn.utils.parametrizations.weight_norm(model.lm_head)
    with pytest.raises(ValueError, match="computed from other parameters"):
        TrustRegion(0.1).attach(model, SGD(model.parameters(), lr=1.0))


# Gradients that are not finite


@pytest.mark.few(6)
@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_step_with_a_gradient_that_is_not_finite_is_left_out_whole(name, closure):
    model = Model(bias=True)
    optimizer = head_optimizer(name, model, 1e-2)
    with TrustRegion(0.1).watch(model, optimizer) as region:
        backward(model, 0)
        optimizer.step()
        before = [p.detach().clone() for p in model.parameters()]
        state = [x.clone() for s in optimizer.state.values() for x in s.values() if isinstance(x, torch.Tensor)]

        def run():
            optimizer.zero_grad()
            backward(model, 1)
            model.embedding.weight.grad[3, 1] = math.inf

        if not closure:
            run()
        with pytest.warns(UserWarning, match="step 2 is not finite"):
            optimizer.step(run) if closure else optimizer.step()
        assert region.last.left_out
        assert not region.last.held
        assert model.embedding.weight.grad[3, 1] == math.inf, "the gradients are there again"
        after = [x for s in optimizer.state.values() for x in s.values() if isinstance(x, torch.Tensor)]
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert all(torch.equal(a, b) for a, b in zip(state, after, strict=True))
        optimizer.zero_grad()
        backward(model, 2)
        optimizer.step()
        assert not region.last.left_out
        assert region.left_out == 1


def test_run_stops_after_so_many_steps_that_were_left_out():
    model = Model()
    optimizer = SGD(model.parameters(), lr=1e-2)
    with TrustRegion(0.1, stop_after=3).watch(model, optimizer), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for bad in (True, True, False, True, True):
            optimizer.zero_grad()
            backward(model, 0, math.nan if bad else 1.0)
            optimizer.step()
        optimizer.zero_grad()
        backward(model, 0, math.nan)
        with pytest.raises(NonFiniteGradients, match="3 steps in a row"):
            optimizer.step()
    assert model.lm_head.weight.isfinite().all()


@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_a_grad_scaler_skips_are_its_own(fused):
    model = Model()
    optimizer = AdamW(model.parameters(), lr=1e-2, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with TrustRegion(1e-3, stop_after=1).watch(model, optimizer) as region:
        for number, bad in enumerate((False, True, False)):
            optimizer.zero_grad()
            tokens = torch.randint(V, (2, 16), generator=torch.Generator().manual_seed(number))
            scaler.scale(cross_entropy(model(tokens[0]), tokens[1])).backward()
            if bad:
                model.lm_head.weight.grad[0, 0] = math.inf
            before = model.lm_head.weight.detach().clone()
            scaler.step(optimizer)
            scaler.update()
            assert torch.equal(before, model.lm_head.weight) == bad
            assert diameter(model.lm_head.weight.detach() - (1 - 1e-4) * before.double()) <= 1e-3 * (1 + 1e-6) or bad
    assert region.left_out == 0


def test_accumulated_gradients_make_one_step():
    model = Model()
    optimizer = AdamW(model.parameters(), lr=1.0)
    with TrustRegion(0.01).watch(model, optimizer) as region:
        for number in range(6):
            backward(model, number)
            if number % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
    assert region.step == region.clipped == 2


def test_head_without_a_gradient_rests():
    model = Model()
    optimizer = AdamW(model.parameters(), lr=1.0, weight_decay=0.5)
    with TrustRegion(1e-6).watch(model, optimizer) as region:
        model.embedding.weight.grad = torch.ones(V, D)
        before = model.lm_head.weight.detach().clone()
        optimizer.step()
    assert torch.equal(before, model.lm_head.weight)
    assert not region.last.held


def test_run_that_goes_on_makes_the_same_bits():
    def run(steps, saved=None):
        model = Model()
        optimizer = AdamW(model.parameters(), lr=0.1)
        region = TrustRegion(lambda step: 0.01 / step)
        if saved is not None:
            weights, state, own = saved
            model.load_state_dict(weights)
            optimizer.load_state_dict(state)
            region.load_state_dict(own)
        with region.watch(model, optimizer):
            for step in steps:
                optimizer.zero_grad()
                backward(model, step)
                optimizer.step()
        return model.state_dict(), optimizer.state_dict(), region.state_dict()

    whole, half = run(range(6)), run(range(3))
    resumed = run(range(3, 6), half)
    assert all(torch.equal(whole[0][name], resumed[0][name]) for name in whole[0])
    assert whole[2] == resumed[2]


def test_detached_region_leaves_no_trace():
    model = Model()
    optimizer = SGD(model.parameters(), lr=1.0)
    with TrustRegion(1e-6).watch(model, optimizer):
        pass
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


# Several ranks


def ranks_train(rank, world, layout, name, how):
    model = Model(bias=True)
    if layout == "fsdp":
        fully_shard(model.lm_head)
    if layout == "tp":
        mesh = init_device_mesh("cpu", (world,))
        parallelize_module(model, mesh, {"lm_head": ColwiseParallel(output_layouts=Replicate())})
    rest = [model.embedding.weight]
    head = [model.lm_head.weight] if name in ("RowNorm", "Muon") else [model.lm_head.weight, model.lm_head.bias]
    rest += [] if len(head) == 2 else [model.lm_head.bias]
    optimizer = ChainedOptimizer(OPTIMIZERS[name](head, lr=0.1), SGD(rest, lr=1e-3))
    results = []
    with TrustRegion(0.01, how=how).watch(model, optimizer) as region, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in range(3):
            optimizer.zero_grad()
            backward(model, seed)
            if seed == 1 and rank == world - 1:
                gradient = model.lm_head.weight.grad
                (gradient.to_local() if layout else gradient)[-1, 0] = math.nan
            optimizer.step()
            results.append(region.last)
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.lm_head.parameters()]
    return results, [w.detach() for w in weights]


HELD = (("AdamW", "rows"), ("RowNorm", "rows"), ("AdamW", "scale"))


def all_of_a_rank(rank, world):
    """Runs of every layout, one after the other: processes take longer to start."""
    layouts = ("fsdp", "tp", "") if world == 2 else ("fsdp",)
    return {(layout, *held): ranks_train(rank, world, layout, *held) for layout in layouts for held in HELD}


@pytest.fixture(scope="module")
def ranks_of(tmp_path_factory):
    """What each of so many ranks has."""
    return cache(lambda world: in_ranks(all_of_a_rank, tmp_path_factory.mktemp("ranks"), world=world))


@pytest.mark.few(1)
@pytest.mark.parametrize(("world", "layout"), [(2, "fsdp"), (3, "fsdp"), (2, "tp")])
def test_sharded_heads_are_held_as_whole_ones(ranks_of, world, layout):
    for name, how in HELD:
        sharded = [rank[layout, name, how] for rank in ranks_of(world)]
        whole, weights = ranks_train(0, 1, "", name, how)
        for results, mine in sharded:
            assert results == sharded[0][0]
            for one, other in zip(results, whole, strict=True):
                assert (one.step, one.left_out, one.held) == (other.step, other.left_out, other.held)
                assert one.asked_upper == pytest.approx(other.asked_upper, rel=1e-4)
            assert_same_way(mine, weights, Model(bias=True).lm_head.parameters())


def test_ranks_leave_out_a_step_together(ranks_of):
    for results, weights in (rank["", "AdamW", "rows"] for rank in ranks_of(2)):
        assert [one.left_out for one in results] == [False, True, False]
        assert all(w.isfinite().all() for w in weights)

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
from hilbert_monitor.monitor.trust_region import NonFiniteGradients
from tests.support.draws import draws
from tests.support.ranks import in_ranks
from tests.support.ways import assert_same_way

V, D = 41, 8


class Lion(torch.optim.Optimizer):
    """The step of lion-pytorch, in a class that is unknown."""

    def __init__(self, params, lr, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.mul_(1 - group["lr"] * group["weight_decay"])
                moment = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.add_(moment.clone().mul_(0.9).add(p.grad, alpha=0.1).sgn_(), alpha=-group["lr"])
                moment.mul_(0.99).add_(p.grad, alpha=0.01)


OPTIMIZERS = {
    "AdamW": partial(AdamW, weight_decay=0.1),
    "fused AdamW": partial(AdamW, weight_decay=0.1, fused=True),
    "Adam": partial(Adam, weight_decay=0.1),
    "SGD": partial(SGD, momentum=0.9),
    "RMSprop": RMSprop,
    "RowNorm": partial(RowNorm, weight_decay=0.1),
    "Muon": Muon,
    "unknown": Lion,
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


def train(model, optimizer, seeds):
    for seed in seeds:
        optimizer.zero_grad()
        backward(model, seed)
        optimizer.step()


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
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    magnitude=st.sampled_from([1e-3, 1.0, 1e6]),
    limit=st.sampled_from([1e-5, 2e-3, 0.05, 1.0]),
    scale=st.sampled_from([1e-2, 1.0, 30.0]),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=draws(75), deadline=None)
def test_diameter_of_what_is_stored_is_within_the_limit(name, dtype, magnitude, limit, scale, seed):
    """In fp64, to its own rounding: at most ten entries of a row are rounded, here and in the projection, each by half
    of eps times the row's length; a norm of D squares by (D / 2 + 1) eps of itself, twice."""
    model = Model(scale=scale).to(dtype)
    weight, eps = model.lm_head.weight, torch.finfo(torch.float64).eps
    optimizer = OPTIMIZERS[name]([weight], lr=1e-2 * magnitude)
    for group in optimizer.param_groups:
        if "weight_decay" in group:
            group["weight_decay"] /= magnitude
    with TrustRegion(limit).watch(model, optimizer) as region, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(3):
            optimizer.zero_grad()
            backward(model, seed + number)
            before = weight.detach().clone()
            optimizer.step()
            S = stored_step(before, weight.detach(), keep_of(optimizer, name, weight))
            length = float(torch.cat([before, weight.detach()]).double().norm(dim=1).max())
            assert diameter(S) <= limit + eps * (10 * length + (D + 2) * limit), region.last
            assert region.last.made_upper <= limit
            assert weight.isfinite().all()


@pytest.mark.few(4)
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_steps_within_the_limit_keep_their_bits(name):
    weights = []
    for region in (None, TrustRegion(1e3)):
        model = Model(bias=True)
        optimizer = head_optimizer(name, model, 1e-2)
        if region is not None:
            region.watch(model, optimizer)
        train(model, optimizer, range(4))
        weights.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*weights, strict=True))
    assert region.clipped == 0
    assert region.last.asked_lower > 0


def test_rows_in_the_ball_keep_their_bits_next_to_one_that_is_held():
    model = Model()
    optimizer = SGD(model.parameters(), lr=1.0)
    model.lm_head.weight.grad = torch.full((V, D), 1e-3)
    model.lm_head.weight.grad[7] = 0.1
    before = model.lm_head.weight.detach().clone()
    asked = before - model.lm_head.weight.grad
    with TrustRegion(0.08).watch(model, optimizer) as region:
        optimizer.step()
    others = torch.arange(V) != 7
    assert torch.equal(model.lm_head.weight[others], asked[others])
    assert not torch.equal(model.lm_head.weight[7], asked[7])
    assert (region.last.held, region.last.rows, region.last.tokens) == (1, V, (7,))
    rounding = 1 + 4 * torch.finfo(torch.float64).eps * D
    assert region.last.asked_lower <= diameter(asked.double() - before.double()) * rounding
    assert diameter(asked.double() - before.double()) <= region.last.asked_upper * rounding


@pytest.mark.parametrize("kind", ["bias", "tied", "scaled"])
def test_bias_tied_weight_and_logit_scale_count(kind):
    model = Model(bias=kind == "bias", tied=kind == "tied")
    optimizer = SGD(model.parameters(), lr=100.0)
    with TrustRegion(0.01, logit_scale=10.0 if kind == "scaled" else None).watch(model, optimizer):
        backward(model, 0)
        before = [p.detach().double().clone() for p in model.lm_head.parameters()]
        optimizer.step()
    parts = [p.detach().double() - x for p, x in zip(model.lm_head.parameters(), before, strict=True)]
    made = diameter(torch.cat([x.reshape(V, -1) for x in parts], 1)) * (10 if kind == "scaled" else 1)
    assert 0.005 < made <= 0.01 * (1 + 1e-12)


def test_limit_may_be_a_function_of_the_step_and_a_zero_learning_rate_is_no_step():
    model = Model()
    optimizer = AdamW(model.parameters(), lr=0.0)
    with TrustRegion(lambda step: 0.0 if step == 1 else 0.01 / step).watch(model, optimizer) as region:
        train(model, optimizer, [0])
        assert not region.last.held
        optimizer.param_groups[0]["lr"] = 1.0
        train(model, optimizer, range(2))
    assert region.last.limit == 0.01 / 3
    assert region.clipped == 2


@pytest.mark.parametrize("as_tensor", [False, True])
def test_limit_may_be_a_multiple_of_the_learning_rate(as_tensor):
    model = Model()
    optimizer = AdamW(model.parameters(), lr=torch.tensor(0.0) if as_tensor else 0.0)
    with TrustRegion(lr_multiple=0.5).watch(model, optimizer) as region:
        for lr in (0.25, 1.0, 0.125):
            optimizer.param_groups[0]["lr"] = torch.tensor(lr) if as_tensor else lr
            backward(model, 0)
            optimizer.step()
            assert region.last.limit == lr / 2
            assert region.last.held


def test_limit_may_be_a_multiple_of_the_usual_diameter():
    model = Model()
    optimizer = SGD([model.lm_head.weight], lr=1.0)
    gradient = torch.randn(V, D, generator=torch.Generator().manual_seed(0))
    steps = []
    with TrustRegion(usual=3.0).watch(model, optimizer) as region:
        for rate in [0.0] * 5 + [1e-3] * 55 + [1.0] * 20:
            optimizer.param_groups[0]["lr"] = rate
            model.lm_head.weight.grad = gradient
            optimizer.step()
            steps.append(region.last)
    assert [step.step for step in steps if step.held] == list(range(61, 81)), "a step of zero is not usual"
    assert steps[-1].made_upper == steps[-1].limit == pytest.approx(3 * steps[59].made_upper, rel=1e-3)


def lion_run(region, weight_decay, lr=1e-5):
    model = Model()
    optimizer = Lion(model.parameters(), lr=lr, weight_decay=weight_decay)
    if region is not None:
        region.watch(model, optimizer)
    train(model, optimizer, range(100))
    return model.lm_head.weight.detach()


def test_decay_that_is_unknown_is_held_with_the_step_and_never_undone():
    region = TrustRegion(1e-3)
    with pytest.warns(UserWarning, match="holds the whole change") as warned:
        weight = lion_run(region, weight_decay=0.1)
    assert len(warned) == 1
    assert region.last.held == region.clipped == 0
    assert torch.equal(weight, lion_run(None, weight_decay=0.1))


def test_held_steps_keep_the_decay_that_the_user_states():
    region = TrustRegion(1e-6, decay="decoupled")
    weight, c = lion_run(region, weight_decay=100.0), 1 - 1e-5 * 100.0
    assert region.last.held
    decayed = c**100 * Model().lm_head.weight.detach()
    # m' and the row around it move by 1e-6 / 2 each in a step; fp32 rounds twice, by 2^-24 of 1 / sqrt(D)
    assert (weight - decayed).norm(dim=1).max() <= 100 * (1e-6 + D**0.5 * 2 * 2**-24 / D**0.5)


def test_exactly_one_limit_is_given_zero_or_more():
    for options in ({}, {"limit": 0.1, "usual": 3.0}):
        with pytest.raises(TypeError, match="one of limit=, lr_multiple= and usual="):
            TrustRegion(**options)
    for options in ({"limit": -1.0}, {"limit": "0.1"}, {"usual": math.nan}, {"lr_multiple": True}):
        with pytest.raises(ValueError, match="zero or a positive number"):
            TrustRegion(**options)


def test_soft_capped_and_computed_heads_are_refused():
    model = Model()
    model.config = SimpleNamespace(final_logit_softcapping=30.0)
    with pytest.raises(ValueError, match="soft-capped at 30"):
        TrustRegion(0.1).watch(model, SGD(model.parameters(), lr=1.0))
    model = Model()
    nn.utils.parametrizations.weight_norm(model.lm_head)
    with pytest.raises(ValueError, match="computed from other parameters"):
        TrustRegion(0.1).watch(model, SGD(model.parameters(), lr=1.0))


# Gradients that are not finite


@pytest.mark.few(6)
@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_step_with_a_gradient_that_is_not_finite_is_left_out_whole(name, closure):
    model = Model(bias=True)
    optimizer = head_optimizer(name, model, 1e-2)
    with TrustRegion(0.1).watch(model, optimizer) as region:
        train(model, optimizer, [0])
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
        train(model, optimizer, [2])
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
        with pytest.raises(NonFiniteGradients, match="3 last steps were skipped"):
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


def test_head_without_a_gradient_rests():
    model = Model()
    optimizer = AdamW(model.parameters(), lr=1.0, weight_decay=0.5)
    with TrustRegion(1e-6).watch(model, optimizer) as region:
        model.embedding.weight.grad = torch.ones(V, D)
        before = model.lm_head.weight.detach().clone()
        optimizer.step()
    assert torch.equal(before, model.lm_head.weight)
    assert not region.last.held


@pytest.mark.parametrize("options", [{"limit": lambda step: 0.01 / step}, {"usual": 0.5}])
def test_run_that_goes_on_makes_the_same_bits(options):
    def run(steps, saved=None):
        model, region = Model(), TrustRegion(**options)
        optimizer = AdamW(model.parameters(), lr=0.1)
        if saved is not None:
            for one, state in zip((model, optimizer, region), saved, strict=True):
                one.load_state_dict(state)
        with region.watch(model, optimizer):
            train(model, optimizer, steps)
        assert region.clipped
        assert not optimizer._optimizer_step_pre_hooks
        return model.state_dict(), optimizer.state_dict(), region.state_dict()

    whole, half = run(range(60)), run(range(55))
    resumed = run(range(55, 60), half)
    assert all(torch.equal(whole[0][name], resumed[0][name]) for name in whole[0])
    assert whole[2] == resumed[2]


# Several ranks


def ranks_train(rank, world, layout, name):
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
    with TrustRegion(0.01).watch(model, optimizer) as region, warnings.catch_warnings():
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


HELD = ("AdamW", "RowNorm")


def all_of_a_rank(rank, world):
    """Runs of every layout, one after the other: processes take longer to start."""
    layouts = ("fsdp", "tp", "") if world == 2 else ("fsdp",)
    return {(layout, name): ranks_train(rank, world, layout, name) for layout in layouts for name in HELD}


@pytest.fixture(scope="module")
def ranks_of(tmp_path_factory):
    """What each of so many ranks has."""
    return cache(lambda world: in_ranks(all_of_a_rank, tmp_path_factory.mktemp("ranks"), world=world))


@pytest.mark.few(1)
@pytest.mark.parametrize(("world", "layout"), [(2, "fsdp"), (3, "fsdp"), (2, "tp")])
def test_sharded_heads_are_held_as_whole_ones(ranks_of, world, layout):
    for name in HELD:
        sharded = [rank[layout, name] for rank in ranks_of(world)]
        whole, weights = ranks_train(0, 1, "", name)
        for results, mine in sharded:
            assert results == sharded[0][0]
            for one, other in zip(results, whole, strict=True):
                assert (one.step, one.left_out, one.held) == (other.step, other.left_out, other.held)
                assert one.asked_upper == pytest.approx(other.asked_upper, rel=1e-4)
            assert_same_way(mine, weights, Model(bias=True).lm_head.parameters())


def test_ranks_leave_out_a_step_together(ranks_of):
    for results, weights in (rank["", "AdamW"] for rank in ranks_of(2)):
        assert [one.left_out for one in results] == [False, True, False]
        assert all(w.isfinite().all() for w in weights)

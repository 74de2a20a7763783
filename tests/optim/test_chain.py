"""The chain: several optimizers that step as they would alone, and look like one to everything that takes one."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, NAdam, RMSprop, lr_scheduler

from hilbert_monitor.optim import ChainedOptimizer, Muon, RowNorm
from tests.support.decoders import Plain, RawPositions, loss_of, seeded

MATRICES = ["blocks.0.up.weight", "blocks.0.down.weight", "blocks.1.up.weight", "blocks.1.down.weight"]
VECTORS = ["blocks.0.norm.weight", "blocks.1.norm.weight", "norm.weight"]


def parts(model, others=(AdamW,), named=True):
    """Muon, then each of `others` on a share of embedding and vectors, then RowNorm, not yet chained."""

    def of(names):
        return [(name, model.get_parameter(name)) if named else model.get_parameter(name) for name in names]

    rest = ["embed.weight", *VECTORS]
    muon = Muon(of(MATRICES), lr=0.02, weight_decay=0.1)
    middle = [make(of(rest[i :: len(others)])) for i, make in enumerate(others)]
    return muon, *middle, RowNorm(of(["lm_head.weight"]), lr=0.03)


def chained(model, others=(AdamW,), named=True):
    return ChainedOptimizer(*parts(model, others, named), model=model)


def backward(model, seed):
    for p in model.parameters():
        p.grad = None
    loss_of(model, seed).backward()


def train(model, step, seeds=range(4)):
    for seed in seeds:
        backward(model, seed)
        step()


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(a, b):
    """Whether two dictionaries, lists or tensors are equal bit for bit, dtypes included."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def snapshot(model, chain):
    return copy.deepcopy((weights(model), chain.state_dict()))


def is_shared(chain):
    """Whether the optimizers inside hold the chain's groups, in its order, and its state."""
    groups = [group for o in chain.optimizers for group in o.param_groups]
    return (
        {id(group) for group in groups} == {id(group) for group in chain.param_groups}
        and len(groups) == len(chain.param_groups)
        and all(o.state is chain.state for o in chain.optimizers)
        and all(chain.owner(p) is o for o in chain.optimizers for group in o.param_groups for p in group["params"])
    )


def has_state(chain, p):
    """Whether the owner of `p` keeps anything: all do but SGD without momentum."""
    return not isinstance(chain.owner(p), SGD) or chain.owner(p).defaults["momentum"] > 0


def fused(params):
    return AdamW(params, lr=0.01, weight_decay=0.1, fused=True)


OTHERS = {
    "fused AdamW": [fused],
    "two AdamWs": [fused, lambda params: AdamW(params, lr=0.002)],
    "SGD": [lambda params: SGD(params, lr=0.1, momentum=0.9)],
    "Adam": [lambda params: Adam(params, lr=0.01, amsgrad=True, foreach=True)],
    "Adagrad": [lambda params: Adagrad(params, lr=0.01, initial_accumulator_value=0.1)],
    "RMSprop": [lambda params: RMSprop(params, lr=0.01, momentum=0.5, centered=True)],
    "NAdam": [lambda params: NAdam(params, lr=0.01)],
    "three": [lambda params: SGD(params, lr=0.1), fused, lambda params: Adagrad(params, lr=0.01)],
}
all_others = pytest.mark.parametrize("others", OTHERS.values(), ids=OTHERS)


# A step is the steps of the optimizers


@all_others
def test_chain_steps_as_its_optimizers_do_one_after_another(others):
    together, apart = seeded(Plain), seeded(Plain)
    chain, alone = chained(together, others), parts(apart, others)
    train(together, chain.step)
    train(apart, lambda: [o.step() for o in alone])
    assert same(weights(together), weights(apart))
    assert not same(weights(together), weights(seeded(Plain)))
    states = {name: o.state[p] for o in alone for name, p in apart.named_parameters() if p in o.state}
    assert same({name: chain.state[p] for name, p in together.named_parameters() if p in chain.state}, states)


@all_others
def test_optimizers_that_have_stepped_are_chained_with_their_state(others):
    together, apart = seeded(Plain), seeded(Plain)
    first, alone = parts(together, others), parts(apart, others)
    train(together, lambda: [o.step() for o in first], range(2))
    chain = ChainedOptimizer(*first)
    train(together, chain.step, range(2, 5))
    train(apart, lambda: [o.step() for o in alone], range(5))
    assert same(weights(together), weights(apart))


def test_zero_grad_reaches_every_parameter():
    model = seeded(Plain)
    chain = chained(model)
    backward(model, 0)
    chain.zero_grad(set_to_none=False)
    assert all((p.grad == 0).all() for p in model.parameters())
    chain.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_closure_is_called_once_with_grad_and_its_value_returned():
    model, plain = seeded(Plain), seeded(Plain)
    chain, alone = chained(model), parts(plain)
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        backward(model, 0)
        return "the loss"

    assert chain.step(closure) == "the loss"
    assert calls == [True]
    train(plain, lambda: [o.step() for o in alone], [0])
    assert same(weights(model), weights(plain))


def test_step_without_a_closure_returns_nothing():
    model = seeded(Plain)
    chain = chained(model)
    backward(model, 0)
    assert chain.step() is None


def test_closure_sees_the_callers_autocast_and_the_step_does_not():
    model, plain = seeded(Plain), seeded(Plain)
    chain, alone = chained(model), chained(plain)
    inside, during_step = [], []
    for o in chain.optimizers:
        o.register_step_pre_hook(lambda *_: during_step.append(torch.is_autocast_enabled("cpu")))

    def closure():
        inside.append(torch.is_autocast_enabled("cpu"))
        backward(model, 0)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        chain.step(closure)
        backward(plain, 0)
        assert torch.is_autocast_enabled("cpu")
    alone.step()
    assert inside == [True]
    assert during_step == [False] * 3
    assert same(snapshot(model, chain), snapshot(plain, alone))


def test_every_hook_fires_once_a_step_and_the_inner_ones_see_the_new_gradient():
    model = seeded(Plain)
    chain = chained(model)
    head, fired = model.lm_head.weight, []

    def note(name):
        return lambda *_: fired.append((name, head.grad is not None))

    for name, o in (("chain", chain), *((type(o).__name__, o) for o in chain.optimizers)):
        o.register_step_pre_hook(note(f"before {name}"))
        o.register_step_post_hook(note(f"after {name}"))
    model.zero_grad()
    for _ in range(2):
        fired.clear()
        chain.step(lambda: backward(model, 0))
        inner = [(f"{when} {name}", True) for name in ("Muon", "AdamW", "RowNorm") for when in ("before", "after")]
        assert fired == [("before chain", False), *inner, ("after chain", True)]
        model.zero_grad()


@pytest.mark.parametrize("name", ["blocks.1.up.weight", "lm_head.weight"])
def test_sparse_gradient_of_a_matrix_is_refused_before_anything_moves(name):
    model = seeded(Plain)
    chain = chained(model)
    train(model, chain.step, range(2))
    backward(model, 2)
    p = model.get_parameter(name)
    p.grad = p.grad.to_sparse()
    before = snapshot(model, chain)
    with pytest.raises(TypeError, match=rf"\A.* needs dense real gradients, got a sparse one for .*'{name}'.*\Z"):
        chain.step()
    assert same(snapshot(model, chain), before)


def test_parameters_without_a_gradient_stay_and_have_no_state():
    model = seeded(Plain)
    chain = chained(model)
    before = weights(model)
    backward(model, 0)
    model.lm_head.weight.grad = None
    chain.step()
    assert torch.equal(model.lm_head.weight, before["lm_head.weight"])
    assert model.lm_head.weight not in chain.state


# One list of groups, one state


@all_others
def test_groups_and_state_are_shared_from_the_start_and_after_steps(others):
    model = seeded(Plain)
    chain = chained(model, others)
    assert is_shared(chain)
    train(model, chain.step, range(2))
    assert is_shared(chain)
    assert chain.state.keys() == {p for p in model.parameters() if has_state(chain, p)}


@pytest.mark.few(3)
@all_others
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_a_copy_shares_nothing_with_the_first_and_goes_on_as_it_does(others, copied):
    model = seeded(Plain)
    chain = chained(model, others)
    train(model, chain.step, range(2))
    other_model, other = copied((model, chain))
    assert is_shared(other)
    assert other.state.keys() == {p for p in other_model.parameters() if has_state(other, p)}
    assert same(snapshot(other_model, other), snapshot(model, chain))
    train(other_model, other.step, range(2, 5))
    assert is_shared(chain)
    train(model, chain.step, range(2, 5))
    assert same(snapshot(other_model, other), snapshot(model, chain))


@all_others
def test_a_chain_of_optimizers_that_had_stepped_is_copied(others):
    model = seeded(Plain)
    first = parts(model, others)
    train(model, lambda: [o.step() for o in first], range(2))
    chain = ChainedOptimizer(*first)
    other_model, other = copy.deepcopy((model, chain))
    assert same(snapshot(other_model, other), snapshot(model, chain))
    for its, o in ((model, chain), (other_model, other)):
        train(its, o.step, range(2, 4))
    assert same(snapshot(other_model, other), snapshot(model, chain))


def test_a_copy_loads():
    model = seeded(Plain)
    chain = chained(model)
    train(model, chain.step, range(2))
    other_model, other = copy.deepcopy((model, chain))
    other.load_state_dict(copy.deepcopy(chain.state_dict()))
    assert is_shared(other)
    for its, o in ((model, chain), (other_model, other)):
        train(its, o.step, range(2, 4))
    assert same(snapshot(other_model, other), snapshot(model, chain))


SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda t: 1 / (1 + t)),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=20, cycle_momentum=False),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=10),
}


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
def test_a_scheduler_on_the_chain_is_schedulers_on_its_optimizers(make):
    together, apart = seeded(Plain), seeded(Plain)
    chain, alone = chained(together), parts(apart)
    one, several = make(chain), [make(o) for o in alone]
    lrs = set()
    for seed in range(5):
        train(together, chain.step, [seed])
        train(apart, lambda: [o.step() for o in alone], [seed])
        for scheduler in (one, *several):
            scheduler.step()
        rates = [group["lr"] for o in chain.optimizers for group in o.param_groups]
        assert rates == [group["lr"] for o in alone for group in o.param_groups]
        lrs.add(tuple(rates))
    assert len(lrs) == 5
    assert same(weights(together), weights(apart))


def test_a_plateau_lowers_every_rate():
    model = seeded(Plain)
    chain = chained(model)
    scheduler = lr_scheduler.ReduceLROnPlateau(chain, factor=0.5, patience=0)
    before = [group["lr"] for o in chain.optimizers for group in o.param_groups]
    for _ in range(2):
        scheduler.step(1.0)
    assert [group["lr"] for o in chain.optimizers for group in o.param_groups] == [lr / 2 for lr in before]


def test_a_scheduler_goes_on_after_a_load():
    model = seeded(Plain)
    chain = chained(model)
    scheduler = lr_scheduler.LambdaLR(chain, lambda t: 1 / (1 + t))
    chain.load_state_dict(copy.deepcopy(chain.state_dict()))
    chain.step()
    scheduler.step()
    assert [o.param_groups[0]["lr"] for o in chain.optimizers] == [0.01, 0.0005, 0.015]


def test_gradients_are_clipped_over_the_chains_groups():
    model = seeded(Plain)
    chain = chained(model)
    backward(model, 0)
    norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    before = nn.utils.clip_grad_norm_([p for group in chain.param_groups for p in group["params"]], norm / 2)
    clipped = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    assert float(before) == pytest.approx(float(norm), rel=1e-4)
    assert float(clipped) == pytest.approx(float(norm / 2), rel=1e-4)


# A gradient scaler


def scaled_backward(model, scaler, seed):
    model.zero_grad()
    scaler.scale(loss_of(model, seed)).backward()


def test_a_scaled_step_is_the_unscaled_one():
    scaled, plain = seeded(Plain), seeded(Plain)
    one, other = chained(scaled, [fused]), chained(plain, [fused])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for seed in range(3):
        scaled_backward(scaled, scaler, seed)
        scaler.step(one)
        scaler.update()
    train(plain, other.step, range(3))
    assert same(snapshot(scaled, one), snapshot(plain, other))


@pytest.mark.parametrize("where", ["embed.weight", "blocks.0.up.weight", "norm.weight", "lm_head.weight"])
def test_an_overflow_anywhere_skips_every_optimizer(where):
    model = seeded(Plain)
    chain = chained(model, [fused])
    train(model, chain.step, range(2))
    before = snapshot(model, chain)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaled_backward(model, scaler, 2)
    model.get_parameter(where).grad.flatten()[0] = torch.inf
    scaler.step(chain)
    scaler.update()
    assert scaler.get_scale() == 2.0**9
    assert same(snapshot(model, chain), before)


def test_unscaled_gradients_can_be_clipped_before_the_step():
    scaled, plain = seeded(Plain), seeded(Plain)
    one, other = chained(scaled, [fused]), chained(plain, [fused])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaled_backward(scaled, scaler, 0)
    scaler.unscale_(one)
    nn.utils.clip_grad_norm_(scaled.parameters(), 0.1)
    scaler.step(one)
    backward(plain, 0)
    nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    other.step()
    assert same(snapshot(scaled, one), snapshot(plain, other))


def test_the_scaler_is_not_told_that_the_chain_unscales_by_itself():
    assert not getattr(chained(seeded(Plain), [fused]), "_step_supports_amp_scaling", False)


# Saving and loading


def saved(chain, path):
    torch.save(chain.state_dict(), path)
    return torch.load(path, weights_only=True)


@pytest.mark.few(3)
@all_others
@pytest.mark.parametrize("named", [True, False], ids=["named", "unnamed"])
def test_a_fresh_chain_resumes_bit_for_bit(others, named, tmp_path):
    model = seeded(Plain)
    chain = chained(model, others, named)
    train(model, chain.step, range(3))
    state = saved(chain, tmp_path / "chain.pt")
    again = copy.deepcopy(model)
    resumed = chained(again, others, named)
    resumed.load_state_dict(state)
    assert is_shared(resumed)
    assert same(snapshot(again, resumed), snapshot(model, chain))
    for its, o in ((model, chain), (again, resumed)):
        train(its, o.step, range(3, 6))
    assert same(snapshot(again, resumed), snapshot(model, chain))
    assert is_shared(resumed)


def test_a_bf16_model_resumes_bit_for_bit_with_its_matrices_state_in_fp32(tmp_path):
    model = seeded(Plain).bfloat16()
    chain = chained(model, [fused])
    train(model, chain.step, range(3))
    again = copy.deepcopy(model)
    resumed = chained(again, [fused])
    resumed.load_state_dict(saved(chain, tmp_path / "chain.pt"))
    for name in ("lm_head.weight", *MATRICES):
        assert resumed.state[again.get_parameter(name)]["momentum_buffer"].dtype == torch.float32
    assert resumed.state[again.embed.weight]["exp_avg"].dtype == torch.bfloat16
    for its, o in ((model, chain), (again, resumed)):
        train(its, o.step, range(3, 6))
    assert same(snapshot(again, resumed), snapshot(model, chain))


def test_an_optimizer_with_state_of_other_shapes_than_its_parameters_resumes(tmp_path):
    model = seeded(Plain)
    chain = chained(model, [Adafactor])
    train(model, chain.step, range(2))
    again = copy.deepcopy(model)
    resumed = chained(again, [Adafactor])
    resumed.load_state_dict(saved(chain, tmp_path / "chain.pt"))
    for its, o in ((model, chain), (again, resumed)):
        train(its, o.step, range(2, 4))
    assert same(weights(again), weights(model))


def test_a_state_saved_before_the_first_step_loads(tmp_path):
    model = seeded(Plain)
    state = saved(chained(model), tmp_path / "chain.pt")
    chain = chained(model)
    train(model, chain.step, range(2))
    chain.load_state_dict(state)
    assert not chain.state
    assert is_shared(chain)


def test_loaded_hyperparameters_reach_the_optimizers():
    model = seeded(Plain)
    chain = chained(model)
    state = copy.deepcopy(chain.state_dict())
    for lr, group in enumerate(state["param_groups"]):
        group["lr"] = lr
    chain.load_state_dict(state)
    assert [group["lr"] for o in chain.optimizers for group in o.param_groups] == [0, 1, 2]


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod."])
def test_names_from_a_compiled_or_wrapped_model_load(prefix):
    model = seeded(Plain)
    chain = chained(model)
    train(model, chain.step, range(2))
    before = copy.deepcopy(chain.state_dict()["state"])
    state = copy.deepcopy(chain.state_dict())
    for group in state["param_groups"]:
        group["param_names"] = [prefix + name for name in group["param_names"]]
    chain.load_state_dict(state)
    assert same(chain.state_dict()["state"], before)


@pytest.mark.parametrize("unnamed", ["saved", "loading"])
def test_names_on_one_side_only_are_not_compared(unnamed):
    model = seeded(Plain)
    chain, other = chained(model, named=unnamed == "loading"), chained(model, named=unnamed == "saved")
    train(model, chain.step, range(2))
    other.load_state_dict(copy.deepcopy(chain.state_dict()))
    assert same(other.state_dict()["state"], chain.state_dict()["state"])


def swapped(model):
    muon, adamw, rownorm = parts(model)
    return ChainedOptimizer(rownorm, adamw, muon)


def without_a_parameter(model):
    model.norm.weight.requires_grad_(False)
    muon, _, rownorm = parts(model)
    rest = ["embed.weight", *VECTORS[:-1]]
    return ChainedOptimizer(muon, AdamW([(name, model.get_parameter(name)) for name in rest]), rownorm)


def renamed(model):
    model.unembed = model.lm_head
    muon, adamw, _ = parts(model)
    return ChainedOptimizer(muon, adamw, RowNorm([("unembed.weight", model.unembed.weight)], lr=1.0))


def in_another_order(model):
    _, adamw, rownorm = parts(model)
    names = [MATRICES[i] for i in (2, 1, 0, 3)]
    return ChainedOptimizer(Muon([(name, model.get_parameter(name)) for name in names]), adamw, rownorm)


def in_two_groups(model):
    muon, _, rownorm = parts(model)
    groups = [{"params": [model.embed.weight]}, {"params": [model.get_parameter(name) for name in VECTORS]}]
    return ChainedOptimizer(muon, AdamW(groups), rownorm)


OTHER_CHAINS = {
    "another order of optimizers": (Plain, swapped),
    "another class": (Plain, lambda model: chained(model, [SGD])),
    "one more optimizer": (Plain, lambda model: chained(model, [AdamW, AdamW])),
    "one optimizer fewer": (Plain, lambda model: ChainedOptimizer(*parts(model)[:2])),
    "another number of parameters": (Plain, without_a_parameter),
    "another division into groups": (Plain, in_two_groups),
    "other shapes": (lambda: Plain(V=29), chained),
    "other widths without names": (lambda: Plain(d=8), lambda model: chained(model, named=False)),
    "other names": (Plain, renamed),
    "another order of names": (Plain, in_another_order),
}


@pytest.mark.parametrize(("kind", "make"), OTHER_CHAINS.values(), ids=OTHER_CHAINS)
def test_the_state_of_another_chain_is_refused_in_one_sentence_and_nothing_changes(kind, make):
    model = seeded(Plain)
    chain = chained(model)
    train(model, chain.step, range(2))
    other_model = seeded(kind)
    other = make(other_model)
    for seed in range(2):
        other.zero_grad()
        other_model(torch.tensor([[seed, 2, 3]])).sum().backward()
        other.step()
    for loading, its, state in ((chain, model, other.state_dict()), (other, other_model, chain.state_dict())):
        before, groups = snapshot(its, loading), list(loading.param_groups)
        with pytest.raises(ValueError, match=r"\Athis state belongs to another chain: [^\n]*\Z"):
            loading.load_state_dict(state)
        assert same(snapshot(its, loading), before)
        assert list(map(id, loading.param_groups)) == list(map(id, groups))
        assert is_shared(loading)


def test_the_same_optimizers_in_another_order_are_refused_without_names_and_before_a_step():
    p, q = nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(3, 3))
    state = ChainedOptimizer(RowNorm([p], lr=1.0), Muon([q])).state_dict()
    chain = ChainedOptimizer(Muon([p]), RowNorm([q], lr=1.0))
    with pytest.raises(ValueError, match=r"\Athis state belongs to another chain: .*RowNorm: 1 parameters, Muon.*\Z"):
        chain.load_state_dict(state)
    assert [group["owner"] for group in chain.param_groups] == ["Muon", "RowNorm"]


NOT_A_CHAINS = {
    "AdamW": lambda: AdamW(seeded(Plain).parameters()).state_dict(),
    "empty": dict,
    "no groups": lambda: {"state": {}},
    "no state": lambda: {"param_groups": chained(seeded(Plain)).state_dict()["param_groups"]},
    "a list": lambda: [{}],
    "none": lambda: None,
    "a checkpoint around it": lambda: {"optimizer": chained(seeded(Plain)).state_dict()},
}


@pytest.mark.parametrize("make", NOT_A_CHAINS.values(), ids=NOT_A_CHAINS)
def test_what_no_chain_saved_is_refused_in_one_sentence_and_nothing_changes(make):
    model = seeded(Plain)
    chain = chained(model)
    train(model, chain.step, range(2))
    before = snapshot(model, chain)
    with pytest.raises((TypeError, ValueError), match=r"\A[^\n]*ChainedOptimizer[^\n]*\Z"):
        chain.load_state_dict(make())
    assert same(snapshot(model, chain), before)
    assert is_shared(chain)


def test_a_chain_goes_on_as_if_nothing_had_been_refused():
    model, plain = seeded(Plain), seeded(Plain)
    chain, other = chained(model), chained(plain)
    train(model, chain.step, range(2))
    with pytest.raises(ValueError, match="another chain"):
        chain.load_state_dict(swapped(seeded(Plain)).state_dict())
    train(model, chain.step, range(2, 4))
    train(plain, other.step)
    assert same(snapshot(model, chain), snapshot(plain, other))


def test_state_dict_hooks_of_the_user_work():
    chain = chained(seeded(Plain))
    seen = []
    chain.register_state_dict_pre_hook(lambda o: seen.append(o is chain))
    chain.register_state_dict_post_hook(lambda o, state: {**state, "note": "mine"})
    assert chain.state_dict()["note"] == "mine"
    assert seen == [True]


def test_load_hooks_of_the_user_see_the_loaded_state_and_fire_once():
    model = seeded(Plain).bfloat16()
    chain = chained(model)
    train(model, chain.step, range(2))
    state, fired = copy.deepcopy(chain.state_dict()), []
    chain.register_load_state_dict_pre_hook(lambda *_: fired.append("before"))
    chain.register_load_state_dict_post_hook(
        lambda o: fired.append(o.state[model.lm_head.weight]["momentum_buffer"].dtype)
    )
    for _ in range(2):
        fired.clear()
        chain.load_state_dict(state)
        assert fired == ["before", torch.float32]
        assert is_shared(chain)


def test_loading_leaves_no_hook_behind():
    chain = chained(seeded(Plain))
    chain.load_state_dict(chain.state_dict())
    assert not chain._optimizer_load_state_dict_pre_hooks
    assert not chain._optimizer_load_state_dict_post_hooks


def halved(state):
    """A new state dict with the head's buffer halved."""
    state = copy.deepcopy(state)
    head = state["param_groups"][-1]["params"][0]
    state["state"][head]["momentum_buffer"] /= 2
    return state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("how", ["returned", "in place"])
def test_a_hook_that_rewrites_the_state_has_the_last_word(how, dtype):
    model = seeded(Plain).to(dtype)
    chain = chained(model)
    train(model, chain.step, range(2))
    state = copy.deepcopy(chain.state_dict())
    if how == "returned":
        chain.register_load_state_dict_pre_hook(lambda _, given: halved(given))
    else:
        chain.register_load_state_dict_pre_hook(lambda _, given: given.update(halved(given)))
    chain.load_state_dict(state)
    assert same(chain.state_dict(), halved(state))


def test_a_hook_can_make_a_foreign_state_fit():
    model = seeded(Plain)
    chain = chained(model)
    train(model, chain.step, range(2))
    state = copy.deepcopy(chain.state_dict())
    chain.register_load_state_dict_pre_hook(lambda _, given: given["optimizer"])
    chain.load_state_dict({"optimizer": copy.deepcopy(state)})
    assert same(chain.state_dict(), state)


def test_what_a_hook_made_unfit_is_refused_and_nothing_changes():
    model = seeded(Plain)
    chain, other = chained(model), seeded(Plain, V=29)
    foreign = chained(other)
    train(model, chain.step, range(2))
    train(other, foreign.step, range(2))
    before = snapshot(model, chain)
    chain.register_load_state_dict_pre_hook(lambda *_: foreign.state_dict())
    with pytest.raises(ValueError, match=r"\Athis state belongs to another chain: .*\Z"):
        chain.load_state_dict(copy.deepcopy(chain.state_dict()))
    assert same(snapshot(model, chain), before)


# What is refused at the start


def test_a_chain_of_nothing_is_refused_in_one_sentence():
    with pytest.raises(ValueError, match=r"\AChainedOptimizer needs at least one optimizer, got none\Z"):
        ChainedOptimizer()


@pytest.mark.parametrize("what", ["a list", "parameters", "a chain", "a class"])
def test_what_is_no_plain_optimizer_is_refused_in_one_sentence(what):
    model = seeded(Plain)
    wrong = {
        "a list": list(parts(model)),
        "parameters": model.parameters(),
        "a chain": chained(model),
        "a class": AdamW,
    }
    with pytest.raises(TypeError, match=r"\AChainedOptimizer takes plain torch optimizers, got .*: give its parts\Z"):
        ChainedOptimizer(SGD([nn.Parameter(torch.ones(2))]), wrong[what])


@pytest.mark.parametrize(
    ("named", "with_model", "label"),
    [
        (True, False, r"'embed.weight' \(23, 6\)"),
        (False, True, "'embed.weight'"),
        (False, False, r"number 0 \(23, 6\)"),
    ],
)
def test_a_parameter_in_two_optimizers_is_refused_with_its_name(named, with_model, label):
    model = seeded(Plain)
    embedding = [("embed.weight", model.embed.weight)] if named else [model.embed.weight]
    with pytest.raises(ValueError, match=rf"\Aparameter {label} is in AdamW and SGD: give it to one of them\Z"):
        ChainedOptimizer(*parts(model), SGD(embedding), model=model if with_model else None)


def test_a_parameter_in_two_optimizers_of_one_class_is_refused_with_both():
    p = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match=r"\Aparameter .* is in SGD and SGD 2: give it to one of them\Z"):
        ChainedOptimizer(SGD([p]), SGD([p]))


def test_one_optimizer_given_twice_is_refused():
    o = SGD([nn.Parameter(torch.ones(2))])
    with pytest.raises(ValueError, match=r"\Aparameter .* is in SGD.*\Z"):
        ChainedOptimizer(o, o)


def test_trainable_parameters_of_the_model_that_nobody_owns_are_refused_with_their_names():
    model = seeded(RawPositions)
    with pytest.raises(ValueError, match=r"\Ano optimizer owns 'positions', .*'gate.bias': add them to one, or .*\Z"):
        ChainedOptimizer(*parts(model), model=model)


def test_frozen_parameters_need_no_owner():
    model = seeded(Plain)
    model.lm_head.requires_grad_(False)
    assert is_shared(ChainedOptimizer(*parts(model)[:2], model=model))


def test_without_the_model_nobody_is_missed():
    assert is_shared(ChainedOptimizer(*parts(seeded(RawPositions))))


# Adding a group


def extra(shape=(4, 6)):
    p = nn.Parameter(torch.ones(shape))
    p.grad = torch.full(shape, 0.5)
    return p


def structure(chain):
    return [[(id(group), len(group["params"])) for group in o.param_groups] for o in (chain, *chain.optimizers)]


@pytest.mark.parametrize("owner", ["Muon", "AdamW", "AdamW 2", "RowNorm"])
def test_an_added_group_is_stepped_by_its_owner_and_saved(owner, tmp_path):
    def grown():
        model = seeded(Plain)
        chain, p = chained(model, [AdamW, fused]), extra()
        chain.add_param_group({"params": [("extra", p)], "lr": 0.125, "owner": owner})
        return model, chain, p

    model, chain, p = grown()
    index = ["Muon", "AdamW", "AdamW 2", "RowNorm"].index(owner)
    assert is_shared(chain)
    assert chain.owner(p) is chain.optimizers[index]
    assert chain.param_groups[-1]["lr"] == 0.125
    assert chain.param_groups[-1].keys() >= chain.optimizers[index].param_groups[0].keys()
    backward(model, 0)
    chain.step()
    assert not torch.equal(p, torch.ones(4, 6))

    again, resumed, q = grown()
    again.load_state_dict(model.state_dict())
    q.data.copy_(p.data)
    resumed.load_state_dict(saved(chain, tmp_path / "chain.pt"))
    assert is_shared(resumed)
    assert same(resumed.state[q], chain.state[p])
    for its, o in ((model, chain), (again, resumed)):
        train(its, o.step, range(1, 3))
    assert torch.equal(p, q)
    assert same(snapshot(again, resumed), snapshot(model, chain))


def test_an_added_group_may_be_one_tensor():
    chain, p = chained(seeded(Plain), named=False), extra((3,))
    chain.add_param_group({"params": p, "owner": "AdamW"})
    chain.step()
    assert not torch.equal(p, torch.ones(3))


@pytest.mark.parametrize("owner", [None, "SGD", "AdamW 2", ""])
def test_a_group_without_a_known_owner_is_refused_in_one_sentence(owner):
    chain = chained(seeded(Plain), named=False)
    before = structure(chain)
    group = {"params": [extra()]} if owner is None else {"params": [extra()], "owner": owner}
    with pytest.raises(ValueError, match=rf"\A.*\"owner\" with one of 'Muon', 'AdamW', 'RowNorm', got {owner!r}\Z"):
        chain.add_param_group(group)
    assert structure(chain) == before
    assert is_shared(chain)


@pytest.mark.parametrize("owner", ["Muon", "AdamW", "RowNorm"])
@pytest.mark.parametrize("taken", ["blocks.0.up.weight", "embed.weight", "lm_head.weight"])
def test_a_group_with_a_parameter_that_has_an_owner_is_refused(owner, taken):
    model = seeded(Plain)
    chain = chained(model)
    before = structure(chain)
    with pytest.raises(ValueError, match=r"\A[^\n]*(has an owner already|more than one parameter group)[^\n]*\Z"):
        chain.add_param_group({"params": [("new", extra()), (taken, model.get_parameter(taken))], "owner": owner})
    assert structure(chain) == before
    assert is_shared(chain)


def test_a_group_that_is_there_already_is_refused():
    chain = chained(seeded(Plain))
    before = structure(chain)
    with pytest.raises(ValueError, match=r"\A[^\n]*(already|more than one parameter group)[^\n]*\Z"):
        chain.add_param_group(chain.param_groups[0])
    assert structure(chain) == before


@pytest.mark.parametrize("owner", ["Muon", "RowNorm"])
def test_a_vector_for_an_optimizer_of_matrices_is_refused(owner):
    chain = chained(seeded(Plain), named=False)
    before = structure(chain)
    with pytest.raises(ValueError, match=rf"\A{owner} moves matrices, and parameter number 0 \(4,\) is none: .*\Z"):
        chain.add_param_group({"params": [extra((4,))], "owner": owner})
    assert structure(chain) == before
    assert is_shared(chain)


# Asking


def test_owner_is_the_optimizer_that_moves_a_parameter():
    model = seeded(Plain)
    muon, adamw, rownorm = chain_parts = parts(model)
    chain = ChainedOptimizer(*chain_parts)
    assert chain.owner(model.blocks[0].up.weight) is muon
    assert chain.owner(model.norm.weight) is adamw
    assert chain.owner(model.lm_head.weight) is rownorm


@pytest.mark.parametrize("ask", ["owner", "increment"])
def test_a_foreign_parameter_is_refused_in_one_sentence(ask):
    chain = chained(seeded(Plain))
    with pytest.raises(ValueError, match=r"\Athe parameter of shape \(4, 6\) is in none of the chained optimizers\Z"):
        getattr(chain, ask)(extra())


def test_increment_is_what_the_step_added():
    model = seeded(Plain).double()
    chain = chained(model)
    before = weights(model)
    train(model, chain.step, [0])
    for name, shrink in (("lm_head.weight", 1.0), ("blocks.0.up.weight", 1 - 0.02 * 0.1)):
        increment = chain.increment(model.get_parameter(name))
        moved = model.get_parameter(name).detach() - shrink * before[name]
        torch.testing.assert_close(increment, moved, rtol=0, atol=1e-15)
        assert increment.norm() > 0


def test_increment_of_another_optimizers_parameter_is_refused_in_one_sentence():
    model = seeded(Plain)
    chain = chained(model)
    train(model, chain.step, [0])
    with pytest.raises(TypeError, match=r"\AAdamW cannot say what its last step was: RowNorm and Muon can\Z"):
        chain.increment(model.embed.weight)


# The description


def described(chain):
    out = io.StringIO()
    chain.describe(file=out)
    return out.getvalue()


def test_description_names_optimizers_groups_parameters_rates_and_decays():
    layers = nn.ModuleList(nn.Linear(4, 3, bias=False) for _ in range(3))
    head, bias = nn.Parameter(torch.ones(300, 4)), nn.Parameter(torch.ones(5))
    chain = ChainedOptimizer(
        Muon([{"params": list(layers.named_parameters()), "name": "blocks"}], lr=0.0625, weight_decay=0.25),
        SGD([{"params": [("b", bias)], "lr": 0.75}]),
        RowNorm([{"params": [("head", head)], "name": "last"}], lr=torch.tensor(0.5)),
    )
    lines = [line.split() for line in described(chain).splitlines() if line.strip()]
    assert lines[0] == ["optimizer", "group", "parameters", "tensors", "numbers", "lr", "decay"]
    assert lines[2:] == [
        ["Muon", "blocks", "*.weight", "3", "36", "0.0625", "0.25"],
        ["SGD", "b", "1", "5", "0.75", "0"],
        ["RowNorm", "last", "head", "1", "1,200", "0.5", "0"],
    ]


def test_description_shows_peaks_under_a_schedule():
    chain = chained(seeded(Plain))
    lr_scheduler.LambdaLR(chain, lambda t: 0.0)
    assert "0.02" in described(chain)
    assert chain.param_groups[0]["lr"] == 0


def test_description_of_unnamed_parameters_gives_their_shapes():
    text = described(chained(seeded(Plain), [fused, AdamW], named=False))
    for word in ("12x6, 6x12", "23x6", "AdamW 2", "RowNorm"):
        assert word in text


def test_description_shows_names_in_brackets():
    p = nn.Parameter(torch.ones(2, 2))
    chain = ChainedOptimizer(SGD([{"params": [("a[bold]", p)], "name": "[red]"}]))
    assert "a[bold]" in described(chain)
    assert "[red]" in described(chain)


def test_description_goes_to_the_terminal_by_default(capsys):
    chained(seeded(Plain)).describe()
    assert "RowNorm" in capsys.readouterr().out


# What people do to optimizers


class OtherAdamW(AdamW):
    """A subclass from some library, under the name of its base."""


OtherAdamW.__name__ = "AdamW"


def test_two_classes_of_one_name_own_each_their_own():
    p, q = (nn.Parameter(torch.ones(2)) for _ in range(2))
    chain = ChainedOptimizer(AdamW([p], lr=1e-3, weight_decay=0), OtherAdamW([q], lr=1e-3, weight_decay=0))
    assert [group["owner"] for group in chain.param_groups] == ["AdamW", "AdamW 2"]
    p.grad, q.grad = torch.ones(2), torch.ones(2)
    chain.step()
    assert [float(chain.state[x]["step"]) for x in (p, q)] == [1, 1]
    torch.testing.assert_close(p.detach(), torch.full((2,), 0.999))


def test_a_load_that_fails_inside_leaves_everything_as_it_was():
    model = seeded(Plain)
    chain = chained(model)
    train(model, chain.step, range(2))
    before, state = snapshot(model, chain), copy.deepcopy(chain.state_dict())
    for group in state["param_groups"]:
        group["lr"] = 123.0
    owners = [group["owner"] for group in state["param_groups"] for _ in group["params"]]
    del state["state"][owners.index("AdamW")]["step"]
    with pytest.raises(KeyError):
        chain.load_state_dict(state)
    assert same(snapshot(model, chain), before)
    assert is_shared(chain)


def test_groups_put_in_from_outside_are_used():
    model = seeded(Plain)
    chain = chained(model)
    before = weights(model)
    chain.param_groups = [{**group, "lr": 0.0, "weight_decay": 0.0} for group in chain.param_groups]
    train(model, chain.step, range(2))
    assert same(weights(model), before)
    assert is_shared(chain)


def test_a_sparse_gradient_for_adam_is_refused_before_anything_has_moved():
    model = seeded(Plain)
    model.embed.sparse = True
    chain = chained(model)
    before = weights(model)
    with pytest.raises(TypeError, match="AdamW takes no sparse gradient"):
        train(model, chain.step, range(1))
    assert same(weights(model), before)


def test_a_checkpoint_loads_when_activation_checkpointing_has_come_or_gone():
    p = nn.Parameter(torch.ones(2, 2))
    wrapped = ChainedOptimizer(RowNorm([("blocks.0._checkpoint_wrapped_module.weight", p)], lr=0.1))
    plain = ChainedOptimizer(RowNorm([("blocks.0.weight", p)], lr=0.2))
    plain.load_state_dict(wrapped.state_dict())
    assert plain.param_groups[0]["lr"] == 0.1

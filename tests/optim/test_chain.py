"""The chain: several optimizers that step as they would alone, and look like one to everything that takes one."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, RMSprop, lr_scheduler

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


def fused(params):
    return AdamW(params, lr=0.01, weight_decay=0.1, fused=True)


OTHERS = {
    "fused AdamW": [fused],
    "two AdamWs": [fused, lambda params: AdamW(params, lr=0.002)],
    "SGD": [lambda params: SGD(params, lr=0.1, momentum=0.9)],
    "Adam": [lambda params: Adam(params, lr=0.01, amsgrad=True, foreach=True)],
    "Adagrad": [lambda params: Adagrad(params, lr=0.01, initial_accumulator_value=0.1)],
    "RMSprop": [lambda params: RMSprop(params, lr=0.01, momentum=0.5, centered=True)],
    "Adafactor": [lambda params: Adafactor(params, lr=0.01)],
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
    assert is_shared(chain)


@all_others
def test_optimizers_that_have_stepped_are_chained_with_their_state(others):
    together, apart = seeded(Plain), seeded(Plain)
    first, alone = parts(together, others), parts(apart, others)
    train(together, lambda: [o.step() for o in first], range(2))
    chain = ChainedOptimizer(*first)
    train(together, chain.step, range(2, 5))
    train(apart, lambda: [o.step() for o in alone], range(5))
    assert same(weights(together), weights(apart))


def test_closure_is_called_once_with_grad_and_the_callers_autocast_and_every_hook_fires_outside_it():
    model = seeded(Plain)
    chain = chained(model)
    head, fired, inside = model.lm_head.weight, [], []

    def note(name):
        return lambda *_: fired.append((name, head.grad is not None, torch.is_autocast_enabled("cpu")))

    def closure():
        inside.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        backward(model, 0)
        return "the loss"

    for name, o in (("chain", chain), *((type(o).__name__, o) for o in chain.optimizers)):
        o.register_step_pre_hook(note(f"before {name}"))
        o.register_step_post_hook(note(f"after {name}"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert chain.step(closure) == "the loss"
    assert inside == [(True, True)]
    inner = [(f"{when} {name}", True, False) for name in ("Muon", "AdamW", "RowNorm") for when in ("before", "after")]
    assert fired == [("before chain", False, True), *inner, ("after chain", True, True)]
    assert chain.step() is None


@pytest.mark.parametrize("name", ["embed.weight", "blocks.1.up.weight", "lm_head.weight"])
def test_a_sparse_gradient_is_refused_before_anything_moves(name):
    model = seeded(Plain)
    chain = chained(model)
    train(model, chain.step, range(2))
    backward(model, 2)
    p = model.get_parameter(name)
    p.grad = p.grad.to_sparse()
    before = snapshot(model, chain)
    with pytest.raises(TypeError, match=rf"\A.* sparse .*'{name}'.*\Z"):
        chain.step()
    assert same(snapshot(model, chain), before)


# One list of groups, one state


@pytest.mark.few(3)
@all_others
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_a_copy_shares_nothing_with_the_first_and_goes_on_as_it_does(others, copied):
    model = seeded(Plain)
    chain = chained(model, others)
    train(model, chain.step, range(2))
    other_model, other = copied((model, chain))
    assert is_shared(other)
    assert same(snapshot(other_model, other), snapshot(model, chain))
    train(other_model, other.step, range(2, 5))
    assert is_shared(chain)
    train(model, chain.step, range(2, 5))
    assert same(snapshot(other_model, other), snapshot(model, chain))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (lr_scheduler.LambdaLR, {"lr_lambda": lambda t: 1 / (1 + t)}),
        (lr_scheduler.OneCycleLR, {"max_lr": 0.1, "total_steps": 20, "cycle_momentum": False}),
    ],
)
def test_a_scheduler_on_the_chain_is_schedulers_on_its_optimizers(kind, options):
    together, apart = seeded(Plain), seeded(Plain)
    chain, alone = chained(together), parts(apart)
    one, several = kind(chain, **options), [kind(o, **options) for o in alone]
    for seed in range(5):
        train(together, chain.step, [seed])
        train(apart, lambda: [o.step() for o in alone], [seed])
        for scheduler in (one, *several):
            scheduler.step()
        rates = [group["lr"] for o in chain.optimizers for group in o.param_groups]
        assert rates == [group["lr"] for o in alone for group in o.param_groups]
    assert same(weights(together), weights(apart))


def scaled_backward(model, scaler, seed):
    model.zero_grad()
    scaler.scale(loss_of(model, seed)).backward()


@pytest.mark.parametrize("where", ["embed.weight", "blocks.0.up.weight", "norm.weight", "lm_head.weight"])
def test_a_scaled_step_is_the_unscaled_one_and_an_overflow_anywhere_skips_every_optimizer(where):
    scaled, plain = seeded(Plain), seeded(Plain)
    one, other = chained(scaled, [fused]), chained(plain, [fused])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for seed in range(3):
        scaled_backward(scaled, scaler, seed)
        scaler.step(one)
        scaler.update()
    train(plain, other.step, range(3))
    before = snapshot(plain, other)
    assert same(snapshot(scaled, one), before)
    scaled_backward(scaled, scaler, 3)
    scaled.get_parameter(where).grad.flatten()[0] = torch.inf
    scaler.step(one)
    scaler.update()
    assert scaler.get_scale() == 2.0**9
    assert same(snapshot(scaled, one), before)


# Saving and loading


def saved(chain, path):
    torch.save(chain.state_dict(), path)
    return torch.load(path, weights_only=True)


@pytest.mark.few(3)
@all_others
@pytest.mark.parametrize("named", [True, False], ids=["named", "unnamed"])
def test_a_fresh_chain_resumes_bit_for_bit(others, named, tmp_path):
    for dtype in (torch.float32, torch.bfloat16):
        model = seeded(Plain).to(dtype)
        chain = chained(model, others, named)
        train(model, chain.step, range(3))
        again = copy.deepcopy(model)
        resumed = chained(again, others, named)
        resumed.load_state_dict(saved(chain, tmp_path / "chain.pt"))
        assert is_shared(resumed)
        assert resumed.state[again.lm_head.weight]["momentum_buffer"].dtype == torch.float32
        assert same(snapshot(again, resumed), snapshot(model, chain))
        for its, o in ((model, chain), (again, resumed)):
            train(its, o.step, range(3, 6))
        assert same(snapshot(again, resumed), snapshot(model, chain))


def test_a_state_from_before_any_step_with_other_hyperparameters_loads():
    model, again = seeded(Plain), seeded(Plain)
    chain, resumed = chained(model), chained(again)
    state = copy.deepcopy(chain.state_dict())
    for lr, group in enumerate(state["param_groups"]):
        group["lr"] = lr
    train(again, resumed.step, range(2))
    resumed.load_state_dict(state)
    assert not resumed.state
    assert is_shared(resumed)
    assert [group["lr"] for o in resumed.optimizers for group in o.param_groups] == [0, 1, 2]


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module._orig_mod.", "_checkpoint_wrapped_module."])
def test_names_of_a_wrapped_model_load_and_names_on_one_side_only_are_not_compared(prefix):
    model = seeded(Plain)
    chain, unnamed = chained(model), chained(model, named=False)
    train(model, chain.step, range(2))
    before = copy.deepcopy(chain.state_dict())
    wrapped = copy.deepcopy(before)
    for group in wrapped["param_groups"]:
        group["param_names"] = [prefix + name for name in group["param_names"]]
    for loading, state in ((chain, lambda: wrapped), (unnamed, lambda: before), (chain, unnamed.state_dict)):
        loading.load_state_dict(copy.deepcopy(state()))
        assert same(loading.state_dict()["state"], before["state"])


def swapped(model):
    muon, adamw, rownorm = parts(model)
    return ChainedOptimizer(rownorm, adamw, muon)


def renamed(model):
    model.unembed = model.lm_head
    muon, adamw, _ = parts(model)
    return ChainedOptimizer(muon, adamw, RowNorm([("unembed.weight", model.unembed.weight)], lr=1.0))


ANOTHER = "this state belongs to another chain: .*"
FOREIGN = {
    "another order of optimizers": (lambda: swapped(seeded(Plain)), ANOTHER),
    "another class": (lambda: chained(seeded(Plain), [SGD]), ANOTHER),
    "one optimizer fewer": (lambda: ChainedOptimizer(*parts(seeded(Plain))[:2]), ANOTHER),
    "other shapes": (lambda: chained(seeded(Plain, V=29)), ANOTHER),
    "other widths without names": (lambda: chained(seeded(Plain, d=8), named=False), ANOTHER),
    "other names": (lambda: renamed(seeded(Plain)), ANOTHER),
    "AdamW": (lambda: AdamW(seeded(Plain).parameters()), "this state was not saved by a ChainedOptimizer: .*"),
    "a checkpoint around it": (lambda: {"optimizer": {}}, "ChainedOptimizer loads what state_dict.* without 'state'.*"),
    "none": (lambda: None, r"ChainedOptimizer loads a dict that state_dict\(\) made, got NoneType"),
}


@pytest.mark.parametrize(("make", "sentence"), FOREIGN.values(), ids=FOREIGN)
def test_a_foreign_state_is_refused_in_one_sentence_and_nothing_changes(make, sentence):
    model = seeded(Plain)
    chain = chained(model)
    train(model, chain.step, range(2))
    state = make()
    if isinstance(state, torch.optim.Optimizer):
        for p in (p for group in state.param_groups for p in group["params"]):
            p.grad = torch.ones_like(p)
        state.step()
        state = state.state_dict()
    before, groups = snapshot(model, chain), list(chain.param_groups)
    with pytest.raises((TypeError, ValueError), match=rf"\A{sentence}\Z"):
        chain.load_state_dict(state)
    assert same(snapshot(model, chain), before)
    assert list(map(id, chain.param_groups)) == list(map(id, groups))
    assert is_shared(chain)


def test_load_hooks_of_the_user_fire_once_and_have_the_last_word():
    model = seeded(Plain).bfloat16()
    chain = chained(model)
    train(model, chain.step, range(2))
    halved, fired = copy.deepcopy(chain.state_dict()), []
    halved["state"][halved["param_groups"][-1]["params"][0]]["momentum_buffer"] /= 2
    chain.register_load_state_dict_pre_hook(lambda _, given: fired.append(1) or given["optimizer"])
    chain.register_load_state_dict_post_hook(
        lambda o: fired.append(o.state[model.lm_head.weight]["momentum_buffer"].dtype)
    )
    for _ in range(2):
        fired.clear()
        chain.load_state_dict({"optimizer": copy.deepcopy(halved)})
        assert fired == [1, torch.float32]
        assert is_shared(chain)
        assert same(chain.state_dict(), halved)


# Bad input


def a_vector(model):
    return nn.Parameter(torch.ones(2))


BAD_CHAINS = {
    "ChainedOptimizer needs at least one optimizer, got none": lambda m: [],
    "ChainedOptimizer takes plain torch optimizers, got list: give its parts": lambda m: [list(parts(m))],
    "ChainedOptimizer takes plain torch optimizers, got ChainedOptimizer: .*": lambda m: [chained(m)],
    "ChainedOptimizer takes plain torch optimizers, got type: .*": lambda m: [SGD([a_vector(m)]), AdamW],
    r"parameter 'embed.weight' \(23, 6\) is in AdamW and SGD: give it to one of them": lambda m: [
        *parts(m),
        SGD([("embed.weight", m.embed.weight)]),
    ],
    r"parameter number 0 \(23, 6\) is in AdamW and SGD: .*": lambda m: [*parts(m), SGD([m.embed.weight])],
    "parameter .* is in SGD and SGD 2: give it to one of them": lambda m: [SGD([m.embed.weight]) for _ in range(2)],
}


@pytest.mark.parametrize("sentence", BAD_CHAINS)
def test_a_bad_chain_is_refused_in_one_sentence(sentence):
    with pytest.raises((TypeError, ValueError), match=rf"\A{sentence}\Z"):
        ChainedOptimizer(*BAD_CHAINS[sentence](seeded(Plain)))


def test_every_trainable_parameter_of_the_model_needs_an_owner():
    model = seeded(RawPositions)
    with pytest.raises(ValueError, match=r"\Ano optimizer owns 'positions', .*'gate.bias': add them to one, or .*\Z"):
        ChainedOptimizer(*parts(model), model=model)
    assert is_shared(ChainedOptimizer(*parts(model)))
    frozen = seeded(Plain)
    frozen.lm_head.requires_grad_(False)
    assert is_shared(ChainedOptimizer(*parts(frozen)[:2], model=frozen))


# Adding a group


def extra(shape=(4, 6)):
    p = nn.Parameter(torch.ones(shape))
    p.grad = torch.full(shape, 0.5)
    return p


@pytest.mark.parametrize("owner", ["Muon", "AdamW", "AdamW 2", "RowNorm"])
def test_an_added_group_is_stepped_by_its_owner(owner):
    model = seeded(Plain)
    chain, p = chained(model, [AdamW, fused]), extra()
    chain.add_param_group({"params": [("extra", p)], "lr": 0.125, "owner": owner})
    its = chain.optimizers[["Muon", "AdamW", "AdamW 2", "RowNorm"].index(owner)]
    assert is_shared(chain)
    assert chain.owner(p) is its
    assert chain.param_groups[-1]["lr"] == 0.125
    assert chain.param_groups[-1].keys() >= its.param_groups[0].keys()
    backward(model, 0)
    chain.step()
    assert not torch.equal(p, torch.ones(4, 6))


HAS_OWNER = r"[^\n]*(has an owner already|more than one parameter group)[^\n]*"
BAD_GROUPS = [
    (lambda m: {"params": [extra()]}, r".*\"owner\" with one of 'Muon', 'AdamW', 'RowNorm', got None"),
    (lambda m: {"params": [extra()], "owner": "AdamW 2"}, ".*, got 'AdamW 2'"),
    (lambda m: {"params": [("new", extra()), ("taken", m.embed.weight)], "owner": "AdamW"}, HAS_OWNER),
    (lambda m: {"params": [("new", extra()), ("taken", m.embed.weight)], "owner": "Muon"}, HAS_OWNER),
    (lambda m: {"params": [("new", extra((4,)))], "owner": "RowNorm"}, "RowNorm moves matrices, and .*'new' .*"),
]


@pytest.mark.parametrize(("make", "sentence"), BAD_GROUPS)
def test_a_bad_group_is_refused_in_one_sentence_and_nothing_changes(make, sentence):
    model = seeded(Plain)
    chain = chained(model)

    def structure():
        return [[(id(group), len(group["params"])) for group in o.param_groups] for o in (chain, *chain.optimizers)]

    before = structure()
    with pytest.raises(ValueError, match=rf"\A{sentence}\Z"):
        chain.add_param_group(make(model))
    with pytest.raises(ValueError, match=r"\A[^\n]*(already|more than one parameter group)[^\n]*\Z"):
        chain.add_param_group(chain.param_groups[0])
    assert structure() == before
    assert is_shared(chain)


# Asking


def test_the_owner_moves_a_parameter_and_gives_its_increment():
    model = seeded(Plain)
    muon, adamw, rownorm = chain_parts = parts(model)
    chain = ChainedOptimizer(*chain_parts)
    owned = (model.blocks[0].up, model.norm, model.lm_head)
    assert [chain.owner(module.weight) for module in owned] == [muon, adamw, rownorm]
    train(model, chain.step, [0])
    for o, p in ((muon, model.blocks[0].up.weight), (rownorm, model.lm_head.weight)):
        assert torch.equal(chain.increment(p), o.increment(p))
    for ask in (chain.owner, chain.increment):
        with pytest.raises(
            ValueError, match=r"\Athe parameter of shape \(4, 6\) is in none of the chained optimizers\Z"
        ):
            ask(extra())
    with pytest.raises(TypeError, match=r"\AAdamW cannot say what its last step was: RowNorm and Muon can\Z"):
        chain.increment(model.embed.weight)


def test_description_names_optimizers_groups_parameters_peaks_and_decays(capsys):
    layers = nn.ModuleList(nn.Linear(4, 3, bias=False) for _ in range(3))
    head, bias, plain = (nn.Parameter(torch.ones(shape)) for shape in ((300, 4), (5,), (2, 2)))
    chain = ChainedOptimizer(
        Muon([{"params": list(layers.named_parameters()), "name": "blocks"}], lr=0.0625, weight_decay=0.25),
        SGD([{"params": [("b[bold]", bias)], "lr": 0.75, "name": "[red]"}]),
        SGD([plain], lr=0.5),
        RowNorm([{"params": [("head", head)], "name": "last"}], lr=torch.tensor(0.5)),
    )
    lr_scheduler.LambdaLR(chain, lambda t: 0.0)
    out = io.StringIO()
    chain.describe(file=out)
    lines = [line.split() for line in out.getvalue().splitlines() if line.strip()]
    assert lines[0] == ["optimizer", "group", "parameters", "tensors", "numbers", "lr", "decay"]
    assert lines[2:] == [
        ["Muon", "blocks", "*.weight", "3", "36", "0.0625", "0.25"],
        ["SGD", "[red]", "b[bold]", "1", "5", "0.75", "0"],
        ["SGD", "2", "2x2", "1", "4", "0.5", "0"],
        ["RowNorm", "last", "head", "1", "1,200", "0.5", "0"],
    ]
    chain.describe()
    assert "RowNorm" in capsys.readouterr().out


# What people do to optimizers


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

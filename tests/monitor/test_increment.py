"""S_t of a step from what the optimizer left behind: the one that fp64 equations give, with any optimizer and loop."""

import copy
import logging
import warnings
from functools import partial
from itertools import pairwise

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.nn import Parameter
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop, lr_scheduler
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from hilbert_monitor.geometry import row_diameter
from hilbert_monitor.monitor.increment import IncrementSource
from hilbert_monitor.optim import ChainedOptimizer, Muon, RowNorm
from tests.support.optim_references import adam_steps, close, gradients, muon_steps, rownorm_steps, sgd_steps
from tests.support.references import all_pairs_diameter, normal

LRS = [1e-2, 3e-3, 0.0, 2e-2, 1e-3]
SHAPE = (17, 6)

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def start(dtype=torch.float32, scale=1.0):
    return normal(0, *SHAPE, scale=scale).to(dtype)


def some_gradients(dtype=torch.float32):
    """Gradients of changing size, so that the largest second moment is not the last."""
    return [G * s for G, s in zip(gradients(10, SHAPE, len(LRS), dtype=dtype), [1, 5, 0.1, 0.01, 3], strict=True)]


def set_lr(optimizer, lr):
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def watched(optimizer, p, grads=None, lrs=LRS, source=None):
    """Increments of steps with these gradients, each checked to be what moved the weights."""
    source, seen, increments = source or IncrementSource(optimizer, p), [], []
    end = source.watch(seen.append)
    for G, lr in zip(some_gradients(p.dtype) if grads is None else grads, lrs, strict=True):
        set_lr(optimizer, lr)
        before, p.grad = p.detach().clone().double(), G.clone()
        optimizer.step()
        increment = source.form()
        kept = 1 - lr * seen[-1].decay if source.decoupled else 1
        largest = torch.maximum(before.abs().amax(), p.detach().abs().amax())
        close(p, kept * before + increment.S, atol=float(3 * torch.finfo(p.dtype).eps * largest))
        increments.append(increment)
    end()
    assert [step.lr for step in seen] == pytest.approx(lrs)
    assert not any(step.skipped for step in seen)
    return increments


def assert_from_state(increments, references, tolerance=1e-5, rounds=False):
    """`rounds`: the parameter is of less than fp32, and may not have moved by what the step was."""
    for increment, (_, S) in zip(increments, references, strict=True):
        assert (increment.rounding > 0) == rounds
        assert not increment.S.requires_grad
        close(increment.S, S, atol=tolerance * float(S.abs().max()))
        assert row_diameter(increment.S).value == pytest.approx(all_pairs_diameter(S), rel=tolerance, abs=0)


def assert_by_difference(increments, references):
    for increment, (_, S) in zip(increments, references, strict=True):
        assert 0 < increment.rounding < 1e-5
        close(increment.S, S, atol=increment.rounding)
        slack = 2 * SHAPE[1] ** 0.5 * increment.rounding
        assert row_diameter(increment.S).value == pytest.approx(all_pairs_diameter(S), rel=0, abs=slack)


# torch's Adam and SGD


IMPLEMENTATIONS = {"single": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
implementations = pytest.mark.parametrize("implementation", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)

ADAM_OPTIONS = {
    "plain": {},
    "decay": {"weight_decay": 0.1},
    "amsgrad": {"weight_decay": 0.1, "amsgrad": True, "betas": (0.9, 0.95)},
    "maximize": {"weight_decay": 0.1, "maximize": True, "betas": (0.0, 0.9), "eps": 1e-2},
}


@pytest.mark.few(6)
@implementations
@pytest.mark.parametrize("options", ADAM_OPTIONS.values(), ids=ADAM_OPTIONS)
@pytest.mark.parametrize("make", [Adam, AdamW])
def test_adam_is_formed_from_its_state(make, options, implementation):
    p, options = Parameter(start()), {"weight_decay": 0.0, **options}
    increments = watched(make([p], **options, **implementation), p)
    assert_from_state(increments, adam_steps(start(), some_gradients(), LRS, decoupled=make is AdamW, **options))


SGD_OPTIONS = {
    "plain": {},
    "maximize": {"maximize": True},
    "momentum": {"momentum": 0.9},
    "dampening": {"momentum": 0.9, "dampening": 0.3, "maximize": True},
    "momentum-decay": {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
}
SGD_DECAYED = {
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "nesterov-maximize": {"momentum": 0.9, "nesterov": True, "maximize": True},
    "decay": {"weight_decay": 0.1},
    "nesterov-decay": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "maximize": True},
}


@implementations
@pytest.mark.parametrize("options", SGD_OPTIONS.values(), ids=SGD_OPTIONS)
def test_sgd_is_formed_from_buffer_and_gradient(options, implementation):
    p = Parameter(start())
    increments = watched(SGD([p], **options, **implementation), p)
    assert_from_state(increments, sgd_steps(start(), some_gradients(), LRS, **options))


@pytest.mark.few(4)
@implementations
@pytest.mark.parametrize("options", SGD_DECAYED.values(), ids=SGD_DECAYED)
def test_sgd_whose_step_is_in_no_buffer_is_a_difference(options, implementation):
    p = Parameter(start())
    optimizer = SGD([p], **options, **implementation)
    assert not IncrementSource(optimizer, p).from_state
    assert_by_difference(watched(optimizer, p), sgd_steps(start(), some_gradients(), LRS, **options))


ADAMW = partial(AdamW, weight_decay=0.1)
OURS = {
    "RowNorm": (partial(RowNorm, weight_decay=0.1), partial(rownorm_steps, weight_decay=0.1)),
    "RowNorm-both": (partial(RowNorm, center="both"), partial(rownorm_steps, center="both")),
    "Muon": (Muon, muon_steps),
    "Muon-plain": (partial(Muon, nesterov=False), partial(muon_steps, nesterov=False)),
}
FROM_STATE = {
    **OURS,
    "AdamW": (ADAMW, partial(adam_steps, weight_decay=0.1)),
    "Adam": (partial(Adam, weight_decay=0.1), partial(adam_steps, weight_decay=0.1, decoupled=False)),
    "SGD": (partial(SGD, momentum=0.9), partial(sgd_steps, momentum=0.9)),
    "SGD-plain": (SGD, sgd_steps),
}
from_state = pytest.mark.parametrize(("make", "reference"), FROM_STATE.values(), ids=FROM_STATE)
each_from_state = pytest.mark.parametrize("make", [make for make, _ in FROM_STATE.values()], ids=FROM_STATE)


@pytest.mark.parametrize(("make", "reference"), OURS.values(), ids=OURS)
def test_our_optimizers_are_formed_from_their_state(make, reference):
    p = Parameter(start())
    optimizer = make([p], lr=0.1)
    assert IncrementSource(optimizer, p).from_state
    assert_from_state(watched(optimizer, p), reference(start(), some_gradients(), LRS))


@from_state
def test_the_owner_in_a_chain_is_watched(make, reference):
    p, other = Parameter(start()), Parameter(torch.ones(3, 3))
    chain = ChainedOptimizer(Muon([other]), make([p], lr=0.1))
    other.grad = torch.ones(3, 3)
    source = IncrementSource(chain, p)
    assert source.optimizer is chain.optimizers[1]
    assert_from_state(watched(chain, p, source=source), reference(start(), some_gradients(), LRS))


@from_state
def test_lr_may_be_a_tensor(make, reference):
    p = Parameter(start())
    increments = watched(make([p], lr=torch.tensor(0.1)), p)
    assert_from_state(increments, reference(start(), some_gradients(), LRS))


@from_state
def test_a_small_increment_of_large_weights_is_not_lost(make, reference):
    """U ~ 1e3 and lr 1e-7: in fp32 most steps do not move the weights at all."""
    p, tiny = Parameter(start(scale=1e3)), [1e-7] * len(LRS)
    expected = reference(start(scale=1e3), some_gradients(), tiny)
    assert_from_state(watched(make([p], lr=0.1), p, lrs=tiny), expected)


@pytest.mark.parametrize("name", [name for name in FROM_STATE if "Muon" not in name])  # it iterates in fp32
def test_fp64_parameters_get_fp64_increments(name):
    make, reference = FROM_STATE[name]
    p = Parameter(start(torch.float64))
    increments = watched(make([p], lr=0.1), p)
    assert increments[0].S.dtype == torch.float64
    expected = reference(start(torch.float64), some_gradients(torch.float64), LRS)
    assert_from_state(increments, expected, tolerance=1e-11)


def test_the_first_step_is_precise_though_0999_is_not_in_fp32():
    p, G = Parameter(start()), some_gradients()[0]
    (increment,) = watched(AdamW([p], eps=1e-12), p, [G], [1e-3])
    close(increment.S, -1e-3 * G.sign(), atol=1e-9)


def test_a_parameter_has_the_hyperparameters_of_its_group():
    U, other = Parameter(start()), Parameter(start())
    optimizer = AdamW([{"params": [other]}, {"params": [U], "betas": (0.5, 0.7), "eps": 0.1, "weight_decay": 0.3}])
    other.grad = torch.ones(SHAPE)
    increments = watched(optimizer, U)
    options = {"betas": (0.5, 0.7), "eps": 0.1, "weight_decay": 0.3}
    assert_from_state(increments, adam_steps(start(), some_gradients(), LRS, **options))


@pytest.mark.parametrize("implementation", [{"foreach": False}, {"fused": True}], ids=["single", "fused"])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_bf16_state_goes_through_the_formula_in_fp32(amsgrad, implementation):
    p = Parameter(start(torch.bfloat16))
    optimizer = AdamW([p], amsgrad=amsgrad, **implementation)
    increments = watched(optimizer, p)
    assert all(increment.S.dtype == torch.float32 for increment in increments)
    state, t = optimizer.state[p], len(LRS)
    v = state["max_exp_avg_sq" if amsgrad else "exp_avg_sq"].double() / (1 - 0.999**t)
    assert_from_state(
        increments[-1:], [(p, -LRS[-1] * state["exp_avg"].double() / (1 - 0.9**t) / (v.sqrt() + 1e-8))], rounds=True
    )


@pytest.mark.parametrize("options", [{}, {"momentum": 0.5}], ids=str)
def test_sgd_of_bf16_parameters_is_formed_in_fp32(options):
    p, (G, *_) = Parameter(start(torch.bfloat16)), some_gradients(torch.bfloat16)
    increments = watched(SGD([p], **options), p, [G], [0.3])
    assert_from_state(increments, sgd_steps(start(), [G], [0.3], **options), rounds=True)


def test_a_step_of_no_learning_rate_has_no_increment():
    for make in [make for make, _ in FROM_STATE.values()] + list(DIFFERENCES.values()):
        p = Parameter(start())
        (increment,) = watched(make([p], lr=0.1), p, some_gradients()[:1], [0.0])
        assert not increment.S.any()


# by difference


DIFFERENCES = {
    "NAdam": partial(NAdam, weight_decay=0.1),
    "NAdam-decoupled": partial(NAdam, weight_decay=0.1, decoupled_weight_decay=True),
    "RMSprop": partial(RMSprop, weight_decay=0.1, momentum=0.5),
    "Adagrad": partial(Adagrad, weight_decay=0.1),
    "Adafactor": partial(Adafactor, weight_decay=0.1),
    "torch-Muon": partial(torch.optim.Muon, weight_decay=0.1),
}
DECOUPLED = ("NAdam-decoupled", "Adafactor", "torch-Muon")
by_difference = pytest.mark.parametrize("name", DIFFERENCES)


@by_difference
@pytest.mark.parametrize("chained", [False, True], ids=["alone", "chained"])
def test_other_optimizers_are_a_difference_within_its_rounding(name, chained):
    p, walked = Parameter(start()), [start().double()]
    optimizer = DIFFERENCES[name]([p], lr=0.1)
    optimizer.register_step_post_hook(lambda *_: walked.append(p.detach().double()))
    if chained:
        optimizer = ChainedOptimizer(optimizer)
    source = IncrementSource(optimizer, p)
    assert not source.from_state
    assert source.decoupled == (name in DECOUPLED)
    kept = [1 - lr * 0.1 * (name in DECOUPLED) for lr in LRS]
    increments = watched(optimizer, p, source=source)
    expected = [(b, b - k * a) for k, (a, b) in zip(kept, pairwise(walked), strict=True)]
    assert_by_difference(increments, expected)


@pytest.mark.parametrize("name", [name for name in DIFFERENCES if name != "torch-Muon"])
def test_the_same_optimizer_in_fp64_has_this_increment_within_the_rounding(name):
    """Not torch's Muon: it iterates in bf16 whatever it is given."""
    p, wide = Parameter(start()), Parameter(start().double())
    grads = some_gradients()
    reference = watched(DIFFERENCES[name]([wide], lr=0.1), wide, [G.double() for G in grads])
    assert_by_difference(
        watched(DIFFERENCES[name]([p], lr=0.1), p, grads), [(None, increment.S) for increment in reference]
    )


@by_difference
def test_a_difference_of_bf16_weights_has_their_rounding(name):
    p = Parameter(start(torch.bfloat16))
    for increment in watched(DIFFERENCES[name]([p], lr=0.1), p):
        assert increment.S.dtype == torch.float32
        assert increment.rounding >= torch.finfo(torch.bfloat16).eps * float(p.detach().abs().max())


class NamedSGD(SGD):
    """SGD by another name."""


def sliding(base):
    """A new subclass that moves the weights before the step of `base`, and after it again."""

    class Slides(base):
        def step(self, closure=None):
            self.slide()
            loss = super().step(closure)
            self.slide()
            return loss

        @torch.no_grad()
        def slide(self):
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_(group["lr"] * 0.5)

    return Slides


@pytest.mark.parametrize("options", [{"weight_decay": 0.1}, {"weight_decay": 0.1, "momentum": 0.9}], ids=str)
def test_a_subclass_of_sgd_without_a_step_of_its_own_decays_as_sgd_does(options):
    p = Parameter(start())
    optimizer = NamedSGD([p], **options)
    source = IncrementSource(optimizer, p)
    assert not source.decoupled
    increments = watched(optimizer, p, source=source)
    expected = sgd_steps(start(), some_gradients(), LRS, **options)
    (assert_from_state if source.from_state else assert_by_difference)(increments, expected)


def slid(steps, decay):
    """What slides add: half of lr that the decay shrinks, and half that it does not."""
    return [(U, S - lr / 2 * (1 - lr * decay) - lr / 2) for lr, (U, S) in zip(LRS, steps, strict=True)]


@pytest.fixture
def never_made(monkeypatch):
    """Adam and AdamW as they are imported: torch puts hooks on the step of a class when the first of it is made."""
    if "step" in vars(AdamW):
        monkeypatch.delattr(AdamW, "step")
    if hasattr(Adam.step, "hooked"):
        monkeypatch.setattr(Adam, "step", Adam.step.__wrapped__)
    assert not hasattr(AdamW.step, "hooked")


MADE = {"none": [], "Adam": [Adam], "AdamW": [AdamW], "both": [AdamW, Adam]}
after_each = pytest.mark.parametrize("made", MADE.values(), ids=MADE)


@pytest.mark.usefixtures("never_made")
@after_each
def test_a_subclass_without_a_step_of_its_own_is_formed_from_state(made):
    for kind in made:
        kind([Parameter(start())])
    p = Parameter(start())
    increments = watched(type("Named", (AdamW,), {})([p], weight_decay=0.1), p)
    assert_from_state(increments, adam_steps(start(), some_gradients(), LRS, weight_decay=0.1))


@pytest.mark.usefixtures("never_made")
@after_each
def test_a_subclass_with_a_step_of_its_own_is_a_difference_and_one_step(made):
    """Once the base has hooks of its own, a step on top of its step fires them twice."""
    for kind in made:
        kind([Parameter(start())])
    p = Parameter(start())
    optimizer = sliding(AdamW)([p], weight_decay=0.1)
    source = IncrementSource(optimizer, p)
    assert not source.from_state
    increments = watched(optimizer, p, source=source)
    assert_by_difference(increments, slid(adam_steps(start(), some_gradients(), LRS, weight_decay=0.1), 0.1))


# unknown optimizers


class Unseen(Optimizer):
    """Sign descent with one decay or the other."""

    coupled = False

    def __init__(self, params, lr=0.1, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                decay = group["weight_decay"] * p
                p.sub_(group["lr"] * ((p.grad + decay).tanh() if self.coupled else p.grad.tanh() + decay))


class UnseenCoupled(Unseen):
    coupled = True


def unseen_steps(coupled, decay=0.1):
    U, steps = start().double(), []
    for G, lr in zip(some_gradients(), LRS, strict=True):
        S = -lr * (G.double() + coupled * decay * U).tanh()
        U = (1 if coupled else 1 - lr * decay) * U + S
        steps.append((U, S))
    return steps


def test_an_unknown_decay_is_taken_to_be_decoupled_with_one_warning():
    p = Parameter(start())
    optimizer = Unseen([p], weight_decay=0.1)
    with pytest.warns(UserWarning, match="how Unseen uses weight_decay and takes it to be decoupled") as caught:
        increments = watched(optimizer, p)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert 'decay="coupled"' in str(caught[0].message)
    assert_by_difference(increments, unseen_steps(coupled=False))


@pytest.mark.parametrize("kind", [Unseen, UnseenCoupled])
def test_a_decay_that_was_told_is_used_without_a_warning(kind):
    p = Parameter(start())
    optimizer = kind([p], weight_decay=0.1)
    source = IncrementSource(optimizer, p, decay="coupled" if kind.coupled else "decoupled")
    assert source.decoupled != kind.coupled
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        increments = watched(optimizer, p, source=source)
    assert_by_difference(increments, unseen_steps(kind.coupled))


def test_an_unknown_optimizer_without_decay_warns_of_nothing():
    p = Parameter(start())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        increments = watched(UnseenCoupled([p]), p)
    assert_by_difference(increments, unseen_steps(coupled=True, decay=0.0))


# the step that was made


def train(model, optimizer, after=lambda: None, updates=4, clip=0.05):
    """Two batches an update, clipped."""
    for update in range(updates):
        optimizer.zero_grad()
        for half in range(2):
            x = normal(100 + 2 * update + half, 5, 6).float()
            (model(x).logsumexp(1).mean() / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        after()


STEPPED = {
    "AdamW": (ADAMW, partial(adam_steps, weight_decay=0.1)),
    "momentum": (
        partial(SGD, momentum=0.9),
        partial(sgd_steps, momentum=0.9),
    ),
    "RowNorm": (partial(RowNorm, weight_decay=0.1), partial(rownorm_steps, weight_decay=0.1)),
    "decayed-SGD": (partial(SGD, weight_decay=0.1), partial(sgd_steps, weight_decay=0.1)),
}


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["float", "tensor"])
@pytest.mark.parametrize(("make", "reference"), STEPPED.values(), ids=STEPPED)
def test_accumulated_clipped_and_rescheduled_steps_are_the_ones_formed(make, reference, lr):
    torch.manual_seed(0)
    model = nn.Linear(6, 17, bias=False)
    p, U = model.weight, model.weight.detach().clone()
    lr = lr.clone() if isinstance(lr, torch.Tensor) else lr
    optimizer, grads, increments = make([p], lr=lr), [], []
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda t: [1, 0.01, 3, 0, 1][t])
    source = IncrementSource(optimizer, p)
    source.watch(lambda _: grads.append(p.grad.clone()))

    def after():
        scheduler.step()
        increments.append(source.form())

    train(model, optimizer, after)
    expected = reference(U, grads, [0.1, 0.001, 0.3, 0.0])
    (assert_from_state if source.from_state else assert_by_difference)(increments, expected)


@pytest.mark.parametrize("tensor", [False, True], ids=["float", "tensor"])
def test_a_decay_that_was_scheduled_away_is_still_that_of_the_step(tensor):
    p = Parameter(start())
    optimizer = Adafactor([p], lr=torch.tensor([0.5]) if tensor else 0.5, weight_decay=0.5)
    source = IncrementSource(optimizer, p)
    source.watch(lambda _: None)
    p.grad = some_gradients()[0]
    optimizer.step()
    S = source.form().S
    close(S, p - 0.75 * start(), atol=1e-6)
    set_lr(optimizer, 0.0)
    optimizer.param_groups[0]["weight_decay"] = 0.0
    assert torch.equal(source.form().S, S)
    assert (source.last.lr, source.last.decay) == (0.5, 0.5)


@each_from_state
def test_a_step_without_gradient_is_skipped_and_has_no_increment(make):
    p, other, seen = Parameter(start()), Parameter(start()), []
    optimizer = make([p, other], lr=0.1)
    source = IncrementSource(optimizer, p)
    source.watch(seen.append)
    p.grad, other.grad, *_ = some_gradients()
    optimizer.step()
    assert source.form().S.any()
    p.grad = None
    optimizer.step()
    assert [step.skipped for step in seen] == ["", "no gradient"]
    assert torch.equal(source.form().S, torch.zeros(SHAPE))
    assert source.form().rounding == 0


def scaled_step(scaler, optimizer, p, G):
    optimizer.zero_grad()
    scaler.scale((p * torch.nan_to_num(G, posinf=1.0)).sum()).backward()
    p.grad[~torch.isfinite(G)] = torch.inf
    scaler.step(optimizer)
    scaler.update()


def overflown():
    G = some_gradients()[1]
    G[0, 0] = torch.inf
    return G


@pytest.mark.parametrize(("make", "reference"), list(STEPPED.values())[:2], ids=list(STEPPED)[:2])
def test_a_fused_step_left_out_by_the_scaler_is_an_overflow(make, reference):
    p, seen, scaler = Parameter(start()), [], torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer = make([p], lr=0.1, fused=True)
    source = IncrementSource(optimizer, p)
    source.watch(seen.append)
    first, _, second, *_ = some_gradients()
    increments = []
    for G in (first, overflown(), second):
        before = p.detach().clone()
        scaled_step(scaler, optimizer, p, G)
        increments.append(source.form())
        assert torch.equal(p, before) == bool(seen[-1].skipped)
    assert [step.skipped for step in seen] == ["", "overflow", ""]
    assert not increments.pop(1).S.any()
    assert_from_state(increments, reference(start(), [first, second], [0.1, 0.1]))


@pytest.mark.parametrize("make", [ADAMW, partial(RowNorm, lr=0.1), partial(Adafactor, lr=0.1)])
def test_an_ordinary_step_left_out_by_the_scaler_is_not_seen(make):
    p, seen, scaler = Parameter(start()), [], torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer = make([p])
    source = IncrementSource(optimizer, p)
    source.watch(seen.append)
    scaled_step(scaler, optimizer, p, some_gradients()[0])
    last = source.last
    S = source.form().S
    scaled_step(scaler, optimizer, p, overflown())
    assert seen == [last]
    assert source.last is last
    assert torch.equal(source.form().S, S)


@each_from_state
def test_forming_changes_nothing(make):
    p = Parameter(start())
    optimizer = make([p], lr=0.1)
    source = IncrementSource(optimizer, p)
    source.watch(lambda _: None)

    def everything():
        held = {"U": p, "G": p.grad, **{k: v for k, v in optimizer.state[p].items() if isinstance(v, torch.Tensor)}}
        tensors = {name: (t.detach().clone(), t._version, t.data_ptr()) for name, t in held.items()}
        return tensors, torch.get_rng_state(), dict(optimizer.param_groups[0], params=None)

    for G in some_gradients():
        p.grad = G
        optimizer.step()
        (tensors, rng, options), first, second = everything(), source.form(), source.form()
        tensors_after, rng_after, options_after = everything()
        assert torch.equal(first.S, second.S)
        first.S.zero_()
        assert torch.equal(source.form().S, second.S)
        assert torch.equal(rng, rng_after)
        assert options == options_after
        for name, (value, version, place) in tensors.items():
            assert torch.equal(value, tensors_after[name][0])
            assert (version, place) == tensors_after[name][1:]


def test_an_increment_has_no_graph_and_is_never_in_bf16():
    p = Parameter(start(torch.bfloat16))
    optimizer = SGD([p])
    source = IncrementSource(optimizer, p)
    source.watch(lambda _: None)
    for p.grad in (some_gradients(torch.bfloat16)[0].requires_grad_(), None):
        optimizer.step()
        assert source.form().S.dtype == torch.float32
        assert not source.form().S.requires_grad


class Clones(TorchDispatchMode):
    """Counts copies of one tensor."""

    def __init__(self, tensor):
        super().__init__()
        self.place, self.size, self.count = tensor.data_ptr(), tensor.numel(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.clone, torch.ops.aten._to_copy):
            self.count += args[0].data_ptr() == self.place and args[0].numel() == self.size
        return func(*args, **(kwargs or {}))


def test_weights_are_copied_only_for_the_steps_that_are_measured():
    p, wanted = Parameter(normal(0, 1024, 4).float()), [True, False, True, False]
    optimizer, answers = Adagrad([p]), iter(wanted)
    source = IncrementSource(optimizer, p)
    end = source.watch(lambda _: None, measure=lambda: next(answers))
    for measured in wanted:
        p.grad, before = normal(1, 1024, 4).float(), p.detach().double()
        with Clones(p) as clones:
            optimizer.step()
        assert clones.count == measured
        if measured:
            close(source.form().S, p.double() - before, atol=source.form().rounding)
        else:
            with pytest.raises(RuntimeError, match="increment of Adagrad is a difference of weights"):
                source.form()
    end()


@each_from_state
def test_weights_are_never_copied_where_state_is_enough(make):
    p = Parameter(normal(0, 1024, 4))
    optimizer = make([p], lr=0.1)
    source = IncrementSource(optimizer, p)
    source.watch(lambda _: None)
    for seed in (1, 2):
        p.grad = normal(seed, 1024, 4)
        with Clones(p) as clones:
            optimizer.step()
            source.form()
        assert clones.count == 0


def test_the_step_is_told_once_it_is_made_and_never_after_the_end():
    p, seen, asked = Parameter(start()), [], []
    optimizer = Adagrad([p])
    source = IncrementSource(optimizer, p)
    end = source.watch(lambda step: seen.append((step, source.form().S)), measure=lambda: asked.append(1) or True)
    p.grad = some_gradients()[0]
    optimizer.step()
    end()
    ((step, S),) = seen
    assert step is source.last
    assert torch.equal(S, source.form().S)
    optimizer.step()
    assert (len(seen), len(asked)) == (1, 1)
    assert source.last is step


def test_a_loaded_state_is_the_one_that_is_used():
    p, grads = Parameter(start()), some_gradients()
    optimizer = ADAMW([p])
    source = IncrementSource(optimizer, p)
    before = watched(optimizer, p, grads[:2], LRS[:2], source)
    saved = copy.deepcopy(optimizer.state_dict())
    watched(optimizer, p, grads[2:], LRS[2:], source)
    optimizer.load_state_dict(saved)
    assert_from_state(
        [*before, *watched(optimizer, p, grads[2:], LRS[2:], source)],
        adam_steps(start(), grads, LRS, weight_decay=0.1),
    )


def test_there_is_nothing_to_form_before_a_step():
    p = Parameter(start())
    source = IncrementSource(AdamW([p]), p)
    with pytest.raises(RuntimeError, match="no step"):
        source.form()
    source.watch(lambda _: None)
    with pytest.raises(RuntimeError, match="no step"):
        source.form()


def test_a_parameter_of_somebody_else_is_refused():
    p, equal = Parameter(start()), Parameter(start())
    with pytest.raises(ValueError, match=r"\(17, 6\) is in no group of AdamW"):
        IncrementSource(AdamW([p]), equal)
    with pytest.raises(ValueError, match="none of the chained optimizers"):
        IncrementSource(ChainedOptimizer(AdamW([p])), equal)


# in Lightning


class Automatic(lightning.LightningModule):
    def __init__(self, make):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.make = nn.Linear(4, 6), nn.Linear(6, 17, bias=False), make

    def training_step(self, x, _):
        return self.head(self.body(x)).logsumexp(1).mean()

    def configure_optimizers(self):
        optimizer = self.make([self.head.weight], self.body.parameters())
        scheduler = lr_scheduler.LambdaLR(optimizer, lambda t: 1 / (1 + t))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Watch(Callback):
    """Forms the head's increment at the end of every batch that stepped, and once more at the end."""

    def on_fit_start(self, trainer, pl_module):
        self.p = pl_module.head.weight
        self.U, self.grads, self.steps, self.increments = self.p.detach().clone(), [], [], []
        (optimizer,) = trainer.optimizers
        self.source = IncrementSource(optimizer, self.p)
        self.source.optimizer.register_step_post_hook(lambda *_: self.grads.append(self.p.grad.clone()))
        self.end = self.source.watch(self.steps.append)

    def on_train_batch_end(self, *_):
        if len(self.steps) > len(self.increments):
            self.increments.append(self.source.form())

    def on_train_end(self, *_):
        self.again = self.source.form()
        self.end()


def fit(module, folder, callbacks=(), **options):
    lightning.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        max_epochs=1,
        callbacks=list(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **options,
    ).fit(module, DataLoader([normal(t, 5, 4).float() for t in range(8)], batch_size=None))
    return [p.detach().clone() for p in module.parameters()]


AUTOMATIC = {
    "AdamW": (lambda head, body: ADAMW([*head, *body], lr=0.1), partial(adam_steps, weight_decay=0.1)),
    "SGD": (lambda head, body: SGD([*head, *body], lr=0.1), sgd_steps),
    "chain": (
        lambda head, body: ChainedOptimizer(RowNorm(head, lr=0.1, weight_decay=0.1), AdamW(body)),
        partial(rownorm_steps, weight_decay=0.1),
    ),
    "difference": (
        lambda head, body: SGD([*head, *body], lr=0.1, weight_decay=0.1),
        partial(sgd_steps, weight_decay=0.1),
    ),
}


@pytest.mark.parametrize(("make", "reference"), AUTOMATIC.values(), ids=AUTOMATIC)
def test_automatic_optimization_is_watched_and_left_alone(make, reference, tmp_path):
    options, watch = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}, Watch()
    weights = fit(Automatic(make), tmp_path, [watch], **options)
    lrs = [0.1 / (1 + t) for t in range(4)]
    assert [step.lr for step in watch.steps] == pytest.approx(lrs)
    check = assert_from_state if watch.source.from_state else assert_by_difference
    check(watch.increments, reference(watch.U, watch.grads, lrs))
    assert torch.equal(watch.again.S, watch.increments[-1].S)
    assert all(torch.equal(a, b) for a, b in zip(weights, fit(Automatic(make), tmp_path, **options), strict=True))


class Manual(Automatic):
    """Steps the body on every batch and the head on every other, and watches both."""

    def __init__(self, wrapped, head):
        super().__init__(head)
        self.automatic_optimization, self.wrapped = False, wrapped

    def configure_optimizers(self):
        return ADAMW(self.body.parameters(), lr=0.1), self.make([self.head.weight], lr=0.1)

    def on_train_start(self):
        optimizers = self.optimizers() if self.wrapped else self.trainer.optimizers
        params = self.body.weight, self.head.weight
        self.began = [p.detach().clone() for p in params]
        self.sources = [IncrementSource(o, p) for o, p in zip(optimizers, params, strict=True)]
        self.grads, self.increments = ([], []), ([], [])
        for source, grads, increments in zip(self.sources, self.grads, self.increments, strict=True):

            def note(_, source=source, grads=grads, increments=increments):
                grads.append(source.param.grad.clone())
                increments.append(source.form())

            source.watch(note)

    def training_step(self, x, index):
        body, head = self.optimizers()
        for optimizer in (body, head)[: 1 + index % 2]:
            optimizer.zero_grad()
        self.manual_backward(super().training_step(x, index))
        body.step()
        if index % 2:
            head.step()


@pytest.mark.parametrize("wrapped", [False, True], ids=["optimizer", "LightningOptimizer"])
@pytest.mark.parametrize("name", ["SGD", "RowNorm", "SGD-decayed"])
def test_manual_optimization_with_two_optimizers_is_watched(name, wrapped, tmp_path):
    options = {"momentum": 0.9, "weight_decay": 0.1}
    make, reference = {
        "SGD-decayed": (partial(SGD, **options), partial(sgd_steps, **options)),
        **FROM_STATE,
    }[name]
    module = Manual(wrapped, make)
    fit(module, tmp_path)
    assert [len(increments) for increments in module.increments] == [8, 4]
    walks = (
        adam_steps(module.began[0], module.grads[0], [0.1] * 8, weight_decay=0.1),
        reference(module.began[1], module.grads[1], [0.1] * 4),
    )
    for source, increments, walk in zip(module.sources, module.increments, walks, strict=True):
        (assert_from_state if source.from_state else assert_by_difference)(increments, walk)

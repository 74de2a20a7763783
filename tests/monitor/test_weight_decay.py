"""Weight decay is known exactly or not at all: D(S) is the fp64 answer, or the record has the change of the weights."""

import warnings
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.optim import Adam, AdamW, NAdam, Optimizer

from hilbert_monitor import Probe, RowNorm
from hilbert_monitor.monitor.optimizers import WeightDecay
from hilbert_monitor.monitor.panel import Panel
from tests.support.decoders import Plain, loss_of, seeded
from tests.support.optim_references import adam_steps, gradients, sgd_steps
from tests.support.references import all_pairs_diameter, normal

V, D = 17, 6
START = normal(0, V, D)
GRADS = [(G - G.mean(0)) * size for G, size in zip(gradients(10, (V, D), 4), [1, 5, 0.1, 3], strict=True)]
LRS = [1e-2, 3e-2, 5e-3, 1e-2]
DECAY = 0.5
FLAG = {"decoupled_weight_decay": True}


def measured(make, *, lrs=LRS, **options):
    """Step a head with known gradients and rates; return its records, its weights, and what the probe has to say."""
    model = nn.ModuleDict({"lm_head": nn.Linear(D, V, bias=False)})
    p = model["lm_head"].weight
    p.data.copy_(START)
    optimizer = make([p], lr=lrs[0])
    records, weights = [], [p.detach().double()]
    with Probe(
        model, optimizer, head="lm_head", diameter_every=1, perturbation_every=0, strict=True, **options
    ) as probe:
        for G, lr in zip(GRADS, lrs, strict=False):
            optimizer.param_groups[0]["lr"] = lr
            p.grad = G.float()
            optimizer.step()
            records.append(probe.record())
            weights.append(p.detach().double())
    return records, weights, probe.remarks


def assert_known(records, increments):
    """Records have D of these increments in fp64, up to the rounding of a difference of fp32 weights."""
    for record, S in zip(records, increments, strict=True):
        slack = (record.rounding or 0.0) + 1e-5 * all_pairs_diameter(S)
        assert record.diameter == pytest.approx(all_pairs_diameter(S), rel=0, abs=slack)
        assert record.change_diameter is None
        assert record.decay == ""


def assert_unknown(records, weights):
    """Records have no D(S), and the exact diameter of the change of the weights."""
    for record, (before, after) in zip(records, pairwise(weights), strict=True):
        assert (record.diameter, record.diameter_lower, record.diameter_upper) == (None, None, None)
        assert record.change_diameter == pytest.approx(all_pairs_diameter(after - before), rel=1e-5)
        assert record.decay == "unknown"


# Optimizers that are known


TORCH = ["Adagrad", "Adadelta", "Adamax", "RMSprop", "Adam", "AdamW", "NAdam", "Adafactor"]
FLAGGED = ["Adam", "NAdam", "RAdam"]


@pytest.mark.parametrize(("name", "flag"), [*((name, {}) for name in TORCH), *((name, FLAG) for name in FLAGGED)])
def test_a_first_step_of_torchs_own_is_the_one_without_decay_or_the_one_with_it(name, flag):
    """In fp64 a decoupled decay changes the first step by a multiple of the weights, and a coupled one otherwise."""
    kind, lr = getattr(torch.optim, name), 0.05
    ends = []
    for decay in (0.0, DECAY):
        p = nn.Parameter(START.clone())
        p.grad = GRADS[0].clone()
        kind([p], lr=lr, weight_decay=decay, **flag).step()
        ends.append(p.detach())
    decoupled = torch.allclose(ends[1] - ends[0], -lr * DECAY * START, rtol=1e-9, atol=1e-12)
    records, *_ = measured(partial(kind, weight_decay=DECAY, **flag), lrs=[lr])
    assert_known(records, [ends[0] - START if decoupled else ends[1] - START])


def lion_steps(betas=(0.9, 0.99)):
    """Increments of Lion in fp64: whatever the decay is, they are the same."""
    m, steps = torch.zeros_like(START), []
    for G, lr in zip(GRADS, LRS, strict=True):
        steps.append(-lr * (betas[0] * m + (1 - betas[0]) * G).sign())
        m = betas[1] * m + (1 - betas[1]) * G
    return steps


def adams(decoupled):
    return [S for _, S in adam_steps(START, GRADS, LRS, weight_decay=DECAY, decoupled=decoupled)]


SGDS = [S for _, S in sgd_steps(START, GRADS, LRS, momentum=0.9, weight_decay=DECAY)]
ELSEWHERE = [
    ("lion_pytorch.Lion", {"weight_decay": 0.01, "decoupled_weight_decay": False}, lion_steps()),
    # With its flag the decay is divided by the first learning rate.
    ("lion_pytorch.Lion", {"weight_decay": 0.01, "decoupled_weight_decay": True}, lion_steps()),
    ("pytorch_optimizer.Lion", {"weight_decay": 0.1, "fixed_decay": False}, lion_steps()),
    ("pytorch_optimizer.Lion", {"weight_decay": 0.1, "fixed_decay": True}, lion_steps()),
    # Adam of bitsandbytes decays as AdamW does.
    ("bitsandbytes.optim.Adam", {"weight_decay": DECAY}, adams(decoupled=True)),
    ("bitsandbytes.optim.AdamW", {"weight_decay": DECAY}, adams(decoupled=True)),
    ("bitsandbytes.optim.SGD", {"weight_decay": DECAY, "momentum": 0.9}, SGDS),
    # The decay of some entries is not known.
    ("lion_pytorch.cautious_lion.Lion", {"weight_decay": DECAY, "cautious_wd": True}, None),
    ("pytorch_optimizer.RAdam", {"weight_decay": DECAY, "fixed_decay": True}, None),
]


@pytest.mark.parametrize(("name", "options", "steps"), ELSEWHERE)
@pytest.mark.filterwarnings("ignore")
def test_optimizers_of_other_packages(name, options, steps):
    module, _, kind = name.rpartition(".")
    records, weights, remarks = measured(partial(getattr(pytest.importorskip(module), kind), **options))
    if steps is None:
        assert_unknown(records, weights)
        assert f"it is not known how {kind} uses weight_decay" in remarks[0]
    else:
        assert_known(records, steps)
        assert remarks == []


def test_a_flag_that_a_class_of_ones_own_declares_is_believed():
    class Flagged(Own):
        def __init__(self, params, lr, weight_decay, decoupled):
            options = {"lr": lr, "weight_decay": weight_decay, "decoupled_weight_decay": decoupled}
            Optimizer.__init__(self, params, options)
            self.coupled = not decoupled

    for decoupled in (True, False):
        records, *_ = measured(partial(Flagged, weight_decay=DECAY, decoupled=decoupled))
        assert_known(records, own_steps(coupled=not decoupled))


# Optimizers that are not


class Own(Optimizer):
    """Descent along tanh of the gradient, with one decay or the other."""

    coupled = False

    def __init__(self, params, lr=0.1, **options):
        super().__init__(params, {"lr": lr} | options)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            decay = group.get("weight_decay", 0.0) + group.get("wd", 0.0)
            for p in group["params"]:
                pull = decay * p
                p.sub_(group["lr"] * ((p.grad + pull).tanh() if self.coupled else p.grad.tanh() + pull))


class OwnCoupled(Own):
    """The same with coupled decay."""

    coupled = True


class DecoupledInItsStep(Adam):
    """Decays in a step of its own, and then makes Adam's; the group's flag is inherited, and is False."""

    @torch.no_grad()
    def step(self, closure=None):
        (group,) = self.param_groups
        decay = group["weight_decay"]
        for p in group["params"]:
            p.mul_(1 - group["lr"] * decay)
        group["weight_decay"] = 0.0
        super().step(closure)
        group["weight_decay"] = decay


class CoupledInItsStep(AdamW):
    """Adds the decay to the gradient; the group's flag is inherited, and is True."""

    @torch.no_grad()
    def step(self, closure=None):
        (group,) = self.param_groups
        (p,), decay = group["params"], group["weight_decay"]
        gradient, p.grad = p.grad, p.grad + decay * p
        group["weight_decay"] = 0.0
        super().step(closure)
        p.grad, group["weight_decay"] = gradient, decay


class RowNormCoupled(RowNorm):
    """One of ours with a step of its own, that inherits a flag too."""

    @torch.no_grad()
    def step(self, closure=None):
        (group,) = self.param_groups
        for p in group["params"]:
            p.sub_(p.grad + group["weight_decay"] * p, alpha=group["lr"])


class OwnNAdam(NAdam):
    """One of torch's that does as well."""

    coupled, step = False, Own.step


def own_steps(coupled):
    U, steps = START, []
    for G, lr in zip(GRADS, LRS, strict=True):
        steps.append(-lr * (G + coupled * DECAY * U).tanh())
        U = (1 if coupled else 1 - lr * DECAY) * U + steps[-1]
    return steps


@pytest.mark.parametrize("kind", [Own, OwnCoupled, DecoupledInItsStep, CoupledInItsStep, OwnNAdam, RowNormCoupled])
def test_a_step_that_nobody_knows_has_the_change_of_the_weights_and_no_increment(kind):
    records, weights, remarks = measured(partial(kind, weight_decay=DECAY))
    assert_unknown(records, weights)
    (remark,) = remarks
    assert f"how {kind.__name__} uses weight_decay, so D(S) is not measured" in remark
    assert 'pass decay="decoupled" | "coupled" | a number | a function of the group' in remark


TOLD = {
    "decoupled": (Own, "decoupled", lambda: own_steps(False)),
    "coupled": (OwnCoupled, "coupled", lambda: own_steps(True)),
    "an inherited False": (DecoupledInItsStep, "decoupled", lambda: adams(decoupled=True)),
    "an inherited True": (CoupledInItsStep, "coupled", lambda: adams(decoupled=False)),
    "a function": (Own, lambda group: group["lr"] * group["weight_decay"], lambda: own_steps(False)),
}


@pytest.mark.parametrize(("kind", "decay", "steps"), TOLD.values(), ids=TOLD)
def test_what_the_user_says_wins(kind, decay, steps):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        records, _, remarks = measured(partial(kind, weight_decay=DECAY), decay=decay)
    assert_known(records, steps())
    assert remarks == []


def test_a_number_is_the_share_of_the_weights_also_where_the_class_is_known():
    records, weights, _ = measured(partial(NAdam, weight_decay=DECAY), decay=0.25)
    expected = [after - 0.75 * before for before, after in pairwise(weights)]
    assert_known(records, expected)


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.0}])
def test_without_decay_nothing_is_unknown(options):
    records, weights, remarks = measured(partial(Own, **options))
    assert_known(records, [after - before for before, after in pairwise(weights)])
    assert remarks == []


def test_a_decay_by_another_name_is_not_taken_for_none():
    records, weights, _ = measured(partial(Own, wd=DECAY))
    assert_unknown(records, weights)


def test_a_decay_that_is_scheduled_later_is_not_known_from_then_on():
    def make(params, lr):
        optimizer, decays = Own(params, lr, weight_decay=0.0), iter((0.0, DECAY))
        optimizer.register_step_pre_hook(lambda *_: optimizer.param_groups[0].update(weight_decay=next(decays)))
        return optimizer

    records, weights, remarks = measured(make, lrs=LRS[:2])
    assert_known(records[:1], [weights[1] - weights[0]])
    assert_unknown(records[1:], weights[1:])
    assert [remark.partition(",")[0] for remark in remarks] == ["it is not known how Own uses weight_decay"]


def test_what_needs_an_increment_is_not_measured_of_a_change():
    model = seeded(Plain, V=V, d=D)
    optimizer, panel = Own(model.parameters(), weight_decay=DECAY), Panel.of_tokens(torch.randint(V, (4, 9)), 20)
    options = {"diameter_every": 2, "perturbation_every": 4, "bounds": True, "efficiency": True, "strict": True}
    with Probe(model, optimizer, panel=panel, **options) as probe:
        for update in range(4):
            optimizer.zero_grad()
            loss_of(model, update, V).backward()
            optimizer.step()
            record = probe.record()
            assert (record.change_diameter is not None) == (update % 2 == 1)
            assert record.diameter_upper is None
    names = ("perturbation_rms", "radius", "gauge_waste", "spectral_norm", "ceiling", "efficiency_upper")
    assert [getattr(record, name) for name in names] == [None] * len(names)


def test_a_word_that_says_nothing_of_a_decay_is_refused():
    weight = torch.nn.Parameter(torch.zeros(3, 2))
    with pytest.raises(ValueError, match='decay is "decoupled", "coupled", a number or a function of the group, got'):
        WeightDecay(AdamW([weight]), "typo")

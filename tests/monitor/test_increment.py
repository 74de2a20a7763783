"""The increment of a step is the one that fp64 equations give, with any optimizer and loop, or none is reported."""

import logging
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop

from hilbert_monitor import Probe
from hilbert_monitor.geometry import row_diameter
from hilbert_monitor.monitor.increment import Basis, IncrementSource, StepPlan
from hilbert_monitor.monitor.optimizers import on_steps
from hilbert_monitor.monitor.panel import Panel
from hilbert_monitor.optim import ChainedOptimizer, Muon, RowNorm
from tests.support.decoders import Plain, loss_of, seeded
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


def watch(source, seen=None, plan=StepPlan()):  # noqa: B008
    """Let a source see the steps of its optimizer; return a function that ends it."""
    seen = [] if seen is None else seen
    return on_steps([source.optimizer], lambda: source.begin(plan), lambda: seen.append(source.end()))


def watched(optimizer, p, grads=None, lrs=LRS, source=None):
    """Increments of steps with these gradients, each checked to be what moved the weights."""
    source, seen, increments = source or IncrementSource(optimizer, p), [], []
    end = watch(source, seen)
    for G, lr in zip(some_gradients(p.dtype) if grads is None else grads, lrs, strict=True):
        set_lr(optimizer, lr)
        before, p.grad = p.detach().clone().double(), G.clone()
        optimizer.step()
        increment = source.increment()
        S, rounding = increment.rows.matrix().clone(), increment.rounding
        kept = 1 - float(source.decay.share(source.last.options))
        largest = torch.maximum(before.abs().amax(), p.detach().abs().amax())
        close(p, kept * before + S, atol=float(3 * torch.finfo(p.dtype).eps * largest))
        increments.append((S, rounding))
    end()
    assert [step.lr for step in seen] == pytest.approx(lrs)
    assert not any(step.skipped for step in seen)
    return increments


def assert_from_state(increments, references, tolerance=1e-5, rounds=False):
    """`rounds`: the parameter is of less than fp32, and may not have moved by what the step was."""
    for (S, rounding), (_, expected) in zip(increments, references, strict=True):
        assert (rounding > 0) == rounds
        close(S, expected, atol=tolerance * float(expected.abs().max()))
        assert row_diameter(S).value == pytest.approx(all_pairs_diameter(expected), rel=tolerance, abs=0)


def assert_by_difference(increments, references):
    for (S, rounding), (_, expected) in zip(increments, references, strict=True):
        assert 0 < rounding < 1e-5
        close(S, expected, atol=rounding)
        slack = 2 * SHAPE[1] ** 0.5 * rounding
        assert row_diameter(S).value == pytest.approx(all_pairs_diameter(expected), rel=0, abs=slack)


# From the optimizer's state

AMSGRAD = {"weight_decay": 0.1, "amsgrad": True, "betas": (0.9, 0.95)}
MAXIMIZE = {"weight_decay": 0.1, "maximize": True, "betas": (0.0, 0.9), "eps": 1e-2}
DAMPED = {"momentum": 0.9, "dampening": 0.3, "maximize": True}
FROM_STATE = {
    "AdamW": (partial(AdamW, weight_decay=0.1), partial(adam_steps, weight_decay=0.1)),
    "AdamW-amsgrad": (partial(AdamW, **AMSGRAD), partial(adam_steps, **AMSGRAD)),
    "AdamW-fused": (partial(AdamW, **MAXIMIZE, fused=True), partial(adam_steps, **MAXIMIZE)),
    "Adam": (partial(Adam, weight_decay=0.1), partial(adam_steps, weight_decay=0.1, decoupled=False)),
    "SGD": (SGD, sgd_steps),
    "SGD-maximize": (partial(SGD, maximize=True), partial(sgd_steps, maximize=True)),
    "SGD-momentum": (partial(SGD, momentum=0.9), partial(sgd_steps, momentum=0.9)),
    "SGD-dampening": (partial(SGD, **DAMPED, foreach=True), partial(sgd_steps, **DAMPED)),
    "RowNorm": (partial(RowNorm, weight_decay=0.1), partial(rownorm_steps, weight_decay=0.1)),
    "RowNorm-both": (partial(RowNorm, center="both"), partial(rownorm_steps, center="both")),
    "Muon": (Muon, muon_steps),
}
MAIN = ["AdamW", "SGD", "SGD-momentum", "RowNorm", "Muon"]


def each(names):
    return pytest.mark.parametrize(("make", "reference"), [FROM_STATE[name] for name in names], ids=names)


@each(FROM_STATE)
def test_the_increment_is_formed_from_state(make, reference):
    p = Parameter(start())
    optimizer = make([p], lr=0.1)
    assert IncrementSource(optimizer, p).basis is Basis.STATE
    assert_from_state(watched(optimizer, p), reference(start(), some_gradients(), LRS))


@each(MAIN)
def test_the_owner_in_a_chain_is_watched_and_its_rate_may_be_a_tensor(make, reference):
    p, other = Parameter(start()), Parameter(torch.ones(3, 3))
    chain = ChainedOptimizer(Muon([other]), make([p], lr=torch.tensor(0.1)))
    other.grad = torch.ones(3, 3)
    source = IncrementSource(chain, p)
    assert source.optimizer is chain.optimizers[1]
    assert_from_state(watched(chain, p, source=source), reference(start(), some_gradients(), LRS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@each([name for name in MAIN if name != "Muon"])  # it iterates in fp32
def test_a_small_increment_of_large_weights_is_not_lost(make, reference, dtype):
    """U ~ 1e3 and lr 1e-7: in fp32 most steps do not move the weights at all."""
    p, tiny = Parameter(start(dtype, scale=1e3)), [1e-7] * len(LRS)
    increments = watched(make([p], lr=0.1), p, lrs=tiny)
    assert increments[0][0].dtype == dtype
    expected = reference(start(dtype, scale=1e3), some_gradients(dtype), tiny)
    assert_from_state(increments, expected, tolerance=1e-5 if dtype == torch.float32 else 1e-11)


def test_the_first_step_is_precise_though_0999_is_not_in_fp32():
    p, G = Parameter(start()), some_gradients()[0]
    ((S, _),) = watched(AdamW([p], eps=1e-12), p, [G], [1e-3])
    close(S, -1e-3 * G.sign(), atol=1e-9)


def test_bf16_state_goes_through_the_formula_in_fp32():
    p = Parameter(start(torch.bfloat16))
    optimizer = AdamW([p], amsgrad=True)
    increments = watched(optimizer, p)
    assert all(S.dtype == torch.float32 for S, _ in increments)
    state, t = optimizer.state[p], len(LRS)
    v = state["max_exp_avg_sq"].double() / (1 - 0.999**t)
    S = -LRS[-1] * state["exp_avg"].double() / (1 - 0.9**t) / (v.sqrt() + 1e-8)
    assert_from_state(increments[-1:], [(p, S)], rounds=True)


# As a difference of the weights

DIFFERENCES = {
    "SGD-decay": partial(SGD, weight_decay=0.1),
    "SGD-nesterov": partial(SGD, momentum=0.9, nesterov=True),
    "NAdam-decoupled": partial(NAdam, weight_decay=0.1, decoupled_weight_decay=True),
    "Adagrad": partial(Adagrad, weight_decay=0.1),
    "torch-Muon": partial(torch.optim.Muon, weight_decay=0.1),
}
DECOUPLED = ("NAdam-decoupled", "torch-Muon")


@pytest.mark.parametrize("name", DIFFERENCES)
def test_other_optimizers_are_a_difference_within_its_rounding(name):
    p, before = Parameter(start()), [start().double()]
    optimizer = DIFFERENCES[name]([p], lr=0.1)
    optimizer.register_step_post_hook(lambda *_: before.append(p.detach().double()))
    assert IncrementSource(optimizer, p).basis is Basis.STEP
    kept = [1 - lr * 0.1 * (name in DECOUPLED) for lr in LRS]
    increments = watched(optimizer, p)
    expected = [(None, b - k * a) for k, (a, b) in zip(kept, pairwise(before), strict=True)]
    assert_by_difference(increments, expected)


def test_weights_are_copied_only_for_the_steps_that_are_measured():
    p = Parameter(normal(0, 1024, 4).float())
    optimizer = Adagrad([p])
    source = IncrementSource(optimizer, p)
    for measured in (True, False, True):
        end = watch(source, plan=StepPlan(exact=measured, bounds=False, check=False))
        p.grad, before = normal(1, 1024, 4).float(), p.detach().double()
        optimizer.step()
        end()
        assert source.has_before == measured
        if measured:
            increment = source.increment()
            close(increment.rows.matrix(), p.double() - before, atol=increment.rounding)
        else:
            with pytest.raises(RuntimeError, match="increment of Adagrad is a difference of weights"):
                source.increment()


# Subclasses


@pytest.fixture
def never_made(monkeypatch):
    """Adam and AdamW as they are imported: torch puts hooks on the step of a class when the first of it is made."""
    if "step" in vars(AdamW):
        monkeypatch.delattr(AdamW, "step")
    if hasattr(Adam.step, "hooked"):
        monkeypatch.setattr(Adam, "step", Adam.step.__wrapped__)
    assert not hasattr(AdamW.step, "hooked")


MADE = {"none": [], "Adam": [Adam], "AdamW": [AdamW], "both": [AdamW, Adam]}


@pytest.mark.usefixtures("never_made")
@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
def test_a_subclass_is_its_base_or_with_a_step_of_its_own_a_difference_and_one_step(made):
    """Once the base has hooks of its own, a step on top of its step fires them twice."""
    for kind in made:
        kind([Parameter(start())])
    p = Parameter(start())
    increments = watched(type("Named", (AdamW,), {})([p], weight_decay=0.1), p)
    assert_from_state(increments, adam_steps(start(), some_gradients(), LRS, weight_decay=0.1))

    class Slides(AdamW):
        @torch.no_grad()
        def step(self, closure=None):
            super().step(closure)
            p.sub_(self.param_groups[0]["lr"] * 0.5)

    p = Parameter(start())
    optimizer = Slides([p], weight_decay=0.0)
    assert IncrementSource(optimizer, p).basis is Basis.STEP
    assert all(0 < rounding < 1e-5 for _, rounding in watched(optimizer, p))


# Which step was made


def test_a_step_without_gradient_is_skipped_and_has_no_increment():
    p, other, seen = Parameter(start()), Parameter(start()), []
    optimizer = AdamW([p, other], lr=0.1)
    source = IncrementSource(optimizer, p)
    watch(source, seen)
    p.grad, other.grad, *_ = some_gradients()
    optimizer.step()
    assert source.increment().rows.matrix().any()
    p.grad = None
    optimizer.step()
    assert [step.skipped for step in seen] == ["", "no gradient"]
    assert torch.equal(source.increment().rows.matrix(), torch.zeros(SHAPE))
    assert source.increment().rounding == 0


def test_a_parameter_of_somebody_else_is_refused_and_before_a_step_there_is_nothing_to_form():
    p, equal = Parameter(start()), Parameter(start())
    with pytest.raises(RuntimeError, match="no step"):
        IncrementSource(AdamW([p]), p).increment()
    with pytest.raises(ValueError, match=r"\(17, 6\) is in no group of AdamW"):
        IncrementSource(AdamW([p]), equal)
    with pytest.raises(ValueError, match="none of the chained optimizers"):
        IncrementSource(ChainedOptimizer(AdamW([p])), equal)


# Whatever moves the weights, D(S) is that of the step that they made

V, D, UPDATES = 40, 16, 9


class Lookahead(Optimizer):
    """Goes back half of the way every three steps. As many of its kind, it never calls Optimizer.__init__."""

    def __init__(self, optimizer):
        self.optimizer, self.count = optimizer, 0
        self.param_groups, self.state, self.defaults = optimizer.param_groups, optimizer.state, optimizer.defaults
        self.slow = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        self.optimizer.step(closure)
        self.count += 1
        if self.count % 3 == 0:
            for group in self.param_groups:
                for slow, p in zip(self.slow, group["params"], strict=True):
                    slow.lerp_(p, 0.5)
                    p.copy_(slow)


class SAM(Optimizer):
    """Takes the gradient at a point that is worse."""

    def __init__(self, params, **options):
        super().__init__(params, options)
        self.base_optimizer = AdamW(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self):
        for p in self.param_groups[0]["params"]:
            self.state[p]["old"] = p.detach().clone()
            p.add_(p.grad, alpha=0.05 / float(p.grad.norm() + 1e-9))

    @torch.no_grad()
    def second_step(self):
        for p in self.param_groups[0]["params"]:
            p.copy_(self.state[p]["old"])
        self.base_optimizer.step()


class Clearing(SGD):
    """Clears gradients in its step, to save memory."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            p.grad = None


def backward(model, seed):
    model.zero_grad()
    loss_of(model, seed, V).backward()


def measured(optimizer, model, *, factor=1.0, step=None, updates=UPDATES, **options):
    """Train with a probe; return it, its records, and D of the weights' real increments in fp64.

    Args:
        factor: c of U' = c U + S.
        step: makes a step, in place of optimizer.step().
    """
    weight, records, diameters = model.lm_head.weight, [], []
    options = {"diameter_every": 1, "perturbation_every": 0, "strict": True} | options
    with Probe(model, optimizer, **options) as probe:
        for update in range(updates):
            backward(model, update)
            before = weight.detach().double()
            (step or optimizer.step)()
            records.append(probe.record())
            diameters.append(all_pairs_diameter(weight.detach().double() - factor * before))
    return probe, records, diameters


def assert_right(records, diameters, *, missing, rel=1e-4):
    """Every diameter is that of the weights; some steps may have none, and no more than `missing`."""
    assert [record.step for record in records] == list(range(1, len(records) + 1))
    for record, diameter in zip(records, diameters, strict=True):
        if record.diameter is not None:
            assert record.diameter == pytest.approx(diameter, rel=rel), record.step
    assert sum(record.diameter is None for record in records) <= missing


@pytest.fixture
def model():
    return seeded(Plain, V=V, d=D)


@pytest.fixture(autouse=True)
def _quiet(recwarn):
    """What the monitor says is looked at as remarks."""


def patched(optimizer, weight):
    original = optimizer.step

    @torch.no_grad()
    def step(closure=None):
        original(closure)
        weight.add_(normal(int(optimizer.state[weight]["step"]), V, D), alpha=1e-3)

    optimizer.step = step


@pytest.mark.parametrize("kind", ["wrapper", "patched step", "two calls", "clears", "clears, with momentum"])
def test_whatever_moves_the_weights_the_diameter_is_that_of_their_change(model, kind):
    step, plain = None, {"weight_decay": 0.0}
    if kind == "wrapper":
        optimizer = Lookahead(AdamW(model.parameters(), **plain))
    elif kind == "two calls":
        optimizer = SAM(model.parameters(), lr=1e-3, **plain)

        def step():
            optimizer.first_step()
            backward(model, 99)
            optimizer.second_step()
    elif kind == "patched step":
        optimizer = AdamW(model.parameters(), **plain)
        patched(optimizer, model.lm_head.weight)
    else:
        optimizer = Clearing(model.parameters(), lr=0.1, momentum=0.9 if "momentum" in kind else 0.0)
    probe, records, diameters = measured(optimizer, model, step=step)
    assert_right(records, diameters, missing=1)
    assert {record.skipped for record in records} == {""}
    if kind == "wrapper":
        assert "over whole updates from now on" in probe.remarks[-1]
        assert records[-1].increment_from == "update"
    if kind == "patched step":
        assert "patched step" in probe.remarks[-1]


@pytest.mark.parametrize("kind", ["state", "gradient"])
def test_a_step_that_its_state_does_not_tell_costs_its_own_measures_alone(model, kind):
    optimizer = SGD(model.parameters(), lr=0.1) if kind == "gradient" else AdamW(model.parameters(), weight_decay=0.0)
    weight = model.lm_head.weight

    def spoil(*_):
        if kind == "gradient":
            weight.grad = None
        else:
            optimizer.state[weight]["exp_avg"].mul_(0.5)

    optimizer.register_step_post_hook(spoil)
    panel = Panel.of_tokens(torch.randint(0, V, (4, 9), generator=torch.Generator().manual_seed(0)), 30)
    _, records, diameters = measured(optimizer, model, updates=3, panel=panel, perturbation_every=1)
    assert_right(records, diameters, missing=1)
    assert [record.perturbation_rms is not None for record in records] == [False, True, True]
    assert [record.increment_from for record in records] == ["", "step", "step"]


def test_weights_that_are_loaded_before_the_first_step_are_not_a_step(model):
    optimizer = AdamW(model.parameters())
    probe = Probe(model, optimizer, diameter_every=1, perturbation_every=0, strict=True).attach()
    with torch.no_grad():
        model.lm_head.weight.mul_(0.5)
    backward(model, 0)
    optimizer.step()
    assert probe.record().increment_from == "state"
    assert probe.remarks == []


def test_weights_swapped_before_the_last_record_are_not_a_step(model):
    """As those that weight averaging puts in place at the end of training."""
    optimizer = RMSprop(model.parameters(), lr=1e-3)
    with Probe(model, optimizer, diameter_every=10, bounds=False, perturbation_every=0, strict=True) as probe:
        for update in range(3):
            backward(model, update)
            optimizer.step()
            record = probe.record()
        assert record.diameter is None
        with torch.no_grad():
            model.lm_head.weight.mul_(0.5)
        assert probe.record(final=True) is None


@pytest.mark.parametrize("set_before", [True, False])
def test_a_compiled_step_is_seen_with_its_rate_and_its_hooks_are_not_compiled(model, set_before):
    """A schedule sets the rate before the step or after it."""
    optimizer = AdamW(model.parameters(), lr=1e-3, weight_decay=0.5)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    weight, records, diameters, rates = model.lm_head.weight, [], [], []
    with Probe(model, optimizer, diameter_every=1, perturbation_every=0, strict=True) as probe:
        for update in range(4):
            backward(model, update)
            if set_before:
                optimizer.param_groups[0]["lr"] = 1e-3 * (update + 1)
            rates.append(optimizer.param_groups[0]["lr"])
            before = weight.detach().double()
            step()
            diameters.append(all_pairs_diameter(weight.detach().double() - (1 - rates[-1] * 0.5) * before))
            if not set_before:
                optimizer.param_groups[0]["lr"] = 1e-3 * (update + 2)
            assert not probe.stepped
            probe.notice_update([optimizer])
            records.append(probe.record())
    assert_right(records, diameters, missing=0)
    assert [record.learning_rate for record in records] == pytest.approx(rates)
    assert {record.increment_from for record in records} == {"state"}
    assert probe.remarks == []


def test_something_that_moves_the_weights_between_two_steps_of_a_batch_is_told_once(model):
    optimizer = AdamW(model.parameters(), weight_decay=0.0)
    weight, records = model.lm_head.weight, []
    with Probe(model, optimizer, diameter_every=1, perturbation_every=0, strict=True) as probe:
        for update in range(6):
            for half in range(2):
                backward(model, 2 * update + half)
                before = weight.detach().double()
                optimizer.step()
                weight.data.mul_(2 / weight.detach().norm())
            diameter = all_pairs_diameter(weight.detach().double() - before)
            records.append((probe.record(), diameter))
            probe.earlier()
    assert len(probe.remarks) == 1
    for record, diameter in records[1:]:
        assert record.diameter == pytest.approx(diameter, rel=1e-3)


def test_a_row_outside_the_first_sample_is_found_when_it_is_its_turn():
    model = seeded(Plain, V=2048, d=4)
    optimizer = AdamW(model.parameters(), weight_decay=0.0)
    with Probe(model, optimizer, diameter_every=1, perturbation_every=0, strict=True) as probe:
        for update in range(40):
            model.zero_grad()
            loss_of(model, update, 2048).backward()
            optimizer.step()
            model.lm_head.weight.data[1].add_(0.5)
            record = probe.record()
    assert record.increment_from == "update"
    assert record.diameter > 0.5


def test_sparse_gradients_are_measured():
    class Picked(nn.Module):
        """Scores tokens by rows that it looks up."""

        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(V, D)
            self.lm_head = nn.Embedding(V, D, sparse=True)

        def forward(self, tokens):
            return self.embed(tokens) @ self.lm_head(torch.arange(V)).T

    model = seeded(Picked)
    optimizer = SGD([model.lm_head.weight], lr=0.1)
    _, records, diameters = measured(optimizer, model, head="lm_head", updates=3)
    assert_right(records, diameters, missing=0)
    assert records[-1].gradient_row_norm is not None


# Reading never writes


@pytest.mark.parametrize("make", [lambda p: SGD(p, lr=0.1), lambda p: torch.optim.LBFGS(p, max_iter=2)])
def test_reading_a_state_never_makes_one(make):
    def state_after(observed):
        model = seeded(Plain, V=V, d=D)
        optimizer = make(model.parameters())
        closure = lambda: backward(model, 1) or loss_of(model, 1, V)  # noqa: E731
        probe = Probe(model, optimizer, diameter_every=1, perturbation_every=1, efficiency=True)
        if observed:
            probe.attach()
        for update in range(3):
            backward(model, update)
            optimizer.step(closure) if isinstance(optimizer, torch.optim.LBFGS) else optimizer.step()
            assert not observed or probe.record().diameter is not None
        probe.detach()
        return optimizer.state_dict()["state"]

    assert str(state_after(True)) == str(state_after(False))


# Ceilings


class LongRows(RowNorm):
    """Makes rows twice as long as RowNorm's."""

    @torch.no_grad()
    def step(self, closure=None):
        W = self.param_groups[0]["params"][0]
        before = W.detach().clone()
        super().step(closure)
        W.add_(W - before)


def test_no_ceiling_is_claimed_for_a_step_that_is_not_known(model):
    optimizer = LongRows([model.lm_head.weight], lr=1e-2, weight_decay=0.0)
    _, records, diameters = measured(optimizer, model, updates=4)
    assert {record.ceiling for record in records} == {None}
    assert_right(records, diameters, missing=1, rel=0.02)


@pytest.mark.parametrize(("betas", "known"), [((0.9, 0.0), False), ((0.0, 0.0), True), ((0.9, 0.999), True)])
def test_a_ceiling_of_adam_holds_and_a_second_beta_of_zero_is_no_failure(model, betas, known):
    optimizer = AdamW(model.parameters(), lr=1e-2, betas=betas)
    _, records, _ = measured(optimizer, model, factor=1 - 1e-4, updates=3)
    assert (records[-1].ceiling is not None) == known
    if known:
        assert records[-1].diameter <= records[-1].ceiling * (1 + 1e-6)

"""D(S) is that of the step that the weights made, whatever the optimizer is: a belief that is wrong is given up."""

import math

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from hilbert_monitor import Probe, RowNorm
from hilbert_monitor.monitor.panel import Panel
from tests.support.decoders import Plain, loss_of, seeded
from tests.support.ranks import in_ranks
from tests.support.references import all_pairs_diameter, normal

V, D, UPDATES = 40, 16, 9


class Lion(Optimizer):
    """Sign descent whose decay, as in lion-pytorch with decoupled_weight_decay, is divided by the first lr."""

    def __init__(self, params, lr=1e-3, weight_decay=0.01):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.first = lr

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.mul_(1 - group["lr"] * group["weight_decay"] / self.first).sub_(group["lr"] * p.grad.sign())


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


class HookedLookahead(Lookahead):
    """One that is an optimizer with hooks of its own."""

    def __init__(self, optimizer):
        Optimizer.__init__(self, optimizer.param_groups, dict(optimizer.defaults))
        super().__init__(optimizer)


class SAM(Optimizer):
    """Takes the gradient at a point that is worse."""

    def __init__(self, params, **options):
        super().__init__(params, options)
        self.base_optimizer = AdamW(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = p.detach().clone()
                p.add_(p.grad, alpha=0.05 / float(p.grad.norm() + 1e-9))

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.state[p]["old"])
        self.base_optimizer.step()


def backward(model, seed):
    model.zero_grad()
    loss_of(model, seed, V).backward()


def measured(optimizer, model, *, factor=1.0, step=None, updates=UPDATES, **options):
    """Train with a probe; return it, its records, and D of the weights' real increments in fp64.

    Args:
        factor: c of U' = c U + S, or a function of the optimizer that returns it.
        step: makes a step, in place of optimizer.step().
    """
    weight, records, diameters = model.lm_head.weight, [], []
    with Probe(model, optimizer, diameter_every=1, perturbation_every=0, strict=True, **options) as probe:
        for update in range(updates):
            backward(model, update)
            before = weight.detach().double()
            c = factor(optimizer) if callable(factor) else factor
            (step or optimizer.step)()
            records.append(probe.record())
            diameters.append(all_pairs_diameter(weight.detach().double() - c * before))
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


def test_a_decay_over_the_first_learning_rate_is_found_out(model):
    optimizer = Lion(model.parameters())
    probe, records, diameters = measured(optimizer, model, factor=1 - 0.01)
    assert_right(records, diameters, missing=0)
    assert "where 1e-05 was assumed" in probe.remarks[-1]
    assert {record.increment_from for record in records} == {"step"}


def test_a_decay_that_follows_the_schedule_is_found_out(model):
    optimizer = Lion(model.parameters())

    def step():
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.8

    _, records, diameters = measured(
        optimizer, model, step=step, factor=lambda lion: 1 - 0.01 * lion.param_groups[0]["lr"] / 1e-3
    )
    assert_right(records, diameters, missing=0)


@pytest.mark.parametrize("make", [AdamW, lambda p: Adam(p, weight_decay=0.1), lambda p: SGD(p, lr=0.1, momentum=0.9)])
def test_a_right_belief_is_kept(model, make):
    optimizer = make(model.parameters())
    factor = 1 - 1e-3 * 0.01 if isinstance(optimizer, AdamW) else 1.0
    probe, records, diameters = measured(optimizer, model, factor=factor)
    assert_right(records, diameters, missing=0)
    assert probe.remarks == []
    assert {record.increment_from for record in records} == {"state"}


def test_the_adafactor_of_transformers_scales_its_own_learning_rate(model):
    from transformers.optimization import Adafactor

    optimizer = Adafactor(
        model.parameters(), lr=1e-2, scale_parameter=True, relative_step=False, warmup_init=False, weight_decay=0.5
    )

    def factor(_):
        scale = max(1e-3, float(model.lm_head.weight.detach().square().mean().sqrt()))
        return 1 - 1e-2 * scale * 0.5

    _, records, diameters = measured(optimizer, model, factor=factor)
    assert_right(records, diameters, missing=0)


def test_weights_that_are_loaded_before_the_first_step_are_nobodys_step(model):
    optimizer = AdamW(model.parameters())
    probe = Probe(model, optimizer, diameter_every=1, perturbation_every=0, strict=True).attach()
    with torch.no_grad():
        model.lm_head.weight.mul_(0.5)
    backward(model, 0)
    optimizer.step()
    assert probe.record().increment_from == "state"
    assert probe.remarks == []


@pytest.mark.parametrize("kind", [Lookahead, HookedLookahead])
def test_a_wrapper_that_moves_the_weights_too_is_found_out(model, kind):
    optimizer = kind(AdamW(model.parameters(), weight_decay=0.0))
    probe, records, diameters = measured(optimizer, model)
    assert_right(records, diameters, missing=1)
    if kind is Lookahead:
        assert "over whole updates from now on" in probe.remarks[-1]
        assert records[-1].increment_from == "update"


def test_a_step_that_was_patched_on_the_instance_is_found_out(model):
    optimizer = AdamW(model.parameters(), weight_decay=0.0)
    original = optimizer.step

    @torch.no_grad()
    def step(closure=None):
        original(closure)
        model.lm_head.weight.add_(normal(int(optimizer.state[model.lm_head.weight]["step"]), V, D), alpha=1e-3)

    optimizer.step = step
    probe, records, diameters = measured(optimizer, model, step=step)
    assert_right(records, diameters, missing=1)
    assert "patched step" in probe.remarks[-1]


def test_a_subclass_that_changes_the_state_is_found_out(model):
    """Its step is that of AdamW by name, and its weights do something else."""

    class Clipped(AdamW):
        pass

    optimizer = Clipped(model.parameters(), weight_decay=0.0)
    optimizer.register_step_post_hook(lambda *_: optimizer.state[model.lm_head.weight]["exp_avg"].mul_(0.5))
    probe, records, diameters = measured(optimizer, model)
    assert_right(records, diameters, missing=1)
    assert "where its state says" in probe.remarks[-1]
    assert {record.increment_from for record in records[1:]} == {"step"}


@pytest.mark.parametrize("make", [AdamW, lambda p: SGD(p, lr=0.1)])
def test_a_step_that_is_found_out_where_all_is_due_costs_its_own_measures_alone(model, make):
    optimizer = make(model.parameters())
    weight = model.lm_head.weight

    def spoil(*_):
        if isinstance(optimizer, SGD):
            weight.grad = None
        else:
            optimizer.state[weight]["exp_avg"].mul_(0.5)

    optimizer.register_step_post_hook(spoil)
    panel = Panel.of_tokens(torch.randint(0, V, (4, 9), generator=torch.Generator().manual_seed(0)), 30)
    with Probe(model, optimizer, panel=panel, diameter_every=1, perturbation_every=1, strict=True) as probe:
        records = []
        for update in range(3):
            backward(model, update)
            optimizer.step()
            records.append(probe.record())
    assert [record.perturbation_rms is not None for record in records] == [False, True, True]
    assert [record.increment_from for record in records] == ["", "step", "step"]


def test_two_calls_that_make_a_step_are_seen(model):
    optimizer = SAM(model.parameters(), lr=1e-3, weight_decay=0.0)

    def step():
        optimizer.first_step()
        backward(model, 99)
        optimizer.second_step()

    _, records, diameters = measured(optimizer, model, step=step)
    assert_right(records, diameters, missing=1)


@pytest.mark.parametrize("make", [AdamW, lambda p: torch.optim.RMSprop(p, lr=1e-3)])
def test_weights_swapped_before_the_last_record_are_not_a_step(model, make):
    """As those that weight averaging puts in place at the end of training."""
    optimizer = make(model.parameters())
    with Probe(model, optimizer, diameter_every=10, bounds=False, perturbation_every=0, strict=True) as probe:
        for update in range(3):
            backward(model, update)
            optimizer.step()
            record = probe.record()
        assert record.diameter is None
        with torch.no_grad():
            model.lm_head.weight.mul_(0.5)
        assert probe.record(final=True) is None


def test_a_compiled_step_is_seen_and_its_hooks_are_not_compiled(model):
    optimizer = AdamW(model.parameters(), weight_decay=0.0)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    weight, records, diameters = model.lm_head.weight, [], []
    with Probe(model, optimizer, diameter_every=1, perturbation_every=0, strict=True) as probe:
        for update in range(4):
            backward(model, update)
            before = weight.detach().double()
            step()
            assert not probe.stepped
            probe.notice_update([optimizer])
            records.append(probe.record())
            diameters.append(all_pairs_diameter(weight.detach().double() - before))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert torch._dynamo.utils.counters["frames"]["total"] <= 10  # of torch's own, by its version
    assert_right(records, diameters, missing=0)
    assert {record.increment_from for record in records} == {"state"}


class Clearing(SGD):
    """Clears gradients in its step, to save memory."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            p.grad = None


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_step_that_clears_its_gradients_is_no_step_without_one(model, momentum):
    optimizer = Clearing(model.parameters(), lr=0.1, momentum=momentum)
    _, records, diameters = measured(optimizer, model)
    assert {record.skipped for record in records} == {""}
    assert_right(records, diameters, missing=1)


@pytest.mark.parametrize("own", [False, True])
def test_an_l2_term_of_the_loss_is_part_of_the_step(model, own):
    """As decay it would show as one multiple of the weights in all rows, too."""
    optimizer = (Late if own else torch.optim.Adafactor)(model.parameters())

    def step():
        model.lm_head.weight.grad.add_(model.lm_head.weight.detach(), alpha=0.5)
        optimizer.step()

    probe, records, diameters = measured(optimizer, model, step=step)
    assert_right(records, diameters, missing=0)
    assert not any("decay" in remark for remark in probe.remarks)


def test_a_rescaling_now_and_then_is_not_taken_for_decay(model):
    optimizer = AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    count = iter(range(1, 100))

    def step():
        optimizer.step()
        if next(count) % 4 == 0:
            model.lm_head.weight.data.mul_(0.7)

    _, records, diameters = measured(optimizer, model, step=step)
    assert_right(records, diameters, missing=1)
    assert records[-1].increment_from == "update"


def test_a_learning_rate_whose_decay_no_weight_can_store_is_no_doubt(model):
    optimizer = torch.optim.NAdam(model.parameters(), lr=1e-10, weight_decay=0.1, decoupled_weight_decay=True)
    probe, _, _ = measured(optimizer, model)
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


@pytest.mark.sweep
def test_a_compiled_step_has_the_learning_rate_it_was_made_with(model):
    """A schedule sets it before the step, as for the first two, or after it."""
    optimizer = AdamW(model.parameters(), lr=1e-3, weight_decay=0.5)
    torch._dynamo.reset()
    step, rates, records = torch.compile(lambda: optimizer.step(), backend="eager"), [], []
    with Probe(model, optimizer, diameter_every=1, perturbation_every=0, strict=True) as probe:
        for update in range(4):
            backward(model, update)
            if update < 2:
                optimizer.param_groups[0]["lr"] = 1e-3 * (update + 1)
            rates.append(optimizer.param_groups[0]["lr"])
            step()
            if update >= 2:
                optimizer.param_groups[0]["lr"] = 1e-3 * (update + 2)
            if not probe.stepped:
                probe.notice_update([optimizer])
            records.append(probe.record())
    assert [record.learning_rate for record in records] == pytest.approx(rates)
    assert probe.remarks == []


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


def test_panels_are_checked_where_no_diameter_is_due(model):
    optimizer = Lion(model.parameters())
    tokens = torch.randint(0, V, (4, 9), generator=torch.Generator().manual_seed(0))
    with Probe(
        model, optimizer, panel=Panel.of_tokens(tokens, 30), diameter_every=0, perturbation_every=3, strict=True
    ) as probe:
        for update in range(3):
            backward(model, update)
            optimizer.step()
            probe.record()
    assert "was assumed" in probe.remarks[-1]


def perturbations(rank, world):
    """Train with an optimizer that nobody knows, the same on every rank; return what its panels say."""
    model = seeded(Plain, V=V, d=D)
    optimizer = Lion(model.parameters())
    tokens = torch.randint(0, V, (8, 9), generator=torch.Generator().manual_seed(0))
    panel, rms = Panel.of_tokens(tokens, 60), []
    with Probe(model, optimizer, panel=panel, diameter_every=10, perturbation_every=7, world=world) as probe:
        for update in range(14):
            backward(model, update)
            optimizer.step()
            rms.append(probe.record().perturbation_rms)
    return [value for value in rms if value is not None], probe.head.basis


def test_what_one_rank_finds_out_all_of_them_know(tmp_path):
    (first, belief), (second, other) = in_ranks(perturbations, tmp_path)
    alone, _ = perturbations(0, 1)
    assert first == alone
    assert second == []  # the first measures alone
    assert belief == other


# Reading never writes


class Late(Optimizer):
    """Makes its state at the second step, and only for parameters that have none."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1e-3})
        self.count = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        for p in self.param_groups[0]["params"]:
            if self.count > 1:
                if p not in self.state:
                    self.state[p]["sum"] = torch.zeros_like(p)
                self.state[p]["sum"].add_(p.grad.square())
            p.sub_(p.grad, alpha=1e-3)


@pytest.mark.parametrize("make", [Late, lambda p: SGD(p, lr=0.1), lambda p: torch.optim.LBFGS(p, max_iter=2)])
def test_reading_a_state_never_makes_one(model, make):
    def state_after(observed):
        torch.manual_seed(0)
        model = seeded(Plain, V=V, d=D)
        optimizer = make(model.parameters())
        closure = lambda: backward(model, 1) or loss_of(model, 1, V)  # noqa: E731
        with Probe(model, optimizer, diameter_every=1, perturbation_every=1, efficiency=True) as probe:
            if not observed:
                probe.detach()
            for update in range(3):
                backward(model, update)
                optimizer.step(closure) if isinstance(optimizer, torch.optim.LBFGS) else optimizer.step()
                if observed:
                    assert probe.record().diameter is not None
        return optimizer.state_dict()["state"]

    assert str(state_after(True)) == str(state_after(False))


# Ceilings


class Doubled(AdamW):
    """Makes steps twice as long as AdamW's."""

    @torch.no_grad()
    def step(self, closure=None):
        before = [p.detach().clone() for p in self.param_groups[0]["params"]]
        super().step(closure)
        for p, old in zip(self.param_groups[0]["params"], before, strict=True):
            p.add_(p - old)


class LongRows(RowNorm):
    """Makes rows twice as long as RowNorm's."""

    @torch.no_grad()
    def step(self, closure=None):
        W = self.param_groups[0]["params"][0]
        before = W.detach().clone()
        super().step(closure)
        W.add_(W - before)


@pytest.mark.parametrize("kind", [Doubled, LongRows])
def test_no_ceiling_is_claimed_for_a_step_that_is_not_known(model, kind):
    optimizer = kind([model.lm_head.weight], lr=1e-2)
    _, records, diameters = measured(optimizer, model, factor=1 - 1e-4 if kind is Doubled else 1.0, updates=4)
    assert {record.ceiling for record in records} == {None}
    assert_right(records, diameters, missing=1, rel=0.02)


@pytest.mark.parametrize(("betas", "known"), [((0.9, 0.0), False), ((0.0, 0.0), True), ((0.9, 0.999), True)])
def test_a_second_beta_of_zero_is_no_failure(model, betas, known):
    optimizer = AdamW(model.parameters(), lr=1e-2, betas=betas)
    _, records, _ = measured(optimizer, model, factor=1 - 1e-4, updates=3)
    assert (records[-1].ceiling is not None) == known
    if known:
        assert records[-1].diameter <= records[-1].ceiling * (1 + 1e-6)


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
    assert not math.isnan(records[-1].gradient_balance)

"""The bench of safeguards: each does what its opponents are known to do, and its table says what the runs came to."""

import math
from dataclasses import replace

import pytest
import torch
from torch.optim import AdamW

from hilbert_monitor.bench import guard_summary, guarding
from hilbert_monitor.bench.guarding import ARMS, GUARD_FAULTS, Guarding, GuardPlan, GuardTrial, Outcome
from hilbert_monitor.bench.guards import GradientClipping, HeldSteps, Nothing, SkippedSteps, UpdateClipping
from hilbert_monitor.bench.small_run import StepChange

pytestmark = pytest.mark.usefixtures("less_text")
QUICK = GuardPlan.quick()
FAULTS = (
    "the head's rate x100, 20 steps",
    "the backbone's rate x100, 20 steps",
    "fp16 overflow to inf",
    "a nan in the gradient",
)
FAST = replace(QUICK, fault_step=3, horizons=(1, 2), faults=FAULTS)


@pytest.fixture(scope="module")
def summary(less_text):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield guard_summary.summarize(guarding.run(FAST, workers=1))
    torch.set_num_threads(threads)


def cell(summary, fault, head, arm):
    return next(c for c in summary.cells if (c.fault, c.head, c.arm) == (fault, head, arm))


@pytest.mark.sweep
def test_the_table_has_every_fault_under_every_safeguard(summary):
    assert len(summary.cells) == 2 * len(ARMS) * len(FAULTS)
    assert len(summary.costs) == 2 * len(ARMS)
    harder = {f"learning rate x{factor}, {steps}" for factor in (10, 100) for steps in ("1 step", "20 steps")}
    assert harder <= {*GuardPlan().faults}


@pytest.mark.parametrize("head", ["adamw", "rownorm"])
def test_a_nan_is_survived_by_those_that_leave_the_step_out_and_by_nobody_else(summary, head):
    for fault in ("a nan in the gradient", "fp16 overflow to inf"):
        lost = {arm: cell(summary, fault, head, arm).lost for arm in ARMS}
        assert lost == {arm: arm not in ("skipped steps", "trust region") for arm in ARMS}
        assert cell(summary, fault, head, "trust region").left_out == 1


@pytest.mark.parametrize("head", ["adamw", "rownorm"])
def test_a_rate_of_the_head_a_hundred_times_too_high_is_held_by_the_trust_region_alone(summary, head):
    excess = {arm: cell(summary, "the head's rate x100, 20 steps", head, arm).excess[-1].mean for arm in ARMS}
    held = excess.pop("trust region")
    assert held < 1 < min(excess.values())


@pytest.mark.parametrize("head", ["adamw", "rownorm"])
def test_a_fault_of_the_backbone_is_not_held(summary, head):
    """At two steps of such a rate nothing is lost yet; what counts is that the trust region changes nothing."""
    alone, ours = (
        cell(summary, "the backbone's rate x100, 20 steps", head, arm) for arm in ("nothing", "trust region")
    )
    assert ours.excess[0].mean == pytest.approx(alone.excess[0].mean, abs=0.1)
    assert ours.left_out == 0


def trained(arm, steps=3, limit=1.0, **change):
    """Steps of a small run under a safeguard, of which the last has a change; the run and the safeguard."""
    run = guarding._small_run("adamw", 0, QUICK)
    guard = guarding.guarded(arm, run, limit)
    for step in range(steps):
        guarding.step(run, guard, StepChange(**change) if step == steps - 1 else StepChange())
    return run, guard


def test_update_clipping_divides_the_rate_by_the_rms_of_a_step_that_does_not_fit_its_second_moment():
    """Gradients that suddenly grow by 1000: v has hardly moved, and the rate of this step falls to about 1/30."""

    def grow(gradient):
        gradient.mul_(1000)

    (alone, _), (clipped, guard) = (trained(arm, gradient=grow) for arm in ("nothing", "update clipping"))
    assert isinstance(guard, UpdateClipping)
    owner = alone.optimizer.owner(alone.model.lm_head.weight)
    assert isinstance(owner, AdamW)
    before, _ = trained("nothing", steps=2)
    b = before.model.lm_head.weight.detach()
    moved = [(run.model.lm_head.weight.detach() - b).norm() for run in (alone, clipped)]
    weight = alone.model.lm_head.weight
    state, beta = owner.state[weight], 0.999
    v = state["exp_avg_sq"] / (1 - beta**3)
    rms = (weight.grad.double().square() / v.double().clamp(min=1e-20)).mean().sqrt()
    assert rms > 1.2
    assert moved[0] / moved[1] == pytest.approx(float(rms), rel=0.1)  # but for weight decay
    rates = [group["lr"] for group in clipped.optimizer.param_groups]
    assert rates == [group["lr"] for group in alone.optimizer.param_groups]


def test_skipped_steps_need_a_history_and_then_leave_out_what_is_six_deviations_above_it():
    run = guarding._small_run("adamw", 0, QUICK)
    guard = SkippedSteps(run)
    guarding.step(run, guard, StepChange())  # its rate is zero
    guard.losses.clear()
    guard.norms.clear()
    run.backward(StepChange())
    for k in range(63):
        guard.step(5.0 + 0.01 * (k % 2))
    guard.step(50.0)
    assert guard.left_out == 0  # 63 values are no history
    guard.losses.pop()
    guard.step(5.0)
    weight = run.model.lm_head.weight.detach().clone()
    guard.step(5.1)
    assert guard.left_out == 1
    assert torch.equal(run.model.lm_head.weight, weight)
    guard.step(5.01)
    assert guard.left_out == 1
    assert not torch.equal(run.model.lm_head.weight, weight)
    guard.step(math.nan)
    assert guard.left_out == 2
    assert len(guard.losses) <= 128
    copy = SkippedSteps(run)
    copy.load(guard)
    assert copy.losses == guard.losses


def test_clipping_scales_gradients_to_one_and_the_trust_region_holds_the_heads_step():
    run, guard = trained("gradient clipping", gradient=lambda G: G.mul_(1000))
    assert isinstance(guard, GradientClipping)
    norm = torch.nn.utils.get_total_norm([p.grad for p in run.model.parameters()])
    assert float(norm) == pytest.approx(1, rel=1e-3)
    run, guard = trained("trust region", steps=8, limit=0.05, rate=100.0)
    assert isinstance(guard, HeldSteps)
    assert guard.held
    assert guard.region.last.made_upper <= 0.05 < guard.region.last.asked_upper
    guard.close()
    assert not run.optimizer._optimizer_step_post_hooks


def test_a_clean_twin_and_a_run_without_a_fault_are_the_same_to_the_bit():
    trunk = guarding._small_run("rownorm", 3, FAST)
    guard = Nothing(trunk)
    for _ in range(3):
        guarding.step(trunk, guard, StepChange())
    quiet = lambda run, since: StepChange()  # noqa: E731
    a, b = (guarding._follow(trunk, guard, "nothing", "rownorm", "", quiet, FAST, 1.0) for _ in range(2))
    for _ in range(2):
        guarding.step(trunk, guard, StepChange())
    assert a == b
    assert a.losses[-1] == trunk.validation_loss()


def test_the_summary_counts_lost_runs_and_compares_with_the_twin_of_the_same_seed():
    clean = {0: (3.0, 2.0), 1: (4.0, 3.0)}
    faulty = {0: (3.5, 2.1), 1: (math.inf, math.inf)}
    trials = [
        GuardTrial(arm, head, seed, Outcome("", clean[seed], 1, 0), outcomes, 2, 3, 0.004)
        for arm in ARMS
        for head in ("adamw", "rownorm")
        for seed in (0, 1)
        if (outcomes := [Outcome(fault, faulty[seed], 5, 0) for fault in GUARD_FAULTS])
    ]
    summary = guard_summary.summarize(Guarding(replace(QUICK, seeds=(0, 1)), {"adamw": 1.0, "rownorm": 1.0}, trials))
    first = summary.cells[0]
    assert (first.lost, first.left_out) == (1, 4)
    assert [str(excess) for excess in first.excess] == ["lost", "lost"]
    assert str(guard_summary.Excess.of([0.5, 0.1])) == "+0.30 ± 0.28"
    assert summary.costs[1].excess == guard_summary.Excess(0.0, 0.0)

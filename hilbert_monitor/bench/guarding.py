"""Does a trust region help? Faults are put into small real training runs, beside safeguards in common use.

All of this was fixed before the runs were made. Every arm trains from the start under its own safeguard (see `guards`)
and makes the same clean steps up to the fault. From there it goes on twice: with the fault, and without it, as the
clean twin. What counts is the validation loss 50 and 200 steps later, less that of the clean twin of the same arm. What
a safeguard costs a run without a fault is the loss of its clean twin, less that of the run without any safeguard.

The limit of the trust region follows the schedule. It is half as much again as the largest ball that a clean run with
another seed needed after its warm-up. Nothing else was tuned, and nothing on these seeds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import torch
from torch import Tensor

from hilbert_monitor.geometry import center_rows
from hilbert_monitor.monitor.finite_gradients import NonFiniteGradients
from hilbert_monitor.optim import pretraining_optimizer
from hilbert_monitor.optim.schedule import warmup_cosine_scale
from hilbert_monitor.pretrain.recipes import HEADS, Head

from .faults import FAULTS, Fault
from .guards import GradientClipping, HeldSteps, Nothing, SkippedSteps, UpdateClipping
from .small_run import SmallRun, StepChange, TrialSizes
from .workers import in_processes

ARMS = ("nothing", "gradient clipping", "update clipping", "skipped steps", "trust region")
ROOM = 1.5
"""The limit of the trust region over the largest ball of a clean run."""
LOST = 1.0
"""A run whose validation loss is so much above that of its clean twin counts as lost."""


def _rate(factor: float, steps: int, *groups: str) -> Fault:
    return lambda run, since: StepChange(rate=factor, groups=groups) if since < steps else StepChange()


def _one_token(run: SmallRun, since: int) -> StepChange:
    """Make the whole batch of its first token."""
    return StepChange(batch=lambda tokens: torch.full_like(tokens, int(tokens[0, 0]))) if since == 0 else StepChange()


GUARD_FAULTS: dict[str, Fault] = {
    "learning rate x10, 1 step": _rate(10, 1),
    "learning rate x10, 20 steps": _rate(10, 20),
    "learning rate x100, 1 step": _rate(100, 1),
    "learning rate x100, 20 steps": _rate(100, 20),
    "learning rate x3, for good": FAULTS["learning rate x3, for good"],
    "the head's rate x100, 20 steps": _rate(100, 20, "head"),
    "the backbone's rate x100, 20 steps": _rate(100, 20, "matrix"),
    "a batch of one repeated token": _one_token,
    **{
        name: FAULTS[name]
        for name in (
            "a batch of random tokens",
            "a poisoned row of the gradient",
            "a rare token after long silence",
            "fp16 overflow to inf",
            "a nan in the gradient",
        )
    },
}
"""Those of `bench faults`, and harder ones."""


@dataclass(frozen=True)
class GuardPlan:
    """Which runs are trained, and when the faults begin."""

    seeds: tuple[int, ...] = (40, 41, 42)
    """Seeds on which nothing was tuned."""
    calibration_seed: int = 39
    """Another, whose clean run gives the limit of the trust region."""
    sizes: TrialSizes = field(default_factory=lambda: TrialSizes(steps=500, vocab_size=1024, context=32))
    fault_step: int = 200
    """Steps before the fault begins: past the warm-up, and past what the safeguards need to learn."""
    faults: tuple[str, ...] = tuple(GUARD_FAULTS)
    horizons: tuple[int, ...] = (50, 200)
    """Steps after the beginning of the fault at which the validation loss is measured."""

    @classmethod
    def quick(cls) -> GuardPlan:
        """Return a plan that takes seconds."""
        sizes = TrialSizes(steps=60, vocab_size=512, width=32, context=16, batch=4, validation=8)
        return cls(seeds=(0,), calibration_seed=1, sizes=sizes, fault_step=10, horizons=(2, 5))


@dataclass(frozen=True)
class Outcome:
    """What became of a run after a fault, or of its clean twin."""

    fault: str
    """Empty for the clean twin."""
    losses: tuple[float, ...]
    """Validation losses at the plan's horizons; infinite where there is none any more."""
    left_out: int
    """Steps after the beginning of the fault that were not made."""
    held: int
    """Steps after it that were made smaller."""


@dataclass(frozen=True)
class GuardTrial:
    """One arm on one seed: its clean twin, and what became of it after each fault."""

    arm: str
    head: Head
    seed: int
    clean: Outcome
    outcomes: list[Outcome]
    left_out: int
    """Steps before the fault that were not made: false alarms."""
    held: int
    """Steps before the fault that were made smaller."""
    seconds: float
    """Median processor time of a step's safeguard and optimizer, before the fault."""


def guarded(arm: str, run: SmallRun, limit: float) -> Nothing:
    """Return the safeguard of an arm."""
    kinds: dict[str, Callable[[SmallRun], Nothing]] = {
        "nothing": Nothing,
        "gradient clipping": GradientClipping,
        "update clipping": UpdateClipping,
        "skipped steps": SkippedSteps,
        "trust region": partial(HeldSteps, limit=limit),
    }
    return kinds[arm](run)


def calibrate(head: Head, plan: GuardPlan) -> float:
    """Return the limit: what a clean run of the calibration seed needed after its warm-up, and half as much again."""
    run, largest = _small_run(head, plan.calibration_seed, plan), 0.0
    weight, steps = run.model.lm_head.weight, plan.sizes.steps
    while run.updates < plan.fault_step + max(plan.horizons):
        scale = warmup_cosine_scale(run.updates, total_steps=steps)
        group = next(group for group in run.optimizer.param_groups if group["name"] == "head")
        before, shrink = weight.detach().clone(), 1 - group["lr"] * group["weight_decay"]
        step(run, Nothing(run), StepChange())
        if run.updates > 0.1 * steps:
            largest = max(largest, _ball(weight.detach() - shrink * before) / scale)
    return ROOM * largest


def _ball(S: Tensor) -> float:
    """Return the diameter of the ball around the mean row that holds all rows."""
    return 2 * float(torch.linalg.vector_norm(center_rows(S), dim=1).max())


def step(run: SmallRun, guard: Nothing, change: StepChange) -> float:
    """Make a training step under a safeguard; return the processor time of its second half, after the gradients."""
    loss = float(run.backward(change))
    with run.update(change):
        start = time.thread_time()
        guard.step(loss)
        return time.thread_time() - start


def guard_trial(arm: str, head: Head, seed: int, plan: GuardPlan, limit: float) -> GuardTrial:
    """Train one arm up to the fault, and go on from there without one and with each."""
    run = _small_run(head, seed, plan)
    guard = guarded(arm, run, limit)
    seconds = [step(run, guard, StepChange()) for _ in range(plan.fault_step)]
    clean = _follow(run, guard, arm, head, "", lambda run, since: StepChange(), plan, limit)
    outcomes = [_follow(run, guard, arm, head, name, GUARD_FAULTS[name], plan, limit) for name in plan.faults]
    guard.close()
    return GuardTrial(arm, head, seed, clean, outcomes, guard.left_out, guard.held, median(seconds))


def _follow(
    trunk: SmallRun, past: Nothing, arm: str, head: Head, name: str, fault: Fault, plan: GuardPlan, limit: float
) -> Outcome:
    """Go on from a run with a fault, and measure the validation loss at the horizons."""
    run = _small_run(head, trunk.seed, plan).load(trunk)
    guard = guarded(arm, run, limit)
    guard.load(past)
    losses: list[float] = []
    with suppress(NonFiniteGradients):  # a trust region ends a run that has nothing else any more
        for since in range(max(plan.horizons)):
            step(run, guard, fault(run, since))
            if since + 1 in plan.horizons:
                losses.append(run.validation_loss())
                if not math.isfinite(losses[-1]):
                    break
    guard.close()
    finite = [loss for loss in losses if math.isfinite(loss)]
    lost = [math.inf] * (len(plan.horizons) - len(finite))
    return Outcome(name, (*finite, *lost), guard.left_out, guard.held)


def _small_run(head: Head, seed: int, plan: GuardPlan) -> SmallRun:
    return SmallRun(seed, plan.sizes, lambda model: pretraining_optimizer(model, head))


@dataclass(frozen=True)
class Guarding:
    """All trials, and the limits that the trust region had."""

    plan: GuardPlan
    limits: dict[Head, float]
    trials: list[GuardTrial]


def run(plan: GuardPlan, *, workers: int, after_each: Callable[[], None] = lambda: None) -> Guarding:
    """Run all trials, each on one thread, in so many processes."""
    calibrations = in_processes(calibrate, [(head, plan) for head in HEADS], workers=workers)
    limits: dict[Head, float] = dict(zip(HEADS, calibrations, strict=True))
    jobs = [(arm, head, seed, plan, limits[head]) for seed in plan.seeds for head in HEADS for arm in ARMS]
    trials = in_processes(guard_trial, jobs, workers=workers, after_each=lambda _: after_each())
    return Guarding(plan, limits, trials)

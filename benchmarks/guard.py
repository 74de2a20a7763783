"""Faults in small training runs under TrustRegion, against no safeguard and gradient clipping.

All of this was fixed before the runs were made. Every arm trains from the start under its own safeguard and makes the
same clean steps up to the fault. From there it goes on twice: with the fault, and without it, as the clean twin. What
counts is the validation loss 50 and 200 steps later, less that of the clean twin of the same arm. What a safeguard
costs a run without a fault is the loss of its clean twin, less that of the run without any safeguard.

The limit of the trust region follows the schedule. It is half as much again as the largest ball that a clean run with
another seed needed after its warm-up. Nothing else was tuned, and nothing on these seeds.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import mean, median, stdev

import torch
from torch import Tensor

from hilbert_monitor import TrustRegion
from hilbert_monitor.geometry import center_rows
from hilbert_monitor.monitor.trust_region import NonFiniteGradients
from hilbert_monitor.optim import pretraining_optimizer, warmup_cosine_scale
from hilbert_monitor.pretrain.recipe import HEADS, Head

from .data import SmallRun, StepChange, TrialSizes
from .faults import FAULTS, Fault
from .measure import Result, in_processes

NOTHING, CLIPPING, REGION = ARMS = ("nothing", "gradient clipping", "trust region")
ROOM = 1.5
"""The limit of the trust region over the largest ball of a clean run."""


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
    **{name: fault for name, fault in FAULTS.items() if name != "learning rate x10, one step"},
}
"""Those of the benchmark of faults, and harder ones."""


@dataclass(frozen=True)
class Plan:
    """Which runs are trained, when the faults begin, and how long after it the validation loss is measured.

    Nothing was tuned on these seeds; the clean run of the calibration seed gives the limit of the trust region.
    """

    seeds: tuple[int, ...] = (40, 41, 42)
    calibration_seed: int = 39
    sizes: TrialSizes = field(default_factory=lambda: TrialSizes(steps=500, vocab_size=1024, context=32))
    fault_step: int = 200
    horizons: tuple[int, ...] = (50, 200)


SMALL = TrialSizes(steps=60, vocab_size=512, width=32, context=16, batch=4, validation=8, one_file_in=12)
QUICK = Plan(seeds=(0,), calibration_seed=1, sizes=SMALL, fault_step=10, horizons=(2, 5))


class GuardedRun(SmallRun):
    """A small run whose steps are made under a safeguard; `limit` is the ball's diameter at the schedule's peak."""

    def __init__(self, arm: str, head: Head, seed: int, sizes: TrialSizes, limit: float) -> None:
        super().__init__(seed, sizes, lambda model: pretraining_optimizer(model, head))
        self.arm, self.head, self.limit, self.clipped = arm, head, limit, 0
        self.region = TrustRegion(limit=lambda step: self.limit * self.scale)
        if arm == REGION:
            self.region.watch(self.model, self.optimizer)

    @property
    def scale(self) -> float:
        """The learning rates of this step over those of the peak."""
        return warmup_cosine_scale(self.updates, total_steps=self.sizes.steps)

    def branch(self) -> GuardedRun:
        """Return an independent copy that continues from this step, and has counted nothing."""
        return GuardedRun(self.arm, self.head, self.seed, self.sizes, self.limit).load(self)

    def step(self, change: StepChange | None = None) -> float:
        """Make a training step; return the processor time of its second half, after the gradients."""
        change = change or StepChange()
        float(self.backward(change))
        with self.update(change):
            start = time.thread_time()
            if self.arm == CLIPPING:
                self.clipped += not float(self.clip_gradients()) <= 1
            self.optimizer.step()
            return time.thread_time() - start

    @property
    def held(self) -> int:
        """Steps that were made smaller."""
        return self.clipped + self.region.clipped


@dataclass(frozen=True)
class Outcome:
    """What became of a run after a fault, or of its clean twin: losses at the horizons, and steps that were left out.

    A loss is infinite where there is none any more.
    """

    losses: tuple[float, ...]
    left_out: int


@dataclass(frozen=True)
class Trial:
    """One arm on one seed: its clean twin, what became of it after each fault, and its steps before the fault.

    `held` of these were made smaller, `left_out` were not made; `seconds` is the median of safeguard and optimizer.
    """

    arm: str
    head: Head
    seed: int
    clean: Outcome
    outcomes: dict[str, Outcome]
    left_out: int
    held: int
    seconds: float


def calibrate(head: Head, plan: Plan) -> float:
    """Return the limit: what a clean run of the calibration seed needed after its warm-up, and half as much again."""
    run, largest = GuardedRun(NOTHING, head, plan.calibration_seed, plan.sizes, math.inf), 0.0
    weight = run.model.lm_head.weight
    while run.updates < plan.fault_step + max(plan.horizons):
        scale = run.scale
        group = next(group for group in run.optimizer.param_groups if group["name"] == "head")
        before, shrink = weight.detach().clone(), 1 - group["lr"] * group["weight_decay"]
        run.step()
        if run.updates > 0.1 * plan.sizes.steps:
            largest = max(largest, _ball(weight.detach() - shrink * before) / scale)
    return ROOM * largest


def _ball(S: Tensor) -> float:
    """Return the diameter of the ball around the mean row that holds all rows."""
    return 2 * float(torch.linalg.vector_norm(center_rows(S), dim=1).max())


def trial(arm: str, head: Head, seed: int, plan: Plan, limit: float) -> Trial:
    """Train one arm up to the fault, and go on from there without one and with each."""
    run = GuardedRun(arm, head, seed, plan.sizes, limit)
    seconds = median(run.step() for _ in range(plan.fault_step))
    warnings.filterwarnings("ignore", "hilbert_monitor: the gradient of step")  # two of the faults
    clean = follow(run, lambda run, since: StepChange(), plan)
    outcomes = {name: follow(run, fault, plan) for name, fault in GUARD_FAULTS.items()}
    run.region.detach()
    print(f"trained {arm}, {head}, seed {seed}", flush=True)
    return Trial(arm, head, seed, clean, outcomes, run.region.left_out, run.held, seconds)


def follow(trunk: GuardedRun, fault: Fault, plan: Plan) -> Outcome:
    """Go on from a run with a fault, and measure the validation loss at the horizons."""
    run = trunk.branch()
    losses = [math.inf] * len(plan.horizons)
    with suppress(NonFiniteGradients):  # a trust region ends a run that has nothing else any more
        for since in range(max(plan.horizons)):
            run.step(fault(run, since))
            if since + 1 in plan.horizons:
                loss = run.validation_loss()
                if not math.isfinite(loss):
                    break
                losses[plan.horizons.index(since + 1)] = loss
    run.region.detach()
    return Outcome(tuple(losses), run.region.left_out)


def run(*, quick: bool) -> list[Result]:
    """Run all trials, each on one thread; print the loss that each fault costs under each arm."""
    plan, workers = (QUICK, 1) if quick else (Plan(), None)
    limits = dict(zip(HEADS, in_processes(calibrate, [(head, plan) for head in HEADS], workers=workers), strict=True))
    print("limits of the trust region at the peak:", ", ".join(f"{head} {limits[head]:.4g}" for head in HEADS))
    jobs = [(arm, head, seed, plan, limits[head]) for seed in plan.seeds for head in HEADS for arm in ARMS]
    trials = in_processes(trial, jobs, workers=workers)
    return [r for head in HEADS for r in results(head, [t for t in trials if t.head == head], plan)]


def results(head: Head, trials: Sequence[Trial], plan: Plan) -> Iterator[Result]:
    """Compare each run with its clean twin, and each clean twin with that of the run without a safeguard."""
    arms = {arm: [t for t in trials if t.arm == arm] for arm in ARMS}
    subject = f"loss above the clean twin's {plan.horizons[-1]} steps later, {head}"
    print(f"{head}, loss above the clean twin's {' / '.join(map(str, plan.horizons))} steps after the fault began:")
    for fault in GUARD_FAULTS:
        texts = {arm: _text(fault, own) for arm, own in arms.items()}
        print(f"  {fault}:", ", ".join(f"{arm} {text}" for arm, text in texts.items()))
        cost = {arm: _mean(_excesses(fault, own, -1)) for arm, own in arms.items()}
        for arm in (NOTHING, CLIPPING):
            yield Result(subject, fault, cost[REGION], arm, cost[arm], "")
    plain = {t.seed: t.clean.losses[-1] for t in arms[NOTHING]}
    seconds = {arm: mean(t.seconds for t in own) for arm, own in arms.items()}
    for arm in (CLIPPING, REGION):
        excess = _spread([t.clean.losses[-1] - plain[t.seed] for t in arms[arm]], digits=3)
        left_out, held = mean(t.left_out for t in arms[arm]), mean(t.held for t in arms[arm])
        note = f"loss {excess}, steps left out {left_out:.1f}, made smaller {held:.1f}"
        subject = f"without a fault, processor time a step, {head}"
        yield Result(subject, arm, seconds[arm], NOTHING, seconds[NOTHING], "s", note)


def _excesses(fault: str, trials: Sequence[Trial], horizon: int) -> list[float]:
    """Validation losses at a horizon above those of the clean twins, one for each seed."""
    return [t.outcomes[fault].losses[horizon] - t.clean.losses[horizon] for t in trials]


def _mean(values: Sequence[float]) -> float:
    return mean(values) if all(map(math.isfinite, values)) else math.inf


def _spread(values: Sequence[float], digits: int = 2) -> str:
    """Return mean and sample deviation, or "lost" if a loss is not finite any more."""
    if not all(map(math.isfinite, values)):
        return "lost"
    return f"{mean(values):+.{digits}f}" + (f" ± {stdev(values):.{digits}f}" if len(values) > 1 else "")


def _text(fault: str, trials: Sequence[Trial]) -> str:
    """Return the cell of a fault and an arm; in brackets the steps that were left out, less the twin's."""
    costs = " / ".join(_spread(_excesses(fault, trials, k)) for k in range(len(trials[0].clean.losses)))
    left_out = mean(t.outcomes[fault].left_out - t.clean.left_out for t in trials)
    return costs + (f" ({left_out:.0f})" if left_out >= 0.5 else "")

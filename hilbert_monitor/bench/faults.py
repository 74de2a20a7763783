"""Do the blow-up rules work? Faults are put into small real training runs, beside two detectors in common use.

The criteria were fixed before the rules were. A fault is visible if it makes D(S) or the Hilbert RMS of its step at
least twice, or at most half, that of a clean twin, by a reference in fp64, or not finite. The rules must report each
visible fault in the very step, and must report nothing in a clean run. The opponents look for spikes of the loss and of
the gradient norm. Their thresholds give them as many false alarms on the same clean runs as the rules had.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

import torch
from torch import Tensor

from hilbert_monitor.pretrain.recipes import HEADS, Head

from .small_run import SmallRun, StepChange, TrialSizes
from .trial_runs import TrialRun, TrialStep
from .workers import in_processes

VISIBLE = 2.0
"""Factor, up or down, from which a fault counts as visible."""
WINDOW, QUIET = 100, 20
"""Values that the opponents remember, and those they need before they judge: as many as the rules."""

Fault = Callable[[SmallRun, int], StepChange]
"""From the run, and the number of steps since the fault began, to what the fault changes in this step."""


def _once(change: Callable[[SmallRun], StepChange]) -> Fault:
    return lambda run, since: change(run) if since == 0 else StepChange()


def _random_tokens(run: SmallRun) -> StepChange:
    draw = torch.Generator().manual_seed(run.updates)
    return StepChange(batch=lambda tokens: torch.randint(run.sizes.vocab_size, tokens.shape, generator=draw))


def _poisoned_row(run: SmallRun) -> StepChange:
    """Make one row of the head's gradient a thousand times as long as the longest."""

    def poison(G: Tensor) -> None:
        draw = torch.Generator().manual_seed(run.updates)
        row = torch.randn(G.shape[1], generator=draw)
        token = int(torch.randint(len(G), (), generator=draw))
        G[token] = row / row.norm() * 1000 * torch.linalg.vector_norm(G, dim=1).max()

    return StepChange(gradient=poison)


def _overflow(run: SmallRun) -> StepChange:
    """Cast the gradient to fp16 and back, with a scale at which its largest entry overflows."""

    def cast(G: Tensor) -> None:
        scale = 2 * torch.finfo(torch.float16).max / G.abs().max()
        G.copy_((G * scale).half().float() / scale)

    return StepChange(gradient=cast)


def _nan(run: SmallRun) -> StepChange:
    def put(G: Tensor) -> None:
        G[0, 0] = math.nan

    return StepChange(gradient=put)


def _rare_token(run: SmallRun) -> StepChange:
    """Put the token that has been absent for longest into the batch a few times."""
    token = int(run.absence.argmax())

    def insert(tokens: Tensor) -> Tensor:
        changed = tokens.clone()
        changed[0, 5::10] = token
        return changed

    return StepChange(batch=insert)


FAULTS: dict[str, Fault] = {
    "learning rate x10, one step": _once(lambda run: StepChange(rate=10)),
    "learning rate x3, for good": lambda run, since: StepChange(rate=3),
    "a batch of random tokens": _once(_random_tokens),
    "a poisoned row of the gradient": _once(_poisoned_row),
    "fp16 overflow to inf": _once(_overflow),
    "a nan in the gradient": _once(_nan),
    "a rare token after long silence": _once(_rare_token),
}


class Spikes:
    """The usual spike detector: how far the logarithm of a value is above the median of the last ones."""

    def __init__(self, past: Sequence[float] = ()) -> None:
        self.past: deque[float] = deque(past, maxlen=WINDOW)

    def score(self, value: float) -> float:
        """Return the height of a value over the last ones.

        It is infinite for a value that is not finite or not positive, and minus infinity while the past is too short.
        """
        if not math.isfinite(value) or value <= 0:
            return math.inf
        height = math.log(value) - median(self.past) if len(self.past) >= QUIET else -math.inf
        self.past.append(math.log(value))
        return height


Detectors = tuple[Spikes, Spikes]
"""The opponents: spikes of the loss, and of the gradient norm."""


@dataclass
class CleanRun:
    """A run without a fault: the false alarms in it, and the scores of the opponents."""

    measured: int = 0
    """Steps that the rules judged."""
    false_alarms: list[str] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    gradient: list[float] = field(default_factory=list)


@dataclass
class Branch:
    """The steps after a fault: how far the first was from its clean twin, and who noticed when."""

    fault: str
    head: str
    seed: int
    step: int
    """The step in which the fault began."""
    diameter_ratio: float
    perturbation_ratio: float
    noticed: int | None
    """Steps from the fault to our first alert: 0 is the step itself."""
    loss: list[float]
    gradient: list[float]

    @property
    def visible(self) -> bool:
        """Whether the fault leaves a trace in the increment, whatever a rule makes of it."""
        ratios = (self.diameter_ratio, self.perturbation_ratio)
        return any(not math.isfinite(r) or r >= VISIBLE or r <= 1 / VISIBLE for r in ratios)


@dataclass
class Divergence:
    """A run whose learning rate grows until it diverges, and who noticed when."""

    head: str
    seed: int
    steps: int | None
    """Steps until the loss was one above its median; None if that never happened."""
    noticed: int | None
    loss: list[float]
    gradient: list[float]


@dataclass
class Trial:
    """One training run with all its faults."""

    head: Head
    seed: int
    clean: CleanRun
    branches: list[Branch]
    divergence: Divergence | None


@dataclass(frozen=True)
class TrialPlan:
    """Which runs are trained, and when the faults begin."""

    seeds: tuple[int, ...] = (20, 21, 22, 23, 24)
    """Seeds on which the rules were not tuned."""
    clean_seeds: tuple[int, ...] = tuple(range(25, 35))
    """Others, of runs without a fault: false alarms are rare, so that it takes many steps to count them."""
    sizes: TrialSizes = field(default_factory=TrialSizes)
    fault_steps: tuple[int, ...] = (60, 150, 400, 800)
    """Steps at which every fault begins: in the warm-up, at the peak, in the decay, late."""
    horizon: int = 20
    """Steps for which a fault is followed."""
    growth: float = 1.02
    """Factor on the learning rate at each step of a divergence."""
    patience: int = 400
    """Steps that a divergence may take; 0 to try none."""

    @classmethod
    def quick(cls) -> TrialPlan:
        """Return a plan that takes seconds."""
        sizes = TrialSizes(steps=120, vocab_size=512, width=32, context=32, batch=4, panel=128)
        return cls(seeds=(0,), clean_seeds=(1,), sizes=sizes, fault_steps=(90,), horizon=5, patience=0)


def trial(head: Head, seed: int, plan: TrialPlan) -> Trial:
    """Train one clean run, with a branch for every fault at every fault step, and one branch that diverges."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "hilbert_monitor: identity not exact")  # a fault changes the gradient
        return _trial(head, seed, plan)


def _trial(head: Head, seed: int, plan: TrialPlan) -> Trial:
    run, clean, detectors = TrialRun(head, seed, plan.sizes), CleanRun(), (Spikes(), Spikes())
    branches: list[Branch] = []
    divergence = None
    for step in range(1, plan.sizes.steps + 1):
        if step in plan.fault_steps:
            branches += _branches(run, detectors, step, plan)
            if step == plan.fault_steps[len(plan.fault_steps) // 2] and plan.patience:
                divergence = _diverge(run, detectors, plan)
        result = run.step()
        clean.measured += result.record.diameter_lower is not None
        clean.false_alarms += [f"step {alert.step}: {alert.message}" for alert in result.alerts]
        _score(result, detectors, clean)
    return Trial(head, seed, clean, branches, divergence)


def _branches(run: TrialRun, detectors: Detectors, step: int, plan: TrialPlan) -> Iterator[Branch]:
    twin = run.branch().step(reference=True)
    assert twin.diameter
    assert twin.perturbation
    for name, fault in FAULTS.items():
        faulty, copies = run.branch(), _copied(detectors)
        branch = Branch(name, run.head, run.seed, step, math.nan, math.nan, None, [], [])
        for since in range(plan.horizon):
            result = faulty.step(fault(faulty, since), reference=since == 0)
            if result.diameter is not None and result.perturbation is not None:
                branch.diameter_ratio = result.diameter / twin.diameter
                branch.perturbation_ratio = result.perturbation / twin.perturbation
            if result.alerts and branch.noticed is None:
                branch.noticed = since
            _score(result, copies, branch)
        yield branch


def _diverge(run: TrialRun, detectors: Detectors, plan: TrialPlan) -> Divergence:
    """Let the learning rate grow until the loss is up by one, and follow the run for some steps more."""
    faulty, copies = run.branch(), _copied(detectors)
    usual_loss = math.exp(median(detectors[0].past))
    divergence = Divergence(run.head, run.seed, None, None, [], [])
    for since in range(plan.patience):
        result = faulty.step(StepChange(rate=plan.growth ** (since + 1)))
        if result.alerts and divergence.noticed is None:
            divergence.noticed = since
        _score(result, copies, divergence)
        if divergence.steps is None and not result.loss <= usual_loss + 1:
            divergence.steps = since
        if divergence.steps is not None and since >= divergence.steps + plan.horizon:
            break
    return divergence


def _copied(detectors: Detectors) -> Detectors:
    return Spikes(detectors[0].past), Spikes(detectors[1].past)


def _score(result: TrialStep, detectors: Detectors, into: CleanRun | Branch | Divergence) -> None:
    into.loss.append(detectors[0].score(result.loss))
    into.gradient.append(detectors[1].score(result.gradient_norm))


def run(plan: TrialPlan, *, workers: int, after_each: Callable[[Trial], None] = lambda trial: None) -> list[Trial]:
    """Run all trials, each on one thread, in so many processes."""
    clean = replace(plan, fault_steps=())
    jobs = [(head, seed, plan) for seed in plan.seeds for head in HEADS]
    jobs += [(head, seed, clean) for seed in plan.clean_seeds for head in HEADS]
    return in_processes(trial, jobs, workers=workers, after_each=after_each)

"""Do the blow-up rules work? Faults put into real small training runs, beside two detectors that people use today.

What counts was fixed before the rules were: a fault is visible if it makes D(S) or the Hilbert RMS of its step twice
or half what its clean twin has, by a reference in fp64, or not finite. Visible faults must be reported in the step
itself. A clean run must give no alert. The opponents look for spikes of the loss and of the gradient's norm, by the
same kind of rule, with thresholds that give them as many false alarms on the same clean runs as the rules had.
"""

from __future__ import annotations

import math
import multiprocessing
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

from hilbert_monitor.pretrain.recipes import HEADS, Head

from .trial_runs import Bed, BedConfig, Outcome, Spoil

VISIBLE = 2.0
WINDOW, QUIET = 100, 20
"""Of the opponents' history, as of the rules'."""

Strike = Callable[[Bed, int], Spoil]
"""From the run as it stands, and the number of steps since the fault began, to what it does to this step."""


def _once(make: Callable[[Bed], Spoil]) -> Strike:
    return lambda bed, since: make(bed) if since == 0 else Spoil()


def _random_tokens(bed: Bed) -> Spoil:
    draw = torch.Generator().manual_seed(bed.probe.step)
    return Spoil(batch=lambda tokens: torch.randint(bed.config.vocab_size, tokens.shape, generator=draw))


def _poisoned_row(bed: Bed) -> Spoil:
    """One row of the head's gradient a thousand times the largest."""

    def poison(G: Tensor) -> None:
        draw = torch.Generator().manual_seed(bed.probe.step)
        row = torch.randn(G.shape[1], generator=draw)
        token = int(torch.randint(len(G), (), generator=draw))
        G[token] = row / row.norm() * 1000 * torch.linalg.vector_norm(G, dim=1).max()

    return Spoil(gradient=poison)


def _overflow(bed: Bed) -> Spoil:
    """The gradient goes through fp16 with a scale that its largest entry does not survive."""

    def cast(G: Tensor) -> None:
        scale = 2 * torch.finfo(torch.float16).max / G.abs().max()
        G.copy_((G * scale).half().float() / scale)

    return Spoil(gradient=cast)


def _nan(bed: Bed) -> Spoil:
    def put(G: Tensor) -> None:
        G[0, 0] = math.nan

    return Spoil(gradient=put)


def _rare_token(bed: Bed) -> Spoil:
    """The token that has not occurred for longest occurs a few times."""
    token = int(bed.silence.argmax())

    def insert(tokens: Tensor) -> Tensor:
        changed = tokens.clone()
        changed[0, 5::10] = token
        return changed

    return Spoil(batch=insert)


FAULTS: dict[str, Strike] = {
    "learning rate x10, one step": _once(lambda bed: Spoil(rate=10)),
    "learning rate x3, for good": lambda bed, since: Spoil(rate=3),
    "a batch of random tokens": _once(_random_tokens),
    "a poisoned row of the gradient": _once(_poisoned_row),
    "fp16 overflow to inf": _once(_overflow),
    "a nan in the gradient": _once(_nan),
    "a rare token after long silence": _once(_rare_token),
}


class Spikes:
    """How far the logarithm of something is above the median of its last values: the usual spike detector."""

    def __init__(self, past: Sequence[float] = ()) -> None:
        self.past: deque[float] = deque(past, maxlen=WINDOW)

    def score(self, value: float) -> float:
        """The height of a value over the last ones; infinite for one that is no number, minus that without a past."""
        if not math.isfinite(value) or value <= 0:
            return math.inf
        found = math.log(value) - median(self.past) if len(self.past) >= QUIET else -math.inf
        self.past.append(math.log(value))
        return found


@dataclass
class Clean:
    """A run without a fault."""

    measured: int = 0
    false_alarms: list[str] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    """Scores of the opponents."""
    gradient: list[float] = field(default_factory=list)


@dataclass
class Branch:
    """What followed a fault: how far its step was from its twin's, and who noticed when."""

    fault: str
    head: str
    seed: int
    step: int
    diameter_ratio: float
    perturbation_ratio: float
    noticed: int | None
    """Steps from the fault to the first alert: 0 is the step itself."""
    loss: list[float]
    gradient: list[float]

    @property
    def visible(self) -> bool:
        """Whether the increment shows the fault, whatever a rule makes of it."""
        ratios = (self.diameter_ratio, self.perturbation_ratio)
        return any(not math.isfinite(r) or r >= VISIBLE or r <= 1 / VISIBLE for r in ratios)


@dataclass
class Divergence:
    """A run whose learning rate grows until it diverges: who noticed how many steps before."""

    head: str
    seed: int
    steps: int | None
    """Until the loss was one above its median; None if that never came. It is followed for some steps more."""
    noticed: int | None
    loss: list[float]
    gradient: list[float]


@dataclass
class Trial:
    """All that was seen of one run."""

    head: Head
    seed: int
    clean: Clean
    branches: list[Branch]
    divergence: Divergence | None


@dataclass(frozen=True)
class Plan:
    """How much is tried."""

    seeds: tuple[int, ...] = (5, 6, 7, 8, 9)
    """The rules were tuned on others."""
    config: BedConfig = field(default_factory=BedConfig)
    strikes: tuple[int, ...] = (60, 150, 400, 800)
    """Steps at which every fault strikes: in the warm-up, at the peak, in the decay, late."""
    horizon: int = 20
    """Steps that a fault is followed."""
    growth: float = 1.02
    """Of the learning rate at each step of a divergence."""
    patience: int = 400

    @classmethod
    def quick(cls) -> Plan:
        """Return one that takes seconds."""
        config = BedConfig(steps=120, vocab_size=512, width=32, context=32, batch=4, panel=128)
        return cls(seeds=(0,), config=config, strikes=(90,), horizon=5, patience=0)


def trial(head: Head, seed: int, plan: Plan) -> Trial:
    """Train one run clean, branch it at every strike for every fault, and let one branch diverge."""
    bed, clean, spikes = Bed(head, seed, plan.config), Clean(), (Spikes(), Spikes())
    branches: list[Branch] = []
    divergence = None
    for step in range(1, plan.config.steps + 1):
        if step in plan.strikes:
            branches += _branches(bed, spikes, step, plan)
            if step == plan.strikes[len(plan.strikes) // 2] and plan.patience:
                divergence = _diverge(bed, spikes, plan)
        outcome = bed.step()
        clean.measured += outcome.record.diameter_lower is not None
        clean.false_alarms += [f"step {alert.step}: {alert.message}" for alert in outcome.alerts]
        _score(outcome, spikes, clean)
    return Trial(head, seed, clean, branches, divergence)


def _branches(bed: Bed, spikes: tuple[Spikes, Spikes], step: int, plan: Plan) -> Iterator[Branch]:
    twin = bed.branch().step(reference=True)
    assert twin.diameter
    assert twin.perturbation
    for name, strike in FAULTS.items():
        other, theirs = bed.branch(), (Spikes(spikes[0].past), Spikes(spikes[1].past))
        found = Branch(name, bed.head, bed.seed, step, math.nan, math.nan, None, [], [])
        for since in range(plan.horizon):
            outcome = other.step(strike(other, since), reference=since == 0)
            if outcome.diameter is not None and outcome.perturbation is not None:
                found.diameter_ratio = outcome.diameter / twin.diameter
                found.perturbation_ratio = outcome.perturbation / twin.perturbation
            if outcome.alerts and found.noticed is None:
                found.noticed = since
            _score(outcome, theirs, found)
        yield found


def _diverge(bed: Bed, spikes: tuple[Spikes, Spikes], plan: Plan) -> Divergence:
    other, theirs = bed.branch(), (Spikes(spikes[0].past), Spikes(spikes[1].past))
    usual = math.exp(median(spikes[0].past))
    found = Divergence(bed.head, bed.seed, None, None, [], [])
    for since in range(plan.patience):
        outcome = other.step(Spoil(rate=plan.growth ** (since + 1)))
        if outcome.alerts and found.noticed is None:
            found.noticed = since
        _score(outcome, theirs, found)
        if found.steps is None and not outcome.loss <= usual + 1:
            found.steps = since
        if found.steps is not None and since >= found.steps + plan.horizon:
            break
    return found


def _score(outcome: Outcome, spikes: tuple[Spikes, Spikes], into: Clean | Branch | Divergence) -> None:
    into.loss.append(spikes[0].score(outcome.loss))
    into.gradient.append(spikes[1].score(outcome.gradient_norm))


def run(plan: Plan, *, workers: int, done: Callable[[Trial], None] = lambda trial: None) -> list[Trial]:
    """Run all trials, each in a process with a thread of its own."""
    jobs = [(head, seed) for seed in plan.seeds for head in HEADS]
    if workers == 1:
        trials = []
        for head, seed in jobs:
            trials.append(trial(head, seed, plan))
            done(trials[-1])
        return trials
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        futures = [pool.submit(trial, head, seed, plan) for head, seed in jobs]
        for future in as_completed(futures):
            done(future.result())
        return [future.result() for future in futures]


@dataclass(frozen=True)
class Cell:
    """One fault under one optimizer, over all seeds and times."""

    fault: str
    head: str
    tried: int
    visible: int
    reported: int
    """Of the visible ones, in the step itself."""
    diameter_ratio: float
    """Median of what the fault makes of D(S)."""
    lead_loss: str
    """When a spike of the loss was noticed, in steps after our alert."""
    lead_gradient: str


@dataclass(frozen=True)
class Summary:
    """What the trials come to."""

    measured: int
    false_alarms: list[str]
    thresholds: dict[str, float]
    """Of the opponents, as factors over the median."""
    cells: list[Cell]
    divergences: list[dict[str, Any]]

    @property
    def visible(self) -> int:
        """Faults that the increment shows."""
        return sum(cell.visible for cell in self.cells)

    @property
    def reported(self) -> int:
        """Those of them that were reported in the step itself."""
        return sum(cell.reported for cell in self.cells)

    def as_dict(self) -> dict[str, Any]:
        """Plain types, for JSON."""
        return {**asdict(self), "visible": self.visible, "reported": self.reported}


def summary(trials: Sequence[Trial]) -> Summary:
    """Count, and give the opponents thresholds with which they have no more false alarms than the rules."""
    false_alarms = [f"{t.head}, seed {t.seed}, {text}" for t in trials for text in t.clean.false_alarms]
    limits = {
        name: _threshold([getattr(t.clean, name) for t in trials], len(false_alarms)) for name in ("loss", "gradient")
    }
    cells = []
    for fault in FAULTS:
        for head in HEADS:
            found = [b for t in trials for b in t.branches if (b.fault, b.head) == (fault, head)]
            visible = [b for b in found if b.visible]
            cells.append(
                Cell(
                    fault,
                    head,
                    len(found),
                    len(visible),
                    sum(b.noticed == 0 for b in visible),
                    median(b.diameter_ratio for b in found)
                    if all(math.isfinite(b.diameter_ratio) for b in found)
                    else math.nan,
                    _leads(visible, "loss", limits),
                    _leads(visible, "gradient", limits),
                )
            )
    divergences = [
        {
            "head": d.head,
            "seed": d.seed,
            "diverged": d.steps,
            "noticed": d.noticed,
            "loss": _first(d.loss, limits["loss"]),
            "gradient": _first(d.gradient, limits["gradient"]),
        }
        for t in trials
        if (d := t.divergence) is not None
    ]
    factors = {name: math.exp(limit) for name, limit in limits.items()}
    return Summary(sum(t.clean.measured for t in trials), false_alarms, factors, cells, divergences)


def _threshold(runs: Sequence[Sequence[float]], alarms: int) -> float:
    """The least threshold that so many scores of clean runs pass."""
    scores = sorted((score for run in runs for score in run), reverse=True)
    return scores[min(alarms, len(scores) - 1)]


def _first(scores: Sequence[float], limit: float) -> int | None:
    return next((i for i, score in enumerate(scores) if score > limit), None)


def _leads(branches: Sequence[Branch], name: str, limits: dict[str, float]) -> str:
    """Median steps from our alert to theirs, and how often they had none."""
    pairs = [(b.noticed, _first(getattr(b, name), limits[name])) for b in branches if b.noticed is not None]
    if not pairs:
        return "-"
    seen = [theirs - ours for ours, theirs in pairs if theirs is not None]
    missed = len(pairs) - len(seen)
    said = [f"{median(seen):+g}"] if seen else []
    return ", ".join(said + ([f"missed {missed} of {len(pairs)}"] if missed else []))

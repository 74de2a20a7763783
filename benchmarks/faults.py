"""Blow-up rules in real training runs with injected faults, against spikes of the loss and of the gradient norm.

The criteria were fixed before the rules were. A fault is visible if it makes D(S) or the Hilbert RMS of its step at
least twice, or at most half, that of a clean twin, by a reference in fp64, or not finite. The rules must report each
visible fault in the very step, and must report nothing in a clean run. The thresholds of the baselines give them as
many false alarms on the same clean runs as the rules had.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from hilbert_monitor.monitor.panel import Panel
from hilbert_monitor.monitor.probe import Probe
from hilbert_monitor.optim import pretraining_optimizer
from hilbert_monitor.pretrain.recipe import HEADS, Head
from hilbert_monitor.runs.alerts import Judge

from .data import SmallRun, StepChange, TrialSizes
from .measure import Result, in_processes

VISIBLE = 2.0
"""Factor, up or down, from which a fault counts as visible."""
WINDOW, NEEDED = 100, 20
"""Values that the baselines remember, and those they need before they judge: as many as the rules."""
GROWTH = 1.02
"""Factor on the learning rate at each step of a divergence."""
GROWING, TOLD = f"learning rate x{GROWTH} a step", "told in the step of the fault"
BASELINES = ("loss spike", "gradient norm spike")
Fault = Callable[[SmallRun, int], StepChange]
"""From the run, and the number of steps since the fault began, to what the fault changes in this step."""


def _once(place: str, change: Callable[..., Any]) -> Fault:
    return lambda run, since: StepChange(**({place: partial(change, run)} if since == 0 else {}))  # type: ignore[arg-type]


def _random_tokens(run: SmallRun, tokens: Tensor) -> Tensor:
    draw = torch.Generator().manual_seed(run.updates)
    return torch.randint(run.sizes.vocab_size, tokens.shape, generator=draw)


def _rare_token(run: SmallRun, tokens: Tensor) -> Tensor:
    """Put the token that has been absent for longest into the batch a few times."""
    changed = tokens.clone()
    changed[0, 5::10] = int(run.absence.argmax())
    return changed


def _poisoned_row(run: SmallRun, G: Tensor) -> None:
    """Make one row of the head's gradient a thousand times as long as the longest."""
    draw = torch.Generator().manual_seed(run.updates)
    row = torch.randn(G.shape[1], generator=draw)
    token = int(torch.randint(len(G), (), generator=draw))
    G[token] = row / row.norm() * 1000 * torch.linalg.vector_norm(G, dim=1).max()


def _overflow(run: SmallRun, G: Tensor) -> None:
    """Cast the gradient to fp16 and back, with a scale at which its largest entry overflows."""
    scale = 2 * torch.finfo(torch.float16).max / G.abs().max()
    G.copy_((G * scale).half().float() / scale)


def _nan(run: SmallRun, G: Tensor) -> None:
    G[0, 0] = math.nan


FAULTS: dict[str, Fault] = {
    "learning rate x10, one step": lambda run, since: StepChange(rate=10 if since == 0 else 1),
    "learning rate x3, for good": lambda run, since: StepChange(rate=3),
    "a batch of random tokens": _once("batch", _random_tokens),
    "a poisoned row of the gradient": _once("gradient", _poisoned_row),
    "fp16 overflow to inf": _once("gradient", _overflow),
    "a nan in the gradient": _once("gradient", _nan),
    "a rare token after long silence": _once("batch", _rare_token),
}


class Spikes:
    """The usual spike detector: how far the logarithm of a value is above the median of the last ones."""

    def __init__(self) -> None:
        self.past: deque[float] = deque(maxlen=WINDOW)

    def score(self, value: float) -> float:
        """Return the height of a value over the last ones; minus infinity while they are too few."""
        if not math.isfinite(value) or value <= 0:
            return math.inf
        height = math.log(value) - median(self.past) if len(self.past) >= NEEDED else -math.inf
        self.past.append(math.log(value))
        return height


@dataclass
class Followed:
    """Steps of a clean run, or after a fault: those with an alert or a page, from 0, and the scores of the baselines.

    The reference is D(S) and the Hilbert RMS of the fault's step in fp64, and ratios are these over the clean twin's.
    Where the learning rate grows, `diverged` is the step in which the loss was one above its median.
    """

    told: list[int] = field(default_factory=list)
    paged: list[int] = field(default_factory=list)
    scores: list[tuple[float, ...]] = field(default_factory=list)
    reference: tuple[float, ...] = ()
    ratios: tuple[float, ...] = ()
    diverged: int | None = None

    @property
    def visible(self) -> bool:
        """Whether the fault leaves a trace in the increment, whatever a rule makes of it."""
        return any(not math.isfinite(r) or r >= VISIBLE or r <= 1 / VISIBLE for r in self.ratios)

    def noticed(self, baseline: int, limit: float) -> int | None:
        """Return the first step in which a baseline is above its limit."""
        return next((step for step, scores in enumerate(self.scores) if scores[baseline] > limit), None)


class TrialRun(SmallRun):
    """A small run by the paper's recipe, with a probe and the baselines attached."""

    def __init__(self, head: Head, seed: int, sizes: TrialSizes) -> None:
        super().__init__(seed, sizes, lambda model: pretraining_optimizer(model, head))
        self.head, self.spikes = head, [Spikes() for _ in BASELINES]
        self.panel = Panel.of_tokens(self.held_out, sizes.panel, sizes.context)
        parts: dict[str, Any] = {"panel": self.panel, "schedulers": self.schedule, "judge": Judge()}
        self.probe = Probe(self.model, self.optimizer, perturbation_every=25, strict=True, **parts).attach()

    def branch(self) -> TrialRun:
        """Return an independent copy that continues from this step."""
        other = TrialRun(self.head, self.seed, self.sizes).load(self)
        other.probe.judge, other.spikes = copy.deepcopy(self.probe.judge), copy.deepcopy(self.spikes)
        other.probe.step = self.probe.step
        return other

    def step(self, into: Followed, change: StepChange | None = None, *, reference: bool = False) -> float:
        """Make one training step, with what a fault changes in it; return the loss."""
        change = change or StepChange()
        loss = float(self.backward(change))
        norm = float(self.clip_gradients())
        with self.update(change):
            before = self.model.lm_head.weight.detach().double().clone()
            self.optimizer.step()
            self.probe.record(train_loss=loss)
            if reference:
                into.reference = self._reference(before)
        into.told += [len(into.scores)] if self.probe.alerts else []
        into.paged += [len(into.scores)] if any(alert.severity == "page" for alert in self.probe.alerts) else []
        into.scores.append((self.spikes[0].score(loss), self.spikes[1].score(norm)))
        return loss

    @torch.no_grad()
    def _reference(self, before: Tensor) -> tuple[float, float]:
        """Return D(S) over all pairs, and the RMS over positions of the largest minus the smallest logit change."""
        group: dict[str, Any] = self.probe.head.source.group
        S = self.model.lm_head.weight.double() - (1 - group["lr"] * group["weight_decay"]) * before
        places = zip(self.panel.batches, self.panel.positions, strict=True)
        rows = torch.cat([batch.flatten()[at] for batch, at in places]).view(-1, self.sizes.context)
        logits = self.model.hidden(rows).flatten(0, 1).double() @ S.T
        spread = logits.amax(1) - logits.amin(1)
        longest = max(float(torch.cdist(part, S).max()) for part in S.split(512))
        return longest, float(spread.square().mean().sqrt())


@dataclass(frozen=True)
class Plan:
    """Which runs are trained, and when the faults begin; `patience` are the steps that a divergence may take.

    The rules were not tuned on these seeds. The clean seeds are of runs without a fault: false alarms are rare, so that
    it takes many steps to count them. Faults begin in the warm-up, at the peak, in the decay and late.
    """

    seeds: tuple[int, ...] = (20, 21, 22, 23, 24)
    clean_seeds: tuple[int, ...] = tuple(range(25, 35))
    sizes: TrialSizes = field(default_factory=TrialSizes)
    fault_steps: tuple[int, ...] = (60, 150, 400, 800)
    horizon: int = 20
    patience: int = 400


SMALL = TrialSizes(steps=90, vocab_size=512, width=32, context=32, batch=4, panel=128, one_file_in=12)
QUICK = Plan(seeds=(0,), clean_seeds=(1,), sizes=SMALL, fault_steps=(75,), horizon=2, patience=0)
Trial = tuple[Head, Followed, list[tuple[str, Followed]]]
"""One training run: its head, its clean steps, and those after each fault; a rate that grows is one."""


def trial(head: Head, seed: int, plan: Plan) -> Trial:
    """Train one clean run, with a branch for every fault at every fault step, and one branch that diverges."""
    run, clean, faults = TrialRun(head, seed, plan.sizes), Followed(), list[tuple[str, Followed]]()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "hilbert_monitor: identity not exact")  # a fault changes the gradient
        for step in range(1, plan.sizes.steps + 1):
            if step in plan.fault_steps:
                faults += _branches(run, plan)
                if step == plan.fault_steps[len(plan.fault_steps) // 2] and plan.patience:
                    faults.append((GROWING, _diverge(run, plan)))
            run.step(clean)
    print(f"trained {head}, seed {seed}", flush=True)
    return head, clean, faults


def _branches(run: TrialRun, plan: Plan) -> Iterator[tuple[str, Followed]]:
    twin = Followed()
    run.branch().step(twin, reference=True)
    for name, fault in FAULTS.items():
        faulty, followed = run.branch(), Followed()
        for since in range(plan.horizon):
            faulty.step(followed, fault(faulty, since), reference=since == 0)
        followed.ratios = tuple(a / b for a, b in zip(followed.reference, twin.reference, strict=True))
        yield name, followed


def _diverge(run: TrialRun, plan: Plan) -> Followed:
    """Let the learning rate grow until the loss is up by one, and follow the run for some steps more."""
    faulty, followed = run.branch(), Followed()
    usual_loss = math.exp(median(run.spikes[0].past))
    for since in range(plan.patience):
        loss = faulty.step(followed, StepChange(rate=GROWTH ** (since + 1)))
        if followed.diverged is None:
            followed.diverged = None if loss <= usual_loss + 1 else since
        elif since >= followed.diverged + plan.horizon:
            break
    return followed


def run(*, quick: bool) -> list[Result]:
    """Train all runs, each on one thread, and count who notices which fault in its step."""
    plan = QUICK if quick else Plan()
    clean = replace(plan, fault_steps=())
    jobs = [(head, seed, plan) for seed in plan.seeds for head in HEADS]
    jobs += [(head, seed, clean) for seed in plan.clean_seeds for head in HEADS]
    return list(results(in_processes(trial, jobs, workers=1 if quick else None)))


def results(trials: Sequence[Trial]) -> Iterator[Result]:
    """Compare with the baselines at the thresholds with which they have no more false alarms than the rules."""
    scores = [one for _, clean, _ in trials for one in clean.scores]
    alarms = sum(len(clean.told) for _, clean, _ in trials)
    limits = [sorted((one[k] for one in scores), reverse=True)[alarms] for k in range(2)]
    for k, name in enumerate(BASELINES):
        theirs, note = sum(one[k] > limits[k] for one in scores), f"threshold {math.exp(limits[k]):.2f} x its median"
        yield Result("false alarms in clean steps", f"{len(scores):,} steps", alarms, name, theirs, "", note)
    pages = sum(len(clean.paged) for _, clean, _ in trials)
    yield Result("false pages in clean steps", f"{len(scores):,} steps", pages, "false alarms", alarms, "")
    seen = [after for *_, faults in trials for _, after in faults if after.visible]
    yield Result(
        TOLD,
        "all visible faults",
        sum(0 in after.told for after in seen),
        "visible",
        len(seen),
        "",
        more_is_better=True,
    )
    for fault in (*FAULTS, GROWING):
        branches = {head: [f for h, _, fs in trials if h == head for name, f in fs if name == fault] for head in HEADS}
        if branches["adamw"]:
            yield from (_divergences if fault == GROWING else _told)(fault, branches, limits)


def _told(fault: str, branches: dict[Head, list[Followed]], limits: Sequence[float]) -> Iterator[Result]:
    both = [after for followed in branches.values() for after in followed]
    ours, visible = (sum(flags) for flags in ([0 in f.told and f.visible for f in both], [f.visible for f in both]))
    paged = sum(0 in f.paged and f.visible for f in both)
    ratios = ", ".join(f"x{median(f.ratios[0] for f in own):.2f} {head}" for head, own in branches.items())
    yield Result(
        TOLD, fault, ours, "visible", visible, "", f"{paged} paged, of {len(both)}; D(S) {ratios}", more_is_better=True
    )
    for k, name in enumerate(BASELINES):
        steps = [step for f in both if (step := f.noticed(k, limits[k])) is not None]
        note = f"it tells {len(steps)} of {len(both)}" + (f", after {median(steps):g} steps" if any(steps) else "")
        yield Result(TOLD, fault, ours, name, steps.count(0), "", note, more_is_better=True)


def _divergences(fault: str, branches: dict[Head, list[Followed]], limits: Sequence[float]) -> Iterator[Result]:
    """Steps from the start of the growth: medians over the runs in which there are any."""
    for head, runs in branches.items():
        told, diverged = [f.told[0] for f in runs if f.told], [f.diverged for f in runs if f.diverged is not None]
        note = f"told in {len(told)} of {len(runs)}"
        for k, name in enumerate(BASELINES):
            steps = [step for f in runs if (step := f.noticed(k, limits[k])) is not None]
            note += f"; {name} in {len(steps)}" + (f", after {median(steps):g}" if steps else "")
        ours, theirs = (median(steps) if steps else math.inf for steps in (told, diverged))
        yield Result("steps of growth until told", f"{fault}, {head}", ours, "loss up by one", theirs, "", note)

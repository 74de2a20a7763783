"""What the trials of safeguards come to: the loss that a fault costs under each, and what each costs without one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import mean, stdev
from typing import Any

from rich.console import Console
from rich.table import Table

from hilbert_monitor.pretrain.recipes import HEADS, Head

from .guarding import ARMS, LOST, Guarding, GuardTrial
from .output import show_machine


@dataclass(frozen=True)
class Excess:
    """Validation loss above that of a twin, over the seeds."""

    mean: float
    """Infinite where a run has no finite loss any more."""
    deviation: float
    """Sample standard deviation; nan for one seed, or where a loss is not finite."""

    @classmethod
    def of(cls, values: Sequence[float]) -> Excess:
        """Return mean and deviation of some differences."""
        finite = all(map(math.isfinite, values))
        return cls(mean(values) if finite else math.inf, stdev(values) if finite and len(values) > 1 else math.nan)

    def __str__(self) -> str:
        if not math.isfinite(self.mean):
            return "lost"
        return f"{self.mean:+.2f}" if math.isnan(self.deviation) else f"{self.mean:+.2f} ± {self.deviation:.2f}"


@dataclass(frozen=True)
class GuardCell:
    """A fault under one head optimizer and one safeguard, over all seeds."""

    fault: str
    head: str
    arm: str
    excess: tuple[Excess, ...]
    """Over the clean twin of the same arm and seed, at each horizon."""
    lost: int
    """Runs whose last loss is more than LOST above the twin's, or not finite."""
    left_out: float
    """Steps that were not made after the fault began, more than in the clean twin; mean."""
    held: float
    """Steps that were made smaller, likewise."""


@dataclass(frozen=True)
class GuardCost:
    """What a safeguard costs a run without a fault, over all seeds."""

    head: str
    arm: str
    excess: Excess
    """Of the clean twin at the last horizon, over that of the run without any safeguard."""
    left_out: float
    """Steps before the fault that were not made: false alarms; mean."""
    held: float
    """Steps before the fault that were made smaller; mean."""
    seconds: float
    """Processor time of a step's safeguard and optimizer; mean over the seeds of medians."""


@dataclass(frozen=True)
class GuardSummary:
    """What the trials come to."""

    seeds: tuple[int, ...]
    horizons: tuple[int, ...]
    limits: dict[Head, float]
    cells: list[GuardCell]
    costs: list[GuardCost]

    def as_dict(self) -> dict[str, Any]:
        """Plain types, for JSON."""
        return asdict(self)


def summarize(guarding: Guarding) -> GuardSummary:
    """Compare each run with its clean twin, and each clean twin with that of the run without a safeguard."""
    plan, trials = guarding.plan, guarding.trials
    cells = [
        _cell(fault, head, arm, [t for t in trials if (t.head, t.arm) == (head, arm)])
        for fault in plan.faults
        for head in HEADS
        for arm in ARMS
    ]
    costs = [_cost(head, arm, trials) for head in HEADS for arm in ARMS]
    return GuardSummary(plan.seeds, plan.horizons, guarding.limits, cells, costs)


def _cell(fault: str, head: Head, arm: str, trials: Sequence[GuardTrial]) -> GuardCell:
    pairs = [(t.clean, next(o for o in t.outcomes if o.fault == fault)) for t in trials]
    excesses = [
        [a - b for a, b in zip(outcome.losses, clean.losses, strict=True)] for clean, outcome in pairs
    ]  # (seeds, horizons)
    return GuardCell(
        fault,
        head,
        arm,
        excess=tuple(map(Excess.of, zip(*excesses, strict=True))),
        lost=sum(not values[-1] <= LOST for values in excesses),
        left_out=mean(outcome.left_out - clean.left_out for clean, outcome in pairs),
        held=mean(outcome.held - clean.held for clean, outcome in pairs),
    )


def _cost(head: Head, arm: str, trials: Sequence[GuardTrial]) -> GuardCost:
    plain = {t.seed: t.clean.losses[-1] for t in trials if (t.head, t.arm) == (head, ARMS[0])}
    own = [t for t in trials if (t.head, t.arm) == (head, arm)]
    return GuardCost(
        head,
        arm,
        excess=Excess.of([t.clean.losses[-1] - plain[t.seed] for t in own]),
        left_out=mean(t.left_out for t in own),
        held=mean(t.held for t in own),
        seconds=mean(t.seconds for t in own),
    )


def show(summary: GuardSummary, console: Console) -> None:
    """Print the loss that each fault costs under each safeguard, and what each costs without a fault."""
    show_machine(console)
    for place, horizon in enumerate(summary.horizons):
        console.print(_fault_table(summary, place, f"{horizon} steps after the beginning of the fault"))
    console.print(_cost_table(summary))
    limits = ", ".join(f"{head} {limit:.4g}" for head, limit in summary.limits.items())
    seeds = ", ".join(map(str, summary.seeds))
    console.print(f"Seeds {seeds}. Limits of the trust region at the peak of the schedule: {limits}.")


def _fault_table(summary: GuardSummary, place: int, when: str) -> Table:
    table = Table(
        title=f"Validation loss above that of the clean twin, {when}; in brackets, steps left out, less the twin's"
    )
    for name in ("fault", "head"):
        table.add_column(name)
    for arm in ARMS:
        table.add_column(arm, justify="right")
    for fault in dict.fromkeys(cell.fault for cell in summary.cells):
        for head in HEADS:
            cells = [c for c in summary.cells if (c.fault, c.head) == (fault, head)]
            texts = [f"{c.excess[place]}{f' ({c.left_out:.0f})' if c.left_out >= 0.5 else ''}" for c in cells]
            table.add_row(fault, head, *texts)
    return table


def _cost_table(summary: GuardSummary) -> Table:
    table = Table(title="Without a fault: loss above that of a run without a safeguard, and what was done to its steps")
    for name in ("head", "safeguard"):
        table.add_column(name)
    for name in ("loss", "steps left out", "steps made smaller", "ms a step"):
        table.add_column(name, justify="right")
    for c in summary.costs:
        table.add_row(c.head, c.arm, str(c.excess), f"{c.left_out:.1f}", f"{c.held:.1f}", f"{1e3 * c.seconds:.1f}")
    return table

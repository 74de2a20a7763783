"""What the fault trials come to: faults reported, false alarms, and how the opponents did."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from hilbert_monitor.pretrain.recipes import HEADS

from .faults import FAULTS, Branch, Trial
from .output import show_machine


@dataclass(frozen=True)
class Cell:
    """One fault under one head optimizer, over all seeds and all steps at which it began."""

    fault: str
    head: str
    tried: int
    visible: int
    reported: int
    """Visible faults that the rules reported in the very step."""
    diameter_ratio: float
    """Median of D(S) over that of the clean twin; nan if one is not finite."""
    lead_loss: str
    """How many steps after our alert the detector of loss spikes noticed, in words."""
    lead_gradient: str
    """The same for spikes of the gradient norm."""


@dataclass(frozen=True)
class TrialSummary:
    """What the trials come to."""

    measured: int
    """Clean steps that the rules judged."""
    false_alarms: list[str]
    thresholds: dict[str, float]
    """Thresholds of the opponents, as factors over the median."""
    cells: list[Cell]
    divergences: list[dict[str, Any]]

    @property
    def visible(self) -> int:
        """Number of faults that leave a trace in the increment."""
        return sum(cell.visible for cell in self.cells)

    @property
    def reported(self) -> int:
        """Number of visible faults that the rules reported in the very step."""
        return sum(cell.reported for cell in self.cells)

    def as_dict(self) -> dict[str, Any]:
        """Plain types, for JSON."""
        return {**asdict(self), "visible": self.visible, "reported": self.reported}


def summarize(trials: Sequence[Trial]) -> TrialSummary:
    """Count, and give each opponent the threshold with which it has no more false alarms than the rules."""
    false_alarms = [f"{t.head}, seed {t.seed}, {text}" for t in trials for text in t.clean.false_alarms]
    limits = {
        name: _threshold([getattr(t.clean, name) for t in trials], len(false_alarms)) for name in ("loss", "gradient")
    }
    branches = [branch for trial in trials for branch in trial.branches]
    cells = [
        _cell(fault, head, [b for b in branches if (b.fault, b.head) == (fault, head)], limits)
        for fault in FAULTS
        for head in HEADS
    ]
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
    return TrialSummary(sum(t.clean.measured for t in trials), false_alarms, factors, cells, divergences)


def _cell(fault: str, head: str, branches: Sequence[Branch], limits: dict[str, float]) -> Cell:
    visible, ratios = [b for b in branches if b.visible], [b.diameter_ratio for b in branches]
    return Cell(
        fault,
        head,
        tried=len(branches),
        visible=len(visible),
        reported=sum(b.noticed == 0 for b in visible),
        diameter_ratio=median(ratios) if all(map(math.isfinite, ratios)) else math.nan,
        lead_loss=_leads(visible, "loss", limits["loss"]),
        lead_gradient=_leads(visible, "gradient", limits["gradient"]),
    )


def _threshold(runs: Sequence[Sequence[float]], alarms: int) -> float:
    """Return the lowest threshold that at most `alarms` scores of the clean runs pass."""
    scores = sorted((score for run in runs for score in run), reverse=True)
    return scores[min(alarms, len(scores) - 1)]


def _first(scores: Sequence[float], limit: float) -> int | None:
    return next((i for i, score in enumerate(scores) if score > limit), None)


def _leads(branches: Sequence[Branch], name: str, limit: float) -> str:
    """Return the median number of steps from our alert to the opponent's, and how often it had none."""
    pairs = [(b.noticed, _first(getattr(b, name), limit)) for b in branches if b.noticed is not None]
    if not pairs:
        return "-"
    leads = [theirs - ours for ours, theirs in pairs if theirs is not None]
    missed = len(pairs) - len(leads)
    parts = [f"{median(leads):+g}"] if leads else []
    return ", ".join(parts + ([f"missed {missed} of {len(pairs)}"] if missed else []))


def show(summary: TrialSummary, console: Console) -> None:
    """Print the faults, which of them were reported, who noticed first, and the false alarms."""
    show_machine(console)
    table = Table(
        title="Faults in real training runs. A fault is visible if it makes D(S) or the Hilbert RMS twice or half"
        " that of a clean twin; otherwise it leaves no trace in the step.",
        title_justify="left",
    )
    for name in ("fault", "head"):
        table.add_column(name)
    for name in ("D(S) x", "visible", "reported at once", "loss spike after", "gradient spike after"):
        table.add_column(name, justify="right")
    for c in summary.cells:
        reported = f"{c.reported} of {c.visible}" if c.visible else "no trace"
        ratio = "not finite" if math.isnan(c.diameter_ratio) else f"{c.diameter_ratio:.2f}"
        table.add_row(c.fault, c.head, ratio, f"{c.visible} of {c.tried}", reported, c.lead_loss, c.lead_gradient)
    console.print(table)
    console.print(
        f"{summary.reported} of {summary.visible} visible faults reported in the very step; {len(summary.false_alarms)}"
        f" false alarms in {summary.measured:,} clean steps. The opponents' thresholds for as many: loss"
        f" {summary.thresholds['loss']:.2f}x, gradient norm {summary.thresholds['gradient']:.2f}x their medians."
    )
    for text in summary.false_alarms:
        console.print(f"false alarm: {text}", style="yellow")
    if summary.divergences:
        console.print(_divergence_table(summary.divergences))


def _divergence_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="A learning rate that grows until the loss is up by one: steps from the start of the growth")
    for name in ("head", "seed", "diverged", "our alert", "loss spike", "gradient spike"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*("never" if value is None else str(value) for value in row.values()))
    return table

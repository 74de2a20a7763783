"""What the runs of a sweep over diameters come to: a table of their final losses, read from their logs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hilbert_monitor.service.figures.diameter_curves import diameter_sweeps, multiple
from hilbert_monitor.service.figures.final_values import SampleStatistics
from hilbert_monitor.service.report import summary

from .output import show_machine


@dataclass(frozen=True)
class CurveRow:
    """One point: a curve at a diameter, over its seeds."""

    curve: str
    allowed: float
    """In multiples of RowNorm's ceiling; infinite for no limit."""
    loss: SampleStatistics
    """The final validation loss."""
    made: SampleStatistics
    """The median diameter of the steps that were made, in the same multiples."""

    def as_dict(self) -> dict[str, Any]:
        """Plain types, for JSON."""
        return {**asdict(self), "allowed": multiple(self.allowed)}


def summarize(runs: Path) -> list[CurveRow]:
    """Return the points of the runs in a folder, as the dashboard and the report have them."""
    (sweep,) = diameter_sweeps(run.series for run in summary.load(runs))
    return [
        CurveRow(name, point.allowed, point.loss, point.made)
        for name, points in sweep.curves.items()
        for point in points
    ]


def show(rows: Sequence[CurveRow], console: Console) -> None:
    """Print the losses: a row for each diameter, a column for each curve."""
    show_machine(console)
    curves = list(dict.fromkeys(row.curve for row in rows))
    table = Table(title="Final validation loss by the diameter allowed; in brackets, the diameter made", min_width=80)
    table.add_column("allowed")
    for curve in curves:
        table.add_column(curve, justify="right")
    cells = {(row.curve, row.allowed): row for row in rows}
    for allowed in sorted({row.allowed for row in rows}):
        table.add_row(multiple(allowed), *(_cell(cells.get((curve, allowed))) for curve in curves))
    console.print(table)


def _cell(row: CurveRow | None) -> str:
    if row is None or row.loss.mean is None:
        return ""
    deviation = "" if row.loss.deviation is None else f" ± {row.loss.deviation:.3f}"
    return f"{row.loss.mean:.3f}{deviation}" + ("" if row.made.mean is None else f" ({row.made.mean:.2g})")

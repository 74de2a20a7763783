"""What a report says of some runs, as CSV and JSON; `page` shows it. The CSV file of the curves has every value."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hilbert_monitor.runs.log import RunReader, RunState, find_runs
from hilbert_monitor.runs.metrics import CATALOGUE
from hilbert_monitor.runs.record import Alert, RunInfo
from hilbert_monitor.service.figures.comparison import (
    BASELINE,
    CANDIDATE,
    METRICS,
    Comparison,
    SampleStatistics,
    final_value,
)
from hilbert_monitor.service.figures.series import CURVES, RunSeries, read_run, read_table
from hilbert_monitor.service.following.columns import Table
from hilbert_monitor.service.following.published import PAPER, Figure
from hilbert_monitor.service.following.text import clip, csv_lines

METRIC_NAMES = {metric.field: metric.name for metric in CATALOGUE}
DASH, MINUS, TIMES = "\u2013", "\u2212", "\u00d7"


@dataclass(frozen=True, slots=True)
class Run:
    """What a report says of a run."""

    series: RunSeries
    info: RunInfo
    state: RunState
    alerts: tuple[Alert, ...] = ()
    worth: Mapping[str, float] = field(default_factory=dict)
    """What its steps were worth: means over the run, by field of a record."""


def load(root: str | os.PathLike[str]) -> list[Run]:
    """Read the runs under a folder, or the one whose folder it is; ValueError says what is missing."""
    if not Path(root).is_dir():
        raise ValueError(f"there is no folder '{root}': give the one that runs are logged to")
    readers = [RunReader(root)] if RunReader(root).attempts else find_runs(root)
    if not readers:
        raise ValueError(f"there are no runs in '{root}': train with HilbertMonitor(run_dir='{root}') first")
    return [_load(reader) for reader in readers]


def _load(reader: RunReader) -> Run:
    state, table = reader.state(), read_table(reader)
    return Run(read_run(reader, state, table), reader.info, state, tuple(reader.alerts()), dict(_worth(table)))


WORTH = ("efficiency_lower", "efficiency_upper", "moment_efficiency_lower", "moment_efficiency_upper", "gauge_waste")


def _worth(table: Table) -> Iterator[tuple[str, float]]:
    """Means of what was measured of the steps' worth."""
    for name in WORTH:
        values = table.column(name)
        if np.isfinite(values).any():
            yield name, float(values[np.isfinite(values)].mean())


def headline(comparison: Comparison) -> str:
    """A model's ratios and its difference in a line."""
    names = {"step_diameter": "row diameter", "perturbation_rms": "Hilbert RMS"}
    told = [
        f"{name} {ratio:,.1f}" for metric, name in names.items() if (ratio := comparison.ratios[metric]) is not None
    ]
    shown = f"{BASELINE} / {CANDIDATE}: {', '.join(told)}" if told else f"no ratio of {BASELINE} to {CANDIDATE}"
    mean = comparison.difference.mean
    return f"{clip(comparison.model, 60)}, {shown}" + (
        f"; {CANDIDATE} - {BASELINE}: loss {mean:+.4f}" if mean is not None else ""
    )


# JSON and CSV


def as_json(runs: Sequence[Run], comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """The report's numbers, by model; what does not exist is None."""
    return {
        "optimizers": {c.model: {name: _spreads(found) for name, found in c.optimizers.items()} for c in comparisons},
        "ratios": {c.model: c.ratios for c in comparisons},
        "paired_difference": {c.model: _paired(c) for c in comparisons},
        "notes": {c.model: list(c.notes) for c in comparisons},
        "runs": [_run_json(run, {r.id for c in comparisons for r in c.counted}) for run in runs],
    }


def write_json(runs: Sequence[Run], comparisons: Sequence[Comparison], path: Path) -> None:
    """Write the report's numbers as JSON."""
    path.write_text(json.dumps(as_json(runs, comparisons), indent=2, allow_nan=False) + "\n", encoding="utf-8")


def write_csv(comparisons: Sequence[Comparison], folder: Path) -> None:
    """Write table.csv and curves.csv into a folder, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    table = ("model", "optimizer", "metric", "runs", "mean", "deviation", "paper_mean", "paper_deviation")
    _write_rows(folder / "table.csv", table, (row for c in comparisons for row in _table_rows(c)))
    curves = ("model", "optimizer", "seed", "run", "metric", "step", "tokens", "value")
    _write_rows(folder / "curves.csv", curves, (row for c in comparisons for row in _curve_rows(c)))


def _spreads(found: dict[str, SampleStatistics]) -> dict[str, Any]:
    return {metric: {"mean": s.mean, "deviation": s.deviation, "runs": s.runs} for metric, s in found.items()}


def _paired(c: Comparison) -> dict[str, Any]:
    d = c.difference
    paired = {"mean": d.mean, "deviation": d.deviation, "pairs": d.runs}
    return {**paired, "below": c.below, "checkpoints": c.checkpoints}


def _run_json(run: Run, counted: set[str]) -> dict[str, Any]:
    s = run.series
    about = {"id": s.id, "name": s.name, "model": s.model, "optimizer": s.optimizer, "seed": s.seed}
    where = {"panel_hash": s.panel_hash, "status": s.status, "step": s.step, "error": run.state.error}
    values = {metric: _finite(final_value(s, metric)) for metric in METRICS}
    return {**about, **where, **values, "counted": s.id in counted, "alerts": len(run.alerts), "worth": {**run.worth}}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _table_rows(c: Comparison) -> Iterator[tuple[Any, ...]]:
    published = PAPER.get(c.model)
    for name, found in c.optimizers.items():
        for metric, s in found.items():
            paper = published.optimizers.get(name, {}).get(metric) if published else None
            yield c.model, name, metric, s.runs, s.mean, s.deviation, *_columns(paper)
    for metric, ratio in c.ratios.items():
        paper = published.ratios[metric] if published else None
        yield c.model, f"{BASELINE} / {CANDIDATE}", metric, None, ratio, None, *_columns(paper)
    d = c.difference
    paper = published.difference if published else None
    yield c.model, f"{CANDIDATE} - {BASELINE}", "validation_loss", d.runs, d.mean, d.deviation, *_columns(paper)


def _columns(paper: Figure | None) -> tuple[float | None, float | None]:
    return (paper.mean, paper.deviation) if paper else (None, None)


def _curve_rows(c: Comparison) -> Iterator[tuple[Any, ...]]:
    for run in (*c.counted, *c.excluded):
        for metric in CURVES:
            curve, name = run.curve(metric), METRIC_NAMES[metric]
            columns = (curve.steps.tolist(), curve.tokens.tolist(), curve.values.tolist())
            for step, tokens, value in zip(*columns, strict=True):
                known = None if math.isnan(tokens) else int(tokens)
                yield run.model, run.optimizer, run.seed, run.id, name, step, known, value


def _write_rows(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        file.writelines(csv_lines(header, rows))

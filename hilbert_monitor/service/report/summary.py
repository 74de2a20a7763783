"""Load runs for a report, and write its numbers as CSV and JSON. The HTML page is in `page`."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hilbert_monitor.runs.run import Run, load_runs
from hilbert_monitor.service.figures.comparison import BASELINE, CANDIDATE, Comparison
from hilbert_monitor.service.figures.contrasts import Contrast
from hilbert_monitor.service.figures.final_values import METRIC_NAMES, METRICS, SampleStatistics, final_value
from hilbert_monitor.service.figures.series import CURVES
from hilbert_monitor.service.following.published import PAPER, Published
from hilbert_monitor.service.following.published import Figure as PublishedFigure
from hilbert_monitor.service.following.text import clip, csv_lines

from .sides import sides

EFFICIENCY_FIELDS = (
    "efficiency_lower",
    "efficiency_upper",
    "moment_efficiency_lower",
    "moment_efficiency_upper",
    "gauge_waste",
)
"""The fields of a StepRecord that say how well a step uses its diameter."""


def load(root: str | os.PathLike[str]) -> list[Run]:
    """Read the runs in a folder, or the single run whose folder it is.

    Raises:
        ValueError: there is no such folder, or no run in it.
    """
    runs = load_runs(root)
    if not runs:
        raise ValueError(f"there are no runs in '{root}': train with HilbertMonitor(run_dir='{root}') first")
    return runs


def efficiency(run: Run) -> dict[str, float]:
    """Return the means over a run of those EFFICIENCY_FIELDS that were measured."""
    columns = {name: run.table.column(name) for name in EFFICIENCY_FIELDS}
    finite = {name: values[np.isfinite(values)] for name, values in columns.items()}
    return {name: float(values.mean()) for name, values in finite.items() if len(values)}


def headline(comparison: Comparison) -> str:
    """The ratios of a model and its difference in validation loss, in a line for each setting; and what else differs.

    Without a ratio it has the final values of each group.
    """
    contrasts = comparison.contrasts
    lines = [_contrast_line(contrast, is_only=len(contrasts) == 1) for contrast in contrasts]
    lines = lines or list(_group_lines(comparison))
    text = "\n".join(f"{clip(comparison.model, 60)}, {line}" for line in lines)
    return f"{text}\n{comparison.about}" if comparison.about else text


RATIO_NAMES = {"step_diameter": "row diameter", "perturbation_rms": "Hilbert RMS"}


def _contrast_line(contrast: Contrast, *, is_only: bool) -> str:
    a, b, shared = sides(contrast)
    ratios = [
        f"{name} {ratio:,.1f}" for metric, name in RATIO_NAMES.items() if (ratio := contrast.ratios[metric]) is not None
    ]
    text = f"{a} / {b}{shared}: {', '.join(ratios)}" if ratios else f"no ratio of {a} to {b}{shared}"
    difference = contrast.difference.mean
    if difference is None:
        return text
    return f"{text}; {b} - {a}: loss {difference:+.4f}" if is_only else f"{text}; loss {difference:+.4f}"


def _group_lines(comparison: Comparison) -> Iterator[str]:
    names = {"validation_loss": "validation loss", **RATIO_NAMES}
    for group, metrics in comparison.optimizers.items():
        means = [f"{text} {mean:.4g}" for name, text in names.items() if (mean := metrics[name].mean) is not None]
        yield f"{group}: {', '.join(means) or 'no value yet'}"


# JSON


def as_json(runs: Sequence[Run], comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """The numbers of the report, by model. A number that does not exist is None."""
    counted = {run.id for c in comparisons for run in c.counted}
    return {
        "optimizers": {c.model: {name: _metrics_json(m) for name, m in c.optimizers.items()} for c in comparisons},
        "ratios": {c.model: c.ratios for c in comparisons},
        "paired_difference": {c.model: _difference_json(c.contrast) for c in comparisons},
        "contrasts": {c.model: [_contrast_json(contrast) for contrast in c.contrasts] for c in comparisons},
        "about": {c.model: c.about for c in comparisons},
        "notes": {c.model: list(c.notes) for c in comparisons},
        "runs": [_run_json(run, counted=run.id in counted) for run in runs],
    }


def write_json(runs: Sequence[Run], comparisons: Sequence[Comparison], path: Path) -> None:
    """Write the numbers of the report to a JSON file."""
    path.write_text(json.dumps(as_json(runs, comparisons), indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _metrics_json(metrics: dict[str, SampleStatistics]) -> dict[str, Any]:
    return {name: {"mean": s.mean, "deviation": s.deviation, "runs": s.runs} for name, s in metrics.items()}


def _contrast_json(c: Contrast) -> dict[str, Any]:
    sides = {"baseline": c.baseline, "candidate": c.candidate, "differs": c.differs}
    return {**sides, "ratios": c.ratios, "paired_difference": _difference_json(c)}


def _difference_json(c: Contrast) -> dict[str, Any]:
    d = c.difference
    statistics = {"mean": d.mean, "deviation": d.deviation, "pairs": d.runs}
    return {**statistics, "below": c.below, "checkpoints": c.checkpoints}


def _run_json(run: Run, *, counted: bool) -> dict[str, Any]:
    finals = {metric: _finite(final_value(run, metric)) for metric in METRICS}
    return {
        "id": run.id,
        "name": run.name,
        "model": run.model,
        "optimizer": run.optimizer,
        "seed": run.seed,
        "panel_hash": run.info.panel_hash,
        "status": run.status,
        "step": run.step,
        "error": run.problem or run.state.error,
        **finals,
        "counted": counted,
        "alerts": len(run.alerts),
        "worth": efficiency(run),
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


# CSV


def write_csv(comparisons: Sequence[Comparison], folder: Path) -> None:
    """Write table.csv, the paper's table, and curves.csv, every value of every curve, into a folder.

    The folder is created if it does not exist.
    """
    folder.mkdir(parents=True, exist_ok=True)
    table = ("model", "optimizer", "metric", "runs", "mean", "deviation", "paper_mean", "paper_deviation")
    _write_rows(folder / "table.csv", table, (row for c in comparisons for row in _table_rows(c)))
    curves = ("model", "optimizer", "seed", "run", "metric", "step", "tokens", "value")
    _write_rows(folder / "curves.csv", curves, (row for c in comparisons for row in _curve_rows(c)))


def _table_rows(c: Comparison) -> Iterator[tuple[Any, ...]]:
    published = PAPER.get(c.model)
    for name, metrics in c.optimizers.items():
        for metric, s in metrics.items():
            paper = published.optimizers.get(name, {}).get(metric) if published else None
            yield c.model, name, metric, s.runs, s.mean, s.deviation, *_paper_cells(paper)
    for contrast in c.contrasts:
        yield from _contrast_rows(c.model, contrast, published)


def _contrast_rows(model: str, contrast: Contrast, published: Published | None) -> Iterator[tuple[Any, ...]]:
    a, b, d = contrast.baseline, contrast.candidate, contrast.difference
    if (a, b) != (BASELINE, CANDIDATE):
        published = None
    for metric, ratio in contrast.ratios.items():
        paper = published.ratios[metric] if published else None
        yield model, f"{a} / {b}", metric, None, ratio, None, *_paper_cells(paper)
    paper = published.difference if published else None
    yield model, f"{b} - {a}", "validation_loss", d.runs, d.mean, d.deviation, *_paper_cells(paper)


def _paper_cells(paper: PublishedFigure | None) -> tuple[float | None, float | None]:
    return (paper.mean, paper.deviation) if paper else (None, None)


def _curve_rows(c: Comparison) -> Iterator[tuple[Any, ...]]:
    for run in (*c.counted, *c.excluded):
        for field_name in CURVES:
            curve, metric = run.curve(field_name), METRIC_NAMES[field_name]
            columns = (curve.steps.tolist(), curve.tokens.tolist(), curve.values.tolist())
            for step, tokens, value in zip(*columns, strict=True):
                whole_tokens = None if math.isnan(tokens) else int(tokens)
                yield run.model, run.optimizer, run.seed, run.id, metric, step, whole_tokens, value


def _write_rows(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        file.writelines(csv_lines(header, rows))

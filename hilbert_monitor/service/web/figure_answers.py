"""Answers with figures: of one run, and of runs that are compared."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from hilbert_monitor.runs.json_values import plain
from hilbert_monitor.service.figures import compare_figures, compare_tables, run_figures
from hilbert_monitor.service.figures.comparison import Comparison, SampleStatistics, axes, compare
from hilbert_monitor.service.figures.plot_options import PlotOptions
from hilbert_monitor.service.figures.series import RunSeries, RunSeriesCache
from hilbert_monitor.service.following.snapshot import RunSnapshot, model_of
from hilbert_monitor.service.following.text import csv_lines

from .answers import newest, stamp


class Choice(NamedTuple):
    """The runs that are compared, all of one model."""

    models: dict[str, int]
    """All models, with their numbers of runs."""
    model: str | None
    runs: tuple[RunSnapshot, ...]
    unknown: tuple[str, ...]
    """Ids that were asked for and that no run has."""

    @property
    def versions(self) -> tuple[Any, ...]:
        """A key that changes whenever the answer about these runs does."""
        return self.model, tuple(self.models.items()), self.unknown, tuple(map(stamp, self.runs))


def choose(index: Mapping[str, RunSnapshot], model: str = "", ids: Collection[str] = ()) -> Choice:
    """Choose the runs to compare: those of a model, by default that of the newest run.

    Args:
        index: all runs.
        model: name of the model; empty for the default.
        ids: of the runs to choose from; empty for all.
    """
    candidates = [index[id] for id in dict.fromkeys(ids) if id in index] if ids else index.values()
    usable = [run for run in candidates if run.attempts and (len(run.table) or not run.problem)]
    models: dict[str, int] = {}
    for run in usable:
        name = model_of(run.info)
        models[name] = models.get(name, 0) + 1
    last = max(usable, key=newest, default=None)
    chosen = model or (model_of(last.info) if last else None)
    return Choice(
        models=dict(sorted(models.items())),
        model=chosen,
        runs=tuple(run for run in usable if model_of(run.info) == chosen),
        unknown=tuple(id for id in dict.fromkeys(ids) if id not in index),
    )


class FigureAnswers:
    """Draws runs. The series of a run are loaded once as long as the run does not change."""

    def __init__(self) -> None:
        self._loaded, self._lock = RunSeriesCache(), threading.Lock()

    def of_run(self, run: RunSnapshot, options: PlotOptions) -> dict[str, Any]:
        """The figures of one run."""
        drawn = run_figures.figures(run.table, run.info, run.attempts, run.alerts, options)
        return {"id": run.id, "version": run.version, "figures": drawn}

    def run_csv(self, run: RunSnapshot, panel: str, options: PlotOptions) -> Iterator[str]:
        """Every value of the curves of a run's panel."""
        return csv_lines(*run_figures.curves(panel, run.table, run.info, run.attempts, options))

    def compared(self, choice: Choice, options: PlotOptions, version: int) -> dict[str, Any]:
        """The runs of one model, compared."""
        comparison = self._compare(choice)
        answer: dict[str, Any] = {
            "models": [{"name": name, "runs": count} for name, count in choice.models.items()],
            "model": choice.model,
            "version": version,
            **_numbers(comparison, choice),
        }
        return {**plain(answer), "figures": _figures(comparison, options) if comparison else {}}

    def compared_csv(self, choice: Choice, panel: str, options: PlotOptions) -> Iterator[str]:
        """Every value of the curves of a panel."""
        comparison = self._compare(choice)
        runs, excluded = _drawn_runs(comparison) if comparison else ([], set())
        return csv_lines(*compare_tables.panel_table(panel, runs, options, excluded))

    def forget_others(self, ids: Collection[str]) -> None:
        """Free the series of all runs but these."""
        with self._lock:
            self._loaded.keep_only(ids)

    def _compare(self, choice: Choice) -> Comparison | None:
        with self._lock:
            series = [self._load(run) for run in choice.runs]
        return next(iter(compare(series, live=True)), None)

    def _load(self, run: RunSnapshot) -> RunSeries:
        return self._loaded.get(run.id, run.info, run.state, run.table, run.attempts[0].started)


def _drawn_runs(comparison: Comparison) -> tuple[Sequence[RunSeries], set[str]]:
    """All runs of a comparison, and the ids of those that are in no mean."""
    return [*comparison.counted, *comparison.excluded], {run.id for run in comparison.excluded}


def _figures(comparison: Comparison, options: PlotOptions) -> dict[str, Any]:
    runs, excluded = _drawn_runs(comparison)
    return {name: panel(runs, options, excluded) for name, panel in compare_figures.PANELS.items()}


def _numbers(comparison: Comparison | None, choice: Choice) -> dict[str, Any]:
    notes = [f"There is no run '{id[:100]}' any more, or not yet." for id in choice.unknown[:20]]
    if comparison is None:
        nothing: dict[str, Any] = {"optimizers": {}, "ratios": {}, "difference": None, "pairs": [], "counted": []}
        return {**nothing, "notes": notes, "aside": [], "axes": ["updates"]}
    runs, _ = _drawn_runs(comparison)
    return {
        "optimizers": {
            name: {metric: _spread(spread) for metric, spread in spreads.items()}
            for name, spreads in comparison.optimizers.items()
        },
        "ratios": {
            name: {"now": now.ratio, "step": now.step, "pairs": now.pairs}
            for name, now in comparison.current_ratios.items()
        },
        "difference": {
            "mean": comparison.difference.mean,
            "deviation": comparison.difference.deviation,
            "pairs": comparison.difference.runs,
            "below": comparison.below,
            "checkpoints": comparison.checkpoints,
        },
        "notes": [*notes, *comparison.notes],
        "pairs": comparison.pairs,
        "counted": [run.id for run in comparison.counted],
        "aside": [run.id for run in comparison.excluded],
        "axes": axes(runs),
    }


def _spread(spread: SampleStatistics) -> dict[str, Any]:
    return {"mean": spread.mean, "deviation": spread.deviation, "runs": spread.runs}

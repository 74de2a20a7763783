"""Answers with figures: of one run, and of runs that are compared."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from hilbert_monitor.runs.files import to_json
from hilbert_monitor.runs.run import Run
from hilbert_monitor.service.figures import compare_figures, compare_tables, run_figures
from hilbert_monitor.service.figures.axes import axes, with_axis
from hilbert_monitor.service.figures.comparison import Comparison, compare
from hilbert_monitor.service.figures.contrasts import Contrast
from hilbert_monitor.service.figures.final_values import SampleStatistics
from hilbert_monitor.service.figures.looks import looks
from hilbert_monitor.service.figures.plot_options import Choices, PlotOptions
from hilbert_monitor.service.following.text import csv_lines

from .answers import newest, stamp

NOTHING = Comparison(model="", groups=(), optimizers={}, contrasts=(), excluded=(), notes=())
"""The comparison of no runs."""


class Choice(NamedTuple):
    """The runs that are compared, all of one model."""

    models: dict[str, int]
    """All models, with their numbers of runs."""
    model: str | None
    runs: tuple[Run, ...]
    unknown: tuple[str, ...]
    """Ids that were asked for and that no run has."""

    @property
    def versions(self) -> tuple[Any, ...]:
        """A key that changes whenever the answer about these runs does."""
        return self.model, tuple(self.models.items()), self.unknown, tuple(map(stamp, self.runs))


def choose(index: Mapping[str, Run], model: str = "", ids: Collection[str] = ()) -> Choice:
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
        name = run.model
        models[name] = models.get(name, 0) + 1
    last = max(usable, key=newest, default=None)
    chosen = model or (last.model if last else None)
    return Choice(
        models=dict(sorted(models.items())),
        model=chosen,
        runs=tuple(run for run in usable if run.model == chosen),
        unknown=tuple(id for id in dict.fromkeys(ids) if id not in index),
    )


class FigureAnswers:
    """Draws runs."""

    def of_run(self, run: Run, options: PlotOptions) -> dict[str, Any]:
        """The figures of one run."""
        drawn = run_figures.figures(run, options)
        return {"id": run.id, "version": run.version, "figures": drawn}

    def run_csv(self, run: Run, panel: str, options: PlotOptions) -> Iterator[str]:
        """Every value of the curves of a run's panel."""
        return csv_lines(*run_figures.curves(panel, run, options))

    def compared(self, choice: Choice, options: PlotOptions, choices: Choices, version: int) -> dict[str, Any]:
        """The runs of one model, compared."""
        comparison = self._compare(choice, choices)
        answer: dict[str, Any] = {
            "models": [{"name": name, "runs": count} for name, count in choice.models.items()],
            "model": choice.model,
            "version": version,
            **_numbers(comparison, choice),
        }
        return {**to_json(answer), "figures": _figures(comparison, options, choices) if comparison.groups else {}}

    def compared_csv(self, choice: Choice, panel: str, options: PlotOptions, choices: Choices) -> Iterator[str]:
        """Every value of the curves of a panel."""
        return csv_lines(*compare_tables.panel_table(panel, self._compare(choice, choices), options))

    def _compare(self, choice: Choice, choices: Choices) -> Comparison:
        return next(iter(compare(choice.runs, live=True, choices=choices)), NOTHING)


def _figures(comparison: Comparison, options: PlotOptions, choices: Choices) -> dict[str, Any]:
    options = with_axis(options, comparison.runs)
    figures = {name: draw(comparison, options) for name, draw in compare_figures.PANELS.items()}
    return figures | {name: compare_figures.metric_panel(name)(comparison, options) for name in choices.panels}


def _numbers(comparison: Comparison, choice: Choice) -> dict[str, Any]:
    notes = [f"There is no run '{id[:100]}' any more, or not yet." for id in choice.unknown[:20]]
    contrast = comparison.contrast
    return {
        "optimizers": {
            name: {metric: spread_answer(spread) for metric, spread in spreads.items()}
            for name, spreads in comparison.optimizers.items()
        },
        **(_contrast(contrast) if comparison.groups else {"ratios": {}, "difference": None}),
        "contrasts": [
            {"baseline": one.baseline, "candidate": one.candidate, "differs": one.differs, **_contrast(one)}
            for one in comparison.contrasts
        ],
        "sides": comparison.sides,
        "groups": _groups(comparison),
        "about": comparison.about,
        "keys": comparison.keys,
        "notes": [*notes, *comparison.notes],
        "pairs": comparison.pairs,
        "counted": [run.id for run in comparison.counted],
        "aside": [run.id for run in comparison.excluded],
        "axes": axes(comparison.runs) if comparison.groups else ["updates"],
        "measured": _measured(comparison.runs),
    }


def _groups(comparison: Comparison) -> list[dict[str, Any]]:
    how = looks(comparison.groups)
    return [
        {
            "name": group.name,
            "optimizer": group.optimizer,
            "colour": how[group.name].colour,
            "runs": [run.id for run in group.runs],
        }
        for group in comparison.groups
    ]


def _measured(runs: Collection[Run]) -> list[str]:
    """The metrics that some run has, by field."""
    columns = {name for run in runs for name in run.table.columns}
    return [field for field, metric in compare_figures.METRIC_PANELS.items() if {*metric.fields} <= columns]


def _contrast(contrast: Contrast) -> dict[str, Any]:
    return {
        "ratios": {
            name: {"now": now.ratio, "step": now.step, "pairs": now.pairs}
            for name, now in contrast.current_ratios.items()
        },
        "difference": {
            "mean": contrast.difference.mean,
            "deviation": contrast.difference.deviation,
            "pairs": contrast.difference.runs,
            "below": contrast.below,
            "checkpoints": contrast.checkpoints,
        },
    }


def spread_answer(spread: SampleStatistics) -> dict[str, Any]:
    """A mean over seeds, and its spread."""
    return {"mean": spread.mean, "deviation": spread.deviation, "runs": spread.runs}

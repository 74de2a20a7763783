"""Every value behind a figure that compares runs, as the rows of a table. Nothing is downsampled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hilbert_monitor.runs.run import Run
from hilbert_monitor.runs.table import Floats

from . import style
from .averages import mean_curve
from .axes import with_axis
from .comparison import Comparison
from .contrasts import RATIO_CURVES, Contrast, pair_ratios
from .final_values import same_panel
from .grouping import Group
from .plot_options import PLAIN, Axis, PlotOptions
from .series import smoothed

PANEL_CURVES = {
    "loss": ("validation_loss", "train_loss"),
    "diameter": ("diameter",),
    "perturbation": ("perturbation_rms",),
}
"""The curves of each panel but that of the ratios and those of one metric."""
X_COLUMNS: tuple[Axis, ...] = ("updates", "tokens", "time")
"""The axes of the columns step, tokens and hours."""
COLUMNS = ("optimizer", "run", "seed", "metric", "step", "tokens", "hours", "value", "smoothed", "deviation", "runs")
RATIO_COLUMNS = ("metric", "step", "tokens", "hours", "ratio", "smoothed", "pairs", "baseline", "candidate")
Row = tuple[Any, ...]


def panel_table(
    panel: str, comparison: Comparison, options: PlotOptions = PLAIN
) -> tuple[tuple[str, ...], Iterator[Row]]:
    """The header and the rows of a panel's table, with every value in the visible range.

    The column "optimizer" has the name of a mean's group: the optimizer, and the settings that groups differ in.

    Args:
        panel: one of `compare_figures.PANELS`, or a field of `compare_figures.METRIC_PANELS`.
        comparison: the runs of one model.
        options: those of the figure. If they draw means, the means of a metric follow its runs.
    """
    options = with_axis(options, comparison.runs)
    if panel == "ratio":
        pairs = ((contrast, name) for name in RATIO_CURVES for contrast in comparison.contrasts)
        return RATIO_COLUMNS, (row for contrast, name in pairs for row in _ratio_rows(contrast, name, options))
    return COLUMNS, _panel_rows(PANEL_CURVES.get(panel, (panel,)), comparison, options)


def _panel_rows(names: Sequence[str], comparison: Comparison, options: PlotOptions) -> Iterator[Row]:
    counted = {run.id for run in comparison.counted}
    for name in names:
        for run in comparison.runs:
            yield from _run_rows(run, name, options)
        for group in comparison.groups if options.group == "optimizer" else ():
            runs = [run for run in group.runs if run.id in counted]
            if name != "perturbation_rms" or same_panel(runs):
                yield from _mean_rows(group, runs, name, options)


def _run_rows(run: Run, name: str, options: PlotOptions) -> Iterator[Row]:
    curve = run.curve(name).with_x(options.x_axis)
    rows = style.inside(curve.x(options.x_axis), options)
    averages = _column(smoothed(curve, options.smooth)[rows] if options.smooth else None, len(rows))
    hours = _column(curve.x("time")[rows] if curve.has_x("time") else None, len(rows))
    tokens = [None if number is None else int(number) for number in style.numbers(curve.tokens[rows])]
    columns = (curve.steps[rows].tolist(), tokens, hours, curve.values[rows].tolist(), averages)
    for row in zip(*columns, strict=True):
        yield run.optimizer, run.id, run.seed, name, *row, None, None


def _mean_rows(group: Group, runs: Sequence[Run], name: str, options: PlotOptions) -> Iterator[Row]:
    curves, axis, smooth = [run.curve(name) for run in runs], options.x_axis, options.smooth
    means = mean_curve(curves, axis)
    rows = style.inside(means.x, options)
    smoothed = mean_curve(curves, axis, smooth=smooth, spread=False).mean[rows] if smooth else None
    columns = (
        style.numbers(means.mean[rows]),
        _column(smoothed, len(rows)),
        style.numbers(means.deviation[rows]),
        means.runs[rows].tolist(),
    )
    for x, *row in zip(means.x[rows].tolist(), *columns, strict=True):
        yield group.name, "mean", None, name, *_x_cells(x, axis), *row


def _ratio_rows(contrast: Contrast, name: str, options: PlotOptions) -> Iterator[Row]:
    axis, smooth, pairs = options.x_axis, options.smooth, contrast.pairs
    ratios = pair_ratios(pairs, name, axis)
    rows = style.inside(ratios.x, options)
    smoothed = pair_ratios(pairs, name, axis, smooth).ratio[rows] if smooth else None
    columns = (style.numbers(ratios.ratio[rows]), _column(smoothed, len(rows)), ratios.pairs[rows].tolist())
    for x, *row in zip(ratios.x[rows].tolist(), *columns, strict=True):
        yield name, *_x_cells(x, axis), *row, contrast.baseline, contrast.candidate


def _column(values: Floats | None, length: int) -> list[float | None]:
    """The cells of a column, empty ones if there is no value."""
    return [None] * length if values is None else style.numbers(values)


def _x_cells(x: float, axis: Axis) -> tuple[float | None, ...]:
    """The cells of step, tokens and hours, of which only that of the axis is filled."""
    value = x if axis == "time" else int(x)
    return tuple(value if column == axis else None for column in X_COLUMNS)

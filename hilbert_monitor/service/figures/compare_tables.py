"""Every value behind a figure that compares runs, as the rows of a table. Nothing is downsampled."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from hilbert_monitor.service.following.columns import Floats

from . import style
from .averages import mean_curve
from .comparison import RATIO_CURVES, Pair, by_optimizer, pair_ratios, pair_up, same_panel, with_axis
from .plot_options import PLAIN, Axis, PlotOptions
from .series import RunSeries

PANEL_CURVES = {
    "loss": ("validation_loss", "train_loss"),
    "diameter": ("diameter",),
    "perturbation": ("perturbation_rms",),
}
"""The curves of each panel but that of the ratios."""
X_COLUMNS: tuple[Axis, ...] = ("updates", "tokens", "time")
"""The axes of the columns step, tokens and hours."""
COLUMNS = ("optimizer", "run", "seed", "metric", "step", "tokens", "hours", "value", "smoothed", "deviation", "runs")
RATIO_COLUMNS = ("metric", "step", "tokens", "hours", "ratio", "smoothed", "pairs")
Row = tuple[Any, ...]


def panel_table(
    panel: str, runs: Sequence[RunSeries], options: PlotOptions = PLAIN, excluded: Collection[str] = ()
) -> tuple[tuple[str, ...], Iterator[Row]]:
    """The header and the rows of a panel's table, with every value in the visible range.

    Args:
        panel: one of `compare_figures.PANELS`.
        runs: runs of one model.
        options: those of the figure. If they group by optimizer, the means of a metric follow its runs.
        excluded: ids of runs that enter no mean.
    """
    options = with_axis(options, runs)
    counted = [run for run in runs if run.id not in excluded]
    if panel == "ratio":
        pairs = pair_up(counted)
        return RATIO_COLUMNS, (row for name in RATIO_CURVES for row in _ratio_rows(pairs, name, options))
    return COLUMNS, _panel_rows(PANEL_CURVES[panel], runs, counted, options)


def _panel_rows(
    names: Sequence[str], runs: Sequence[RunSeries], counted: Sequence[RunSeries], options: PlotOptions
) -> Iterator[Row]:
    for name in names:
        for run in runs:
            yield from _run_rows(run, name, options)
        for optimizer, group in by_optimizer(counted).items() if options.group == "optimizer" else ():
            if name != "perturbation_rms" or same_panel(group):
                yield from _mean_rows(optimizer, group, name, options)


def _run_rows(run: RunSeries, name: str, options: PlotOptions) -> Iterator[Row]:
    curve = run.curve(name).with_x(options.x_axis)
    rows = style.inside(curve.x(options.x_axis), options)
    smoothed = _column(curve.smoothed(options.smooth)[rows] if options.smooth else None, len(rows))
    hours = _column(curve.x("time")[rows] if curve.has_x("time") else None, len(rows))
    tokens = [None if number is None else int(number) for number in style.numbers(curve.tokens[rows])]
    columns = (curve.steps[rows].tolist(), tokens, hours, curve.values[rows].tolist(), smoothed)
    for row in zip(*columns, strict=True):
        yield run.optimizer, run.id, run.seed, name, *row, None, None


def _mean_rows(optimizer: str, group: Sequence[RunSeries], name: str, options: PlotOptions) -> Iterator[Row]:
    curves, axis, smooth = [run.curve(name) for run in group], options.x_axis, options.smooth
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
        yield optimizer, "mean", None, name, *_x_cells(x, axis), *row


def _ratio_rows(pairs: Sequence[Pair], name: str, options: PlotOptions) -> Iterator[Row]:
    axis, smooth = options.x_axis, options.smooth
    ratios = pair_ratios(pairs, name, axis)
    rows = style.inside(ratios.x, options)
    smoothed = pair_ratios(pairs, name, axis, smooth).ratio[rows] if smooth else None
    columns = (style.numbers(ratios.ratio[rows]), _column(smoothed, len(rows)), ratios.pairs[rows].tolist())
    for x, *row in zip(ratios.x[rows].tolist(), *columns, strict=True):
        yield name, *_x_cells(x, axis), *row


def _column(values: Floats | None, length: int) -> list[float | None]:
    """The cells of a column, empty ones if there is no value."""
    return [None] * length if values is None else style.numbers(values)


def _x_cells(x: float, axis: Axis) -> tuple[float | None, ...]:
    """The cells of step, tokens and hours, of which only that of the axis is filled."""
    value = x if axis == "time" else int(x)
    return tuple(value if column == axis else None for column in X_COLUMNS)

"""Figures that compare runs: RunSeries in, plotly figures as plain dicts out. No file is read or written.

Runs are grouped by the optimizer of their LM head. A group of several runs is drawn as its mean, with a band of one
sample standard deviation; on request with the line of each run behind it. A single run is drawn as a line. The options
may also ask for one line per run, without means.

- Smoothing is applied to each run before the mean is taken. The unsmoothed curve is drawn behind, faint, so that
  smoothing hides nothing.
- On a logarithmic axis a value that is not positive is a gap. The lower edge of a band stays positive there: it is at
  least half the smallest value of the runs.
- A trace has at most 2,000 points, see `downsampling`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import numpy as np

from hilbert_monitor.service.following.columns import Floats
from hilbert_monitor.service.following.text import label

from . import style
from .averages import MeanCurve, mean_curve
from .comparison import BASELINE, CANDIDATE, Pair, by_optimizer, pair_ratios, pair_up, same_panel, with_axis
from .downsampling import POINTS, downsample
from .plot_options import PLAIN, PlotOptions
from .series import RunSeries, Series
from .style import Figure, Trace, colour, template

__all__ = ["PANELS", "diameter", "loss", "perturbation", "ratio", "template"]

FAINT = 0.35
"""Opacity of the lines behind a mean or a smoothed line."""
LEGEND_RUNS = 24
"""The largest number of runs that the legend names one by one. If there are more it names the optimizers."""
RATIO_STYLES = {"diameter": ("D(S)", "#8A6FD1", "solid"), "perturbation_rms": ("Hilbert RMS", "#009E73", "dot")}
"""The curves that have a ratio, and the name, colour and dash of each ratio."""


def loss(runs: Sequence[RunSeries], options: PlotOptions = PLAIN, excluded: Collection[str] = ()) -> Figure:
    """The validation loss, and the training loss as a thinner line.

    Args:
        runs: runs of one model.
        options: how to draw them.
        excluded: ids of runs that are drawn but enter no mean.
    """
    options, log = with_axis(options, runs), options.logarithmic(False)
    unsmoothed = replace(options, smooth=0.0)  # validation losses are few, and smooth by themselves
    traces = _training_traces(runs, options, excluded, log=log)
    traces += _metric_traces(runs, "validation_loss", unsmoothed, excluded, log=log)
    style.name_groups(traces)
    losses = [curve for run in runs for curve in (run.validation_loss, run.train_loss)]
    y_range = None if log else style.late_range(losses, options)
    return style.figure("Loss", traces, options, log=log, **({"range": y_range} if y_range else {}))


def diameter(runs: Sequence[RunSeries], options: PlotOptions = PLAIN, excluded: Collection[str] = ()) -> Figure:
    """The row diameter D(S) of the step, by default on a logarithmic axis. Arguments as for `loss`."""
    options, log = with_axis(options, runs), options.logarithmic(True)
    traces = style.name_groups(_metric_traces(runs, "diameter", options, excluded, log=log))
    return style.figure("Row diameter D(S)", traces, options, log=log)


def perturbation(runs: Sequence[RunSeries], options: PlotOptions = PLAIN, excluded: Collection[str] = ()) -> Figure:
    """The Hilbert RMS perturbation of the panel, by default on a logarithmic axis. Arguments as for `loss`.

    Runs with different panels have no mean.
    """
    options, log = with_axis(options, runs), options.logarithmic(True)
    traces = style.name_groups(_metric_traces(runs, "perturbation_rms", options, excluded, log=log))
    return style.figure("Hilbert RMS", traces, options, log=log)


def ratio(runs: Sequence[RunSeries], options: PlotOptions = PLAIN, excluded: Collection[str] = ()) -> Figure:
    """AdamW's mean over RowNorm's, of D(S) and of Hilbert RMS, over the pairs. Arguments as for `loss`.

    Without a pair the figure has no trace.
    """
    options, log = with_axis(options, runs), options.logarithmic(False)
    pairs = pair_up(run for run in runs if run.id not in excluded)
    traces = style.name_groups([trace for name in RATIO_STYLES for trace in _ratio_traces(pairs, name, options)])
    yaxis = {} if log else {"rangemode": "tozero"}
    return style.figure(f"{BASELINE} / {CANDIDATE}", traces, options, log=log, **yaxis)


PANELS: dict[str, Callable[..., Figure]] = {
    "loss": loss,
    "diameter": diameter,
    "perturbation": perturbation,
    "ratio": ratio,
}


# Lines of single runs


def _metric_traces(
    runs: Sequence[RunSeries], name: str, options: PlotOptions, excluded: Collection[str], *, log: bool
) -> list[Trace]:
    """All traces of a metric: means and bands of the groups, and the lines of runs that are asked for."""
    runs = [run for run in runs if len(run.curve(name))]
    if options.group == "run":
        return _traces_by_run(runs, name, options, excluded, log=log)
    traces: list[Trace] = []
    for optimizer, group in by_optimizer(runs).items():
        counted = [run for run in group if run.id not in excluded]
        has_mean = len(counted) > 1 and (name != "perturbation_rms" or same_panel(counted))
        for run in group:
            if not has_mean and run.id not in excluded:
                traces += _run_lines(run, name, options, len(runs), log=log)
            elif options.seeds or not has_mean:
                traces.append(_faint_line(run, name, options, len(runs), log=log, excluded=run.id in excluded))
        if has_mean:
            traces += _mean_traces(optimizer, [run.curve(name) for run in counted], options, log=log)
    return traces


def _traces_by_run(
    runs: Sequence[RunSeries], name: str, options: PlotOptions, excluded: Collection[str], *, log: bool
) -> list[Trace]:
    """A line for each run, in a shade of its optimizer's colour. It has a legend entry of its own if there is room."""
    traces: list[Trace] = []
    for optimizer, group in by_optimizer(runs).items():
        for number, run in enumerate(group):
            color, dash = style.shade(colour(optimizer), number)
            for trace in _run_lines(run, name, options, len(runs), log=log):
                width = min(trace["line"]["width"], 1.75)
                trace["line"] = {"color": color, "width": width, "dash": "dot" if run.id in excluded else dash}
                if len(runs) <= LEGEND_RUNS:
                    trace |= {"name": label(run.label), "legendgroup": label(run.id, 200)}
                traces.append(trace)
    return traces


def _run_lines(run: RunSeries, name: str, options: PlotOptions, line_count: int, *, log: bool) -> list[Trace]:
    """One run's line; if it is smoothed, the unsmoothed curve comes first, faint.

    Args:
        run: the run.
        name: the curve.
        options: how to draw it.
        line_count: the number of lines in the figure, which limits the points of each.
        log: whether the y axis is logarithmic.
    """
    line = style.line(run.curve(name), options, log=log, points=_points(line_count), smooth=options.smooth)
    line |= _run_labels(run) | {"opacity": 1.0, "line": {"color": colour(run.optimizer), "width": 2.5}}
    if not options.smooth:
        return [line]
    return [_faint_line(run, name, options, line_count, log=log, excluded=False) | {"hoverinfo": "skip"}, line]


def _faint_line(
    run: RunSeries, name: str, options: PlotOptions, line_count: int, *, log: bool, excluded: bool
) -> Trace:
    """One run's curve, unsmoothed and faint; dotted if the run enters no mean."""
    trace = style.line(run.curve(name), options, log=log, points=_points(line_count)) | _run_labels(run)
    if excluded:
        trace["meta"] += f", {label(run.status)}"
    trace["line"] = {"color": colour(run.optimizer), "width": 1, "dash": "dot" if excluded else "solid"}
    return trace | {"opacity": FAINT}


def _run_labels(run: RunSeries) -> Trace:
    """A run's legend group and the name in its hover text."""
    seed = f"seed {run.seed}" if run.seed is not None else "no seed"
    return _legend_group(label(run.optimizer)) | {"meta": f"{label(run.label)}, {seed}"}


def _legend_group(name: str) -> Trace:
    """The name and the group of a trace. The traces of a group are toggled together."""
    return {"type": "scatter", "name": name, "legendgroup": name}


def _points(line_count: int) -> int:
    """The number of points of each line in a figure with so many lines."""
    return POINTS if line_count <= 12 else max(24_000 // line_count, 100)


# Means and ratios


def _mean_traces(optimizer: str, curves: Sequence[Series], options: PlotOptions, *, log: bool) -> list[Trace]:
    """The band and the mean of some curves, the mean last."""
    axis, color, group = options.x_axis, colour(optimizer), _legend_group(label(optimizer))
    means = _visible_means(curves, options)
    mean, lower, upper = style.plottable(means.mean, log), *_band_edges(means, log)
    rows = downsample([lower, upper, mean])
    forward = means.x[rows] >= np.maximum.accumulate(means.x[rows]) if len(rows) else np.empty(0, bool)
    band_rows = rows[forward & ~np.isnan(lower[rows]) & ~np.isnan(upper[rows])]
    edge = group | {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip"}
    fill = {"fill": "tonexty", "fillcolor": style.faded(color)}
    mean_line = style.xy(means.x, mean, rows, axis, [_hover_text(means, row) for row in rows.tolist()])
    traces = [
        style.xy(means.x, lower, band_rows, axis) | edge,
        style.xy(means.x, upper, band_rows, axis) | edge | fill,
    ]
    if options.smooth and not options.seeds:  # with seeds, the lines of the runs show the unsmoothed values
        traces.append(_thin_mean(curves, replace(options, smooth=0.0), color, log=log) | group)
    return [*traces, mean_line | group | {"line": {"color": color, "width": 2.5}, "meta": label(optimizer)}]


def _thin_mean(curves: Sequence[Series], options: PlotOptions, color: str, *, log: bool) -> Trace:
    """The mean of some curves as a thin, faint line without a hover text."""
    means = _visible_means(curves, options, spread=False)
    mean = style.plottable(means.mean, log)
    trace = style.xy(means.x, mean, downsample([mean]), options.x_axis)
    return trace | {"opacity": FAINT, "line": {"color": color, "width": 1}, "hoverinfo": "skip"}


def _training_traces(
    runs: Sequence[RunSeries], options: PlotOptions, excluded: Collection[str], *, log: bool
) -> list[Trace]:
    """The training loss as thin lines: the mean of each optimizer, or each run."""
    runs = [run for run in runs if len(run.train_loss)]
    traces: list[Trace] = []
    if options.group == "run":
        for trace in _traces_by_run(runs, "train_loss", options, excluded, log=log):
            line = trace["line"] | {"width": 1}
            traces.append(
                trace | {"meta": f"{trace['meta']}, training", "opacity": 0.5 * trace["opacity"], "line": line}
            )
        return traces
    for optimizer, group in by_optimizer(run for run in runs if run.id not in excluded).items():
        name, curves = f"{label(optimizer)}, training", [run.train_loss for run in group]
        common = _legend_group(name) | {"legendrank": 2000, "meta": name}
        if options.smooth:
            unsmoothed = _thin_mean(curves, replace(options, smooth=0.0), colour(optimizer), log=log)
            traces.append(unsmoothed | common | {"opacity": 0.2})
        mean = _thin_mean(curves, options, colour(optimizer), log=log) | common | {"opacity": 0.55}
        del mean["hoverinfo"]
        traces.append(mean)
    return traces


def _ratio_traces(pairs: Sequence[Pair], name: str, options: PlotOptions) -> list[Trace]:
    """The ratio of the pairs' means; if it is smoothed, the unsmoothed ratio comes first, faint."""
    traces = []
    text, color, dash = RATIO_STYLES[name]
    for smooth in sorted({0.0, options.smooth}):
        ratios = pair_ratios(pairs, name, options.x_axis, smooth)
        ratios = ratios[style.window(ratios.x, options)]
        if not len(ratios.x):
            continue
        y, strong = style.plottable(ratios.ratio, log=True), smooth == options.smooth
        trace = style.xy(ratios.x, y, downsample([y]), options.x_axis) | _legend_group(text)
        trace |= {"line": {"color": color, "width": 2 if strong else 1, "dash": dash}}
        trace |= {"meta": f"{text}, {BASELINE} / {CANDIDATE}"} if strong else {"opacity": FAINT, "hoverinfo": "skip"}
        traces.append(trace)
    return traces


def _visible_means(curves: Sequence[Series], options: PlotOptions, *, spread: bool = True) -> MeanCurve:
    """The mean of some curves in the visible range."""
    means = mean_curve(curves, options.x_axis, smooth=options.smooth, spread=spread)
    return means[style.window(means.x, options)]


def _band_edges(means: MeanCurve, log: bool) -> tuple[Floats, Floats]:
    """The lower and the upper edge of the band around a mean."""
    lower, upper = means.mean - means.deviation, means.mean + means.deviation
    if log:
        least = np.where(np.isfinite(means.smallest), means.smallest / 2, 0.0)
        lower, upper = np.maximum(lower, least), np.maximum(upper, least)
    return style.plottable(lower, log), style.plottable(upper, log)


def _hover_text(means: MeanCurve, row: int) -> str:
    """The deviation and the number of runs at a point of a mean."""
    runs, deviation = int(means.runs[row]), float(means.deviation[row])
    return "(one run)" if runs == 1 else f"± {deviation:.3g}, {runs} runs" if deviation == deviation else f"{runs} runs"

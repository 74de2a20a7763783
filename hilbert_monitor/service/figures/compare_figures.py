"""Figures that compare runs: a Comparison in, plotly figures as plain dicts out. No file is read or written.

A group of several runs is drawn as its mean, with a band of one sample standard deviation while there are few groups;
on request with the line of each run behind it. A single run is drawn as a line. The options may also ask for one line
per run, without means. A run that enters no mean is drawn where each run has a line.

- Smoothing is applied to each run before the mean is taken. The unsmoothed curve is drawn behind, faint, so that
  smoothing hides nothing.
- On a logarithmic axis a value that is not positive is a gap. The lower edge of a band stays positive there: it is at
  least half the smallest value of the runs.
- Over time a line has a gap where training paused.
- A trace has at most about 2,000 points, see `downsampling`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hilbert_monitor.runs.record import METRICS, Metric
from hilbert_monitor.runs.run import Curve, Run
from hilbert_monitor.runs.table import Floats
from hilbert_monitor.service.following.text import label

from . import style
from .averages import MeanCurve, mean_curve
from .axes import with_axis
from .comparison import Comparison
from .contrasts import Contrast, pair_ratios
from .downsampling import POINTS
from .final_values import same_panel
from .grouping import Group
from .looks import Look, looks
from .plot_options import PLAIN, PlotOptions
from .style import Figure, Trace, template

__all__ = ["METRIC_PANELS", "PANELS", "diameter", "loss", "metric_panel", "perturbation", "ratio", "template"]

FAINT = 0.35
"""Opacity of the lines behind a mean or a smoothed line."""
LEGEND_RUNS = 24
"""The largest number of runs that the legend names one by one. If there are more it names their groups."""
BANDS = 8
"""The largest number of groups whose means have a band. More bands would hide each other."""
RATIO_STYLES = {"diameter": ("D(S)", "#8A6FD1", "solid"), "perturbation_rms": ("Hilbert RMS", "#009E73", "dot")}
"""The curves that have a ratio, and the name, colour and dash of each ratio."""


@dataclass(frozen=True, slots=True)
class Drawing:
    """What the traces of a figure are made of."""

    comparison: Comparison
    options: PlotOptions
    log: bool
    looks: dict[str, Look]
    excluded: frozenset[str]
    """Ids of the runs that enter no mean."""

    @property
    def draws_runs(self) -> bool:
        """Whether each run has a line of its own, also behind the mean of its group."""
        return self.options.group == "run" or self.options.seeds

    def groups(self, name: str) -> list[Group]:
        """The groups, with those of their runs that have a curve and are drawn or in a mean."""
        groups = [
            replace(group, runs=tuple(run for run in group.runs if len(run.curve(name)) and self._takes_part(run)))
            for group in self.comparison.groups
        ]
        return [group for group in groups if group.runs]

    def _takes_part(self, run: Run) -> bool:
        return self.draws_runs or run.id not in self.excluded


def loss(comparison: Comparison, options: PlotOptions = PLAIN) -> Figure:
    """The validation loss, and the training loss as a thinner line."""
    drawing = _drawing(comparison, options, log=False)
    unsmoothed = replace(
        drawing, options=replace(drawing.options, smooth=0.0)
    )  # they are few, and smooth by themselves
    traces = _training_traces(drawing) + _metric_traces(unsmoothed, "validation_loss")
    style.name_groups(traces)
    y_range = None if drawing.log else style.late_range(traces, drawing.options)
    return style.figure("Loss", traces, drawing.options, log=drawing.log, **({"range": y_range} if y_range else {}))


def diameter(comparison: Comparison, options: PlotOptions = PLAIN) -> Figure:
    """The row diameter D(S) of the step, by default on a logarithmic axis."""
    return _metric_figure(comparison, options, "diameter", "Row diameter D(S)", log=True)


def perturbation(comparison: Comparison, options: PlotOptions = PLAIN) -> Figure:
    """The Hilbert RMS perturbation of the panel, by default on a logarithmic axis.

    Runs with different panels have no mean.
    """
    return _metric_figure(comparison, options, "perturbation_rms", "Hilbert RMS", log=True)


def ratio(comparison: Comparison, options: PlotOptions = PLAIN) -> Figure:
    """The baseline's mean over the candidate's, of D(S) and of Hilbert RMS, over the pairs of each contrast.

    Without a pair the figure has no trace.
    """
    drawing = _drawing(comparison, options, log=False)
    contrasts = [contrast for contrast in comparison.contrasts if contrast.pairs]
    colours = {run.id: drawing.looks[group.name].colour for group in comparison.groups for run in group.runs}
    traces = [
        trace
        for name in RATIO_STYLES
        for contrast in contrasts
        for trace in _ratio_traces(
            drawing, contrast, name, "" if len(contrasts) == 1 else colours[contrast.pairs[0][1].id]
        )
    ]
    yaxis = {} if drawing.log else {"rangemode": "tozero"}
    title = " / ".join(label(side) for side in comparison.sides)
    return style.figure(title, style.name_groups(traces), drawing.options, log=drawing.log, **yaxis)


def metric_panel(field: str) -> Callable[..., Figure]:
    """A function that draws any metric of the catalogue, on the axis and in the unit that the metric has."""
    metric = METRIC_PANELS[field]

    def draw(comparison: Comparison, options: PlotOptions = PLAIN) -> Figure:
        options = options if metric.smoothed else replace(options, smooth=0.0)
        ticks = {"tickformat": style.SHARE_TICKS} if metric.unit == "ratio" else {}
        return _metric_figure(comparison, options, field, metric.name, log=metric.log, **ticks)

    return draw


PANELS: dict[str, Callable[..., Figure]] = {
    "loss": loss,
    "diameter": diameter,
    "perturbation": perturbation,
    "ratio": ratio,
}
"""The panels that are always drawn."""
METRIC_PANELS: dict[str, Metric] = {metric.field: metric for metric in METRICS if metric.field not in PANELS}
"""The metrics that a panel can be asked for, by field; all but those that are always drawn."""


def _drawing(comparison: Comparison, options: PlotOptions, *, log: bool) -> Drawing:
    """A drawing whose scale, if the options choose none, is logarithmic or not."""
    options = with_axis(options, comparison.runs)
    excluded = frozenset(run.id for run in comparison.excluded)
    return Drawing(comparison, options, options.logarithmic(log), looks(comparison.groups), excluded)


def _metric_figure(
    comparison: Comparison, options: PlotOptions, name: str, title: str, *, log: bool, **yaxis: Any
) -> Figure:
    drawing = _drawing(comparison, options, log=log)
    traces = style.name_groups(_metric_traces(drawing, name))
    return style.figure(title, traces, drawing.options, log=drawing.log, **yaxis)


# Lines of single runs


def _metric_traces(drawing: Drawing, name: str) -> list[Trace]:
    """All traces of a metric: means and bands of the groups, and the lines of runs that are asked for."""
    groups, traces = drawing.groups(name), list[Trace]()
    if drawing.options.group == "run":
        return _traces_by_run(drawing, name)
    lines = sum(len(group.runs) for group in groups) if drawing.draws_runs else len(groups)
    for group in groups:
        counted = [run for run in group.runs if run.id not in drawing.excluded]
        has_mean = len(counted) > 1 and (name != "perturbation_rms" or same_panel(counted))
        for run in group.runs:
            if not has_mean and run.id not in drawing.excluded:
                traces += _run_lines(drawing, group, run, name, lines)
            elif drawing.options.seeds:
                traces.append(_faint_line(drawing, group, run, name, lines))
        if has_mean:
            traces += _mean_traces(drawing, group, [run.curve(name) for run in counted], len(groups))
    return traces


def _traces_by_run(drawing: Drawing, name: str) -> list[Trace]:
    """A line for each run, in a shade of its colour. It has a legend entry of its own if there is room."""
    groups, traces = drawing.groups(name), list[Trace]()
    lines, numbers = sum(len(group.runs) for group in groups), dict[str, int]()
    for group in groups:
        color = drawing.looks[group.name].colour if group.chosen is not None else style.colour(group.optimizer)
        for run in group.runs:
            numbers[color] = numbers.get(color, -1) + 1
            shade, dash = style.shade(color, numbers[color])
            for trace in _run_lines(drawing, group, run, name, lines):
                width = min(trace["line"]["width"], 1.75)
                trace["line"] = {"color": shade, "width": width, "dash": _dash(drawing, run, dash)}
                if lines <= LEGEND_RUNS:
                    trace |= {"name": label(run.label), "legendgroup": label(run.id, 200)}
                traces.append(trace)
    return traces


def _run_lines(drawing: Drawing, group: Group, run: Run, name: str, lines: int) -> list[Trace]:
    """One run's line; if it is smoothed, the unsmoothed curve comes first, faint.

    Args:
        drawing: what it is part of.
        group: the run's group.
        run: the run.
        name: the curve.
        lines: the number of lines in the figure, which limits the points of each.
    """
    options, look = drawing.options, drawing.looks[group.name]
    line = style.line(run.curve(name), options, log=drawing.log, points=_points(lines), smooth=options.smooth)
    line |= _run_labels(group, run) | {"opacity": 1.0, "line": {"color": look.colour, "width": 2.5, "dash": look.dash}}
    if not options.smooth:
        return [line]
    return [_faint_line(drawing, group, run, name, lines) | {"hoverinfo": "skip"}, line]


def _faint_line(drawing: Drawing, group: Group, run: Run, name: str, lines: int) -> Trace:
    """One run's curve, unsmoothed and faint; dotted if the run enters no mean."""
    trace = style.line(run.curve(name), drawing.options, log=drawing.log, points=_points(lines))
    trace |= _run_labels(group, run)
    if run.id in drawing.excluded:
        trace["meta"] += f", {label(run.status)}, in no mean"
    trace["line"] = {"color": drawing.looks[group.name].colour, "width": 1, "dash": _dash(drawing, run, "solid")}
    return trace | {"opacity": FAINT}


def _dash(drawing: Drawing, run: Run, dash: str) -> str:
    return "dot" if run.id in drawing.excluded else dash


def _run_labels(group: Group, run: Run) -> Trace:
    """A run's legend group and the name in its hover text."""
    seed = f"seed {run.seed}" if run.seed is not None else "no seed"
    return _legend_group(label(group.name, 200)) | {"meta": f"{label(run.label)}, {seed}"}


def _legend_group(name: str) -> Trace:
    """The name and the group of a trace. The traces of a group are toggled together."""
    return {"type": "scatter", "name": name, "legendgroup": name}


def _points(lines: int) -> int:
    """The number of points of each line in a figure with so many lines."""
    return POINTS if lines <= 12 else max(24_000 // lines, 100)


# Means and ratios


def _mean_traces(drawing: Drawing, group: Group, curves: Sequence[Curve], groups: int) -> list[Trace]:
    """The band and the mean of some curves, the mean last."""
    options, look, names = drawing.options, drawing.looks[group.name], _legend_group(label(group.name, 200))
    means = _visible_means(curves, options)
    mean, lower, upper = style.plottable(means.mean, drawing.log), *_band_edges(means, drawing.log)
    has_band = groups <= BANDS
    columns = [lower, upper, mean] if has_band else [mean]
    rows = style.drawn_rows(columns, means.x, options, means.breaks, _points(groups))
    texts = [_hover_text(means, row) for row in rows.tolist()]
    traces = [trace | names for trace in _band(means, lower, upper, rows, options, look)] if has_band else []
    if options.smooth and not options.seeds:  # with seeds, the lines of the runs show the unsmoothed values
        traces.append(_thin_mean(curves, replace(options, smooth=0.0), look.colour, log=drawing.log) | names)
    mean_line = style.xy(means.x, mean, rows, options.x_axis, means.breaks, texts) | names
    line = {"color": look.colour, "width": 2.5, "dash": look.dash}
    return [*traces, mean_line | {"line": line, "meta": label(group.name, 120)}]


def _band(
    means: MeanCurve, lower: Floats, upper: Floats, rows: style.Rows, options: PlotOptions, look: Look
) -> list[Trace]:
    """The area between two edges: two traces for each part between gaps."""
    edge: Trace = {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip"}
    fill = {"fill": "tonexty", "fillcolor": style.faded(look.colour)}
    traces: list[Trace] = []
    for part in style.unbroken_parts(rows, means.breaks):
        part = part[~np.isnan(lower[part]) & ~np.isnan(upper[part])]
        traces.append(style.xy(means.x, lower, part, options.x_axis) | edge)
        traces.append(style.xy(means.x, upper, part, options.x_axis) | edge | fill)
    return traces


def _thin_mean(curves: Sequence[Curve], options: PlotOptions, color: str, *, log: bool, points: int = POINTS) -> Trace:
    """The mean of some curves as a thin, faint line without a hover text."""
    if len(curves) == 1:
        trace = style.line(curves[0], options, log=log, points=points, smooth=options.smooth)
    else:
        means = _visible_means(curves, options, spread=False)
        mean = style.plottable(means.mean, log)
        rows = style.drawn_rows([mean], means.x, options, means.breaks, points)
        trace = style.xy(means.x, mean, rows, options.x_axis, means.breaks)
    return trace | {"opacity": FAINT, "line": {"color": color, "width": 1}, "hoverinfo": "skip"}


def _training_traces(drawing: Drawing) -> list[Trace]:
    """The training loss as thin lines: the mean of each group, or each run."""
    options, traces = drawing.options, list[Trace]()
    if options.group == "run":
        for trace in _traces_by_run(drawing, "train_loss"):
            line = trace["line"] | {"width": 1}
            traces.append(
                trace | {"meta": f"{trace['meta']}, training", "opacity": 0.5 * trace["opacity"], "line": line}
            )
        return traces
    groups = drawing.groups("train_loss")
    for group in groups:
        curves = [run.curve("train_loss") for run in group.runs if run.id not in drawing.excluded]
        if not curves:
            continue
        name, color = f"{label(group.name, 200)}, training", drawing.looks[group.name].colour
        common = _legend_group(name) | {"legendrank": 2000, "meta": name}
        points = _points(len(groups))
        if options.smooth:
            unsmoothed = _thin_mean(curves, replace(options, smooth=0.0), color, log=drawing.log, points=points)
            traces.append(unsmoothed | common | {"opacity": 0.2})
        mean = _thin_mean(curves, options, color, log=drawing.log, points=points) | common | {"opacity": 0.55}
        del mean["hoverinfo"]
        traces.append(mean)
    return traces


def _ratio_traces(drawing: Drawing, contrast: Contrast, name: str, own_color: str) -> list[Trace]:
    """The ratio of the pairs' means; if it is smoothed, the unsmoothed ratio comes first, faint.

    Args:
        drawing: what it is part of.
        contrast: the two sides.
        name: the curve.
        own_color: the colour that tells the contrast from others; empty if it is the only one.
    """
    traces, options = [], drawing.options
    text, color, dash = RATIO_STYLES[name]
    sides = f"{label(contrast.baseline, 120)} / {label(contrast.candidate, 120)}"
    meta = f"{text}, {sides}"
    if own_color:
        text, color = meta, own_color
    for smooth in sorted({0.0, options.smooth}):
        trace = _ratio_line(contrast, name, options, smooth, _points(2 * len(drawing.comparison.contrasts)))
        if not trace["x"]:
            continue
        strong = smooth == options.smooth
        trace |= _legend_group(text) | {"line": {"color": color, "width": 2 if strong else 1, "dash": dash}}
        trace |= {"meta": meta} if strong else {"opacity": FAINT, "hoverinfo": "skip"}
        traces.append(trace)
    return traces


def _ratio_line(contrast: Contrast, name: str, options: PlotOptions, smooth: float, points: int) -> Trace:
    """x, y and mode of a ratio. The last result is cached in the first curve: most contrasts have no new data."""
    curve = pair_ratios(contrast.pairs, name, options.x_axis, smooth)
    cache = contrast.pairs[0][0].curve(name).cache
    slot, key = ("ratio line", smooth > 0), (options.x0, options.x1, options.log_x, points)
    entry = cache.get(slot)
    if entry is None or entry[0] is not curve or entry[1] != key:
        ratios = curve[style.window(curve.x, options)]
        y = style.plottable(ratios.ratio, log=True)
        rows = style.drawn_rows([y], ratios.x, options, ratios.breaks, points)
        entry = cache[slot] = curve, key, style.xy(ratios.x, y, rows, options.x_axis, ratios.breaks)
    return dict(entry[2])


def _visible_means(curves: Sequence[Curve], options: PlotOptions, *, spread: bool = True) -> MeanCurve:
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

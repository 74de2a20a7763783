"""Figures of one run, as plain dicts in plotly's form: one for each panel of `run_panels` that the run's page draws.

Values that are not finite have no place on an axis. They are gaps in their curve, and a cross at the top marks each.
Alerts have marks, and attempts lines. Marks stand on a y axis of their own, from 0 at the bottom to 1 at the top.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np

from hilbert_monitor.runs.record import Line, Metric
from hilbert_monitor.runs.run import Curve, Run
from hilbert_monitor.runs.table import MISSING, SECONDS, Floats, Table, present
from hilbert_monitor.service.following.text import label

from . import run_panels, style
from .downsampling import downsample
from .plot_options import PLAIN, Axis, PlotOptions
from .run_panels import RunPanel, drawn_in
from .style import GREY, Figure, Trace, colour

PANELS = {panel.name: panel for panel in run_panels.PANELS if panel.on_page}
"""The panels of a run's page, by name and in their order there."""
MARKS = 500
"""Marks of one kind in a figure, at most: the newest alerts, and an even choice of values that are not finite."""
LINES = 100
"""Alerts and attempts that have a line to themselves, at most."""
RED = "#D0312D"
COLOURS = ("#009E73", "#CC79A7", "#A07800", "#8A6FD1", "#56B4E9", "#D55E00", "#0072B2", "#7F7F7F")
"""Of lines that are not in the optimizer's colour."""
MARKS_AXIS: dict[str, Any] = {"overlaying": "y", "range": [0, 1], "fixedrange": True, "visible": False}
LAYERS = get_args(Line)
PERCENT = "%{y:.2%}"

Values = Mapping[str, Floats]
"""Columns of a panel, by their names."""


@dataclass(frozen=True, slots=True)
class RunData:
    """A run, and the options that its figures are drawn with."""

    run: Run
    options: PlotOptions

    @property
    def axis(self) -> Axis:
        """What the curves are drawn against."""
        return self.options.axis or "updates"

    @property
    def color(self) -> str:
        """The colour of the run's optimizer."""
        return colour(self.run.optimizer)

    def series(self, values: Floats) -> Curve:
        """The curve of a column."""
        return Curve.of(self.run.table, values, self.run.start_time)

    def where(self, steps: Floats, times: Floats) -> Floats:
        """Places on the axis of steps that need not have a record; nan where that is not known."""
        if self.axis == "updates":
            return steps
        if self.axis == "time":
            return (times - self.run.start_time) / 3600
        tokens = self.run.table.column("tokens")
        known = np.isfinite(tokens)
        if not known.any():
            return np.full(len(steps), np.nan)
        return np.interp(steps, self.run.table.steps[known], tokens[known])


def figures(run: Run, options: PlotOptions = PLAIN) -> dict[str, Figure]:
    """Return the figures of a run that have a curve, by the names of their panels.

    Args:
        run: to draw.
        options: how curves are drawn; one run has neither groups nor seeds.
    """
    data = _run_data(run, options)
    drawn = {
        panel.name: DRAW.get(panel.name, _draw)(data, panel, _columns(panel, run.table)) for panel in PANELS.values()
    }
    return {name: figure for name, figure in drawn.items() if figure is not None}


def curves(panel: str, run: Run, options: PlotOptions = PLAIN) -> tuple[tuple[str, ...], Iterator[tuple[Any, ...]]]:
    """Return every value of a panel in the range of the options: the header and the rows of a table, nothing thinned.

    Args:
        panel: one of PANELS.
        run: to list.
        options: which part of which axis.
    """
    columns = _columns(PANELS[panel], run.table)
    return ("step", "tokens", "hours", *columns), _rows(_run_data(run, options), list(columns.values()))


def _run_data(run: Run, options: PlotOptions) -> RunData:
    if options.axis is None:
        options = replace(options, axis="tokens" if np.isfinite(run.table.column("tokens")).all() else "updates")
    return RunData(run, options)


def _columns(panel: RunPanel, table: Table) -> Values:
    """The columns of a panel that a table has; none if all of them are other panels' own."""
    known = {metric.field: table.get(metric.field) for metric in drawn_in(panel)}
    columns = {field: values for field, values in known.items() if values is not None}
    if panel.name == "cost":
        columns |= {name: table.columns[name] for name in sorted(table.columns) if name.startswith(SECONDS)}
    others = {metric.field for metric in drawn_in(panel) if metric.panel != panel.name}
    return columns if columns.keys() - others else {}


def _rows(data: RunData, columns: Sequence[Floats]) -> Iterator[tuple[Any, ...]]:
    table, hours = data.run.table, (data.run.table.column("time") - data.run.start_time) / 3600
    some = np.zeros(len(table), bool)
    for column in columns:
        some |= present(column)
    x = {"updates": table.steps.astype(np.float64), "tokens": table.column("tokens"), "time": hours}[data.axis]
    rows = np.intersect1d(np.flatnonzero(some), style.inside(x, data.options))
    tokens = [None if number is None else int(number) for number in style.numbers(table.column("tokens")[rows])]
    listed = [_listed(column[rows]) for column in columns]
    yield from zip(table.steps[rows].tolist(), tokens, style.numbers(hours[rows]), *listed, strict=True)


def _listed(column: Floats) -> list[float | None]:
    """Numbers, which may be nan; None for what is missing."""
    return [value if there else None for value, there in zip(column.tolist(), present(column).tolist(), strict=True)]


# Panels


def _draw(data: RunData, panel: RunPanel, columns: Values) -> Figure | None:
    """A panel as its metrics say: each line in its layer, on the axis and in the unit that they have."""
    metrics = [metric for metric in drawn_in(panel) if metric.field in columns]
    log = data.options.logarithmic(any(metric.log for metric in drawn_in(panel)))
    traces = _lines(data, metrics, columns, log=log)
    yaxis: dict[str, Any] = {}
    if any(metric.unit == "ratio" for metric in metrics):
        yaxis["tickformat"] = style.SHARE_TICKS
    if panel.skips_start and not log:
        late = style.late_range(traces, data.options)
        yaxis |= {"range": late} if late else {}
    return _figure(data, panel.axis_title, traces, columns, log=log, **yaxis)


def _draw_cost(data: RunData, panel: RunPanel, columns: Values) -> Figure | None:
    """Seconds of each part of measuring, and on the right what share of the run's time they are."""
    parts = [name for name in columns if name.startswith(SECONDS)]
    if not parts:
        return _draw(data, panel, columns)
    log, traces = data.options.logarithmic(False), list[Trace]()
    for number, name in enumerate(parts):
        color = COLOURS[number % len(COLOURS)]
        traces += _curve(data, columns[name], name.removeprefix(SECONDS), color, log=log, width=1.5)
    for trace in traces:
        trace["says"] = "%{y:.3~s}s"
    shares = [metric for metric in drawn_in(panel) if metric.field in columns]
    traces += [trace | {"yaxis": "y3"} for trace in _lines(data, shares, columns, log=False)]
    figure = _figure(data, "Seconds", traces, columns, log=log)
    if figure and shares:
        right = {"overlaying": "y", "side": "right", "showgrid": False, "rangemode": "tozero", "tickformat": ".2~%"}
        figure["layout"]["yaxis3"] = right | {"tickmode": "auto", "title": {"text": panel.axis_title}}
    return figure


DRAW: dict[str, Callable[[RunData, RunPanel, Values], Figure | None]] = {"cost": _draw_cost}
"""Panels that draw more than their metrics."""


# Traces


def _lines(data: RunData, metrics: Sequence[Metric], columns: Values, *, log: bool) -> list[Trace]:
    """The lines of some metrics, the strongest on top. Metrics with the same label look alike."""
    traces: list[Trace] = []
    for line in LAYERS:
        labels = list(dict.fromkeys(metric.label for metric in metrics if metric.line == line))
        for number, text in enumerate(labels):
            group = [metric for metric in metrics if metric.line == line and metric.label == text]
            if line == "band":
                traces += _band(data, text, [columns[metric.field] for metric in group], data.color, log=log)
                continue
            look = _look(data, line, number)
            for metric in group:
                options = data.options if metric.smoothed else replace(data.options, smooth=0.0)
                curve = _curve(replace(data, options=options), columns[metric.field], text, log=log, **look)
                traces += [trace | ({"says": PERCENT} if metric.unit == "ratio" else {}) for trace in curve]
    return traces


def _look(data: RunData, line: Line, number: int) -> dict[str, Any]:
    """Colour, width, dash and opacity of the line with this number among those of its layer."""
    if line == "strong":
        color, dash = style.shade(data.color, number)
        return {"color": color, "width": 2, "dash": dash}
    looks: dict[Line, dict[str, Any]] = {
        "reference": {"color": GREY, "width": 1.5, "dash": "dash"},
        "faint": {"color": data.color, "width": 1, "opacity": 0.5},
        "dotted": {"color": data.color, "width": 1.25, "dash": "dot"},
        "other": {"color": COLOURS[number % len(COLOURS)], "width": 1.75, "dash": "dot"},
    }
    return looks[line]


def _curve(
    data: RunData,
    values: Floats,
    name: str,
    color: str,
    *,
    log: bool,
    width: float = 2,
    dash: str = "solid",
    opacity: float = 1.0,
) -> list[Trace]:
    """A line, and behind a smooth one the values that it is the average of."""
    series, text = data.series(values), label(name)
    traces = []
    for smooth in sorted({0.0, data.options.smooth}):
        strong = smooth == data.options.smooth
        trace = style.line(series, data.options, log=log, smooth=smooth)
        trace |= {"type": "scatter", "name": text, "legendgroup": text, "opacity": opacity * (1.0 if strong else 0.35)}
        trace |= {"line": {"color": color, "width": width if strong else 1, "dash": dash if strong else "solid"}}
        traces.append(trace | ({"meta": text} if strong else {"hoverinfo": "skip"}))
    return traces


def _band(data: RunData, name: str, bounds: Sequence[Floats], color: str, *, log: bool) -> list[Trace]:
    """The area between a lower and an upper bound, where there are both."""
    if len(bounds) != 2:
        return []
    both = present(bounds[0]) & present(bounds[1])
    lower, upper = (data.series(np.where(both, values, MISSING)).with_x(data.axis) for values in bounds)
    x, text = lower.x(data.axis), label(name)
    part, breaks = style.window(x, data.options), style.line_breaks(lower, data.axis)
    x, breaks = x[part], breaks[part]
    low, high = style.plottable(lower.values[part], log), style.plottable(upper.values[part], log)
    places = downsample([low, high]) if len(x) else np.empty(0, np.int64)
    places = places[~np.isnan(low[places]) & ~np.isnan(high[places])]
    edge: Trace = {"type": "scatter", "name": text, "legendgroup": text, "mode": "lines"}
    edge |= {"line": {"width": 0.75, "color": style.faded(color, 0.4)}, "hoverinfo": "skip"}
    fill = {"fill": "tonexty", "fillcolor": style.faded(color, 0.22), "meta": text, "says": "", "hoverinfo": "all"}
    traces = []
    for rows in style.unbroken_parts(places, breaks):
        texts = [f"{a:.4g} to {b:.4g}" for a, b in zip(low[rows].tolist(), high[rows].tolist(), strict=True)]
        traces += [style.xy(x, low, rows, data.axis) | edge]
        traces += [style.xy(x, high, rows, data.axis, hover=texts) | edge | fill]
    return traces


def _figure(
    data: RunData, title: str, traces: list[Trace], columns: Values, *, log: bool, **yaxis: Any
) -> Figure | None:
    """A figure with its marks; None without a curve."""
    if not any(len(trace["x"]) for trace in traces) and not any(present(values).any() for values in columns.values()):
        return None
    style.name_groups(traces)
    marks = _nonfinite_marks(data, columns) + _alert_marks(data)
    figure = style.figure(title, traces + marks, data.options, log=log, **yaxis)
    figure["layout"] |= {"yaxis2": dict(MARKS_AXIS), "shapes": _attempt_lines(data)}
    return figure


# Marks


def _nonfinite_marks(data: RunData, columns: Values) -> list[Trace]:
    """Crosses where a column is not finite."""
    crosses: list[Floats] = []
    texts: list[str] = []
    for name, values in columns.items():
        rows = np.flatnonzero(present(values) & ~np.isfinite(values))
        x = data.where(data.run.table.steps[rows].astype(np.float64), data.run.table.column("time")[rows])
        seen = style.inside(x, data.options)
        seen = seen[np.unique(np.linspace(0, len(seen) - 1, MARKS).astype(np.int64))] if len(seen) > MARKS else seen
        crosses.append(x[seen])
        pairs = zip(values[rows[seen]].tolist(), data.run.table.steps[rows[seen]].tolist(), strict=True)
        texts += [f"{label(name.removeprefix(SECONDS))} {value} at step {step:,}" for value, step in pairs]
    x = np.concatenate(crosses) if crosses else np.empty(0)
    marker = {"symbol": "x", "size": 8, "color": RED}
    return [_marks(data, x, 1.0, texts, marker, "not finite")] if len(x) else []


def _alert_marks(data: RunData) -> list[Trace]:
    """Marks of the alerts, hollow for notices, and a line down from each of the newest pages."""
    alerts = list(data.run.alerts)
    steps = np.array([alert.step for alert in alerts], np.float64)
    x = data.where(steps, np.array([alert.time for alert in alerts], np.float64))
    seen = style.inside(x, data.options)[-MARKS:]
    if not len(seen):
        return []
    texts = [f"{label(alerts[i].kind)} at step {alerts[i].step:,}: {alerts[i].value:.4g}" for i in seen.tolist()]
    pages = np.array([alerts[i].severity == "page" for i in seen.tolist()])
    symbols = np.where(pages, "triangle-down", "triangle-down-open").tolist()
    marks = _marks(data, x[seen], 0.97, texts, {"symbol": symbols, "size": 9, "color": RED}, "alerts")
    places = style.places(x[seen][pages], data.axis)[-LINES:]
    lines: Trace = {"type": "scatter", "mode": "lines", "yaxis": "y2", "hoverinfo": "skip", "showlegend": False}
    lines |= {"x": [end for place in places for end in (place, place, None)], "y": [0, 0.97, None] * len(places)}
    return [lines | {"line": {"color": RED, "width": 1}, "opacity": 0.3, "legendgroup": "alerts"}, marks]


def _marks(data: RunData, x: Floats, height: float, texts: list[str], marker: dict[str, Any], name: str) -> Trace:
    trace: Trace = {"type": "scatter", "mode": "markers", "yaxis": "y2", "name": name, "legendgroup": name}
    trace |= {"x": style.places(x, data.axis), "y": [height] * len(x), "customdata": texts, "cliponaxis": False}
    return trace | {"marker": marker, "meta": name, "says": "", "showlegend": True}


def _attempt_lines(data: RunData) -> list[dict[str, Any]]:
    """Dotted lines where a further attempt began."""
    later = list(data.run.attempts[1:])[-LINES:]
    steps = np.array([attempt.first_step for attempt in later], np.float64)
    x = data.where(steps, np.array([attempt.started for attempt in later], np.float64))
    seen = style.inside(x, data.options)
    shapes = []
    for number, place in zip(seen.tolist(), style.places(x[seen], data.axis), strict=True):
        text = {"text": f"attempt {later[number].attempt}", "font": {"size": 10}, "textposition": "end", "textangle": 0}
        ends = {"type": "line", "x0": place, "x1": place, "y0": 0, "y1": 1, "yref": "y domain"}
        line = {"color": GREY, "width": 1, "dash": "dot"}
        shapes.append({**ends, "line": line, "label": {**text, "xanchor": "left", "yanchor": "top"}})
    return shapes

"""Figures of one run, from its records: plain dicts, as `figures` makes them of several runs.

What is not finite has no place on an axis and is a gap, but a cross at the top says that it was there. So do marks for
the alerts and lines for the attempts: they stand on an axis of their own, from 0 at the bottom to 1 at the top.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hilbert_monitor.runs.record import Alert, RunInfo
from hilbert_monitor.service.following.columns import MISSING, SECONDS, Floats, Table, present
from hilbert_monitor.service.following.text import label

from . import style
from .downsampling import downsample
from .plot_options import PLAIN, Axis, PlotOptions
from .series import Series, origin, series_of
from .style import GREY, Figure, Trace, colour

MARKS = 500
"""Marks of one kind in a figure, at most; of alerts the newest, of what is not finite some of every part."""
LINES = 100
"""Alerts and attempts that have a line to themselves, at most."""
RED = "#D0312D"
PARTS = ("#009E73", "#CC79A7", "#A07800", "#8A6FD1", "#56B4E9", "#D55E00", "#0072B2", "#7F7F7F")
OVER: dict[str, Any] = {"overlaying": "y", "range": [0, 1], "fixedrange": True, "visible": False}
"""The axis of the marks."""


@dataclass(frozen=True, slots=True)
class Run:
    """What the figures of a run are made of."""

    table: Table
    info: RunInfo
    attempts: Sequence[RunInfo]
    alerts: Sequence[Alert]
    view: PlotOptions
    began: float

    @property
    def axis(self) -> Axis:
        """What the curves are drawn against."""
        return self.view.axis or "updates"

    @property
    def color(self) -> str:
        """Of the run's optimizer."""
        return colour(self.info.head_optimizer or "unknown")

    def series(self, values: Floats) -> Series:
        """A curve of some column."""
        return series_of(self.table, values, self.began)

    def where(self, steps: Floats, times: Floats) -> Floats:
        """Places on the axis of things that are no records; nan where nobody knows."""
        if self.axis == "updates":
            return steps
        if self.axis == "time":
            return (times - self.began) / 3600
        tokens = self.table.column("tokens")
        known = np.isfinite(tokens)
        if not known.any():
            return np.full(len(steps), np.nan)
        return np.interp(steps, self.table.steps[known], tokens[known])


Values = dict[str, Floats]
"""Columns of a panel, by their names."""


def figures(
    table: Table, info: RunInfo, attempts: Sequence[RunInfo], alerts: Sequence[Alert], view: PlotOptions = PLAIN
) -> dict[str, Figure]:
    """The figures of a run that have a curve, by name.

    Args:
        table: its records.
        info: what its newest attempt says of it.
        attempts: what all of them do.
        alerts: those that count.
        view: how it is looked at; one run has neither groups nor seeds.
    """
    run = _run(table, info, attempts, alerts, view)
    drawn = {name: draw(run, columns(table)) for name, (columns, draw) in PANELS.items()}
    return {name: figure for name, figure in drawn.items() if figure is not None}


def curves(
    panel: str, table: Table, info: RunInfo, attempts: Sequence[RunInfo], view: PlotOptions = PLAIN
) -> tuple[tuple[str, ...], Iterator[tuple[Any, ...]]]:
    """Every value of a panel in the view's range, as the header and the rows of a table; nothing is thinned.

    Args:
        panel: one of PANELS.
        table: the run's records.
        info: what its newest attempt says of it.
        attempts: what all of them do.
        view: how it is looked at.
    """
    run, columns = _run(table, info, attempts, (), view), PANELS[panel][0](table)
    return ("step", "tokens", "hours", *columns), _rows(run, list(columns.values()))


def _run(table: Table, info: RunInfo, attempts: Sequence[RunInfo], alerts: Sequence[Alert], view: PlotOptions) -> Run:
    began = origin(table, attempts[0].started if attempts else None)
    if view.axis is None:
        view = replace(view, axis="tokens" if np.isfinite(table.column("tokens")).all() else "updates")
    return Run(table, info, attempts, alerts, view, began)


def _rows(run: Run, columns: Sequence[Floats]) -> Iterator[tuple[Any, ...]]:
    table, hours = run.table, (run.table.column("time") - run.began) / 3600
    some = np.zeros(len(table), bool)
    for column in columns:
        some |= present(column)
    x = {"updates": table.steps.astype(np.float64), "tokens": table.column("tokens"), "time": hours}[run.axis]
    rows = np.intersect1d(np.flatnonzero(some), style.inside(x, run.view))
    tokens = [None if number is None else int(number) for number in style.numbers(table.column("tokens")[rows])]
    listed = [_listed(column[rows]) for column in columns]
    yield from zip(table.steps[rows].tolist(), tokens, style.numbers(hours[rows]), *listed, strict=True)


def _listed(column: Floats) -> list[float | None]:
    """Numbers, which may be nan; None for what is missing."""
    return [value if there else None for value, there in zip(column.tolist(), present(column).tolist(), strict=True)]


# Columns


def _some(*names: str) -> Callable[[Table], Values]:
    """Those of some columns that a table has."""
    return lambda table: {name: table.columns[name] for name in names if name in table.columns}


def _saturation(table: Table) -> Values:
    """D(S) as a share of its ceiling."""
    over, under = table.column("diameter"), table.column("ceiling")
    return _derived("saturation", np.divide, over, under, present(over) & present(under) & (under != 0))


def _perturbation(table: Table) -> Values:
    """Perturbations, and the bound that D(S) and the largest hidden state set them."""
    diameter, norm = table.column("diameter"), table.column("hidden_norm")
    bound = _derived("bound", np.multiply, diameter, norm, present(diameter) & present(norm))
    return _some("perturbation_rms", "perturbation_max")(table) | bound


def _shares(table: Table) -> Values:
    """What part of the worst case the panel sees, and what part of the increment is in vain."""
    rms, diameter, norm = (table.column(name) for name in ("perturbation_rms", "diameter", "hidden_norm_rms"))
    with np.errstate(all="ignore"):
        worst = diameter * norm
    there = present(rms) & present(diameter) & present(norm) & (worst != 0)
    return _derived("utilisation", np.divide, rms, worst, there) | _some("gauge_waste")(table)


def _cost(table: Table) -> Values:
    return _some("share", *sorted(name for name in table.columns if name.startswith(SECONDS)))(table)


def _derived(name: str, operation: Callable[..., Floats], a: Floats, b: Floats, where: Any) -> Values:
    """A column that is made of two, where both have a value; none if that is nowhere."""
    with np.errstate(all="ignore"):
        return {name: np.where(where, operation(a, b), MISSING)} if where.any() else {}


# Panels


def _draw_diameter(run: Run, columns: Values) -> Figure | None:
    """Exact D(S), its bracket, its ceiling."""
    log, color = run.view.logarithmic(True), run.color
    traces = _bracket(run, columns, color, log=log)
    if "ceiling" in columns:
        traces += _curve(run, columns["ceiling"], "ceiling", GREY, log=log, width=1.5, dash="dash")
    if "diameter" in columns:
        traces += _curve(run, columns["diameter"], "D(S), exact", color, log=log)
    return _figure(run, "Row diameter D(S)", traces, columns, log=log)


def _draw_saturation(run: Run, columns: Values) -> Figure | None:
    log, color = run.view.logarithmic(False), run.color
    traces = [t for values in columns.values() for t in _curve(run, values, "D(S) / ceiling", color, log=log)]
    for trace in traces:
        trace["says"] = "%{y:.2%}"
    return _figure(run, "Share of the ceiling", traces, columns, log=log, tickformat=".0%")


def _draw_perturbation(run: Run, columns: Values) -> Figure | None:
    log, color = run.view.logarithmic(True), run.color
    traces: list[Trace] = []
    if "bound" in columns:
        traces += _curve(run, columns["bound"], "bound D(S) max|h|", GREY, log=log, width=1.5, dash="dash")
    if "perturbation_max" in columns:
        traces += _curve(run, columns["perturbation_max"], "maximum", color, log=log, width=1.25, dash="dot")
    if "perturbation_rms" in columns:
        traces += _curve(run, columns["perturbation_rms"], "Hilbert RMS", color, log=log)
    return _figure(run, "Hilbert perturbation", traces, columns, log=log)


def _draw_loss(run: Run, columns: Values) -> Figure | None:
    log, color = run.view.logarithmic(False), run.color
    traces: list[Trace] = []
    if "train_loss" in columns:
        for trace in _curve(run, columns["train_loss"], "training", color, log=log, width=1):
            traces.append(trace | {"opacity": 0.5 * trace["opacity"]})
    if "validation_loss" in columns:
        few = replace(run, view=replace(run.view, smooth=0.0))  # as there are few of them
        traces += _curve(few, columns["validation_loss"], "validation", color, log=log)
    late = None if log else style.late_range([run.series(values) for values in columns.values()], run.view)
    return _figure(run, "Loss", traces, columns, log=log, **({"range": late} if late else {}))


def _draw_rate(run: Run, columns: Values) -> Figure | None:
    log, color = run.view.logarithmic(False), run.color
    traces = [t for values in columns.values() for t in _curve(run, values, "learning rate", color, log=log)]
    return _figure(run, "Learning rate of the LM head", traces, columns, log=log)


def _draw_efficiency(run: Run, columns: Values) -> Figure | None:
    """Between its bounds, for the moment and for the gradient."""
    log, traces = run.view.logarithmic(False), list[Trace]()
    for prefix, name, color, dash in (("moment_", "moment", run.color, "solid"), ("", "gradient", GREY, "dot")):
        for end in ("lower", "upper"):
            if (column := f"{prefix}efficiency_{end}") in columns:
                traces += _curve(run, columns[column], f"for the {name}", color, log=log, width=1.5, dash=dash)
    for trace in traces:
        trace["says"] = "%{y:.2%}"
    return _figure(run, "Share of the best descent", traces, columns, log=log, tickformat=".0%")


def _draw_shares(run: Run, columns: Values) -> Figure | None:
    log, traces = run.view.logarithmic(False), list[Trace]()
    looks_of = {"utilisation": ("utilisation", run.color, "solid"), "gauge_waste": ("gauge waste", GREY, "dash")}
    for column, (name, color, dash) in looks_of.items():
        if column in columns:
            traces += _curve(run, columns[column], name, color, log=log, dash=dash)
    for trace in traces:
        trace["says"] = "%{y:.2%}"
    return _figure(run, "Share", traces, columns, log=log, tickformat=".0%")


def _draw_norms(run: Run, columns: Values) -> Figure | None:
    """The spectral norm of the step, and the bound on what it changes of a gradient, beside D(S)."""
    log, traces = run.view.logarithmic(True), list[Trace]()
    if not {"spectral_norm", "backward_bound"} & columns.keys():
        return None
    looks_of = {
        "backward_bound": ("backward bound", GREY, "dash"),
        "spectral_norm": ("spectral norm", "#009E73", "dot"),
        "diameter": ("D(S), exact", run.color, "solid"),
    }
    for column, (name, color, dash) in looks_of.items():
        if column in columns:
            traces += _curve(run, columns[column], name, color, log=log, width=1.75, dash=dash)
    return _figure(run, "Norms of the step", traces, columns, log=log)


def _draw_cost(run: Run, columns: Values) -> Figure | None:
    """Seconds of each part, and on the right what share of the run's time they are."""
    log, traces = run.view.logarithmic(False), list[Trace]()
    parts = [name for name in columns if name.startswith(SECONDS)]
    for number, name in enumerate(parts):
        color = PARTS[number % len(PARTS)]
        traces += _curve(run, columns[name], name.removeprefix(SECONDS), color, log=log, width=1.5)
    for trace in traces:
        trace["says"] = "%{y:.3~s}s"
    if "share" in columns:
        for trace in _curve(run, columns["share"], "share of the time", GREY, log=False, width=1.5, dash="dot"):
            traces.append(trace | {"yaxis": "y3" if parts else "y", "says": "%{y:.2%}"})
    figure = _figure(run, "Seconds" if parts else "Share of the time", traces, columns, log=log)
    if figure and parts and "share" in columns:
        right = {"overlaying": "y", "side": "right", "showgrid": False, "rangemode": "tozero", "tickformat": ".2~%"}
        figure["layout"]["yaxis3"] = right | {"tickmode": "auto", "title": {"text": "Share of the time"}}
    return figure


PANELS: dict[str, tuple[Callable[[Table], Values], Callable[[Run, Values], Figure | None]]] = {
    "diameter": (_some("diameter", "diameter_lower", "diameter_upper", "ceiling"), _draw_diameter),
    "saturation": (_saturation, _draw_saturation),
    "perturbation": (_perturbation, _draw_perturbation),
    "efficiency": (
        _some("efficiency_lower", "efficiency_upper", "moment_efficiency_lower", "moment_efficiency_upper"),
        _draw_efficiency,
    ),
    "shares": (_shares, _draw_shares),
    "norms": (_some("diameter", "spectral_norm", "backward_bound"), _draw_norms),
    "loss": (_some("train_loss", "validation_loss"), _draw_loss),
    "learning_rate": (_some("learning_rate"), _draw_rate),
    "cost": (_cost, _draw_cost),
}
NAMES = tuple(PANELS)


# Traces


def _curve(
    run: Run, values: Floats, name: str, color: str, *, log: bool, width: float = 2, dash: str = "solid"
) -> list[Trace]:
    """A line, and behind a smooth one what it is made of."""
    series, text = run.series(values), label(name)
    traces = []
    for smooth in sorted({0.0, run.view.smooth}):
        strong = smooth == run.view.smooth
        trace = style.line(series, run.view, log=log, smooth=smooth)
        trace |= {"type": "scatter", "name": text, "legendgroup": text, "opacity": 1.0 if strong else 0.35}
        trace |= {"line": {"color": color, "width": width if strong else 1, "dash": dash if strong else "solid"}}
        traces.append(trace | ({"meta": text} if strong else {"hoverinfo": "skip"}))
    return traces


def _bracket(run: Run, columns: Values, color: str, *, log: bool) -> list[Trace]:
    """The band between the certified bounds, where there are both."""
    if "diameter_lower" not in columns or "diameter_upper" not in columns:
        return []
    both = present(columns["diameter_lower"]) & present(columns["diameter_upper"])
    lower, upper = (
        run.series(np.where(both, columns[f"diameter_{end}"], MISSING)).with_x(run.axis) for end in ("lower", "upper")
    )
    x = lower.x(run.axis)
    part = style.window(x, run.view)
    x, low, high = x[part], style.plottable(lower.values[part], log), style.plottable(upper.values[part], log)
    kept = downsample([low, high]) if len(x) else np.empty(0, np.int64)
    kept = kept[~np.isnan(low[kept]) & ~np.isnan(high[kept])]
    edge: Trace = {"type": "scatter", "name": "bracket", "legendgroup": "bracket", "mode": "lines"}
    edge |= {"line": {"width": 0.75, "color": style.faded(color, 0.4)}, "hoverinfo": "skip"}
    said = [f"{a:.4g} to {b:.4g}" for a, b in zip(low[kept].tolist(), high[kept].tolist(), strict=True)]
    fill = {"fill": "tonexty", "fillcolor": style.faded(color, 0.22), "meta": "bracket", "says": "", "hoverinfo": "all"}
    return [style.xy(x, low, kept, run.axis) | edge, style.xy(x, high, kept, run.axis, said) | edge | fill]


def _figure(run: Run, title: str, traces: list[Trace], columns: Values, *, log: bool, **yaxis: Any) -> Figure | None:
    """A figure with its marks; None without a curve."""
    if not any(len(trace["x"]) for trace in traces) and not any(present(values).any() for values in columns.values()):
        return None
    style.name_groups(traces)
    figure = style.figure(title, traces + _lost(run, columns) + _alerted(run), run.view, log=log, **yaxis)
    figure["layout"] |= {"yaxis2": dict(OVER), "shapes": _attempted(run)}
    return figure


def _lost(run: Run, columns: Values) -> list[Trace]:
    """Crosses where a column is not finite."""
    at: list[Floats] = []
    said: list[str] = []
    for name, values in columns.items():
        rows = np.flatnonzero(present(values) & ~np.isfinite(values))
        x = run.where(run.table.steps[rows].astype(np.float64), run.table.column("time")[rows])
        seen = style.inside(x, run.view)
        seen = seen[np.unique(np.linspace(0, len(seen) - 1, MARKS).astype(np.int64))] if len(seen) > MARKS else seen
        at.append(x[seen])
        shown = zip(values[rows[seen]].tolist(), run.table.steps[rows[seen]].tolist(), strict=True)
        said += [f"{label(name.removeprefix(SECONDS))} {value} at step {step:,}" for value, step in shown]
    x = np.concatenate(at) if at else np.empty(0)
    marker = {"symbol": "x", "size": 8, "color": RED}
    return [_marks(run, x, 1.0, said, marker, "not finite")] if len(x) else []


def _alerted(run: Run) -> list[Trace]:
    """Marks of the alerts, and a line down from each if they are few."""
    alerts = list(run.alerts)
    steps = np.array([alert.step for alert in alerts], np.float64)
    x = run.where(steps, np.array([alert.time for alert in alerts], np.float64))
    seen = style.inside(x, run.view)[-MARKS:]
    if not len(seen):
        return []
    said = [f"{label(alerts[i].kind)} at step {alerts[i].step:,}: {alerts[i].value:.4g}" for i in seen.tolist()]
    marks = _marks(run, x[seen], 0.97, said, {"symbol": "triangle-down", "size": 9, "color": RED}, "alerts")
    places = style.places(x[seen], run.axis)[-LINES:]
    lines: Trace = {"type": "scatter", "mode": "lines", "yaxis": "y2", "hoverinfo": "skip", "showlegend": False}
    lines |= {"x": [at for place in places for at in (place, place, None)], "y": [0, 0.97, None] * len(places)}
    return [lines | {"line": {"color": RED, "width": 1}, "opacity": 0.3, "legendgroup": "alerts"}, marks]


def _marks(run: Run, x: Floats, height: float, said: list[str], marker: dict[str, Any], name: str) -> Trace:
    trace: Trace = {"type": "scatter", "mode": "markers", "yaxis": "y2", "name": name, "legendgroup": name}
    trace |= {"x": style.places(x, run.axis), "y": [height] * len(x), "customdata": said, "cliponaxis": False}
    return trace | {"marker": marker, "meta": name, "says": "", "showlegend": True}


def _attempted(run: Run) -> list[dict[str, Any]]:
    """Dotted lines where a further attempt went on."""
    later = list(run.attempts[1:])[-LINES:]
    steps = np.array([attempt.first_step for attempt in later], np.float64)
    x = run.where(steps, np.array([attempt.started for attempt in later], np.float64))
    seen = style.inside(x, run.view)
    shapes = []
    for number, place in zip(seen.tolist(), style.places(x[seen], run.axis), strict=True):
        font = {"size": 10, "color": GREY}
        text = {"text": f"attempt {later[number].attempt}", "font": font, "textposition": "end", "textangle": 0}
        ends = {"type": "line", "x0": place, "x1": place, "y0": 0, "y1": 1, "yref": "y domain"}
        line = {"color": GREY, "width": 1, "dash": "dot"}
        shapes.append({**ends, "line": line, "label": {**text, "xanchor": "left", "yanchor": "top"}})
    return shapes

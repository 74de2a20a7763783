"""The common style of all figures: colours, templates, axes, hover texts and lines. Nothing here depends on a run."""

from __future__ import annotations

import colorsys
import math
import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hilbert_monitor.runs.run import Curve
from hilbert_monitor.runs.table import Floats

from .downsampling import POINTS, downsample, log_downsample
from .plot_options import Axis, PlotOptions
from .series import pauses, smoothed

Theme = Literal["light", "dark"]
Trace = dict[str, Any]
Rows = NDArray[np.int64]
Breaks = NDArray[np.bool_]
"""Where the line to a point is broken."""
Figure = dict[str, Any]
"""A plotly figure: {"data": traces, "layout": ...}. Plotly's own classes would take most of the time of an answer."""

COLOURS = {"AdamW": "#D55E00", "RowNorm": "#0072B2", "Muon": "#009E73", "SGD": "#CC79A7"}
"""The colours of known optimizers: those of Okabe and Ito that are legible on white and on black."""
OTHER_COLOURS = ("#A07800", "#8A6FD1", "#7F7F7F")
"""The colours of all other optimizers."""
SHADES = (0.0, 0.16, -0.12, 0.28, -0.2)
"""Changes of lightness that tell runs of one optimizer apart."""
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
"""Line styles that tell runs apart once all shades are in use."""

GREY = "#8A8F98"
"""The colour of lines that are not measurements: ceilings, bounds, attempts."""
INK = {"light": ("#1d2126", "#e7e8ea"), "dark": ("#e6e8eb", "#2a2f36")}
"""The colours of the text and of the grid."""
GROUND = {"light": "#fdfdfc", "dark": "#121417"}
"""The background of the pages. Plotly chooses the colour of the line under the pointer by the background of the plot,
and takes a transparent background for white."""
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"

TITLES: dict[Axis, str] = {"updates": "updates", "tokens": "training tokens", "time": "hours since the run began"}
HOVER_X: dict[Axis, str] = {"updates": "%{x:,} updates", "tokens": "%{x:,} tokens", "time": "%{x:.2f} hours"}
"""How a hover text writes an x coordinate."""
SHARE_TICKS = ".6~%"
"""How an axis writes shares: with as many decimals as its ticks need, so that no two read alike."""
FEW_DECADES = 2.5
"""A logarithmic axis of fewer decades has labels between the powers of ten too."""
UNIFIED = 12
"""How many lines can share one hover box. If there are more, each line has its own."""


def colour(optimizer: str) -> str:
    """An optimizer's colour. It is the same in every figure, and legible on white and on black."""
    number = zlib.crc32(optimizer.encode("utf-8", "replace"))
    return COLOURS.get(optimizer) or OTHER_COLOURS[number % len(OTHER_COLOURS)]


def shade(color: str, number: int) -> tuple[str, str]:
    """The colour and the dash of the run with this number, among runs whose optimizer has a given colour."""
    dash = DASHES[number // len(SHADES) % len(DASHES)]
    return (lighter(color, SHADES[number % len(SHADES)]) if number % len(SHADES) else color), dash


@lru_cache(maxsize=4096)
def lighter(color: str, change: float) -> str:
    """A colour whose lightness, from 0 to 1, is changed."""
    hue, lightness, saturation = colorsys.rgb_to_hls(*(part / 255 for part in rgb(color)))
    return hexadecimal(*colorsys.hls_to_rgb(hue, min(max(lightness + change, 0.15), 0.85), saturation))


def faded(color: str, opacity: float = 0.18) -> str:
    """A colour made transparent."""
    red, green, blue = rgb(color)
    return f"rgba({red},{green},{blue},{opacity})"


def rgb(color: str) -> tuple[int, int, int]:
    """Red, green and blue, from 0 to 255."""
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)


def hexadecimal(red: float, green: float, blue: float) -> str:
    """A colour from its parts, from 0 to 1."""
    return "#" + "".join(f"{round(255 * part):02X}" for part in (red, green, blue))


def template(theme: Theme) -> dict[str, Any]:
    """The plotly template of a light or a dark page: fonts, grid and legend."""
    ink, grid = INK[theme]
    axis = {"gridcolor": grid, "linecolor": grid, "zeroline": False, "ticks": "", "automargin": True}
    spike = {"spikecolor": GREY, "spikethickness": 1, "spikedash": "dot"}
    ground = "#ffffff" if theme == "light" else "#1b1f24"
    layout = {
        "font": {"family": FONT, "size": 13, "color": ink},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": GROUND[theme],
        "xaxis": {**axis, "showgrid": False, "showline": True, **spike},
        "yaxis": axis,
        "hovermode": "closest",
        "hoverlabel": {"bgcolor": ground, "bordercolor": grid, "font": {"color": ink}, "align": "left"},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "bgcolor": "rgba(0,0,0,0)"},
        "margin": {"l": 8, "r": 8, "t": 48, "b": 8},
    }
    return {"layout": layout}


# Figures


def figure(title: str, traces: list[Trace], options: PlotOptions, *, log: bool = False, **yaxis: Any) -> Figure:
    """Make a figure from traces.

    Args:
        title: title of the y axis.
        traces: plotly traces. Each has its name for the hover text in `meta`. It may have in `says` how the hover text
            formats its value, which is a number by default.
        options: the options, with an axis.
        log: whether the y axis is logarithmic.
        yaxis: more settings of the y axis.
    """
    axis = options.x_axis
    unified = _set_hover_texts(traces, axis)
    _set_uids(traces)
    y = {"title": {"text": title}, "uirevision": f"{axis} {log}", "exponentformat": "power", **yaxis}
    if log:
        y = _log_ticks(traces) | y | {"type": "log"}
    x: dict[str, Any] = {
        "title": {"text": TITLES[axis]},
        "uirevision": axis,
        "unifiedhovertitle": {"text": HOVER_X[axis]},
    }
    if axis != "time":
        x["exponentformat"] = "B"
    if options.log_x:
        x |= {"type": "log", "uirevision": f"{axis} log", "tickformat": ".4~g" if axis == "time" else "~s"}
    elif options.x0 is not None and options.x1 is not None and options.x0 < options.x1:
        x["range"] = [options.x0, options.x1]
    layout = {"uirevision": "kept", "hovermode": "x unified" if unified else "closest", "xaxis": x, "yaxis": y}
    return {"data": traces, "layout": layout}


def _set_hover_texts(traces: list[Trace], axis: Axis) -> bool:
    """Give every trace its hover text. Return whether the traces are few enough to share one hover box."""
    unified = len([trace for trace in traces if trace.get("hoverinfo") != "skip"]) <= UNIFIED
    before_value, after_value = ("", "") if unified else ("<br>", f"<br>{HOVER_X[axis]}")
    for trace in traces:
        value = trace.pop("says", "%{y:.5~g}")
        customdata = " %{customdata}" if "customdata" in trace else ""
        if trace.get("hoverinfo") != "skip":
            trace["hovertemplate"] = f"<b>%{{meta}}</b> {before_value}{value}{customdata}{after_value}<extra></extra>"
    return unified


def _set_uids(traces: list[Trace]) -> None:
    """Give every trace an id that stays the same when other groups are added.

    By it the page finds the traces that a user has hidden.
    """
    counts: dict[str, int] = {}
    for trace in reversed(traces):
        group = trace["legendgroup"]
        counts[group] = counts.get(group, 0) + 1
        trace["uid"] = f"{group} {counts[group]}"


def _log_ticks(traces: list[Trace]) -> dict[str, Any]:
    """Settings that give a logarithmic axis two labels at least: powers of ten, or numbers between them as well.

    Plotly adds finer ones on zooming.
    """
    values = [value for trace in traces if "yaxis" not in trace for value in trace["y"] if value is not None]
    decades = math.log10(max(values)) - math.log10(min(values)) if values else 0.0
    if decades < FEW_DECADES:
        return {"nticks": max(math.ceil(2 * decades), 3), "tickformat": ".4~g"}
    return {"nticks": min(math.ceil(1.11 * decades), 10)}


def name_groups(traces: list[Trace]) -> list[Trace]:
    """Show one legend entry per group, that of its widest line. A click on it toggles the whole group."""
    widest: dict[str, Trace] = {}
    for trace in traces:
        trace["showlegend"] = False
        other = widest.get(trace["legendgroup"])
        if other is None or trace["line"]["width"] >= other["line"]["width"]:
            widest[trace["legendgroup"]] = trace
    for trace in widest.values():
        trace["showlegend"] = True
    return traces


# Lines


def line(series: Curve, options: PlotOptions, *, log: bool, points: int = POINTS, smooth: float = 0.0) -> Trace:
    """x, y and mode of a downsampled curve, with a gap where a value cannot be drawn. The result is cached."""
    axis = options.x_axis
    key = ("line", axis, options.x0, options.x1, options.log_x, log, points, smooth)
    trace: Trace | None = series.cache.get(key)
    if trace is None:
        curve = series.with_x(axis)
        x, y = curve.x(axis), plottable(smoothed(curve, smooth), log)
        rows, breaks = window(x, options), line_breaks(curve, axis)
        x, y, breaks = x[rows], y[rows], breaks[rows]
        trace = xy(x, y, drawn_rows([y], x, options, breaks, points), axis, breaks)
        if len(series.cache) > 24:  # a user who zooms asks for many ranges, and rarely for one again
            series.cache.clear()
        series.cache[key] = trace
    return dict(trace)


def line_breaks(curve: Curve, axis: Axis) -> Breaks:
    """Where the line of a curve is broken: over time, at pauses."""
    return pauses(curve.steps, curve.x(axis)) if axis == "time" else np.zeros(len(curve), bool)


def drawn_rows(
    columns: Sequence[Floats], x: Floats, options: PlotOptions, breaks: Breaks, points: int = POINTS
) -> Rows:
    """Which rows of some columns to draw: those of `downsample`, and both ends of every gap."""
    rows = log_downsample(columns, x, points) if options.log_x else downsample(columns, points)
    ends = np.flatnonzero(breaks)
    return np.unique(np.concatenate([rows, ends, ends[ends > 0] - 1])) if len(ends) else rows


def unbroken_parts(rows: Rows, breaks: Breaks) -> list[Rows]:
    """Some rows, cut where the line is broken."""
    return np.split(rows, _cuts(rows, breaks)) if len(rows) else []


def _cuts(rows: Rows, breaks: Breaks) -> Rows:
    """The places among some rows before which the line is broken."""
    return np.flatnonzero(np.diff(np.cumsum(breaks)[rows])) + 1 if breaks.any() else np.empty(0, np.int64)


def xy(x: Floats, y: Floats, rows: Rows, axis: Axis, breaks: Breaks | None = None, hover: Sequence[str] = ()) -> Trace:
    """x, y and mode of a trace, for some rows of a curve.

    Args:
        x: the x coordinates of the curve.
        y: its values.
        rows: the indices of the points to draw.
        axis: the x axis.
        breaks: where the line is broken; None for nowhere.
        hover: a text for each of these points, which follows the value in the hover box.
    """
    cuts = _cuts(rows, breaks) if breaks is not None else np.empty(0, np.int64)
    x, y = x[rows], y[rows]
    if len(cuts):
        x, y = np.insert(x, cuts, x[cuts]), np.insert(y, cuts, np.nan)
    texts: Trace = {"customdata": np.insert(np.array(hover, object), cuts, "").tolist()} if hover else {}
    return {"x": places(x, axis), "y": numbers(y), "mode": "lines" if len(rows) > 30 else "lines+markers"} | texts


def plottable(values: Floats, log: bool) -> Floats:
    """The values, with nan where they cannot be drawn: not finite, or not positive on a logarithmic axis."""
    valid = np.isfinite(values) & (values > 0) if log else np.isfinite(values)
    return values if valid.all() else np.where(valid, values, np.nan)


def window(x: Floats, options: PlotOptions) -> slice:
    """The rows in the visible range and one more on either side, so that lines reach the edges of the plot."""
    if options.x0 is None and options.x1 is None:
        return slice(None)
    rows = inside(x, options)
    if len(rows):
        return slice(max(int(rows[0]) - 1, 0), int(rows[-1]) + 2)
    before = 0 if options.x0 is None else int(np.count_nonzero(x < options.x0))
    return slice(max(before - 1, 0), before + 1)


def inside(x: Floats, options: PlotOptions) -> NDArray[np.int64]:
    """The rows in the visible range."""
    low, high = (-math.inf if options.x0 is None else options.x0), (math.inf if options.x1 is None else options.x1)
    return np.flatnonzero((x >= low) & (x <= high) & np.isfinite(x))


def places(x: Floats, axis: Axis) -> list[float]:
    """x coordinates for JSON: integers for updates and tokens, hours rounded to a fraction of a second."""
    integral = axis != "time" and np.abs(x).max(initial=0.0) < 2**53
    coordinates: list[float] = (np.round(x).astype(np.int64) if integral else np.round(x, 5)).tolist()
    return coordinates


def numbers(y: Floats) -> list[float | None]:
    """Values for JSON, with None for nan."""
    values: list[float | None] = y.tolist()
    return [None if value != value else value for value in values] if np.isnan(y).any() else values


def late_range(traces: Sequence[Trace], options: PlotOptions) -> list[float] | None:
    """A range of the y axis that leaves out the high losses of the start, or None for plotly's own range.

    It fits what the traces draw after the first twentieth of x. There is none for a zoomed plot or for few points.
    """
    drawn = [trace for trace in traces if trace["x"]]
    if options.x0 is not None or options.x1 is not None or not drawn:
        return None
    start = max(trace["x"][-1] for trace in drawn) / 20
    values = [y for trace in drawn for x, y in zip(trace["x"], trace["y"], strict=True) if y is not None and x > start]
    if len(values) < 20:
        return None
    low, high = min(values), max(values)
    margin = (high - low) / 20
    return [low - margin, high + margin] if math.isfinite(abs(low) + abs(high) + margin) else None

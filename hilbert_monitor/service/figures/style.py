"""The common style of all figures: colours, templates, axes, hover texts and lines. Nothing here depends on a run."""

from __future__ import annotations

import colorsys
import math
import zlib
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hilbert_monitor.service.following.columns import Floats

from .downsampling import POINTS, downsample
from .plot_options import Axis, PlotOptions
from .series import Series

Theme = Literal["light", "dark"]
Trace = dict[str, Any]
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
UNIFIED = 12
"""How many lines can share one hover box. If there are more, each line has its own."""


def colour(optimizer: str) -> str:
    """An optimizer's colour. It is the same in every figure, and legible on white and on black."""
    number = zlib.crc32(optimizer.encode("utf-8", "replace"))
    return COLOURS.get(optimizer) or OTHER_COLOURS[number % len(OTHER_COLOURS)]


def shade(color: str, number: int) -> tuple[str, str]:
    """The colour and the dash of the run with this number, among runs whose optimizer has a given colour."""
    hue, lightness, saturation = colorsys.rgb_to_hls(*(part / 255 for part in _rgb(color)))
    lightness = min(max(lightness + SHADES[number % len(SHADES)], 0.15), 0.85)
    red, green, blue = (round(255 * part) for part in colorsys.hls_to_rgb(hue, lightness, saturation))
    dash = DASHES[number // len(SHADES) % len(DASHES)]
    return (f"#{red:02X}{green:02X}{blue:02X}" if number % len(SHADES) else color), dash


def faded(color: str, opacity: float = 0.18) -> str:
    """A colour made transparent."""
    red, green, blue = _rgb(color)
    return f"rgba({red},{green},{blue},{opacity})"


def _rgb(color: str) -> tuple[int, int, int]:
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)


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
        y |= {"type": "log", "nticks": _log_ticks(traces)}
    x: dict[str, Any] = {
        "title": {"text": TITLES[axis]},
        "uirevision": axis,
        "unifiedhovertitle": {"text": HOVER_X[axis]},
    }
    if axis != "time":
        x["exponentformat"] = "B"
    if options.x0 is not None and options.x1 is not None and options.x0 < options.x1:
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


def _log_ticks(traces: list[Trace]) -> int:
    """The number of ticks on a logarithmic axis that puts one at every decade; plotly adds finer ones on zooming."""
    values = [value for trace in traces if "yaxis" not in trace for value in trace["y"] if value is not None]
    span = math.log10(max(values)) - math.log10(min(values)) if values else 0.0
    return max(math.ceil(1.11 * span), 2)


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


def line(series: Series, options: PlotOptions, *, log: bool, points: int = POINTS, smooth: float = 0.0) -> Trace:
    """x, y and mode of a downsampled curve, with a gap where a value cannot be drawn. The result is cached."""
    axis = options.x_axis
    key = ("line", axis, options.x0, options.x1, log, points, smooth)
    trace: Trace | None = series.cache.get(key)
    if trace is None:
        curve = series.with_x(axis)
        x, y = curve.x(axis), plottable(curve.smoothed(smooth), log)
        rows = window(x, options)
        x, y = x[rows], y[rows]
        trace = xy(x, y, downsample([y], points), axis)
        if len(series.cache) > 24:  # a user who zooms asks for many ranges, and rarely for one again
            series.cache.clear()
        series.cache[key] = trace
    return dict(trace)


def xy(x: Floats, y: Floats, rows: NDArray[np.int64], axis: Axis, hover: Sequence[str] = ()) -> Trace:
    """x, y and mode of a trace, for some rows of a curve.

    The mean time of several runs jumps back where the slow ones end. The line has a gap there.

    Args:
        x: the x coordinates of the curve.
        y: its values.
        rows: the indices of the points to draw.
        axis: the x axis.
        hover: a text for each of these points, which follows the value in the hover box.
    """
    x, y = x[rows], y[rows]
    jumps = np.flatnonzero(x[1:] < x[:-1]) + 1
    if len(jumps):
        x, y = np.insert(x, jumps, x[jumps]), np.insert(y, jumps, np.nan)
    texts: Trace = {"customdata": np.insert(np.array(hover, object), jumps, "").tolist()} if hover else {}
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


def late_range(curves: Sequence[Series], options: PlotOptions) -> list[float] | None:
    """A range of the y axis that leaves out the high losses of the start, or None for plotly's own range.

    It fits the values after the first twentieth of the longest run. There is none for a zoomed plot or fewer than 20
    values.
    """
    axis = options.x_axis
    if options.x0 is not None or options.x1 is not None:
        return None
    curves = [curve for curve in (curve.with_x(axis) for curve in curves) if len(curve)]
    start = max((curve.last_x(axis) for curve in curves), default=0.0) / 20
    count, low, high = 0, math.inf, -math.inf
    for curve in curves:
        values = curve.values[curve.index_after(axis, start) :]
        values = values if curve.all_finite else values[np.isfinite(values)]
        if len(values):
            count, low, high = count + len(values), min(low, float(values.min())), max(high, float(values.max()))
    margin = (high - low) / 20
    if count < 20 or not math.isfinite(abs(low) + abs(high) + margin):
        return None
    return [low - margin, high + margin]

"""What all figures look like: colours, axes, hover texts, and lines that an axis has room for. No run is known here."""

from __future__ import annotations

import colorsys
import math
import zlib
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hilbert_monitor.service.following.columns import Floats

from .downsampling import POINTS, thin
from .plot_options import Axis, PlotOptions
from .series import Series

Theme = Literal["light", "dark"]
Trace = dict[str, Any]
Figure = dict[str, Any]
"""A plotly figure: {"data": traces, "layout": ...}. Building plotly's own objects would take most of a page's time."""

COLOURS = {"AdamW": "#D55E00", "RowNorm": "#0072B2", "Muon": "#009E73", "SGD": "#CC79A7"}
OTHERS = ("#A07800", "#8A6FD1", "#7F7F7F")
"""Okabe and Ito's, where they are legible on white and on black."""
SHADES = (0.0, 0.16, -0.12, 0.28, -0.2)
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
"""Shades of a colour, and dashes for when they are used up."""

GREY = "#8A8F98"
"""Of what is not measured: ceilings, bounds, attempts."""
INK = {"light": ("#1d2126", "#e7e8ea"), "dark": ("#e6e8eb", "#2a2f36")}
"""Of the text and of the grid."""
GROUND = {"light": "#fdfdfc", "dark": "#121417"}
"""Of the pages: plotly makes the line under the pointer visible on it, and takes a transparent one for white."""
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"

TITLES: dict[Axis, str] = {"updates": "updates", "tokens": "training tokens", "time": "hours since the run began"}
PLACES: dict[Axis, str] = {"updates": "%{x:,} updates", "tokens": "%{x:,} tokens", "time": "%{x:.2f} hours"}
UNIFIED = 12
"""Lines that a common hover text has room for; with more, each speaks for itself."""


def colour(optimizer: str) -> str:
    """An optimizer's colour, the same in every figure; legible on white and on black."""
    return COLOURS.get(optimizer) or OTHERS[zlib.crc32(optimizer.encode("utf-8", "replace")) % len(OTHERS)]


def shade(color: str, number: int) -> tuple[str, str]:
    """A colour of the same family, and a dash, for the line with this number."""
    hue, light, saturation = colorsys.rgb_to_hls(*(part / 255 for part in _parts(color)))
    light = min(max(light + SHADES[number % len(SHADES)], 0.15), 0.85)
    red, green, blue = (round(255 * part) for part in colorsys.hls_to_rgb(hue, light, saturation))
    dash = DASHES[number // len(SHADES) % len(DASHES)]
    return (f"#{red:02X}{green:02X}{blue:02X}" if number % len(SHADES) else color), dash


def faded(color: str, opacity: float = 0.18) -> str:
    """A colour that others shine through."""
    red, green, blue = _parts(color)
    return f"rgba({red},{green},{blue},{opacity})"


def _parts(color: str) -> tuple[int, int, int]:
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)


def template(theme: Theme) -> dict[str, Any]:
    """Fonts, grid and legend for a light or a dark page."""
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


def figure(title: str, traces: list[Trace], view: PlotOptions, *, log: bool = False, **yaxis: Any) -> Figure:
    """A figure of some traces, whose view has its axis."""
    axis: Axis = view.axis or "updates"
    unified = _say(traces, axis)
    _tell_apart(traces)
    y = {"title": {"text": title}, "uirevision": f"{axis} {log}", "exponentformat": "power", **yaxis}
    if log:
        y |= {"type": "log", "nticks": _decades(traces)}
    x: dict[str, Any] = {
        "title": {"text": TITLES[axis]},
        "uirevision": axis,
        "unifiedhovertitle": {"text": PLACES[axis]},
    }
    if axis != "time":
        x["exponentformat"] = "B"
    if view.x0 is not None and view.x1 is not None and view.x0 < view.x1:
        x["range"] = [view.x0, view.x1]
    layout = {"uirevision": "kept", "hovermode": "x unified" if unified else "closest", "xaxis": x, "yaxis": y}
    return {"data": traces, "layout": layout}


def _say(traces: list[Trace], axis: Axis) -> bool:
    """Give every line its hover text, and say whether they all speak at once.

    A trace has its name as `meta`, and in `says` how its value is said if not as a number.
    """
    unified = len([trace for trace in traces if trace.get("hoverinfo") != "skip"]) <= UNIFIED
    before, behind = ("", "") if unified else ("<br>", f"<br>{PLACES[axis]}")
    for trace in traces:
        value = trace.pop("says", "%{y:.5~g}")
        more = " %{customdata}" if "customdata" in trace else ""
        if trace.get("hoverinfo") != "skip":
            trace["hovertemplate"] = f"<b>%{{meta}}</b> {before}{value}{more}{behind}<extra></extra>"
    return unified


def _tell_apart(traces: list[Trace]) -> None:
    """Give every trace an id, by which a page knows what was toggled though others came before it."""
    seen: dict[str, int] = {}
    for trace in reversed(traces):
        group = trace["legendgroup"]
        seen[group] = seen.get(group, 0) + 1
        trace["uid"] = f"{group} {seen[group]}"


def _decades(traces: list[Trace]) -> int:
    """Ticks for a logarithmic axis: one at every decade, and finer ones where that is zoomed into."""
    values = [value for trace in traces if "yaxis" not in trace for value in trace["y"] if value is not None]
    span = math.log10(max(values)) - math.log10(min(values)) if values else 0.0
    return max(math.ceil(1.11 * span), 2)


def name_groups(traces: list[Trace]) -> list[Trace]:
    """Put the last and strongest line of every group into the legend; it toggles the whole group."""
    strongest: dict[str, Trace] = {}
    for trace in traces:
        trace["showlegend"] = False
        known = strongest.get(trace["legendgroup"])
        if known is None or trace["line"]["width"] >= known["line"]["width"]:
            strongest[trace["legendgroup"]] = trace
    for trace in strongest.values():
        trace["showlegend"] = True
    return traces


# Lines


def line(series: Series, view: PlotOptions, *, log: bool, points: int = POINTS, smooth: float = 0.0) -> Trace:
    """x and y of a curve, thinned, with gaps where the axis has no place for a value; worked out once."""
    axis: Axis = view.axis or "updates"
    key = ("line", axis, view.x0, view.x1, log, points, smooth)
    found: Trace | None = series.memo.get(key)
    if found is None:
        here = series.on(axis)
        x, y = here.along(axis), shown(here.smoothed(smooth), log)
        part = window(x, view)
        x, y = x[part], y[part]
        found = drawn(x, y, thin([y], points), axis)
        if len(series.memo) > 24:  # a page that zooms has many views, of which few come back
            series.memo.clear()
        series.memo[key] = found
    return dict(found)


def drawn(x: Floats, y: Floats, kept: NDArray[np.int64], axis: Axis, said: Sequence[str] = ()) -> Trace:
    """x, y and mode of a trace, of the places that are kept, and what is said at each of them.

    Where x goes back, as the mean time does when slow runs end, there is a gap.
    """
    x, y = x[kept], y[kept]
    back = np.flatnonzero(x[1:] < x[:-1]) + 1
    if len(back):
        x, y = np.insert(x, back, x[back]), np.insert(y, back, np.nan)
    more: Trace = {"customdata": np.insert(np.array(said, object), back, "").tolist()} if said else {}
    return {"x": places(x, axis), "y": numbers(y), "mode": "lines" if len(kept) > 30 else "lines+markers"} | more


def shown(values: Floats, log: bool) -> Floats:
    """Values that the axis has a place for, and else gaps."""
    known = np.isfinite(values) & (values > 0) if log else np.isfinite(values)
    return values if known.all() else np.where(known, values, np.nan)


def window(x: Floats, view: PlotOptions) -> slice:
    """The places in the view's range, and one more on either side, so that lines go on to the edge."""
    if view.x0 is None and view.x1 is None:
        return slice(None)
    found = inside(x, view)
    if len(found):
        return slice(max(int(found[0]) - 1, 0), int(found[-1]) + 2)
    before = 0 if view.x0 is None else int(np.count_nonzero(x < view.x0))
    return slice(max(before - 1, 0), before + 1)


def inside(x: Floats, view: PlotOptions) -> NDArray[np.int64]:
    """The places in the view's range, and no more."""
    low, high = (-math.inf if view.x0 is None else view.x0), (math.inf if view.x1 is None else view.x1)
    return np.flatnonzero((x >= low) & (x <= high) & np.isfinite(x))


def places(x: Floats, axis: Axis) -> list[float]:
    """Tokens and updates are whole numbers, hours have a place for a tenth of a second."""
    whole = axis != "time" and np.abs(x).max(initial=0.0) < 2**53
    found: list[float] = (np.round(x).astype(np.int64) if whole else np.round(x, 5)).tolist()
    return found


def numbers(y: Floats) -> list[float | None]:
    """Numbers, None for a gap."""
    found: list[float | None] = y.tolist()
    return [None if value != value else value for value in found] if np.isnan(y).any() else found


def late_range(curves: Sequence[Series], view: PlotOptions) -> list[float] | None:
    """The losses after the first twentieth of the longest run, so that the start does not press the rest flat."""
    axis: Axis = view.axis or "updates"
    if view.x0 is not None or view.x1 is not None:
        return None
    curves = [curve for curve in (curve.on(axis) for curve in curves) if len(curve)]
    start = max((curve.end(axis) for curve in curves), default=0.0) / 20
    count, low, high = 0, math.inf, -math.inf
    for curve in curves:
        values = curve.values[curve.after(axis, start) :]
        values = values if curve.finite else values[np.isfinite(values)]
        if len(values):
            count, low, high = count + len(values), min(low, float(values.min())), max(high, float(values.max()))
    room = (high - low) / 20
    if count < 20 or not math.isfinite(abs(low) + abs(high) + room):
        return None
    return [low - room, high + room]

"""A figure as an SVG: for papers, for print, and for browsers without JavaScript.

It draws the part of plotly's form that our figures use: lines with gaps and dashes, bands between two lines, marks,
linear and logarithmic axes, and a legend. Plotly itself makes an SVG only in a browser, in the colours and at the size
of its page. Here the ground is white, the text is text, and every figure has the same size.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from hilbert_monitor.service.figures.style import GREY, INK, Figure, Trace
from hilbert_monitor.service.following.text import clip

from .scale import Scale, Tick

WIDTH, HEIGHT, SIZE = 320.0, 215.0, 9.0
"""Of a figure with a short legend, and of its letters, in points."""
ROW, ROWS = 1.5 * SIZE, 2
"""Height of a row of the legend, and how many of them fit into the figure as it is."""
MANY, SMALL = 8, 7.0
"""A legend of more names than these has small letters, and leaves out the training losses beside the others."""
THICKNESS = 0.6
"""Points of a line for each pixel that the figure gives it."""
FONT = "Helvetica, Arial, sans-serif"
DASHES = {"dash": "5 3", "dot": "1.2 2.2", "dashdot": "5 2 1.2 2", "longdash": "9 3"}
DARK, LIGHT = INK["light"]
GAP = 14.0
"""Between two names of the legend."""
NARROW, WIDE = "ijltfI.,:;|!'() ", "mwMW%@"
UNPRINTABLE = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML does not allow."""

Point = tuple[float, float]


def svg(figure: Figure, name: str = "figure") -> str:
    """The text of an SVG file, which is also an element of an HTML page.

    Args:
        figure: a figure in plotly's form.
        name: a name that no other figure of the page has.
    """
    plot = _plot(figure)
    clip = f"clip-{name}"
    body = [
        *_y_axis(plot, figure["layout"]["yaxis"]),
        *_x_axis(plot, figure["layout"]["xaxis"]),
        f'<clipPath id="{clip}"><rect {_box(plot)}/></clipPath><g clip-path="url(#{clip})">',
        *_shapes(plot, figure["layout"].get("shapes", ())),
        *_curves(plot, figure["data"]),
        "</g>",
        *_legend(figure["data"]),
    ]
    height = HEIGHT + ROW * extra_rows(figure)
    size = f'viewBox="0 0 {WIDTH:g} {height:g}" width="{WIDTH:g}pt" height="{height:g}pt"'
    font = f'font-family="{FONT}" font-size="{SIZE:g}" fill="{DARK}" stroke-linejoin="round"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>{"".join(body)}</svg>'


def extra_rows(figure: Figure) -> int:
    """How many rows a long legend has more than a figure has room for. The figure is higher by these."""
    return max(len(_legend_rows(figure["data"])) - ROWS, 0)


@dataclass(frozen=True, slots=True)
class _Plot:
    """The area of the curves, and its scales."""

    left: float
    top: float
    width: float
    height: float
    x: Scale
    y: Scale

    def point(self, x: float, y: float, axis: str = "y") -> Point:
        """A point in the figure. Marks, on the axis y2, have heights from 0 to 1."""
        height = y if axis == "y2" else self.y.place(y)
        return self.left + self.width * self.x.place(x), self.top + self.height * (1 - height)


def _plot(figure: Figure) -> _Plot:
    x, y = _scales(figure)
    rows = len(_legend_rows(figure["data"]))
    top = 10 + ROW * rows
    labels = _y_ticks(y, figure["layout"]["yaxis"])
    left = 14 + SIZE + max((_length(tick.text) + 0.7 * _length(tick.exponent) for tick in labels), default=0)
    height = HEIGHT + ROW * extra_rows(figure) - top - 3.6 * SIZE
    return _Plot(left, top, WIDTH - left - 12, height, x, y)


def _scales(figure: Figure) -> tuple[Scale, Scale]:
    layout, traces = figure["layout"], [trace for trace in figure["data"] if trace.get("yaxis") != "y3"]
    x = [value for trace in traces for value in trace["x"] if value is not None]
    y = [value for trace in traces if trace.get("yaxis") != "y2" for value in trace["y"] if value is not None]
    log, to_zero = layout["yaxis"].get("type") == "log", layout["yaxis"].get("rangemode") == "tozero"
    y_range = layout["yaxis"].get("range")
    return (
        Scale.of(x, log=layout["xaxis"].get("type") == "log", margin=0.02),
        Scale(*y_range) if y_range and not log else Scale.of(y, log=log, to_zero=to_zero),
    )


# Axes


def _y_ticks(scale: Scale, axis: dict[str, Any]) -> list[Tick]:
    return scale.ticks(5, percent="%" in axis.get("tickformat", ""))


def _y_axis(plot: _Plot, axis: dict[str, Any]) -> Iterator[str]:
    """Grid lines with their values, and the title, which runs upwards."""
    for tick in _y_ticks(plot.y, axis):
        y = plot.top + plot.height * (1 - plot.y.place(tick.value))
        yield _line([(plot.left, y), (plot.left + plot.width, y)], LIGHT, 0.7)
        yield _words(tick.text, plot.left - 5, y + 0.35 * SIZE, "end", exponent=tick.exponent)
    x, middle = SIZE + 1, plot.top + plot.height / 2
    yield _words(axis["title"]["text"], x, middle, "middle", turn=f' transform="rotate(-90 {x:.1f} {middle:.1f})"')


def _x_ticks(scale: Scale, axis: dict[str, Any]) -> list[Tick]:
    """The ticks that the figure names, or some of the scale's own."""
    if "tickvals" in axis:
        return [Tick(value, text) for value, text in zip(axis["tickvals"], axis["ticktext"], strict=True)]
    return scale.ticks(6, letters=axis.get("exponentformat") == "B")


def _x_axis(plot: _Plot, axis: dict[str, Any]) -> Iterator[str]:
    """The line below the curves, its values, and the title."""
    bottom = plot.top + plot.height
    yield _line([(plot.left, bottom), (plot.left + plot.width, bottom)], GREY, 0.7)
    for tick in _x_ticks(plot.x, axis):
        x = plot.left + plot.width * plot.x.place(tick.value)
        yield _line([(x, bottom), (x, bottom + 3)], GREY, 0.7)
        yield _words(tick.text, x, bottom + 1.5 * SIZE, "middle")
    yield _words(axis["title"]["text"], plot.left + plot.width / 2, bottom + 3.1 * SIZE, "middle")


# Curves


def _curves(plot: _Plot, traces: Sequence[Trace]) -> Iterator[str]:
    """Bands, lines and marks, in the order of the traces."""
    below: list[Point] = []
    for trace in traces:
        axis = trace.get("yaxis", "y")
        if axis == "y3":
            continue
        pieces = _pieces(plot, trace, axis)
        points = [point for piece in pieces for point in piece]
        if trace.get("fill") == "tonexty" and points:
            yield f'<path d="{_path([*below, *reversed(points)])}Z" {_fill(trace["fillcolor"])}/>'
        below = points
        line, opacity = trace.get("line", {}), trace.get("opacity", 1.0)
        if "lines" in trace["mode"] and line.get("width") and pieces:
            path = "".join(_path(piece) for piece in pieces)
            yield _stroke(path, line["color"], line["width"] * THICKNESS, line.get("dash", "solid"), opacity)
        if "markers" in trace["mode"] and (trace.get("marker") or line.get("width")):
            yield from (_mark(point, trace, opacity) for point in points)


def _pieces(plot: _Plot, trace: Trace, axis: str) -> list[list[Point]]:
    """The points of a trace, in one piece between two gaps."""
    pairs = zip(trace["x"], trace["y"], strict=True)
    pieces = groupby(pairs, key=lambda pair: pair[0] is not None and pair[1] is not None)
    return [[plot.point(x, y, axis) for x, y in piece] for there, piece in pieces if there]


def _mark(point: Point, trace: Trace, opacity: float) -> str:
    """A dot of a line, or a mark: a cross, or a triangle that points down."""
    marker, (x, y) = trace.get("marker", {}), point
    color, size = marker.get("color") or trace["line"]["color"], 3.0
    if marker.get("symbol") == "x":
        corners = [(x - size, y - size), (x + size, y + size)], [(x - size, y + size), (x + size, y - size)]
        return "".join(_line(corner, color, 1.5) for corner in corners)
    if marker.get("symbol") == "triangle-down":
        return f'<path d="{_path([(x - size, y - size), (x + size, y - size), (x, y + size)])}Z" {_fill(color)}/>'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="1.6" {_fill(color, opacity)}/>'


def _shapes(plot: _Plot, shapes: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Upright lines, such as that of a further attempt."""
    for shape in shapes:
        ends = [plot.point(shape["x0"], height, "y2") for height in (0, 1)]
        yield _stroke(_path(ends), shape["line"]["color"], THICKNESS, shape["line"]["dash"], 1.0)


# The legend


def _legend(traces: Sequence[Trace]) -> Iterator[str]:
    size = _legend_size(traces)
    for number, row in enumerate(_legend_rows(traces)):
        y = 6 + ROW * (number + 0.5)
        for x, trace in row:
            ends, line = [(x, y), (x + 16, y)], trace.get("line", {})
            if "lines" in trace["mode"] and line.get("width"):
                opacity = max(trace.get("opacity", 1.0), 0.5)
                yield _stroke(_path(ends), line["color"], line["width"] * THICKNESS, line.get("dash", "solid"), opacity)
            else:
                yield _mark((x + 8, y), trace, 1.0)
            yield _words(_name(trace, size), x + 20, y + 0.35 * size, "start", size=size)


def _legend_rows(traces: Sequence[Trace]) -> list[list[tuple[float, Trace]]]:
    """The traces that the legend names, in rows that fit, each with the x coordinate of its entry."""
    rows: list[list[tuple[float, Trace]]] = []
    x, size = math.inf, _legend_size(traces)
    for trace in _named(traces):
        length = 20 + _length(_name(trace, size), size) + GAP
        if x + length > WIDTH:
            rows.append([])
            x = 8.0
        rows[-1].append((x, trace))
        x += length
    return rows


def _legend_size(traces: Sequence[Trace]) -> float:
    return SIZE if len(_named(traces)) <= MANY else SMALL


def _named(traces: Sequence[Trace]) -> list[Trace]:
    """The traces that the legend names, in its order."""
    named = [trace for trace in traces if trace.get("showlegend") and trace.get("yaxis") != "y3"]
    if len(named) > MANY:
        named = [trace for trace in named if "legendrank" not in trace] or named
    return sorted(named, key=lambda trace: trace.get("legendrank", 1000))


def _name(trace: Trace, size: float) -> str:
    """The name of a trace, cut to what fits into the figure."""
    return clip(html.unescape(trace.get("name", "")), round((WIDTH - 40) / (0.5 * size)))


# Pieces of SVG


def _path(points: Sequence[Point]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _stroke(path: str, color: str, width: float, dash: str, opacity: float) -> str:
    more = f' stroke-dasharray="{DASHES[dash]}"' if dash in DASHES else ""
    paint, share = _paint(color)
    more += f' stroke-opacity="{share * opacity:.3g}"' if share * opacity < 1 else ""
    return f'<path d="{path}" fill="none" stroke="{paint}" stroke-width="{width:.3g}"{more}/>'


def _line(ends: Sequence[Point], color: str, width: float) -> str:
    return _stroke(_path(ends), color, width, "solid", 1.0)


def _fill(color: str, opacity: float = 1.0) -> str:
    paint, share = _paint(color)
    return f'fill="{paint}"' + (f' fill-opacity="{share * opacity:.3g}"' if share * opacity < 1 else "")


def _paint(color: str) -> tuple[str, float]:
    """A colour as #rrggbb, and its opacity. Programs for drawing do not read rgba()."""
    match = re.fullmatch(r"rgba\((\d+),(\d+),(\d+),([\d.]+)\)", color)
    if match is None:
        return color, 1.0
    return "#" + "".join(f"{int(part):02x}" for part in match.groups()[:3]), float(match[4])


def _box(plot: _Plot) -> str:
    return f'x="{plot.left:.1f}" y="{plot.top:.1f}" width="{plot.width:.1f}" height="{plot.height:.1f}"'


def _words(
    text: str, x: float, y: float, anchor: str, *, exponent: str = "", size: float = SIZE, turn: str = ""
) -> str:
    raised = f'<tspan dy="-{0.4 * SIZE:.1f}" font-size="{0.75 * SIZE:.3g}">{exponent}</tspan>' if exponent else ""
    words = html.escape(UNPRINTABLE.sub("", html.unescape(text)), quote=False)
    more = turn if size == SIZE else f' font-size="{size:g}"{turn}'
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{words}{raised}</text>'


def _length(text: str, size: float = SIZE) -> float:
    """About how wide a text is, in a font that is a little wider than Helvetica."""
    return size * sum(0.3 if c in NARROW else 0.85 if c in WIDE else 0.68 if c.isupper() else 0.58 for c in text)

"""Checkpoints of a run over its updates, as one figure: an SVG, or a page that opens without a network."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from hilbert_monitor.service.figures.style import GREY, Figure, Trace, colour
from hilbert_monitor.service.report.svg import WIDTH, svg

from .look import HeadLook

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }}
svg {{ width: 48%; height: auto; min-width: 20rem }}</style></head>
<body><h1>{title}</h1>
{body}
<p>{caption}</p></body></html>
"""
CAPTION = (
    "D(U): the largest distance between two rows of the head. Next D(S): that of the step which the optimizer's moments"
    " would make if the next gradient were zero, and its ceiling."
)
POINTS = re.compile(r'(width|height)="([\d.]+)pt"')
"""The size of an SVG element."""
SPACE = 20.0
"""Between two figures, in points."""


def write_figure(looks: Sequence[HeadLook], path: Path) -> None:
    """Write the head, and the next step where there is one: an .svg stacks both, an .html has them side by side."""
    ordered = sorted(looks, key=lambda each: _place(each, looks))
    figures = [figure for figure in (_head(ordered), _next_step(ordered)) if figure is not None]
    pieces = [svg(figure, f"figure-{number}") for number, figure in enumerate(figures)]
    if path.suffix.lower() == ".svg":
        path.write_text(_stacked(pieces), encoding="utf-8")
        return
    title = html.escape(f"The LM head {ordered[0].head} over {len(ordered)} checkpoints")
    path.write_text(PAGE.format(title=title, body="\n".join(pieces), caption=CAPTION), encoding="utf-8")


def _head(looks: Sequence[HeadLook]) -> Figure:
    name = looks[0].next.optimizer if looks[0].next is not None else "head"
    traces = [
        _trace(looks, "D(U)", lambda each: each.diameter, colour(name)),
        _trace(looks, "spectral norm", lambda each: each.spectral_norm, colour(name), dash="dash"),
        _trace(looks, "mean norm of a row", lambda each: each.row_norm, GREY),
        _trace(looks, "mean row", lambda each: each.mean_row, GREY, dash="dot"),
    ]
    return _figure("the head", looks, traces)


def _next_step(looks: Sequence[HeadLook]) -> Figure | None:
    known = [each.next for each in looks if each.next is not None]
    if not known:
        return None
    traces = [
        _trace(looks, "next D(S)", lambda each: each.next.diameter if each.next else None, colour(known[0].optimizer)),
        _trace(looks, "ceiling", lambda each: each.next.ceiling if each.next else None, GREY, dash="dash"),
    ]
    return _figure("the next step", looks, [trace for trace in traces if any(y is not None for y in trace["y"])])


def _trace(
    looks: Sequence[HeadLook], name: str, value: Callable[[HeadLook], float | None], color: str, dash: str = "solid"
) -> Trace:
    values = [value(each) for each in looks]
    return {
        "x": [_place(each, looks) for each in looks],
        "y": [y if y is not None and 0 < y < float("inf") else None for y in values],  # the axis is logarithmic
        "name": name,
        "mode": "lines+markers",
        "showlegend": True,
        "line": {"color": color, "width": 2, "dash": dash},
    }


def _figure(title: str, looks: Sequence[HeadLook], traces: list[Trace]) -> Figure:
    below = "updates" if _are_numbered(looks) else "checkpoint"
    axes = {"xaxis": {"title": {"text": below}}, "yaxis": {"title": {"text": title}, "type": "log"}}
    return {"data": traces, "layout": axes}


def _place(each: HeadLook, looks: Sequence[HeadLook]) -> float:
    """The x coordinate: updates, or the place in the list where a checkpoint does not tell."""
    return float(each.step or 0) if _are_numbered(looks) else looks.index(each)


def _are_numbered(looks: Sequence[HeadLook]) -> bool:
    """Whether every checkpoint tells its update."""
    return all(each.step is not None for each in looks)


def _stacked(pieces: Sequence[str]) -> str:
    """Several SVG elements one below the other, as one file.

    An element within another is laid out in the outer one's units, where a point is 4/3 of one: its size loses its
    unit, or each figure would be a third larger than its room.
    """
    if len(pieces) == 1:
        return pieces[0]
    placed, top = [], 0.0
    for piece in pieces:
        inner = POINTS.sub(r'\1="\2"', piece, count=2)
        placed.append(inner.replace("<svg ", f'<svg y="{top:g}" ', 1))
        top += float(POINTS.findall(piece)[1][1]) + SPACE
    height = top - SPACE
    size = f'viewBox="0 0 {WIDTH:g} {height:g}" width="{WIDTH:g}pt" height="{height:g}pt"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(placed)}</svg>'

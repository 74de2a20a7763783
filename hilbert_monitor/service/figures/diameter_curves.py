"""What a diameter buys: the final loss of runs over the diameter that their steps were allowed.

Runs that are points of a sweep say so in their configuration (`runs.diameter_sweep`). Runs of one point differ in the
seed alone: their mean is a point of a curve, and one sample standard deviation its band. Finished runs count, and of
several with one seed the last.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from hilbert_monitor.runs.diameter_sweep import SweepPoint, sweep_point
from hilbert_monitor.service.following.text import label

from . import style
from .final_values import SampleStatistics, final_value, sample_statistics
from .grouping import listed, optimizer_order
from .plot_options import PLAIN
from .series import RunSeries
from .style import Figure, Trace

ALLOWED = "diameter allowed, in multiples of RowNorm's"
WARMUP = 0.1
"""Share of a run's steps at its beginning whose diameters are not counted."""


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """The runs of one point."""

    allowed: float
    """Infinite for runs without a limit."""
    loss: SampleStatistics
    """The final validation loss."""
    made: SampleStatistics
    """The median diameter of the steps that were made, in units."""
    runs: tuple[str, ...]
    """Ids of the runs that count."""


@dataclass(frozen=True, slots=True)
class DiameterSweep:
    """The curves of one model."""

    model: str
    curves: dict[str, tuple[CurvePoint, ...]]
    """By name, each in the order of its diameters. Runs without a limit are one point, the last."""
    notes: tuple[str, ...] = ()
    """Sentences that say what was left out."""

    @property
    def runs(self) -> int:
        """Number of runs that count."""
        return sum(len(point.runs) for points in self.curves.values() for point in points)


def point_of(run: RunSeries) -> SweepPoint | None:
    """The point of a sweep that a run is, if it is one."""
    return sweep_point(dict(run.settings))


def diameter_sweeps(runs: Iterable[RunSeries]) -> list[DiameterSweep]:
    """The sweeps among some runs, one for each model that has one."""
    placed = [(run, point) for run in sorted(runs, key=lambda run: (run.started, run.id)) if (point := point_of(run))]
    models = sorted({run.model for run, _ in placed})
    return [_sweep(model, [(run, point) for run, point in placed if run.model == model]) for model in models]


def _sweep(model: str, placed: Sequence[tuple[RunSeries, SweepPoint]]) -> DiameterSweep:
    members: dict[tuple[str, float], dict[object, tuple[RunSeries, SweepPoint]]] = {}
    for run, point in placed:
        if run.status == "finished":
            seed = run.id if run.seed is None else run.seed
            members.setdefault((point.curve, point.allowed), {})[seed] = run, point
    points = {key: _point(key[1], list(some.values())) for key, some in members.items()}
    names = sorted({curve for curve, _ in points}, key=lambda name: (optimizer_order(name.partition(",")[0]), name))
    curves = {name: tuple(point for (curve, _), point in sorted(points.items()) if curve == name) for name in names}
    return DiameterSweep(model, curves, tuple(_notes(placed, curves)))


def _point(allowed: float, placed: Sequence[tuple[RunSeries, SweepPoint]]) -> CurvePoint:
    losses = [final_value(run, "validation_loss") for run, _ in placed]
    made = [value for run, point in placed if (value := _made(run, point)) is not None]
    finite = [loss for loss in losses if loss is not None and math.isfinite(loss)]
    return CurvePoint(allowed, sample_statistics(finite), sample_statistics(made), tuple(run.id for run, _ in placed))


def _made(run: RunSeries, point: SweepPoint) -> float | None:
    """The median diameter of a run's steps after the warm-up, over the unit at their learning rates.

    Where a trust region held steps, D(S) is that of the step asked for, and the one made is another field.
    """
    held, rates = run.curve("made_diameter"), run.curve("learning_rate")
    diameters = held if len(held) else run.curve("diameter")
    steps, own, other = np.intersect1d(diameters.steps, rates.steps, return_indices=True)
    if not len(steps):
        return None
    scale = rates.values[other] / np.nanmax(rates.values)
    counted = (steps > WARMUP * steps[-1]) & (scale > 0)
    values = diameters.values[own][counted] / (point.unit * scale[counted])
    values = values[np.isfinite(values)]
    return float(np.median(values)) if len(values) else None


def _notes(placed: Sequence[tuple[RunSeries, SweepPoint]], curves: dict[str, tuple[CurvePoint, ...]]) -> Iterable[str]:
    if waiting := [run for run, _ in placed if run.status in ("running", "stalled")]:
        yield f"Still training, and not drawn yet: {listed(run.label for run in waiting)}."
    lost = [
        f"{name} at {multiple(point.allowed)}: {len(point.runs) - point.loss.runs} of {len(point.runs)}"
        for name, points in curves.items()
        for point in points
        if point.loss.runs < len(point.runs)
    ]
    if lost:
        yield f"Without a finite loss, and therefore in no mean: {listed(lost)}."


def multiple(allowed: float) -> str:
    """How a multiple is written: 1/4x, 2x, or that there is no limit."""
    if not math.isfinite(allowed):
        return "no limit"
    number = f"1/{1 / allowed:g}" if allowed < 1 and (1 / allowed).is_integer() else f"{allowed:g}"
    return f"{number}\N{MULTIPLICATION SIGN}"


# Figures


def loss_figure(sweep: DiameterSweep) -> Figure:
    """The final validation loss over the diameter allowed, a curve for each way to hold it."""
    return _figure(sweep, "loss", "Final validation loss")


def made_figure(sweep: DiameterSweep) -> Figure:
    """The usual diameter that steps made, over the diameter allowed; on the diagonal all of it is used."""
    return _figure(sweep, "made", "Diameter made, in multiples of RowNorm's", log=True)


FIGURES = {"loss": loss_figure, "made": made_figure}


def _figure(sweep: DiameterSweep, name: str, title: str, *, log: bool = False) -> Figure:
    places = sorted({point.allowed for points in sweep.curves.values() for point in points if is_limited(point)})
    traces: list[Trace] = []
    for curve, points in sweep.curves.items():
        how = look(curve, list(sweep.curves))
        if limited := [point for point in points if is_limited(point)]:
            traces += _curve_traces(curve, limited, name, how)
        traces += [trace for point in points if not is_limited(point) for trace in _level(curve, point, name, places)]
    if name == "made" and places:
        traces.append(_diagonal(places))
    y_range = None if log else _readable_range(traces)
    figure = style.figure(title, style.name_groups(traces), PLAIN, log=log, **({"range": y_range} if y_range else {}))
    figure["layout"]["xaxis"] = {
        "title": {"text": ALLOWED},
        "type": "log",
        "uirevision": "allowed",
        "tickmode": "array",
        "tickvals": places,
        "ticktext": [multiple(place) for place in places],
        "unifiedhovertitle": {"text": "%{x:.4~g} times RowNorm's"},
    }
    return figure


def _readable_range(traces: Sequence[Trace]) -> list[float] | None:
    """A range of y in which all curves but the highest are whole: one that runs away would flatten the others."""
    highest: dict[str, float] = {}
    for trace in traces:
        highest[trace["name"]] = max([highest.get(trace["name"], -math.inf), *trace["y"]])
    if len(highest) < 3:
        return None
    low, high = min(y for trace in traces for y in trace["y"]), sorted(highest.values())[-2]
    margin = (high - low) / 20
    return [low - margin, high + margin] if margin > 0 else None


def is_limited(point: CurvePoint) -> bool:
    """Whether steps were held to a diameter."""
    return math.isfinite(point.allowed)


def look(curve: str, curves: Sequence[str]) -> dict[str, str]:
    """Colour and dash of a curve: the colour of its optimizer, and a dash of its own among those of the optimizer."""
    optimizer = curve.partition(",")[0]
    mates = [name for name in curves if name.partition(",")[0] == optimizer and name != optimizer]
    number = mates.index(curve) if curve in mates else 0
    color = style.colour(optimizer)
    return {"color": style.lighter(color, 0.13 * number) if number else color, "dash": style.DASHES[number % 3]}


def _curve_traces(curve: str, points: Sequence[CurvePoint], name: str, how: dict[str, str]) -> list[Trace]:
    """The band and the mean of a curve."""
    drawn = [(point, spread) for point in points if (spread := getattr(point, name)).mean is not None]
    x = [point.allowed for point, _ in drawn]
    means = [spread.mean for _, spread in drawn]
    rooms = [spread.deviation or 0.0 for _, spread in drawn]
    names = {"type": "scatter", "name": label(curve, 200), "legendgroup": label(curve, 200)}
    edge: Trace = {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", **names}
    fill = {"fill": "tonexty", "fillcolor": style.faded(how["color"])}
    lower = [max(mean - room, mean / 2) for mean, room in zip(means, rooms, strict=True)]
    upper = [mean + room for mean, room in zip(means, rooms, strict=True)]
    line: Trace = {
        "x": x,
        "y": means,
        "mode": "lines+markers",
        "line": {**how, "width": 2.5},
        "marker": {"size": 7, "color": how["color"]},
        "meta": label(curve, 120),
        "customdata": [_hover_text(spread) for _, spread in drawn],
    }
    bands = [{"x": x, "y": lower, **edge}, {"x": x, "y": upper, **edge, **fill}] if any(rooms) else []
    return [*bands, line | names]


def _level(curve: str, point: CurvePoint, name: str, places: Sequence[float]) -> list[Trace]:
    """A level line for runs without a limit."""
    spread: SampleStatistics = getattr(point, name)
    if spread.mean is None or not places:
        return []
    text = label(f"{curve}, no limit", 200)
    ends = list(places) if len(places) > 1 else [places[0] / 2, places[0] * 2]
    line = {"color": style.GREY, "width": 1.5, "dash": "dot"}
    level: Trace = {"type": "scatter", "name": text, "legendgroup": text, "meta": text, "mode": "lines", "line": line}
    return [level | {"x": ends, "y": [spread.mean] * len(ends), "customdata": [_hover_text(spread)] * len(ends)}]


def _diagonal(places: Sequence[float]) -> Trace:
    line = {"color": style.GREY, "width": 1, "dash": "dash"}
    names = {"type": "scatter", "name": "all that is allowed", "legendgroup": "all that is allowed"}
    return {**names, "x": list(places), "y": list(places), "mode": "lines", "line": line, "hoverinfo": "skip"}


def _hover_text(spread: SampleStatistics) -> str:
    return f"± {spread.deviation:.2g}, {spread.runs} runs" if spread.deviation is not None else "1 run"

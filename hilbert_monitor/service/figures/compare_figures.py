"""Figures of several runs: loaded series in, plotly figures as plain dicts out, no files.

Runs are grouped by the optimizer of their head. A group of several has its pointwise mean over the runs that have a
value there and a band of one sample standard deviation, and each run's own line, faint, where the view asks for it; a
single run is a line. Or else every run is a line. A moving average is taken of each run before the mean; what it is
taken of stays behind it, faint, so that nothing which it hides is lost.
On a logarithmic axis the lower edge of a band is the mean minus the deviation, but at least half the smallest value of
the runs there, so that it stays positive; a value that is not positive has no place there and is a gap.
A trace has at most 2,000 points: `thin` keeps the smallest and the largest value of every stretch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hilbert_monitor.service.following.columns import Floats
from hilbert_monitor.service.following.text import label

from . import style
from .averages import Means, Ratios, paired, pointwise
from .comparison import BASE, OURS, Pair, axis_of, by_optimizer, pair_up, same_panel
from .downsampling import POINTS, thin
from .plot_options import PLAIN, Axis, PlotOptions
from .series import RunSeries, Series
from .style import Figure, Theme, Trace, colour, template

__all__ = ["PANELS", "Figure", "Theme", "colour", "curves", "diameter", "loss", "perturbation", "ratio", "template"]

FAINT = 0.35
"""Opacity of what stands behind a mean."""
NAMED = 24
"""Runs that a legend has room for; of more it names the optimizers."""
RATIOS = {"diameter": ("D(S)", "#8A6FD1", "solid"), "perturbation_rms": ("Hilbert RMS", "#009E73", "dot")}
"""Curves that have a ratio, and what it looks like."""
METRICS = {"loss": ("validation_loss", "train_loss"), "diameter": ("diameter",), "perturbation": ("perturbation_rms",)}
"""Curves of a panel."""


def loss(runs: Sequence[RunSeries], view: PlotOptions = PLAIN, aside: Collection[str] = ()) -> Figure:
    """Validation loss, and thinner the training loss.

    Args:
        runs: of one model.
        view: how they are looked at.
        aside: ids of runs that are drawn, but in no mean.
    """
    view, log = _settled(view, runs), view.logarithmic(False)
    few = replace(view, smooth=0.0)  # validation losses are few, and smooth by themselves
    traces = _training(runs, view, aside, log=log) + _metric(runs, "validation_loss", few, aside, log=log)
    style.name_groups(traces)
    late = None if log else style.late_range([c for r in runs for c in (r.validation_loss, r.train_loss)], view)
    return style.figure("Loss", traces, view, log=log, **({"range": late} if late else {}))


def diameter(runs: Sequence[RunSeries], view: PlotOptions = PLAIN, aside: Collection[str] = ()) -> Figure:
    """Row diameter D(S) of the step, on a logarithmic axis unless the view says else; arguments as for `loss`."""
    view, log = _settled(view, runs), view.logarithmic(True)
    traces = style.name_groups(_metric(runs, "diameter", view, aside, log=log))
    return style.figure("Row diameter D(S)", traces, view, log=log)


def perturbation(runs: Sequence[RunSeries], view: PlotOptions = PLAIN, aside: Collection[str] = ()) -> Figure:
    """Hilbert RMS perturbation of the panel, likewise; no mean over different panels."""
    view, log = _settled(view, runs), view.logarithmic(True)
    traces = style.name_groups(_metric(runs, "perturbation_rms", view, aside, log=log))
    return style.figure("Hilbert RMS", traces, view, log=log)


def ratio(runs: Sequence[RunSeries], view: PlotOptions = PLAIN, aside: Collection[str] = ()) -> Figure:
    """AdamW's mean over RowNorm's, of D(S) and of Hilbert RMS, over the pairs that have both; none without a pair."""
    view, log = _settled(view, runs), view.logarithmic(False)
    pairs = pair_up(run for run in runs if run.id not in aside)
    traces = style.name_groups([trace for name in RATIOS for trace in _ratio(pairs, name, view)])
    return style.figure(f"{BASE} / {OURS}", traces, view, log=log, **({} if log else {"rangemode": "tozero"}))


PANELS: dict[str, Callable[..., Figure]] = {
    "loss": loss,
    "diameter": diameter,
    "perturbation": perturbation,
    "ratio": ratio,
}


def _settled(view: PlotOptions, runs: Sequence[RunSeries]) -> PlotOptions:
    """A view that has its axis."""
    return view if view.axis else replace(view, axis=axis_of(runs))


def _axis(view: PlotOptions) -> Axis:
    return view.axis or "updates"


# Traces


def _metric(
    runs: Sequence[RunSeries], name: str, view: PlotOptions, aside: Collection[str], *, log: bool
) -> list[Trace]:
    """All traces of a metric."""
    runs = [run for run in runs if len(run.curve(name))]
    if view.group == "run":
        return _each(runs, name, view, aside, log=log)
    traces: list[Trace] = []
    for optimizer, group in by_optimizer(runs).items():
        counted = [run for run in group if run.id not in aside]
        averaged = len(counted) > 1 and (name != "perturbation_rms" or same_panel(counted))
        for run in group:
            if not averaged and run.id not in aside:
                traces += _line(run, name, view, len(runs), log=log)
            elif view.seeds or not averaged:
                traces.append(_behind(run, name, view, len(runs), log=log, aside=run.id in aside))
        if averaged:
            traces += _mean(optimizer, [run.curve(name) for run in counted], view, log=log)
    return traces


def _each(runs: Sequence[RunSeries], name: str, view: PlotOptions, aside: Collection[str], *, log: bool) -> list[Trace]:
    """A line for each run, in a shade of its optimizer's colour and under its own name, if a legend has the room."""
    traces: list[Trace] = []
    for optimizer, group in by_optimizer(runs).items():
        for number, run in enumerate(group):
            color, dash = style.shade(colour(optimizer), number)
            for trace in _line(run, name, view, len(runs), log=log):
                width = min(trace["line"]["width"], 1.75)
                trace["line"] = {"color": color, "width": width, "dash": "dot" if run.id in aside else dash}
                if len(runs) <= NAMED:
                    trace |= {"name": label(run.label), "legendgroup": label(run.id, 200)}
                traces.append(trace)
    return traces


def _line(run: RunSeries, name: str, view: PlotOptions, among: int, *, log: bool) -> list[Trace]:
    """One run's line, and behind a smooth one what it is made of."""
    line = style.line(run.curve(name), view, log=log, points=_points(among), smooth=view.smooth) | _of(run)
    line |= {"opacity": 1.0, "line": {"color": colour(run.optimizer), "width": 2.5}}
    if not view.smooth:
        return [line]
    return [_behind(run, name, view, among, log=log, aside=False) | {"hoverinfo": "skip"}, line]


def _behind(run: RunSeries, name: str, view: PlotOptions, among: int, *, log: bool, aside: bool) -> Trace:
    """One run's values as they are, faint; dotted if it is in no mean."""
    trace = style.line(run.curve(name), view, log=log, points=_points(among)) | _of(run)
    if aside:
        trace["meta"] += f", {label(run.status)}"
    trace["line"] = {"color": colour(run.optimizer), "width": 1, "dash": "dot" if aside else "solid"}
    return trace | {"opacity": FAINT}


def _of(run: RunSeries) -> Trace:
    about = f"seed {run.seed}" if run.seed is not None else "no seed"
    return _named(label(run.optimizer)) | {"meta": f"{label(run.label)}, {about}"}


def _named(name: str) -> Trace:
    """What makes traces toggle together."""
    return {"type": "scatter", "name": name, "legendgroup": name}


def _points(among: int) -> int:
    """Points of a line among so many."""
    return POINTS if among <= 12 else max(24_000 // among, 100)


def _mean(optimizer: str, curves: Sequence[Series], view: PlotOptions, *, log: bool) -> list[Trace]:
    """Mean and band of some curves, the mean last."""
    axis, color, common = _axis(view), colour(optimizer), _named(label(optimizer))
    found = _cut(pointwise(curves, axis, smooth=view.smooth), view)
    mean, lower, upper = style.shown(found.mean, log), *_edges(found, log)
    kept = thin([lower, upper, mean])
    onward = found.x[kept] >= np.maximum.accumulate(found.x[kept]) if len(kept) else np.empty(0, bool)
    inside = kept[onward & ~np.isnan(lower[kept]) & ~np.isnan(upper[kept])]
    edge = common | {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip"}
    fill = {"fill": "tonexty", "fillcolor": style.faded(color)}
    strong = style.drawn(found.x, mean, kept, axis, [_spoken(found, place) for place in kept.tolist()])
    return [
        style.drawn(found.x, lower, inside, axis) | edge,
        style.drawn(found.x, upper, inside, axis) | edge | fill,
        *([_thin_mean(curves, replace(view, smooth=0.0), color, log=log) | common] if _hides(view) else []),
        strong | common | {"line": {"color": color, "width": 2.5}, "meta": label(optimizer)},
    ]


def _hides(view: PlotOptions) -> bool:
    """Whether a smooth mean has nothing behind it: where each run's line is, that is not smooth."""
    return view.smooth > 0 and not view.seeds


def _thin_mean(curves: Sequence[Series], view: PlotOptions, color: str, *, log: bool) -> Trace:
    """A thin line of the mean, faint and silent."""
    found = _cut(pointwise(curves, _axis(view), smooth=view.smooth, spread=False), view)
    mean = style.shown(found.mean, log)
    trace = style.drawn(found.x, mean, thin([mean]), _axis(view))
    return trace | {"opacity": FAINT, "line": {"color": color, "width": 1}, "hoverinfo": "skip"}


def _training(runs: Sequence[RunSeries], view: PlotOptions, aside: Collection[str], *, log: bool) -> list[Trace]:
    """The training loss: of each optimizer a thin line of its mean, or of its only run; or of each run."""
    runs = [run for run in runs if len(run.train_loss)]
    traces: list[Trace] = []
    if view.group == "run":
        for trace in _each(runs, "train_loss", view, aside, log=log):
            line = trace["line"] | {"width": 1}
            traces.append(
                trace | {"meta": f"{trace['meta']}, training", "opacity": 0.5 * trace["opacity"], "line": line}
            )
        return traces
    for optimizer, group in by_optimizer(run for run in runs if run.id not in aside).items():
        name, curves = f"{label(optimizer)}, training", [run.train_loss for run in group]
        common = _named(name) | {"legendrank": 2000, "meta": name}
        if view.smooth:
            raw = _thin_mean(curves, replace(view, smooth=0.0), colour(optimizer), log=log)
            traces.append(raw | common | {"opacity": 0.2})
        mean = _thin_mean(curves, view, colour(optimizer), log=log) | common | {"opacity": 0.55}
        del mean["hoverinfo"]
        traces.append(mean)
    return traces


def _ratio(pairs: Sequence[Pair], name: str, view: PlotOptions) -> list[Trace]:
    """The ratio of the pairs' means, and behind a smooth one what it is made of."""
    traces = []
    text, color, dash = RATIOS[name]
    for smooth in sorted({0.0, view.smooth}):
        found = _ratios(pairs, name, view, smooth)
        if not len(found.x):
            continue
        y, strong = style.shown(found.ratio, log=True), smooth == view.smooth
        trace = style.drawn(found.x, y, thin([y]), _axis(view)) | _named(text)
        trace |= {"line": {"color": color, "width": 2 if strong else 1, "dash": dash}}
        trace |= {"meta": f"{text}, {BASE} / {OURS}"} if strong else {"opacity": FAINT, "hoverinfo": "skip"}
        traces.append(trace)
    return traces


# Numbers


def _cut(means: Means, view: PlotOptions) -> Means:
    """Means in the view's range."""
    part = style.window(means.x, view)
    return Means(means.x[part], means.mean[part], means.deviation[part], means.runs[part], means.smallest[part])


def _ratios(pairs: Sequence[Pair], name: str, view: PlotOptions, smooth: float) -> Ratios:
    """Ratios in the view's range."""
    found = paired([(a.curve(name), b.curve(name)) for a, b in pairs], _axis(view), smooth=smooth)
    part = style.window(found.x, view)
    return Ratios(found.x[part], found.ratio[part], found.pairs[part])


def _edges(means: Means, log: bool) -> tuple[Floats, Floats]:
    """The edges of the band."""
    lower, upper = means.mean - means.deviation, means.mean + means.deviation
    if log:
        least = np.where(np.isfinite(means.smallest), means.smallest / 2, 0.0)
        lower, upper = np.maximum(lower, least), np.maximum(upper, least)
    return style.shown(lower, log), style.shown(upper, log)


def _spoken(means: Means, place: int) -> str:
    runs, deviation = int(means.runs[place]), float(means.deviation[place])
    return "(one run)" if runs == 1 else f"± {deviation:.3g}, {runs} runs" if deviation == deviation else f"{runs} runs"


# Every value

WHERE: dict[Axis, int] = {"updates": 0, "tokens": 1, "time": 2}
"""Columns of a place: step, tokens, hours."""
COLUMNS = ("optimizer", "run", "seed", "metric", "step", "tokens", "hours", "value", "smoothed", "deviation", "runs")
RATIO_COLUMNS = ("metric", "step", "tokens", "hours", "ratio", "smoothed", "pairs")
Row = tuple[Any, ...]


def curves(
    panel: str, runs: Sequence[RunSeries], view: PlotOptions = PLAIN, aside: Collection[str] = ()
) -> tuple[tuple[str, ...], Iterator[Row]]:
    """Every value of a panel in the view's range, as the header and the rows of a table; nothing is thinned.

    Args:
        panel: one of PANELS.
        runs: of one model.
        view: as for the figure. With groups by optimizer the means come after the runs.
        aside: ids of runs that are in no mean.
    """
    view = _settled(view, runs)
    counted = [run for run in runs if run.id not in aside]
    if panel == "ratio":
        return RATIO_COLUMNS, (row for name in RATIOS for row in _ratio_rows(pair_up(counted), name, view))
    return COLUMNS, _panel_rows(METRICS[panel], runs, counted, view)


def _panel_rows(
    names: Sequence[str], runs: Sequence[RunSeries], counted: Sequence[RunSeries], view: PlotOptions
) -> Iterator[Row]:
    for name in names:
        for run in runs:
            yield from _run_rows(run, name, view)
        for optimizer, group in by_optimizer(counted).items() if view.group == "optimizer" else ():
            if name != "perturbation_rms" or same_panel(group):
                yield from _mean_rows(optimizer, group, name, view)


def _run_rows(run: RunSeries, name: str, view: PlotOptions) -> Iterator[Row]:
    curve = run.curve(name).on(_axis(view))
    rows = style.inside(curve.along(_axis(view)), view)
    smoothed = style.numbers(curve.smoothed(view.smooth)[rows]) if view.smooth else [None] * len(rows)
    hours = style.numbers(curve.along("time")[rows]) if curve.has("time") else [None] * len(rows)
    tokens = [None if number is None else int(number) for number in style.numbers(curve.tokens[rows])]
    columns = (curve.steps[rows].tolist(), tokens, hours, curve.values[rows].tolist(), smoothed)
    for row in zip(*columns, strict=True):
        yield run.optimizer, run.id, run.seed, name, *row, None, None


def _mean_rows(optimizer: str, group: Sequence[RunSeries], name: str, view: PlotOptions) -> Iterator[Row]:
    series = [run.curve(name) for run in group]
    found = pointwise(series, _axis(view))
    rows = style.inside(found.x, view)
    smooth = pointwise(series, _axis(view), smooth=view.smooth, spread=False).mean[rows] if view.smooth else None
    smoothed = [None] * len(rows) if smooth is None else style.numbers(smooth)
    columns = (
        style.numbers(found.mean[rows]),
        smoothed,
        style.numbers(found.deviation[rows]),
        found.runs[rows].tolist(),
    )
    for place, *row in zip(found.x[rows].tolist(), *columns, strict=True):
        yield optimizer, "mean", None, name, *_at(place, view), *row


def _ratio_rows(pairs: Sequence[Pair], name: str, view: PlotOptions) -> Iterator[Row]:
    found = _ratios(pairs, name, replace(view, x0=None, x1=None), 0.0)
    rows = style.inside(found.x, view)
    smooth = _ratios(pairs, name, replace(view, x0=None, x1=None), view.smooth).ratio[rows] if view.smooth else None
    smoothed = [None] * len(rows) if smooth is None else style.numbers(smooth)
    columns = (found.x[rows].tolist(), style.numbers(found.ratio[rows]), smoothed, found.pairs[rows].tolist())
    for place, ratio_, smooth_, count in zip(*columns, strict=True):
        yield name, *_at(place, view), ratio_, smooth_, count


def _at(place: float, view: PlotOptions) -> tuple[float | None, ...]:
    """A place in its column."""
    found = place if view.axis == "time" else int(place)
    return tuple(found if column == WHERE[_axis(view)] else None for column in range(3))

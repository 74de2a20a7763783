"""Figures of runs: loaded series in, plotly figures out, no files.

Runs are grouped by the optimizer of their head. A group of several has its pointwise mean over the runs that have a
value there, a band of one sample standard deviation, and each run's own line, faint; a single run is a line. On a
logarithmic axis the lower edge of a band is the mean minus the deviation, but at least half the smallest value of the
runs there, so that it stays positive; a value that is not positive has no place there and is a gap.
A trace has at most 2,000 points: `thin` keeps the smallest and the largest value of every stretch.
"""

from __future__ import annotations

import html
import math
import zlib
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Literal

import plotly.graph_objects as go  # type: ignore[import-untyped]

from .series import RunSeries, Series
from .statistics import BASE, OURS, Axis, by_optimizer, clip, pointwise, position, ratio, same_panel

Theme = Literal["light", "dark"]
Number = float | None

POINTS = 2000
"""Points to a trace, at most."""

COLOURS = {BASE: "#D55E00", OURS: "#0072B2", "Muon": "#009E73", "SGD": "#CC79A7"}
OTHERS = ("#A07800", "#8A6FD1", "#7F7F7F")
"""Okabe and Ito's, where they are legible on white and on black."""

INK = {"light": ("#1d2126", "#e7e8ea"), "dark": ("#e6e8eb", "#2a2f36")}
"""Of the text and of the grid."""

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"


def loss(
    runs: Sequence[RunSeries], *, axis: Axis = "tokens", theme: Theme = "light", aside: Collection[str] = ()
) -> go.Figure:
    """Validation loss, and thinner the training loss.

    Args:
        runs: of one model.
        axis: what the curves are drawn against.
        theme: of the page.
        aside: ids of runs that are drawn, but in no mean.
    """
    figure = _figure("Loss", axis, theme)
    for name, group in by_optimizer(runs).items():
        figure.add_traces(_mean_only(name, group, "train_loss", axis, aside))
    figure.add_traces(_groups(runs, "validation_loss", axis, aside, log=False))
    figure.update_yaxes(range=_late_range(runs, axis))
    return figure


def diameter(
    runs: Sequence[RunSeries], *, axis: Axis = "tokens", theme: Theme = "light", aside: Collection[str] = ()
) -> go.Figure:
    """Row diameter D(S) of the step, on a logarithmic axis; arguments as for `loss`."""
    return _logarithmic("Row diameter D(S)", _groups(runs, "diameter", axis, aside, log=True), axis, theme)


def perturbation(
    runs: Sequence[RunSeries], *, axis: Axis = "tokens", theme: Theme = "light", aside: Collection[str] = ()
) -> go.Figure:
    """Hilbert RMS perturbation of the panel, on a logarithmic axis; no mean over different panels."""
    return _logarithmic("Hilbert RMS", _groups(runs, "perturbation_rms", axis, aside, log=True), axis, theme)


def ratios(
    runs: Sequence[RunSeries], *, axis: Axis = "tokens", theme: Theme = "light", aside: Collection[str] = ()
) -> go.Figure:
    """AdamW's mean over RowNorm's, of D(S) and of Hilbert RMS, wherever both have one; none over different panels."""
    figure = _figure(f"{BASE} / {OURS}", axis, theme).update_yaxes(rangemode="tozero")
    groups = by_optimizer(run for run in runs if run.id not in aside)
    compared = [groups.get(name, []) for name in (BASE, OURS)]
    figure.add_traces(_ratio("D(S)", compared, "diameter", axis, color="#8A6FD1", dash="solid"))
    if same_panel(run for group in compared for run in group):
        figure.add_traces(_ratio("Hilbert RMS", compared, "perturbation_rms", axis, color="#009E73", dash="dot"))
    return figure


def colour(optimizer: str) -> str:
    """An optimizer's colour, the same in every figure; legible on white and on black."""
    return COLOURS.get(optimizer) or OTHERS[zlib.crc32(optimizer.encode("utf-8", "replace")) % len(OTHERS)]


def template(theme: Theme) -> go.layout.Template:
    """Fonts, grid and legend on a transparent ground, for a light or a dark page."""
    ink, grid = INK[theme]
    axis = {"gridcolor": grid, "linecolor": grid, "zeroline": False, "ticks": "", "automargin": True}
    layout = {
        "font": {"family": FONT, "size": 13, "color": ink},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "xaxis": {**axis, "showgrid": False, "showline": True},
        "yaxis": axis,
        "hovermode": "closest",
        "hoverlabel": {
            "bgcolor": "#ffffff" if theme == "light" else "#1b1f24",
            "font": {"color": ink},
            "align": "left",
        },
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "bgcolor": "rgba(0,0,0,0)"},
        "margin": {"l": 8, "r": 8, "t": 48, "b": 8},
    }
    return go.layout.Template(layout=layout)


def thin(columns: Sequence[Sequence[Number]], points: int = POINTS) -> list[int]:
    """Places to keep of some columns of equal length: of every stretch where each column is smallest and largest.

    First and last are kept too. Nothing is left out of columns that are short enough.
    """
    length = len(columns[0])
    if length <= points:
        return list(range(length))
    buckets = max((points - 2) // (2 * len(columns)), 1)
    kept = {0, length - 1}
    for bucket in range(buckets):
        stretch = range(bucket * length // buckets, (bucket + 1) * length // buckets)
        for column in columns:
            found = [(value, i) for i in stretch if (value := column[i]) is not None and math.isfinite(value)]
            kept.update((min(found)[1], max(found)[1]) if found else stretch[:1])
    return sorted(kept)


# Traces


def _groups(runs: Sequence[RunSeries], name: str, axis: Axis, aside: Collection[str], *, log: bool) -> list[go.Scatter]:
    """All traces of a metric."""
    points = POINTS if len(runs) <= 12 else max(24_000 // len(runs), 100)
    traces: list[go.Scatter] = []
    for optimizer, group in by_optimizer(run for run in runs if len(getattr(run, name).values)).items():
        counted = [run for run in group if run.id not in aside]
        averaged = len(counted) > 1 and (name != "perturbation_rms" or same_panel(counted))
        for run in group:
            faint = averaged or run.id in aside
            traces.append(_run(run, name, axis, points, log=log, faint=faint, aside=run.id in aside))
        if averaged:
            traces += _band(optimizer, [getattr(run, name) for run in counted], axis, log=log)
        _name_one(traces, optimizer)
    return traces


def _run(run: RunSeries, name: str, axis: Axis, points: int, *, log: bool, faint: bool, aside: bool) -> go.Scatter:
    """One run's line."""
    curve: Series = getattr(run, name)
    x, y = position(curve, axis), [_shown(value, log) for value in curve.values]
    kept = thin([y], points)
    about = f"seed {run.seed}" if run.seed is not None else "no seed"
    return go.Scatter(
        x=_whole(x, kept),
        y=[y[i] for i in kept],
        mode=_mode(kept),
        name=_text(run.optimizer),
        legendgroup=_text(run.optimizer),
        showlegend=False,
        opacity=0.35 if faint else 1.0,
        line={"color": colour(run.optimizer), "width": 1 if faint else 2.5, "dash": "dot" if aside else "solid"},
        meta=f"{_text(run.label)}, {about}" + (f", {_text(run.status)}" if aside else ""),
        hovertemplate=f"<b>%{{meta}}</b><br>%{{y:.7~g}}<br>%{{x:,}} {axis}<extra></extra>",
    )


def _band(optimizer: str, curves: list[Series], axis: Axis, *, log: bool) -> list[go.Scatter]:
    """Mean and band of some curves."""
    rows = [row for row in pointwise(curves, axis) if row[1].mean is not None]
    x, means = [row[0] for row in rows], [_shown(row[1].mean, log) for row in rows]
    lower = [_edge(s.mean, s.deviation, values, -1, log) for _, s, values in rows]
    upper = [_edge(s.mean, s.deviation, values, +1, log) for _, s, values in rows]
    kept = thin([lower, upper, means])
    inside = [i for i in kept if lower[i] is not None and upper[i] is not None]
    common: dict[str, Any] = {"name": _text(optimizer), "legendgroup": _text(optimizer), "showlegend": False}
    edge = {**common, "x": _whole(x, inside), "mode": "lines", "line": {"width": 0}, "hoverinfo": "skip"}
    return [
        go.Scatter(**edge, y=[lower[i] for i in inside]),
        go.Scatter(**edge, y=[upper[i] for i in inside], fill="tonexty", fillcolor=_faded(colour(optimizer))),
        go.Scatter(
            **common,
            x=_whole(x, kept),
            y=[means[i] for i in kept],
            mode=_mode(kept),
            line={"color": colour(optimizer), "width": 2.5},
            meta=_text(optimizer),
            customdata=[_spoken(rows[i][1].deviation, rows[i][1].runs) for i in kept],
            hovertemplate=f"<b>%{{meta}}</b><br>%{{y:.7~g}} %{{customdata}}<br>%{{x:,}} {axis}<extra></extra>",
        ),
    ]


def _mean_only(
    optimizer: str, runs: list[RunSeries], name: str, axis: Axis, aside: Collection[str]
) -> list[go.Scatter]:
    """A thin line of the mean, or of the only run, without a band."""
    curves = [getattr(run, name) for run in runs if run.id not in aside and len(getattr(run, name).values)]
    rows = list(pointwise(curves, axis))
    if not rows:
        return []
    x, means = [row[0] for row in rows], [row[1].mean for row in rows]
    kept = thin([means])
    label = f"{_text(optimizer)}, training"
    trace = go.Scatter(
        x=_whole(x, kept),
        y=[means[i] for i in kept],
        mode=_mode(kept),
        name=label,
        legendgroup=label,
        legendrank=2000,
        opacity=0.45,
        line={"color": colour(optimizer), "width": 1},
        meta=label,
        hovertemplate=f"<b>%{{meta}}</b><br>%{{y:.7~g}}<br>%{{x:,}} {axis}<extra></extra>",
    )
    return [trace]


def _ratio(
    label: str, compared: list[list[RunSeries]], name: str, axis: Axis, *, color: str, dash: str
) -> list[go.Scatter]:
    """The ratio of two groups' means, wherever both have one."""
    over, under = ({x: s.mean for x, s, _ in pointwise((getattr(r, name) for r in runs), axis)} for runs in compared)
    found = {x: ratio(over[x], under[x]) for x in sorted(over.keys() & under.keys())}
    x, y = list(found), [_shown(value, True) for value in found.values()]
    if not x:
        return []
    kept = thin([y])
    trace = go.Scatter(
        x=_whole(x, kept),
        y=[y[i] for i in kept],
        mode=_mode(kept),
        name=label,
        line={"color": color, "width": 2, "dash": dash},
        meta=f"{label}, {BASE} / {OURS}",
        hovertemplate=f"<b>%{{meta}}</b><br>%{{y:.5~g}}<br>%{{x:,}} {axis}<extra></extra>",
    )
    return [trace]


# Numbers


def _shown(value: Number, log: bool) -> Number:
    """A value that the axis has a place for, or a gap."""
    return None if value is None or not math.isfinite(value) or (log and value <= 0) else value


def _edge(mean: Number, deviation: Number, values: list[float], sign: int, log: bool) -> Number:
    """An edge of the band."""
    if mean is None or deviation is None:
        return None
    edge = mean + sign * deviation
    return _shown(max(edge, min((v for v in values if v > 0), default=0.0) / 2) if log else edge, log)


def _late_range(runs: Iterable[RunSeries], axis: Axis) -> list[float] | None:
    """The losses after the first twentieth of the longest run, so that the start does not press the rest flat."""
    curves = [curve for run in runs for curve in (run.validation_loss, run.train_loss)]
    points = [p for c in curves for p in zip(position(c, axis), c.values, strict=True) if math.isfinite(p[1])]
    start = max((x for x, _ in points), default=0) / 20
    late = [value for x, value in points if x > start]
    if len(late) < 20:
        return None
    room = (max(late) - min(late)) / 20
    return [min(late) - room, max(late) + room]


def _whole(x: Sequence[float], kept: Iterable[int]) -> list[float]:
    """Tokens and updates are whole numbers."""
    return [int(x[i]) for i in kept]


# Texts and looks


def _figure(title: str, axis: Axis, theme: Theme) -> go.Figure:
    figure = go.Figure(layout={"template": template(theme), "height": 380, "uirevision": "kept"})
    figure.update_xaxes(title={"text": "training tokens" if axis == "tokens" else "updates"}, exponentformat="B")
    return figure.update_yaxes(title={"text": title})


def _logarithmic(title: str, traces: list[go.Scatter], axis: Axis, theme: Theme) -> go.Figure:
    """A figure with a tick at every decade, and finer ones where that is zoomed into."""
    logs = [math.log10(value) for trace in traces for value in trace.y if value is not None]
    ticks = math.ceil(1.11 * (max(logs) - min(logs))) if logs else 0
    figure = _figure(title, axis, theme).add_traces(traces)
    return figure.update_yaxes(type="log", exponentformat="power", nticks=max(ticks, 2))


def _name_one(traces: list[go.Scatter], optimizer: str) -> None:
    """Put the group's last and strongest line into the legend; it toggles the whole group."""
    mine = [trace for trace in traces if trace.legendgroup == _text(optimizer)]
    max(mine, key=lambda trace: ((trace.line.width or 0), traces.index(trace))).showlegend = True


def _spoken(deviation: Number, runs: int) -> str:
    return "(one run)" if runs == 1 else f"± {deviation:.3g}, {runs} runs" if deviation is not None else f"{runs} runs"


def _text(text: str) -> str:
    """Text of others, which plotly would else read as markup."""
    return html.escape(clip(text, 60), quote=False)


def _mode(kept: Sequence[int]) -> str:
    return "lines" if len(kept) > 30 else "lines+markers"


def _faded(color: str) -> str:
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.18)"

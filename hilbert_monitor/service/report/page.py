"""The page of a report: one HTML file that needs no network.

Names, tokens, settings and exceptions come from others: they are escaped, and clipped to what a page has room for.
The curves are downsampled, see `figures.downsampling`.
"""

from __future__ import annotations

import html
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any

import numpy as np
from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]

from hilbert_monitor.runs.record import Alert
from hilbert_monitor.service.figures import compare_figures, style
from hilbert_monitor.service.figures.comparison import (
    BASELINE,
    CANDIDATE,
    METRICS,
    Comparison,
    SampleStatistics,
    final_value,
)
from hilbert_monitor.service.figures.plot_options import PlotOptions
from hilbert_monitor.service.figures.series import CURVES, RunSeries
from hilbert_monitor.service.following.published import PAPER, Figure, Published
from hilbert_monitor.service.following.run_settings import settings
from hilbert_monitor.service.following.text import clip

from .summary import DASH, MINUS, TIMES, Run

ALERTS = 30
"""Alerts of a run that the page shows, the last ones."""
SETTINGS = 100
"""Settings that differ, at most."""
HEADS = ("LM head", "Validation loss", "D(S)", "Hilbert RMS", "Runs")
FIGURES = {
    "Loss": compare_figures.loss,
    "Row diameter of a step": compare_figures.diameter,
    "Hilbert RMS perturbation": compare_figures.perturbation,
    f"{BASELINE} over {CANDIDATE}": compare_figures.ratio,
}
THEMES: tuple[style.Theme, ...] = ("light", "dark")

Value = SampleStatistics | Figure


def page(runs: Sequence[Run], comparisons: Sequence[Comparison], *, now: float | None = None) -> str:
    """The report as one HTML file, with plotly.js in it."""
    drawn: list[dict[str, Any]] = []
    models = "".join(_model(c, drawn, several=len(comparisons) > 1) for c in comparisons)
    themes = {theme: style.template(theme) for theme in THEMES}
    when = time.strftime("%d %B %Y, %H:%M", time.localtime(now))
    known = {r.id for c in comparisons for r in c.counted}
    body = [
        f"<header><h1>LM-head step geometry</h1><p>{_plural(len(runs), 'run')}, {when}</p></header>",
        models,
        _runs(runs, known),
        _worth(runs),
        _alerts(runs),
        _remarks(runs),
        _differences(runs),
        "<footer>Made with hilbert-monitor report.</footer>",
    ]
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            f"<title>LM-head step geometry</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>",
            *body,
            "</main>",
            f'<script type="application/json" id="figures">{_script({"figures": drawn, "themes": themes})}</script>',
            f"<script>{get_plotlyjs()}</script>\n<script>{DRAW}</script>\n</body>\n</html>\n",
        ]
    )


def _script(value: Any) -> str:
    """JSON that cannot end the script it stands in."""
    return json.dumps(value, allow_nan=False).replace("<", "\\u003c")


def _text(value: object, limit: int = 100) -> str:
    return html.escape(clip(str(value), limit))


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


# One model


def _model(c: Comparison, drawn: list[dict[str, Any]], *, several: bool) -> str:
    """A model's section; its figures are added to `drawn`."""
    name = f"<h2>{_text(c.model)}</h2>" if several or c.model in PAPER else ""
    notes = "".join(f"<li>{_text(note, 1000)}</li>" for note in (*c.notes, *_protocol(c)))
    notes = f'<ul class="notes">{notes}</ul>' if notes else ""
    return f'<section class="model">{name}{_hero(c)}{_table(c)}{notes}{_figures(c, drawn)}</section>'


def _protocol(c: Comparison) -> Iterator[str]:
    """How far these runs are from the paper's, where they stand beside them."""
    published, steps = PAPER.get(c.model), {run.step for run in c.counted if run.step is not None}
    if published and steps and steps != {published.updates}:
        made = " to ".join(f"{step:,}" for step in sorted({min(steps), max(steps)}))
        yield f"The paper trained this model for {published.updates:,} updates, these runs made {made}."


def _hero(c: Comparison) -> str:
    """The three figures that matter, large."""
    paper = PAPER.get(c.model)
    cards = [
        _ratio_card(c, "step_diameter", "steps", "Row diameter D(S)"),
        _ratio_card(c, "perturbation_rms", "perturbation", "Hilbert RMS on the panel"),
        _difference_card(c, paper),
    ]
    shown = "".join(cards)
    return f'<div class="hero">{shown}</div>' if shown else ""


def _ratio_card(c: Comparison, metric: str, noun: str, what: str) -> str:
    factor, paper = _factor(c.ratios[metric]), PAPER.get(c.model)
    if not factor:
        return ""
    number, word = factor.split(" ")
    beside = f"; in the paper {paper.ratios[metric].mean}{TIMES}" if paper else ""
    return _card(number, f"{word} {noun}", f"{what}, {CANDIDATE} against {BASELINE}{beside}")


def _difference_card(c: Comparison, paper: Published | None) -> str:
    d = c.difference
    if d.mean is None:
        return ""
    spread = f" ± {d.deviation:.4f}" if d.deviation is not None else ""
    below = f"; below at {c.below} of {_plural(c.checkpoints, 'checkpoint')}" if c.checkpoints else ""
    beside = f"; in the paper {_signed(paper.difference.mean)}" if paper else ""
    about = f"{CANDIDATE} minus {BASELINE}{spread}, {_plural(d.runs, 'pair')}{below}{beside}"
    return _card(_signed(d.mean), "validation loss", about)


def _card(number: str, label: str, about: str) -> str:
    return (
        f'<div class="card"><b>{_text(number)}</b><span>{_text(label)}</span><small>{_text(about, 300)}</small></div>'
    )


def _figures(c: Comparison, drawn: list[dict[str, Any]]) -> str:
    """Places for the model's figures; one without a curve has none."""
    runs, aside = (*c.counted, *c.excluded), {run.id for run in c.excluded}
    places = []
    for title, draw in FIGURES.items():
        figure = draw(runs, PlotOptions(seeds=True), aside)
        if figure["data"]:
            del figure["layout"]["yaxis"]["title"]  # the page has it
            figure["layout"]["height"] = 380
            drawn.append(figure)
            label = f"{title} of {c.model}"
            places.append(
                f'<figure><h3>{title}</h3><div class="plot" role="img" aria-label="{_text(label)}"></div></figure>'
            )
    warning = "<noscript><p>The curves need JavaScript; the numbers above do not.</p></noscript>" if places else ""
    return f'{warning}<div class="figures">{"".join(places)}</div>'


# The table


def _table(c: Comparison) -> str:
    """The paper's table, of these runs."""
    paper = PAPER.get(c.model)
    rows = [_optimizer_row(name, found, paper) for name, found in c.optimizers.items()]
    if {BASELINE, CANDIDATE} <= c.optimizers.keys():
        rows.append(
            _row(f"{BASELINE} / {CANDIDATE}", ["", *(_ratio_cell(c, metric, paper) for metric in c.ratios), ""])
        )
        difference = _beside(c.difference, paper.difference if paper else None, _signed_spread, _absolute)
        rows.append(_row(f"{CANDIDATE} {MINUS} {BASELINE}", [difference, "", "", _plural(c.difference.runs, "pair")]))
    head = "".join(f'<th scope="col">{name}</th>' for name in HEADS)
    caption = "Final values: mean ± one sample standard deviation over seeds"
    return f"<table><caption>{caption}</caption><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _optimizer_row(name: str, found: dict[str, SampleStatistics], paper: Published | None) -> str:
    published = paper.optimizers.get(name, {}) if paper else {}
    loss = _beside(found["validation_loss"], published.get("validation_loss"), _fixed, _absolute)
    geometry = ("step_diameter", "perturbation_rms")
    cells = [loss, *(_beside(found[metric], published.get(metric), _scientific, _relative) for metric in geometry)]
    runs = max(s.runs for s in found.values())
    return _row(name, [*cells, str(runs)], f'<i class="dot" style="background:{style.colour(name)}"></i>')


def _ratio_cell(c: Comparison, metric: str, paper: Published | None) -> str:
    ours, theirs = SampleStatistics(c.ratios[metric]), paper.ratios[metric] if paper else None
    return _beside(ours, theirs, lambda value: f"{value.mean:,.1f}{TIMES}", _relative)


def _row(name: str, cells: Sequence[str], dot: str = "") -> str:
    return f'<tr><th scope="row">{dot}{_text(name)}</th>{_cells(HEADS, cells)}</tr>'


def _cells(heads: Sequence[str], cells: Sequence[str]) -> str:
    """Cells that carry their column's name, for a phone has no room for columns."""
    filled = (f"<div>{cell}</div>" if cell else "" for cell in cells)
    return "".join(f'<td data-label="{head}">{cell}</td>' for head, cell in zip(heads[1:], filled, strict=True))


def _beside(
    ours: SampleStatistics, paper: Figure | None, form: Callable[[Value], str], off: Callable[[float, float], str]
) -> str:
    """Our number, and under it the paper's and how far ours is from it."""
    if ours.mean is None:
        return DASH
    under = f"<small>paper {form(paper)}, <span>here {off(ours.mean, paper.mean)}</span></small>" if paper else ""
    return form(ours) + under


# Numbers


def _fixed(value: Value) -> str:
    mean = _minus(f"{value.mean:.4f}")
    return mean if value.deviation is None else f"{mean} ± {value.deviation:.4f}"


def _signed_spread(value: Value) -> str:
    return ("+" if value.mean is not None and value.mean >= 0 else "") + _fixed(value)


def _scientific(value: Value) -> str:
    """(2.870 ± 0.140) times a power of ten, as in the paper."""
    mean, power = value.mean or 0.0, math.floor(math.log10(abs(value.mean))) if value.mean else 0
    unit = 10.0**power
    number = f"{mean / unit:.3f}"
    if value.deviation is not None:
        number = f"({number} ± {value.deviation / unit:.3f})"
    return f"{number} {TIMES} 10<sup>{_minus(str(power))}</sup>"


def _factor(ratio: float | None) -> str:
    """How many times smaller, or larger; nothing without a ratio."""
    if ratio is None or ratio <= 0:
        return ""
    factor, word = (ratio, "smaller") if ratio >= 1 else (1 / ratio, "larger")
    return f"{factor:,.{1 if factor < 1000 else 0}f}{TIMES} {word if factor >= 1.05 else 'the'}"


def _signed(value: float) -> str:
    return _minus(f"{value:+.4f}")


def _absolute(ours: float, paper: float) -> str:
    return _signed(ours - paper)


def _relative(ours: float, paper: float) -> str:
    return _minus(f"{100 * (ours / paper - 1):+.1f} %")


def _minus(text: str) -> str:
    return text.replace("-", MINUS)


# The runs


def _runs(runs: Sequence[Run], counted: set[str]) -> str:
    heads = ("Run", "LM head", "Seed", "State", "Last step", "Validation loss", "D(S)", "Hilbert RMS")
    rows = "".join(_run_row(run, heads, run.series.id in counted) for run in runs)
    head = "".join(f'<th scope="col">{name}</th>' for name in heads)
    return f"<section><h2>Runs</h2><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></section>"


def _run_row(run: Run, heads: Sequence[str], counted: bool) -> str:
    s = run.series
    error = f": {run.state.error} {run.state.message}" if run.state.error else ""
    state = f'<em class="{s.status}">{s.status}</em><span>{_text(error, 400)}</span>' + (
        "" if counted else "<small>in no mean</small>"
    )
    values = [DASH if (v := final_value(s, metric)) is None else _minus(f"{v:.5g}") for metric in METRICS]
    dot = f'<i class="dot" style="background:{style.colour(s.optimizer)}"></i>'
    seed, step = (DASH if number is None else f"{number:,}" for number in (s.seed, s.step))
    cells = (f"{dot}<span>{_text(s.optimizer, 40)}</span>", seed, state, step, *values)
    name = _text(s.label) + (f"<small>{_text(s.id)}</small>" if s.label != s.id else "")
    return f'<tr><th scope="row">{name}</th>{_cells(heads, cells)}</tr>'


def _worth(runs: Sequence[Run]) -> str:
    """How much descent the steps made of their diameter, if that was measured."""
    heads = ("Run", "LM head", "For the moment", "For the batch's gradient", "Gauge waste")
    told = [run for run in runs if "efficiency_lower" in run.worth]
    if not told:
        return ""
    rows = "".join(_worth_row(run, heads) for run in told)
    head = "".join(f'<th scope="col">{name}</th>' for name in heads)
    about = "Descent as a share of the best that a step of the same diameter could have made: a mean over the run"
    table = f"<table><caption>{about}</caption><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return f"<section><h2>Step efficiency</h2>{table}</section>"


def _worth_row(run: Run, heads: Sequence[str]) -> str:
    shares = [_between(run.worth, name) for name in ("moment_efficiency", "efficiency")]
    waste = f"{run.worth['gauge_waste']:.2%}" if "gauge_waste" in run.worth else DASH
    dot = f'<i class="dot" style="background:{style.colour(run.series.optimizer)}"></i>'
    cells = (f"{dot}<span>{_text(run.series.optimizer, 40)}</span>", *shares, waste)
    return f'<tr><th scope="row">{_text(run.series.label)}</th>{_cells(heads, cells)}</tr>'


def _between(worth: Mapping[str, float], name: str) -> str:
    """An interval in percent."""
    if f"{name}_lower" not in worth:
        return DASH
    return _minus(f"{100 * worth[f'{name}_lower']:.1f} to {100 * worth[f'{name}_upper']:.1f} %")


def _alerts(runs: Sequence[Run]) -> str:
    parts = "".join(_alert_list(run) for run in runs if run.alerts)
    return f"<section><h2>Alerts</h2>{parts or '<p>None.</p>'}</section>"


def _alert_list(run: Run) -> str:
    shown = run.alerts[-ALERTS:]
    lines = "".join(f"<li><b>{alert.step:,}</b> {_text(_sentence(alert), 600)}</li>" for alert in shown)
    left = f"<p>The last {len(shown)} of {len(run.alerts):,}.</p>" if len(shown) < len(run.alerts) else ""
    return f'<h3>{_text(run.series.label)}</h3>{left}<ul class="alerts">{lines}</ul>'


def _sentence(alert: Alert) -> str:
    """An alert's own words; without them, what it measured and on which tokens."""
    tokens = f", tokens {alert.pair_text[0]!r} and {alert.pair_text[1]!r}" if alert.pair_text else ""
    return alert.message or f"{alert.kind}: {alert.value:.4g}{tokens}"


def _remarks(runs: Sequence[Run]) -> str:
    said: dict[str, list[Run]] = {}
    for run in runs:
        for remark in (*run.info.remarks, *_lost(run.series)):
            said.setdefault(remark, []).append(run)
    lines = "".join(f"<li>{_text(remark, 1000)} <small>{_who(who, runs)}</small></li>" for remark, who in said.items())
    return f"<section><h2>Remarks</h2><ul>{lines}</ul></section>" if lines else ""


def _lost(series: RunSeries) -> Iterator[str]:
    """What a curve cannot show."""
    for name in CURVES:
        curve = series.curve(name)
        bad = curve.steps[~np.isfinite(curve.values)]
        if len(bad):
            yield f"{name} is nan or infinite at {_plural(len(bad), 'step')}, first at {bad[0]:,}."


def _differences(runs: Sequence[Run]) -> str:
    """Settings that are not the same in all runs."""
    found = [settings(run.info) for run in runs]
    rows = []
    for key in sorted({key for setting in found for key in setting}):
        values: dict[str, list[Run]] = {}
        for run, setting in zip(runs, found, strict=True):
            values.setdefault(setting.get(key, DASH), []).append(run)
        if len(values) > 1:
            cells = "".join(f"<li>{_text(v, 200)} <small>{_who(who, runs)}</small></li>" for v, who in values.items())
            rows.append(f'<tr><th scope="row">{_text(key)}</th><td><ul>{cells}</ul></td></tr>')
    table = f'<table class="settings"><tbody>{"".join(rows[:SETTINGS])}</tbody></table>'
    left = f"<p>The first {SETTINGS} of {len(rows):,}.</p>" if len(rows) > SETTINGS else ""
    shown = left + table if rows else "<p>None.</p>"
    return f"<section><h2>Configuration differences</h2>{shown}</section>" if len(runs) > 1 else ""


def _who(who: Sequence[Run], runs: Sequence[Run]) -> str:
    if len(who) == len(runs):
        return "all runs"
    names = ", ".join(clip(run.series.label, 40) for run in who[:6])
    return _text(names + (f" and {len(who) - 6} more" if len(who) > 6 else ""), 400)


# What the page looks like

POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
"""Nothing is loaded from anywhere, whatever a text may contain."""

STYLE, DRAW = (files(__package__).joinpath(name).read_text("utf-8") for name in ("report.css", "report.js"))

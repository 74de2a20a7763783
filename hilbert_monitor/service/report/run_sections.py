"""The sections of a report about single runs: their states, efficiency, alerts and remarks."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np

from hilbert_monitor.runs.record import Alert
from hilbert_monitor.runs.run import Run, settings
from hilbert_monitor.service.figures.final_values import METRICS, final_value
from hilbert_monitor.service.figures.series import CURVES
from hilbert_monitor.service.following.text import clip

from .markup import DASH, optimizer_cell, plural, table, text, with_minus
from .settings_section import differences, item_of_runs
from .summary import efficiency

ALERTS = 30
"""The largest number of alerts of a run on the page; it shows the last ones."""

RUN_HEADS = ("Run", "LM head", "Seed", "State", "Last step", "Validation loss", "D(S)", "Hilbert RMS")
EFFICIENCY_HEADS = ("Run", "LM head", "For the moment", "For the batch's gradient", "Gauge waste")


# Runs


def runs_section(runs: Sequence[Run], counted: Collection[str]) -> str:
    """A table of all runs, with their states and final values. `counted` has the ids of those that enter a mean."""
    differing = differences(runs)
    rows = [_run_row(run, run.id in counted, _own_settings(run, differing)) for run in sorted(runs, key=_rank)]
    caption = "The lowest validation loss first" if len(runs) > 1 else ""
    return f"<section><h2>Runs</h2>{table(RUN_HEADS, rows, caption)}</section>"


def _rank(run: Run) -> tuple[str, float]:
    """Runs are in the order of their models, and of their validation losses."""
    loss = final_value(run, "validation_loss")
    return run.model, math.inf if loss is None or math.isnan(loss) else loss


def _own_settings(run: Run, differing: Sequence[str]) -> str:
    """The settings of a run that other runs do not share, with the last parts of their keys: "lr=0.001"."""
    own = settings(run.info)
    pairs = [f"{key.rpartition('.')[2]}={clip(own[key], 40)}" for key in differing if key in own]
    return clip(", ".join(pairs), 200)


def _run_row(run: Run, counted: bool, own_settings: str) -> tuple[str, Sequence[str]]:
    s = run
    reason = " ".join(filter(None, (run.state.error, run.state.message))) or run.problem
    error = f": {reason}" if reason else ""
    state = f'<em class="{s.status}">{s.status}</em><span>{text(error, 400)}</span>' + (
        "" if counted else "<small>in no mean</small>"
    )
    finals = (final_value(s, metric) for metric in METRICS)
    values = [DASH if value is None else with_minus(f"{value:.5g}") for value in finals]
    seed, step = (DASH if number is None else f"{number:,}" for number in (s.seed, s.step))
    details = [detail for detail in (s.id if s.label != s.id else "", own_settings) if detail]
    name = text(s.label) + "".join(f"<small>{text(detail, 200)}</small>" for detail in details)
    return name, (optimizer_cell(s.optimizer), seed, state, step, *values)


# Efficiency


def efficiency_section(runs: Sequence[Run]) -> str:
    """A table of how much descent the steps made for their diameter; empty if no run measured it."""
    rows = [_efficiency_row(run) for run in runs if "efficiency_lower" in efficiency(run)]
    if not rows:
        return ""
    caption = "Descent as a share of the best that a step of the same diameter could have made: a mean over the run"
    return f"<section><h2>Step efficiency</h2>{table(EFFICIENCY_HEADS, rows, caption)}</section>"


def _efficiency_row(run: Run) -> tuple[str, Sequence[str]]:
    means = efficiency(run)
    shares = [_percent_interval(means, name) for name in ("moment_efficiency", "efficiency")]
    waste = f"{means['gauge_waste']:.2%}" if "gauge_waste" in means else DASH
    return text(run.label), (optimizer_cell(run.optimizer), *shares, waste)


def _percent_interval(efficiency: Mapping[str, float], name: str) -> str:
    """The interval between the bounds of an efficiency: "40.0 to 50.0 %"."""
    if f"{name}_lower" not in efficiency:
        return DASH
    return with_minus(f"{100 * efficiency[f'{name}_lower']:.1f} to {100 * efficiency[f'{name}_upper']:.1f} %")


# Alerts and remarks


def alerts_section(runs: Sequence[Run]) -> str:
    """The last alerts of each run."""
    lists = "".join(_alert_list(run) for run in runs if run.alerts)
    return f"<section><h2>Alerts</h2>{lists or '<p>None.</p>'}</section>"


def _alert_list(run: Run) -> str:
    alerts = run.alerts[-ALERTS:]
    items = "".join(f"<li><b>{alert.step:,}</b> {text(_alert_text(alert), 600)}</li>" for alert in alerts)
    cut = f"<p>The last {len(alerts)} of {len(run.alerts):,}.</p>" if len(alerts) < len(run.alerts) else ""
    return f'<h3>{text(run.label)}</h3>{cut}<ul class="alerts">{items}</ul>'


def _alert_text(alert: Alert) -> str:
    """An alert's message; if it has none, its kind, value and tokens."""
    texts = map(repr, alert.pair_text) if alert.pair_text else map(str, alert.pair or ())
    tokens = f", tokens {' and '.join(texts)}" if alert.pair_text or alert.pair else ""
    return alert.message or f"{alert.kind}: {alert.value:.4g}{tokens}"


def remarks_section(runs: Sequence[Run]) -> str:
    """What the monitor remarked about the runs, and which curves have values that cannot be drawn."""
    runs_of_remark: dict[str, list[Run]] = {}
    for run in runs:
        for remark in (*run.info.remarks, *_nonfinite_remarks(run)):
            runs_of_remark.setdefault(remark, []).append(run)
    items = "".join(item_of_runs(remark, 1000, some, runs) for remark, some in runs_of_remark.items())
    return f"<section><h2>Remarks</h2><ul>{items}</ul></section>" if items else ""


def _nonfinite_remarks(run: Run) -> Iterator[str]:
    for name in CURVES:
        curve = run.curve(name)
        steps = curve.steps[~np.isfinite(curve.values)]
        if len(steps):
            yield f"{name} is nan or infinite at {plural(len(steps), 'step')}, first at {steps[0]:,}."

"""Compare optimizers as the paper does: means and deviations over seeds, ratios of means, differences over pairs.

Only runs of the same model are compared. These runs are counted, that is, enter the means:

- In a report, the finished runs; if no run is finished, all of them. In a live comparison, all that did not break off:
  a run that was asked to stop counts like one that is still training, a failed or killed one does not.
- If several runs have the same optimizer, seed and panel, the one that started last.

A run's final value of a metric is the last one in its log. If it is nan or infinite it is left out of the mean, and a
note says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hilbert_monitor.runs.metrics import CATALOGUE
from hilbert_monitor.service.following.text import clip

from .averages import RatioCurve, mean_curve, ratio_curve
from .plot_options import Axis, PlotOptions
from .series import CURVES, RunSeries, Series

BASELINE, CANDIDATE = "AdamW", "RowNorm"
"""Ratios are baseline over candidate, differences are candidate minus baseline."""

METRIC_NAMES = {metric.field: metric.name for metric in CATALOGUE}
"""The name of each metric, by the field of a StepRecord."""

METRICS = {METRIC_NAMES[field]: field for field in ("validation_loss", "diameter", "perturbation_rms")}
"""The metrics of the paper's table, and the curve of a run that has each."""

TITLES = {"validation_loss": "validation loss", "step_diameter": "D(S)", "perturbation_rms": "Hilbert RMS"}
"""The metrics of the table as a sentence names them."""

RATIO_CURVES = ("diameter", "perturbation_rms")
"""The curves whose ratio is of interest."""

Pair = tuple[RunSeries, RunSeries]
"""A run of AdamW and a run of RowNorm with the same model, seed and panel."""


@dataclass(frozen=True, slots=True)
class SampleStatistics:
    """Mean and sample standard deviation over some runs; None where they do not exist."""

    mean: float | None = None
    deviation: float | None = None
    runs: int = 0


@dataclass(frozen=True, slots=True)
class CurrentRatio:
    """A ratio at the last step that both runs of some pair have reached, over the pairs that have reached it."""

    ratio: float | None = None
    step: int | None = None
    pairs: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The comparison of the runs of one model."""

    model: str
    optimizers: dict[str, dict[str, SampleStatistics]]
    """Final values, by optimizer and metric."""
    ratios: dict[str, float | None]
    """Mean final value of AdamW over that of RowNorm, by metric."""
    difference: SampleStatistics
    """Final validation loss of RowNorm minus that of AdamW, over the pairs."""
    below: int
    """The number of checkpoints where RowNorm's mean validation loss is below AdamW's."""
    checkpoints: int
    """The number of checkpoints where both have a mean validation loss."""
    counted: tuple[RunSeries, ...]
    """The runs that enter the means."""
    excluded: tuple[RunSeries, ...]
    """The runs that are drawn but enter no mean."""
    notes: tuple[str, ...]
    """Sentences that say what was left out, and why."""
    pairs: tuple[tuple[str, str], ...] = ()
    """The ids of the two runs of each pair."""
    current_ratios: dict[str, CurrentRatio]
    """Mean of AdamW over mean of RowNorm, over the pairs, by curve."""


def compare(runs: Iterable[RunSeries], *, live: bool = False) -> list[Comparison]:
    """Compare the runs of each model. The order of the runs does not matter.

    Args:
        runs: runs of any models.
        live: whether to count runs that are still training.
    """
    ordered = sorted(
        runs, key=lambda run: (run.model, _optimizer_order(run.optimizer), _seed_order(run), run.started, run.id)
    )
    models = dict.fromkeys(run.model for run in ordered)
    return [_compare_model(model, [run for run in ordered if run.model == model], live) for model in models]


def sample_statistics(values: Iterable[float]) -> SampleStatistics:
    """Mean and sample standard deviation. A single value has no deviation."""
    sample = list(values)
    count = len(sample)
    if not count:
        return SampleStatistics()
    mean = sum(sample) / count
    if count == 1 or not math.isfinite(mean):
        return SampleStatistics(mean if math.isfinite(mean) else None, None, count)
    variance = sum((value - mean) * (value - mean) for value in sample) / (count - 1)
    return SampleStatistics(mean, math.sqrt(variance) if math.isfinite(variance) else None, count)


def by_optimizer(runs: Iterable[RunSeries]) -> dict[str, list[RunSeries]]:
    """Group runs by optimizer: AdamW and RowNorm first, then by name."""
    groups: dict[str, list[RunSeries]] = {}
    for run in runs:
        groups.setdefault(run.optimizer, []).append(run)
    return dict(sorted(groups.items(), key=lambda item: _optimizer_order(item[0])))


def axes(runs: Iterable[RunSeries]) -> tuple[Axis, ...]:
    """The axes on which every point of every run has an x coordinate."""
    curves = [run.curve(name) for run in runs for name in CURVES]
    all_axes: tuple[Axis, ...] = ("updates", "tokens", "time")
    return tuple(axis for axis in all_axes if all(curve.has_x(axis) for curve in curves))


def axis_of(runs: Iterable[RunSeries]) -> Axis:
    """The default axis of some runs: tokens if every point has a token count, and updates otherwise."""
    return "tokens" if "tokens" in axes(runs) else "updates"


def with_axis(options: PlotOptions, runs: Sequence[RunSeries]) -> PlotOptions:
    """The options, with the default axis of the runs if they name none."""
    return options if options.axis else replace(options, axis=axis_of(runs))


def final_value(run: RunSeries, metric: str) -> float | None:
    """A run's last value of a metric of the table."""
    return run.curve(METRICS[metric]).last


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """The ratio of two means, or None if one is missing or the result is not finite."""
    if numerator is None or denominator is None or not denominator:
        return None
    quotient = numerator / denominator
    return quotient if math.isfinite(quotient) else None


def same_panel(runs: Iterable[RunSeries]) -> bool:
    """Whether all runs with perturbations measured them on the same panel."""
    return len({run.panel_hash for run in runs if len(run.perturbation_rms)}) < 2


def pair_up(runs: Iterable[RunSeries]) -> list[Pair]:
    """Pair each run of AdamW with the runs of RowNorm that have the same model, seed and panel.

    Runs without a seed are paired only if AdamW and RowNorm have one run each.
    """
    groups = by_optimizer(runs)
    baseline, candidates = groups.get(BASELINE, []), groups.get(CANDIDATE, [])
    one_each = len(baseline) == len(candidates) == 1
    partners: dict[tuple[str, int | None, str], list[RunSeries]] = {}
    for run in candidates:
        partners.setdefault((run.model, run.seed, run.panel_hash), []).append(run)
    return [
        (run, partner)
        for run in baseline
        if run.seed is not None or one_each
        for partner in partners.get((run.model, run.seed, run.panel_hash), [])
    ]


def pair_ratios(pairs: Sequence[Pair], name: str, axis: Axis, smooth: float = 0.0) -> RatioCurve:
    """The mean of AdamW over the mean of RowNorm along a curve, over the pairs."""
    return ratio_curve([(a.curve(name), b.curve(name)) for a, b in pairs], axis, smooth=smooth)


# One model


def _compare_model(model: str, runs: list[RunSeries], live: bool) -> Comparison:
    notes: list[str] = []
    counted = _newest(_unbroken(runs, notes) if live else _finished(runs, notes), notes)
    groups = by_optimizer(counted)
    optimizers = {
        name: {metric: _final_statistics(name, metric, group, notes) for metric in METRICS}
        for name, group in groups.items()
    }
    pairs = pair_up(counted)
    pairing_notes = _pairing_notes(groups, pairs)
    ratios = _ratios(groups, optimizers, [] if live and pairing_notes else notes)
    notes += pairing_notes
    below, checkpoints = _count_below(pairs, groups)
    return Comparison(
        model=model,
        optimizers=optimizers,
        ratios=ratios,
        difference=_difference(pairs),
        below=below,
        checkpoints=checkpoints,
        counted=tuple(counted),
        excluded=tuple(_without(runs, counted)),
        notes=tuple(notes),
        pairs=tuple((a.id, b.id) for a, b in pairs),
        current_ratios={name: _current_ratio(pairs, name) for name in RATIO_CURVES},
    )


def _finished(runs: list[RunSeries], notes: list[str]) -> list[RunSeries]:
    """The finished runs that have a value, or all runs if there is no such run."""
    finished = [run for run in runs if run.status == "finished" and any(len(run.curve(name)) for name in CURVES)]
    if not finished:
        notes.append("No run is finished: these are the last values so far.")
        return runs
    if others := _without(runs, finished):
        notes.append(f"Not finished, or without a value, and therefore in no mean: {_labels(others)}.")
    return finished


def _unbroken(runs: list[RunSeries], notes: list[str]) -> list[RunSeries]:
    """The runs that did not fail. A failed or killed run counts only if its optimizer has no other run."""
    replaceable = {run.optimizer for run in runs if run.status not in ("failed", "killed")}
    broken = [run for run in runs if run.status in ("failed", "killed") and run.optimizer in replaceable]
    if broken:
        notes.append(f"Broken off, and therefore in no mean: {_labels(broken)}.")
    return _without(runs, broken)


def _newest(runs: list[RunSeries], notes: list[str]) -> list[RunSeries]:
    """The newest of the runs with the same optimizer, seed and panel. All runs without a seed are kept."""
    newest = {(run.optimizer, run.panel_hash, run.id if run.seed is None else run.seed): run for run in runs}
    if len(newest) < len(runs):
        older = _labels(_without(runs, newest.values()))
        notes.append(f"A later run has the same optimizer, seed and panel, so that these are in no mean: {older}.")
    return list(newest.values())


def _final_statistics(optimizer: str, metric: str, runs: list[RunSeries], notes: list[str]) -> SampleStatistics:
    """Mean and deviation of a metric's final values over the runs of an optimizer."""
    if metric == "perturbation_rms" and not same_panel(runs):
        notes.append(f"The runs of {optimizer} have different panels: their Hilbert RMS has no mean.")
        return SampleStatistics()
    finals = [(run, value) for run in runs if (value := final_value(run, metric)) is not None]
    not_finite = [run for run, value in finals if not math.isfinite(value)]
    if not_finite:
        notes.append(f"The last {TITLES[metric]} is not finite, and therefore in no mean: {_labels(not_finite)}.")
    return sample_statistics(value for _, value in finals if math.isfinite(value))


def _ratios(
    groups: dict[str, list[RunSeries]], optimizers: dict[str, dict[str, SampleStatistics]], notes: list[str]
) -> dict[str, float | None]:
    """Ratios of the mean final D(S) and Hilbert RMS. Hilbert RMS has a ratio only if all runs share a panel."""
    means = {
        metric: [optimizers.get(name, {}).get(metric, SampleStatistics()).mean for name in (BASELINE, CANDIDATE)]
        for metric in ("step_diameter", "perturbation_rms")
    }
    ratios = {metric: ratio(*pair) for metric, pair in means.items()}
    if not same_panel(run for name in (BASELINE, CANDIDATE) for run in groups.get(name, [])):
        notes.append(f"{BASELINE} and {CANDIDATE} have different panels: there is no ratio of their Hilbert RMS.")
        ratios["perturbation_rms"] = None
    return ratios


def _pairing_notes(groups: dict[str, list[RunSeries]], pairs: Sequence[Pair]) -> list[str]:
    """A note that says why there is no pair, although both optimizers have runs."""
    baseline, candidates = groups.get(BASELINE, []), groups.get(CANDIDATE, [])
    if pairs or not baseline or not candidates:
        return []
    if not {run.panel_hash for run in baseline} & {run.panel_hash for run in candidates}:
        reason = f"The runs of {BASELINE} and {CANDIDATE} were measured on different panels"
    else:
        reason = f"No run of {CANDIDATE} has the seed and the panel of one of {BASELINE}"
    return [f"{reason}: there is no paired difference, and no ratio is drawn."]


def _current_ratio(pairs: Sequence[Pair], name: str) -> CurrentRatio:
    """The ratio of a curve at the last step where a pair has both values."""
    curve = pair_ratios(pairs, name, "updates")
    if not len(curve.x):
        return CurrentRatio()
    last = float(curve.ratio[-1])
    return CurrentRatio(last if math.isfinite(last) else None, int(curve.x[-1]), int(curve.pairs[-1]))


def _difference(pairs: list[Pair]) -> SampleStatistics:
    """Mean and deviation over the pairs of the difference in validation loss, at the last step where both have one."""
    differences = (_last_difference(a.validation_loss, b.validation_loss) for a, b in pairs)
    return sample_statistics(value for value in differences if value is not None and math.isfinite(value))


def _last_difference(a: Series, b: Series) -> float | None:
    """The second curve minus the first, at their last common step."""
    _, rows_a, rows_b = np.intersect1d(a.steps, b.steps, return_indices=True)
    return float(b.values[rows_b[-1]] - a.values[rows_a[-1]]) if len(rows_a) else None


def _count_below(pairs: list[Pair], groups: dict[str, list[RunSeries]]) -> tuple[int, int]:
    """At how many checkpoints RowNorm's mean validation loss is below AdamW's, and the number of checkpoints.

    The means are over the pairs, or over all runs if there is no pair. Only checkpoints where every run has a loss are
    counted.
    """
    baseline, candidates = (
        [pair[i] for pair in pairs] or groups.get(name, []) for i, name in enumerate((BASELINE, CANDIDATE))
    )
    axis = axis_of([*baseline, *candidates])
    a, b = (_complete_means(runs, axis) for runs in (baseline, candidates))
    common = a.keys() & b.keys()
    return sum(b[x] < a[x] for x in common), len(common)


def _complete_means(runs: list[RunSeries], axis: Axis) -> dict[float, float]:
    """The mean validation loss by x coordinate, where every run has one."""
    curve = mean_curve([run.validation_loss for run in runs], axis, spread=False)
    complete = (curve.runs == len(runs)) & np.isfinite(curve.mean)
    return dict(zip(curve.x[complete].tolist(), curve.mean[complete].tolist(), strict=True))


# Order and names


def _optimizer_order(optimizer: str) -> tuple[int, str]:
    first = (BASELINE, CANDIDATE)
    return (first.index(optimizer) if optimizer in first else len(first), optimizer)


def _seed_order(run: RunSeries) -> tuple[bool, int]:
    return run.seed is None, run.seed or 0


def _without(runs: Iterable[RunSeries], others: Iterable[RunSeries]) -> list[RunSeries]:
    ids = {run.id for run in others}
    return [run for run in runs if run.id not in ids]


def _labels(runs: Iterable[RunSeries]) -> str:
    return ", ".join(clip(run.label, 60) for run in runs)

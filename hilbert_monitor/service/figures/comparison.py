"""The paper's statistics: means and sample deviations over seeds, ratios of means, paired differences.

Runs are compared within one model. Once a run of a model is finished, only finished ones count; before, all do, as they
stand. Of two runs with the same optimizer, seed and panel the one that began last counts. A run's final value is that
of the last record that has one. If that is nan or infinite it has no place in a mean, and a sentence says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from hilbert_monitor.service.following.text import clip

from .averages import paired, pointwise
from .plot_options import Axis
from .series import CURVES, RunSeries, Series

BASE, OURS = "AdamW", "RowNorm"
"""Ratios are of the first over the second, differences of the second minus the first."""

METRICS = {"validation_loss": "validation_loss", "step_diameter": "diameter", "perturbation_rms": "perturbation_rms"}
"""Metrics of the table, and the field of a run that has them."""

NAMES = {"validation_loss": "validation loss", "step_diameter": "D(S)", "perturbation_rms": "Hilbert RMS"}

COMPARED = ("diameter", "perturbation_rms")
"""Curves that have a ratio."""

Pair = tuple[RunSeries, RunSeries]
"""Runs of AdamW and of RowNorm that differ in nothing else."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and sample standard deviation of some runs; None where there is none."""

    mean: float | None = None
    deviation: float | None = None
    runs: int = 0


@dataclass(frozen=True, slots=True)
class Current:
    """A ratio as it stands: at the last step that the runs of a pair share, over the pairs that have come so far."""

    ratio: float | None = None
    step: int | None = None
    pairs: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The runs of one model, compared."""

    model: str
    optimizers: dict[str, dict[str, Spread]]
    """By optimizer and metric."""
    ratios: dict[str, float | None]
    """By metric: the mean of AdamW over that of RowNorm."""
    difference: Spread
    """Final validation loss, RowNorm minus AdamW, over the pairs."""
    below: int
    checkpoints: int
    """RowNorm's mean validation loss is below AdamW's at so many of so many checkpoints."""
    counted: tuple[RunSeries, ...]
    aside: tuple[RunSeries, ...]
    """Runs that no mean has in it."""
    notes: tuple[str, ...]
    pairs: tuple[tuple[str, str], ...] = ()
    """Ids of the runs of AdamW and RowNorm that make a pair."""
    current: dict[str, Current]
    """By curve: the mean of AdamW over that of RowNorm, of the pairs alone."""


def compare(runs: Iterable[RunSeries], *, live: bool = False) -> list[Comparison]:
    """Compare the runs of each model; their order does not matter.

    Args:
        runs: of any models.
        live: whether runs count as they stand, be they finished or not.
    """
    ordered = sorted(runs, key=lambda run: (run.model, _rank(run.optimizer), _seed(run), run.started, run.id))
    models = dict.fromkeys(run.model for run in ordered)
    return [_compare_model(model, [run for run in ordered if run.model == model], live) for model in models]


def spread(values: Iterable[float]) -> Spread:
    """Mean and sample standard deviation; of one value there is no deviation."""
    found = list(values)
    count = len(found)
    if not count:
        return Spread()
    mean = sum(found) / count
    if count == 1 or not math.isfinite(mean):
        return Spread(mean if math.isfinite(mean) else None, None, count)
    variance = sum((value - mean) * (value - mean) for value in found) / (count - 1)
    return Spread(mean, math.sqrt(variance) if math.isfinite(variance) else None, count)


def by_optimizer(runs: Iterable[RunSeries]) -> dict[str, list[RunSeries]]:
    """The runs of each optimizer: AdamW and RowNorm first, then by name."""
    found = list(runs)
    names = sorted({run.optimizer for run in found}, key=_rank)
    return {name: [run for run in found if run.optimizer == name] for name in names}


def axes(runs: Iterable[RunSeries]) -> tuple[Axis, ...]:
    """The axes that every point of every run has a place on."""
    curves = [run.curve(name) for run in runs for name in CURVES]
    known: tuple[Axis, ...] = ("updates", "tokens", "time")
    return tuple(axis for axis in known if all(curve.has(axis) for curve in curves))


def axis_of(runs: Iterable[RunSeries]) -> Axis:
    """What curves are drawn and aligned by: tokens, if every point of every run has them."""
    return "tokens" if "tokens" in axes(runs) else "updates"


def final(run: RunSeries, metric: str) -> float | None:
    """A run's final value of a metric of the table."""
    last: float | None = getattr(run, METRICS[metric]).last
    return last


def ratio(over: float | None, under: float | None) -> float | None:
    """One mean over another, if there are both and the second is not zero."""
    if over is None or under is None or not under:
        return None
    found = over / under
    return found if math.isfinite(found) else None


def same_panel(runs: Iterable[RunSeries]) -> bool:
    """Whether the perturbations of the runs are over one panel."""
    return len({run.panel_hash for run in runs if len(run.perturbation_rms)}) < 2


def pair_up(runs: Iterable[RunSeries]) -> list[Pair]:
    """Runs of AdamW and RowNorm with the same model, seed and panel.

    Runs without a seed make a pair only if they are the only ones of their optimizers.
    """
    groups = by_optimizer(runs)
    base, ours = groups.get(BASE, []), groups.get(OURS, [])
    alone = len(base) == len(ours) == 1
    partners: dict[tuple[str, int | None, str], list[RunSeries]] = {}
    for run in ours:
        partners.setdefault((run.model, run.seed, run.panel_hash), []).append(run)
    return [
        (run, partner)
        for run in base
        if run.seed is not None or alone
        for partner in partners.get((run.model, run.seed, run.panel_hash), [])
    ]


# One model


def _compare_model(model: str, runs: list[RunSeries], live: bool) -> Comparison:
    notes: list[str] = []
    counted = _newest(_going(runs, notes) if live else _finished(runs, notes), notes)
    groups = by_optimizer(counted)
    optimizers = {
        name: {metric: _final(name, metric, group, notes) for metric in METRICS} for name, group in groups.items()
    }
    pairs = pair_up(counted)
    apart = _unpaired(groups, pairs)
    ratios = _ratios(groups, optimizers, [] if live and apart else notes)
    notes += apart
    below, checkpoints = _below(pairs, groups)
    ids = {run.id for run in counted}
    return Comparison(
        model=model,
        optimizers=optimizers,
        ratios=ratios,
        difference=_difference(pairs),
        below=below,
        checkpoints=checkpoints,
        counted=tuple(counted),
        aside=tuple(run for run in runs if run.id not in ids),
        notes=tuple(notes),
        pairs=tuple((a.id, b.id) for a, b in pairs),
        current={name: _current(pairs, name) for name in COMPARED},
    )


def _finished(runs: list[RunSeries], notes: list[str]) -> list[RunSeries]:
    """The finished runs that measured something, or all if there is none."""
    done = [run for run in runs if run.status == "finished" and any(len(run.curve(name)) for name in CURVES)]
    if not done:
        notes.append("No run is finished: these are the last values so far.")
        return runs
    if len(done) < len(runs):
        ids = {run.id for run in done}
        left = _names(run for run in runs if run.id not in ids)
        notes.append(f"Not finished, or without a value, and therefore in no mean: {left}.")
    return done


def _going(runs: list[RunSeries], notes: list[str]) -> list[RunSeries]:
    """The runs that go on or have finished; one that broke off counts only where its optimizer has no other."""
    well = [run for run in runs if run.status not in ("failed", "killed")]
    others = {run.optimizer for run in well}
    broken = [run for run in runs if run.status in ("failed", "killed") and run.optimizer in others]
    if broken:
        notes.append(f"Broken off, and therefore in no mean: {_names(broken)}.")
    ids = {run.id for run in broken}
    return [run for run in runs if run.id not in ids]


def _newest(runs: list[RunSeries], notes: list[str]) -> list[RunSeries]:
    """Of the runs with the same optimizer, seed and panel the one that began last; without a seed, all."""
    kept = {(r.optimizer, r.panel_hash, r.id if r.seed is None else r.seed): r for r in runs}
    if len(kept) < len(runs):
        ids = {run.id for run in kept.values()}
        left = _names(run for run in runs if run.id not in ids)
        notes.append(f"A later run has the same optimizer, seed and panel, so that these are in no mean: {left}.")
    return list(kept.values())


def _final(optimizer: str, metric: str, runs: list[RunSeries], notes: list[str]) -> Spread:
    """Mean and deviation of a metric's final values."""
    if metric == "perturbation_rms" and not same_panel(runs):
        notes.append(f"The runs of {optimizer} have different panels: their Hilbert RMS has no mean.")
        return Spread()
    found = [(run, last) for run in runs if (last := final(run, metric)) is not None]
    lost = [run for run, last in found if not math.isfinite(last)]
    if lost:
        notes.append(f"The last {NAMES[metric]} is not finite, and therefore in no mean: {_names(lost)}.")
    return spread(last for _, last in found if math.isfinite(last))


def _ratios(
    groups: dict[str, list[RunSeries]], optimizers: dict[str, dict[str, Spread]], notes: list[str]
) -> dict[str, float | None]:
    """Ratios of the means of D(S) and of Hilbert RMS, the latter over one panel only."""
    means = {
        metric: [optimizers.get(name, {}).get(metric, Spread()).mean for name in (BASE, OURS)]
        for metric in ("step_diameter", "perturbation_rms")
    }
    found = {metric: ratio(*pair) for metric, pair in means.items()}
    if not same_panel(run for name in (BASE, OURS) for run in groups.get(name, [])):
        notes.append(f"{BASE} and {OURS} have different panels: there is no ratio of their Hilbert RMS.")
        found["perturbation_rms"] = None
    return found


def _unpaired(groups: dict[str, list[RunSeries]], pairs: Sequence[Pair]) -> list[str]:
    """Why no two runs can be compared, if that is so."""
    base, ours = groups.get(BASE, []), groups.get(OURS, [])
    if pairs or not base or not ours:
        return []
    if not {run.panel_hash for run in base} & {run.panel_hash for run in ours}:
        why = f"The runs of {BASE} and {OURS} were measured on different panels"
    else:
        why = f"No run of {OURS} has the seed and the panel of one of {BASE}"
    return [f"{why}: there is no paired difference, and no ratio is drawn."]


def _current(pairs: Sequence[Pair], name: str) -> Current:
    """A curve's ratio at the last step that the runs of a pair share."""
    found = paired([(a.curve(name), b.curve(name)) for a, b in pairs], "updates")
    if not len(found.x):
        return Current()
    last = float(found.ratio[-1])
    return Current(last if math.isfinite(last) else None, int(found.x[-1]), int(found.pairs[-1]))


def _difference(pairs: list[Pair]) -> Spread:
    """Mean and deviation of the pairs' differences in validation loss, at the last step where both have one."""
    found = (_last_difference(a.validation_loss, b.validation_loss) for a, b in pairs)
    return spread(value for value in found if value is not None and math.isfinite(value))


def _last_difference(a: Series, b: Series) -> float | None:
    """The second curve minus the first at the last step of both."""
    _, rows, others = np.intersect1d(a.steps, b.steps, return_indices=True)
    return float(b.values[others[-1]] - a.values[rows[-1]]) if len(rows) else None


def _below(pairs: list[Pair], groups: dict[str, list[RunSeries]]) -> tuple[int, int]:
    """At how many checkpoints RowNorm's mean validation loss is below AdamW's, and of how many.

    The means are over the pairs, or over all runs if there is none. A checkpoint is one where each of them has a loss.
    """
    base, ours = ([p[i] for p in pairs] or groups.get(name, []) for i, name in enumerate((BASE, OURS)))
    axis = axis_of([*base, *ours])
    a, b = (_complete(runs, axis) for runs in (base, ours))
    common = a.keys() & b.keys()
    return sum(b[x] < a[x] for x in common), len(common)


def _complete(runs: list[RunSeries], axis: Axis) -> dict[float, float]:
    """The mean validation loss wherever every run has one."""
    found = pointwise([run.validation_loss for run in runs], axis, spread=False)
    all_have = (found.runs == len(runs)) & np.isfinite(found.mean)
    return dict(zip(found.x[all_have].tolist(), found.mean[all_have].tolist(), strict=True))


# Names and order


def _rank(optimizer: str) -> tuple[int, str]:
    return ((BASE, OURS).index(optimizer) if optimizer in (BASE, OURS) else 2, optimizer)


def _seed(run: RunSeries) -> tuple[bool, int]:
    return run.seed is None, run.seed or 0


def _names(runs: Iterable[RunSeries]) -> str:
    return ", ".join(clip(run.label, 60) for run in runs)

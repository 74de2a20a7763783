"""One side of a comparison against another: pairs of runs, ratios, and the difference of the losses.

By default the sides are the groups of AdamW and RowNorm that agree in all settings that split groups: a pair of runs
differs in the optimizer of the head, and in what follows from it, alone. A reader may choose any two optimizers, groups
or runs instead. Whatever else differs between them is said.

Ratios are baseline over candidate, differences are candidate minus baseline.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from hilbert_monitor.runs.run import Curve, Run

from .averages import RatioCurve, mean_curve, ratio_curve
from .axes import axis_of
from .final_values import SampleStatistics, final_statistics, ratio, same_panel, sample_statistics
from .grouping import Group, Roles, optimizer_order, short_names
from .plot_options import Axis

RATIO_CURVES = ("diameter", "perturbation_rms")
"""The curves whose ratio is of interest."""
RATIO_METRICS = ("step_diameter", "perturbation_rms")
"""The metrics of the table whose ratio is of interest."""

Pair = tuple[Run, Run]
"""A run of the baseline and a run of the candidate that belong together."""


@dataclass(frozen=True, slots=True)
class CurrentRatio:
    """A ratio at the last step that both runs of some pair have reached, over the pairs that have reached it."""

    ratio: float | None = None
    step: int | None = None
    pairs: int = 0


@dataclass(frozen=True, slots=True)
class Side:
    """A group, or one run by itself."""

    name: str
    optimizer: str
    settings: tuple[str | None, ...]
    runs: tuple[Run, ...]
    is_run: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrast:
    """A baseline and a candidate."""

    baseline: str = ""
    candidate: str = ""
    optimizers: tuple[str, str] = ("", "")
    """Those of the two sides."""
    differs: dict[str, str] = field(default_factory=dict)
    """The settings that split groups and in which the two sides differ: {"lr": "0.1 against 0.2"}."""
    same_panel: bool = True
    """Whether all runs that the ratios are of have the same panel."""
    pairs: tuple[Pair, ...] = field(default=(), repr=False)
    ratios: dict[str, float | None] = field(default_factory=lambda: dict.fromkeys(RATIO_METRICS))
    """Mean final value of the baseline over that of the candidate, by metric: over the pairs, or else all runs."""
    current_ratios: dict[str, CurrentRatio] = field(default_factory=lambda: {n: CurrentRatio() for n in RATIO_CURVES})
    """Mean of the baseline over mean of the candidate, over the pairs, by curve."""
    difference: SampleStatistics = field(default_factory=SampleStatistics)
    """Final validation loss of the candidate minus that of the baseline, over the pairs."""
    below: int = 0
    """The number of checkpoints where the candidate's mean validation loss is below the baseline's."""
    checkpoints: int = 0
    """The number of checkpoints where both have a mean validation loss."""


def find_contrasts(groups: Sequence[Group], roles: Roles, baseline: str = "", candidate: str = "") -> list[Contrast]:
    """The contrasts of some groups; those without a pair only if none has one.

    Args:
        groups: groups of runs that are counted.
        roles: what the settings of the runs mean.
        baseline: name of an optimizer or a group, or id of a run; empty for the usual.
        candidate: the same.
    """
    sides = [(a, b, pair_up(a, b, roles)) for a, b in _sides(groups, baseline, candidate)]
    if any(pairs for *_, pairs in sides):
        sides = [side for side in sides if side[2]]
    return [_contrast(a, b, pairs, roles) for a, b, pairs in sides]


def pair_up(a: Side, b: Side, roles: Roles) -> list[Pair]:
    """Pair the runs of two sides that have the same seed and panel.

    Runs without a seed are paired only if each side has one run. A run by itself is paired with every run of the other
    side that has its panel.
    """
    everyone = a.is_run or b.is_run
    one_each = len(a.runs) == len(b.runs) == 1
    partners: dict[tuple[object, ...], list[Run]] = {}
    for run in b.runs:
        partners.setdefault((run.info.panel_hash, None if everyone else roles.seed(run)), []).append(run)
    return [
        (run, partner)
        for run in a.runs
        if everyone or run.seed is not None or one_each
        for partner in partners.get((run.info.panel_hash, None if everyone else roles.seed(run)), [])
    ]


def pair_ratios(pairs: Sequence[Pair], name: str, axis: Axis, smooth: float = 0.0) -> RatioCurve:
    """The mean of the baseline over the mean of the candidate along a curve, over the pairs."""
    return ratio_curve([(a.curve(name), b.curve(name)) for a, b in pairs], axis, smooth=smooth)


# Sides


def default_optimizers(groups: Sequence[Group]) -> tuple[str, ...]:
    """The two optimizers that are compared by default, if there are two: AdamW and RowNorm, or else the first."""
    return tuple(sorted({group.optimizer for group in groups}, key=optimizer_order)[:2])


def _sides(groups: Sequence[Group], baseline: str, candidate: str) -> Iterator[tuple[Side, Side]]:
    """The sides to compare: by default groups of two optimizers with the same settings."""
    usual = [name for name in default_optimizers(groups) if name not in (baseline, candidate)]
    optimizers = {group.optimizer for group in groups}
    if {baseline, candidate} <= {*optimizers, ""}:
        first = baseline or (usual[0] if usual else "")
        second = candidate or next((name for name in _ordered(optimizers) if name != first), "")
        agree = True
    else:
        first, second, agree = baseline, candidate, False
    everyone = [_side(group) for group in groups]
    baselines, candidates = (_named(groups, name) if name else everyone for name in (first, second))
    for a, b in product(baselines, candidates):
        if a.name == b.name or (agree and (a.optimizer == b.optimizer or a.settings != b.settings)):
            continue
        a_rest, b_rest = _without(a, b) if b.is_run else a, _without(b, a) if a.is_run else b
        if a_rest.runs and b_rest.runs:
            yield a_rest, b_rest


def _ordered(optimizers: set[str]) -> list[str]:
    return sorted(optimizers, key=optimizer_order)


def _named(groups: Sequence[Group], name: str) -> list[Side]:
    """The groups of an optimizer, or the group of this name, or the run with this id."""
    found = [_side(group) for group in groups if name == group.optimizer]
    found = found or [_side(group) for group in groups if name == group.name]
    return found or [
        Side(name, group.optimizer, group.settings, (run,), is_run=True)
        for group in groups
        for run in group.runs
        if run.id == name
    ]


def _side(group: Group) -> Side:
    return Side(group.name, group.optimizer, group.settings, group.runs)


def _without(side: Side, other: Side) -> Side:
    ids = {run.id for run in other.runs}
    runs = tuple(run for run in side.runs if run.id not in ids)
    return Side(side.name, side.optimizer, side.settings, runs, side.is_run)


# The numbers of a contrast


def _contrast(a: Side, b: Side, pairs: Sequence[Pair], roles: Roles) -> Contrast:
    below, checkpoints = _count_below(a, b, pairs)
    ours, theirs = _paired(a, b, pairs)
    return Contrast(
        baseline=a.name,
        candidate=b.name,
        optimizers=(a.optimizer, b.optimizer),
        differs=_differing_settings(a, b, roles),
        same_panel=same_panel((*ours, *theirs)),
        pairs=tuple(pairs),
        ratios=_final_ratios(ours, theirs),
        current_ratios={name: _current_ratio(pairs, name) for name in RATIO_CURVES},
        difference=_difference(pairs),
        below=below,
        checkpoints=checkpoints,
    )


def _differing_settings(a: Side, b: Side, roles: Roles) -> dict[str, str]:
    names = short_names(roles.splitting)
    both = zip(roles.splitting, a.settings, b.settings, strict=True)
    return {names[key]: f"{one or 'none'} against {other or 'none'}" for key, one, other in both if one != other}


def _paired(a: Side, b: Side, pairs: Sequence[Pair]) -> tuple[list[Run], list[Run]]:
    """The runs of each side that are in a pair, each of them once; all runs if there is no pair."""
    first, second = ({pair[i].id: pair[i] for pair in pairs}.values() or side.runs for i, side in enumerate((a, b)))
    return list(first), list(second)


def _final_ratios(a: list[Run], b: list[Run]) -> dict[str, float | None]:
    """Ratios of the mean final values. Hilbert RMS has one only if all runs share a panel."""
    ratios = {name: ratio(*(final_statistics(runs, name).mean for runs in (a, b))) for name in RATIO_METRICS}
    if not same_panel((*a, *b)):
        ratios["perturbation_rms"] = None
    return ratios


def _current_ratio(pairs: Sequence[Pair], name: str) -> CurrentRatio:
    """The ratio of a curve at the last step where a pair has both values."""
    curve = pair_ratios(pairs, name, "updates")
    if not len(curve.x):
        return CurrentRatio()
    last = float(curve.ratio[-1])
    return CurrentRatio(last if math.isfinite(last) else None, int(curve.x[-1]), int(curve.pairs[-1]))


def _difference(pairs: Sequence[Pair]) -> SampleStatistics:
    """Mean and deviation over the pairs of the difference in validation loss, at the last step where both have one."""
    differences = (_last_difference(a.curve("validation_loss"), b.curve("validation_loss")) for a, b in pairs)
    return sample_statistics(value for value in differences if value is not None and math.isfinite(value))


def _last_difference(a: Curve, b: Curve) -> float | None:
    """The second curve minus the first, at their last common step."""
    _, rows_a, rows_b = np.intersect1d(a.steps, b.steps, return_indices=True)
    return float(b.values[rows_b[-1]]) - float(a.values[rows_a[-1]]) if len(rows_a) else None


def _count_below(a: Side, b: Side, pairs: Sequence[Pair]) -> tuple[int, int]:
    """At how many checkpoints the candidate's mean validation loss is below the baseline's, and of how many.

    The means are over the pairs, or over all runs if there is no pair. Only checkpoints where every run has a loss are
    counted.
    """
    baseline, candidates = ([pair[i] for pair in pairs] or list(side.runs) for i, side in enumerate((a, b)))
    axis = axis_of([*baseline, *candidates])
    ours, theirs = (_complete_means(runs, axis) for runs in (baseline, candidates))
    common = ours.keys() & theirs.keys()
    return sum(theirs[x] < ours[x] for x in common), len(common)


def _complete_means(runs: list[Run], axis: Axis) -> dict[float, float]:
    """The mean validation loss by x coordinate, where every run has one."""
    curve = mean_curve([run.curve("validation_loss") for run in runs], axis, spread=False)
    complete = (curve.runs == len(runs)) & np.isfinite(curve.mean)
    return dict(zip(curve.x[complete].tolist(), curve.mean[complete].tolist(), strict=True))

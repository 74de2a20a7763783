"""Compare optimizers as the paper does: means and deviations over seeds, ratios of means, differences over pairs.

Only runs of the same model are compared. `grouping` says which of them are seeds of one. These runs are counted, that
is, enter the means:

- In a report, the finished runs; if no run is finished, all of them. In a live comparison, all that did not break off:
  a run that was asked to stop counts like one that is still training, a failed or killed one does not, unless its group
  has no other.
- If several runs of a group have the same seed and panel, the one that started last.

A run's final value of a metric is the last one in its log. If it is nan or infinite it is left out of the mean, and a
note says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from hilbert_monitor.runs.run import Run
from hilbert_monitor.service.following.text import clip

from .contrasts import Contrast, CurrentRatio, default_optimizers, find_contrasts
from .final_values import METRICS, TITLES, SampleStatistics, final_statistics, final_value, same_panel
from .grouping import (
    FIRST,
    Group,
    Roles,
    differences,
    find_roles,
    group_runs,
    listed,
    offered_keys,
    optimizer_order,
    short_names,
)
from .plot_options import Choices
from .series import has_curve

LABELS = 20
"""The largest number of runs that a note names."""
BASELINE, CANDIDATE = FIRST
"""The optimizers that are compared by default, where runs of both are there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The comparison of the runs of one model."""

    model: str
    groups: tuple[Group, ...]
    """All runs, by optimizer and settings."""
    optimizers: dict[str, dict[str, SampleStatistics]]
    """Final values, by the name of a group, which is that of its optimizer unless settings differ, and by metric."""
    contrasts: tuple[Contrast, ...]
    """Baselines and candidates: one for each setting in which both have runs."""
    excluded: tuple[Run, ...]
    """The runs that enter no mean."""
    notes: tuple[str, ...]
    """Sentences that say what was left out, and why."""
    about: str = ""
    """Sentences that say in what the runs differ besides optimizer and seed."""
    keys: tuple[str, ...] = ()
    """Settings that a reader can split groups by: those that differ."""

    @property
    def runs(self) -> tuple[Run, ...]:
        """All runs, in the order of their groups."""
        return tuple(run for group in self.groups for run in group.runs)

    @property
    def counted(self) -> tuple[Run, ...]:
        """The runs that enter the means."""
        excluded = {run.id for run in self.excluded}
        return tuple(run for run in self.runs if run.id not in excluded)

    @property
    def contrast(self) -> Contrast:
        """The only contrast; an empty one if there are none or several."""
        return self.contrasts[0] if len(self.contrasts) == 1 else Contrast()

    @property
    def sides(self) -> tuple[str, str]:
        """What the ratios are of, and to: a group if it is the same in all contrasts, or else an optimizer."""
        names = [(c.baseline, c.candidate) for c in self.contrasts] or [FIRST]
        optimizers = [c.optimizers for c in self.contrasts] or [FIRST]
        first, second = (_same(names, side) or _same(optimizers, side) or "each group" for side in (0, 1))
        return first, second

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """The ids of the two runs of each pair."""
        return tuple((a.id, b.id) for contrast in self.contrasts for a, b in contrast.pairs)

    @property
    def ratios(self) -> dict[str, float | None]:
        """Those of the only contrast."""
        return self.contrast.ratios

    @property
    def current_ratios(self) -> dict[str, CurrentRatio]:
        """Those of the only contrast."""
        return self.contrast.current_ratios

    @property
    def difference(self) -> SampleStatistics:
        """That of the only contrast."""
        return self.contrast.difference

    @property
    def below(self) -> int:
        """That of the only contrast."""
        return self.contrast.below

    @property
    def checkpoints(self) -> int:
        """Those of the only contrast."""
        return self.contrast.checkpoints


def compare(runs: Iterable[Run], *, live: bool = False, choices: Choices | None = None) -> list[Comparison]:
    """Compare the runs of each model. The order of the runs does not matter.

    Args:
        runs: runs of any models.
        live: whether to count runs that are still training.
        choices: what a reader chose to compare; by default AdamW and RowNorm, or the first two optimizers.
    """
    ordered = sorted(
        runs, key=lambda run: (run.model, optimizer_order(run.optimizer), _seed_order(run), run.info.started, run.id)
    )
    models = dict.fromkeys(run.model for run in ordered)
    choices = choices or Choices()
    return [_compare_model(model, [run for run in ordered if run.model == model], live, choices) for model in models]


# One model


def _compare_model(model: str, runs: list[Run], live: bool, choices: Choices) -> Comparison:
    notes: list[str] = []
    roles = find_roles(runs)
    groups = group_runs(runs, roles)
    counted = _newest(_unbroken(groups, notes) if live else _finished(groups, notes), roles, notes)
    contrasts = find_contrasts(counted, roles, choices.baseline, choices.candidate)
    ids = {run.id for group in counted for run in group.runs}
    shown = group_runs(runs, roles, choices.by) if choices.by else groups
    optimizers = {
        group.name: {metric: _noted_statistics(group, metric, notes) for metric in METRICS}
        for group in (_only(group, ids) for group in shown)
        if group.runs
    }
    notes += _contrast_notes(counted, contrasts, roles, choices, live)
    return Comparison(
        model=model,
        groups=tuple(shown),
        optimizers=optimizers,
        contrasts=tuple(contrasts),
        excluded=tuple(run for run in runs if run.id not in ids),
        notes=tuple(notes),
        about=differences(runs, roles),
        keys=tuple(offered_keys(runs, roles)),
    )


def _finished(groups: Sequence[Group], notes: list[str]) -> list[Group]:
    """The finished runs that have a value, or all runs if there is no such run."""
    finished = {run.id for group in groups for run in group.runs if run.status == "finished" and has_curve(run)}
    if not finished:
        notes.append("No run is finished: these are the last values so far.")
        return list(groups)
    if others := [run for group in groups for run in group.runs if run.id not in finished]:
        notes.append(f"Not finished, or without a value, and therefore in no mean: {_labels(others)}.")
    return [_only(group, finished) for group in groups]


def _unbroken(groups: Sequence[Group], notes: list[str]) -> list[Group]:
    """The runs that did not fail. Failed and killed runs count only if their group has no other run with a curve."""
    whole = {run.id for group in groups for run in group.runs if run.status not in ("failed", "killed")}
    counted = [
        _only(group, whole) if any(run.id in whole and has_curve(run) for run in group.runs) else group
        for group in groups
    ]
    if broken := _lost(groups, counted):
        notes.append(f"Broken off, and therefore in no mean: {_labels(broken)}.")
    return counted


def _newest(groups: Sequence[Group], roles: Roles, notes: list[str]) -> list[Group]:
    """The newest of the runs of a group with the same seed and panel. All runs without a seed are kept."""
    newest: dict[tuple[object, ...], str] = {}
    for group in groups:
        for run in group.runs:
            seed = run.id if run.seed is None else roles.seed(run)
            newest[group.optimizer, group.settings, run.info.panel_hash, seed] = run.id
    counted = [_only(group, {*newest.values()}) for group in groups]
    if older := _lost(groups, counted):
        labels = _labels(older)
        notes.append(f"A later run has the same optimizer, settings, seed and panel: in no mean are {labels}.")
    return [group for group in counted if group.runs]


def _noted_statistics(group: Group, metric: str, notes: list[str]) -> SampleStatistics:
    """Mean and deviation of a metric's final values over the runs of a group; a note says what is left out."""
    if metric == "perturbation_rms" and not same_panel(group.runs):
        notes.append(f"The runs of {group.name} have different panels: their Hilbert RMS has no mean.")
    else:
        finals = ((run, final_value(run, metric)) for run in group.runs)
        not_finite = [run for run, value in finals if value is not None and not math.isfinite(value)]
        if not_finite:
            notes.append(f"The last {TITLES[metric]} is not finite, and therefore in no mean: {_labels(not_finite)}.")
    return final_statistics(group.runs, metric)


def _contrast_notes(
    groups: Sequence[Group], contrasts: Sequence[Contrast], roles: Roles, choices: Choices, live: bool
) -> Iterator[str]:
    """Notes that say why there is no ratio or no pair, and in what the sides of a contrast differ besides."""
    for name in filter(None, (choices.baseline, choices.candidate)):
        if not any(name in (group.optimizer, group.name, *(run.id for run in group.runs)) for group in groups):
            yield f"No optimizer, group or counted run is called '{clip(name, 100)}': there is nothing to compare with."
            return
    if not contrasts and (choices.baseline or choices.candidate):
        yield "The two sides that were chosen are the same, or share no settings: there is nothing to compare."
        return
    if len(contrasts) == 1 and (differs := contrasts[0].differs):
        settings = listed(f"{key} ({values})" for key, values in differs.items())
        yield f"{contrasts[0].baseline} and {contrasts[0].candidate} also differ in {settings}."
    elif differing := {key: "" for contrast in contrasts for key in contrast.differs}:
        yield f"The two sides of the ratios also differ in {listed(differing)}."
    for contrast in contrasts[:3]:
        if not contrast.same_panel and (contrast.pairs or not live):
            names = f"{contrast.baseline} and {contrast.candidate}"
            yield f"{names} have different panels: there is no ratio of their Hilbert RMS."
    yield from _pairing_notes(groups, contrasts, roles)


def _pairing_notes(groups: Sequence[Group], contrasts: Sequence[Contrast], roles: Roles) -> Iterator[str]:
    optimizers = default_optimizers(groups)
    if not contrasts and len(optimizers) == 2:
        keys = listed(short_names(roles.splitting).values())
        yield f"No run of {optimizers[1]} has the {keys} of one of {optimizers[0]}: there is no ratio of the two."
    if not contrasts or any(contrast.pairs for contrast in contrasts):
        return
    a, b = contrasts[0].baseline, contrasts[0].candidate
    panels = [
        {run.info.panel_hash for group in groups for run in group.runs if name in (group.name, run.id)}
        for name in (a, b)
    ]
    if not panels[0] & panels[1]:
        reason = f"The runs of {a} and {b} were measured on different panels"
    else:
        reason = f"No run of {b} has the seed and the panel of one of {a}"
    yield f"{reason}: there is no paired difference, and no ratio is drawn."


def _only(group: Group, ids: Iterable[str]) -> Group:
    """A group with those of its runs that have one of these ids."""
    return replace(group, runs=tuple(run for run in group.runs if run.id in ids))


def _lost(before: Iterable[Group], after: Iterable[Group]) -> list[Run]:
    """The runs that are in groups before, and in none after."""
    ids = {run.id for group in after for run in group.runs}
    return [run for group in before for run in group.runs if run.id not in ids]


# Order and names


def _same(pairs: Sequence[tuple[str, str]], side: int) -> str:
    """The name that all pairs have on one side; empty if there are several."""
    names = {pair[side] for pair in pairs}
    return names.pop() if len(names) == 1 else ""


def _seed_order(run: Run) -> tuple[bool, int]:
    return run.seed is None, run.seed or 0


def _labels(runs: Sequence[Run]) -> str:
    labels = [clip(run.label, 60) for run in runs[:LABELS]]
    more = [f"and {len(runs) - LABELS} more"] if len(runs) > LABELS else []
    return ", ".join([*labels, *more])

"""One detector for all signals, thresholds from clean runs, and what leads: as docs/instabilities.md defines them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .instability_events import MERGED, WINDOW, Floats, Instability
from .instability_runs import family_of

BUDGET = 10_000
"""Updates of clean runs in which one alarm is allowed."""
REACH, AFTER = 200, 200
"""An alarm counts for an instability that begins at most so many updates later; after one, alarms do not count."""
LEADS = (1, 10, 50)
SHIFT, DRAWS = 25, 1000
FIXED = {"loss, six deviations": "loss", "gradient norm, six deviations": "gradient norm"}
"""What OLMo-core skips steps by: six standard deviations over 128 values, without a learned threshold."""
EMBEDDING = {"RMS(g / sqrt v), embedding": "RMS(g / sqrt v):embed"}
"""A member of a family that is judged by itself too."""


@dataclass
class Judged:
    """One run: its scores by signal, what happened in it, and from which update on it is judged."""

    label: str
    scores: dict[str, Floats]
    events: list[Instability]
    first: int

    @property
    def length(self) -> int:
        """Updates of the run."""
        return len(next(iter(self.scores.values())))


def scores_of(table: dict[str, Floats]) -> dict[str, Floats]:
    """Return the score of each signal at each update; of a family the largest of its members."""
    scores: dict[str, Floats] = {}
    for name, values in table.items():
        score, family = robust_score(values), family_of(name)
        scores[family] = np.maximum(scores[family], score) if family in scores else score
    for name, member in EMBEDDING.items():
        if member in table:
            scores[name] = robust_score(table[member])
    for name, source in FIXED.items():
        scores[name] = plain_score(table[source])
    return scores


def robust_score(values: Floats) -> Floats:
    """(value - median) / (1.4826 MAD) over the last 128 values before it; infinite for one that is not finite.

    The spread is at least a thousandth of the median's size. Before 128 values it is minus infinity.
    """
    windows = _windows(values)
    if not len(windows):
        return np.full(len(values), -np.inf)
    middle = np.median(windows, axis=1)
    spread = 1.4826 * np.median(np.abs(windows - middle[:, None]), axis=1)
    return _scored(values, middle, np.maximum(spread, 1e-3 * np.abs(middle) + 1e-30))


def plain_score(values: Floats) -> Floats:
    """(value - mean) / standard deviation over the last 128 values."""
    windows = _windows(values)
    if not len(windows):
        return np.full(len(values), -np.inf)
    return _scored(values, windows.mean(1), windows.std(1) + 1e-30)


def _windows(values: Floats) -> Floats:
    if len(values) <= WINDOW:
        return np.empty((0, WINDOW))
    known = np.where(np.isfinite(values), values, 0.0)
    windows: Floats = np.lib.stride_tricks.sliding_window_view(known, WINDOW)[: len(values) - WINDOW]
    return windows


def _scored(values: Floats, middle: Floats, spread: Floats) -> Floats:
    score = np.full(len(values), -np.inf)
    with np.errstate(invalid="ignore", over="ignore"):
        score[WINDOW:] = (values[WINDOW:] - middle) / spread
    score[~np.isfinite(values)] = np.inf
    return np.where(np.isnan(score), np.inf, score)


def alarms(score: Floats, threshold: float, first: int) -> list[int]:
    """Return the updates at which alarms begin; scores above the threshold within 50 updates belong together."""
    high = np.flatnonzero(score > threshold)
    high = high[high >= first]
    return [int(t) for i, t in enumerate(high) if i == 0 or t - high[i - 1] > MERGED]


def threshold(scores: Sequence[Floats], first: int) -> float:
    """Return the smallest threshold with at most one alarm in 10,000 updates of clean runs together."""
    judged = sum(max(0, len(score) - first) for score in scores)
    allowed = judged // BUDGET
    candidates = np.unique(np.concatenate([score[first:] for score in scores]))
    candidates = candidates[np.isfinite(candidates)]
    low, high = 0, len(candidates) - 1
    while low < high:  # fewer alarms above a higher threshold, but for those that merge
        middle = (low + high) // 2
        count = sum(len(alarms(score, float(candidates[middle]), first)) for score in scores)
        low, high = (low, middle) if count <= allowed else (middle + 1, high)
    return float(candidates[low])


@dataclass
class Lead:
    """What one signal told of the instabilities of some runs."""

    signal: str
    threshold: float
    leads: list[list[int | None]]
    """For each run, and each of its instabilities, the updates between its first alarm and the onset."""
    true: list[int]
    """For each run, the alarms that came before an instability."""
    false: list[int]
    chance: list[list[float]]
    """For each run, at each of LEADS, how many instabilities shifted alarms precede, on average."""

    @property
    def events(self) -> int:
        """Instabilities of all runs."""
        return sum(map(len, self.leads))

    def recall(self, least: int, runs: Sequence[int] | None = None) -> float:
        """Share of the instabilities with a lead of at least so many updates."""
        leads = [lead for r in (range(len(self.leads)) if runs is None else runs) for lead in self.leads[r]]
        return sum(lead is not None and lead >= least for lead in leads) / len(leads) if leads else math.nan

    def chance_recall(self, place: int, runs: Sequence[int] | None = None) -> float:
        """The recall at LEADS[place] of alarms that were shifted in a circle."""
        which = range(len(self.leads)) if runs is None else runs
        number = sum(len(self.leads[r]) for r in which)
        return sum(self.chance[r][place] for r in which) / number if number else math.nan

    @property
    def precision(self) -> float:
        """Share of the alarms that came before an instability."""
        number = sum(self.true) + sum(self.false)
        return sum(self.true) / number if number else math.nan

    @property
    def median(self) -> float:
        """Median lead of the instabilities that had one."""
        known = [lead for leads in self.leads for lead in leads if lead is not None]
        return float(np.median(known)) if known else math.nan


def lead_of(signal: str, level: float, runs: Sequence[Judged]) -> Lead:
    """Compare the alarms of a signal with the instabilities of runs."""
    lead = Lead(signal, level, [], [], [], [])
    for run in runs:
        times = [t for t in alarms(run.scores[signal], level, run.first)]
        leads, true, false = matched(times, run.events)
        lead.leads.append(leads)
        lead.true.append(true)
        lead.false.append(false)
        lead.chance.append(_chance(times, run))
    return lead


def matched(times: Sequence[int], events: Sequence[Instability]) -> tuple[list[int | None], int, int]:
    """Return the lead of each instability, and how many alarms came before one and before none."""
    counted = [t for t in times if not any(_is_over(t, event) for event in events)]
    before = [[t for t in counted if event.onset - REACH <= t <= event.onset] for event in events]
    leads: list[int | None] = [
        event.onset - found[0] if found else None for event, found in zip(events, before, strict=True)
    ]
    true = len({t for found in before for t in found})
    return leads, true, len(counted) - true


def _is_over(t: int, event: Instability) -> bool:
    """Whether an alarm comes when the instability is known: soon after a spike, or any time after a divergence."""
    return event.onset < t and (event.kind == "divergence" or t <= event.onset + AFTER)


def _chance(times: Sequence[int], run: Judged) -> list[float]:
    """How many instabilities have a lead of at least each of LEADS, with alarms shifted in a circle, on average."""
    length = run.length - run.first
    shifts = range(SHIFT, length, SHIFT)
    totals = [0.0] * len(LEADS)
    for shift in shifts:
        moved = sorted((t - run.first + shift) % length + run.first for t in times)
        leads, _, _ = matched(moved, run.events)
        for place, least in enumerate(LEADS):
            totals[place] += sum(lead is not None and lead >= least for lead in leads)
    return [total / max(1, len(shifts)) for total in totals]


@dataclass(frozen=True)
class Interval:
    """The 95 % interval of a bootstrap over runs."""

    low: float
    high: float


def bootstrap(lead: Lead, place: int = 1, seed: int = 0) -> tuple[Interval, Interval]:
    """Return the intervals of the recall at LEADS[place] less its chance level, and of the median lead."""
    draw, number = np.random.default_rng(seed), len(lead.leads)
    excess, medians = [], []
    for _ in range(DRAWS):
        runs = draw.integers(number, size=number).tolist()
        excess.append(lead.recall(LEADS[place], runs) - lead.chance_recall(place, runs))
        known = [x for r in runs for x in lead.leads[r] if x is not None]
        medians.append(float(np.median(known)) if known else math.nan)
    return _interval(excess), _interval(medians)


def _interval(values: Sequence[float]) -> Interval:
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return Interval(math.nan, math.nan)
    low, high = np.quantile(known, [0.025, 0.975])
    return Interval(float(low), float(high))

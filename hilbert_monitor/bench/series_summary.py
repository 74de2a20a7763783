"""What the synthetic series come to: false alarms, and the shares of faults that the rules and the opponents told."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from .output import show_machine
from .series import OPPONENTS, WINDOW, Array, SeriesRun

APART = 5
"""Alarms at most so many steps apart are one."""
DIAL = 1.0
"""False alarms in 10,000 steps that the rules are allowed."""
CONFIDENCE = 0.99


@dataclass(frozen=True)
class FaultShares:
    """One fault in one noise: who told of how many."""

    fault: str
    tried: int
    ours: float
    opponents: dict[str, float]
    behind: float
    """How far the rules are behind the better opponent, in standard errors of the difference."""

    @property
    def worse(self) -> bool:
        """Whether chance does not explain that an opponent is better."""
        return self.behind > 2


@dataclass(frozen=True)
class NoiseSummary:
    """All runs of one noise."""

    noise: str
    steps: int
    false_alarms: int
    above_dial: bool
    """Whether there are more false alarms than the dial allows, with 99 % confidence."""
    opponents_false_alarms: dict[str, int]
    thresholds: dict[str, float]
    faults: list[FaultShares]

    @property
    def per_10k(self) -> float:
        """False alarms of the rules in 10,000 steps."""
        return self.false_alarms / self.steps * 1e4


@dataclass(frozen=True)
class SeriesSummary:
    """What all series come to."""

    noises: list[NoiseSummary]
    microseconds: float
    """Mean time of one judgement."""

    @property
    def sums(self) -> dict[str, float]:
        """Shares summed over all faults in all noises, of the rules and of each opponent."""
        cells = [cell for noise in self.noises for cell in noise.faults]
        theirs = {name: sum(cell.opponents[name] for cell in cells) for name in OPPONENTS}
        return {"ours": sum(cell.ours for cell in cells), **theirs}

    @property
    def worse(self) -> list[tuple[str, FaultShares]]:
        """Noises and faults in which an opponent is better by more than two standard errors."""
        return [(noise.noise, cell) for noise in self.noises for cell in noise.faults if cell.worse]

    def as_dict(self) -> dict[str, Any]:
        """Plain types, for JSON."""
        worse = [f"{noise}: {cell.fault}" for noise, cell in self.worse]
        return {**asdict(self), "sums": self.sums, "worse": worse}


def summarize(runs: Sequence[SeriesRun]) -> SeriesSummary:
    """Give the opponents their thresholds, and count."""
    names = dict.fromkeys(one.noise for one in runs)
    seconds, steps = sum(one.seconds for one in runs), sum(one.steps for one in runs)
    noises = [_noise(name, [one for one in runs if one.noise == name]) for name in names]
    return SeriesSummary(noises, seconds / steps * 1e6)


def _noise(name: str, runs: Sequence[SeriesRun]) -> NoiseSummary:
    steps, alarms = sum(one.steps for one in runs), sum(count_alarms(one.alarms) for one in runs)
    scores = {opponent: [one.scores[opponent] for one in runs] for opponent in OPPONENTS}
    limits = {opponent: threshold(scores[opponent], alarms) for opponent in OPPONENTS}
    theirs = {
        opponent: sum(count_alarms(np.flatnonzero(score > limits[opponent]).tolist()) for score in scores[opponent])
        for opponent in OPPONENTS
    }
    strict, lenient = (
        {opponent: threshold(scores[opponent], round(number)) for opponent in OPPONENTS}
        for number in (max(alarms - math.sqrt(alarms), 0), alarms + max(math.sqrt(alarms), 1))
    )
    faults = []
    for fault in runs[0].told:
        ours = np.concatenate([one.told[fault] for one in runs])
        highest = {opponent: np.concatenate([one.highest[fault][opponent] for one in runs]) for opponent in OPPONENTS}
        others = {opponent: highest[opponent] > limits[opponent] for opponent in OPPONENTS}
        errors = {
            opponent: float(np.mean((highest[opponent] > lenient[opponent]) & (highest[opponent] <= strict[opponent])))
            / 2
            for opponent in OPPONENTS
        }
        faults.append(fault_shares(fault, ours, others, errors))
    above = poisson_tail(alarms, steps / 1e4 * DIAL) < 1 - CONFIDENCE
    return NoiseSummary(name, steps, alarms, above, theirs, limits, faults)


def fault_shares(
    fault: str,
    ours: np.ndarray[Any, Any],
    others: dict[str, np.ndarray[Any, Any]],
    threshold_errors: dict[str, float],
) -> FaultShares:
    """Compare who told of a fault, place by place.

    Args:
        fault: its name.
        ours: (places,) whether the rules told of it.
        others: the same for each opponent.
        threshold_errors: standard errors of the opponents' shares, as their thresholds are known from a number n of
            false alarms only: half of what lies between the thresholds for n - sqrt(n) and n + sqrt(n).
    """
    best = max(others, key=lambda opponent: float(np.mean(others[opponent])))
    difference = others[best].astype(float) - ours
    places = len(ours)
    paired = max(float(difference.std(ddof=1)) / math.sqrt(places), 1 / places)  # as if one place differed
    behind = float(difference.mean()) / math.hypot(paired, threshold_errors[best])
    shares = {opponent: float(told.mean()) for opponent, told in others.items()}
    return FaultShares(fault, places, float(ours.mean()), shares, behind)


def count_alarms(steps: Iterable[int]) -> int:
    """Count alarms at sorted steps of a run; those at most APART steps apart are one."""
    steps = list(steps)
    return bool(steps) + sum(after - before > APART for before, after in pairwise(steps))


def threshold(runs: Sequence[Array], alarms: int) -> float:
    """Return the lowest threshold with which the scores of clean runs give at most so many alarms.

    It goes down from the highest score, until there is one alarm too many.
    """
    scores = np.concatenate(runs)
    steps = np.concatenate([np.arange(len(one)) + i * (len(one) + APART + 1) for i, one in enumerate(runs)])
    above: list[int] = []
    for i in np.argsort(-scores):
        # The score itself is not above the threshold that it would be.
        if count_alarms(above) > alarms:
            break
        limit = float(scores[i])
        insort(above, int(steps[i]))
    return limit


def poisson_tail(count: int, mean: float) -> float:
    """Return the probability of at least so many events where so many are the mean."""
    return 1 - sum(math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) for k in range(count))


def show(summary: SeriesSummary, console: Console) -> None:
    """Print false alarms and shares of each noise, then the sums and where an opponent is better."""
    show_machine(console)
    table = Table(
        title="Shares of faults told in synthetic series, at equal numbers of false alarms; ! marks those where an"
        " opponent is better by more than two standard errors",
        title_justify="left",
    )
    table.add_column("noise and fault")
    for name in ("ours", *OPPONENTS, ""):
        table.add_column(name, justify="right")
    for noise in summary.noises:
        table.add_section()
        table.add_row(f"[bold]{noise.noise}")
        above = "above the dial" if noise.above_dial else ""
        theirs = (f"{noise.opponents_false_alarms[name] / noise.steps * 1e4:.2f}" for name in OPPONENTS)
        table.add_row("false alarms in 10,000 steps", f"{noise.per_10k:.2f}", *theirs, above)
        for cell in noise.faults:
            table.add_row(
                cell.fault,
                f"{cell.ours:.3f}",
                *(f"{cell.opponents[name]:.3f}" for name in OPPONENTS),
                f"! {cell.behind:.1f}" if cell.worse else "",
            )
    console.print(table)
    cells = sum(len(noise.faults) for noise in summary.noises)
    sums = ", ".join(f"{name} {total:.2f}" for name, total in summary.sums.items())
    console.print(
        f"Shares summed over {cells} cells: {sums}. An opponent is better in {len(summary.worse)} of them. Each"
        f" opponent compares with the last {WINDOW} values. A judgement took {summary.microseconds:.1f} microseconds."
    )
    for name, cell in summary.worse:
        better = max(cell.opponents, key=lambda opponent: cell.opponents[opponent])
        console.print(
            f"{name}: {cell.fault}: ours {cell.ours:.3f}, {better} {cell.opponents[better]:.3f}", style="yellow"
        )

"""Does any signal come before a loss spike? The study of docs/instabilities.md: its grid, its runs, its table.

Runs are trained four at a time, by processes of one thread. A run that has ended is a file in the folder of the study,
and is not trained again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from .instability_alarms import FIXED, LEADS, Judged, Lead, bootstrap, lead_of, scores_of, threshold
from .instability_arms import ARMS, CLEAN, Arm, Job, without_qk_norm
from .instability_events import WINDOW, instabilities
from .instability_model import StudySizes
from .instability_runs import StudyRuns
from .workers import in_processes

SIX = 6.0
"""Deviations from which OLMo-core skips a step."""


@dataclass(frozen=True)
class StudyPlan:
    """Which runs there are."""

    sizes: StudySizes = field(default_factory=StudySizes)
    seeds: tuple[int, ...] = (0,)
    clean_seeds: tuple[int, ...] = (100, 101, 102)
    both_bases: bool = False
    """Whether arms are also tried with QK norm."""
    arms: tuple[Arm, ...] = ARMS
    side_by_side: int = 4

    @classmethod
    def full(cls) -> StudyPlan:
        """Return the plan for a night."""
        return cls(seeds=(0, 1, 2), clean_seeds=tuple(range(100, 106)), both_bases=True)

    @classmethod
    def quick(cls) -> StudyPlan:
        """Return a plan that takes seconds."""
        sizes = StudySizes(updates=340, vocab_size=260, width=16, head_dim=8, blocks=1, context=8, batch=2, rate=0.3)
        return cls(sizes, (0,), (100, 101), arms=ARMS[:1])

    def jobs(self) -> list[Job]:
        """All runs, the clean twins first: half of them with QK norm, and half without."""
        clean = [
            Job(without_qk_norm(CLEAN) if place % 2 else CLEAN, seed) for place, seed in enumerate(self.clean_seeds)
        ]
        arms = [*map(without_qk_norm, self.arms), *(self.arms if self.both_bases else self.arms[:1])]
        return [*clean, *(Job(arm, seed) for seed in self.seeds for arm in arms)]


Told = Callable[[str], None]


def train(plan: StudyPlan, folder: Path, tell: Told = lambda text: None) -> None:
    """Train the runs that have no file in a folder yet, by a process for each processor."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = [job for job in plan.jobs() if not _file(folder, job).exists()]
    groups = [missing[first : first + plan.side_by_side] for first in range(0, len(missing), plan.side_by_side)]
    work = [(group, plan.sizes, folder) for group in groups]
    in_processes(_train, work, workers=max(1, min(len(groups), os.cpu_count() or 1)), after_each=tell)


def _train(jobs: Sequence[Job], sizes: StudySizes, folder: Path) -> str:
    runs = StudyRuns(jobs, sizes)
    for _ in range(sizes.updates):
        runs.step()
    for place, job in enumerate(jobs):
        _save(_file(folder, job), runs.table(place))
    return f"{', '.join(job.key for job in jobs)}: {sizes.updates} updates"


def _file(folder: Path, job: Job) -> Path:
    return folder / f"{job.key}.npz"


def _save(path: Path, table: dict[str, Any]) -> None:
    """Write a table at once: a run that was stopped in the middle has no file."""
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        np.savez_compressed(file, **table)
    os.replace(part, path)


@dataclass
class StudyResults:
    """What the study found."""

    runs: list[Judged]
    """Those that are judged."""
    clean: list[Judged]
    unclean: list[str]
    """Twins with an instability, which are left out."""
    leads: list[Lead]
    bad: list[Lead]
    """Of bad spikes and divergences by themselves, in the same order of signals."""

    def plain(self) -> dict[str, Any]:
        """All of it for JSON."""
        return {
            "clean twins": [run.label for run in self.clean],
            "left out": self.unclean,
            "runs": [{"run": run.label, "events": [vars(event) for event in run.events]} for run in self.runs],
            "signals": [_row(lead) for lead in self.leads],
            "signals, bad spikes and divergences": [_row(lead) for lead in self.bad],
        }


def results(plan: StudyPlan, folder: Path) -> StudyResults:
    """Judge the runs of a folder, as far as they have ended."""
    judged: list[tuple[Job, Judged]] = []
    for job in plan.jobs():
        if _file(folder, job).exists():
            with np.load(_file(folder, job)) as file:
                table = {name: file[name] for name in file.files}
            events = instabilities(table["panel loss"], job.arm.warmup)
            judged.append((job, Judged(job.key, scores_of(table), events, job.arm.warmup + WINDOW)))
    clean = [run for job, run in judged if job.is_clean and not run.events]
    unclean = [run.label for job, run in judged if job.is_clean and run.events]
    runs = [run for job, run in judged if not job.is_clean]
    worst = [replace(run, events=[event for event in run.events if event.bad]) for run in runs]
    levels = {name: _level(name, clean) for name in clean[0].scores} if clean and runs else {}
    leads, bad = ([lead_of(name, level, some) for name, level in levels.items()] for some in (runs, worst))
    return StudyResults(runs, clean, unclean, leads, bad)


def _level(signal: str, clean: Sequence[Judged]) -> float:
    return SIX if signal in FIXED else threshold([run.scores[signal] for run in clean], clean[0].first)


def _row(lead: Lead) -> dict[str, Any]:
    excess, median = bootstrap(lead)
    recalls = {f"recall at {least}": lead.recall(least) for least in LEADS}
    chances = {f"chance at {least}": lead.chance_recall(place) for place, least in enumerate(LEADS)}
    return {
        "signal": lead.signal,
        "threshold": lead.threshold,
        "events": lead.events,
        **recalls,
        **chances,
        "alarms": sum(lead.true) + sum(lead.false),
        "precision": lead.precision,
        "median lead": lead.median,
        "median lead, 95 %": [median.low, median.high],
        "recall at 10 less chance, 95 %": [excess.low, excess.high],
        "leads": bool(excess.low > 0),
    }


def rows(found: StudyResults) -> Iterator[tuple[str, ...]]:
    """The table, in text: for the terminal and for the documents."""
    yield (
        "signal",
        "threshold",
        *(f"lead >= {n} (chance)" for n in LEADS),
        f"bad ones, >= {LEADS[1]}",
        "alarms",
        "precision",
        "median lead",
        "leads",
    )
    for lead, bad in zip(found.leads, found.bad, strict=True):
        row = _row(lead)
        recalls = (f"{row[f'recall at {n}']:.0%} ({row[f'chance at {n}']:.0%})" for n in LEADS)
        low, high = row["median lead, 95 %"]
        median = (
            f"{row['median lead']:.0f} ({low:.0f} to {high:.0f})" if row["median lead"] == row["median lead"] else "-"
        )
        precision = f"{row['precision']:.0%}" if row["alarms"] else "-"
        yield (
            lead.signal,
            f"{lead.threshold:.3g}",
            *recalls,
            f"{bad.recall(LEADS[1]):.0%} ({bad.chance_recall(1):.0%})",
            str(row["alarms"]),
            precision,
            median,
            "yes" if row["leads"] else "no",
        )


def event_rows(found: StudyResults) -> Iterator[tuple[str, ...]]:
    """What happened in each run, in text."""
    yield "run", "spikes", "bad ones", "divergence"
    for run in found.runs:
        spikes = [event for event in run.events if event.kind == "spike"]
        diverged = next((str(event.onset) for event in run.events if event.kind == "divergence"), "-")
        yield run.label, str(len(spikes)), str(sum(bool(event.bad) for event in spikes)), diverged


def show(found: StudyResults, console: Console) -> None:
    """Print both tables."""
    for make in (event_rows, rows):
        head, *body = make(found)
        table = Table(*head)
        for row in body:
            table.add_row(*row)
        console.print(table)
    console.print(f"clean twins: {len(found.clean)}; left out: {', '.join(found.unclean) or 'none'}")

"""The jobs of each bench in their order, and how their results are printed and written."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from hilbert_monitor.pretrain.recipes import HEADS, Head

from . import (
    curve_summary,
    diameter,
    diameter_curve,
    faults,
    guard_summary,
    guarding,
    optimizers,
    oracle,
    overhead,
    perturbation,
    series,
    series_summary,
    service,
    sharded,
    sharded_muon,
    shared_step,
)
from .curve_summary import CurveRow
from .fault_summary import TrialSummary, summarize
from .guard_summary import GuardSummary
from .increments import SampleIncrement, load_increment, make_increment
from .measure import BenchResult
from .output import progress_bar, show_machine, write_document

Job = tuple[str, Callable[[], Iterable[BenchResult]]]
"""A label for the progress bar, and the work."""
Summary = TrialSummary | GuardSummary | series_summary.SeriesSummary
Results = Sequence[BenchResult] | Sequence[oracle.Gap] | Sequence[CurveRow] | Summary | dict[str, Any]


def geometry_jobs(paths: Sequence[Path], *, quick: bool) -> Iterator[Job]:
    """Jobs on the increments of some files, or on synthetic ones; then on the worst case and on growing sizes."""
    V, d, N = (4096, 64, 1024) if quick else (50_257, 256, 8192)
    sizes = [1024, 2048, 4096] if quick else [2**k * 1024 for k in range(3, 8)]
    widths = [32, 64, 128] if quick else [64, 128, 256, 512, 1024]
    saved = [load_increment(path) for path in paths]
    if saved:
        for increment in saved:
            yield increment.name, lambda increment=increment: _measure(increment)  # type: ignore[misc]
    else:
        yield "AdamW head", lambda: _measure(make_increment("adamw", V, d, panel=N))
        yield "RowNorm head", lambda: _measure(make_increment("rownorm", V, d, panel=N))
    yield "points on a sphere", lambda: diameter.worst_case(V, d)
    yield "hard cases", lambda: diameter.hard_cases(1024 if quick else 20_000, 64)
    yield "a long run", lambda: diameter.long_run(*((1024, 64, 40) if quick else (8192, 64, 2000)))
    yield (
        "growth with tokens",
        lambda: diameter.growth_in_tokens(make_increment("rownorm", sizes[-1], d, panel=1), sizes),
    )
    yield (
        "growth with width",
        lambda: diameter.growth_in_width(
            [make_increment("rownorm", 4096 if quick else 16_384, w, panel=1) for w in widths]
        ),
    )


def monitor_jobs(*, quick: bool) -> Iterator[Job]:
    """Jobs on the cost of the monitor in a run of the demo's size."""
    V, d, steps = (512, 32, 1) if quick else (8192, 128, 15)
    cpu = torch.device("cpu")
    yield "monitor, AdamW head", lambda: overhead.overhead(cpu, V, d, steps, "adamw")
    yield "monitor, RowNorm head", lambda: overhead.overhead(cpu, V, d, steps, "rownorm")
    yield "layers", lambda: overhead.layer_overhead(cpu, V, d, steps, "rownorm")


def optimizer_jobs(*, quick: bool) -> Iterator[Job]:
    """Jobs on the optimizers' steps: RowNorm on a head, Muon on the matrices of some blocks."""
    V, d = (4096, 64) if quick else (50_257, 512)
    yield "RowNorm", lambda: optimizers.rownorm(V, d)
    for width, blocks in [(32, 2)] if quick else [(64, 16), (256, 4), (512, 2)]:
        yield f"Muon, width {width}", lambda width=width, blocks=blocks: optimizers.muon(width, blocks)  # type: ignore[misc]
    width, blocks, worlds = (32, 1, [2]) if quick else (512, 4, [2, 4])
    yield "Muon, sharded", lambda: sharded_muon.sharded_muon(width, blocks, worlds=worlds)


def sharded_jobs(*, quick: bool, large: bool) -> Iterator[Job]:
    """Jobs on ranks that share the rows of an increment. A large one is trained for fewer steps, to be made in time."""
    V, d, panel, worlds = (4096, 64, 256, [2]) if quick else (50_257, 256, 8192, [2, 4, 8])
    heads: tuple[Head, ...] = ("adamw", "rownorm")
    for head in heads:
        yield (
            f"bytes, {head} head",
            lambda head=head: sharded.traffic(head, V, d, worlds=worlds, panel=panel),  # type: ignore[misc]
        )
    for head in heads if large else ():
        yield (
            f"bytes, {head} head, 128,256 x 4,096",
            lambda head=head: sharded.traffic(  # type: ignore[misc]
                head, 128_256, 4096, worlds=worlds, panel=64, steps=8, batch=64
            ),
        )
    for width, steps in [(d, 4)] if quick else [(256, 20), (1024, 6)]:
        for head in heads:
            yield (
                f"two ranks, {head} head, width {width}",
                lambda head=head, width=width, steps=steps: shared_step.shared_step(  # type: ignore[misc]
                    head, V, width, steps=steps, repeat=2 if quick else 25
                ),
            )


def _measure(increment: SampleIncrement) -> Iterator[BenchResult]:
    yield from diameter.exact_search(increment)
    yield from perturbation.panel(increment)


def run(jobs: Sequence[Job], console: Console) -> list[BenchResult]:
    """Run the jobs behind a progress bar."""
    results: list[BenchResult] = []
    with progress_bar(console) as progress:
        task = progress.add_task("", total=len(jobs))
        for label, job in jobs:
            progress.update(task, description=label)
            results.extend(job())
            progress.advance(task)
    return results


def show(results: Sequence[BenchResult], console: Console) -> None:
    """Print the machine and the results."""
    show_machine(console)
    table = Table(
        title="Measured in this run; a ratio above 1 means faster, or smaller, than the opponent or the limit",
        title_justify="left",
    )
    table.add_column("case")
    for name in ("ours", "opponent", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    for subject in dict.fromkeys(r.subject for r in results):
        table.add_section()
        table.add_row(f"[bold]{subject}")
        for r in (r for r in results if r.subject == subject):
            case = f"{r.case}\n[dim]{r.note}" if r.note else r.case
            ours, theirs = _amount(r.amount, r.unit), _amount(r.opponent_amount, r.unit)
            table.add_row(case, ours, f"{r.opponent} {theirs}", f"{r.ratio:.3g}x")
    console.print(table)


def _amount(amount: float, unit: str) -> str:
    if unit == "B":
        return f"{amount / 2**20:.0f} MiB" if amount >= 2**20 else f"{amount / 2**10:.0f} KiB"
    return f"{amount * 1e3:.1f} ms" if amount < 1 else f"{amount:.2f} s"


def run_service(load: service.ServiceLoad, console: Console) -> tuple[list[BenchResult], list[str]]:
    """Measure the service. Return the results, and a sentence for each figure that could not be measured.

    Raises:
        RuntimeError: if the disk has no room, or a service fails.
    """
    with service.prepare(load) as bench:
        return run(bench.jobs(), console), bench.remarks


def run_faults(plan: faults.TrialPlan, console: Console) -> TrialSummary:
    """Run the trials of the blow-up rules behind a progress bar."""
    runs = 2 * (len(plan.seeds) + len(plan.clean_seeds))
    workers = min(os.cpu_count() or 1, runs)
    with progress_bar(console) as progress:
        task = progress.add_task("training runs, with faults and without", total=runs)
        trials = faults.run(plan, workers=workers, after_each=lambda _: progress.advance(task))
    return summarize(trials)


def run_series(plan: series.SeriesPlan, console: Console) -> series_summary.SeriesSummary:
    """Judge synthetic series with known faults behind a progress bar."""
    total = len(plan.noises) * len(plan.seeds)
    with progress_bar(console) as progress:
        task = progress.add_task("synthetic runs, each with its faults", total=total)
        workers = min(os.cpu_count() or 1, total)
        runs = series.run(plan, workers=workers, after_each=lambda _: progress.advance(task))
    return series_summary.summarize(runs)


def run_guards(plan: guarding.GuardPlan, console: Console) -> GuardSummary:
    """Run the trials of safeguards behind a progress bar."""
    total = len(plan.seeds) * len(HEADS) * len(guarding.ARMS)
    with progress_bar(console) as progress:
        task = progress.add_task("training runs under safeguards, each with all faults", total=total)
        workers = min(os.cpu_count() or 1, total)
        trials = guarding.run(plan, workers=workers, after_each=lambda: progress.advance(task))
    return guard_summary.summarize(trials)


def run_curve(plan: diameter_curve.CurvePlan, runs: Path, console: Console) -> list[CurveRow]:
    """Make the runs of a sweep over diameters that are not there yet, behind a progress bar; return its points."""
    total = len(list(plan.points()))
    with progress_bar(console) as progress:
        task = progress.add_task("runs held to diameters", total=total)
        workers = min(os.cpu_count() or 1, total)
        diameter_curve.run(plan, runs, workers=workers, after_each=lambda _: progress.advance(task))
    return curve_summary.summarize(runs)


def run_oracle(paths: Sequence[Path], console: Console, *, quick: bool) -> list[oracle.Gap]:
    """Bound the tension of a synthetic gradient, or of saved matrices, at several sizes and budgets; print the gaps."""
    V, d, budgets = (2048, 32, (0.0, 0.5)) if quick else (50_257, 256, (0.0, 1.0, 5.0, 20.0))
    saved = [(path.stem, load_increment(path).S) for path in paths]
    results: list[oracle.Gap] = []
    synthetic = [("gradient", oracle.head_gradient(V, d)), ("scattered gradient", oracle.scattered_gradient(V, d))]
    for name, G in saved or synthetic:
        sizes = [size for size in (1024, 8192) if 2 * size <= len(G)] + [len(G)]
        with console.status(f"tension of the {name}"):
            results += oracle.gaps(name, G, sizes, budgets)
    oracle.show(results, console)
    return results


def write_json(results: Results, path: Path) -> None:
    """Write the machine and the results as one JSON document."""
    if isinstance(results, dict):
        write_document(path, results=results)
    elif isinstance(results, Summary):
        write_document(path, results=results.as_dict())
    else:
        write_document(path, results=[r.as_dict() for r in results])

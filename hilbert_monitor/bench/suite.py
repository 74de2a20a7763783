"""The jobs of a bench run, in order, and how their results are printed."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from . import diameter, faults, optimizers, oracle, overhead, perturbation, service
from .increments import Increment, load_increment, make_increment
from .measure import Comparison, machine

Job = tuple[str, Callable[[], Iterable[Comparison]]]


def geometry_jobs(paths: Sequence[Path], *, quick: bool) -> Iterator[Job]:
    """Jobs on the given increments, or on made ones; then the worst case and the growth."""
    V, d, N = (4096, 64, 1024) if quick else (50_257, 256, 8192)
    sizes = [1024, 2048, 4096] if quick else [2**k * 1024 for k in range(3, 8)]
    widths = [32, 64, 128] if quick else [64, 128, 256, 512, 1024]
    given = [load_increment(path) for path in paths]
    if given:
        for increment in given:
            yield increment.name, lambda increment=increment: _measure(increment)  # type: ignore[misc]
    else:
        yield "AdamW head", lambda: _measure(make_increment("adamw", V, d, panel=N))
        yield "RowNorm head", lambda: _measure(make_increment("rownorm", V, d, panel=N))
    yield "points on a sphere", lambda: diameter.worst_case(V, d)
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
    """What the monitor costs a run of the demo's size."""
    V, d, steps = (512, 32, 1) if quick else (8192, 128, 15)
    cpu = torch.device("cpu")
    yield "monitor, AdamW head", lambda: overhead.overhead(cpu, V, d, steps, "adamw")
    yield "monitor, RowNorm head", lambda: overhead.overhead(cpu, V, d, steps, "rownorm")


def optimizer_jobs(*, quick: bool) -> Iterator[Job]:
    """Jobs on the optimizers' steps: RowNorm on a head, Muon on the matrices of some blocks."""
    V, d = (4096, 64) if quick else (50_257, 512)
    yield "RowNorm", lambda: optimizers.rownorm(V, d)
    for width, blocks in [(32, 2)] if quick else [(64, 16), (256, 4), (512, 2)]:
        yield f"Muon, width {width}", lambda width=width, blocks=blocks: optimizers.muon(width, blocks)  # type: ignore[misc]


def _measure(increment: Increment) -> Iterator[Comparison]:
    yield from diameter.exact_search(increment)
    yield from perturbation.panel(increment)


def run(jobs: Sequence[Job], console: Console) -> list[Comparison]:
    """Run the jobs behind a progress bar."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    results: list[Comparison] = []
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(jobs))
        for label, job in jobs:
            progress.update(task, description=label)
            results.extend(job())
            progress.advance(task)
    return results


def show(results: Sequence[Comparison], console: Console) -> None:
    """Print the machine and the results."""
    console.print(" | ".join(f"{name} {value}" for name, value in machine().items()), style="dim")
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


def run_service(sizes: service.Sizes, console: Console) -> tuple[list[Comparison], list[str]]:
    """Measure the service, and say what could not be. RuntimeError, if there is no room or a service fails."""
    with service.prepared(sizes) as bench:
        return run(bench.jobs(), console), bench.remarks


def run_faults(plan: faults.Plan, console: Console) -> faults.Summary:
    """Run the trials of the blow-up rules behind a progress bar."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    workers = min(os.cpu_count() or 1, 2 * len(plan.seeds))
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("runs, each with its faults", total=2 * len(plan.seeds))
        trials = faults.run(plan, workers=workers, done=lambda _: progress.advance(task))
    return faults.summary(trials)


def show_faults(found: faults.Summary, console: Console) -> None:
    """Print what was reported, what was missed, and who noticed first."""
    console.print(" | ".join(f"{name} {value}" for name, value in machine().items()), style="dim")
    table = Table(
        title="Faults in real training runs: visible if D(S) or the Hilbert RMS is twice or half the clean twin's",
        title_justify="left",
    )
    for name in ("fault", "head"):
        table.add_column(name)
    for name in ("D(S) x", "visible", "reported in its step", "loss spike after", "gradient spike after"):
        table.add_column(name, justify="right")
    for c in found.cells:
        seen = f"{c.reported} of {c.visible}" if c.visible else "invisible in the increment"
        ratio = "not finite" if math.isnan(c.diameter_ratio) else f"{c.diameter_ratio:.2f}"
        table.add_row(c.fault, c.head, ratio, f"{c.visible} of {c.tried}", seen, c.lead_loss, c.lead_gradient)
    console.print(table)
    console.print(
        f"{found.reported} of {found.visible} visible faults reported in their step; {len(found.false_alarms)} false"
        f" alarms in {found.measured:,} clean steps. The opponents' thresholds for as many: loss"
        f" {found.thresholds['loss']:.2f}x, gradient norm {found.thresholds['gradient']:.2f}x their medians."
    )
    for text in found.false_alarms:
        console.print(f"false alarm: {text}", style="yellow")
    if found.divergences:
        console.print(_divergences(found.divergences))


def _divergences(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="A learning rate that grows until the loss is up by one: steps from the start of the growth")
    for name in ("head", "seed", "diverged", "our alert", "loss spike", "gradient spike"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*("never" if value is None else str(value) for value in row.values()))
    return table


def run_oracle(paths: Sequence[Path], console: Console, *, quick: bool) -> list[oracle.Gap]:
    """Bracket the tension of a gradient that is made, or of saved matrices, at several sizes and budgets; print it."""
    V, d, budgets = (2048, 32, (0.0, 0.5)) if quick else (50_257, 256, (0.0, 1.0, 5.0, 20.0))
    saved = [(path.stem, load_increment(path).S) for path in paths]
    results: list[oracle.Gap] = []
    for name, G in saved or [("gradient", oracle.head_gradient(V, d))]:
        sizes = [size for size in (1024, 8192) if 2 * size <= len(G)] + [len(G)]
        with console.status(f"tension of the {name}"):
            results += oracle.gaps(name, G, sizes, budgets)
    oracle.show(results, console)
    return results


def write_json(results: Sequence[Comparison | oracle.Gap] | faults.Summary, path: Path) -> None:
    """Write the machine and the results as one JSON document."""
    found = results.as_dict() if isinstance(results, faults.Summary) else [r.as_dict() for r in results]
    document = {"machine": machine(), "results": found}
    path.write_text(json.dumps(document, indent=2) + "\n")


def _amount(amount: float, unit: str) -> str:
    if unit == "B":
        return f"{amount / 2**20:.0f} MiB" if amount >= 2**20 else f"{amount / 2**10:.0f} KiB"
    return f"{amount * 1e3:.1f} ms" if amount < 1 else f"{amount:.2f} s"

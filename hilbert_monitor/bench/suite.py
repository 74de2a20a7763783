"""The jobs of a bench run, in order, and how their results are printed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from . import diameter, optimizers, overhead, perturbation
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
        title="Measured in this run; a ratio above 1 means faster, or smaller, than the opponent", title_justify="left"
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


def write_json(results: Sequence[Comparison], path: Path) -> None:
    """Write the machine and the results as one JSON document."""
    document = {"machine": machine(), "results": [r.as_dict() for r in results]}
    path.write_text(json.dumps(document, indent=2) + "\n")


def _amount(amount: float, unit: str) -> str:
    if unit == "B":
        return f"{amount / 2**20:.0f} MiB"
    return f"{amount * 1e3:.1f} ms" if amount < 1 else f"{amount:.2f} s"

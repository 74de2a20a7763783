"""Time, memory, the machine, and the table of results."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch.multiprocessing.spawn import spawn
from torch.profiler import ProfilerActivity, profile

from hilbert_monitor.doctor.device import machine

T = TypeVar("T")


@dataclass(frozen=True)
class Result:
    """One figure of ours and that of a named baseline, both from the same run.

    The unit is "s", "B", "%" or "" (a plain number).
    """

    subject: str
    case: str
    ours: float
    baseline: str
    baseline_value: float
    unit: str = "s"
    note: str = ""
    more_is_better: bool = False

    @property
    def ratio(self) -> float:
        """How many times better than the baseline: faster, smaller or, if more is better, larger.

        It is nan if one of the two values is not a positive number.
        """
        better, worse = (self.ours, self.baseline_value) if self.more_is_better else (self.baseline_value, self.ours)
        return better / worse if better > 0 and worse > 0 else math.nan


def seconds(call: Callable[[], object], *, repeat: int = 5) -> float:
    """Return the median time of `repeat` calls. If there are several, a first one is not counted."""
    times = []
    for _ in range(repeat if repeat == 1 else repeat + 1):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:] or times)


def paired_seconds(*calls: Callable[[], object], repeat: int = 15) -> list[float]:
    """Return the median time of each call. They take turns, so that other work on the machine slows all alike."""
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    for _ in range(repeat):
        for samples, call in zip(times, calls, strict=True):
            samples.append(seconds(call, repeat=1))
    return [statistics.median(samples) for samples in times]


def peak_bytes(call: Callable[[], object]) -> int:
    """Return the most bytes that `call` holds at once in torch's CPU allocator."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler announces itself on stderr
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        call()
    results = trace.profiler.kineto_results
    held = peak = 0
    for event in sorted((e for e in results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def in_processes(
    function: Callable[..., T],
    jobs: Sequence[tuple[Any, ...]],
    *,
    workers: int | None = None,
    after_each: Callable[[T], None] = lambda result: None,
) -> list[T]:
    """Call a function with the arguments of each job, and return the results in the order of the jobs.

    Args:
        function: what is called; it can be pickled, as its arguments and results.
        jobs: the arguments of each call.
        workers: number of processes of one thread each, one for each core by default; a single one is this process.
        after_each: called with each result, in the order in which they come.
    """
    workers = min(workers or os.cpu_count() or 1, len(jobs))
    if workers <= 1:
        results = []
        for job in jobs:
            results.append(function(*job))
            after_each(results[-1])
        return results
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        futures = [pool.submit(function, *job) for job in jobs]
        for future in as_completed(futures):
            after_each(future.result())
        return [future.result() for future in futures]


def in_ranks(work: Callable[..., T], *args: Any, world: int) -> list[T]:
    """Call ``work(rank, world, *args)`` in processes of torch.distributed (gloo) of one thread each.

    Return the results in the order of the ranks. If one rank fails, the others are ended.
    """
    with TemporaryDirectory() as folder:
        spawn(_rank, (world, folder, work, args), nprocs=world)  # type: ignore[no-untyped-call]
        return [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(world)]


def _rank(rank: int, world: int, folder: str, work: Callable[..., Any], args: Sequence[Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    torch.save(work(rank, world, *args), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def collect(results: Iterable[Result]) -> list[Result]:
    """Return the results as a list, and print a line when one comes."""
    collected = []
    for r in results:
        collected.append(r)
        ours, baseline = formatted(r.ours, r.unit), formatted(r.baseline_value, r.unit)
        print(f"{r.subject}, {r.case}: {ours}, {r.baseline} {baseline}", flush=True)
    return collected


def print_results(results: Sequence[Result], console: Console | None = None) -> None:
    """Print the machine, then a table of the results by subject."""
    console = console or Console()
    console.print(" | ".join(f"{name} {value}" for name, value in machine().items()), style="dim", soft_wrap=True)
    table = Table(title="Ratio: how many times better than the baseline", title_justify="left")
    table.add_column("case")
    for name in ("ours", "baseline", "ratio"):
        table.add_column(name, justify="right")
    for subject in dict.fromkeys(r.subject for r in results):
        table.add_section()
        table.add_row(f"[bold]{escape(subject)}")
        for r in (r for r in results if r.subject == subject):
            case = f"{escape(r.case)}\n[dim]{escape(r.note)}" if r.note else escape(r.case)
            baseline = f"{escape(r.baseline)} {formatted(r.baseline_value, r.unit)}"
            table.add_row(
                case, formatted(r.ours, r.unit), baseline, f"{r.ratio:.3g}x" if math.isfinite(r.ratio) else "-"
            )
    console.print(table)


def formatted(value: float, unit: str) -> str:
    """Return a value with its unit: us, ms or s, KiB or MiB, or the unit as it is."""
    if unit == "s":
        if abs(value) < 1e-3:
            return f"{value * 1e6:.0f} us"
        return f"{value * 1e3:.1f} ms" if abs(value) < 1 else f"{value:.2f} s"
    if unit == "B":
        return f"{value / 2**20:.0f} MiB" if abs(value) >= 2**20 else f"{value / 2**10:.0f} KiB"
    return f"{value:.4g} {unit}".rstrip()


def write_json(results: Sequence[Result], path: Path) -> None:
    """Write the machine and the results as one JSON document. A number that is not finite becomes null."""
    rows = [{**asdict(r), "ratio": r.ratio} for r in results]
    finite = [
        {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()}
        for row in rows
    ]
    path.write_text(json.dumps({"machine": machine(), "results": finite}, indent=2) + "\n")

"""The demo: pairs of small runs, one with an AdamW head and one with a RowNorm head, on one text and from one start.

Each run is a process, `hilbert-monitor pretrain --size demo`. The demo reads only their run logs.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from hilbert_monitor.pretrain.data import VALIDATION, find_shards, write_shard
from hilbert_monitor.pretrain.recipe import DEMO, HEADS, Head, Recipe
from hilbert_monitor.pretrain.text import standard_library, tokenize
from hilbert_monitor.runs.reader import RunReader, find_runs
from hilbert_monitor.service.web.server import AddressError, background

PORT = 8000
"""Port of the dashboard, unless it is taken."""
QUIET = 30.0
"""Seconds between two progress lines where the output is not a terminal."""
NAMES: dict[str, str] = {"adamw": "AdamW", "rownorm": "RowNorm"}
RESULTS = {"validation_loss": "validation_loss", "step_diameter": "diameter", "perturbation_rms": "perturbation_rms"}
"""Fields of a record by the names of the results."""
RATIOS = ("step_diameter", "perturbation_rms")
FORMATS = {"train_loss": ".3f", "validation_loss": ".3f", "diameter": ".4f", "perturbation_rms": ".4f"}
"""Formats of the fields of a record in the progress table."""


@dataclass
class DemoRun:
    """A run of the demo, and the newest numbers of its log."""

    head: Head
    name: str
    process: subprocess.Popen[bytes]
    output: Path
    runs: Path
    started: float
    reader: RunReader | None = None
    offset: int = 0
    step: int = 0
    values: dict[str, float] = field(default_factory=dict)
    """The last value of each field of `FORMATS`."""

    def update(self) -> None:
        """Read the new records of the log."""
        if self.reader is None:
            readers = [r for r in find_runs(self.runs) if r.info.name == self.name and r.info.started >= self.started]
            self.reader = readers[-1] if readers else None
        for news in self.reader.follow(self.offset) if self.reader is not None else ():
            self.offset = news.offset
            for record in news.records:
                self.step = record.step
                self.values |= {name: value for name in FORMATS if (value := getattr(record, name)) is not None}


def train_pairs(out: Path, recipe: Recipe, *, seeds: int, texts: Sequence[Path], console: Console) -> list[DemoRun]:
    """Train a pair for every seed, the two at the same time, and show their progress. Ctrl-C ends the runs early."""
    runs: list[DemoRun] = []
    with console.status("tokenizing the text"):
        prepare(out / "data", recipe, texts)
    try:
        for seed in range(seeds):
            pair = [start(out, recipe, head, seed) for head in HEADS]
            runs += pair
            follow(pair, recipe, console, title=f"seed {seed}, {seed + 1} of {seeds}" if seeds > 1 else "")
    except KeyboardInterrupt:
        console.print("ended early: these are the numbers of the steps so far")
    finally:
        for run in runs:
            stop(run)
    return runs


def prepare(folder: Path, recipe: Recipe, texts: Sequence[Path]) -> None:
    """Write the demo's shards, from the given texts or the sources of the standard library.

    Validation windows are spread evenly over the held-out files. The loss on the first files alone can be off by more
    than the runs differ.
    """
    tokenize(texts or standard_library(), folder, vocab_size=recipe.vocab_size, shard_tokens=sys.maxsize, force=True)
    [shard] = find_shards(folder, VALIDATION)
    text = np.array(shard.read(0, shard.tokens))
    starts = np.linspace(0, max(0, len(text) - recipe.context - 1), recipe.validation_tokens // recipe.context)
    windows = [text[int(start) : int(start) + recipe.context] for start in starts]
    write_shard(shard.path, np.concatenate([*windows, text[-1:]]))


def start(out: Path, recipe: Recipe, head: Head, seed: int) -> DemoRun:
    """Start a run as a process, with its share of the processor cores."""
    values = {f.name: (getattr(recipe, f.name), getattr(DEMO, f.name)) for f in fields(Recipe) if f.name != "head_lr"}
    name, started = f"demo-{head}-seed{seed}", time.time()
    command = [sys.executable, "-m", "hilbert_monitor", "pretrain", "--size=demo", f"--head={head}", f"--seed={seed}"]
    command += [f"--data={out / 'data'}", f"--runs={out / 'runs'}", f"--checkpoints={out / 'checkpoints'}"]
    command += [f"--name={name}", "--accelerator=cpu", "--no-resume", "--quiet"]
    command += [f"--set={key}={value}" for key, (value, preset) in values.items() if value != preset]
    environment = {**os.environ, "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // len(HEADS)))}
    output = out / f"{name}.log"
    with output.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
    return DemoRun(head, name, process, output, out / "runs", started)


def stop(run: DemoRun, patience: float = 20.0) -> None:
    """End a run that is still running, give it time to close its log, and read the rest of the log."""
    if run.process.poll() is None:
        with suppress(ProcessLookupError):
            run.process.send_signal(signal.SIGINT)
        try:
            run.process.wait(patience)
        except subprocess.TimeoutExpired:
            run.process.kill()
            run.process.wait()
    run.update()


def follow(pair: Sequence[DemoRun], recipe: Recipe, console: Console, *, title: str = "") -> None:
    """Show the runs of a pair until both end. Raise RuntimeError if one of them fails.

    A terminal has a table that changes in place. A file or a pipe gets a line every `QUIET` seconds.
    """
    start = printed = time.monotonic()
    running = True
    with Live(console=console, refresh_per_second=4, transient=True) as live:
        while running:
            running = any(run.process.poll() is None for run in pair)  # read the logs once more after the end
            for run in pair:
                run.update()
                check(run)
            now = time.monotonic()
            step = min(run.step for run in pair)
            minutes = (now - start) / 60 * ((recipe.updates or 0) / step - 1) if step else 0.0
            left = f"{minutes:.1f} minutes left" if step else "starting"
            bar = ProgressBar(total=recipe.updates, completed=step, width=60)
            live.update(Group(progress_table(pair, recipe, title), bar, left))
            if not console.is_terminal and now - printed > QUIET:
                printed = now
                steps = ", ".join(f"{NAMES[run.head]} {run.step}" for run in pair)
                console.print(f"steps of {recipe.updates}: {steps}; {left}")
            time.sleep(0.25)


def check(run: DemoRun) -> None:
    """Raise RuntimeError if a run ended with an error."""
    if run.process.poll() not in (None, 0):
        lines = run.output.read_text(errors="replace").strip().splitlines() or ["it printed nothing"]
        raise RuntimeError(f"the {NAMES[run.head]} run ended with an error: {lines[-1]} (its output: {run.output})")


def progress_table(pair: Sequence[DemoRun], recipe: Recipe, title: str) -> Table:
    """Return a table of the newest numbers of a pair."""
    table = Table("head", title=title or None, title_justify="left")
    for name in ("step", "training loss", "validation loss", "D(S)", "Hilbert RMS"):
        table.add_column(name, justify="right")
    for run in pair:
        values = (format(run.values[name], form) if name in run.values else "" for name, form in FORMATS.items())
        table.add_row(NAMES[run.head], f"{run.step} of {recipe.updates}", *values)
    return table


def results(runs: Sequence[DemoRun], folder: Path) -> dict[str, Any]:
    """Return the last numbers of each head, as means over the seeds, and the ratios of AdamW to RowNorm."""
    heads: dict[str, Any] = {
        head: {name: mean(values) if (values := _last_values(runs, head, name)) else None for name in RESULTS}
        for head in HEADS
    }
    adamw, rownorm = heads["adamw"], heads["rownorm"]
    ratios = {name: adamw[name] / rownorm[name] for name in RATIOS if adamw[name] is not None and rownorm[name]}
    return {**heads, "ratios": ratios, "runs": str(folder)}


def _last_values(runs: Sequence[DemoRun], head: Head, name: str) -> list[float]:
    """Return the last value of a result in each run of a head that has one."""
    return [run.values[RESULTS[name]] for run in runs if run.head == head and RESULTS[name] in run.values]


def write_json(results: dict[str, Any], path: Path) -> None:
    """Write the results as JSON."""
    path.write_text(json.dumps(results, indent=2) + "\n")


def show(runs: Sequence[DemoRun], recipe: Recipe, console: Console) -> None:
    """Print the paper's table for these runs: means, and sample deviations where there are several seeds."""
    table = Table(title=f"After {recipe.updates} updates of {recipe.tokens_per_update:,} tokens", title_justify="left")
    table.add_column("LM head")
    for name in ("validation loss", "D(S)", "Hilbert RMS"):
        table.add_column(name, justify="right")
    for head in HEADS:
        table.add_row(NAMES[head], *(_mean_and_deviation(_last_values(runs, head, name)) for name in RESULTS))
    ratios = results(runs, Path())["ratios"]
    table.add_section()
    table.add_row("AdamW / RowNorm", "", *(f"{ratios[n]:.1f}x" if n in ratios else "" for n in RATIOS), style="bold")
    console.print(table)


def _mean_and_deviation(values: Sequence[float]) -> str:
    deviation = f" \u00b1 {stdev(values):.4f}" if len(values) > 1 else ""
    return f"{mean(values):.4f}{deviation}" if values else ""


def write_report(out: Path) -> Path:
    """Write the report of all runs in a demo's folder. Return its path."""
    from .service.figures.comparison import compare
    from .service.report import page, summary

    runs = summary.load(out / "runs")
    path = out / "report.html"
    path.write_text(page.page(runs, compare(runs)), encoding="utf-8")
    return path


@contextmanager
def dashboard(runs: Path, port: int | None, console: Console) -> Iterator[str]:
    """Serve the runs within the block, print the address and yield it."""
    with ExitStack() as stack:
        try:
            server = stack.enter_context(background(runs, port=PORT if port is None else port))
        except AddressError:
            if port is not None:
                raise
            server = stack.enter_context(background(runs, port=0))
        console.print(f"live dashboard: {server.url}", soft_wrap=True)
        yield server.url

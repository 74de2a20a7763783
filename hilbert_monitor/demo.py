"""The demo: pairs of small runs, one with an AdamW head and one with a RowNorm head, on one text and from one start.

Each run is a process, `hilbert-monitor pretrain --size demo`. The demo reads nothing but their run logs.
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
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from hilbert_monitor.pretrain.corpus import Corpus, corpus, standard_library
from hilbert_monitor.pretrain.recipes import DEMO, HEADS, Head, Recipe
from hilbert_monitor.pretrain.shards import write_shard
from hilbert_monitor.pretrain.tokenization import TOKENIZER, text_files
from hilbert_monitor.runs.reader import RunReader, find_runs
from hilbert_monitor.runs.record import StepRecord
from hilbert_monitor.service.web.server import AddressError, background

PORT = 8000
"""Port of the dashboard, unless it is taken."""
QUIET = 30.0
"""Seconds between two lines about runs that go on, where the output is no terminal."""
NAMES: dict[str, str] = {"adamw": "AdamW", "rownorm": "RowNorm"}
RESULTS = {"validation_loss": "validation_loss", "step_diameter": "diameter", "perturbation_rms": "perturbation_rms"}
"""From the numbers in the results to the fields of a record."""
FORMATS = {"train_loss": ".3f", "validation_loss": ".3f", "diameter": ".4f", "perturbation_rms": ".4f"}
"""How the fields of a record are printed while a run goes on."""


@dataclass
class DemoRun:
    """One run of the demo, and what its log says so far."""

    head: Head
    seed: int
    process: subprocess.Popen[bytes]
    output: Path
    runs: Path
    started: float
    reader: RunReader | None = None
    offset: int = 0
    step: int = 0
    values: dict[str, float] = field(default_factory=dict)
    """The last value of each field."""

    @property
    def name(self) -> str:
        """Name of the run."""
        return f"demo-{self.head}-seed{self.seed}"

    def update(self) -> None:
        """Read the records that are new."""
        if self.reader is None:
            readers = [r for r in find_runs(self.runs) if r.info.name == self.name and r.info.started >= self.started]
            self.reader = readers[-1] if readers else None
        if self.reader is not None:
            for news in self.reader.follow(self.offset):
                self.offset = news.offset
                for record in news.records:
                    self._take(record)

    def _take(self, record: StepRecord) -> None:
        self.step = record.step
        for name in FORMATS:
            value = getattr(record, name)
            if value is not None:
                self.values[name] = value


def prepare(folder: Path, recipe: Recipe, texts: Sequence[Path]) -> Corpus:
    """Write the demo's shards, from the sources of the standard library or from the given texts.

    The validation text is windows spread evenly over the held-out files. The loss on a single file can be off by more
    than the runs differ.
    """
    text = corpus(text_files(texts) if texts else standard_library(), recipe.vocab_size)
    folder.mkdir(parents=True, exist_ok=True)
    write_shard(folder / "fineweb_train_000.bin", text.train)
    windows = recipe.validation_tokens // recipe.context
    starts = np.linspace(0, max(0, len(text.validation) - recipe.context - 1), windows).astype(int)
    spread = np.concatenate([text.validation[start : start + recipe.context] for start in starts])
    write_shard(folder / "fineweb_val_000.bin", np.append(spread, text.validation[-1:]))
    (folder / TOKENIZER).write_text(text.tokenizer_json)
    return text


def train_pairs(out: Path, recipe: Recipe, *, seeds: int, texts: Sequence[Path], console: Console) -> list[DemoRun]:
    """Train a pair for every seed, the two side by side, and show their progress. Ctrl-C ends the runs early."""
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


@contextmanager
def dashboard(runs: Path, port: int | None, console: Console) -> Iterator[str]:
    """Serve the runs while the block lasts; print the address before anything else, and give it."""
    with ExitStack() as stack:
        try:
            server = stack.enter_context(background(runs, port=PORT if port is None else port))
        except AddressError:
            if port is not None:
                raise
            server = stack.enter_context(background(runs, port=0))
        console.print(f"live dashboard: {server.url}", soft_wrap=True)
        yield server.url


def start(out: Path, recipe: Recipe, head: Head, seed: int) -> DemoRun:
    """Start a run as a process, with half of the processor."""
    changes = {name: value for name, value in recipe.as_dict().items() if value != DEMO.as_dict().get(name)}
    derived = {"parameters", "accumulation", "head", "seed", "head_lr"}
    options = [f"--set={name}={value}" for name, value in changes.items() if name not in derived]
    command = [sys.executable, "-m", "hilbert_monitor", "pretrain", "--size=demo", f"--head={head}", f"--seed={seed}"]
    command += [f"--data={out / 'data'}", f"--runs={out / 'runs'}", f"--checkpoints={out / 'checkpoints'}"]
    command += [f"--name=demo-{head}-seed{seed}", "--accelerator=cpu", "--no-resume", "--quiet", *options]
    threads = str(max(1, (os.cpu_count() or 1) // len(HEADS)))
    output = out / f"demo-{head}-seed{seed}.log"
    started = time.time()
    with output.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": threads}
        )
    return DemoRun(head, seed, process, output, out / "runs", started)


def stop(run: DemoRun, patience: float = 20.0) -> None:
    """End a run that is still going, give it time to close its log, and read the rest of the log."""
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
    """Show the runs of a pair until both have ended; raise RuntimeError if one of them failed.

    A terminal has a table that changes in place; a file or a pipe gets a line every now and then.
    """
    start = said = time.monotonic()
    with Live(console=console, refresh_per_second=4, transient=True) as live:
        while any(run.process.poll() is None for run in pair):
            for run in pair:
                run.update()
                check(run)
            live.update(view(pair, recipe, time.monotonic() - start, title))
            if not console.is_terminal and time.monotonic() - said > QUIET:
                said = time.monotonic()
                steps = ", ".join(f"{NAMES[run.head]} {run.step}" for run in pair)
                console.print(f"steps of {recipe.updates}: {steps}; {remaining(pair, recipe, said - start)}")
            time.sleep(0.25)
    for run in pair:
        run.process.wait()
        run.update()
        check(run)


def check(run: DemoRun) -> None:
    """Raise RuntimeError if a run ended with an error."""
    if run.process.poll() not in (None, 0):
        lines = run.output.read_text(errors="replace").strip().splitlines() or ["it printed nothing"]
        raise RuntimeError(f"the {NAMES[run.head]} run ended with an error: {lines[-1]} (its output: {run.output})")


def view(pair: Sequence[DemoRun], recipe: Recipe, seconds: float, title: str) -> Group:
    """Return the state of a pair: a table, a progress bar and the time that is left."""
    table = Table(title=title or None, title_justify="left")
    for name in ("head", "step", "training loss", "validation loss", "D(S)", "Hilbert RMS"):
        table.add_column(name, justify="left" if name == "head" else "right")
    for run in pair:
        values = (format(run.values[name], form) if name in run.values else "" for name, form in FORMATS.items())
        table.add_row(NAMES[run.head], f"{run.step} of {recipe.updates}", *values)
    step = min(run.step for run in pair)
    bar = ProgressBar(total=recipe.updates, completed=step, width=60)
    return Group(table, bar, remaining(pair, recipe, seconds))


def remaining(pair: Sequence[DemoRun], recipe: Recipe, seconds: float) -> str:
    """Return how long a pair that began so many seconds ago will go on."""
    assert recipe.updates is not None
    step = min(run.step for run in pair)
    return f"{seconds / step * (recipe.updates - step) / 60:.1f} minutes left" if step else "starting"


def results(runs: Sequence[DemoRun], folder: Path) -> dict[str, Any]:
    """Return the final numbers of each head, as means over the seeds, and the ratios of AdamW to RowNorm."""
    heads: dict[str, Any] = {
        head: {name: mean(values) if (values := _last_values(runs, head, name)) else None for name in RESULTS}
        for head in HEADS
    }
    ratios = {
        name: heads["adamw"][name] / heads["rownorm"][name]
        for name in ("step_diameter", "perturbation_rms")
        if heads["adamw"][name] is not None and heads["rownorm"][name]
    }
    return {**heads, "ratios": ratios, "runs": str(folder)}


def _last_values(runs: Sequence[DemoRun], head: Head, name: str) -> list[float]:
    """Return the last value of a number in each run of a head that has one."""
    field = RESULTS[name]
    return [run.values[field] for run in runs if run.head == head and field in run.values]


def show(runs: Sequence[DemoRun], recipe: Recipe, console: Console) -> None:
    """Print the paper's table for these runs: means, and sample deviations where there are several seeds."""
    table = Table(title=f"After {recipe.updates} updates of {recipe.tokens_per_update:,} tokens", title_justify="left")
    for name in ("LM head", "validation loss", "D(S)", "Hilbert RMS"):
        table.add_column(name, justify="left" if name == "LM head" else "right")
    for head in HEADS:
        table.add_row(NAMES[head], *(_spread(_last_values(runs, head, name)) for name in RESULTS))
    ratios = results(runs, Path())["ratios"]
    table.add_section()
    cells = (f"{ratios[name]:.1f}x" if name in ratios else "" for name in ("step_diameter", "perturbation_rms"))
    table.add_row("AdamW / RowNorm", "", *cells, style="bold")
    console.print(table)


def _spread(values: Sequence[float]) -> str:
    if not values:
        return ""
    center = f"{mean(values):.4f}"
    return f"{center} \u00b1 {stdev(values):.4f}" if len(values) > 1 else center


def write_report(out: Path) -> Path:
    """Write the report of all runs in a demo's folder; return its path."""
    from .service.figures.comparison import compare
    from .service.report import page, summary

    runs = summary.load(out / "runs")
    path = out / "report.html"
    path.write_text(page.page(runs, compare(runs)), encoding="utf-8")
    return path


def write_json(results: dict[str, Any], path: Path) -> None:
    """Write the results as JSON."""
    path.write_text(json.dumps(results, indent=2) + "\n")

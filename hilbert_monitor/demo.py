"""The paired demo: AdamW and RowNorm on one text from one start, side by side, and what the paper's table says of them.

Each run is a process of its own, `hilbert-monitor pretrain --size demo`; the demo reads nothing but their run logs.
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
from statistics import stdev
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
from hilbert_monitor.runs.log import RunReader, find_runs
from hilbert_monitor.runs.record import StepRecord
from hilbert_monitor.service.web.server import AddressError, background

PORT = 8000
"""Of the dashboard, unless it is taken."""
NAMES: dict[str, str] = {"adamw": "AdamW", "rownorm": "RowNorm"}


@dataclass
class Latest:
    """What is known of one run so far, from its log."""

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
    """The last of each number, by the name of its field."""

    @property
    def name(self) -> str:
        """What the run is called."""
        return f"demo-{self.head}-seed{self.seed}"

    def update(self) -> None:
        """Read what is new."""
        if self.reader is None:
            found = [r for r in find_runs(self.runs) if r.info.name == self.name and r.info.started >= self.started]
            self.reader = found[-1] if found else None
        if self.reader is not None:
            for news in self.reader.follow(self.offset):
                self.offset = news.offset
                for record in news.records:
                    self._take(record)

    def _take(self, record: StepRecord) -> None:
        self.step = record.step
        for name in ("train_loss", "validation_loss", "diameter", "perturbation_rms"):
            value = getattr(record, name)
            if value is not None:
                self.values[name] = value


def prepare(folder: Path, recipe: Recipe, texts: Sequence[Path]) -> Corpus:
    """Make the demo's shards: the standard library's text, or texts of one's own.

    The text to validate on is windows spread evenly over the held-out files; the end of a single file can mislead by
    more than the runs differ.
    """
    made = corpus(text_files(texts) if texts else standard_library(), recipe.vocab_size)
    folder.mkdir(parents=True, exist_ok=True)
    write_shard(folder / "fineweb_train_000.bin", made.train)
    windows = recipe.validation_tokens // recipe.context
    starts = np.linspace(0, max(0, len(made.validation) - recipe.context - 1), windows).astype(int)
    spread = np.concatenate([made.validation[start : start + recipe.context] for start in starts])
    write_shard(folder / "fineweb_val_000.bin", np.append(spread, made.validation[-1:]))
    (folder / TOKENIZER).write_text(made.tokenizer_json)
    return made


def run(out: Path, recipe: Recipe, *, seeds: int, texts: Sequence[Path], console: Console) -> list[Latest]:
    """Train a pair for every seed, the two side by side, and show how they do. Ctrl-C ends it with what there is."""
    done: list[Latest] = []
    with console.status("tokens of the text"):
        prepare(out / "data", recipe, texts)
    try:
        for seed in range(seeds):
            pair = [start(out, recipe, head, seed) for head in HEADS]
            done += pair
            follow(pair, recipe, console, said=f"seed {seed}, {seed + 1} of {seeds}" if seeds > 1 else "")
    except KeyboardInterrupt:
        console.print("ended early: what follows is of the steps so far")
    finally:
        for one in done:
            stop(one)
    return done


@contextmanager
def dashboard(runs: Path, port: int | None, console: Console) -> Iterator[str]:
    """Show the runs live while the block lasts; say where before anything else. Give the address."""
    with ExitStack() as stack:
        try:
            place = stack.enter_context(background(runs, port=PORT if port is None else port))
        except AddressError:
            if port is not None:
                raise
            place = stack.enter_context(background(runs, port=0))
        console.print(f"live dashboard: {place.url}", soft_wrap=True)
        yield place.url


def start(out: Path, recipe: Recipe, head: Head, seed: int) -> Latest:
    """Begin a run in a process of its own, with half of the processor."""
    changed = {name: value for name, value in recipe.as_dict().items() if value != DEMO.as_dict().get(name)}
    derived = {"parameters", "accumulation", "head", "seed", "head_lr"}
    given = [f"--set={name}={value}" for name, value in changed.items() if name not in derived]
    command = [sys.executable, "-m", "hilbert_monitor", "pretrain", "--size=demo", f"--head={head}", f"--seed={seed}"]
    command += [f"--data={out / 'data'}", f"--runs={out / 'runs'}", f"--checkpoints={out / 'checkpoints'}"]
    command += [f"--name=demo-{head}-seed{seed}", "--accelerator=cpu", "--no-resume", "--quiet", *given]
    threads = str(max(1, (os.cpu_count() or 1) // len(HEADS)))
    output = out / f"demo-{head}-seed{seed}.log"
    began = time.time()
    with output.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": threads}
        )
    return Latest(head, seed, process, output, out / "runs", began)


def stop(one: Latest, patience: float = 20.0) -> None:
    """End a run that is still going, so that it can close its log; read what it left."""
    if one.process.poll() is None:
        with suppress(ProcessLookupError):
            one.process.send_signal(signal.SIGINT)
        try:
            one.process.wait(patience)
        except subprocess.TimeoutExpired:
            one.process.kill()
            one.process.wait()
    one.update()


def follow(pair: Sequence[Latest], recipe: Recipe, console: Console, *, said: str = "") -> None:
    """Show the runs of a pair until both have ended; raise if one of them failed."""
    began = time.monotonic()
    with Live(console=console, refresh_per_second=4, transient=True) as live:
        while any(one.process.poll() is None for one in pair):
            for one in pair:
                one.update()
                check(one)
            live.update(view(pair, recipe, time.monotonic() - began, said))
            time.sleep(0.25)
    for one in pair:
        one.process.wait()
        one.update()
        check(one)


def check(one: Latest) -> None:
    """Raise if a run ended with an error."""
    if one.process.poll() not in (None, 0):
        lines = one.output.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
        raise RuntimeError(f"the {NAMES[one.head]} run ended with an error: {lines[-1]} (all it said: {one.output})")


def view(pair: Sequence[Latest], recipe: Recipe, seconds: float, said: str) -> Group:
    """The pair so far: a table, a bar and the time that is left."""
    assert recipe.updates is not None
    table = Table(title=said or None, title_justify="left")
    for name in ("head", "step", "training loss", "validation loss", "D(S)", "Hilbert RMS"):
        table.add_column(name, justify="left" if name == "head" else "right")
    for one in pair:
        table.add_row(NAMES[one.head], f"{one.step} of {recipe.updates}", *_shown(one.values))
    step = min(one.step for one in pair)
    left = seconds / step * (recipe.updates - step) if step else None
    eta = "starting" if left is None else f"{left / 60:.1f} minutes left"
    return Group(table, ProgressBar(total=recipe.updates, completed=step, width=60), eta)


def _shown(values: dict[str, float]) -> Iterator[str]:
    for name, form in (
        ("train_loss", ".3f"),
        ("validation_loss", ".3f"),
        ("diameter", ".4f"),
        ("perturbation_rms", ".4f"),
    ):
        yield format(values[name], form) if name in values else ""


RESULTS = {"validation_loss": "validation_loss", "step_diameter": "diameter", "perturbation_rms": "perturbation_rms"}


def results(done: Sequence[Latest], runs: Path) -> dict[str, Any]:
    """Final numbers of each head, mean over the seeds, and how many times smaller RowNorm's are."""
    found: dict[str, Any] = {}
    for head in HEADS:
        of = [one.values for one in done if one.head == head]
        found[head] = {name: _mean([v[key] for v in of if key in v]) for name, key in RESULTS.items()}
    ratios = {
        name: found["adamw"][name] / found["rownorm"][name]
        for name in ("step_diameter", "perturbation_rms")
        if found["adamw"][name] is not None and found["rownorm"][name]
    }
    return {**found, "ratios": ratios, "runs": str(runs)}


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def show(done: Sequence[Latest], recipe: Recipe, console: Console) -> None:
    """Print the paper's table for these runs: means, and sample deviations where there are several seeds."""
    table = Table(title=f"After {recipe.updates} updates of {recipe.tokens_per_update:,} tokens", title_justify="left")
    for name in ("LM head", "validation loss", "D(S)", "Hilbert RMS"):
        table.add_column(name, justify="left" if name == "LM head" else "right")
    for head in HEADS:
        of = [one.values for one in done if one.head == head]
        table.add_row(NAMES[head], *(_spread([v[key] for v in of if key in v]) for key in RESULTS.values()))
    ratios = results(done, Path())["ratios"]
    table.add_section()
    shown = (f"{ratios[name]:.1f}x" if name in ratios else "" for name in ("step_diameter", "perturbation_rms"))
    table.add_row("AdamW / RowNorm", "", *shown, style="bold")
    console.print(table)


def _spread(values: Sequence[float]) -> str:
    if not values:
        return ""
    mean = f"{sum(values) / len(values):.4f}"
    return f"{mean} \u00b1 {stdev(values):.4f}" if len(values) > 1 else mean


def draw(out: Path) -> Path:
    """Write the report of all runs of a demo's folder; return where it is."""
    from .service.figures.comparison import compare
    from .service.report import page, summary

    runs = summary.load(out / "runs")
    path = out / "report.html"
    path.write_text(page.page(runs, compare(run.series for run in runs)), encoding="utf-8")
    return path


def write_json(found: dict[str, Any], path: Path) -> None:
    """Write the results."""
    path.write_text(json.dumps(found, indent=2) + "\n")

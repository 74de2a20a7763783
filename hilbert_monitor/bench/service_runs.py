"""Synthetic runs for the service to show, written quickly and with the bytes of a real run's writer; one can continue.

This module loads no torch, so that the process which continues a run starts at once.
"""

from __future__ import annotations

import math
import multiprocessing
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from hilbert_monitor.runs.log import INFO, STEPS, RunWriter
from hilbert_monitor.runs.record import Alert, RunInfo, StepRecord

OPTIMIZERS = ("AdamW", "RowNorm")
PATTERNS = 3
"""Seeds of each optimizer with their own random records; further runs have the bytes of one of these."""
VOCABULARY, WIDTH, RATE = 50_257, 768, 4e-3
EXACT, PANEL = 10, 500
"""Steps from one exact diameter to the next, and from one measurement on the panel to the next."""
PACE = 0.6
"""Seconds from one step to the next."""
RECORD_BYTES = 800
"""Most bytes on disk for one record: its line, and its columns in the service's cache."""

SHORT_RUN_BYTES = 6 * 4096
"""Bytes on disk of a run's folder and files, besides its records."""


def records_of(head: str, seed: int, count: int, *, began: float) -> Iterator[StepRecord]:
    """Yield records of a synthetic run as the monitor writes them by default: bounds at every step, the rest rarely."""
    rng = np.random.default_rng([OPTIMIZERS.index(head), seed])
    step = np.arange(1, count + 1)
    rate = RATE * np.minimum(1, step / (0.04 * count)) * (0.55 + 0.45 * np.cos(math.pi * step / count))
    if head == "AdamW":  # a few rows move much further than the others, and some steps do
        norm = 8 * rate * np.exp(0.15 * rng.standard_t(3, count).clip(-8, 8))
        ceiling = 2 * rate * math.sqrt(WIDTH) * 7.27
    else:  # no row moves further than the learning rate
        norm, ceiling = rate * rng.uniform(0.97, 1, count), 2 * rate
    diameter = norm * rng.uniform(1.6, 1.9, count)
    loss = 3 + 6 / np.sqrt(step) + 0.02 * rng.standard_normal(count)
    tokens = (VOCABULARY * rng.random((count, 4)) ** 6).astype(int)
    noise = rng.uniform(0.9, 1.2, (count, 4))
    panel = max(1, min(PANEL, count // 10))
    columns = (step, rate, norm, ceiling, diameter, loss, tokens, noise)
    for n, lr, row, bound, D, train_loss, ids, factors in zip(*(column.tolist() for column in columns), strict=True):
        seconds = {"learning_rate": 2e-6 * factors[0], "increment": 0.021 * factors[1], "rules": 3e-6 * factors[2]}
        if exact := n % EXACT == 0 or n % panel == 0:
            values = _exact(D, row, ids, factors)
            seconds |= {"diameter": 0.08 * factors[3], "gradient": 0.004 * factors[2]}
        else:
            values = {}
            seconds["bracket"] = 0.012 * factors[3]
        if n % panel == 0:
            values |= _on_panel(D, n, ids, factors)
            seconds["panel"] = 0.9 * factors[0]
        yield StepRecord(
            step=n,
            time=began + n * PACE,
            tokens=n * 524_288,
            train_loss=train_loss,
            learning_rate=lr,
            diameter_lower=D if exact else 0.98 * D,
            diameter_upper=D if exact else 1.04 * D,
            pair=(ids[0], ids[1]),
            pair_text=(f" token{ids[0]}", f"token{ids[1]}"),
            ceiling=bound,
            nonfinite_rows=0,
            seconds=seconds,
            share=0.012 * factors[1],
            **values,
        )


def _exact(diameter: float, norm: float, tokens: list[int], noise: list[float]) -> dict[str, Any]:
    values = {"diameter": diameter, "row_norm": norm, "row_token": tokens[2], "gradient_row_token": tokens[3]}
    return {**values, "gradient_row_norm": 0.01 * noise[0], "gradient_balance": 1e-8 * noise[1]}


def _on_panel(diameter: float, step: int, tokens: list[int], noise: list[float]) -> dict[str, Any]:
    rms, pair = 3 * diameter, (tokens[2], tokens[3])
    values = {"perturbation_rms": rms, "perturbation_max": 4 * rms, "hidden_norm": 27.7 * noise[2]}
    texts = {"perturbation_pair": pair, "perturbation_pair_text": (f" token{pair[0]}", f"token{pair[1]}")}
    return {**values, **texts, "validation_loss": 3 + 6 / math.sqrt(step) + 0.01 * noise[3]}


def make_runs(root: Path, count: int, records: int) -> list[str]:
    """Write finished runs of both optimizers, in pairs by seed; return their ids.

    RunWriter writes the first few record by record. It also opens, describes and closes the others, but their lines
    are copies of the first ones', because so many runs would take minutes otherwise.
    """
    began = time.time() - records * PACE
    lines: dict[tuple[str, int], bytes] = {}
    ids = []
    for place in range(count):
        head, seed = OPTIMIZERS[place % 2], place // 2
        writer = RunWriter.open(root, _info(head, seed, records))
        writer.describe(started=began)
        if seed < PATTERNS:
            for record in records_of(head, seed, records, began=began):
                writer.write(record)
            lines[head, seed] = (writer.folder / STEPS).read_bytes().partition(b"\n")[2]
        else:
            with (writer.folder / STEPS).open("ab") as file:
                file.write(lines[head, seed % PATTERNS])
        if head == "AdamW":
            _write_alert(writer, step=records // 2, time=began + records // 2 * PACE)
        writer.close()
        ids.append(writer.id)
    return ids


def make_short_runs(root: Path, count: int, records: int) -> None:
    """Write many short, finished runs in moments: copies of two that RunWriter writes, under ids of their own."""
    ids = make_runs(root, 2, records)
    patterns = [{path.name: path.read_bytes() for path in (root / id).iterdir()} for id in ids]
    for place in range(2, count):
        id, files = ids[place % 2], patterns[place % 2]
        folder = root / f"{id}-{place // 2 + 1}"  # as RunWriter numbers runs of one name
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_bytes(content)
        info = files[INFO].replace(f'"id":"{id}"'.encode(), f'"id":"{folder.name}"'.encode())
        (folder / INFO).write_bytes(info)


def _info(head: str, seed: int, records: int) -> RunInfo:
    return RunInfo(
        name=f"{head.lower()}-seed{seed}",
        head_optimizer=head,
        seed=seed,
        model="Decoder",
        panel_hash="5ab1e",
        panel_size=8192,
        config={"size": "bench", "width": WIDTH, "vocab_size": VOCABULARY, "updates": records, "lr": RATE},
    )


def _write_alert(writer: RunWriter, *, step: int, time: float) -> None:
    message = f"step {step}: D(S) = 0.2 is 5.0 times what the last steps had"
    writer.alert(Alert(step=step, time=time, kind="diameter", value=0.2, expected=0.04, message=message))


class ContinuedRun:
    """A synthetic run that continues in its own process.

    Args:
        root: folder of the runs.
        place: which of the runs it is, in the order in which `make_runs` wrote them.
        records: number of records that it has so far.
    """

    def __init__(self, root: Path, place: int, records: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_continue, args=(root, place, records, theirs), daemon=True)
        self.step = records
        """The last step that was written."""
        self._process.start()
        theirs.close()
        self.id: str = self._pipe.recv()
        self._log: Path = root / self.id / STEPS

    @property
    def size(self) -> int:
        """Size of its step log in bytes."""
        return self._log.stat().st_size

    def write(self, count: int = 1, *, pause: float = 0.0) -> list[float]:
        """Write so many records. Return the moments just before each write, in seconds since the epoch."""
        self._pipe.send((count, pause))
        moments: list[float] = self._pipe.recv()
        self.step += count
        return moments

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()


def _continue(root: Path, place: int, records: int, pipe: Connection) -> None:
    head, seed = OPTIMIZERS[place % 2], place // 2
    writer = RunWriter.open(root, _info(head, seed, records), first_step=records)
    pipe.send(writer.id)
    whole = records_of(head, seed, 2 * records + 10_000, began=time.time() - records * PACE)
    rest = islice(whole, records, None)
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            count, pause = pipe.recv()
            moments = []
            for record in islice(rest, count):
                moments.append(time.time())
                writer.write(record)
                time.sleep(pause)
            pipe.send(moments)
    writer.close()

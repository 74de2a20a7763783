"""One run, for people and programs: its description, its records as numpy columns, its alerts, settings and state.

Example:
    run = load_run("runs/baseline")
    print(run.status, run.step, run.settings["optimizer.lr"])
    curve = run.curve("diameter")
    print(curve.steps[-1], curve.values[-1])
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from .reader import RunReader, RunState, Status, find_runs
from .record import Alert, RunInfo
from .table import Floats, Steps, Table, TableBuilder, present

Axis = Literal["updates", "tokens", "time"]
"""The x axis of a curve: optimizer steps, training tokens, or hours since the run started."""
ShownStatus = Literal[Status, "unreadable"]
SHOWN_STATUSES: tuple[ShownStatus, ...] = get_args(ShownStatus)
UNKNOWN = RunState(status="killed", step=None, time=0.0)
"""The state of a run that cannot be read; its `problem` says why."""
SIZES = {"190M": 185_680_896, "380M": 379_184_640, "640M": 639_797_248}
"""The paper's models, and their parameters."""

DEPTH, TEXT, COUNT = 8, 500, 2000
"""Levels of a configuration that become keys; characters of a key or a value; settings of a run. At most."""
WHOLE = re.compile(r"-?\d+\.0")  # a whole number that is written as a fraction
RECENT, PARTS = 5000, 5
"""Records that the speed follows from, and the parts of them whose median it is, so that pauses in two of them do not
count. A part is long enough to contain its share of validation."""
SOURCES = {"tokens": "tokens", "time": "times"}
"""The column of a Curve that the x axis follows from."""


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """The values of one metric of one run, at the steps where it was measured. A value may be nan or infinite."""

    steps: Steps
    tokens: Floats
    """Training tokens seen at each step; nan where unknown."""
    times: Floats
    """Time of each step in seconds since the epoch; nan where unknown."""
    values: Floats
    start_time: float = 0.0
    """Start of the run, in seconds since the epoch."""
    cache: dict[Any, Any] = field(default_factory=dict, repr=False)
    """Results computed from this curve. They stay valid because the arrays never change."""
    number: int = field(default_factory=count().__next__, repr=False)
    """A number that no other curve of this process has, for cache keys."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", np.asarray(self.steps, np.int64))
        for name in ("tokens", "times", "values"):
            column = np.asarray(getattr(self, name), np.float64)
            object.__setattr__(self, name, column if len(column) else np.full(len(self.steps), np.nan))

    @classmethod
    def of(cls, table: Table, values: Floats, start_time: float = 0.0) -> Curve:
        """Return a column of a table as a curve, without the rows that lack a value."""
        known = present(values)
        rows = slice(None) if known.all() else np.flatnonzero(known)
        tokens, times = table.column("tokens"), table.column("time")
        return cls(table.steps[rows], tokens[rows], times[rows], values[rows], start_time)

    def __len__(self) -> int:
        return len(self.values)

    @property
    def last(self) -> float | None:
        """The last value, or None for an empty curve."""
        return float(self.values[-1]) if len(self.values) else None

    def x(self, axis: Axis) -> Floats:
        """Return the x coordinate of each point."""
        if axis == "time":
            return (self.times - self.start_time) / 3600
        return self.tokens if axis == "tokens" else self.steps.astype(np.float64)

    @property
    def all_finite(self) -> bool:
        """True if no value is nan or infinite."""
        return self._all_finite("values")

    def has_x(self, axis: Axis) -> bool:
        """Return True if every point has an x coordinate on an axis."""
        return axis == "updates" or self._all_finite(SOURCES[axis])

    def with_x(self, axis: Axis) -> Curve:
        """Return the points that have an x coordinate on an axis."""
        if self.has_x(axis):
            return self
        rows = np.isfinite(getattr(self, SOURCES[axis]))
        return Curve(self.steps[rows], self.tokens[rows], self.times[rows], self.values[rows], self.start_time)

    def _all_finite(self, name: str) -> bool:
        if name not in self.cache:
            self.cache[name] = bool(np.isfinite(getattr(self, name)).all())
        return bool(self.cache[name])


class Speed(NamedTuple):
    """Steps and tokens per second; None where unknown."""

    steps: float | None = None
    tokens: float | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """A run, as far as its log was read. It never changes; a run that grows gets a new one."""

    id: str
    """Name of the run's folder."""
    info: RunInfo = field(default_factory=RunInfo)
    """The description that the newest attempt wrote."""
    attempts: tuple[RunInfo, ...] = ()
    """The description of each attempt, the oldest first."""
    state: RunState = UNKNOWN
    problem: str = ""
    """The reason for which the log cannot be read, in a sentence; else empty."""
    table: Table = field(default_factory=Table, repr=False)
    """The records that count, as numpy columns."""
    alerts: tuple[Alert, ...] = ()
    """Those that count, the oldest first."""
    torn: int = 0
    """Lines that were skipped because they were not whole."""
    heartbeat: float = 0.0
    """Time of the last step or validation, in seconds since the epoch."""
    indexed: float = 1.0
    """Share of the log that was read so far."""
    version: int = 0
    """A number that grows with every change."""
    curves: dict[str, Curve] = field(default_factory=dict, repr=False)
    """The curves of this table that were asked for so far."""

    @property
    def name(self) -> str:
        """The name that the user gave the run."""
        return self.info.name

    @property
    def label(self) -> str:
        """The run's name, or its id."""
        return self.info.name or self.id

    @property
    def optimizer(self) -> str:
        """The optimizer of the LM head."""
        return self.info.head_optimizer or "unknown"

    @property
    def seed(self) -> int | None:
        """The seed of the run."""
        return self.info.seed

    @cached_property
    def model(self) -> str:
        """The model's name. Only runs of one model are compared.

        A model with as many parameters as one of the paper's has the paper's name. Otherwise the name is the `size` of
        the run's configuration, or else the model's class; without a `size`, or with one of the paper's, the number of
        parameters is added.
        """
        size, parameters = self.info.config.get("size"), self.info.config.get("parameters")
        label = str(size).strip() if type(size) in (str, int) else ""
        if type(parameters) is not int:
            return label or self.info.model or "model"
        if paper := next((name for name, number in SIZES.items() if number == parameters), ""):
            return paper
        if label and label not in SIZES:
            return label
        return f"{label or self.info.model or 'model'}, {parameters:,} parameters"

    @property
    def status(self) -> ShownStatus:
        """The state of the run, or that its log cannot be read."""
        return "unreadable" if self.problem else self.state.status

    @property
    def step(self) -> int | None:
        """The last step that counts."""
        return self.state.step

    @cached_property
    def start_time(self) -> float:
        """Origin of the time axis, in seconds since the epoch: the start of the first attempt.

        If that is unknown or later than the first record, it is the first record.
        """
        times, started = self.table.columns.get("time"), self.attempts[0].started if self.attempts else None
        first = float(times[0]) if times is not None and len(times) else 0.0
        return started if started and (started <= first or not math.isfinite(first)) else first

    @cached_property
    def settings(self) -> dict[str, str]:
        """The run's configuration, flat: {"optimizer.lr": "0.1"}. Equal numbers have equal texts, also 0 and 0.0."""
        flat = _flat_texts(self.info.config)
        return {key: text[: -len(".0")] if WHOLE.fullmatch(text) else text for key, text in flat.items()}

    @cached_property
    def environment(self) -> dict[str, str]:
        """The versions, ranks and panel of the run, flat."""
        return _flat_texts(_environment(self.info))

    def curve(self, name: str) -> Curve:
        """Return the curve of a column, such as "diameter"; empty if no record has it."""
        if name not in self.curves:
            self.curves.setdefault(name, Curve.of(self.table, self.table.column(name), self.start_time))
        return self.curves[name]

    @property
    def speed(self) -> Speed:
        """Steps and tokens per second over the newest records."""
        newest, table = slice(-RECENT - 1, None), self.table
        steps, times, tokens = table.steps[newest], table.column("time")[newest], table.column("tokens")[newest]
        known = np.flatnonzero(np.isfinite(times))
        ends = known[np.linspace(0, len(known) - 1, PARTS + 1).astype(np.int64)] if len(known) else known
        seconds = np.diff(times[ends])
        return Speed(_median_rate(np.diff(steps[ends]), seconds), _median_rate(np.diff(tokens[ends]), seconds))

    @property
    def last_step(self) -> int | None:
        """The step at which training will end, where that is known."""
        return self.info.last_step


def load_run(folder: str | os.PathLike[str]) -> Run:
    """Return the run of a folder; raises ValueError if it is not a run, and OSError if it cannot be read."""
    reader = RunReader(folder)
    attempts = tuple(reader.attempts)
    if not attempts:
        raise ValueError(f"'{folder}' is not the folder of a run: give one that has an info.jsonl")
    builder, torn = TableBuilder(), 0
    for batch in reader.follow():
        torn += batch.torn + builder.append(batch)
    return Run(
        id=Path(os.path.abspath(folder)).name,
        info=attempts[-1],
        attempts=attempts,
        state=reader.state(),
        table=builder.table,
        alerts=tuple(reader.alerts()),
        torn=torn + reader.torn,
    )


def load_runs(root: str | os.PathLike[str]) -> list[Run]:
    """Return the runs in a folder, sorted by id, or the one run whose folder it is.

    A run that cannot be read has a `problem` and no records.
    """
    if not Path(root).is_dir():
        raise ValueError(f"there is no folder '{root}': give the one that runs are logged to")
    alone = RunReader(root)
    runs = []
    for reader in [alone] if alone.attempts else find_runs(root):
        try:
            runs.append(load_run(reader.folder))
        except Exception as error:  # anything may be in a log, and it must not cost the others
            problem, attempts = clip(f"{type(error).__name__}: {error}", TEXT), tuple(reader.attempts)
            id_ = Path(os.path.abspath(reader.folder)).name
            runs.append(Run(id=id_, info=attempts[-1], attempts=attempts, problem=problem))
    return runs


def settings(info: RunInfo) -> dict[str, str]:
    """Return a run's configuration and environment, flat: {"optimizer.lr": "0.1"}."""
    return _flat_texts({**info.config, **_environment(info)})


def clip(text: str, limit: int) -> str:
    """Cut a text to at most `limit` characters."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _environment(info: RunInfo) -> dict[str, Any]:
    return {"versions": info.versions, "ranks": info.world_size, "panel": info.panel_hash}


def _flat_texts(values: dict[str, Any]) -> dict[str, str]:
    texts: dict[str, str] = {}
    for key, text in islice(_flatten(values), COUNT):
        texts.setdefault(clip(key, TEXT), clip(text, TEXT))
    return texts


def _flatten(values: dict[str, Any], prefix: str = "", depth: int = DEPTH) -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, dict) and value and depth:
            yield from _flatten(value, f"{prefix}{key}.", depth - 1)
            continue
        try:
            yield f"{prefix}{key}", value if isinstance(value, str) else msgspec.json.encode(value).decode()
        except RecursionError:
            yield f"{prefix}{key}", "nested too deeply to be shown"


def _median_rate(amounts: NDArray[Any], seconds: Floats) -> float | None:
    usable = np.isfinite(amounts) & np.isfinite(seconds) & (amounts > 0) & (seconds > 0)
    return float(np.median(amounts[usable] / seconds[usable])) if usable.any() else None

"""Runs as tables and figures see them: series of numbers, already loaded."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numpy as np

from hilbert_monitor.runs.log import RunReader, RunState
from hilbert_monitor.runs.record import RunInfo
from hilbert_monitor.service.following.columns import Columns, Floats, Steps, Table, present
from hilbert_monitor.service.following.snapshot import model_of

from .plot_options import Axis

_NONE: Floats = np.empty(0)


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    """One metric of one run, by step, where it was measured. A value may be nan or infinite."""

    steps: Steps = field(default_factory=lambda: np.empty(0, np.int64))
    tokens: Floats = field(default_factory=lambda: _NONE)
    """nan where they are not known, as they may be throughout."""
    times: Floats = field(default_factory=lambda: _NONE)
    """Seconds since the epoch."""
    values: Floats = field(default_factory=lambda: _NONE)
    began: float = 0.0
    """When the run did, in the same seconds."""
    memo: dict[Any, Any] = field(default_factory=dict, repr=False)
    """What was worked out of this series, for the next who asks: the numbers in it never change."""
    number: int = field(default_factory=count().__next__, repr=False)
    """Of this series and no other."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", np.asarray(self.steps, np.int64))
        for name in ("tokens", "times", "values"):
            column = np.asarray(getattr(self, name), np.float64)
            object.__setattr__(self, name, column if len(column) else np.full(len(self.steps), np.nan))

    def __len__(self) -> int:
        return len(self.values)

    @property
    def last(self) -> float | None:
        """The value of the last record that has one."""
        return float(self.values[-1]) if len(self.values) else None

    @property
    def finite(self) -> bool:
        """Whether every value is."""
        if "finite" not in self.memo:
            self.memo["finite"] = bool(np.isfinite(self.values).all())
        return bool(self.memo["finite"])

    def along(self, axis: Axis) -> Floats:
        """Where the points stand on an axis: updates, tokens, or hours since the run began."""
        if axis == "time":
            return (self.times - self.began) / 3600
        return self.tokens if axis == "tokens" else self.steps.astype(np.float64)

    def end(self, axis: Axis) -> float:
        """Where the last point stands."""
        return float(Series(self.steps[-1:], self.tokens[-1:], self.times[-1:], began=self.began).along(axis)[0])

    def after(self, axis: Axis, place: float) -> int:
        """The first point beyond a place on an axis."""
        if axis == "time":
            return int(np.searchsorted(self.times, self.began + 3600 * place, "right"))
        return int(np.searchsorted(self.tokens if axis == "tokens" else self.steps, place, "right"))

    def has(self, axis: Axis) -> bool:
        """Whether every point has a place on an axis."""
        if axis == "updates":
            return True
        if axis not in self.memo:
            places = self.tokens if axis == "tokens" else self.times
            self.memo[axis] = bool(np.isfinite(places).all())
        return bool(self.memo[axis])

    def on(self, axis: Axis) -> Series:
        """The points that have a place on an axis."""
        if self.has(axis):
            return self
        places = self.tokens if axis == "tokens" else self.times
        rows = np.isfinite(places)
        return Series(self.steps[rows], self.tokens[rows], self.times[rows], self.values[rows], self.began)

    def smoothed(self, weight: float) -> Floats:
        """The values as an exponential moving average; those of the last weight that was asked for are kept."""
        if not weight:
            return self.values
        known: tuple[float, Floats] | None = self.memo.get("smoothed")
        if known is None or known[0] != weight:
            known = self.memo["smoothed"] = weight, smoothed(self.values, weight)
        return known[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSeries:
    """One run: what it is compared by, and its curves."""

    id: str
    name: str = ""
    optimizer: str = "unknown"
    """Of the LM head."""
    model: str = "model"
    """Equal for runs of one size, which alone are compared."""
    seed: int | None = None
    panel_hash: str = ""
    started: float = 0.0
    status: str = "finished"
    step: int | None = None
    """The last one."""
    validation_loss: Series = field(default_factory=Series)
    train_loss: Series = field(default_factory=Series)
    diameter: Series = field(default_factory=Series)
    perturbation_rms: Series = field(default_factory=Series)

    @property
    def label(self) -> str:
        """What the user calls it, or its id."""
        return self.name or self.id

    def curve(self, name: str) -> Series:
        """A curve by the name of its field."""
        found: Series = getattr(self, name)
        return found


CURVES = ("validation_loss", "train_loss", "diameter", "perturbation_rms")
"""Fields of a StepRecord that are Series of a RunSeries."""


def read_run(reader: RunReader, state: RunState | None = None, table: Table | None = None) -> RunSeries:
    """Load a run's curves from its log, or from what was read of it."""
    attempts = reader.attempts
    began = attempts[0].started if attempts else None
    return run_series(reader.info, state or reader.state(), table or read_table(reader), began)


def read_table(reader: RunReader) -> Table:
    """Load a run's records from its log."""
    columns = Columns()
    for news in reader.follow():
        columns.take(news)
    return columns.table


def run_series(info: RunInfo, state: RunState, table: Table, began: float | None = None) -> RunSeries:
    """A run's curves from its records; a column that every record has is not copied.

    Args:
        info: what the newest attempt says of the run.
        state: where it stands.
        table: its records.
        began: when the first attempt did; if nobody knows, the first record is where wall time begins.
    """
    start = origin(table, began)
    curves: dict[str, Any] = {name: series_of(table, table.column(name), start) for name in CURVES}
    return RunSeries(**_about(info, state), **curves)


class Loaded:
    """The runs that were made into RunSeries. One is made anew only if its records are others than before."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Table, RunInfo, RunState, RunSeries]] = {}

    def get(self, key: str, info: RunInfo, state: RunState, table: Table, began: float | None = None) -> RunSeries:
        """As `run_series`, of the run with this key, which is its id."""
        known = self._known.get(key)
        if known is None or known[0] is not table:
            found = replace(run_series(info, state, table, began), id=key)
        elif known[1] is info and known[2] is state:
            return known[3]
        else:
            found = replace(known[3], **{**_about(info, state), "id": key})
        self._known[key] = table, info, state, found
        return found

    def forget(self, keys: Collection[str]) -> None:
        """Let go of all runs but these."""
        self._known = {key: known for key, known in list(self._known.items()) if key in keys}


def series_of(table: Table, values: Floats, began: float) -> Series:
    """The rows of a table where a column has a value."""
    rows = present(values)
    picked = slice(None) if rows.all() else np.flatnonzero(rows)
    if not isinstance(picked, slice) and not len(picked):
        return Series()
    tokens, times = table.column("tokens"), table.column("time")
    return Series(table.steps[picked], tokens[picked], times[picked], values[picked], began)


def origin(table: Table, began: float | None) -> float:
    """Where wall time begins: with the first attempt, or the first record if that is not known or not before it."""
    times = table.columns.get("time")
    first = float(times[0]) if times is not None and len(times) else 0.0
    return began if began and (began <= first or not math.isfinite(first)) else first


def smoothed(values: Floats, weight: float) -> Floats:
    """Exponential moving average, in which the first values count as what they are and not as zeros.

        y_t = sum_i weight^(t - i) x_i / sum_i weight^(t - i),  i = 0 .. t

    What is not finite has no part in it and stays a gap. The sum above is made stretch by stretch: in one of n points
    it is a running sum of weight^-i x_i, as long as weight^-n is a number. The sum below is a geometric one.
    """
    there = np.isfinite(values)
    x = values[there]
    largest = float(np.abs(x).max(initial=0.0))
    if not largest:
        return np.where(there, values, np.nan)
    length = int(min(max(math.log(1e60) / -math.log(weight), 1), len(x)))
    rows = -(-len(x) // length)
    padded = np.zeros(rows * length)
    padded[: len(x)] = x / largest
    fading = weight ** np.arange(length)
    sums = np.cumsum(padded.reshape(rows, length) / fading, axis=1) * fading
    carried = [0.0]
    for end in sums[:-1, -1].tolist():
        carried.append(end + carried[-1] * weight**length)
    sums += np.outer(carried, weight * fading)
    counted = -np.expm1(np.arange(1, len(x) + 1) * math.log(weight)) / (1 - weight)
    found = np.full(len(values), np.nan)
    found[there] = sums.ravel()[: len(x)] / counted * largest
    return found


def _about(info: RunInfo, state: RunState) -> dict[str, Any]:
    return {
        "id": info.id,
        "name": info.name,
        "optimizer": info.head_optimizer or "unknown",
        "model": model_of(info),
        "seed": info.seed,
        "panel_hash": info.panel_hash,
        "started": info.started,
        "status": state.status,
        "step": state.step,
    }

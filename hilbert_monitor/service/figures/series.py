"""The curves of a run as arrays in memory, for the statistics and the figures.

A `Series` is one metric of one run. A `RunSeries` is one run with its four curves, and others on request.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hilbert_monitor.runs.reader import RunReader, RunState
from hilbert_monitor.runs.record import RunInfo
from hilbert_monitor.service.following.columns import Columns, Floats, Steps, Table, present
from hilbert_monitor.service.following.run_settings import configuration, environment
from hilbert_monitor.service.following.snapshot import model_of

from .plot_options import Axis

Settings = frozenset[tuple[str, str]]
"""Keys and their texts. What all runs share is found quickly as an intersection."""

PAUSE = 20.0
"""A pause is at least so many times as long as the steps in it usually take,"""
PAUSE_SECONDS = 60.0
"""and at least so long,"""
PAUSE_SHARE = 0.02
"""and at least this share of the whole curve, so that it can be seen."""

_EMPTY: Floats = np.empty(0)


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    """The values of one metric of one run, at the steps where it was measured. A value may be nan or infinite."""

    steps: Steps = field(default_factory=lambda: np.empty(0, np.int64))
    tokens: Floats = field(default_factory=lambda: _EMPTY)
    """Training tokens seen at each step; nan where unknown."""
    times: Floats = field(default_factory=lambda: _EMPTY)
    """Time of each step in seconds since the epoch; nan where unknown."""
    values: Floats = field(default_factory=lambda: _EMPTY)
    start_time: float = 0.0
    """When the run started, in seconds since the epoch."""
    cache: dict[Any, Any] = field(default_factory=dict, repr=False)
    """Results computed from this series. They stay valid because the arrays never change."""
    number: int = field(default_factory=count().__next__, repr=False)
    """A number that no other series of this process has, for cache keys."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", np.asarray(self.steps, np.int64))
        for name in ("tokens", "times", "values"):
            column = np.asarray(getattr(self, name), np.float64)
            object.__setattr__(self, name, column if len(column) else np.full(len(self.steps), np.nan))

    def __len__(self) -> int:
        return len(self.values)

    @property
    def last(self) -> float | None:
        """The last value, or None for an empty series."""
        return float(self.values[-1]) if len(self.values) else None

    @property
    def all_finite(self) -> bool:
        """Whether no value is nan or infinite."""
        if "finite" not in self.cache:
            self.cache["finite"] = bool(np.isfinite(self.values).all())
        return bool(self.cache["finite"])

    def x(self, axis: Axis) -> Floats:
        """The x coordinate of each point: updates, tokens, or hours since the run started."""
        if axis == "time":
            return (self.times - self.start_time) / 3600
        return self.tokens if axis == "tokens" else self.steps.astype(np.float64)

    def has_x(self, axis: Axis) -> bool:
        """Whether every point has an x coordinate on an axis."""
        if axis == "updates":
            return True
        if axis not in self.cache:
            self.cache[axis] = bool(self._known_x(axis).all())
        return bool(self.cache[axis])

    def with_x(self, axis: Axis) -> Series:
        """The points that have an x coordinate on an axis."""
        if self.has_x(axis):
            return self
        rows = self._known_x(axis)
        return Series(self.steps[rows], self.tokens[rows], self.times[rows], self.values[rows], self.start_time)

    def _known_x(self, axis: Axis) -> Any:
        return np.isfinite(self.tokens if axis == "tokens" else self.times)

    def smoothed(self, weight: float) -> Floats:
        """The moving average of the values; the values themselves if the weight is zero.

        Only the result for the last weight is cached.
        """
        if not weight:
            return self.values
        entry: tuple[float, Floats] | None = self.cache.get("smoothed")
        if entry is None or entry[0] != weight:
            entry = self.cache["smoothed"] = weight, moving_average(self.values, weight)
        return entry[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSeries:
    """One run: its curves, and the properties by which runs are grouped and compared."""

    id: str
    name: str = ""
    optimizer: str = "unknown"
    """The optimizer of the LM head."""
    model: str = "model"
    """The size of the model. Only runs with the same model are compared."""
    seed: int | None = None
    panel_hash: str = ""
    started: float = 0.0
    status: str = "finished"
    step: int | None = None
    """The last step."""
    validation_loss: Series = field(default_factory=Series)
    train_loss: Series = field(default_factory=Series)
    diameter: Series = field(default_factory=Series)
    perturbation_rms: Series = field(default_factory=Series)
    settings: Settings = field(default=frozenset(), repr=False)
    """The configuration, flat."""
    environment: Settings = field(default=frozenset(), repr=False)
    """What the run ran on, flat."""
    table: Table | None = field(default=None, repr=False, compare=False)
    """The records that curves of other metrics are made from; None if the four curves are all that is known."""
    start_time: float = 0.0
    others: dict[str, Series] = field(default_factory=dict, repr=False, compare=False)
    """Curves of other metrics that were made so far."""

    @property
    def label(self) -> str:
        """The name that the user gave the run, or its id."""
        return self.name or self.id

    @property
    def has_curve(self) -> bool:
        """Whether any of the four curves has a value."""
        return any(len(self.curve(name)) for name in CURVES)

    def curve(self, name: str) -> Series:
        """The curve with this field name, which may be any metric's."""
        if name in CURVES:
            series: Series = getattr(self, name)
            return series
        if name not in self.others:
            table = self.table or Table()
            values = table.get(name)
            self.others[name] = Series() if values is None else series_of(table, values, self.start_time)
        return self.others[name]


CURVES = ("validation_loss", "train_loss", "diameter", "perturbation_rms")
"""The fields of a StepRecord that become a Series of a RunSeries."""


def read_run(reader: RunReader, state: RunState | None = None, table: Table | None = None) -> RunSeries:
    """Load a run. State and table are read from its log unless the caller has them already."""
    attempts = reader.attempts
    started = attempts[0].started if attempts else None
    return run_series(reader.info, state or reader.state(), table or read_table(reader), started)


def read_table(reader: RunReader) -> Table:
    """Load a run's records from its log."""
    columns = Columns()
    for news in reader.follow():
        columns.take(news)
    return columns.table


def run_series(info: RunInfo, state: RunState, table: Table, started: float | None = None) -> RunSeries:
    """Make a run's curves from its records. A column without gaps is not copied.

    Args:
        info: the description of the run that its newest attempt wrote.
        state: the run's status and last step.
        table: the run's records.
        started: when the first attempt started, or None if that is unknown.
    """
    start_time = origin(table, started)
    curves: dict[str, Any] = {name: series_of(table, table.column(name), start_time) for name in CURVES}
    return RunSeries(**_description(info, state), **curves, start_time=start_time)


class RunSeriesCache:
    """The RunSeries of live runs. It makes the curves of a run again only when the run has a new table."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[Table, RunInfo, RunState, RunSeries]] = {}

    def get(self, id: str, info: RunInfo, state: RunState, table: Table, started: float | None = None) -> RunSeries:
        """The RunSeries with this id. The other arguments are those of `run_series`."""
        entry = self._entries.get(id)
        if entry is None or entry[0] is not table:
            run = replace(run_series(info, state, table, started), id=id, table=table)
        elif entry[1] is info and entry[2] is state:
            return entry[3]
        else:
            run = replace(entry[3], **{**_description(info, state), "id": id})
        self._entries[id] = table, info, state, run
        return run

    def keep_only(self, ids: Collection[str]) -> None:
        """Drop every run whose id is not among these."""
        self._entries = {id: entry for id, entry in list(self._entries.items()) if id in ids}


def series_of(table: Table, values: Floats, start_time: float) -> Series:
    """Make a series from a column of a table, without the rows where the column has no value."""
    rows = present(values)
    selection = slice(None) if rows.all() else np.flatnonzero(rows)
    if not isinstance(selection, slice) and not len(selection):
        return Series()
    tokens, times = table.column("tokens"), table.column("time")
    return Series(table.steps[selection], tokens[selection], times[selection], values[selection], start_time)


def origin(table: Table, started: float | None) -> float:
    """The origin of the time axis, in seconds since the epoch.

    It is the start of the first attempt. If that is unknown or later than the first record, it is the first record.
    """
    times = table.columns.get("time")
    first = float(times[0]) if times is not None and len(times) else 0.0
    return started if started and (started <= first or not math.isfinite(first)) else first


def pauses(steps: Steps | Floats, hours: Floats) -> NDArray[np.bool_]:
    """Where a line over time is broken: at points that follow a pause in training, or that lie before the last one.

    Args:
        steps: the step of each point, increasing.
        hours: when each was made.
    """
    breaks = np.zeros(len(hours), bool)
    if len(hours) < 3:
        return breaks
    waits, counts = np.diff(hours), np.maximum(np.diff(steps), 1)
    paces = (waits / counts)[waits > 0]
    middle = (len(paces) - 1) // 2
    usual = float(np.partition(paces, middle)[middle]) if len(paces) else 0.0
    shortest = max(PAUSE_SECONDS / 3600, PAUSE_SHARE * float(hours.max() - hours.min()))
    breaks[1:] = (waits < 0) | ((waits > PAUSE * usual * counts) & (waits >= shortest))
    return breaks


def moving_average(values: Floats, weight: float) -> Floats:
    """Exponential moving average, normalised so that the first values are not pulled towards zero.

        y_t = sum_i weight^(t - i) x_i / sum_i weight^(t - i),  i = 0 .. t

    Values that are not finite are left out of the sums, and the result is nan there. The denominator is a geometric
    sum. The numerator is a running sum of weight^-i x_i, computed in stretches that are short enough for weight^-i not
    to overflow; each stretch carries the sum of those before it.
    """
    finite = np.isfinite(values)
    x = values[finite]
    largest = float(np.abs(x).max(initial=0.0))
    if not largest:
        return np.where(finite, values, np.nan)
    length = int(min(max(math.log(1e60) / -math.log(weight), 1), len(x)))
    stretches = -(-len(x) // length)
    padded = np.zeros(stretches * length)
    padded[: len(x)] = x / largest
    powers = weight ** np.arange(length)
    sums = np.cumsum(padded.reshape(stretches, length) / powers, axis=1) * powers
    carry = [0.0]
    for stretch_sum in sums[:-1, -1].tolist():
        carry.append(stretch_sum + carry[-1] * weight**length)
    sums += np.outer(carry, weight * powers)
    weights = -np.expm1(np.arange(1, len(x) + 1) * math.log(weight)) / (1 - weight)
    averages = np.full(len(values), np.nan)
    averages[finite] = sums.ravel()[: len(x)] / weights * largest
    return averages


def _description(info: RunInfo, state: RunState) -> dict[str, Any]:
    """The fields of a RunSeries that are not curves."""
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
        "settings": frozenset(configuration(info).items()),
        "environment": frozenset(environment(info).items()),
    }

"""A run's records as columns that grow with its log.

A value that a record does not have is MISSING: a nan with a special payload, like R's NA. So a loss that is nan
and a loss that was not measured stay different.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from sys import intern
from typing import Any, get_type_hints

import numpy as np
from msgspec.structs import astuple
from numpy.typing import NDArray

from .reader import Batch
from .record import DERIVED_LINES, FORMULAS, Pair, StepRecord

Floats = NDArray[np.float64]
Steps = NDArray[np.int64]
Values = tuple[Any, ...]
"""One field of some records."""

_BITS = 0x7FF8_0000_0000_07A2
MISSING: float = struct.unpack("<d", struct.pack("<Q", _BITS))[0]


def _fields(*types: object) -> tuple[str, ...]:
    """Return the fields of a StepRecord that have one of some types, except its step."""
    return tuple(name for name, type_ in get_type_hints(StepRecord).items() if type_ in types and name != "step")


NUMBERS = _fields(float, int, float | None, int | None)
"""Fields of a StepRecord that are columns of the same name."""
PAIRS = _fields(Pair, Pair | None)
"""Fields that are two columns each: "pair.0" and "pair.1"."""
PAIR_COLUMNS = tuple(f"{name}.{end}" for name in PAIRS for end in (0, 1))
WHOLE = {*_fields(int, int | None), *PAIR_COLUMNS}
"""Columns of whole numbers."""
DERIVED = {metric.field: metric for metric in (*FORMULAS, *DERIVED_LINES)}
"""Columns that are computed from others on demand."""
SECONDS, PARTS = "seconds.", 16
"""Seconds that a part of measuring took are the column "seconds.PART". A run has at most 16 of them."""
TEXT, BLOCK = 80, 4096
"""Characters of a token's text that are stored, at most, and rows that are searched at once for a last value."""


def present(values: Floats) -> NDArray[np.bool_]:
    """Return where a column has a value, which may be nan."""
    return np.not_equal(values.view(np.int64), _BITS)


@dataclass(frozen=True, slots=True)
class Table:
    """The records of a run that count, sorted by step. A table never changes; a run that grows gets a new one."""

    steps: Steps = field(default_factory=lambda: np.empty(0, np.int64))
    columns: Mapping[str, Floats] = field(default_factory=dict)
    """Each as long as the steps. A column that no record has is left out."""
    texts: Mapping[int, str] = field(default_factory=dict)
    """Texts of tokens, where they are known."""

    def __len__(self) -> int:
        return len(self.steps)

    def get(self, name: str) -> Floats | None:
        """Return a column, also one that follows from others; None if no record has it."""
        values = self._rows(name, slice(None))
        return values if values is not None and (name in self.columns or present(values).any()) else None

    def column(self, name: str) -> Floats:
        """Return a column, MISSING throughout if no record has it."""
        values = self.get(name)
        return np.full(len(self), MISSING) if values is None else values

    def last(self, name: str) -> float | None:
        """Return the last value of a column that is not missing."""
        for stop in range(len(self), 0, -BLOCK):
            values = self._rows(name, slice(max(stop - BLOCK, 0), stop))
            if values is None:
                return None
            places = np.flatnonzero(present(values))
            if len(places):
                return float(values[places[-1]])
        return None

    def _rows(self, name: str, rows: slice) -> Floats | None:
        """Return some rows of a column; None without it, or without a column that it follows from."""
        metric = DERIVED.get(name)
        if metric is None or metric.formula is None:
            column = self.columns.get(name)
            return None if column is None else column[rows]
        if not self.columns.keys() >= {*metric.fields}:
            return None
        parts = [self.columns[field][rows] for field in metric.fields]
        with np.errstate(all="ignore"):
            values = np.asarray(metric.formula(*parts), np.float64)
        known = np.logical_and.reduce([present(part) for part in parts])
        known &= np.isfinite(values) | ~np.logical_and.reduce([np.isfinite(part) for part in parts])
        return np.where(known, values, MISSING)


class TableBuilder:
    """Builds the Tables of a run. A Table that was handed out never changes: rows are added behind its end."""

    def __init__(self, table: Table | None = None) -> None:
        table = table or Table()
        self.rows = len(table)
        self._steps, self._columns, self._texts = table.steps, dict(table.columns), dict(table.texts)
        self._is_shared = False
        """True if a Table holds the dictionary of texts."""
        self._expected = 0

    @property
    def table(self) -> Table:
        """All rows so far."""
        columns = {name: values[: self.rows] for name, values in self._columns.items()}
        self._is_shared = True
        return Table(self._steps[: self.rows], columns, self._texts)

    def append(self, batch: Batch[StepRecord], expected: int = 0) -> int:
        """Add the new records of a log; return how many were skipped because a number in them is too large.

        `expected` estimates the number of rows in the end. Room for them is reserved, so that a long log is not copied
        as it grows. Room that is never filled takes no memory.
        """
        self._expected = expected
        if batch.keep is not None:
            self._truncate(int(np.searchsorted(self._steps[: self.rows], batch.keep, "right")))
        return self._add_fitting(sorted(batch.records, key=lambda record: record.step)) if batch.records else 0

    def _add_fitting(self, records: list[StepRecord]) -> int:
        try:
            self._add(records)
        except OverflowError:  # a log may hold any number of digits
            return 1 if len(records) == 1 else sum(self._add_fitting([record]) for record in records)
        return 0

    def _add(self, records: list[StepRecord]) -> None:
        """Add records, sorted by step. A record of a step that is there already replaces it."""
        fields = dict(zip(StepRecord.__struct_fields__, zip(*map(astuple, records), strict=True), strict=True))
        steps, new = np.array(fields["step"], np.int64), _columns(fields)
        parts = [name for name in {**self._columns, **new} if name.startswith(SECONDS)]
        for name in {*parts[PARTS:]} & {*new}:
            del new[name]
        texts = _texts(fields["pair"], fields["pair_text"])
        texts |= _texts(fields["perturbation_pair"], fields["perturbation_pair_text"])
        news = {token: intern(text[:TEXT]) for token, text in texts.items() if token not in self._texts}
        if news and self._is_shared:
            self._texts, self._is_shared = dict(self._texts), False
        self._texts |= news
        first = int(np.searchsorted(self._steps[: self.rows], steps[0]))
        if first < self.rows:
            steps, new = self._merged(first, steps, new)
            self._truncate(first)
        start, self.rows = self.rows, self.rows + len(steps)
        if not start:  # most runs of a large folder are short
            self._steps, self._columns = steps, new
            return
        self._steps = _room(self._steps, start, self.rows, self._expected)
        self._steps[start : self.rows] = steps
        for name in {*self._columns, *new}:
            values = _room(self._columns.get(name, np.empty(0)), start, self.rows, self._expected)
            values[start : self.rows] = new.get(name, MISSING)
            self._columns[name] = values

    def _merged(self, first: int, steps: Steps, new: dict[str, Floats]) -> tuple[Steps, dict[str, Floats]]:
        """Return the rows from `first`, merged with new rows; of two with the same step the new one counts."""
        old = slice(first, self.rows)
        both = np.concatenate([self._steps[old], steps])
        order = np.argsort(both, kind="stable")
        rows = order[np.append(np.diff(both[order]) > 0, True)]  # the last of each step
        columns = {}
        for name in {*self._columns, *new}:
            before = self._columns[name][old] if name in self._columns else np.full(self.rows - first, MISSING)
            columns[name] = np.concatenate([before, new.get(name, np.full(len(steps), MISSING))])[rows]
        return both[rows], columns

    def _truncate(self, rows: int) -> None:
        """Drop all but the first rows, in new arrays: Tables that were handed out still hold the old ones."""
        if rows < self.rows:
            self.rows = rows
            self._steps = self._steps[:rows].copy()
            self._columns = {name: values[:rows].copy() for name, values in self._columns.items()}


def _texts(pairs: Values, texts: Values) -> dict[int, str]:
    """Return the texts of tokens, of records that have both a pair and its texts; of several texts the last."""
    known = ((pair, both) for pair, both in zip(pairs, texts, strict=True) if pair is not None and both is not None)
    return {token: text for pair, both in known for token, text in zip(pair, both, strict=True)}


def _columns(fields: Mapping[str, Values]) -> dict[str, Floats]:
    """Return the columns of some records; those that no record has are left out.

    Every line of every log comes through here, so values move by whole columns.
    """
    columns = {name: _floats(fields[name]) for name in NUMBERS if _any(fields[name])}
    for name in PAIRS:
        if _any(fields[name]):
            pairs = [pair or (None, None) for pair in fields[name]]
            columns |= {f"{name}.{end}": _floats(values) for end, values in enumerate(zip(*pairs, strict=True))}
    if any(fields["skipped"]):
        columns["skipped"] = _floats([1.0 if reason else None for reason in fields["skipped"]])
    seconds = fields["seconds"]
    for part in sorted(set().union(*seconds)):
        columns[SECONDS + part] = _floats([parts.get(part, MISSING) for parts in seconds])
    return columns


def _any(values: Values) -> bool:
    """Return True if there is any value. Most columns have one that is not zero, which is found at once."""
    return any(values) or values.count(None) < len(values)


def _floats(values: Sequence[Any]) -> Floats:
    """Return numbers as a column, None as MISSING. A whole number that is too large raises OverflowError."""
    try:
        return np.frombuffer(struct.pack(f"{len(values)}d", *values))  # half the time of an array of a list
    except struct.error:  # a None among them, or a number that is too large
        return np.array([MISSING if value is None else value for value in values], np.float64)


def _room(values: Any, rows: int, wanted: int, expected: int) -> Any:
    """Return an array with room for `wanted` rows, or more, that keeps the first `rows`; MISSING fills a new column."""
    if wanted <= len(values) and values.flags.writeable:
        return values
    grown = np.empty(max(wanted, expected, rows + rows // 2 if rows > 64 else wanted), values.dtype)
    known = min(rows, len(values))
    grown[:known] = values[:known]
    grown[known:wanted] = MISSING if values.dtype == np.float64 else 0
    return grown

"""How quickly a run goes, and at which step it will end."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hilbert_monitor.runs.record import RunInfo

from .columns import Floats, Table

RECORDS = 5000
"""The newest records that tell the pace, at most."""
PARTS = 5
"""Parts of these records. The pace is the median of theirs, so that pauses in two of them do not count. Each part is
long enough to have its share of what is slow and regular, such as validation."""
TOTALS = ("max_steps", "total_steps", "updates")
"""Settings that older runs may have the number of their steps in."""


class Pace(NamedTuple):
    """Steps and tokens a second; None where that is not known."""

    steps: float | None = None
    tokens: float | None = None


def pace_of(table: Table) -> Pace:
    """The pace of a run over its newest records."""
    newest = slice(-RECORDS - 1, None)
    steps, times, tokens = table.steps[newest], table.column("time")[newest], table.column("tokens")[newest]
    known = np.isfinite(times)
    if known.sum() < 2:
        return Pace()
    steps, times, tokens = steps[known].astype(np.float64), times[known], tokens[known]
    ends = np.unique(np.linspace(0, len(times) - 1, PARTS + 1).astype(np.int64))
    seconds = np.diff(times[ends])
    return Pace(_median_rate(np.diff(steps[ends]), seconds), _median_rate(np.diff(tokens[ends]), seconds))


def _median_rate(amounts: Floats, seconds: Floats) -> float | None:
    usable = np.isfinite(amounts) & np.isfinite(seconds) & (amounts > 0) & (seconds > 0)
    return float(np.median(amounts[usable] / seconds[usable])) if usable.any() else None


def last_step(info: RunInfo) -> int | None:
    """The step at which a run will end: as its trainer said, or as its settings say."""
    if info.last_step is not None:
        return info.last_step
    settings = (info.config.get(name) for name in TOTALS)
    return next((total for total in settings if type(total) is int and total > 0), None)

"""The heat map of a run's layers: each row a layer over time, as a multiple of what is usual for it.

The head stands above them in its own ruler, D(S). Colours are logarithms of multiples, so that layers of all sizes
share one scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from hilbert_monitor.runs.record import LayerRecord
from hilbert_monitor.runs.table import Floats, Table

COLUMNS = 240
"""Columns of the map, at most: of the steps that share one, the largest value is shown."""


def layer_map(records: Sequence[LayerRecord], table: Table, head: str = "") -> dict[str, Any]:
    """The map of some records.

    Args:
        records: the layers of steps, in their order.
        table: the run's own records, for D(S).
        head: where the LM head is in the model.

    Returns:
        "steps", the last of each column, and "rows": name, ruler, what is usual, the last value, and for each column
        the value over the usual one, None where there is none.
    """
    steps = np.array([record.step for record in records], np.int64)
    if not len(steps):
        return {"steps": [], "rows": []}
    names = list(dict.fromkeys(name for record in records for name in record.layers))
    places = {name: place for place, name in enumerate(names)}
    values = np.full((len(names), len(records)), np.nan)
    kinds: dict[str, str] = {}
    for column, record in enumerate(records):
        for name, layer in record.layers.items():
            values[places[name], column] = layer.relative
            kinds[name] = layer.kind
    ends = _ends(len(steps))
    rows = [_row(name, kinds[name], values[place], ends) for place, name in enumerate(names)]
    diameters = _diameters(table, steps)
    if np.isfinite(diameters).any():
        rows.insert(0, _row(head or "LM head", "D(S)", diameters, ends))
    return {"steps": [int(steps[end - 1]) for end in ends[1:]], "rows": rows}


def _diameters(table: Table, steps: Any) -> Floats:
    """D(S), or its lower bound, at some steps."""
    found: Floats = np.full(len(steps), np.nan)
    exact, lower = table.column("diameter"), table.column("diameter_lower")
    known = np.where(np.isfinite(exact), exact, lower)
    places = np.searchsorted(table.steps, steps)
    inside = places < len(table.steps)
    inside[inside] = table.steps[places[inside]] == steps[inside]
    found[inside] = known[places[inside]]
    return found


def _ends(number: int) -> list[int]:
    """Where the columns of a map begin and end, among so many records."""
    columns = min(number, COLUMNS)
    return [round(place * number / columns) for place in range(columns + 1)]


def _row(name: str, kind: str, values: Floats, ends: Sequence[int]) -> dict[str, Any]:
    finite = values[np.isfinite(values) & (values > 0)]
    usual = float(np.median(finite)) if len(finite) else None
    cells: list[float | None] = []
    for start, end in pairwise(ends):
        part = values[start:end]
        part = part[np.isfinite(part)]
        cells.append(round(float(part.max()) / usual, 4) if len(part) and usual else None)
    last = finite[-1] if len(finite) else None
    return {"name": name, "ruler": kind, "usual": usual, "last": None if last is None else float(last), "cells": cells}

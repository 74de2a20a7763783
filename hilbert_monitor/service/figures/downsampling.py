"""Reduce a curve to a few thousand points and keep every spike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tsdownsample import MinMaxDownsampler

from hilbert_monitor.runs.table import Floats

POINTS = 2000
"""Largest number of points in a trace."""
DOUBLINGS = 50
"""How many doublings of x have points of their own on a logarithmic axis, counted from the right."""

# The downsampler ignores nan. For a stretch of nothing but nan it returns the first index.
_min_max: Any = MinMaxDownsampler()  # type: ignore[no-untyped-call]


def downsample(columns: Sequence[Floats], points: int = POINTS) -> NDArray[np.int64]:
    """Choose which rows of a table to draw, and return their indices in increasing order.

    The rows are cut into stretches of equal length. Of each stretch the result has the rows where each column has its
    smallest and its largest finite value. It also has the first and the last row. If there are at most `points` rows,
    it has all of them.

    Args:
        columns: columns of equal length.
        points: how many rows to keep at most.
    """
    length = len(columns[0])
    if length <= points:
        return np.arange(length)
    stretches = max((points - 2) // (2 * len(columns)), 1)
    indices = [np.array([0, length - 1])]
    for column in columns:
        values = np.ascontiguousarray(column, np.float64)
        if np.isinf(values).any():
            values = np.where(np.isinf(values), np.nan, values)
        indices.append(_min_max.downsample(values, n_out=2 * stretches).astype(np.int64))
    return np.unique(np.concatenate(indices))


def log_downsample(columns: Sequence[Floats], x: Floats, points: int = POINTS) -> NDArray[np.int64]:
    """Choose which rows to draw on a logarithmic x axis, where every doubling of x has the same room.

    Args:
        columns: columns of equal length.
        x: their x coordinates, increasing where they are positive.
        points: how many rows to keep at most, about.
    """
    length = len(columns[0])
    positive = np.flatnonzero(x > 0)
    if length <= points or not len(positive):
        return downsample(columns, points)
    largest = float(x[positive].max())
    first = max(float(x[positive[0]]), largest / 2.0**DOUBLINGS)
    doublings = int(np.log2(max(largest / first, 1.0))) + 1
    edges = np.unique([0, *np.searchsorted(x, first * 2.0 ** np.arange(1, doublings)), length])
    parts = list(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True))
    share = max(points // len(parts), 2)
    return np.concatenate(
        [start + downsample([column[start:stop] for column in columns], share) for start, stop in parts]
    )

"""Fewer points of a curve, in which everything that stands out is still there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tsdownsample import MinMaxDownsampler

from hilbert_monitor.service.following.columns import Floats

POINTS = 2000
"""Points to a trace, at most."""

# It passes over nan; of a stretch of nothing else it gives the first place.
_extremes: Any = MinMaxDownsampler()  # type: ignore[no-untyped-call]


def thin(columns: Sequence[Floats], points: int = POINTS) -> NDArray[np.int64]:
    """Places to keep of some columns of equal length: of every stretch where each column is smallest and largest.

    Only finite values are compared. First and last are kept too. Nothing is left out of columns that are short enough.
    """
    length = len(columns[0])
    if length <= points:
        return np.arange(length)
    buckets = max((points - 2) // (2 * len(columns)), 1)
    kept = [np.array([0, length - 1])]
    for column in columns:
        values = np.ascontiguousarray(column, np.float64)
        if np.isinf(values).any():
            values = np.where(np.isinf(values), np.nan, values)
        kept.append(_extremes.downsample(values, n_out=2 * buckets).astype(np.int64))
    return np.unique(np.concatenate(kept))

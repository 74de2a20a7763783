"""Curves of several runs as one: pointwise means, deviations and ratios, aligned by update or by token.

Wall time aligns nothing, for no two runs are measured at the same moment: on that axis runs are aligned by update, and
what they have in common stands at the mean of their times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hilbert_monitor.service.following.columns import Floats

from .plot_options import Axis
from .series import Series

Keys = NDArray[Any]
Places = slice | NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Means:
    """Some curves' mean wherever at least one of them has a finite value."""

    x: Floats
    mean: Floats
    """nan where it is not finite."""
    deviation: Floats
    """Of the sample; nan where there is but one value."""
    runs: NDArray[np.int64]
    """How many have a value."""
    smallest: Floats
    """Of the positive values; infinite where there is none."""


@dataclass(frozen=True, slots=True)
class Ratios:
    """The mean of some curves over that of their partners, wherever a pair has both."""

    x: Floats
    ratio: Floats
    """nan where it is not finite."""
    pairs: NDArray[np.int64]
    """How many have both values."""


def pointwise(curves: Sequence[Series], axis: Axis, *, smooth: float = 0.0, spread: bool = True) -> Means:
    """Mean and deviation of some curves. The last that were worked out are kept: of most groups nothing is new.

    Args:
        curves: one of each run.
        axis: what they are drawn against.
        smooth: weight of the moving average that is taken of each curve first.
        spread: whether deviation and smallest value are wanted; else they are nan.
    """
    memo = curves[0].memo if curves else {}
    place, key = ("means", smooth > 0, spread), (axis, smooth, *(curve.number for curve in curves))
    known = memo.get(place)
    if known is None or known[0] != key:
        known = memo[place] = key, _pointwise(curves, axis, smooth, spread)
    found: Means = known[1]
    return found


def _pointwise(curves: Sequence[Series], axis: Axis, smooth: float, spread: bool) -> Means:
    curves = [curve for curve in (curve.on(axis) for curve in curves) if len(curve)]
    keys, places = align([_keys(curve, axis) for curve in curves])
    parts = [_Part(curve, at, smooth) for curve, at in zip(curves, places, strict=True)]
    total, count = np.zeros(len(keys)), _count(parts, len(keys))
    with np.errstate(all="ignore"):
        for part in parts:
            total[part.at] += part.filled(part.values)
        mean = total / count
        deviation, smallest = _spread(parts, mean, count) if spread else np.full((2, len(keys)), np.nan)
        x = _mean_place(parts, axis, count) if axis == "time" else keys.astype(np.float64)
    columns = (x, np.where(np.isfinite(mean), mean, np.nan), deviation, count, smallest)
    some = count > 0
    return Means(*(columns if some.all() else [column[some] for column in columns]))


def paired(pairs: Sequence[tuple[Series, Series]], axis: Axis, *, smooth: float = 0.0) -> Ratios:
    """Mean of the first curves over mean of the second ones; a pair counts where both have a finite value."""
    pairs = [(a, b) for a, b in ((a.on(axis), b.on(axis)) for a, b in pairs) if len(a) and len(b)]
    keys, places = align([_keys(curve, axis) for pair in pairs for curve in pair])
    over, under, total, count = (np.zeros(len(keys), dtype) for dtype in (float, float, float, np.int64))
    with np.errstate(all="ignore"):
        for number, (a, b) in enumerate(pairs):
            at, rows = _shared((a, places[2 * number]), (b, places[2 * number + 1]), len(keys))
            over[at] += a.smoothed(smooth)[rows[0]]
            under[at] += b.smoothed(smooth)[rows[1]]
            count[at] += 1
            if axis == "time":
                total[at] += (a.along(axis)[rows[0]] + b.along(axis)[rows[1]]) / 2
        ratio = over / under
        x = total / count if axis == "time" else keys.astype(np.float64)
    some = count > 0
    return Ratios(x[some], np.where(np.isfinite(ratio), ratio, np.nan)[some], count[some])


Placed = tuple[Series, Places]


def _shared(a: Placed, b: Placed, length: int) -> tuple[Places, tuple[Places, Places]]:
    """Where both of two curves have a finite value: among all keys, and in each of them."""
    if isinstance(a[1], slice) and isinstance(b[1], slice) and a[0].finite and b[0].finite:
        both = slice(min(a[1].stop, b[1].stop))
        return both, (both, both)
    rows = np.full((2, length), -1)
    for row, (curve, at) in zip(rows, (a, b), strict=True):
        row[at] = np.where(np.isfinite(curve.values), np.arange(len(curve)), -1)
    there = np.flatnonzero((rows >= 0).all(axis=0))
    return there, (rows[0, there], rows[1, there])


def align(keys: Sequence[Keys]) -> tuple[Keys, list[Places]]:
    """All keys that occur, in order, and of each array where its keys are among them.

    Arrays that begin alike, as those of runs that measure at the same steps do, are aligned without a search.
    """
    if not keys:
        return np.empty(0), []
    longest = max(keys, key=len)
    if (longest[1:] > longest[:-1]).all():
        found = [_places(longest, array) for array in keys]
        places = [place for place in found if place is not None]
        if len(places) == len(keys):
            return longest, places
        strange = [array for array, place in zip(keys, found, strict=True) if place is None]
    else:
        strange = list(keys)
    union = np.unique(np.concatenate([longest, *strange]))
    return union, [np.searchsorted(union, array) for array in keys]


def _places(keys: Keys, some: Keys) -> Places | None:
    """Where some keys are among others, or None if not all of them are."""
    if np.array_equal(keys[: len(some)], some):
        return slice(len(some))
    places = np.minimum(np.searchsorted(keys, some), len(keys) - 1)
    return places if np.array_equal(keys[places], some) else None


class _Part:
    """What one curve has to add, and where."""

    def __init__(self, curve: Series, at: Places, smooth: float) -> None:
        self.curve, self.at, self.values = curve, at, curve.smoothed(smooth)
        self.there: NDArray[np.bool_] | bool = curve.finite or np.isfinite(self.values)

    def filled(self, values: Floats) -> Floats:
        """Zero where the curve has no finite value."""
        return values if self.there is True else np.where(self.there, values, 0.0)


def _count(parts: Sequence[_Part], length: int) -> NDArray[np.int64]:
    """How many curves have a finite value, by place; whole beginnings are counted by where they end."""
    count, ends = np.zeros(length, np.int64), np.zeros(length + 1, np.int64)
    for part in parts:
        if isinstance(part.at, slice) and part.there is True:
            ends[part.at.stop] += 1
        else:
            count[part.at] += part.there
    return count + np.cumsum(ends[::-1])[::-1][1:]


def _spread(parts: Sequence[_Part], mean: Floats, count: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Sample deviation, and the smallest positive value."""
    squares, smallest = np.zeros(len(mean)), np.full(len(mean), np.inf)
    for part in parts:
        away = part.values - mean[part.at]
        squares[part.at] += part.filled(away * away)
        positive = np.where(part.values > 0, part.values, np.inf)
        smallest[part.at] = np.minimum(smallest[part.at], positive)
    deviation = np.sqrt(squares / (count - 1))
    return np.where((count > 1) & np.isfinite(deviation), deviation, np.nan), smallest


def _mean_place(parts: Sequence[_Part], axis: Axis, count: NDArray[np.int64]) -> Floats:
    """Mean of the curves' own places, where they have a value."""
    total = np.zeros(len(count))
    for part in parts:
        total[part.at] += part.filled(part.curve.along(axis))
    return total / count


def _keys(curve: Series, axis: Axis) -> Keys:
    return curve.tokens if axis == "tokens" else curve.steps

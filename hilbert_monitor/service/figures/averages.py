"""Combine the curves of several runs point by point: means, deviations and ratios.

Points are matched by update or by token count. Two runs never measure at the same moment, so for a time axis points are
matched by update as well, and the combined point is drawn at the mean of the times at which the runs made that update.
All runs that were under way then count, also those that measured nothing at that update. The line has a gap where
a run begins or ends, as the mean time jumps there, and where a run paused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hilbert_monitor.runs.run import Curve
from hilbert_monitor.runs.table import Floats

from .plot_options import Axis
from .series import pauses, smoothed

Counts = NDArray[np.int64]
Breaks = NDArray[np.bool_]
"""Where the line to a point is broken."""
Keys = NDArray[Any]
"""What points are matched by: the steps or the token counts of a curve."""
Positions = slice | NDArray[np.int64]
"""Where the keys of one curve are among the keys of all curves."""


@dataclass(frozen=True, slots=True)
class MeanCurve:
    """The mean of several curves, at every point where at least one of them has a finite value."""

    x: Floats
    mean: Floats
    """nan where the sum overflows."""
    deviation: Floats
    """Sample standard deviation; nan where only one curve has a value."""
    runs: Counts
    """How many curves have a finite value."""
    smallest: Floats
    """The smallest positive value; infinite where no value is positive."""
    breaks: Breaks

    def __getitem__(self, rows: slice) -> MeanCurve:
        columns: tuple[Any, ...] = (self.x, self.mean, self.deviation, self.runs, self.smallest, self.breaks)
        return MeanCurve(*(column[rows] for column in columns))


@dataclass(frozen=True, slots=True)
class RatioCurve:
    """The ratio of two means over pairs of curves, at every point where a pair has two finite values."""

    x: Floats
    ratio: Floats
    """nan where it is not finite."""
    pairs: Counts
    """How many pairs have two finite values."""
    breaks: Breaks

    def __getitem__(self, rows: slice) -> RatioCurve:
        return RatioCurve(self.x[rows], self.ratio[rows], self.pairs[rows], self.breaks[rows])


def mean_curve(curves: Sequence[Curve], axis: Axis, *, smooth: float = 0.0, spread: bool = True) -> MeanCurve:
    """Pointwise mean and deviation of some curves.

    The last result is cached in the first curve: a page asks for all groups again and again, and most have no new data.

    Args:
        curves: one per run.
        axis: the x axis of the figure.
        smooth: weight of the moving average that is applied to each curve before the mean.
        spread: whether to compute deviation and smallest value; if not, they are nan.
    """
    cache = curves[0].cache if curves else {}
    slot, key = ("means", smooth > 0, spread), (axis, smooth, *(curve.number for curve in curves))
    entry = cache.get(slot)
    if entry is None or entry[0] != key:
        entry = cache[slot] = key, _mean_curve(curves, axis, smooth, spread)
    means: MeanCurve = entry[1]
    return means


def _mean_curve(curves: Sequence[Curve], axis: Axis, smooth: float, spread: bool) -> MeanCurve:
    curves = [curve for curve in (curve.with_x(axis) for curve in curves) if len(curve)]
    keys, positions = align([_keys(curve, axis) for curve in curves])
    aligned = [_AlignedCurve(curve, at, smooth) for curve, at in zip(curves, positions, strict=True)]
    total, count = np.zeros(len(keys)), _finite_counts(aligned, len(keys))
    with np.errstate(all="ignore"):
        for curve in aligned:
            total[curve.at] += curve.zero_filled(curve.values)
        mean = total / count
        deviation, smallest = (
            _deviation_and_smallest(aligned, mean, count) if spread else np.full((2, len(keys)), np.nan)
        )
    rows = count > 0
    columns: tuple[Any, ...] = (np.where(np.isfinite(mean), mean, np.nan), deviation, count, smallest)
    if not rows.all():
        columns = tuple(column[rows] for column in columns)
    x, breaks = _places(zip(curves, positions, strict=True), keys, rows, axis)
    return MeanCurve(*(x, *columns, breaks))


def ratio_curve(pairs: Sequence[tuple[Curve, Curve]], axis: Axis, *, smooth: float = 0.0) -> RatioCurve:
    """Mean of the first curves over mean of the second ones; a pair counts where both have a finite value.

    The last result is cached in the first curve, as that of `mean_curve` is.
    """
    cache = pairs[0][0].cache if pairs else {}
    slot, key = ("ratios", axis, smooth > 0), (smooth, *((a.number, b.number) for a, b in pairs))
    entry = cache.get(slot)
    if entry is None or entry[0] != key:
        entry = cache[slot] = key, _ratio_curve(pairs, axis, smooth)
    ratios: RatioCurve = entry[1]
    return ratios


def _ratio_curve(pairs: Sequence[tuple[Curve, Curve]], axis: Axis, smooth: float) -> RatioCurve:
    pairs = [(a, b) for a, b in ((a.with_x(axis), b.with_x(axis)) for a, b in pairs) if len(a) and len(b)]
    keys, positions = align([_keys(curve, axis) for pair in pairs for curve in pair])
    numerator, denominator = np.zeros((2, len(keys)))
    count = np.zeros(len(keys), np.int64)
    with np.errstate(all="ignore"):
        for number, (a, b) in enumerate(pairs):
            at, rows = _common_points((a, positions[2 * number]), (b, positions[2 * number + 1]), len(keys))
            numerator[at] += smoothed(a, smooth)[rows[0]]
            denominator[at] += smoothed(b, smooth)[rows[1]]
            count[at] += 1
        ratio = numerator / denominator
    paired = count > 0
    curves = zip((curve for pair in pairs for curve in pair), positions, strict=True)
    x, breaks = _places(curves, keys, paired, axis)
    return RatioCurve(x, np.where(np.isfinite(ratio), ratio, np.nan)[paired], count[paired], breaks)


def _common_points(
    a: tuple[Curve, Positions], b: tuple[Curve, Positions], length: int
) -> tuple[Positions, tuple[Positions, Positions]]:
    """Where two aligned curves both have a finite value: positions among all keys, and rows of each curve."""
    if isinstance(a[1], slice) and isinstance(b[1], slice) and a[0].all_finite and b[0].all_finite:
        both = slice(min(a[1].stop, b[1].stop))
        return both, (both, both)
    rows = np.full((2, length), -1)
    for row, (curve, at) in zip(rows, (a, b), strict=True):
        row[at] = np.where(np.isfinite(curve.values), np.arange(len(curve)), -1)
    common = np.flatnonzero((rows >= 0).all(axis=0))
    return common, (rows[0, common], rows[1, common])


def align(keys: Sequence[Keys]) -> tuple[Keys, list[Positions]]:
    """Merge sorted arrays of keys: return all keys in order, and the positions of each array's keys among them.

    Runs that measure at the same steps have arrays that begin alike. Those are aligned by slices, without a search.
    """
    if not keys:
        return np.empty(0), []
    longest = max(keys, key=len)
    if (longest[1:] > longest[:-1]).all():
        candidates = [_positions(longest, array) for array in keys]
        positions = [candidate for candidate in candidates if candidate is not None]
        if len(positions) == len(keys):
            return longest, positions
        others = [array for array, candidate in zip(keys, candidates, strict=True) if candidate is None]
    else:
        others = list(keys)
    union = np.unique(np.concatenate([longest, *others]))
    return union, [np.searchsorted(union, array) for array in keys]


def _positions(keys: Keys, subset: Keys) -> Positions | None:
    """The positions of some keys among others, or None if not all of them are there."""
    if np.array_equal(keys[: len(subset)], subset):
        return slice(len(subset))
    positions = np.minimum(np.searchsorted(keys, subset), len(keys) - 1)
    return positions if np.array_equal(keys[positions], subset) else None


class _AlignedCurve:
    """A curve, smoothed, and the positions of its points among the points of all curves."""

    def __init__(self, curve: Curve, at: Positions, smooth: float) -> None:
        self.curve, self.at, self.values = curve, at, smoothed(curve, smooth)
        self.finite: NDArray[np.bool_] | bool = curve.all_finite or np.isfinite(self.values)
        """Where the values are finite, or True if all are."""

    def zero_filled(self, numbers: Floats) -> Floats:
        """Some numbers, one per point, with zero where the curve's value is not finite."""
        return numbers if self.finite is True else np.where(self.finite, numbers, 0.0)


def _finite_counts(curves: Sequence[_AlignedCurve], length: int) -> Counts:
    """How many curves have a finite value at each position.

    A curve that fills the positions from 0 to its end is counted once, at that end, and the counts are summed up from
    the right afterwards.
    """
    count, ends = np.zeros(length, np.int64), np.zeros(length + 1, np.int64)
    for curve in curves:
        if isinstance(curve.at, slice) and curve.finite is True:
            ends[curve.at.stop] += 1
        else:
            count[curve.at] += curve.finite
    return count + np.cumsum(ends[::-1])[::-1][1:]


def _deviation_and_smallest(curves: Sequence[_AlignedCurve], mean: Floats, count: Counts) -> tuple[Floats, Floats]:
    """The sample standard deviation, and the smallest positive value."""
    squares, smallest = np.zeros(len(mean)), np.full(len(mean), np.inf)
    for curve in curves:
        difference = curve.values - mean[curve.at]
        squares[curve.at] += curve.zero_filled(difference * difference)
        positive = np.where(curve.values > 0, curve.values, np.inf)
        smallest[curve.at] = np.minimum(smallest[curve.at], positive)
    deviation = np.sqrt(squares / (count - 1))
    return np.where((count > 1) & np.isfinite(deviation), deviation, np.nan), smallest


def _places(
    curves: Iterable[tuple[Curve, Positions]], keys: Keys, rows: NDArray[np.bool_], axis: Axis
) -> tuple[Floats, Breaks]:
    """The x coordinates of combined points, and where the line between them is broken.

    Args:
        curves: curves, and their positions among the keys.
        keys: what all points are matched by.
        rows: those of the keys that have a point.
        axis: the x axis.
    """
    if axis != "time":
        return keys[rows].astype(np.float64), np.zeros(np.count_nonzero(rows), bool)
    total, under_way = np.zeros(len(keys)), np.zeros(len(keys), np.int64)
    for curve, at in curves:
        part, seconds = at, curve.times - curve.start_time
        if not isinstance(at, slice):  # it measured at some of these steps, and made the others too
            part = slice(int(at[0]), int(at[-1]) + 1)
            seconds = np.interp(keys[part], curve.steps, seconds)
        total[part] += seconds
        under_way[part] += 1
    hours, under_way = total[rows] / (3600 * np.maximum(under_way[rows], 1)), under_way[rows]
    breaks = pauses(keys[rows], hours)
    breaks[1:] |= np.diff(under_way) != 0
    return hours, breaks


def _keys(curve: Curve, axis: Axis) -> Keys:
    return curve.tokens if axis == "tokens" else curve.steps

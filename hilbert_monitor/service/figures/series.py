"""Smoothing of a run's curves, and the pauses in them."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from hilbert_monitor.runs.run import Curve, Run
from hilbert_monitor.runs.table import Floats, Steps

CURVES = ("validation_loss", "train_loss", "diameter", "perturbation_rms")
"""The fields of a StepRecord that are always compared."""

PAUSE = 20.0
"""A pause is at least so many times as long as the steps in it usually take,"""
PAUSE_SECONDS = 60.0
"""and at least so long,"""
PAUSE_SHARE = 0.02
"""and at least this share of the whole curve, so that it can be seen."""


def has_curve(run: Run) -> bool:
    """Return True if any of the four CURVES has a value."""
    return any(len(run.curve(name)) for name in CURVES)


def smoothed(curve: Curve, weight: float) -> Floats:
    """Return the moving average of a curve's values; the values themselves if the weight is zero.

    Only the result for the last weight is cached.
    """
    if not weight:
        return curve.values
    entry: tuple[float, Floats] | None = curve.cache.get("smoothed")
    if entry is None or entry[0] != weight:
        entry = curve.cache["smoothed"] = weight, moving_average(curve.values, weight)
    return entry[1]


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

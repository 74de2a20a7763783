"""Final values of runs, and their mean and deviation over seeds: the numbers of the paper's table."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from hilbert_monitor.runs.record import METRICS as ALL_METRICS
from hilbert_monitor.runs.run import Run

METRIC_NAMES = {metric.field: metric.name for metric in ALL_METRICS}
"""The name of each metric, by the field of a StepRecord."""

METRICS = {METRIC_NAMES[field]: field for field in ("validation_loss", "diameter", "perturbation_rms")}
"""The metrics of the paper's table, and the curve of a run that has each."""

TITLES = {"validation_loss": "validation loss", "step_diameter": "D(S)", "perturbation_rms": "Hilbert RMS"}
"""The metrics of the table as a sentence names them."""


@dataclass(frozen=True, slots=True)
class SampleStatistics:
    """Mean and sample standard deviation over some runs; None where they do not exist."""

    mean: float | None = None
    deviation: float | None = None
    runs: int = 0


def sample_statistics(values: Iterable[float]) -> SampleStatistics:
    """Mean and sample standard deviation. A single value has no deviation."""
    sample = list(values)
    count = len(sample)
    if not count:
        return SampleStatistics()
    mean = sum(sample) / count
    if count == 1 or not math.isfinite(mean):
        return SampleStatistics(mean if math.isfinite(mean) else None, None, count)
    variance = sum((value - mean) * (value - mean) for value in sample) / (count - 1)
    return SampleStatistics(mean, math.sqrt(variance) if math.isfinite(variance) else None, count)


def final_value(run: Run, metric: str) -> float | None:
    """A run's last value of a metric of the table."""
    return run.curve(METRICS[metric]).last


def final_statistics(runs: Iterable[Run], metric: str) -> SampleStatistics:
    """Mean and deviation of the final values that are finite. Hilbert RMS needs runs with the same panel."""
    runs = list(runs)
    if metric == "perturbation_rms" and not same_panel(runs):
        return SampleStatistics()
    finals = [final_value(run, metric) for run in runs]
    return sample_statistics(value for value in finals if value is not None and math.isfinite(value))


def same_panel(runs: Iterable[Run]) -> bool:
    """Whether all runs with perturbations measured them on the same panel."""
    return len({run.info.panel_hash for run in runs if len(run.curve("perturbation_rms"))}) < 2


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """The ratio of two means, or None if one is missing or the result is not finite."""
    if numerator is None or denominator is None or not denominator:
        return None
    quotient = numerator / denominator
    return quotient if math.isfinite(quotient) else None

"""Which x axis suits a set of runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from hilbert_monitor.runs.run import Run

from .plot_options import Axis, PlotOptions
from .series import CURVES


def axes(runs: Iterable[Run]) -> tuple[Axis, ...]:
    """The axes on which every point of every run has an x coordinate."""
    curves = [run.curve(name) for run in runs for name in CURVES]
    all_axes: tuple[Axis, ...] = ("updates", "tokens", "time")
    return tuple(axis for axis in all_axes if all(curve.has_x(axis) for curve in curves))


def axis_of(runs: Iterable[Run]) -> Axis:
    """The default axis of some runs: tokens if every point has a token count, and updates otherwise."""
    return "tokens" if "tokens" in axes(runs) else "updates"


def with_axis(options: PlotOptions, runs: Sequence[Run]) -> PlotOptions:
    """The options, with the default axis of the runs if they name none."""
    return options if options.axis else replace(options, axis=axis_of(runs))

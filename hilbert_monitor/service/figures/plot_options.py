"""The options of a plot, and what of several runs is compared. A web page sends both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Axis = Literal["updates", "tokens", "time"]
Scale = Literal["auto", "log", "linear"]
Group = Literal["optimizer", "run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotOptions:
    """How to draw a set of curves."""

    axis: Axis | None = None
    """The x axis. None means tokens if every point has a token count, and updates otherwise.

    Time is in hours since the start of the run.
    """
    smooth: float = 0.0
    """Weight of earlier values in a moving average: 0 turns smoothing off, and it must be less than 1."""
    scale: Scale = "auto"
    """The scale of the y axis. With "auto" each panel chooses its own."""
    group: Group = "optimizer"
    """Whether to draw one mean per group, that is optimizer and settings, or one line per run."""
    seeds: bool = False
    """Whether to draw the line of each run behind the mean of its group."""
    x0: float | None = None
    """Start of the visible range of the x axis, or None for no limit."""
    x1: float | None = None
    """End of the visible range of the x axis, or None for no limit."""
    log_x: bool = False
    """Whether the x axis is logarithmic."""

    @property
    def x_axis(self) -> Axis:
        """The x axis to draw: updates if none was chosen."""
        return self.axis or "updates"

    def logarithmic(self, auto: bool) -> bool:
        """Whether the y axis is logarithmic. `auto` is the answer for the scale "auto"."""
        return auto if self.scale == "auto" else self.scale == "log"


PLAIN = PlotOptions()
"""The default options: whole curves, not smoothed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What a reader chose to compare."""

    by: str = ""
    """A key of the configuration that groups are split and coloured by; empty for none."""
    baseline: str = ""
    """Name of an optimizer or a group, or id of a run; empty for the usual, AdamW if it is there."""
    candidate: str = ""
    """The same; by default RowNorm if it is there, and all other groups if the baseline is a group or a run."""
    panels: tuple[str, ...] = ()
    """Metrics of the catalogue that have a panel of their own, by field."""

"""How curves are looked at: what a page asks for, and a figure obeys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Axis = Literal["updates", "tokens", "time"]
Scale = Literal["auto", "log", "linear"]
Group = Literal["optimizer", "run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotOptions:
    """A way to look at curves."""

    axis: Axis | None = None
    """None for tokens, if every point has them, and else updates. Time is in hours since the run began."""
    smooth: float = 0.0
    """Weight of what came before in a moving average, at least 0 and less than 1; 0 for none."""
    scale: Scale = "auto"
    group: Group = "optimizer"
    """One mean for each optimizer, or a line for each run."""
    seeds: bool = False
    """Whether each run's line stands behind the mean."""
    x0: float | None = None
    x1: float | None = None
    """The range of the axis that is drawn, all of it if None."""

    def logarithmic(self, auto: bool) -> bool:
        """Whether the values have a logarithmic axis, where `auto` says what is best."""
        return auto if self.scale == "auto" else self.scale == "log"


PLAIN = PlotOptions()
"""All of every curve, as it is."""

"""How a run says that it is one point of a sweep over diameters: what moved the head, and how far it was allowed to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

KEY = "diameter_sweep"
"""The key of a run's configuration that holds the point."""


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One point of a curve. Runs of the same point differ in the seed alone."""

    curve: str
    """What moved the head, and how it was held: "AdamW, rows held"."""
    allowed: float
    """The diameter of a step that was allowed, in units; infinite if nothing was held."""
    unit: float
    """The unit, RowNorm's largest diameter, at the peak of the learning rate."""

    def as_config(self) -> dict[str, Any]:
        """The entry of a run's configuration."""
        return {KEY: {**asdict(self), "allowed": self.allowed if math.isfinite(self.allowed) else "any"}}


def sweep_point(settings: Mapping[str, str]) -> SweepPoint | None:
    """The point that a run's settings name, flat and as texts; None if they name none, or one that makes no sense."""
    curve, allowed, unit = (settings.get(f"{KEY}.{name}") for name in ("curve", "allowed", "unit"))
    if not curve or allowed is None or unit is None:
        return None
    try:
        point = SweepPoint(curve, math.inf if allowed == "any" else float(allowed), float(unit))
    except ValueError:
        return None
    return point if point.allowed > 0 and 0 < point.unit < math.inf else None

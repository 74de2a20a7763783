"""Metrics that follow from others: a formula stands here once, for the numbers of a record and for whole columns."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Formula:
    """A product of fields of a StepRecord, divided by a product of others.

    Example:
        >>> Formula(over=("diameter",), under=("ceiling",)).apply({"diameter": 1.0, "ceiling": 4.0}.get)
        0.25
    """

    over: tuple[str, ...]
    under: tuple[str, ...] = ()

    @property
    def fields(self) -> tuple[str, ...]:
        """All fields that it takes."""
        return (*self.over, *self.under)

    def divisor(self, values: Callable[[str], Any]) -> Any:
        """The number, or the array, that is divided by."""
        return math.prod(values(field) for field in self.under)

    def apply(self, values: Callable[[str], Any]) -> Any:
        """The result for numbers or for numpy arrays, which `values` gives by the names of the fields."""
        return math.prod(values(field) for field in self.over) / self.divisor(values)

    def of(self, record: object) -> float | None:
        """The result for one record; None if a field was not measured, or the divisor is zero."""
        values = {field: getattr(record, field) for field in self.fields}
        if None in values.values() or self.divisor(values.__getitem__) == 0:
            return None
        return float(self.apply(values.__getitem__))


SATURATION = Formula(over=("diameter",), under=("ceiling",))
"""D(S) as a share of its ceiling."""
UTILISATION = Formula(over=("perturbation_rms",), under=("diameter", "hidden_norm_rms"))
"""The panel's RMS perturbation as a share of the most it could be, D(S) times the RMS norm of its hidden states."""
PERTURBATION_BOUND = Formula(over=("diameter", "hidden_norm"))
"""What no perturbation of the panel can exceed: D(S) times the largest norm of a hidden state."""

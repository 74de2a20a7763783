"""What is measured of one optimizer step: typed parts, and the record that they make.

A part holds the results of one measurement. Its fields have the names of `StepRecord`'s fields, and are copied into the
record.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from hilbert_monitor.geometry import (
    DiameterBracket,
    covering_radius,
    hilbert_perturbation,
    row_diameter,
    row_diameter_bracket,
    row_statistics,
)
from hilbert_monitor.runs.record import Pair, StepRecord

from .head_rows import Matrix
from .held_step import RegionStep
from .logit_shape import HeadShape, LogitShape
from .observers import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class DiameterBounds:
    """Certified bounds of D(S), and the pair of tokens that attains the lower one."""

    diameter_lower: float
    diameter_upper: float
    pair: Pair
    nonfinite_rows: int

    @classmethod
    def of(cls, S: Matrix) -> DiameterBounds:
        """Bound the diameter of an increment (V, d) in one pass."""
        return cls.of_bracket(row_diameter_bracket(S))

    @staticmethod
    def of_bracket(bracket: DiameterBracket) -> DiameterBounds:
        """Take the bounds that the geometry found."""
        return DiameterBounds(
            diameter_lower=bracket.lower,
            diameter_upper=bracket.upper,
            pair=bracket.pair,
            nonfinite_rows=bracket.nonfinite_rows,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactDiameter(DiameterBounds):
    """D(S) itself, and what else is measured of the increment on exact steps."""

    diameter: float
    row_norm: float
    row_token: int
    radius: float
    radius_lower: float

    @classmethod
    def of(cls, S: Matrix) -> ExactDiameter:
        """Search an increment (V, d) for its diameter."""
        exact = row_diameter(S)
        radius = covering_radius(S, diameter=exact)
        rows = row_statistics(S)
        return cls(
            diameter=exact.lower,
            diameter_lower=exact.lower,
            diameter_upper=exact.upper,
            pair=exact.pair,
            nonfinite_rows=exact.nonfinite_rows,
            row_norm=rows.longest_norm,
            row_token=rows.longest_row,
            radius=radius.upper,
            radius_lower=radius.lower,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredStep:
    """The step that weights of less than fp32 really made, next to the one that was intended."""

    stored_diameter: float | None
    stored_diameter_lower: float
    stored_diameter_upper: float
    stored_pair: Pair
    moved_share: float

    @classmethod
    def of(cls, bounds: DiameterBounds, *, moved_share: float) -> StoredStep:
        """Make it of the diameter of what the stored weights did, or its bounds."""
        return cls(
            stored_diameter=bounds.diameter if isinstance(bounds, ExactDiameter) else None,
            stored_diameter_lower=bounds.diameter_lower,
            stored_diameter_upper=bounds.diameter_upper,
            stored_pair=bounds.pair,
            moved_share=moved_share,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenStep:
    """The step that a forward pass in less than the weights' precision sees, such as one in bf16 of fp32 weights."""

    seen_diameter: float
    seen_pair: Pair

    @classmethod
    def of(cls, S: Matrix) -> SeenStep:
        """Search the increment of the cast weights (V, d) for its diameter."""
        exact = row_diameter(S)
        return cls(seen_diameter=exact.lower, seen_pair=exact.pair)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientRows:
    """The head's gradient by rows: its longest row, and how far its rows are from summing to zero."""

    gradient_row_norm: float
    gradient_row_token: int
    gradient_balance: float

    @classmethod
    def of(cls, gradient: Matrix, tokens: int | None = None) -> GradientRows:
        """Measure a gradient (V, d) whose first `tokens` rows are tokens; padding takes part in the softmax too."""
        rows = row_statistics(gradient, tokens=tokens)
        return cls(
            gradient_row_norm=rows.longest_norm,
            gradient_row_token=rows.longest_row,
            gradient_balance=rows.balance,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepQuality:
    """How much of the step reaches the predictions, and how much descent it makes of its diameter."""

    gauge_waste: float
    spectral_norm: float
    efficiency_lower: float | None = None
    efficiency_upper: float | None = None
    moment_efficiency_lower: float | None = None
    moment_efficiency_upper: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PanelPerturbation:
    """The Hilbert perturbation over the panel, and the norms of its hidden states."""

    perturbation_rms: float
    perturbation_max: float
    perturbation_pair: Pair
    hidden_norm: float
    hidden_norm_rms: float

    @classmethod
    def of(cls, S: Matrix, H: Tensor) -> PanelPerturbation:
        """Measure an increment (V, d) at the hidden states (N, d) of a panel, the same on all ranks."""
        perturbation = hilbert_perturbation(S, H)
        norms = torch.linalg.vector_norm(H, dim=1).double()
        return cls(
            perturbation_rms=perturbation.rms,
            perturbation_max=perturbation.max,
            perturbation_pair=perturbation.pair,
            hidden_norm=float(norms.max()),
            hidden_norm_rms=float(norms.square().mean().sqrt()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldPart:
    """What a `TrustRegion` made of the step."""

    trust_limit: float | None
    made_diameter: float | None
    held_rows: int | None
    held_share: float | None
    held_tokens: tuple[int, ...] | None

    @classmethod
    def of(cls, step: RegionStep) -> HeldPart:
        """Take what the region says. Of a step that was left out, nothing is known but that."""
        made = not step.left_out
        return cls(
            trust_limit=step.limit if math.isfinite(step.limit) else None,
            made_diameter=step.made_upper if made else None,
            held_rows=step.held if made else None,
            held_share=step.held / step.rows if made else None,
            held_tokens=step.tokens or None,
        )


@dataclass(slots=True, kw_only=True)
class Measurement:
    """One step while it is being measured. A part that was not measured is None."""

    step: int
    skipped: str = ""
    learning_rate: float | None = None
    scheduled: bool | None = None
    batch: int | None = None
    samples: tuple[int, ...] | None = None
    rounding: float | None = None
    ceiling: float | None = None
    increment_from: str = ""
    bounds: DiameterBounds | None = None
    """An ExactDiameter on exact steps."""
    stored: StoredStep | None = None
    seen: SeenStep | None = None
    gradient: GradientRows | None = None
    quality: StepQuality | None = None
    panel: PanelPerturbation | None = None
    head_shape: HeadShape | None = None
    logits: LogitShape | None = None
    outcome: Outcome | None = None
    """Reads what a `TrustRegion` made of the step, where there is one."""
    attention_logit: float | None = None
    backward_bound: float | None = None
    train_loss: float | None = None
    validation_loss: float | None = None
    tokens: int | None = None

    def forget_increment(self) -> None:
        """Drop what was measured of an increment that turned out not to be that of the update."""
        self.bounds = self.stored = self.seen = self.quality = self.ceiling = self.rounding = None
        self.increment_from = ""

    @property
    def exact(self) -> ExactDiameter | None:
        """The exact diameter, if it was searched for."""
        return self.bounds if isinstance(self.bounds, ExactDiameter) else None

    def record(
        self,
        *,
        time: float,
        seconds: dict[str, float],
        share: float | None,
    ) -> StepRecord:
        """Make the record.

        Args:
            time: seconds since the epoch.
            seconds: what measuring cost, by part.
            share: of the time since the last record, the part that measuring took.
        """
        values: dict[str, Any] = {}
        if self.outcome is not None and self.outcome().left_out:
            self.skipped = "not finite"
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "outcome" and value is not None:
                value = HeldPart.of(value())
            if is_dataclass(value):
                values |= {part.name: getattr(value, part.name) for part in fields(value)}
            elif field.name not in PARTS:
                values[field.name] = value
        return StepRecord(time=time, seconds=seconds, share=share, **values)


PARTS = {
    "bounds": ExactDiameter,
    "stored": StoredStep,
    "seen": SeenStep,
    "gradient": GradientRows,
    "quality": StepQuality,
    "panel": PanelPerturbation,
    "head_shape": HeadShape,
    "logits": LogitShape,
    "outcome": HeldPart,
}
"""Fields of a Measurement that hold several fields of a record."""

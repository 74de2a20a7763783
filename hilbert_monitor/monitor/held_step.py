"""Holds one step of a head, and tells what became of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hilbert_monitor.geometry import row_diameter

from .held_rows import TOP, HeldRows

How = Literal["rows", "scale"]
"""How a step is held: its centred rows are projected onto a ball, or all of it is scaled."""


@dataclass(frozen=True, slots=True)
class RegionStep:
    """What a `TrustRegion` made of one step."""

    step: int
    """Number of the step, from 1."""
    limit: float
    """Of D(S) in this step."""
    left_out: bool = False
    """Whether the step was left out whole, because a gradient was not finite. Then nothing else is known of it."""
    asked_lower: float = 0.0
    """At least D(S) of the step that the optimizer made."""
    asked_upper: float = 0.0
    """At most D(S) of the step that the optimizer made; with ``how="scale"`` the exact value, or next to it."""
    made_upper: float = 0.0
    """At most D(S) of the step that was stored: never more than the limit."""
    held: int = 0
    """Rows that were held back."""
    rows: int = 0
    """Rows of the head."""
    tokens: tuple[int, ...] = ()
    """Of the rows that were held back most, the farthest first."""


@dataclass(frozen=True, slots=True)
class HeldStep:
    """A step that was held, with what the host has not read of it yet."""

    survey: Tensor
    """How many rows were out of the ball, and the largest distances from the mean row and their tokens."""
    rows: int
    """Rows of the head."""
    diameter: float | None
    """At most D(S) as it was asked for, in units of the weights, if it was searched for."""

    def read(self, step: int, limit: float, scale: float) -> RegionStep:
        """Read it: an accelerator is waited for.

        Args:
            step: its number.
            limit: of D(S), on the logits.
            scale: factor between the head's output and the logits.
        """
        count, *numbers = self.survey.tolist()
        far, tokens = [x * scale for x in numbers[:TOP]], numbers[TOP:]
        if self.diameter is None:
            lower, upper, held = far[0], far[0] + max(far[1], 0.0), int(count)
        else:
            lower = upper = self.diameter * scale
            held = 0 if upper <= limit else self.rows
        return RegionStep(
            step,
            limit,
            asked_lower=lower,
            asked_upper=upper,
            made_upper=limit if held else min(limit, upper),
            held=held,
            rows=self.rows,
            tokens=tuple(int(token) for token, x in zip(tokens, far, strict=True) if held and x > limit / 2),
        )


def hold(rows: HeldRows, limit: float, *, how: How) -> HeldStep:
    """Hold the rows of a step to a limit of their diameter. On an accelerator, only "scale" waits.

    Args:
        rows: of this rank, around the step. They are written where they are held.
        limit: in units of the weights.
        how: by which way.
    """
    allowed = torch.full((), limit, dtype=rows.wide, device=rows.device)
    mean = rows.mean()
    distances = rows.distances(mean, allowed / 2)
    survey = rows.survey(distances, allowed / 2)
    if how == "rows":
        if not rows.on_cpu or survey[0] > 0:
            rows.project(mean, distances, allowed / 2, survey[0])
        return HeldStep(survey, rows.total, None)
    # Rounding to fp32 has moved a centred row by 2^-24 of its length at most, which is no more than D.
    diameter = row_diameter(rows.centred(mean)).upper * (1 + 2.0**-22)
    if not diameter <= limit:
        rows.scale(mean, distances, allowed, torch.full_like(allowed, diameter))
    return HeldStep(survey, rows.total, diameter)

"""What the two sides of a contrast are called where they stand together."""

from __future__ import annotations

from typing import NamedTuple

from hilbert_monitor.service.figures.contrasts import Contrast


class Sides(NamedTuple):
    """The names of the baseline and of the candidate, and the settings that both have, which are said once."""

    baseline: str
    candidate: str
    shared: str
    """Empty, or a comma and the settings: ", lr=0.1"."""


def sides(c: Contrast) -> Sides:
    """The sides of a contrast: ("AdamW", "RowNorm", ", lr=0.1") for groups that differ in the optimizer alone."""
    baseline, candidate = c.optimizers
    shared = c.baseline.removeprefix(baseline)
    if shared.startswith(",") and c.candidate == candidate + shared:
        return Sides(baseline, candidate, shared)
    return Sides(c.baseline, c.candidate, "")

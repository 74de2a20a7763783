"""How groups of runs look: their colours and dashes, legible on white and on black."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .grouping import Group, natural_order
from .style import DASHES, colour, hexadecimal, lighter, rgb

RAMP = ("#0072B2", "#009E73", "#A07800", "#D55E00", "#CC79A7")
"""The colours of values, from the smallest to the largest. Those between are mixed."""
TONES = (-0.06, 0.3)
"""The smallest and the largest change of lightness of the groups of one optimizer, which are in the order of values."""


class Look(NamedTuple):
    """How the line of a group looks."""

    colour: str
    dash: str = "solid"


def looks(groups: Sequence[Group]) -> dict[str, Look]:
    """How each group looks, by its name.

    A group has its optimizer's colour, and a tone of it if the optimizer has several groups. If a reader chose a key to
    split by, the colour says its value, and the dash the optimizer.
    """
    optimizers = list(dict.fromkeys(group.optimizer for group in groups))
    if any(group.chosen is not None for group in groups):
        values = sorted({group.chosen for group in groups}, key=natural_order)
        colours = dict(zip(values, ramp(len(values)), strict=True))
        return {
            group.name: Look(colours[group.chosen], DASHES[optimizers.index(group.optimizer) % len(DASHES)])
            for group in groups
        }
    found: dict[str, Look] = {}
    for optimizer in optimizers:
        names = [group.name for group in groups if group.optimizer == optimizer]
        for number, name in enumerate(names):
            found[name] = _tone(colour(optimizer), number, len(names))
    return found


def _tone(color: str, number: int, count: int) -> Look:
    """The look of one of several groups that share a colour. Of many, neighbours have different dashes."""
    if count == 1:
        return Look(color)
    change = TONES[0] + (TONES[1] - TONES[0]) * number / (count - 1)
    return Look(lighter(color, change), DASHES[number % 3] if count > 6 else "solid")


def ramp(count: int) -> list[str]:
    """So many colours in the order of RAMP, with mixed ones between."""
    anchors = np.array([rgb(color) for color in RAMP], float)
    places = np.linspace(0, len(RAMP) - 1, count) if count > 1 else np.zeros(count)
    mixed = np.stack([np.interp(places, range(len(RAMP)), anchors[:, part]) for part in range(3)], axis=1)
    return [hexadecimal(*(part / 255 for part in row)) for row in mixed.tolist()]

"""The states that a run can be in, and the silence after which it counts as stalled or gone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Literal, get_args

Status = Literal["running", "stalled", "failed", "killed", "stopped", "finished"]
STATUSES: tuple[Status, ...] = get_args(Status)
"""All of them, in the order in which they are listed."""
LIVE: tuple[Status, ...] = ("running", "stalled")
"""States of a run whose process is there."""
ENDED: tuple[Status, ...] = ("finished", "stopped", "failed")
"""States of a run that said how it ended."""

STALLED_AFTER, STALLED_STEPS, STALLED_PAUSES = 300.0, 20.0, 2.0
"""A run is stalled once it has been silent for all of these: so many seconds, the time that so many of its steps take,
and so many times its longest pause of late, which may have been a validation."""
PACED_BY = 100
"""The last steps of a run that its pace follows from."""
LOST_AFTER = 60.0
"""A process is gone after so many seconds without a heartbeat."""


def patience(times: Sequence[float], least: float = STALLED_AFTER) -> float:
    """Return the seconds of silence after which a run counts as stalled.

    Args:
        times: of the steps of its present attempt, in seconds, or of the last PACED_BY of them.
        least: what it has asked for.
    """
    gaps = [after - before for before, after in pairwise(times[-PACED_BY:]) if 0 < after - before < math.inf]
    return max(least, STALLED_STEPS * median(gaps), STALLED_PAUSES * max(gaps)) if gaps else least

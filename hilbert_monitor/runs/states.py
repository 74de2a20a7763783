"""The states that a run can be in, and the silence after which it counts as stalled or gone."""

from __future__ import annotations

from typing import Literal, get_args

Status = Literal["running", "stalled", "failed", "killed", "stopped", "finished"]
STATUSES: tuple[Status, ...] = get_args(Status)
"""All of them, in the order in which they are listed."""
LIVE: tuple[Status, ...] = ("running", "stalled")
"""States of a run whose process is there."""
ENDED: tuple[Status, ...] = ("finished", "stopped", "failed")
"""States of a run that said how it ended."""

STALLED_AFTER, STALLED_STEPS = 300.0, 20.0
"""A run is stalled once it has been silent for both: so many seconds, and the time that so many of its steps take."""
LOST_AFTER = 60.0
"""A process is gone after so many seconds without a heartbeat."""

"""The blow-ups of a run that last: each is reported when it begins, and again only if it doubles."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

CALM = 5
"""Normal values in a row that end a blow-up. While it lasts, only a value twice as large is reported again."""


@dataclass(slots=True)
class BlowUp:
    """A blow-up that lasts."""

    reported: float
    """Value of its last alert."""
    calm: int = 0
    """Normal values since its last value above the limit."""


class BlowUps:
    """The blow-ups that last, one of each kind at most."""

    def __init__(self) -> None:
        self._lasting: dict[str, BlowUp] = {}

    def begins(self, kind: str, value: float, is_blow_up: bool) -> bool:
        """Whether a blow-up of this kind begins here, or has doubled; one that lasts is reported once.

        Args:
            kind: of the rule.
            value: that the rule looks at.
            is_blow_up: what the rule says of the value.
        """
        lasting = self._lasting.get(kind)
        if not is_blow_up:
            if lasting is not None:
                lasting.calm += 1
                if lasting.calm >= CALM:
                    del self._lasting[kind]
            return False
        value = value if math.isfinite(value) else sys.float_info.max  # nothing doubles it, and JSON can hold it
        new = lasting is None or value > 2 * lasting.reported
        lasting = self._lasting.setdefault(kind, BlowUp(value))
        lasting.reported = value if new else lasting.reported
        lasting.calm = 0
        return new

    def state(self) -> dict[str, list[Any]]:
        """Return them in plain types, for a checkpoint."""
        return {kind: [blow_up.reported, blow_up.calm] for kind, blow_up in self._lasting.items()}

    def restore(self, state: dict[str, list[Any]]) -> None:
        """Take over those that `state` returned."""
        self._lasting = {kind: BlowUp(*values) for kind, values in state.items()}

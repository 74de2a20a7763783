"""What the rules say of a step: whether its bounds are suspicious, whether it is a blow-up, and its alerts."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from hilbert_monitor.runs.alerts import Judge, with_samples
from hilbert_monitor.runs.record import Alert, StepRecord

from .measurement import Measurement

Judged = tuple[StepRecord, list[Alert]]
"""A record, and the alerts that the rules raised about it."""


class Verdict:
    """Asks the rules about measurements and records. Only rank zero's rules know the run.

    Args:
        judge: the rules, or None for none.
    """

    def __init__(self, judge: Judge | None) -> None:
        self.judge = judge

    def suspects(self, step: Measurement, lower: float, upper: float) -> bool:
        """Whether the rules want to know the exact diameter of a step with these bounds."""
        if self.judge is None or step.learning_rate is None:
            return False
        return self.judge.suspects(step.step, step.learning_rate, lower, upper, scheduled=step.scheduled)

    def is_blow_up(self, step: Measurement) -> bool:
        """Whether the diameter of a step is more than the rules allow: that of what was stored, where it is another."""
        stored = step.stored.stored_diameter if step.stored else None
        diameter = stored if stored is not None else step.exact.diameter if step.exact else None
        if self.judge is None or diameter is None or step.learning_rate is None:
            return False
        limit = self.judge.limit(step.step, step.learning_rate, scheduled=step.scheduled)
        return limit is not None and diameter > limit

    def of(self, record: StepRecord, samples: Callable[[], tuple[int, ...] | None]) -> Judged:
        """Judge a record; where there is an alert, both get the indices of the step's samples.

        Args:
            record: of a step.
            samples: reads the indices, for which an accelerator may have to be waited for.
        """
        alerts = [] if self.judge is None else self.judge.judge(record)
        indices = samples() if alerts else None
        if indices is None:
            return record, alerts
        return msgspec.structs.replace(record, samples=indices), [with_samples(alert, indices) for alert in alerts]

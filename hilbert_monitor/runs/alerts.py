"""The rules for blow-ups: records in, alerts out, nothing else. Replaying a log gives the alerts of the run again.

Two rules compare with theory: an increment must hold no nan and no infinity, and D(S) must not exceed what its
optimizer can make. The others compare with the run's own history: D(S) and the perturbation of the panel (the fixed set
of validation positions), each over the learning rate, and what the logits of the panel lose in the run's precision.
`noise` learns what is usual and how rare a value is; `rates` says which learning rates could be foreseen. One that
could not is not divided out. The one dial is how many false alarms there may be in 10,000 steps, of all series and
rules together.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, get_args

from .alert_messages import advice, ceiling_message, comparison, ending, nonfinite_message, precision_message, tokens
from .alert_messages import with_samples as with_samples
from .alert_messages import with_texts as with_texts
from .blow_ups import BlowUps
from .noise import MOST, Event, Noise
from .rates import Rates
from .record import Alert, StepRecord

Kind = Literal["nonfinite", "ceiling", "diameter", "perturbation", "precision", "layer"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""The rules, by what they look at: rows that are not finite, D(S) against its ceiling, D(S), the perturbation of the
panel and the precision loss of its logits against their history, and the layers (see `layer_alerts`)."""

CEILING_FACTOR = 1.01
"""D(S) may exceed its ceiling by this factor, for rounding."""
RATE_FACTOR = 1.2
"""Where nobody foresaw the learning rate, a value is a blow-up from this factor over the usual on."""


@dataclass(frozen=True, kw_only=True, init=False)
class Rules:
    """What counts as a blow-up.

    Args:
        false_alarms_per_10k: how many false alarms there may be in 10,000 steps of a run. Fewer mean that a blow-up has
            to be larger to be told.
    """

    false_alarms_per_10k: float = 1.0

    def __init__(self, *, false_alarms_per_10k: float = 1.0, **old: Any) -> None:
        if old:
            raise TypeError(
                f"Rules has one setting, false_alarms_per_10k, and no {', '.join(sorted(old))}: limits, windows and"
                " schedules are learned from the run, so leave it out"
            )
        if not isinstance(false_alarms_per_10k, int | float) or not 1e-3 <= false_alarms_per_10k <= 100:
            raise ValueError(
                f"false_alarms_per_10k is a number from 0.001 to 100, got {false_alarms_per_10k!r}: 1 is usual"
            )
        object.__setattr__(self, "false_alarms_per_10k", float(false_alarms_per_10k))


@dataclass
class Series:
    """A quantity that is compared with its history: what is known of that."""

    kind: Literal["diameter", "perturbation", "precision"]
    name: str
    noise: Noise
    share: float
    """Of the false alarms that are allowed. Some are left over: tails of real runs are heavier than a few hundred
    values show."""
    steps: deque[int] = field(default_factory=lambda: deque(maxlen=4))
    """Of its last values."""

    @property
    def gap(self) -> int:
        """Steps between two values."""
        return min((after - before for before, after in pairwise(self.steps)), default=1)

    def note(self, step: int) -> None:
        """Note that there is a value of a step."""
        if not self.steps or step > self.steps[-1]:
            self.steps.append(step)

    def rarity(self, event: Event) -> float:
        """Steps in which something as unlikely is seen once."""
        return min(self.gap / max(event.chance, 1e-12), 1e12)


class Judge:
    """Applies the rules to the records of one run, in their order.

    Args:
        rules: what counts as a blow-up.
    """

    def __init__(self, rules: Rules | None = None) -> None:
        self.rules = rules or Rules()
        self.rates = Rates()
        self.diameter = Series("diameter", "D(S)", Noise(quiet=20, floor=math.log(1.4)), 0.6)
        self.perturbation = Series("perturbation", "The panel's Hilbert RMS", Noise(quiet=8, floor=math.log(2)), 0.1)
        self.precision = Series("precision", "The panel's precision loss", Noise(quiet=8, floor=math.log(2)), 0.05)
        self._gap = 0.0  # usual logarithm of the upper bound of D(S) over the lower
        self._blow_ups = BlowUps()

    def limit(self, step: int, lr: float, *, scheduled: bool | None = None) -> float | None:
        """The largest D(S) of that step that is no blow-up; None while there is too little history.

        Args:
            step: its number.
            lr: its learning rate.
            scheduled: whether the run's scheduler set it, if that is known.
        """
        noise = self.diameter.noise
        usual = noise.usual(exact=True)
        if usual is None or not noise.ready or not 0 < lr < math.inf:
            return None
        foreseen = self.rates.foreseen(step, lr, scheduled=scheduled)
        if foreseen < lr:
            return _exp(usual) * RATE_FACTOR * foreseen
        return _exp(min(noise.limits(self._probability(self.diameter))).value + noise.offset) * lr

    def suspects(self, step: int, lr: float, lower: float, upper: float, *, scheduled: bool | None = None) -> bool:
        """Whether the exact D(S) of a step has to be known, as its bounds are higher than usual ones may be."""
        limit = self.limit(step, lr, scheduled=scheduled)
        if limit is None:
            return False
        offset = self.diameter.noise.offset
        return lower > limit * _exp(-offset) or upper > limit * _exp(max(0.0, self._gap - offset))

    def state(self) -> dict[str, Any]:
        """Return the history in plain types, for a checkpoint."""
        return {
            "series": {
                series.kind: {"noise": series.noise.state(), "steps": list(series.steps)} for series in self._series
            },
            "rates": self.rates.state(),
            "gap": self._gap,
            "lasting": self._blow_ups.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take over the history that `state` returned. One of an earlier version is left out: it has other contents."""
        if "series" not in state:
            return
        fresh = Judge(self.rules)
        for series in fresh._series:
            saved = state["series"].get(series.kind)
            if saved is None:  # of a version that did not know it
                continue
            series.noise.restore(saved["noise"])
            series.steps.extend(int(step) for step in saved["steps"])
        fresh.rates.restore(state["rates"])
        fresh._gap = float(state["gap"])
        fresh._blow_ups.restore(state["lasting"])
        self.__dict__.update(fresh.__dict__)

    def judge(self, record: StepRecord) -> list[Alert]:
        """Return the alerts of a record, and add it to the history."""
        if record.skipped:
            return []
        alerts = [*self._nonfinite(record), *self._precision(record)]
        lr = record.learning_rate
        if lr is None:
            return alerts
        alerts += self._ceiling(record)
        foreseen = self.rates.foreseen(record.step, lr, scheduled=record.scheduled)
        value, exact = judged_diameter(record)
        for series, one, is_exact in (
            (self.diameter, value, exact),
            (self.perturbation, record.perturbation_rms, False),
        ):
            if one is not None and one > 0 and foreseen > 0 and math.isfinite(one / lr):
                alerts += self._against_history(series, record, one, foreseen, is_exact)
        self._learn_gap(record)
        told = any(alert.pattern == "rate" for alert in alerts)
        self.rates.add(record.step, lr, foreseen=foreseen, told=told)
        return alerts

    @property
    def _series(self) -> tuple[Series, ...]:
        return self.diameter, self.perturbation, self.precision

    def _probability(self, series: Series) -> float:
        """How likely a false alarm about one value of a series may be."""
        return min(self.rules.false_alarms_per_10k / 1e4 * series.share * series.gap, MOST)

    def _nonfinite(self, record: StepRecord) -> Iterator[Alert]:
        if record.nonfinite_rows is None:
            return
        bad = record.nonfinite_rows
        if self._blow_ups.begins("nonfinite", float(bad), bad > 0):
            yield _alert(record, "nonfinite", float(bad), 0.0, nonfinite_message(record))

    def _ceiling(self, record: StepRecord) -> Iterator[Alert]:
        value = _intended_diameter(record)  # a theorem is about no rounding
        if value is None or not record.ceiling:
            return
        if self._blow_ups.begins("ceiling", value, value > record.ceiling * CEILING_FACTOR):
            yield _alert(record, "ceiling", value, record.ceiling, ceiling_message(record, value))

    def _precision(self, record: StepRecord) -> Iterator[Alert]:
        """Compare what the logits lose in the run's precision with its history: it knows no learning rate."""
        value, series = record.precision_loss_rms, self.precision
        if value is None or not 0 < value < math.inf:
            return
        series.note(record.step)
        event = series.noise.event(math.log(value), self._probability(series))
        if self._blow_ups.begins("precision", value, event is not None):
            assert event is not None
            usual, rarity = _exp(event.usual), series.rarity(event)
            message = precision_message(series.name, value, usual, rarity)
            yield _alert(record, "precision", value, usual, message, pattern=event.pattern, rarity=rarity)
        series.noise.add(math.log(value), pattern="" if event is None else event.pattern)

    def _against_history(
        self, series: Series, record: StepRecord, value: float, foreseen: float, exact: bool
    ) -> Iterator[Alert]:
        """Compare a value with its history, and add it."""
        lr, noise = record.learning_rate, series.noise
        assert lr is not None
        x, usual = math.log(value) - math.log(foreseen), noise.usual(exact=exact)
        series.note(record.step)
        if foreseen < lr:
            accident = noise.ready and usual is not None and x - usual > math.log(RATE_FACTOR)
            if self._blow_ups.begins(series.kind, value, accident):
                assert usual is not None
                yield self._history_alert(series, record, value, foreseen, _exp(usual) * foreseen, "rate", None)
            return
        event = noise.event(x, self._probability(series), exact=exact)
        if self._blow_ups.begins(series.kind, value, event is not None):
            assert event is not None
            expected = _exp(event.usual + (noise.offset if exact else 0.0)) * lr
            yield self._history_alert(series, record, value, foreseen, expected, event.pattern, event)
        noise.add(x, exact=exact, pattern="" if event is None else event.pattern)

    def _history_alert(
        self,
        series: Series,
        record: StepRecord,
        value: float,
        foreseen: float,
        expected: float,
        pattern: str,
        event: Event | None,
    ) -> Alert:
        pair, text = record.pair, record.pair_text
        if series.kind == "perturbation":
            pair, text = record.perturbation_pair, record.perturbation_pair_text
        elif record.stored_pair not in (None, record.pair):
            pair, text = record.stored_pair, None
        rarity = None if event is None else series.rarity(event)
        compared = comparison(series.name, value, expected, pattern, rarity)
        message = f"{compared}, between {tokens(pair, text)}: {advice(record, pattern, foreseen)}"
        return _alert(record, series.kind, value, expected, message, pair, text, pattern=pattern, rarity=rarity)

    def _learn_gap(self, record: StepRecord) -> None:
        lower, upper = record.diameter_lower, record.diameter_upper
        if record.diameter is None and lower and upper and math.isfinite(upper) and upper >= lower > 0:
            gap = math.log(upper) - math.log(lower)
            self._gap = gap if not self._gap else self._gap + 0.05 * (gap - self._gap)


def alerts_of(records: Iterable[StepRecord], rules: Rules | None = None) -> Iterator[Alert]:
    """Return the alerts of a run with these records."""
    judge = Judge(rules)
    for record in records:
        yield from judge.judge(record)


def _exp(x: float) -> float:
    return math.exp(min(x, 700.0))


def judged_diameter(record: StepRecord) -> tuple[float | None, bool]:
    """The diameter that a blow-up is looked for in, and whether it is exact: that of the step that was stored."""
    if record.stored_diameter is not None or record.stored_diameter_lower is not None:
        exact = record.stored_diameter is not None
        return record.stored_diameter if exact else record.stored_diameter_lower, exact
    return _intended_diameter(record), record.diameter is not None


def _intended_diameter(record: StepRecord) -> float | None:
    """D(S), or its lower bound where it was not computed."""
    return record.diameter_lower if record.diameter is None else record.diameter


def _alert(
    record: StepRecord,
    kind: Kind,
    value: float,
    expected: float | None,
    message: str,
    pair: tuple[int, int] | None = None,
    text: tuple[str, str] | None = None,
    *,
    pattern: str = "",
    rarity: float | None = None,
) -> Alert:
    return Alert(
        step=record.step,
        time=record.time,
        kind=kind,
        value=value,
        expected=expected,
        pair=pair or record.pair,
        pair_text=text or record.pair_text,
        pattern=pattern,
        rarity=rarity,
        batch=record.batch,
        samples=record.samples,
        message=message + ending(record),
    )

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
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, get_args

import msgspec

from .noise import LAG, MOST, Event, Noise
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
CALM = 5
"""Normal values in a row that end a blow-up. While it lasts, only a value twice as large is reported again."""


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
        if not 1e-3 <= false_alarms_per_10k <= 100:
            raise ValueError(
                f"false_alarms_per_10k is a number from 0.001 to 100, got {false_alarms_per_10k}: 1 is usual"
            )
        object.__setattr__(self, "false_alarms_per_10k", float(false_alarms_per_10k))


@dataclass(slots=True)
class BlowUp:
    """A blow-up that lasts."""

    reported: float
    """Value of its last alert."""
    calm: int = 0
    """Normal values since its last value above the limit."""


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
        self._lasting: dict[str, BlowUp] = {}

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
            "lasting": {kind: [blow_up.reported, blow_up.calm] for kind, blow_up in self._lasting.items()},
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
        fresh._lasting = {kind: BlowUp(*values) for kind, values in state["lasting"].items()}
        self.__dict__.update(fresh.__dict__)

    def resumed(self) -> None:
        """Forget the learning rates: those of a resumed run may be others on purpose."""
        self.rates.forget()

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
        if self._begins("nonfinite", float(bad), bad > 0):
            yield _alert(
                record,
                "nonfinite",
                float(bad),
                0.0,
                f"{bad:,} rows of the increment are not finite, that of {_tokens(record.pair, record.pair_text, 1)}"
                " among them: look at the batch, the loss scale and the gradient norm of this step, and go back to the"
                " last checkpoint before it",
            )

    def _ceiling(self, record: StepRecord) -> Iterator[Alert]:
        value = _intended_diameter(record)  # a theorem is about no rounding
        if value is None or not record.ceiling:
            return
        if self._begins("ceiling", value, value > record.ceiling * CEILING_FACTOR):
            yield _alert(
                record,
                "ceiling",
                value,
                record.ceiling,
                f"D(S) = {value:.3g} is more than the {record.ceiling:.3g} that this optimizer can make at its learning"
                f" rate, between {_tokens(record.pair, record.pair_text)}: look for other code that writes to the head,"
                " its gradients in place or the optimizer's state",
            )

    def _precision(self, record: StepRecord) -> Iterator[Alert]:
        """Compare what the logits lose in the run's precision with its history: it knows no learning rate."""
        value, series = record.precision_loss_rms, self.precision
        if value is None or not 0 < value < math.inf:
            return
        if not series.steps or record.step > series.steps[-1]:
            series.steps.append(record.step)
        event = series.noise.event(math.log(value), self._probability(series))
        if self._begins("precision", value, event is not None):
            assert event is not None
            usual, rarity = _exp(event.usual), min(series.gap / max(event.chance, 1e-12), 1e12)
            yield _alert(
                record,
                "precision",
                value,
                usual,
                f"{series.name} = {value:.3g}, {value / usual:.3g} times the usual {usual:.3g}, {_once_in(rarity)}:"
                " the logits have outgrown their precision, look at log Z and the mean logit, and consider logits in"
                " fp32, a z-loss or a soft cap",
                pattern=event.pattern,
                rarity=rarity,
            )
        series.noise.add(math.log(value), pattern="" if event is None else event.pattern)

    def _against_history(
        self, series: Series, record: StepRecord, value: float, foreseen: float, exact: bool
    ) -> Iterator[Alert]:
        """Compare a value with its history, and add it."""
        lr, noise = record.learning_rate, series.noise
        assert lr is not None
        x, usual = math.log(value) - math.log(foreseen), noise.usual(exact=exact)
        if not series.steps or record.step > series.steps[-1]:
            series.steps.append(record.step)
        if foreseen < lr:
            accident = noise.ready and usual is not None and x - usual > math.log(RATE_FACTOR)
            if self._begins(series.kind, value, accident):
                assert usual is not None
                yield self._history_alert(series, record, value, _exp(usual) * foreseen, "rate", None)
            return
        event = noise.event(x, self._probability(series), exact=exact)
        if self._begins(series.kind, value, event is not None):
            assert event is not None
            expected = _exp(event.usual + (noise.offset if exact else 0.0)) * lr
            yield self._history_alert(series, record, value, expected, event.pattern, event)
        noise.add(x, exact=exact, pattern="" if event is None else event.pattern)

    def _history_alert(
        self, series: Series, record: StepRecord, value: float, expected: float, pattern: str, event: Event | None
    ) -> Alert:
        pair, text = record.pair, record.pair_text
        if series.kind == "perturbation":
            pair, text = record.perturbation_pair, record.perturbation_pair_text
        elif record.stored_pair not in (None, record.pair):
            pair, text = record.stored_pair, None
        rarity = None if event is None else min(series.gap / max(event.chance, 1e-12), 1e12)
        what = f"{series.name} = {value:.3g}, {value / max(expected, math.ulp(0.0)):.3g} times "
        usual = {
            "trend": f"the {expected:.3g} of {LAG} measured steps ago at this learning rate",
            "level": f"the usual {expected:.3g}, and high for some steps",
        }.get(pattern, f"the usual {expected:.3g}")
        chance = "" if rarity is None else f", {_once_in(rarity)}"
        advice = self._advice(record, pattern)
        message = f"{what}{usual}{chance}, between {_tokens(pair, text)}: {advice}"
        return _alert(record, series.kind, value, expected, message, pair, text, pattern=pattern, rarity=rarity)

    def _advice(self, record: StepRecord, pattern: str) -> str:
        if pattern == "rate":
            before = self.rates.before
            return f"the learning rate went from {before:.3g} to {record.learning_rate:.3g}, look at it"
        if pattern == "trend":
            return "the steps grow while the learning rate does not, lower it, or go back and look at loss and data"
        if pattern == "level":
            return "look at what changed in the run or its data some steps ago"
        if record.pair and record.gradient_row_token in record.pair:
            return "the head's gradient is largest at one of them, look at how they occur in the batch of this step"
        return "look at the batch of this step, and at how long these tokens had not occurred"

    def _learn_gap(self, record: StepRecord) -> None:
        lower, upper = record.diameter_lower, record.diameter_upper
        if record.diameter is None and lower and upper and math.isfinite(upper) and upper >= lower > 0:
            gap = math.log(upper) - math.log(lower)
            self._gap = gap if not self._gap else self._gap + 0.05 * (gap - self._gap)

    def _begins(self, kind: Kind, value: float, is_blow_up: bool) -> bool:
        """Whether a blow-up of this kind begins here, or has doubled; one that lasts is reported once."""
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


def alerts_of(records: Iterable[StepRecord], rules: Rules | None = None) -> Iterator[Alert]:
    """Return the alerts of a run with these records."""
    judge = Judge(rules)
    for record in records:
        yield from judge.judge(record)


def with_texts(alert: Alert, texts: tuple[str, str]) -> Alert:
    """Return an alert about tokens whose texts were not known, with the texts in it and in its message."""
    number = 1 if alert.kind == "nonfinite" else 2
    ids, names = _tokens(alert.pair, None, number), _tokens(alert.pair, texts, number)
    return msgspec.structs.replace(alert, pair_text=texts, message=alert.message.replace(ids, names, 1))


def with_samples(alert: Alert, samples: tuple[int, ...]) -> Alert:
    """Return an alert with the samples of its step, in it and in its message."""
    message = alert.message.removesuffix(_batch(alert.batch, alert.samples)) + _batch(alert.batch, samples)
    return msgspec.structs.replace(alert, samples=samples, message=message)


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
        message=message + _held(record) + _batch(record.batch, record.samples),
    )


def _held(record: StepRecord) -> str:
    """Say that a TrustRegion held the step, where it did."""
    if not record.held_rows or record.trust_limit is None:
        return ""
    return f"; it was held to {record.trust_limit:.3g}, in {record.held_rows:,} rows"


def _batch(batch: int | None, samples: tuple[int, ...] | None) -> str:
    """Say which batch it was, for the end of a message."""
    if batch is None and not samples:
        return ""
    which = "a batch" if batch is None else f"batch {batch} of its epoch"
    if not samples:
        return f"; it was {which}"
    more = f" and {len(samples) - 5} more" if len(samples) > 5 else ""
    return f"; it was {which}, with samples {', '.join(map(str, samples[:5]))}{more}"


def _once_in(rarity: float) -> str:
    """Say how rare that is, with one or two digits."""
    if rarity >= 1e9:
        return "not seen once in a billion steps"
    digits = 10 ** max(0, math.floor(math.log10(max(rarity, 1.0))))
    return f"seen once in {round(rarity / digits) * digits:,} steps"


def _tokens(pair: tuple[int, int] | None, text: tuple[str, str] | None, number: int = 2) -> str:
    if pair is None:
        return "tokens that are not known"
    texts = text or ("", "")
    names = [
        f"{token} {token_text!r}" if token_text else str(token) for token, token_text in zip(pair, texts, strict=True)
    ]
    return f"token {names[0]}" if number == 1 else f"tokens {names[0]} and {names[1]}"

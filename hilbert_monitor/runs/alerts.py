"""The rules for blow-ups: records in, alerts out, nothing else. Replaying a log gives the alerts of the run again.

Two rules compare with theory: an increment must hold no nan and no infinity, and D(S) must not exceed what its
optimizer can make. Two rules compare with the run's own history. D(S) and the perturbation of the panel (the fixed set
of validation positions) grow with the learning rate, so the history is of their ratios to it. A step is a blow-up if
its ratio is far above all but two of the last ones: a run that has bursts by itself, as AdamW has when rare tokens
return, may repeat them. A blow-up is not added to the history, unless it has lasted so long that it is the new normal.
A learning rate that jumps is not divided out: the ratio is then taken to the rate that the last two steps led to
expect, and the limit is lower.

Tried and dropped: a factor and a number of robust standard deviations over the median. The logarithm of AdamW's ratio
has a tail that its spread does not show: with 5 deviations and a factor of 1.65 there were three false alarms in 5,000
clean steps, and a limit without false alarms missed steps that had tripled.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import nlargest
from statistics import median
from typing import Any, Literal, get_args

import msgspec

from .record import Alert, StepRecord

Kind = Literal["nonfinite", "ceiling", "diameter", "perturbation"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""The rules, by what they look at: rows that are not finite, D(S) against its ceiling, D(S) and the perturbation of the
panel against their history."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """What counts as a blow-up."""

    window: int = 200
    """How many of the last measured values are the history."""
    diameter_quiet: int = 20
    perturbation_quiet: int = 5
    """How many values the history needs before its rule can give an alert."""
    diameter_factor: float = 1.75
    perturbation_factor: float = 2.0
    """The limit, as a multiple of the third largest value of the history."""
    jump: float = 1.1
    """A learning rate has jumped if it exceeds, by this factor, what the last two steps led to expect. Infinite for a
    schedule with restarts, which jumps on purpose."""
    jump_factor: float = 1.65
    """The limit where the learning rate has jumped, as a multiple of the median of the history."""
    ceiling_factor: float = 1.01
    """The limit, as a multiple of the ceiling."""
    calm: int = 5
    """Normal values in a row that end a blow-up. While it lasts, only a value twice as large is reported again."""
    settled: int = 50
    """Values after which a blow-up that lasts is the new normal."""


class History:
    """The last values of a quantity that grows with the learning rate, stored as the logarithms of their ratios to it.

    Args:
        window: how many values are stored.
        quiet: how many values there must be before there is a limit.
        factor: the limit over the third largest value.
        jump_factor: the limit over the median, where the learning rate has jumped.
    """

    def __init__(self, window: int, quiet: int, factor: float, jump_factor: float) -> None:
        self.quiet, self.room, self.jump_room = quiet, math.log(factor), math.log(jump_factor)
        self.logs: deque[float] = deque(maxlen=window)

    def add(self, value: float, lr: float) -> None:
        """Add a value, unless its ratio has no finite logarithm."""
        if value > 0 and lr > 0 and math.isfinite(value / lr):
            self.logs.append(math.log(value) - math.log(lr))

    def expected(self, lr: float) -> float | None:
        """The usual value at a learning rate, by the median; None without a history."""
        return _exp(median(self.logs)) * lr if self.logs else None

    def limit(self, lr: float, *, jumped: bool = False) -> float | None:
        """The largest value that is no blow-up; None while there is too little history."""
        if len(self.logs) < self.quiet:
            return None
        if jumped:
            return _exp(median(self.logs) + self.jump_room) * lr
        return _exp(nlargest(3, self.logs)[-1] + self.room) * lr


@dataclass(slots=True)
class BlowUp:
    """A blow-up that lasts."""

    reported: float
    """Value of its last alert."""
    calm: int = 0
    """Normal values since its last value above the limit."""
    values: int = 0
    """Values above the limit."""


class Judge:
    """Applies the rules to the records of one run, in their order.

    Args:
        rules: what counts as a blow-up.
    """

    def __init__(self, rules: Rules | None = None) -> None:
        self.rules = rules = rules or Rules()
        self.diameter, self.perturbation = (
            History(rules.window, quiet, factor, rules.jump_factor)
            for quiet, factor in (
                (rules.diameter_quiet, rules.diameter_factor),
                (rules.perturbation_quiet, rules.perturbation_factor),
            )
        )
        self._rates: deque[tuple[int, float]] = deque(maxlen=2)
        self._lasting: dict[str, BlowUp] = {}

    def limit(self, step: int, lr: float) -> float | None:
        """The largest D(S) of that step that is no blow-up; None while there is too little history."""
        usual = self._usual_rate(step, lr)
        return self.diameter.limit(usual, jumped=usual < lr) if lr > 0 else None

    def state(self) -> dict[str, Any]:
        """Return the history in plain types, for a checkpoint."""
        return {
            "diameter": list(self.diameter.logs),
            "perturbation": list(self.perturbation.logs),
            "rates": [list(rate) for rate in self._rates],
            "lasting": {
                kind: [blow_up.reported, blow_up.calm, blow_up.values] for kind, blow_up in self._lasting.items()
            },
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take over the history that `state` returned."""
        diameter, perturbation = ([float(x) for x in state[name]] for name in ("diameter", "perturbation"))
        rates = [(int(step), float(lr)) for step, lr in state["rates"]]
        lasting = {kind: BlowUp(*values) for kind, values in state["lasting"].items()}
        self.diameter.logs.extend(diameter)
        self.perturbation.logs.extend(perturbation)
        self._rates.extend(rates)
        self._lasting.update(lasting)

    def judge(self, record: StepRecord) -> list[Alert]:
        """Return the alerts of a record, and add it to the history."""
        lr, value = record.learning_rate, judged_diameter(record)
        if record.skipped:
            return []
        alerts = list(self._nonfinite(record))
        if lr is None:
            return alerts
        alerts += [*self._ceiling(record), *self._blow_ups(record, lr, value)]
        if value is not None and self._is_usual("diameter"):
            self.diameter.add(value, lr)
        if record.perturbation_rms is not None and self._is_usual("perturbation"):
            self.perturbation.add(record.perturbation_rms, lr)
        if not self._rates or record.step > self._rates[-1][0]:
            self._rates.append((record.step, lr))
        return alerts

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
        limit = record.ceiling * self.rules.ceiling_factor
        if self._begins("ceiling", value, value > limit):
            yield _alert(
                record,
                "ceiling",
                value,
                record.ceiling,
                f"D(S) = {value:.3g} is more than the {record.ceiling:.3g} that this optimizer can make at its learning"
                f" rate, between {_tokens(record.pair, record.pair_text)}: look for other code that writes to the head,"
                " its gradients in place or the optimizer's state",
            )

    def _blow_ups(self, record: StepRecord, lr: float, value: float | None) -> Iterator[Alert]:
        usual = self._usual_rate(record.step, lr)
        rms = record.perturbation_rms
        if value is not None and (alert := self._against("diameter", self.diameter, record, value, usual)):
            yield alert
        if rms is not None and (alert := self._against("perturbation", self.perturbation, record, rms, usual)):
            yield alert

    def _against(self, kind: Kind, history: History, record: StepRecord, value: float, lr: float) -> Alert | None:
        jumped = record.learning_rate is not None and lr < record.learning_rate
        limit, expected = history.limit(lr, jumped=jumped), history.expected(lr)
        if limit is None or expected is None or not math.isfinite(value):
            return None
        if not self._begins(kind, value, value > limit > 0):
            return None
        diameter = kind == "diameter"
        name = "D(S)" if diameter else "The panel's Hilbert RMS"
        pair, text = record.pair, record.pair_text
        if not diameter:
            pair, text = record.perturbation_pair, record.perturbation_pair_text
        elif record.stored_pair not in (None, record.pair):
            pair, text = record.stored_pair, None
        factor = value / expected
        return _alert(
            record,
            kind,
            value,
            expected,
            f"{name} = {value:.3g}, {factor:.3g} times the {expected:.3g} of the last {len(history.logs)} measured,"
            f" between {_tokens(pair, text)}: {self._advice(record, lr)}",
            pair,
            text,
        )

    def _advice(self, record: StepRecord, usual: float) -> str:
        if record.learning_rate and record.learning_rate > usual:
            return f"the learning rate jumped from {self._rates[-1][1]:.3g} to {record.learning_rate:.3g}, look at it"
        if record.pair and record.gradient_row_token in record.pair:
            return "the head's gradient is largest at one of them, look at how they occur in the batch of this step"
        return "look at the batch of this step, and at how long these tokens had not occurred"

    def _usual_rate(self, step: int, lr: float) -> float:
        """The learning rate; if it has jumped, the one that the last two steps led to expect."""
        if len(self._rates) < 2:
            return lr
        (before, first), (last, second) = self._rates
        ahead = second + abs(second - first) * (step - last) / (last - before)  # a schedule may turn
        return ahead if second > 0 and lr > self.rules.jump * ahead else lr

    def _begins(self, kind: Kind, value: float, is_blow_up: bool) -> bool:
        """Whether a blow-up of this kind begins here, or has doubled; one that lasts is reported once."""
        lasting = self._lasting.get(kind)
        if not is_blow_up:
            if lasting is not None:
                lasting.calm += 1
                if lasting.calm >= self.rules.calm:
                    del self._lasting[kind]
            return False
        new = lasting is None or value > 2 * lasting.reported
        lasting = self._lasting.setdefault(kind, BlowUp(value))
        lasting.reported = value if new else lasting.reported
        lasting.calm, lasting.values = 0, lasting.values + 1
        return new

    def _is_usual(self, kind: Kind) -> bool:
        """Whether the value just judged belongs to the history: it is no blow-up, or one that has lasted long."""
        lasting = self._lasting.get(kind)
        return lasting is None or lasting.calm > 0 or lasting.values > self.rules.settled


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


def _exp(x: float) -> float:
    return math.exp(min(x, 700.0))


def judged_diameter(record: StepRecord) -> float | None:
    """The diameter that a blow-up is looked for in, or its lower bound: that of the step that was stored."""
    stored = record.stored_diameter_lower if record.stored_diameter is None else record.stored_diameter
    return _intended_diameter(record) if stored is None else stored


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
) -> Alert:
    return Alert(
        step=record.step,
        time=record.time,
        kind=kind,
        value=value,
        expected=expected,
        pair=pair or record.pair,
        pair_text=text or record.pair_text,
        message=message,
    )


def _tokens(pair: tuple[int, int] | None, text: tuple[str, str] | None, number: int = 2) -> str:
    if pair is None:
        return "tokens that are not known"
    texts = text or ("", "")
    names = [
        f"{token} {token_text!r}" if token_text else str(token) for token, token_text in zip(pair, texts, strict=True)
    ]
    return f"token {names[0]}" if number == 1 else f"tokens {names[0]} and {names[1]}"

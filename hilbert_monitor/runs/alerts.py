"""Blow-up rules: records in, alerts out, nothing else. Whoever replays a log gets the alerts of the run.

Against theory: an increment with a nan or an infinity; a D(S) that is larger than its optimizer can make. Against the
run's own history: D(S) and the perturbation of the panel grow with the learning rate, so what has a history is their
ratio to it, in logarithms. A step is a blow-up if its ratio is far above the median of the last ones, both as a factor
and by their own spread. A learning rate that jumps is not divided out: the ratio is to the one that the last two steps
led to expect, if that is less.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from statistics import median
from typing import Literal

from msgspec import Struct

from .record import Alert, StepRecord

Kind = Literal["nonfinite", "ceiling", "diameter", "perturbation"]

_NORMAL = 1.4826  # standard deviations to a median absolute deviation, of a normal distribution


class Rules(Struct, frozen=True, kw_only=True):
    """What counts as a blow-up."""

    window: int = 100
    """Measured values that make the history."""
    diameter_quiet: int = 20
    perturbation_quiet: int = 5
    """Measured values before their rule says anything."""
    diameter_factor: float = 1.65
    perturbation_factor: float = 2.0
    """Never an alert below this factor over the median."""
    deviations: float = 5.0
    """Nor below so many robust standard deviations of the logarithm."""
    certain: float = 2.5
    """Always an alert above this factor over the median, however wide the spread."""
    ceiling_factor: float = 1.01
    jump: float = 1.1
    """Factor over what the last two steps led to expect from which a learning rate has jumped."""
    calm: int = 5
    """Values without an alert that end a blow-up; while it lasts only one twice as large is reported again."""


class History:
    """The last values of something that grows with the learning rate."""

    def __init__(self, rules: Rules, quiet: int, factor: float) -> None:
        self.quiet, self.factor, self.deviations, self.certain = quiet, factor, rules.deviations, rules.certain
        self.logs: deque[float] = deque(maxlen=rules.window)

    def add(self, value: float, lr: float) -> None:
        """Note a value, unless it has no logarithm."""
        if value > 0 and lr > 0 and math.isfinite(value):
            self.logs.append(math.log(value / lr))

    def expected(self, lr: float) -> float | None:
        """The usual value at a learning rate; None before there is one."""
        return math.exp(median(self.logs)) * lr if self.logs else None

    def limit(self, lr: float) -> float | None:
        """The largest value that is no blow-up; None as long as there is too little history."""
        if len(self.logs) < self.quiet:
            return None
        middle = median(self.logs)
        spread = _NORMAL * median(abs(x - middle) for x in self.logs)
        room = min(max(self.factor, math.exp(self.deviations * spread)), self.certain)
        return math.exp(middle) * room * lr


class Judge:
    """Applies the rules to the records of one run, in their order.

    Args:
        rules: what counts as a blow-up.
    """

    def __init__(self, rules: Rules | None = None) -> None:
        self.rules = rules = rules or Rules()
        self.diameter = History(rules, rules.diameter_quiet, rules.diameter_factor)
        self.perturbation = History(rules, rules.perturbation_quiet, rules.perturbation_factor)
        self._rates: deque[tuple[int, float]] = deque(maxlen=2)
        self._lasting: dict[str, tuple[float, int]] = {}  # value of the last alert of a kind, calm values since

    def limit(self, step: int, lr: float) -> float | None:
        """The largest D(S) of that step that is no blow-up; None where nothing can be said."""
        return self.diameter.limit(self._usual_rate(step, lr)) if lr > 0 else None

    def judge(self, record: StepRecord) -> list[Alert]:
        """Return the alerts of a record, and make it part of the history."""
        lr, value = record.learning_rate, _diameter(record)
        if record.skipped or lr is None:
            return []
        found = [*self._nonfinite(record), *self._ceiling(record, value), *self._blow_ups(record, lr, value)]
        if value is not None:
            self.diameter.add(value, lr)
        if record.perturbation_rms is not None:
            self.perturbation.add(record.perturbation_rms, lr)
        if not self._rates or record.step > self._rates[-1][0]:
            self._rates.append((record.step, lr))
        return found

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

    def _ceiling(self, record: StepRecord, value: float | None) -> Iterator[Alert]:
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
        limit, expected = history.limit(lr), history.expected(lr)
        if limit is None or expected is None or not math.isfinite(value):
            return None
        if not self._begins(kind, value, value > limit > 0):
            return None
        diameter = kind == "diameter"
        name = "D(S)" if diameter else "The panel's Hilbert RMS"
        pair, text = (
            (record.pair, record.pair_text) if diameter else (record.perturbation_pair, record.perturbation_pair_text)
        )
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
        """The learning rate, or if it has jumped the one that the last two steps led to expect."""
        if len(self._rates) < 2:
            return lr
        (before, first), (last, second) = self._rates
        ahead = second + max(second - first, 0.0) * (step - last) / (last - before)
        return ahead if second > 0 and lr > self.rules.jump * ahead else lr

    def _begins(self, kind: Kind, value: float, is_one: bool) -> bool:
        """Whether a blow-up of this kind begins here, or has doubled; a lasting one is reported once."""
        reported, calm = self._lasting.get(kind, (math.inf, 0))
        if is_one:
            new = kind not in self._lasting or value > 2 * reported
            self._lasting[kind] = (value if new else reported, 0)
            return new
        if kind in self._lasting:
            self._lasting[kind] = (reported, calm + 1)
            if calm + 1 >= self.rules.calm:
                del self._lasting[kind]
        return False


def alerts_of(records: Iterable[StepRecord], rules: Rules | None = None) -> Iterator[Alert]:
    """Return the alerts that a run of these records gives."""
    judge = Judge(rules)
    for record in records:
        yield from judge.judge(record)


def _diameter(record: StepRecord) -> float | None:
    """D(S), or the length of the longest pair that is known."""
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
    named = [f"{token} {said!r}" if said else str(token) for token, said in zip(pair, texts, strict=True)]
    return f"token {named[0]}" if number == 1 else f"tokens {named[0]} and {named[1]}"

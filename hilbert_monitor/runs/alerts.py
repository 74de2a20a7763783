"""Blow-up rules: records in, alerts out, nothing else. Whoever replays a log gets the alerts of the run.

Against theory: an increment with a nan or an infinity; a D(S) that is larger than its optimizer can make. Against the
run's own history: D(S) and the perturbation of the panel grow with the learning rate, so what has a history is their
ratio to it. A step is a blow-up if its ratio is far above all but two of the last ones: a run that has bursts by
itself, as AdamW's have when rare tokens return, is allowed what it has shown. A blow-up is not part of the history,
unless it has lasted for so long that it is the new usual. A learning rate that jumps is not divided out: the ratio is
then to the one that the last two steps led to expect, and the limit is nearer.

Tried and dropped: a factor and a number of robust standard deviations over the median. The logarithm of AdamW's ratio
has a tail that its spread does not show: with 5 deviations and a factor of 1.65 there were three false alarms in 5,000
clean steps, and to have none took a limit that missed what tripled.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import nlargest
from statistics import median
from typing import Any, Literal, get_args

from .record import Alert, StepRecord

Kind = Literal["nonfinite", "ceiling", "diameter", "perturbation"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""The rules, by what they look at: rows that are not finite, D(S) against its ceiling, D(S) and the perturbation of the
panel against their history."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """What counts as a blow-up."""

    window: int = 200
    """Measured values that make the history."""
    diameter_quiet: int = 20
    perturbation_quiet: int = 5
    """Measured values before their rule says anything."""
    diameter_factor: float = 1.75
    perturbation_factor: float = 2.0
    """No alert up to this factor over the third largest of the history."""
    jump: float = 1.1
    """Factor over what the last two steps led to expect from which a learning rate has jumped. Infinite for a schedule
    with restarts, which jump on purpose."""
    jump_factor: float = 1.65
    """No alert up to this factor over the median of the history, where the learning rate has jumped."""
    ceiling_factor: float = 1.01
    calm: int = 5
    """Values without an alert that end a blow-up; while it lasts only one twice as large is reported again."""
    settled: int = 50
    """Values after which a blow-up that lasts is the new usual."""


class History:
    """The last values of something that grows with the learning rate, as logarithms of its ratio to that.

    Args:
        window: values that are kept.
        quiet: values before there is a limit.
        factor: over the third largest.
        jump_factor: over the median.
    """

    def __init__(self, window: int, quiet: int, factor: float, jump_factor: float) -> None:
        self.quiet, self.room, self.jump_room = quiet, math.log(factor), math.log(jump_factor)
        self.logs: deque[float] = deque(maxlen=window)

    def add(self, value: float, lr: float) -> None:
        """Note a value, unless it has no logarithm."""
        if value > 0 and lr > 0 and math.isfinite(value / lr):
            self.logs.append(math.log(value) - math.log(lr))

    def expected(self, lr: float) -> float | None:
        """The usual value at a learning rate; None before there is one."""
        return _exp(median(self.logs)) * lr if self.logs else None

    def limit(self, lr: float, *, jumped: bool = False) -> float | None:
        """The largest value that is no blow-up; None as long as there is too little history."""
        if len(self.logs) < self.quiet:
            return None
        if jumped:
            return _exp(median(self.logs) + self.jump_room) * lr
        return _exp(nlargest(3, self.logs)[-1] + self.room) * lr


@dataclass(slots=True)
class BlowUp:
    """One that lasts."""

    reported: float
    """Value of its last alert."""
    calm: int = 0
    """Values since that are none."""
    values: int = 0
    """Values that are one."""


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
        """The largest D(S) of that step that is no blow-up; None where nothing can be said."""
        usual = self._usual_rate(step, lr)
        return self.diameter.limit(usual, jumped=usual < lr) if lr > 0 else None

    def state(self) -> dict[str, Any]:
        """The history in plain types, for a checkpoint."""
        return {
            "diameter": list(self.diameter.logs),
            "perturbation": list(self.perturbation.logs),
            "rates": [list(rate) for rate in self._rates],
            "lasting": {kind: [one.reported, one.calm, one.values] for kind, one in self._lasting.items()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on with a history."""
        diameter, perturbation = ([float(x) for x in state[name]] for name in ("diameter", "perturbation"))
        rates = [(int(step), float(lr)) for step, lr in state["rates"]]
        lasting = {kind: BlowUp(*values) for kind, values in state["lasting"].items()}
        self.diameter.logs.extend(diameter)
        self.perturbation.logs.extend(perturbation)
        self._rates.extend(rates)
        self._lasting.update(lasting)

    def judge(self, record: StepRecord) -> list[Alert]:
        """Return the alerts of a record, and make it part of the history."""
        lr, value = record.learning_rate, _diameter(record)
        if record.skipped:
            return []
        found = list(self._nonfinite(record))
        if lr is None:
            return found
        found += [*self._ceiling(record, value), *self._blow_ups(record, lr, value)]
        if value is not None and self._is_usual("diameter"):
            self.diameter.add(value, lr)
        if record.perturbation_rms is not None and self._is_usual("perturbation"):
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
        jumped = record.learning_rate is not None and lr < record.learning_rate
        limit, expected = history.limit(lr, jumped=jumped), history.expected(lr)
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
        ahead = second + abs(second - first) * (step - last) / (last - before)  # a schedule may turn
        return ahead if second > 0 and lr > self.rules.jump * ahead else lr

    def _begins(self, kind: Kind, value: float, is_one: bool) -> bool:
        """Whether a blow-up of this kind begins here, or has doubled; a lasting one is reported once."""
        lasting = self._lasting.get(kind)
        if not is_one:
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
        """Whether the value just judged is part of the history: no blow-up, or one that has lasted for long."""
        lasting = self._lasting.get(kind)
        return lasting is None or lasting.calm > 0 or lasting.values > self.rules.settled


def alerts_of(records: Iterable[StepRecord], rules: Rules | None = None) -> Iterator[Alert]:
    """Return the alerts that a run of these records gives."""
    judge = Judge(rules)
    for record in records:
        yield from judge.judge(record)


def _exp(x: float) -> float:
    return math.exp(min(x, 700.0))


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

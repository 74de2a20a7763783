"""The blow-up rules: records in, alerts out, nothing else. Replaying a log gives the alerts of the run again.

An alert is a page or a notice. Pages need somebody now:

- nonfinite: a step or a loss that is not finite;
- ceiling: D(S) above what its optimizer can make, by a theorem;
- rate: a learning rate 1.5 times what its schedule led to expect;
- diameter: one D(S) per learning rate at least three times its usual level and beyond this run's own bursts.

All that is slower or smaller is a notice: level and trend of D(S), the perturbation of the panel (the fixed set of
validation positions), what its logits lose in the run's precision, and the layers. `Baseline` learns what is usual.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import msgspec

from .baseline import Baseline, Event, Learner, LearningRates
from .record import Alert, LayerRecord, Pair, StepRecord

Kind = Literal["nonfinite", "ceiling", "rate", "diameter", "perturbation", "precision", "layer"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""Kinds of alerts: the quantity that the rule judges."""
Severity = Literal["page", "notice"]
SEVERITIES: dict[Kind, tuple[Severity, ...]] = dict.fromkeys(KINDS, ("notice",))
SEVERITIES |= {"nonfinite": ("page",), "ceiling": ("page",), "rate": ("page",), "diameter": ("page", "notice")}
"""The severities that alerts of each kind can have."""

CEILING_FACTOR, CALM = 1.01, 5
"""D(S) may exceed its ceiling by this factor, for rounding. So many normal values in a row end a blow-up; while it
lasts, only a value twice as large is reported again."""
PANEL: dict[str, Any] = {"share": 0.01, "min_history": 8, "floor": math.log(3)}
BASELINES: dict[Kind, dict[str, Any]] = {"diameter": {"share": 0.4}, "perturbation": PANEL, "precision": PANEL}
LAYERS: dict[str, Any] = {"share": 0.01, "floor": math.log(4)}
"""What is compared with its history. Shares of the panel and of all layers together are small: they have hundreds of
values, too few to know a heavy tail, and then give many times their share of false alarms."""

ADVICE = {
    "nonfinite": "look at the batch, the loss scale and the gradient norm of this step, and go back to the last"
    " checkpoint before it",
    "ceiling": "look for other code that writes to the head, its gradients in place or the optimizer's state",
    "rate": "check the schedule and the settings of this run",
    "layer": "look at the gradient of this layer, and at what feeds it",
    "precision": "the logits have outgrown their precision, look at log Z and the mean logit, and consider logits in"
    " fp32, a z-loss or a soft cap",
    "trend": "steps have grown against the learning rate, lower it, or go back and look at loss and data",
    "level": "look at what changed in the run or its data some steps ago",
    "gradient": "the head's gradient is largest at one of them, look at how they occur in the batch of this step",
    "step": "look at the batch of this step, and at how long these tokens had not occurred",
}
"""What to look at, by the kind of an alert or its pattern."""

Texts = tuple[str, str] | None


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Settings of the blow-up rules: limits, windows and schedules are learned from the run."""

    false_alarms_per_10k: float = 1.0
    """False notices allowed in 10,000 steps of a run, of all series together. Pages do not depend on it."""

    def __post_init__(self) -> None:
        dial = self.false_alarms_per_10k
        if not isinstance(dial, int | float) or not 1e-3 <= dial <= 100:
            raise ValueError(f"false_alarms_per_10k is a number from 0.001 to 100, got {dial!r}: 1 is usual")


class Judge(Learner):
    """Applies the rules to the records of one run, in their order."""

    def __init__(self, rules: Rules | None = None) -> None:
        self._rules = rules or Rules()
        self.rates = LearningRates()
        self.baselines = {kind: Baseline(**settings) for kind, settings in BASELINES.items()}
        self.bounds_ratio = 0.0  # usual logarithm of the upper bound of D(S) over the lower
        self.lasting: dict[str, list[float]] = {}  # value of its last alert, and normal values since

    def judge(self, record: StepRecord) -> list[Alert]:
        """Return the alerts of a record, and add it to the history."""
        alerts = list(self._nonfinite(record))
        if record.skipped:
            return alerts
        alerts += self._against_history("precision", record, record.precision_loss_rms, 1.0)  # it knows no rate
        lr = record.learning_rate
        if lr is None:
            return alerts
        alerts += self._ceiling(record)
        expected = self.rates.expected_rate(record.step, lr, scheduled=record.scheduled)
        alerts += self._rate(record, lr, expected)
        if 0 < lr <= expected:
            diameter, exact = judged_diameter(record)
            alerts += self._against_history("diameter", record, diameter, lr, exact=exact)
            alerts += self._against_history("perturbation", record, record.perturbation_rms, lr)
        self._learn_bounds_ratio(record)
        self.rates.add(record.step, lr, alerted=lr > expected)
        return alerts

    def limit(self, step: int, lr: float, *, scheduled: bool | None = None) -> float | None:
        """Return the largest D(S) of a step that raises no alert; None while there is too little history."""
        if not 0 < lr < math.inf:
            return None
        if self.rates.expected_rate(step, lr, scheduled=scheduled) < lr:
            return 0.0
        baseline = self.baselines["diameter"]
        limits = [value for value, *_ in baseline.limits(self._rules.false_alarms_per_10k)]
        return _exp(min(limits) + baseline.offset) * lr if limits else None

    def suspects(self, step: int, lr: float, lower: float, upper: float, *, scheduled: bool | None = None) -> bool:
        """Return True if the exact D(S) of a step is needed, as its bounds are higher than usual ones may be."""
        limit = self.limit(step, lr, scheduled=scheduled)
        if limit is None:
            return False
        offset = self.baselines["diameter"].offset
        return lower > limit * _exp(-offset) or upper > limit * _exp(max(0.0, self.bounds_ratio - offset))

    def _begins(self, name: str, value: float, is_blow_up: bool) -> bool:
        """Return True if a blow-up begins here, or has doubled; one that lasts is reported once."""
        reported, calm = self.lasting.get(name, (0.0, 0.0))
        if not is_blow_up:
            self.lasting.pop(name, None)
            if reported and calm + 1 < CALM:
                self.lasting[name] = [reported, calm + 1]
            return False
        value = value if math.isfinite(value) else sys.float_info.max  # nothing doubles it, and JSON can hold it
        is_new = not reported or value > 2 * reported
        self.lasting[name] = [value if is_new else reported, 0]
        return is_new

    def _nonfinite(self, record: StepRecord) -> Iterator[Alert]:
        loss = record.train_loss if record.train_loss is None or not math.isfinite(record.train_loss) else None
        measured = None if record.skipped else record.nonfinite_rows
        if measured is None and loss is None:
            return
        rows = measured or 0
        if self._begins("nonfinite", max(rows, 1), rows > 0 or loss is not None):
            what = [] if loss is None else [f"the training loss is {loss}"]
            if rows:
                which = f", that of {tokens(record.pair, record.pair_text, 'nonfinite')}" if record.pair else ""
                are = "rows of the increment are" if rows > 1 else "row of the increment is"
                what += [f"{rows:,} {are} not finite{which}{' first' if which and rows > 1 else ''}"]
            message = f"{' and '.join(what)}: {ADVICE['nonfinite']}"
            pair, text = (record.pair, record.pair_text) if rows else (None, None)
            yield _alert(record, "nonfinite", float(rows), 0.0, message, pair=pair, pair_text=text)

    def _ceiling(self, record: StepRecord) -> Iterator[Alert]:
        value, ceiling = _intended_diameter(record), record.ceiling  # a theorem is about no rounding
        if value is not None and ceiling and self._begins("ceiling", value, value > ceiling * CEILING_FACTOR):
            what = (
                f"D(S) = {value:.3g} is more than the {ceiling:.3g} that this optimizer can make at its learning rate"
            )
            message = f"{what}, between {tokens(record.pair, record.pair_text)}: {ADVICE['ceiling']}"
            yield _alert(record, "ceiling", value, ceiling, message, pair=record.pair, pair_text=record.pair_text)

    def _rate(self, record: StepRecord, lr: float, expected: float) -> Iterator[Alert]:
        if self._begins("rate", lr, lr > expected):
            what = (
                f"the learning rate is {lr:.3g}, {lr / expected:.3g} times the {expected:.3g} that earlier ones led to"
            )
            yield _alert(record, "rate", lr, expected, f"{what} expect: {ADVICE['rate']}")

    def _against_history(
        self, kind: Kind, record: StepRecord, value: float | None, lr: float, *, exact: bool = False
    ) -> Iterator[Alert]:
        """Compare a value with its history, and add it."""
        if value is None or not 0 < value / lr < math.inf:
            return
        baseline, x = self.baselines[kind], math.log(value) - math.log(lr)
        event = baseline.event(x, self._rules.false_alarms_per_10k, exact=exact)
        is_page = event is not None and event.is_page and kind == "diameter"
        pages = self._begins(f"{kind} page", value, is_page)
        notices = self._begins(f"{kind} notice", value, event is not None)
        if event is not None and (pages if is_page else notices):
            usual = _exp(event.usual + (baseline.offset if exact else 0.0)) * lr
            yield _history_alert(record, kind, "page" if is_page else "notice", value, usual, event)
        baseline.add(record.step, x, event, exact=exact)

    def _learn_bounds_ratio(self, record: StepRecord) -> None:
        lower, upper = record.diameter_lower, record.diameter_upper
        if record.diameter is None and lower and upper and math.isfinite(upper) and upper >= lower > 0:
            ratio = math.log(upper) - math.log(lower)
            self.bounds_ratio += (ratio - self.bounds_ratio) * (0.05 if self.bounds_ratio else 1.0)


class LayerJudge(Learner):
    """Applies the rule for layers to one run, in the order of its steps. Its alerts are notices.

    A value is the logarithm of a layer's relative step over its learning rate. A blow-up begins with the first layer
    that is far above its own history, and lasts until no layer has been for some measurements. All share the dial.
    """

    def __init__(self, rules: Rules | None = None) -> None:
        self._rules = rules or Rules()
        self.baselines: dict[str, Baseline] = {}
        self.calm = CALM

    def judge(self, record: LayerRecord) -> list[Alert]:
        """Return the alert of a record, if there is one, and add it to the history."""
        dial, events = self._rules.false_alarms_per_10k / max(1, len(record.layers)), dict[str, Event]()
        for name, layer in record.layers.items():
            value = layer.relative / layer.lr if layer.lr else layer.relative
            if 0 < value < math.inf:
                baseline = self.baselines.setdefault(name, Baseline(**LAYERS))
                event = baseline.event(math.log(value), dial)
                if event is not None:
                    events[name] = event
                baseline.add(record.step, math.log(value), event)
        begins = bool(events) and self.calm >= CALM
        self.calm = 0 if events else self.calm + 1
        if not begins:
            return []
        name = max(events, key=lambda name: events[name].height)  # the layer that is furthest above its history
        event, layer, others = events[name], record.layers[name], len(events) - 1
        usual = _exp(event.usual) * (layer.lr or 1.0)
        message = (
            f"{name} moved first: its step is {layer.relative:.3g} of its weight, {layer.relative / usual:.3g} times"
            f" the usual at its learning rate, and {others or 'no'} other layer{'s' * (others > 1)} with it:"
            f" {ADVICE['layer']}"
        )
        how: dict[str, Any] = {"pattern": event.pattern, "rarity": event.rarity, "message": message}
        return [Alert(step=record.step, time=record.time, kind="layer", value=layer.relative, expected=usual, **how)]

    def restore(self, state: dict[str, Any]) -> None:
        """Take over the history that `state` returned."""
        for name in state.get("baselines", ()):
            self.baselines[name] = Baseline(**LAYERS)
        super().restore(state)


def alerts_of(records: Iterable[StepRecord], rules: Rules | None = None) -> Iterator[Alert]:
    """Yield the alerts of a run with these records."""
    judge = Judge(rules)
    for record in records:
        yield from judge.judge(record)


def judged_diameter(record: StepRecord) -> tuple[float | None, bool]:
    """Return the diameter of the stored step, or of the change with unknown decay, and whether it is exact."""
    if record.decay == "unknown":
        return record.change_diameter, True
    if record.stored_diameter is not None or record.stored_diameter_lower is not None:
        exact = record.stored_diameter is not None
        return record.stored_diameter if exact else record.stored_diameter_lower, exact
    return _intended_diameter(record), record.diameter is not None


def _intended_diameter(record: StepRecord) -> float | None:
    """Return D(S), or its lower bound where it was not computed."""
    return record.diameter_lower if record.diameter is None else record.diameter


def _exp(x: float) -> float:
    return math.exp(min(x, 700.0))


def with_texts(alert: Alert, texts: tuple[str, str]) -> Alert:
    """Return an alert about tokens whose texts were not known, with the texts in it and in its message."""
    without, named = (tokens(alert.pair, known, alert.kind) for known in (None, texts))
    message = alert.message.replace(without, named, 1)
    return msgspec.structs.replace(alert, pair_text=texts, message=message)


def with_samples(alert: Alert, samples: tuple[int, ...]) -> Alert:
    """Return an alert with the samples of its step, in it and in its message."""
    message = alert.message.removesuffix(_batch(alert.batch, alert.samples)) + _batch(alert.batch, samples)
    return msgspec.structs.replace(alert, samples=samples, message=message)


def tokens(pair: Pair | None, text: Texts, kind: str = "") -> str:
    """Name a pair of tokens. That of a row that is not finite is (0, row), or (0, 1) for row 0."""
    if pair is None:
        return "unknown tokens"
    first, second = (f"{t} {name!r}" if name else f"{t}" for t, name in zip(pair, text or ("", ""), strict=True))
    if kind != "nonfinite":
        return f"tokens {first} and {second}"
    return f"token {second}" if pair[1] > 1 else f"token {first} or {second}"


def _history_alert(
    record: StepRecord, kind: Kind, severity: Severity, value: float, usual: float, event: Event
) -> Alert:
    """Make the alert of a value that is above its history."""
    name, pair, text = "D(S)", record.pair, record.pair_text
    if kind == "precision":
        name, pair, text = "The panel's precision loss", None, None
    elif kind == "perturbation":
        name, pair, text = "The panel's Hilbert RMS", record.perturbation_pair, record.perturbation_pair_text
    elif record.decay == "unknown":
        name = "The diameter of the weights' change with its unknown decay"
    elif record.stored_pair not in (None, record.pair):
        pair, text = record.stored_pair, None
    since = {"level": ", and high for some steps", "trend": " of some hundred measured steps ago"}.get(
        event.pattern, ""
    )
    message = f"{name} = {value:.3g}, {value / max(usual, math.ulp(0.0)):.3g} times the usual {usual:.3g}{since}"
    if event.rarity is not None:
        digits = 10 ** max(0, math.floor(math.log10(max(event.rarity, 1.0))))
        once = f"once in {round(event.rarity / digits) * digits:,}" if event.rarity < 1e9 else "not once in a billion"
        message += f", seen {once} steps"
    message += ", more than this run has shown before" if severity == "page" else ""
    message += "" if kind == "precision" else f", between {tokens(pair, text)}"
    is_largest = event.pattern == "step" and bool(pair) and record.gradient_row_token in (pair or ())
    message += f": {ADVICE['precision' if kind == 'precision' else 'gradient' if is_largest else event.pattern]}"
    how = {"pair": pair, "pair_text": text, "severity": severity, "pattern": event.pattern, "rarity": event.rarity}
    return _alert(record, kind, value, usual, message, **how)


def _batch(batch: int | None, samples: tuple[int, ...] | None) -> str:
    """Name the batch, for the end of a message."""
    if batch is None and not samples:
        return ""
    which = "a batch" if batch is None else f"batch {batch} of its epoch"
    some = f", with samples {', '.join(map(str, samples[:5]))}" if samples else ""
    return f"; it was {which}{some}" + (f" and {len(samples) - 5} more" if samples and len(samples) > 5 else "")


def _alert(record: StepRecord, kind: Kind, value: float, expected: float, message: str, **how: Any) -> Alert:
    """Make the alert of a step, a page; the message ends with its batch, and whether a TrustRegion held the step."""
    if record.held_rows and record.trust_limit is not None:
        message += f"; it was held to {record.trust_limit:.3g}, in {record.held_rows:,} rows"
    message += _batch(record.batch, record.samples)
    how = {"severity": "page", "batch": record.batch, "samples": record.samples, **how}
    return Alert(step=record.step, time=record.time, kind=kind, value=value, expected=expected, message=message, **how)

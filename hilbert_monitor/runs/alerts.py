"""The blow-up rules: records in, alerts out, nothing else. Replaying a log gives the alerts of the run again.

An alert is a page or a notice. Pages need somebody now:

- nonfinite: a step or a loss that is not finite;
- ceiling: D(S) above what its optimizer can make, by a theorem;
- rate: a learning rate 1.5 times what its schedule led to expect;
- diameter: one D(S) per learning rate at least three times its usual level and beyond this run's own bursts.

All that is slower or smaller is a notice: the level and the trend of D(S), the perturbation of the panel (the fixed
set of validation positions), what its logits lose in the run's precision, and the layers. `Baseline` learns the usual
level of each. `Rules` limits the false notices; false pages are rarer by a factor of a hundred.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, get_args

import msgspec

from .baseline import Baseline, Event, LearningRates
from .record import Alert, LayerRecord, Pair, StepRecord

Kind = Literal["nonfinite", "ceiling", "rate", "diameter", "perturbation", "precision", "layer"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""Kinds of alerts: the quantity that the rule judges."""
Severity = Literal["page", "notice"]
SEVERITIES: dict[Kind, tuple[Severity, ...]] = {
    **dict.fromkeys(KINDS[:3], ("page",)),
    "diameter": ("page", "notice"),
    **dict.fromkeys(KINDS[4:], ("notice",)),
}
"""The severities that alerts of each kind can have."""

CEILING_FACTOR = 1.01
"""D(S) may exceed its ceiling by this factor, for rounding."""
CALM = 5
"""Normal values in a row that end a blow-up. While it lasts, only a value twice as large is reported again."""
LEAST_LAYER, LAYER_SHARE = math.log(4), 0.03
"""A layer's step is an event from this factor over the usual on; share of all layers in the false alarms allowed."""
LONGEST_GAP = 20
"""Steps between two values that count, at most: a value has the false alarms of the steps since the last one."""

Texts = tuple[str, str] | None


@dataclass(frozen=True, kw_only=True, init=False)
class Rules:
    """Settings of the blow-up rules.

    Args:
        false_alarms_per_10k: false notices allowed in 10,000 steps of a run, of all series together. With fewer, a
            blow-up has to be larger. Pages do not depend on it.
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


class Series:
    """A quantity that is compared with its history.

    Args:
        kind: of its alerts.
        name: in their messages.
        baseline: learns its usual level and noise.
        share: of the false alarms that are allowed. The shares sum to less than one: tails of real runs are heavier
            than a few hundred values show.
    """

    def __init__(self, kind: Kind, name: str, baseline: Baseline, share: float) -> None:
        self.kind, self.name, self.baseline, self.share = kind, name, baseline, share
        self.steps: deque[int] = deque(maxlen=4)
        """Steps of its last values."""

    @property
    def gap(self) -> int:
        """Steps between two values."""
        return min((after - before for before, after in pairwise(self.steps)), default=1)

    def probability(self, rules: Rules) -> float:
        """Return the probability of a false alarm that one value may have."""
        return rules.false_alarms_per_10k / 1e4 * self.share * min(self.gap, LONGEST_GAP)

    def add(self, step: int, x: float, event: Event | None, *, exact: bool = False) -> None:
        """Learn from the value of a step."""
        if not self.steps or step > self.steps[-1]:
            self.steps.append(step)
        self.baseline.add(x, exact=exact, pattern="" if event is None else event.pattern)

    def state(self) -> dict[str, Any]:
        """Return the history in plain types."""
        return {"baseline": self.baseline.state(), "steps": list(self.steps)}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over the history that `state` returned."""
        self.baseline.restore(state["baseline"])
        self.steps.extend(int(step) for step in state["steps"])


class Judge:
    """Applies the rules to the records of one run, in their order.

    Args:
        rules: settings.
    """

    def __init__(self, rules: Rules | None = None) -> None:
        self.rules = rules or Rules()
        self.rates = LearningRates()
        self.diameter = Series("diameter", "D(S)", Baseline(), 0.4)
        self.perturbation = Series(
            "perturbation", "The panel's Hilbert RMS", Baseline(min_history=8, floor=math.log(3)), 0.05
        )
        self.precision = Series(
            "precision", "The panel's precision loss", Baseline(min_history=8, floor=math.log(3)), 0.05
        )
        self._bounds_ratio = 0.0  # usual logarithm of the upper bound of D(S) over the lower
        self._lasting: dict[str, list[float]] = {}  # value of its last alert, and normal values since

    def judge(self, record: StepRecord) -> list[Alert]:
        """Return the alerts of a record, and add it to the history."""
        alerts = list(self._nonfinite(record))
        if record.skipped:
            return alerts
        x = record.precision_loss_rms  # it knows no learning rate
        if x is not None and 0 < x < math.inf:
            alerts += self._against_history(self.precision, record, x, 1.0)
        lr = record.learning_rate
        if lr is None:
            return alerts
        alerts += self._ceiling(record)
        expected = self.rates.expected_rate(record.step, lr, scheduled=record.scheduled)
        alerts += self._rate(record, lr, expected)
        if 0 < lr <= expected:
            diameter, exact = judged_diameter(record)
            for series, value in ((self.diameter, diameter), (self.perturbation, record.perturbation_rms)):
                if value is not None and value > 0 and math.isfinite(value / lr):
                    alerts += self._against_history(series, record, value, lr, exact=exact and series is self.diameter)
        self._learn_bounds_ratio(record)
        self.rates.add(record.step, lr, alerted=lr > expected)
        return alerts

    def limit(self, step: int, lr: float, *, scheduled: bool | None = None) -> float | None:
        """Return the largest D(S) of a step that raises no alert; None while there is too little history.

        Args:
            step: its number.
            lr: its learning rate.
            scheduled: whether the run's scheduler set it, if that is known.
        """
        if not 0 < lr < math.inf:
            return None
        if self.rates.expected_rate(step, lr, scheduled=scheduled) < lr:
            return 0.0
        baseline = self.diameter.baseline
        limits = [limit.value for limit in baseline.limits(self.diameter.probability(self.rules))]
        return _exp(min(limits) + baseline.offset) * lr if limits else None

    def suspects(self, step: int, lr: float, lower: float, upper: float, *, scheduled: bool | None = None) -> bool:
        """Return True if the exact D(S) of a step is needed, as its bounds are higher than usual ones may be."""
        limit = self.limit(step, lr, scheduled=scheduled)
        if limit is None:
            return False
        offset = self.diameter.baseline.offset
        return lower > limit * _exp(-offset) or upper > limit * _exp(max(0.0, self._bounds_ratio - offset))

    def state(self) -> dict[str, Any]:
        """Return the history in plain types, for a checkpoint."""
        return {
            "baselines": {series.kind: series.state() for series in self._series},
            "rates": self.rates.state(),
            "bounds_ratio": self._bounds_ratio,
            "lasting": {kind: list(values) for kind, values in self._lasting.items()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take over the history that `state` returned. That of another version is left out: its contents differ."""
        if "baselines" not in state:
            return
        fresh = Judge(self.rules)
        for series in fresh._series:
            series.restore(state["baselines"][series.kind])
        fresh.rates.restore(state["rates"])
        fresh._bounds_ratio = float(state["bounds_ratio"])
        fresh._lasting = {kind: [float(value) for value in values] for kind, values in state["lasting"].items()}
        self.__dict__.update(fresh.__dict__)

    @property
    def _series(self) -> tuple[Series, ...]:
        return self.diameter, self.perturbation, self.precision

    def _begins(self, name: str, value: float, is_blow_up: bool) -> bool:
        """Return True if a blow-up begins here, or has doubled; one that lasts is reported once."""
        reported, calm = self._lasting.get(name, (0.0, 0.0))
        if not is_blow_up:
            self._lasting.pop(name, None)
            if reported and calm + 1 < CALM:
                self._lasting[name] = [reported, calm + 1]
            return False
        value = value if math.isfinite(value) else sys.float_info.max  # nothing doubles it, and JSON can hold it
        is_new = not reported or value > 2 * reported
        self._lasting[name] = [value if is_new else reported, 0]
        return is_new

    def _nonfinite(self, record: StepRecord) -> Iterator[Alert]:
        loss_is_bad = record.train_loss is not None and not math.isfinite(record.train_loss)
        if record.skipped and not loss_is_bad:
            return
        rows = 0 if record.skipped else record.nonfinite_rows
        if rows is None and not loss_is_bad:
            return
        rows = rows or 0
        if self._begins("nonfinite", max(rows, 1), rows > 0 or loss_is_bad):
            pair, text = (record.pair, record.pair_text) if rows else (None, None)
            message = _nonfinite_message(rows, record.train_loss if loss_is_bad else None, pair, text)
            yield _alert(record, "nonfinite", float(rows), 0.0, message, pair, text)

    def _ceiling(self, record: StepRecord) -> Iterator[Alert]:
        value = _intended_diameter(record)  # a theorem is about no rounding
        if value is None or not record.ceiling:
            return
        if self._begins("ceiling", value, value > record.ceiling * CEILING_FACTOR):
            message = (
                f"D(S) = {value:.3g} is more than the {record.ceiling:.3g} that this optimizer can make at its learning"
                f" rate, between {tokens(record.pair, record.pair_text)}: look for other code that writes to the head,"
                " its gradients in place or the optimizer's state"
            )
            yield _alert(record, "ceiling", value, record.ceiling, message, record.pair, record.pair_text)

    def _rate(self, record: StepRecord, lr: float, expected: float) -> Iterator[Alert]:
        if self._begins("rate", lr, lr > expected):
            message = (
                f"the learning rate is {lr:.3g}, {lr / expected:.3g} times the {expected:.3g} that earlier ones led to"
                " expect: check the schedule and the settings of this run"
            )
            yield _alert(record, "rate", lr, expected, message)

    def _against_history(
        self, series: Series, record: StepRecord, value: float, lr: float, *, exact: bool = False
    ) -> Iterator[Alert]:
        """Compare a value with its history, and add it."""
        baseline, x = series.baseline, math.log(value) - math.log(lr)
        event = baseline.event(x, series.probability(self.rules), exact=exact)
        is_page = event is not None and series.kind == "diameter" and baseline.is_page(x, exact=exact)
        begins = {
            severity: self._begins(f"{series.kind} {severity}", value, is_blow_up)
            for severity, is_blow_up in (("page", is_page), ("notice", event is not None))
        }
        if event is not None and begins["page" if is_page else "notice"]:
            yield self._history_alert(series, record, value, lr, event, "page" if is_page else "notice", exact=exact)
        series.add(record.step, x, event, exact=exact)

    def _history_alert(
        self, series: Series, record: StepRecord, value: float, lr: float, event: Event, severity: Severity, exact: bool
    ) -> Alert:
        usual = _exp(event.usual + (series.baseline.offset if exact else 0.0)) * lr
        rarity = _rarity(series.gap, event)
        message = _comparison(series.name, value, usual, event.pattern, rarity)
        message += ", more than this run has shown before" if severity == "page" else ""
        pair, text = {
            "diameter": judged_pair(record),
            "perturbation": (record.perturbation_pair, record.perturbation_pair_text),
        }.get(series.kind, (None, None))
        message += "" if series.kind == "precision" else f", between {tokens(pair, text)}"
        message += f": {_advice(series.kind, record, event.pattern, pair)}"
        return _alert(
            record,
            series.kind,
            value,
            usual,
            message,
            pair,
            text,
            severity=severity,
            pattern=event.pattern,
            rarity=rarity,
        )

    def _learn_bounds_ratio(self, record: StepRecord) -> None:
        lower, upper = record.diameter_lower, record.diameter_upper
        if record.diameter is None and lower and upper and math.isfinite(upper) and upper >= lower > 0:
            ratio = math.log(upper) - math.log(lower)
            self._bounds_ratio += (ratio - self._bounds_ratio) * (0.05 if self._bounds_ratio else 1.0)


class LayerJudge:
    """Applies the rule for layers to one run, in the order of its steps. Its alerts are notices.

    A value is the logarithm of a layer's relative step over its learning rate. A blow-up begins with the first layer
    that is far above its own history, and lasts until no layer has been for some measurements.

    Args:
        rules: the dial, which the layers share.
    """

    def __init__(self, rules: Rules | None = None) -> None:
        self.rules = rules or Rules()
        self._baselines: dict[str, Baseline] = {}
        self._last: int | None = None
        self._gap, self._calm = 10, CALM

    def judge(self, record: LayerRecord) -> list[Alert]:
        """Return the alert of a record, if there is one, and add it to the history."""
        if self._last is not None and record.step > self._last:
            self._gap = record.step - self._last
        self._last = record.step
        share = LAYER_SHARE * min(self._gap, LONGEST_GAP) / max(1, len(record.layers))
        probability = self.rules.false_alarms_per_10k / 1e4 * share
        events: dict[str, tuple[Event, float]] = {}
        for name, layer in record.layers.items():
            value = layer.relative / layer.lr if layer.lr else layer.relative
            if not 0 < value < math.inf:
                continue
            baseline = self._baselines.setdefault(name, Baseline(floor=LEAST_LAYER))
            event = baseline.event(math.log(value), probability)
            if event is not None:
                events[name] = event, value / _exp(event.usual)
            baseline.add(math.log(value), pattern="" if event is None else event.pattern)
        begins = bool(events) and self._calm >= CALM
        self._calm = 0 if events else self._calm + 1
        return [self._alert(record, events)] if begins else []

    def _alert(self, record: LayerRecord, events: dict[str, tuple[Event, float]]) -> Alert:
        """Name the layer that is furthest above its history."""
        name = max(events, key=lambda name: events[name][0].height)
        event, factor = events[name]
        layer, others = record.layers[name], len(events) - 1
        more = f", and {others or 'no'} other layer{'s' * (others > 1)} with it"
        return Alert(
            step=record.step,
            time=record.time,
            kind="layer",
            value=layer.relative,
            expected=layer.relative / factor,
            pattern=event.pattern,
            rarity=_rarity(self._gap, event),
            message=f"{name} moved first: its step is {layer.relative:.3g} of its weight, {factor:.3g} times the usual"
            f" at its learning rate{more}: look at the gradient of this layer, and at what feeds it",
        )

    def state(self) -> dict[str, Any]:
        """Return the history in plain types, for a checkpoint."""
        baselines = {name: baseline.state() for name, baseline in self._baselines.items()}
        return {"baselines": baselines, "last": self._last, "gap": self._gap, "calm": self._calm}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over the history that `state` returned. That of another version is left out."""
        if "baselines" not in state:
            return
        for name, saved in state["baselines"].items():
            self._baselines[name] = Baseline(floor=LEAST_LAYER)
            self._baselines[name].restore(saved)
        self._last, self._gap, self._calm = state["last"], int(state["gap"]), int(state["calm"])


def alerts_of(records: Iterable[StepRecord], rules: Rules | None = None) -> Iterator[Alert]:
    """Yield the alerts of a run with these records."""
    judge = Judge(rules)
    for record in records:
        yield from judge.judge(record)


def judged_diameter(record: StepRecord) -> tuple[float | None, bool]:
    """Return the diameter of the stored step, which history judges, and whether it is exact."""
    if record.stored_diameter is not None or record.stored_diameter_lower is not None:
        exact = record.stored_diameter is not None
        return record.stored_diameter if exact else record.stored_diameter_lower, exact
    return _intended_diameter(record), record.diameter is not None


def judged_pair(record: StepRecord) -> tuple[Pair | None, Texts]:
    """Return the tokens that attain the judged diameter, and their texts."""
    if record.stored_pair in (None, record.pair):
        return record.pair, record.pair_text
    return record.stored_pair, None


def _intended_diameter(record: StepRecord) -> float | None:
    """Return D(S), or its lower bound where it was not computed."""
    return record.diameter_lower if record.diameter is None else record.diameter


def _exp(x: float) -> float:
    return math.exp(min(x, 700.0))


def _rarity(gap: int, event: Event) -> float | None:
    """Return the steps among which one event as unlikely is expected."""
    return None if event.chance is None else min(gap / max(event.chance, 1e-12), 1e12)


# Messages


def with_texts(alert: Alert, texts: tuple[str, str]) -> Alert:
    """Return an alert about tokens whose texts were not known, with the texts in it and in its message."""
    name = _nonfinite_tokens if alert.kind == "nonfinite" else tokens
    message = alert.message.replace(name(alert.pair, None), name(alert.pair, texts), 1)
    return msgspec.structs.replace(alert, pair_text=texts, message=message)


def with_samples(alert: Alert, samples: tuple[int, ...]) -> Alert:
    """Return an alert with the samples of its step, in it and in its message."""
    message = alert.message.removesuffix(_batch(alert.batch, alert.samples)) + _batch(alert.batch, samples)
    return msgspec.structs.replace(alert, samples=samples, message=message)


def tokens(pair: Pair | None, text: Texts) -> str:
    """Name a pair of tokens."""
    if pair is None:
        return "unknown tokens"
    first, second = _names(pair, text)
    return f"tokens {first} and {second}"


def _names(pair: Pair, text: Texts) -> tuple[str, str]:
    first, second = (
        f"{token} {name!r}" if name else f"{token}" for token, name in zip(pair, text or ("", ""), strict=True)
    )
    return first, second


def _nonfinite_tokens(pair: Pair | None, text: Texts) -> str:
    """Name the first row that is not finite: the pair is (0, row), or (0, 1) for row 0."""
    assert pair is not None
    first, second = _names(pair, text)
    return f"token {second}" if pair[1] > 1 else f"token {first} or {second}"


def _nonfinite_message(rows: int, loss: float | None, pair: Pair | None, text: Texts) -> str:
    what = [] if loss is None else [f"the training loss is {loss}"]
    if rows:
        which = "" if pair is None else f", that of {_nonfinite_tokens(pair, text)}" + " first" * (rows > 1)
        what += [f"{rows:,} row{'s' * (rows > 1)} of the increment {'are' if rows > 1 else 'is'} not finite{which}"]
    return (
        f"{' and '.join(what)}: look at the batch, the loss scale and the gradient norm of this step, and go back to"
        " the last checkpoint before it"
    )


def _comparison(name: str, value: float, usual: float, pattern: str, rarity: float | None) -> str:
    """Compare a value with its history, in words."""
    against = {
        "trend": f"the {usual:.3g} that was usual some hundred measured steps ago",
        "level": f"the usual {usual:.3g}, and high for some steps",
    }.get(pattern, f"the usual {usual:.3g}")
    chance = "" if rarity is None else f", {_once_in(rarity)}"
    return f"{name} = {value:.3g}, {value / max(usual, math.ulp(0.0)):.3g} times {against}{chance}"


def _advice(kind: Kind, record: StepRecord, pattern: str, pair: Pair | None) -> str:
    """Say what to look at."""
    if kind == "precision":
        return (
            "the logits have outgrown their precision, look at log Z and the mean logit, and consider logits in fp32, a"
            " z-loss or a soft cap"
        )
    if pattern == "trend":
        return "steps have grown against the learning rate, lower it, or go back and look at loss and data"
    if pattern == "level":
        return "look at what changed in the run or its data some steps ago"
    if pair and record.gradient_row_token in pair:
        return "the head's gradient is largest at one of them, look at how they occur in the batch of this step"
    return "look at the batch of this step, and at how long these tokens had not occurred"


def _batch(batch: int | None, samples: tuple[int, ...] | None) -> str:
    """Name the batch, for the end of a message."""
    if batch is None and not samples:
        return ""
    which = "a batch" if batch is None else f"batch {batch} of its epoch"
    if not samples:
        return f"; it was {which}"
    more = f" and {len(samples) - 5} more" if len(samples) > 5 else ""
    return f"; it was {which}, with samples {', '.join(map(str, samples[:5]))}{more}"


def _once_in(rarity: float) -> str:
    """Say how rare that is, with one digit."""
    if rarity >= 1e9:
        return "not seen once in a billion steps"
    digits = 10 ** max(0, math.floor(math.log10(max(rarity, 1.0))))
    return f"seen once in {round(rarity / digits) * digits:,} steps"


def _alert(
    record: StepRecord,
    kind: Kind,
    value: float,
    expected: float,
    message: str,
    pair: Pair | None = None,
    text: Texts = None,
    *,
    severity: Severity = "page",
    **how: Any,
) -> Alert:
    """Make the alert of a step; the message ends with its batch, and whether a TrustRegion held the step."""
    held = ""
    if record.held_rows and record.trust_limit is not None:
        held = f"; it was held to {record.trust_limit:.3g}, in {record.held_rows:,} rows"
    return Alert(
        step=record.step,
        time=record.time,
        kind=kind,
        severity=severity,
        value=value,
        expected=expected,
        pair=pair,
        pair_text=text,
        batch=record.batch,
        samples=record.samples,
        message=message + held + _batch(record.batch, record.samples),
        **how,
    )

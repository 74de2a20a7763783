"""What an alert says: what was seen, how rare it is, between which tokens, and what to look at.

The rules decide that there is an alert (`alerts`); these are the words for it.
"""

from __future__ import annotations

import math

import msgspec

from .record import Alert, StepRecord


def nonfinite_message(record: StepRecord) -> str:
    """Say that rows of the increment are not finite."""
    number = record.nonfinite_rows or 0
    rows = "1 row of the increment is" if number == 1 else f"{number:,} rows of the increment are"
    token = tokens(record.pair, record.pair_text, 1)
    which = "" if record.pair is None else f", that of {token}" if number == 1 else f", that of {token} among them"
    return (
        f"{rows} not finite{which}: look at the batch, the loss scale and the gradient norm of this step, and go back"
        " to the last checkpoint before it"
    )


def ceiling_message(record: StepRecord, value: float) -> str:
    """Say that D(S) is more than its optimizer can make."""
    return (
        f"D(S) = {value:.3g} is more than the {record.ceiling:.3g} that this optimizer can make at its learning rate,"
        f" between {tokens(record.pair, record.pair_text)}: look for other code that writes to the head, its gradients"
        " in place or the optimizer's state"
    )


def precision_message(name: str, value: float, usual: float, rarity: float) -> str:
    """Say that the logits lose more in the run's precision than they used to."""
    return (
        f"{name} = {value:.3g}, {value / usual:.3g} times the usual {usual:.3g}, {_once_in(rarity)}: the logits have"
        " outgrown their precision, look at log Z and the mean logit, and consider logits in fp32, a z-loss or a soft"
        " cap"
    )


def comparison(name: str, value: float, expected: float, pattern: str, rarity: float | None) -> str:
    """Compare a value with its history.

    Args:
        name: of the quantity.
        value: of the step.
        expected: from its history.
        pattern: in which it departs from that.
        rarity: steps in which that is seen once, if it is known.
    """
    what = f"{name} = {value:.3g}, {value / max(expected, math.ulp(0.0)):.3g} times "
    usual = {
        "trend": f"the {expected:.3g} that was usual some hundred measured steps ago, at this learning rate",
        "level": f"the usual {expected:.3g}, and high for some steps",
    }.get(pattern, f"the usual {expected:.3g}")
    chance = "" if rarity is None else f", {_once_in(rarity)}"
    return f"{what}{usual}{chance}"


def advice(record: StepRecord, pattern: str, foreseen: float) -> str:
    """Say what to look at, where a value departs from its history.

    Args:
        record: of the step.
        pattern: in which it departs.
        foreseen: the learning rate that earlier ones led to expect.
    """
    if pattern == "rate":
        return f"the learning rate is {record.learning_rate:.3g} where {foreseen:.3g} was to be expected, look at it"
    if pattern == "trend":
        return "steps have grown against the learning rate, lower it, or go back and look at loss and data"
    if pattern == "level":
        return "look at what changed in the run or its data some steps ago"
    if record.pair and record.gradient_row_token in record.pair:
        return "the head's gradient is largest at one of them, look at how they occur in the batch of this step"
    return "look at the batch of this step, and at how long these tokens had not occurred"


def tokens(pair: tuple[int, int] | None, text: tuple[str, str] | None, number: int = 2) -> str:
    """Name a pair of tokens, or the first of them."""
    if pair is None:
        return "tokens that are not known"
    texts = text or ("", "")
    names = [
        f"{token} {token_text!r}" if token_text else str(token) for token, token_text in zip(pair, texts, strict=True)
    ]
    return f"token {names[0]}" if number == 1 else f"tokens {names[0]} and {names[1]}"


def ending(record: StepRecord) -> str:
    """Say what became of the step, and which batch it was: the end of every message."""
    return _held(record) + _batch(record.batch, record.samples)


def with_texts(alert: Alert, texts: tuple[str, str]) -> Alert:
    """Return an alert about tokens whose texts were not known, with the texts in it and in its message."""
    number = 1 if alert.kind == "nonfinite" else 2
    ids, names = tokens(alert.pair, None, number), tokens(alert.pair, texts, number)
    return msgspec.structs.replace(alert, pair_text=texts, message=alert.message.replace(ids, names, 1))


def with_samples(alert: Alert, samples: tuple[int, ...]) -> Alert:
    """Return an alert with the samples of its step, in it and in its message."""
    message = alert.message.removesuffix(_batch(alert.batch, alert.samples)) + _batch(alert.batch, samples)
    return msgspec.structs.replace(alert, samples=samples, message=message)


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

"""A check, its outcome, and its row in the report. A check that raises has failed."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

Verdict = Literal["ok", "FAILED", "skipped", "not known"]

CLAIMS = {
    "exactness": "D(S), its bounds and the perturbation agree with fp64, for all kinds of rows and settings",
    "increment": "S is the change that the step made to the weights, for every optimizer",
    "non-interference": "a run with the monitor equals the run without it, to the bit",
    "DDP": "several processes measure the same as one, and their weights stay equal",
    "overhead": "the monitor takes at most 2 % of a training step, measuring as often as in the paper",
}
"""The claims, in the order in which they are checked."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The verdict of a check, and the figure that it rests on."""

    verdict: Verdict
    measured: str
    """The figure beside its reference and its limit, or why there is none."""


@dataclass(frozen=True, slots=True)
class Check:
    """One case of a claim. It computes nothing before it is called."""

    claim: str
    case: str
    call: Callable[[], Outcome]


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of the report."""

    claim: str
    case: str
    verdict: Verdict
    measured: str
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Plain types, for JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


def outcome_of(good: bool, measured: str) -> Outcome:
    """Return the outcome of a measurement: ok if it is good, else failed."""
    return Outcome("ok" if good else "FAILED", measured)


def examine(check: Check) -> Finding:
    """Run a check. If it raises, it has failed, and the finding names the exception."""
    start = time.perf_counter()
    try:
        with _quiet():
            outcome = check.call()
    except Exception as error:
        outcome = Outcome("FAILED", describe(error))
    return Finding(check.claim, check.case, outcome.verdict, outcome.measured, time.perf_counter() - start)


def describe(error: BaseException) -> str:
    """Return an exception's class and first line."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['without a message'])[0]}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings and Lightning's greetings, which would stand between the rows."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)

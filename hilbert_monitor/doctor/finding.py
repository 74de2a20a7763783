"""A check, what it measured, and the row that is made of it. What raises is a finding too."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

Verdict = Literal["ok", "FAILED", "skipped"]

CLAIMS = {
    "exactness": "D(S), its bracket and the perturbation are those of fp64, whatever the rows and settings",
    "increment": "S is what the step did to the weights, whatever the optimizer",
    "non-interference": "a run with the monitor is the run without it, to the bit",
    "DDP": "several processes measure what one does, and their weights stay equal",
    "overhead": "at the paper's cadence measuring takes at most 2 % of a training step",
}
"""The claims, in the order in which they are checked."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a check measured."""

    verdict: Verdict
    measured: str
    """The figure beside its opponent and its limit, or why there is none."""


@dataclass(frozen=True, slots=True)
class Check:
    """One case of a claim; nothing is computed before it is called."""

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


def judged(good: bool, measured: str) -> Outcome:
    """Return the outcome of a measurement that a claim allows, or does not."""
    return Outcome("ok" if good else "FAILED", measured)


def examine(check: Check) -> Finding:
    """Run a check. It never raises: a check that does has failed, by its exception's class and first line."""
    start = time.perf_counter()
    try:
        with _quiet():
            outcome = check.call()
    except Exception as error:
        outcome = Outcome("FAILED", described(error))
    return Finding(check.claim, check.case, outcome.verdict, outcome.measured, time.perf_counter() - start)


def described(error: BaseException) -> str:
    """Return an exception's class and first line."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['without a message'])[0]}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep a Trainer's greetings, and warnings that are not of the claims, from between the rows."""
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

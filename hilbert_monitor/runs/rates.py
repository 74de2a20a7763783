"""Learning rates: which one the schedule led to expect, so that a schedule is followed and an accident is not.

D(S) grows with the learning rate, so the rules look at D(S) over the rate. A rate that nobody foresaw is not divided
out. Schedules are foreseen without a setting: they go on as they went (warm-up, cosine, cycles), they fall (decay, in
steps or on a plateau), and a scheduler may return to a rate that the run has had (restarts).

Two questions are asked of a rate: did it jump from one step to the next, and is it above all rates so far and has grown
faster than the square of the time over the last 8, 32 or 128 steps? The second sees exponential growth, which looks
straight from one step to the next, from 1 % a step on. Slower growth is seen only where it begins.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

ACCIDENT = 1.5
"""A rate that exceeds what earlier ones led to expect by this factor is an accident. Less is not: warm-ups by epochs
have steps of up to 1.4."""
SPANS = (8, 32, 128)
"""Records over which growth is looked for."""
SAME = 1.001
"""Two rates are the same up to this factor."""
SMALL = 0.01
"""Rates below this share of the highest so far do no harm, however fast they grow."""


class Rates:
    """The learning rates of a run."""

    def __init__(self) -> None:
        self._last: deque[tuple[int, float]] = deque(maxlen=2 * max(SPANS))
        self.highest = 0.0
        """The highest rate that was foreseen, or told of."""

    def foreseen(self, step: int, lr: float, *, scheduled: bool | None) -> float:
        """Return the learning rate; if nobody could foresee it, the highest that could be.

        Args:
            step: whose rate it is.
            lr: the rate.
            scheduled: whether the run's scheduler set it, if that is known.
        """
        if lr <= (SAME if scheduled else SMALL) * self.highest:
            return lr
        straight = self._straight_on(step)
        if straight is not None and lr > ACCIDENT * straight:
            return straight
        if lr <= self.highest:  # growth is looked for above all rates so far
            return lr
        return min((bound for bound in self._grown() if lr > ACCIDENT * bound), default=lr)

    def add(self, step: int, lr: float, *, foreseen: float, told: bool = False) -> None:
        """Note the rate of a step.

        Args:
            step: its number.
            lr: the rate.
            foreseen: what it should have been.
            told: there was an alert about it. What follows is compared with it, so that it is told once.
        """
        if lr < 0 or not math.isfinite(lr) or (self._last and step <= self._last[-1][0]):
            return
        if told:
            self._last.clear()
            self._last.append((step - 1, lr))
        if told or foreseen >= lr:
            self.highest = max(self.highest, lr)
        self._last.append((step, lr))

    def state(self) -> dict[str, Any]:
        """Return the rates in plain types."""
        return {"last": [list(rate) for rate in self._last], "highest": self.highest}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned."""
        self._last.clear()
        self._last.extend((int(step), float(lr)) for step, lr in state["last"])
        self.highest = float(state["highest"])

    def _straight_on(self, step: int) -> float | None:
        """The rate that the last two lead to; a schedule may turn upward."""
        if len(self._last) < 2:
            return None
        (before, first), (last, second) = self._last[-2], self._last[-1]
        return second + abs(second - first) * (step - last) / (last - before) if second > 0 else None

    def _grown(self) -> list[float]:
        """The rates that growth with the square of the time would have reached, at least the highest so far."""
        bounds = []
        for span in SPANS:
            if len(self._last) < 2 * span:
                break
            first, second = (math.sqrt(self._last[-n][1]) for n in (2 * span, span))
            grown = second + abs(second - first)
            bound = max(grown * grown, self.highest / ACCIDENT)  # ** would raise where this is infinite
            bounds += [bound] if bound > 0 else []  # a head that has been frozen leads to expect nothing
        return bounds

"""Who watches a weight that somebody else holds: a `TrustRegion` lets a monitor measure a step before it writes to it.

So records have the step that the optimizer asked for, and the monitor does not take the writing for a doubt about what
it believes of the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from .held_step import RegionStep

Outcome = Callable[[], RegionStep]
"""Reads what was made of a step; an accelerator is waited for."""


class Observer(Protocol):
    """What wants to see a step before it is held."""

    def before_hold(self) -> None:
        """See the step that was made, if it has not been seen yet."""

    def held(self, outcome: Outcome | None) -> None:
        """Take notice of what was made of it; None where steps are held no more."""


_observers: Any = WeakIdKeyDictionary()  # lists of them, by their weights


def observe(weight: Tensor, observer: Observer) -> Callable[[], None]:
    """Let an observer see the steps of a weight; return a function that ends it."""
    watching: list[Observer] = _observers.setdefault(weight, [])
    watching.append(observer)

    def end() -> None:
        if observer in watching:
            watching.remove(observer)

    return end


def observers_of(weight: Tensor) -> list[Observer]:
    """Those that watch a weight now."""
    return list(_observers.get(weight, ()))

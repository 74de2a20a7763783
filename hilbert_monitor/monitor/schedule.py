"""Whether the learning rate of a step is the one that the run's own scheduler set."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from hilbert_monitor.runs.stops import handled_signals

from .device_numbers import Later, read_now, reads_later

Rate = float | Tensor
Schedulers = Any
"""A scheduler, several of them, or a function that returns them."""

SAME = 1e-6
"""Relative difference up to which two rates are one: a tensor has fewer digits."""
TORCH = "torch.optim.lr_scheduler"


class Schedule:
    """The rates that the schedulers of a run set for one parameter. It asks them, and changes nothing.

    A scheduler is any object that says which rates it set last, as torch's do: by `_last_lr` or `get_last_lr()`.
    Torch's own are believed. One with a `step` of its own may have forgotten to note its rates: it is believed once two
    different rates of it were used.

    Args:
        schedulers: of the run. A function is asked at every step, as schedulers may change.
        param: the parameter whose rate it is.
    """

    def __init__(self, schedulers: Schedulers, param: Tensor) -> None:
        self._schedulers, self._param = schedulers, param
        self._ended: list[tuple[Any, Rate | None]] = []  # what they said at the end of the last update
        self._matches: dict[int, tuple[Any, float, bool]] = {}  # scheduler, its first rate, whether it is believed

    def end_update(self) -> None:
        """Note the rates at the end of an update: one may be set before its step is looked for."""
        self._ended = self.rates()

    def rates(self, *, since_update: bool = False) -> list[tuple[Any, Rate | None]]:
        """The schedulers that have a say, each with the rate that it set last; None if it does not tell.

        Args:
            since_update: also with the rate that it had set at the end of the last update.
        """
        schedulers = self._schedulers
        if callable(schedulers) and not hasattr(schedulers, "step"):
            schedulers = schedulers()
        if not isinstance(schedulers, Iterable):
            schedulers = [] if schedulers is None else [schedulers]
        now = [(one, _last_rate(one, self._param)) for one in schedulers if _has_a_say(one, self._param)]
        return [*self._ended, *now] if since_update else now

    def read(self, used: Rate | None, rates: list[tuple[Any, Rate | None]]) -> tuple[float | None, bool | None]:
        """Return the rate that a step used, and whether one of the schedulers set it; None for what is not known.

        Args:
            used: the rate in the parameter's group at the step.
            rates: what `rates` said when the step was made.
        """
        return self.read_later(used, rates, read_now)()

    def read_later(
        self, used: Rate | None, rates: list[tuple[Any, Rate | None]], take: Callable[[Tensor], Later]
    ) -> Callable[[], tuple[float | None, bool | None]]:
        """Return what does as `read` does, once numbers that are on a device have been read.

        Args:
            used: the rate in the parameter's group at the step.
            rates: what `rates` said when the step was made.
            take: takes numbers as they are now, and returns what gives them later.
        """
        if used is None:
            return lambda: (None, None)
        known = [(one, rate) for one, rate in rates if rate is not None and not _are_one_tensor(rate, used)]
        numbers = _numbers([used, *(rate for _, rate in known)], take)

        def answer() -> tuple[float | None, bool | None]:
            number, *others = numbers()
            matching = [one for (one, _), other in zip(known, others, strict=True) if _are_equal(number, other)]
            for scheduler in matching:
                self._note_match(scheduler, number)
            if matching:
                return number, True
            all_tell = len(known) == len(rates) and all(self._believes(scheduler) for scheduler, _ in known)
            return number, False if rates and all_tell else None

        return answer

    def forget(self) -> None:
        """Let go of the schedulers, and of what was learnt about them."""
        self._ended = []
        self._matches.clear()

    def _note_match(self, scheduler: Any, rate: float) -> None:
        _, first, believed = self._matches.get(id(scheduler), (scheduler, rate, False))
        self._matches[id(scheduler)] = scheduler, first, believed or not _are_equal(first, rate)

    def _believes(self, scheduler: Any) -> bool:
        if getattr(getattr(type(scheduler), "step", None), "__module__", "") == TORCH:
            return True
        return self._matches.get(id(scheduler), (scheduler, 0.0, False))[2]


def has_scheduler(optimizer: Any) -> bool:
    """Whether one of torch's schedulers has been made for an optimizer: it leaves a mark on its step."""
    return bool(getattr(optimizer.step, "_wrapped_by_lr_sched", False))


def schedulers_of(optimizer: Any) -> list[LRScheduler]:
    """Torch's schedulers of an optimizer. It goes through all objects there are, which may take a tenth of a second."""
    schedulers = (one for one in gc.get_objects() if LRScheduler in type(one).__mro__)
    return [one for one in schedulers if getattr(one, "optimizer", None) is optimizer]


def _has_a_say(scheduler: Any, param: Tensor) -> bool:
    """Whether a scheduler is one of the parameter's optimizer, or does not say of which it is."""
    groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", None)
    return groups is None or _index(groups, param) is not None


def _last_rate(scheduler: Any, param: Tensor) -> Rate | None:
    """The rate that a scheduler set last for the group of a parameter, if it tells."""
    try:
        rates = getattr(scheduler, "_last_lr", None)
        rates = scheduler.get_last_lr() if rates is None else rates
        groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", None)
        index = _index(groups, param) if groups is not None else 0 if len(rates) == 1 else None
        rate = None if index is None else rates[index]
    except Exception as error:  # whatever a scheduler of the user's does
        if handled_signals(error):
            raise
        return None
    return rate if isinstance(rate, Tensor) else None if rate is None else float(rate)


def _index(groups: list[dict[str, Any]], param: Tensor) -> int | None:
    return next((n for n, group in enumerate(groups) if any(param is p for p in group["params"])), None)


def _numbers(rates: list[Rate], take: Callable[[Tensor], Later]) -> Later:
    """Rates as numbers. Those that are tensors are read together: a device is waited for once."""
    tensors = [rate for rate in rates if isinstance(rate, Tensor)]
    if not tensors:
        return lambda: [float(rate) for rate in rates]
    first = next((x for x in tensors if reads_later(x.device)), tensors[0])
    read = take(torch.stack([x.detach().reshape(()).to(first.device, first.dtype) for x in tensors]))

    def numbers() -> list[float]:
        values = iter(read())
        return [next(values) if isinstance(rate, Tensor) else float(rate) for rate in rates]

    return numbers


def _are_one_tensor(a: Rate, b: Rate) -> bool:
    """Whether two rates are the same tensor, so that a change of one is a change of the other."""
    return isinstance(a, Tensor) and a is b


def _are_equal(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=SAME)

"""Numbers that a step leaves on an accelerator and the host reads later: the device's queue never runs dry for them.

On ordinary steps of a head on an accelerator the host asks the device for nothing. Bounds of D(S), the learning rate
where that is a tensor, the loss and the like travel to the host in one copy behind an event. They are read before the
next step moves anything, when they have long been there. If the rules then suspect the bounds, the exact diameter is
searched for: state and weights are still those of the step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from hilbert_monitor.geometry import DeferredBracket

if TYPE_CHECKING:
    from .head import HeadIncrement
    from .optimizers import OptimizerStep, RateReading


class Arrival(Protocol):
    """What tells whether a copy has arrived, such as torch.cuda.Event."""

    def synchronize(self) -> None:
        """Wait until it has."""


HostCopy = Callable[[Tensor], tuple[Tensor, Arrival]]
"""Starts to copy a tensor to the host behind what its device has queued, and returns the copy and its arrival."""


def pinned_copy(numbers: Tensor) -> tuple[Tensor, Arrival]:
    """Start a copy into pinned memory on the device's current stream, with an event behind it.

    The allocator keeps pinned memory for the next copy, as soon as the event of the last one has passed: only the first
    copies of a run ask the driver for some, which waits.
    """
    module = torch.get_device_module(numbers.device)
    copy = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    copy.copy_(numbers, non_blocking=True)
    event = module.Event()
    event.record(module.current_stream(numbers.device))
    return copy, event


HOST_COPIES: dict[str, HostCopy] = {"cuda": pinned_copy, "xpu": pinned_copy}
"""How to copy without a wait, by type of device. Others are waited for at once."""


def reads_later(device: torch.device) -> bool:
    """Return whether numbers of a device can be read without a wait. Those of a CPU are there already."""
    return device.type in HOST_COPIES


class DeviceNumbers:
    """Collects numbers by name, sends those on a device to the host in one copy, and hands all of them out."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}
        self._parts: dict[str, Tensor] = {}
        self._sent: tuple[Tensor, Arrival] | None = None

    def add(self, name: str, x: Tensor | float | None) -> None:
        """Take numbers as they are now, before `send`; None is left out."""
        if isinstance(x, Tensor) and reads_later(x.device):
            self._parts[name] = x.detach().reshape(-1).to(torch.float64, copy=True)  # its owner may overwrite it
        elif x is not None:
            self._values[name] = x.detach().reshape(-1).tolist() if isinstance(x, Tensor) else [float(x)]

    def send(self) -> None:
        """Start the copy to the host."""
        if self._parts:
            numbers = torch.cat(list(self._parts.values()))
            self._sent = HOST_COPIES[numbers.device.type](numbers)

    def read(self) -> dict[str, list[float]]:
        """Return all numbers, after a wait for those that are not there yet."""
        if self._sent is not None:
            copy, arrival = self._sent
            arrival.synchronize()
            numbers = iter(copy.tolist())
            for name, part in self._parts.items():
                self._values[name] = [next(numbers) for _ in range(len(part))]
            self._sent = None
            self._parts.clear()
        return self._values


@dataclass
class DeferredStep:
    """A step whose numbers are on their way to the host."""

    fields: dict[str, Any]
    """Fields of its record that are known."""
    step: OptimizerStep
    rate: RateReading
    basis: str
    """The record's `increment_from`."""
    numbers: DeviceNumbers = field(default_factory=DeviceNumbers)
    bracket: DeferredBracket | None = None
    """Bounds of D(S), if they are measured."""
    stored: DeferredBracket | None = None
    """Bounds of the diameter of the step that rounded weights made, if it is another."""
    weights: int = 0
    """How many weights were compared, for the share of those that moved."""
    increment: HeadIncrement | None = None
    """The increment, held, where it cannot be formed any more when the numbers are read."""
    outcome: Callable[[], Any] | None = None
    """Reads what a TrustRegion made of the step, where there is one."""
    samples: list[Any] = field(default_factory=list)
    """Indices of the samples that the step was made of."""
    moment: tuple[float, float] = (0.0, 0.0)
    """Seconds since the epoch at its end, and since the record before it."""
    seconds: dict[str, float] = field(default_factory=dict)
    """What it has cost so far, by part."""

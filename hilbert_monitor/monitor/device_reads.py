"""Numbers on their way from a device to the host, which goes on meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class Arrival(Protocol):
    """What tells whether a copy has arrived, such as torch.cuda.Event."""

    def query(self) -> bool:
        """Return whether it has, without a wait."""

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


class PendingRead:
    """Numbers that are read from a device later: the host waits only if they are not there when it asks.

    On a device that is in no `HOST_COPIES`, such as the CPU, they are read at once.

    Args:
        numbers: (n,) to read, as they are now: the device's queue may overwrite them afterwards.
    """

    def __init__(self, numbers: Tensor) -> None:
        copy = HOST_COPIES.get(numbers.device.type)
        self._values: list[float] | None = None
        if copy is None:
            self._values = numbers.tolist()
            return
        self._source: Tensor | None = numbers  # held until it is copied, which may be on a stream that does not own it
        self._copy, self._arrival = copy(numbers.detach())

    @property
    def ready(self) -> bool:
        """Whether `read` would not wait."""
        return self._values is not None or self._arrival.query()

    def read(self) -> list[float]:
        """Return the numbers, after a wait if they are not there yet."""
        if self._values is None:
            self._arrival.synchronize()
            self._values = self._copy.tolist()
            self._source = None
        return self._values

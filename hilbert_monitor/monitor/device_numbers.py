"""The numbers of a step that the host needs, read from the device together: nothing waits for one of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from .device_reads import HOST_COPIES, PendingRead

Later = Callable[[], list[float]]
"""Returns numbers, once they have been read."""


def reads_later(device: torch.device) -> bool:
    """Whether numbers of a device can be read without a wait. Those of a CPU are there already."""
    return device.type in HOST_COPIES


def read_now(x: Tensor) -> Later:
    """Read numbers at once."""
    values = x.tolist()
    return lambda: values


class DeviceNumbers:
    """Collects numbers on a device, sends them to the host in one copy, and hands them out when they are there."""

    def __init__(self) -> None:
        self._parts: list[Tensor] = []
        self._size = 0
        self._read: PendingRead | None = None

    def add(self, x: Tensor) -> Later:
        """Take numbers as they are now, before `send`; return what gives them afterwards.

        What is on a CPU is read at once.
        """
        x = x.detach().reshape(-1)
        if not reads_later(x.device):
            return read_now(x)
        first = self._size
        self._parts.append(x.to(torch.float64, copy=True))  # its owner may overwrite it before it is sent
        self._size += len(x)
        return partial(self._values, first, self._size)

    def send(self) -> None:
        """Start the copy to the host."""
        if self._parts:
            self._read = PendingRead(torch.cat(self._parts))

    def _values(self, first: int, end: int) -> list[float]:
        assert self._read is not None, "the numbers have not been sent"
        values = self._read.read()
        self._parts = []  # not before: another stream than the one that owns them may have sent them
        return values[first:end]

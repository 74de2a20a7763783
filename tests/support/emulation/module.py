"""`torch.emulated`: what torch asks of a device's module, and copies to the host behind an event."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .counts import Count
from .device import DeviceTensor, EmulatedDevice


class Event:
    """A place in the device's queue.

    The device is behind the host by some kernels (`EmulatedDevice.backlog`), and catches up where the host waits.
    """

    def __init__(self) -> None:
        self.device = EmulatedDevice.current()
        self.place = 0 if self.device is None else self.device.queued

    def query(self) -> bool:
        """Return whether the device has come so far."""
        return self.device is None or self.device.done >= self.place

    def synchronize(self) -> None:
        """Wait until it has; that is a wait only if it had not."""
        if self.device is not None and not self.query():
            self.device.wait("event")


def host_copy(numbers: Tensor) -> tuple[Tensor, Event]:
    """Start a copy to the host that nobody waits for, as one into pinned memory; a tensor of `HOST_COPIES`.

    The numbers are wrong until the event has passed, as they would be: nan, or minus one.
    """
    assert isinstance(numbers, DeviceTensor)
    if (device := EmulatedDevice.current()) is not None:
        device.note("to pinned memory", Count(kernels=1, bytes=2 * numbers.nbytes))
    event, value = Event(), numbers.host.detach().clone()
    arriving = torch.full_like(value, float("nan") if value.is_floating_point() else -1)
    return (value if event.query() else _Arriving(arriving, value, event)), event


class _Arriving(Tensor):
    """A tensor of the host whose numbers come with an event."""

    @staticmethod
    def __new__(cls, before: Tensor, after: Tensor, event: Event) -> _Arriving:
        tensor: _Arriving = torch.Tensor._make_subclass(cls, before)
        tensor.after, tensor.event = after, event  # type: ignore[attr-defined]
        return tensor

    def tolist(self) -> Any:
        """Read what is there now."""
        source = self.after if self.event.query() else self.as_subclass(Tensor)  # type: ignore[attr-defined]
        return source.tolist()


class DeviceModule:
    """The functions that torch asks of a device's module. Its random numbers are the CPU's."""

    def is_available(self) -> bool:
        """Return whether there is such a device now: outside of its mode there is none."""
        return EmulatedDevice.current() is not None

    is_initialized = is_available

    def device_count(self) -> int:
        """Return one, or none."""
        return int(self.is_available())

    def current_device(self) -> int:
        """Return its number."""
        return 0

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Return the dtypes of autocast."""
        return [torch.bfloat16, torch.float16]

    def synchronize(self, device: object = None) -> None:
        """Wait for all that is queued."""
        if (mode := EmulatedDevice.current()) is not None:
            mode.wait("synchronize")

    def manual_seed_all(self, seed: int) -> None:
        """Do nothing."""

    def get_rng_state(self, device: object = None) -> Tensor:
        """Return that of the CPU."""
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: object = None) -> None:
        """Set that of the CPU."""
        torch.set_rng_state(state)

    def _is_in_bad_fork(self) -> bool:
        return False

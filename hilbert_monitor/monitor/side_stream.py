"""A stream of the monitor's own: what is queued there runs beside the next forward pass.

Training is ordered before it when it begins, and after it when the next step is about to move weights and state, both
on the device. So what is measured is what a step has left, and what training computes does not depend on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class SideStream:
    """Work beside that of training, on one device.

    Args:
        device: an accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._stream = self._module.Stream(device)

    @contextmanager
    def queued(self) -> Iterator[None]:
        """Queue what runs in this context here, behind all that training has queued so far."""
        self._stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._stream):
            yield

    def join(self) -> None:
        """Let training go on only when all of it has run. The device waits, not the host."""
        self._module.current_stream(self._device).wait_stream(self._stream)

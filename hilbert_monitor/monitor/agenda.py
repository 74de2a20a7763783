"""What is due at which step: exact diameters, panels, bounds, and checks of what is believed of a step."""

from __future__ import annotations

import math

import torch

from .device_numbers import reads_later
from .head import WatchedHead

CHECKED = 5
"""How many of the first steps are compared with what the weights did; later ones where D(S) or the panel is due."""


class Agenda:
    """Says what is measured of each step.

    Args:
        diameter_every: steps between exact diameters; 0 for none.
        perturbation_every: steps between perturbations of the panel; 0 for none.
        bracket: bounds of the diameter on every step; None for where the increment is formed from state.
        immediate: wait for the device in every step that is measured.
        device: that the head is on.
    """

    def __init__(
        self,
        diameter_every: int,
        perturbation_every: int,
        *,
        bracket: bool | None,
        immediate: bool,
        device: torch.device,
    ) -> None:
        self.diameter_every, self.perturbation_every = diameter_every, perturbation_every
        self.immediate, self._device = immediate, device
        self.last = math.inf
        """Number of the last step, where it is known before: it is measured like one that is due."""
        self.bracket = bool(bracket)
        """Whether bounds of the diameter are measured on every step."""
        self.waits = False
        """Whether a step is whole, and can be measured, only when its record is made."""
        self._chosen = bracket
        self._checked = 0  # steps that were compared with what the weights did

    def decide(self, head: WatchedHead) -> None:
        """Note what follows from how increments are formed, where all ranks agree on it: one may find out more soon."""
        self.bracket = head.source.basis == "state" if self._chosen is None else self._chosen
        self.waits = head.waits_for_record

    def diameter_is_due(self, step: int) -> bool:
        """Whether the exact diameter of a step is."""
        return self._is_due(step, self.diameter_every)

    def panel_is_due(self, step: int) -> bool:
        """Whether the panel is, at a step."""
        return self._is_due(step, self.perturbation_every)

    def measures(self, step: int) -> bool:
        """Whether the increment of a step is measured."""
        return self.diameter_is_due(step) or self.panel_is_due(step) or self.bracket

    def begin(self, step: int, head: WatchedHead) -> bool:
        """Return whether a step is compared with what the weights do: an accelerator is waited for. Said once a step.

        The head is told whether what the step leaves on the device is read later.
        """
        due = self.diameter_is_due(step) or self.panel_is_due(step)
        checks = (due or self.bracket) and (due or self._checked < CHECKED)
        self._checked += checks
        formed = not self.bracket or head.is_believed
        head.reads_later = self.may_defer and not (due or checks or self.waits) and formed
        return checks

    @property
    def may_defer(self) -> bool:
        """Whether the host need not wait for the device in ordinary steps."""
        return not self.immediate and reads_later(self._device)

    def _is_due(self, step: int, every: int) -> bool:
        return every > 0 and (step % every == 0 or step == self.last)

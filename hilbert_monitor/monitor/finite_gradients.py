"""Leaves a step out whole where its gradient is not finite, as a GradScaler does it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from .runtime import Ranks, warn_user


class NonFiniteGradients(RuntimeError):
    """So many steps in a row had a gradient that is not finite that the run is ended."""


class FiniteGradients:
    """Looks at the gradients of an optimizer before it moves anything, and takes them away for a step if one is bad.

    An optimizer moves no parameter that has no gradient, and leaves its state as it was. After the step the gradients
    are there again.

    Args:
        optimizer: whose steps are left out.
        ranks: those that train together; they leave out a step together.
        stop_after: left out in a row, from which on the run is ended.
    """

    def __init__(self, optimizer: Optimizer, ranks: Ranks, *, stop_after: int) -> None:
        self.optimizer, self.ranks, self.stop_after = optimizer, ranks, stop_after
        self.left_out = 0
        """Steps left out so far."""
        self.in_a_row = 0
        self._taken: list[tuple[Tensor, Tensor]] = []

    def check(self) -> bool:
        """Take the gradients away if one of any rank is not finite, and return whether that is so. It waits once."""
        if getattr(self.optimizer, "found_inf", None) is not None:
            return False  # a GradScaler has looked, and a fused optimizer leaves the step out for it
        params = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        if self.ranks.all_agree(_are_finite(p.grad for p in params)):
            self.in_a_row = 0
            return False
        self._taken = [(p, p.grad) for p in params]
        for p in params:
            p.grad = None
        self.left_out += 1
        self.in_a_row += 1
        return True

    def restore(self) -> None:
        """Give the gradients back, after the step."""
        for p, gradient in self._taken:
            p.grad = gradient
        self._taken = []

    def tell(self, step: int) -> None:
        """Say that a step was left out; end the run if it is one too many."""
        if self.in_a_row >= self.stop_after:
            raise NonFiniteGradients(
                f"the gradients of {self.in_a_row} steps in a row, up to step {step}, are not finite, and none of these"
                " steps was made: look at the batches, the loss and the hidden states of these steps, or pass a larger"
                " stop_after=..."
            )
        if self.in_a_row == 1:
            warn_user(
                f"the gradient of step {step} is not finite: the step was left out, for all parameters", stacklevel=3
            )


def _are_finite(gradients: Iterable[Any]) -> bool:
    """Whether each entry of this rank's gradients is a finite number. One wait for each device."""
    values = [x for x in map(_values, gradients) if x.numel()]
    here = [x for x in values if x.device.type == "cpu"]
    if not all(torch.isfinite(end) for x in here for end in torch.aminmax(x)):  # ten times faster than the norm there
        return False
    there = [x for x in values if x.device.type != "cpu"]
    return not there or bool(torch.isfinite(get_total_norm(there, float("inf"))))  # no square that could overflow


def _values(gradient: Any) -> Tensor:
    """The entries of a gradient that this rank has."""
    gradient = gradient.detach()
    if hasattr(gradient, "to_local"):
        gradient = gradient.to_local()
    values: Tensor = gradient.coalesce().values() if gradient.is_sparse else gradient
    return values

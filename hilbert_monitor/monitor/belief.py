"""What is believed of an optimizer's steps, and how a belief is given up where the weights did something else.

At first it is believed that the optimizer's state says what a step was, where it can, and that nothing but the step
moves the weights. Each belief is given up once, for good, and the user is told.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import Optimizer

from .decay import WeightDecay
from .weight_increment import WeightIncrement

PARTED = 1e-3
"""Difference between a believed and a real step, as a share of the step, from which on the belief is given up."""


class Belief:
    """What is believed of the steps of an optimizer on one parameter.

    Args:
        optimizer: that moves it.
        decay: of the parameter.
        weights: those before a step, which say nothing of an update.
    """

    def __init__(self, optimizer: Optimizer, decay: WeightDecay, weights: WeightIncrement) -> None:
        self.optimizer, self._decay, self._weights = optimizer, decay, weights
        self.trusts_state = True
        """Whether the optimizer's state says what its steps are, where it says anything."""
        self.by_update = False
        """Whether something besides the step moves the weights, so that only whole updates can be told."""
        self.found_out = False
        """Whether trust in the state was lost in this step: the weights of before it were not kept."""
        self.doubt: Callable[[str], None] = lambda text: None
        """Told in a sentence what is believed no more."""

    @property
    def others_move(self) -> str:
        """Says that something else moves the weights."""
        return (
            f"something besides the step of {type(self.optimizer).__name__} moves the head's weights (Lookahead, a"
            " patched step, swapped or projected weights?)"
        )

    @property
    def numbers(self) -> list[float]:
        """What is believed, in numbers of which the least over the ranks is what all of them believe."""
        return [float(self.trusts_state), float(not self.by_update), self._decay.belief]

    @numbers.setter
    def numbers(self, numbers: list[float]) -> None:
        trusted, by_steps, self._decay.belief = numbers
        if self.trusts_state and not trusted:
            self.distrust("the rows of another rank moved otherwise than the optimizer's state says")
        if not self.by_update and not by_steps:
            self.follow_updates(f"on another rank, {self.others_move}")

    def distrust(self, why: str) -> None:
        """Believe the state no more."""
        self.trusts_state, self.found_out = False, True
        self.doubt(f"{why}: the increment is the difference of the weights from now on")

    def follow_updates(self, why: str) -> None:
        """Believe in whole updates alone."""
        self.by_update, self._weights.before = True, None
        self.doubt(f"{why}: the increment is the difference of the weights over whole updates from now on")

    def check(self, before: Tensor, after: Tensor, step: Tensor, share: float | Tensor) -> bool:
        """Compare some rows with what the state says of them; where they part, believe the state no more.

        Args:
            before: (n, d) the rows before the step, as they are stored.
            after: (n, d) the rows after it.
            step: (n, d) the step that the state says they made.
            share: the share of the weights that decay took away.

        Returns:
            Whether they moved as the state says.
        """
        after = after.to(step.dtype)
        moved = after - before.to(step.dtype) * (1 - share)
        largest = torch.maximum(after.abs().amax(), before.abs().amax().to(step.dtype))
        numbers = ((moved - step).abs().amax(), step.abs().amax(), moved.abs().amax(), largest)
        difference, believed, real, weight = torch.stack(numbers).tolist()
        allowed = PARTED * max(believed, real) + 4 * torch.finfo(before.dtype).eps * weight
        if not difference > allowed:  # also where something is nan
            return True
        kind = type(self.optimizer).__name__
        self.distrust(f"a step of {kind} moved a weight {difference:.3g} away from where its state says, by {real:.3g}")
        return False

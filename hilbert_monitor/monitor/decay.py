"""Decoupled weight decay: the factor c of U' = c U + S, which is no part of the increment S.

How one of torch's optimizers uses its `weight_decay` is known. For others it is assumed, and the assumption is checked
against what the weights did: a wrong c leaves the same multiple of its own row in every row of S. An L2 term of the
loss does so too, so only a multiple that the optimizer's options spell out counts.
"""

from __future__ import annotations

import inspect
import math
import warnings
from typing import Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from hilbert_monitor.optim import Group

from .head_step import HeadStep

Decay = Literal["decoupled", "coupled"]

DECOUPLED = {"AdamW", "AdamW8bit", "PagedAdamW", "PagedAdamW8bit", "Adafactor", "Muon", "Lion", "AdEMAMix", "SOAP"}
COUPLED = {"SGD", "Adam", "Adagrad", "Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "LAMB"}
"""How optimizers whose groups have no flag decoupled_weight_decay use weight_decay, by the name of their class."""

DOMINANT = 0.3
"""Share of a row of S, from which on a multiple of the row's own weights is looked into."""
SPREAD = 0.2
"""Largest spread of that multiple over the rows, as a share of its median, at which it counts as decay."""
ROUNDINGS = 16
"""Rounding errors of a weight, as a share of it, below which nothing can be said of its decay."""
NEAR = 3.0
"""Standard errors within which a measured decay is taken to be one that the options spell out."""


class WeightDecay:
    """What an optimizer's weight decay does to one parameter.

    Args:
        optimizer: that moves the parameter.
        choice: how it uses weight_decay, as the user says.
    """

    def __init__(self, optimizer: Optimizer, choice: Decay | None) -> None:
        self.optimizer, self.choice = optimizer, choice
        self._measured: float | None = None

    def decoupled(self, group: Group) -> bool:
        """Whether weight decay is apart from the increment."""
        flag = group.get("decoupled_weight_decay")
        return bool(flag) if flag is not None else (self.choice or self._known() or "decoupled") == "decoupled"

    def share(self, step: HeadStep) -> float | Tensor:
        """The share 1 - c of the weights that a step takes away. A tensor if the learning rate is one: an accelerator
        is not waited for."""
        lr = step.options.get("lr")
        if lr is None:
            return 0.0
        decay = step.decay if self.decoupled(step.options) else 0.0
        share: float | Tensor = lr * (decay if self._measured is None else self._measured)
        return share

    def correct(self, before: Tensor, S: Tensor, step: HeadStep) -> str:
        """Compare the assumed decay with what the weights did, and correct it where it is plainly another.

        Args:
            before: (n, d) rows of the weight before the step.
            S: (n, d) what the assumption makes of them.
            step: the step.

        Returns:
            What was seen, if the assumption was wrong, in a sentence; otherwise nothing.
        """
        lr = step.lr
        guessed = self.choice is None and self.decoupled(step.options) and not _is_torchs(self.optimizer)
        if not (guessed and lr and step.decay):
            return ""
        eps = torch.finfo(before.dtype).eps
        U, S = before.double(), S.double()
        U, S = U - U.mean(0), S - S.mean(0)
        squares = U.square().sum(1)
        multiples = -(U * S).sum(1) / squares  # of its own weights, that each row lost
        excess = float(multiples.median())
        spread = float((multiples - excess).abs().median())
        share = abs(excess) * float(squares.sqrt().median()) / max(float(S.norm(dim=1).median()), 1e-300)
        if not (share > DOMINANT and spread < SPREAD * abs(excess) and abs(excess) > ROUNDINGS * eps):
            return ""  # also where something is nan
        error = 1.86 * spread / len(U) ** 0.5  # of the median of normal numbers with this median deviation
        assumed = float(self.share(step))
        decay = self._spelt_out((assumed + excess) / lr, (NEAR * error + ROUNDINGS * eps) / lr, step)
        if decay is None:
            return ""
        self._measured = decay
        return (
            f"a step of {type(self.optimizer).__name__} took {assumed + excess:.3g} of the weights away, where"
            f" {assumed:.3g} was assumed: its weight decay is taken to be {decay:.3g} times the learning rate from now"
            " on"
        )

    @property
    def belief(self) -> float:
        """The decay that was measured; infinity if none was."""
        return math.inf if self._measured is None else self._measured

    @belief.setter
    def belief(self, measured: float) -> None:
        self._measured = None if math.isinf(measured) else measured

    def warn_of_guess(self, group: Group) -> None:
        """Say that nothing is known of how this optimizer uses weight_decay, if it uses one."""
        known = "decoupled_weight_decay" in group or self.choice is not None or self._known() is not None
        if not known and group.get("weight_decay"):
            warnings.warn(
                f"hilbert_monitor does not know how {type(self.optimizer).__name__} uses weight_decay and takes it to"
                ' be decoupled, apart from the increment: pass decay="coupled" if it is added to the gradient',
                stacklevel=4,
            )

    def _known(self) -> Decay | None:
        """How the class, or the nearest that it derives from, is known to use weight_decay."""
        for kind in type(self.optimizer).__mro__:
            if kind.__name__ in DECOUPLED | COUPLED:
                return "decoupled" if kind.__name__ in DECOUPLED else "coupled"
        return None

    def _spelt_out(self, measured: float, room: float, step: HeadStep) -> float | None:
        """The decay that the options make, if one of them is as near to what was measured as `room`."""
        rates = (step.lr, step.options.get("initial_lr"), self.optimizer.defaults.get("lr"))
        spelt = [0.0, step.decay, *(step.decay / float(rate) for rate in rates if rate)]
        nearest = min(spelt, key=lambda decay: abs(decay - measured))
        return nearest if abs(nearest - measured) <= room else None


def _is_torchs(optimizer: Optimizer) -> bool:
    """Whether the step is that of one of torch's own classes, whose decay is known."""
    module: str = inspect.unwrap(type(optimizer).step).__module__
    return module.startswith("torch.optim.")

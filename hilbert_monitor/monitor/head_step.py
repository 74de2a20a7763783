"""One step of the optimizer on the head, as its hooks saw it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from hilbert_monitor.optim import Group


@dataclass(frozen=True, slots=True)
class HeadStep:
    """One call of the optimizer's step, as its hooks saw it."""

    skipped: str
    """Why nothing moved ("no gradient", "overflow"), or empty."""
    options: Group
    """The hyperparameters of the parameter's group at that step: a scheduler moves lr soon after."""
    group_lr: float | Tensor | None = None
    """The learning rate in the group, of which some optimizers make another."""
    overflow: Tensor | None = None
    """On its device, whether a GradScaler had a fused optimizer skip the step, where that was not read at once."""

    @property
    def lr(self) -> float | None:
        """Learning rate of the step, if the optimizer has one."""
        lr = self.options.get("lr")
        return None if lr is None else float(lr)

    @property
    def decay(self) -> float:
        """The group's weight decay, whichever way it is used."""
        return float(self.options.get("weight_decay") or 0)


def learning_rate(optimizer: Optimizer, options: Group, state: Group) -> float | Tensor | None:
    """The learning rate of a step: that of the group, or what the Adafactor of transformers made of it."""
    make = getattr(optimizer, "_get_lr", None)
    if callable(make) and "scale_parameter" in options and "RMS" in state:
        return float(torch.as_tensor(make(options, state)))
    lr: float | Tensor | None = options.get("lr")
    return lr

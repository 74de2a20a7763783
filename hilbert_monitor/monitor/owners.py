"""Which optimizer moves a parameter, and which of several within one another has hooks that see its steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from hilbert_monitor.optim import ChainedOptimizer, Group


def group_of(optimizer: Optimizer, param: Tensor) -> Group | None:
    """The group of an optimizer that has a parameter."""
    for group in optimizer.param_groups:
        if any(param is p for p in group["params"]):
            return group
    return None


def owning_optimizer(optimizers: Sequence[Optimizer], param: Tensor) -> Optimizer | None:
    """The first of several optimizers that has a parameter."""
    return next((optimizer for optimizer in optimizers if group_of(optimizer, param) is not None), None)


def stepping_optimizer(optimizer: Any, param: Tensor) -> Optimizer:
    """The outermost optimizer whose hooks see a step of a parameter.

    That is the optimizer itself, the one of a chain that owns the parameter, or, where a wrapper has no hooks (a
    LightningOptimizer, an AcceleratedOptimizer, many a Lookahead), the one inside.
    """
    outer = hooked_optimizer(optimizer, param)
    return outer.owner(param) if isinstance(outer, ChainedOptimizer) else outer


def hooked_optimizer(optimizer: Any, param: Tensor) -> Optimizer:
    """The outermost optimizer that has hooks: as `stepping_optimizer`, but of a chain the chain itself."""
    if isinstance(optimizer, Optimizer) and _has_hooks(optimizer):
        return optimizer
    inner = inner_optimizers(optimizer, param)
    return hooked_optimizer(inner[0], param) if inner else optimizer


def inner_optimizers(optimizer: Any, param: Tensor) -> list[Optimizer]:
    """Optimizers that another one has as attributes and that own the parameter too, as SAM's base_optimizer."""
    return [
        value
        for value in vars(optimizer).values()
        if isinstance(value, Optimizer) and value is not optimizer and owning_optimizer([value], param) is not None
    ]


def _has_hooks(optimizer: Optimizer) -> bool:
    """Whether torch calls the hooks of an optimizer: a wrapper that never calls Optimizer.__init__ has none."""
    return hasattr(optimizer, "_optimizer_step_pre_hooks") and getattr(type(optimizer).step, "hooked", False)

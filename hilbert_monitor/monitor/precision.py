"""The precision in which a forward pass sees the head's weight, where it is less than the weight has."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from .hidden import AutocastFactory
from .runtime import compute_device


def seen_dtype(model: Module, weight: Tensor, autocast: AutocastFactory | None) -> torch.dtype | None:
    """Return what a forward pass casts a weight to: by a mixed-precision policy of FSDP, or under autocast.

    Args:
        model: that has the weight.
        weight: a parameter of it.
        autocast: makes the context in which the model runs its forward pass.

    Returns:
        The dtype, if it is another and has less precision than the weight's.
    """
    dtype = _policy_dtype(model, weight) or _autocast_dtype(compute_device(weight).type, autocast)
    return dtype if dtype is not None and dtype.itemsize < weight.dtype.itemsize else None


def _policy_dtype(model: Module, weight: Tensor) -> torch.dtype | None:
    """The dtype to which FSDP casts the parameters of the innermost of its modules that has the weight."""
    found: torch.dtype | None = None
    for module in model.modules():  # outer ones first
        state: Any = getattr(module, "_get_fsdp_state", None)
        if state is not None and any(p is weight for p in module.parameters()):
            found = getattr(getattr(state(), "_mp_policy", None), "param_dtype", None)
    return found


def _autocast_dtype(device: str, autocast: AutocastFactory | None) -> torch.dtype | None:
    with (autocast or nullcontext)():
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None

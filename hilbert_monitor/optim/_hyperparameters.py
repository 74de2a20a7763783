"""Parameter groups of an optimizer: checks of their hyperparameters, copies of them, and names for messages."""

from __future__ import annotations

import sys
from numbers import Real
from typing import Any

from torch import Tensor

Group = dict[str, Any]
"""One of an optimizer's `param_groups`, or the hyperparameters of one."""


def check_number(
    group: Group, name: str, *, least: float = 0.0, below: float = sys.float_info.max, tensor: bool = False
) -> None:
    """Refuse a hyperparameter that is not a finite number in [least, below).

    Args:
        group: holds the hyperparameter.
        name: its key.
        least: smallest value that is allowed.
        below: smallest value that is too large.
        tensor: allow a tensor of one element as well.
    """
    value = group[name]
    if tensor and isinstance(value, Tensor) and value.dtype.is_floating_point:
        if value.numel() != 1:
            raise ValueError(f"{name} must be a number or a tensor with one element, got shape {tuple(value.shape)}")
    elif isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number{' or a real tensor of one' if tensor else ''}, got {value!r}")
    if not least <= value < below:
        limit = "" if below == sys.float_info.max else f" and below {below:g}"
        raise ValueError(f"{name} must be finite, at least {least:g}{limit}, got {value}")


def check_choice(group: Group, name: str, allowed: tuple[Any, ...]) -> None:
    """Refuse a hyperparameter that is not one of `allowed`. Strings are compared by value, all else by identity."""
    if not any(group[name] is a or (isinstance(a, str) and group[name] == a) for a in allowed):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {group[name]!r}")


def options_of(group: Group) -> Group:
    """Copy the hyperparameters of a group, so that a scheduler that changes lr later does not change the copy."""
    options = {name: value for name, value in group.items() if name not in ("params", "param_names")}
    if isinstance(options.get("lr"), Tensor):
        options["lr"] = options["lr"].detach().clone().reshape(())
    return options


def parameter_label(group: Group, index: int) -> str:
    """Return what a message calls a group's parameter: its name, or else its position, and its shape."""
    shape = tuple(group["params"][index].shape)
    if "param_names" in group:
        return f"'{group['param_names'][index]}' {shape}"
    return f"number {index} {shape}"

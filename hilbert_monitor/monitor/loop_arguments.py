"""What a user gives `watch` of a loop: mistakes that can be seen at once are errors there, not warnings later."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

from torch import Tensor
from torch.nn import Module

from .panel import Panel, check_panel_folder


def check_loop_arguments(
    model: Any,
    optimizer: Any,
    *,
    panel: Any = None,
    log: Any = None,
    autocast: Any = None,
    first_step: Any = 0,
    last_step: Any = None,
    seed: Any = None,
    data_ranks: Any = None,
    save_checkpoint: Any = None,
) -> None:
    """Refuse what cannot be an argument of `watch`, whose arguments these are.

    Raises:
        TypeError: for a value of the wrong kind; the message says which and what to give.
        ValueError: for a negative number.
    """
    if not isinstance(model, Module):
        raise TypeError(f"the model has to be a torch.nn.Module, got {_kind(model)}: watch(model, optimizer, ...)")
    several = optimizer if isinstance(optimizer, Sequence) else [optimizer]
    wrong = [_kind(one) for one in several if not hasattr(one, "param_groups")]
    if wrong or not several:
        raise TypeError(
            "the optimizer has to be the one that moves the head, or a list of optimizers, got"
            f" {wrong[0] if wrong else 'none'}: watch(model, optimizer, ...)"
        )
    if isinstance(panel, str | os.PathLike):
        check_panel_folder(panel)
    elif isinstance(panel, bytes) or not isinstance(panel, Panel | Tensor | Iterable | None):
        raise TypeError(
            f"panel takes token ids, batches or a DataLoader of validation text, got {_kind(panel)}: a text has to be"
            " tokenized first"
        )
    if log is not None and not callable(log):
        raise TypeError(f"log takes a function of a dict and a step, such as wandb.log, got {_kind(log)}")
    if autocast is not None and (not callable(autocast) or hasattr(autocast, "__enter__")):
        raise TypeError(
            f"autocast takes a function that makes a context, got {_kind(autocast)}: write lambda:"
            ' torch.autocast("cuda", torch.bfloat16)'
        )
    if save_checkpoint is not None and not callable(save_checkpoint):
        raise TypeError(f"save_checkpoint takes a function of a path, got {_kind(save_checkpoint)}")
    _check_number("first_step", first_step, "a number of updates", least=0)
    _check_number("last_step", last_step, "a number of updates", least=0)
    _check_number("data_ranks", data_ranks, "a number of processes", least=1)
    _check_number("seed", seed, "a whole number")


def _check_number(name: str, value: Any, what: str, *, least: int | None = None) -> None:
    """Refuse what is no whole number, or too small; None is no number, and is left alone."""
    if value is None:
        return
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{name} is {what}, got {value!r}")
    if least is not None and int(value) < least:
        raise ValueError(f"{name} is {what}, {'zero' if least == 0 else 'one'} or more, got {value!r}")


def check_state(state: Any) -> None:
    """Refuse what no `state_dict()` of a watched run has returned.

    Raises:
        TypeError: if it is no dict.
        ValueError: if it is the dict of something else.
    """
    what = "the state has to be what run.state_dict() returned"
    if not isinstance(state, Mapping):
        raise TypeError(f"{what}, got {_kind(state)}: load the checkpoint, and give its part")
    if state and not isinstance(state.get("step"), int):
        keys = ", ".join(map(repr, list(state)[:6]))
        raise ValueError(f'{what}, with a "step", got a dict with {keys}: give its part of the checkpoint')


def _kind(value: Any) -> str:
    """A value by its class, or as it is where that says more."""
    return repr(value) if value is None or isinstance(value, str | int) else type(value).__name__

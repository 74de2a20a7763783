"""Hooks around the steps of an optimizer: once for each step, also where one step calls another."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch
from torch.optim import Optimizer


def hook_steps(
    optimizers: Iterable[Optimizer], begin: Callable[[], None], end: Callable[[], None]
) -> Callable[[], None]:
    """Call `begin` before and `end` after each step; return a function that removes the hooks.

    Of steps within one another, such as that of a base class within that of a subclass, the outermost counts. A step
    that is compiled has no hooks.

    Args:
        optimizers: whose steps are one and the same: an optimizer, and those that it calls.
        begin: called before a step.
        end: called after it; not if the step raised.
    """
    outermost: FrameType | None = None

    def before(*_: Any) -> None:
        nonlocal outermost
        if torch.compiler.is_dynamo_compiling():
            return
        caller = sys._getframe(1)
        if not _on_the_stack(outermost, caller):
            outermost = caller
            begin()

    def after(*_: Any) -> None:
        nonlocal outermost
        if torch.compiler.is_dynamo_compiling() or sys._getframe(1) is not outermost:
            return
        outermost = None
        end()

    handles = [
        handle
        for optimizer in optimizers
        for handle in (optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after))
    ]

    def remove() -> None:
        nonlocal outermost
        for handle in handles:
            handle.remove()
        outermost = None  # which holds on to what the caller has

    return remove


def _on_the_stack(frame: FrameType | None, caller: FrameType | None) -> bool:
    """Whether `frame` is `caller` or one of the frames that led to it."""
    while frame is not None and caller is not None:
        if caller is frame:
            return True
        caller = caller.f_back
    return False

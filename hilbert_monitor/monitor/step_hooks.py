"""Hooks around the steps of an optimizer: once for each step, also where one step calls another."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch
from torch.optim import Optimizer


def hook_steps(
    optimizers: Iterable[Optimizer],
    begin: Callable[[], None],
    end: Callable[[], None],
    *,
    after_closure: Callable[[], bool] = lambda: False,
) -> Callable[[], None]:
    """Call `begin` before and `end` after each step; return a function that removes the hooks.

    Of steps within one another, such as that of a base class within that of a subclass, the outermost counts. A step
    that is compiled has no hooks, and one that a CUDA graph captures does not call them.

    Args:
        optimizers: whose steps are one and the same: an optimizer, and those that it calls.
        begin: called before a step.
        end: called after it; not if the step raised.
        after_closure: asked whether a step that is given a closure begins when that has run for the first time. Right
            for optimizers that run it before they move anything, as torch's do.
    """
    outermost: FrameType | None = None

    def before(_: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        nonlocal outermost
        if not _is_hooked():
            return None
        caller = sys._getframe(1)
        if _on_the_stack(outermost, caller):
            return None
        outermost = caller
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure) or not after_closure():
            begin()
            return None
        closure = _followed(closure, begin)
        return (args, kwargs | {"closure": closure}) if "closure" in kwargs else ((args[0], closure, *args[2:]), kwargs)

    def after(*_: Any) -> None:
        nonlocal outermost
        if not _is_hooked() or sys._getframe(1) is not outermost:
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


def _is_hooked() -> bool:
    """Whether the step is one that runs now: not one that is being compiled or captured, to be run again unseen."""
    if torch.compiler.is_dynamo_compiling():
        return False
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def _followed(closure: Callable[[], Any], begin: Callable[[], None]) -> Callable[[], Any]:
    """Return a closure that calls `begin` when it has run for the first time."""
    begun = False

    def both() -> Any:
        nonlocal begun
        loss = closure()
        if not begun:
            begun = True
            with torch.no_grad():
                begin()
        return loss

    return both


def _on_the_stack(frame: FrameType | None, caller: FrameType | None) -> bool:
    """Whether `frame` is `caller` or one of the frames that led to it."""
    while frame is not None and caller is not None:
        if caller is frame:
            return True
        caller = caller.f_back
    return False

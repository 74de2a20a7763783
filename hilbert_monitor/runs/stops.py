"""Tells a requested stop, by a signal, from a failure."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from functools import partial
from inspect import CO_VARARGS
from itertools import pairwise
from traceback import walk_tb
from types import CodeType, FrameType
from typing import Any

STOPS = (signal.SIGTERM, signal.SIGINT)
"""Signals that ask a process to stop: clusters send the first, Ctrl-C is the second."""


def requested_stop(error: BaseException | None) -> str:
    """Return the name of the signal that asked for the end of a run, "SIGTERM" or "SIGINT"; empty if none did.

    That is a Ctrl-C, Lightning's SIGTERMException, `sys.exit` with the code that a shell gives such an end (143, 130),
    and whatever a handler of the signal raises.
    """
    if error is None:
        return ""
    handled = handled_signals(error)
    for number in STOPS:
        if number in handled:
            return number.name
    if isinstance(error, KeyboardInterrupt):
        return signal.SIGINT.name
    if any(kind.__name__ == "SIGTERMException" for kind in type(error).__mro__):
        return signal.SIGTERM.name
    codes = {128 + number: number.name for number in STOPS}
    return codes.get(error.code, "") if isinstance(error, SystemExit) and isinstance(error.code, int) else ""


def handled_signals(error: BaseException) -> set[int]:
    """Return the signals whose handlers, as Python functions, raised an exception or let it through; mostly none.

    A handler is known by its call: Python gives it the number of the signal and the frame that it interrupts, which is
    its caller too. No other function is given these. So it does not matter how a handler was installed, or whether it
    has removed itself since. One that has deleted these arguments is known by its code, while it is installed.
    """
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    called = {number for frame in frames for number in _signal_of(frame)}
    codes = {frame.f_code for frame in frames}
    return called or {number for number in signal.valid_signals() if _code(signal.getsignal(number)) in codes}


def _signal_of(frame: FrameType) -> Iterator[int]:
    """Yield the signal that a frame was called to handle, if it was."""
    for number, interrupted in pairwise(_arguments(frame)):
        if interrupted is not None and interrupted is frame.f_back and isinstance(number, int):
            yield number


def _arguments(frame: FrameType) -> list[Any]:
    """Return the arguments that a frame's function was called with by position, as they are now."""
    code = frame.f_code
    values = [frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount]]
    if code.co_flags & CO_VARARGS:
        values += frame.f_locals.get(code.co_varnames[code.co_argcount + code.co_kwonlyargcount]) or ()
    return values


def _code(handler: Any) -> CodeType | None:
    """Return the code of a signal handler: a function, a method, a functools.partial, or an object with __call__."""
    if not callable(handler):  # SIG_DFL, SIG_IGN, or one that was not set from Python
        return None
    while isinstance(handler, partial):
        handler = handler.func
    code = getattr(handler, "__code__", None) or getattr(type(handler).__call__, "__code__", None)
    return code if isinstance(code, CodeType) else None

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
    has removed itself since. One that has overwritten or deleted its arguments is known by its code, if it was
    installed at the start of a run or is installed now.
    """
    note_handlers()
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    called = {number for frame in frames for number in _signal_of(frame)}
    return called or {number for frame in frames if frame.f_code in _seen for number in _signals_by_code(frame)}


_seen: dict[CodeType, set[int]] = {}
"""The signals of every handler that was found installed, by its code."""


def note_handlers() -> None:
    """Remember the signal handlers that are installed now, for when they have removed themselves."""
    for number in signal.valid_signals():
        code = _code(signal.getsignal(number))
        if code is not None:
            _seen.setdefault(code, set()).add(number)


def _signal_of(frame: FrameType) -> Iterator[int]:
    """The signal that a frame was called to handle, if it was."""
    caller = frame.f_back
    for number, interrupted in pairwise(_arguments(frame)):
        if caller is not None and interrupted is caller and isinstance(number, int):
            yield number


def _signals_by_code(frame: FrameType) -> set[int]:
    """The signal that a frame of a handler's code still has as an argument, or all that the handler was seen with."""
    signals = _seen[frame.f_code]
    return {value for value in _arguments(frame) if isinstance(value, int) and value in signals} or signals


def _arguments(frame: FrameType) -> list[Any]:
    """The arguments that a frame's function was called with by position, as they are now."""
    names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
    values = [frame.f_locals.get(name) for name in names]
    if frame.f_code.co_flags & CO_VARARGS:
        more = frame.f_locals.get(frame.f_code.co_varnames[len(names) + frame.f_code.co_kwonlyargcount])
        values += more if isinstance(more, tuple) else ()
    return values


def _code(handler: Any) -> CodeType | None:
    """Return the code of a signal handler: a function, a method, a functools.partial, or an object with __call__."""
    if not callable(handler):  # SIG_DFL, SIG_IGN, or one that was not set from Python
        return None
    while isinstance(handler, partial):
        handler = handler.func
    code = getattr(handler, "__code__", None) or getattr(type(handler).__call__, "__code__", None)
    return code if isinstance(code, CodeType) else None

"""Whether an exception that ended a run was a stop that somebody asked for, by a signal."""

from __future__ import annotations

import signal
from collections.abc import Iterator
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
    signals = [number for frame in handler_frames(error) for number in STOPS if number in _arguments(frame)]
    if signals:
        return signals[0].name
    if isinstance(error, KeyboardInterrupt):
        return signal.SIGINT.name
    if any(kind.__name__ == "SIGTERMException" for kind in type(error).__mro__):
        return signal.SIGTERM.name
    codes = {128 + number: number.name for number in STOPS}
    return codes.get(error.code, "") if isinstance(error, SystemExit) and isinstance(error.code, int) else ""


def handler_frames(error: BaseException) -> Iterator[FrameType]:
    """The frames of Python functions that handle a signal, through which an exception came."""
    handlers = {_code(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    if handlers:
        yield from (frame for frame, _ in walk_tb(error.__traceback__) if frame.f_code in handlers)


def _arguments(frame: FrameType) -> list[int]:
    """The arguments of a frame's function that are whole numbers: a handler gets that of its signal."""
    names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
    values = [frame.f_locals.get(name) for name in names]
    if frame.f_code.co_flags & 0x04:  # *args
        values += frame.f_locals.get(frame.f_code.co_varnames[len(names) + frame.f_code.co_kwonlyargcount], ())
    return [value for value in values if isinstance(value, int)]


def _code(handler: Any) -> CodeType | None:
    """Return the code of a signal handler: a function, a method, a functools.partial, or an object with __call__."""
    if not callable(handler):  # SIG_DFL, SIG_IGN, or one that was not set from Python
        return None
    while hasattr(handler, "func"):
        handler = handler.func
    code = getattr(handler, "__code__", None) or getattr(type(handler).__call__, "__code__", None)
    return code if isinstance(code, CodeType) else None

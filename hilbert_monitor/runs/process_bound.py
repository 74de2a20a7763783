"""Objects that only the process that made them may use.

A fork copies every lock as it is at that moment, but not the thread that would release it, and it shares open files,
sockets and file locks with the parent. A child that takes such a lock may wait forever. So whatever holds a lock, a
thread, a file or a socket of a run is a `ProcessBound` object, and does nothing in a forked child.
"""

from __future__ import annotations

import functools
import os
import sys
import traceback
import weakref
from contextlib import suppress
from typing import NoReturn


class ProcessBound:
    """An object of a run. It is usable in the process that called `bind_to_process`."""

    inherited = False
    """True in a forked child of that process. Check it before you take a lock."""

    def bind_to_process(self) -> None:
        """Make the present process the owner."""
        _register_at_fork()
        self.inherited = False
        _objects.add(self)

    def on_fork(self) -> None:
        """Close what the child shares with its parent. Called in the child, before `os.fork` returns there."""


def forks() -> int:
    """Return a number that changes with every fork of this process, before and after it."""
    _register_at_fork()
    return _forks


def end_child(error: BaseException | None = None) -> NoReturn:
    """End a child that was forked by a function of the user's in a thread of ours: the thread has nothing to do there.

    `error` is what the function raised, if it did.
    """
    status = 0 if error is None else 1
    if isinstance(error, SystemExit):
        status = 0 if error.code is None else error.code & 0xFF if isinstance(error.code, int) else 1
    elif error is not None:
        traceback.print_exception(error)
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(status)


_forks = 0
_objects: weakref.WeakSet[ProcessBound] = weakref.WeakSet()


@functools.cache
def _register_at_fork() -> None:
    os.register_at_fork(before=_count, after_in_parent=_count, after_in_child=_mark_inherited)


def _count() -> None:
    global _forks
    _forks += 1


def _mark_inherited() -> None:
    objects = list(_objects)
    _objects.clear()
    for item in objects:
        item.inherited = True
    for item in objects:
        with suppress(Exception):  # one that fails must not leave the others open
            item.on_fork()

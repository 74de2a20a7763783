"""The plain state of Python objects: saved before the monitor calls the user's code, and put back after it.

A data set may count its items, and a forward pass its calls. `SavedState` walks from an object to what it holds:

- attributes, in ``__dict__`` and ``__slots__``, and plain attributes of the classes;
- lists, dicts, sets and deques: the container itself is copied if it has at most LONG entries, and the entries are
  looked at too if there are at most SHORT;
- what a function, a bound method or a functools.partial carries with it;
- generators of random numbers of torch, numpy and Python, and the place at which a file is read;
- tensors and arrays, the smallest first, as many as fit into `memory`. Larger ones are taken to be data. If one of
  them is a tensor and was written to, `SavedState.lost` names it afterwards.

Only what has changed is put back. `SavedState.unseen` lists what the walk cannot look into: an iterator, a thread, an
object written in C. Objects of the packages in DATA are not looked into: reading does not change what they deliver.
Global variables of a Python module are not looked at.
"""

from __future__ import annotations

import concurrent.futures
import datetime
import functools
import io
import mmap
import multiprocessing.process
import queue
import random
import re
import socket
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from enum import Enum
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from .undo import (
    CONTAINERS,
    Undo,
    has_memory,
    is_generator,
    undo_array,
    undo_cell,
    undo_class,
    undo_container,
    undo_dict,
    undo_file,
    undo_generator,
    undo_slot,
    undo_tensor,
)

SHORT = 1_000
"""Entries of a container that is looked into."""
LONG = 100_000
"""Entries of a container that is copied."""
OBJECTS = 200_000
"""Objects that one walk looks at."""

DATA = frozenset(
    {
        *("array", "decimal", "logging", "operator", "regex"),
        *("h5py", "lmdb", "numpy", "pandas", "polars", "pyarrow", "torch", "zarr"),
        *("sentencepiece", "tiktoken", "tokenizers"),
    }
)
"""Packages whose objects deliver the same item however often they are read, or only report."""
LEAVES = (
    *(type(None), bool, int, float, complex, str, bytes, memoryview, range, slice, type, Enum, PurePath, re.Pattern),
    *(types.ModuleType, types.MappingProxyType, types.GenericAlias, types.EllipsisType, weakref.ref),
    *(types.MethodDescriptorType, types.WrapperDescriptorType, functools._lru_cache_wrapper, random.SystemRandom),
    *(datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo),
    *(type(threading.Lock()), type(threading.RLock())),
)
"""Types whose values do not change, or not in a way that matters."""
CONCURRENT = (
    *(threading.Thread, queue.Queue, queue.SimpleQueue, socket.socket),
    *(concurrent.futures.Executor, concurrent.futures.Future, multiprocessing.process.BaseProcess),
)
"""Types of which another thread or process may change something at any time."""

Follow = Callable[[type], bool]
"""Whether objects of this class are looked into."""

Held = Iterable[tuple[Any, str]]
"""What an object holds, each with a name for messages."""


class SavedState:
    """What can be seen of the state of some objects, as it is now.

    Args:
        roots: the objects, with names for messages.
        follow: of which classes other objects are looked into. Modules always are.
        memory: bytes of tensors and arrays that are copied.
    """

    def __init__(self, roots: Iterable[tuple[str, Any]], *, follow: Follow, memory: int) -> None:
        self.unseen: list[str] = []
        """What could not be looked into."""
        self.lost: list[str] = []
        """Tensors that had changed at `restore` and were not copied before."""
        self._follow = follow
        self._visited: dict[int, Any] = {}  # holds the objects, so that no other gets their ids
        self._undo: list[Undo] = []
        self._seeds: list[Callable[[int], Any]] = []
        self._arrays: list[tuple[float, str, Any]] = []
        waiting = deque((value, name) for name, value in roots)
        while waiting:
            value, name = waiting.popleft()
            if isinstance(value, LEAVES) or type(value) is object or id(value) in self._visited:
                continue
            if len(self._visited) == OBJECTS:
                self.unseen.append(f"more than {OBJECTS:,} objects")
                break
            self._visited[id(value)] = value
            waiting.extend(self._look_at(value, name))
        self._copy_arrays(memory)

    def seed(self, seed: int) -> None:
        """Seed the generators that were found."""
        for each in self._seeds:
            each(seed)

    def restore(self) -> None:
        """Put back what has changed; all of it, also where a part fails."""
        with torch.no_grad(), ExitStack() as stack:
            for undo in self._undo:
                stack.callback(undo)

    # One object: remember it as it is now, and return what it holds

    def _look_at(self, x: Any, name: str) -> Held:
        if is_generator(x):
            undo, seed = undo_generator(x)
            self._undo.append(undo)
            self._seeds.append(seed)
            return ()
        if isinstance(x, Tensor) or _is_array(x):
            self._arrays.append((_bytes_to_copy(x), name, x))
            return ()
        if isinstance(x, CONTAINERS):
            return self._container(x, name)
        if isinstance(x, tuple | frozenset):
            return [(value, f"{name}[...]") for value in x] if len(x) <= SHORT else ()
        if isinstance(x, types.FunctionType):
            return self._function(x, name)
        if isinstance(x, types.MethodType | types.BuiltinMethodType | types.MethodWrapperType):
            return [(x.__self__, name), (getattr(x, "__func__", None), name)]
        if isinstance(x, functools.partial):
            return [(x.func, name), (x.args, name), (x.keywords, name)]
        if isinstance(x, io.IOBase | mmap.mmap):
            return self._file(x, name)
        return self._object(x, name)

    def _object(self, x: Any, name: str) -> Held:
        kind, attributes = type(x), _attributes(x)
        if not isinstance(x, Module):
            if (_package(kind) in DATA and not kind.__module__.startswith("torch.utils.data")) or not self._follow(
                kind
            ):
                return ()
            shared = isinstance(x, CONCURRENT) or any(isinstance(value, CONCURRENT) for value in attributes.values())
            if shared or not (_has_dict(x) or _slots(kind)):
                self.unseen.append(f"{name} (a {kind.__name__})")
                return ()
        self._remember_attributes(x)
        if isinstance(x, Module):  # its parameters, but not which they are: FSDP exchanges shards and whole ones
            attributes = {key: value for key, value in attributes.items() if not _is_empty_hooks(key, value)}
            attributes |= attributes.pop("_parameters", {})
        held = ((value, f"{name}.{key}") for key, value in attributes.items())
        return [*held, *self._class(kind, name)]

    def _remember_attributes(self, x: Any) -> None:
        if _has_dict(x):
            self._undo.append(undo_dict(x.__dict__))
        self._undo.extend(undo_slot(x, slot) for slot in _slots(type(x)))

    def _class(self, kind: type, name: str) -> Iterator[tuple[Any, str]]:
        """Remember the plain attributes of a class and of those above it."""
        for cls in kind.__mro__:
            if id(cls) in self._visited or _package(cls) in (*DATA, "builtins") or not self._follow(cls):
                continue
            self._visited[id(cls)] = cls
            plain = {
                key: value
                for key, value in list(vars(cls).items())
                if not key.startswith("__")
                and (isinstance(value, (*CONTAINERS, *LEAVES, Tensor)) or is_generator(value))
            }
            self._undo.append(undo_class(cls, plain))
            yield from ((value, f"{name}.{key}") for key, value in plain.items())

    def _container(self, x: Any, name: str) -> Held:
        if _package(type(x)) not in ("builtins", "collections"):
            self._remember_attributes(x)
        if len(x) > LONG:
            return ()
        self._undo.append(undo_container(x))
        if len(x) > SHORT or isinstance(x, bytearray):
            return ()
        if isinstance(x, dict):
            return [(value, f"{name}.{key}") for key, value in list(dict.items(x))]
        return [(value, f"{name}[...]") for value in list(x)]

    def _function(self, x: types.FunctionType, name: str) -> Held:
        held: list[tuple[Any, str]] = [(x.__defaults__, name), (x.__kwdefaults__, name)]
        for variable, cell in zip(x.__code__.co_freevars, x.__closure__ or (), strict=True):
            undo, value = undo_cell(cell)
            self._undo.append(undo)
            held.append((value, f"{name}, {variable}"))
        self._remember_attributes(x)
        return [*held, *((value, f"{name}.{key}") for key, value in x.__dict__.items())]

    def _file(self, x: Any, name: str) -> Held:
        if not x.closed and (isinstance(x, mmap.mmap) or x.readable()):
            try:
                self._undo.append(undo_file(x))
            except OSError:  # a pipe, or text that is being iterated
                self.unseen.append(f"{name} (a {type(x).__name__})")
        return ()

    def _copy_arrays(self, memory: float) -> None:
        for size, name, x in sorted(self._arrays, key=lambda entry: entry[0]):
            memory -= size
            if memory >= 0:
                self._undo.append(undo_tensor(x) if isinstance(x, Tensor) else undo_array(x))
            elif isinstance(x, Tensor):
                self._undo.append(self._notice(x, name))

    def _notice(self, x: Tensor, name: str) -> Undo:
        """Not to put a tensor back, but to say that it was written to."""
        version = _version(x)
        name = name.replace("._buffers.", ".")
        return lambda: self.lost.append(name) if _version(x) != version else None


@contextmanager
def kept_state(roots: Iterable[tuple[str, Any]], *, follow: Follow, memory: int) -> Iterator[SavedState]:
    """Put back at the end of the block what it has changed of some objects. The arguments are those of `SavedState`."""
    state = SavedState(roots, follow=follow, memory=memory)
    try:
        yield state
    finally:
        state.restore()


def same_packages(objects: Iterable[Any]) -> Follow:
    """Follow classes of the packages that these objects' classes come from, such as the user's own and Hugging Face's.

    A class that inherits from one of another package is not followed: it may be a Trainer, or a logger with threads.
    """
    packages = {_package(type(x)) for x in objects} - DATA | {"builtins", "abc", "typing", "types", "collections"}

    def follow(kind: type) -> bool:
        classes = (kind,) if issubclass(kind, Module) else kind.__mro__
        own = kind.__module__.startswith("hilbert_monitor.monitor")
        return not own and all(_package(cls) in packages for cls in classes)

    return follow


# Kinds of things


def _package(kind: type) -> str:
    return str(kind.__module__).partition(".")[0]


def _is_array(x: Any) -> bool:
    """Whether this is an array of numpy, in memory, that can be written to."""
    numpy = sys.modules.get("numpy")
    return (
        numpy is not None
        and isinstance(x, numpy.ndarray)
        and x.flags.writeable
        and not x.dtype.hasobject
        and not isinstance(x, numpy.memmap)
    )


def _bytes_to_copy(x: Any) -> float:
    """Bytes of a tensor or an array; infinitely many of a tensor that cannot simply be written back."""
    if not isinstance(x, Tensor):
        return float(x.nbytes)
    plain = type(x) in (Tensor, torch.nn.Parameter, torch.nn.Buffer) and x.layout is torch.strided
    if not plain or x.device.type == "meta" or not has_memory(x):
        return float("inf")
    repeated = any(step == 0 and size > 1 for step, size in zip(x.stride(), x.shape, strict=True))
    return float("inf") if repeated else float(x.nbytes)


def _version(x: Tensor) -> int | None:
    return None if x.is_inference() else x._version


def _has_dict(x: Any) -> bool:
    return isinstance(getattr(x, "__dict__", None), dict)


def _slots(kind: type) -> list[Any]:
    """The descriptors of the slots of a class that is written in Python."""
    return [
        member
        for cls in kind.__mro__
        if "__slots__" in vars(cls)
        for member in vars(cls).values()
        if isinstance(member, types.MemberDescriptorType)
    ]


def _attributes(x: Any) -> dict[str, Any]:
    """The attributes that an object has itself, not those of its class."""
    attributes = dict(x.__dict__) if _has_dict(x) else {}
    for slot in _slots(type(x)):
        try:
            attributes[slot.__name__] = slot.__get__(x)
        except AttributeError:
            continue
    return attributes


def _is_empty_hooks(name: str, value: Any) -> bool:
    """Whether these are hooks that a module does not have. Each module has a dozen such dicts."""
    return "_hooks" in name and isinstance(value, dict) and not value

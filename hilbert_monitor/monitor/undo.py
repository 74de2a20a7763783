"""Functions that remember one thing as it is now. Each returns a function that puts it back if it has changed."""

from __future__ import annotations

import functools
import random
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable
from operator import is_
from typing import Any

import torch
from torch import Tensor

Undo = Callable[[], Any]
"""Puts one thing back."""

CONTAINERS = (list, dict, set, deque, bytearray)
"""Python's own containers that can change."""


def undo_dict(attributes: dict[str, Any]) -> Undo:
    """Remember the attributes of an object."""
    before = dict(attributes)

    def undo() -> None:
        for key in attributes.keys() - before.keys():
            del attributes[key]
        for key, value in before.items():
            if key not in attributes or attributes[key] is not value:
                attributes[key] = value

    return undo


def undo_slot(x: Any, slot: Any) -> Undo:
    """Remember the value of a slot, or that it has none."""
    missing = object()

    def read() -> Any:
        try:
            return slot.__get__(x)
        except AttributeError:
            return missing

    before = read()

    def undo() -> None:
        if read() is before:
            return
        if before is missing:
            slot.__delete__(x)
        else:
            slot.__set__(x, before)

    return undo


def undo_class(cls: type, before: dict[str, Any]) -> Undo:
    """Remember these attributes of a class."""

    def undo() -> None:
        for key, value in before.items():
            if vars(cls).get(key) is not value:
                setattr(cls, key, value)

    return undo


def undo_container(x: Any) -> Undo:
    """Remember the entries of a container.

    They are put back by the methods of Python's own type: those of a subclass may do more.
    """
    kind: Any = next(t for t in (OrderedDict, *CONTAINERS) if isinstance(x, t))
    before = dict.copy(x) if isinstance(x, dict) else kind(x)

    def same() -> bool:
        if len(x) != len(before) or isinstance(x, set | bytearray):
            return bool(x == before)
        if isinstance(x, dict):
            return all(map(is_, dict.keys(x), before)) and all(map(is_, dict.values(x), before.values()))
        return all(map(is_, x, before))

    def undo() -> None:
        if not same():
            kind.clear(x)
            (kind.update if isinstance(x, dict | set) else kind.extend)(x, before)

    return undo


def undo_cell(cell: types.CellType) -> tuple[Undo, Any]:
    """Remember a variable that a function shares with the one around it; return its value too."""
    try:
        before = cell.cell_contents
    except ValueError:  # it has no value yet
        return lambda: None, None

    def undo() -> None:
        cell.cell_contents = before

    return undo, before


def undo_file(x: Any) -> Undo:
    """Remember where a file is read. Raises OSError if it cannot be set back."""
    place = x.tell()
    x.seek(place)

    def undo() -> None:
        if not x.closed and x.tell() != place:
            x.seek(place)

    return undo


def undo_tensor(x: Tensor) -> Undo:
    """Remember the values of a tensor."""
    before = x.detach().clone()

    def undo() -> None:
        """Write through `.data`, so that autograd sees no write. On a device all is copied, and nothing waits."""
        if x.shape != before.shape or not has_memory(x):
            x.data = before
        elif x.device.type != "cpu" or not _equal_on_the_host(x, before):
            x.data.copy_(before)

    return undo


def _equal_on_the_host(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x, y)


def has_memory(x: Tensor) -> bool:
    """Whether the memory of a tensor is there: some frameworks free it between passes."""
    return x.untyped_storage().nbytes() >= x.element_size() * bool(x.numel())


def undo_array(x: Any) -> Undo:
    """Remember the values of a numpy array."""
    before = x.copy()

    def undo() -> None:
        if x.tobytes() != before.tobytes():
            x[...] = before

    return undo


def undo_generator(x: Any) -> tuple[Undo, Callable[[int], Any]]:
    """Remember the state of a generator of random numbers; return also how it is seeded."""
    if isinstance(x, torch.Generator):
        state: Any = x.get_state()
        return functools.partial(x.set_state, state), x.manual_seed
    if isinstance(x, random.Random):
        return functools.partial(x.setstate, x.getstate()), x.seed
    if hasattr(x, "get_state"):  # numpy's RandomState
        return functools.partial(x.set_state, x.get_state()), x.seed
    bits = getattr(x, "bit_generator", x)
    state = bits.state
    return lambda: setattr(bits, "state", state), lambda seed: setattr(bits, "state", type(bits)(seed).state)


def is_generator(x: Any) -> bool:
    """Whether this is a generator of random numbers of torch, numpy or Python, with a state of its own."""
    numpy = sys.modules.get("numpy.random")
    kinds = (numpy.Generator, numpy.BitGenerator, numpy.RandomState) if numpy else ()
    return isinstance(x, (torch.Generator, random.Random, *kinds)) and not isinstance(x, random.SystemRandom)

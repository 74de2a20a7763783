"""The panel of a loop of one's own: made of what the user gives, the same on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn import Module

from .batches import Batch, with_decoder_inputs
from .panel import Panel
from .runtime import Ranks, keep_random_state

GivenPanel = Panel | Tensor | Iterable[Any]
"""Token ids, batches, a DataLoader, or a panel."""


def given_panel(given: GivenPanel, size: int, *, model: Module, ranks: Ranks) -> Panel | None:
    """Make a panel of what a user gives. Called on every rank.

    Ranks that give the same have it. Ranks that give batches of their own make an equal part of it each.

    Args:
        given: see `GivenPanel`. A DataLoader is not iterated where its dataset has items.
        size: number of positions on all ranks together.
        model: that is trained; the batches of an encoder-decoder get the ids of its decoder.
        ranks: those that train together.

    Returns:
        The panel; None if another rank could not make its own.
    """
    mine: Panel | None = None
    try:
        mine = _own_panel(given, size, model)
    finally:  # also after a failure: the other ranks wait for this one
        hashes = ranks.gather(None if mine is None else mine.hash)
    different = list(dict.fromkeys(hashes))
    if mine is None or None in different:
        return None
    if len(different) == 1:
        return mine
    reader, readers = different.index(mine.hash), len(different)
    share = size * (reader + 1) // readers - size * reader // readers
    part: Panel | None = None
    try:
        part = Panel.of_batches(mine.batches, share) if share else Panel((), ())
    finally:
        parts = ranks.gather(part)
    first = [parts[hashes.index(one)] for one in different]
    return None if None in first else Panel.joined(first)


def _own_panel(given: GivenPanel, size: int, model: Module) -> Panel:
    """The panel of this rank."""
    if isinstance(given, Panel):
        return given
    if _are_ids(given):
        return Panel.of_tokens(given, size)  # type: ignore[arg-type]
    prepared = partial(with_decoder_inputs, model)
    if hasattr(given, "dataset") and callable(getattr(given, "collate_fn", None)):
        panel = Panel.of_loader(given, size, prepared=prepared)
        if panel is not None:
            return panel
    batches: Iterable[Batch] = [given] if isinstance(given, Mapping) else given
    with keep_random_state():
        return Panel.of_batches(map(prepared, batches), size)


def _are_ids(given: Any) -> bool:
    """Whether it is the ids of a text, or of several: no batch has one dimension only."""
    if isinstance(given, Tensor | np.ndarray):
        return True
    first = given[0] if isinstance(given, list | tuple) and given else None
    if isinstance(first, Tensor):
        return first.ndim < 2
    return isinstance(first, int) or (isinstance(first, list) and bool(first) and isinstance(first[0], int))

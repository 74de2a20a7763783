"""The fixed validation panel: positions of validation text at which the states of every measured step are read.

A position is one token of one row of a batch: what the LM head sees there depends on the row up to that token. Padding
and tokens with an ignored label are not positions.
"""

from __future__ import annotations

import copy
import hashlib
import random
import struct
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, IterableDataset

Batch = Any
"""Token ids (B, T); a tuple or list whose first ids are the input; or a mapping with "input_ids"."""

POSITIONS = 8192
IGNORED = -100
ROWS = 8
"""Rows to a micro-batch where the text does not come in batches."""


@dataclass(frozen=True, eq=False)
class Panel:
    """Micro-batches of validation text on the CPU, and which of their positions count.

    Rows without a position that counts are left out of a micro-batch: its tensors with B entries in the first dimension
    lose those. Made by `of_loader`, `of_tokens` or `of_batches`.
    """

    batches: tuple[Batch, ...]
    """As the model takes them."""
    positions: tuple[Tensor, ...]
    """For each micro-batch indices into its B * T positions, ascending; int64."""
    own: bool = False
    """Whether these are the positions of one rank already, of its own text."""

    @property
    def size(self) -> int:
        """Number of positions."""
        return sum(map(len, self.positions))

    @cached_property
    def hash(self) -> str:
        """SHA-256, in hex, of what the states are a function of.

        That is, row by row in order: the tokens up to the last position that counts, padding left out, and the places
        of the positions among them. Neither the size of micro-batches nor the width of padding enters, nor a device
        nor a dtype.
        """
        digest = hashlib.sha256()
        for batch, positions in zip(self.batches, self.positions, strict=True):
            ids, attended = input_ids(batch), _attended(batch)
            rows, columns = positions // ids.shape[1], positions % ids.shape[1]
            for row in sorted(set(rows.tolist())):
                places = attended[row].cumsum(0)[columns[rows == row]] - 1
                tokens = ids[row][attended[row]][: int(places.max()) + 1]
                entries = [len(tokens), len(places), *tokens.tolist(), *places.tolist()]
                digest.update(struct.pack(f"<{len(entries)}q", *entries))
        return digest.hexdigest()

    def share(self, rank: int, world: int) -> Panel:
        """Return the part of one rank: those of all ranks, one after the other, are the panel.

        Sizes differ by one at most; with more ranks than positions some are empty. Of a panel of one rank it is all.
        """
        _check_rank(rank, world)
        if self.own or world == 1:
            return self
        start, stop = self.size * rank // world, self.size * (rank + 1) // world
        parts, before = [], 0
        for batch, positions in zip(self.batches, self.positions, strict=True):
            part = positions[max(start - before, 0) : max(stop - before, 0)]
            before += len(positions)
            if len(part):
                parts.append(_narrowed(batch, part))
        return Panel(tuple(batch for batch, _ in parts), tuple(part for _, part in parts))

    @classmethod
    def of_loader(cls, loader: Any, size: int = POSITIONS) -> Panel | None:
        """Take the first positions of a loader's dataset, without iterating the loader.

        Items 0, 1, 2, ... go through the loader's own collate_fn in batches of its own size, so that the panel depends
        on no shuffling, no workers and no number of ranks; of a subset that a sampler draws from, its items. Random
        numbers that items draw are the same every time, and no generator of torch, numpy or Python is left advanced.

        Args:
            loader: a DataLoader; of a CombinedLoader, a list or a dict of them the first.
            size: number of positions.

        Returns:
            The panel; None if the data are a stream, or cannot be told to be anything else.
        """
        first = _first_loader(loader)
        data = getattr(first, "dataset", None)
        indexed = hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, IterableDataset)
        if not indexed or not callable(getattr(first, "collate_fn", None)):
            return None
        with random_state_kept(seed=0):
            return cls._of(_items(first), size)

    @classmethod
    def of_tokens(cls, tokens: Tensor | Sequence[Any], size: int = POSITIONS, context: int = 1024) -> Panel:
        """Take the first positions of a text.

        Args:
            tokens: ids of one text, or of several: a tensor or list with one or two dimensions; rows of a list of lists
                may have any lengths.
            size: number of positions.
            context: a text is cut into rows of this many tokens, no more than the model takes; the rest is a row too.
        """
        if not context >= 1:
            raise ValueError(f"context must be at least one token, got {context}")
        rows = [tokens] if len(tokens) and _dimensions(tokens[0]) == 0 else tokens
        texts = [torch.as_tensor(row) for row in rows]
        for text in texts:
            if text.ndim != 1 or not (_integer(text) or not len(text)):
                raise ValueError(
                    f"tokens must be integer ids with one or two dimensions, got rows of shape {tuple(text.shape)} and"
                    f" dtype {text.dtype}: give the ids that the model takes"
                )
        pieces = (piece.long() for text in texts if len(text) for piece in torch.split(text[:size], context))
        batches = (torch.stack(rows) for _, same in groupby(pieces, len) for rows in _by(ROWS, same))
        return cls._of(batches, size)

    @classmethod
    def of_batches(cls, batches: Iterable[Batch], size: int = POSITIONS, *, rank: int = 0, world: int = 1) -> Panel:
        """Take the first positions of batches already at hand; no more of them are asked for than it takes.

        Args:
            batches: as the model takes them, on any device; they are copied.
            size: number of positions on all ranks together.
            rank: with `world`, the rank whose own batches these are; it takes its part of `size` from them.
            world: number of ranks.
        """
        _check_rank(rank, world)
        part = size * (rank + 1) // world - size * rank // world
        found = cls((), ()) if size > 0 and not part else cls._of(batches, part)
        return replace(found, own=world > 1)

    @classmethod
    def _of(cls, batches: Iterable[Batch], size: int) -> Panel:
        if not size >= 1:
            raise ValueError(f"a panel has at least one position, got size={size}")
        parts, missing = [], size
        with torch.inference_mode(False):  # what is made within would be of no use outside of it
            for batch in batches:
                found = positions_of(batch)[:missing]
                if len(found):
                    parts.append(_narrowed(batch, found))
                    missing -= len(found)
                if not missing:
                    break
        if not parts:
            raise ValueError(
                f"found no position in the validation text, of {size} asked for: it is empty, or all padding and labels"
                f" of {IGNORED}"
            )
        if missing:
            warnings.warn(
                f"the validation text has {size - missing} positions, fewer than the {size} asked for: the panel is of"
                f" {size - missing}",
                stacklevel=3,
            )
        return cls(tuple(batch for batch, _ in parts), tuple(found for _, found in parts))


def token_ids(batch: Batch) -> Tensor | None:
    """Return the input ids of a batch, (B, T), if it has any."""
    if isinstance(batch, Mapping):
        found = [batch.get("input_ids")]
    else:
        found = list(batch) if isinstance(batch, list | tuple) else [batch]
    return next((x for x in found if isinstance(x, Tensor) and x.ndim == 2 and _integer(x)), None)


def input_ids(batch: Batch) -> Tensor:
    """Return the input ids of a batch, (B, T); refuse one that has none."""
    ids = token_ids(batch)
    if ids is None:
        parts = batch.items() if isinstance(batch, Mapping) else enumerate([batch] if _leaf(batch) else batch)
        got = ", ".join(f"{name}: {_described(x)}" for name, x in parts)
        raise ValueError(
            f"found no token ids in a batch of type {type(batch).__name__} ({got}): a batch is a tensor of integers"
            ' (B, T), a tuple or list that has one, or a dict that has one as "input_ids"; for other forms give the'
            " text itself, as tokens"
        )
    return ids


def positions_of(batch: Batch) -> Tensor:
    """Return the positions of a batch that count, as ascending indices into its B * T, on the CPU."""
    counts = _attended(batch)
    for labels in _labels(batch):
        counts = counts & (labels != IGNORED).to(counts.device)
    return counts.flatten().nonzero().squeeze(1).cpu()


def with_tensors(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """Return a batch of the same form with every tensor changed."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, MutableMapping):
        changed = copy.copy(batch)  # keeps the attributes of a BatchEncoding
        for name, value in batch.items():
            changed[name] = with_tensors(value, change)
        return changed
    if isinstance(batch, list | tuple):
        values = [with_tensors(value, change) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return batch


@contextmanager
def random_state_kept(seed: int | None = None) -> Iterator[None]:
    """Give every generator of torch, numpy and Python the state back that it had.

    Args:
        seed: of those on the CPU within. Not by torch.manual_seed, which also seeds a CUDA that is yet to start.
    """
    cpu, python, numpy = torch.get_rng_state(), random.getstate(), sys.modules.get("numpy.random")
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    legacy = numpy.get_state() if numpy else None
    try:
        if seed is not None:
            torch.default_generator.manual_seed(seed)
            random.seed(seed)
            if numpy:
                numpy.seed(seed)
        yield
    finally:
        torch.set_rng_state(cpu)
        random.setstate(python)
        if numpy:
            numpy.set_state(legacy)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)


def _narrowed(batch: Batch, positions: Tensor) -> tuple[Batch, Tensor]:
    """Copy the rows of a batch that positions stand in to the CPU; return them, and the positions in them."""
    B, T = input_ids(batch).shape
    used = torch.zeros(B, dtype=torch.bool)
    used[positions // T] = True

    def narrow(x: Tensor) -> Tensor:
        x = x.detach()
        return x[used.to(x.device)].cpu() if x.ndim and len(x) == B else x.to("cpu", copy=True)

    row = used.cumsum(0)[positions // T] - 1
    return with_tensors(batch, narrow), row * T + positions % T


def _attended(batch: Batch) -> Tensor:
    """Where a batch is not padding, (B, T)."""
    ids, mask = input_ids(batch), batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if isinstance(mask, Tensor) and mask.shape == ids.shape:
        return torch.ne(mask, 0).to(ids.device)
    return torch.ones_like(ids, dtype=torch.bool)


def _labels(batch: Batch) -> list[Tensor]:
    """Labels of a mapping by name; of a tuple or list all integers of the same shape beside its ids."""
    ids = input_ids(batch)
    named = isinstance(batch, Mapping)
    others = [batch.get("labels")] if named else [] if _leaf(batch) else [x for x in batch if x is not ids]
    return [x for x in others if isinstance(x, Tensor) and _integer(x) and x.shape == ids.shape]


def _first_loader(loader: Any) -> Any:
    while True:
        if isinstance(getattr(loader, "flattened", None), list):  # a CombinedLoader
            loader = loader.flattened
        elif isinstance(loader, Mapping):
            loader = list(loader.values())
        elif isinstance(loader, list | tuple):
            if not loader:
                return None
            loader = loader[0]
        else:
            return loader


def _items(loader: Any) -> Iterator[Batch]:
    """Batches of a loader over a map-style dataset, in the order of the dataset."""
    data, batched = loader.dataset, getattr(loader, "batch_sampler", None)
    sampler = batched or getattr(loader, "sampler", None)
    size = getattr(loader, "batch_size", None) or getattr(sampler, "batch_size", None) or 1
    if batched is None and not isinstance(sampler, BatchSampler):  # an item is a batch
        yield from (loader.collate_fn(data[i]) for i in _chosen(loader))
        return
    for chosen in _by(size, _chosen(loader)):
        if batched is None:  # the dataset takes a list of indices
            yield loader.collate_fn(data[chosen])
        elif getattr(data, "__getitems__", None):
            yield loader.collate_fn(data.__getitems__(chosen))
        else:
            yield loader.collate_fn([data[i] for i in chosen])


def _chosen(loader: Any) -> Iterable[int]:
    """Which items of its dataset a loader delivers, in the order of the dataset: those of a subset, or all."""
    sampler = getattr(loader, "sampler", None)
    while (inner := getattr(getattr(sampler, "dataset", None), "_sampler", None)) is not None:
        sampler = inner  # of Lightning's distributed wrapper
    subset = getattr(sampler, "indices", None)
    return range(len(loader.dataset)) if subset is None else sorted(int(i) for i in subset)


def _by(number: int, things: Iterable[Any]) -> Iterator[list[Any]]:
    """Things in lists of that number, the last one perhaps shorter."""
    some: list[Any] = []
    for thing in things:
        some.append(thing)
        if len(some) == number:
            yield some
            some = []
    if some:
        yield some


def _integer(x: Tensor) -> bool:
    return not x.is_floating_point() and not x.is_complex() and x.dtype != torch.bool


def _dimensions(x: Any) -> int:
    return int(getattr(x, "ndim", isinstance(x, Sequence)))


def _leaf(batch: Batch) -> bool:
    return not isinstance(batch, list | tuple)


def _described(x: Any) -> str:
    return f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


def _check_rank(rank: int, world: int) -> None:
    if not 0 <= rank < world:
        raise ValueError(f"rank must be one of the {world} from 0 on, got {rank}")

"""The items of a validation loader in the order of its dataset, without iterating the loader or changing its state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, IterableDataset

from .batches import Batch
from .object_state import kept_state
from .runtime import keep_random_state, warn_user

KEPT_BYTES = 4_000_000
"""Tensors and arrays of a dataset that are copied, to be put back: counters, and not the text."""


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


@contextmanager
def ordered_batches(loaders: Any) -> Iterator[Iterator[Batch] | None]:
    """Give batches of the first loader, in the order of its dataset; None if its data are a stream.

    Items 0, 1, 2, ... go through the loader's own collate_fn in batches of its own size, so that they depend on no
    shuffling, no workers and no number of ranks; of a subset that a sampler draws from, its items.

    At the end of the block the dataset and the collate_fn are as before: their generators, counters, caches and
    whatever else `SavedState` sees of them. Within it all generators have the same seed in every run and on every rank.
    Where something cannot be seen (an iterator, a thread, an object written in C), no item is read and the data are
    taken for a stream.

    Args:
        loaders: a DataLoader, or a CombinedLoader, a list or a dict of them.
    """
    loader = _first_loader(loaders)
    data = getattr(loader, "dataset", None)
    indexed = hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, IterableDataset)
    if not indexed or not callable(getattr(loader, "collate_fn", None)):
        yield None
        return
    roots = {"dataset": data, "collate_fn": loader.collate_fn}
    with (
        keep_random_state(seed=0),
        kept_state(roots.items(), follow=lambda kind: True, memory=KEPT_BYTES) as state,
    ):
        if state.unseen:
            warn_user(
                f"takes the panel from the first validation batches: {_listed(state.unseen)} may change when an item is"
                " read, and could not be put back; runs with other batch sizes or ranks then have other panels, unless"
                " you pass token ids as panel=..."
            )
            yield None
            return
        state.seed(0)
        yield _batches(loader)
    if state.lost:
        warn_user(
            f"reading validation items wrote to {_listed(state.lost)}, too large to be put back: training changes"
        )


def _listed(names: list[str]) -> str:
    return ", ".join([*names[:3], *(["..."] if len(names) > 3 else [])])


def _batches(loader: Any) -> Iterator[Batch]:
    data, batched = loader.dataset, getattr(loader, "batch_sampler", None)
    sampler = batched or getattr(loader, "sampler", None)
    size = getattr(loader, "batch_size", None) or getattr(sampler, "batch_size", None) or 1
    if batched is None and not isinstance(sampler, BatchSampler):  # an item is a batch
        yield from (loader.collate_fn(data[i]) for i in _indices(loader))
        return
    for indices in in_lists(size, _indices(loader)):
        if batched is None:  # the dataset takes a list of indices
            yield loader.collate_fn(data[indices])
        elif getattr(data, "__getitems__", None):
            yield loader.collate_fn(data.__getitems__(indices))
        else:
            yield loader.collate_fn([data[i] for i in indices])


def _indices(loader: Any) -> Iterable[int]:
    """Which items of its dataset a loader delivers, in the order of the dataset: those of a subset, or all."""
    sampler = getattr(loader, "sampler", None)
    while (inner := getattr(getattr(sampler, "dataset", None), "_sampler", None)) is not None:
        sampler = inner  # of Lightning's distributed wrapper
    subset = getattr(sampler, "indices", None)
    return range(len(loader.dataset)) if subset is None else sorted(int(i) for i in subset)


def in_lists(length: int, items: Iterable[Any]) -> Iterator[list[Any]]:
    """Yield items in lists of a length, the last one perhaps shorter."""
    rest = iter(items)
    while part := list(islice(rest, length)):
        yield part

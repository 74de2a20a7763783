"""Which samples a batch was made of, where the batch itself tells."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .batches import Batch, is_integer

SampleIndices = Tensor | Sequence[int]
"""Indices of the samples of a batch, (B,)."""
FORMS = ("index", "indices", "indexes", "idx", "idxs")
NAMES = (
    *(f"{what}{form}" for what in ("", "sample_", "example_", "item_", "data_", "dataset_") for form in FORMS),
    *("sample_id", "sample_ids", "example_id", "example_ids"),
)
"""What the indices are usually called in a batch."""
MOST = 64
"""How many are kept."""


def sample_indices(batch: Batch) -> SampleIndices | None:
    """Return the indices of a batch's samples, if it has them under one of the usual names. Nothing is read of them."""
    parts = [batch, *batch] if isinstance(batch, list | tuple) else [batch]
    for part in parts:
        named = part if isinstance(part, Mapping) else part._asdict() if hasattr(part, "_asdict") else {}
        for name in NAMES:
            indices = named.get(name)
            if _are_indices(indices):
                return indices
    return None


def first_samples(batches: Iterable[SampleIndices]) -> tuple[int, ...]:
    """Read the indices of some batches, and keep the first of them."""
    read: list[int] = []
    for indices in batches:
        left = MOST - len(read)
        first = indices[:left]
        read += [int(index) for index in (first.tolist() if isinstance(first, Tensor) else first)]
    return tuple(read)


def _are_indices(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.ndim == 1 and is_integer(value) and value.layout is torch.strided
    if isinstance(value, list | tuple):
        return bool(value) and all(isinstance(x, int) and not isinstance(x, bool) for x in value)
    return False

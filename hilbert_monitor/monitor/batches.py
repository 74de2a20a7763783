"""The forms a batch of text comes in, and the positions in it that count.

A position is one token of one row of a batch. Padding and tokens with an ignored label are not positions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

Batch = Any
"""Token ids (B, T); a tuple or list whose first ids are the input; or a mapping with "input_ids"."""

IGNORED = -100
"""The label of a token that no loss looks at."""


def token_ids(batch: Batch) -> Tensor | None:
    """Return the input ids of a batch, (B, T), if it has any."""
    if isinstance(batch, Mapping):
        candidates = [batch.get("input_ids")]
    else:
        candidates = list(batch) if isinstance(batch, list | tuple) else [batch]
    return next((x for x in candidates if isinstance(x, Tensor) and x.ndim == 2 and is_integer(x)), None)


def input_ids(batch: Batch) -> Tensor:
    """Return the input ids of a batch, (B, T); refuse one that has none."""
    ids = token_ids(batch)
    if ids is None:
        parts = batch.items() if isinstance(batch, Mapping) else enumerate([batch] if _leaf(batch) else batch)
        got = ", ".join(f"{name}: {_described(x)}" for name, x in parts)
        raise ValueError(
            f"found no token ids in a batch of type {type(batch).__name__} ({got}): a batch is a tensor of integers"
            ' (B, T), a tuple or list that has one, or a dict that has one as "input_ids"; for other forms give the'
            " ids of the text itself as panel=..."
        )
    return ids


def positions_of(batch: Batch) -> Tensor:
    """Return the positions of a batch that count, as ascending indices into its B * T, on the CPU."""
    counts = attended(batch)
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


def select_rows(batch: Batch, positions: Tensor) -> tuple[Batch, Tensor]:
    """Copy the rows of a batch that hold positions to the CPU; return them, and the positions within them."""
    B, T = input_ids(batch).shape
    used = torch.zeros(B, dtype=torch.bool)
    used[positions // T] = True
    rows = used.nonzero().flatten()

    def narrow(x: Tensor) -> Tensor:
        x = x.detach()
        if x.ndim == 0 or len(x) != B:
            return x.to("cpu", copy=True)
        return x.index_select(0, rows.to(x.device)).cpu()  # torch 2.9 cannot index uint16 with brackets

    row = used.cumsum(0)[positions // T] - 1
    return with_tensors(batch, narrow), row * T + positions % T


def attended(batch: Batch) -> Tensor:
    """Return where a batch is not padding, (B, T)."""
    ids, mask = input_ids(batch), batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if isinstance(mask, Tensor) and mask.shape == ids.shape:
        return torch.ne(mask, 0).to(ids.device)
    return torch.ones_like(ids, dtype=torch.bool)


def _labels(batch: Batch) -> list[Tensor]:
    """Labels of a mapping by name; of a tuple or list all integers of the same shape beside its ids."""
    ids = input_ids(batch)
    named = isinstance(batch, Mapping)
    others = [batch.get("labels")] if named else [] if _leaf(batch) else [x for x in batch if x is not ids]
    return [x for x in others if isinstance(x, Tensor) and is_integer(x) and x.shape == ids.shape]


def is_integer(x: Tensor) -> bool:
    """Whether a tensor holds integers."""
    return not x.is_floating_point() and not x.is_complex() and x.dtype != torch.bool


def _leaf(batch: Batch) -> bool:
    return not isinstance(batch, list | tuple)


def _described(x: Any) -> str:
    return f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__

"""The forms a batch of text comes in, and the positions in it that count.

A position is one token of one row of a batch. Padding, and tokens after which no loss looks at the prediction, are not
positions.

Labels come in two forms. Hugging Face's stand at the token that they are: the model predicts label t + 1 at position t.
Others are shifted by the loader and stand where they are predicted. The batch itself tells: labels of the first form
are the input ids wherever they are not ignored. Those of a model for masked tokens are not, and stand where they are
predicted; so are those of an encoder-decoder, whose positions are its decoder's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

Batch = Any
"""Token ids (B, T); a tuple or list whose first ids are the input; or a mapping with "input_ids", and with
"decoder_input_ids" for an encoder-decoder."""

IGNORED = -100
"""The label of a token that no loss looks at."""
WITHOUT_EFFECT = ("labels", "input_ids", "attention_mask", "decoder_attention_mask")
"""Entries of a batch that the hidden states do not depend on, or that count by themselves."""


def token_ids(batch: Batch) -> Tensor | None:
    """Return the input ids of a batch, (B, T), if it has any."""
    if isinstance(batch, Mapping):
        candidates = [batch.get("input_ids")]
    else:
        candidates = list(batch) if isinstance(batch, list | tuple) else [batch]
    return next((x for x in candidates if isinstance(x, Tensor) and x.ndim == 2 and is_integer(x)), None)


def token_count(batch: Batch) -> int:
    """Return how many tokens a batch has, also a dataclass or a list of samples; 0 if it does not tell."""
    if is_dataclass(batch) and not isinstance(batch, Mapping | type):
        batch = {field.name: getattr(batch, field.name, None) for field in fields(batch)}
    ids = token_ids(batch)
    if ids is not None:
        return ids.numel()
    samples = batch if isinstance(batch, list | tuple) else ()
    texts = [sample.get("input_ids") for sample in samples if isinstance(sample, Mapping)]
    return sum(len(text) for text in texts if isinstance(text, list) or (isinstance(text, Tensor) and text.ndim == 1))


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


def text_ids(batch: Batch) -> Tensor:
    """Return the ids whose states the head is given, (B, T): the input, or the decoder's of an encoder-decoder."""
    ids = batch.get("decoder_input_ids") if isinstance(batch, Mapping) else None
    return ids if isinstance(ids, Tensor) and ids.ndim == 2 else input_ids(batch)


def positions_of(batch: Batch) -> Tensor:
    """Return the positions of a batch that count, as ascending indices into the B * T of its text, on the CPU."""
    counts = attended(batch)
    for targets in _targets(batch):
        counts = counts & (targets != IGNORED).to(counts.device)
    return counts.flatten().nonzero().squeeze(1).cpu()


def next_tokens(batch: Batch) -> Tensor:
    """Return the token that each position of a batch predicts, (B, T) on the CPU; IGNORED where no loss looks at it.

    Without labels it is the next token of the row.
    """
    for targets in _targets(batch):
        return targets.long().cpu()
    ids, there = text_ids(batch).long().cpu(), attended(batch).cpu()
    following = ids.masked_fill(~there, IGNORED)[:, 1:]
    return torch.nn.functional.pad(following, (0, 1), value=IGNORED)


def with_decoder_inputs(model: Module, batch: Batch) -> Batch:
    """Return a batch for an encoder-decoder with the decoder's ids in it, as the model makes them from its labels.

    Batches of other models, and those that have these ids, are returned as they are.
    """
    make = next((m for m in map(_decoder_inputs, model.modules()) if m is not None), None)
    labels = batch.get("labels") if isinstance(batch, MutableMapping) else None
    if make is None or not isinstance(labels, Tensor) or "decoder_input_ids" in batch:
        return batch
    batch = copy.copy(batch)
    batch["decoder_input_ids"] = make(labels=labels)
    return batch


def _decoder_inputs(module: Module) -> Callable[..., Tensor] | None:
    """How a Hugging Face encoder-decoder makes the ids of its decoder, if the module is one."""
    if not getattr(getattr(module, "config", None), "is_encoder_decoder", False):
        return None
    return getattr(module, "prepare_decoder_input_ids_from_labels", None)


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
    B, T = text_ids(batch).shape
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
    """Return where the text of a batch is not padding, (B, T)."""
    ids = text_ids(batch)
    name = "attention_mask" if ids is token_ids(batch) else "decoder_attention_mask"
    mask = batch.get(name) if isinstance(batch, Mapping) else None
    if isinstance(mask, Tensor) and mask.shape == ids.shape:
        return torch.ne(mask, 0).to(ids.device)
    return torch.ones_like(ids, dtype=torch.bool)


def other_inputs(batch: Batch) -> list[Tensor]:
    """Return what else a mapping has for each token of its text, such as the places of tokens that were packed."""
    ids = text_ids(batch)
    named = batch if isinstance(batch, Mapping) else {}
    others = [named[name] for name in sorted(named) if name not in WITHOUT_EFFECT]
    return [x for x in others if isinstance(x, Tensor) and x is not ids and is_integer(x) and x.shape == ids.shape]


def encoded_ids(batch: Batch, row: int) -> list[int]:
    """Return the ids that an encoder is given in a row of a batch, padding left out."""
    ids, mask = input_ids(batch)[row], batch.get("attention_mask")
    known = isinstance(mask, Tensor) and mask.shape == input_ids(batch).shape
    return (ids[mask[row] != 0] if known else ids).tolist()


def _targets(batch: Batch) -> Iterator[Tensor]:
    """Yield what a batch says of the token that each position of its text predicts, (B, T)."""
    ids = text_ids(batch)
    for labels in _labels(batch):
        if ids is token_ids(batch) and _are_unshifted(labels, ids, by_name=isinstance(batch, Mapping)):
            labels = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
        yield labels


def _are_unshifted(labels: Tensor, ids: Tensor, *, by_name: bool) -> bool:
    """Whether labels stand at the token that they are, and not at the one before it.

    Text of one repeated token does not tell: then labels that have a name are Hugging Face's.
    """
    ids = ids.to(labels.device)
    ignored = labels == IGNORED
    if bool(ignored.all()) or not bool(((labels == ids) | ignored).all()):
        return False
    return by_name or not bool(((labels[:, :-1] == ids[:, 1:]) | ignored[:, :-1]).all())


def _labels(batch: Batch) -> list[Tensor]:
    """Labels of a mapping by name; of a tuple or list all integers of the same shape beside its ids."""
    ids = text_ids(batch)
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

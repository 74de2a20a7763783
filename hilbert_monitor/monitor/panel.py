"""The panel: fixed positions of validation text, at which every measured step is looked at.

A position is one token of one row of a batch. The hidden state there depends on the row up to that token.
"""

from __future__ import annotations

import hashlib
import struct
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from .batches import (
    IGNORED,
    Batch,
    attended,
    encoded_ids,
    input_ids,
    is_integer,
    other_inputs,
    positions_of,
    select_rows,
    text_ids,
)
from .loader_items import in_lists, ordered_batches

POSITIONS = 8192
"""Positions of a panel, unless another number is asked for."""
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

    @property
    def size(self) -> int:
        """Number of positions."""
        return sum(map(len, self.positions))

    @cached_property
    def hash(self) -> str:
        """SHA-256, in hex, of all that the hidden states depend on, besides the weights.

        That is, row by row in order: the tokens up to the last position that counts, padding left out, and the places
        of the positions among them; what else the batch has for each token; what an encoder is given. Neither the size
        of micro-batches nor the width of padding enters, nor a device nor a dtype.
        """
        digest = hashlib.sha256()
        for batch, positions in zip(self.batches, self.positions, strict=True):
            ids, attention = text_ids(batch), attended(batch)
            rows, columns = positions // ids.shape[1], positions % ids.shape[1]
            for row in sorted(set(rows.tolist())):
                places = attention[row].cumsum(0)[columns[rows == row]] - 1
                end = int(places.max()) + 1
                tokens = ids[row].long()[attention[row]][:end]
                entries = [len(tokens), len(places), *tokens.tolist(), *places.tolist()]
                for more in other_inputs(batch):
                    entries += more[row].long()[attention[row]][:end].tolist()
                if ids is not input_ids(batch):
                    entries += encoded_ids(batch, row)
                digest.update(struct.pack(f"<{len(entries)}q", *entries))
        return digest.hexdigest()

    @cached_property
    def number(self) -> int:
        """A number below 2^48 that two panels have in common if they have the same text in the same micro-batches."""
        shapes = [tuple(text_ids(batch).shape) for batch in self.batches]
        return int(hashlib.sha256(f"{self.hash} {shapes}".encode()).hexdigest()[:12], 16)

    @classmethod
    def joined(cls, parts: Iterable[Panel]) -> Panel:
        """Return panels one after the other as one."""
        panels = tuple(parts)
        batches = (batch for panel in panels for batch in panel.batches)
        return cls(tuple(batches), tuple(positions for panel in panels for positions in panel.positions))

    @classmethod
    def of_loader(
        cls, loader: Any, size: int = POSITIONS, *, prepared: Callable[[Batch], Batch] = lambda batch: batch
    ) -> Panel | None:
        """Take the first positions of a loader's dataset, without iterating the loader.

        Random numbers that items draw are the same every time. Generators, counters and caches of the dataset are as
        before, see `ordered_batches`.

        Args:
            loader: see `ordered_batches`.
            size: number of positions.
            prepared: makes of a batch what the model takes.

        Returns:
            The panel; None if the data are a stream, or may be one.
        """
        with ordered_batches(loader) as batches:
            return None if batches is None else cls._of(map(prepared, batches), size)

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
        rows = [tokens] if len(tokens) and not getattr(tokens[0], "ndim", isinstance(tokens[0], Sequence)) else tokens
        texts = [torch.as_tensor(row) for row in rows]
        for text in texts:
            if text.ndim != 1 or not (is_integer(text) or not len(text)):
                raise ValueError(
                    f"tokens must be integer ids with one or two dimensions, got rows of shape {tuple(text.shape)} and"
                    f" dtype {text.dtype}: give the ids that the model takes"
                )
        pieces = (piece.long() for text in texts if len(text) for piece in torch.split(text[:size], context))
        batches = (torch.stack(rows) for _, same in groupby(pieces, len) for rows in in_lists(ROWS, same))
        return cls._of(batches, size)

    @classmethod
    def of_batches(cls, batches: Iterable[Batch], size: int = POSITIONS) -> Panel:
        """Take the first positions of batches; ask for no more batches than are needed.

        Args:
            batches: as the model takes them, on any device; they are copied.
            size: number of positions.
        """
        return cls._of(batches, size)

    @classmethod
    def _of(cls, batches: Iterable[Batch], size: int) -> Panel:
        if not size >= 1:
            raise ValueError(f"a panel has at least one position, got size={size}")
        parts, missing = [], size
        with torch.inference_mode(False):  # inference tensors could not be used outside of it
            for batch in batches:
                positions = positions_of(batch)[:missing]
                if len(positions):
                    parts.append(select_rows(batch, positions))
                    missing -= len(positions)
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
        return cls(tuple(batch for batch, _ in parts), tuple(positions for _, positions in parts))

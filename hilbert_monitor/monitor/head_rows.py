"""The rows of the LM head that this rank has: all, or its shard."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from hilbert_monitor.geometry import RowShards, RowSource

from .runtime import compute_device

Matrix = Tensor | RowShards
"""A (V, d) matrix, whole or with its rows on several ranks."""


class HeadRows:
    """Which entries of the head's weight this rank has: all, or its shard of a DTensor. A row stands for a token.

    Args:
        weight: the parameter, with as many rows as tokens, or as many columns.
        dim: the dimension of the tokens.
    """

    def __init__(self, weight: Tensor, *, dim: int = 0) -> None:
        self.number = weight.shape[dim]
        self.device = compute_device(weight)
        self.sharded = hasattr(weight, "device_mesh")
        self._shards: RowShards | None = None
        self._counts: dict[int, int] = {}  # of this rank's tokens among so many, so that a device is waited for once
        if self.sharded:
            tokens_first: Any = weight.detach() if dim == 0 else weight.detach().t()
            check_layout(tokens_first)
            width = None if tokens_first.ndim == 2 else 1  # of a bias
            self._shards = RowShards.of(RowSource(tokens_first, width=width))

    def of(self, x: Tensor) -> Tensor:
        """Return this rank's entries of a tensor that is laid out as the weight is. Nothing is copied."""
        if not self.sharded:
            return x
        local: Any = x.detach()
        return local.to_local()  # type: ignore[no-any-return]

    def matrix(self, rows: Tensor, number: int | None = None) -> Matrix:
        """Return rows (n, d) of this rank as a part of the whole matrix, as the geometry takes it.

        Args:
            rows: one for each of this rank's tokens.
            number: tokens; rows after these are padding, and are left out.
        """
        if self._shards is None:
            return rows[:number]
        ids, number = self._shards.ids, self.number if number is None else min(number, self.number)
        if number not in self._counts:
            self._counts[number] = int((ids < number).sum())
        mine = self._counts[number]  # the first ones: ids ascend
        source = RowSource(rows[:mine].to(self.device))
        return replace(self._shards, rows=source, ids=ids[:mine].to(self.device), number=number)


def check_layout(weight: Any) -> None:
    """Refuse a DTensor whose rows are in pieces."""
    columns = [p for p in weight.placements if not p.is_replicate() and getattr(p, "dim", None) != 0]
    if columns:
        raise ValueError(
            f"the head has placements {tuple(weight.placements)}, and only a head sharded by rows, one for each token,"
            " is measured: shard it with Shard(0), as fully_shard and ColwiseParallel do"
        )

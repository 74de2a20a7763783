"""The rows of the LM head that this rank measures: all, its part of a head that every rank has, or its shard."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hilbert_monitor.geometry import RowRuns, RowShards

from .ranks import Ranks, compute_device

Matrix = Tensor | RowShards
"""A (V, d) matrix, whole or with its rows on several ranks."""


class HeadRows:
    """Which entries of the head's weight this rank measures. A row stands for a token.

    Under DDP every rank has the whole weight, and the ranks measure runs of its rows in turn. A DTensor stays where it
    is: each rank measures its own shard.

    Args:
        weight: the parameter, with as many rows as tokens, or as many columns.
        ranks: those that train together.
        dim: the dimension of the tokens.
    """

    def __init__(self, weight: Tensor, ranks: Ranks, *, dim: int = 0) -> None:
        self.dim, self.number = dim, weight.shape[dim]
        self.device = compute_device(weight)
        self.sharded = hasattr(weight, "device_mesh")
        self.part: RowRuns | None = None
        """Of a weight that every rank has: the tokens of this rank."""
        self._shards: RowShards | None = None
        self._counts: dict[int, int] = {}  # of this rank's tokens among so many, so that a device is waited for once
        if self.sharded:
            tokens_first: Any = weight.detach() if dim == 0 else weight.detach().t()
            check_layout(tokens_first)
            self._shards = RowShards.of(tokens_first)
        elif ranks.world > 1:
            self.part = RowRuns(self.number, ranks.world, ranks.rank)  # as `split` does
            self._shards = RowShards.split(torch.empty(self.number, 0, device=weight.device), ranks.group)

    def of(self, x: Tensor) -> Tensor:
        """Return this rank's entries of a tensor that is laid out as the weight is: a copy if they are a part of it."""
        if self.sharded:
            local: Any = x.detach()
            return local.to_local()  # type: ignore[no-any-return]
        if self.part is None:
            return x
        return self.part.of(x) if self.dim == 0 else self.part.of(x.t()).t()

    def some(self, x: Tensor, at: slice) -> Tensor:
        """Return `of(x)[at]`; where that is a few rows of a part, nothing else is copied."""
        if self.part is None or self.dim == 1:
            return self.of(x)[at]
        assert self._shards is not None
        return x.index_select(0, self._shards.ids[at])

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
        return replace(self._shards, rows=rows[:mine].to(self.device), ids=ids[:mine].to(self.device), number=number)


def check_layout(weight: Any) -> None:
    """Refuse a DTensor whose rows are in pieces."""
    columns = [p for p in weight.placements if not p.is_replicate() and getattr(p, "dim", None) != 0]
    if columns:
        raise ValueError(
            f"the head has placements {tuple(weight.placements)}, and only a head sharded by rows, one for each token,"
            " is measured: shard it with Shard(0), as fully_shard and ColwiseParallel do"
        )

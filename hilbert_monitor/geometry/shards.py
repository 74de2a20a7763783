"""The rows of a matrix, some on each rank: what the geometry measures without gathering them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from ._ranks import Ranks
from .arithmetic import check_real


@dataclass(frozen=True)
class RowShards:
    """The rows of a (V, d) matrix that this rank has; the other ranks of some process groups have the rest.

    All ranks call a function of the geometry together, each with its own part, and all get the same answer.
    """

    rows: Tensor
    """(n, d) rows of this rank; n may be zero."""
    ids: Tensor
    """(n,) which rows of the matrix they are."""
    number: int
    """V."""
    ranks: Ranks

    @property
    def shape(self) -> tuple[int, int]:
        """(V, d) of the whole matrix."""
        return self.number, self.rows.shape[1]

    def first(self, number: int) -> RowShards:
        """Return the first rows of the matrix alone, as without those that pad a vocabulary: nothing is sent."""
        kept = self.ids < number
        rows, ids = (self.rows, self.ids) if bool(kept.all()) else (self.rows[kept], self.ids[kept])
        return replace(self, rows=rows, ids=ids, number=min(number, self.number))

    @classmethod
    def whole(cls, S: Tensor) -> RowShards:
        """Take all rows of a plain matrix (V, d), with no other rank."""
        return cls(S, torch.arange(len(S), device=S.device), len(S), Ranks([], S.device))

    @classmethod
    def of(cls, S: Tensor) -> RowShards:
        """Take the local rows of a DTensor that is sharded by rows, over one mesh dimension or several."""
        from torch.distributed.tensor import distribute_tensor

        mesh, placements = S.device_mesh, S.placements  # type: ignore[attr-defined]
        if mesh.get_coordinate() is None:
            raise ValueError(f"rank {dist.get_rank()} is not in the mesh of S: call this on the ranks of {mesh} alone")
        groups = []
        for dimension, placement in enumerate(placements):
            if placement.is_replicate():
                continue
            if getattr(placement, "dim", None) != 0:
                raise ValueError(
                    f"S must be sharded by rows, got placements {tuple(placements)}: redistribute it to Shard(0),"
                    " or give its whole rows with .full_tensor()"
                )
            groups.append(mesh.get_group(dimension))
        rows: Tensor = S.to_local()  # type: ignore[attr-defined]
        ids = torch.arange(S.shape[0], device=rows.device)
        if groups:
            whole = distribute_tensor(ids, mesh, placements, src_data_rank=None)  # none: nothing is sent
            ids = whole.to_local()
        return cls(rows, ids, S.shape[0], Ranks(groups, rows.device))


def row_shards(S: Tensor | RowShards, beside: Callable[[], Sequence[int]] = tuple) -> RowShards | None:
    """Return the rows of this rank, if S is a DTensor or has rows on several ranks; None for a plain tensor.

    The ranks make sure that they are about to measure the same matrix alike, in one collective: with different shapes
    they would wait for each other, or take each other's numbers for something else.

    Args:
        S: what a function was given. Anything that is no matrix is left to the caller's own checks.
        beside: further checks of this rank, which may raise, and up to two numbers that must be the same on all.
    """
    if isinstance(S, RowShards):
        shards = S
    elif is_dtensor(S):
        if S.ndim != 2:
            raise ValueError(f"S must be a (V, d) matrix with one row a token, got shape {tuple(S.shape)}")
        shards = RowShards.of(S)
    else:
        return None
    _agree(shards, beside)
    if 0 in shards.shape:
        raise ValueError(f"S must have at least one row and one column, got shape {shards.shape}")
    return shards


_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _agree(shards: RowShards, beside: Callable[[], Sequence[int]]) -> None:
    """Raise on all ranks if one has another matrix, or if their rows together are not those of the matrix."""

    def make() -> Sequence[Tensor]:
        check_real("S", shards.rows)
        if shards.rows.ndim != 2 or shards.ids.shape != shards.rows.shape[:1]:
            shapes = f"{tuple(shards.rows.shape)} and {tuple(shards.ids.shape)}"
            raise ValueError(f"rows and ids must be (n, d) and (n,), got {shapes}")
        numbers = [*shards.shape, _DTYPES.index(shards.rows.dtype), *beside()]
        numbers = [len(shards.ids), *numbers, *[-1] * (5 - len(numbers))]
        return [torch.tensor(numbers, device=shards.ranks.device)]

    (table,) = shards.ranks.gather(make, ((6,), torch.int64))
    if not bool((table[:, 1:] == table[0, 1:]).all()):
        forms = [f"{(V, d)} {_DTYPES[dtype]} {rest}" for _, V, d, dtype, *rest in table.tolist()]
        raise ValueError(f"ranks must measure one matrix alike, got {'; '.join(dict.fromkeys(forms))}")
    if int(table[:, 0].sum()) != shards.number:
        counts = ", ".join(map(str, table[:, 0].tolist()))
        raise ValueError(f"ranks must hold each of {shards.number} rows once, got {counts} rows: check the ids of each")


def is_dtensor(S: object) -> bool:
    """Return whether S is a DTensor, one of torch's sharded tensors."""
    if type(S) is Tensor or not isinstance(S, Tensor) or not dist.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(S, DTensor)


def like(S: Tensor, rows: Tensor) -> Tensor:
    """Return rows of this rank as a matrix that is sharded as S is."""
    from torch.distributed.tensor import DTensor

    assert isinstance(S, DTensor)
    stride = (S.shape[1], 1)
    return DTensor.from_local(rows, S.device_mesh, S.placements, run_check=False, shape=S.shape, stride=stride)

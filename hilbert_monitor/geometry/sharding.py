"""The rows of a matrix, some on each rank, and what the ranks tell each other.

Every rank runs the same code on its own rows. What one needs of the others goes through `Ranks`: sums, maxima, and
small tables that all ranks see. A rank that fails takes part in the collective it is about to enter all the same, with
a flag, so that all of them raise together and nobody waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from .numerics import check_real

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its newer name
T = TypeVar("T")
Form = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor."""


class RankError(RuntimeError):
    """Another rank has failed; it raises what went wrong there."""


class Ranks:
    """The ranks of one or more process groups: those of the mesh dimensions over which rows are sharded.

    Args:
        groups: one process group for each of these dimensions, with this rank in it.
        device: where the tensors are that go through collectives.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup], device: torch.device) -> None:
        self.groups, self.device = tuple(groups), device
        self.number = math.prod(dist.get_world_size(group) for group in self.groups)
        self.rank = 0
        """Of this rank, in tables of all ranks."""
        size = 1
        for group in self.groups:
            self.rank += size * dist.get_rank(group)
            size *= dist.get_world_size(group)
        self.is_single = not self.groups
        """Whether there is no other rank to ask."""
        self.collectives = 0
        self.bytes = 0
        """Received by this rank, as a ring moves them."""

    def sum(self, make: Callable[[], Tensor], *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        """Return the sum over the ranks of what each makes: a tensor of this shape."""
        return self._reduced(make, shape, dtype, dist.ReduceOp.SUM)

    def max(self, make: Callable[[], Tensor], *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        """Return the entrywise maximum over the ranks of what each makes. It must hold no nan."""
        return self._reduced(make, shape, dtype, dist.ReduceOp.MAX)

    def gather(self, make: Callable[[], Sequence[Tensor]], *forms: Form) -> list[Tensor]:
        """Return what the ranks make, tensors of these shapes and dtypes: each as (ranks, *shape).

        All ranks get the same tables, in the same order of ranks.
        """
        if self.is_single:
            return [x[None] for x in make()]
        parts, failure = self._made(lambda: [_bytes(x, form) for x, form in zip(make(), forms, strict=True)])
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in forms]
        flag = torch.tensor([failure is not None], dtype=torch.uint8, device=self.device)
        empty = torch.zeros(sum(sizes), dtype=torch.uint8, device=self.device)
        table = torch.cat([empty if parts is None else torch.cat(parts), flag])[None]
        table = self._gathered(table)
        self._raise_together(failure, bool(table[:, -1].any()))
        return _tensors(table, forms)

    def from_owners(self, owner: Tensor, make: Callable[[Tensor], Sequence[Tensor]], *forms: Form) -> list[Tensor]:
        """Return what the owners of some items make of them, tensors of these shapes and dtypes: each as (n, *shape).

        Args:
            owner: (n,) the rank that has each item, the same on all ranks.
            make: from the indices of this rank's items, what it shows of them: (items, *shape) each.
            forms: shapes and dtypes for one item.
        """
        mine = (owner == self.rank).nonzero().squeeze(1)
        if self.is_single:
            return list(make(mine))
        counts = torch.bincount(owner, minlength=self.number).tolist()
        most = max(counts)
        if self.number * most > 2 * len(owner):  # uneven: a maximum of bytes moves less than padded tables

            def table() -> Tensor:
                items = _items(make(mine), forms)
                return items.new_zeros(len(owner), items.shape[1]).index_copy_(0, mine, items)

            width = sum(math.prod(shape) * dtype.itemsize for shape, dtype in forms)
            items = self.max(table, len(owner), width, dtype=torch.uint8)
            return _tensors(items, forms)
        tables = self.gather(
            lambda: [pad(x, (0, 0) * (x.ndim - 1) + (0, most - len(x))) for x in make(mine)],
            *(((most, *shape), dtype) for shape, dtype in forms),
        )
        places = torch.empty_like(owner)
        for rank, count in enumerate(counts):
            places[owner == rank] = torch.arange(rank * most, rank * most + count, device=owner.device)
        return [table.flatten(0, 1)[places] for table in tables]

    def _reduced(
        self, make: Callable[[], Tensor], shape: Sequence[int], dtype: torch.dtype, operation: dist.ReduceOp.RedOpType
    ) -> Tensor:
        if self.is_single:
            return make().to(dtype).reshape(*shape)
        part, failure = self._made(make)
        numbers = torch.zeros(math.prod(shape) + 1, dtype=dtype, device=self.device)
        if part is not None:
            numbers[:-1] = part.reshape(-1)
        numbers[-1] = failure is not None
        self._all_reduce(numbers, operation)
        self._raise_together(failure, bool(numbers[-1] != 0))
        return numbers[:-1].view(*shape)

    def _gathered(self, table: Tensor) -> Tensor:
        """Return the tables (1, n) of all ranks, one below the other."""
        for group in self.groups:
            ranks = dist.get_world_size(group)
            out = table.new_empty(ranks * len(table), table.shape[1])
            _all_gather(out, table.contiguous(), group=group)
            self._count(out.numel() * (ranks - 1) // ranks)
            table = out
        return table

    def _all_reduce(self, numbers: Tensor, operation: dist.ReduceOp.RedOpType) -> None:
        """Reduce numbers over all ranks, in place."""
        for group in self.groups:
            dist.all_reduce(numbers, op=operation, group=group)
            ranks = dist.get_world_size(group)
            self._count(2 * numbers.nbytes * (ranks - 1) // ranks)

    def _made(self, make: Callable[[], T]) -> tuple[T | None, Exception | None]:
        try:
            return make(), None
        except Exception as failure:
            return None, failure

    def _raise_together(self, failure: Exception | None, any_failed: bool) -> None:
        if failure is not None:
            raise failure
        if any_failed:
            raise RankError("another rank failed while the rows of all ranks were measured: its own error says why")

    def _count(self, received: int) -> None:
        self.collectives += 1
        self.bytes += received


def _bytes(x: Tensor, form: Form) -> Tensor:
    shape, dtype = form
    assert (tuple(x.shape), x.dtype) == (tuple(shape), dtype), f"made {tuple(x.shape)} {x.dtype}, announced {form}"
    return x.contiguous().view(-1).view(torch.uint8) if x.numel() else x.new_empty(0, dtype=torch.uint8)


def _items(tensors: Sequence[Tensor], forms: Sequence[Form]) -> Tensor:
    """Return the bytes of items side by side: (items, bytes)."""
    columns = []
    for x, (shape, dtype) in zip(tensors, forms, strict=True):
        columns.append(_bytes(x, ((len(x), *shape), dtype)).view(len(x), math.prod(shape) * dtype.itemsize))
    return torch.cat(columns, 1)


def _tensors(table: Tensor, forms: Sequence[Form]) -> list[Tensor]:
    """Return the tensors, (items, *shape) each, whose bytes are side by side in a table (items, bytes)."""
    ends = list(accumulate((math.prod(shape) * dtype.itemsize for shape, dtype in forms), initial=0))
    columns = [table[:, start:end] for start, end in pairwise(ends)]
    return [
        column.reshape(-1).clone().view(dtype).view(len(column), *shape)  # a copy: views must be aligned
        for column, (shape, dtype) in zip(columns, forms, strict=True)
    ]


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

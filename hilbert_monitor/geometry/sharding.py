"""Rows of a matrix that are formed on demand, and rows that several ranks share.

The geometry reads the rows of a `RowSource`, chunk by chunk, and never needs the whole matrix. A tensor is a source of
its own rows. Adam's state is a source of the rows of its step.

`RowShards` are the rows of one rank. A plain matrix is a shard on one rank: every function of the geometry is written
once, for shards. What a rank needs to know of the others goes through `Ranks`: sums, maxima and small tables. A rank
that fails still enters the next collective, with a flag. All ranks then raise together, and none of them hangs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from .numerics import DTYPES, MAX_BYTES, check_matrix, check_real, chunk_length, on_host

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its newer name
_CHUNK_BYTES = 2**22  # of a chunk and what is made of it, on a CPU
T = TypeVar("T")
Form = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor."""


class RowSource:
    """Rows of a (V, d) matrix, formed on demand from the corresponding rows of some tensors or other sources.

    Args:
        parts: (V, ...) tensors or sources. DTensors must share one layout, and be parts of the outermost source.
        form: function from n rows of each part to n rows of the matrix, as a view of its arguments or in new memory
            that it does not use again. It must not write to its arguments, and must treat each row by itself. By
            default the rows are those of the only part.
        width: d, if it is not that of the first part.
        dtype: of the rows, if it is not that of the first part.
        number: V, if only the first rows of the parts are meant.

    Example:
        >>> step = RowSource(exp_avg, exp_avg_sq, form=lambda m, v: -lr * m / (v.sqrt() + eps))
        >>> row_diameter(step)  # no (V, d) matrix is allocated
    """

    def __init__(
        self,
        *parts: Tensor | RowSource,
        form: Callable[..., Tensor] | None = None,
        width: int | None = None,
        dtype: torch.dtype | None = None,
        number: int | None = None,
    ) -> None:
        first = parts[0]
        V = first.shape[0] if number is None else min(number, first.shape[0])
        self.parts, self.form = parts, form
        self.shape: tuple[int, int] = (V, first.shape[1] if width is None else width)
        self.dtype: torch.dtype = dtype or first.dtype
        self.device: torch.device = first.device

    def __len__(self) -> int:
        """Return V."""
        return self.shape[0]

    @property
    def tensor(self) -> Tensor | None:
        """The matrix itself, if the rows are those of a tensor."""
        first = self.parts[0]
        if self.form is not None or not isinstance(first, Tensor):
            return None
        return first if len(self) == len(first) else first[: len(self)]

    def chunk(self, start: int, stop: int, step: int = 1) -> Tensor:
        """Return rows start to stop (n, d). Do not write to them: they may be the caller's own."""
        stop = min(stop, len(self))
        rows = [p[start:stop:step] if isinstance(p, Tensor) else p.chunk(start, stop, step) for p in self.parts]
        return rows[0] if self.form is None else self.form(*rows)

    def take(self, index: Tensor) -> Tensor:
        """Return some rows (n, d), in memory of their own."""
        rows = [p.index_select(0, index) if isinstance(p, Tensor) else p.take(index) for p in self.parts]
        return rows[0] if self.form is None else self.form(*rows)

    def matrix(self) -> Tensor:
        """Return all rows (V, d)."""
        tensor = self.tensor
        if tensor is None:
            tensor = torch.empty(self.shape, dtype=self.dtype, device=self.device)
            for at, rows in self.chunks(MAX_BYTES):
                tensor[at] = rows
        return tensor

    def at(self, index: Tensor) -> RowSource:
        """Return some rows as a source."""
        return RowSource(index, form=self.take, width=self.shape[1], dtype=self.dtype)

    def shares_memory(self, rows: Tensor) -> bool:
        """Return True if rows (n, d) are a part of this source, so that nobody may write to them."""
        storage = rows.untyped_storage()._cdata
        return any(
            part.shares_memory(rows) if isinstance(part, RowSource) else part.untyped_storage()._cdata == storage
            for part in self.parts
        )

    def chunks(
        self,
        max_bytes: int,
        *,
        share: int = 1,
        dtype: torch.dtype | None = None,
        copies: int = 2,
        extra: int = 0,
        longest: int = 0,
    ) -> Iterator[tuple[slice, Tensor]]:
        """Yield slices and their rows (n, d), as many at a time as the memory allows; on a CPU, as fit its cache.

        Args:
            max_bytes: bound on scratch memory.
            share: divisor of max_bytes that gives the memory for one chunk.
            dtype: of the chunks; by default that of the source.
            copies: chunks in memory at once: this one and those that the caller makes of it.
            extra: bytes of scratch that the caller needs for each row.
            longest: most rows in a chunk, in place of what fits the cache.
        """
        dtype = dtype or self.dtype
        row_bytes = (copies + 2 * (self.form is not None)) * self.shape[1] * dtype.itemsize + extra
        cached = max(64, _CHUNK_BYTES // max(1, row_bytes)) if on_host(self) else max(1, len(self))
        length = chunk_length(row_bytes, max_bytes, share=share, longest=longest or cached)
        for start in range(0, len(self), length):
            at = slice(start, min(start + length, len(self)))
            yield at, self.chunk(at.start, at.stop).to(dtype)


class RankError(RuntimeError):
    """Another rank has failed; it raises what went wrong there."""


class Ranks:
    """The ranks of one or more process groups: those of the mesh dimensions over which rows are sharded.

    Args:
        groups: one process group for each of these dimensions, with this rank in it; none for a plain matrix.
        device: of the tensors that go through collectives.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup], device: torch.device) -> None:
        self.groups, self.device = tuple(groups), device
        self.number = math.prod(dist.get_world_size(group) for group in self.groups)
        self.rank = 0
        size = 1
        for group in self.groups:
            self.rank += size * dist.get_rank(group)
            size *= dist.get_world_size(group)
        self.is_single = not self.groups
        self.collectives = 0
        self.bytes = 0
        """Bytes that this rank has received, as a ring moves them."""

    def sum(self, make: Callable[[], Tensor], *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        """Return the sum over the ranks of the tensor of this shape that each makes."""
        return self._reduced(make, shape, dtype, dist.ReduceOp.SUM)

    def max(self, make: Callable[[], Tensor], *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        """Return the entrywise maximum over the ranks of what each makes. It must hold no nan."""
        return self._reduced(make, shape, dtype, dist.ReduceOp.MAX)

    def from_first(self, make: Callable[[], Tensor], *shape: int, dtype: torch.dtype) -> Tensor:
        """Return what the first rank makes, the same bits on all ranks."""
        zeros = lambda: torch.zeros(shape, dtype=dtype, device=self.device)  # noqa: E731
        return self.sum(zeros if self.rank else make, *shape, dtype=dtype)  # adding zero changes no bit

    def gather(self, make: Callable[[], Sequence[Tensor]], *forms: Form) -> list[Tensor]:
        """Return the tensors of these shapes and dtypes that the ranks make, each as (ranks, *shape).

        All ranks get the same tables, in the same order of ranks.
        """
        if self.is_single:
            return [x[None] for x in make()]
        parts, failure = _attempt(lambda: [_bytes(x, form) for x, form in zip(make(), forms, strict=True)])
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in forms]
        flag = torch.tensor([failure is not None], dtype=torch.uint8, device=self.device)
        empty = torch.zeros(sum(sizes), dtype=torch.uint8, device=self.device)
        table = torch.cat([empty if parts is None else torch.cat(parts), flag])[None]
        for group in self.groups:
            ranks = dist.get_world_size(group)
            out = table.new_empty(ranks * len(table), table.shape[1])
            _all_gather(out, table.contiguous(), group=group)
            self._count(out.numel() * (ranks - 1) // ranks)
            table = out
        _raise_together(failure, bool(table[:, -1].any()))
        return _tensors(table, forms)

    def from_owners(self, owner: Tensor, make: Callable[[Tensor], Sequence[Tensor]], *forms: Form) -> list[Tensor]:
        """Return the tensors that the owners of some items make of them, each as (n, *shape).

        Args:
            owner: (n,) the rank that has each item, the same on all ranks.
            make: function from the indices of this rank's items to tensors (items, *shape).
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
            return _tensors(self.max(table, len(owner), width, dtype=torch.uint8), forms)
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
        part, failure = _attempt(make)
        numbers = torch.zeros(math.prod(shape) + 1, dtype=dtype, device=self.device)
        if part is not None:
            numbers[:-1] = part.reshape(-1)
        numbers[-1] = failure is not None
        for group in self.groups:
            dist.all_reduce(numbers, op=operation, group=group)
            ranks = dist.get_world_size(group)
            self._count(2 * numbers.nbytes * (ranks - 1) // ranks)
        _raise_together(failure, bool(numbers[-1] != 0))
        return numbers[:-1].view(*shape)

    def _count(self, received: int) -> None:
        self.collectives += 1
        self.bytes += received


def _attempt(make: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return make(), None
    except Exception as failure:
        return None, failure


def _raise_together(failure: Exception | None, any_failed: bool) -> None:
    if failure is not None:
        raise failure
    if any_failed:
        raise RankError("another rank failed while the rows of all ranks were measured: its own error says why")


def _bytes(x: Tensor, form: Form) -> Tensor:
    shape, dtype = form
    assert (tuple(x.shape), x.dtype) == (tuple(shape), dtype), f"made {tuple(x.shape)} {x.dtype}, announced {form}"
    return x.contiguous().view(-1).view(torch.uint8) if x.numel() else x.new_empty(0, dtype=torch.uint8)


def _items(tensors: Sequence[Tensor], forms: Sequence[Form]) -> Tensor:
    """Return the bytes of items next to each other: (items, bytes)."""
    columns = []
    for x, (shape, dtype) in zip(tensors, forms, strict=True):
        columns.append(_bytes(x, ((len(x), *shape), dtype)).view(len(x), math.prod(shape) * dtype.itemsize))
    return torch.cat(columns, 1)


def _tensors(table: Tensor, forms: Sequence[Form]) -> list[Tensor]:
    """Return the tensors (items, *shape) whose bytes are in the columns of a table (items, bytes)."""
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

    rows: RowSource
    """(n, d) rows of this rank; n may be zero."""
    ids: Tensor
    """(n,) their row numbers in the matrix."""
    number: int
    """V."""
    ranks: Ranks
    counts: tuple[int, ...] = ()
    """Rows of each rank, known once the ranks have agreed on their input."""

    @classmethod
    def of(cls, S: Tensor | RowSource, name: str = "S") -> RowShards:
        """Return this rank's rows of a DTensor, or of a source whose parts are DTensors; or all rows of a plain matrix.

        Nothing is sent.
        """
        if len(S.shape) != 2:
            check_matrix(name, tuple(S.shape))
        source = S if isinstance(S, RowSource) else RowSource(S)
        sharded: Any = next((part for part in source.parts if is_dtensor(part)), None)
        if sharded is None:
            if any(is_dtensor(part) for part in _tensors_within(source)):
                raise ValueError(f"{name} has a DTensor in an inner source: make it a part of the outermost one")
            ids = torch.arange(len(source), device=source.device)
            return cls(source, ids, len(source), Ranks([], source.device))
        mesh, placements = sharded.device_mesh, sharded.placements
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
        parts = [part.to_local() if is_dtensor(part) else part for part in source.parts]  # type: ignore[union-attr]
        ids = torch.arange(sharded.shape[0], device=parts[0].device)
        if groups:
            from torch.distributed.tensor import distribute_tensor

            ids = distribute_tensor(ids, mesh, placements, src_data_rank=None).to_local()  # nothing is sent
        mine = len(ids) if len(source) == len(sharded) else int((ids < len(source)).sum())  # ids ascend
        rows = RowSource(*parts, form=source.form, width=source.shape[1], dtype=source.dtype, number=mine)
        return cls(rows, ids[:mine], len(source), Ranks(groups, rows.device))

    @property
    def shape(self) -> tuple[int, int]:
        """(V, d) of the whole matrix."""
        return self.number, self.rows.shape[1]

    @property
    def device(self) -> torch.device:
        """Device of the rows."""
        return self.rows.device

    def take(self, places: Tensor, k: int) -> list[Tensor]:
        """Return k of this rank's rows (k, d) and their ids (k,); where places are fewer, zeros with the id -1."""
        rows, ids, missing = self.rows.take(places), self.ids.index_select(0, places), k - len(places)
        return [pad(rows, (0, 0, 0, missing)), pad(ids, (0, missing), value=-1)] if missing else [rows, ids]

    def gather(self, choose: Callable[[], Tensor], k: int) -> tuple[Tensor, Tensor]:
        """Return the rows (ranks k, d) that all ranks choose by their places, k at most each, and their ids."""
        rows, ids = self.ranks.gather(
            lambda: self.take(choose(), k), ((k, self.shape[1]), self.rows.dtype), ((k,), torch.int64)
        )
        return rows.flatten(0, 1), ids.flatten()


def _tensors_within(source: RowSource) -> Iterator[Tensor]:
    for part in source.parts:
        yield from _tensors_within(part) if isinstance(part, RowSource) else [part]


def as_shards(
    S: Tensor | RowSource | RowShards, *, name: str = "S", agree_on: Callable[[], Sequence[int]] = tuple
) -> RowShards:
    """Return the rows of this rank, of a plain matrix all, after a check that all ranks measure one matrix alike.

    With different shapes the ranks would hang, or mistake each other's numbers for something else. One collective
    prevents this; for a plain matrix there is none.

    Args:
        S: (V, d) matrix: a tensor, a DTensor, a source, or shards.
        name: of the argument, for error messages.
        agree_on: further checks of this rank, which may raise, and up to two numbers that all ranks must share.
    """
    if not isinstance(S, Tensor | RowSource | RowShards):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(S).__name__}: convert it with torch.as_tensor")
    shards = S if isinstance(S, RowShards) else RowShards.of(S, name)

    def numbers() -> list[int]:
        rows = shards.rows
        check_real(name, torch.empty(0, dtype=rows.dtype) if rows.tensor is None else rows.tensor)
        if shards.ids.shape != (len(rows),):
            raise ValueError(f"{name} must have one id per row, got {tuple(shards.ids.shape)} for {len(rows)} rows")
        return [len(rows), *shards.shape, DTYPES.index(rows.dtype), *agree_on()]

    if shards.ranks.is_single:
        counts = [numbers()[0]]
    else:

        def make() -> Sequence[Tensor]:
            row = numbers()
            return [torch.tensor(row + [-1] * (6 - len(row)), device=shards.ranks.device)]

        (table,) = shards.ranks.gather(make, ((6,), torch.int64))
        if not bool((table[:, 1:] == table[0, 1:]).all()):
            forms = [f"{(V, d)} {DTYPES[dtype]} {rest}" for _, V, d, dtype, *rest in table.tolist()]
            raise ValueError(f"ranks must measure one matrix alike, got {'; '.join(dict.fromkeys(forms))}")
        counts = table[:, 0].tolist()
    check_matrix(name, shards.shape)
    if sum(counts) != shards.number:
        rows = ", ".join(map(str, counts))
        raise ValueError(f"ranks must hold each of {shards.number} rows once, got {rows} rows: check the ids of each")
    return replace(shards, counts=tuple(counts))


def is_dtensor(S: object) -> bool:
    """Return True if S is a DTensor, one of torch's sharded tensors."""
    if type(S) is Tensor or not isinstance(S, Tensor) or not dist.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(S, DTensor)


def like(S: Tensor, rows: Tensor) -> Tensor:
    """Return rows of this rank as a matrix with the layout of S: the rows themselves, or a DTensor as S is."""
    if not is_dtensor(S):
        return rows
    from torch.distributed.tensor import DTensor

    assert isinstance(S, DTensor)
    stride = (S.shape[1], 1)
    return DTensor.from_local(rows, S.device_mesh, S.placements, run_check=False, shape=S.shape, stride=stride)

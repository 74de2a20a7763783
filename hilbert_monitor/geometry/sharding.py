"""Rows of a matrix that are formed on demand, and rows that several ranks share.

The geometry reads the rows of a `RowSource` chunk by chunk and never needs the whole matrix. A tensor is a source of
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

from .numerics import DTYPES, MAX_BYTES, check_matrix, check_real, on_host

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

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that the rows are formed from, also those of inner sources."""
        for part in self.parts:
            yield from part.tensors() if isinstance(part, RowSource) else [part]

    def shares_memory(self, rows: Tensor) -> bool:
        """Return True if rows (n, d) are a part of this source, so that nobody may write to them."""
        storage = rows.untyped_storage()._cdata
        return any(part.untyped_storage()._cdata == storage for part in self.tensors())

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
            share: divisor of `max_bytes`, the bound on scratch memory, that gives the memory for one chunk.
            dtype: of the chunks; by default that of the source.
            copies: chunks in memory at once: this one and those that the caller makes of it.
            extra: bytes of scratch that the caller needs for each row.
            longest: most rows in a chunk, in place of what fits the cache.
        """
        dtype = dtype or self.dtype
        row_bytes = max(1, (copies + 2 * (self.form is not None)) * self.shape[1] * dtype.itemsize + extra)
        if max_bytes < (need := share * row_bytes):
            raise ValueError(f"max_bytes={max_bytes} is less than the {need} bytes this input needs: raise max_bytes")
        cached = max(64, _CHUNK_BYTES // row_bytes) if on_host(self) else max(1, len(self))
        length = min(longest or cached, max_bytes // need)
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
        self.number, self.rank = 1, 0
        for group in self.groups:
            self.rank += self.number * dist.get_rank(group)
            self.number *= dist.get_world_size(group)
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

    def gather(self, make: Callable[[], Sequence[Tensor]], *forms: Form) -> list[Tensor]:
        """Return the tensors of these shapes and dtypes that the ranks make, each as (ranks, *shape).

        All ranks get the same tables, in the same order of ranks.
        """
        if self.is_single:
            return [x[None] for x in make()]
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in forms]
        table = torch.zeros(1, sum(sizes) + 1, dtype=torch.uint8, device=self.device)
        parts, failure = _attempt(lambda: [_bytes(x, form) for x, form in zip(make(), forms, strict=True)])
        if parts is not None:
            table[0, :-1] = torch.cat(parts)
        table[0, -1] = failure is not None
        for group in self.groups:
            ranks = dist.get_world_size(group)
            out = table.new_empty(ranks * len(table), table.shape[1])
            _all_gather(out, table, group=group)
            self._count(out.numel() * (ranks - 1) // ranks)
            table = out
        _raise_together(failure, bool(table[:, -1].any()))
        columns = [table[:, start:end] for start, end in pairwise(accumulate(sizes, initial=0))]
        return [
            column.reshape(-1).clone().view(dtype).view(len(table), *shape)  # a copy: views must be aligned
            for column, (shape, dtype) in zip(columns, forms, strict=True)
        ]

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
    assert (tuple(x.shape), x.dtype) == form, f"made {tuple(x.shape)} {x.dtype}, announced {form}"
    return x.contiguous().view(-1).view(torch.uint8) if x.numel() else x.new_empty(0, dtype=torch.uint8)


@dataclass(frozen=True)
class RowShards:
    """The rows of a (V, d) matrix that this rank has; the other ranks of some process groups have the rest.

    All ranks call a function of the geometry together, each with its own part, and all get the same answer.
    """

    rows: RowSource
    """(n, d) rows of this rank; n may be zero."""
    ids: Tensor
    """(n,) their row numbers in the matrix, in increasing order."""
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
            if any(is_dtensor(tensor) for tensor in source.tensors()):
                raise ValueError(f"{name} has a DTensor in an inner source: make it a part of the outermost one")
            ids = torch.arange(len(source), device=source.device)
            return cls(source, ids, len(source), Ranks([], source.device))
        mesh, placements = sharded.device_mesh, sharded.placements
        if mesh.get_coordinate() is None:
            raise ValueError(f"rank {dist.get_rank()} is not in the mesh of S: call this on the ranks of {mesh} alone")
        split = [at for at, placement in enumerate(placements) if not placement.is_replicate()]
        if any(getattr(placements[at], "dim", None) != 0 for at in split):
            raise ValueError(
                f"S must be sharded by rows, got placements {tuple(placements)}: redistribute it to Shard(0),"
                " or give its whole rows with .full_tensor()"
            )
        parts: list[Any] = [part.to_local() if is_dtensor(part) else part for part in source.parts]  # type: ignore[union-attr]
        ids = torch.arange(sharded.shape[0], device=parts[0].device)
        if split:
            from torch.distributed.tensor import distribute_tensor

            ids = distribute_tensor(ids, mesh, placements, src_data_rank=None).to_local()  # nothing is sent
        mine = len(ids) if len(source) == len(sharded) else int((ids < len(source)).sum())
        rows = RowSource(*parts, form=source.form, width=source.shape[1], dtype=source.dtype, number=mine)
        return cls(rows, ids[:mine], len(source), Ranks([mesh.get_group(at) for at in split], rows.device))

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

    def find(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the places of some ids (n,) among the rows of this rank, and which of them it has."""
        places = torch.searchsorted(self.ids, ids)
        return places, pad(self.ids, (0, 1), value=self.number)[places] == ids

    def from_owners(self, ids: Tensor, make: Callable[[Tensor], Tensor], width: int, dtype: torch.dtype) -> Tensor:
        """Return what the ranks that have some rows make of them, by their places: (n, width) on all ranks."""
        if self.ranks.is_single:
            return make(ids)

        def part() -> Tensor:
            places, here = self.find(ids)
            mine = here.nonzero().squeeze(1)
            table = torch.zeros(len(ids), width, dtype=dtype, device=self.device)
            return table.index_copy_(0, mine, make(places[mine]).to(dtype))

        return self.ranks.sum(part, len(ids), width, dtype=dtype)  # adding zero changes no number


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
    rows = shards.rows

    def numbers() -> list[int]:
        check_real(name, torch.empty(0, dtype=rows.dtype) if rows.tensor is None else rows.tensor)
        if shards.ids.shape != (len(rows),):
            raise ValueError(f"{name} must have one id per row, got {tuple(shards.ids.shape)} for {len(rows)} rows")
        found = [len(rows), *shards.shape, DTYPES.index(rows.dtype), *agree_on()]
        return found + [-1] * (6 - len(found))

    if shards.ranks.is_single:
        table = [numbers()]
    else:
        table = shards.ranks.gather(lambda: [torch.tensor(numbers())], ((6,), torch.int64))[0].tolist()
    counts, forms = [row[0] for row in table], [row[1:] for row in table]
    if any(form != forms[0] for form in forms):
        found = [f"{(V, d)} {DTYPES[dtype]} {rest}" for V, d, dtype, *rest in forms]
        raise ValueError(f"ranks must measure one matrix alike, got {'; '.join(dict.fromkeys(found))}")
    check_matrix(name, shards.shape)
    if sum(counts) != shards.number:
        listed = ", ".join(map(str, counts))
        raise ValueError(f"ranks must hold each of {shards.number} rows once, got {listed} rows: check the ids of each")
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

"""Whole matrices from their shards and back: each goes to one rank, its owner, and comes back in parts.

With W ranks and P numbers in all matrices, a rank sends and receives about 2 P / W numbers each. Gathering every matrix
on every rank would move P to each, and every rank would do all the work.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hilbert_monitor.geometry.sharding import Ranks

BUCKET_BYTES = 256 * 2**20
"""Of whole matrices that each rank owns at a time: it bounds the memory that their gathering takes on a rank."""


class Shard(NamedTuple):
    """Where the shard of one rank is in its matrix."""

    rows: slice | Tensor
    columns: slice | Tensor
    shape: tuple[int, int]
    replica: tuple[int, ...]
    """Coordinates of its rank along mesh dimensions over which nothing is sharded."""

    @property
    def numel(self) -> int:
        """How many numbers the shard has."""
        return self.shape[0] * self.shape[1]

    def of(self, X: Tensor) -> Tensor:
        """Return the shard of a whole matrix."""
        return X[self.rows][:, self.columns]

    def put(self, X: Tensor, part: Tensor) -> None:
        """Write the shard into a whole matrix."""
        both = isinstance(self.rows, Tensor) and isinstance(self.columns, Tensor)
        X[self.rows[:, None] if both else self.rows, self.columns] = part.view(self.shape)  # type: ignore[index]


class Held(NamedTuple):
    """A matrix at its owner, or the shard of it on another rank."""

    X: Tensor
    present: Tensor
    """(1,): one, or zero if a rank had nothing to send. A tensor, so that nobody waits for the device."""


class Owners:
    """The ranks of a mesh, each the owner of some matrices. All of them call the methods together.

    Args:
        mesh: of sharded parameters; this rank is in it.
    """

    def __init__(self, mesh: Any) -> None:
        ranks = mesh.mesh.flatten().tolist()
        self.mesh, self.group = mesh, _group_of(mesh, ranks)
        self.ranks = ranks if self.group is None else dist.get_process_group_ranks(self.group)
        self.place = self.ranks.index(dist.get_rank())
        self._shards: dict[Any, list[Shard]] = {}

    def buckets(self, params: Sequence[Tensor], dtype: torch.dtype) -> Iterator[Bucket]:
        """Split parameters, in their order, into lists of a size that is gathered at once.

        Args:
            params: sharded over the mesh.
            dtype: of the matrices at their owners, and on the wire.
        """
        self._meet(params)
        some: list[Tensor] = []
        size, budget = 0, BUCKET_BYTES * len(self.ranks)
        for p in params:
            if some and size + p.numel() * dtype.itemsize > budget:
                yield self._bucket(some, dtype)
                some, size = [], 0
            some.append(p)
            size += p.numel() * dtype.itemsize
        if some:
            yield self._bucket(some, dtype)

    def _bucket(self, params: list[Tensor], dtype: torch.dtype) -> Bucket:
        shards = [self._shards[_layout(p)] for p in params]
        return Bucket(self, params, shards, torch.empty(0, dtype=dtype, device=params[0].device))

    def _meet(self, params: Sequence[Tensor]) -> None:
        """Learn where the shards of parameters are on all ranks: two small collectives, where any layout is new.

        Raises:
            ValueError: on all ranks, if they do not hold shards of the same matrices.
        """
        new = {_layout(p): p for p in params if _layout(p) not in self._shards}
        if not new:
            return
        device, groups = params[0].device, [] if self.group is None else [self.group]
        own = zlib.crc32(repr([(_layout(p), p.dtype) for p in params]).encode())
        form: Any = ((1,), torch.int64)
        (held,) = Ranks(groups, device).gather(lambda: [torch.tensor([own], device=device)], form)
        if not bool((held == held[0]).all()):
            raise ValueError(
                "the ranks of a mesh hold shards of different matrices, and Muon gathers each from all of them: give"
                " every rank the same parameters in the same order"
            )
        forms: list[Any] = [((length,), torch.bool) for p in new.values() for length in p.shape]
        masks = Ranks(groups, device).gather(lambda: [mask for p in new.values() for mask in _masks(p)], *forms)
        for (layout, p), rows, columns in zip(new.items(), masks[::2], masks[1::2], strict=True):
            parts = zip(self.ranks, rows.cpu(), columns.cpu(), strict=True)
            self._shards[layout] = [
                Shard(_index(r), _index(c), (int(r.sum()), int(c.sum())), self._replica(p, rank))
                for rank, r, c in parts
            ]

    def _replica(self, p: Tensor, rank: int) -> tuple[int, ...]:
        coordinate = (self.mesh.mesh == rank).nonzero()[0].tolist()
        pairs = zip(coordinate, p.placements, strict=True)  # type: ignore[attr-defined]
        return tuple(c for c, placement in pairs if placement.is_replicate())

    def swap(self, pieces: list[list[Tensor]], sizes: list[list[int]], empty: Tensor) -> list[Iterator[Tensor]]:
        """Send each rank its pieces by one collective, and return the pieces of these sizes that each has sent."""
        if self.group is None:
            return [iter(row) for row in pieces]
        sent, lengths = [sum(map(len, row)) for row in pieces], [sum(row) for row in sizes]
        out = empty.new_empty(sum(lengths))
        dist.all_to_all_single(
            out, torch.cat([empty, *(piece for row in pieces for piece in row)]), lengths, sent, group=self.group
        )
        rows = zip(torch.split(out, lengths), sizes, strict=True)
        return [iter(torch.split(row, size)) for row, size in rows]


class Bucket:
    """Sharded matrices that go to their owners, and back, at once.

    Args:
        ranks: of their mesh.
        params: sharded parameters that have the layouts of the matrices.
        shards: of each, on all ranks.
        empty: (0,) of the device and dtype of the matrices.
    """

    def __init__(self, ranks: Owners, params: list[Tensor], shards: list[list[Shard]], empty: Tensor) -> None:
        self.params = params
        self._ranks, self._shards, self._empty = ranks, shards, empty
        self._owners = balanced([work(p) for p in params], len(ranks.ranks))

    def gather(self, parts: Sequence[Tensor | None]) -> dict[int, Held]:
        """Send the shards of matrices to their owners.

        Args:
            parts: the shard of this rank of each matrix, or None if it has nothing to send.

        Returns:
            the matrices that this rank owns, (m, n), by their positions in `params`.
        """
        ranks, places = self._ranks, range(len(self._ranks.ranks))
        pieces: list[list[Tensor]] = [[] for _ in places]
        for part, shards, owner in zip(parts, self._shards, self._owners, strict=True):
            if _sends(shards, ranks.place, owner):
                numbers = self._empty.new_zeros(shards[ranks.place].numel) if part is None else part.reshape(-1)
                flag = self._empty.new_full((1,), part is not None)
                pieces[owner] += [numbers.to(flag.dtype), flag]
        mine = [i for i, owner in enumerate(self._owners) if owner == ranks.place]
        senders = [[i for i in mine if _sends(self._shards[i], place, ranks.place)] for place in places]
        sizes = [[n for i in some for n in (self._shards[i][place].numel, 1)] for place, some in enumerate(senders)]
        received = ranks.swap(pieces, sizes, self._empty)
        wholes = {i: Held(self._empty.new_empty(self.params[i].shape), self._empty.new_ones(1)) for i in mine}
        for place, some in enumerate(senders):
            for i in some:
                self._shards[i][place].put(wholes[i].X, next(received[place]))
                wholes[i].present.mul_(next(received[place]))
        return wholes

    def scatter(self, wholes: dict[int, Held]) -> list[Held]:
        """Send every rank its shards of the matrices that `gather` has given their owners.

        Returns:
            the shard of this rank of each of `params`.
        """
        ranks, places = self._ranks, range(len(self._ranks.ranks))
        pieces: list[list[Tensor]] = [[] for _ in places]
        for i, (X, present) in wholes.items():
            for place, shard in enumerate(self._shards[i]):
                pieces[place] += [shard.of(X).reshape(-1), present]
        mine = [shards[ranks.place] for shards in self._shards]
        sizes = [
            [n for shard, owner in zip(mine, self._owners, strict=True) if owner == place for n in (shard.numel, 1)]
            for place in places
        ]
        received = ranks.swap(pieces, sizes, self._empty)
        owners = zip(mine, self._owners, strict=True)
        return [Held(next(received[owner]).view(shard.shape), next(received[owner])) for shard, owner in owners]


def _sends(shards: list[Shard], place: int, owner: int) -> bool:
    """Return whether a rank has a shard that the owner needs: of replicas, the one beside the owner."""
    return shards[place].numel > 0 and shards[place].replica == shards[owner].replica


def balanced(works: list[int], ranks: int) -> list[int]:
    """Return an owner for each piece of work, so that all have about the same: the largest is given first."""
    loads, owners = [0] * ranks, [0] * len(works)
    for index in sorted(range(len(works)), key=lambda i: -works[i]):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += works[index]
    return owners


def work(p: Tensor) -> int:
    """Return a number that grows as the products of a Newton-Schulz step on a matrix."""
    m, n = sorted(p.shape)
    return m * m * (2 * n + m)


def _group_of(mesh: Any, ranks: list[int]) -> dist.ProcessGroup | None:
    """Return one process group of all ranks of a mesh; None for a single rank."""
    if len(ranks) == 1:
        return None
    if mesh.ndim == 1:
        group: dist.ProcessGroup = mesh.get_group(0)
        return group
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    made: dist.ProcessGroup = dist.new_group(sorted(ranks), use_local_synchronization=True)  # only these are here
    return made


def _layout(p: Tensor) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    return tuple(p.shape), tuple(p.placements)  # type: ignore[attr-defined]


def _masks(p: Tensor) -> Iterator[Tensor]:
    """Yield which rows of a matrix this rank has, (m,), and which columns, (n,)."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    for dim, length in enumerate(p.shape):
        placements = [q if getattr(q, "dim", None) == dim else Replicate() for q in p.placements]  # type: ignore[attr-defined]
        indices = torch.arange(length, device=p.device).view((-1, 1) if dim == 0 else (1, -1))
        own = distribute_tensor(indices, p.device_mesh, placements, src_data_rank=None)  # type: ignore[attr-defined]
        mask = torch.zeros(length, dtype=torch.bool, device=p.device)
        mask[own.to_local().reshape(-1)] = True
        yield mask


def _index(mask: Tensor) -> slice | Tensor:
    """Return the indices where a mask is true, as a slice if they are consecutive."""
    indices = mask.nonzero()[:, 0]
    if len(indices) == 0:
        return slice(0, 0)
    first, last = int(indices[0]), int(indices[-1])
    return slice(first, last + 1) if last - first + 1 == len(indices) else indices

"""DTensors as plain tensors, and the exchange of whole matrices between ranks.

A step works on the plain tensors inside DTensors, with no operation of DTensor in between: rows and columns of this
rank, and its own collectives where the formula needs the rest of the matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from hilbert_monitor.geometry.sharding import is_dtensor

BATCH_BYTES = 256 * 2**20
"""Size of the whole matrices that go through one exchange; for shards, of those that each rank owns."""

_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name since torch 2.13


@dataclass(frozen=True)
class ShardLayout:
    """Process groups of the ranks that have the other rows and columns, one for each sharded mesh dimension."""

    rows: tuple[dist.ProcessGroup, ...] = ()
    columns: tuple[dist.ProcessGroup, ...] = ()


def shard_layout(p: Tensor) -> ShardLayout:
    """Return the layout of a parameter; for a plain tensor it has no groups."""
    if not is_dtensor(p) or p.device_mesh.get_coordinate() is None:  # type: ignore[attr-defined]
        return ShardLayout()
    mesh, placements = p.device_mesh, p.placements  # type: ignore[attr-defined]
    sharded = [i for i, placement in enumerate(placements) if hasattr(placement, "dim") and mesh.size(i) > 1]
    groups = [(placements[i].dim % p.ndim, mesh.get_group(i)) for i in sharded]
    rows, columns = (tuple(group for dim, group in groups if dim == side) for side in (0, 1))
    return ShardLayout(rows, columns)


def local(t: Tensor) -> Tensor:
    """Return this rank's part of a tensor, in the same memory; a plain tensor is its own part."""
    if not is_dtensor(t):
        return t
    part: Tensor = t.to_local()  # type: ignore[attr-defined]
    return part.wait() if hasattr(part, "wait") else part  # of a collective that is under way


def local_gradient(p: Tensor) -> Tensor:
    """Return this rank's part of a parameter's gradient, redistributed to the parameter's layout (collective)."""
    G = p.grad
    assert G is not None
    if is_dtensor(p) and G.placements != p.placements:  # type: ignore[attr-defined]
        G = G.redistribute(placements=p.placements)  # type: ignore[attr-defined]
    return local(G)


def gradient_mismatch(p: Tensor) -> str | None:
    """Return why a gradient does not fit its sharded parameter, or None if it does."""
    G = p.grad
    if G is None or not (is_dtensor(p) or is_dtensor(G)):
        return None
    if not (is_dtensor(p) and is_dtensor(G)):
        kinds = ["sharded" if is_dtensor(t) else "plain" for t in (p, G)]
        return f"a {kinds[1]} gradient of a {kinds[0]} parameter"
    if G.device_mesh != p.device_mesh:  # type: ignore[attr-defined]
        return f"a gradient on {G.device_mesh} of a parameter on {p.device_mesh}"  # type: ignore[attr-defined]
    both = (*G.placements, *p.placements)  # type: ignore[attr-defined]
    if G.placements != p.placements and any(type(x).__name__ == "_StridedShard" for x in both):  # type: ignore[attr-defined]
        return f"a gradient that is {G.placements} of a parameter that is {p.placements}"  # type: ignore[attr-defined]
    return None


def lay_out_like(t: Tensor, p: Tensor) -> Tensor:
    """Return a DTensor, or a tensor that every rank has whole, in a parameter's layout (collective for a DTensor)."""
    from torch.distributed.tensor import distribute_tensor

    if not is_dtensor(p):
        return t.full_tensor() if is_dtensor(t) else t  # type: ignore[attr-defined]
    mesh, placements = p.device_mesh, p.placements  # type: ignore[attr-defined]
    if is_dtensor(t):
        if (t.device_mesh, t.placements) == (mesh, placements):  # type: ignore[attr-defined]
            return t
        t = t.full_tensor()  # type: ignore[attr-defined]
    return distribute_tensor(t.to(p.device), mesh, placements, src_data_rank=None)  # none: nothing is sent


def is_partial(p: Tensor) -> bool:
    """Return True if a parameter is a sum that the ranks have not taken yet."""
    return is_dtensor(p) and any(placement.is_partial() for placement in p.placements)  # type: ignore[attr-defined]


def version_of(t: Tensor) -> int:
    """Return the count of changes in place of a tensor and of its part on this rank.

    Zero for an inference tensor, where torch does not count.
    """
    if t.is_inference():
        return 0
    with torch.no_grad():
        return t._version + (local(t)._version if is_dtensor(t) else 0)


class Result(NamedTuple):
    """A whole matrix or this rank's shard of it, and a flag (1,): zero if a gradient was missing, else one."""

    X: Tensor
    present: Tensor | float  # a tensor where others may lack a gradient, so that nothing synchronizes


class ReplicatedExchange:
    """Distributes the work on matrices that every rank holds whole. One all-gather; none for a single rank.

    Args:
        params: the matrices, on one device.
        dtype: of the directions and results.
        ranks: number of ranks.
        group: their process group; by default all ranks.
    """

    def __init__(
        self, params: list[Tensor], dtype: torch.dtype, ranks: int = 1, group: dist.ProcessGroup | None = None
    ) -> None:
        self.params, self.dtype, self.ranks, self.group = params, dtype, ranks, group
        self._owners = balanced_owners(params, ranks)
        rank = dist.get_rank(group) if ranks > 1 else 0
        self.inputs = [p for p, owner in zip(params, self._owners, strict=True) if owner == rank]
        """Parameters whose directions this rank brings: those that it owns."""

    def collect(self, directions: list[Tensor | None]) -> list[Tensor]:
        """Return the whole matrices that this rank owns, from the directions of `inputs`; None without a gradient."""
        self._present = [direction is not None for direction in directions]
        pairs = zip(directions, self.inputs, strict=True)
        return [torch.zeros_like(p, dtype=self.dtype) if N is None else N.to(self.dtype) for N, p in pairs]

    def distribute(self, results: list[Tensor]) -> list[Result]:
        """Return the results of all ranks in the order of `params`, from the results for the collected matrices."""
        if self.ranks == 1:
            return [Result(X, float(present)) for X, present in zip(results, self._present, strict=True)]
        sizes: list[list[int]] = [[] for _ in range(self.ranks)]
        for p, owner in zip(self.params, self._owners, strict=True):
            sizes[owner] += [p.numel(), 1]
        flags = torch.tensor(self._present, dtype=self.dtype, device=self.params[0].device)
        pairs = zip(results, torch.split(flags, 1), strict=True) if results else ()
        mine = torch.cat([flags[:0], *(piece for X, flag in pairs for piece in (X.reshape(-1), flag))])
        longest = max(map(sum, sizes))
        gathered = mine.new_empty(self.ranks, longest)
        _all_gather(gathered.view(-1), pad(mine, (0, longest - len(mine))), group=self.group)
        pieces = [iter(torch.split(row[: sum(size)], size)) for row, size in zip(gathered, sizes, strict=True)]
        return [
            Result(next(pieces[owner]).view(p.shape), next(pieces[owner]))
            for p, owner in zip(self.params, self._owners, strict=True)
        ]


class Shard(NamedTuple):
    """The place of one rank's shard in its matrix."""

    rows: slice | Tensor
    columns: slice | Tensor
    shape: tuple[int, int]
    replica: tuple[int, ...]
    """Coordinates of the rank along mesh dimensions over which nothing is sharded."""

    @property
    def numel(self) -> int:
        """Number of entries."""
        return self.shape[0] * self.shape[1]

    def cut(self, X: Tensor) -> Tensor:
        """Return the shard of a whole matrix."""
        return X[self.rows][:, self.columns]

    def put(self, X: Tensor, part: Tensor) -> None:
        """Write the shard into a whole matrix."""
        both = isinstance(self.rows, Tensor) and isinstance(self.columns, Tensor)
        X[self.rows[:, None] if both else self.rows, self.columns] = part.view(self.shape)  # type: ignore[index]


class MeshRanks:
    """The ranks of a mesh, and the places of their shards. This rank is one of them."""

    def __init__(self, mesh: Any) -> None:
        ranks = mesh.mesh.flatten().tolist()
        self.mesh, self.group = mesh, _group_of(mesh, ranks)
        self.ranks = ranks if self.group is None else dist.get_process_group_ranks(self.group)
        self.rank = self.ranks.index(dist.get_rank())
        self.shards: dict[Any, list[Shard]] = {}
        """The shard of every rank, by shape and placements."""

    def learn(self, params: Sequence[Tensor]) -> None:
        """Learn where the shards of parameters are on all ranks (collective).

        Raises:
            ValueError: on all ranks, if they do not hold shards of the same matrices.
        """
        forms = [(_form(p), str(p.dtype)) for p in params]
        tables = {_form(p): tuple(_indices(p)) for p in params}
        ranks = gather_objects((repr(forms), list(tables.values())), len(self.ranks), self.group)
        if any(others != repr(forms) for others, _ in ranks):
            raise ValueError(
                "the ranks of a mesh hold shards of different matrices, and Muon gathers each from all of them: give"
                " every rank the same parameters in the same order"
            )
        for place, form in enumerate(tables):
            self.shards[form] = [
                Shard(_slice(rows), _slice(columns), (len(rows), len(columns)), self._replica(form, rank))
                for rank, (rows, columns) in zip(self.ranks, (table[place] for _, table in ranks), strict=True)
            ]

    def _replica(self, form: tuple[Any, Any], rank: int) -> tuple[int, ...]:
        coordinate = (self.mesh.mesh == rank).nonzero()[0].tolist()
        return tuple(c for c, placement in zip(coordinate, form[1], strict=True) if placement.is_replicate())


class ShardedExchange:
    """Moves matrices from their shards to one rank each, the owner, and the results back. Two all-to-alls.

    With W ranks a rank sends and receives about 2 / W of all matrices. A gather on every rank would receive all of
    them, and every rank would do all the work.

    Args:
        params: sharded over a mesh that knows their shards, on one device.
        dtype: of the directions and results.
        mesh: the ranks.
    """

    def __init__(self, params: list[Tensor], dtype: torch.dtype, mesh: MeshRanks) -> None:
        self.params = self.inputs = params
        self._mesh, self._shards = mesh, [mesh.shards[_form(p)] for p in params]
        self._owners = balanced_owners(params, len(mesh.ranks))
        self._owned = [i for i, owner in enumerate(self._owners) if owner == mesh.rank]
        self._empty = torch.empty(0, dtype=dtype, device=params[0].device)

    def collect(self, directions: list[Tensor | None]) -> list[Tensor]:
        """Return the whole matrices that this rank owns, from this rank's shards; None is a missing gradient."""
        rank, places = self._mesh.rank, range(len(self._mesh.ranks))
        pieces: list[list[Tensor]] = [[] for _ in places]
        for part, shards, owner in zip(directions, self._shards, self._owners, strict=True):
            if _sends(shards, rank, owner):
                numbers = self._empty.new_zeros(shards[rank].numel) if part is None else part.reshape(-1)
                pieces[owner] += [numbers.to(self._empty.dtype), self._empty.new_full((1,), part is not None)]
        senders = [[i for i in self._owned if _sends(self._shards[i], place, rank)] for place in places]
        sizes = [[n for i in some for n in (self._shards[i][place].numel, 1)] for place, some in enumerate(senders)]
        received = self._all_to_all(pieces, sizes)
        matrices = {i: self._empty.new_empty(self.params[i].shape) for i in self._owned}
        self._present = {i: self._empty.new_ones(1) for i in self._owned}
        for place, some in enumerate(senders):
            for i in some:
                self._shards[i][place].put(matrices[i], next(received[place]))
                self._present[i].mul_(next(received[place]))
        return list(matrices.values())

    def distribute(self, results: list[Tensor]) -> list[Result]:
        """Return this rank's shards of all results, from the results for the collected matrices."""
        pieces: list[list[Tensor]] = [[] for _ in self._mesh.ranks]
        for i, X in zip(self._owned, results, strict=True):
            X = X.masked_fill(self._present[i] == 0, 0)
            for place, shard in enumerate(self._shards[i]):
                pieces[place] += [shard.cut(X).reshape(-1), self._present[i]]
        own = [(shards[self._mesh.rank], owner) for shards, owner in zip(self._shards, self._owners, strict=True)]
        sizes = [
            [n for shard, owner in own if owner == place for n in (shard.numel, 1)] for place in range(len(pieces))
        ]
        received = self._all_to_all(pieces, sizes)
        return [Result(next(received[owner]).view(shard.shape), next(received[owner])) for shard, owner in own]

    def _all_to_all(self, pieces: list[list[Tensor]], sizes: list[list[int]]) -> list[Iterator[Tensor]]:
        """Send each rank its pieces, and return the pieces of these sizes that each has sent."""
        if self._mesh.group is None:
            return [iter(row) for row in pieces]
        sent, lengths = [sum(map(len, row)) for row in pieces], [sum(row) for row in sizes]
        out = self._empty.new_empty(sum(lengths))
        together = torch.cat([self._empty, *(piece for row in pieces for piece in row)])
        dist.all_to_all_single(out, together, lengths, sent, group=self._mesh.group)
        return [iter(torch.split(row, size)) for row, size in zip(torch.split(out, lengths), sizes, strict=True)]


def gather_objects(mine: Any, ranks: int, group: dist.ProcessGroup | None) -> list[Any]:
    """Return an object of every rank of a group (collective)."""
    objects = [mine] * ranks
    if ranks > 1:
        dist.all_gather_object(objects, mine, group=group)
    return objects


def balanced_owners(params: Sequence[Tensor], ranks: int) -> list[int]:
    """Return a rank for each matrix, so that all have about the same Newton-Schulz work: the largest is given first."""
    sides = [sorted(p.shape) for p in params]
    works = [m * m * (2 * n + m) for m, n in sides]
    loads, owners = [0] * ranks, [0] * len(works)
    for index in sorted(range(len(works)), key=lambda i: -works[i]):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += works[index]
    return owners


def batches(params: Sequence[Tensor], dtype: torch.dtype, size: int) -> Iterator[list[Tensor]]:
    """Split parameters, sorted by shape and device, into lists of at most `size` bytes in `dtype`."""
    kinds: dict[Any, list[Tensor]] = {}
    for p in params:
        kinds.setdefault((p.device, p.shape), []).append(p)
    batch: list[Tensor] = []
    used = 0
    for p in chain.from_iterable(kinds.values()):
        needed = p.numel() * dtype.itemsize
        if batch and (used + needed > size or p.device != batch[0].device):
            yield batch
            batch, used = [], 0
        batch.append(p)
        used += needed
    if batch:
        yield batch


def _sends(shards: list[Shard], rank: int, owner: int) -> bool:
    """Return True if a rank has a shard that the owner needs: of replicas, the one in the owner's place."""
    return shards[rank].numel > 0 and shards[rank].replica == shards[owner].replica


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


def _form(p: Tensor) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    return tuple(p.shape), tuple(p.placements)  # type: ignore[attr-defined]


def _indices(p: Tensor) -> Iterator[Tensor]:
    """Yield which rows of a matrix this rank has, and which columns, on the CPU."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    for dim, length in enumerate(p.shape):
        placements = [q if getattr(q, "dim", None) == dim else Replicate() for q in p.placements]  # type: ignore[attr-defined]
        indices = torch.arange(length, device=p.device).view((-1, 1) if dim == 0 else (1, -1))
        own = distribute_tensor(indices, p.device_mesh, placements, src_data_rank=None)  # type: ignore[attr-defined]
        yield own.to_local().reshape(-1).cpu()


def _slice(indices: Tensor) -> slice | Tensor:
    """Return indices as a slice if they are consecutive."""
    first = int(indices[0]) if len(indices) else 0
    consecutive = torch.equal(indices, torch.arange(first, first + len(indices)))
    return slice(first, first + len(indices)) if consecutive else indices

"""DTensors as plain tensors, and the exchange of whole matrices between ranks.

A step works on the plain tensors inside DTensors, with its own collectives where the formula needs other shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from hilbert_monitor.geometry.sharding import is_dtensor

BATCH_BYTES = 256 * 2**20
"""Size of the whole matrices that go through one exchange; for shards, of those that each rank owns."""

_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name since torch 2.13


class ShardLayout(NamedTuple):
    """Process groups of the ranks that have the other rows and columns, one for each sharded mesh dimension."""

    rows: tuple[dist.ProcessGroup, ...] = ()
    columns: tuple[dist.ProcessGroup, ...] = ()


def shard_layout(p: Tensor) -> ShardLayout:
    """Return the layout of a parameter; for a plain tensor it has no groups."""
    if not is_dtensor(p) or p.device_mesh.get_coordinate() is None:  # type: ignore[attr-defined]
        return ShardLayout()
    mesh, placements = p.device_mesh, p.placements  # type: ignore[attr-defined]
    sharded = [(i, q.dim % p.ndim) for i, q in enumerate(placements) if hasattr(q, "dim") and mesh.size(i) > 1]
    return ShardLayout(*(tuple(mesh.get_group(i) for i, dim in sharded if dim == side) for side in (0, 1)))


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

    if is_dtensor(t):
        if is_dtensor(p) and (t.device_mesh, t.placements) == (p.device_mesh, p.placements):  # type: ignore[attr-defined]
            return t
        t = t.full_tensor()  # type: ignore[attr-defined]
    if not is_dtensor(p):
        return t
    return distribute_tensor(t.to(p.device), p.device_mesh, p.placements, src_data_rank=None)  # type: ignore[attr-defined]


def version_of(t: Tensor) -> int:
    """Return the count of changes in place of a tensor and its part on this rank; zero where torch does not count."""
    if t.is_inference():
        return 0
    with torch.no_grad():
        return t._version + (local(t)._version if is_dtensor(t) else 0)


class Result(NamedTuple):
    """A whole matrix or this rank's shard of it, and a flag (1,): zero if a gradient was missing, else one."""

    X: Tensor
    present: Tensor | float  # a tensor where others may lack a gradient, so that nothing synchronizes


class ReplicatedExchange:
    """Distributes the work on matrices of one device that all ranks of a group hold whole. One all-gather.

    `inputs` are the parameters that this rank owns. It brings their directions.
    """

    def __init__(
        self, params: list[Tensor], dtype: torch.dtype, ranks: int = 1, group: dist.ProcessGroup | None = None
    ) -> None:
        self.params, self.dtype, self.ranks, self.group = params, dtype, ranks, group
        self._owners = balanced_owners(params, ranks)
        rank = dist.get_rank(group) if ranks > 1 else 0
        self.inputs = [p for p, owner in zip(params, self._owners, strict=True) if owner == rank]

    def collect(self, directions: list[Tensor | None]) -> list[Tensor]:
        """Return the whole matrices that this rank owns, from the directions of `inputs`; None without a gradient."""
        self._present = [direction is not None for direction in directions]
        pairs = zip(directions, self.inputs, strict=True)
        return [torch.zeros_like(p, dtype=self.dtype) if N is None else N.to(self.dtype) for N, p in pairs]

    def distribute(self, results: list[Tensor]) -> list[Result]:
        """Return the results of all ranks in the order of `params`, from the results for the collected matrices."""
        if self.ranks == 1:
            return [Result(X, float(present)) for X, present in zip(results, self._present, strict=True)]
        owned = list(zip(self.params, self._owners, strict=True))
        sizes = [[n for p, owner in owned if owner == rank for n in (p.numel(), 1)] for rank in range(self.ranks)]
        flags = torch.tensor(self._present, dtype=self.dtype, device=self.params[0].device)
        pairs = zip(results, torch.split(flags, 1), strict=True) if results else ()
        mine = torch.cat([flags[:0], *(piece for X, flag in pairs for piece in (X.reshape(-1), flag))])
        longest = max(map(sum, sizes))
        gathered = mine.new_empty(self.ranks, longest)
        _all_gather(gathered.view(-1), pad(mine, (0, longest - len(mine))), group=self.group)
        pieces = [iter(torch.split(row[: sum(size)], size)) for row, size in zip(gathered, sizes, strict=True)]
        return [Result(next(pieces[owner]).view(p.shape), next(pieces[owner])) for p, owner in owned]


class _Shard(NamedTuple):
    """The place of one rank's shard in its matrix."""

    rows: slice | Tensor
    columns: slice | Tensor
    shape: tuple[int, int]
    replica: tuple[int, ...]  # coordinates of the rank along mesh dimensions over which nothing is sharded

    @property
    def numel(self) -> int:
        return self.shape[0] * self.shape[1]

    def cut(self, X: Tensor) -> Tensor:
        return X[self.rows][:, self.columns]

    def put(self, X: Tensor, part: Tensor) -> None:
        both = isinstance(self.rows, Tensor) and isinstance(self.columns, Tensor)
        X[self.rows[:, None] if both else self.rows, self.columns] = part.view(self.shape)  # type: ignore[index]

    def sends(self, owner: _Shard) -> bool:
        """Return True if the owner of the matrix needs this shard: of replicas, the one in the owner's place."""
        return self.numel > 0 and self.replica == owner.replica


class MeshRanks:
    """The ranks of a mesh, and the places of their shards. This rank is one of them."""

    def __init__(self, mesh: Any) -> None:
        self.ranks: list[int] = mesh.mesh.flatten().tolist()
        self.group: dist.ProcessGroup | None = None
        if mesh.ndim == 1 and len(self.ranks) > 1:
            self.group = mesh.get_group(0)
        elif len(self.ranks) == dist.get_world_size() > 1:
            self.group = dist.group.WORLD
        elif len(self.ranks) > 1:  # only these ranks are here
            self.group = dist.new_group(sorted(self.ranks), use_local_synchronization=True)
        if self.group is not None:
            self.ranks = dist.get_process_group_ranks(self.group)
        self.rank = self.ranks.index(dist.get_rank())
        self._coordinates = [(mesh.mesh == rank).nonzero()[0].tolist() for rank in self.ranks]
        self.shards: dict[Any, list[_Shard]] = {}
        """The shard of every rank, by shape and placements."""

    def learn(self, params: Sequence[Tensor]) -> None:
        """Learn where the shards of parameters are (collective); raise ValueError on all ranks if they differ."""
        forms = [(_form(p), str(p.dtype)) for p in params]
        tables = {_form(p): tuple(_indices(p)) for p in params}
        ranks = gather_objects((repr(forms), list(tables.values())), len(self.ranks), self.group)
        if any(others != repr(forms) for others, _ in ranks):
            raise ValueError(
                "the ranks of a mesh hold shards of different matrices, and Muon gathers each from all of them: give"
                " every rank the same parameters in the same order"
            )
        for place, form in enumerate(tables):
            replicated = [dim for dim, placement in enumerate(form[1]) if placement.is_replicate()]
            self.shards[form] = [
                _Shard(_slice(rows), _slice(columns), (len(rows), len(columns)), tuple(at[dim] for dim in replicated))
                for at, (rows, columns) in zip(self._coordinates, (table[place] for _, table in ranks), strict=True)
            ]


class ShardedExchange:
    """Moves matrices from their shards to one rank each, the owner, and the results back. Two all-to-alls.

    With W ranks a rank sends and receives about 2 / W of all matrices. A gather on every rank would receive all of
    them, and every rank would do all the work. The parameters are on one device, and the mesh knows their shards.
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
            if shards[rank].sends(shards[owner]):
                numbers = self._empty.new_zeros(shards[rank].numel) if part is None else part.reshape(-1)
                pieces[owner] += [numbers.to(self._empty.dtype), self._empty.new_full((1,), part is not None)]
        senders = [[i for i in self._owned if self._shards[i][place].sends(self._shards[i][rank])] for place in places]
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
        places = range(len(pieces))
        sizes = [[n for shard, owner in own if owner == place for n in (shard.numel, 1)] for place in places]
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
    works = [m * m * (2 * n + m) for m, n in (sorted(p.shape) for p in params)]
    loads, owners = [0] * ranks, [0] * len(works)
    for index in sorted(range(len(works)), key=lambda i: -works[i]):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += works[index]
    return owners


def batches(params: Sequence[Tensor], dtype: torch.dtype, size: int) -> Iterator[list[Tensor]]:
    """Split parameters, sorted by device and shape, into lists of at most `size` bytes in `dtype`."""
    batch: list[Tensor] = []
    used = 0
    for p in sorted(params, key=lambda p: (str(p.device), p.shape)):
        needed = p.numel() * dtype.itemsize
        if batch and (used + needed > size or p.device != batch[0].device):
            yield batch
            batch, used = [], 0
        batch.append(p)
        used += needed
    if batch:
        yield batch


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

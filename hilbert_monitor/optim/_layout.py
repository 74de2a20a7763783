"""How the shards of a parameter lie on the ranks, and what a step does with them.

A sharded parameter is a DTensor. A step works on the plain tensors inside, with no operation of DTensor in between:
rows and columns of this rank, and collectives of its own where the formula needs the rest of the matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hilbert_monitor.geometry.sharding import is_dtensor


@dataclass(frozen=True)
class Layout:
    """Which ranks have the other rows and columns of a matrix, and where this rank's shard is among theirs."""

    rows: tuple[dist.ProcessGroup, ...] = ()
    """One group of ranks for each mesh dimension over which rows are sharded."""
    columns: tuple[dist.ProcessGroup, ...] = ()
    place: tuple[int, ...] = ()
    """Coordinates of this shard; replicas of one shard have the same."""

    @classmethod
    def of(cls, p: Tensor) -> Layout:
        """Return the layout of a parameter; that of a plain tensor has no ranks."""
        if not is_dtensor(p):
            return WHOLE
        mesh, placements = p.device_mesh, p.placements  # type: ignore[attr-defined]
        coordinate = mesh.get_coordinate()
        sharded = [i for i, placement in enumerate(placements) if hasattr(placement, "dim") and mesh.size(i) > 1]
        if coordinate is None or not sharded:
            return WHOLE
        groups = [(placements[i].dim % p.ndim, mesh.get_group(i)) for i in sharded]
        return cls(
            tuple(group for dim, group in groups if dim == 0),
            tuple(group for dim, group in groups if dim == 1),
            tuple(coordinate[i] for i in sharded),
        )


WHOLE = Layout()


def local(t: Tensor) -> Tensor:
    """Return this rank's part of a tensor, in the same memory; a plain tensor is its own part."""
    if not is_dtensor(t):
        return t
    part: Tensor = t.to_local()  # type: ignore[attr-defined]
    return part.wait() if hasattr(part, "wait") else part  # of a collective that is under way


def local_gradient(p: Tensor) -> Tensor:
    """Return this rank's part of a parameter's gradient, which is laid out as the parameter for it (collective)."""
    G = p.grad
    assert G is not None
    if is_dtensor(p) and G.placements != p.placements:  # type: ignore[attr-defined]
        G = G.redistribute(placements=p.placements)  # type: ignore[attr-defined]
    return local(G)


def refusal(p: Tensor) -> str | None:
    """Return why a gradient does not go with its sharded parameter, or None if it does."""
    G = p.grad
    if G is None or not (is_dtensor(p) or is_dtensor(G)):
        return None
    if not (is_dtensor(p) and is_dtensor(G)):
        kinds = ["sharded" if is_dtensor(t) else "plain" for t in (p, G)]
        return f"a {kinds[1]} gradient of a {kinds[0]} parameter"
    if G.device_mesh != p.device_mesh:  # type: ignore[attr-defined]
        return f"a gradient on {G.device_mesh} of a parameter on {p.device_mesh}"  # type: ignore[attr-defined]
    if G.placements != p.placements and any(map(_is_strided, (*G.placements, *p.placements))):  # type: ignore[attr-defined]
        return f"a gradient that is {G.placements} of a parameter that is {p.placements}"  # type: ignore[attr-defined]
    return None


def laid_out_like(t: Tensor, p: Tensor) -> Tensor:
    """Return a tensor of a parameter's shape in the layout of the parameter (collective if it is sharded another way).

    Args:
        t: a plain tensor that every rank has whole, or a DTensor.
        p: the parameter.
    """
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
    """Return whether a parameter is a sum that the ranks have not taken yet."""
    return is_dtensor(p) and any(placement.is_partial() for placement in p.placements)  # type: ignore[attr-defined]


def _is_strided(placement: object) -> bool:
    return type(placement).__name__ == "_StridedShard"


def changes(t: Tensor) -> int:
    """Return how often a tensor, or the part of it on this rank, was changed in place.

    Zero for an inference tensor, where torch does not count.
    """
    if t.is_inference():
        return 0
    with torch.no_grad():
        return t._version + (local(t)._version if is_dtensor(t) else 0)

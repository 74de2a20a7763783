"""Collectives by which the ranks of a run stay together: all of them do a thing, or none does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes that train together; alone, nothing is sent. Every rank calls each of these, or none does."""

    world: int
    rank: int
    device: torch.device
    """Where what is sent has to be."""
    group: dist.ProcessGroup | None = None
    """The processes, if they are not all: in a pipeline, those that have the head."""

    @classmethod
    def of(cls, device: torch.device, world: int | None = None, group: dist.ProcessGroup | None = None) -> Ranks:
        """Those of torch.distributed, or of one of its groups; with `world=1`, this process alone."""
        started = dist.is_available() and dist.is_initialized()
        world = (dist.get_world_size(group) if started else 1) if world is None else world
        return cls(world, dist.get_rank(group) if world > 1 else 0, device, group)

    def from_rank_zero(self, mine: bool) -> bool:
        """Return what rank zero passes."""
        if self.world == 1:
            return mine
        flag = torch.tensor([float(mine)], device=self.device)
        dist.broadcast(flag, group=self.group, group_src=0)
        return bool(flag.item())

    def least(self, mine: list[float]) -> list[float]:
        """Return, for each of some numbers, the least that a rank passes. None of them may be nan."""
        return self._reduced(mine, dist.ReduceOp.MIN)

    def total(self, mine: list[float]) -> list[float]:
        """Return the sums of what the ranks pass."""
        return self._reduced(mine, dist.ReduceOp.SUM)

    def unanimous(self, mine: bool) -> bool:
        """Whether every rank says so."""
        return bool(self.least([float(mine)])[0])

    def gathered(self, mine: Any) -> list[Any]:
        """Return the objects of all ranks, in their order. They are pickled."""
        if self.world == 1:
            return [mine]
        everyone: list[Any] = [None] * self.world
        dist.all_gather_object(everyone, mine, group=self.group)
        return everyone

    def _reduced(self, mine: list[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
        if self.world == 1:
            return mine
        numbers = torch.tensor(mine, dtype=torch.float64, device=self.device)
        dist.all_reduce(numbers, op=operation, group=self.group)
        return numbers.tolist()


def compute_device(weight: Tensor) -> torch.device:
    """Where a weight is computed with: its own device, or that of its mesh if its shards are kept on a CPU."""
    mesh: Any = getattr(weight, "device_mesh", None)
    if mesh is None or mesh.device_type == weight.device.type:
        return weight.device
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())

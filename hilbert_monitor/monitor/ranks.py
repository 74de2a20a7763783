"""Collectives by which the ranks of a run stay together: all of them do a thing, or none does."""

from __future__ import annotations

from dataclasses import dataclass

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

    @classmethod
    def of(cls, device: torch.device, world: int | None = None) -> Ranks:
        """Those of torch.distributed; with `world=1`, this process alone."""
        started = dist.is_available() and dist.is_initialized()
        world = (dist.get_world_size() if started else 1) if world is None else world
        return cls(world, dist.get_rank() if world > 1 else 0, device)

    def from_rank_zero(self, mine: bool) -> bool:
        """Return what rank zero passes."""
        if self.world == 1:
            return mine
        flag = torch.tensor([float(mine)], device=self.device)
        dist.broadcast(flag, src=0)
        return bool(flag.item())

    def numbers_from_rank_zero(self, mine: list[float]) -> list[float]:
        """Return the numbers that rank zero passes."""
        if self.world == 1:
            return mine
        numbers = torch.tensor(mine, dtype=torch.float64, device=self.device)
        dist.broadcast(numbers, src=0)
        return numbers.tolist()

    def unanimous(self, mine: bool) -> bool:
        """Whether every rank says so."""
        if self.world == 1:
            return mine
        flag = torch.tensor([float(mine)], device=self.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        return bool(flag.item())

    def gathered(self, mine: Tensor) -> Tensor:
        """Vectors of all ranks as rows, on the CPU."""
        if self.world == 1:
            return mine[None]
        sent = mine.to(self.device)
        everyone = [torch.empty_like(sent) for _ in range(self.world)]
        dist.all_gather(everyone, sent)
        return torch.stack(everyone).cpu()

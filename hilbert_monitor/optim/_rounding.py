"""The update of a weight, and how it is rounded to a dtype below fp32.

A step far below the spacing of the weights is lost when the sum is rounded to the nearest number: the weight stays
where it is, at every step. Two other ways keep the trajectory. Stochastic rounding goes to one of the two neighbours
with probabilities that make the mean right. Compensated rounding adds what was lost at the next step.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from hilbert_monitor.geometry import compute_dtype

from ._chunks import cache_chunks
from ._layout import Layout, local

ROUNDINGS = ("nearest", "stochastic", "compensated")
"""Choices of the hyperparameter `rounding`."""


@dataclass(frozen=True, slots=True)
class Rounding:
    """How one parameter, or a chunk of its rows, is rounded in one step. By default to the nearest number."""

    lost: Tensor | None = None
    """What earlier steps lost by rounding, in the parameter's dtype; updated in place."""
    generator: Generator | None = None
    """Source of random numbers for stochastic rounding."""

    @classmethod
    def of(cls, p: Tensor, kind: str, state: dict[str, Any], index: int) -> Rounding:
        """Prepare the rounding of a parameter's next step.

        Stochastic rounding has a generator of its own, seeded by the parameter's position and its number of steps. So
        no other random number is disturbed, a resumed run draws what it would have drawn, and all ranks draw alike.
        Shards of one parameter draw differently, replicas of one shard alike.

        Args:
            p: the parameter; in fp32 or fp64 it is not rounded.
            kind: one of `ROUNDINGS`.
            state: the optimizer's, of the parameter.
            index: position of the parameter in its optimizer.
        """
        if kind == "nearest" or p.dtype not in (torch.bfloat16, torch.float16):
            return NEAREST
        if kind == "compensated":
            if "compensation" not in state:
                state["compensation"] = torch.zeros_like(p)
            return cls(lost=local(state["compensation"]))
        state["roundings"] = state.get("roundings", 0) + 1
        place = "".join(f" {coordinate}" for coordinate in Layout.of(p).place)
        seed = zlib.crc32(f"{index} {state['roundings']}{place}".encode())
        return cls(generator=torch.Generator(p.device).manual_seed(seed))

    def chunks(self, A: Tensor, like: Tensor, *, size: int | None = None) -> Iterator[tuple[Tensor, Rounding]]:
        """Yield chunks of a parameter's rows as `cache_chunks` does, each with its rounding."""
        if self.lost is None:
            yield from ((chunk, self) for chunk in cache_chunks(A, like, size=size))
        else:
            pairs = zip(*(cache_chunks(x, like, size=size) for x in (A, self.lost)), strict=True)
            yield from ((chunk, Rounding(lost=lost)) for chunk, lost in pairs)

    def store(self, u: Tensor, target: Tensor) -> None:
        """Set u to the target (fp32), rounded to u's dtype."""
        if self.generator is not None:
            u.copy_(_stochastic(target, u.dtype, self.generator))
            return
        u.copy_(target)
        if self.lost is not None:
            self.lost.copy_(target.sub_(u.to(target.dtype)))


NEAREST = Rounding()


def shrink_and_add(
    u: Tensor,
    s: Tensor,
    *,
    scale: Tensor | None = None,
    shrink: float | Tensor = 1.0,
    rounding: Rounding = NEAREST,
) -> None:
    """Set u to shrink u + scale s in place, rounded once to u's dtype."""
    target = u.to(compute_dtype(u))
    if rounding.lost is not None:
        target.add_(rounding.lost.to(target.dtype))  # cast first: a mixed sum is slow on a CPU
    if isinstance(shrink, Tensor) or shrink != 1:  # a tensor is not compared: that would wait for the device
        target.mul_(shrink)
    if scale is None:
        target.add_(s)
    else:
        target.addcmul_(s, scale)
    if target is not u:
        rounding.store(u, target)


def _stochastic(target: Tensor, dtype: torch.dtype, generator: Generator) -> Tensor:
    """Round fp32 numbers to bf16 or fp16, up or down at random, with the exact number as the mean.

    A number is sign and magnitude, so its bits plus one are its neighbour away from zero, whatever the sign.
    """
    nearest = target.to(dtype)
    bits = nearest.view(torch.int16)
    bits = bits - (nearest.abs() > target.abs()).to(torch.int16)  # towards zero
    inner, outer = bits.view(dtype).float(), (bits + 1).view(dtype).float()
    share = (target - inner) / (outer - inner)  # nan where the target is not finite, which then stays as it is
    draws = torch.rand(target.shape, generator=generator, device=target.device)
    return (bits + (draws < share).to(torch.int16)).view(dtype)

"""The increment of an optimizer's last step as a difference of weights: correct for any optimizer, to their rounding.

It takes a copy of the weights before the steps that are measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hilbert_monitor.geometry import compute_dtype

from .device_numbers import reads_later


@dataclass(frozen=True, slots=True)
class Increment:
    """The increment of a step, and how far it may be from what the stored weights did."""

    S: Tensor
    """This rank's entries, laid out as those of the parameter, in fp32 or better."""
    rounding: float | Tensor
    """Bound on the difference between an entry of S and the change of the stored weight, which is rounded: on the
    device of S where that is an accelerator. Zero where S was formed from state and U has at least fp32."""


class WeightIncrement:
    """Forms the increment of one parameter from its weights before a step and after it.

    Args:
        weights: returns this rank's entries of the parameter, as they are when it is called.
    """

    def __init__(self, weights: Callable[[], Tensor]) -> None:
        self._weights = weights
        self.before: Tensor | None = None
        """The weights before the step, where they were kept."""
        self.cast: Tensor | None = None
        """Those, as a forward pass of less precision sees them, where they were kept."""

    def keep(self, *, wanted: bool) -> None:
        """Keep the weights as they are, if they are wanted: a step or an update begins."""
        self.before = None  # first, for its memory
        if wanted:
            self.before = self._weights().clone()

    def keep_cast(self, dtype: torch.dtype) -> None:
        """Keep the weights as a forward pass in `dtype` sees them."""
        self.cast = self._weights().to(dtype)

    def forget(self) -> None:
        """Let go of the weights before the step."""
        self.before = self.cast = None

    def form(self, share: float | Tensor) -> Increment:
        """Return the increment that the stored weights made: U' - c U.

        Args:
            share: 1 - c, the share of the weights that decay took away.
        """
        assert self.before is not None
        U, before = self._weights(), self.before
        dtype = compute_dtype(U)
        moved = torch.sub(U.to(dtype), before.to(dtype))  # near U the subtraction is exact
        return Increment(moved + before.to(dtype) * share, 2 * torch.finfo(U.dtype).eps * largest(U, before))

    def form_cast(self, share: float | Tensor) -> Tensor:
        """Return the increment that the forward pass sees: cast(U') - c cast(U)."""
        assert self.cast is not None
        U, before = self._weights(), self.cast
        after, dtype = U.to(before.dtype), compute_dtype(U)
        return (after.to(dtype) - before.to(dtype)).add_(before.to(dtype) * share)

    def moved(self) -> tuple[Tensor, int]:
        """How many of this rank's weights are not what they were before the step, and how many there are."""
        assert self.before is not None
        return (self.before != self._weights()).sum(), self.before.numel()


def largest(*matrices: Tensor) -> float | Tensor:
    """The largest |entry|, zero if there is none; on an accelerator, which is not waited for, in fp64."""
    maxima = [x.abs().amax() for x in matrices if x.numel()]
    if not maxima:
        return 0.0
    most = torch.stack(maxima).amax()
    return most.double() if reads_later(most.device) else float(most)

"""A few hundred rows of a weight, kept to see what moved it: a few kernels a step, and no copy of the weight.

They are others after every check, so that a change of a single row is found too, once it is its turn.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

ROWS = 256
"""How many rows are kept, at most."""
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class KeptRows:
    """Evenly spaced rows of a parameter, as they were before its last step and as they were last seen.

    Args:
        weights: returns some of this rank's rows of the parameter, as they are when it is called.
        number: of this rank's rows.
    """

    def __init__(self, weights: Callable[[slice], Tensor], number: int) -> None:
        self._weights = weights
        self._stride = max(1, number // ROWS)
        self._start, self._starts = 0, random.Random(0)  # the same on every rank
        self.before: Tensor | None = None
        """The rows before the last step."""
        self._seen: Tensor | None = None
        self._differ: Tensor | None = None

    @property
    def at(self) -> slice:
        """Which they are, of this rank's rows."""
        return slice(self._start, None, self._stride)

    def of(self, matrix: Tensor) -> Tensor:
        """The same rows of another matrix of this rank's rows."""
        return matrix.detach()[self.at]

    def now(self) -> Tensor:
        """The rows as they are."""
        return self._weights(self.at)

    def go_on(self) -> None:
        """Take other rows from now on."""
        self._start = self._starts.randrange(self._stride)

    def see(self) -> None:
        """Keep the rows as they are: nobody but the next step should move them."""
        self._seen = self.now().clone()

    def begin(self) -> None:
        """Take the rows last seen as those before a step."""
        self.before = self._seen

    def compare(self) -> None:
        """Compare the rows with those last seen, for `moved` to say. An accelerator is not waited for."""
        differ = self._difference()
        if differ is not None:
            self._differ = differ if self._differ is None else self._differ | differ

    def moved(self) -> bool:
        """Whether a comparison has found a difference since this was last asked."""
        moved, self._differ = self._differ is not None and bool(self._differ), None
        return moved

    def are_others(self) -> bool:
        """Whether the rows are not those last seen."""
        differ = self._difference()
        return differ is not None and bool(differ)

    def stepped(self) -> bool:
        """Whether the rows are not those of before the step, as far as can be seen: a rank may have none."""
        return self.before is not None and (not len(self.before) or bool(_differ(self.before, self.now())))

    def _difference(self) -> Tensor | None:
        rows, seen = self.now(), self._seen
        if seen is None or seen.shape != rows.shape or seen.dtype != rows.dtype or seen.device != rows.device:
            return None
        return _differ(seen, rows)

    def forget(self) -> None:
        """Let go of them."""
        self.before = self._seen = self._differ = None


def _differ(one: Tensor, other: Tensor) -> Tensor:
    """Whether a bit differs; a nan is equal to itself."""
    bits = BITS[one.dtype.itemsize]
    return torch.ne(one.view(bits), other.view(bits)).any()

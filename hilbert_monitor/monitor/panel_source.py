"""Where the panel comes from: the user's own tokens, the first validation items, or what validation delivers."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from .batches import Batch, positions_of, with_tensors
from .guard import tell
from .panel import Panel

PanelChoice = Literal["loader", "paper"] | list[int] | list[list[int]] | Tensor
"""See `PanelSource`."""


class PanelSource:
    """Finds the panel of a run.

    Args:
        choice: "loader" for the first positions of the validation data; "paper" for those that each rank's first
            validation batches hold, an equal part from each, as the paper's authors take them; or token ids.
        size: number of positions on all ranks together.
    """

    def __init__(self, choice: PanelChoice, size: int) -> None:
        self.choice, self.size = choice, size
        self.panel: Panel | None = None
        """The panel, once there is one."""
        self._batches: list[Batch] | None = None

    def take(self, loaders: Any, *, validates: bool) -> None:
        """Take the panel from what is at hand, without iterating anything.

        Args:
            loaders: validation loaders, if there are any yet.
            validates: whether validation will deliver batches, from which a panel can be collected.
        """
        if not isinstance(self.choice, str):
            self.panel = Panel.of_tokens(self.choice, self.size)
        elif loaders is not None and self.choice == "loader":
            self.panel = Panel.of_loader(loaders, self.size)
        elif not validates:
            tell(
                "found no validation data and measures the diameter alone: give the Trainer a validation loader, or"
                " token ids as panel=..."
            )

    def collect(self) -> None:
        """Begin to collect validation batches, if there is no panel yet."""
        self._batches = [] if self.panel is None else None

    def offer(self, batch: Batch, *, world: int) -> None:
        """Collect a validation batch, if this rank still lacks positions of its part."""
        if self._batches is not None and self._missing(world) > 0:
            self._batches.append(with_tensors(batch, lambda x: x.detach().cpu().clone()))

    def finish(self, *, rank: int, world: int, more_to_come: bool = False) -> None:
        """Make the panel of what was collected.

        Args:
            rank: this process.
            world: ranks that train together.
            more_to_come: a later validation will deliver more: too few positions make no panel yet.
        """
        batches, missing = self._batches, self._missing(world)
        self._batches = None
        if batches and not (missing > 0 and more_to_come):
            self.panel = Panel.of_batches(batches, self.size, rank=rank, world=world)

    def reset(self) -> None:
        """Forget the panel: the next run finds its own."""
        self.panel = self._batches = None

    def _missing(self, world: int) -> int:
        """Positions that this rank still lacks of its part."""
        return -(-self.size // world) - sum(len(positions_of(batch)) for batch in self._batches or ())

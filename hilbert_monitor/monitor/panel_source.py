"""Where the panel comes from: the user's own tokens, the first validation items, or what validation delivers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from torch import Tensor
from torch.nn import Module

from .batches import Batch, positions_of, with_decoder_inputs, with_tensors
from .panel import Panel
from .runtime import Ranks, warn_user

PanelChoice = Literal["loader", "paper"] | list[int] | list[list[int]] | Tensor
"""See `PanelSource`."""
Prepare = Callable[[Batch], Batch]


def _as_it_is(batch: Batch) -> Batch:
    return batch


class PanelSource:
    """Finds the panel of a run. All ranks have the same one, or none has.

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
        self._stream = False  # the loader's data cannot be read without changing something
        self._prepared: Prepare = _as_it_is

    def take(self, loaders: Any, *, validates: bool, ranks: Ranks, model: Module) -> None:
        """Take the panel from what is at hand, without iterating anything. Called on every rank.

        Ranks that find different panels, because each has a dataset of its own, keep none: then it is collected.

        Args:
            loaders: validation loaders, if there are any yet.
            validates: whether validation will deliver batches, from which a panel can be collected.
            ranks: those that train together.
            model: that is trained; the batches of an encoder-decoder get the ids of its decoder.
        """
        panel: Panel | None = None
        self._prepared = partial(with_decoder_inputs, model)
        try:
            panel = self._at_hand(loaders, validates=validates)
        finally:  # also after a failure: the other ranks wait for this one
            hashes = ranks.gather(None if panel is None else panel.hash)
            self.panel = panel if len(set(hashes)) == 1 else None

    def _at_hand(self, loaders: Any, *, validates: bool) -> Panel | None:
        if not isinstance(self.choice, str):
            return Panel.of_tokens(self.choice, self.size)
        if loaders is not None and self.choice == "loader":
            panel = None if self._stream else Panel.of_loader(loaders, self.size, prepared=self._prepared)
            self._stream = panel is None
            return panel
        if not validates:
            warn_user(
                "found no validation data and measures the diameter alone: give the Trainer a validation loader, or"
                " token ids as panel=..."
            )
        return None

    def collect(self) -> None:
        """Begin to collect validation batches, if there is no panel yet."""
        self._batches = [] if self.panel is None else None

    def offer(self, batch: Batch, *, readers: int) -> None:
        """Collect a validation batch, if this rank still lacks positions of its part.

        Args:
            batch: as the model takes it.
            readers: how many ranks read data of their own.
        """
        if self._batches is not None and self._missing(readers) > 0:
            self._batches.append(with_tensors(self._prepared(batch), lambda x: x.detach().cpu().clone()))

    def finish(self, *, ranks: Ranks, reader: int, readers: int, more_to_come: bool = False) -> None:
        """Make the panel of what the ranks have collected: of each its part. Called on every rank.

        Args:
            ranks: those that train together.
            reader: number of this rank among those that read data of their own; ranks that share data share it.
            readers: how many there are.
            more_to_come: a later validation will deliver more: too few positions make no panel yet.
        """
        if self._batches is None:
            return
        part: Panel | None = None
        try:
            batches, missing = self._batches, self._missing(readers)
            self._batches = None
            if batches and not (missing > 0 and more_to_come):
                part = self._part(batches, reader, readers)
        finally:
            parts = dict(reversed(ranks.gather((reader, part))))  # of ranks that share data, the first one's
            whole = [parts[key] for key in sorted(parts)]
            self.panel = None if None in whole else Panel.joined(whole)

    def _part(self, batches: list[Batch], reader: int, readers: int) -> Panel:
        size = self.size * (reader + 1) // readers - self.size * reader // readers
        return Panel.of_batches(batches, size) if size else Panel((), ())

    def reset(self) -> None:
        """Forget the panel: the next run finds its own."""
        self.panel = self._batches = None
        self._stream, self._prepared = False, _as_it_is

    def _missing(self, readers: int) -> int:
        """Positions that this rank still lacks of its part."""
        return -(-self.size // readers) - sum(len(positions_of(batch)) for batch in self._batches or ())

"""Says once why nothing is measured: the head has no optimizer, is frozen, or no gradient reaches it."""

from __future__ import annotations

from collections.abc import Callable

from .head import WatchedHead
from .runtime import warn_user

QUIET = 20
"""Updates in which nothing was measured, after which a reader is told why."""


class Silence:
    """Updates in which nothing was measured, so far.

    Args:
        rank: of this process; only rank zero says anything.
    """

    def __init__(self, rank: int) -> None:
        self._updates = 0.0
        self._reason: Callable[[str], str] | None = None
        self._is_over = rank != 0

    def add(self, reason: Callable[[str], str], weight: float = 1.0) -> None:
        """Count an update, and say the reason if it is time to.

        Args:
            reason: makes a sentence, given how many updates there were, in words.
            weight: how much of an update it is, where the training loop cannot tell.
        """
        self._updates += weight
        self._reason = reason
        if self._updates >= QUIET:
            self.tell()

    def tell(self) -> None:
        """Say the reason, unless it has been said or something was measured: it is time to, or the run is over."""
        if self._updates and self._reason is not None and not self._is_over:
            number = max(1, round(self._updates))
            warn_user(self._reason("1 update" if number == 1 else f"{number} updates"), stacklevel=4)
        self.end()

    def end(self) -> None:
        """Count no more: something is measured."""
        self._is_over = True


def why_head_rests(head: WatchedHead, skipped: str, updates: str) -> str:
    """Say why a head does not move though an optimizer has it.

    Args:
        head: that is watched.
        skipped: what the optimizer's steps lack, or nothing if it makes none.
        updates: in how many.
    """
    if not head.weight.requires_grad:
        reason = "it is frozen, and is measured once it is not"
    elif skipped == "overflow":
        reason = "all were left out because gradients overflowed: look at the loss and its scale"
    elif skipped:
        reason = f"{skipped} reaches it: if the model trains another head, pass that as head=..."
    else:
        kind = type(head.source.optimizer).__name__
        reason = f"{kind}, which has it, makes no step: if another head is trained, pass that as head=..."
    return f"the head '{head.name}' has not moved in {updates}; {reason}"

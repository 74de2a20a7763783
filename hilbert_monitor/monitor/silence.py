"""Says once why nothing is measured: the head has no optimizer, is frozen, or no gradient reaches it."""

from __future__ import annotations

from collections.abc import Callable

from .guard import tell
from .head import WatchedHead

QUIET = 20
"""Updates in which nothing was measured, after which a reader is told why."""


class Silence:
    """Updates in which nothing was measured, so far."""

    def __init__(self) -> None:
        self._updates = 0.0
        self._is_over = False

    def add(self, reason: Callable[[], str], weight: float = 1.0) -> None:
        """Count an update, and say the reason if it is time to.

        Args:
            reason: a sentence.
            weight: how much of an update it is, where the training loop cannot tell.
        """
        self._updates += weight
        if self._updates >= QUIET:
            self.end(reason)

    def end(self, reason: Callable[[], str] | None = None) -> None:
        """Count no more: something is measured, or the run is over and the reason has not been said yet."""
        if reason is not None and self._updates and not self._is_over:
            tell(reason(), stacklevel=4)
        self._is_over = True


def why_head_rests(head: WatchedHead, skipped: str) -> str:
    """Say why a head does not move though an optimizer has it.

    Args:
        head: that is watched.
        skipped: what the optimizer's steps lack, or nothing if it makes none.
    """
    if not head.weight.requires_grad:
        reason = "it is frozen, and is measured once it is not"
    elif skipped:
        reason = f"{skipped} reaches it: if the model trains another head, pass that as head=..."
    else:
        kind = type(head.source.optimizer).__name__
        reason = f"{kind}, which has it, makes no step: if another head is trained, pass that as head=..."
    return f"the head '{head.name}' has not moved in {QUIET} updates; {reason}"

"""What a reader of a run's numbers should know of them, each said once: in a warning, and in the run's log."""

from __future__ import annotations

from .runtime import warn_user


class Remarks:
    """Sentences about a run's numbers."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def inexact(self, text: str) -> None:
        """Note why the bound H D(S) on the perturbation is not tight."""
        if text not in self.texts:
            self.texts.append(text)
            warn_user(f"identity not exact, {text}", stacklevel=3)

    def note(self, text: str) -> None:
        """Note something that a reader should know."""
        if text not in self.texts:
            self.texts.append(text)
            warn_user(text, stacklevel=3)

    def doubt(self, text: str, *, step: int) -> None:
        """Note that D(S) is formed in another way than before, from a step on."""
        if not any(remark.endswith(text) for remark in self.texts):
            self.texts.append(f"from step {step} on: {text}")
            warn_user(f"step {step}: {text}", stacklevel=3)

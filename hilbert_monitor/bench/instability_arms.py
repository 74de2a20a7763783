"""The recipes of the study of instabilities: a base that is known to be fragile, and arms that each change one thing.

The definitions stand in docs/instabilities.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class Arm:
    """One recipe: the base, with the high rate everywhere, or the base with one thing changed."""

    name: str = "base"
    qk_norm: bool = True
    head_decay: Literal["coupled", "none", "independent"] = "coupled"
    """Coupled to the learning rate, none, or independent of it."""
    tied: bool = False
    z_loss: bool = False
    centred: bool = False
    high: Literal["all", "head", "backbone", "none"] = "all"
    """Which parameters have the high rate: none in a clean twin."""
    clipping: bool = True
    warmup: int = 200
    beta2: float = 0.95
    bf16_logits: bool = False

    @property
    def label(self) -> str:
        """Its name, with what it says of QK norm."""
        return self.name if self.qk_norm else f"{self.name}, no QK norm"


ARMS = (
    Arm(),
    Arm("no head decay", head_decay="none"),
    Arm("independent head decay", head_decay="independent"),
    Arm("tied", tied=True),
    Arm("z-loss", z_loss=True),
    Arm("centred head", centred=True),
    Arm("head alone", high="head"),
    Arm("backbone alone", high="backbone"),
    Arm("no clipping", clipping=False),
    Arm("short warm-up", warmup=20),
    Arm("beta2 0.999", beta2=0.999),
    Arm("bf16 logits", bf16_logits=True),
)
CLEAN = Arm("clean", high="none")
"""The base at a tenth of the rate."""


def without_qk_norm(arm: Arm) -> Arm:
    """The same arm without the norm of queries and keys."""
    return replace(arm, qk_norm=False)


@dataclass(frozen=True)
class Job:
    """One run: an arm with a seed."""

    arm: Arm
    seed: int

    @property
    def is_clean(self) -> bool:
        """Whether it is a twin from which thresholds are learned."""
        return self.arm.high == "none"

    @property
    def key(self) -> str:
        """A name for its file."""
        return f"{self.arm.label} seed {self.seed}".replace(",", "").replace(" ", "-")

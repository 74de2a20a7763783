"""The paper's pretraining runs as data: three sizes, two optimizers of the head, and every number in one place."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, get_args, get_type_hints

import msgspec

from hilbert_monitor.optim.recipe import EMBEDDING_LR, HEAD_LR, MATRIX_LR, WEIGHT_DECAY

from .model import DecoderConfig

Head = Literal["adamw", "rownorm"]
"""Optimizer of the LM head."""
HEADS: tuple[Head, ...] = get_args(Head)
TOKENS_PER_PARAMETER = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """All numbers of one run. `resolved` computes those that are None from the others."""

    size: str = ""
    """Name of the preset."""
    head: Head = "rownorm"
    seed: int = 0

    vocab_size: int = 50_257
    width: int = 512
    blocks: int = 32
    head_dim: int = 64
    context: int = 2048

    global_batch: int = 256
    """Sequences per update, over all devices."""
    micro_batch: int = 32
    """Sequences per forward pass of one device."""
    devices: int = 1
    nodes: int = 1
    strategy: str = "ddp"
    """"ddp" shards the data, "fsdp" also the parameters, "tp=N" also each matrix over N ranks."""

    updates: int | None = None
    """By default 20 tokens per parameter."""
    warmup: float = 0.1
    """Fraction of the updates over which the learning rates rise."""
    final_rate: float = 0.1
    """Last learning rate, as a fraction of the peak."""
    head_lr: float | None = None
    """Peak learning rate of the head. None takes the paper's, proportional to 1 / width."""
    matrix_lr: float = MATRIX_LR
    embedding_lr: float = EMBEDDING_LR
    weight_decay: float = WEIGHT_DECAY
    clip: float = 1.0
    """Largest norm of the gradient."""

    trust_region: float | None = None
    """Limit of the diameter of the head's steps. The paper has none."""

    diameter_every: int = 10
    perturbation_every: int = 500
    panel_size: int = 8192
    panel: Literal["loader", "paper"] = "paper"
    efficiency: bool = False
    """True to measure the efficiency of the steps as often as the perturbation."""
    validation_every: int = 500
    """Updates between validations."""
    validation_tokens: int = 5_242_880
    checkpoint_every: int = 500

    precision: Literal["32-true", "bf16-mixed"] = "bf16-mixed"
    loss_chunk: int | None = 4096
    """Positions whose logits are in memory at a time; None for a whole micro-batch."""
    compile: bool = False

    @property
    def model(self) -> DecoderConfig:
        """Sizes of the decoder."""
        return DecoderConfig(self.vocab_size, self.width, self.blocks, self.head_dim, self.context)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.devices * self.nodes

    @property
    def tensor_parallel(self) -> int:
        """Ranks that share each matrix, and read the same data."""
        return int(self.strategy.removeprefix("tp=")) if self.strategy.startswith("tp=") else 1

    @property
    def data_parallel(self) -> int:
        """Number of ranks, or tensor-parallel groups, that read different data."""
        return self.world // self.tensor_parallel

    @property
    def sharded(self) -> bool:
        """True if each rank holds only a part of the model."""
        return self.strategy != "ddp" and self.world > 1

    @property
    def accumulation(self) -> int:
        """Micro-batches of one rank per update."""
        return self.global_batch // (self.data_parallel * self.micro_batch)

    @property
    def tokens_per_update(self) -> int:
        """Training tokens per update, over all ranks."""
        return self.global_batch * self.context

    @property
    def resolved(self) -> Recipe:
        """The recipe with its updates and head_lr filled in."""
        updates, head_lr = self.updates, self.head_lr
        if updates is None:
            updates = max(1, TOKENS_PER_PARAMETER * self.model.parameters // self.tokens_per_update)
        return replace(self, updates=updates, head_lr=HEAD_LR[self.head] / self.width if head_lr is None else head_lr)

    def __post_init__(self) -> None:
        if self.head not in HEADS:
            raise ValueError(f"the head is trained by {' or '.join(HEADS)}, got {self.head!r}")
        for name in ("global_batch", "micro_batch", "devices", "nodes", "panel_size", "validation_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("updates", "loss_chunk"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}")
        if self.trust_region is not None and not self.trust_region >= 0:
            raise ValueError(f"trust_region must be zero or a positive number, got {self.trust_region}")
        _ = self.model  # checks its sizes
        self._check_strategy()
        if self.global_batch % (self.data_parallel * self.micro_batch):
            groups = f" in groups of {self.tensor_parallel}" if self.tensor_parallel > 1 else ""
            raise ValueError(
                f"a global batch of {self.global_batch} sequences does not divide into micro-batches of"
                f" {self.micro_batch} on {self.world} devices{groups}: choose --set micro_batch=... so that"
                f" {self.data_parallel} times it divides {self.global_batch}, or --set global_batch=..."
            )

    def _check_strategy(self) -> None:
        if not re.fullmatch(r"ddp|fsdp|tp=[1-9]\d*", self.strategy):
            raise ValueError(f"the strategy is ddp, fsdp or tp=N with a number of ranks, got {self.strategy!r}")
        ranks, heads = self.tensor_parallel, self.width // self.head_dim
        if self.world % ranks:
            raise ValueError(
                f"strategy {self.strategy} needs a multiple of {ranks} devices, got {self.world}: choose --devices and"
                " --nodes accordingly, or another N"
            )
        if heads % ranks:
            raise ValueError(f"strategy {self.strategy} splits {heads} attention heads: choose an N that divides them")
        if self.sharded and self.compile:
            raise ValueError(f"compile=true is for strategy ddp, got {self.strategy}: train eagerly, or with ddp")

    def as_dict(self) -> dict[str, Any]:
        """Return plain types for JSON, with the numbers of parameters and of micro-batches."""
        return {**asdict(self), "parameters": self.model.parameters, "accumulation": self.accumulation}


PAPER = {
    "190M": Recipe(size="190M", width=512, micro_batch=32, devices=8),
    "380M": Recipe(size="380M", width=768, micro_batch=16, devices=8),
    "640M": Recipe(size="640M", width=1024, micro_batch=8, devices=8),
}

DEMO = Recipe(
    size="demo",
    vocab_size=8192,
    width=128,
    blocks=4,
    head_dim=32,
    context=128,
    global_batch=16,
    micro_batch=16,
    updates=300,
    diameter_every=5,
    perturbation_every=20,
    panel_size=2048,
    panel="loader",
    validation_every=20,
    validation_tokens=16 * 16 * 128,
    checkpoint_every=100,
    precision="32-true",
    loss_chunk=None,
)
"""The demo's recipe: a run takes minutes on two CPU cores."""

SIZES = {**PAPER, "demo": DEMO}


def recipe(size: str, **overrides: Any) -> Recipe:
    """Return a preset with some numbers changed, resolved.

    Args:
        size: "190M", "380M", "640M" or "demo".
        **overrides: fields of a Recipe.
    """
    if size not in SIZES:
        raise ValueError(f"unknown size {size!r}: choose one of {', '.join(SIZES)}, and override its numbers")
    return replace(SIZES[size], **overrides).resolved


def parse_changes(changes: Sequence[str]) -> dict[str, Any]:
    """Parse overrides of the form name=value, as --set takes them."""
    kinds, overrides = get_type_hints(Recipe), {}
    for change in changes:
        name, _, value = change.partition("=")
        name = name.strip().replace("-", "_")
        if name not in {field.name for field in fields(Recipe)}:
            raise ValueError(f"--set {change}: a recipe has no {name!r}; it has {', '.join(kinds)}")
        try:
            overrides[name] = msgspec.convert(None if value == "None" else value, kinds[name], strict=False)
        except msgspec.ValidationError as error:
            raise ValueError(f"--set {change}: {error}: give it as {name}=VALUE") from None
    return overrides

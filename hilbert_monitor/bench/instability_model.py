"""Small decoders, several side by side: one forward pass for many runs, each with weights and a recipe of its own.

Every tensor has a first dimension R, one entry a run. One process trains a dozen runs in little more time than three:
at these sizes most of a step is overhead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from .instability_arms import Job

MATRICES = ("q", "k", "v", "out", "gate", "up", "down")
SQUARE, WIDE, NARROW = ("q", "k", "v", "out"), ("gate", "up"), ("down",)
"""Matrices of one shape."""


@dataclass(frozen=True)
class StudySizes:
    """Sizes and rate of the runs."""

    updates: int = 10_000
    vocab_size: int = 2048
    width: int = 64
    head_dim: int = 32
    blocks: int = 2
    context: int = 16
    batch: int = 8
    rate: float = 0.2
    """The high rate; a clean twin has a tenth of it."""


@dataclass
class Pass:
    """What a forward pass leaves: hidden states, the largest attention logit, and the inputs of the matrices."""

    states: Tensor
    """(R, N, d) what the heads are given."""
    size: Tensor
    """(R,) the RMS norm of the same before the final norm."""
    attention: Tensor
    """(R,) the largest |attention logit|."""
    inputs: dict[str, Tensor]
    """(R, N, n) by the name of a matrix."""


class Decoders:
    """Decoders as in the paper (RMS norms without gain, rotary positions, SwiGLU), R of them.

    Args:
        jobs: the runs; weights are drawn from the seed of each.
        sizes: how large each decoder is.
    """

    def __init__(self, jobs: Sequence[Job], sizes: StudySizes) -> None:
        self.sizes = sizes
        self.qk_norm = torch.tensor([job.arm.qk_norm for job in jobs])
        V, d = sizes.vocab_size, sizes.width
        shapes = {"embed": (V, d), "head": (V, d)}
        inner = {**dict.fromkeys(SQUARE, (d, d)), **dict.fromkeys(WIDE, (4 * d, d)), "down": (d, 4 * d)}
        shapes |= {f"{block}.{part}": inner[part] for block in range(sizes.blocks) for part in MATRICES}
        draws = [torch.Generator().manual_seed(job.seed) for job in jobs]
        self.weights = {
            name: torch.stack([0.02 * torch.randn(shape, generator=draw) for draw in draws]).requires_grad_()
            for name, shape in shapes.items()
        }
        half = torch.arange(0, sizes.head_dim, 2) / sizes.head_dim
        angles = torch.outer(torch.arange(sizes.context), 10_000.0**-half)
        self.cos, self.sin = angles.cos(), angles.sin()  # (T, n/2)
        self.later = torch.ones(sizes.context, sizes.context, dtype=torch.bool).triu(1)

    def run(self, tokens: Tensor) -> Pass:
        """Run all decoders on their own tokens (R, B, T)."""
        R, B, T = tokens.shape
        V, d = self.sizes.vocab_size, self.sizes.width
        rows = tokens.flatten(1) + V * torch.arange(R)[:, None]
        x = self.weights["embed"].view(R * V, d)[rows]  # (R, N, d)
        largest: list[Tensor] = []
        inputs: dict[str, Tensor] = {}
        for block in range(self.sizes.blocks):
            part = {name: self.weights[f"{block}.{name}"] for name in MATRICES}
            h = _norm(x)
            mixed, logit = self._attention(h, part, B, T)
            x = x + _apply(part["out"], mixed)
            g = _norm(x)
            gated = silu(_apply(part["gate"], g)) * _apply(part["up"], g)
            x = x + _apply(part["down"], gated)
            given = {"q": h, "k": h, "v": h, "out": mixed, "gate": g, "up": g, "down": gated}
            inputs |= {f"{block}.{name}": value.detach() for name, value in given.items()}
            largest.append(logit)
        size = x.detach().square().sum(-1).mean(1).sqrt()
        return Pass(_norm(x), size, torch.stack(largest).amax(0), inputs)

    def _attention(self, h: Tensor, part: dict[str, Tensor], B: int, T: int) -> tuple[Tensor, Tensor]:
        """Return the mixture (R, N, d) of values, and the largest |logit| of each run."""
        n, R = self.sizes.head_dim, len(h)
        q, k, v = (_apply(part[name], h).view(R, B, T, -1, n).transpose(2, 3) for name in ("q", "k", "v"))
        flag = self.qk_norm.view(-1, 1, 1, 1, 1)
        q, k = (self._turned(torch.where(flag, _norm(x), x)) for x in (q, k))
        logits = q @ k.mT / math.sqrt(n)  # (R, B, heads, T, T)
        largest = logits.detach().masked_fill(self.later, 0.0).abs().amax((1, 2, 3, 4))
        mixed = logits.masked_fill(self.later, -torch.inf).softmax(-1) @ v
        return mixed.transpose(2, 3).reshape(R, B * T, -1), largest

    def _turned(self, x: Tensor) -> Tensor:
        """Turn queries or keys by their positions."""
        a, b = x.chunk(2, -1)
        return torch.cat([a * self.cos - b * self.sin, b * self.cos + a * self.sin], -1)


def _apply(W: Tensor, x: Tensor) -> Tensor:
    """Apply each run's matrix (R, m, n) to its inputs (R, N, n)."""
    return x @ W.mT


def _norm(x: Tensor) -> Tensor:
    return rms_norm(x, x.shape[-1:], eps=1e-6)

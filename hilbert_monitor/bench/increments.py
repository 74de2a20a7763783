"""Increments to measure on: given in a file, or made by training a softmax head for a few steps."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from hilbert_monitor.geometry import row_norm

Head = Literal["adamw", "rownorm"]


@dataclass(frozen=True, slots=True)
class Increment:
    """An LM-head increment and, where known, hidden states of a panel after the update."""

    name: str
    S: Tensor  # (V, d)
    H: Tensor | None  # (N, d)


def load_increment(path: Path) -> Increment:
    """Read an increment saved with torch: a (V, d) tensor, or a dict.

    A dict holds ``S``, or ``S_over_lr`` and ``lr``; and, if there is a panel, ``hidden``.
    """
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ValueError(f"there is no increment file {path}: check the path") from None
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        what = str(error).splitlines()[0]
        raise ValueError(f"{path} is not a file that torch.load can read ({what}): save it with torch.save") from None
    if isinstance(saved, Tensor):
        saved = {"S": saved}
    if isinstance(saved, dict) and {"S_over_lr", "lr"} <= saved.keys():
        saved["S"] = saved["S_over_lr"].float() * saved["lr"]
    if not isinstance(saved, dict) or not isinstance(saved.get("S"), Tensor):
        raise ValueError(f"{path} holds no increment: save a (V, d) tensor or a dict with the key 'S'")
    hidden = saved.get("hidden")
    return Increment(path.stem, saved["S"].float(), None if hidden is None else hidden.float())


def make_increment(
    head: Head, V: int, d: int, *, steps: int = 40, batch: int = 128, panel: int = 8192, seed: int = 0
) -> Increment:
    """Train a head on synthetic next-token data and return its last increment.

    Targets follow Zipf's law; a hidden state leans towards its target's embedding, over a common mean and noise whose
    spectrum decays as 1/j. Gradients are those of softmax cross entropy, and forty steps are enough for the rare
    tokens' to die down, so the increments have what makes real ones easy or hard to search: a mass of rare tokens
    pushed one way, and a few thousand seen ones pushed each its own.
    """
    draw = torch.Generator().manual_seed(seed)
    spectrum = torch.arange(1, d + 1) ** -1.0
    embedding = torch.randn(V, d, generator=draw) * spectrum
    mean = torch.randn(d, generator=draw) * spectrum
    frequency = 1.0 / torch.arange(1, V + 1)[torch.randperm(V, generator=draw)]

    def sample(n: int) -> tuple[Tensor, Tensor]:
        target = torch.multinomial(frequency, n, replacement=True, generator=draw)
        h = embedding[target] + mean + torch.randn(n, d, generator=draw) * spectrum
        return normalize(h, dim=1) * d**0.5, target

    U = 0.02 * torch.randn(V, d, generator=draw)
    S, first, second = (torch.zeros(V, d) for _ in range(3))
    for t in range(1, steps + 1):
        h, target = sample(batch)
        residual = (h @ U.T).softmax(1)  # (batch, V): p - e_c
        residual[torch.arange(batch), target] -= 1
        gradient = residual.T @ h / batch
        S = _step(head, gradient, first, second, t) * min(1.0, 2 * t / steps) / d
        U += S
    return Increment(f"{head} V={V} d={d}", S, sample(panel)[0])


def _step(head: Head, gradient: Tensor, first: Tensor, second: Tensor, t: int) -> Tensor:
    """One step of the paper's head recipe, at its peak learning rate times d; moments are updated in place."""
    if head == "rownorm":
        first.lerp_(gradient, 0.05)
        return row_norm(first / (1 - 0.95**t), eps=1e-8).mul_(-1.6384)
    first.lerp_(gradient, 0.1)
    second.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
    root = (second / (1 - 0.999**t)).sqrt_().add_(1e-10)
    return (first / (1 - 0.9**t)).div_(root).mul_(-2.048)

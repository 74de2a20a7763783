"""Increments to measure on: from a file, or from a softmax head that is trained for a few steps."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hilbert_monitor.emulation.synthetic import NextTokens, softmax_residual
from hilbert_monitor.geometry import row_norm
from hilbert_monitor.optim.pretraining import HEAD_LR
from hilbert_monitor.pretrain.recipes import Head

_BLOCK = 4096


@dataclass(frozen=True, slots=True)
class SampleIncrement:
    """An increment S of the LM head and, where known, hidden states H of a panel after the update."""

    name: str
    S: Tensor  # (V, d)
    H: Tensor | None  # (N, d)


def load_increment(path: Path) -> SampleIncrement:
    """Read an increment that torch.save wrote: a (V, d) tensor, or a dict.

    A dict holds ``S``, or ``S_over_lr`` and ``lr``; and, if there is a panel, ``hidden``.
    """
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ValueError(f"there is no increment file {path}: check the path") from None
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path} is not a file that torch.load can read ({reason}): save it with torch.save") from None
    if isinstance(saved, Tensor):
        saved = {"S": saved}
    if isinstance(saved, dict) and {"S_over_lr", "lr"} <= saved.keys():
        saved["S"] = saved["S_over_lr"].float() * saved["lr"]
    if not isinstance(saved, dict) or not isinstance(saved.get("S"), Tensor):
        raise ValueError(f"{path} holds no increment: save a (V, d) tensor or a dict with the key 'S'")
    hidden = saved.get("hidden")
    return SampleIncrement(path.stem, saved["S"].float(), None if hidden is None else hidden.float())


def make_increment(
    head: Head, V: int, d: int, *, steps: int = 40, batch: int = 128, panel: int = 8192, seed: int = 0
) -> SampleIncrement:
    """Train a head on synthetic next-token data and return its last increment.

    The gradients are those of softmax cross entropy, and after forty steps those of rare tokens have died down. So the
    increments have what makes real ones easy or hard to search: a mass of rare tokens that all move one way, and a few
    thousand frequent ones that each move their own way.
    """
    draw = torch.Generator().manual_seed(seed)
    data = NextTokens(V, d, draw, decay=1.0, shuffled=True)
    U = 0.02 * torch.randn(V, d, generator=draw)
    first, second = (torch.zeros(V, d) for _ in range(2))
    for t in range(1, steps + 1):
        h, target = data.sample(batch)
        residual = softmax_residual(U, h, target)
        for start in range(0, V, _BLOCK):  # of rows, or a large head would need three more matrices of its size
            at = slice(start, start + _BLOCK)
            gradient = residual[:, at].T @ h / len(h)
            S = _step(head, gradient, first[at], second[at], t) * min(1.0, 2 * t / steps) / d
            U[at] += S
            if t == steps:
                first[at] = S
    return SampleIncrement(f"{head} V={V} d={d}", first, data.sample(panel)[0])


def _step(head: Head, gradient: Tensor, first: Tensor, second: Tensor, t: int) -> Tensor:
    """One step of the paper's head recipe at its peak learning rate times d; it updates the moments in place."""
    if head == "rownorm":
        first.lerp_(gradient, 0.05)
        direction = row_norm(first / (1 - 0.95**t), eps=1e-8)
    else:
        first.lerp_(gradient, 0.1)
        second.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
        direction = (first / (1 - 0.9**t)).div_((second / (1 - 0.999**t)).sqrt_().add_(1e-10))
    return direction.mul_(-HEAD_LR[head])

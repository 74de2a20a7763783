"""Synthetic data for the checks: token ids, and increments of a softmax head that is trained for a few steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from hilbert_monitor.geometry import row_norm
from hilbert_monitor.optim.recipe import HEAD_LR
from hilbert_monitor.pretrain.recipe import Head

_BLOCK = 4096


@dataclass(frozen=True, slots=True)
class SampleIncrement:
    """An increment S of the LM head and, where known, hidden states H of a panel after the update."""

    name: str
    S: Tensor  # (V, d)
    H: Tensor | None  # (N, d)


class NextTokens:
    """Next-token data for a softmax head: hidden states of norm sqrt(d) and their target tokens.

    Targets follow Zipf's law. A hidden state leans towards the embedding of its target, over a mean that all share and
    noise; in all three the spread of coordinate j falls as j^-decay.

    Args:
        V: number of tokens.
        d: width of the hidden states.
        draw: source of the random numbers.
        decay: see above.
        shuffled: give the tokens' frequencies in random order, not from the most frequent to the rarest.
    """

    def __init__(self, V: int, d: int, draw: torch.Generator, *, decay: float = 1.0, shuffled: bool = True) -> None:
        self._draw = draw
        self._spectrum = torch.arange(1, d + 1) ** -decay
        self._embedding = torch.randn(V, d, generator=draw) * self._spectrum
        self._mean = torch.randn(d, generator=draw) * self._spectrum
        rank = torch.arange(1, V + 1)
        self._frequency = 1.0 / (rank[torch.randperm(V, generator=draw)] if shuffled else rank)

    def sample(self, n: int) -> tuple[Tensor, Tensor]:
        """Return hidden states (n, d) and target tokens (n,)."""
        target = torch.multinomial(self._frequency, n, replacement=True, generator=self._draw)
        d = len(self._spectrum)
        h = self._embedding[target] + self._mean + torch.randn(n, d, generator=self._draw) * self._spectrum
        return normalize(h, dim=1) * d**0.5, target


def softmax_residual(U: Tensor, h: Tensor, target: Tensor) -> Tensor:
    """Return the gradient p - e_c (n, V) of each cross entropy by its logits."""
    residual = (h @ U.T).softmax(1)
    residual[torch.arange(len(h)), target] -= 1
    return residual


def synthetic_text(V: int, rows: int, length: int, *, seed: int = 0) -> Tensor:
    """Return token ids (rows, length) in which small ids are frequent, as some words are."""
    return (V * torch.rand(rows, length, generator=torch.Generator().manual_seed(seed)) ** 3).long()


def make_increment(
    head: Head, V: int, d: int, *, steps: int = 40, batch: int = 128, panel: int = 8192, seed: int = 0
) -> SampleIncrement:
    """Train a head on synthetic next-token data and return its last increment.

    The gradients are those of softmax cross entropy, and after forty steps those of rare tokens have died down. So the
    increments have what makes real ones easy or hard to search: a mass of rare tokens that all move one way, and a few
    thousand frequent ones that each move their own way.
    """
    draw = torch.Generator().manual_seed(seed)
    data = NextTokens(V, d, draw)
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
    """Return one step of the paper's head recipe at its peak learning rate times d; update the moments in place."""
    if head == "rownorm":
        first.lerp_(gradient, 0.05)
        direction = row_norm(first / (1 - 0.95**t), eps=1e-8)
    else:
        first.lerp_(gradient, 0.1)
        second.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
        direction = (first / (1 - 0.9**t)).div_((second / (1 - 0.999**t)).sqrt_().add_(1e-10))
    return direction.mul_(-HEAD_LR[head])

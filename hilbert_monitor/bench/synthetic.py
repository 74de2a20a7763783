"""Synthetic training data: token ids, and the hidden states and gradients that a softmax head would see."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize


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

    def __init__(self, V: int, d: int, draw: torch.Generator, *, decay: float, shuffled: bool) -> None:
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


def softmax_gradient(U: Tensor, h: Tensor, target: Tensor) -> Tensor:
    """Gradient (V, d) of the mean cross entropy by the head U, for hidden states h (n, d) and targets (n,)."""
    return softmax_residual(U, h, target).T @ h / len(h)


def softmax_residual(U: Tensor, h: Tensor, target: Tensor) -> Tensor:
    """Gradient p - e_c (n, V) of each cross entropy by its logits."""
    residual = (h @ U.T).softmax(1)
    residual[torch.arange(len(h)), target] -= 1
    return residual


def synthetic_text(V: int, rows: int, length: int, *, seed: int = 0) -> Tensor:
    """Token ids (rows, length) in which small ids are frequent, as some words are."""
    return (V * torch.rand(rows, length, generator=torch.Generator().manual_seed(seed)) ** 3).long()

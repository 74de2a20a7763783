"""Synthetic data: token ids, the hidden states and gradients that a softmax head would see, and rows hard to search."""

from __future__ import annotations

import math

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


def hard_rows(V: int, d: int, *, seed: int = 0) -> dict[str, Tensor]:
    """Return matrices of V rows, by name, on which a search for the longest pair has much to do.

    They have d columns; vertices of a product of three simplices, all of them different, as many as they need.
    """
    draw = torch.Generator().manual_seed(seed)

    def pick(n: int, choices: int) -> Tensor:
        return torch.randint(choices, (n,), generator=draw)

    k = math.ceil(V ** (1 / 3))
    at = torch.randperm(k**3, generator=draw)[:V]
    points = [torch.eye(k)[at // k**power % k] for power in range(3)]
    decay = torch.arange(1, d + 1) ** -0.5
    return {
        "points on a sphere": normalize(torch.randn(V, d, generator=draw), dim=1),
        "rows of signs": 2.0 * pick(V * d, 2).view(V, d) - 1,
        "vertices of a simplex": torch.eye(d)[pick(V, d)],
        "vertices of a product of simplices": torch.cat(points, 1),
        "each row twenty times": torch.randn(V // 20, d, generator=draw)[pick(V, V // 20)],
        "unit rows of a falling spectrum": normalize(torch.randn(V, d, generator=draw) * decay, dim=1),
    }

"""A tiny decoder for the checks that train. Its products give the same bits on every call, unlike fused attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


class TinyBlock(nn.Module):
    """Attention with one head, written as plain products, then a two-layer network."""

    def __init__(self, d: int, dropout: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(d, bias=False) for _ in range(2))
        self.query, self.key, self.value, self.out = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(d, 4 * d, bias=False), nn.Linear(4 * d, d, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the states (B, T, d) plus what attention and network add to them."""
        h = self.norms[0](x)
        scores = self.query(h) @ self.key(h).transpose(1, 2) / x.shape[2] ** 0.5  # (B, T, T)
        future = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
        x = x + self.dropout(self.out(scores.masked_fill(future, float("-inf")).softmax(2) @ self.value(h)))
        added: Tensor = self.dropout(self.down(torch.relu(self.up(self.norms[1](x)))))
        return x + added


class TinyDecoder(nn.Module):
    """Embedding, blocks, a norm and an untied head; the weights depend on the sizes alone."""

    def __init__(self, V: int, d: int, *, blocks: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            self.embed = nn.Embedding(V, d)
            self.blocks = nn.ModuleList(TinyBlock(d, dropout) for _ in range(blocks))
            self.norm = nn.LayerNorm(d, bias=False)
            self.lm_head = nn.Linear(d, V, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits (B, T, V) of tokens (B, T)."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.lm_head(self.norm(x))
        return logits


def loss_of(model: nn.Module, text: Tensor) -> Tensor:
    """Return the cross entropy of the next tokens of a text (B, T + 1)."""
    return cross_entropy(model(text[:, :-1]).float().flatten(0, 1), text[:, 1:].flatten())

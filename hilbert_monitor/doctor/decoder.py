"""A small decoder and a text, for the checks that train."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


class TinyBlock(nn.Module):
    """Attention of one head in plain products, which are the same to the bit on every call, and a network."""

    def __init__(self, d: int, dropout: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(d, bias=False) for _ in range(2))
        self.query, self.key, self.value, self.out = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(d, 4 * d, bias=False), nn.Linear(4 * d, d, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Add what the block makes of the states (B, T, d)."""
        h = self.norms[0](x)
        scores = self.query(h) @ self.key(h).transpose(1, 2) / x.shape[2] ** 0.5  # (B, T, T)
        future = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
        x = x + self.dropout(self.out(scores.masked_fill(future, float("-inf")).softmax(2) @ self.value(h)))
        added: Tensor = self.dropout(self.down(torch.relu(self.up(self.norms[1](x)))))
        return x + added


class TinyDecoder(nn.Module):
    """Embedding, blocks, a norm and a head of its own; weights are a function of the sizes alone."""

    def __init__(self, V: int, d: int, *, blocks: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            self.embed = nn.Embedding(V, d)
            self.blocks = nn.ModuleList(TinyBlock(d, dropout) for _ in range(blocks))
            self.norm = nn.LayerNorm(d, bias=False)
            self.lm_head = nn.Linear(d, V, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (B, T, V) of the tokens (B, T)."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.lm_head(self.norm(x))
        return logits


def loss_of(model: nn.Module, text: Tensor) -> Tensor:
    """Cross entropy of the next token."""
    return cross_entropy(model(text[:, :-1]).float().flatten(0, 1), text[:, 1:].flatten())


def some_text(V: int, rows: int, length: int, *, seed: int = 0) -> Tensor:
    """Token ids (rows, length) in which small ones are frequent, as words are."""
    draw = torch.Generator().manual_seed(seed)
    return (V * torch.rand(rows, length, generator=draw) ** 3).long()

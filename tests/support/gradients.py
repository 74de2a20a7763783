"""Gradients to bracket the tension of."""

from __future__ import annotations

import torch
from torch import Tensor


def gradient(V: int, d: int, seed: int = 0, rank: int | None = None) -> Tensor:
    """Rows of very different norms, a mass of them to one side, as a softmax head's are."""
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randn(V, d, generator=draw, dtype=torch.float64)
    if rank:
        rows = rows[:, :rank] @ torch.randn(rank, d, generator=draw, dtype=torch.float64)
    rows *= torch.rand(V, 1, generator=draw, dtype=torch.float64) ** 3
    if not rank:
        rows[V // 2 :, 0] += 0.5
    return rows - rows.mean(0)

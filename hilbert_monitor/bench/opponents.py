"""The opponents: the obvious ways to compute the same, done well."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def all_pairs_cdist(S: Tensor, *, block: int = 4096) -> float:
    """Return the row diameter by blocked `torch.cdist`, each unordered pair of blocks once, as in the paper's code."""
    return max(
        float(torch.cdist(S[i : i + block], S[j : j + block]).max())
        for i in range(0, len(S), block)
        for j in range(i, len(S), block)
    )


def all_pairs_matmul(S: Tensor, *, block: int = 2048) -> float:
    """Return the row diameter by tiled products of centred rows, each unordered pair of tiles once."""
    X = S - S.mean(0)
    norm2 = X.square().sum(1)
    buffer = X.new_empty(min(block, len(X)) ** 2)
    longest = 0.0
    for i in range(0, len(X), block):
        for j in range(i, len(X), block):
            x, y = X[i : i + block], X[j : j + block]
            gap2 = buffer[: len(x) * len(y)].view(len(x), len(y))
            torch.addmm(norm2[j : j + block], x, y.T, alpha=-2, out=gap2)
            longest = max(longest, float(gap2.add_(norm2[i : i + block, None]).max()))
    return math.sqrt(longest)


def one_pass(S: Tensor) -> Tensor:
    """Return the norm of every row, which reads S once."""
    norms: Tensor = torch.linalg.vector_norm(S, dim=1)
    return norms


def bare_product(S: Tensor, H: Tensor, *, rows: int = 512, positions: int = 2048) -> None:
    """Compute H S' in chunks into one buffer, and do nothing with it."""
    buffer = S.new_empty(rows * positions)
    for i in range(0, len(S), rows):
        x = S[i : i + rows]
        for j in range(0, len(H), positions):
            h = H[j : j + positions]
            torch.mm(h, x.T, out=buffer[: len(h) * len(x)].view(len(h), len(x)))


def muon_loop(params: Sequence[Tensor], buffers: Sequence[Tensor], *, lr: float = 8e-3, decay: float = 0.1) -> None:
    """Make one Muon step, matrix by matrix, with the plain Newton-Schulz loop in fp32."""
    a, b, c = 3.4445, -4.7750, 2.0315
    with torch.no_grad():
        for p, M in zip(params, buffers, strict=True):
            assert p.grad is not None
            M.mul_(0.95).add_(p.grad)
            X = p.grad + 0.95 * M
            tall = p.shape[0] > p.shape[1]
            X = X.T if tall else X
            X = X / (X.norm() + 1e-5)
            for _ in range(5):
                A = X @ X.T
                X = a * X + (b * A + c * A @ A) @ X
            p.mul_(1 - lr * decay)
            p.add_(X.T if tall else X, alpha=-lr * max(1, p.shape[0] / p.shape[1]) ** 0.5)

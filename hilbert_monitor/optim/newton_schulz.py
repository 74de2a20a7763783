"""Newton-Schulz: an approximation of the nearest semi-orthogonal matrix, by matrix products alone."""

from __future__ import annotations

import torch
from torch import Tensor

from hilbert_monitor.geometry import full_precision

from ._norms import stable_norms

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic a x + b x^3 + c x^5: steep at zero, and into about [0.7, 1.2] after five steps."""


@full_precision
def orthogonalize(X: Tensor, *, steps: int, eps: float) -> Tensor:
    """Move the singular values of each matrix of a stack towards one: divide by (|X|_F + eps), then iterate.

    One step is X <- a X + (b A + c A A) X with A = X X'. For matrices at least twice as wide as high, three steps at a
    time work on A alone: with Z = a I + b A + c A A a step is X <- Z X and A <- Z A Z, so X itself is multiplied once
    in three steps. After them A is computed from X again, so rounding does not build up.

    Args:
        X: (k, m, n) with m <= n; overwritten.
        steps: number of iterations.
        eps: added to the Frobenius norm.

    Returns:
        (k, m, n) in X's dtype, in which everything is computed.
    """
    X, norm, eps_like_norm = stable_norms(X, (1, 2), eps)
    X.div_(norm.add_(eps_like_norm).clamp_min_(torch.finfo(norm.dtype).tiny))  # a zero matrix stays zero
    if X.shape[2] >= 2 * X.shape[1] and X.dtype in (torch.float32, torch.float64):
        for done in range(0, steps, 3):
            X = _gram_steps(X, min(3, steps - done))
        return X
    return _plain_steps(X, steps)


def _plain_steps(X: Tensor, steps: int) -> Tensor:
    a, b, c = COEFFICIENTS
    A = X.new_empty(len(X), X.shape[1], X.shape[1])
    Z, Y = torch.empty_like(A), torch.empty_like(X)
    for _ in range(steps):
        torch.bmm(X, X.mT, out=A)
        torch.baddbmm(A, A, A, beta=b, alpha=c, out=Z)
        torch.baddbmm(X, Z, X, beta=a, out=Y)
        X, Y = Y, X
    return X


def _gram_steps(X: Tensor, steps: int) -> Tensor:
    a, b, c = COEFFICIENTS
    A = torch.bmm(X, X.mT)
    product: Tensor | None = None
    for step in range(steps):
        Z = torch.baddbmm(A, A, A, beta=b, alpha=c)
        Z.diagonal(dim1=1, dim2=2).add_(a)
        product = Z if product is None else torch.bmm(Z, product)
        if step < steps - 1:
            A = torch.bmm(torch.bmm(Z, A), Z)
    return X if product is None else torch.bmm(product, X)

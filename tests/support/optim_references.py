"""Reference optimizers in fp64, written from the paper's equations. They share no code with the package.

The functions *_steps return the weights and the increment, (W, S), after each step.
"""

import math

import torch
from torch.nn import Parameter

from tests.support.references import normal

LRS = [0.0, 0.3, 0.02, 1.0, 0.0, 0.1]
"""Learning rates of six steps, the first zero as in a warm-up."""


def rownorm_steps(U, grads, lrs, momentum=0.95, eps=1e-8, weight_decay=0.0, center="none"):
    """Practical projected RowNorm. With `center="none"` the projections P are left out."""
    U, B = U.double(), torch.zeros_like(U, dtype=torch.float64)
    P = torch.eye(len(U), dtype=torch.float64)
    if center == "both":
        P = P - 1 / len(U)
    steps = []
    for t, (G, lr) in enumerate(zip(grads, lrs, strict=True)):
        B = momentum * B + (1 - momentum) * G.double()
        C = P @ (B / (1 - momentum ** (t + 1)))
        S = -lr * P @ torch.stack([c / (c.norm() + eps) for c in C])
        U = (1 - lr * weight_decay) * U + S
        steps.append((U, S))
    return steps


def newton_schulz(N, steps=5, eps=1e-5):
    """Newton-Schulz iteration on a matrix divided by its Frobenius norm, transposed if it is tall."""
    X = N.double()
    if X.shape[0] > X.shape[1]:
        return newton_schulz(N.T, steps, eps).T
    X = X / (X.square().sum().sqrt() + eps)
    for _ in range(steps):
        A = X @ X.T
        X = 3.4445 * X + (-4.7750 * A + 2.0315 * A @ A) @ X
    return X


def muon_steps(W, grads, lrs, momentum=0.95, weight_decay=0.1, nesterov=True, ns_steps=5, eps=1e-5):
    """Muon."""
    m, n = W.shape
    W, M = W.double(), torch.zeros_like(W, dtype=torch.float64)
    steps = []
    for G, lr in zip(grads, lrs, strict=True):
        M = momentum * M + G.double()
        N = G.double() + momentum * M if nesterov else M
        S = -lr * math.sqrt(max(1, m / n)) * newton_schulz(N, ns_steps, eps)
        W = (1 - lr * weight_decay) * W + S
        steps.append((W, S))
    return steps


def walk(make, W, grads, lrs, **options):
    """Steps of an optimizer of the package on one parameter: (W, S) after each, as the references return them."""
    p = Parameter(W.clone())
    optimizer = make([p], lr=lrs[0], **options)
    steps = []
    for G, lr in zip(grads, lrs, strict=True):
        optimizer.param_groups[0]["lr"] = lr
        p.grad = G.clone()
        optimizer.step()
        steps.append((p.detach().clone(), optimizer.increment(p)))
    return steps


def rotation(basis):
    """An orthogonal matrix, from the QR decomposition of a square one."""
    return torch.linalg.qr(basis)[0]


def gradients(seed, shape, steps=6, scale=1.0, dtype=torch.float64):
    """Random gradients, one for each step."""
    return [normal(seed + t, *shape, scale=scale).to(dtype) for t in range(steps)]


def close(actual, expected, atol, rtol=0.0):
    """Assert that two tensors agree in fp64."""
    torch.testing.assert_close(actual.detach().double(), expected.detach().double(), rtol=rtol, atol=atol)


def assert_walks_agree(actual, expected, atol=0.0, rtol=0.0):
    """Assert that two lists of (W, S) agree at every step."""
    for step, reference in zip(actual, expected, strict=True):
        for a, b in zip(step, reference, strict=True):
            close(a, b, atol, rtol)


def adam_steps(
    U,
    grads,
    lrs,
    betas=(0.9, 0.999),
    eps=1e-8,
    weight_decay=0.0,
    decoupled=True,
    amsgrad=False,
    maximize=False,
):
    """AdamW; Adam if not `decoupled`."""
    U, (b1, b2) = U.double(), betas
    m, v, top = (torch.zeros_like(U) for _ in range(3))
    steps = []
    for t, (G, lr) in enumerate(zip(grads, lrs, strict=True), start=1):
        G = -G.double() if maximize else G.double()
        if not decoupled:
            G = G + weight_decay * U
        m, v = b1 * m + (1 - b1) * G, b2 * v + (1 - b2) * G**2
        top = torch.maximum(top, v)
        second = (top if amsgrad else v) / (1 - b2**t)
        S = -lr * (m / (1 - b1**t)) / (second.sqrt() + eps)
        U = (1 - lr * weight_decay if decoupled else 1) * U + S
        steps.append((U, S))
    return steps


def sgd_steps(U, grads, lrs, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False, maximize=False):
    """SGD. Its weight decay is part of S."""
    U, B = U.double(), None
    steps = []
    for G, lr in zip(grads, lrs, strict=True):
        G = (-G.double() if maximize else G.double()) + weight_decay * U
        if momentum:
            B = G if B is None else momentum * B + (1 - dampening) * G
            G = G + momentum * B if nesterov else B
        S = -lr * G
        U = U + S
        steps.append((U, S))
    return steps

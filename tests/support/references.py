"""Slow reference computations in fp64, written from the definitions. They share no code with the package."""

import math

import torch


def normal(seed, *shape, scale=1.0):
    """A Gaussian fp64 tensor that depends only on its seed."""
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def all_pairs_diameter(S):
    """Longest |s_i - s_j| over all pairs, from differences taken in fp64."""
    S = S.detach().double().cpu()
    best = 0.0
    for i in range(len(S) - 1):
        gap = S[i + 1 :] - S[i]
        scale = float(gap.abs().max())
        if scale > 0:
            best = max(best, scale * float(((gap / scale) ** 2).sum(1).max()) ** 0.5)
    return best


def length(S, pair):
    """|s_i - s_j|, with a correctly rounded sum of squares."""
    i, j = pair
    return math.sqrt(math.fsum((a - b) ** 2 for a, b in zip(S[i].tolist(), S[j].tolist(), strict=True)))


def deltas(S, H):
    """max_i (S h)_i - min_i (S h)_i for each position, in fp64, rows centred first."""
    S, H = S.double(), H.double()
    logits = (S - S.mean(0)) @ H.T
    return logits.max(0).values - logits.min(0).values


def total_variation(p, q):
    """Half the l1 distance."""
    return (p - q).abs().sum(-1) / 2


def head_gradient(U, h, target):
    """Gradient of the cross entropy at h, by autograd."""
    h = h.clone().requires_grad_()
    loss = torch.nn.functional.cross_entropy((U @ h)[None], torch.tensor([target]))
    return torch.autograd.grad(loss, h)[0]


def regular_simplex(k, dtype=torch.float64):
    """Return k + 1 points in k dimensions, centred, at unit distance from each other."""
    points = torch.eye(k + 1, dtype=dtype) / math.sqrt(2)
    points = points - points.mean(0)
    basis, _ = torch.linalg.qr(points[:-1].T)
    return points @ basis[:, :k]


def blocked_diameter(S, block=1024):
    """The longest |s_i - s_j|, for many rows: fp64 Gram blocks, with the longest of each block computed again."""
    X = S.double() - S.double().mean(0)
    square = (X * X).sum(1)
    best = 0.0
    for i in range(0, len(X), block):
        for j in range(i, len(X), block):
            gap2 = torch.addmm(square[j : j + block], X[i : i + block], X[j : j + block].T, alpha=-2)
            gap2 += square[i : i + block, None]
            a, b = divmod(int(gap2.argmax()), gap2.shape[1])
            best = max(best, float((S[i + a].double() - S[j + b].double()).norm()))
    return best


def logit_numbers(U, H, softcap=None):
    """Mean logit, log-sum-exp and largest |logit| at each state, from the whole product in fp64."""
    logits = H.double() @ U.double().T
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    highest = logits.max(1, keepdim=True).values
    return logits.mean(1), (highest[:, 0] + (logits - highest).exp().sum(1).log()), logits.abs().max(1).values


def bf16_losses(U, H, targets):
    """Cross entropies of bf16 logits: operands and product rounded, softmax in fp64."""
    logits = (H.bfloat16().double() @ U.bfloat16().double().T).float().bfloat16().double()
    return torch.nn.functional.cross_entropy(logits, targets, reduction="none")

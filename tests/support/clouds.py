"""Random matrices of update rows, V rows of d coordinates: the kinds that optimizers make, and hard cases for searches.

KINDS lists the functions that tests are parametrized with.
"""

import math

import torch
from torch.nn.functional import normalize


def gaussian(V, d, seed):
    """Independent Gaussian entries."""
    return torch.randn(V, d, generator=_g(seed))


def sphere(V, d, seed):
    """Unit rows in random directions."""
    return normalize(gaussian(V, d, seed), dim=1)


def heavy_tailed(V, d, seed):
    """Like AdamW early in training: a few long rows, many short ones, all shifted in one direction."""
    size = torch.rand(V, 1, generator=_g(seed + 1)).clamp_min(1e-3).pow(-0.5)
    return size * sphere(V, d, seed) + gaussian(1, d, seed + 2)


def row_normalised(V, d, seed):
    """Like RowNorm: unit rows, most of them in one cluster, the others opposite to it."""
    opposite = torch.rand(V, 1, generator=_g(seed + 1)) < 0.05
    lean = sphere(1, d, seed + 2)
    return normalize(torch.where(opposite, -lean + sphere(V, d, seed), lean + 0.1 * sphere(V, d, seed)), dim=1)


def low_rank(V, d, seed):
    """Unit rows near a few-dimensional subspace, with many almost antipodal pairs."""
    k = min(d, 5)
    return normalize(gaussian(V, k, seed) @ gaussian(k, d, seed + 1) + 0.01 * gaussian(V, d, seed + 2), dim=1)


def flat(V, d, seed):
    """Unit rows of a small subspace. Bounds along its directions are exact up to rounding."""
    k = min(d, 4)
    basis, _ = torch.linalg.qr(gaussian(d, k, seed + 1).double())
    return (sphere(V, k, seed).double() @ basis.T).float()


def two_clusters(V, d, seed):
    """Two tight clusters at distance one."""
    S = 1e-4 * gaussian(V, d, seed)
    S[V // 2 :] += sphere(1, d, seed + 1)
    return S


def one_outlier(V, d, seed):
    """One row far from all others, so that every other row could be the partner in the longest pair."""
    S = 1e-3 * gaussian(V, d, seed)
    S[seed % V] += 5 * sphere(1, d, seed + 1)[0]
    return S


def mostly_zero(V, d, seed):
    """One row in fifty is not zero."""
    S = torch.zeros(V, d)
    rows = torch.randperm(V, generator=_g(seed))[: max(2, V // 50)]
    S[rows] = gaussian(len(rows), d, seed + 1)
    return S


def repeated(V, d, seed):
    """Each row stands about twenty times."""
    return gaussian(max(2, V // 20), d, seed)[torch.randint(max(2, V // 20), (V,), generator=_g(seed + 1))]


KINDS = [
    gaussian,
    sphere,
    heavy_tailed,
    row_normalised,
    low_rank,
    flat,
    two_clusters,
    one_outlier,
    mostly_zero,
    repeated,
]


def simplex_vertices(V, d, seed):
    """V rows, each one of d coordinate points: all pairs of distinct rows have the same distance."""
    return torch.eye(d)[torch.randint(d, (V,), generator=_g(seed))] / math.sqrt(2)


def simplex_product(V, k, seed):
    """V different vertices of a product of three simplices of k points, in 3k columns: most pairs are a longest one."""
    at = torch.randperm(k**3, generator=_g(seed))[:V]
    return torch.cat([torch.eye(k)[at // k**2], torch.eye(k)[at // k % k], torch.eye(k)[at % k]], 1)


def _g(seed):
    return torch.Generator().manual_seed(seed)

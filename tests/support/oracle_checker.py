"""Verify the certificates of bounds on T(G) in NumPy, over all pairs of rows.

A potential proves a lower bound, a flow an upper bound. Nothing else of the package's result is used. P G are the
centred rows of G.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hilbert_monitor.geometry import TensionFlow

Array = NDArray[np.float64]


def centred(G: Tensor) -> Array:
    """P G: the rows of G minus their mean."""
    rows = G.double().cpu().numpy()
    return rows - rows.mean(0)


def diameter(points: Array) -> float:
    """The largest distance between two points."""
    return max(float(np.linalg.norm(points - p, axis=1).max()) for p in points)


def proved_below(G: Tensor, potential: Tensor) -> float:
    """The lower bound that a potential Phi proves: <P G, Phi> / D(Phi)."""
    points = potential.double().cpu().numpy()
    size = diameter(points)
    return float((centred(G) * points).sum()) / size if size else 0.0


def proved_above(G: Tensor, y: dict[tuple[int, int], Array]) -> float:
    """The upper bound that a flow proves: the sum of its lengths, after a check that it balances P G."""
    g = centred(G)
    residual = left_over(g, y)
    assert np.abs(residual).max() <= 1e-11 * np.abs(g).sum() + 1e-14 * len(g) * np.abs(G.double().cpu().numpy()).max()
    return float(sum(np.linalg.norm(vector) for vector in y.values()))


def left_over(g: Array, y: dict[tuple[int, int], Array]) -> Array:
    """What a flow leaves unbalanced of the rows."""
    residual = g.copy()
    for (i, j), vector in y.items():
        assert i < j
        residual[i] -= vector
        residual[j] += vector
    return residual


def proved_with_jung(G: Tensor, y: dict[tuple[int, int], Array]) -> float:
    """The upper bound that a flow proves whose remainder is closed by Jung's theorem at the rank of P G."""
    g = centred(G)
    k = max(1, int(np.linalg.matrix_rank(g / np.abs(g).max(), tol=1e-6)))
    length = sum(float(np.linalg.norm(vector)) for vector in y.values())
    return length + float(np.linalg.norm(left_over(g, y), axis=1).sum()) * (k / (2 * (k + 1))) ** 0.5


def edges(i: Tensor, j: Tensor, flow: Tensor) -> dict[tuple[int, int], Array]:
    """A flow by pair of rows; the vectors of a pair that occurs twice are added."""
    pairs = zip(i.tolist(), j.tolist(), flow.cpu().numpy(), strict=True)
    y: dict[tuple[int, int], Array] = {}
    for a, b, vector in pairs:
        y[a, b] = y.get((a, b), 0) + vector
    return y


def spread(G: Tensor, flow: TensionFlow) -> dict[tuple[int, int], Array]:
    """The flow among rows that a flow among groups of rows describes, without what it leaves over."""
    g, group, x = centred(G), flow.group.cpu().numpy(), flow.points.cpu().numpy()
    K = len(x)
    norm = np.linalg.norm(g, axis=1) * (group >= 0)
    weight, load = np.zeros(K), np.zeros_like(x)
    for row, a in enumerate(group):
        if a >= 0:
            weight[a] += norm[row]
            load[a] += g[row]
    among, share = np.zeros((K, K, x.shape[1])), np.zeros((K, K))
    for a, b, t in zip(flow.i.tolist(), flow.j.tolist(), flow.tension.tolist(), strict=True):
        among[a, b] += t * (x[a] - x[b])
        among[b, a] -= t * (x[a] - x[b])
        share[a, b] += t
        share[b, a] += t  # twice, from a group to itself
    share /= np.where(share.sum(1, keepdims=True) > 0, share.sum(1, keepdims=True), 1)
    np.fill_diagonal(share, 0)  # what a group keeps is left to Jung's theorem
    y = {}
    rows = np.flatnonzero(group >= 0)
    part = {i: norm[i] / weight[group[i]] for i in rows}
    own = {i: g[i] - part[i] * load[group[i]] for i in rows}
    for i in rows:
        for j in rows[rows > i]:
            a, b = group[i], group[j]
            y[i, j] = share[a, b] * part[j] * own[i] - share[b, a] * part[i] * own[j] + part[i] * part[j] * among[a, b]
    return y

"""Verify the certificates of bounds on T(G) in NumPy, over all pairs of rows.

A potential proves a lower bound, a flow an upper bound. Nothing else of the package's result is used. P G are the
centred rows of G.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hilbert_monitor.geometry._tension_solver import TensionFlow

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


def proved_by_edges(G: Tensor, i: Tensor, j: Tensor, flow: Tensor) -> float:
    """The upper bound that a flow along edges between rows proves, with Jung's theorem for what it leaves."""
    left = centred(G)
    for a, b, y in zip(i.tolist(), j.tolist(), flow.cpu().numpy(), strict=True):
        left[a] -= y
        left[b] += y
    return float(np.linalg.norm(flow.cpu().numpy(), axis=1).sum()) + closed(G, left)


def proved_by_groups(G: Tensor, flow: TensionFlow) -> float:
    """The upper bound that a flow among groups proves: y_ij pair by pair, with Jung's theorem for what they leave.

    y_ij = alpha_i alpha_j Y_AB + tau_AB alpha_j r_i - tau_BA alpha_i r_j; a group keeps tau_AA r_i.
    """
    g, group, x, tension = centred(G), *(part.cpu().numpy() for part in (flow.group, flow.points, flow.tension))
    assert np.array_equal(tension, tension.T)
    assert tension.min() >= 0
    rows = np.flatnonzero(group >= 0)
    own, norm = group[rows], np.linalg.norm(g[rows], axis=1)
    weight, load = np.zeros(len(x)), np.zeros_like(x)
    np.add.at(weight, own, norm)
    np.add.at(load, own, g[rows])
    degree = tension.sum(1, keepdims=True)
    tau = np.where(degree > 0, tension / np.where(degree > 0, degree, 1), np.eye(len(x)))
    np.fill_diagonal(tau, 0)
    tension = tension * (1 - np.eye(len(x)))
    alpha = norm / weight[own]
    rest = g[rows] - alpha[:, None] * load[own]
    length, left = 0.0, g.copy()
    for i, a in enumerate(own):
        among = tension[a, own, None] * (x[a] - x[own])
        y = (alpha[i] * alpha)[:, None] * among + np.outer(tau[a, own] * alpha, rest[i])
        y -= (tau[own, a] * alpha[i])[:, None] * rest
        left[rows[i]] -= y.sum(0)
        length += float(np.linalg.norm(y, axis=1).sum()) / 2  # each pair from both of its ends
    return length + closed(G, left)


def closed(G: Tensor, left: Array) -> float:
    """Bound T of what is left of the rows, by Jung's theorem at the rank of P G."""
    g = centred(G)
    k = max(1, int(np.linalg.matrix_rank(g / np.abs(g).max(), tol=1e-6)))
    return float(np.linalg.norm(left, axis=1).sum()) * (k / (2 * (k + 1))) ** 0.5

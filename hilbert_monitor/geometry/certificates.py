"""Checks of the certificates of bounds on T(G), independent of the solvers that made them, at any vocabulary.

A check takes G and a certificate, nothing else of a result. It centres G itself, in fp64, and goes through the rows in
chunks. What it returns is what the certificate proves, and by how much it misses what it should fulfil.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .arithmetic import MAX_BYTES, check_rows, full_precision, row_chunks
from .diameter import row_diameter
from .oracle import OracleSolution, jung_ratio
from .tension import TensionFlow


@dataclass(frozen=True, slots=True)
class CheckedPotential:
    """What a potential Phi proves: T(G) >= bound."""

    bound: float
    """<P G, Phi> / D(Phi)."""
    pairing: float
    """<P G, Phi>."""
    diameter: float
    """D(Phi) = max |phi_i - phi_j|, from above."""
    pair: tuple[int, int]
    """Two rows that far apart."""

    @property
    def excess(self) -> float:
        """Return by how much the diameter exceeds one: zero for a feasible potential."""
        return max(0.0, self.diameter - 1)

    def violation(self, lower: float) -> float:
        """Return by what share of it a claimed lower bound is more than is proved; zero for a true claim."""
        return max(0.0, 1 - self.bound / lower) if lower > 0 else 0.0


@dataclass(frozen=True, slots=True)
class CheckedFlow:
    """What a flow proves: T(G) <= bound."""

    bound: float
    """The length, and what closes the remainder: J_k times `remainder`, with J_k = sqrt(k / (2 (k + 1)))."""
    length: float
    """Length of the flow's own edges; for edges between groups, the bound of it that `TensionFlow` describes."""
    remainder: float
    """Sum of what the edges leave unbalanced of each row: zero for a balanced flow."""
    rank: int
    """k, the rank of P G as it is counted here."""

    def violation(self, upper: float) -> float:
        """Return by what share of it a claimed upper bound is less than what is proved; zero for a true claim."""
        return max(0.0, 1 - upper / self.bound) if self.bound > 0 else 0.0


@full_precision
def check_potential(G: Tensor, potential: Tensor, *, max_bytes: int = MAX_BYTES) -> CheckedPotential:
    """Check a potential: its diameter by the exact search, and what it proves of T(G) from below, in fp64.

    Args:
        G: (V, d) gradient or moment. Its rows are centred here.
        potential: (V, d), such as `TensionBracket.potential` or -S of `OracleSolution`.
        max_bytes: bound on scratch memory beyond the search's own, a few matrices of the potential's size.
    """
    check_rows("G", G)
    check_rows("potential", potential)
    if G.shape != potential.shape:
        shapes = f"{tuple(G.shape)} and {tuple(potential.shape)}"
        raise ValueError(f"G and potential must have one shape, got {shapes}: pass the gradient it was made for")
    pairing = sum(float((g * potential[at].double()).sum()) for at, g in _centred(G, max_bytes))
    search = row_diameter(potential, max_bytes=max_bytes)
    bound = pairing / search.upper if search.upper > 0 else 0.0
    return CheckedPotential(bound, pairing, search.upper, (int(search.pair[0]), int(search.pair[1])))


@full_precision
def check_flow(G: Tensor, flow: TensionFlow | OracleSolution | None, *, max_bytes: int = MAX_BYTES) -> CheckedFlow:
    """Check a flow: how much of each row its edges leave unbalanced, and what it proves of T(G) from above, in fp64.

    What is left over is closed by Jung's theorem, so that every flow proves something, an empty one Jung's bound.

    Args:
        G: (V, d) gradient or moment. Its rows are centred here.
        flow: a `TensionFlow`, an `OracleSolution`, or None for an empty flow.
        max_bytes: bound on scratch memory beyond tables of the groups: (K, K) and (K, d) in fp64.
    """
    check_rows("G", G)
    if flow is None:
        length, remainder = 0.0, sum(float(torch.linalg.vector_norm(g, dim=1).sum()) for _, g in _centred(G, max_bytes))
    elif isinstance(flow, TensionFlow):
        length, remainder = _grouped(G, flow, max_bytes)
    else:
        length, remainder = _by_edges(G, flow, max_bytes)
    k, outside = _rank(G, max_bytes)
    full = max(1, min(len(G) - 1, G.shape[1]))
    bound = length + remainder / (2 * jung_ratio(k)) + outside / (2 * jung_ratio(full))
    return CheckedFlow(bound, length, remainder, k)


def _centred(G: Tensor, max_bytes: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices and rows of P G in fp64, as (g_i - g_0) - mean_j (g_j - g_0): close rows have exact differences."""
    origin = G[0].double()
    mean = torch.zeros_like(origin)
    for _, chunk in row_chunks(G, torch.float64, max_bytes, copies=4):
        mean += (chunk - origin).sum(0)
    for at, chunk in row_chunks(G, torch.float64, max_bytes, copies=4):
        yield at, chunk - origin - mean / len(G)


def _by_edges(G: Tensor, flow: OracleSolution, max_bytes: int) -> tuple[float, float]:
    """Return the length of edges between rows, and the sum of what they leave of each row."""
    out = torch.zeros(G.shape, dtype=torch.float64, device=G.device)
    out.index_add_(0, flow.i, flow.flow.double()).index_add_(0, flow.j, flow.flow.double(), alpha=-1)
    left = sum(float(torch.linalg.vector_norm(g - out[at], dim=1).sum()) for at, g in _centred(G, max_bytes))
    return float(torch.linalg.vector_norm(flow.flow.double(), dim=1).sum()), left


def _grouped(G: Tensor, flow: TensionFlow, max_bytes: int) -> tuple[float, float]:
    """Return the length of edges between groups, spread to their rows, and the sum of what they leave of each row.

    Row i of group A has the share alpha_i = |g_i| / W_A, and r_i = g_i - alpha_i g_A to itself. The spread of the group
    is s_A^2 = sum_i |r_i|^2 / alpha_i, summed row by row.
    """
    group, x = flow.group, flow.points.double()
    K = len(x)
    weight, load, square = x.new_zeros(K), torch.zeros_like(x), x.new_zeros(K)
    ungrouped = 0.0
    for at, g in _centred(G, max_bytes):
        norms, inside = torch.linalg.vector_norm(g, dim=1), group[at] >= 0
        ungrouped += float(norms[~inside].sum())
        weight.index_add_(0, group[at][inside], norms[inside])
        load.index_add_(0, group[at][inside], g[inside])
    for at, g in _centred(G, max_bytes):
        norms, inside = torch.linalg.vector_norm(g, dim=1), group[at] >= 0
        g, norms, own = g[inside], norms[inside], group[at][inside]
        alpha = norms / weight[own]
        rest = g - alpha[:, None] * load[own]
        square.index_add_(0, own, rest.square().sum(1) / alpha.clamp_min(1e-300))
    tension = x.new_zeros(K, K)
    tension.index_put_((flow.i, flow.j), flow.tension.double(), accumulate=True)
    tension = tension + tension.T
    degree = tension.sum(1)
    share = torch.where(degree[:, None] > 0, tension / degree[:, None], torch.eye(K, dtype=x.dtype, device=x.device))
    spread = square.sqrt()
    sent = share * spread[:, None]
    length, left = 0.0, load.clone()
    for a in range(K):
        partners = (tension[a] > 0).nonzero().squeeze(1)
        partners = partners[partners != a]
        edges = tension[a, partners, None] * (x[a] - x[partners])
        left[a] -= edges.sum(0)
        parts = edges.square().sum(1) + sent[a, partners].square() + sent[partners, a].square()
        length += float(parts.sqrt().sum()) / 2  # each edge from both of its ends
    remainder = (left.square().sum(1) + sent.diagonal().square()).sqrt().sum()
    return length, float(remainder) + ungrouped


def _rank(G: Tensor, max_bytes: int) -> tuple[int, float]:
    """Return the rank k of P G, and the sum of the rows' parts outside its k leading directions, which is rounding."""
    V, d = G.shape
    full = max(1, min(d, V - 1))
    gram = torch.zeros(d, d, dtype=torch.float64, device=G.device)
    for _, g in _centred(G, max_bytes):
        unit = g / torch.linalg.vector_norm(g, dim=1, keepdim=True).clamp_min(1e-300)
        gram += unit.T @ unit
    size, direction = torch.linalg.eigh(gram)
    k = max(1, int((size > 1e-10 * size[-1]).sum()))
    if k >= full:
        return full, 0.0
    basis = direction[:, -k:]
    parts = (g - (g @ basis) @ basis.T for _, g in _centred(G, max_bytes))
    return k, sum(float(torch.linalg.vector_norm(part, dim=1).sum()) for part in parts)

"""Steepest descent under the row diameter, solved exactly for a vocabulary of a few hundred tokens.

Among all S with D(S) <= eta the largest first-order decrease -<G, S> is eta T(G). The minimum total tension T(G) is the
length sum |y_ij| of the shortest flow that balances G: sum_j y_ij = g_i. The step itself proves T(G) from below, a
balanced flow from above. `tension.py` brackets T(G) for any number of rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ._gradient_rows import CentredGradient, blocks
from ._tension_program import EdgeFlow, GroupLoads, solve
from .arithmetic import check_nonnegative, check_rows, full_precision
from .efficiency import Interval

_MOST_ROWS = 2048  # (V, V) tables in fp64
_TOLERANCE = 6e-7


def jung_ratio(k: int) -> float:
    """Return the share sqrt((k + 1) / (2 k)) of the best first-order decrease that projected RowNorm guarantees.

    -eta/2 PRN(G) decreases the loss by eta/2 sum |g_i|. With k the rank of G, by Jung's theorem no step of diameter eta
    decreases it by more than eta sqrt(k / (2 (k + 1))) sum |g_i|. A gradient whose rows are the vertices of a regular
    simplex, with or without zero rows, attains the ratio.

    Args:
        k: rank of G, or any upper bound on it, such as min(d, V - 1).
    """
    if k < 1:
        raise ValueError(f"k must be a rank of at least one, got {k}")
    return math.sqrt((k + 1) / (2 * k))


@full_precision
def first_order_decrease(G: Tensor, S: Tensor) -> float:
    """Return the decrease -<G, S> of the linearised loss by the step S, summed in fp64.

    Args:
        G: (V, d) gradient or moment. If its rows do not sum to zero, a common shift of the rows of S counts too.
        S: (V, d) step.
    """
    check_rows("G", G)
    check_rows("S", S)
    if G.shape != S.shape:
        raise ValueError(f"G and S must have one shape, got {tuple(G.shape)} and {tuple(S.shape)}")
    return -sum(float((G[at].double() * S[at].double()).sum()) for at in blocks(len(G)))


@full_precision
def centred_decrease(G: Tensor, S: Tensor) -> Interval:
    """Bound the decrease -<P G, S> of the linearised loss, with the rows of G centred in fp64.

    Args:
        G: (V, d) gradient or moment, any real floating-point dtype. A common shift of its rows does not count.
        S: (V, d) step.

    Returns:
        bounds that allow for the rounding of fp64. G and S are taken as they are.
    """
    rows = CentredGradient.of(G)
    check_rows("S", S)
    if G.shape != S.shape:
        raise ValueError(f"G and S must have one shape, got {tuple(G.shape)} and {tuple(S.shape)}")
    pairing = longest = 0.0
    for at, g in rows.chunks():
        s = S[at].double()
        pairing += float((g * s).sum())
        longest = max(longest, float(torch.linalg.vector_norm(s, dim=1).max()))
    slack = rows.rounding * longest  # more than 32 units of rounding, so a few products with the bounds are covered too
    return Interval(rows.unscaled(-pairing - slack), rows.unscaled(-pairing + slack))


@dataclass(frozen=True, slots=True)
class OracleSolution:
    """The best step of diameter eta, and the balanced flow that proves it."""

    S: Tensor
    """(V, d) fp64: centred, with D(S) <= eta."""
    i: Tensor
    """(E,) row where an edge of the flow starts; pairs that are not listed carry nothing."""
    j: Tensor
    """(E,) row where it ends, j > i."""
    flow: Tensor
    """(E, d) fp64: y_ij. Edges with a flow are tight: s_i - s_j = -eta y_ij / |y_ij|, to the accuracy of the gap."""
    value: float
    """-<G, S>, which is eta T(G) to the accuracy of the gap."""
    lower: float
    """Lower bound of eta T(G): `value` less its rounding."""
    upper: float
    """Upper bound of eta T(G): eta times the flow's length, plus its rounding."""
    shifted: bool
    """Whether the rows of G did not sum to zero, so that this is the solution for P G."""

    @property
    def gap(self) -> float:
        """Return upper / lower, which is one for a perfect proof."""
        return self.upper / self.lower if self.lower > 0 else (1.0 if self.upper == 0 else math.inf)


@full_precision
def diameter_oracle(G: Tensor, eta: float = 1.0) -> OracleSolution:
    """Minimise <G, S> over the centred S with D(S) <= eta, with a proof: a gap of 1 + 1e-6 or less.

    Takes seconds at 400 rows of 64, and grows faster than V^2 d.

    Args:
        G: (V, d) gradient or moment, any real floating-point dtype, on any device. Its rows should sum to zero.
        eta: the diameter, zero or more.

    Returns:
        the step, the flow, and the interval that they prove for eta T(G).
    """
    rows = CentredGradient.of(G)
    check_nonnegative("eta", eta)
    if not math.isfinite(eta):
        raise ValueError(f"eta must be finite, got {eta}")
    V, d = G.shape
    if V > _MOST_ROWS:
        raise ValueError(f"the oracle takes at most {_MOST_ROWS} rows, got {V}: bracket T(G) with tension_bracket")
    g = torch.cat([chunk for _, chunk in rows.chunks()])
    nonzero = (rows.norms > 0).nonzero().squeeze(1)
    none = torch.zeros(0, dtype=torch.long, device=G.device)
    if len(nonzero) < 2 or eta == 0:
        i, j, flow, S = none, none, g.new_zeros(0, d), torch.zeros_like(g)
        if eta == 0 and len(nonzero) > 1:
            i, j, flow = _star(g, nonzero)
        _, upper = rows.bounds(0.0, eta * (rows.total + rows.rounding))  # zero for equal rows
        return OracleSolution(S, i, j, rows.unscaled(flow), 0.0, 0.0, upper, rows.shifted)
    weight = rows.norms[nonzero]
    solution = solve(GroupLoads(g[nonzero], torch.zeros_like(weight), weight), tol=_TOLERANCE, deadline=math.inf)
    assert solution is not None
    edges, points = solution
    i, j, flow = _balanced(g[nonzero], edges)
    S = torch.zeros_like(g)
    S[nonzero] = -points  # a zero row goes to the centre, within eta of all others
    S[rows.norms == 0] = -points.mean(0)
    S -= S.mean(0)
    S *= eta / (float(torch.pdist(S).max()) * (1 + 2.0**-40))
    pairing = -float((g * S).sum())
    value = rows.unscaled(pairing)
    length = float(torch.linalg.vector_norm(flow, dim=1).sum()) * (1 + 2.0**-40)
    lower, upper = rows.bounds(max(0.0, pairing - eta * rows.rounding), eta * (length + rows.rounding))
    return OracleSolution(S, nonzero[i], nonzero[j], rows.unscaled(flow), value, lower, upper, rows.shifted)


def _balanced(g: Tensor, edges: EdgeFlow) -> tuple[Tensor, Tensor, Tensor]:
    """Return a flow that balances G: the solver's, with its remainder sent along the same edges where they connect."""
    K = len(g)
    i, j, flow = edges.i, edges.j, edges.vectors()
    rest = _rest(g, i, j, flow)
    graph = g.new_zeros(K, K)
    graph[i, j] = graph[j, i] = -1.0
    graph -= torch.diag(graph.sum(1))
    height = torch.linalg.pinv(graph, hermitian=True) @ rest
    flow = flow + height[i] - height[j]
    rest = _rest(g, i, j, flow)
    unbalanced = (torch.linalg.vector_norm(rest, dim=1) > 2.0**-45 * torch.linalg.vector_norm(g, dim=1).sum()).nonzero()
    if len(unbalanced):  # the edges do not connect all rows
        a, b, more = _star(rest, unbalanced.squeeze(1))
        i, j, flow = torch.cat([i, a]), torch.cat([j, b]), torch.cat([flow, more])
    return i, j, flow


def _rest(g: Tensor, i: Tensor, j: Tensor, flow: Tensor) -> Tensor:
    """Return the part of the rows (V, d) that a flow leaves unbalanced."""
    return g.index_add(0, i, flow, alpha=-1).index_add_(0, j, flow)


def _star(g: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return a flow that balances some rows through the first of them."""
    hub, others = rows[0].expand(len(rows) - 1), rows[1:]
    return hub, others, -g[others]

"""The row diameter D(S) = max_{i<j} |s_i - s_j|: the exact value with its proof.

An all-pairs search costs V^2 d / 2 multiplications. The exact search here grows about as V d on the
increments that optimizers make, because almost every pair can be *proved* shorter than one that is known:

1. Survey. Centre the rows and keep, for each, its norm r_i and its coordinates z_i along a few leading
   directions. What the directions leave out has norm rho_i = sqrt(r_i^2 - |z_i|^2), so
   |s_i - s_j|^2 <= r_i^2 + r_j^2 - 2 z_i.z_j + 2 rho_i rho_j.
2. Walk. Go from outlying rows to their farthest partners in the survey. The longest pair met has length L.
3. Hubs. A pair of length L has one end with r_i >= L/2, a hub, and the other with r_j >= L - r_max. The mean
   of an increment's rows sits in the mass of rare tokens, so hubs are few. Where rows stand more than once, one of
   each kind is kept.
4. Screen. The bound of step 1 is one matrix product of hubs against partners. Hubs and partners that never
   reach L are dropped; the rest are screened again with more directions.
5. Prove. Hubs that are left, the most promising first, meet their partners in full; pairs that come within
   rounding of L are measured in fp64. Where almost every hub is left and has few pairs whose bound reaches L, these
   are told from the others by their bounds, and measured one by one.

Every comparison has a slack for rounding, so a dropped pair is shorter than L in exact arithmetic. One part of the
slack was measured, not proved: how far the directions are from orthonormal (at most half of what the slack allows).
Where nothing can be dropped (points on a sphere) the search gives a screen up after a sample of hubs, and step 5 is a
tiled all-pairs search. Where most pairs tie for the longest, it is one in fp64, and pairs are measured only if they
exceed L by more than the certificate allows for.

On an accelerator the host reads numbers after the walk, after each screen and after each tile of step 5, and at most
twice more. An emulated device counted 5 waits and 190 to 205 kernels on optimizers' increments of 50,257 x 512. There
the tiles are as large as the memory bound allows, all hubs meet at once, and one screen is left out.

Tried and dropped: no distinction between hubs and partners, which drops almost no row where one outlier is far from
everything; and one slack for all pairs, scaled by the largest norm, which keeps two to nine times the hubs that a slack
by the pair's own norms keeps. A comparison of every bound with L^2 and `nonzero` to list pairs: more time than the
bounds themselves take; the largest bound of 16 hubs at a time is compared instead. `torch.unique` to
find equal rows: nine times slower than to compare neighbours in a sort by the distance from one point. Not built: a
tiling of the rows, which could drop blocks of pairs where hubs are many.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ._cloud import PointCloud, column_extremes
from ._search import Search
from ._sharded_search import ShardedSearch, search
from ._sharded_survey import ordered
from .arithmetic import MAX_BYTES, check_rows, full_precision
from .bracket import DiameterBracket, fp64_rounding, rounded_up, trivial_diameter
from .shards import RowShards, row_shards


@dataclass(frozen=True, slots=True)
class RowDiameter(DiameterBracket):
    """The exact row diameter: `value` is the fp64 length of `pair`, `upper` differs by fp64 rounding alone."""

    pairs_screened: int
    """Bounds computed along leading directions; a pair that is screened again counts again."""
    pairs_computed: int
    """Distances computed in all d dimensions; a pair that is computed twice counts twice."""

    @property
    def value(self) -> float:
        """D(S)."""
        return self.lower


@full_precision
def row_diameter(S: Tensor | RowShards, *, max_bytes: int = MAX_BYTES) -> RowDiameter:
    """Compute D(S) = max_{i<j} |s_i - s_j| exactly, with a pair that attains it.

    Where several pairs tie, any one of them is returned. The cost grows about as V d on optimizers' increments, and is
    that of an all-pairs search at worst; the docstring of `diameter.py` explains the method.

    Args:
        S: (V, d) update rows, any real floating-point dtype.
        max_bytes: bound on scratch memory.

    Returns:
        the value (fp64, from the rows as given), the pair, and how many pairs were screened and computed.
    """
    if shards := row_shards(S):
        return _sharded_diameter(shards, max_bytes)
    assert not isinstance(S, RowShards)
    check_rows("S", S)
    found = Search(PointCloud.unscaled(S, max_bytes))
    if not found.run():
        low, high = column_extremes(S)
        if ends := trivial_diameter(S, low, high, max_bytes):
            return RowDiameter(*ends, 0, 0)
        found = Search(PointCloud.in_range(S, low, high, max_bytes))
        found.run(in_range=True)
    value = found.cloud.row_length(found.length)
    return RowDiameter(
        value, rounded_up(value * fp64_rounding(S.shape[1])), found.pair, 0, found.screened, found.computed
    )


def _sharded_diameter(shards: RowShards, max_bytes: int) -> RowDiameter:
    found = search(shards, max_bytes)
    if not isinstance(found, ShardedSearch):
        return RowDiameter(*found, 0, 0)
    value = found.cloud.row_length(found.length)
    upper = rounded_up(value * fp64_rounding(shards.shape[1]))
    return RowDiameter(value, upper, ordered(*found.pair), 0, found.screened, found.computed)

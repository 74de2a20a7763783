"""The Hilbert perturbation of a panel of hidden states: delta_l = max_i (S h_l)_i - min_i (S h_l)_i.

The plain method computes S H' a chunk of the vocabulary at a time, and updates the extremes. On a CPU most of that
product can be skipped. Rows and hidden states are split along the panel's leading directions, s_i = Q z_i + ... and
h_l = Q g_l + ..., with remainders of norm rho_i and sigma_l, so that

    |s_i.h_l - z_i.g_l| <= rho_i sigma_l.

A few outlying rows give first extremes M_l and m_l for every position. A row that cannot exceed either of them is
skipped at that position. Positions are tiled by median splits, so that one bound (from a tile's centre and radius) can
skip a row for a whole tile. A second bound, position by position, skips most of the others. The rest is multiplied in
full. If a few tiles show that little can be skipped, the plain method takes over. Other devices always use it: there
every tile would cost a synchronisation.

Rows are centred throughout: a common shift changes no delta. Outlying rows are chosen along the tiles' centres as well
as by norm, because RowNorm's rows all have one norm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ._cloud import SAMPLE, PointCloud, in_range, leading_directions, on_host, slant
from .numerics import MAX_BYTES, check_rows, compute_dtype, full_precision, times_power_of_two
from .sharding import RowShards, row_shards

_RANK = 32
_TILE = 64  # positions
_GUESSES = 64  # tiles whose outermost rows every position meets first
_MANY_ROWS, _MANY_POSITIONS = 16384, 512  # fewer are not worth the bookkeeping
_ROWS, _BLOCK = 512, 2048  # rows and positions of a product that stays in cache
_LARGE_BLOCK = 8192  # positions of a product on an accelerator
_HOPELESS, _SPARSE = 0.8, 0.25  # shares of rows left by the two bounds, above which the plain method is faster


@dataclass(frozen=True, slots=True)
class HilbertPerturbation:
    """Perturbation of every position, and where it is largest.

    With a nan in S every delta is nan; with an infinity in S, inf. A position that is not finite has delta nan.
    """

    delta: Tensor
    """(N,), fp32 or better, on the device of S."""
    rms: float
    max: float
    position: int
    """The position that attains `max`."""
    pair: tuple[int, int]
    """The tokens whose logits rose most and least there; their log-odds changed by `max`."""
    nonfinite_rows: int
    nonfinite_positions: int
    products: int
    """Row-position products computed in full: few of V N with pruning, or all (and a few twice) without."""


@full_precision
def hilbert_perturbation(S: Tensor | RowShards, H: Tensor, *, max_bytes: int = MAX_BYTES) -> HilbertPerturbation:
    """Measure how far the update S moves the predictions at the hidden states H, in Hilbert distance.

    Args:
        S: (V, d) update rows, any real floating-point dtype; they may be on several ranks.
        H: (N, d) hidden states, on the same device and the same on all ranks.
        max_bytes: bound on scratch memory; V x N is never held.

    Returns:
        delta of every position, its RMS and maximum, and the tokens that attain the maximum.
    """
    shards = row_shards(S, lambda: _check_states(S, H))
    if shards is None:
        assert not isinstance(S, RowShards)
        check_rows("S", S)
        _check_states(S, H)
        shards = RowShards.whole(S)
    dtype = compute_dtype(shards.rows, H)
    largest_entry = torch.maximum(H.amax(1), -H.amin(1)).to(dtype)  # (N,), a nan where there is one
    bad_positions = ~largest_entry.isfinite()
    cloud = in_range(shards, max_bytes, largest_entry.dtype)
    if isinstance(cloud, PointCloud):
        panel, row, bad_rows = _Panel(cloud, H, largest_entry), 0, 0
        delta = _delta(shards, panel)
    else:  # equal rows, or rows that are not finite
        panel, row, bad_rows = None, cloud.first_nonfinite, cloud.nonfinite_rows
        delta = torch.full_like(largest_entry, cloud.lower)
    delta = delta.masked_fill_(bad_positions, torch.nan)
    position = int(delta.argmax())
    largest = float(delta[position])
    pair, products = (row, row), 0
    if panel is not None:
        pair, products = _extreme_tokens(shards, panel, position), panel.products
        if not shards.ranks.is_single:
            products = int(shards.ranks.sum(lambda: torch.tensor([float(products)]), 1))
    return HilbertPerturbation(
        delta=delta,
        rms=float(delta.double().square().mean().sqrt()),
        max=largest,
        position=position,
        pair=pair if math.isfinite(largest) or bad_rows else (0, 0),
        nonfinite_rows=bad_rows,
        nonfinite_positions=int(bad_positions.sum()),
        products=products,
    )


def _check_states(S: Tensor | RowShards, H: Tensor) -> tuple[int, int]:
    """Raise unless H (N, d) fits S. Return N, and whether H is in fp64."""
    check_rows("H", H)
    if S.shape[1] != H.shape[1]:
        raise ValueError(f"S and H must have one width, got rows of {S.shape[1]} and states of {H.shape[1]}")
    device = S.rows.device if isinstance(S, RowShards) else S.device
    if device != H.device:
        raise ValueError(
            f"S and H must be on one device, got {device} and {H.device}: move H with .to({str(device)!r})"
        )
    return len(H), int(H.dtype == torch.float64)


def _delta(shards: RowShards, panel: _Panel) -> Tensor:
    """Let every rank find the extremes over its own rows; all-reduce them, and return delta (N,)."""
    N = len(panel.H)

    def extremes() -> Tensor:
        panel.run()
        return torch.cat([panel.high, -panel.low])

    numbers = shards.ranks.max(extremes, 2 * N, dtype=panel.cloud.dtype)
    panel.high, panel.low = numbers[:N], -numbers[N:]
    return panel.delta()


def _extreme_tokens(shards: RowShards, panel: _Panel, position: int) -> tuple[int, int]:
    """Return the tokens with the largest and the smallest product at a position."""

    def make() -> Sequence[Tensor]:
        if not len(shards.rows):
            return [panel.high.new_full((2,), -torch.inf), shards.ids.new_zeros(2)]
        logits = panel.logits(position)
        ends = torch.stack([logits.argmax(), logits.argmin()])
        values = logits[ends]
        return [torch.cat([values[:1], -values[1:]]), shards.ids[ends]]

    values, ids = shards.ranks.gather(make, ((2,), panel.cloud.dtype), ((2,), torch.int64))
    high, low = ids.gather(0, values.argmax(0, keepdim=True))[0].tolist()
    return high, low


class _Panel:
    """Running extremes of x_i.h_l over the rows, for every position."""

    def __init__(self, cloud: PointCloud, H: Tensor, largest_entry: Tensor) -> None:
        self.cloud = cloud
        self.H = H
        self.high = torch.full((len(H),), -torch.inf, dtype=cloud.dtype, device=H.device)
        self.low = -self.high
        self.products = 0
        # delta scales with its position: states whose squares would leave the range are brought near one
        tame = (largest_entry > 1e-9) & (largest_entry < 1e9)
        exponents = torch.frexp(largest_entry.where(~tame & largest_entry.isfinite(), 0.0)).exponent
        self.exponents = None if bool(tame.all()) else exponents

    def states(self, at: slice | Tensor) -> Tensor:
        """Load states (n, d), scaled by powers of two where they need it; zero for one that is not finite."""
        h = self.H[at].to(self.cloud.dtype)
        if self.exponents is None:
            return h
        return times_power_of_two(h, -self.exponents[at, None]).nan_to_num_(0.0, 0.0, 0.0)

    def delta(self) -> Tensor:
        """Return high - low in the units of S and H."""
        delta = (self.high - self.low) / self.cloud.post_scale / self.cloud.pre_scale
        return delta if self.exponents is None else times_power_of_two(delta, self.exponents)

    def logits(self, position: int) -> Tensor:
        """Return the products (V,) of all points with the state of a position."""
        h = self.states(slice(position, position + 1))[0]
        return torch.cat([x @ h for _, x in self.cloud.chunks()])

    def run(self) -> None:
        (V, d), N = self.cloud.S.shape, len(self.H)
        numbers = V * (2 * _RANK + _GUESSES + 16) + N * (d + 3 * _RANK + 16)
        tables = numbers * self.cloud.dtype.itemsize + V * (2 * N // _TILE)
        worthwhile = V >= _MANY_ROWS and N >= _MANY_POSITIONS and d >= 4 * _RANK
        if not (self.H.device.type == "cpu" and worthwhile and tables <= 2 * self.cloud.budget and self._prune()):
            self._stream()

    def _stream(self) -> None:
        """Multiply all rows with all positions: in tiles that stay in a CPU's cache, elsewhere in few large ones."""
        here = on_host(self.H)
        block = min(len(self.H), _BLOCK if here else _LARGE_BLOCK)
        scratch = self.high.new_empty(0)
        for _, x in self.cloud.chunks(extra=2 * block * scratch.element_size(), longest=_ROWS if here else None):
            scratch = scratch if scratch.numel() else x.new_empty(len(x) * block)
            for start in range(0, len(self.H), block):
                at = slice(start, start + block)
                h = self.states(at)
                product = torch.mm(h, x.T, out=scratch[: len(h) * len(x)].view(len(h), len(x)))
                torch.maximum(self.high[at], product.amax(1), out=self.high[at])
                torch.minimum(self.low[at], product.amin(1), out=self.low[at])
        self.products += len(self.cloud) * len(self.H)

    def _meet(self, rows: Tensor, positions: Tensor) -> None:
        """Multiply some rows with a few positions."""
        h = self.states(positions)
        for _, x in self.cloud.chunks(rows, extra=2 * len(h) * h.element_size()):
            product = x @ h.T
            self.high[positions] = torch.maximum(self.high[positions], product.amax(0))
            self.low[positions] = torch.minimum(self.low[positions], product.amin(0))
        self.products += len(rows) * len(positions)

    def _prune(self) -> bool:
        """Find the extremes from few products. Return False, and stop, if few products can be skipped."""
        cloud = self.cloud
        H = self.states(slice(None))
        directions = leading_directions(H[:: -(-len(H) // SAMPLE)], _RANK)
        e = cloud.rounding
        err = math.sqrt(_RANK) * e + float(slant(directions))  # of coordinates and of products of them
        norms, z = cloud.survey(directions)
        norm2 = norms.square_()
        g = H @ directions
        rests = _remainder_and_norm(norm2, z, err)  # (V, 2)
        states = _remainder_and_norm(H.square().sum(1), g, err)  # (N, 2)
        states[:, 1] *= 4 * (e + err)  # the rounding of z.g and of the extremes
        tiles = _median_tiles(g)  # (T, _TILE) positions
        centre = g[tiles].mean(1)
        radius = (g[tiles] - centre[:, None]).square().sum(2).amax(1).sqrt_().mul_(1 + e)

        self._guess(norm2, z, centre)
        # a product is at most z.g + 0 + rho sigma + rounding, and in a tile at most z.c + |z| R + rho sigma + rounding
        left = torch.column_stack([z, z.square().sum(1).sqrt_().mul_(1 + e), rests, torch.ones_like(norm2)])
        of_tile = torch.column_stack([radius, states[tiles].amax(1)])
        of_state = torch.column_stack([torch.zeros_like(g[:, :1]), states])
        sides = _sides(centre, of_tile, self.high[tiles].amin(1), self.low[tiles].amax(1))  # (2 T, k + 4)
        needed = torch.empty(len(tiles), len(left), dtype=torch.bool)
        for start in range(0, len(left), _BLOCK):
            at = slice(start, start + _BLOCK)
            needed[:, at] = ~((sides @ left[at].T).view(2, len(tiles), -1).amax(0) < 0)
        if float(needed.double().mean()) > _HOPELESS:
            return False

        trial = range(0, len(tiles), -(-len(tiles) // 4))
        rows_left = 0
        for t in (*trial, *(t for t in range(len(tiles)) if t not in trial)):
            tile, rows = tiles[t], needed[t].nonzero().squeeze(1)
            sides = _sides(g[tile], of_state[tile], self.high[tile], self.low[tile])
            rows = rows[~((left.index_select(0, rows) @ sides.T).amax(1) < 0)]
            self._meet(rows, tile)
            rows_left += len(rows)
            if t == trial[-1] and rows_left > _SPARSE * len(left) * len(trial):
                return False
        return True

    def _guess(self, norm2: Tensor, z: Tensor, centre: Tensor) -> None:
        """Give every position its first extremes: from the longest rows and those farthest along tile centres."""
        along = z @ centre[:: -(-len(centre) // _GUESSES)].T  # (V, _GUESSES)
        outer = torch.zeros(len(z), dtype=torch.bool)
        outer[torch.cat([norm2.topk(128).indices, along.argmax(0), along.argmin(0)])] = True
        self._meet(outer.nonzero().squeeze(1), torch.arange(len(self.H)))


def _remainder_and_norm(norm2: Tensor, z: Tensor, err: float) -> Tensor:
    """Return norms (n, 2) of the points' parts outside the directions of z, and of the points; rounded up."""
    rest2 = (norm2 - z.square().sum(1)).clamp_min_(0).add_(norm2, alpha=8 * err)
    return torch.stack([rest2, norm2 * (1 + 2 * err)], 1).sqrt_()


def _sides(g: Tensor, over: Tensor, high: Tensor, low: Tensor) -> Tensor:
    """Return a table (2 n, k + 4) whose product with a row's is negative if the row passes neither `high` nor `low`."""
    return torch.cat([torch.column_stack([g, over, -high]), torch.column_stack([-g, over, low])])


def _median_tiles(g: Tensor) -> Tensor:
    """Tile points (n, k) by median splits along their coordinate of largest variance.

    Returns:
        (tiles, _TILE) indices, some repeated.
    """
    depth = max(0, math.ceil(math.log2(len(g) / _TILE)))
    size = 2**depth * -(-len(g) // 2**depth)
    tiles = torch.arange(size, device=g.device).clamp_max(len(g) - 1)[None]
    for _ in range(depth):
        points = g[tiles]  # (tiles, n, k)
        widest = points.var(1).argmax(1)[:, None, None].expand(-1, tiles.shape[1], 1)
        order = points.gather(2, widest).squeeze(2).argsort(1)
        tiles = tiles.gather(1, order).view(2 * len(tiles), -1)
    return tiles

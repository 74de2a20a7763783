"""Logits of a panel of hidden states: the Hilbert perturbation of an update, and the log-partition of a head.

**Perturbation.** delta_l = max_i (S h_l)_i - min_i (S h_l)_i. The plain method computes S H' one chunk of the
vocabulary at a time, and updates the extremes. On a CPU most of that product can be skipped. Along the panel's leading
directions Q, s_i = Q z_i + ... and h_l = Q g_l + ..., with remainders of norm rho_i and sigma_l, so that

    |s_i.h_l - z_i.g_l| <= rho_i sigma_l.

A few outlying rows (by norm, and along the tiles' centres: RowNorm's rows all have one norm) give first extremes for
every position. A row that cannot exceed them is skipped: first for a whole tile of positions, by the tile's centre and
radius, then position by position. The rest is multiplied in full. If a few tiles show that little can be skipped, the
plain method takes over. Other devices always use it: there every tile would cost a synchronization.

Rows are centred throughout: a common shift changes no delta.

**Log-partition.** The mean logit z is the mean row of U times the hidden state. Softmax does not see it. A is the
log-sum-exp of the logits without their mean, so that log Z = z + A. In exact arithmetic z harms nothing. In bf16 a
logit of size x is rounded to x / 256, so that both cost precision.

Neither function holds (V, N) numbers. Ranks that share the rows reduce a few numbers per position.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .numerics import MAX_BYTES, check_rows, compute_dtype, full_precision, on_host, times_power_of_two
from .points import CentredRows, Trivial, about_mean, leading_directions, scales_of, slant
from .sharding import RowShards, RowSource, as_shards

_RANK = 32
_SAMPLE = 2048  # positions from which directions are estimated
_TILE = 64  # positions
_GUESSES = 64  # tiles whose outermost rows every position meets first
_MANY_ROWS, _MANY_POSITIONS = 16384, 512  # fewer are not worth the bookkeeping
_ROWS, _BLOCK = 512, 2048  # rows and positions of a product that stays in cache
_LARGE_BLOCK = 8192  # positions of a product on an accelerator
_HOPELESS, _SPARSE = 0.8, 0.25  # shares of rows left by the two bounds, above which the plain method is faster


@dataclass(frozen=True, slots=True)
class HilbertPerturbation:
    """Perturbation of every position, and where it is largest.

    With a nan in S every delta is nan; with an infinity, inf. A position that is not finite has delta nan.
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
    """Row-position products computed in full."""


@full_precision
def hilbert_perturbation(
    S: Tensor | RowSource | RowShards, H: Tensor, *, max_bytes: int = MAX_BYTES
) -> HilbertPerturbation:
    """Measure how far the update S moves the predictions at the hidden states H, in Hilbert distance.

    H (N, d) is on the same device as S, and the same on all ranks. V x N numbers are never held.
    """
    shards = as_shards(S, agree_on=lambda: _check_states("S", S, H))
    largest_entry = torch.maximum(H.amax(1), -H.amin(1)).to(compute_dtype(shards.rows, H))  # (N,), a nan stays one
    bad_positions = ~largest_entry.isfinite()
    scales = scales_of(shards, max_bytes, largest_entry.dtype)
    if isinstance(scales, Trivial):  # equal rows, or rows that are not finite
        bad_rows = scales.nonfinite_rows
        delta = torch.full_like(largest_entry, scales.lower)
    else:
        bad_rows, panel = 0, _Panel(shards, about_mean(shards, scales, max_bytes), H, largest_entry)
        delta = panel.delta()
    delta = delta.masked_fill_(bad_positions, torch.nan)
    position = int(delta.argmax())
    largest = float(delta[position])
    if isinstance(scales, Trivial):
        pair, products = (scales.first_nonfinite,) * 2, 0
    else:
        pair, products = panel.extreme_tokens(position)
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


def _check_states(name: str, S: Tensor | RowSource | RowShards, H: Tensor) -> tuple[int, int]:
    """Raise unless H (N, d) fits S. Return N, and whether H is in fp64."""
    check_rows("H", H)
    if S.shape[1] != H.shape[1]:
        raise ValueError(f"{name} and H must have one width, got rows of {S.shape[1]} and states of {H.shape[1]}")
    if S.device != H.device:
        raise ValueError(
            f"{name} and H must be on one device, got {S.device} and {H.device}: move H with .to({str(S.device)!r})"
        )
    return len(H), int(H.dtype == torch.float64)


class _Panel:
    """Running extremes of x_i.h_l over the rows of this rank, for every position."""

    def __init__(self, shards: RowShards, points: CentredRows, H: Tensor, largest_entry: Tensor) -> None:
        self.shards, self.points, self.H = shards, points, H
        self.high = torch.full((len(H),), -torch.inf, dtype=points.dtype, device=H.device)
        self.low = -self.high
        self.products = 0
        # delta scales with its position: states whose squares would leave the range are brought near one
        tame = (largest_entry > 1e-9) & (largest_entry < 1e9)
        exponents = torch.frexp(largest_entry.where(~tame & largest_entry.isfinite(), 0.0)).exponent
        self.exponents = None if bool(tame.all()) else exponents

    def states(self, at: slice | Tensor) -> Tensor:
        """Load states (n, d), scaled by powers of two where they need it; zero for one that is not finite."""
        h = self.H[at].to(self.points.dtype)
        if self.exponents is None:
            return h
        return times_power_of_two(h, -self.exponents[at, None]).nan_to_num_(0.0, 0.0, 0.0)

    def delta(self) -> Tensor:
        """Let every rank find the extremes over its own rows; return high - low (N,) in the units of S and H."""

        def extremes() -> Tensor:
            self.run()
            return torch.stack([self.high, -self.low])

        high, low = self.shards.ranks.max(extremes, 2, len(self.H), dtype=self.points.dtype)
        delta: Tensor = self.points.scales.of_rows(high + low)
        return delta if self.exponents is None else times_power_of_two(delta, self.exponents)

    def logits(self, position: int) -> Tensor:
        """Return the products (n,) of the points of this rank with the state of a position."""
        h = self.states(slice(position, position + 1))[0]
        return torch.cat([x @ h for _, x in self.points.chunks()])

    def extreme_tokens(self, position: int) -> tuple[tuple[int, int], int]:
        """Return the tokens with the largest and the smallest product at a position, and the products of all ranks."""

        def make() -> Sequence[Tensor]:
            values, ids = self.high.new_full((2,), -torch.inf), self.shards.ids.new_zeros(2)
            if len(self.points):
                logits = self.logits(position)
                ends = torch.stack([logits.argmax(), logits.argmin()])
                values, ids = torch.stack([logits.amax(), -logits.amin()]), self.shards.ids[ends]
            return [values, ids, torch.tensor(self.products)]

        values, ids, products = self.shards.ranks.gather(
            make, ((2,), self.points.dtype), ((2,), torch.int64), ((), torch.int64)
        )
        high, low = ids.gather(0, values.argmax(0, keepdim=True))[0].tolist()
        return (high, low), int(products.sum())

    def run(self) -> None:
        (V, d), N = self.points.rows.shape, len(self.H)
        numbers = V * (2 * _RANK + _GUESSES + 16) + N * (d + 3 * _RANK + 16)
        tables = numbers * self.points.dtype.itemsize + V * (2 * N // _TILE)
        worthwhile = V >= _MANY_ROWS and N >= _MANY_POSITIONS and d >= 4 * _RANK
        if not (self.H.device.type == "cpu" and worthwhile and tables <= 2 * self.points.budget and self._prune()):
            self._stream()

    def _stream(self) -> None:
        """Multiply all rows with all positions: in tiles that stay in a CPU's cache, elsewhere in few large ones."""
        here = on_host(self.H)
        block = min(len(self.H), _BLOCK if here else _LARGE_BLOCK)
        scratch = self.high.new_empty(0)
        for _, x in self.points.chunks(extra=2 * block * scratch.element_size(), longest=_ROWS if here else 0):
            scratch = scratch if scratch.numel() else x.new_empty(len(x) * block)
            for start in range(0, len(self.H), block):
                at = slice(start, start + block)
                h = self.states(at)
                product = torch.mm(h, x.T, out=scratch[: len(h) * len(x)].view(len(h), len(x)))
                torch.maximum(self.high[at], product.amax(1), out=self.high[at])
                torch.minimum(self.low[at], product.amin(1), out=self.low[at])
        self.products += len(self.points) * len(self.H)

    def _meet(self, rows: Tensor, positions: Tensor) -> None:
        """Multiply some rows with a few positions."""
        h = self.states(positions)
        for _, x in self.points.chunks(rows, extra=2 * len(h) * h.element_size()):
            product = x @ h.T
            self.high[positions] = torch.maximum(self.high[positions], product.amax(0))
            self.low[positions] = torch.minimum(self.low[positions], product.amin(0))
        self.products += len(rows) * len(positions)

    def _prune(self) -> bool:
        """Find the extremes from few products. Return False, and stop, if few products can be skipped."""
        points = self.points
        H = self.states(slice(None))
        sample = H[:: -(-len(H) // _SAMPLE)]
        along = sample @ (basis := leading_directions(sample, _RANK))
        directions = basis @ torch.linalg.eigh(along.T @ along).eigenvectors.flip(1)  # the leading first, for the tiles
        e = points.rounding
        err = math.sqrt(_RANK) * e + float(slant(directions))  # of coordinates and of products of them
        norms, z = points.project(directions)
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


# The log-partition

NO_TARGET = -1
"""Stands for the target of a position that has none."""


@dataclass(frozen=True, slots=True)
class LogPartition:
    """The logits of each position in a few numbers, all (N,) in fp64; nan where one of its logits is not finite."""

    mean: Tensor
    """z, the mean logit."""
    log_z: Tensor
    """log Z, the log-sum-exp of the logits."""
    largest: Tensor
    """The largest |logit|."""
    target: Tensor
    """The logit of the target; nan where there is none."""

    @property
    def centred(self) -> Tensor:
        """A = log Z - z: the log-sum-exp of the logits less their mean. At least log V."""
        return self.log_z - self.mean

    @property
    def loss(self) -> Tensor:
        """The cross entropy of the target."""
        return self.log_z - self.target


@full_precision
def log_partition(
    U: Tensor | RowSource | RowShards,
    H: Tensor,
    targets: Tensor | None = None,
    *,
    round_to: torch.dtype | None = None,
    softcap: float | None = None,
    max_bytes: int = MAX_BYTES,
) -> LogPartition:
    """Return mean logit, log Z, the largest |logit| and the target's logit at each hidden state.

    Cost: the product U H', and an exponential for each of its entries; rows on several ranks also two reductions of
    three numbers a position.

    Args:
        U: (V, d) rows that make the logits U h.
        H: (N, d) hidden states, on the same device and the same on all ranks.
        targets: (N,) tokens, NO_TARGET where there is none; the same on all ranks.
        round_to: round rows, states and logits to this dtype, as a matrix product in it does that sums in fp32. The
            softmax is computed in fp32 or better all the same.
        softcap: logits are softcap * tanh(x / softcap) of the products x.
        max_bytes: bound on scratch memory.
    """
    if targets is None:
        targets = torch.full((len(H),), NO_TARGET)
    wanted = targets.to(H.device)
    shards = as_shards(U, name="U", agree_on=lambda: _check_targets(U, H, wanted))
    sums = _Sums(shards, H, wanted)

    def run() -> Tensor:
        sums.run(round_to, softcap, max_bytes)
        return torch.stack(
            [sums.high.nan_to_num(-torch.inf, torch.inf, -torch.inf), sums.largest.nan_to_num(0.0), sums.bad]
        )

    high, largest, bad = shards.ranks.max(run, 3, len(H))
    total, mass, target = shards.ranks.sum(lambda: sums.parts(high), 3, len(H))
    is_bad = bad > 0
    numbers = (total / shards.number, high + mass.log(), largest, target.masked_fill(wanted < 0, torch.nan))
    return LogPartition(*(number.masked_fill(is_bad, torch.nan) for number in numbers))


def _check_targets(U: Tensor | RowSource | RowShards, H: Tensor, targets: Tensor) -> tuple[int, int]:
    """Raise unless H (N, d) and targets (N,) fit U. Return N, and whether H is in fp64."""
    numbers = _check_states("U", U, H)
    if targets.shape != H.shape[:1] or targets.is_floating_point():
        raise ValueError(f"targets must be {len(H)} tokens, one per state, got shape {tuple(targets.shape)}")
    if len(targets) and int(targets.max()) >= U.shape[0]:
        largest = int(targets.max())
        raise ValueError(f"targets must be tokens below {U.shape[0]}, got {largest}: give {NO_TARGET} for none")
    return numbers


class _Sums:
    """Running sums over the rows of this rank, for every position."""

    def __init__(self, shards: RowShards, H: Tensor, targets: Tensor) -> None:
        self.rows, self.H, zeros = shards.rows, H, torch.zeros(len(H), dtype=torch.float64, device=H.device)
        self.high, self.mass = zeros - torch.inf, zeros.clone()  # the largest logit; sum of exp(logit - it)
        self.total, self.largest, self.target = zeros.clone(), zeros.clone(), zeros.clone()
        self.place, self.has = shards.find(targets)

    @property
    def bad(self) -> Tensor:
        """One for a position with a logit that is not finite."""
        return (~self.total.isfinite()).double()

    def parts(self, high: Tensor) -> Tensor:
        """Return sums (3, N) that ranks may add: of logits, of exp(logit - high), and the target's logit."""
        mass = self.mass * (self.high - high).exp()
        return torch.stack([self.total, mass.where(self.mass > 0, 0.0), self.target]).nan_to_num(0.0, 0.0, 0.0)

    def run(self, round_to: torch.dtype | None, softcap: float | None, max_bytes: int) -> None:
        """Go through all rows of this rank."""
        dtype = compute_dtype(self.rows, self.H)
        step = min(len(self.H), _BLOCK)
        for first in range(0, len(self.H), step):
            at = slice(first, first + step)
            h = _rounded(self.H[at].to(dtype), round_to)
            chunks = self.rows.chunks(max_bytes, dtype=dtype, copies=3, extra=4 * step * dtype.itemsize, longest=_ROWS)
            for rows, chunk in chunks:
                logits = _rounded(h @ _rounded(chunk, round_to).T, round_to)
                self._add(at, rows, logits if softcap is None else softcap * torch.tanh(logits / softcap))

    def _add(self, at: slice, rows: slice, logits: Tensor) -> None:
        """Add the logits (n, rows) of some positions and rows."""
        low, high = logits.amin(1), logits.amax(1)
        self.largest[at] = torch.maximum(self.largest[at], torch.maximum(high, -low).double())
        self.total[at] += logits.sum(1, dtype=torch.float64)
        here = self.has[at] & (self.place[at] >= rows.start) & (self.place[at] < rows.stop)
        place = (self.place[at] - rows.start).clamp(0, logits.shape[1] - 1)  # without a wait for how many there are
        self.target[at] = logits.gather(1, place[:, None])[:, 0].double().where(here, self.target[at])
        highest = torch.maximum(self.high[at], high.double())
        mass = logits.sub_(highest.to(logits.dtype)[:, None]).exp_().sum(1, dtype=torch.float64)
        earlier = self.mass[at] * (self.high[at] - highest).exp()
        self.mass[at] = earlier.where(self.mass[at] > 0, 0.0) + mass
        self.high[at] = highest


def _rounded(x: Tensor, round_to: torch.dtype | None) -> Tensor:
    return x if round_to is None else x.to(round_to).to(x.dtype)

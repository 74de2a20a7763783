"""Where the logits of a head are: at each position the mean logit z, and log Z = z + A.

z is the mean row of U times the hidden state. Softmax does not see it. A is the log-sum-exp of the logits without their
mean, which softmax does see. In exact arithmetic z harms nothing. In bf16 a logit of size x is rounded to x / 256, so
that both cost precision.

The logits are formed a chunk of the vocabulary at a time; (V, N) numbers are never in memory. Ranks that share the rows
reduce one maximum and one sum of a few numbers a position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .numerics import MAX_BYTES, check_rows, chunk_length, compute_dtype, full_precision, row_chunks
from .sharding import RowShards, row_shards

_ROWS, _BLOCK = 512, 2048  # rows and positions of a product that stays in cache
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
    U: Tensor | RowShards,
    H: Tensor,
    targets: Tensor | None = None,
    *,
    through: torch.dtype | None = None,
    softcap: float | None = None,
    max_bytes: int = MAX_BYTES,
) -> LogPartition:
    """Return mean logit, log Z, the largest |logit| and the target's logit at each hidden state.

    Cost: the product U H', and an exponential for each of its entries; rows on several ranks also two reductions of
    three numbers a position.

    Args:
        U: (V, d) rows that make the logits U h, any real floating-point dtype; they may be on several ranks.
        H: (N, d) hidden states, on the same device and the same on all ranks.
        targets: (N,) tokens, NO_TARGET where there is none; the same on all ranks.
        through: round rows, states and logits to this dtype, as a matrix product in it does that sums in fp32. The
            softmax is computed in fp32 or better all the same.
        softcap: logits are softcap * tanh(x / softcap) of the products x.
        max_bytes: bound on scratch memory.
    """
    if targets is None:
        targets = torch.full((len(H),), NO_TARGET)
    wanted = targets.to(H.device)
    shards = row_shards(U, lambda: _check(U, H, wanted))
    if shards is None:
        assert not isinstance(U, RowShards)
        check_rows("U", U)
        _check(U, H, wanted)
        shards = RowShards.whole(U)
    sums = _Sums(shards, H, wanted)

    def run() -> Tensor:
        sums.run(through, softcap, max_bytes)
        return torch.stack(
            [sums.high.nan_to_num(-torch.inf, torch.inf, -torch.inf), sums.largest.nan_to_num(0.0), sums.bad]
        )

    high, largest, bad = shards.ranks.max(run, 3, len(H))
    total, mass, target = shards.ranks.sum(lambda: sums.parts(high), 3, len(H))
    is_bad = bad > 0
    numbers = (total / shards.number, high + mass.log(), largest, target.masked_fill(wanted < 0, torch.nan))
    return LogPartition(*(number.masked_fill(is_bad, torch.nan) for number in numbers))


def _check(U: Tensor | RowShards, H: Tensor, targets: Tensor) -> tuple[int, int]:
    """Raise unless H (N, d) and targets (N,) fit U. Return N, and whether H is in fp64."""
    check_rows("H", H)
    V, d = U.shape
    if d != H.shape[1]:
        raise ValueError(f"U and H must have one width, got rows of {d} and states of {H.shape[1]}")
    if targets.shape != H.shape[:1] or targets.is_floating_point():
        raise ValueError(f"targets must be {len(H)} tokens, one a state, got shape {tuple(targets.shape)}")
    if len(targets) and int(targets.max()) >= V:
        raise ValueError(f"targets must be tokens below {V}, got {int(targets.max())}: give {NO_TARGET} for none")
    return len(H), int(H.dtype == torch.float64)


class _Sums:
    """Running sums over the rows of this rank, for every position."""

    def __init__(self, shards: RowShards, H: Tensor, targets: Tensor) -> None:
        self.rows, self.H, zeros = shards.rows, H, torch.zeros(len(H), dtype=torch.float64, device=H.device)
        self.high, self.mass = zeros - torch.inf, zeros.clone()  # the largest logit; sum of exp(logit - it)
        self.total, self.largest, self.target = zeros.clone(), zeros.clone(), zeros.clone()
        order = shards.ids.argsort()
        at = torch.searchsorted(shards.ids[order], targets).clamp_max(max(len(order) - 1, 0))
        self.place = order[at] if len(order) else torch.zeros_like(targets)  # of a target among this rank's rows
        self.has = shards.ids[self.place] == targets if len(order) else torch.zeros_like(targets, dtype=torch.bool)

    @property
    def bad(self) -> Tensor:
        """One for a position with a logit that is not finite."""
        return (~self.total.isfinite()).double()

    def parts(self, high: Tensor) -> Tensor:
        """Return sums (3, N) that ranks may add: of logits, of exp(logit - high), and the target's logit."""
        mass = self.mass * (self.high - high).exp()
        return torch.stack([self.total, mass.where(self.mass > 0, 0.0), self.target]).nan_to_num(0.0, 0.0, 0.0)

    def run(self, through: torch.dtype | None, softcap: float | None, max_bytes: int) -> None:
        """Go through all rows of this rank."""
        dtype = compute_dtype(self.rows, self.H)
        step = min(len(self.H), _BLOCK)
        need = dtype.itemsize * (4 * step + 3 * self.H.shape[1])
        length = chunk_length(need, max_bytes, longest=_ROWS)
        for first in range(0, len(self.H), step):
            at = slice(first, first + step)
            h = _rounded(self.H[at].to(dtype), through)
            for start in range(0, len(self.rows), length):
                rows = slice(start, min(start + length, len(self.rows)))
                logits = _rounded(h @ _rounded(self.rows[rows].to(dtype), through).T, through)
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


def _rounded(x: Tensor, through: torch.dtype | None) -> Tensor:
    return x if through is None else x.to(through).to(x.dtype)


class MeanRow(NamedTuple):
    """The mean row of a matrix, beside how long its rows are."""

    norm: float
    """Norm of the mean row."""
    usual: float
    """Mean of the norms of the rows; no less than `norm`."""


@full_precision
def mean_row(U: Tensor | RowShards, *, max_bytes: int = MAX_BYTES) -> MeanRow:
    """Return the norm of the mean row, and the mean of the norms of the rows.

    The first is what softmax does not see of a head.

    Cost: one pass; rows on several ranks also one sum of d + 1 numbers.

    Args:
        U: (V, d); rows may be on several ranks.
        max_bytes: bound on scratch memory.
    """
    shards = row_shards(U)
    if shards is None:
        assert not isinstance(U, RowShards)
        check_rows("U", U)
        shards = RowShards.whole(U)
    rows, d = shards.rows, shards.shape[1]

    def sums() -> Tensor:
        total = torch.zeros(d + 1, dtype=torch.float64, device=rows.device)
        for _, chunk in row_chunks(rows, compute_dtype(rows), max_bytes, copies=3):
            total[:d] += chunk.sum(0, dtype=torch.float64)
            total[d] += torch.linalg.vector_norm(chunk, dim=1, dtype=torch.float64).sum()
        return total

    total = shards.ranks.sum(sums, d + 1) / shards.number
    norm, usual = torch.stack([torch.linalg.vector_norm(total[:d]), total[d]]).tolist()
    return MeanRow(norm, usual)

"""Holds the rows of one step to a ball, or scales them down, and writes what may stay: U' = c U + S_held.

The rows of S = U' - c U are what was stored, so that what an optimizer's own rounding does counts too. They are formed
from a copy of the weights from before the step: taking a step of 1e6 times its size back from the weights that it left
would leave its rounding errors in them.

A row is held where |s_i - m| > r, with the mean row m and r = limit / 2. It becomes

    s_i' = m' + f_i (s_i - m),    f_i = (r - e_i) / |s_i - m|,

so that all rows are within r of m' afterwards, and no two of them are farther apart than the limit. m' is m, shortened
to r where it is longer: no log-odds sees a shift that all rows have in common, but floating-point numbers do, and so
does an embedding that is tied to the head. Rows that are not held keep their bits where m' is m.

What rounding may add. All this is done in fp64, whose own errors are of order 1e-15. What is stored is rounded to the
weight's dtype with unit roundoff u: an entry x by u |x| at most, or by half the smallest number above zero, a. So a row
t = c U_i + s_i' of d entries is moved by |t| u + sqrt(d) a / 2 at most, and |t| <= |c U_i| + |m'| + r. That is e_i, by
which the radius is lowered, but never by more than half of it: where weights below fp32 are coarse, the bound is far
larger than the error usually is. What was rounded is then measured. A row that has left the ball is put back to the
bits that it had before the step. It has not moved at all: its s_i' is zero, without decay, and that is in the ball too,
as |m'| <= r. So the limit holds in every dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from hilbert_monitor.geometry import RowShards, RowSource, compute_dtype

from .measure import Matrix

TOP = 8
"""How many of the rows that were held back most are named."""
CHUNK_BYTES = {"cpu": 2**20}
"""Memory for a chunk of rows in fp64: what a processor has near, and what an accelerator has plenty of."""


@dataclass(frozen=True, slots=True)
class MovedRows:
    """Rows of one parameter around a step: U' = c U + S."""

    before: Tensor
    """(n, d) a copy of the rows U from before the step."""
    after: Tensor
    """(n, d) the rows U' as they are stored, which are written where they are held."""
    keep: float | Tensor
    """c, that decoupled weight decay leaves of the weights."""

    @property
    def unit_roundoff(self) -> float:
        """By what share of itself a stored number may be rounded; also where fp64 is rounded to fp32 first."""
        return torch.finfo(self.after.dtype).eps / 2 * (1 + 2.0**-10)

    @property
    def least(self) -> float:
        """The smallest number above zero that can be stored."""
        info = torch.finfo(self.after.dtype)
        return info.smallest_normal * info.eps


class HeldRows:
    """This rank's rows of a head around one step: the weight's, extended by those of a bias that is trained.

    Args:
        parts: weight and bias, with as many rows each.
        among: the matrix that they are rows of, if it is spread over several ranks.
    """

    def __init__(self, parts: list[MovedRows], *, among: RowShards | None = None) -> None:
        self.parts, self._shards = parts, among if among is not None and among.ranks.groups else None
        self.total = self._shards.number if self._shards is not None else len(parts[0].after)
        """Rows of all ranks."""
        self.number, self.width = len(parts[0].after), sum(part.after.shape[1] for part in parts)
        self.device = parts[0].after.device
        self.on_cpu = self.device.type == "cpu"
        """Whether a look at a number is no wait."""
        self.wide = torch.float32 if self.device.type == "mps" else torch.float64  # which has no fp64

    # Look

    def mean(self) -> Tensor:
        """The mean row of S over all ranks, to rounding. (d,). Rows that are not finite count as zero."""
        total = torch.zeros(self.width + 1, dtype=self.wide, device=self.device)
        if self.on_cpu:
            for at in self._chunks():
                total[:-1] += self._roughly(at).sum(0)
        if not self.on_cpu or not torch.isfinite(total).all():
            total.zero_()
            for at in self._chunks():
                rows = self._step(at, self._decayed(at))
                total[:-1] += torch.where(torch.isfinite(rows.sum(1, keepdim=True)), rows, 0.0).sum(0)
        total[-1] = self.number
        total = self._reduced(total, dist.ReduceOp.SUM)
        return torch.nan_to_num(total[:-1] / total[-1], 0.0, 0.0, 0.0)

    def distances(self, mean: Tensor, radius: Tensor) -> Tensor:
        """How far each row of S is from the mean row, infinity for a row that is not finite. (n,).

        On a CPU it is computed in the weights' precision first, and again in fp64 for rows that may be out of the ball
        or among the farthest. In fp32, with u = 2^-24, the factor c, its product, two differences and the mean row are
        rounded by u |U_i| + u |U_i| + u |s_i| + u |s_i - m| + u |m| together, and the norm by (d + 2) u of itself.
        """
        distances = torch.empty(self.number, dtype=self.wide, device=self.device)
        if not self.on_cpu:
            for at in self._chunks():
                distances[at] = self._exact_distances(at, mean)
            return torch.nan_to_num(distances, torch.inf, torch.inf)
        length, unsure = float(torch.linalg.vector_norm(mean)), torch.empty(self.number, dtype=torch.bool)
        for at in self._chunks():
            rough = self._roughly(at)
            unit = torch.finfo(rough.dtype).eps / 2
            far = torch.linalg.vector_norm(rough.sub_(mean.to(rough.dtype)), dim=1)
            entry = max(float(x.abs()) for part in self.parts for x in torch.aminmax(part.before[at]))
            error = unit * (2 * self.width**0.5 * entry + 2 * length + (self.width + 4) * far)
            distances[at], unsure[at] = far, ~(far + error <= radius)
        unsure[distances.topk(min(2 * TOP, self.number)).indices] = True
        for places, _ in self._places(unsure):
            distances[places] = self._exact_distances(places, mean)
        return torch.nan_to_num(distances, torch.inf, torch.inf)

    def _exact_distances(self, at: slice | Tensor, mean: Tensor) -> Tensor:
        distances: Tensor = torch.linalg.vector_norm(self._step(at, self._decayed(at)).sub_(mean), dim=1)
        return distances

    def centred(self, mean: Tensor) -> Matrix:
        """S less its mean row, in fp32, for a search of its diameter. (V, d)."""
        S = torch.empty(self.number, self.width, device=self.device)
        for at in self._chunks():
            S[at] = self._step(at, self._decayed(at)).sub_(mean).float()
        return S if self._shards is None else replace(self._shards, rows=RowSource(S.to(self._shards.rows.device)))

    def survey(self, distances: Tensor, radius: Tensor) -> Tensor:
        """How many rows are out of the ball, and the largest distances and their tokens, of all ranks. (1 + 2 TOP,)."""
        top = distances.topk(min(TOP, self.number))  # a rank may have no row
        ids = top.indices if self._shards is None else self._shards.ids.to(self.device)[top.indices]
        table = torch.full((1, 2 * TOP + 1), -1.0, dtype=self.wide, device=self.device)
        table[0, 0] = (distances > radius).sum()
        table[0, 1 : 1 + len(ids)] = top.values
        table[0, 1 + TOP : 1 + TOP + len(ids)] = ids.to(self.wide)
        table = self._gathered(table)
        values, order = table[:, 1 : 1 + TOP].reshape(-1).sort(descending=True, stable=True)
        tokens = table[:, 1 + TOP :].reshape(-1)[order]
        return torch.cat([table[:, 0].sum()[None], values[:TOP], tokens[:TOP]])

    # Act

    def project(self, mean: Tensor, distances: Tensor, radius: Tensor, held: Tensor) -> Tensor:
        """Hold each row to a ball around the mean row, and return which were put back to what they were. (n,).

        Args:
            mean: (d,) mean row m of S.
            distances: (n,) of the rows from it.
            radius: () of the ball.
            held: () how many rows of all ranks are out of it.
        """
        length = torch.linalg.vector_norm(mean)
        moves = (length > radius) & (held > 0)  # then all rows are shifted, also those in the ball
        shift = torch.where(moves, mean * (radius / length), mean)

        def factors(decayed: Tensor, far: Tensor) -> Tensor:
            slack = self._slack(torch.linalg.vector_norm(decayed, dim=1) + torch.linalg.vector_norm(shift) + radius)
            return (torch.maximum(radius - slack, radius / 2) / far).clamp(max=1.0)

        return self._write((distances > radius) | moves, mean, shift, distances, factors, radius)

    def scale(self, mean: Tensor, distances: Tensor, limit: Tensor, diameter: Tensor) -> Tensor:
        """Scale all rows so that their diameter becomes the limit; return which were put back to what they were. (n,).

        All of them are, where the diameter is not finite, or rounding alone may make more than the limit of it.

        Args:
            mean: (d,) mean row of S.
            distances: (n,) of the rows from it.
            limit: () of the diameter.
            diameter: () an upper bound of it as it is, more than the limit.
        """
        tiny = torch.finfo(self.wide).tiny
        slack = self._slack(self._longest_row() + 1.5 * limit)  # |shift| <= limit / 2, and |f (s_i - m)| <= limit
        factor = torch.nan_to_num((limit - 2 * slack) / diameter, 0.0, 0.0, 0.0).clamp_min(0.0)
        length = torch.linalg.vector_norm(mean).clamp_min(tiny)
        shift = mean * torch.minimum(factor, limit / 2 / length)
        reach = torch.where(factor > 0, torch.inf, -1.0)
        every = torch.ones_like(distances, dtype=torch.bool)
        return self._write(every, mean, shift, distances, lambda _, far: factor.expand_as(far), reach)

    def _write(
        self,
        rows: Tensor,
        mean: Tensor,
        shift: Tensor,
        distances: Tensor,
        factors: Callable[[Tensor, Tensor], Tensor],
        reach: Tensor,
    ) -> Tensor:
        """Write c U + shift + f (S - mean) into some rows; put those back that are then out of reach of the shift."""
        back = torch.zeros_like(rows)
        for at, mine in self._places(rows):
            decayed, far = self._decayed(at), distances[at]
            target = self._step(at, decayed).sub_(mean).nan_to_num_(0.0, 0.0, 0.0)
            target.mul_(factors(decayed, far)[:, None]).add_(decayed.add_(shift))
            blocks = [(part, x.to(part.after.dtype)) for part, x in self._blocks(target)]
            gap = torch.linalg.vector_norm(self._joined([x for _, x in blocks]).sub_(decayed), dim=1)
            back[at] = lost = mine & ~((gap <= reach) & torch.isfinite(far))
            for part, x in blocks:
                if not self.on_cpu or lost.any():
                    x = torch.where(lost[:, None], part.before[at], x)
                part.after[at] = x if self.on_cpu else torch.where(mine[:, None], x, part.after[at])
        return back

    # Rows

    def _chunks(self) -> Iterator[slice]:
        length = max(1, CHUNK_BYTES.get(self.device.type, 2**26) // (8 * self.width))
        return (slice(start, start + length) for start in range(0, self.number, length))

    def _places(self, rows: Tensor) -> Iterator[tuple[slice | Tensor, Tensor]]:
        """Where the rows are that some are chosen of, and which: on a CPU those alone, elsewhere without a wait."""
        if not self.on_cpu:
            yield from ((at, rows[at]) for at in self._chunks())
            return
        chosen = rows.nonzero().squeeze(1)
        if len(chosen) == self.number:
            yield from ((at, rows[at]) for at in self._chunks())
            return
        for at in self._chunks():
            if len(places := chosen[at]):
                yield places, torch.ones_like(places, dtype=torch.bool)

    def _roughly(self, at: slice) -> Tensor:
        """Rows of S in the weights' precision, or fp32 where that is less. (n, d)."""
        blocks = []
        for part in self.parts:
            dtype = compute_dtype(part.after)
            blocks.append(torch.sub(part.after[at].to(dtype), part.before[at].to(dtype), alpha=float(part.keep)))
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks, 1)

    def _decayed(self, at: slice | Tensor) -> Tensor:
        """Rows of c U. (n, d)."""
        blocks = [part.before[at].to(self.wide, copy=True).mul_(part.keep) for part in self.parts]
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks, 1)

    def _step(self, at: slice | Tensor, decayed: Tensor) -> Tensor:
        """Rows of S = U' - c U. (n, d)."""
        return self._joined([part.after[at] for part in self.parts]).sub_(decayed)

    def _joined(self, blocks: list[Tensor]) -> Tensor:
        """Rows of all parameters side by side, in fp64, in memory of their own. (n, d)."""
        wide = [x.to(self.wide, copy=True) for x in blocks]
        return wide[0] if len(wide) == 1 else torch.cat(wide, 1)

    def _blocks(self, rows: Tensor) -> list[tuple[MovedRows, Tensor]]:
        """What of some rows belongs to each parameter."""
        return list(zip(self.parts, torch.split(rows, [part.after.shape[1] for part in self.parts], 1), strict=True))

    def _slack(self, lengths: Tensor) -> Tensor:
        """How far rounding may move rows of these lengths."""
        unit, least = max(part.unit_roundoff for part in self.parts), max(part.least for part in self.parts)
        slack: Tensor = unit * lengths + self.width**0.5 * least / 2
        return slack

    def _longest_row(self) -> Tensor:
        """The largest |c U_i| of all ranks."""
        longest = torch.zeros((), dtype=self.wide, device=self.device)
        for at in self._chunks():
            longest = torch.maximum(longest, torch.linalg.vector_norm(self._decayed(at), dim=1).amax())
        return self._reduced(longest, dist.ReduceOp.MAX)

    # Ranks

    def _reduced(self, x: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        """Reduce a tensor over all ranks; nothing is waited for."""
        if self._shards is None:
            return x
        sent = x.to(self._shards.rows.device)
        for group in self._shards.ranks.groups:
            dist.all_reduce(sent, operation, group=group)
        return sent.to(self.device)

    def _gathered(self, table: Tensor) -> Tensor:
        """The tables (1, n) of all ranks, one below the other; nothing is waited for."""
        if self._shards is None:
            return table
        table = table.to(self._shards.rows.device)
        for group in self._shards.ranks.groups:
            tables = [torch.empty_like(table) for _ in range(dist.get_world_size(group))]
            dist.all_gather(tables, table, group=group)
            table = torch.cat(tables)
        return table.to(self.device)

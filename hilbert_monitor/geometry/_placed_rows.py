"""Rows put within one of each other: a potential of diameter one from proposed points, as good as time allows.

Each row has a proposed point. It moves from there towards a common centre until it is within one of the rows that were
placed before it. Heavy rows go first, and so stay where they want to be. There are three tiers:

1. free: a row must be within one of every row before it. A row costs as many products as there are rows before it.
2. in the ball of radius 1/2 about the centre: any two of these are within one of each other, so a row must only be
   within one of the free ones.
3. in the ball of radius 1 - R, with R the largest distance of a free row from the centre: no product at all.

The plan of the tiers follows from the time left, from how fast the products have been, and from the weight of the
rows: the tail of a heavy-tailed gradient is worth no product.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

_BLOCK = 256
_CHUNK = 1024


def placed_rows(points: Tensor, weight: Tensor, deadline: float) -> Tensor:
    """Move points towards zero, the centre, until any two are within one of each other, but for `placing_slack`.

    Cost: at least two passes, at most V^2 d / 2 multiplications; the clock is looked at after each block.

    Args:
        points: (V, d) proposals relative to the centre, fp32 or fp64.
        weight: (V,) of the rows.
        deadline: in the time of time.monotonic().

    Returns:
        the moved points (V, d).
    """
    placing = _Placing(points, weight)
    V = len(points)
    while placing.count < V and placing.planned_free_rows(deadline) > placing.count:
        placing.add_free_block()
    placing.add_others(deadline)
    return placing.result


def best_scale(points: Tensor, gain: Tensor, scales: tuple[float, ...]) -> float:
    """Return the scale at which points (K, d), placed in turn as free rows about zero, have the largest sum of gains.

    Where many pairs are a little too far apart, it is better to scale all points than to move the later ones by more.

    Args:
        points: (K, d), heaviest first.
        gain: (K,) what a point gains for each unit of length.
        scales: candidates.
    """
    size = torch.linalg.vector_norm(points, dim=1)
    direction = points / size.clamp_min(1e-30)[:, None]
    far = (size.new_tensor(scales)[:, None] * size).clamp_max_(1.0)  # (scales, K)
    cosine = direction @ direction.T
    room = 1 - far.square()
    for k in range(1, len(points)):
        far[:, k] = torch.minimum(far[:, k], _root(cosine[k, :k] * far[:, :k], room[:, :k]).amin(1))
        room[:, k] = 1 - far[:, k].square()
    return scales[int((far @ gain).argmax())]


def placing_slack(points: Tensor) -> float:
    """Return by how much the distance of two placed rows may exceed one.

    A product of unit vectors errs by at most d eps in the dtype of the points, the root of it and of one more number of
    order one by another few eps, twice over for the two ends.
    """
    return 4 * (points.shape[1] + 16) * torch.finfo(points.dtype).eps


class _Placing:
    def __init__(self, points: Tensor, weight: Tensor) -> None:
        self.points, self.order = points, weight.argsort(descending=True, stable=True)
        self.weight = weight[self.order].double()
        self.length = torch.linalg.vector_norm(points, dim=1)[self.order].double()
        self.result = torch.zeros_like(points)
        self.count, self.last = 0, 0  # rows that are free; the end of those that will be in the ball of radius 1/2
        self._free = torch.empty_like(points[:0])
        self._products, self._seconds, self._block_seconds = 0, 0.0, 0.0

    def planned_free_rows(self, deadline: float) -> int:
        """Return how many free rows are best in the time left, and plan with them which rows get any product."""
        left = deadline - time.monotonic()
        if not self._products:
            return self.count + 1 if left > self._block_seconds else self.count
        V = len(self.order)
        reach = torch.linalg.vector_norm(self._free, dim=1)
        usual, farthest = float(reach[-_BLOCK:].mean()), float(reach.max())
        free, ball, rest = (
            torch.cat([self.weight.new_zeros(1), (self.weight * self.length.clamp_max(most)).cumsum(0)])
            for most in (usual, 0.5, self._rest(farthest))
        )  # what rows up to any one gain in each tier
        m = torch.arange(self.count, V + _BLOCK, _BLOCK, device=free.device).clamp_max(V)
        blocks = (m - self.count).double() / _BLOCK
        affordable = (0.8 * left - blocks * self._block_seconds) * self._products / max(self._seconds, 1e-9)
        others = ((affordable - (m.square() - self.count**2) / 2) / m).floor()
        last = (m + others.clamp(0, V).long()).clamp_max(V)
        value = (free[m] + ball[last] - ball[m] + rest[V] - rest[last]).where((others >= 0) | (blocks == 0), -torch.inf)
        best = int(value.argmax())
        self.last = int(last[best])
        return int(m[best])

    def _rest(self, farthest: float) -> float:
        """Return the radius of a ball about the centre that is within one of all free rows."""
        return min(0.5, max(0.0, 1 - farthest))

    def add_free_block(self) -> None:
        began = time.monotonic()
        rows = self.order[self.count : self.count + _BLOCK]
        direction, far = self._rays(rows, most=1.0)
        far = torch.minimum(far, self._reach(direction))
        cosine = direction @ direction.T
        for k in range(1, len(rows)):
            along = cosine[k, :k] * far[:k]
            far[k] = torch.minimum(far[k], _root(along, 1 - far[:k].square()).amin())
        placed = direction * far[:, None]
        self.result[rows] = placed
        self._free = torch.cat([self._free, placed])
        self.count += len(rows)
        self._block_seconds = time.monotonic() - began

    def add_others(self, deadline: float) -> None:
        near = self._rest(float(torch.linalg.vector_norm(self._free, dim=1).max())) if self.count else 0.5
        for start in range(self.count, len(self.order), _CHUNK):
            rows = self.order[start : start + _CHUNK]
            if start < self.last and time.monotonic() < deadline:
                direction, far = self._rays(rows, most=0.5)
                far = torch.minimum(far, self._reach(direction))
            else:
                direction, far = self._rays(rows, most=near)
            self.result[rows] = direction * far[:, None]

    def _rays(self, rows: Tensor, most: float) -> tuple[Tensor, Tensor]:
        """Return unit vectors (n, d) from the centre to the proposals, and the distances (n,), at most `most`."""
        ray = self.points[rows]
        far = torch.linalg.vector_norm(ray, dim=1)
        return ray / far.clamp_min(1e-30)[:, None], far.clamp_max(most)

    def _reach(self, direction: Tensor) -> Tensor:
        """Return how far (n,) along unit vectors (n, d) one gets and is still within one of all free points."""
        if not len(self._free):
            return torch.ones_like(direction[:, 0])
        began = time.monotonic()
        room = 1 - self._free.square().sum(1)
        far = torch.cat([_root(part @ self._free.T, room).amin(1) for part in torch.split(direction, _BLOCK)])
        self._products += len(direction) * len(self._free)
        self._seconds += time.monotonic() - began
        return far


def _root(along: Tensor, room: Tensor) -> Tensor:
    """Return the larger t with |t u - y| = 1, given <u, y> and 1 - |y|^2."""
    return along.square().add_(room).clamp_min_(0).sqrt_().add_(along).clamp_min_(0)

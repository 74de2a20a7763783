"""Centre and leading directions of rows on several ranks, in one collective.

Each rank finds the principal axes of its part of an even sample about its own mean m_r, with no word to the others, and
shows them all its mean and its axes, each as long as the points spread along it: together they have almost the scatter
of its n_r points. With c the mean of all, the scatter of all points about c is the sum of these and of
n_r (m_r - c)(m_r - c)'. Every rank takes the leading directions of that sum. They are an estimate, and need be no more:
a screen along any orthonormal directions is right, and along good ones it drops more.

Tried and dropped: subspace iteration with all-reduced products, which is the computation of one rank and takes a
collective for each product.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from ._cloud import PointCloud
from ._sharded_survey import sample_of
from .shards import RowShards

AXES = 4
"""A rank shows at least so many axes, and all ranks together at least so many times the directions that are wanted."""
Scales = tuple[torch.dtype, float, float]
"""Dtype, `pre_scale` and `post_scale` of a cloud."""


class SampleScatter:
    """How an even sample of all ranks' rows lies: its mean, and about it k leading directions.

    Args:
        shards: the rows of this rank.
        k: how many directions; none need a mean alone.
        scales: those of the points.
        max_bytes: bound on scratch memory.
    """

    def __init__(self, shards: RowShards, k: int, scales: Scales, max_bytes: int) -> None:
        self.ranks, self.k, self.scales, self.max_bytes = shards.ranks, k, scales, max_bytes
        d = shards.shape[1]
        self.axes = min(k, max(AXES, -(-AXES * k // shards.ranks.number)))  # that each rank shows
        self._tables = shards.ranks.gather(
            lambda: self._local(shards), ((d + 1,), torch.float64), ((self.axes, d), scales[0])
        )
        sums = self._tables[0].sum(0)
        self._centre = sums[:-1] / sums[-1]
        self.cloud = PointCloud(shards.rows, self._centre.to(scales[0]), *scales[1:], max_bytes)

    def _local(self, shards: RowShards) -> Sequence[Tensor]:
        """Return the sum of this rank's sample with the number of its rows, and its axes about its mean."""
        dtype, pre, post = self.scales
        sample = sample_of(shards, dtype, self.max_bytes).to(dtype) * pre
        n = len(sample)
        total = sample.sum(0, dtype=torch.float64)
        points = _finite(sample.sub_((total / max(n, 1)).to(dtype)).mul_(post))
        axes = principal_axes(points, self.axes)
        return [torch.cat([total, total.new_tensor([n])]), pad(axes, (0, 0, 0, self.axes - len(axes)))]

    @cached_property
    def directions(self) -> Tensor:
        """The leading directions (d, k), orthonormal."""
        sums, axes = self._tables
        numbers = sums[:, -1:]
        between = (sums[:, :-1] / numbers.clamp_min(1) - self._centre) * (self.scales[2] * numbers.sqrt())
        scatter = _finite(torch.cat([axes.flatten(0, 1), between.to(axes.dtype)]))
        _, order = torch.linalg.eigh(_finite(scatter @ scatter.T))
        leading = scatter.T @ order.flip(1)[:, : self.k]
        return _orthonormal(leading)[:, : self.k]

    def checksum(self) -> Tensor:
        """Return a number that tells other directions from these, also the same in another order."""
        bits = self.directions.reshape(-1).view(torch.int32)
        return (bits * torch.arange(1, len(bits) + 1, device=bits.device)).sum()

    def agree(self, checksums: Tensor) -> bool:
        """Return whether all ranks have the same directions, by their checksums (ranks,). If not, take the first's.

        They compute them from the same numbers, but perhaps not with the same kernels, as on other processors or with
        another number of threads. Coordinates along different directions give bounds that are wrong.
        """
        same = bool((checksums == checksums[0]).all())
        if not same:
            form = self.directions.shape, self.directions.dtype
            (tables,) = self.ranks.gather(lambda: [self.directions.contiguous()], form)
            self.directions = tables[0]
        return same


def principal_axes(points: Tensor, k: int) -> Tensor:
    """Estimate the axes (k, d) along which finite points (n, d) about their mean spread most, as long as they spread.

    By subspace iteration from some of the points, so no random numbers are drawn. There are fewer than k axes if there
    are fewer points.
    """
    k = min(k, *points.shape)
    if not k:
        return points[:0]
    start = torch.linspace(0, len(points) - 1, k, device=points.device).long()
    basis = _orthonormal(points[start].T)
    for _ in range(2):
        basis = _orthonormal(points.T @ (points @ basis))
    coordinates = points @ basis
    spread2, order = torch.linalg.eigh(_finite(coordinates.T @ coordinates))
    axes: Tensor = (basis @ order) * spread2.clamp_min(0).sqrt()
    return axes.flip(1).T


def _finite(x: Tensor) -> Tensor:
    """Set what is not finite to zero: rows out of range get directions of no use, and then a scale."""
    return x.nan_to_num_(0.0, 0.0, 0.0)


def _orthonormal(x: Tensor) -> Tensor:
    q: Tensor = torch.linalg.qr(_finite(x))[0]
    return q

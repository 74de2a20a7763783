"""The potential of a constant-width body about an axis, and a good axis for it."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from ._cloud import leading_directions
from ._constant_width_body import best_body
from ._gradient_rows import blocks

_POWER_STEPS = 8
_SAMPLE = 2048
BODY_ROUNDING = 1e-9
"""Of the diameter of a body's points in fp64; rounding to their dtype comes on top."""


def body_potential(unit: Tensor, norms: Tensor, deadline: float) -> Tensor:
    """Return points (V, d) of a body of diameter one, round about an axis that is improved until the deadline.

    Args:
        unit: (V, d) directions of the rows, d > 1.
        norms: (V,) fp64 norms of the rows.
        deadline: in the time of time.monotonic().
    """
    heavy = norms.topk(min(_SAMPLE, len(unit))).indices
    sample = unit[heavy] * norms[heavy].sqrt().to(unit.dtype)[:, None]
    return _body_points(unit, norms, _improved_axis(unit, norms, leading_directions(sample, 1)[:, 0], deadline))


def _angles(unit: Tensor, axis: Tensor) -> Tensor:
    """Angles (V,) of the rows to the axis, fp64."""
    along = unit @ axis
    across = torch.empty_like(along)
    for at in blocks(len(unit)):
        torch.linalg.vector_norm(torch.addmm(unit[at], along[at, None], axis[None], alpha=-1), dim=1, out=across[at])
    return torch.atan2(across, along).double()


def _improved_axis(unit: Tensor, norms: Tensor, heavy_axis: Tensor, deadline: float) -> Tensor:
    """Return an axis whose best body proves more: gradient ascent on the sphere, until it stalls or the deadline.

    The start is the better of the leading direction of the heaviest rows and that of all of them.
    """
    axis, weight = heavy_axis, norms.to(unit.dtype)
    for _ in range(_POWER_STEPS):
        axis = torch.nn.functional.normalize((weight * (unit @ axis)) @ unit, dim=0)
    starts = [(*_gain(unit, norms, start), start) for start in (heavy_axis, axis)]
    gain, angle, slope, axis = max(starts, key=lambda start: start[0])
    step = 0.2
    while step > 1e-3 and time.monotonic() < deadline:
        uphill = -((slope * norms / angle.sin().clamp_min(1e-3)).to(unit.dtype) @ unit)
        uphill -= (uphill @ axis) * axis
        new_axis = torch.nn.functional.normalize(axis + step * torch.nn.functional.normalize(uphill, dim=0), dim=0)
        new = _gain(unit, norms, new_axis)
        if new[0] > gain:
            axis, step = new_axis, 1.5 * step
            gain, angle, slope = new
        else:
            step /= 3
    return axis


def _gain(unit: Tensor, norms: Tensor, axis: Tensor) -> tuple[float, Tensor, Tensor]:
    """Return sum |g_i| h(u_i) of the best body about an axis, the rows' angles to it, and the slopes h' there."""
    angle = _angles(unit, axis)
    h, slope = best_body(angle, norms).support(angle)
    return float((norms * h).sum()), angle, slope


def _body_points(unit: Tensor, norms: Tensor, axis: Tensor) -> Tensor:
    """Return for each row the point of the best body about the axis that is farthest along it: (V, d).

    A row and its point lie in one plane with the axis. The part of the point along the axis is h cos t - h' sin t, the
    part across it h sin t + h' cos t. In fp64, so that the point is on the body even where the angle is inexact. The
    diameter is then one by construction. To measure it would take an all-pairs search: opposite points of a
    constant-width body are all at distance one.
    """
    angle = _angles(unit, axis)
    h, slope = best_body(angle, norms).support(angle)
    axis = axis.double() / torch.linalg.vector_norm(axis.double())
    points = torch.empty_like(unit)
    for at in blocks(len(unit)):
        u, t = unit[at].double(), angle[at]
        across = u - torch.outer(u @ axis, axis)
        across -= torch.outer(across @ axis, axis)  # again: a row along the axis leaves little but rounding
        across /= torch.linalg.vector_norm(across, dim=1, keepdim=True).clamp_min(2.0**-40)
        out = torch.outer(h[at] * t.cos() - slope[at] * t.sin(), axis)
        points[at] = out.addcmul_((h[at] * t.sin() + slope[at] * t.cos())[:, None], across)
    points[norms == 0] = 0  # inside the body
    return points

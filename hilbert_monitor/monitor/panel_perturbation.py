"""The Hilbert perturbation of the panel: each rank measures its share, and one gather makes the whole of it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hilbert_monitor.geometry import hilbert_perturbation

from .measurement import PanelPerturbation

WIDTH = 8
"""Numbers that a rank sends: whether it went well, positions, sum of squares, maximum, the two tokens of the maximum,
largest norm of a hidden state, sum of the squared norms."""


def failure() -> Tensor:
    """What a rank sends that could not measure its share."""
    return torch.zeros(WIDTH, dtype=torch.float64)


def nothing() -> Tensor:
    """What a rank sends whose share is empty."""
    return torch.tensor([1.0] + [0.0] * (WIDTH - 1), dtype=torch.float64)


def share(S: Tensor, H: Tensor) -> Tensor:
    """Measure one rank's share of the panel.

    Args:
        S: (V, d) increment.
        H: (n, d) hidden states at the rank's positions.
    """
    perturbation = hilbert_perturbation(S, H)
    norms = torch.linalg.vector_norm(H, dim=1).double()
    numbers = (
        1.0,
        len(H),
        len(H) * perturbation.rms**2,
        perturbation.max,
        *perturbation.pair,
        float(norms.max()),
        float(norms.square().sum()),
    )
    return torch.tensor(numbers, dtype=torch.float64)


def whole(shares: Tensor) -> PanelPerturbation | None:
    """Combine what the ranks sent, (world, WIDTH); None if one of them failed or there was nothing to measure."""
    ranks = shares.tolist()
    went_well, counts, squares, _, _, _, _, squared_norms = zip(*ranks, strict=True)
    positions = sum(counts)
    if not all(went_well) or not positions:
        return None
    worst = ranks[int(shares[:, 3].argmax())]
    return PanelPerturbation(
        perturbation_rms=math.sqrt(sum(squares) / positions),
        perturbation_max=worst[3],
        perturbation_pair=(int(worst[4]), int(worst[5])),
        hidden_norm=float(shares[:, 6].max()),  # nan if one is
        hidden_norm_rms=math.sqrt(sum(squared_norms) / positions),
    )

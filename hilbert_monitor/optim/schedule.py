"""The paper's learning-rate schedule."""

from __future__ import annotations

import math
from functools import partial

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def warmup_cosine(optimizer: Optimizer, total_steps: int, *, warmup: float = 0.1, floor: float = 0.1) -> LambdaLR:
    """Return the paper's schedule for every group of `optimizer`; step it after each update.

    Update t of T, from 0, has the scale t/w for t < w = floor(warmup T), so zero at the first update. Then it follows a
    cosine from one at t = w to exactly `floor` at the last update, t = T - 1, and stays there.

    Args:
        optimizer: its current learning rates are the peaks.
        total_steps: T, the optimizer updates of the whole run.
        warmup: share of T to warm up over.
        floor: scale at the last update.
    """
    if not 1 <= total_steps < math.inf:
        raise ValueError(
            f"total_steps must be a number of updates, at least 1, got {total_steps}: a Trainer knows it if it has"
            " max_steps or max_epochs"
        )
    if not 0 <= warmup < 1:
        raise ValueError(f"warmup must be a share of the run, from 0 to below 1, got {warmup}")
    if not 0 <= floor <= 1:
        raise ValueError(f"floor must be between 0 and 1, got {floor}")
    return LambdaLR(optimizer, partial(warmup_cosine_scale, total_steps=total_steps, warmup=warmup, floor=floor))


def warmup_cosine_scale(step: int, *, total_steps: int, warmup: float = 0.1, floor: float = 0.1) -> float:
    """Return the scale of the learning rate at update `step` (from 0) of `total_steps`."""
    w = math.floor(round(warmup * total_steps, 6))  # 0.29 * 100 is 28.999999999999996
    if step < w:
        return step / w
    progress = (step - w) / (total_steps - w - 1) if step < total_steps - 1 else 1.0
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))

"""What counts as an instability: spikes, bad spikes and divergences of a loss, after docs/instabilities.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

WINDOW, SPREAD, LEAST = 128, 6.0, 0.1
"""Updates of the past, spreads above its median, and nats above it, from which an update counts as high."""
HIGH, OF = 3, 10
"""A spike has at least so many high updates of so many."""
MERGED = 50
"""Updates after the last high one within which another belongs to the same spike."""
BAD, BEFORE = 0.02, 200
DIVERGED, CROSSED, SMOOTHED = 0.5, 0.1, 100


@dataclass(frozen=True)
class Instability:
    """A spike or a divergence that begins at an update (from zero)."""

    onset: int
    kind: Literal["spike", "divergence"] = "spike"
    bad: bool | None = None
    """Whether the loss stayed worse; None where the run ends too soon to tell."""


def instabilities(loss: Floats, warmup: int) -> list[Instability]:
    """Return the instabilities of a run, in their order."""
    first = warmup + WINDOW
    divergence = divergence_of(loss, first)
    end = len(loss) if divergence is None else divergence - MERGED
    spikes = [Instability(t, "spike", _is_bad(loss, t)) for t in spikes_of(loss, first) if t < end]
    return spikes if divergence is None else [*spikes, Instability(divergence, "divergence", True)]


def spikes_of(loss: Floats, first: int) -> list[int]:
    """Return the onsets of spikes from an update on. A loss that is not finite is high."""
    values = np.where(np.isfinite(loss), loss, np.inf)
    onsets, t = [], max(first, WINDOW)
    while t < len(values):
        limit = _limit(values[t - WINDOW : t])
        if values[t] > limit and int((values[t : t + OF] > limit).sum()) >= HIGH:
            onsets.append(t)
            high = np.flatnonzero(values[t:] > limit)
            gaps = np.flatnonzero(np.diff(high) > MERGED)
            t += int(high[gaps[0]] if len(gaps) else high[-1]) + MERGED
        t += 1
    return onsets


def _limit(past: Floats) -> float:
    middle = float(np.median(past))
    spread = 1.4826 * float(np.median(np.abs(past - middle)))
    return middle + max(SPREAD * spread, LEAST)


def _is_bad(loss: Floats, t: int) -> bool | None:
    """Whether the median loss of 200 to 400 updates later is above the trend of before, which falls or is flat."""
    if t + 2 * BEFORE > len(loss) or t < 2 * BEFORE:
        return None
    earlier, before = np.median(loss[t - 2 * BEFORE : t - BEFORE]), np.median(loss[t - BEFORE : t])
    after = np.median(loss[t + BEFORE : t + 2 * BEFORE])
    expected = before + 2 * min(0.0, before - earlier)  # the middle of `after` is 400 updates from that of `before`
    return bool(not after <= expected + BAD)


def divergence_of(loss: Floats, first: int) -> int | None:
    """Return the update at which a run begins to diverge for good, if it does."""
    bad = np.flatnonzero(~np.isfinite(loss))
    number = int(bad[0]) if len(bad) else len(loss)
    finite = loss[:number]
    start = max(first, SMOOTHED)
    if number <= start:
        return number if len(bad) else None
    windows = np.lib.stride_tricks.sliding_window_view(finite, SMOOTHED)
    smooth = np.median(windows, axis=1)[start - SMOOTHED :]  # of the last 100 updates, from `start` - 1 on
    lowest = np.minimum.accumulate(smooth)
    at_end = smooth[-1] > lowest[-1] + DIVERGED
    if not (at_end or len(bad)):
        return None
    below = np.flatnonzero(smooth <= lowest + CROSSED)
    crossing = start + int(below[-1])  # the update after the last one that is not above
    return min(crossing, number) if at_end else number

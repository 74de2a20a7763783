"""Times the Hilbert perturbation of a panel against the bare product S H'."""

from __future__ import annotations

from collections.abc import Iterator

from hilbert_monitor.geometry import hilbert_perturbation

from .increments import SampleIncrement
from .measure import BenchResult, peak_bytes, seconds
from .opponents import bare_product


def panel(increment: SampleIncrement) -> Iterator[BenchResult]:
    """Time the perturbation of the increment's panel, if it has one, and measure the scratch memory."""
    S, H = increment.S, increment.H
    if H is None:
        return
    result = hilbert_perturbation(S, H)
    scratch = peak_bytes(lambda: hilbert_perturbation(S, H)) / 2**20
    share = result.products / (len(S) * len(H))
    yield BenchResult(
        "perturbation",
        f"{increment.name} (panel of {len(H):,})",
        "hilbert_perturbation",
        seconds(lambda: hilbert_perturbation(S, H), repeat=3),
        "bare matmul",
        seconds(lambda: bare_product(S, H), repeat=3),
        f"RMS {result.rms:.6g}, {share:.1%} of products computed, {scratch:.0f} MiB scratch",
    )

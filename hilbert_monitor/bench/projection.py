"""Measurements on an accelerator, on paper: counts of this code on an emulated device, beside those of opponents.

Figures of a `Device` make seconds of them. Nobody has measured these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from hilbert_monitor.emulation.counts import Count
from hilbert_monitor.emulation.device import EmulatedDevice
from hilbert_monitor.geometry import hilbert_perturbation, pending_bracket, row_diameter
from hilbert_monitor.pretrain.device import Device
from hilbert_monitor.pretrain.plan import plan
from hilbert_monitor.pretrain.recipes import HEADS, PAPER, recipe

from .increments import make_increment
from .opponents import all_pairs_matmul, bare_product, one_pass

TILE = 2048
"""Rows of the opponent's tiles."""


def counted(call: Callable[..., object], *inputs: Tensor) -> Count:
    """Count a call with these tensors on an emulated device."""
    with EmulatedDevice() as device:
        on_device = [device.tensor(x) for x in inputs]
        with device.counted() as counts:
            call(*on_device)
    return counts.total


def all_pairs_count(V: int, d: int) -> Count:
    """Return the work of the all-pairs search for V rows, from that for two tiles.

    It goes over n (n + 1) / 2 pairs of n tiles, each unordered pair once.
    """
    two = counted(all_pairs_matmul, torch.zeros(2 * TILE, d))
    n = -(-V // TILE)
    return (n * (n + 1) / 2 / 3) * two


def measurements(V: int = 50_257, d: int = 512, panel: int = 1024) -> Iterator[tuple[str, Count, str, Count]]:
    """Yield the parts of the monitor with their counts, and an opponent for each with its own."""
    for head in HEADS:
        increment = make_increment(head, V, d, steps=20, panel=panel)
        S, H = increment.S, increment.H
        assert H is not None
        yield f"bounds, {head} head", counted(pending_bracket, S), "one read of S", counted(one_pass, S)
        yield f"D(S), {head} head", counted(row_diameter, S), "all pairs in fp32", all_pairs_count(V, d)
        product = counted(lambda S, H: bare_product(S, H, rows=8192), S, H)
        yield f"panel of {panel:,}, {head} head", counted(hilbert_perturbation, S, H), "the bare product", product


def measurement_rows() -> Iterator[tuple[str, ...]]:
    """The table of the measurements."""
    device = Device()
    yield "what", "kernels", "waits", "GB moved", "GFLOP", "assumed ms", "opponent", "its assumed ms", "ratio"
    for name, count, opponent, theirs in measurements():
        ours_ms, theirs_ms = (1e3 * device.seconds(each) for each in (count, theirs))
        yield (
            name,
            f"{count.kernels:,.0f}",
            f"{count.waits:,.0f}",
            f"{count.bytes / 1e9:,.2f}",
            f"{count.flops / 1e9:,.1f}",
            f"{ours_ms:.2f}",
            opponent,
            f"{theirs_ms:.2f}",
            f"{theirs_ms / ours_ms:.2f}",
        )


def size_rows() -> Iterator[tuple[str, ...]]:
    """The table of the paper's sizes, on eight devices at the paper's cadence with bounds in each update."""
    yield "size", "head", "ms an update", "kernels", "waits", "all waited for", "beside the next forward pass"
    for size in PAPER:
        for head in HEADS:
            found = plan(recipe(size, head=head))
            kernels, waits = (sum(getattr(c, name) for c in found.monitor.values()) for name in ("kernels", "waits"))
            update = sum(found.seconds.values()) - found.seconds["monitor"]
            shares = (f"{found.monitor_share['seconds']:.2%}", f"{found.overlapped_share:.2%}")
            yield size, head, f"{1e3 * update:.0f}", f"{kernels:.0f}", f"{waits:.0f}", *shares

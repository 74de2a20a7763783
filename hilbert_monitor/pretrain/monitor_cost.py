"""The monitor on paper: what it adds to an update, and what its ranks exchange.

Kernels, waits, bytes and FLOPs are counted of this very code, on an emulated device and a small head (see
`emulation.monitor_work`), and are grown to the size of the head. Seconds follow from them and from the figures of a
`Device`. Where all ranks have the head, rank zero measures it alone; of W ranks that share its rows, each forms and
surveys V / W. The panel is run whole by every rank, or group of tensor-parallel ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from itertools import pairwise

from hilbert_monitor.emulation.counts import Count
from hilbert_monitor.emulation.monitor_work import MonitorWork, Work, grown_work
from hilbert_monitor.geometry._sharded_survey import OUTER

from .device import Device
from .recipes import Recipe
from .training_cost import FP32, INT64, forward_flops

MOST_RANKS = 8
"""Ranks that are emulated at most. More make the same kernels, of fewer rows each."""
SEARCH_GATHER = 0.0103
"""What a rank receives for an exact search over what a gather of S would bring it: the most of the bench, at 2, 4 and 8
ranks and V = 50,257, d = 256. It is not known for more ranks."""
AGREEMENTS, PANEL_AGREEMENTS = 2, 6
"""Collectives of a record by which ranks agree that each can take part, and of a panel besides: each waits, too."""


@dataclass(frozen=True, slots=True)
class MonitorCost:
    """Work of one part of the monitor in an update, as a mean over the updates."""

    flops: float = 0.0
    """FLOPs of all ranks."""
    bytes: float = 0.0
    """Bytes that all ranks move in memory, as if there were no cache."""
    kernels: float = 0.0
    """Of a rank."""
    waits: float = 0.0
    """Times that a rank's host waits for its device."""
    seconds: float = 0.0
    """Seconds of a rank, if each kernel were waited for, with those of what it exchanges."""
    overlapped: float = 0.0
    """Seconds that are left where kernels run beside the next forward pass. What waits cannot do that."""
    received: float = 0.0
    """Bytes that a rank receives from others."""

    def __add__(self, other: MonitorCost) -> MonitorCost:
        return MonitorCost(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(MonitorCost)))


def monitor_costs(r: Recipe, device: Device) -> dict[str, MonitorCost]:
    """Return the work of the monitor in an update, as a mean over the updates, by part.

    S is formed in every update, and its exact diameter computed or else bounds on it.
    """
    searches = 1 / r.diameter_every if r.diameter_every else 0.0
    panels = 1 / r.perturbation_every if r.perturbation_every else 0.0
    alone = r.strategy == "ddp"
    on_one = replace(r, devices=1, nodes=1, micro_batch=1, global_batch=1) if alone else r
    work, ranks = rank_work(on_one), on_one.world
    panel = work.quality + work.product
    agreements = AGREEMENTS if r.world > 1 else 0
    often, seldom = (0, agreements) if alone else (agreements, 0)  # nothing is agreed on in a step that is read later
    forward = forward_flops(r.model, panel_rows(r), head=False)
    seconds = forward / r.tensor_parallel / device.decoder_speed(bf16=r.autocast)
    passes = MonitorCost(flops=panels * r.readers * forward, seconds=panels * seconds, overlapped=panels * seconds)
    return {
        "forming S": _cost(r, device, 1.0, _agreed(work.forming, often), ranks),
        "bracket": _cost(r, device, 1 - searches, work.bracket, ranks),
        "exact search, typical": _cost(r, device, searches, _agreed(work.search, seldom), ranks),
        "panel": _cost(r, device, panels, _agreed(panel, PANEL_AGREEMENTS if r.world > 1 else 0), ranks) + passes,
    }


def rank_work(r: Recipe) -> MonitorWork:
    """Return what a rank does for each part, at the size of the recipe's head, with its rows on all ranks."""
    ranks = min(r.world, MOST_RANKS)
    work = grown_work(
        r.head,
        ranks=ranks,
        autocast=r.autocast,
        rows=own_rows(r) * ranks,
        width=r.width,
        positions=r.panel_size,
    )
    return replace(
        work,
        bracket=replace(work.bracket, received=bracket_received(r)),
        search=replace(work.search, received=_search_received(r)),
    )


def _agreed(work: Work, collectives: int) -> Work:
    """Add the collectives by which ranks agree: a number goes to the device, through the wire, and back."""
    return work + Work(Count(kernels=3 * collectives, waits=2 * collectives, copies=collectives), collectives)


def _cost(r: Recipe, device: Device, share: float, work: Work, ranks: int) -> MonitorCost:
    """Return the cost of fp32 work that some ranks do in a fraction of the updates."""
    count = work.count
    wire = device.wire_seconds(work.received, work.collectives, nodes=r.nodes) if r.world > 1 else 0.0
    seconds = device.seconds(count) + wire
    return MonitorCost(
        flops=share * ranks * count.flops,
        bytes=share * ranks * count.bytes,
        kernels=share * count.kernels,
        waits=share * count.waits,
        seconds=share * seconds,
        overlapped=share * (seconds if count.waits else device.busy_seconds(count)),
        received=share * work.received,
    )


def panel_memory(r: Recipe) -> int:
    """Return the bytes of the states of the panel, and of the rows of text that contain them."""
    return FP32 * r.panel_size * r.width + 2 * INT64 * panel_rows(r) * r.context if r.perturbation_every else 0


def own_rows(r: Recipe) -> int:
    """Return the rows of S that a rank measures: all where each has the head, and rank zero measures alone."""
    return r.vocab_size if r.strategy == "ddp" else math.ceil(r.vocab_size / r.world)


def bracket_received(r: Recipe) -> float:
    """Return the bytes of the others' outlying rows that a rank receives, and of the mean of a sample."""
    shown = math.ceil(OUTER / r.world)
    rows = 2 * max(2, shown) + max(1, shown)  # outliers twice, partners once
    return (r.world - 1) * (FP32 * rows * r.width + 2 * 8 * r.width / r.world)


def _search_received(r: Recipe) -> float:
    return SEARCH_GATHER * FP32 * r.vocab_size * r.width * (r.world - 1) / r.world


def panel_rows(r: Recipe) -> int:
    """Return the number of rows of text that the panel's positions stand in; in the paper each reader begins a new
    one."""
    if r.panel != "paper":
        return math.ceil(r.panel_size / r.context)
    bounds = [r.panel_size * reader // r.readers for reader in range(r.readers + 1)]
    return sum(math.ceil((stop - start) / r.context) for start, stop in pairwise(bounds))


def monitor_at(r: Recipe, device: Device, *, vocab_size: int, width: int, world: int) -> MonitorCost:
    """Return the cost of the monitor's own work for another head, sharded over other ranks, in machines of eight.

    The forward pass of the panel is left out: it is the model's, and there is none of that width.
    """
    other = replace(
        r, vocab_size=vocab_size, width=width, head_dim=2, blocks=1, context=r.panel_size, panel="loader",
        strategy="fsdp", devices=min(world, 8), nodes=max(1, world // 8), micro_batch=1, global_batch=world,
    )  # fmt: skip
    work, total = monitor_costs(other, device), MonitorCost()
    for cost in work.values():
        total += cost
    often = 1 / other.perturbation_every if other.perturbation_every else 0.0
    forward = often * forward_flops(other.model, panel_rows(other), head=False)
    seconds = forward / device.decoder_speed(bf16=other.autocast)
    return replace(
        total,
        flops=total.flops - other.readers * forward,
        seconds=total.seconds - seconds,
        overlapped=total.overlapped - seconds,
    )

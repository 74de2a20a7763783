"""The monitor on paper: FLOPs, bytes and seconds that it adds to an update, what its ranks exchange, and its memory.

Matrix products and passes over the increment S count. A multiply-add counts as two FLOPs. Of W ranks each forms and
surveys V / W rows, under every strategy. The panel is run whole by every rank, or group of tensor-parallel ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise

from hilbert_monitor.geometry._sharded_survey import OUTER

from .device import Device
from .recipes import Head, Recipe
from .training_cost import FP32, INT64, forward_flops

SEARCH_FLOPS: dict[Head, float] = {"adamw": 42.9, "rownorm": 72.8}
SEARCH_READS: dict[Head, float] = {"adamw": 7.3, "rownorm": 10.5}
SEARCH_CALLS: dict[Head, int] = {"adamw": 613, "rownorm": 877}
"""A typical exact search: FLOPs of products over V d, bytes moved over those of S, and calls of torch.

They are means over three synthetic increments of the bench, at V = 50,257 and d = 256, 512 and 1024. FLOPs ranged from
41 to 46 and from 62 to 91, calls from 473 to 769 and from 655 to 1,208. They are not from the paper's runs, and no
bound: an increment of which no pair can be ruled out costs V^2 d.
"""

BRACKET_CALLS = 77  # beside those of its passes
SURVEY_BYTES, SURVEY_CALLS = 2**22, 3  # rows that a pass over S takes at a time, with room for three copies; calls each
STREAM_ROWS, STREAM_CALLS = 512, 8  # the same of the product with a panel


SEARCH_GATHER = 0.017
"""What a rank receives for an exact search over what a gather of S would bring it: the most of the bench, at 2, 4 and 8
ranks and V = 50,257, d = 256. It is not known for more ranks."""
BRACKET_COLLECTIVES, SEARCH_COLLECTIVES, PANEL_COLLECTIVES = 8, 40, 25
"""Those of a record with bounds, of one with an exact diameter, and of a panel besides."""


@dataclass(frozen=True, slots=True)
class MonitorCost:
    """Work of one part of the monitor in an update, as a mean over the updates."""

    flops: float = 0.0
    """FLOPs of all ranks."""
    bytes: float = 0.0
    """Bytes that all ranks move in memory, as if there were no cache."""
    seconds: float = 0.0
    """Seconds of a rank, with those of what it exchanges."""
    received: float = 0.0
    """Bytes that a rank receives from others."""


Work = tuple[float, float, float]
"""FLOPs, bytes and calls of one rank."""


def monitor_costs(r: Recipe, device: Device) -> dict[str, MonitorCost]:
    """Return the work of the monitor in an update, as a mean over the updates, by part.

    Every rank forms its rows of S, and all compute its exact diameter or else bounds on it.
    """
    searches = 1 / r.diameter_every if r.diameter_every else 0.0
    panels = 1 / r.perturbation_every if r.perturbation_every else 0.0
    return {
        "forming S": _cost(r, device, 1.0, forming_work(r)),
        "bracket": _cost(r, device, 1 - searches, bracket_work(r), bracket_received(r), BRACKET_COLLECTIVES),
        "exact search, typical": _cost(r, device, searches, _search_work(r), _search_received(r), SEARCH_COLLECTIVES),
        "panel": _panel_cost(r, device, panels),
    }


def _cost(
    r: Recipe, device: Device, share: float, work: Work, received: float = 0.0, collectives: float = 0.0
) -> MonitorCost:
    """Return the cost of fp32 work of each rank that a fraction of the updates does."""
    flops, traffic, _ = work
    seconds = device.seconds(*work)
    if r.world > 1:
        seconds += device.wire_seconds(received, collectives, nodes=r.nodes)
    return MonitorCost(share * r.world * flops, share * r.world * traffic, share * seconds, share * received)


def panel_memory(r: Recipe) -> int:
    """Return the bytes of the states of the panel, and of the rows of text that contain them."""
    return FP32 * r.panel_size * r.width + 2 * INT64 * panel_rows(r) * r.context if r.perturbation_every else 0


def own_rows(r: Recipe) -> int:
    """Return the rows of S that a rank measures."""
    return math.ceil(r.vocab_size / r.world)


def forming_work(r: Recipe) -> Work:
    """Return the work of forming S: RowNorm's norms and a product, or AdamW's five operations."""
    entries = own_rows(r) * r.width
    return (3 * entries, 3 * FP32 * entries, 5) if r.head == "rownorm" else (5 * entries, 11 * FP32 * entries, 5)


def bracket_work(r: Recipe) -> Work:
    """Return that of the bounds: two passes that centre rows and take norms, and 16 rows against a sample of 2,048."""
    entries = own_rows(r) * r.width
    chunks = math.ceil(own_rows(r) / max(64, SURVEY_BYTES // (3 * FP32 * r.width)))
    flops = 2 * 3 * entries + 2 * 16 * min(2048, r.vocab_size) * r.width / r.world
    return flops, 2 * 3 * FP32 * entries, 2 * SURVEY_CALLS * chunks + BRACKET_CALLS


def bracket_received(r: Recipe) -> float:
    """Return the bytes of the others' outlying rows that a rank receives, and of the mean of a sample."""
    shown = math.ceil(OUTER / r.world)
    rows = 2 * max(2, shown) + max(1, shown)  # outliers twice, partners once
    return (r.world - 1) * (FP32 * rows * r.width + 2 * 8 * r.width / r.world)


def _search_work(r: Recipe) -> Work:
    """Return that of the exact search, the norms of S and of the gradient, and the gradient's sum."""
    entries = own_rows(r) * r.width
    flops, reads = SEARCH_FLOPS[r.head] + 5, SEARCH_READS[r.head] + 3
    return flops * entries, reads * FP32 * entries, SEARCH_CALLS[r.head]


def _search_received(r: Recipe) -> float:
    return SEARCH_GATHER * FP32 * r.vocab_size * r.width * (r.world - 1) / r.world


def _panel_cost(r: Recipe, device: Device, share: float) -> MonitorCost:
    """Return the cost of the panel: a forward pass of its rows by each group, and the product with a rank's rows."""
    entries, size = own_rows(r) * r.width, r.panel_size
    known = bool(r.diameter_every) and r.perturbation_every % r.diameter_every == 0  # the search has formed S already
    forming = (0.0, 0.0, 0.0) if known else forming_work(r)
    product = 2.0 * size * entries, FP32 * (5.0 * entries + 3.0 * size * own_rows(r)), _stream_calls(r, size)
    extremes = 2 * 2 * 8 * size * (r.world - 1) / r.world  # an all-reduce
    cost = _cost(r, device, share, _sum(product, forming), extremes, PANEL_COLLECTIVES)
    forward = forward_flops(r.model, panel_rows(r), head=False)
    seconds = forward / r.tensor_parallel / device.decoder_speed(bf16=r.autocast)
    flops = cost.flops + share * r.readers * forward
    return MonitorCost(flops, cost.bytes, cost.seconds + share * seconds, cost.received)


def _sum(a: Work, b: Work) -> Work:
    return a[0] + b[0], a[1] + b[1], a[2] + b[2]


def _stream_calls(r: Recipe, size: int) -> float:
    return STREAM_CALLS * math.ceil(own_rows(r) / STREAM_ROWS) * math.ceil(size / 2048)


def panel_rows(r: Recipe) -> int:
    """Return the number of rows of text that the panel's positions stand in; in the paper each reader begins a new
    one."""
    if r.panel != "paper":
        return math.ceil(r.panel_size / r.context)
    bounds = [r.panel_size * reader // r.readers for reader in range(r.readers + 1)]
    return sum(math.ceil((stop - start) / r.context) for start, stop in pairwise(bounds))


def monitor_at(r: Recipe, device: Device, *, vocab_size: int, width: int, world: int) -> MonitorCost:
    """Return the cost of the monitor's own work for another head on another number of ranks, in machines of eight.

    The forward pass of the panel is left out: it is the model's, and there is none of that width.
    """
    other = replace(
        r, vocab_size=vocab_size, width=width, head_dim=2, blocks=1, context=r.panel_size, panel="loader",
        strategy="ddp", devices=min(world, 8), nodes=max(1, world // 8), micro_batch=1, global_batch=world,
    )  # fmt: skip
    forward = forward_flops(other.model, panel_rows(other), head=False)
    costs = monitor_costs(other, device).values()
    flops, traffic, seconds, received = (
        sum(getattr(cost, name) for cost in costs) for name in ("flops", "bytes", "seconds", "received")
    )
    often = 1 / other.perturbation_every if other.perturbation_every else 0.0
    seconds -= often * forward / device.decoder_speed(bf16=other.autocast)
    return MonitorCost(flops - often * other.readers * forward, traffic, seconds, received)

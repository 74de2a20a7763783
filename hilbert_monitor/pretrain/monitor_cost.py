"""The monitor on paper: FLOPs, bytes and seconds that it adds to an update, and its memory.

Matrix products and passes over the increment S count. A multiply-add counts as two FLOPs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

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


@dataclass(frozen=True, slots=True)
class MonitorCost:
    """Work of one part of the monitor in an update, as a mean over the updates."""

    flops: float = 0.0
    """FLOPs of all ranks."""
    bytes: float = 0.0
    """Bytes that all ranks move, as if there were no cache."""
    seconds: float = 0.0
    """Seconds of the busiest rank, for which the others wait."""


def monitor_costs(r: Recipe, device: Device) -> dict[str, MonitorCost]:
    """Return the work of the monitor in an update, as a mean over the updates, by part.

    One rank forms S, and computes its exact diameter or else bounds on it. All ranks share the panel, and each forms S
    for it if it has not.
    """
    searches = 1 / r.diameter_every if r.diameter_every else 0.0
    panels = 1 / r.perturbation_every if r.perturbation_every else 0.0
    forms = forming_work(r)
    return {
        "forming S": _cost(device, 1.0, *forms),
        "bracket": _cost(device, 1 - searches, *bracket_work(r)),
        "exact search, typical": _cost(device, searches, *_search_work(r)),
        "panel": _panel_cost(r, device, panels, *forms),
    }


def _cost(device: Device, share: float, flops: float, traffic: float, calls: float) -> MonitorCost:
    """Return the cost of fp32 work on one rank that a fraction of the updates does."""
    return MonitorCost(share * flops, share * traffic, share * device.seconds(flops, traffic, calls))


def panel_memory(r: Recipe) -> int:
    """Return the bytes of the states of a rank's share, and of the rows of text that contain them."""
    if not r.perturbation_every:
        return 0
    return max(FP32 * size * r.width + 2 * INT64 * rows * r.context for size, rows in panel_shares(r))


def forming_work(r: Recipe) -> tuple[float, float, float]:
    """Return FLOPs, bytes and calls of forming S: RowNorm's norms and a product, or AdamW's five operations."""
    entries = r.vocab_size * r.width
    return (3 * entries, 3 * FP32 * entries, 5) if r.head == "rownorm" else (5 * entries, 11 * FP32 * entries, 5)


def bracket_work(r: Recipe) -> tuple[float, float, float]:
    """Return those of the bounds: two passes that centre rows and take norms, and 16 rows against a sample of 2,048."""
    entries = r.vocab_size * r.width
    chunks = math.ceil(r.vocab_size / max(64, SURVEY_BYTES // (3 * FP32 * r.width)))
    flops = 2 * 3 * entries + 2 * 16 * min(2048, r.vocab_size) * r.width
    return flops, 2 * 3 * FP32 * entries, 2 * SURVEY_CALLS * chunks + BRACKET_CALLS


def _search_work(r: Recipe) -> tuple[float, float, float]:
    """Return those of the exact search, the norms of S and of the gradient, and the gradient's sum."""
    entries = r.vocab_size * r.width
    flops, reads = SEARCH_FLOPS[r.head] + 5, SEARCH_READS[r.head] + 3
    return flops * entries, reads * FP32 * entries, SEARCH_CALLS[r.head]


def _panel_cost(r: Recipe, device: Device, share: float, *forming: float) -> MonitorCost:
    """Return the cost of the panel: a forward pass of its rows, S on every rank, and their product in full."""
    entries, shares = r.vocab_size * r.width, panel_shares(r)
    known = bool(r.diameter_every) and r.perturbation_every % r.diameter_every == 0  # the search has formed S already
    active = sum(size > 0 for size, _ in shares)
    flops = traffic = longest = 0.0
    for size, rows in shares:
        if not size:
            continue
        forward = forward_flops(r.model, rows, head=False)
        product = 2.0 * size * entries, FP32 * (5.0 * entries + 3.0 * size * r.vocab_size), _stream_calls(r, size)
        flops += forward + product[0]
        traffic += product[1]
        longest = max(longest, forward / device.decoder_speed(bf16=r.autocast) + device.seconds(*product))
    copies = active - known  # of S, that are formed for the panel alone
    seconds = longest + (device.seconds(*forming) if copies else 0.0)
    return MonitorCost(share * (flops + copies * forming[0]), share * (traffic + copies * forming[1]), share * seconds)


def _stream_calls(r: Recipe, size: int) -> float:
    return STREAM_CALLS * math.ceil(r.vocab_size / STREAM_ROWS) * math.ceil(size / 2048)


def panel_shares(r: Recipe) -> list[tuple[int, int]]:
    """Return for each rank its number of positions, and the number of rows of text that it runs for them."""
    bounds = [r.panel_size * rank // r.world for rank in range(r.world + 1)]
    shares = []
    for start, stop in pairwise(bounds):
        first = 0 if r.panel == "paper" else start % r.context  # in the paper each rank begins with a new row
        shares.append((stop - start, math.ceil((first + stop - start) / r.context) if stop > start else 0))
    return shares

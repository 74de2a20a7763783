"""A run on paper: parameters, memory, FLOPs, what the monitor adds, and hours, from formulas and before anything runs.

A multiply-add counts as two FLOPs. Of the decoder and of Newton-Schulz matrix products are counted, of the monitor also
the passes over the increment. Memory is what PyTorch holds at the end of a forward pass and what a loss adds to it. Not
counted are gradients of activations, the chunk-wise sum of the head's gradient, Muon's gathered results (they come when
activations have gone), workspaces of kernels and of NCCL, and what an allocator wastes; `torch.compile` may hold less.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from .model import DecoderConfig
from .recipes import Head, Recipe

NEWTON_SCHULZ_STEPS = 5
FP32, BF16, INT64 = 4, 2, 8  # bytes

SEARCH_FLOPS: dict[Head, float] = {"adamw": 42.9, "rownorm": 72.8}
SEARCH_READS: dict[Head, float] = {"adamw": 7.3, "rownorm": 10.5}
SEARCH_CALLS: dict[Head, int] = {"adamw": 613, "rownorm": 877}
"""A typical exact search: FLOPs of products by V d, bytes moved by those of S, and calls of torch.

Counted, as means, on three increments that the bench makes by forty steps of training a softmax head, at V = 50,257 and
d = 256, 512 and 1024. FLOPs ranged from 41 to 46 and from 62 to 91, calls from 473 to 769 and from 655 to 1,208. Not of
the paper's runs, and no bound: an increment that nothing can be dropped of costs V^2 d.
"""

BRACKET_CALLS = 77  # beside those of its passes
SURVEY_BYTES, SURVEY_CALLS = 2**22, 3  # rows that a pass over S takes at a time, with room for three copies; calls each
STREAM_ROWS, STREAM_CALLS = 512, 8  # the same of the product with a panel


@dataclass(frozen=True, slots=True)
class Device:
    """What hours are computed with: printed figures of a device, and how much of them a run is assumed to reach."""

    name: str = "H200"
    bf16: float = 989e12
    """Dense FLOP/s."""
    fp32: float = 67e12
    """FLOP/s without TF32, which Newton-Schulz and the monitor keep out."""
    bandwidth: float = 4.8e12
    """Bytes of memory a second."""
    utilisation: float = 0.4
    """Of all three."""
    call: float = 10e-6
    """Seconds that a call of torch takes at least."""


@dataclass(frozen=True, slots=True)
class MonitorCost:
    """Work of the monitor in an update, as a mean over the updates."""

    flops: float = 0.0
    """Of all ranks."""
    bytes: float = 0.0
    """That all ranks move, as if there were no cache."""
    seconds: float = 0.0
    """Of the rank that has most to do, the others waiting for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a recipe comes to. Parts of a whole are dicts, in the order in which they are shown."""

    size: str
    head: Head
    precision: str
    devices: int
    nodes: int
    parameters: dict[str, int]
    """By role: embedding, matrices, head."""
    updates: int
    tokens: int
    tokens_per_update: int
    micro_batch: int
    accumulation: int
    memory: dict[str, int]
    """Bytes of a rank."""
    flops: dict[str, int]
    """Of one update, all ranks together."""
    validation_flops: int
    """Of all ranks, as a mean over updates."""
    newton_schulz: dict[str, int]
    """FLOPs of one update on all ranks: replicated, shared, and of the busiest rank as the code runs it."""
    monitor: dict[str, MonitorCost]
    seconds: dict[str, float]
    """Of one update."""
    device: Device = field(default_factory=Device)

    @property
    def update_flops(self) -> int:
        """FLOPs of one update on all ranks, validation and monitor left out."""
        return sum(self.flops.values())

    @property
    def monitor_share(self) -> dict[str, float]:
        """What the monitor adds to an update: by FLOPs, and by assumed seconds."""
        seconds, flops = self.seconds["monitor"], sum(cost.flops for cost in self.monitor.values())
        return {"flops": flops / self.update_flops, "seconds": seconds / (sum(self.seconds.values()) - seconds)}

    @property
    def newton_schulz_share(self) -> dict[str, float]:
        """FLOPs of Newton-Schulz by those of forward and backward, replicated and shared."""
        rest = self.update_flops - self.flops["newton-schulz"]
        return {name: self.newton_schulz[name] / rest for name in ("replicated", "shared")}

    @property
    def hours(self) -> float:
        """Of the run, at the assumed speed."""
        return self.updates * sum(self.seconds.values()) / 3600

    def as_dict(self) -> dict[str, Any]:
        """Plain types, with what follows from them."""
        return {
            **asdict(self),
            "update_flops": self.update_flops,
            "monitor_share": self.monitor_share,
            "newton_schulz_share": self.newton_schulz_share,
            "hours": self.hours,
            "device_hours": self.hours * self.devices * self.nodes,
        }


def plan(recipe: Recipe, device: Device | None = None) -> Plan:
    """Project a run.

    Args:
        recipe: any; what it leaves open is filled in.
        device: what hours are computed with; an H200 at 40 % by default.
    """
    r, device = recipe.resolved, device or Device()
    assert r.updates is not None
    polar = newton_schulz(r.model, r.world)
    monitor = monitor_costs(r, device)
    flops = decoder_flops(r.model, r.global_batch, chunked=r.loss_chunk is not None)
    flops["newton-schulz"] = polar["shared"]
    checked = validation_flops(r)
    return Plan(
        size=r.size,
        head=r.head,
        precision=r.precision,
        devices=r.devices,
        nodes=r.nodes,
        parameters=parameters(r.model),
        updates=r.updates,
        tokens=r.updates * r.tokens_per_update,
        tokens_per_update=r.tokens_per_update,
        micro_batch=r.micro_batch,
        accumulation=r.accumulation,
        memory=memory(r),
        flops=flops,
        validation_flops=checked,
        newton_schulz=polar,
        monitor=monitor,
        seconds=_seconds(r, flops, polar["busiest"], checked, monitor, device),
        device=device,
    )


def parameters(config: DecoderConfig) -> dict[str, int]:
    """Number of parameters by role."""
    tokens = config.vocab_size * config.width
    return {"embedding": tokens, "matrices": sum(m * n for m, n in _matrices(config)), "head": tokens}


def _matrices(config: DecoderConfig) -> Iterator[tuple[int, int]]:
    """Shapes of what Muon moves."""
    d, inner = config.width, config.mlp_ratio * config.width
    for _ in range(config.blocks):
        yield from [(d, d)] * 4 + [(inner, d)] * 2 + [(d, inner)]


# Memory


def memory(r: Recipe) -> dict[str, int]:
    """Bytes of one rank, by part."""
    count = parameters(r.model)
    total, bf16 = sum(count.values()), _autocast(r)
    positions = r.micro_batch * r.context
    chunk = positions if r.loss_chunk is None else min(r.loss_chunk, positions)
    return {
        "parameters": FP32 * total,
        "gradients": FP32 * total,
        **{f"optimizer: {name}": size for name, size in optimizer_state(r).items()},
        "gradient buckets of DDP": FP32 * total if r.world > 1 else 0,
        "bf16 copies of weights": BF16 * (count["matrices"] + count["head"]) if bf16 else 0,
        "activations of a micro-batch": activations(
            r.model, r.micro_batch, bf16=bf16, chunked=r.loss_chunk is not None
        ),
        "logits of a loss chunk": 3 * FP32 * chunk * r.vocab_size,  # log-probabilities, their gradient, the logits'
        "monitor: increment": FP32 * count["head"],
        "monitor: panel": _panel_memory(r),
    }


def optimizer_state(r: Recipe) -> dict[str, int]:
    """Bytes of state by optimizer: Muon and RowNorm have one buffer, AdamW two and a count for each tensor."""
    count, adamw = parameters(r.model), r.head == "adamw"
    state = {"Muon": FP32 * count["matrices"]}
    state["AdamW"] = sum(2 * FP32 * count[role] + FP32 for role in ("embedding", "head")[: 1 + adamw])
    return state if adamw else {**state, "RowNorm": FP32 * count["head"]}


def activations(config: DecoderConfig, sequences: int, *, bf16: bool, chunked: bool) -> int:
    """Bytes that a forward pass keeps for its backward pass, up to what the head is given, and targets.

    A block keeps, of d entries a position: both inputs of norms (the stream, fp32); queries and keys before their norm
    (fp32) and after their rotation; values; what attention mixed, as the kernel left it and in order; the input of q, k
    and v; that of gate and up; and of 4 d entries gate, its SiLU, up and their product. Autocast casts the input of a
    product anew for each, so that two inputs become five. One number a row is kept of each norm, and one a head of
    attention. The ends keep the last norm's input in fp32, what the loss is given of its output, tokens and targets.
    """
    d, inner, heads = config.width, config.mlp_ratio * config.width, config.width // config.head_dim
    wide, inputs, small = (4, 5, BF16) if bf16 else (4, 2, FP32)
    block = wide * FP32 * d + (5 + inputs) * small * d + 4 * small * inner + FP32 * (2 + 3 * heads)
    ends = FP32 * d + (FP32 if chunked else small) * d + FP32 + 2 * INT64
    return sequences * config.context * (config.blocks * block + ends)


def _panel_memory(r: Recipe) -> int:
    """States of a rank's share, and the rows of text they stand in."""
    if not r.perturbation_every:
        return 0
    return max(FP32 * size * r.width + 2 * INT64 * rows * r.context for size, rows in _panel_shares(r))


def _autocast(r: Recipe) -> bool:
    return r.precision == "bf16-mixed"


# FLOPs of training


def decoder_flops(config: DecoderConfig, sequences: int, *, chunked: bool) -> dict[str, int]:
    """FLOPs of forward and backward: each product is one forward and two backward.

    Attention has two products forward and five backward, as a flash kernel forms its scores again, over the T (T + 1)/2
    pairs of positions that a causal mask leaves.
    """
    n, count = sequences * config.context, parameters(config)
    return {
        "matrices": 6 * count["matrices"] * n,
        "attention": 7 * _attention_product(config, sequences),
        "head": 6 * count["head"] * n,
        "head again, for a chunked loss": 2 * count["head"] * n if chunked else 0,
    }


def forward_flops(config: DecoderConfig, sequences: int, *, head: bool) -> int:
    """FLOPs of a forward pass alone, with or without its logits."""
    count = parameters(config)
    weights = count["matrices"] + (count["head"] if head else 0)
    return 2 * weights * sequences * config.context + 2 * _attention_product(config, sequences)


def _attention_product(config: DecoderConfig, sequences: int) -> int:
    """FLOPs of one product of causal attention in all blocks."""
    pairs = config.context * (config.context + 1) // 2
    return 2 * pairs * config.width * config.blocks * sequences


def validation_flops(r: Recipe) -> int:
    """FLOPs of validation by update."""
    sequences = r.validation_tokens // r.context
    return forward_flops(r.model, sequences, head=True) // r.validation_every


def newton_schulz(config: DecoderConfig, world: int) -> dict[str, int]:
    """FLOPs of one update's Newton-Schulz on all ranks if every rank did all of it, or shared; and of the busiest."""
    work = {shape: (count, newton_schulz_flops(*shape)) for shape, count in Counter(_matrices(config)).items()}
    once = sum(count * each for count, each in work.values())
    busiest = sum(math.ceil(count / world) * each for count, each in work.values())
    return {"replicated": once * world, "shared": once, "busiest": busiest}


def newton_schulz_flops(rows: int, columns: int, steps: int = NEWTON_SCHULZ_STEPS) -> int:
    """FLOPs for one matrix: the plain loop, or, at least twice as wide as high, three steps at a time on A = X X'."""
    m, n = sorted((rows, columns))
    wide, square = 2 * m * m * n, 2 * m**3
    if n < 2 * m:
        return steps * (2 * wide + square)
    groups = [min(3, steps - done) for done in range(0, steps, 3)]
    return sum(2 * wide + (4 * k - 3) * square for k in groups)  # k squares of A, k - 1 of each other product


# The monitor


def monitor_costs(r: Recipe, device: Device) -> dict[str, MonitorCost]:
    """What the monitor does in an update, as a mean over updates, by part.

    One rank forms S, and brackets its diameter wherever it does not search for it; all ranks share the panel, and each
    forms S for it if it has not.
    """
    searches = 1 / r.diameter_every if r.diameter_every else 0.0
    panels = 1 / r.perturbation_every if r.perturbation_every else 0.0
    forms = _forming(r)
    return {
        "forming S": _cost(device, 1.0, *forms),
        "bracket": _cost(device, 1 - searches, *_bracketing(r)),
        "exact search, typical": _cost(device, searches, *_searching(r)),
        "panel": _panel_cost(r, device, panels, *forms),
    }


def _cost(device: Device, often: float, flops: float, moved: float, calls: float) -> MonitorCost:
    """MonitorCost of fp32 work on one rank that an update does so often."""
    return MonitorCost(often * flops, often * moved, often * _roofline(device, flops, moved, calls))


def _roofline(device: Device, flops: float, moved: float, calls: float) -> float:
    """Seconds of fp32 work: the longest of computing, moving and calling."""
    u = device.utilisation
    return max(flops / (u * device.fp32), moved / (u * device.bandwidth), calls * device.call)


def _forming(r: Recipe) -> tuple[float, float, float]:
    """FLOPs, bytes and calls: RowNorm's norms and one product; AdamW's five entrywise operations."""
    entries = r.vocab_size * r.width
    return (3 * entries, 3 * FP32 * entries, 5) if r.head == "rownorm" else (5 * entries, 11 * FP32 * entries, 5)


def _bracketing(r: Recipe) -> tuple[float, float, float]:
    """Two passes that centre rows and take their norms, and 16 rows against a sample of 2,048."""
    entries = r.vocab_size * r.width
    chunks = math.ceil(r.vocab_size / max(64, SURVEY_BYTES // (3 * FP32 * r.width)))
    flops = 2 * 3 * entries + 2 * 16 * min(2048, r.vocab_size) * r.width
    return flops, 2 * 3 * FP32 * entries, 2 * SURVEY_CALLS * chunks + BRACKET_CALLS


def _searching(r: Recipe) -> tuple[float, float, float]:
    """The search, and beside it the norms of S and of the gradient, and the gradient's sum."""
    entries = r.vocab_size * r.width
    flops, reads = SEARCH_FLOPS[r.head] + 5, SEARCH_READS[r.head] + 3
    return flops * entries, reads * FP32 * entries, SEARCH_CALLS[r.head]


def _panel_cost(r: Recipe, device: Device, often: float, *forming: float) -> MonitorCost:
    """Forward of the rows that positions stand in, S on every rank, and its product with the states, in full."""
    entries, shares = r.vocab_size * r.width, _panel_shares(r)
    known = bool(r.diameter_every) and r.perturbation_every % r.diameter_every == 0  # S of a step that was searched
    active = sum(size > 0 for size, _ in shares)
    flops = moved = longest = 0.0
    for size, rows in shares:
        if not size:
            continue
        forward = forward_flops(r.model, rows, head=False)
        product = 2.0 * size * entries, FP32 * (5.0 * entries + 3.0 * size * r.vocab_size), _stream_calls(r, size)
        flops += forward + product[0]
        moved += product[1]
        longest = max(longest, forward / _speed(r, device) + _roofline(device, *product))
    formed = active - known
    seconds = longest + (_roofline(device, *forming) if formed else 0.0)
    return MonitorCost(often * (flops + formed * forming[0]), often * (moved + formed * forming[1]), often * seconds)


def _stream_calls(r: Recipe, size: int) -> float:
    return STREAM_CALLS * math.ceil(r.vocab_size / STREAM_ROWS) * math.ceil(size / 2048)


def _panel_shares(r: Recipe) -> list[tuple[int, int]]:
    """For each rank its positions, and the rows of text that it runs for them."""
    bounds = [r.panel_size * rank // r.world for rank in range(r.world + 1)]
    shares = []
    for start, stop in pairwise(bounds):
        first = 0 if r.panel == "paper" else start % r.context  # the paper's ranks begin each with a row of their own
        shares.append((stop - start, math.ceil((first + stop - start) / r.context) if stop > start else 0))
    return shares


# Time


def _speed(r: Recipe, device: Device) -> float:
    """FLOP/s that the decoder is assumed to run at."""
    return device.utilisation * (device.bf16 if _autocast(r) else device.fp32)


def _seconds(
    r: Recipe, flops: dict[str, int], polar: int, checked: int, monitor: dict[str, MonitorCost], device: Device
) -> dict[str, float]:
    """Seconds of an update: Newton-Schulz is fp32 work, on each rank its share."""
    trained, ranks = sum(flops.values()) - flops["newton-schulz"], r.world * _speed(r, device)
    return {
        "forward and backward": trained / ranks,
        "newton-schulz": polar / (device.utilisation * device.fp32),
        "validation": checked / ranks,
        "monitor": sum(cost.seconds for cost in monitor.values()),
    }

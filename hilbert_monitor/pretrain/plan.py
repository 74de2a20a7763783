"""A run on paper, before anything runs: parameters, memory, FLOPs, the cost of the monitor, and hours.

A multiply-add counts as two FLOPs. For the decoder and for Newton-Schulz only matrix products count; for the monitor
the passes over the increment count too. Memory is what PyTorch holds at the end of a forward pass, plus what the loss
adds. It leaves out gradients of activations, the chunk-wise sum of the head's gradient, Muon's gathered results (they
come when the activations are gone), workspaces of kernels and of NCCL, and what the allocator wastes. `torch.compile`
may hold less.
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
"""A typical exact search: FLOPs of products over V d, bytes moved over those of S, and calls of torch.

They are means over three synthetic increments of the bench, at V = 50,257 and d = 256, 512 and 1024. FLOPs ranged from
41 to 46 and from 62 to 91, calls from 473 to 769 and from 655 to 1,208. They are not from the paper's runs, and no
bound: an increment of which no pair can be ruled out costs V^2 d.
"""

BRACKET_CALLS = 77  # beside those of its passes
SURVEY_BYTES, SURVEY_CALLS = 2**22, 3  # rows that a pass over S takes at a time, with room for three copies; calls each
STREAM_ROWS, STREAM_CALLS = 512, 8  # the same of the product with a panel


@dataclass(frozen=True, slots=True)
class Device:
    """A device's data sheet, and the fraction of it that a run is assumed to reach; hours follow from these."""

    name: str = "H200"
    bf16: float = 989e12
    """Dense bf16 FLOP/s."""
    fp32: float = 67e12
    """FLOP/s without TF32, which Newton-Schulz and the monitor do not use."""
    bandwidth: float = 4.8e12
    """Bytes of memory per second."""
    utilisation: float = 0.4
    """Fraction of all three that a run reaches."""
    call: float = 10e-6
    """Least seconds of a call of torch."""


@dataclass(frozen=True, slots=True)
class MonitorCost:
    """Work of one part of the monitor in an update, as a mean over the updates."""

    flops: float = 0.0
    """FLOPs of all ranks."""
    bytes: float = 0.0
    """Bytes that all ranks move, as if there were no cache."""
    seconds: float = 0.0
    """Seconds of the busiest rank, for which the others wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a recipe takes. Parts of a whole are dicts, in the order in which they are printed."""

    size: str
    head: Head
    precision: str
    devices: int
    nodes: int
    parameters: dict[str, int]
    """Parameters by role: embedding, matrices, head."""
    updates: int
    tokens: int
    tokens_per_update: int
    micro_batch: int
    accumulation: int
    memory: dict[str, int]
    """Bytes of one rank, by part."""
    flops: dict[str, int]
    """FLOPs of one update over all ranks, by part."""
    validation_flops: int
    """FLOPs of all ranks, as a mean over the updates."""
    newton_schulz: dict[str, int]
    """FLOPs of one update: over all ranks if each did everything, over all ranks when shared, and of the busiest."""
    monitor: dict[str, MonitorCost]
    seconds: dict[str, float]
    """Seconds of one update, by part."""
    device: Device = field(default_factory=Device)

    @property
    def update_flops(self) -> int:
        """FLOPs of one update over all ranks, without validation and monitor."""
        return sum(self.flops.values())

    @property
    def monitor_share(self) -> dict[str, float]:
        """Fraction that the monitor adds to an update, by FLOPs and by assumed seconds."""
        seconds, flops = self.seconds["monitor"], sum(cost.flops for cost in self.monitor.values())
        return {"flops": flops / self.update_flops, "seconds": seconds / (sum(self.seconds.values()) - seconds)}

    @property
    def newton_schulz_share(self) -> dict[str, float]:
        """FLOPs of Newton-Schulz as a fraction of forward and backward, replicated and shared."""
        rest = self.update_flops - self.flops["newton-schulz"]
        return {name: self.newton_schulz[name] / rest for name in ("replicated", "shared")}

    @property
    def hours(self) -> float:
        """Hours of the run at the assumed speed."""
        return self.updates * sum(self.seconds.values()) / 3600

    def as_dict(self) -> dict[str, Any]:
        """Plain types, for JSON, with the numbers that follow from them."""
        return {
            **asdict(self),
            "update_flops": self.update_flops,
            "monitor_share": self.monitor_share,
            "newton_schulz_share": self.newton_schulz_share,
            "hours": self.hours,
            "device_hours": self.hours * self.devices * self.nodes,
        }


def plan(recipe: Recipe, device: Device | None = None) -> Plan:
    """Compute what a run takes.

    Args:
        recipe: the run; it need not be resolved.
        device: the device that hours are computed for; by default an H200 at 40 %.
    """
    r, device = recipe.resolved, device or Device()
    assert r.updates is not None
    orthogonalisation = newton_schulz(r.model, r.world)
    monitor = monitor_costs(r, device)
    flops = decoder_flops(r.model, r.global_batch, chunked=r.loss_chunk is not None)
    flops["newton-schulz"] = orthogonalisation["shared"]
    validation = validation_flops(r)
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
        validation_flops=validation,
        newton_schulz=orthogonalisation,
        monitor=monitor,
        seconds=_seconds(r, flops, orthogonalisation["busiest"], validation, monitor, device),
        device=device,
    )


def parameters(config: DecoderConfig) -> dict[str, int]:
    """Return the number of parameters by role."""
    tokens = config.vocab_size * config.width
    return {"embedding": tokens, "matrices": sum(m * n for m, n in _matrices(config)), "head": tokens}


def _matrices(config: DecoderConfig) -> Iterator[tuple[int, int]]:
    """Yield the shapes of the matrices that Muon trains."""
    d, inner = config.width, config.mlp_ratio * config.width
    for _ in range(config.blocks):
        yield from [(d, d)] * 4 + [(inner, d)] * 2 + [(d, inner)]


# Memory


def memory(r: Recipe) -> dict[str, int]:
    """Return the bytes of one rank, by part."""
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
    """Return the bytes of state by optimizer: Muon and RowNorm have one buffer, AdamW two and a count per tensor."""
    count, adamw = parameters(r.model), r.head == "adamw"
    state = {"Muon": FP32 * count["matrices"]}
    state["AdamW"] = sum(2 * FP32 * count[role] + FP32 for role in ("embedding", "head")[: 1 + adamw])
    return state if adamw else {**state, "RowNorm": FP32 * count["head"]}


def activations(config: DecoderConfig, sequences: int, *, bf16: bool, chunked: bool) -> int:
    """Return the bytes that a forward pass keeps for its backward pass, up to the input of the head, and targets.

    For each position a block keeps these vectors of d entries: the two inputs of norms (the stream, fp32); queries and
    keys before their norm (fp32) and after their rotation; values; the output of attention, as the kernel left it and
    in order; the input of q, k and v; the input of gate and up. Of 4 d entries it keeps gate, its SiLU, up and their
    product. Autocast casts the input anew for each product, so that two inputs become five. Each norm keeps one number
    per row, and attention one per head. Outside the blocks there are the last norm's input in fp32, its output as the
    loss gets it, tokens and targets.
    """
    d, inner, heads = config.width, config.mlp_ratio * config.width, config.width // config.head_dim
    wide, inputs, small = (4, 5, BF16) if bf16 else (4, 2, FP32)
    block = wide * FP32 * d + (5 + inputs) * small * d + 4 * small * inner + FP32 * (2 + 3 * heads)
    ends = FP32 * d + (FP32 if chunked else small) * d + FP32 + 2 * INT64
    return sequences * config.context * (config.blocks * block + ends)


def _panel_memory(r: Recipe) -> int:
    """Return the bytes of the states of a rank's share, and of the rows of text that contain them."""
    if not r.perturbation_every:
        return 0
    return max(FP32 * size * r.width + 2 * INT64 * rows * r.context for size, rows in _panel_shares(r))


def _autocast(r: Recipe) -> bool:
    return r.precision == "bf16-mixed"


# FLOPs of training


def decoder_flops(config: DecoderConfig, sequences: int, *, chunked: bool) -> dict[str, int]:
    """Return the FLOPs of forward and backward: each product forward needs two backward.

    Attention has two products forward and five backward, because a flash kernel computes its scores again, over the
    T (T + 1)/2 pairs of positions that a causal mask leaves.
    """
    n, count = sequences * config.context, parameters(config)
    return {
        "matrices": 6 * count["matrices"] * n,
        "attention": 7 * _attention_product(config, sequences),
        "head": 6 * count["head"] * n,
        "head again, for a chunked loss": 2 * count["head"] * n if chunked else 0,
    }


def forward_flops(config: DecoderConfig, sequences: int, *, head: bool) -> int:
    """Return the FLOPs of a forward pass alone, with or without the logits."""
    count = parameters(config)
    weights = count["matrices"] + (count["head"] if head else 0)
    return 2 * weights * sequences * config.context + 2 * _attention_product(config, sequences)


def _attention_product(config: DecoderConfig, sequences: int) -> int:
    """Return the FLOPs of one product of causal attention in all blocks."""
    pairs = config.context * (config.context + 1) // 2
    return 2 * pairs * config.width * config.blocks * sequences


def validation_flops(r: Recipe) -> int:
    """Return the FLOPs of validation, as a mean over the updates."""
    sequences = r.validation_tokens // r.context
    return forward_flops(r.model, sequences, head=True) // r.validation_every


def newton_schulz(config: DecoderConfig, world: int) -> dict[str, int]:
    """Return the FLOPs of one update's Newton-Schulz: replicated on every rank, shared, and of the busiest rank."""
    work = {shape: (count, newton_schulz_flops(*shape)) for shape, count in Counter(_matrices(config)).items()}
    once = sum(count * each for count, each in work.values())
    busiest = sum(math.ceil(count / world) * each for count, each in work.values())
    return {"replicated": once * world, "shared": once, "busiest": busiest}


def newton_schulz_flops(rows: int, columns: int, steps: int = NEWTON_SCHULZ_STEPS) -> int:
    """Return the FLOPs for one matrix: by the plain loop or, if one side is twice the other, in threes on A = X X'."""
    m, n = sorted((rows, columns))
    wide, square = 2 * m * m * n, 2 * m**3
    if n < 2 * m:
        return steps * (2 * wide + square)
    groups = [min(3, steps - done) for done in range(0, steps, 3)]
    return sum(2 * wide + (4 * k - 3) * square for k in groups)  # k squares of A, k - 1 of each other product


# The monitor


def monitor_costs(r: Recipe, device: Device) -> dict[str, MonitorCost]:
    """Return the work of the monitor in an update, as a mean over the updates, by part.

    One rank forms S, and computes its exact diameter or else bounds on it. All ranks share the panel, and each forms S
    for it if it has not.
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


def _cost(device: Device, share: float, flops: float, traffic: float, calls: float) -> MonitorCost:
    """Return the cost of fp32 work on one rank that a fraction of the updates does."""
    return MonitorCost(share * flops, share * traffic, share * _roofline(device, flops, traffic, calls))


def _roofline(device: Device, flops: float, traffic: float, calls: float) -> float:
    """Return the seconds of fp32 work: the longest of computing, moving bytes and calling torch."""
    u = device.utilisation
    return max(flops / (u * device.fp32), traffic / (u * device.bandwidth), calls * device.call)


def _forming(r: Recipe) -> tuple[float, float, float]:
    """Return FLOPs, bytes and calls of forming S: RowNorm's norms and a product, or AdamW's five operations."""
    entries = r.vocab_size * r.width
    return (3 * entries, 3 * FP32 * entries, 5) if r.head == "rownorm" else (5 * entries, 11 * FP32 * entries, 5)


def _bracketing(r: Recipe) -> tuple[float, float, float]:
    """Return those of the bounds: two passes that centre rows and take norms, and 16 rows against a sample of 2,048."""
    entries = r.vocab_size * r.width
    chunks = math.ceil(r.vocab_size / max(64, SURVEY_BYTES // (3 * FP32 * r.width)))
    flops = 2 * 3 * entries + 2 * 16 * min(2048, r.vocab_size) * r.width
    return flops, 2 * 3 * FP32 * entries, 2 * SURVEY_CALLS * chunks + BRACKET_CALLS


def _searching(r: Recipe) -> tuple[float, float, float]:
    """Return those of the exact search, the norms of S and of the gradient, and the gradient's sum."""
    entries = r.vocab_size * r.width
    flops, reads = SEARCH_FLOPS[r.head] + 5, SEARCH_READS[r.head] + 3
    return flops * entries, reads * FP32 * entries, SEARCH_CALLS[r.head]


def _panel_cost(r: Recipe, device: Device, share: float, *forming: float) -> MonitorCost:
    """Return the cost of the panel: a forward pass of its rows, S on every rank, and their product in full."""
    entries, shares = r.vocab_size * r.width, _panel_shares(r)
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
        longest = max(longest, forward / _speed(r, device) + _roofline(device, *product))
    copies = active - known  # of S, that are formed for the panel alone
    seconds = longest + (_roofline(device, *forming) if copies else 0.0)
    return MonitorCost(share * (flops + copies * forming[0]), share * (traffic + copies * forming[1]), share * seconds)


def _stream_calls(r: Recipe, size: int) -> float:
    return STREAM_CALLS * math.ceil(r.vocab_size / STREAM_ROWS) * math.ceil(size / 2048)


def _panel_shares(r: Recipe) -> list[tuple[int, int]]:
    """Return for each rank its number of positions, and the number of rows of text that it runs for them."""
    bounds = [r.panel_size * rank // r.world for rank in range(r.world + 1)]
    shares = []
    for start, stop in pairwise(bounds):
        first = 0 if r.panel == "paper" else start % r.context  # in the paper each rank begins with a new row
        shares.append((stop - start, math.ceil((first + stop - start) / r.context) if stop > start else 0))
    return shares


# Time


def _speed(r: Recipe, device: Device) -> float:
    """Return the FLOP/s that the decoder is assumed to reach."""
    return device.utilisation * (device.bf16 if _autocast(r) else device.fp32)


def _seconds(
    r: Recipe,
    flops: dict[str, int],
    newton_schulz: int,
    validation: int,
    monitor: dict[str, MonitorCost],
    device: Device,
) -> dict[str, float]:
    """Return the seconds of an update by part. Newton-Schulz is fp32 work, of which the busiest rank counts."""
    training, ranks = sum(flops.values()) - flops["newton-schulz"], r.world * _speed(r, device)
    return {
        "forward and backward": training / ranks,
        "newton-schulz": newton_schulz / (device.utilisation * device.fp32),
        "validation": validation / ranks,
        "monitor": sum(cost.seconds for cost in monitor.values()),
    }

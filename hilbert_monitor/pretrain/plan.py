"""What a run takes, computed before it starts: parameters, memory, FLOPs, tokens, updates and hours.

A multiply-add counts as two FLOPs, and only matrix products count. Memory is what PyTorch holds at the end of a forward
pass, plus what the loss and the monitor add. It leaves out gradients of activations, workspaces of kernels and of NCCL,
and what the allocator wastes; `torch.compile` may hold less. Hours assume 40 % of the data sheet of an H200, and leave
out what ranks exchange and the monitor. Nobody has measured them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from rich.console import Console
from rich.table import Table

from .model import DecoderConfig
from .recipes import Recipe

FP32, BF16, INT64 = 4, 2, 8  # bytes
NEWTON_SCHULZ_STEPS = 5
DEVICE, BF16_SPEED, FP32_SPEED, UTILISATION = "H200", 989e12, 67e12, 0.4
"""Dense bf16 and fp32 FLOP/s of the data sheet (Newton-Schulz uses no TF32), and the share that a run reaches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a recipe takes. Parts of a whole are dicts, in the order in which they are printed."""

    recipe: Recipe
    parameters: dict[str, int]
    """Parameters by role: embedding, matrices, head."""
    updates: int
    tokens: int
    memory: dict[str, int]
    """Bytes of one rank, by part."""
    flops: dict[str, int]
    """FLOPs of one update over all ranks, by part; those of validation are a mean over the updates."""
    seconds: dict[str, float]
    """Assumed seconds of one update, by part."""

    @property
    def hours(self) -> float:
        """Assumed hours of the run."""
        return self.updates * sum(self.seconds.values()) / 3600

    def as_dict(self) -> dict[str, Any]:
        """Plain types, for JSON."""
        return {**asdict(self), "recipe": self.recipe.as_dict(), "hours": self.hours}


def plan(recipe: Recipe) -> Plan:
    """Compute what a run takes. The recipe need not be resolved."""
    r = recipe.resolved
    assert r.updates is not None
    decoder = decoder_flops(r.model, r.global_batch, chunked=r.loss_chunk is not None)
    validation = forward_flops(r.model, r.validation_tokens // r.context, head=True) // r.validation_every
    orthogonalization, busiest = newton_schulz(r.model, r.world)
    speed = r.world * UTILISATION * (BF16_SPEED if r.autocast else FP32_SPEED)
    return Plan(
        recipe=r,
        parameters=parameters(r.model),
        updates=r.updates,
        tokens=r.updates * r.tokens_per_update,
        memory=memory(r),
        flops={**decoder, "Newton-Schulz": orthogonalization, "validation": validation},
        seconds={
            "forward and backward": sum(decoder.values()) / speed,
            "Newton-Schulz": busiest / (UTILISATION * FP32_SPEED),
            "validation": validation / speed,
        },
    )


def parameters(config: DecoderConfig) -> dict[str, int]:
    """Return the number of parameters by role."""
    tokens = config.vocab_size * config.width
    return {"embedding": tokens, "matrices": sum(m * n for m, n in matrices(config)), "head": tokens}


def matrices(config: DecoderConfig) -> Iterator[tuple[int, int]]:
    """Yield the shapes of the matrices that Muon trains."""
    d, inner = config.width, config.mlp_ratio * config.width
    for _ in range(config.blocks):
        yield from [(d, d)] * 4 + [(inner, d)] * 2 + [(d, inner)]


# Memory


def memory(r: Recipe) -> dict[str, int]:
    """Return the bytes of one rank, by part."""
    count, ranks = parameters(r.model), r.tensor_parallel
    total, shards = sum(count.values()), r.world if r.sharded else 1
    positions = r.micro_batch * r.context
    chunk = positions if r.loss_chunk is None else min(r.loss_chunk, positions)
    block = count["matrices"] // r.blocks
    gathered = count["embedding"] + count["head"] + 2 * block + max(block, count["head"])  # with one unit's gradient
    head_rows = math.ceil(r.vocab_size / shards)  # under DDP rank zero measures all of them
    return {
        "parameters": FP32 * total // shards,
        "gradients": FP32 * total // shards,
        **{f"optimizer: {name}": size // shards for name, size in optimizer_state(r).items()},
        "gradient buckets of DDP": FP32 * total if r.world > 1 and not r.sharded else 0,
        "gathered units of FSDP": FP32 * gathered // ranks if r.sharded and r.readers > 1 else 0,
        "bf16 copies of weights": BF16 * (count["matrices"] + count["head"]) // ranks if r.autocast else 0,
        "activations of a micro-batch": activations(
            r.model, r.micro_batch, bf16=r.autocast, chunked=r.loss_chunk is not None, tensor_parallel=ranks
        ),
        "logits of a loss chunk": 3 * FP32 * chunk * -(-r.vocab_size // ranks),  # log-probabilities, two gradients
        "monitor: increment": FP32 * head_rows * r.width,
        "monitor: panel": FP32 * r.panel_size * r.width + 2 * INT64 * panel_rows(r) * r.context
        if r.perturbation_every
        else 0,
    }


def optimizer_state(r: Recipe) -> dict[str, int]:
    """Return the bytes of state by optimizer: Muon and RowNorm have one buffer, AdamW two and a count per tensor."""
    count, adamw = parameters(r.model), r.head == "adamw"
    state = {"Muon": FP32 * count["matrices"]}
    state["AdamW"] = sum(2 * FP32 * count[role] + FP32 for role in ("embedding", "head")[: 1 + adamw])
    return state if adamw else {**state, "RowNorm": FP32 * count["head"]}


def activations(config: DecoderConfig, sequences: int, *, bf16: bool, chunked: bool, tensor_parallel: int = 1) -> int:
    """Return the bytes that a forward pass keeps for its backward pass, up to the input of the head, and targets.

    For each position a block keeps these vectors of d entries: the two inputs of norms (the stream, fp32); queries and
    keys before their norm (fp32) and after their rotation; values; the output of attention, as the kernel left it and
    in order; the input of q, k and v; the input of gate and up. Of 4 d entries it keeps gate, its SiLU, up and their
    product. Autocast casts the input anew for each product, so that two inputs become five. Each norm keeps one number
    per row, and attention one per head. Outside the blocks there are the last norm's input in fp32, its output as the
    loss gets it, tokens and targets. Tensor-parallel ranks each have the stream and the inputs, and their part of the
    rest.
    """
    d, inner, heads = config.width, config.mlp_ratio * config.width, config.width // config.head_dim
    inputs, small = (5, BF16) if bf16 else (2, FP32)
    whole = 2 * FP32 * d + inputs * small * d + 2 * FP32
    block = whole + (2 * FP32 * d + 5 * small * d + 4 * small * inner + 3 * FP32 * heads) // tensor_parallel
    ends = FP32 * d + (FP32 if chunked else small) * d + FP32 + 2 * INT64
    return sequences * config.context * (config.blocks * block + ends)


def panel_rows(r: Recipe) -> int:
    """Return the number of rows of text that hold the panel; in the paper each reader begins a new one."""
    if r.panel != "paper":
        return math.ceil(r.panel_size / r.context)
    bounds = [r.panel_size * reader // r.readers for reader in range(r.readers + 1)]
    return sum(math.ceil((stop - start) / r.context) for start, stop in pairwise(bounds))


# FLOPs


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


def newton_schulz(config: DecoderConfig, world: int) -> tuple[int, int]:
    """Return the FLOPs of one update's Newton-Schulz: over all ranks, which share the matrices, and of the busiest."""
    work = [(count, newton_schulz_flops(*shape)) for shape, count in Counter(matrices(config)).items()]
    return sum(count * each for count, each in work), sum(math.ceil(count / world) * each for count, each in work)


def newton_schulz_flops(rows: int, columns: int, steps: int = NEWTON_SCHULZ_STEPS) -> int:
    """Return the FLOPs for one matrix: by the plain loop or, if one side is twice the other, in threes on A = X X'."""
    m, n = sorted((rows, columns))
    wide, square = 2 * m * m * n, 2 * m**3
    if n < 2 * m:
        return steps * (2 * wide + square)
    groups = [min(3, steps - done) for done in range(0, steps, 3)]
    return sum(2 * wide + (4 * k - 3) * square for k in groups)  # k squares of A, k - 1 of each other product


# Print


def show(plan: Plan, console: Console) -> None:
    """Print a plan: the run, the memory of a rank, and the FLOPs of an update."""
    r = plan.recipe
    title = f"{r.size}, {r.head} head, {r.precision}: {r.nodes} x {r.devices} {DEVICE}, {r.strategy}"
    run = {f"parameters: {role}": f"{count:,}" for role, count in plan.parameters.items()}
    run |= {
        "parameters": f"{sum(plan.parameters.values()):,}",
        "updates": f"{plan.updates:,}",
        "tokens": f"{plan.tokens:,}",
        "tokens in an update": f"{r.tokens_per_update:,}",
        "micro-batches in an update": f"{r.accumulation} of {r.micro_batch} sequences",
        **{f"assumed time of an update: {name}": f"{part * 1e3:,.2f} ms" for name, part in plan.seconds.items()},
        "assumed hours": f"{plan.hours:,.3g}",
        "assumed device hours": f"{plan.hours * r.world:,.3g}",
    }
    memory = plan.memory | {"all": sum(plan.memory.values())}
    flops = plan.flops | {"all": sum(plan.flops.values())}
    console.print(
        _table(title, ("run", ""), run),
        _table("Memory of a rank", ("part", "GiB"), {k: f"{v / 2**30:,.4g}" for k, v in memory.items() if v}),
        _table("One update on all ranks", ("part", "TFLOP"), {k: f"{v / 1e12:,.4g}" for k, v in flops.items() if v}),
    )
    console.print(
        f"The hours are assumed; nobody has measured them. They assume {UTILISATION:.0%} of the data sheet of an"
        f" {DEVICE}: {BF16_SPEED / 1e12:.0f} TFLOP/s bf16, {FP32_SPEED / 1e12:.0f} fp32 without TF32 (Newton-Schulz)."
        " They leave out what ranks exchange, and the monitor. The memory leaves out workspaces and what the allocator"
        " wastes.",
        style="dim",
    )


def _table(title: str, columns: tuple[str, str], rows: dict[str, str]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(columns[0])
    table.add_column(columns[1], justify="right", no_wrap=True)
    for name, value in rows.items():
        table.add_row(name, value)
    return table

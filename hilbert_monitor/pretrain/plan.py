"""The costs of a run before it starts: parameters, memory, FLOPs, tokens, updates and hours.

A multiply-add counts as two FLOPs, and only matrix products count. Memory is what PyTorch holds at the end of a forward
pass, plus the loss and the monitor, without gradients of activations, workspaces of kernels and of NCCL, and the
allocator's waste. Hours assume 40 % of an H200's data sheet, without communication and the monitor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from .recipe import Recipe

FP32, BF16, INT64 = 4, 2, 8  # bytes
NEWTON_SCHULZ_STEPS = 5  # Muon's default
DEVICE, BF16_SPEED, FP32_SPEED, UTILIZATION = "H200", 989e12, 67e12, 0.4
"""Dense bf16 and fp32 FLOP/s of the data sheet (Newton-Schulz uses no TF32), and the assumed share of them."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Costs of a recipe. Parts of a whole are dicts in print order."""

    recipe: Recipe
    parameters: dict[str, int]
    memory: dict[str, int]
    """Bytes of one rank, by part."""
    flops: dict[str, int]
    """FLOPs of one update over all ranks, by part. Validation is a mean over the updates."""
    seconds: dict[str, float]
    """Assumed seconds of one update, by part."""

    @property
    def hours(self) -> float:
        """Assumed hours of the run."""
        return (self.recipe.updates or 0) * sum(self.seconds.values()) / 3600


def plan(recipe: Recipe) -> Plan:
    """Compute the costs of a recipe, without allocating its model."""
    r = recipe.resolved
    training, validation = training_flops(r), forward_flops(r, r.validation_tokens // r.context) // r.validation_every
    newton_schulz, busiest = newton_schulz_flops(r)
    speed = r.world * UTILIZATION * (BF16_SPEED if r.precision == "bf16-mixed" else FP32_SPEED)
    seconds = {
        "forward and backward": sum(training.values()) / speed,
        "Newton-Schulz": busiest / (UTILIZATION * FP32_SPEED),
        "validation": validation / speed,
    }
    flops = {**training, "Newton-Schulz": newton_schulz, "validation": validation}
    return Plan(r, parameters(r), memory(r), flops, seconds)


def parameters(r: Recipe) -> dict[str, int]:
    """Return the number of parameters by role."""
    tokens = r.vocab_size * r.width
    return {"embedding": tokens, "matrices": r.model.parameters - 2 * tokens, "head": tokens}


def memory(r: Recipe) -> dict[str, int]:
    """Return the bytes of one rank, by part."""
    count, ranks, bf16 = parameters(r), r.tensor_parallel, r.precision == "bf16-mixed"
    total, shards = sum(count.values()), r.world if r.sharded else 1
    chunk = min(r.loss_chunk or math.inf, r.micro_batch * r.context)
    block = count["matrices"] // r.blocks
    gathered = count["embedding"] + count["head"] + 2 * block + max(block, count["head"])  # with one unit's gradient
    return {
        "parameters": FP32 * total // shards,
        "gradients": FP32 * total // shards,
        **{f"optimizer: {name}": size // shards for name, size in optimizer_state(r).items()},
        "gradient buckets of DDP": FP32 * total if r.world > 1 and not r.sharded else 0,
        "gathered units of FSDP": FP32 * gathered // ranks if r.sharded and r.data_parallel > 1 else 0,
        "bf16 copies of weights": BF16 * (count["matrices"] + count["head"]) // ranks if bf16 else 0,
        "activations of a micro-batch": activations(r),
        "logits of a loss chunk": 3 * FP32 * int(chunk) * -(-r.vocab_size // ranks),  # log-probabilities, two gradients
        "monitor: increment": FP32 * math.ceil(r.vocab_size / shards) * r.width,  # under DDP rank zero measures all
        "monitor: panel": FP32 * r.panel_size * r.width if r.perturbation_every else 0,
    }


def optimizer_state(r: Recipe) -> dict[str, int]:
    """Return the bytes of state by optimizer: Muon and RowNorm have one buffer, AdamW two and a count per tensor."""
    count = parameters(r)
    adamw = sum(2 * FP32 * count[role] + FP32 for role in ("embedding", "head")[: 2 if r.head == "adamw" else 1])
    state = {"Muon": FP32 * count["matrices"], "AdamW": adamw}
    return state if r.head == "adamw" else {**state, "RowNorm": FP32 * count["head"]}


def activations(r: Recipe) -> int:
    """Return the bytes that the forward pass of a micro-batch keeps for its backward pass, without the logits.

    For each position a block keeps vectors of d entries: the inputs of its two norms (the residual stream, fp32);
    queries and keys before their norm (fp32) and after rotation; values; the output of attention twice, as computed and
    in order; the input of q, k and v, and that of gate and up, of which autocast makes five copies. Of 4 d entries it
    keeps gate, its SiLU, up and their product; of each norm one number, and of attention one per head. Tensor-parallel
    ranks split all but the stream and the two inputs.
    """
    d, inner, bf16 = r.width, r.model.mlp_ratio * r.width, r.precision == "bf16-mixed"
    inputs, small = (5, BF16) if bf16 else (2, FP32)
    whole = 2 * FP32 * d + inputs * small * d + 2 * FP32
    split = 2 * FP32 * d + 5 * small * d + 4 * small * inner + 3 * FP32 * (d // r.head_dim)
    ends = FP32 * d + (FP32 if r.loss_chunk else small) * d + FP32 + 2 * INT64  # the last norm, tokens and targets
    return r.micro_batch * r.context * (r.blocks * (whole + split // r.tensor_parallel) + ends)


def training_flops(r: Recipe) -> dict[str, int]:
    """Return the FLOPs of forward and backward of an update: each product forward needs two backward.

    Attention has two products forward and five backward, because a flash kernel recomputes its scores.
    """
    tokens, count = r.tokens_per_update, parameters(r)
    return {
        "matrices": 6 * count["matrices"] * tokens,
        "attention": 7 * _attention_product(r, r.global_batch),
        "head": 6 * count["head"] * tokens,
        "head again, for a chunked loss": 2 * count["head"] * tokens if r.loss_chunk else 0,
    }


def forward_flops(r: Recipe, sequences: int) -> int:
    """Return the FLOPs of a forward pass with logits."""
    weights = r.model.parameters - r.vocab_size * r.width
    return 2 * weights * sequences * r.context + 2 * _attention_product(r, sequences)


def _attention_product(r: Recipe, sequences: int) -> int:
    """Return the FLOPs of one product of attention in all blocks, over the pairs that a causal mask leaves."""
    pairs = r.context * (r.context + 1) // 2
    return 2 * pairs * r.width * r.blocks * sequences


def newton_schulz_flops(r: Recipe) -> tuple[int, int]:
    """Return the FLOPs of one update's Newton-Schulz: of all ranks, which share the matrices, and of the busiest.

    A wide matrix runs three steps at a time on A = X X', a square one the plain loop.
    """
    d, inner, steps = r.width, r.model.mlp_ratio * r.width, NEWTON_SCHULZ_STEPS
    total = busiest = 0
    for count, m, n in ((4 * r.blocks, d, d), (2 * r.blocks, inner, d), (r.blocks, d, inner)):
        m, n = sorted((m, n))
        wide, square = 2 * m * m * n, 2 * m**3
        if n < 2 * m:
            flops = steps * (2 * wide + square)
        else:  # k steps at a time take k squares of A and k - 1 of each other product
            flops = sum(2 * wide + (4 * min(3, steps - done) - 3) * square for done in range(0, steps, 3))
        total, busiest = total + count * flops, busiest + math.ceil(count / r.world) * flops
    return total, busiest


def show(plan: Plan, console: Console) -> None:
    """Print a plan: the run, the memory of a rank, and the FLOPs of an update."""
    r = plan.recipe
    run = {f"parameters: {role}": f"{count:,}" for role, count in plan.parameters.items()}
    run |= {
        "parameters": f"{sum(plan.parameters.values()):,}",
        "updates": f"{r.updates:,}",
        "tokens": f"{(r.updates or 0) * r.tokens_per_update:,}",
        "tokens in an update": f"{r.tokens_per_update:,}",
        "micro-batches in an update": f"{r.accumulation} of {r.micro_batch} sequences",
        **{f"assumed time of an update: {name}": f"{part * 1e3:,.2f} ms" for name, part in plan.seconds.items()},
        "assumed hours": f"{plan.hours:,.3g}",
        "assumed device hours": f"{plan.hours * r.world:,.3g}",
    }
    memory = plan.memory | {"all": sum(plan.memory.values())}
    flops = plan.flops | {"all": sum(plan.flops.values())}
    tables = {
        f"{r.size}, {r.head} head, {r.precision}: {r.nodes} x {r.devices} {DEVICE}, {r.strategy}": ("run", "", run),
        "Memory of a rank": ("part", "GiB", {k: f"{v / 2**30:,.4g}" for k, v in memory.items() if v}),
        "One update on all ranks": ("part", "TFLOP", {k: f"{v / 1e12:,.4g}" for k, v in flops.items() if v}),
    }
    for title, (name, unit, rows) in tables.items():
        table = Table(name, title=title, title_justify="left")
        table.add_column(unit, justify="right", no_wrap=True)
        for row in rows.items():
            table.add_row(*row)
        console.print(table)
    console.print(
        f"The hours are assumed, not measured: {UTILIZATION:.0%} of the data sheet of an {DEVICE},"
        f" {BF16_SPEED / 1e12:.0f} TFLOP/s bf16, {FP32_SPEED / 1e12:.0f} fp32 without TF32 (Newton-Schulz). They leave"
        " out communication and the monitor. The memory leaves out workspaces and what the allocator wastes.",
        style="dim",
    )

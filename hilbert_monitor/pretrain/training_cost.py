"""Training on paper: parameters, FLOPs, and bytes of state and activations of the decoder and its optimizers.

A multiply-add counts as two FLOPs, and only matrix products count.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from .model import DecoderConfig
from .recipes import Recipe

NEWTON_SCHULZ_STEPS = 5
FP32, BF16, INT64 = 4, 2, 8  # bytes


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


def validation_flops(r: Recipe) -> int:
    """Return the FLOPs of validation, as a mean over the updates."""
    sequences = r.validation_tokens // r.context
    return forward_flops(r.model, sequences, head=True) // r.validation_every


def newton_schulz(config: DecoderConfig, world: int) -> dict[str, int]:
    """Return the FLOPs of one update's Newton-Schulz: replicated on every rank, shared, and of the busiest rank."""
    work = {shape: (count, newton_schulz_flops(*shape)) for shape, count in Counter(matrices(config)).items()}
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

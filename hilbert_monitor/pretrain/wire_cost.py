"""The wire on paper: bytes that a rank sends in an update, for gradients, parameters, Muon and tensor parallelism.

Collectives are counted as a ring moves them: of n bytes on R ranks an all-gather or a reduce-scatter sends
n (R - 1) / R from each, an all-reduce twice that. It leaves out a few numbers here and there: the norm of the gradient,
losses, flags, and the sums of a vocabulary-parallel loss.
"""

from __future__ import annotations

import torch

from hilbert_monitor.optim._owners import balanced, work

from .recipes import Recipe
from .training_cost import BF16, FP32, matrices, newton_schulz_flops, parameters


def exchange(r: Recipe) -> dict[str, float]:
    """Return the bytes that a rank sends in an update, by part."""
    if r.world == 1:
        return {}
    muon = {"Muon": _muon_sharded(r) if r.sharded else _muon_shared(r)}
    if not r.sharded:
        return {"gradients": 2 * _ring(FP32 * sum(parameters(r.model).values()), r.world), **muon}
    return {**_fully_sharded(r), **muon, **(_tensor_parallel(r) if r.tensor_parallel > 1 else {})}


def _ring(size: float, ranks: int) -> float:
    return size * (ranks - 1) / ranks


def _fully_sharded(r: Recipe) -> dict[str, float]:
    """Return the bytes of FSDP2, in fp32 and for every micro-batch: the embedding stays gathered for its backward."""
    count = {role: FP32 * number / r.tensor_parallel for role, number in parameters(r.model).items()}
    everything = sum(count.values())
    return {
        "gradients": r.accumulation * _ring(everything, r.readers),
        "parameters, forward": r.accumulation * _ring(everything, r.readers),
        "parameters, backward": r.accumulation * _ring(everything - count["embedding"], r.readers),
    }


def _tensor_parallel(r: Recipe) -> dict[str, float]:
    """Return the bytes of the stream: out and down are sums over ranks, and so are the gradients of what q, k, v, gate,
    up and the head are given; the embedding is gathered."""
    ranks, product = r.tensor_parallel, BF16 if r.autocast else FP32
    stream = r.accumulation * r.micro_batch * r.context * r.width  # numbers
    return {
        "stream, forward": 2 * r.blocks * 2 * _ring(product * stream, ranks) + _ring(FP32 * stream, ranks),
        "stream, backward": (5 * r.blocks + 1) * 2 * _ring(product * stream, ranks),
    }


def _muon_shared(r: Recipe) -> float:
    """Return the bytes of gathering the results of all ranks, each of which has its share of every shape."""
    shapes = list(matrices(r.model))
    shares = {shape: -(-shapes.count(shape) // r.world) for shape in set(shapes)}
    return sum(FP32 * (r.world - 1) * share * (m * n + 1) for (m, n), share in shares.items())


def _muon_sharded(r: Recipe) -> float:
    """Return the bytes of the busiest rank: its shards to their owners, and the others' shards of what it owns."""
    sizes = [m * n for m, n in matrices(r.model)]
    owned = [0] * r.world
    for size, owner in zip(sizes, owners(r), strict=True):
        owned[owner] += size
    return FP32 * (_ring(sum(sizes) / r.world, r.world) + _ring(max(owned), r.world))


def owners(r: Recipe) -> list[int]:
    """Return the owner of each matrix of a sharded model, as Muon chooses it; all matrices in one bucket."""
    return balanced([work(torch.empty(shape, device="meta")) for shape in matrices(r.model)], r.world)


def busiest_owner(r: Recipe) -> int:
    """Return the FLOPs of Newton-Schulz of the rank that has most of them, where the model is sharded."""
    flops = [0] * r.world
    for shape, owner in zip(matrices(r.model), owners(r), strict=True):
        flops[owner] += newton_schulz_flops(*shape)
    return max(flops)

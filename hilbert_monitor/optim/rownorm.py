"""RowNorm: every token's row of the LM head moves by at most the learning rate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.linalg import vector_norm
from torch.optim.optimizer import ParamsT

from hilbert_monitor.geometry import RowSource, compute_dtype

from .base import Group, LastStep, MatrixOptimizer, check_choice, check_number, shrink_and_add
from .distributed import ShardLayout, local, local_gradient, shard_layout

CHUNK_BYTES = {"cpu": 4 * 2**20}
"""Size of a chunk of rows, in bytes: on a CPU it stays in the cache from one operation to the next.

Elsewhere 256 MiB, because a launch costs more than a second read. Tried and dropped on a CPU, at 50,257 x 512: sizes
found by trials at run time, a thread for each half of the rows, and torch.compile (8 times slower).
"""

SAFE_NORMS = 2.0**-45, 2.0**60
"""Norms of rows whose squares stay in the range of fp32."""


class RowNorm(MatrixOptimizer):
    """Practical projected RowNorm, the paper's optimizer of the LM head.

    With the gradient G_t of a (V, d) matrix, one row a token::

        B_t = momentum B_{t-1} + (1 - momentum) G_t                    the only buffer
        C_t = B_t / (1 - momentum^(t+1))                               bias correction
        S_t = -lr RN(C_t),    RN(C)_i = c_i / (|c_i| + eps)
        U_{t+1} = (1 - lr weight_decay) U_t + S_t

    Every row of S_t has norm at most lr, hence D(S_t) <= 2 lr (to fp32 rounding): a step changes no pairwise log-odds
    at a hidden state h by more than 2 lr |h|. For a head stored in bf16 or fp16 this is the intended step, which
    `increment` returns. The stored weights move by that plus rounding, which loses most of it where lr is far below
    their spacing.

    Cost: the step is in place. On a CPU it takes rows in chunks of 4 MiB and needs no scratch of the matrix's size.
    Elsewhere it takes up to seven kernels and 256 MiB of scratch, twice that for bf16 and fp16 matrices.

    A sharded matrix (a DTensor) is stepped shard by shard, with state in the same layout. Where rows are sharded, as by
    `fully_shard` and `ColwiseParallel`, a step needs no communication, and every row is equal to the bit to the row
    of the whole matrix. center="both" adds two all-reduces of d numbers. Where columns are sharded, a step needs one
    all-reduce of V squared norms.

    Args:
        params: matrices, or groups of them. A vector is refused.
        lr: largest norm of a row's step; a float or a tensor with one element.
        momentum: decay of the gradient's average, in [0, 1).
        eps: stabiliser of the row norms, at least 1e-15.
        weight_decay: decoupled: U shrinks by the factor 1 - lr weight_decay before S is added.
        center: "both" for the projected map P RN(P C) of the theory, where P subtracts the mean row; "none" for the
            paper's experiments. On a softmax head both give the same function: rows of its gradient sum to zero, and
            softmax does not see a common shift.
        maximize: ascend.
        rounding: of a head stored in bf16 or fp16: "nearest" as in torch's optimizers, or "compensated", which adds the
            rounding error of each step to the next one, from one more buffer in the head's dtype.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        momentum: float = 0.95,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        center: str = "none",
        maximize: bool = False,
        rounding: str = "nearest",
    ) -> None:
        numbers = {"lr": lr, "momentum": momentum, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**numbers, "center": center, "maximize": maximize, "rounding": rounding})

    def _check_group(self, group: Group) -> None:
        super()._check_group(group)
        check_number(group, "momentum", below=1)
        check_number(group, "eps", least=1e-15)
        check_choice(group, "center", ("none", "both"))

    def _step_group(self, params: list[Tensor], options: Group) -> None:
        shrink = 1 - options["lr"] * options["weight_decay"]
        for p in params:
            if p.grad is None:
                continue
            state = self.state[p]
            if "step" not in state:
                state["step"] = 0
                state["momentum_buffer"] = torch.zeros_like(p, dtype=compute_dtype(p))
            state["step"] += 1
            B, G, U, lost = local(state["momentum_buffer"]), local_gradient(p), local(p), self._lost(p, options)
            weight, chunks = 1 - options["momentum"], zip(cache_chunks(B), cache_chunks(G, B), strict=True)
            averages = (b.lerp_(g.to(b.dtype), weight) for b, g in chunks)  # B_t, in place
            steps = _steps(averages, len(p), shard_layout(p), state["step"], options)
            weights = cache_chunks(U, B)
            errors = [None] * len(weights) if lost is None else cache_chunks(lost, B)
            for u, e, (rows, scale) in zip(weights, errors, steps, strict=True):
                shrink_and_add(u, rows, scale=scale, shrink=shrink, lost=e)

    def _increment_rows(self, param: Tensor, last: LastStep) -> RowSource:
        B, step, layout = local(self.state[param]["momentum_buffer"]), self.state[param]["step"], shard_layout(param)

        def formed(averages: Iterable[Tensor]) -> list[Tensor]:
            return [rows * scale for rows, scale in _steps(averages, len(param), layout, step, last.options)]

        if last.options["center"] == "none" and not layout.columns:
            return RowSource(B, form=lambda b: formed([b])[0])
        return RowSource(torch.cat(formed(cache_chunks(B))))


def cache_chunks(A: Tensor, like: Tensor | None = None) -> tuple[Tensor, ...]:
    """Return views of consecutive rows of a matrix in chunks that fit the cache.

    The size of a row of `like` decides the length of a chunk, so that several matrices split alike.
    """
    like = A if like is None else like
    row_bytes = like[:1].numel() * like.element_size()
    return torch.split(A, max(1, CHUNK_BYTES.get(A.device.type, 256 * 2**20) // max(1, row_bytes)))


def _steps(
    averages: Iterable[Tensor], V: int, layout: ShardLayout, step: int, options: Group
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield chunks of -lr RN(C), or of -lr P RN(P C), as rows and factors (rows, 1) or (); the product is the step.

    `averages` are chunks of the buffer B, or of this rank's shard of it; the whole has V rows. With no statistics of
    the whole matrix the chunks are taken one after another, while each is in the cache.
    """
    lr = options["lr"] if options["maximize"] else -options["lr"]
    eps = options["eps"] * (1 - options["momentum"] ** step)  # lr b / (|b| + eps') is lr c / (|c| + eps)

    def direction(b: Tensor, norm: Tensor | None = None) -> tuple[Tensor, Tensor]:
        rows, length, stabiliser = _in_range(b, eps, norm)
        return rows, lr / (length + stabiliser)

    if options["center"] == "none" and not layout.columns:
        yield from map(direction, averages)
        return
    averages = list(averages)
    centred = options["center"] == "both"
    mean = _mean(averages, V, layout) if centred else averages[0].new_zeros(())
    norms = _norms_over_ranks((b - mean for b in averages), layout) if layout.columns else [None] * len(averages)

    def directions() -> Iterator[tuple[Tensor, Tensor]]:
        return (direction(b - mean, norm) for b, norm in zip(averages, norms, strict=True))

    shift = _mean((rows * scale for rows, scale in directions()), V, layout) if centred else mean
    for rows, scale in directions():
        yield (rows.mul_(scale).sub_(shift), rows.new_ones(())) if centred else (rows, scale)


def _in_range(b: Tensor, eps: float, norm: Tensor | None) -> tuple[Tensor, Tensor, float | Tensor]:
    """Return rows, their norms and eps, all three divided by a length for rows whose squares leave the range.

    b / (|b| + eps) is the same with or without the division. Norms far below eps do not matter. `norm` is (rows, 1) in
    fp64, of whole rows where `b` has some of their columns.
    """
    local_norm = vector_norm(b, dim=1, keepdim=True) if norm is None else norm
    smallest, largest = SAFE_NORMS
    outside = (local_norm > largest) | (local_norm < (smallest if eps < smallest else 0))
    if b.numel() == 0 or (b.device.type == "cpu" and not bool(outside.any())):  # elsewhere the check would synchronize
        return b, local_norm.to(b.dtype), eps
    info = torch.finfo(b.dtype)
    length = vector_norm(b, float("inf"), dim=1, keepdim=True) if norm is None else norm
    length = length.clamp(info.tiny, info.max).to(b.dtype).masked_fill_(~outside, 1)
    rows = b / length
    return rows, vector_norm(rows, dim=1, keepdim=True) if norm is None else (norm / length).to(b.dtype), eps / length


def _norms_over_ranks(chunks: Iterable[Tensor], layout: ShardLayout) -> tuple[Tensor, ...]:
    """Return the norms (rows, 1) of chunks of rows whose columns are on several ranks, in fp64: one all-reduce each."""
    squares = [vector_norm(b, dim=1, keepdim=True, dtype=torch.float64).square_() for b in chunks]
    total = torch.cat(squares)
    for group in layout.columns:
        dist.all_reduce(total, group=group)
    return torch.split(total.sqrt_(), [len(x) for x in squares])


def _mean(chunks: Iterable[Tensor], V: int, layout: ShardLayout) -> Tensor:
    """Return the mean row of all shards. Sums of chunks are added in fp64, where the device has fp64."""
    sums = [(b.sum(0), b.device.type) for b in chunks]
    total = torch.stack([x.to(torch.float32 if device == "mps" else torch.float64) for x, device in sums]).sum(0)
    for group in layout.rows:
        dist.all_reduce(total, group=group)
    return (total / V).to(sums[0][0].dtype)

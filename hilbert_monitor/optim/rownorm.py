"""RowNorm: every token's row of the LM head moves by at most the learning rate."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import repeat

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import ParamsT

from hilbert_monitor.geometry import compute_dtype

from ._chunks import ChunkTrials, cache_chunks
from ._hyperparameters import Group, check_choice, check_number
from ._layout import Layout, local, local_gradient
from ._matrix_optimizer import LastStep, MatrixOptimizer
from ._norms import in_range, norms_over_ranks, stable_norms
from ._rounding import shrink_and_add


class RowNorm(MatrixOptimizer):
    """Practical projected RowNorm, the paper's optimizer of the LM head.

    With the gradient G_t of a (V, d) matrix, one row a token::

        B_t = momentum B_{t-1} + (1 - momentum) G_t                    the only buffer
        C_t = B_t / (1 - momentum^(t+1))                               bias correction
        S_t = -lr RN(C_t),    RN(C)_i = c_i / (|c_i| + eps)
        U_{t+1} = (1 - lr weight_decay) U_t + S_t

    Every row of S_t has norm at most lr, hence D(S_t) <= 2 lr (to fp32 rounding): a step changes no pairwise log-odds
    at a hidden state h by more than 2 lr |h|. For a head stored in bf16 or fp16 this is the intended step, which
    `increment` returns. The stored weights move by that plus the rounding of U_{t+1}, so their step is bounded by 2 lr
    plus rounding. Where lr is far below the spacing of the weights, rounding to the nearest number loses most of the
    step. In 500 steps of softmax regression with a bf16 head (lr 3e-4, weights about 0.5), against the same run in
    fp64::

        rounding       distance to the fp64 weights, over their displacement    share of the fp64 run's fall of the loss
        nearest        0.98                                                     0.03
        compensated    0.05                                                     1.00
        an fp32 head   0.00                                                     1.00

    The step is in place. On a CPU it needs no scratch of the matrix's size: it takes rows in chunks, so that what one
    operation writes the next one finds in the cache. The first steps of a large matrix try sizes of chunks, and later
    ones take the fastest; to the bit, the result is the same with any. Elsewhere it takes five kernels over the matrix,
    six with weight decay, and up to 256 MiB of scratch, twice that for bf16 and fp16 matrices.

    A sharded matrix (a DTensor) is stepped shard by shard, with state laid out alike. Where rows are sharded, as
    `fully_shard` and `ColwiseParallel` do it, a step needs no communication at all, and every row is to the bit what it
    is in the whole matrix. center="both" adds two all-reduces of d numbers. Where columns are sharded, a step needs one
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
        rounding: of a head stored in bf16 or fp16; no other is rounded. "nearest" is what torch's optimizers do.
            "compensated" adds at each step what the steps before it lost, from one more buffer in the head's dtype.
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
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "eps": eps,
            "weight_decay": weight_decay,
            "center": center,
            "maximize": maximize,
            "rounding": rounding,
        }
        super().__init__(params, defaults)

    def _check_group(self, group: Group) -> None:
        super()._check_group(group)
        check_number(group, "momentum", below=1)
        check_number(group, "eps", least=1e-15)
        check_choice(group, "center", ("none", "both"))

    def _step_group(self, params: list[Tensor], options: Group) -> None:
        weight = 1 - options["momentum"]
        shrink = 1 - options["lr"] * options["weight_decay"]
        for p in params:
            if p.grad is None:
                continue
            state = self.state[p]
            if "step" not in state:
                state["step"] = 0
                state["momentum_buffer"] = torch.zeros_like(p, dtype=compute_dtype(p))
            state["step"] += 1
            B, layout = local(state["momentum_buffer"]), Layout.of(p)
            G, U, lost = local_gradient(p), local(p), self._lost(p, options)
            if options["center"] == "none" and not layout.columns:  # a chunk's row norms need its own buffer alone
                with _TRIALS.size(B, G, U) as size:
                    averages = _averages(B, G, weight, size)
                    steps = (_direction(b, None, state["step"], options) for b in averages)
                    _move(U, lost, B, steps, shrink, size)
            else:
                deque(_averages(B, G, weight), maxlen=0)
                _move(U, lost, B, _steps(B, len(p), layout, state["step"], options), shrink)

    def _form_increment(self, param: Tensor, last: LastStep, out: Tensor | None) -> Tensor:
        B, step = local(self.state[param]["momentum_buffer"]), self.state[param]["step"]
        out = torch.empty_like(B) if out is None else out
        steps = _steps(B, len(param), Layout.of(param), step, last.options)
        for (chunk, scale), s in zip(steps, cache_chunks(out), strict=True):
            if scale is None:
                s.copy_(chunk)
            else:
                torch.mul(chunk, scale, out=s)
        return out


_TRIALS = ChunkTrials()
_Factors = tuple[Tensor, Tensor | None]
"""Rows, and factors (rows, 1) whose product with them is the step; None where the rows are the step."""


def _averages(B: Tensor, G: Tensor, weight: float, size: int | None = None) -> Iterator[Tensor]:
    """Yield chunks of the buffer after the gradient has entered it."""
    for b, g in zip(cache_chunks(B, size=size), cache_chunks(G, B, size=size), strict=True):
        yield b.lerp_(g.to(b.dtype), weight)


def _move(
    U: Tensor, lost: Tensor | None, B: Tensor, steps: Iterable[_Factors], shrink: float | Tensor, size: int | None = None
) -> None:
    """Shrink chunks of the matrix, and add the steps to them."""
    targets = cache_chunks(U, B, size=size)
    errors = [None] * len(targets) if lost is None else cache_chunks(lost, B, size=size)
    for u, e, (rows, scale) in zip(targets, errors, steps, strict=True):
        shrink_and_add(u, rows, scale=scale, shrink=shrink, lost=e)


def _steps(B: Tensor, number: int, layout: Layout, step: int, options: Group) -> Iterator[_Factors]:
    """Yield chunks of -lr RN(C), or of -lr P RN(P C).

    Args:
        B: the buffer, or the shard of it on this rank.
        number: of rows, of all shards together.
        layout: of the buffer.
        step: number of the step.
        options: the hyperparameters.
    """
    centred = options["center"] == "both"
    mean = _mean(cache_chunks(B), number, layout) if centred else None

    def chunks() -> Iterator[Tensor]:
        yield from (b if mean is None else b - mean for b in cache_chunks(B))

    norms: Iterable[Tensor | None] = repeat(None)
    if layout.columns:
        norms = torch.split(norms_over_ranks(chunks(), layout.columns), [len(b) for b in cache_chunks(B)])

    def directions() -> Iterator[tuple[Tensor, Tensor]]:
        for b, norm in zip(chunks(), norms, strict=False):
            yield _direction(b, norm, step, options)

    if not centred:
        return directions()
    shift = _mean((chunk.mul_(scale) for chunk, scale in directions()), number, layout)
    return ((chunk.mul_(scale).sub_(shift), None) for chunk, scale in directions())


def _direction(b: Tensor, norm: Tensor | None, step: int, options: Group) -> tuple[Tensor, Tensor]:
    """Return rows and factors (..., 1) whose product is the step: -lr b / (|b| + eps (1 - momentum^step)).

    This is -lr c / (|c| + eps), with c = b / (1 - momentum^step) the bias-corrected rows, which are not formed. The
    rows are `b` itself, but for rows whose squares leave the range of their dtype.

    Args:
        b: rows of the buffer, or some columns of them.
        norm: of whole rows, where `b` has only some of their columns.
        step: number of the step.
        options: the hyperparameters.
    """
    lr = options["lr"] if options["maximize"] else -options["lr"]
    eps = options["eps"] * (1 - options["momentum"] ** step)
    rows, norm, eps = stable_norms(b, -1, eps) if norm is None else in_range(b, norm, eps)
    return rows, norm.add_(eps).reciprocal_().mul_(lr)


def _mean(chunks: Iterable[Tensor], rows: int, layout: Layout) -> Tensor:
    """Return the mean row of all shards. Sums of chunks are added in fp64, where the device has fp64."""
    total, dtype = None, torch.float32
    for chunk in chunks:
        wide = torch.float32 if chunk.device.type == "mps" else torch.float64  # which knows no fp64
        part, dtype = chunk.sum(0).to(wide), chunk.dtype
        total = part if total is None else total.add_(part)
    assert total is not None
    for group in layout.rows:
        dist.all_reduce(total, group=group)
    return (total / rows).to(dtype)

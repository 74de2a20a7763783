"""RowNorm: every token's row of the LM head moves by at most the learning rate."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from hilbert_monitor.geometry import compute_dtype

from ._chunks import cache_chunks
from ._hyperparameters import Group, check_choice, check_number
from ._matrix_optimizer import LastStep, MatrixOptimizer
from ._norms import stable_norms
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
        stochastic     0.34                                                     1.00
        compensated    0.05                                                     1.00
        an fp32 head   0.00                                                     1.00

    The step is in place. On a CPU it needs no scratch of the matrix's size: it takes rows in chunks that fit the cache,
    so that matrix, gradient and buffer are read from memory once. Elsewhere it takes five kernels over the matrix, six
    with weight decay, and up to 256 MiB of scratch, twice that for bf16 and fp16 matrices.

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
            "stochastic" rounds up or down at random with the right mean: no buffer, slow on a CPU. It has random
            numbers of its own, the same on all ranks and after a resume.
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
            B = state["momentum_buffer"]
            targets = self._rounding(p, options).chunks(p, B)
            if options["center"] == "none":  # a chunk's row norms need its own buffer alone
                for b, g, (u, rounding) in zip(cache_chunks(B), cache_chunks(p.grad, B), targets, strict=True):
                    b.lerp_(g.to(b.dtype), weight)
                    rows, scale = _direction(b, state["step"], options)
                    shrink_and_add(u, rows, scale=scale, shrink=shrink, rounding=rounding)
            else:
                for b, g in zip(cache_chunks(B), cache_chunks(p.grad, B), strict=True):
                    b.lerp_(g.to(b.dtype), weight)
                for s, (u, rounding) in zip(_projected(B, state["step"], options), targets, strict=True):
                    shrink_and_add(u, s, shrink=shrink, rounding=rounding)

    def _form_increment(self, param: Tensor, last: LastStep, out: Tensor | None) -> Tensor:
        B, step, options = self.state[param]["momentum_buffer"], self.state[param]["step"], last.options
        out = torch.empty_like(B) if out is None else out
        if options["center"] == "none":
            for b, s in zip(cache_chunks(B), cache_chunks(out), strict=True):
                torch.mul(*_direction(b, step, options), out=s)
        else:
            for chunk, s in zip(_projected(B, step, options), cache_chunks(out), strict=True):
                s.copy_(chunk)
        return out


def _direction(b: Tensor, step: int, options: Group) -> tuple[Tensor, Tensor]:
    """Return rows and factors (rows, 1) whose product is the step: -lr b / (|b| + eps (1 - momentum^step)).

    This is -lr c / (|c| + eps), with c = b / (1 - momentum^step) the bias-corrected rows, which are not formed. The
    rows are `b` itself, but for rows whose squares leave the range of their dtype.
    """
    lr = options["lr"] if options["maximize"] else -options["lr"]
    rows, norm, eps = stable_norms(b, 1, options["eps"] * (1 - options["momentum"] ** step))
    return rows, norm.add_(eps).reciprocal_().mul_(lr)


def _projected(B: Tensor, step: int, options: Group) -> Iterator[Tensor]:
    """Yield chunks of -lr P RN(P C)."""
    mean = _mean(cache_chunks(B), len(B))

    def steps() -> Iterator[Tensor]:
        for b in cache_chunks(B):
            rows, scale = _direction(b - mean, step, options)
            yield rows.mul_(scale)

    shift = _mean(steps(), len(B))
    for s in steps():
        yield s.sub_(shift)


def _mean(chunks: Iterator[Tensor] | tuple[Tensor, ...], rows: int) -> Tensor:
    """Return the mean row. Sums of chunks are added in fp64, where the device has fp64."""
    total, dtype = None, torch.float32
    for chunk in chunks:
        wide = torch.float32 if chunk.device.type == "mps" else torch.float64  # which knows no fp64
        part, dtype = chunk.sum(0).to(wide), chunk.dtype
        total = part if total is None else total.add_(part)
    assert total is not None
    return (total / rows).to(dtype)

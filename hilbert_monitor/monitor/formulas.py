"""Increments formed from an optimizer's state, for the optimizers whose step is known."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import SGD, Adam, Optimizer

from hilbert_monitor.geometry import compute_dtype
from hilbert_monitor.optim import Group, cache_chunks

Formula = Callable[[Tensor, Group, Group, Tensor | None], Tensor]
"""From a parameter, its state and gradient, the options of the step and memory for the result to the increment."""


def state_of(optimizer: Optimizer, param: Tensor) -> Group:
    """The optimizer's state of a parameter, or nothing. Indexing `optimizer.state` would insert an empty one."""
    state: Group = optimizer.state.get(param, {})
    return state


def steps_as(optimizer: Optimizer, kind: type[Optimizer]) -> bool:
    """Whether an optimizer is of `kind` and its step is that of `kind`; torch wraps steps for its hooks."""
    return isinstance(optimizer, kind) and inspect.unwrap(type(optimizer).step) is inspect.unwrap(kind.step)


def formula_of(optimizer: Optimizer, options: Group) -> Formula | None:
    """How to form the increment of one of torch's optimizers from its state; None if it cannot be."""
    if steps_as(optimizer, Adam):
        return adam
    if steps_as(optimizer, SGD):
        buffered = options["momentum"] and not options["nesterov"]  # nesterov leaves a changed gradient behind
        return sgd if buffered or not (options["momentum"] or options["weight_decay"]) else None
    return None


def adam(p: Tensor, state: Group, options: Group, out: Tensor | None) -> Tensor:
    """-lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps), with the largest v so far under amsgrad.

    It is formed as m / (factor sqrt(v) + term), seven passes over memory: the scale of S is in the denominator. Where
    the learning rate is nearly zero, or a tensor, S is formed for a rate of one and then multiplied.
    """
    dtype, lr = compute_dtype(p), options["lr"]
    V = state["max_exp_avg_sq"] if options["amsgrad"] else state["exp_avg_sq"]
    S = torch.empty_like(p, dtype=dtype) if out is None else out
    divides = not isinstance(lr, Tensor) and abs(lr) > 1e-30
    factor, term = _denominator(state["step"], options, lr if divides else 1.0, dtype)
    for s, m, v in zip(*(cache_chunks(A, S) for A in (S, state["exp_avg"], V)), strict=True):
        torch.sqrt(v.to(dtype), out=s)
        if isinstance(factor, Tensor):
            torch.addcmul(term, s, factor, out=s)
        else:  # faster on a CPU
            torch.add(term, s, alpha=factor, out=s)
        torch.div(m.to(dtype), s, out=s)
        if not divides:
            s.mul_(lr)
    return S


def _denominator(step: float | Tensor, options: Group, lr: float, dtype: torch.dtype) -> tuple[float | Tensor, Tensor]:
    """Return by what sqrt(v) is multiplied, and what is added to it, so that it divides m to the step.

    The count of steps is taken in fp64, as 1 - 0.999^t needs it; an accelerator that has it is not waited for.
    """
    on_device = isinstance(step, Tensor) and step.device.type not in ("cpu", "mps")
    t = step.double() if isinstance(step, Tensor) and on_device else float(step)
    b1, b2 = options["betas"]
    first, root = (1 - b1**t) / -lr, (1 - b2**t) ** 0.5
    if isinstance(first, Tensor):
        return (first / root).to(dtype), (first * options["eps"]).to(dtype)
    return first / root, torch.tensor(first * options["eps"], dtype=dtype)


def sgd(p: Tensor, state: Group, options: Group, out: Tensor | None) -> Tensor:
    """-lr times the momentum buffer, or, without momentum, the gradient."""
    momentum, ascends = bool(options["momentum"]), options["maximize"] and not options["momentum"]
    direction = state["momentum_buffer" if momentum else "gradient"]
    return torch.mul(direction.to(compute_dtype(p)), options["lr"] if ascends else -options["lr"], out=out)

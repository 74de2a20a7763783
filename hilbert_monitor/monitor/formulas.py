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
    """-lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps), with the largest v so far under amsgrad."""
    b1, b2 = options["betas"]
    t, dtype = _count(state["step"]), compute_dtype(p)
    scale, root = -options["lr"] / (1 - b1**t), (1 - b2**t) ** 0.5
    V = state["max_exp_avg_sq"] if options["amsgrad"] else state["exp_avg_sq"]
    S = torch.empty_like(p, dtype=dtype) if out is None else out
    for s, m, v in zip(*(cache_chunks(A, S) for A in (S, state["exp_avg"], V)), strict=True):
        torch.sqrt(v.to(dtype), out=s)
        torch.div(m.to(dtype), s.div_(root).add_(options["eps"]), out=s).mul_(scale)
    return S


def _count(step: float | Tensor) -> float | Tensor:
    """The optimizer's count of steps in fp64, as 1 - 0.999^t needs it; an accelerator is not waited for."""
    if isinstance(step, Tensor) and step.device.type not in ("cpu", "mps"):
        return step.double()
    return float(step)


def sgd(p: Tensor, state: Group, options: Group, out: Tensor | None) -> Tensor:
    """-lr times the momentum buffer, or, without momentum, the gradient."""
    if options["momentum"]:
        return torch.mul(state["momentum_buffer"].to(compute_dtype(p)), -options["lr"])
    G = state["gradient"]
    return torch.mul(G.to(compute_dtype(p)), options["lr"] if options["maximize"] else -options["lr"])

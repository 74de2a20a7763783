"""The step that an optimizer's moments would make next, if the next gradient were zero.

The moments decay once, the count of steps goes up by one, and the step is made at the learning rate that the checkpoint
has. Weight decay is no part of it. It is what the past alone does: a new gradient adds its share to it, for Adam a
tenth of its moment. Optimizers that are not known make none.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW, Optimizer

from hilbert_monitor.monitor.optimizers import adam_increment, diameter_ceiling
from hilbert_monitor.optim import Group, MatrixOptimizer, Muon, RowNorm

from .moments import HeadMoments

ASSUMED = "the next gradient is zero: moments decay once, at the learning rate in the checkpoint, without weight decay"
NOT_ADAM = ("momentum_decay", "max_exp_avg_sq_row", "alpha", "rho")
"""Options of optimizers that keep Adam's two moments and step in another way."""


@dataclass(frozen=True)
class NextStep:
    """The step, laid out as the head's tensor is."""

    optimizer: str
    S: Tensor
    learning_rate: float
    count: float | None
    """Number of the step by the optimizer's own count, if it has one."""
    ceiling: float | None
    """The largest D(S) that the optimizer can make at this learning rate, where there is a theorem."""


def next_step(moments: HeadMoments) -> NextStep | None:
    """Form it, or None for an optimizer that is not known."""
    make = _maker(moments.group, moments.state)
    return None if make is None else make(moments)


def _maker(group: Group, state: Any) -> Callable[[HeadMoments], NextStep] | None:
    """How an optimizer steps, by what its groups and its state have: a state dict does not name its class."""
    if {"exp_avg", "exp_avg_sq"} <= state.keys() and {"betas", "eps", "amsgrad"} <= group.keys():
        return None if any(name in group for name in NOT_ADAM) else _adam
    if "momentum_buffer" not in state:
        return None
    if "ns_steps" in group:
        return _muon if {"ns_dtype", "rounding"} <= group.keys() else None  # torch's own has another scale
    if "center" in group and "rounding" in group:
        return _rownorm
    return _sgd if {"dampening", "nesterov"} <= group.keys() else None


def _adam(moments: HeadMoments) -> NextStep:
    state, options = moments.state, {**moments.group, "lr": _rate(moments.group)}
    b1, b2 = options["betas"] = tuple(float(b) for b in options["betas"])
    count = float(state["step"]) + 1
    m = state["exp_avg"]
    later = {"step": count, "exp_avg": m * b1}
    for name in ("exp_avg_sq", "max_exp_avg_sq"):
        if name in state:
            later[name] = state[name] * (b2 if name == "exp_avg_sq" else 1.0)  # the largest so far stays
    S = adam_increment(later, options).matrix()
    kind = AdamW if options.get("decoupled_weight_decay") else Adam
    return _step(kind.__name__, _empty(kind, options), S, options, count)


def _sgd(moments: HeadMoments) -> NextStep:
    options = {**moments.group, "lr": _rate(moments.group)}
    momentum = float(options["momentum"])
    factor = momentum**2 if options["nesterov"] else momentum  # nesterov looks ahead: g + momentum * buffer
    S = moments.moment.float() * (-options["lr"] * factor)
    return _step("SGD", _empty(SGD, options), S, options, None)


def _rownorm(moments: HeadMoments) -> NextStep:
    return _ours(RowNorm, moments)


def _muon(moments: HeadMoments) -> NextStep:
    return _ours(Muon, moments, distributed=False)


def _ours(kind: type[MatrixOptimizer], moments: HeadMoments, **more: Any) -> NextStep:
    """Let one of our optimizers step once on zeros with a zero gradient, and ask it what it did."""
    options = {**moments.group, "lr": _rate(moments.group), "weight_decay": 0.0, "rounding": "nearest"}
    takes = inspect.signature(kind).parameters
    known = {name: value for name, value in options.items() if name in takes}
    p = Parameter(torch.zeros_like(moments.moment))
    p.grad = p.new_zeros(()).expand_as(p)  # which takes no memory
    optimizer = kind([p], **known, **more)
    optimizer.state[p].update(
        {name: x.clone() if isinstance(x, Tensor) else x for name, x in moments.state.items() if name != "compensation"}
    )
    optimizer.step()
    S = optimizer.increment(p)
    count = optimizer.state[p].get("step")
    return _step(kind.__name__, optimizer, S, options, None if count is None else float(count))


def _step(name: str, optimizer: Optimizer, S: Tensor, options: Group, count: float | None) -> NextStep:
    lr = float(options["lr"])
    ceiling = diameter_ceiling(optimizer, options, lr=lr, count=count or 1.0, width=S.shape[1])
    return NextStep(name, S, options["lr"], count, ceiling)


def _empty(kind: type[Optimizer], options: Group) -> Optimizer:
    """An optimizer of a kind that moves nothing, to be asked for its ceiling."""
    return kind([_nothing()], lr=options["lr"])  # type: ignore[call-arg]


def _nothing() -> Parameter:
    return Parameter(torch.zeros(1, 1))


def _rate(group: Group) -> float:
    return float(group["lr"])

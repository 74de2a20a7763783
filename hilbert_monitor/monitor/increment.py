"""The increment S of one optimizer step on one parameter, without decoupled weight decay: U' = (1 - lr decay) U + S.

Our own optimizers say what their last step was. For torch's Adam, AdamW and SGD it is formed again from their state, so
that nothing is copied and nothing lost to cancellation. For every other optimizer it is the difference of the weights,
which takes a copy of U on the steps that are measured and is exact to the rounding of U.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import SGD, Adam, Optimizer

from hilbert_monitor.geometry import compute_dtype
from hilbert_monitor.optim import (
    ChainedOptimizer,
    Group,
    LastStep,
    MatrixOptimizer,
    Muon,
    cache_chunks,
    options_of,
)

Decay = Literal["decoupled", "coupled"]

DECOUPLED = {"AdamW", "AdamW8bit", "PagedAdamW", "PagedAdamW8bit", "Adafactor", "Muon", "Lion", "AdEMAMix", "SOAP"}
COUPLED = {"SGD", "Adam", "Adagrad", "Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "LAMB"}
"""How optimizers whose groups have no flag decoupled_weight_decay use weight_decay, by the name of their class."""


@dataclass(frozen=True, slots=True)
class HeadStep:
    """One call of the optimizer's step, as its hooks saw it."""

    skipped: str
    """Why nothing moved ("no gradient", "overflow"), or empty."""
    options: Group
    """The hyperparameters of the parameter's group at that step: a scheduler moves lr soon after."""

    @property
    def lr(self) -> float | None:
        """Learning rate of the step, if the optimizer has one."""
        lr = self.options.get("lr")
        return None if lr is None else float(lr)

    @property
    def decay(self) -> float:
        """The group's weight decay, whichever way it is used."""
        return float(self.options.get("weight_decay", 0))


@dataclass(frozen=True, slots=True)
class Increment:
    """The increment of a step, and how far it may be from what the stored weights did."""

    S: Tensor  # as the parameter, in fp32 or better
    rounding: float
    """Bound on the difference between an entry of S and the change of the stored weight, which is rounded. Zero where S
    was formed from state and U has at least fp32."""


class IncrementSource:
    """Tells what each step of an optimizer does to one of its parameters.

    Args:
        optimizer: a torch optimizer; of a ChainedOptimizer the one that owns the parameter is watched.
        param: a parameter of it.
        decay: how an unknown optimizer uses weight_decay. Without it "decoupled" is assumed, with a warning.
    """

    def __init__(self, optimizer: Optimizer, param: Tensor, *, decay: Decay | None = None) -> None:
        inner = getattr(optimizer, "optimizer", None)  # of a LightningOptimizer
        optimizer = inner if isinstance(inner, Optimizer) else optimizer
        self.optimizer = optimizer.owner(param) if isinstance(optimizer, ChainedOptimizer) else optimizer
        self.param = param
        self.last: HeadStep | None = None
        self._decay = decay
        self._before: Tensor | None = None
        self._outermost: FrameType | None = None
        self._gradient: LastStep | None = None
        _ = self.group  # refuses a parameter of somebody else

    @property
    def from_state(self) -> bool:
        """Whether the increment is formed without a copy of the weights."""
        return isinstance(self.optimizer, MatrixOptimizer) or self._formula(self.group) is not None

    @property
    def fleeting(self) -> bool:
        """Whether the increment is formed from the gradient, and lost when that is cleared."""
        last = self.last
        plain = last is not None and self._formula(last.options) is _sgd and not last.options["momentum"]
        return plain or isinstance(self.optimizer, Muon)

    @property
    def formable(self) -> bool:
        """Whether the increment of the last step can still be formed."""
        if self.last is None:
            return False
        if self._formula(self.last.options) is _sgd and not self.last.options["momentum"]:
            return self._has_gradient()
        return self.from_state or self._before is not None

    @property
    def decoupled(self) -> bool:
        """Whether weight decay is apart from the increment."""
        flag = self.group.get("decoupled_weight_decay")
        if flag is not None:
            return bool(flag)
        return (self._decay or self._known_decay() or "decoupled") == "decoupled"

    def _known_decay(self) -> Decay | None:
        """How the class, or the nearest that it derives from, is known to use weight_decay."""
        for kind in type(self.optimizer).__mro__:
            if kind.__name__ in DECOUPLED | COUPLED:
                return "decoupled" if kind.__name__ in DECOUPLED else "coupled"
        return None

    def watch(
        self,
        on_step: Callable[[HeadStep], None],
        *,
        measure: Callable[[], bool] = lambda: True,
        guard: Callable[[str], AbstractContextManager[Any]] = nullcontext,
    ) -> Callable[[], None]:
        """Call `on_step` after each step; return a function that ends it.

        Args:
            on_step: called when the parameter has moved, or would have.
            measure: asked before each step whether its increment will be; only then are weights copied, where needed.
            guard: makes the context for what runs inside the optimizer's step, by the name of the part.
        """
        self._warn_of_unknown_decay()

        def before(*_: Any) -> None:
            caller = sys._getframe(1)
            if _on_the_stack(self._outermost, caller):
                return  # a step within a step: a subclass called that of its base, which has hooks too
            self._outermost, self._before = caller, None
            with guard("increment"):
                if not self.from_state:
                    self.last = None
                    if measure():
                        self._before = self.param.detach().clone()

        def after(*_: Any) -> None:
            if sys._getframe(1) is not self._outermost:
                return
            self._outermost = None
            with guard("increment"):
                self.last = HeadStep(self._skipped(), options_of(self.group))
                if _steps_as(self.optimizer, SGD) and self.param.grad is not None:
                    self._gradient = LastStep.of(self.param.grad, self.last.options)
                on_step(self.last)

        handles = [self.optimizer.register_step_pre_hook(before), self.optimizer.register_step_post_hook(after)]

        def end() -> None:
            for handle in handles:
                handle.remove()
            self._outermost = None  # which holds on to what the caller has

        return end

    def forget(self) -> None:
        """Forget the last step."""
        self._before = self.last = None

    @torch.no_grad()
    def form(self, out: Tensor | None = None) -> Increment:
        """Return the increment of the last step: after it, and before the next or a change of its gradient.

        Args:
            out: memory for S, used where it can be: on a CPU new memory costs more than S itself.

        Raises:
            RuntimeError: if there was no step, or it was not to be measured and has left nothing to form it from.
        """
        if self.last is None:
            raise RuntimeError("there has been no step to form an increment of")
        dtype, U = compute_dtype(self.param), self.param.detach()
        if self.last.skipped:
            return Increment(torch.zeros_like(U, dtype=dtype), 0.0)
        stored = 0.0 if U.dtype.itemsize >= 4 else torch.finfo(U.dtype).eps * float(U.abs().amax())
        if isinstance(self.optimizer, MatrixOptimizer):
            return Increment(self.optimizer.increment(self.param, out=out), stored)
        formula = self._formula(self.last.options)
        if formula is _sgd and not self.last.options["momentum"] and not self._has_gradient():
            raise RuntimeError("the gradient of the last step is gone or changed, and SGD's increment needs it")
        if formula is not None:
            return Increment(formula(self.param, self.optimizer.state[self.param], self.last.options, out), stored)
        if self._before is None:
            raise RuntimeError(
                f"the increment of {type(self.optimizer).__name__} is a difference of weights, and none were kept of"
                " before this step: it was not to be measured"
            )
        decays = self.decoupled and self.last.decay and self.last.lr is not None
        shrink = 1 - self.last.options["lr"] * self.last.decay if decays else 1.0
        S = U.to(dtype) - self._before.to(dtype) * shrink
        largest = float(torch.maximum(U.abs().amax(), self._before.abs().amax()))
        return Increment(S, 2 * torch.finfo(U.dtype).eps * largest)

    @property
    def group(self) -> Group:
        """The group of the parameter, as it is now."""
        for group in self.optimizer.param_groups:
            if any(self.param is p for p in group["params"]):
                return group
        raise ValueError(
            f"the parameter of shape {tuple(self.param.shape)} is in no group of {type(self.optimizer).__name__}: give"
            " the optimizer that moves it"
        )

    def _formula(self, options: Group) -> Callable[[Tensor, Group, Group, Tensor | None], Tensor] | None:
        if _steps_as(self.optimizer, Adam):
            return _adam
        if _steps_as(self.optimizer, SGD):
            buffered = options["momentum"] and not options["nesterov"]  # nesterov leaves a changed gradient behind
            return _sgd if buffered or not (options["momentum"] or options["weight_decay"]) else None
        return None

    def _has_gradient(self) -> bool:
        return self._gradient is not None and self._gradient.had(self.param.grad)

    def _skipped(self) -> str:
        if self.param.grad is None:
            return "no gradient"
        overflow = getattr(self.optimizer, "found_inf", None)  # a GradScaler leaves it to a fused optimizer
        return "overflow" if overflow is not None and bool(overflow) else ""

    def _warn_of_unknown_decay(self) -> None:
        group, kind = self.group, type(self.optimizer).__name__
        known = "decoupled_weight_decay" in group or self._decay is not None or self._known_decay() is not None
        if not known and group.get("weight_decay"):
            warnings.warn(
                f"hilbert_monitor does not know how {kind} uses weight_decay and takes it to be decoupled, apart"
                ' from the increment: pass decay="coupled" if it is added to the gradient',
                stacklevel=3,
            )


def _on_the_stack(frame: FrameType | None, caller: FrameType | None) -> bool:
    """Whether `frame` is `caller` or one of the frames that led to it."""
    while frame is not None and caller is not None:
        if caller is frame:
            return True
        caller = caller.f_back
    return False


def _steps_as(optimizer: Optimizer, kind: type[Optimizer]) -> bool:
    """Whether an optimizer is of `kind` and its step is that of `kind`; torch wraps steps for its hooks."""
    return isinstance(optimizer, kind) and inspect.unwrap(type(optimizer).step) is inspect.unwrap(kind.step)


def _adam(p: Tensor, state: Group, options: Group, out: Tensor | None) -> Tensor:
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


def _sgd(p: Tensor, state: Group, options: Group, out: Tensor | None) -> Tensor:
    """-lr times the momentum buffer, or, without momentum, the gradient."""
    if options["momentum"]:
        return torch.mul(state["momentum_buffer"].to(compute_dtype(p)), -options["lr"])
    assert p.grad is not None
    G = p.grad.to_dense() if p.grad.is_sparse else p.grad
    return torch.mul(G.to(compute_dtype(p)), options["lr"] if options["maximize"] else -options["lr"])

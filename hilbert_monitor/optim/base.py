"""The base class of RowNorm and Muon: checks, the order of a step, the update of a weight, and the increment."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from hilbert_monitor.geometry import RowSource, compute_dtype
from hilbert_monitor.geometry.sharding import is_dtensor, like

from .distributed import gradient_mismatch, lay_out_like, local, version_of

Group = dict[str, Any]
"""One of an optimizer's `param_groups`, or the hyperparameters of one."""


class LastStep(NamedTuple):
    """The hyperparameters of the last step on a parameter, and how to recognise the gradient that it used."""

    options: Group
    mark: object  # also an attribute of the gradient
    version: int  # the gradient's count of changes in place

    @classmethod
    def of(cls, gradient: Tensor, options: Group) -> LastStep:
        """Record a step. Marks the gradient with an attribute; a weak reference to it would forbid swapping it."""
        gradient._hilbert_mark = mark = object()  # type: ignore[attr-defined]
        return cls(options, mark, version_of(gradient))

    def had(self, gradient: Tensor | None) -> bool:
        """Return True if the step used this gradient and it has not changed since."""
        return getattr(gradient, "_hilbert_mark", None) is self.mark and version_of(gradient) == self.version  # type: ignore[arg-type]


class MatrixOptimizer(Optimizer, ABC):
    """Base class of optimizers that move matrices and can return the increment of their last step.

    Weight decay is decoupled. The state is in fp32, or fp64 for fp64 parameters; compensation is in the parameter's
    dtype. A subclass checks its hyperparameters, steps one group, and forms the increment of the last step again.
    """

    def __init__(self, params: ParamsT, defaults: Group) -> None:
        self._last: dict[Tensor, LastStep | None] = {}
        super().__init__(params, {**defaults, "decoupled_weight_decay": True})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._last = {}

    def add_param_group(self, param_group: Group) -> None:
        """Add a group of matrices, with its own hyperparameters if it has any."""
        super().add_param_group(param_group)
        try:
            self._check_group(param_group)
            for index in range(len(param_group["params"])):
                self._check_parameter(param_group, index)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def _check_group(self, group: Group) -> None:
        check_number(group, "lr", tensor=True)
        check_number(group, "weight_decay")
        check_choice(group, "maximize", (True, False))
        check_choice(group, "rounding", ("nearest", "compensated"))

    def _check_parameter(self, group: Group, index: int) -> None:
        p, name, label = group["params"][index], type(self).__name__, parameter_label(group, index)
        if p.ndim != 2:
            raise ValueError(
                f"{name} moves matrices, and parameter {label} is none: give it to torch.optim.AdamW,"
                " in one ChainedOptimizer with this one"
            )
        if not p.is_floating_point():
            raise TypeError(f"{name} moves real floating-point matrices, got {p.dtype} for {label}")
        if is_dtensor(p) and any(placement.is_partial() for placement in p.placements):
            raise TypeError(f"{name} got a sum that the ranks have not taken yet, {label}: redistribute it first")

    def check_gradients(self) -> None:
        """Raise TypeError for a gradient that this optimizer cannot use, before any parameter has moved."""
        for group in self.param_groups:
            for index, p in enumerate(group["params"]):
                name, label = type(self).__name__, parameter_label(group, index)
                if p.grad is not None and (p.grad.layout != torch.strided or p.grad.is_complex()):
                    kind = "complex" if p.grad.is_complex() else "sparse"
                    raise TypeError(f"{name} needs dense real gradients, got a {kind} one for parameter {label}")
                if mismatch := gradient_mismatch(p):
                    raise TypeError(f"{name} got {mismatch}, {label}: give it the parameter's mesh and placements")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move every parameter that has a gradient, and return the closure's result."""
        loss = call_closure(closure)
        self.check_gradients()
        self._last = {}
        last: dict[Tensor, LastStep | None] = {p: None for group in self.param_groups for p in group["params"]}
        with outside_autocast(last):
            self._before_step()
            for group in self.param_groups:
                options = options_of(group)
                self._step_group(group["params"], options)
                moved = [p for p in group["params"] if is_dtensor(p) and p.grad is not None]
                torch.autograd.graph.increment_version(moved)  # their local tensors were changed in place
                last.update((p, LastStep.of(p.grad, options)) for p in group["params"] if p.grad is not None)
        self._last = last
        return loss

    @torch.no_grad()
    def increment(self, param: Tensor) -> Tensor:
        """Return the increment S of the last step on `param`, without the decoupled weight decay.

        U' = (1 - lr decay) U + S: signed, and scaled by the learning rate of that step. Zero if the parameter had no
        gradient in the last step. A step that a GradScaler skipped does not count. The result (m, n) has the dtype of
        the optimizer's state and the layout of `param`. All ranks of a mesh call this together for Muon, for RowNorm
        with center="both", and where columns are sharded.
        """
        return like(param, self.increment_rows(param).matrix())

    @torch.no_grad()
    def increment_rows(self, param: Tensor) -> RowSource:
        """Return this rank's rows of `increment`: formed on demand by RowNorm, unless other shards are needed."""
        if not any(param is p for group in self.param_groups for p in group["params"]):
            raise ValueError(f"the parameter of shape {tuple(param.shape)} is not one of this {type(self).__name__}'s")
        if param not in self._last:
            why = (
                "no step has moved this parameter since the optimizer was made, loaded or given it: call this after one"
            )
            raise RuntimeError(why)
        last, dtype = self._last[param], compute_dtype(param)
        if last is None:
            return RowSource(local(param.detach()), form=lambda u: torch.zeros_like(u, dtype=dtype), dtype=dtype)
        with outside_autocast([param]):
            return self._increment_rows(param, last)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state in its own precision; torch's method would cast it to the dtype of the parameters."""
        with keep_state_precision(self, self):
            super().load_state_dict(state_dict)

    def _before_step(self) -> None:
        """Prepare a step."""

    def _lost(self, p: Tensor, options: Group) -> Tensor | None:
        """Return this rank's rounding errors of earlier steps on a parameter; None if they are not compensated."""
        if options["rounding"] == "nearest" or p.dtype not in (torch.bfloat16, torch.float16):
            return None
        state = self.state[p]
        if "compensation" not in state:
            state["compensation"] = torch.zeros_like(p)
        return local(state["compensation"])

    @abstractmethod
    def _step_group(self, params: list[Tensor], options: Group) -> None:
        """Step the parameters of one group that have a gradient."""

    @abstractmethod
    def _increment_rows(self, param: Tensor, last: LastStep) -> RowSource:
        """Return this rank's rows of the increment of the last step."""


def shrink_and_add(
    u: Tensor, s: Tensor, *, scale: Tensor | None = None, shrink: float | Tensor = 1.0, lost: Tensor | None = None
) -> None:
    """Set u to shrink u + scale s in place, rounded once to u's dtype.

    Compensated rounding adds the rounding errors of earlier steps, `lost`, and updates them in place (Kahan). Without
    it a step far below the spacing of bf16 weights is lost. `scale` is (rows, 1), for rows of a matrix.
    """
    target = u.to(compute_dtype(u))
    if lost is not None:
        target.add_(lost.to(target.dtype))  # cast first: a mixed sum is slow on a CPU
    if isinstance(shrink, Tensor) or shrink != 1:  # a comparison with a tensor would synchronize
        target.mul_(shrink)
    if scale is None:
        target.add_(s)
    else:
        target.addcmul_(s, scale)
    if target is not u:
        u.copy_(target)
        if lost is not None:
            lost.copy_(target.sub_(u.to(target.dtype)))


@contextmanager
def keep_state_precision(loading: Optimizer, *owners: Optimizer) -> Iterator[None]:
    """Load state in the parameter's layout; that of every `MatrixOptimizer` among `owners` keeps its precision.

    Torch would cast it to the parameter's dtype. `loading` is the optimizer that loads in this context.
    """
    saved: dict[Any, Any] = {}

    def before(_: Optimizer, state_dict: dict[str, Any]) -> None:
        saved.update(state_dict)

    def after(_: Optimizer) -> None:
        indices = (index for group in saved["param_groups"] for index in group["params"])
        params = (p for group in loading.param_groups for p in group["params"])
        groups = chain.from_iterable(o.param_groups for o in owners if isinstance(o, MatrixOptimizer))
        ours = {p for group in groups for p in group["params"]}
        for index, p in zip(indices, params, strict=True):
            for key, value in saved["state"].get(index, {}).items():
                if isinstance(value, Tensor) and p in ours:
                    dtype = p.dtype if key == "compensation" else compute_dtype(p)
                    loading.state[p][key] = lay_out_like(value.to(device=p.device, dtype=dtype), p)
                elif isinstance(value, Tensor) and value.shape == p.shape and key != "step":
                    loading.state[p][key] = lay_out_like(loading.state[p][key], p)

    pre_hook = loading.register_load_state_dict_pre_hook(before)  # after the user's own
    with pre_hook, loading.register_load_state_dict_post_hook(after, prepend=True):
        yield


@contextmanager
def outside_autocast(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Switch autocast off on every device that holds one of `tensors`."""
    with ExitStack() as stack:
        for device in {t.device.type for t in tensors}:
            if torch.amp.is_autocast_available(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def call_closure(closure: Callable[[], Any] | None) -> Any:
    """Return the result of a step's closure, run with gradients enabled; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def check_number(
    group: Group, name: str, *, least: float = 0.0, below: float = sys.float_info.max, tensor: bool = False
) -> None:
    """Refuse a hyperparameter that is not a finite number in [least, below); `tensor` allows one of one element."""
    value = group[name]
    if tensor and isinstance(value, Tensor) and value.dtype.is_floating_point:
        if value.numel() != 1:
            raise ValueError(f"{name} must be a number or a tensor with one element, got shape {tuple(value.shape)}")
    elif isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number{' or a real tensor of one' if tensor else ''}, got {value!r}")
    if not least <= value < below:
        limit = "" if below == sys.float_info.max else f" and below {below:g}"
        raise ValueError(f"{name} must be finite, at least {least:g}{limit}, got {value}")


def check_choice(group: Group, name: str, allowed: tuple[Any, ...]) -> None:
    """Refuse a hyperparameter that is not one of `allowed`. Strings are compared by value, all else by identity."""
    if not any(group[name] is a or (isinstance(a, str) and group[name] == a) for a in allowed):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {group[name]!r}")


def options_of(group: Group) -> Group:
    """Copy the hyperparameters of a group, so that a scheduler that changes lr later does not change the copy."""
    options = {name: value for name, value in group.items() if name not in ("params", "param_names")}
    if isinstance(options.get("lr"), Tensor):
        options["lr"] = options["lr"].detach().clone().reshape(())
    return options


def parameter_label(group: Group, index: int) -> str:
    """Return the name of a group's parameter in messages, or else its position, and its shape."""
    shape = tuple(group["params"][index].shape)
    return f"'{group['param_names'][index]}' {shape}" if "param_names" in group else f"number {index} {shape}"

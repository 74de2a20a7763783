"""What RowNorm and Muon have in common: which inputs they take, how a step runs, and what it leaves to be asked."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from hilbert_monitor.geometry.arithmetic import compute_dtype

Group = dict[str, Any]


class LastStep(NamedTuple):
    """What the last step on a parameter was made with."""

    options: Group
    mark: object
    version: int

    @classmethod
    def of(cls, gradient: Tensor, options: Group) -> LastStep:
        """Note a step; the gradient gets an attribute to be known by (a weak reference would forbid swapping it)."""
        gradient._hilbert_mark = mark = object()  # type: ignore[attr-defined]
        return cls(options, mark, _version(gradient))

    def had(self, gradient: Tensor | None) -> bool:
        """Whether this is the gradient of that step, unchanged."""
        return (
            gradient is not None
            and getattr(gradient, "_hilbert_mark", None) is self.mark
            and _version(gradient) == self.version
        )


def _version(gradient: Tensor) -> int:
    """How often a gradient has been changed in place, as far as it counts."""
    return 0 if gradient.is_inference() else gradient._version


@contextmanager
def outside_autocast(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Without autocast on any device that `tensors` live on."""
    with ExitStack() as stack:
        for device in {t.device.type for t in tensors}:
            if torch.amp.is_autocast_available(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def called(closure: Callable[[], Any] | None) -> Any:
    """What a step's closure returns, with gradients enabled for it."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def options_of(group: Group) -> Group:
    """A group's hyperparameters as they are now: a scheduler moves lr before anyone asks what a step was."""
    options = {name: value for name, value in group.items() if name not in ("params", "param_names")}
    if isinstance(options.get("lr"), Tensor):
        options["lr"] = options["lr"].detach().clone().reshape(())
    return options


def number(
    group: Group, name: str, *, least: float = 0.0, below: float = sys.float_info.max, tensor: bool = False
) -> None:
    """Refuse a hyperparameter that is not a finite number in [least, below), or, where allowed, a tensor of one."""
    value = group[name]
    if tensor and isinstance(value, Tensor) and value.dtype.is_floating_point:
        if value.numel() != 1:
            raise ValueError(f"{name} must be a number or a tensor with one element, got shape {tuple(value.shape)}")
    elif isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number{' or a real tensor of one' if tensor else ''}, got {value!r}")
    if not least <= value < below:
        limit = "" if below == sys.float_info.max else f" and below {below:g}"
        raise ValueError(f"{name} must be finite, at least {least:g}{limit}, got {value}")


def choice(group: Group, name: str, allowed: tuple[Any, ...]) -> None:
    """Refuse a hyperparameter that is none of `allowed`."""
    if not any(group[name] is a or (isinstance(a, str) and group[name] == a) for a in allowed):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {group[name]!r}")


def label(group: Group, index: int) -> str:
    """Name of a group's parameter, or where it stands and its shape."""
    shape = tuple(group["params"][index].shape)
    if "param_names" in group:
        return f"'{group['param_names'][index]}' {shape}"
    return f"number {index} {shape}"


class MatrixOptimizer(Optimizer, ABC):
    """An optimizer of matrices with decoupled weight decay and its state in fp32 (fp64 for fp64 parameters).

    A subclass says which hyperparameters it takes (`_check_group`), does one step on one group (`_step_group`), and
    forms the increment of the last step again when asked (`_form_increment`).
    """

    def __init__(self, params: ParamsT, defaults: Group) -> None:
        self._last: dict[Tensor, LastStep | None] = {}
        super().__init__(params, {**defaults, "decoupled_weight_decay": True})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._last = {}

    def add_param_group(self, param_group: Group) -> None:
        """Add a group of matrices, with hyperparameters of its own if it has any."""
        super().add_param_group(param_group)
        try:
            self._check_group(param_group)
            for index in range(len(param_group["params"])):
                self._check_parameter(param_group, index)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def _check_group(self, group: Group) -> None:
        number(group, "lr", tensor=True)
        number(group, "weight_decay")
        choice(group, "maximize", (True, False))

    def _check_parameter(self, group: Group, index: int) -> None:
        p, name = group["params"][index], type(self).__name__
        if p.ndim != 2:
            raise ValueError(
                f"{name} moves matrices, and parameter {label(group, index)} is none: give it to torch.optim.AdamW,"
                " in one ChainedOptimizer with this one"
            )
        if p.is_complex() or not p.is_floating_point():
            raise TypeError(f"{name} moves real floating-point matrices, got {p.dtype} for {label(group, index)}")
        if hasattr(p, "device_mesh"):
            raise TypeError(
                f"{name} needs whole matrices, and parameter {label(group, index)} is sharded: train it with DDP"
            )

    def check_gradients(self) -> None:
        """Refuse gradients this optimizer cannot use, before anything has moved."""
        for group in self.param_groups:
            for index, p in enumerate(group["params"]):
                if p.grad is not None and (p.grad.layout != torch.strided or p.grad.is_complex()):
                    kind = "complex" if p.grad.is_complex() else "sparse"
                    raise TypeError(
                        f"{type(self).__name__} needs dense real gradients, got a {kind} one for parameter"
                        f" {label(group, index)}"
                    )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move every parameter that has a gradient; return what the closure returned."""
        loss = called(closure)
        self.check_gradients()
        self._last = {}
        last: dict[Tensor, LastStep | None] = {p: None for group in self.param_groups for p in group["params"]}
        with outside_autocast(last):
            self._before_step()
            for group in self.param_groups:
                options = options_of(group)
                self._step_group(group["params"], options)
                last.update((p, LastStep.of(p.grad, options)) for p in group["params"] if p.grad is not None)
        self._last = last
        return loss

    @torch.no_grad()
    def increment(self, param: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return what the last step added to `param`, the decoupled weight decay left out: U' = (1 - lr decay) U + S.

        Signed and scaled by the learning rate of that step. Formed when asked from what the step left behind, so that
        a step costs nothing more for it. Zero if the last step found no gradient. A step that a GradScaler left out
        is none: the answer is still that of the last one that was made.

        Args:
            param: one of this optimizer's.
            out: memory to use for the answer, if it can be used.

        Returns:
            (m, n) in the dtype of the optimizer's state.
        """
        if not any(param is p for group in self.param_groups for p in group["params"]):
            raise ValueError(f"the parameter of shape {tuple(param.shape)} is not one of this {type(self).__name__}'s")
        if param not in self._last:
            raise RuntimeError(
                "no step has moved this parameter since the optimizer was made, loaded or given it: ask after one"
            )
        last = self._last[param]
        if last is None:
            return torch.zeros_like(param, dtype=compute_dtype(param))
        with outside_autocast([param]):
            return self._form_increment(param, last, out)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load, with the state's precision kept: the base class would cast it to the parameter's."""
        with state_precision_kept(self, self):
            super().load_state_dict(state_dict)

    def _before_step(self) -> None:
        """What a subclass does once a step."""

    @abstractmethod
    def _step_group(self, params: list[Tensor], options: Group) -> None:
        """Step the parameters of one group that have a gradient."""

    @abstractmethod
    def _form_increment(self, param: Tensor, last: LastStep, out: Tensor | None) -> Tensor:
        """Form the increment of the last step, in `out` if that is of use."""


CACHE_BYTES = 4 * 2**20
"""Rows that a CPU takes at a time, in bytes of one matrix: what one operation wrote, the next finds in the cache.

Tried and dropped for RowNorm, at 50,257 x 512 on two cores: a thread for each half of the rows, a scratch chunk in
place of the buffer, squares and sums in place of norms, huge pages. All were slower or no faster.
"""

ACCELERATOR_BYTES = 256 * 2**20
"""The same elsewhere, where a launch costs more than a second read; it bounds the scratch of bf16 parameters."""


def cache_chunks(A: Tensor, like: Tensor | None = None) -> tuple[Tensor, ...]:
    """Rows of `A` in chunks, of the length that suits a matrix of `like`'s width and dtype."""
    like = A if like is None else like
    budget = CACHE_BYTES if A.device.type == "cpu" else ACCELERATOR_BYTES
    row_bytes = like[:1].numel() * like.element_size()
    return torch.split(A, max(1, budget // max(1, row_bytes)))


def move(u: Tensor, s: Tensor, *, scale: Tensor | None = None, shrink: float | Tensor = 1.0) -> None:
    """In place u <- shrink u + scale s, rounded once to u's dtype."""
    target = u.to(compute_dtype(u))
    if isinstance(shrink, Tensor) or shrink != 1:  # a tensor is not looked at: that would wait for the device
        target.mul_(shrink)
    if scale is None:
        target.add_(s)
    else:
        target.addcmul_(s, scale)
    if target is not u:
        u.copy_(target)


@contextmanager
def state_precision_kept(loading: Optimizer, *owners: Optimizer) -> Iterator[None]:
    """While `loading` loads, keep the saved precision of the state of the `MatrixOptimizer`s among `owners`."""
    saved: dict[Any, Any] = {}

    def before(_: Optimizer, state_dict: dict[str, Any]) -> None:
        saved.update(state_dict)

    def after(_: Optimizer) -> None:
        indices = (index for group in saved["param_groups"] for index in group["params"])
        params = (p for group in loading.param_groups for p in group["params"])
        ours = {
            p for o in owners if isinstance(o, MatrixOptimizer) for group in o.param_groups for p in group["params"]
        }
        for index, p in zip(indices, params, strict=True):
            for key, value in saved["state"].get(index, {}).items() if p in ours else ():
                if isinstance(value, Tensor):
                    loading.state[p][key] = value.to(device=p.device, dtype=compute_dtype(p))

    handles = [
        loading.register_load_state_dict_pre_hook(before),  # after the user's own
        loading.register_load_state_dict_post_hook(after, prepend=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()

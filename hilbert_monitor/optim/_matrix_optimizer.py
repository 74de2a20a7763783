"""The base class of RowNorm and Muon: which parameters it takes, how a step runs, and its increment afterwards."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from hilbert_monitor.geometry import compute_dtype
from hilbert_monitor.geometry.sharding import is_dtensor, like

from ._hyperparameters import Group, check_choice, check_number, options_of, parameter_label
from ._layout import changes, is_partial, laid_out_like, local, refusal
from ._rounding import ROUNDINGS


class LastStep(NamedTuple):
    """The hyperparameters of the last step on a parameter, and how to recognise the gradient it used."""

    options: Group
    mark: object
    """Also set as an attribute of the gradient."""
    version: int
    """Of the gradient: torch counts its changes in place."""

    @classmethod
    def of(cls, gradient: Tensor, options: Group) -> LastStep:
        """Record a step. Marks the gradient with an attribute; a weak reference to it would forbid swapping it."""
        gradient._hilbert_mark = mark = object()  # type: ignore[attr-defined]
        return cls(options, mark, changes(gradient))

    def had(self, gradient: Tensor | None) -> bool:
        """Return whether the step used this gradient and nobody has changed it since."""
        return (
            gradient is not None
            and getattr(gradient, "_hilbert_mark", None) is self.mark
            and changes(gradient) == self.version
        )


@contextmanager
def outside_autocast(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Switch autocast off on every device that holds one of `tensors`."""
    with ExitStack() as stack:
        for device in {t.device.type for t in tensors}:
            if torch.amp.is_autocast_available(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def call_closure(closure: Callable[[], Any] | None) -> Any:
    """Return what a step's closure returns, run with gradients enabled; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class MatrixOptimizer(Optimizer, ABC):
    """Base class of optimizers that move matrices, and can tell the increment of their last step.

    Weight decay is decoupled, and the state is in fp32 (in fp64 for fp64 parameters); what compensated rounding lost is
    in the parameter's own dtype. A subclass checks its hyperparameters (`_check_group`), steps one group
    (`_step_group`), and forms the increment of the last step again (`_form_increment`).
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
        check_number(group, "lr", tensor=True)
        check_number(group, "weight_decay")
        check_choice(group, "maximize", (True, False))
        check_choice(group, "rounding", ROUNDINGS)

    def _check_parameter(self, group: Group, index: int) -> None:
        p, name, label = group["params"][index], type(self).__name__, parameter_label(group, index)
        if p.ndim != 2:
            raise ValueError(
                f"{name} moves matrices, and parameter {label} is none: give it to torch.optim.AdamW,"
                " in one ChainedOptimizer with this one"
            )
        if p.is_complex() or not p.is_floating_point():
            raise TypeError(f"{name} moves real floating-point matrices, got {p.dtype} for {label}")
        if is_partial(p):
            raise TypeError(
                f"{name} moves parameters, and {label} is a sum that the ranks have not taken yet ({p.placements}):"
                " redistribute it to Shard or Replicate"
            )

    def check_gradients(self) -> None:
        """Raise TypeError for a gradient that this optimizer cannot use, before any parameter has moved."""
        for group in self.param_groups:
            for index, p in enumerate(group["params"]):
                if p.grad is not None and (p.grad.layout != torch.strided or p.grad.is_complex()):
                    kind = "complex" if p.grad.is_complex() else "sparse"
                    raise TypeError(
                        f"{type(self).__name__} needs dense real gradients, got a {kind} one for parameter"
                        f" {parameter_label(group, index)}"
                    )
                refused = refusal(p)
                if refused is not None:
                    raise TypeError(
                        f"{type(self).__name__} got {refused}, {parameter_label(group, index)}: redistribute it to the"
                        " parameter's mesh and placements"
                    )

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
                options = {**self.defaults, **options_of(group)}  # an old checkpoint may lack a hyperparameter
                self._step_group(group["params"], options)
                moved = [p for p in group["params"] if is_dtensor(p) and p.grad is not None]
                torch.autograd.graph.increment_version(moved)  # their local tensors were changed in place
                last.update((p, LastStep.of(p.grad, options)) for p in group["params"] if p.grad is not None)
        self._last = last
        return loss

    @torch.no_grad()
    def increment(self, param: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return the increment S of the last step on `param`, without the decoupled weight decay.

        U' = (1 - lr decay) U + S: signed, and scaled by the learning rate of that step. Zero if the parameter had no
        gradient in the last step. A step that a GradScaler skipped does not count: the increment is still that of the
        step before it. It is formed here from the optimizer's state, so a step itself costs nothing more.

        Of a sharded parameter every rank forms its own shard. All ranks of the mesh must call this together where the
        formula needs the other shards: for Muon, for RowNorm with center="both", and where columns are sharded.

        Args:
            param: one of this optimizer's parameters.
            out: memory for the result: for a sharded parameter a DTensor laid out alike, or memory for this rank's
                part. A subclass may ignore it.

        Returns:
            (m, n), in the dtype of the optimizer's state; a DTensor laid out as `param` if it is sharded.
        """
        if not any(param is p for group in self.param_groups for p in group["params"]):
            raise ValueError(f"the parameter of shape {tuple(param.shape)} is not one of this {type(self).__name__}'s")
        if param not in self._last:
            raise RuntimeError(
                "no step has moved this parameter since the optimizer was made, loaded or given it: call this after one"
            )
        last = self._last[param]
        if last is None:
            return torch.zeros_like(param, dtype=compute_dtype(param))
        with outside_autocast([param]):
            S = self._form_increment(param, last, None if out is None else local(out))
        return like(param, S) if is_dtensor(param) else S

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state in its own precision; torch's method would cast it to that of the parameters."""
        with keep_state_precision(self, self):
            super().load_state_dict(state_dict)

    def _before_step(self) -> None:
        """Do what a subclass needs once a step, before any group."""

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
    def _form_increment(self, param: Tensor, last: LastStep, out: Tensor | None) -> Tensor:
        """Form the increment of the last step, in `out` if the subclass can use it.

        All tensors are plain ones: for a sharded parameter, what this rank has.
        """


@contextmanager
def keep_state_precision(loading: Optimizer, *owners: Optimizer) -> Iterator[None]:
    """Load state in fp32 or better, where torch would cast it to the parameter's dtype, and laid out as the parameter.

    Args:
        loading: the optimizer whose `load_state_dict` runs in this context.
        *owners: the optimizers that it holds; the state of every `MatrixOptimizer` among them keeps its precision.
    """
    saved: dict[Any, Any] = {}

    def before(_: Optimizer, state_dict: dict[str, Any]) -> None:
        saved.update(state_dict)

    def after(_: Optimizer) -> None:
        indices = (index for group in saved["param_groups"] for index in group["params"])
        params = (p for group in loading.param_groups for p in group["params"])
        matrix_optimizers = (o for o in owners if isinstance(o, MatrixOptimizer))
        ours = {p for o in matrix_optimizers for group in o.param_groups for p in group["params"]}
        for index, p in zip(indices, params, strict=True):
            for key, value in saved["state"].get(index, {}).items():
                if isinstance(value, Tensor) and p in ours:
                    dtype = p.dtype if key == "compensation" else compute_dtype(p)
                    loading.state[p][key] = laid_out_like(value.to(device=p.device, dtype=dtype), p)
                elif isinstance(value, Tensor) and value.shape == p.shape and key != "step":
                    loading.state[p][key] = laid_out_like(loading.state[p][key], p)

    handles = [
        loading.register_load_state_dict_pre_hook(before),  # after the user's own
        loading.register_load_state_dict_post_hook(after, prepend=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()

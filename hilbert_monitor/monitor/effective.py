"""The weight of a head that is computed from other parameters: adapters (LoRA, DoRA) and torch's parametrizations.

Such a head has no parameter whose step is the step of its weight. Its increment is the difference of the effective
weight before and after a step, which is formed on the steps that are measured and on no others. The weight decay of the
parameters is in it: what it does to the effective weight is no common factor.

How the weight is computed:

- torch.nn.utils.parametrize and its older kin (weight_norm, spectral_norm, prune): as the module does it, in eval mode,
  so that a spectral norm takes no step of its power iteration.
- LoRA as peft has it, on a frozen nn.Linear: the product scale * B A alone, V d r multiplications in fp32. The frozen
  weight cancels in a difference, and nothing is lost to its rounding.
- any other adapter (DoRA and the other kinds of peft, one's own): the head is a linear map, and what it makes of the
  unit vectors, less what it makes of zero, is its matrix: V d^2 multiplications. Where it has less than fp32 this is
  done on a copy in fp32: a result rounded to bf16 would lose steps that the logits see. To merge a copy of a peft layer
  would be cheaper, but is another code path for each kind of adapter, and knows none but those of peft.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module, ModuleDict, Parameter
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.optim import Optimizer

from hilbert_monitor.geometry import compute_dtype, full_precision
from hilbert_monitor.optim.recipe import parameter_of, weight_matrix
from hilbert_monitor.runs.stops import handled_signals

from .head_rows import HeadRows
from .hidden import undisturbed
from .increment import IncrementSource
from .kept_rows import KeptRows
from .owners import owning_optimizer
from .weight_increment import Increment

UNIT_VECTORS = 256
"""How many unit vectors a head is given at a time."""
WRAPPED = ("base_layer", "original_module")
"""Where an adapter of peft has the head that it changes; the second of these around a few tokens."""
ALIKE = 1e-3
"""Difference between a head's output and that of its matrix, as a share of it, from which on it is no linear map."""


class EffectiveWeight:
    """A head's weight, computed from its parameters whenever it is asked for.

    Args:
        module: the head.
        kind: how it is computed, in a word or two.
        parameters: from which it is computed.
        compute: computes it; nothing that it changes in the module stays.
        fixed: a part of the weight that no step changes and that `compute` leaves out, (V, d).
        by_tokens: whether it is (V, d) for sure, however the module stores it.
    """

    def __init__(
        self,
        module: Module,
        kind: str,
        parameters: Iterable[Parameter],
        compute: Callable[[], Tensor],
        *,
        fixed: Tensor | None = None,
        by_tokens: bool = False,
    ) -> None:
        self.module, self.kind, self._compute, self._fixed = module, kind, compute, fixed
        self.parameters, self.by_tokens = list(parameters), by_tokens
        if any(hasattr(p, "device_mesh") for p in module.parameters()):
            raise TypeError(
                f"the head's weight is computed ({kind}) from parameters that are sharded, and is on no rank: it is not"
                " measured; train a plain head, or keep this one whole on every rank"
            )

    @cached_property
    def like(self) -> Tensor:
        """A tensor of its shape, dtype and device that takes no memory."""
        moving = self.moving()
        return moving.new_zeros(()).expand(moving.shape)

    @property
    def trained(self) -> Parameter:
        """The largest parameter that is trained, for which the optimizer is looked up; any if all are frozen."""
        return max(self.parameters, key=lambda p: (p.requires_grad, p.numel()))

    @full_precision
    def moving(self) -> Tensor:
        """The weight as it is now, but for a part that no step changes. It may be a parameter's own memory."""
        device = next(self.module.parameters()).device.type
        with undisturbed(self.module), torch.autocast(device, enabled=False):
            return self._compute().detach()

    def whole(self) -> Tensor:
        """The weight as it is now."""
        moving = self.moving()
        return moving if self._fixed is None else moving + self._fixed.detach().to(moving.dtype)


def effective_weight(module: Module) -> EffectiveWeight | None:
    """Return how a head's weight is computed, or None if it is a parameter of its own.

    Raises:
        TypeError: if the head is an adapter and no linear map, or what it is computed from is sharded.
    """
    if is_parametrized(module, "weight"):
        chain: Any = module.parametrizations["weight"]  # type: ignore[index]
        return EffectiveWeight(module, "parametrized", chain.parameters(), chain)
    if (hooked := _hooked(module)) is not None:
        return hooked
    return _adapted(module)


def _hooked(module: Module) -> EffectiveWeight | None:
    """A weight that a hook computes before each forward pass, as torch's older functions do it."""
    for hook in module._forward_pre_hooks.values():
        stored = [p for name, p in module._parameters.items() if name.startswith("weight_") and p is not None]
        if isinstance(hook, WeightNorm) and hook.name == "weight":
            return EffectiveWeight(module, "weight_norm", stored, lambda hook=hook: hook.compute_weight(module))  # type: ignore[misc]
        if isinstance(hook, SpectralNorm) and hook.name == "weight":
            compute = lambda hook=hook: hook.compute_weight(module, do_power_iteration=False)  # noqa: E731
            return EffectiveWeight(module, "spectral_norm", stored, compute)
        if isinstance(hook, BasePruningMethod) and getattr(hook, "_tensor_name", "") == "weight":
            return EffectiveWeight(module, "pruned", stored, lambda hook=hook: hook.apply_mask(module))  # type: ignore[misc]
    return None


# Adapters


def _adapted(module: Module) -> EffectiveWeight | None:
    """The weight of a head beside or around which others are trained."""
    base = next((x for x in (getattr(module, name, None) for name in WRAPPED) if isinstance(x, Module)), None)
    own = parameter_of(module, "weight")
    beside = [p for p in module.parameters() if p.requires_grad and p is not own and p.ndim > 1]
    if not isinstance(base, Module) and (own is None or own.requires_grad or not beside):
        return None
    kind, matrix = type(module).__name__, weight_matrix(module if base is None else base)
    parameters = [p for p in module.parameters() if p.ndim > 1 or p.requires_grad]
    if isinstance(base, Linear) and (products := _low_rank(module, base)) is not None:
        return EffectiveWeight(module, kind, parameters, products, fixed=base.weight, by_tokens=True)
    width = int(getattr(module, "in_features", 0) or (matrix.shape[1] if matrix is not None else 0))
    _check_linear(module, width)
    return EffectiveWeight(module, kind, parameters, lambda: _matrix_of(module, width), by_tokens=True)


def _low_rank(module: Any, base: Linear) -> Callable[[], Tensor] | None:
    """How LoRA's product is formed, where it is nothing but that: no DoRA or other variant, nothing merged."""
    parts = [getattr(module, name, None) for name in ("lora_A", "lora_B")]
    plain = not any(getattr(module, "use_dora", {}).values()) and not getattr(module, "lora_variant", {})
    if not all(isinstance(part, ModuleDict) for part in parts) or not plain or getattr(module, "merged", False):
        return None
    layers = [layer for part in parts for layer in part.values()]  # type: ignore[union-attr]
    if base.weight.requires_grad or not all(isinstance(x, Linear) and x.bias is None for x in layers):
        return None

    def products() -> Tensor:
        off = getattr(module, "disable_adapters", False)
        active = [] if off else [name for name in module.active_adapters if name in module.lora_A]
        total: Tensor | None = None
        for name in active:
            B, A = (_wide(part[name].weight) for part in (module.lora_B, module.lora_A))
            B = module.scaling[name] * B  # (V, r): smaller than the product
            total = B @ A if total is None else torch.addmm(total, B, A)
        return torch.zeros_like(base.weight, dtype=compute_dtype(base.weight)) if total is None else total

    return products


def _wide(x: Tensor) -> Tensor:
    return x.to(compute_dtype(x))


def _matrix_of(module: Module, width: int) -> Tensor:
    """The matrix (V, d) of a linear map: what it makes of the unit vectors, less what it makes of zero."""
    head: Any = _in_fp32(module)
    p = next(head.parameters())
    unit = torch.eye(width, dtype=p.dtype, device=p.device)
    offset = head.forward(unit.new_zeros(1, width))  # (1, V)
    U: Tensor = offset.new_empty(offset.shape[-1], width)
    for start in range(0, width, UNIT_VECTORS):
        at = slice(start, start + UNIT_VECTORS)
        U[:, at] = (head.forward(unit[at]) - offset).t()
    return U


def _check_linear(module: Module, width: int) -> None:
    """Refuse a head that is no linear map of hidden states with `width` entries."""
    try:
        with undisturbed(module):
            head = _in_fp32(module)
            x = torch.linspace(-1, 1, width, dtype=next(head.parameters()).dtype, device=next(head.parameters()).device)
            zero, one, minus = (head.forward(k * x[None]).double() for k in (0, 1, -1))
            linear = zero.ndim == 2 and float((one + minus - 2 * zero).norm()) <= ALIKE * float(one.norm())
    except Exception as error:  # whatever its forward pass raises
        if handled_signals(error):
            raise
        raise TypeError(
            f"the head is an adapter, a {type(module).__name__}, that does not take hidden states of {width} numbers"
            f" ({error}): train the head whole, or watch another as head=..."
        ) from error
    if not linear:
        raise TypeError(
            f"the head is an adapter, a {type(module).__name__}, and no linear map of its input, so that it has no"
            " matrix to measure: train the head whole, or watch another as head=..."
        )


def _in_fp32(module: Module) -> Module:
    """The module, or a copy of it in fp32 if a parameter has less."""
    if all(p.dtype.itemsize >= 4 for p in module.parameters() if p.is_floating_point()):
        return module
    return copy.deepcopy(module).float()


# Its increment


class EffectiveSource(IncrementSource):
    """Tells what each step does to an effective weight, as the difference of it before and after.

    Args:
        optimizers: that move its parameters, one or several.
        effective: the weight.
        rows: the entries of it that this rank has.
    """

    def __init__(self, optimizers: list[Optimizer], effective: EffectiveWeight, *, rows: HeadRows) -> None:
        self.effective = effective
        param = effective.trained
        owner = owning_optimizer(optimizers, param)
        assert owner is not None
        super().__init__(owner, param, rows=rows)
        owners = {id(owning_optimizer(optimizers, p)) for p in effective.parameters if p.requires_grad}
        self.belief.by_update = len(owners) > 1  # a step of one of them is not the whole step

    @property
    def from_state(self) -> bool:
        """Never: the state is that of other parameters."""
        return False

    @property
    def is_rounded(self) -> bool:
        """Whether the effective weight has less than fp32."""
        return self.effective.like.dtype.itemsize < 4

    @torch.no_grad()
    def stored(self) -> Increment:
        """Return the difference of the effective weight around the last step, the decay of its parameters included."""
        before = self._by_weights.before
        if self.last is None or before is None:
            raise RuntimeError("the effective weight of before this step was not kept: it was not to be measured")
        after = self._weights()
        dtype = compute_dtype(before)
        largest = max((float(x.abs().amax()) for x in (after, before) if x.numel()), default=0.0)
        return Increment(after.to(dtype) - before.to(dtype), 2 * torch.finfo(before.dtype).eps * largest)

    def _watched(self) -> KeptRows:
        return KeptRows(self._some_weights, len(self.param))

    def _some_weights(self, at: slice) -> Tensor:
        return self.param.detach()[at]

    def _weights(self) -> Tensor:
        return self.rows.of(self.effective.moving())

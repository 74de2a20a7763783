"""The weight of a head that is computed from other parameters: LoRA's products, and torch's parametrizations.

The increment is the difference of the effective weight before and after a step, with the weight decay of the parameters
in it. Of LoRA on a frozen nn.Linear the factors alone are kept, and the frozen weight cancels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module, ModuleDict, Parameter
from torch.nn.utils.parametrize import is_parametrized
from torch.optim import Optimizer

from hilbert_monitor.geometry import RowSource, compute_dtype, full_precision
from hilbert_monitor.optim.recipe import parameter_of

from .hidden_states import without_side_effects
from .increment import Basis, IncrementSource, LocalRows, SampledRows, largest
from .optimizers import Rate, owner_of

WRAPPED = ("base_layer", "original_module")  # where an adapter of peft has the head that it changes
HOOKED = ("weight_g", "weight_orig")  # parameters of a head whose weight a hook of torch's older functions computes


_product = full_precision(torch.matmul)


class ComputedWeight:
    """A head's weight that is computed from its parameters whenever it is asked for.

    `factors` returns (V, r) and (r, d), whose product is the part that steps change, beside the `fixed` one (V, d); or
    the whole weight (V, d) and nothing.
    """

    def __init__(
        self,
        module: Module,
        kind: str,
        parameters: Iterable[Parameter],
        factors: Callable[[], tuple[Tensor, Tensor | None]],
        *,
        fixed: Tensor | None = None,
    ) -> None:
        self.module, self.kind, self._factors, self._fixed = module, kind, factors, fixed
        self.parameters, self.by_tokens = list(parameters), fixed is not None
        if any(hasattr(p, "device_mesh") for p in module.parameters()):
            raise TypeError(
                f"the head's weight is computed ({kind}) from parameters that are sharded, and is on no rank: it is not"
                " measured; train a plain head, or keep this one whole on every rank"
            )

    @cached_property
    def like(self) -> Tensor:
        """A tensor of its shape, dtype and device that takes no memory."""
        left, right = self.factors()
        return left.new_zeros(()).expand(left.shape if right is None else (len(left), right.shape[1]))

    @property
    def trained(self) -> Parameter:
        """The largest parameter that is trained, for which the optimizer is looked up; any if all are frozen."""
        return max(self.parameters, key=lambda p: (p.requires_grad, p.numel()))

    @full_precision
    @torch.no_grad()
    def factors(self) -> tuple[Tensor, Tensor | None]:
        """Return the factors of the part that steps change, in memory of their own or a parameter's."""
        device = next(self.module.parameters()).device.type
        with torch.autocast(device, enabled=False):
            left, right = self._factors()
            return left.detach(), None if right is None else right.detach()

    def rows(self, local: LocalRows) -> RowSource:
        """Return the rows of the weight as it is now (V, d); of LoRA they are formed on demand."""
        left, right = self.factors()
        if right is None or self._fixed is None:
            return RowSource(local.of(left))
        form = lambda b, w: _product(b, right) + w.to(b.dtype)  # noqa: E731
        return RowSource(left, self._fixed.detach(), form=form, width=right.shape[1], dtype=left.dtype)


def computed_weight(module: Module) -> ComputedWeight | None:
    """Return how a head's weight is computed, or None if it is a parameter of its own."""
    if is_parametrized(module, "weight"):
        chain: Any = module.parametrizations["weight"]  # type: ignore[index]

        def parametrized() -> tuple[Tensor, None]:
            with without_side_effects(module):
                return chain(), None

        return ComputedWeight(module, "parametrized", chain.parameters(), parametrized)
    if any(name in module._parameters for name in HOOKED):
        raise TypeError(
            f"the weight of the head, a {type(module).__name__}, is computed by a hook (weight_norm, spectral_norm or"
            " prune of torch.nn.utils), and is not measured: use torch.nn.utils.parametrizations"
        )
    base = next((x for x in (getattr(module, name, None) for name in WRAPPED) if isinstance(x, Module)), None)
    own = parameter_of(module, "weight")
    beside = [p for p in module.parameters() if p.requires_grad and p is not own and p.ndim > 1]
    if base is None and (own is None or own.requires_grad or not beside):
        return None
    factors = _low_rank_factors(module, base) if isinstance(base, Linear) else None
    if factors is None or not isinstance(base, Linear):
        raise TypeError(
            f"the head is an adapter, a {type(module).__name__}, other than plain LoRA on a frozen nn.Linear, and is"
            " not measured: train the head whole, or watch another as head=..."
        )
    parameters = [p for p in module.parameters() if p.ndim > 1 or p.requires_grad]
    return ComputedWeight(module, type(module).__name__, parameters, factors, fixed=base.weight)


def _low_rank_factors(module: Any, base: Linear) -> Callable[[], tuple[Tensor, Tensor]] | None:
    """Return how LoRA's factors are formed, where its weight is their product alone: no DoRA, nothing merged."""
    parts = [getattr(module, name, None) for name in ("lora_A", "lora_B")]
    plain = not any(getattr(module, "use_dora", {}).values()) and not getattr(module, "lora_variant", {})
    if not all(isinstance(part, ModuleDict) for part in parts) or not plain or getattr(module, "merged", False):
        return None
    layers = [layer for part in parts for layer in part.values()]  # type: ignore[union-attr]
    if base.weight.requires_grad or not all(isinstance(x, Linear) and x.bias is None for x in layers):
        return None
    dtype, (V, d) = compute_dtype(base.weight), base.weight.shape

    def factors() -> tuple[Tensor, Tensor]:
        off = getattr(module, "disable_adapters", False)
        active = [] if off else [name for name in module.active_adapters if name in module.lora_A]
        B = [module.scaling[name] * module.lora_B[name].weight.to(dtype) for name in active]
        A = [module.lora_A[name].weight.to(dtype) for name in active]
        empty = base.weight.new_zeros(0, dtype=dtype)
        return torch.cat(B or [empty.view(0, 0).expand(V, 0)], 1), torch.cat(A or [empty.view(0, 0).expand(0, d)], 0)

    return factors


class ComputedSource(IncrementSource):
    """Tells what each step does to a computed weight, as the difference of it before and after."""

    def __init__(self, optimizers: list[Optimizer], computed: ComputedWeight, *, rows: LocalRows) -> None:
        self.computed = computed
        owner = owner_of(optimizers, computed.trained)
        assert owner is not None
        owners = {id(owner_of(optimizers, p)) for p in computed.parameters if p.requires_grad}
        basis = Basis.UPDATE if len(owners) > 1 else Basis.STEP  # a step of one of them is not the whole step
        super().__init__(owner, computed.trained, decay="coupled", rows=rows, basis=basis)
        self._samples = SampledRows(LocalRows(self.param), self.param)

    @property
    def is_rounded(self) -> bool:
        """Never: the increment is that of the stored weights already."""
        return False

    def _snapshot(self) -> Any:
        return tuple(None if x is None else x.clone() for x in self.computed.factors())

    def _weights(self) -> Tensor:  # only its shape is asked for
        return self.rows.of(self.computed.like)

    def _rounding(self) -> Rate:
        (left, right), (old_left, old_right) = self.computed.factors(), self._before
        if right is None:
            return 2 * torch.finfo(left.dtype).eps * largest(left, old_left)
        products = ((left, right), (old_left, old_right))
        entries = [float(b.norm(dim=1).amax() * a.norm(dim=0).amax()) for b, a in products if b.numel() and a.numel()]
        return 2 * torch.finfo(left.dtype).eps * max(entries, default=0.0)

    def _difference(self, share: Rate) -> RowSource:
        (left, right), (old_left, old_right) = self.computed.factors(), self._before
        if right is None:
            dtype = compute_dtype(left)
            parts = self.rows.of(left), self.rows.of(old_left)
            return RowSource(*parts, form=lambda u, b: torch.sub(u.to(dtype), b.to(dtype)), dtype=dtype)
        form = lambda b, old: _product(b, right) - _product(old, old_right)  # noqa: E731
        return RowSource(left, old_left, form=form, width=right.shape[1], dtype=left.dtype)

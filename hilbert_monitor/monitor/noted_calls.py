"""What modules are given and return in a forward pass, noted by hooks that are there for that pass alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves


@contextmanager
def noted_inputs(head: Module | Tensor, inputs: list[Tensor], outputs: list[Any]) -> Iterator[None]:
    """Collect what the head is given within the block, and what it returns."""
    if isinstance(head, Tensor):
        with _Products(head, inputs):
            yield
        return

    def before(_: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        if given is not None:
            inputs.append(given.detach().clone())  # what follows may write to it

    def after(_: Module, args: tuple[Any, ...], output: Any) -> None:
        outputs.append(output)

    hooks = [head.register_forward_pre_hook(before, with_kwargs=True), head.register_forward_hook(after)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def noted_outputs(modules: Iterable[Module], outputs: dict[Module, Any]) -> Iterator[None]:
    """Keep the last output of each of some modules, in the order in which they were called."""

    def after(module: Module, args: tuple[Any, ...], output: Any) -> None:
        outputs.pop(module, None)
        outputs[module] = output

    hooks = [module.register_forward_hook(after) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _Products(TorchFunctionMode):
    """Collects what is multiplied by a parameter that no module of its own holds, by a view or a cast of it.

    Args:
        weight: the parameter.
        inputs: where what it is multiplied with goes.
    """

    def __init__(self, weight: Tensor, inputs: list[Tensor]) -> None:
        super().__init__()
        self._widths, self._inputs = set(weight.shape), inputs
        self._forms = [weight.detach()]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch, and look at what it was given."""
        result = func(*args, **(kwargs or {}))
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.is_floating_point()]
        places = {form.untyped_storage().data_ptr() for form in self._forms}
        others = [x for x in given if x.untyped_storage().data_ptr() not in places]
        if len(others) < len(given):
            if not others and isinstance(result, Tensor) and result.is_floating_point():
                self._forms.append(result)
            self._inputs.extend(x.detach().clone() for x in others[:1] if x.ndim > 1 and x.shape[-1] in self._widths)
        return result

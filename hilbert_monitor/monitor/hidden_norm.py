"""H, the largest norm that a hidden state can have where the LM head is given it.

Behind a final RMSNorm with gain g it is sqrt(d) max |g|, whatever the input: without the gain, its output has norm
sqrt(d) at most. A LayerNorm adds the norm of its bias. Which module that is, and what its gain means (some norms have
1 + weight), is found in a forward pass: it is the one whose output the head is given, and its output is computed again
on a few rows. Behind anything else H is the largest norm that the head has been given so far, on any rank. An RMS
bounds nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from .runtime import Ranks

ROWS = 8
"""Rows of which a norm's output is computed again."""
CLOSE = 0.02
"""Difference, as a share, up to which the two are the same: the module may compute in bf16."""

Bound = Callable[[], Tensor]
"""Makes the bound of a norm's output from its parameters, as they are now. ()."""


class HiddenNorm:
    """Looks at what a head is given, from its making to `remove`.

    Args:
        model: a language model.
        head: its head, which the model calls.
        ranks: those that train together.
    """

    def __init__(self, model: Module, head: Module, ranks: Ranks) -> None:
        self.ranks = ranks
        self.largest: float | None = None
        """The largest norm that the head has been given so far; of a run that goes on, also before."""
        self._seen: Tensor | None = None  # since it was last asked for
        self._bound: Bound | None = None
        self._is_behind_norm: bool | None = None
        self._last: tuple[Module, Tensor, Tensor] | None = None  # a norm, its input and output
        norms = [m for m in model.modules() if type(m).__name__.lower().endswith("norm")]
        self._handles = [m.register_forward_hook(self._after_norm) for m in norms]
        self._handles.append(head.register_forward_pre_hook(self._before_head))

    def remove(self) -> None:
        """Look no more."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._last = [], None

    def value(self) -> float:
        """H as it is now. Called on every rank; an accelerator is waited for."""
        if self._bound is not None:
            return float(self._bound())
        most = max(0.0 if self._seen is None else float(self._seen), self.largest or 0.0)
        most = -self.ranks.all_min([-most])[0]
        if most == 0:
            raise RuntimeError(
                "nats=... needs the norms of hidden states, and the head was given none in this step, or none that is"
                " finite: a model that never calls its head needs hidden_norm=..., the largest norm of what it makes"
            )
        self._seen, self.largest = None, most
        return most

    @torch.no_grad()
    def _after_norm(self, module: Module, args: tuple[Any, ...], output: Any) -> None:
        if self._is_behind_norm is None and isinstance(output, Tensor) and args and isinstance(args[0], Tensor):
            self._last = module, args[0].detach(), output.detach()

    @torch.no_grad()
    def _before_head(self, module: Module, args: tuple[Any, ...]) -> None:
        if not args or not isinstance(args[0], Tensor) or not args[0].numel() or self._bound is not None:
            return
        hidden = args[0].detach()
        if self._is_behind_norm is None:
            self._bound = self._find_bound(hidden)
            self._is_behind_norm, self._last = self._bound is not None, None
        norms = torch.linalg.vector_norm(hidden.flatten(0, -2).float(), dim=1)
        largest = norms.nan_to_num(0.0, 0.0).amax()  # what is not finite makes a gradient that is not
        self._seen = largest if self._seen is None else torch.maximum(self._seen, largest)

    def _find_bound(self, hidden: Tensor) -> Bound | None:
        """The bound of the norm that made these hidden states, or part of them; None if none did."""
        if self._last is None:
            return None
        module, x, y = self._last
        if y.untyped_storage().data_ptr() != hidden.untyped_storage().data_ptr():
            return None
        return bound_of_norm(module, x, y)


def bound_of_norm(module: Module, x: Tensor, y: Tensor) -> Bound | None:
    """Return what bounds |y| for a norm that made y of x, from its parameters; None if it is no norm that is known.

    Args:
        module: the norm.
        x: (..., d) what it was given.
        y: (..., d) what it made of it.
    """
    x, y = (rows.flatten(0, -2)[:ROWS].double() for rows in (x, y))
    width, eps = x.shape[1], _epsilon(module)
    root = width**0.5

    def gain(plus: float) -> Tensor:
        weight = _parameter(module, ("weight", "gain", "scale"))
        return torch.ones(width, dtype=x.dtype, device=x.device) if weight is None else weight + plus

    def shift() -> Tensor:
        bias = _parameter(module, ("bias",))
        return torch.zeros(width, dtype=x.dtype, device=x.device) if bias is None else bias

    centred = x - x.mean(1, keepdim=True)
    for plus in (0.0, 1.0):
        for z in (x, centred):
            again = z / (z.square().mean(1, keepdim=True) + eps).sqrt() * gain(plus) + shift()
            if torch.linalg.vector_norm(again - y) <= CLOSE * torch.linalg.vector_norm(y):
                return lambda plus=plus: root * gain(plus).abs().amax() + torch.linalg.vector_norm(shift())  # type: ignore[misc]
    return None


def _epsilon(module: Module) -> float:
    names = ("eps", "variance_epsilon", "epsilon")
    return float(next((value for name in names if isinstance(value := getattr(module, name, None), float)), 1e-6))


def _parameter(module: Module, names: tuple[str, ...]) -> Tensor | None:
    """A parameter of a norm, whole and in fp64; None if it has none of these names."""
    value: Any = next((p for name in names if isinstance(p := getattr(module, name, None), Tensor)), None)
    if value is None:
        return None
    whole: Tensor = value.detach().full_tensor() if hasattr(value, "full_tensor") else value.detach()
    return whole.double()

"""The LM head that is watched: which module it is, and the increment of its last step as it acts on the logits."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Embedding, EmbeddingBag, Module
from torch.optim import Optimizer

from hilbert_monitor.geometry import compute_dtype
from hilbert_monitor.optim import find_head
from hilbert_monitor.optim.roles import head_weight, parameter_of

from .ceiling import diameter_ceiling
from .increment import Decay, HeadStep, IncrementSource


class LogitIncrement(NamedTuple):
    """The increment of the logits' matrix in one step."""

    S: Tensor
    """(V, d): scaled, padding dropped; (V, d + 1) for a head with a bias, whose increment is the last column."""
    rounding: float | None
    """Bound on the error of D(S) from the rounding of the weights, where there is one."""


class WatchedHead:
    """An LM head and the optimizer that moves it.

    Args:
        model: a language model.
        optimizer: the one that moves the head, or a ChainedOptimizer.
        head: the LM head, its name, or None to look for it.
        decay: how an unknown optimizer uses weight_decay.
        vocab_size: rows of the head that are tokens, if it is padded.
        logit_scale: factor between the head's output and the logits.
    """

    def __init__(
        self,
        model: Module,
        optimizer: Optimizer,
        *,
        head: str | Module | None = None,
        decay: Decay | None = None,
        vocab_size: int | None = None,
        logit_scale: float = 1.0,
    ) -> None:
        self.name, self.module = find_head_module(model, head)
        weight = head_weight(self.module, self.name)
        if not isinstance(weight, Tensor) or weight.ndim != 2:
            kind = type(self.module).__name__
            raise TypeError(f"the head '{self.name}', a {kind}, has no (V, d) weight: pass the LM head as head=...")
        if hasattr(weight, "device_mesh"):
            raise TypeError(f"the head '{self.name}' has a sharded weight, and only a whole one is measured: use DDP")
        self.weight, self.vocab_size, self.logit_scale = weight, vocab_size, logit_scale
        self.source = IncrementSource(optimizer, weight, decay=decay)
        bias = getattr(self.module, "bias", None)
        self.bias = IncrementSource(optimizer, bias, decay=decay) if isinstance(bias, Tensor) else None
        embeddings = (m for m in model.modules() if isinstance(m, Embedding | EmbeddingBag))
        self.tied = any(weight is parameter_of(m, "weight") for m in embeddings)
        self._buffer: Tensor | None = None

    def remarks(self) -> list[str]:
        """Reasons why the bound H D(S) on the perturbation is not tight for this head."""
        remarks = []
        if self.bias is not None:
            remarks.append("the head has a bias: rows are extended by its increment, and sqrt(H^2 + 1) D is a bound")
        if self.tied:
            remarks.append("the head's weight is an embedding's too: a step also moves the hidden states through it")
        return remarks

    @property
    def waits_for_bias(self) -> bool:
        """Whether the bias has an optimizer of its own, so that a step is whole only when both have stepped."""
        return self.bias is not None and self.bias.optimizer is not self.source.optimizer

    def watch(
        self,
        on_step: Callable[[HeadStep], None],
        *,
        measure: Callable[[], bool],
        guard: Callable[[str], AbstractContextManager[Any]],
    ) -> Callable[[], None]:
        """Call `on_step` after each step of the head; return a function that ends it. See IncrementSource.watch."""
        ends = []
        if self.bias is not None:  # first, so that its step is known when `on_step` runs for the weight
            ends.append(self.bias.watch(lambda step: None, measure=measure, guard=guard))
        ends.append(self.source.watch(on_step, measure=measure, guard=guard))

        def end() -> None:
            for stop in ends:
                stop()
            for source in filter(None, (self.source, self.bias)):
                source.forget()
            self._buffer = None

        return end

    def increment(self) -> LogitIncrement:
        """Form the increment of the last step as it acts on the logits."""
        weight = self.weight
        if self._buffer is None and weight.device.type == "cpu":
            self._buffer = torch.empty_like(weight, dtype=compute_dtype(weight), requires_grad=False)
        weight_increment = self.source.form(self._buffer)
        S = weight_increment.S
        squares = S.shape[1] * weight_increment.rounding**2  # of the error of one row, at most
        if self.bias is not None:
            bias_increment = self.bias.form()
            squares += bias_increment.rounding**2
            S = torch.cat([S, bias_increment.S.to(S.dtype)[:, None]], dim=1)
        S, rounding = S[: self.vocab_size], 2 * math.sqrt(squares) * abs(self.logit_scale)
        return LogitIncrement(S if self.logit_scale == 1 else S * self.logit_scale, rounding or None)

    def logit_matrix(self, dtype: torch.dtype) -> Tensor:
        """The matrix that makes logits of hidden states, (V, d), as it is now."""
        return self.weight.detach()[: self.vocab_size].to(dtype) * self.logit_scale

    def ceiling(self) -> float | None:
        """The largest D(S) that the optimizer can make in a step like the last, where there is a theorem."""
        if self.source.last is None or self.bias is not None:
            return None
        count = float(self.source.optimizer.state[self.weight].get("step", 0))
        ceiling = diameter_ceiling(self.source.optimizer, self.source.last, count=count, width=self.weight.shape[1])
        return None if ceiling is None else ceiling * abs(self.logit_scale)


def find_head_module(model: Module, head: str | Module | None) -> tuple[str, Module]:
    """Return the name of the LM head and the module, given either of them or neither."""
    names = {module: name for name, module in model.named_modules()}
    if isinstance(head, Module):
        if head not in names:
            raise ValueError("the head is no module of this model: pass one of its modules, or the name of one")
        return names[head], head
    name = find_head(model) if head is None else head
    if name not in names.values():
        raise ValueError(f"the model has no module called {name!r}: pass the LM head or its name as head=...")
    return name, model.get_submodule(name)

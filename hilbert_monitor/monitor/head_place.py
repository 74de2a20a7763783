"""Where the LM head is in a model: found, or named by the user."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.nn import Embedding, EmbeddingBag, Linear, Module, ModuleDict, Parameter

from hilbert_monitor.optim import find_head
from hilbert_monitor.optim.recipe import head_weight, parameter_of

from .effective import EffectiveWeight, effective_weight


class HeadPlace(NamedTuple):
    """Where the LM head is in a model."""

    name: str
    module: Module | None
    """None if the head is a parameter that no module of its own holds."""
    weight: Tensor
    """As an optimizer has it; of a weight that is computed, the largest parameter that is trained."""
    effective: EffectiveWeight | None = None
    """How the weight is computed from other parameters, if it is."""

    @property
    def like(self) -> Tensor:
        """A tensor of the weight's shape, dtype, device and layout."""
        return self.weight if self.effective is None else self.effective.like

    @property
    def bias(self) -> Tensor | None:
        """The head's bias, if it has one."""
        module = self.module
        while isinstance(inner := getattr(module, "base_layer", None), Module):
            module = inner
        return None if module is None else parameter_of(module, "bias")


def find_head_place(model: Module, head: str | Module | Parameter | None) -> HeadPlace:
    """Find the LM head in a model, given the module, its weight, the name of either, or nothing."""
    if isinstance(head, Parameter):
        name = next((name for name, p in model.named_parameters(remove_duplicate=False) if p is head), None)
        if name is None:
            raise ValueError("the head is no parameter of this model: pass one of its parameters, or the name of one")
        return _place_of_parameter(model, name)
    names = {module: name for name, module in model.named_modules()}
    if isinstance(head, Module):
        if head not in names:
            raise ValueError("the head is no module of this model: pass one of its modules, or the name of one")
        return _place_of_module(names[head], head)
    name = find_head(model) if head is None else head
    modules = dict(model.named_modules(remove_duplicate=False))
    if name in modules:
        return _place_of_module(name, modules[name])
    if name in dict(model.named_parameters(remove_duplicate=False)):
        return _place_of_parameter(model, name)
    raise ValueError(f"the model has no module or parameter called {name!r}: pass the LM head or its name as head=...")


def _place_of_parameter(model: Module, name: str) -> HeadPlace:
    holder, _, last = name.rpartition(".")
    if last == "weight":
        return _place_of_module(holder, model.get_submodule(holder))
    weight = model.get_parameter(name)
    _check_matrix(name, type(weight).__name__, weight)
    return HeadPlace(name, None, weight)


def _place_of_module(name: str, module: Module) -> HeadPlace:
    name, module = _trained_copy(name, module)
    effective = effective_weight(module)
    if effective is not None:
        return HeadPlace(name, module, effective.trained, effective)
    weight = head_weight(module, name)
    _check_matrix(name, type(module).__name__, weight)
    assert weight is not None
    return HeadPlace(name, module, weight)


def _trained_copy(name: str, module: Module) -> tuple[str, Module]:
    """The copy of a head that is trained in its place, as peft does it with `modules_to_save`."""
    copies, active = getattr(module, "modules_to_save", None), list(getattr(module, "active_adapters", None) or [])
    if isinstance(copies, ModuleDict) and len(active) == 1 and active[0] in copies:
        return f"{name}.modules_to_save.{active[0]}", copies[active[0]]
    return name, module


def _check_matrix(name: str, kind: str, weight: Tensor | None) -> None:
    if weight is None or weight.ndim != 2:
        got = "no weight of its own" if weight is None else f"a weight of shape {tuple(weight.shape)}"
        raise TypeError(f"the head '{name}', a {kind}, has {got}, not one of (V, d): pass the LM head as head=...")


def is_transposed(model: Module, place: HeadPlace, vocab_size: int | None) -> bool:
    """Whether the weight is stored as (d, V). That of an nn.Linear never is."""
    if isinstance(place.module, Linear | Embedding | EmbeddingBag):
        return False
    if place.effective is not None and place.effective.by_tokens:
        return False
    rows, columns = place.like.shape
    embeddings = [m for m in model.modules() if isinstance(m, Embedding | EmbeddingBag)]
    for tokens in ({vocab_size}, {m.num_embeddings for m in embeddings}):  # the second, of a padded head
        if rows in tokens or columns in tokens:
            return rows not in tokens
    if vocab_size is not None and (rows < vocab_size) != (columns < vocab_size):
        return rows < vocab_size
    if place.module is not None:
        return False
    asked = "pass vocab_size=..." if vocab_size is None else f"and vocab_size={vocab_size} does not tell: look at it"
    raise ValueError(
        f"cannot tell whether the head '{place.name}' of shape ({rows}, {columns}) is stored as (V, d) or (d, V): no"
        f" embedding has as many tokens; {asked}"
    )


def check_vocabulary(place: HeadPlace, vocab_size: int | None, *, dim: int) -> None:
    """Refuse more tokens than the head has rows.

    Args:
        place: of the head.
        vocab_size: as the user gave it.
        dim: of its weight that counts tokens.
    """
    rows = place.like.shape[dim]
    if vocab_size is not None and vocab_size > rows:
        raise ValueError(f"vocab_size is at most the {rows:,} rows of the head '{place.name}', got {vocab_size:,}")


def why_nobody_moves(place: HeadPlace) -> str:
    """Say why no optimizer has the head's weight, and what to do."""
    if not place.weight.requires_grad:
        return f"the head '{place.name}' is frozen, and no optimizer has it"
    return (
        f"no optimizer has the head '{place.name}', a weight of shape {tuple(place.weight.shape)}: if another head is"
        " trained, pass that as head=..."
    )

"""The roles of a decoder's parameters (head, embedding, matrix, ...), from its module tree or by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

from torch import Tensor
from torch.nn import Embedding, EmbeddingBag, Module, ModuleDict, ModuleList, Parameter, Sequential
from torch.nn.utils.parametrize import is_parametrized

Role = Literal["matrix", "embedding", "tensor", "vector", "head"]

HEAD_NAMES = ("head", "unembed", "unembedding", "output", "output_projection", "embed_out", "to_logits")
STORED_WEIGHTS = ("weight_orig", "weight_v")
"""Parameters from which torch's older spectral_norm and weight_norm compute a weight."""


def parameter_of(module: Module, name: str) -> Parameter | None:
    """Return the parameter that a module has under a name, or None; nothing is computed.

    Reading the attribute itself may compute: a spectral norm then takes a step of its power iteration.
    """
    value = module._parameters.get(name, vars(module).get(name))
    return value if isinstance(value, Parameter) else None


def weight_matrix(module: Module) -> Tensor | None:
    """Return the (V, d) weight of a module, or a stored matrix of that shape from which it is computed, or None."""
    stored: list[Any] = [parameter_of(module, name) for name in ("weight", *STORED_WEIGHTS)]
    if is_parametrized(module, "weight"):
        stored += module.parametrizations["weight"].parameters(recurse=False)  # type: ignore[index, union-attr]
    matrices = [p for p in stored if isinstance(p, Tensor) and p.ndim == 2]
    inner = getattr(module, "base_layer", None)  # that an adapter of peft wraps
    if not matrices and isinstance(inner, Module):
        return weight_matrix(inner)
    return max(matrices, key=Tensor.numel, default=None)


def head_weight(head: Module, name: str) -> Parameter | None:
    """Return the weight of an LM head as its optimizer has it, or None if it has no weight.

    Raises:
        TypeError: if the weight is computed from other parameters, which an optimizer moves in its place.
    """
    weight = parameter_of(head, "weight")
    if weight is not None:
        return weight
    value: Any = weight_matrix(head)
    if value is None:
        value = getattr(head, "weight", None)  # perhaps a property that returns another module's parameter
        if not isinstance(value, Tensor) or isinstance(value, Parameter):
            return value
    raise TypeError(
        f"the head's weight is computed by a parametrization ({type(head).__name__}): '{name}' has no parameter whose"
        " step is the step of the weight; train a head with a plain weight to measure it"
    )


def find_head(model: Module) -> str:
    """Return the name of the module that turns hidden states into logits.

    The first of these rules that one module satisfies, or one trainable module:

    1. `get_output_embeddings` returns it (Hugging Face).
    2. It is called lm_head.
    3. It is outside the blocks, has another usual name of a head, and no fewer rows than the smallest embedding.
    4. It is outside the blocks and has as many rows as an embedding.
    5. It is outside the blocks and has the most rows of all, with a row for every token.
    """
    names: dict[Module, str] = {module: name for name, module in model.named_modules()}
    embeddings = [m for m in names if isinstance(m, Embedding | EmbeddingBag)]
    tokens = {m.num_embeddings for m in embeddings}
    matrices: dict[str, Tensor] = {}
    for m, name in names.items():
        weight = weight_matrix(m)
        if weight is None and name.rpartition(".")[2] in ("lm_head", *HEAD_NAMES):
            weight = getattr(m, "weight", None)  # a property, such as that of a head that borrows an embedding's weight
        if isinstance(weight, Tensor) and weight.ndim == 2 and not isinstance(m, Embedding | EmbeddingBag):
            matrices[name] = weight
    rows = {name: len(w) for name, w in matrices.items()}
    outside = [name for name in rows if not _in_a_list(model, name)] or list(rows)

    def output_embeddings(module: Module) -> str:
        getter: Any = getattr(module, "get_output_embeddings", None)
        head = getter() if callable(getter) else None
        return names.get(head, "") if isinstance(head, Module) else ""

    def named(candidates: Iterable[str], *heads: str) -> list[str]:
        return [name for name in candidates if name.rpartition(".")[2] in heads]

    fitting = [name for name in outside if rows[name] in tokens]
    for candidates in (
        [name for name in map(output_embeddings, names) if name in rows],
        named(rows, "lm_head"),
        [name for name in named(outside, *HEAD_NAMES) if rows[name] >= min(tokens, default=0)],
        fitting,
        [name for name in outside if max(tokens, default=0) <= rows[name] == max(rows.values())],
    ):
        trainable = {name for name in candidates if matrices[name].requires_grad}
        for chosen in (set(candidates), trainable):
            if len(chosen) == 1:
                return chosen.pop()
    candidate_names = ", ".join(fitting or rows) or "no module with a matrix: is the model sharded?"
    raise ValueError(
        f"could not tell which module is the LM head (found {candidate_names}): pass its name"
        " (head=... of the monitor, head_module=... of the optimizers)"
    )


def parameter_roles(
    model: Module,
    *,
    head_module: str | None = None,
    roles: Mapping[str, Role] | None = None,
    tied: Literal["head", "embedding"] | None = None,
) -> dict[str, Role]:
    """Give every trainable parameter of a decoder its role.

    - "head": the weight of the LM head;
    - "embedding": the parameters of nn.Embedding modules;
    - "matrix": other weights with two dimensions, and every parameter with two inside a list of blocks;
    - "tensor": weights with three dimensions and more, such as experts in one tensor;
    - "vector": everything else, norms and biases, and matrices with one row or column.

    Args:
        model: a decoder.
        head_module: name of the LM head; by default `find_head` finds it.
        roles: exceptions, from parameter names to roles; a name may have the wildcards of fnmatch.
        tied: the role of a weight that is embedding and head at once. Without it such a model is refused.

    Returns:
        roles by parameter name, in the model's order.
    """
    if head_module is None and "head" not in (roles or {}).values():
        head_module = find_head(model)
    modules: dict[str | None, Module] = dict(model.named_modules())
    named = modules.get(head_module)
    head = None if named is None else head_weight(named, str(head_module))
    if head_module is not None and head is None:
        raise ValueError(f"head_module must name a module with a weight, got {head_module!r}")
    embeddings = {p for m in model.modules() if isinstance(m, Embedding | EmbeddingBag) for p in m.parameters()}
    if head in embeddings and tied not in ("head", "embedding"):
        raise ValueError(
            f"'{head_module}' and an embedding share one weight, which cannot have two optimizers: untie them, or pass"
            ' tied="head" or tied="embedding" to say whose it takes'
        )
    by_name: dict[str, Role] = {}
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        if p is head and not (p in embeddings and tied == "embedding"):
            by_name[name] = "head"
        elif p in embeddings:
            by_name[name] = "embedding"
        elif p.ndim == 2 and min(p.shape) > 1 and (name.endswith("weight") or _in_a_list(model, name)):
            by_name[name] = "matrix"
        else:
            by_name[name] = "tensor" if p.ndim > 2 else "vector"
    for pattern, role in (roles or {}).items():
        matched = [name for name in by_name if fnmatchcase(name, pattern)]
        if role not in get_args(Role):
            raise ValueError(f"a role is one of {', '.join(get_args(Role))}, got {role!r} for {pattern!r}")
        if not matched:
            raise ValueError(f"roles names {pattern!r}, and the model has no such trainable parameter")
        by_name.update(dict.fromkeys(matched, role))
    return by_name


def _in_a_list(model: Module, name: str) -> bool:
    """Return whether a module or parameter is inside a list of modules, as blocks are."""
    parts = name.split(".")
    above = (model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts)))
    return any(isinstance(m, ModuleList | ModuleDict | Sequential) for m in above)

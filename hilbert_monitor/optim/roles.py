"""Which parameter of a decoder plays which role: found from the module tree, overridable by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

from torch.nn import Embedding, EmbeddingBag, Module, ModuleDict, ModuleList, Parameter, Sequential

Role = Literal["matrix", "embedding", "tensor", "vector", "head"]

HEAD_NAMES = ("head", "unembed", "unembedding", "output", "output_projection", "embed_out", "to_logits")


def find_head(model: Module) -> str:
    """Return the name of the module that turns hidden states into logits.

    In this order: what `get_output_embeddings` returns (Hugging Face); the one module called lm_head; the one outside
    the blocks with another name that heads have, and no fewer rows than the smallest embedding; the one outside the
    blocks with as many rows as an embedding; the one outside the blocks with the most rows of all, if it has a row for
    every token. Of several the one that is trainable.
    """
    names: dict[Module, str] = {module: name for name, module in model.named_modules()}
    embeddings = [m for m in names if isinstance(m, Embedding | EmbeddingBag)]
    tokens = {m.num_embeddings for m in embeddings}
    matrices: dict[str, Parameter] = {}
    for m, name in names.items():
        weight = getattr(m, "weight", None)
        if isinstance(weight, Parameter) and weight.ndim == 2 and not isinstance(m, Embedding | EmbeddingBag):
            matrices[name] = weight
    rows = {name: len(w) for name, w in matrices.items()}
    outside = [name for name in rows if not _in_a_list(model, name)] or list(rows)

    def said(module: Module) -> str:
        ask: Any = getattr(module, "get_output_embeddings", None)
        found = ask() if callable(ask) else None
        return names.get(found, "") if isinstance(found, Module) else ""

    def called(candidates: Iterable[str], *heads: str) -> list[str]:
        return [name for name in candidates if name.rpartition(".")[2] in heads]

    fitting = [name for name in outside if rows[name] in tokens]
    for candidates in (
        [name for name in map(said, names) if name in rows],
        called(rows, "lm_head"),
        [name for name in called(outside, *HEAD_NAMES) if rows[name] >= min(tokens, default=0)],
        fitting,
        [name for name in outside if max(tokens, default=0) <= rows[name] == max(rows.values())],
    ):
        trainable = {name for name in candidates if matrices[name].requires_grad}
        for chosen in (set(candidates), trainable):
            if len(chosen) == 1:
                return chosen.pop()
    seen = ", ".join(fitting or rows) or "no module with a matrix: is the model sharded?"
    raise ValueError(f"could not tell which module is the LM head (found {seen}): pass its name, head_module=...")


def parameter_roles(
    model: Module,
    *,
    head_module: str | None = None,
    roles: Mapping[str, Role] | None = None,
    tied: Literal["head", "embedding"] | None = None,
) -> dict[str, Role]:
    """Give every trainable parameter of a decoder its role.

    - "head": the weight of the LM head;
    - "embedding": the weights of nn.Embedding modules;
    - "matrix": other weights with two dimensions, and every parameter with two inside a list of blocks;
    - "tensor": weights with three dimensions and more, such as experts in one tensor;
    - "vector": everything else, norms and biases, and matrices with one row or column.

    Args:
        model: a decoder.
        head_module: name of the LM head, if it is not to be found by itself.
        roles: exceptions, from parameter names to roles; a name may have the wildcards of fnmatch.
        tied: whose role a weight takes that is embedding and head at once. Without it such a model is refused.

    Returns:
        Roles by name, in the model's order.
    """
    if head_module is None and "head" not in (roles or {}).values():
        head_module = find_head(model)
    modules: dict[str | None, Module] = dict(model.named_modules())
    head = None if head_module is None else getattr(modules.get(head_module), "weight", None)
    if head_module is not None and not isinstance(head, Parameter):
        raise ValueError(f"head_module must name a module with a weight, got {head_module!r}")
    embeddings = {m.weight for m in model.modules() if isinstance(m, Embedding | EmbeddingBag)}
    if head in embeddings and tied not in ("head", "embedding"):
        raise ValueError(
            f"'{head_module}' and an embedding share one weight, which cannot have two optimizers: untie them, or pass"
            ' tied="head" or tied="embedding" to say whose it takes'
        )
    found: dict[str, Role] = {}
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        if p is head and not (p in embeddings and tied == "embedding"):
            found[name] = "head"
        elif p in embeddings:
            found[name] = "embedding"
        elif p.ndim == 2 and min(p.shape) > 1 and (name.endswith("weight") or _in_a_list(model, name)):
            found[name] = "matrix"
        else:
            found[name] = "tensor" if p.ndim > 2 else "vector"
    for pattern, role in (roles or {}).items():
        matched = [name for name in found if fnmatchcase(name, pattern)]
        if role not in get_args(Role):
            raise ValueError(f"a role is one of {', '.join(get_args(Role))}, got {role!r} for {pattern!r}")
        if not matched:
            raise ValueError(f"roles names {pattern!r}, and the model has no such trainable parameter")
        found.update(dict.fromkeys(matched, role))
    return found


def _in_a_list(model: Module, name: str) -> bool:
    """Whether a module or parameter stands inside a list of modules, as blocks do."""
    parts = name.split(".")
    above = (model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts)))
    return any(isinstance(m, ModuleList | ModuleDict | Sequential) for m in above)

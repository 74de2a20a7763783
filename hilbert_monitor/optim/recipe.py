"""The paper's recipe for any decoder: the roles of its parameters, their optimizers, and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal, get_args

from torch import Tensor
from torch.nn import Embedding, EmbeddingBag, Module, ModuleDict, ModuleList, Parameter, Sequential
from torch.nn.utils.parametrize import is_parametrized
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from .chain import ChainedOptimizer
from .muon import Muon
from .rownorm import RowNorm

Role = Literal["matrix", "embedding", "tensor", "vector", "head"]

HEAD_LR = {"rownorm": 1.6384, "adamw": 2.048}
"""Peak learning rate of the head times its width d: at d = 512, 768 and 1024 the paper's rates to the printed digit."""

MATRIX_LR, EMBEDDING_LR = 8e-3, 4e-3
"""Peak learning rates of Muon on the blocks' matrices, and of AdamW on everything but them and the head."""

WEIGHT_DECAY = 0.1
"""Decoupled weight decay of all parameters but a RowNorm head and vectors."""

FUSED_DEVICES = {"cpu", "cuda", "mps", "xpu"}
"""Devices where torch has a fused AdamW kernel. On others torch would fail only at the first step."""

HEAD_NAMES = ("head", "unembed", "unembedding", "output", "output_projection", "embed_out", "to_logits")


def pretraining_optimizer(
    model: Module,
    head: Literal["rownorm", "adamw"] = "rownorm",
    *,
    head_lr: float | None = None,
    matrix_lr: float = MATRIX_LR,
    embedding_lr: float = EMBEDDING_LR,
    weight_decay: float = WEIGHT_DECAY,
    head_module: str | None = None,
    roles: Mapping[str, Role] | None = None,
    tied: Literal["head", "embedding"] | None = None,
    muon: Mapping[str, Any] | None = None,
    rownorm: Mapping[str, Any] | None = None,
) -> ChainedOptimizer:
    """Return the paper's optimizers: Muon on the blocks' matrices, RowNorm or AdamW on the LM head, AdamW elsewhere.

    Muon has momentum 0.95; AdamW has betas (0.9, 0.999) and eps 1e-10. Weight decay is 0.1, but zero on a RowNorm head
    and on vectors (norms and biases). ``describe()`` of the result prints which optimizer owns which parameters. In a
    bf16 model AdamW has its state in bf16, RowNorm and Muon in fp32.

    Args:
        model: a decoder; its module tree gives the roles (see `parameter_roles`).
        head: optimizer of the LM head.
        head_lr: peak learning rate of the head; by default the paper's, which goes as 1/d.
        matrix_lr, embedding_lr: peak learning rates of Muon, and of AdamW on everything else.
        weight_decay: decoupled weight decay.
        head_module: name of the LM head; by default `find_head` finds it.
        roles: exceptions, from parameter names (with the wildcards of fnmatch) to roles.
        tied: "head" or "embedding": the role of a weight that is both. Without it such a model is refused.
        muon, rownorm: further arguments of `Muon` and `RowNorm`, such as rounding for weights in bf16.
    """
    if head not in HEAD_LR:
        raise ValueError(f'head must be "rownorm" or "adamw", got {head!r}')
    parameters = dict(model.named_parameters())
    members: dict[Role, list[tuple[str, Tensor]]] = {role: [] for role in get_args(Role)}
    for name, role in parameter_roles(model, head_module=head_module, roles=roles, tied=tied).items():
        members[role].append((name, parameters[name]))
    if not members["head"] and tied != "embedding":
        raise ValueError("the LM head is frozen: unfreeze it, or name another module with head_module=...")

    optimizers: list[Optimizer] = []
    if members["matrix"]:
        group = {"params": members["matrix"], "name": "matrix"}
        optimizers.append(Muon([group], lr=matrix_lr, weight_decay=weight_decay, **(muon or {})))
    decays: dict[Role, float] = {"embedding": weight_decay, "tensor": weight_decay, "vector": 0.0}
    adamw = [{"params": members[role], "name": role, "weight_decay": decays[role]} for role in decays if members[role]]
    if adamw:
        optimizers.append(_adamw(adamw, lr=embedding_lr))
    if members["head"]:
        width = max((p for _, p in members["head"]), key=Tensor.dim).shape[-1]
        lr = HEAD_LR[head] / width if head_lr is None else head_lr
        group = {"params": members["head"], "name": "head"}
        if head == "rownorm":
            optimizers.append(RowNorm([group], lr=lr, **(rownorm or {})))
        else:
            optimizers.append(_adamw([{**group, "weight_decay": weight_decay}], lr=lr))
    return ChainedOptimizer(*optimizers, model=model)


def _adamw(groups: list[dict[str, Any]], lr: float) -> AdamW:
    params = [p for group in groups for _, p in group["params"]]
    one_mesh = all(len({getattr(p, "device_mesh", None) for _, p in group["params"]}) == 1 for group in groups)
    fused = all(p.device.type in FUSED_DEVICES and p.is_floating_point() for p in params)
    # no kernel takes whole and sharded parameters at once, as in a model under tensor parallelism
    options = {"fused": fused or None} if one_mesh else {"foreach": False}
    return AdamW(groups, lr=lr, betas=(0.9, 0.999), eps=1e-10, **options)


def warmup_cosine(optimizer: Optimizer, total_steps: int, *, warmup: float = 0.1, floor: float = 0.1) -> LambdaLR:
    """Return the paper's schedule for every group of `optimizer`; step it after each update.

    Update t of T, from 0, has the scale t/w for t < w = floor(warmup T), so zero at the first update. Then it follows a
    cosine from one at t = w to exactly `floor` at the last update, t = T - 1, and stays there.

    The current learning rates of `optimizer` are the peaks, and `total_steps` is T, the updates of the whole run.
    """
    if not 1 <= total_steps < math.inf:
        raise ValueError(
            f"total_steps must be a number of updates, at least 1, got {total_steps}: set max_steps or epochs"
        )
    if not 0 <= warmup < 1:
        raise ValueError(f"warmup must be a share of the run, from 0 to below 1, got {warmup}")
    if not 0 <= floor <= 1:
        raise ValueError(f"floor must be between 0 and 1, got {floor}")
    return LambdaLR(optimizer, partial(warmup_cosine_scale, total_steps=total_steps, warmup=warmup, floor=floor))


def warmup_cosine_scale(step: int, *, total_steps: int, warmup: float = 0.1, floor: float = 0.1) -> float:
    """Return the scale of the learning rate at update `step` (from 0) of `total_steps`."""
    w = math.floor(round(warmup * total_steps, 6))  # 0.29 * 100 is 28.999999999999996
    if step < w:
        return step / w
    progress = (step - w) / (total_steps - w - 1) if step < total_steps - 1 else 1.0
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))


def parameter_roles(
    model: Module,
    *,
    head_module: str | None = None,
    roles: Mapping[str, Role] | None = None,
    tied: Literal["head", "embedding"] | None = None,
) -> dict[str, Role]:
    """Return the role of every trainable parameter of a decoder, in the model's order.

    - "head": the weight of the LM head;
    - "embedding": the parameters of nn.Embedding modules;
    - "matrix": other weights with two dimensions, and every parameter with two inside a list of blocks;
    - "tensor": weights with three dimensions and more, such as experts in one tensor;
    - "vector": everything else, norms and biases, and matrices with one row or column.

    The arguments are those of `pretraining_optimizer`.
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
    tokens = {m.num_embeddings for m in names if isinstance(m, Embedding | EmbeddingBag)}
    matrices: dict[str, Tensor] = {}
    for m, name in names.items():
        weight = weight_matrix(m)
        if weight is None and name.rpartition(".")[2] in ("lm_head", *HEAD_NAMES):
            weight = getattr(m, "weight", None)  # a property of a head that borrows an embedding's weight
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


def head_weight(head: Module, name: str) -> Parameter | None:
    """Return the weight of an LM head as its optimizer has it, or None; raise TypeError if the weight is computed."""
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


def weight_matrix(module: Module) -> Tensor | None:
    """Return the (V, d) weight of a module, or a stored matrix of that shape from which it is computed, or None."""
    names = ("weight", "weight_orig", "weight_v")  # the latter two of torch's older spectral_norm and weight_norm
    stored: list[Any] = [parameter_of(module, name) for name in names]
    if is_parametrized(module, "weight"):
        stored += module.parametrizations["weight"].parameters(recurse=False)  # type: ignore[index, union-attr]
    matrices = [p for p in stored if isinstance(p, Tensor) and p.ndim == 2]
    inner = getattr(module, "base_layer", None)  # inside an adapter of peft
    if not matrices and isinstance(inner, Module):
        return weight_matrix(inner)
    return max(matrices, key=Tensor.numel, default=None)


def parameter_of(module: Module, name: str) -> Parameter | None:
    """Return the parameter that a module has under a name, or None. Reading a spectral norm's weight changes it."""
    value = module._parameters.get(name, vars(module).get(name))
    return value if isinstance(value, Parameter) else None


def _in_a_list(model: Module, name: str) -> bool:
    """Return True if a module or parameter is inside a list of modules, as blocks are."""
    parts = name.split(".")
    above = (model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts)))
    return any(isinstance(m, ModuleList | ModuleDict | Sequential) for m in above)

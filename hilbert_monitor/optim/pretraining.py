"""The paper's recipe of optimizers for any decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from torch import Tensor
from torch.nn import Module
from torch.optim import AdamW, Optimizer

from .chain import ChainedOptimizer
from .muon import Muon
from .roles import Role, parameter_roles
from .rownorm import RowNorm

HEAD_LR = {"rownorm": 1.6384, "adamw": 2.048}
"""Peak learning rate of the head times its width d: at d = 512, 768 and 1024 the paper's rates to the printed digit."""

MATRIX_LR, EMBEDDING_LR = 8e-3, 4e-3
"""Peak learning rates of Muon on the blocks' matrices, and of AdamW on everything but them and the head."""
WEIGHT_DECAY = 0.1
"""Decoupled weight decay of all but a RowNorm head and vectors."""

FUSED_DEVICES = {"cpu", "cuda", "mps", "xpu"}
"""Devices where torch has a fused AdamW kernel. On others torch would fail only at the first step."""


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
    and on vectors (norms and biases), which the paper's model does not have. ``describe()`` of the result prints which
    optimizer owns which parameters. In a bf16 model AdamW has its state in bf16, as torch makes it, RowNorm and Muon
    in fp32.

    Args:
        model: a decoder; its module tree gives the roles (see `parameter_roles`).
        head: optimizer of the LM head.
        head_lr: peak learning rate of the head; by default the paper's, which goes as 1/d.
        matrix_lr: peak learning rate of Muon.
        embedding_lr: peak learning rate of AdamW on everything else.
        weight_decay: decoupled weight decay.
        head_module: name of the LM head; by default `find_head` finds it.
        roles: exceptions, from parameter names (with wildcards) to "matrix", "embedding", "head", "tensor" or
            "vector".
        tied: "head" or "embedding": the role of a weight that is both. Without it such a model is refused.
        muon: further arguments of `Muon`, such as ns_dtype.
        rownorm: further arguments of `RowNorm`, such as rounding for a head in bf16.
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
    adamw = [
        {"params": members[role], "name": role, "weight_decay": decay}
        for role, decay in decays.items()
        if members[role]
    ]
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
    together = all(len({getattr(p, "device_mesh", None) for _, p in group["params"]}) == 1 for group in groups)
    fused = all(p.device.type in FUSED_DEVICES and p.is_floating_point() for p in params)
    # no kernel takes whole and sharded parameters at once, as a model under tensor parallelism has
    options = {"fused": fused or None} if together else {"foreach": False}
    return AdamW(groups, lr=lr, betas=(0.9, 0.999), eps=1e-10, **options)

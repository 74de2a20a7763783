"""One optimizer that holds several, for code that takes only one: a Trainer, a scheduler, a GradScaler."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import IO, Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor
from torch.nn import Module
from torch.optim import Adam, Optimizer

from .base import Group, MatrixOptimizer, call_closure, keep_state_precision, outside_autocast, parameter_label


class ChainedOptimizer(Optimizer):
    """Several optimizers that step together and look like one.

    ``ChainedOptimizer(Muon(matrices), AdamW(embedding, fused=True), RowNorm(head, lr=3e-3))``

    The chain has one list of parameter groups and one state, and its optimizers hold the same dictionaries. So a
    scheduler, clipping, a GradScaler, `state_dict`, pickle and deepcopy see one ordinary optimizer. Every group has the
    name of its owner under the key "owner". Hooks on the optimizers inside run too, after the closure. Torch's
    OneCycleLR needs cycle_momentum=False: the optimizers may name their momenta differently.

    Args:
        *optimizers: any torch optimizers that need no closure, each with its own parameters.
        model: if given, each of its trainable parameters must be in one of the optimizers.
    """

    def __init__(self, *optimizers: Optimizer, model: Module | None = None) -> None:
        if not optimizers:
            raise ValueError("ChainedOptimizer needs at least one optimizer, got none")
        for o in optimizers:
            if not isinstance(o, Optimizer) or isinstance(o, ChainedOptimizer):
                raise TypeError(
                    f"ChainedOptimizer takes plain torch optimizers, got {type(o).__name__}: give its parts"
                )
        self.optimizers = optimizers
        for o, name in zip(optimizers, _names(optimizers), strict=True):
            for group in o.param_groups:
                group["owner"] = name
        groups = [group for o in optimizers for group in o.param_groups]
        _check_owned_once(groups, model)
        super().__init__(groups, {})
        for o in optimizers:
            self.state.update(o.state)
        self._share()

    def _share(self) -> None:
        """Give the optimizers the chain's groups and state, through their own `__setstate__`."""
        for o, name in zip(self.optimizers, _names(self.optimizers), strict=True):
            groups = [group for group in self.param_groups if group["owner"] == name]
            own: defaultdict[Tensor, Any] = defaultdict(dict)  # without the others' state: some loop over all of it
            own.update((p, self.state[p]) for group in groups for p in group["params"] if p in self.state)
            o.__setstate__({"state": own, "param_groups": groups})
            o.state = self.state
        self._shared = [id(group) for group in self.param_groups]

    def __getstate__(self) -> dict[str, Any]:
        shared = ("state", "param_groups")
        own = [{k: v for k, v in o.__getstate__().items() if k not in shared} for o in self.optimizers]
        kinds = [type(o) for o in self.optimizers]
        return {**super().__getstate__(), "optimizers": list(zip(kinds, own, strict=True))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        kinds = state.pop("optimizers", None)  # only a copy or a pickle has them, a state dict does not
        super().__setstate__(state)
        if kinds is not None:
            self.optimizers = tuple(kind.__new__(kind) for kind, _ in kinds)
            for o, (_, own) in zip(self.optimizers, kinds, strict=True):
                o.__dict__.update(own)
        self._share()

    def add_param_group(self, param_group: Group) -> None:
        """Add a group whose "owner" names the optimizer that takes it: ``{"params": [...], "owner": "RowNorm"}``."""
        owners = dict(zip(_names(self.optimizers), self.optimizers, strict=True))
        owner = owners.get(param_group.get("owner", ""))
        if owner is None:
            raise ValueError(
                f'a group of a ChainedOptimizer needs the key "owner" with one of {", ".join(map(repr, owners))},'
                f" got {param_group.get('owner')!r}"
            )
        if any(param_group is group for group in self.param_groups):
            raise ValueError(f"this group of {param_group['owner']} is in the chain already")
        if not any(param_group is group for group in owner.param_groups):  # it is when the chain is constructed
            held = {p for group in self.param_groups for p in group["params"]}
            owner.add_param_group(param_group)
            for index, p in enumerate(param_group["params"]):
                if p in held:
                    owner.param_groups.pop()
                    raise ValueError(f"parameter {parameter_label(param_group, index)} has an owner already")
        self.param_groups.append(param_group)
        self._shared = [id(group) for group in self.param_groups]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Call the closure once, step every optimizer, and return the closure's result."""
        loss = call_closure(closure)
        self._check_gradients()
        if [id(group) for group in self.param_groups] != self._shared:
            self._share()  # the groups were replaced
        with outside_autocast(p for group in self.param_groups for p in group["params"]):
            for o in self.optimizers:
                o.step()
        return loss

    def _check_gradients(self) -> None:
        """Raise TypeError for a gradient that one of the optimizers would refuse only after others have stepped."""
        for o in self.optimizers:
            if isinstance(o, MatrixOptimizer):
                o.check_gradients()
            for group in o.param_groups if isinstance(o, Adam) else ():
                for index, p in enumerate(group["params"]):
                    if p.grad is not None and p.grad.is_sparse:
                        raise TypeError(f"{type(o).__name__} takes no sparse gradient: {parameter_label(group, index)}")

    def owner(self, param: Tensor) -> Optimizer:
        """Return the optimizer that moves `param`."""
        for o in self.optimizers:
            if any(param is p for group in o.param_groups for p in group["params"]):
                return o
        raise ValueError(f"the parameter of shape {tuple(param.shape)} is in none of the chained optimizers")

    def increment(self, param: Tensor) -> Tensor:
        """Return the increment of the last step on `param` from its owner: see `MatrixOptimizer.increment`."""
        owner = self.owner(param)
        if not isinstance(owner, MatrixOptimizer):
            raise TypeError(f"{type(owner).__name__} cannot say what its last step was: RowNorm and Muon can")
        return owner.increment(param)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of a chain of the same optimizers over the same parameters; refuse any other state."""
        if not isinstance(state_dict, dict):
            raise TypeError(f"ChainedOptimizer loads a dict that state_dict() made, got {type(state_dict).__name__}")
        before = {"state": self.state, "param_groups": self.param_groups}
        check = self.register_load_state_dict_pre_hook(_check_fits)  # after the user's own hooks
        try:
            with check, keep_state_precision(self, *self.optimizers):
                super().load_state_dict(state_dict)
        except Exception:
            self.__setstate__(before)
            raise

    def describe(self, file: IO[str] | None = None) -> None:
        """Print a table of the groups: optimizer, parameters, learning rate and weight decay."""
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for column in ("optimizer", "group", "parameters"):
            table.add_column(column, no_wrap=True)
        for column in ("tensors", "numbers", "lr", "decay"):
            table.add_column(column, justify="right", no_wrap=True)
        for group in self.param_groups:
            table.add_row(
                group["owner"],
                Text(group.get("name", "")),
                Text(_summary(group)),
                str(len(group["params"])),
                f"{sum(p.numel() for p in group['params']):,}",
                f"{float(group.get('initial_lr', group['lr'])):g}",
                f"{group.get('weight_decay', 0):g}",
            )
        console = Console(file=file)
        console.width = max(console.width, Console(width=1000).measure(table).maximum)  # no column is cut
        console.print(table)


def _names(optimizers: tuple[Optimizer, ...]) -> list[str]:
    """Return the class names of the optimizers, with numbers from the second of a class on."""
    kinds = [type(o).__name__ for o in optimizers]
    counts = [kinds[:index].count(kind) for index, kind in enumerate(kinds)]
    return [f"{kind} {count + 1}" if count else kind for kind, count in zip(kinds, counts, strict=True)]


def _check_owned_once(groups: list[Group], model: Module | None) -> None:
    names = {} if model is None else {p: f"'{name}'" for name, p in model.named_parameters()}
    owners: dict[Tensor, str] = {}
    for group in groups:
        for index, p in enumerate(group["params"]):
            if p in owners:
                name = names.get(p, parameter_label(group, index))
                both = f"{owners[p]} and {group['owner']}" if owners[p] != group["owner"] else f"{owners[p]} twice"
                raise ValueError(f"parameter {name} is in {both}: give it to one of them")
            owners[p] = group["owner"]
    left = [name for p, name in names.items() if p.requires_grad and p not in owners]
    if left:
        raise ValueError(f"no optimizer owns {', '.join(left)}: add them to one, or freeze them")


PER_ENTRY = ("momentum_buffer", "compensation", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum")
"""Keys of state tensors that have their parameter's shape, in torch's optimizers and ours."""


def _check_fits(chain: Optimizer, state_dict: dict[str, Any]) -> None:
    """Raise ValueError for a state that another chain saved, before anything is changed."""
    if not isinstance(state_dict, dict) or not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError(
            "ChainedOptimizer loads what state_dict() made, got something without 'state' and 'param_groups'"
        )
    groups, saved = chain.param_groups, state_dict["param_groups"]
    if any("owner" not in group for group in saved):
        raise ValueError("this state was not saved by a ChainedOptimizer: load it into the optimizer that saved it")
    ours, theirs = ([(g["owner"], len(g["params"])) for g in some] for some in (groups, saved))
    if ours != theirs:
        ours_text, theirs_text = (", ".join(f"{owner}: {n} parameters" for owner, n in some) for some in (ours, theirs))
        raise ValueError(f"this state belongs to another chain: it was saved by ({theirs_text}), this is ({ours_text})")
    for group, other in zip(groups, saved, strict=True):
        names, other_names = (_stripped(g.get("param_names", [])) for g in (group, other))
        for index, p in enumerate(group["params"]):
            if names and other_names and names[index] != other_names[index]:
                raise ValueError(
                    f"this state belongs to another chain: it has '{other_names[index]}' of {group['owner']} where"
                    f" this has '{names[index]}'"
                )
            for key, value in state_dict["state"].get(other["params"][index], {}).items():
                if key in PER_ENTRY and isinstance(value, Tensor) and value.shape != p.shape:
                    raise ValueError(
                        f"this state belongs to another chain: {key} of parameter {parameter_label(group, index)} of"
                        f" {group['owner']} was saved with shape {tuple(value.shape)}"
                    )


def _stripped(names: list[str]) -> list[str]:
    """Return parameter names without the parts that come from compiling or wrapping a model."""
    wrappers = ("_orig_mod", "module", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
    return [".".join(part for part in name.split(".") if part not in wrappers) for name in names]


def _summary(group: Group) -> str:
    """Return the names of a group's parameters, with * for block numbers, or their shapes."""
    if "param_names" not in group:
        return ", ".join(dict.fromkeys("x".join(map(str, p.shape)) for p in group["params"]))
    parts = (name.split(".") for name in group["param_names"])
    return "\n".join(dict.fromkeys(".".join("*" if part.isdigit() else part for part in name) for name in parts))

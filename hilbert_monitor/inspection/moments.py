"""The moments that an optimizer keeps of the head, found in its state dict, which has numbers in place of names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hilbert_monitor.geometry import row_statistics
from hilbert_monitor.monitor.measure import MOMENTS
from hilbert_monitor.optim import Group

from .checkpoint import Checkpoint
from .head_names import HeadTensor

BALANCED = 0.01
"""|sum of a moment's rows| / sum of their norms, up to which it is the moment of a softmax head: an embedding's
is far from zero."""


@dataclass(frozen=True)
class HeadMoments:
    """What an optimizer keeps of the head."""

    state: Mapping[str, Any]
    group: Group
    """Its options, without parameters."""
    matched: str
    """How it is known that it is the head's, in a few words."""

    @property
    def moment(self) -> Tensor:
        """The running average of the gradients, as the head's tensor is stored."""
        moment: Tensor = next(self.state[name] for name in MOMENTS if isinstance(self.state.get(name), Tensor))
        return moment


def head_moments(checkpoint: Checkpoint, head: HeadTensor) -> HeadMoments | None:
    """Find the optimizer's state of the head, or None.

    By name, if the optimizer was given names. Otherwise by shape: where an embedding has the same shape, the order of
    the model's tensors tells the two apart, or else that the rows of a softmax head's gradient sum to zero.
    """
    entries = [entry for state in checkpoint.optimizers for entry in _entries(state)]
    named = [entry for entry in entries if entry.name and _same_name(entry.name, head.name)]
    if len(named) == 1 and named[0].shape == head.info.shape:
        return named[0].moments("by name")
    fitting = [entry for entry in entries if entry.shape == head.info.shape and not entry.name]
    names = [name for name, info in checkpoint.tensors.infos.items() if info.shape == head.info.shape]
    if len(fitting) == 1 and (len(names) == 1 or head.tied):
        return fitting[0].moments("by its shape")
    one_group = len({id(entry.group) for entry in fitting}) == 1
    if checkpoint.ordered and one_group and len(names) == len(fitting) and head.name in names:
        return fitting[names.index(head.name)].moments("by its shape and the order of the parameters")
    balanced = [entry for entry in fitting if _is_balanced(entry, head)]
    if len(balanced) == 1:
        return balanced[0].moments("by its shape, and because its rows sum to zero, as those of a softmax head do")
    return None


@dataclass(frozen=True)
class _Entry:
    """The state of one parameter."""

    name: str
    state: Mapping[str, Any]
    group: Group
    moment: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.moment.shape)

    def moments(self, matched: str) -> HeadMoments:
        options = {key: value for key, value in self.group.items() if key not in ("params", "param_names")}
        return HeadMoments(self.state, options, matched)


def _entries(optimizer: Mapping[str, Any]) -> Iterator[_Entry]:
    """The parameters of a state dict that have a moment, in its order."""
    for group in optimizer["param_groups"]:
        names: Sequence[str] = group.get("param_names") or [""] * len(group["params"])
        for index, name in zip(group["params"], names, strict=False):
            state = optimizer["state"].get(index, {})
            moment = next((state[key] for key in MOMENTS if isinstance(state.get(key), Tensor)), None)
            if moment is not None:
                yield _Entry(name, state, group, moment)


def _same_name(one: str, other: str) -> bool:
    """Whether two names are those of one parameter: a wrapper puts names of its own before."""
    return one == other or one.endswith(f".{other}") or other.endswith(f".{one}")


def _is_balanced(entry: _Entry, head: HeadTensor) -> bool:
    rows = entry.moment.t() if head.transposed else entry.moment
    return row_statistics(rows).balance < BALANCED

"""The tensors of a checkpoint by name: their shapes are known at once, and one is read when it is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

POINTER = b"version https://git-lfs"
"""How a file begins that Git LFS puts in place of a large one."""


class CheckpointError(ValueError):
    """A file cannot be read, or has no head: what is wrong, what was found, and what to do, in a sentence."""


def refuse_pointer(path: Path) -> None:
    """Refuse a file that Git LFS has left in place of a large one, as a clone without LFS does."""
    with path.open("rb") as file:
        if file.read(len(POINTER)) == POINTER:
            raise CheckpointError(
                f"{path} is a pointer of Git LFS and not the file itself: run git lfs pull in its folder"
            )


class TensorInfo(NamedTuple):
    """What is known of a tensor before it is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class TensorStore(Protocol):
    """Tensors of a checkpoint by name."""

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """Shapes and dtypes, in the order of the file."""

    def load(self, name: str) -> Tensor:
        """Return a tensor, mapped from the file where it can be: the system reads the pages that are used."""


class JoinedStore:
    """Several files of one checkpoint, such as the shards of a Hugging Face model.

    Args:
        stores: one for each file.
    """

    def __init__(self, stores: Sequence[TensorStore]) -> None:
        self._owners = {name: store for store in stores for name in store.infos}
        self.infos: Mapping[str, TensorInfo] = {name: store.infos[name] for name, store in self._owners.items()}

    def load(self, name: str) -> Tensor:
        """Return a tensor of the file that has it."""
        return self._owners[name].load(name)


class DictStore:
    """A state dict, whose tensors are mapped from a file already.

    Args:
        tensors: by name; whatever else is in the dict is left out.
    """

    def __init__(self, tensors: Mapping[str, object]) -> None:
        self._tensors = {name: x for name, x in tensors.items() if isinstance(x, Tensor)}
        self.infos: Mapping[str, TensorInfo] = {
            n: TensorInfo(tuple(x.shape), x.dtype) for n, x in self._tensors.items()
        }

    def load(self, name: str) -> Tensor:
        """Return a tensor."""
        return self._tensors[name].detach()


def same_tensor(store: TensorStore, one: str, other: str) -> bool:
    """Whether two names have one tensor: one storage, or equal numbers in files that keep no track of it."""
    if store.infos[one] != store.infos[other]:
        return False
    a, b = store.load(one), store.load(other)
    return a.data_ptr() == b.data_ptr() or bool(torch.equal(a, b))

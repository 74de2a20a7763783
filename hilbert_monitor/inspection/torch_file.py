"""Reads files of torch.save: what of a file is the model, what its optimizers, and which update it was.

Files are mapped, and unpickled with weights_only: nothing in them is run.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from .tensor_store import CheckpointError, refuse_pointer

MODELS = ("state_dict", "model_state_dict", "model", "module", "model_state", "net", "weights", "params")
"""Where checkpoints have the model's state dict."""
OPTIMIZERS = ("optimizer_states", "optimizer_state_dict", "optimizer_state", "optimizers", "optimizer", "optim")
"""Where checkpoints have the state of one optimizer or of several."""
STEPS = ("global_step", "step", "steps", "iter_num", "iteration", "iterations", "update", "updates")
"""Where checkpoints have the number of updates."""
OLD_FORM = "mmap can only be used with files saved with"
"""What torch says of a file that an old version wrote, which it can read all the same."""


def read(path: Path, *, trust: bool = False) -> Any:
    """Return what torch.save wrote, its tensors mapped from the file.

    Args:
        path: the file.
        trust: unpickle objects of any class, which runs code of the file.
    """
    try:
        return _load(path, trust=trust)
    except PermissionError:
        raise  # its own words are plain
    except pickle.UnpicklingError as error:
        refuse_pointer(path)
        raise CheckpointError(_refusal(path, str(error), trust=trust)) from None
    except (RuntimeError, OSError, EOFError, ValueError, LookupError, AttributeError, ImportError) as error:
        why = str(error).partition("\n")[0][:200] or type(error).__name__
        raise CheckpointError(
            f"{path} is not a checkpoint, or is truncated: torch.load says {why!r}; give a safetensors file, a folder"
            " of Hugging Face or a file of torch.save, or copy it again"
        ) from None


def _load(path: Path, *, trust: bool) -> Any:
    options: dict[str, Any] = {"map_location": "cpu", "weights_only": not trust}
    try:
        return torch.load(path, mmap=True, **options)
    except RuntimeError as error:
        if OLD_FORM not in str(error):
            raise
    return torch.load(path, **options)


def _refusal(path: Path, message: str, *, trust: bool) -> str:
    """Say what weights_only refused, in a sentence."""
    refused = re.search(r"GLOBAL (\S+)", message)
    if trust or refused is None:
        return f"{path} is not a checkpoint, or is damaged: it cannot be unpickled; copy it again"
    return (
        f"{path} holds an object of {refused[1]} beside its tensors, which is not unpickled, since that runs code of"
        " the file: pass --trust if it is your own file, or save the state dicts alone"
    )


def state_dict(content: Any) -> Mapping[str, Any] | None:
    """The model's state dict in a checkpoint, or None. A checkpoint may be nothing else, or the model as an object."""
    if isinstance(content, Module):
        return content.state_dict()
    if not isinstance(content, Mapping):
        return None
    for part in (*(content.get(name) for name in MODELS), content):
        if isinstance(part, Module):
            return part.state_dict()
        if isinstance(part, Mapping) and any(isinstance(x, Tensor) and x.ndim == 2 for x in part.values()):
            return {str(name): x for name, x in part.items()}
    return None


def optimizer_states(content: Any) -> list[Mapping[str, Any]]:
    """The state dicts of the optimizers in a checkpoint, which may be nothing but one of them."""
    if not isinstance(content, Mapping):
        return []
    parts = (content, *(content.get(name) for name in OPTIMIZERS))
    return [state for part in parts for state in _listed(part) if _is_optimizer(state)]


def _listed(part: Any) -> Sequence[Any]:
    return part if isinstance(part, list | tuple) else [part]


def _is_optimizer(part: Any) -> bool:
    return isinstance(part, Mapping) and {"state", "param_groups"} <= part.keys()


def step_of(content: Any) -> int | None:
    """The number of updates that a checkpoint names."""
    if not isinstance(content, Mapping):
        return None
    for name in STEPS:
        value = content.get(name)
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.item()
        if isinstance(value, int | float) and not isinstance(value, bool):
            return int(value)
    return None

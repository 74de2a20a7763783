"""A checkpoint as it lies on disk: the model's tensors, its configuration and tokenizer, its optimizers, its update."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import torch_file
from .safetensors_file import SafetensorsFile
from .tensor_store import CheckpointError, DictStore, JoinedStore, TensorStore

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""Files of a Hugging Face folder with the weights. Shards have an index of the same name with `.index.json` after."""
KINDS = (".safetensors", ".ckpt", ".pt", ".pth", ".bin")
"""Endings of a file that may be the only checkpoint of a folder."""


@dataclass(frozen=True)
class Checkpoint:
    """What was found of one."""

    path: Path
    kind: str
    """Such as "Lightning" or "Hugging Face, 3 shards"."""
    tensors: TensorStore
    step: int | None = None
    """Updates so far, where a file or the name of one says so."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The config.json of Hugging Face."""
    tokenizer: Path | None = None
    optimizers: Sequence[Mapping[str, Any]] = ()
    """State dicts."""
    ordered: bool = True
    """Whether tensors have the order of the model's modules; safetensors files are sorted by name."""


def open_checkpoint(path: Path, *, trust: bool = False) -> Checkpoint:
    """Open a file or a folder, and read no tensor.

    Args:
        path: a file of torch.save or Lightning, a safetensors file, or a folder of Hugging Face.
        trust: unpickle objects of any class, which runs code of the file.
    """
    if not path.exists():
        raise CheckpointError(f"{path} does not exist: give a checkpoint's file, or its folder")
    return _folder(path, trust=trust) if path.is_dir() else _file(path, trust=trust)


def _file(path: Path, *, trust: bool) -> Checkpoint:
    beside = _beside(path.parent)
    if path.name.endswith(".index.json"):
        return _folder(path.parent, trust=trust)
    if path.suffix == ".safetensors":
        return Checkpoint(path, "safetensors", SafetensorsFile(path), _number_in(path), ordered=False, **beside)
    content = torch_file.read(path, trust=trust)
    tensors = torch_file.state_dict(content)
    if tensors is None:
        what = type(content).__name__
        keys = f" with {', '.join(map(repr, list(content)[:8]))}" if isinstance(content, Mapping) else ""
        raise CheckpointError(
            f"{path} has no model's weights: it is a {what}{keys}; give a state dict, or a dict that has one under"
            f" {', '.join(map(repr, torch_file.MODELS[:3]))}"
        )
    lightning = isinstance(content, Mapping) and "pytorch-lightning_version" in content
    kind = "Lightning" if lightning else "torch"
    step = torch_file.step_of(content)
    return Checkpoint(
        path,
        kind,
        DictStore(tensors),
        _number_in(path) if step is None else step,
        optimizers=torch_file.optimizer_states(content),
        **beside,
    )


def _folder(path: Path, *, trust: bool) -> Checkpoint:
    for name in WEIGHTS:
        if (path / f"{name}.index.json").is_file():
            shards = _shards(path / f"{name}.index.json")
            return _hugging_face(path, shards, f", {len(shards)} shards", trust=trust)
        if (path / name).is_file():
            return _hugging_face(path, [path / name], "", trust=trust)
    if (path / ".metadata").is_file():
        raise CheckpointError(
            f"{path} is a folder of torch.distributed.checkpoint, whose shards are not read: make one file of it with"
            " python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER FILE"
        )
    if (path / "adapter_config.json").is_file():
        raise CheckpointError(
            f"{path} has an adapter and not the weights that it changes: merge it (merge_and_unload of peft), save the"
            " model, and give that folder"
        )
    files = [file for file in sorted(path.iterdir()) if file.suffix in KINDS and file.is_file()]
    if len(files) == 1:
        return _file(files[0], trust=trust)
    saved = {number: each for each in path.iterdir() if each.is_dir() and (number := _number_in(each)) is not None}
    if saved and not files:  # the output_dir of a Trainer
        raise CheckpointError(
            f"{path} has {len(saved)} checkpoints and is none itself: give one or several of them, such as"
            f" {saved[max(saved)]}"
        )
    found = ", ".join(file.name for file in files[:8]) or "nothing that ends in " + ", ".join(KINDS)
    raise CheckpointError(
        f"{path} is not a folder of Hugging Face: it has no {' or '.join(WEIGHTS)}; give one of its files (it has"
        f" {found})"
    )


def _shards(index: Path) -> list[Path]:
    """The files that an index names, all of them there."""
    try:
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError):
        raise CheckpointError(f"{index} is not an index of shards: it has no weight_map; download it again") from None
    missing = [name for name in files if not (index.parent / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{index.parent} lacks {len(missing)} of its {len(files)} shards, such as {missing[0]}: download them"
        )
    return [index.parent / name for name in files]


def _hugging_face(path: Path, files: Sequence[Path], shards: str, *, trust: bool) -> Checkpoint:
    stores = [_store(file, trust=trust) for file in files]
    moments, state = path / "optimizer.pt", path / "trainer_state.json"
    step = torch_file.step_of(_json(state)) if state.is_file() else None
    optimizers = torch_file.optimizer_states(torch_file.read(moments, trust=trust)) if moments.is_file() else []
    return Checkpoint(
        path,
        f"Hugging Face{shards}",
        stores[0] if len(stores) == 1 else JoinedStore(stores),
        _number_in(path) if step is None else step,
        optimizers=optimizers,
        ordered=files[0].suffix != ".safetensors",
        **_beside(path),
    )


def _store(path: Path, *, trust: bool) -> TensorStore:
    if path.suffix == ".safetensors":
        return SafetensorsFile(path)
    return DictStore(torch_file.state_dict(torch_file.read(path, trust=trust)) or {})


def _beside(folder: Path) -> dict[str, Any]:
    """The configuration and the tokenizer that lie beside the weights."""
    config, tokenizer = folder / "config.json", folder / "tokenizer.json"
    return {
        "config": _json(config) if config.is_file() else {},
        "tokenizer": tokenizer if tokenizer.is_file() else None,
    }


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (ValueError, OSError):
        return {}
    return content if isinstance(content, dict) else {}


def _number_in(path: Path) -> int | None:
    """The update that a name like checkpoint-500, step=500.ckpt or ckpt_500.pt tells."""
    named = re.search(r"(?:step|iter|update|checkpoint|ckpt)[-_=]?(\d+)", path.name, re.I)
    return None if named is None else int(named[1])

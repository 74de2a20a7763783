"""Which tensor of a checkpoint is the LM head, by names and shapes: a file has no modules to look at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hilbert_monitor.optim.recipe import HEAD_NAMES

from .tensor_store import CheckpointError, TensorInfo, TensorStore, same_tensor

EMBEDDING_NAMES = (
    *("embed_tokens", "wte", "word_embeddings", "tok_embeddings", "embed_in", "embed", "embedding", "embeddings"),
    *("token_embedding", "tokens_embed", "embed_token", "shared"),
)
"""Last names of modules that are token embeddings."""
CANDIDATES = 6
"""How many tensors a message names."""


@dataclass(frozen=True)
class HeadTensor:
    """The head's tensor in a file."""

    name: str
    info: TensorInfo
    transposed: bool
    """Whether it is stored as (d, V)."""
    tied: str = ""
    """The embedding that has the same weight, if one has."""
    bias: str = ""
    """The tensor of its bias, if it has one."""


def find_head_tensor(store: TensorStore, config: Mapping[str, Any], *, head: str | None = None) -> HeadTensor:
    """Find the head, given its name or that of its module, or nothing.

    The first of these rules that any matrix satisfies, and one alone: it is called lm_head; it is outside the blocks,
    has another usual name of a head and as many rows as an embedding at least; it is outside the blocks and has as many
    rows as an embedding; it is an embedding, and nothing else can be the head: the two share a weight, which files have
    once.

    Args:
        store: the checkpoint's tensors.
        config: of Hugging Face, or nothing.
        head: what the user says.
    """
    matrices = {name: info for name, info in store.infos.items() if len(info.shape) == 2 and _is_float(info)}
    embeddings = [name for name in matrices if _last(name) in EMBEDDING_NAMES and not _in_block(name)]
    tokens = {matrices[name].shape[0] for name in embeddings}
    name = _chosen(matrices, head) if head is not None else _guess(matrices, embeddings, tokens, config)
    if name is None:
        raise CheckpointError(_nothing_found(matrices))
    rows, columns = matrices[name].shape
    bias = name.removesuffix("weight") + "bias" if name.endswith(".weight") else ""
    return HeadTensor(
        name,
        matrices[name],
        transposed=columns in tokens and rows not in tokens,
        tied=_tied(store, name, embeddings),
        bias=bias if store.infos.get(bias, TensorInfo((), matrices[name].dtype)).shape == (rows,) else "",
    )


def _guess(
    matrices: Mapping[str, TensorInfo], embeddings: list[str], tokens: set[int], config: Mapping[str, Any]
) -> str | None:
    others = [name for name in matrices if name not in embeddings]
    outside = [name for name in others if not _in_block(name)]
    smallest = min(tokens, default=0)
    for candidates in (
        [name for name in others if _last(name) == "lm_head"],
        [name for name in outside if _last(name) in HEAD_NAMES and max(matrices[name].shape) >= smallest],
        [name for name in outside if tokens & {*matrices[name].shape} and not _is_position(name)],
        [name for name in embeddings if config.get("tie_word_embeddings", True)],
    ):
        if candidates:
            return candidates[0] if len(candidates) == 1 else None
    return None


def _chosen(matrices: Mapping[str, TensorInfo], head: str) -> str:
    for name in (head, f"{head}.weight"):
        if name in matrices:
            return name
    raise CheckpointError(f"the checkpoint has no matrix {head!r}: pass --head with one of {_listed(matrices)}")


def _tied(store: TensorStore, name: str, embeddings: list[str]) -> str:
    """The embedding that shares the head's weight. A head that is an embedding's own tensor is tied to it."""
    if name in embeddings:
        return name
    return next((other for other in embeddings if same_tensor(store, name, other)), "")


def _nothing_found(matrices: Mapping[str, TensorInfo]) -> str:
    if not matrices:
        return "no LM head was found: the checkpoint has no matrix of real numbers at all; give the model's weights"
    return f"could not tell which tensor is the LM head: pass --head with one of {_listed(matrices)}"


def _listed(matrices: Mapping[str, TensorInfo]) -> str:
    """Those that may be the head by their shapes: with the most tokens first, blocks last."""
    order = sorted(matrices, key=lambda name: (_in_block(name), -max(matrices[name].shape)))
    shown = [f"{name} {tuple(matrices[name].shape)}" for name in order[:CANDIDATES]]
    more = f" and {len(order) - CANDIDATES} more" if len(order) > CANDIDATES else ""
    return ", ".join(shown) + more


def _last(name: str) -> str:
    """The last name of the module that a tensor belongs to, or of a bare parameter."""
    parts = name.split(".")
    return parts[-2] if parts[-1] == "weight" and len(parts) > 1 else parts[-1]


def _in_block(name: str) -> bool:
    return any(part.isdigit() for part in name.split("."))


def _is_position(name: str) -> bool:
    return _last(name) in ("wpe", "embed_positions", "position_embeddings", "pos_embed", "positions")


def _is_float(info: TensorInfo) -> bool:
    return info.dtype.is_floating_point

"""The paper's data: token shards, the order in which ranks read their blocks, and the validation text.

A shard is a file in the layout of FineWeb100B's ``.bin``: 256 little-endian int32, of which the first three are a magic
number, a version and the number of tokens, then uint16 tokens.

A block is `context` tokens, each with the next one as its target. An optimizer batch is `global_batch` consecutive
blocks of one shard. Ranks take its blocks micro-batch by micro-batch, and within a micro-batch in the order of the
ranks. So the tokens of an update depend neither on the number of ranks nor on accumulation.
"""

from __future__ import annotations

import hashlib
import os
import uuid
import warnings
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.random import SeedSequence, default_rng
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from .recipe import Recipe

TRAIN, VALIDATION = "*_train_*.bin", "*_val_*.bin"
"""Patterns of the names of training and validation shards, such as ``fineweb_train_000001.bin``."""
LIMIT = 2**16
"""Largest vocabulary that uint16 can hold."""
_MAGIC, _VERSION, _HEADER = 20240520, 1, 256
Batch = tuple[Tensor, Tensor]
"""Tokens (B, T) and their targets (B, T), int64."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A token file with a valid header. It is open only during a read, because a corpus has a thousand of them."""

    path: Path
    tokens: int

    def blocks(self, context: int) -> int:
        """Return the number of blocks. Each has `context` tokens and needs one more after it."""
        return (self.tokens - 1) // context

    def read(self, start: int, stop: int, vocab_size: int = LIMIT) -> NDArray[np.uint16]:
        """Map tokens start to stop into memory, read-only. Refuse a token that is not below `vocab_size`."""
        tokens = np.memmap(self.path, dtype="<u2", mode="r", offset=4 * _HEADER, shape=(self.tokens,))[start:stop]
        if len(tokens) and (largest := int(tokens.max())) >= vocab_size:
            raise ValueError(
                f"{self.path.name} has a token {largest} between its tokens {start} and {stop}, but the vocabulary has"
                f" {vocab_size}: give the vocab_size of the tokenizer that made it"
            )
        return tokens


def find_shards(folder: Path | str, pattern: str) -> list[Shard]:
    """Return the shards of a folder whose names match a pattern, ordered by name. Check their headers."""
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"the folder of shards {folder} does not exist: download or tokenize the text first")
    paths = sorted(folder.glob(pattern))
    if not paths:
        raise FileNotFoundError(f"no file in {folder} is named {pattern}: tokenize text into it, or change the pattern")
    return [open_shard(path) for path in paths]


def open_shard(path: Path | str) -> Shard:
    """Return the shard in a file after checking its header and size."""
    path = Path(path)
    with path.open("rb") as file:
        header = file.read(4 * _HEADER)
    if len(header) < 4 * _HEADER:
        raise ValueError(f"{path.name} has {len(header)} bytes, less than the header of a shard: get the file again")
    magic, version, tokens = np.frombuffer(header, dtype="<i4")[:3].tolist()
    if magic != _MAGIC:
        raise ValueError(f"{path.name} is not a shard: its first number must be {_MAGIC}, got {magic}")
    if version != _VERSION:
        raise ValueError(f"{path.name} has version {version} of the layout, but {_VERSION} is read: tokenize it again")
    if tokens < 1:
        raise ValueError(f"{path.name} has {tokens} tokens by its header: remove it, or write it again")
    size = path.stat().st_size - 4 * _HEADER
    if size != 2 * tokens:
        fault = "cut short" if size < 2 * tokens else "too long"
        raise ValueError(
            f"{path.name} is {fault}: its header says {tokens} tokens, but it holds {size // 2}: get the file again"
        )
    return Shard(path, tokens)


def write_shard(path: Path | str, tokens: ArrayLike) -> Shard:
    """Write a shard. It appears complete or not at all."""
    path, ids = Path(path), np.asarray(tokens)
    if ids.ndim != 1 or not len(ids) or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(
            f"a shard is a row of at least one integer, got shape {ids.shape} and dtype {ids.dtype} for {path.name}:"
            " give token ids"
        )
    if ids.min() < 0 or ids.max() >= LIMIT:
        raise ValueError(
            f"tokens of a shard must be 0 to {LIMIT - 1}, got {ids.min()} to {ids.max()} for {path.name}: use a"
            f" vocabulary of at most {LIMIT:,}"
        )
    header = np.zeros(_HEADER, dtype="<i4")
    header[:3] = _MAGIC, _VERSION, len(ids)
    write_whole(path, header.tobytes(), ids.astype("<u2", copy=False).data)
    return Shard(path, len(ids))


def write_whole(path: Path, *parts: bytes | memoryview) -> None:
    """Write a file under a temporary name, and rename it when it is on the disk."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as file:  # with the permissions of the umask
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def batch_at(step: int, batches: tuple[int, ...], seed: int) -> tuple[int, int]:
    """Return the shard of an optimizer batch and its place in the shard.

    Every epoch shuffles the shards, and within each shard its complete optimizer batches.

    Args:
        step: the optimizer batch, counted from the start of the run.
        batches: complete optimizer batches of each shard.
        seed: seed of the shuffles.
    """
    epoch, step = divmod(step, sum(batches))
    shards = _shuffled(len(batches), seed, epoch, 0).tolist()
    starts = list(accumulate((batches[k] for k in shards[:-1]), initial=0))
    place = bisect_right(starts, step) - 1
    k = shards[place]
    return k, int(_shuffled(batches[k], seed, epoch, k, 1)[step - starts[place]])


@lru_cache(maxsize=4)
def _shuffled(number: int, *key: int) -> NDArray[np.int64]:
    order = np.arange(number, dtype=np.int64)
    default_rng(SeedSequence(key)).shuffle(order)
    return order


class TrainingLoader:
    """Micro-batches of one rank, from a position that Lightning saves in checkpoints and restores.

    All iterators share the position: a new one continues where the last one was. If the position was saved between
    updates, as `UpdateCheckpoint` does, the run may continue on another number of ranks.

    Args:
        folder: folder of the shards.
        recipe: a resolved recipe.
        rank: this rank among those that read different data.
    """

    def __init__(self, folder: Path | str, recipe: Recipe, *, rank: int = 0) -> None:
        self.recipe, self.rank, self.shards = recipe, rank, find_shards(folder, TRAIN)
        blocks = [shard.blocks(recipe.context) for shard in self.shards]
        self.batches = tuple(number // recipe.global_batch for number in blocks)
        if not any(self.batches):
            raise ValueError(
                f"no shard in {folder} has a complete batch of {recipe.global_batch} blocks of {recipe.context} tokens,"
                f" the largest has {max(blocks)} blocks: choose a smaller global_batch"
            )
        self.taken = 0
        """Micro-batches yielded since the start of the run."""

    def __len__(self) -> int:
        assert self.recipe.updates is not None
        return self.recipe.updates * self.recipe.accumulation

    def __iter__(self) -> Iterator[Batch]:
        if self.taken >= len(self):  # otherwise Lightning would run empty epochs forever
            raise RuntimeError(
                f"all {self.recipe.updates} updates of the data were taken: end training there, or give more updates"
            )
        while self.taken < len(self):
            batch = self.batch(self.taken)
            self.taken += 1
            yield batch

    def batch(self, number: int) -> Batch:
        """Read one micro-batch of this rank, counted from the start of the run."""
        r = self.recipe
        step, part = divmod(number, r.accumulation)
        k, place = batch_at(step, self.batches, r.seed)
        first = place * r.global_batch + (part * r.data_parallel + self.rank) * r.micro_batch
        return _pinned(_read(self.shards[k], first, r.micro_batch, r))

    def state_dict(self) -> dict[str, Any]:
        """Return the position, which is the same on every rank, and the data that it refers to."""
        return {"taken": self.taken, "accumulation": self.recipe.accumulation, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a position, perhaps of a run with another accumulation. Refuse one in other data."""
        for name, value in self._identity().items():
            if state.get(name) != value:
                raise ValueError(
                    f"the saved position is of a run with {name}={state.get(name)}, got {name}={value}: resume with the"
                    " data and sizes it was trained with"
                )
        self.taken = rescaled(state["taken"], state["accumulation"], self.recipe.accumulation)

    def _identity(self) -> dict[str, Any]:
        sizes = repr([(shard.path.name, shard.tokens) for shard in self.shards])
        shards = hashlib.sha256(sizes.encode()).hexdigest()[:16]
        r = self.recipe
        return {"seed": r.seed, "context": r.context, "global_batch": r.global_batch, "shards": shards}


def rescaled(taken: int, accumulation: int, new: int) -> int:
    """Convert a count of micro-batches to another number of micro-batches per update."""
    if taken * new % accumulation:
        raise ValueError(
            f"the run was saved within an update, after {taken % accumulation} of {accumulation} micro-batches: resume"
            f" with {accumulation} micro-batches per update, got {new}"
        )
    return taken * new // accumulation


class ValidationLoader:
    """Micro-batches of one rank from the first validation blocks, the same in every validation.

    All micro-batches of all ranks have one size, so the mean of their mean losses is the mean over all tokens. Blocks
    beyond the last complete micro-batch of all ranks are dropped.

    Args:
        folder: folder of the shards. If they have less text than `validation_tokens`, all of it is used, with a
            warning.
        recipe: a resolved recipe.
        rank: this rank among those that read different data.
    """

    def __init__(self, folder: Path | str, recipe: Recipe, *, rank: int = 0) -> None:
        self.recipe, self.rank, self.shards = recipe, rank, find_shards(folder, VALIDATION)
        r = recipe
        self._starts = list(accumulate((shard.blocks(r.context) for shard in self.shards), initial=0))
        available, blocks = self._starts[-1], r.validation_tokens // r.context
        if available < blocks:
            warnings.warn(
                f"the validation shards have {available * r.context} tokens in blocks of {r.context}, but"
                f" validation_tokens is {r.validation_tokens}: validating on {available * r.context}",
                stacklevel=2,
            )
        blocks = min(blocks, available)
        self._micro_batches = blocks // (r.data_parallel * r.micro_batch)
        if not self._micro_batches:
            raise ValueError(
                f"validation has {blocks} blocks, less than a micro-batch of {r.micro_batch} on each of"
                f" {r.data_parallel} devices: validate on more tokens, or in smaller micro-batches"
            )

    def __len__(self) -> int:
        return self._micro_batches

    def __iter__(self) -> Iterator[Batch]:
        r = self.recipe
        for number in range(self._micro_batches):
            first = (number * r.data_parallel + self.rank) * r.micro_batch
            blocks = [self._block(i) for i in range(first, first + r.micro_batch)]
            yield _pinned((torch.cat([tokens for tokens, _ in blocks]), torch.cat([targets for _, targets in blocks])))

    def _block(self, index: int) -> Batch:
        k = bisect_right(self._starts, index) - 1
        return _read(self.shards[k], index - self._starts[k], 1, self.recipe)


def _read(shard: Shard, first: int, blocks: int, recipe: Recipe) -> Batch:
    """Read consecutive blocks. Tokens and targets share no memory."""
    start, stop = first * recipe.context, (first + blocks) * recipe.context
    ids = shard.read(start, stop + 1, recipe.vocab_size)
    tokens, targets = (torch.from_numpy(x.astype(np.int64)) for x in (ids[:-1], ids[1:]))
    return tokens.view(blocks, recipe.context), targets.view(blocks, recipe.context)


def _pinned(batch: Batch) -> Batch:
    return (batch[0].pin_memory(), batch[1].pin_memory()) if torch.cuda.is_available() else batch

"""The paper's data: token shards in an order that depends on the seed alone, and a fixed text to validate on.

A block is `context` tokens, each with the next one as its target. An optimizer batch is `global_batch` consecutive
blocks of one shard. They are dealt out micro-batch by micro-batch, and within a micro-batch rank by rank. So the tokens
of a step depend neither on the number of ranks nor on accumulation.
"""

from __future__ import annotations

import hashlib
import warnings
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.random import SeedSequence, default_rng
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from .shards import TRAIN, VALIDATION, Shard, find_shards

VALIDATION_TOKENS = 5_242_880
"""Length of the paper's validation text."""
ENDLESS = 2**40
"""Length of a loader without an end: more micro-batches than any run takes."""
Batch = tuple[Tensor, Tensor]
"""Tokens (B, T) and their targets (B, T), int64."""


class Order:
    """The order of the optimizer batches.

    Every epoch shuffles the shards, and within each shard its complete optimizer batches. An incomplete batch at the
    end of a shard is left out.

    Args:
        batches: number of complete optimizer batches of each shard, in the order of the shards' names.
        seed: seed of the shuffles.
    """

    def __init__(self, batches: Sequence[int], seed: int) -> None:
        self.batches, self.seed = tuple(batches), seed
        self.epoch = sum(self.batches)
        """Number of optimizer batches in an epoch."""

    def at(self, step: int) -> tuple[int, int]:
        """Return the shard of optimizer batch `step`, counted from the start of the run, and its place in the shard."""
        epoch, step = divmod(step, self.epoch)
        shards, starts = _shard_order(self.batches, self.seed, epoch)
        place = bisect_right(starts, step) - 1
        k = shards[place]
        return k, int(_shuffled(self.batches[k], self.seed, epoch, k, 1)[step - starts[place]])


@lru_cache(maxsize=2)
def _shard_order(batches: tuple[int, ...], seed: int, epoch: int) -> tuple[list[int], list[int]]:
    """Return the shards of an epoch in their order, and the step of the epoch at which each begins."""
    shards = _shuffled(len(batches), seed, epoch, 0).tolist()
    return shards, list(accumulate((batches[k] for k in shards[:-1]), initial=0))


@lru_cache(maxsize=2)
def _shuffled(number: int, *key: int) -> NDArray[np.int64]:
    order = np.arange(number, dtype=np.int64)
    default_rng(SeedSequence(key)).shuffle(order)
    return order


class TrainingLoader:
    """One rank's micro-batches, from a position that checkpoints save and restore; it can go on without an end.

    All iterators share the position: a new one continues where the last one was. Lightning saves it in checkpoints and
    restores it. For that a loader must have a length; without one, Lightning fetches a batch ahead, and the position
    that it saves is one too far. So a loader without an end has the length `ENDLESS`. Save between batches, as
    Lightning does: during a step its batch counts as taken.

    Args:
        folder: folder of the shards.
        context: tokens in a block.
        global_batch: blocks in an optimizer batch, over all ranks and all micro-batches.
        micro_batch: blocks in a micro-batch of one rank.
        vocab_size: number of tokens; a larger token id is refused when it is read.
        rank: the rank that takes these micro-batches.
        world: number of ranks.
        seed: seed of the order.
        steps: end after this many optimizer batches, counted from the start of the run.
        pattern: pattern of the shards' names.
        pin_memory: whether batches are in pinned memory, if there is CUDA.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        context: int,
        global_batch: int,
        micro_batch: int,
        vocab_size: int,
        rank: int = 0,
        world: int = 1,
        seed: int = 0,
        steps: int | None = None,
        pattern: str = TRAIN,
        pin_memory: bool = False,
    ) -> None:
        _check_positive(context=context, global_batch=global_batch, micro_batch=micro_batch, vocab_size=vocab_size)
        _check_rank(rank, world)
        if global_batch % (world * micro_batch):
            raise ValueError(
                f"a global batch of {global_batch} blocks does not divide into micro-batches of {micro_batch} on"
                f" {world} devices: choose a multiple of {world * micro_batch}"
            )
        if seed < 0 or (steps is not None and steps < 1):
            raise ValueError(f"seed must be at least 0 and steps at least 1, got {seed} and {steps}")
        self.context, self.micro_batch, self.vocab_size = context, micro_batch, vocab_size
        self.rank, self.world, self.steps, self.pin_memory = rank, world, steps, pin_memory
        self.global_batch, self.accumulation = global_batch, global_batch // (world * micro_batch)
        self.shards = find_shards(folder, pattern)
        self.order = Order([shard.blocks(context) // global_batch for shard in self.shards], seed)
        if not self.order.epoch:
            raise ValueError(
                f"no shard in {folder} has a complete batch of {global_batch} blocks of {context} tokens, the largest"
                f" has {max(shard.blocks(context) for shard in self.shards)} blocks: choose a smaller global_batch"
            )
        self.taken = 0
        """Micro-batches handed out since the start of the run."""

    def __len__(self) -> int:
        return ENDLESS if self.steps is None else self.steps * self.accumulation

    def __iter__(self) -> Iterator[Batch]:
        if self.steps is not None and self.taken >= len(self):  # otherwise Lightning would run empty epochs for ever
            raise RuntimeError(f"all {self.steps} steps of the data were taken: end training there, or give more steps")
        while self.steps is None or self.taken < len(self):
            batch = self.batch(self.taken)
            self.taken += 1
            yield batch

    def batch(self, number: int) -> Batch:
        """Read this rank's micro-batch with a number, counted from the start of the run."""
        step, part = divmod(number, self.accumulation)
        k, at = self.order.at(step)
        first = at * self.global_batch + (part * self.world + self.rank) * self.micro_batch
        tokens, targets = _read(self.shards[k], first, self.micro_batch, self.context, self.vocab_size)
        if self.pin_memory and torch.cuda.is_available():
            return tokens.pin_memory(), targets.pin_memory()
        return tokens, targets

    def state_dict(self) -> dict[str, Any]:
        """Return the position, which is the same on every rank, and the data that it belongs to."""
        return {"taken": self.taken, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position. Refuse one in another order of batches, where it would mean other tokens."""
        for name, value in self._identity().items():
            if state.get(name) != value:
                raise ValueError(
                    f"the saved position is of a run with {name}={state.get(name)}, got {name}={value}: resume with the"
                    " data and sizes it was trained with"
                )
        self.taken = int(state["taken"])

    def _identity(self) -> dict[str, Any]:
        sizes = repr([(shard.path.name, shard.tokens) for shard in self.shards])
        return {
            "seed": self.order.seed,
            "context": self.context,
            "global_batch": self.global_batch,
            "accumulation": self.accumulation,
            "shards": hashlib.sha256(sizes.encode()).hexdigest()[:16],
        }


class ValidationBlocks(Dataset[Batch]):
    """The first blocks of the validation shards, in order. An item is tokens (T,) and their targets (T,).

    Args:
        folder: folder of the shards.
        context: tokens in a block.
        vocab_size: number of tokens; a larger token id is refused when it is read.
        tokens: length of the text. If the shards have fewer, all are taken, with a warning.
        pattern: pattern of the shards' names.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        context: int,
        vocab_size: int,
        tokens: int = VALIDATION_TOKENS,
        pattern: str = VALIDATION,
    ) -> None:
        _check_positive(context=context, vocab_size=vocab_size)
        if tokens < context:
            raise ValueError(f"validation needs at least a block of {context} tokens, got tokens={tokens}")
        self.context, self.vocab_size = context, vocab_size
        self.shards = find_shards(folder, pattern)
        self._starts = list(accumulate((shard.blocks(context) for shard in self.shards), initial=0))
        available, self._blocks = self._starts[-1], tokens // context
        if not available:
            raise ValueError(f"no shard named {pattern} in {folder} has a block of {context} tokens and a next one")
        if available < self._blocks:
            self._blocks = available
            warnings.warn(
                f"the validation shards have {available * context} tokens in blocks of {context}, fewer than the"
                f" {tokens} asked for: validation is on {available * context}",
                stacklevel=2,
            )

    def __len__(self) -> int:
        return self._blocks

    def __getitem__(self, index: int) -> Batch:
        if not 0 <= index < len(self):
            raise IndexError(f"there are {len(self)} validation blocks, got index {index}")
        k = bisect_right(self._starts, index) - 1
        tokens, targets = _read(self.shards[k], index - self._starts[k], 1, self.context, self.vocab_size)
        return tokens[0], targets[0]


class RankSampler(DistributedSampler[Any]):
    """One rank's validation blocks, dealt out as the training blocks are; only complete micro-batches.

    It is a DistributedSampler so that Lightning does not replace it by its own, which repeats items.
    """

    def __init__(self, data: ValidationBlocks, *, micro_batch: int, rank: int = 0, world: int = 1) -> None:
        _check_positive(micro_batch=micro_batch)
        _check_rank(rank, world)
        super().__init__(data, num_replicas=world, rank=rank, shuffle=False)
        self.micro_batch, self.world = micro_batch, world
        self.micro_batches = len(data) // (world * micro_batch)
        if not self.micro_batches:
            raise ValueError(
                f"validation has {len(data)} blocks, less than a micro-batch of {micro_batch} on each of"
                f" {world} devices: validate on more tokens, or in smaller micro-batches"
            )

    def __len__(self) -> int:
        return self.micro_batches * self.micro_batch

    def __iter__(self) -> Iterator[int]:
        for j in range(self.micro_batches):
            first = (j * self.world + self.rank) * self.micro_batch
            yield from range(first, first + self.micro_batch)


def validation_loader(
    blocks: ValidationBlocks, *, micro_batch: int, rank: int = 0, world: int = 1, pin_memory: bool = False
) -> DataLoader[Batch]:
    """Return one rank's loader of the validation text, which starts at the first block every time.

    All micro-batches of all ranks have one size, so the mean of their mean losses is the mean over all tokens.
    """
    sampler = RankSampler(blocks, micro_batch=micro_batch, rank=rank, world=world)
    pinned = pin_memory and torch.cuda.is_available()
    return DataLoader(blocks, batch_size=micro_batch, sampler=sampler, pin_memory=pinned)


def _read(shard: Shard, first: int, blocks: int, context: int, vocab_size: int) -> Batch:
    """Read consecutive blocks. The targets are a copy, so that a change to one does not change the other."""
    start, stop = first * context, (first + blocks) * context
    ids = shard.read(start, stop + 1, vocab_size)
    tokens, targets = (torch.from_numpy(x.astype(np.int64)) for x in (ids[:-1], ids[1:]))
    return tokens.view(blocks, context), targets.view(blocks, context)


def _check_positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")


def _check_rank(rank: int, world: int) -> None:
    if not 0 <= rank < world:
        raise ValueError(f"rank must be at least 0 and below {world}, got {rank}")

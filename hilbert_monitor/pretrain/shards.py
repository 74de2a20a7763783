"""Token files in the layout of FineWeb100B's ``.bin``: a header of 256 int32, then uint16 tokens, little endian.

The header's first three entries are a magic number, a version and the number of tokens; the others are zero.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

TRAIN, VALIDATION = "*_train_*.bin", "*_val_*.bin"
"""Patterns of the names of training and validation files, such as ``fineweb_train_000001.bin``."""
MAGIC, VERSION, ENTRIES = 20240520, 1, 256
LIMIT = 2**16
"""Number of different tokens that uint16 can hold."""
_START = 4 * ENTRIES  # bytes before the first token


@dataclass(frozen=True, slots=True)
class Shard:
    """A token file with a valid header. It is open only while it is read, because a corpus has a thousand of them."""

    path: Path
    tokens: int

    def blocks(self, context: int) -> int:
        """Return the number of blocks; each has `context` tokens and needs one more after it."""
        return (self.tokens - 1) // context

    def read(self, start: int, stop: int, vocab_size: int) -> NDArray[np.uint16]:
        """Map tokens start to stop into memory, read only; refuse any that is not below `vocab_size`.

        Only these tokens are checked: a pass over a whole corpus would take minutes.
        """
        tokens = np.memmap(self.path, dtype="<u2", mode="r", offset=_START, shape=(self.tokens,))[start:stop]
        if len(tokens) and (largest := int(tokens.max())) >= vocab_size:
            raise ValueError(
                f"{self.path.name} has a token {largest} between its tokens {start} and {stop}, but the vocabulary has"
                f" {vocab_size}: give the vocab_size of the tokenizer that made it"
            )
        return tokens


def find_shards(folder: Path | str, pattern: str) -> list[Shard]:
    """Return the shards of a folder whose names match a pattern, in the order of their names; check their headers."""
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"the folder of shards {folder} does not exist: download or tokenize the text first")
    paths = sorted(folder.glob(pattern))
    if not paths:
        raise FileNotFoundError(f"no file in {folder} is named {pattern}: tokenize text into it, or change the pattern")
    return [open_shard(path) for path in paths]


def open_shard(path: Path | str) -> Shard:
    """Return the shard of a file, after a check of its header and its size."""
    path = Path(path)
    with path.open("rb") as file:
        header = np.frombuffer(file.read(_START), dtype=np.uint8)
    if len(header) < _START:
        raise ValueError(f"{path.name} has {len(header)} bytes, less than the header of a shard: get the file again")
    magic, version, tokens = (int(entry) for entry in header.view("<i4")[:3])
    if magic != MAGIC:
        raise ValueError(f"{path.name} is not a shard: its first number must be {MAGIC}, got {magic}")
    if version != VERSION:
        raise ValueError(f"{path.name} has version {version} of the layout, but {VERSION} is read: tokenize it again")
    if tokens < 1:
        raise ValueError(f"{path.name} has {tokens} tokens by its header: remove it, or write it again")
    size = path.stat().st_size - _START
    if size != 2 * tokens:
        fault = "cut short" if size < 2 * tokens else "too long"
        raise ValueError(
            f"{path.name} is {fault}: its header says {tokens} tokens, but it holds {size // 2}: get the file again"
        )
    return Shard(path, tokens)


def write_shard(path: Path | str, tokens: ArrayLike) -> Shard:
    """Write a shard; it appears complete or not at all."""
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
    header = np.zeros(ENTRIES, dtype="<i4")
    header[:3] = MAGIC, VERSION, len(ids)
    write_whole(path, header.tobytes(), ids.astype("<u2", copy=False).data)
    return Shard(path, len(ids))


def write_whole(path: Path, *parts: bytes | memoryview) -> None:
    """Write a file under a temporary name, and rename it when it is on the disk."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with open(handle, "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~_umask())  # mkstemp lets the owner alone read it
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


class ShardWriter:
    """Cuts a stream of tokens into shards ``name_000000.bin``, ``name_000001.bin``, ... of a folder.

    It holds one shard in memory. At the end of a ``with`` block the rest becomes a last, shorter shard.

    Args:
        folder: folder of the shards.
        name: start of their names.
        size: tokens in a shard.
    """

    def __init__(self, folder: Path, name: str, size: int) -> None:
        if size < 2:
            raise ValueError(f"a shard has at least two tokens, a token and its next, got {size}")
        self.folder, self.name = folder, name
        self.shards: list[Shard] = []
        self._parts: list[NDArray[np.uint16]] = []
        self._size, self._number = size, 0

    @property
    def tokens(self) -> int:
        """Number of tokens taken so far."""
        return self._number + sum(shard.tokens for shard in self.shards)

    def add(self, tokens: NDArray[np.uint16]) -> None:
        """Take more tokens."""
        while len(tokens):
            part = tokens[: self._size - self._number]
            self._parts.append(part)
            self._number += len(part)
            if self._number == self._size:
                self.flush()
            tokens = tokens[len(part) :]

    def flush(self) -> None:
        """Write the tokens in memory, if any, as a shard."""
        if self._number:
            path = self.folder / f"{self.name}_{len(self.shards):06}.bin"
            self.shards.append(write_shard(path, np.concatenate(self._parts)))
            self._parts, self._number = [], 0

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.flush()

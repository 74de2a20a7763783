"""Tables of runs on disk, so that a log need not be read again. The log stays the truth; this is a copy.

CACHE/RUN.npy    the columns, a row each, which are mapped into memory
CACHE/RUN.json   their names, the tokens' texts, how far the log was read, and checksums of the log

A cache that does not fit its log, or cannot be read, is ignored.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from sys import intern

import msgspec
import numpy as np
from msgspec import Struct

from .columns import NUMBERS, PAIRS, Table

FORMAT = zlib.crc32(",".join(("3", *NUMBERS, *PAIRS)).encode())
"""What the files look like, and which fields a record had: a cache that lacks a field is made anew."""
LOOK = 4096
"""Bytes at the beginning of a log, and before the offset, that are compared to recognise it."""


class _Head(Struct, frozen=True):
    format: int
    offset: int
    torn: int
    checksums: tuple[int, int]
    columns: list[str]
    texts: dict[int, str]


class CachedTable(Struct, frozen=True):
    """The table of a log, and how far the log was read."""

    table: Table
    offset: int
    torn: int


class Cache:
    """A folder of tables.

    Args:
        folder: is created when needed. If it cannot be written, nothing is cached.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, run: str, log: Path) -> CachedTable | None:
        """Load the table of a run's log; None if the log is another one, or nothing was saved."""
        try:
            head = msgspec.json.decode((self.folder / f"{run}.json").read_bytes(), type=_Head)
            if head.format != FORMAT or head.checksums != _checksums(log, head.offset):
                return None
            rows = np.asarray(np.load(self.folder / f"{run}.npy", mmap_mode="r", allow_pickle=False))
            if rows.ndim != 2 or len(rows) != 1 + len(head.columns) or rows.dtype != np.float64:
                return None
        except (OSError, ValueError, EOFError, msgspec.MsgspecError):
            return None
        columns = dict(zip(head.columns, rows[1:], strict=True))
        texts = {token: intern(text) for token, text in head.texts.items()}  # other runs have the same
        return CachedTable(Table(rows[0].view(np.int64), columns, texts), head.offset, head.torn)

    def save(self, run: str, log: Path, cached: CachedTable) -> bool:
        """Save the table of a run's log; return whether it worked. A reader sees the old or the new one, whole."""
        table = cached.table
        try:
            head = _Head(
                FORMAT,
                cached.offset,
                cached.torn,
                _checksums(log, cached.offset),
                list(table.columns),
                dict(table.texts),
            )
            self.folder.mkdir(parents=True, exist_ok=True)
            json, npy = self.folder / f"{run}.json", self.folder / f"{run}.npy"
            json.unlink(missing_ok=True)  # first: columns without a head are not used
            with _replacing(npy) as path, path.open("wb") as file:  # not mapped: a full disk would be a SIGBUS
                shape = (1 + len(table.columns), len(table))
                header = {"descr": "<f8", "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(file, header)
                for values in (table.steps.view(np.float64), *table.columns.values()):
                    file.write(np.ascontiguousarray(values).data)
            with _replacing(json) as path:
                path.write_bytes(msgspec.json.encode(head))
        except (OSError, ValueError):
            return False
        return True


class _replacing:
    """A temporary path to write to. It replaces the given path when the block ends without an exception."""

    def __init__(self, path: Path) -> None:
        self.path, self.part = path, path.with_name(f"{path.name}.{os.getpid()}.part")

    def __enter__(self) -> Path:
        return self.part

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            os.replace(self.part, self.path)
        else:
            self.part.unlink(missing_ok=True)


def _checksums(log: Path, offset: int) -> tuple[int, int]:
    """Checksums of the log's beginning and of the bytes before an offset."""
    with log.open("rb") as file:
        first = zlib.crc32(file.read(min(LOOK, offset)))
        file.seek(max(0, offset - LOOK))
        return first, zlib.crc32(file.read(offset - max(0, offset - LOOK)))

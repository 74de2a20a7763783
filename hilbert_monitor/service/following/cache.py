"""Tables of runs on disk, so that a log need not be read again. The log stays the truth; this is a copy.

CACHE/RUN.npy    the columns, a row each, which are mapped into memory
CACHE/RUN.json   their names, the tokens' texts, how far the log was read, and checksums of the log

A cache that does not fit its log, or cannot be read, is ignored.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
import resource
import weakref
import zlib
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from sys import intern
from typing import IO, Self

import msgspec
import numpy as np
from msgspec import Struct
from numpy.lib import format as npy
from numpy.typing import NDArray

from hilbert_monitor.runs.table import NUMBERS, PAIRS, Table

from .private_folder import PrivateFolder, place_of

FORMAT = zlib.crc32(",".join(("3", *NUMBERS, *PAIRS)).encode())
"""What the files look like, and which fields a record had: a cache that lacks a field is made anew."""
LOOK = 4096
"""Bytes at the beginning of a log, and before the offset, that are compared to recognise it."""
MAPPED = 0.25
"""Share of the files that a process may have open which may be mapped tables; others are loaded into memory."""
VARIABLE = "HILBERT_MONITOR_CACHE"
"""Environment variable with the folder in which caches are."""

_log = logging.getLogger(__name__)


def cache_folder(root: Path, chosen: Path | None = None) -> Path | None:
    """The folder for the cache of a folder of runs; None, and a line in the log, if the user has no folder at all.

    Args:
        root: folder of the runs.
        chosen: folder in which caches are; by default what the environment says, or else `hilbert-monitor` in the
            user's cache folder.
    """
    if chosen is None and os.environ.get(VARIABLE):
        chosen = Path(os.environ[VARIABLE])
    if chosen is None:
        caches = os.environ.get("XDG_CACHE_HOME", "")
        if not os.path.isabs(caches):
            caches = os.path.expanduser("~/.cache")
        if not os.path.isabs(caches):
            _log.warning("no cache, as this user has no home: every start reads all logs; --cache names a folder")
            return None
        chosen = Path(caches) / "hilbert-monitor"
    return chosen / place_of(root)


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
    """A folder of tables. `Cache.open` makes it.

    Args:
        folder: for their files.
    """

    def __init__(self, folder: PrivateFolder) -> None:
        self._folder, self._is_swept = folder, False
        self._maps: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
        self._most_maps = MAPPED * resource.getrlimit(resource.RLIMIT_NOFILE)[0]

    @classmethod
    def open(cls, path: Path) -> Self | None:
        """Open a folder, which is created if needed; None, and a line in the log, if nothing can be cached there."""
        try:
            return cls(PrivateFolder(path))
        except OSError as error:
            reason = error.strerror or error
            _log.warning("no cache in '%s' (%s): every start reads all logs; --cache names another", path, reason)
            return None

    def load(self, run: str, log: Path) -> CachedTable | None:
        """Load the table of a run's log; None if the log is another one, or nothing was saved."""
        try:
            with self._folder.open(f"{run}.json") as file:
                head = msgspec.json.decode(file.read(), type=_Head)
            if head.format != FORMAT or head.checksums != _checksums(log, head.offset):
                return None
            with self._folder.open(f"{run}.npy") as file:
                rows = self._rows(file)
            if len(rows) != 1 + len(head.columns):
                return None
        except (OSError, ValueError, EOFError, msgspec.MsgspecError):
            return None
        columns = dict(zip(head.columns, rows[1:], strict=True))
        texts = {token: intern(text) for token, text in head.texts.items()}  # other runs have the same
        return CachedTable(Table(rows[0].view(np.int64), columns, texts), head.offset, head.torn)

    def save(self, run: str, log: Path, cached: CachedTable) -> Table | None:
        """Save the table of a run's log; return it with the columns that are on the disk, or None if that failed.

        A reader of the files sees the old table or the new one, whole.
        """
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
            self._folder.remove(f"{run}.json")  # first: columns without a head are not used
            with self._folder.replacing(f"{run}.npy") as file:  # not mapped: a full disk would be a SIGBUS
                shape = (1 + len(table.columns), len(table))
                npy.write_array_header_1_0(file, {"descr": "<f8", "fortran_order": False, "shape": shape})
                for values in (table.steps.view(np.float64), *table.columns.values()):
                    file.write(np.ascontiguousarray(values).data)
            with self._folder.replacing(f"{run}.json") as file:
                file.write(msgspec.json.encode(head))
            with self._folder.open(f"{run}.npy") as file:
                rows = self._rows(file)
        except (OSError, ValueError, EOFError):
            return None
        return Table(rows[0].view(np.int64), dict(zip(table.columns, rows[1:], strict=True)), table.texts)

    def keep_only(self, runs: Collection[str]) -> None:
        """Remove the tables of all other runs, once."""
        if self._is_swept:
            return
        self._is_swept = True
        with suppress(OSError):
            for name in self._folder.names():
                if name.rpartition(".")[0] not in runs:
                    self._folder.remove(name)

    def _rows(self, file: IO[bytes]) -> NDArray[np.float64]:
        """The columns of a file, mapped as long as few files are."""
        if npy.read_magic(file) != (1, 0):
            raise ValueError("not a file of ours")
        shape, is_fortran, dtype = npy.read_array_header_1_0(file)
        start, size = file.tell(), os.fstat(file.fileno()).st_size
        if len(shape) != 2 or is_fortran or dtype != np.float64 or size != start + 8 * math.prod(shape):
            raise ValueError("not a file of ours")
        if len(self._maps) < self._most_maps:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._maps.add(mapped)
            return np.frombuffer(mapped, np.float64, offset=start).reshape(shape)
        return np.frombuffer(file.read(), np.float64).reshape(shape)


def _checksums(log: Path, offset: int) -> tuple[int, int]:
    """Checksums of the log's beginning and of the bytes before an offset."""
    with log.open("rb") as file:
        first = zlib.crc32(file.read(min(LOOK, offset)))
        file.seek(max(0, offset - LOOK))
        return first, zlib.crc32(file.read(offset - max(0, offset - LOOK)))

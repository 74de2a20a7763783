"""A file of JSON lines that one process appends to while others read it. It stays readable if the writer is killed.

A line is one write. A full disk may cut a line short: what was written of it is taken back. So may a kill while the
system copies it: it is torn. The next line then begins with a newline, so that readers skip the torn line alone. JSON
has no nan and no infinities; they are the strings "nan", "inf" and "-inf", which a decoder with strict=False reads as
numbers where the type is a number.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct

from .json_values import plain
from .process_bound import ProcessBound, forks

TRIES = 100
"""How often a file is opened at most, if the process is forked each time."""
LONGEST = 1 << 24
"""The longest line that is read, in bytes."""

Line = TypeVar("Line")
Step = Annotated[int, Meta(ge=-(2**62), le=2**62)]

BROKEN = (msgspec.MsgspecError, ValueError, RecursionError)
"""Exceptions that decoding a broken line may raise."""


class Marker(Struct, frozen=True):
    """The line that begins an attempt. Of the lines above it, those beyond `first_step` no longer count."""

    attempt: int
    first_step: Step


_MARKERS = msgspec.json.Decoder(Marker)
_encoder = msgspec.json.Encoder()


def line_of(record: Struct) -> bytes:
    """Encode a record as one line of JSON, without a newline."""
    values = {name: plain(value) for name, value in msgspec.structs.asdict(record).items()}
    return _encoder.encode(msgspec.structs.replace(record, **values))


# Writing


class LineFile(ProcessBound):
    """A file that this process appends lines to.

    It can be locked for as long as the process lives. The lock is flock's: it holds between processes and between
    threads, and is not lost when the file is copied or read. A forked child would share the lock, and a data loader's
    worker may outlive its killed parent, so a child closes the file as soon as it is forked.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._guard = threading.Lock()
        self._fd = -1
        self.bind_to_process()
        for _ in range(TRIES):
            before = forks()
            fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
            self._fd = fd
            if forks() == before:
                break
            self._fd = -1  # a child that was forked meanwhile may have it too, and would hold its lock
            os.close(fd)
        else:
            raise OSError(f"'{path}' could not be opened for the many forks of this process")
        size = os.fstat(self._fd).st_size
        self._torn = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"
        self._reserved: int | None = None  # where the blanks begin

    @property
    def closed(self) -> bool:
        """Whether it takes no more lines: it was closed, or this process was forked from the one that opened it."""
        return self._fd < 0

    def lock(self, tries: int = 10, pause: float = 0.03) -> bool | None:
        """Try to lock the file; None where there are no locks. It tries several times, as readers test the lock."""
        for attempt in range(tries):
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(pause if attempt + 1 < tries else 0.0)
            except OSError:
                return None
            else:
                return True
        return False

    def append(self, line: bytes) -> None:
        """Write one line at once, or raise OSError; the file stays usable."""
        with self._guard:
            self._refuse_closed()
            if self._reserved is not None:
                self._write_over_blanks(line + b"\n", self._reserved)
            else:
                self._append(b"\n" + line + b"\n" if self._torn else line + b"\n")
                self._torn = False

    def reserve(self, size: int) -> None:
        """Take room for the next line: blanks that it is written over, however full the disk is by then.

        Blanks are no line, so readers pass them over. An attempt that was killed leaves them; the next one's line is
        written over them.
        """
        with self._guard:
            self._refuse_closed()
            end = os.fstat(self._fd).st_size
            last = os.pread(self._fd, size, max(0, end - size))
            blanks = len(last) - len(last.rstrip(b" "))
            is_torn = self._torn and not (blanks == len(last) or last[-blanks - 1 : -blanks or None] == b"\n")
            self._append(b"\n" * is_torn + b" " * max(0, size - blanks))
            self._torn, self._reserved = True, end + is_torn - (0 if is_torn else blanks)

    def _write_over_blanks(self, data: bytes, start: int) -> None:
        fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_APPEND)
        if os.pwrite(self._fd, data, start) < len(data):
            raise OSError(errno.ENOSPC, "no room for a whole line", str(self.path))
        os.ftruncate(self._fd, start + len(data))
        fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) | os.O_APPEND)
        self._torn, self._reserved = False, None

    def _append(self, data: bytes) -> None:
        """Write all of it or nothing; what a full disk lets through in part is taken back."""
        size, torn, self._torn = os.fstat(self._fd).st_size, self._torn, True
        try:
            if os.write(self._fd, data) < len(data):
                raise OSError(errno.ENOSPC, "no room for a whole line", str(self.path))
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, size)
                self._torn = torn
            raise
        self._torn = torn

    def touch(self) -> None:
        """Set the time of the last change."""
        with self._guard:
            self._refuse_closed()
            os.utime(self._fd)

    def close(self) -> None:
        """Force the lines to the disk and close the file."""
        with self._guard:
            fd, self._fd = self._fd, -1
        if fd >= 0:
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def _refuse_closed(self) -> None:
        if self.closed:
            raise OSError(
                f"'{self.path.name}' of run '{self.path.parent.name}' is closed or was opened before this process was"
                " forked, and takes no more lines: write from the process that opened it"
            )

    def on_fork(self) -> None:
        """Close the file in the child, which would hold the lock of the run otherwise."""
        fd, self._fd, self._guard = self._fd, -1, threading.Lock()
        if fd >= 0:
            os.close(fd)


# Reading


def process_exists(pid: int) -> bool:
    """Whether this machine has a process with that number."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return pid > 0


def is_locked(path: Path) -> bool | None:
    """Whether a process has the file locked; None where that cannot be determined."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    else:
        return False
    finally:
        os.close(fd)


def blocks(path: Path, start: int = 0, size: int = 1 << 17) -> Iterator[tuple[int, bytes]]:
    """Read whole lines from a byte offset on, about `size` bytes at a time, each block with the offset of its end.

    A last line without a newline is left for later. A file shorter than the offset was replaced and is read from its
    start. Of a line longer than LONGEST only the end is given, so that it counts as torn and takes no memory.
    """
    try:
        file = _open(path)
    except FileNotFoundError:
        return
    with file:
        start = file.seek(start if start <= os.fstat(file.fileno()).st_size else 0)
        parts: list[bytes] = []
        while block := file.read(size):
            end = block.rfind(b"\n") + 1
            if end:
                start = file.tell() - len(block) + end
                yield start, b"".join((*parts, block[:end]))
                parts = []
            parts.append(block[end:])
            if len(parts) * size > LONGEST:
                parts = [b"?"]


def tail(path: Path, size: int = 1 << 16) -> bytes:
    """The last whole lines of a file."""
    with _open(path) as file:
        start = max(os.fstat(file.fileno()).st_size - size, 0)
        file.seek(start)
        block = file.read(size) or b""
    return block[block.find(b"\n") + 1 if start else 0 : block.rfind(b"\n") + 1]


def _open(path: Path) -> FileIO:
    """Open a file for reading. O_NONBLOCK keeps a pipe of that name from blocking."""
    return open(path, "rb", buffering=0, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))


def items(block: bytes, decoder: msgspec.json.Decoder[Line]) -> list[Line | Marker | None]:
    """Decode the lines of a block, one item a line: None for a torn line. Empty lines are left out."""
    try:
        decoded: list[Line | Marker | None] = [*decoder.decode_lines(block)]
    except BROKEN:
        decoded = []
    if len(decoded) == block.count(b"\n"):
        return decoded
    lines = (line for line in block.split(b"\n") if line.strip())
    return [_decoded(line, decoder) or _decoded(line, _MARKERS) for line in lines]


def _decoded(line: bytes, decoder: msgspec.json.Decoder[Line]) -> Line | None:
    try:
        return decoder.decode(line)
    except BROKEN:
        return None

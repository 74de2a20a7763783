"""Files of a run: JSON lines that one process appends to while others read them, and the heartbeat of that process.

A record is one write, so a killed process loses none that it has written. A full disk may cut a line short: what was
written of it is taken back. So may a kill in the middle of a write: that line is torn. The next line then begins with a
newline, and readers skip the torn line alone. JSON has no nan and no infinities: they are the strings "nan", "inf" and
"-inf", which a decoder with strict=False reads as numbers.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import math
import os
import stat
import threading
import time
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from .process_bound import ProcessBound, forks

LONGEST = 1 << 24
"""Bytes of the longest line that is read."""
CLOCKS_DIFFER = 900.0
"""Seconds by which the clocks of two machines may differ. A first look ignores a heartbeat further away than this from
our time, until it changes."""
BROKEN = (msgspec.MsgspecError, ValueError, RecursionError)
"""Exceptions that decoding a broken line may raise."""

Line = TypeVar("Line")
Step = Annotated[int, Meta(ge=-(2**62), le=2**62)]


class Marker(Struct, frozen=True):
    """The line that begins an attempt. Of the lines above it, those beyond `first_step` no longer count."""

    attempt: int
    first_step: Step


_markers = msgspec.json.Decoder(Marker)


def replace_surrogates(text: str) -> str:
    """Return text that UTF-8 can encode: lone surrogates become their escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def safe_repr(value: object, limit: int = 1000) -> str:
    """Return any object as text of at most `limit` characters, even if its repr fails."""
    try:
        text = value if isinstance(value, str) else str(value) if isinstance(value, os.PathLike) else repr(value)
    except Exception:
        text = f"<{type(value).__name__} that cannot be shown>"
    return replace_surrogates(text if len(text) <= limit else text[: limit - 3] + "...")


def to_json(value: Any, depth: int = 16) -> Any:
    """Return the value as JSON can hold it; what JSON has no form for becomes text."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return replace_surrogates(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else repr(float(value))
    if isinstance(value, int):
        return int(value) if abs(value) < 2**63 else safe_repr(value)
    if depth and isinstance(value, dict):
        texts = {key: replace_surrogates(key) if isinstance(key, str) else safe_repr(key) for key in value}
        return {texts[key]: to_json(item, depth - 1) for key, item in value.items()}
    if depth and isinstance(value, (list, tuple, set, frozenset)):
        return [to_json(item, depth - 1) for item in value]
    return to_json(msgspec.to_builtins(value), depth) if isinstance(value, Struct) else safe_repr(value)


def encode_line(record: Struct) -> bytes:
    """Encode a record as one line of JSON, without a newline."""
    values = {name: to_json(value) for name, value in msgspec.structs.asdict(record).items()}
    return msgspec.json.encode(msgspec.structs.replace(record, **values))


def decode_lines(block: bytes, decoder: msgspec.json.Decoder[Line]) -> list[Line | Marker | None]:
    """Decode the lines of a block, one item a line: None for a torn line. Empty lines are left out."""
    try:
        decoded: list[Line | Marker | None] = [*decoder.decode_lines(block)]
    except BROKEN:
        decoded = []
    if len(decoded) == block.count(b"\n"):
        return decoded
    lines = (line for line in block.split(b"\n") if line.strip())
    return [_decode(line, decoder) or _decode(line, _markers) for line in lines]


def _decode(line: bytes, decoder: msgspec.json.Decoder[Line]) -> Line | None:
    try:
        return decoder.decode(line)
    except BROKEN:
        return None


def read_blocks(path: Path, start: int = 0, size: int = 1 << 17) -> Iterator[tuple[int, bytes]]:
    """Yield blocks of whole lines from a byte offset, about `size` bytes each, with the offset of their ends.

    A last line without a newline is left for later. A file shorter than the offset was replaced and is read from its
    start. Of a line longer than LONGEST only the end is given, so that it counts as torn and takes no memory.
    """
    try:
        file = _open_regular(path)
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


def _open_regular(path: Path) -> FileIO:
    """Open a file for reading. Pipes and devices, which have no end, raise OSError."""
    file = open(path, "rb", buffering=0, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise OSError(errno.EINVAL, "not a regular file", str(path))


class LineFile(ProcessBound):
    """A file that this process appends lines to.

    A forked child would share the file's lock, and a data loader's worker may outlive its killed parent, so a child
    closes the file as soon as it is forked. `head` is a line that is written together with the first one.
    """

    def __init__(self, path: Path, head: bytes = b"") -> None:
        self.path, self._head = path, head + b"\n" if head else b""
        self._guard, self._fd = threading.Lock(), -1
        self._reason = "is closed or was opened before this process was forked: write from the process that opened it"
        self.bind_to_process()
        while self._fd < 0:
            before = forks()
            self._fd = fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
            if forks() != before:  # a child that was forked meanwhile may have it too, and would hold its lock
                self._fd = -1
                os.close(fd)
        try:
            size = os.fstat(self._fd).st_size
            self._torn = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"
        except OSError:
            self.close()
            raise

    @property
    def closed(self) -> bool:
        """True after close(), and in a process that was forked from the one that opened it."""
        return self._fd < 0

    def lock(self) -> bool | None:
        """Lock the file for as long as it is open. Return False if another process has it, None without locks.

        The lock is flock's: it holds between threads too, and is not lost when the file is copied or read. Readers
        test it, so several tries are made.
        """
        for _ in range(10):
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                time.sleep(0.03)
            except OSError:
                return None
        return False

    def append(self, line: bytes) -> None:
        """Write one line at once, or nothing and raise OSError; the file stays usable."""
        with self._guard:
            self._refuse_closed()
            data = b"\n" * self._torn + self._head + line + b"\n"
            size, torn, self._torn = os.fstat(self._fd).st_size, self._torn, True
            try:
                if os.write(self._fd, data) < len(data):
                    raise OSError(errno.ENOSPC, "no room for a whole line", str(self.path))
            except OSError:
                with contextlib.suppress(OSError):  # what a full disk let through is taken back
                    os.ftruncate(self._fd, size)
                    self._torn = torn
                raise
            self._torn, self._head = False, b""

    def touch(self) -> None:
        """Set the time of the last change."""
        with self._guard:
            self._refuse_closed()
            os.utime(self._fd)

    def close(self, reason: str = "") -> None:
        """Force the lines to the disk and close the file. A later write raises an error with the reason."""
        with self._guard:
            fd, self._fd, self._reason = self._fd, -1, reason or self._reason
        if fd >= 0:
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def _refuse_closed(self) -> None:
        if self.closed:
            raise OSError(f"'{self.path.name}' of run '{self.path.parent.name}' refuses lines: it {self._reason}")

    def on_fork(self) -> None:
        """Close the file in the child, which would hold the run's lock."""
        fd, self._fd, self._guard = self._fd, -1, threading.Lock()
        if fd >= 0:
            os.close(fd)


def is_locked(path: Path) -> bool | None:
    """Return True if a process has the file locked; None if that cannot be determined."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(fd)


class Owner(Struct, frozen=True):
    """The process that writes a run, as the file `heartbeat` names it."""

    token: str = ""
    """Random text, another for each attempt."""
    machine: str = ""
    """Identifies the running kernel: containers share it, machines of one name do not."""
    processes: str = ""
    """Identifies the container in which `pid` counts."""
    pid: int = 0

    @classmethod
    def new(cls) -> Owner:
        """Return this process as an owner, with a new token."""
        machine, processes = _this_machine()
        return cls(os.urandom(8).hex(), machine, processes, os.getpid())

    @property
    def is_on_this_machine(self) -> bool:
        """True if it runs under the same kernel as this process, so that both see the same locks."""
        return bool(self.machine) and self.machine == _this_machine()[0]

    @property
    def is_gone(self) -> bool:
        """True if this process can see that its process has ended."""
        if not self.is_on_this_machine or self.processes != _this_machine()[1] or not self.processes:
            return False
        try:
            os.kill(self.pid, 0)
        except PermissionError:
            return False
        except (OSError, OverflowError):
            return True
        return self.pid <= 0


@functools.cache
def _this_machine() -> tuple[str, str]:
    """Return what identifies the running kernel, and the container; empty where the system does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return boot, os.readlink("/proc/self/ns/pid")
    except OSError:
        return "", ""


class Heartbeat:
    """The file `heartbeat` of a run: its content names the process, which sets its time of change every few seconds.

    A reader judges it by the reader's clock. The clock of the other machine may be wrong, so only a change between two
    looks is a sign of life; at the first look, a time close to the reader's is.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.time = -math.inf
        """Time of the file's last change by its own clock, in seconds since the epoch; minus infinity without one."""
        self._mark: tuple[int, int] | None = None
        self._seen, self._is_sign = -math.inf, False

    def beat(self, owner: Owner) -> bool:
        """Show that the owner is alive; return False, and do nothing, if another process has taken the run."""
        with contextlib.suppress(OSError):
            if self.owner.token != owner.token:
                return False
            os.utime(self.path)
        return True

    @property
    def owner(self) -> Owner:
        """The process that it names; raises OSError without the file. Older versions wrote no owner."""
        with _open_regular(self.path) as file:
            return _decode(file.read(1000), msgspec.json.Decoder(Owner)) or Owner()

    def silence(self, now: float) -> float:
        """Return the seconds for which it has not been seen to change; 0 at the first look."""
        try:
            status = os.stat(self.path)
        except OSError:
            self._mark, self._is_sign, self.time = None, False, -math.inf
            return 0.0
        mark = status.st_ino, status.st_mtime_ns
        if mark != self._mark:
            self._is_sign = self._mark is not None or abs(now - status.st_mtime) <= CLOCKS_DIFFER
            self._mark, self._seen, self.time = mark, now, status.st_mtime
        return now - self._seen

    def is_fresh(self, now: float, lost_after: float) -> bool:
        """Return True if it was a sign of life in the last `lost_after` seconds."""
        silence = self.silence(now)
        return self._is_sign and silence <= lost_after

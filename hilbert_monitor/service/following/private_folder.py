"""A folder for this user alone, in which the service keeps files of its own. No link in it is followed.

Who can write runs cannot make the service write elsewhere: files are opened in the folder by its descriptor.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO


def place_of(root: Path) -> str:
    """The name of the folder that has the files about a folder of runs."""
    return hashlib.sha256(os.fsencode(os.path.realpath(root))).hexdigest()[:24]


class PrivateFolder:
    """A folder, which is created if needed.

    Args:
        path: of the folder. OSError if nothing can be kept there, or others can write to it.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        weakref.finalize(self, os.close, self._descriptor)
        _refuse_shared(os.fstat(self._descriptor))
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError("it is read-only")

    def open(self, name: str, flags: int = os.O_RDONLY) -> IO[bytes]:
        """Open a file, and no link."""
        descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600, dir_fd=self._descriptor)
        return open(descriptor, "rb" if flags == os.O_RDONLY else "wb")

    @contextmanager
    def replacing(self, name: str, *, sync: bool = False) -> Iterator[IO[bytes]]:
        """A new file to write to. It replaces the one of the given name when the block ends without an exception.

        Args:
            name: of the file.
            sync: whether to wait until it is on the disk, so that a power cut leaves the old or the new one.
        """
        part = f"{name}.{os.getpid()}.part"
        self.remove(part)
        try:
            with self.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as file:
                yield file
                if sync:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(part, name, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
        except BaseException:
            self.remove(part)
            raise

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._descriptor)

    def look(self, name: str) -> tuple[int, int, int] | None:
        """Inode, size and time of change of a file, by which a change is noticed; None if there is none."""
        try:
            status = os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
        except OSError:
            return None
        return status.st_ino, status.st_size, status.st_mtime_ns

    @contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Keep other processes out of the block, by a lock on a file; nobody is kept out where there are no locks."""
        with self.open(name, os.O_WRONLY | os.O_CREAT) as file:
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def names(self) -> list[str]:
        """The names of all files."""
        return os.listdir(self._descriptor)


def _refuse_shared(status: os.stat_result) -> None:
    """Refuse a folder that somebody else made, or may write to."""
    if status.st_uid != os.geteuid():
        raise PermissionError("it belongs to another user")
    if stat.S_IMODE(status.st_mode) & 0o022:
        raise PermissionError("others can write to it")

"""Which process writes a run, where the file system has no locks.

A process claims a run by a file that it alone can create: `claim-1`, `claim-2` and so on. The last claim counts. It is
held while its time of change is young, which the process sees to, and gone once the process is. Claims are never
deleted, so that two processes that look at once cannot both believe that theirs is the last.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from pathlib import Path

from ._lines import process_exists

NAME = re.compile(r"claim-([1-9]\d{0,8})")


class Claim:
    """The claim of this process on a run's folder.

    Args:
        path: of its file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def take(cls, folder: Path, lost_after: float) -> Claim | None:
        """Claim a folder; None if another process holds it or was quicker.

        Args:
            folder: of the run.
            lost_after: seconds without a sign of life after which a claim is no longer held.
        """
        parked = _parked.pop((os.getpid(), folder), None)
        if parked is not None:
            parked.renew()
        last = max(_numbers(folder), default=0)
        before = folder / f"claim-{last}"
        if parked is not None and parked.path == before:
            return parked
        if last and _is_held(before, lost_after):
            return None
        path = folder / f"claim-{last + 1}"
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            return None
        with contextlib.closing(os.fdopen(fd, "wb", buffering=0)) as file, contextlib.suppress(OSError):
            file.write(f"{socket.gethostname()} {os.getpid()}\n".encode())  # a full disk leaves it empty
        claim = cls(path)
        if last and _is_held(before, lost_after):  # it was parked for long, and has been renewed just now
            claim.release()
            return None
        return claim

    def renew(self) -> None:
        """Show that the process lives."""
        with contextlib.suppress(OSError):
            os.utime(self.path)

    def park(self) -> None:
        """Keep the claim for the next time that this process takes one of the same folder."""
        _parked[os.getpid(), self.path.parent] = self

    def release(self) -> None:
        """Give the run up: the time of change becomes that of long ago, which takes no room on a full disk."""
        with contextlib.suppress(OSError):
            os.utime(self.path, (0, 0))


_parked: dict[tuple[int, Path], Claim] = {}
"""Claims of runs that could not begin for want of room, by process and folder: each try would leave a file else."""


def is_claim(name: str) -> bool:
    """Whether a file of that name is a claim."""
    return NAME.fullmatch(name) is not None


def _numbers(folder: Path) -> list[int]:
    return [int(match[1]) for match in map(NAME.fullmatch, os.listdir(folder)) if match]


def _is_held(path: Path, lost_after: float) -> bool:
    try:
        if time.time() - path.stat().st_mtime > lost_after:
            return False
        host, _, pid = path.read_text(errors="replace").strip().rpartition(" ")
    except OSError:
        return True
    return host != socket.gethostname() or not pid.isdigit() or process_exists(int(pid))

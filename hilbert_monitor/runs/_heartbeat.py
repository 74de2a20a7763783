"""The heartbeat of a run's process, judged by the clock of whoever looks at it."""

from __future__ import annotations

import math
import os


class Heartbeat:
    """The time of change of a file, which a process sets every few seconds.

    That time comes from the clock of another machine, which may be wrong. A change between two looks is a sign of life
    by our own clock, whatever time the file has. Only at the first look the file's own time has to do.

    Args:
        path: of the file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        self.time = -math.inf
        """Of the file's last change, in seconds since the epoch; minus infinity if there is none."""
        self._beat, self._looked, self._first_ahead = -math.inf, -math.inf, -math.inf

    def age(self, now: float) -> float:
        """Seconds since the last sign of life; infinite without one, negative for a time that is ahead of `now`."""
        time = self._changed()
        if time != self.time:
            is_first = self.time == -math.inf
            self._first_ahead = time - now if is_first else -math.inf
            self._beat = time if is_first or self._looked <= time <= now else now
            self.time = time
        self._looked = now
        return now - self._beat if time > -math.inf else math.inf

    def is_ahead(self, now: float, patience: float) -> bool:
        """Whether its time was ahead by more than `patience` when first seen, and has not changed since."""
        self.age(now)
        return self._first_ahead > patience

    def _changed(self) -> float:
        try:
            return os.stat(self._path).st_mtime
        except OSError:
            return -math.inf

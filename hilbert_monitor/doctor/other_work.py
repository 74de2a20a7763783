"""How much of the machine other programs take while something is timed."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

STAT = Path("/proc/stat")
TAKEN, FREE = 0.25, 0.25
"""The machine is busy if others take so many cores, and no more than this share of all cores is idle."""


@dataclass(frozen=True, slots=True)
class _Clocks:
    """Seconds of the processors that this process may use, so far."""

    wall: float
    own: float
    busy: float | None
    """Also by other programs, and by other machines on the same host; None where the system does not tell."""

    @classmethod
    def read(cls) -> _Clocks:
        times = os.times()
        return cls(time.perf_counter(), sum(times[:4]), _busy_seconds())


class OtherWork:
    """``with OtherWork() as others: ...`` measures what other programs do meanwhile."""

    def __enter__(self) -> OtherWork:
        self._before = self._after = _Clocks.read()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._after = _Clocks.read()

    @property
    def cores(self) -> float | None:
        """Cores that others took, on the average; None if that is not known."""
        before, after = self._before, self._after
        if before.busy is None or after.busy is None or after.wall <= before.wall:
            return None
        return max(0.0, (after.busy - before.busy) - (after.own - before.own)) / (after.wall - before.wall)

    @property
    def is_much(self) -> bool:
        """Whether they are in the way. Where the system does not tell, its load average decides."""
        taken, all_cores = self.cores, _cores()
        if taken is None:
            return _load() > 1.5 * all_cores
        own = (self._after.own - self._before.own) / (self._after.wall - self._before.wall)
        return taken > TAKEN and all_cores - own - taken < FREE * all_cores

    def __str__(self) -> str:
        taken = "" if self.cores is None else f", other programs take {self.cores:.1f} of them"
        return f"load {_load():.1f} on {_cores()} cores{taken}"


def _busy_seconds() -> float | None:
    """Seconds in which the processors of this process were not idle."""
    try:
        lines = [line.split() for line in STAT.read_text().splitlines()]
        here = {f"cpu{n}" for n in os.sched_getaffinity(0)}
        # user nice system idle iowait irq softirq steal; user holds the time of guests
        times = [[int(x) for x in line[1:9]] for line in lines if line and line[0] in here]
        return sum(sum(row[:3]) + sum(row[5:]) for row in times) / os.sysconf("SC_CLK_TCK") if times else None
    except (OSError, ValueError, AttributeError):
        return None


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        return os.cpu_count() or 1


def _load() -> float:
    try:
        return os.getloadavg()[0]
    except (OSError, AttributeError):
        return 0.0

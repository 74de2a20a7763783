"""Clocks, memory, the machine, and the record of one measurement."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch.profiler import ProfilerActivity, profile

from hilbert_monitor import __version__


@dataclass(frozen=True, slots=True)
class BenchResult:
    """One figure of ours beside an opponent's, both from this run, in seconds or bytes; or beside a limit."""

    subject: str
    case: str
    ours: str
    amount: float
    opponent: str
    opponent_amount: float
    note: str = ""
    unit: Literal["s", "B"] = "s"

    @property
    def ratio(self) -> float:
        """How many times faster, or smaller, than the opponent."""
        return self.opponent_amount / self.amount

    def as_dict(self) -> dict[str, Any]:
        """Plain types, for JSON."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        return {**fields, "ratio": self.ratio}


def seconds(call: Callable[[], object], *, repeat: int = 5) -> float:
    """Return the median time of `repeat` calls. If there are several, a first one is not counted."""
    times = []
    for _ in range(repeat if repeat == 1 else repeat + 1):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:] or times)


def paired_seconds(*calls: Callable[[], object], repeat: int = 15) -> list[float]:
    """Return the median time of each call. They take turns, so that other work on the machine slows all alike."""
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    for _ in range(repeat):
        for samples, call in zip(times, calls, strict=True):
            samples.append(seconds(call, repeat=1))
    return [statistics.median(samples) for samples in times]


def peak_bytes(call: Callable[[], object]) -> int:
    """Return the most bytes that `call` holds at once in torch's CPU allocator."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler announces itself on stderr
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        call()
    results = trace.profiler.kineto_results
    held = peak = 0
    for event in sorted((e for e in results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def machine() -> dict[str, str]:
    """Return the machine and the versions that the figures were measured with."""
    return {
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "hilbert-monitor": __version__,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"

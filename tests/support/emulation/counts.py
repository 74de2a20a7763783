"""What a device does: kernels, waits of the host, copies, bytes and FLOPs, by line of code."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path

import hilbert_monitor

PACKAGE = Path(hilbert_monitor.__file__).parent
ELSEWHERE = "elsewhere"
"""Place of what no line of the package asked for, such as a backward pass."""


@dataclass(slots=True)
class Count:
    """Work of a device."""

    kernels: float = 0
    """Operations that compute or move something; views and metadata are none."""
    factorisations: float = 0
    """Of these, eigenvectors and orthogonal bases, which are whole programs of a library."""
    waits: float = 0
    """Times that the host stood still until the device had done all that was queued."""
    copies: float = 0
    """Of host memory to the device."""
    bytes: float = 0
    """Read and written, as if there were no cache."""
    flops: float = 0
    """A multiply-add of a product is two; of anything else, each entry is one."""

    def __add__(self, other: Count) -> Count:
        return Count(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Count)))

    def __sub__(self, other: Count) -> Count:
        return self + -1 * other

    def __rmul__(self, factor: float) -> Count:
        return Count(*(factor * getattr(self, f.name) for f in fields(Count)))

    def add(self, other: Count) -> None:
        """Add other work to this."""
        for f in fields(Count):
            setattr(self, f.name, getattr(self, f.name) + getattr(other, f.name))


@dataclass(slots=True)
class Counts:
    """Work by the line of the package that asked for it, and what was waited for."""

    lines: dict[str, Count] = field(default_factory=dict)
    operations: Counter[str] = field(default_factory=Counter)
    """Kernels by name."""
    waited: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Waits by operation and line."""

    def note(self, operation: str, count: Count) -> None:
        """Add what an operation did."""
        place = line_of_package()
        self.lines.setdefault(place, Count()).add(count)
        if count.kernels:
            self.operations[operation] += 1
        if count.waits:
            self.waited[operation, place] += int(count.waits)

    @property
    def total(self) -> Count:
        """All of it."""
        return self.of(self.lines)

    def of(self, places: Iterable[str]) -> Count:
        """Return the work of some lines."""
        total = Count()
        for place in places:
            total.add(self.lines[place])
        return total

    def within(self, *folders: str) -> Count:
        """Return the work of the lines in some folders or files of the package, such as `monitor/`."""
        return self.of(place for place in self.lines if place.startswith(folders))

    def table(self) -> str:
        """Return lines by their waits and kernels, for whoever has to reduce them."""
        total = self.total
        rows = [f"{total.kernels:.0f} kernels, {total.waits:.0f} waits, {total.copies:.0f} copies to the device"]
        rows += [f"{n:6} waits   {place:40} {operation}" for (operation, place), n in self.waited.most_common()]
        by_kernels = sorted(self.lines.items(), key=lambda item: -item[1].kernels)
        rows += [f"{c.kernels:6.0f} kernels {place:40} {c.bytes / 1e6:10.2f} MB" for place, c in by_kernels[:20]]
        return "\n".join(rows)


def line_of_package() -> str:
    """Return the innermost line of the package that is being run, as `geometry/diameter.py:120`."""
    frame = sys._getframe(1)
    root = f"{PACKAGE}/"
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(root):
            return f"{name.removeprefix(root)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ELSEWHERE

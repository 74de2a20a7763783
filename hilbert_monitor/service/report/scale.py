"""The scale of an axis: where a value is, and which values have a tick."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

FAR = 10.0
"""How far outside of a scale a place can be: drawing programs fail at very large coordinates."""
LARGE = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
"""Letters for large numbers on an axis, as in 0.5B tokens."""
SMALLEST, LARGEST, DECADES = 1e-290, 1e300, 250
"""The narrowest linear axis and the largest number on one, and the powers of ten on a logarithmic one."""


@dataclass(frozen=True, slots=True)
class Tick:
    """A tick: its value, its text, and the exponent that is set above the text."""

    value: float
    text: str
    exponent: str = ""


@dataclass(frozen=True, slots=True)
class Scale:
    """A range of values, linear or logarithmic."""

    low: float
    high: float
    log: bool = False

    @classmethod
    def of(cls, values: Iterable[float], *, log: bool = False, to_zero: bool = False, margin: float = 0.05) -> Scale:
        """The scale of some values.

        Args:
            values: finite numbers, positive ones for a logarithmic scale.
            log: whether the scale is logarithmic.
            to_zero: whether zero belongs to it.
            margin: room on either side, as a share of the range.
        """
        numbers = [math.log10(value) if log else value for value in values] or [0.0]
        most = DECADES if log else LARGEST
        low, high = (min(max(number, -most), most) for number in (min(numbers), max(numbers)))
        if to_zero and not log:
            low, high = min(low, 0.0), max(high, 0.0)
        room = margin * (high - low)
        if room <= 1e-9 * max(abs(low), abs(high)):  # all values are the same, but for roundings
            room = 0.5 if log else max(0.5 * abs(high), SMALLEST) if high else 0.5
        low, high = (low if to_zero and not low and not log else low - room), high + room
        return cls(10**low, 10**high, True) if log else cls(low, high)

    def place(self, value: float) -> float:
        """Where a value is: 0 at the low end, 1 at the high end. Of a value far outside, only the direction matters."""
        if self.log:
            place = (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        else:
            width = self.high - self.low
            place = value / width - self.low / width
        return min(max(place, -FAR), 1 + FAR)

    def ticks(self, count: int, *, percent: bool = False, letters: bool = False) -> list[Tick]:
        """About so many ticks.

        Args:
            count: of ticks.
            percent: whether values are shares, and their texts percentages.
            letters: whether large numbers have a letter: 0.5B.
        """
        if self.log:
            return self._decades(count, percent)
        step = _round_step((self.high - self.low) / count)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        values = [step * number for number in range(first, last + 1)]
        if percent:
            return [Tick(value, f"{100 * value:.6g}%") for value in values]
        size, letter = next(((s, text) for s, text in LARGE if letters and self.high >= s), (1.0, ""))
        return [Tick(value, f"{value / size:.6g}{letter if value else ''}") for value in values]

    def _decades(self, count: int, percent: bool) -> list[Tick]:
        """A tick at every decade, or every second or third one, and so on.

        If there are few, also at 2 and 5 times a decade; in a range without two of these, as on a linear scale.
        """
        first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
        if last - first + 1 >= 3:
            stride = -(-(last - first + 1) // (count + 1))
            return [_power(number, percent) for number in range(first, last + 1, stride)]
        values = (digit * 10.0**number for number in range(first - 1, last + 1) for digit in (1, 2, 5))
        ticks = [_between(value, percent) for value in values if self.low <= value <= self.high]
        return ticks if len(ticks) > 1 else Scale(self.low, self.high).ticks(count, percent=percent)


def _power(number: int, percent: bool) -> Tick:
    value = 10.0**number
    return Tick(value, f"{100 * value:.6g}%") if percent else Tick(value, "10", str(number).replace("-", "\u2212"))


def _between(value: float, percent: bool) -> Tick:
    number = math.floor(math.log10(value) + 1e-9)
    digit = round(value / 10.0**number)
    if percent or -3 <= number <= 3:
        return Tick(value, f"{100 * value:.6g}%" if percent else f"{value:.6g}")
    text = "10" if digit == 1 else f"{digit}\u00d710"
    return Tick(value, text, str(number).replace("-", "\u2212"))


def _round_step(rough: float) -> float:
    """A number near a step that is 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(digit * power for digit in (1, 2, 5, 10) if digit * power >= 0.8 * rough)

"""The noise of a run: what is usual, how far values stray from it, and from which value on one is an event.

A value is the logarithm of D(S), or of the panel's perturbation, over the learning rate. Five exponential averages
follow the values, from the last value alone to the mean of the last hundred. The one that predicts best gives the fast
level, the slowest the slow level. Each has a spread, and `tails` says how far beyond it a value may be. An event is

- a step: a value far above the fast level, or far above the slow one;
- a level: an average of the last 3, 20 or 60 deviations from the slow level that is too high for chance;
- a trend: a level far above the one of 200 values ago, which growth since cannot raise, or eight times the lowest of
  the last 2,000 values.

Every rule is a limit for the next value, known before it comes. Its probability is the rule's share of the false alarms
that are allowed. No event is smaller than a factor of 1.4 (trends: 1.75): nobody wants to be called for less.

Tried and dropped: multiples of the third largest of the last 200 values, which growth raises with itself; one average
for all series, which is blind to levels where values are correlated (fast) or to spikes there (slow); a generalised
Pareto tail, which needs thousands of values before it beats a plain z-score on normal noise.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import NormalDist, median
from typing import Any, Literal, NamedTuple

from .tails import BODY, CLIP, CLIPPED_VARIANCE, Tail

Pattern = Literal["step", "level", "trend"]

GAINS = (1.0, 0.5, 0.2, 0.05, 0.01)
"""Gains of the exponential averages; the last is the slow level, the one before it the level that trends look at."""
SLOW, TREND = 4, 3
MEMORY = 400
"""Values over which a spread is averaged."""
AVERAGES = (3, 20, 60)
"""Lengths of the averages of deviations that the level rule looks at."""
ROUND = 3.0
"""Deviations enter levels and averages up to so many spreads."""
LAG = 200
"""Values between a level and the one that a trend compares it with."""
LOWEST_EVERY, LOWEST_OF = 50, 40
"""Every so many values the slow level is noted; so many of these are remembered."""
SMALLEST_SPREAD = 1e-3
SHARES: dict[Pattern, float] = {"step": 0.8, "level": 0.13, "trend": 0.07}
"""How the allowed false alarms are shared. Floors make levels and trends rarer than their share."""
BURST_SHARE = 1.4
"""Bursts have a share of their own: where a run has them, they are what false alarms are made of."""
TREND_FLOOR, TREND_CEILING = math.log(1.75), math.log(8)
"""Growth below the first is no trend; growth above the second is one, even in a run that has always drifted, and so is
a level so far above the lowest one of late: growth that was missed at first teaches its own pace as the usual drift."""
EARLY, YOUNG, EARLY_CEILING = 100, 1000, math.log(6)
"""Before so many values no tail is known: such a step is an event, unless it is within 4.5 spreads. Before so many, the
tail of a body that looks normal is not known to be heavy either."""
SETTLED, FALLEN = 50, 20
"""Events in a row, or values far below the slow level in a row, after which they are the new normal."""
MOST = 1e-3
"""The largest probability of a false alarm for one value, however rare values are."""

_NORMAL = NormalDist()


class Limit(NamedTuple):
    """The largest value that is no event of this pattern."""

    value: float
    pattern: Pattern
    usual: float
    """What it is compared with."""


class Bars(NamedTuple):
    """How high values may be, with the probability of a false alarm that is allowed."""

    step: float
    """In spreads over a level."""
    averages: tuple[float, ...]
    """In spreads over the slow level."""
    trend: float
    """Over the level of LAG values ago."""


@dataclass(frozen=True)
class Event:
    """A value above a limit."""

    pattern: Pattern
    usual: float
    """What it is compared with: the slow level; for a trend, an earlier one."""
    chance: float
    """How likely that is in this run, for each value."""


class Noise:
    """What is usual in one series of a run, learned from its values.

    Args:
        quiet: values that there must be before there is a limit.
        floor: logarithm of the smallest factor over the usual that is an event.
    """

    def __init__(self, *, quiet: int, floor: float) -> None:
        self.quiet, self.floor = quiet, floor
        self.number = 0
        """Values so far."""
        self.offset = 0.0
        """How far exact values are above lower bounds."""
        self._levels = [0.0] * len(GAINS)
        self._variances = [0.0] * len(GAINS)
        self._best = SLOW
        self._tail = Tail()
        self._averages = [0.0] * len(AVERAGES)
        self._average_variances = [0.0] * len(AVERAGES)
        self._past: deque[float] = deque(maxlen=LAG)  # slow levels
        self._lowest: deque[float] = deque(maxlen=LOWEST_OF)  # slow levels, one in LOWEST_EVERY
        self._drift, self._drift_count = 0.0, 0
        self._first: list[float] = []  # values before there is a level
        self._first_exact: list[float] = []  # those of them that are no lower bounds
        self._away: list[float] = []  # values in a row that are far from the slow level, on one side
        self._bars, self._bars_for = Bars(0.0, (0.0,) * len(AVERAGES), 0.0), (-1, 0.0)

    @property
    def ready(self) -> bool:
        """Whether there is a limit."""
        return self.number >= self.quiet

    def usual(self, *, exact: bool = False) -> float | None:
        """The value that is usual now, None before the first."""
        if not self.ready:
            first = self._first or self._first_exact
            return median(first) if first else None
        return self._levels[SLOW] + (self.offset if exact else 0.0)

    def limits(self, probability: float) -> list[Limit]:
        """The limits of the next value, with this probability of a false alarm."""
        if not self.ready:
            return []
        self._renew_bars(probability)
        fast, slow = self._levels[self._best], self._levels[SLOW]
        fast_spread, slow_spread = self._spread(self._best), self._spread(SLOW)
        least = slow + self.floor
        limits = [
            Limit(max(least, fast + max(self.floor, self._bars.step * fast_spread)), "step", slow),
            Limit(max(least, slow + self._bars.step * slow_spread), "step", slow),
        ]
        for i, length in enumerate(AVERAGES):
            if self.number >= 10 * length:
                needed = self._averages[i] + length * (self._bars.averages[i] - self._averages[i])
                if needed < ROUND:
                    limits.append(Limit(max(least, slow + max(needed, -ROUND) * slow_spread), "level", slow))
        earlier = [(TREND, self._past[0], self._bars.trend)] if len(self._past) == LAG else []
        earlier += [(SLOW, min(self._lowest), TREND_CEILING)] if self._lowest else []
        for k, usual, bar in earlier:
            needed = (usual + bar - self._levels[k]) / GAINS[k]
            if needed < ROUND * fast_spread:
                limits.append(Limit(self._levels[k] + max(0.0, needed), "trend", usual))
        return limits

    def event(self, value: float, probability: float, *, exact: bool = False) -> Event | None:
        """Return the event that a value is, or None."""
        value -= self.offset if exact else 0.0
        broken = next((limit for limit in self.limits(probability) if value > limit.value), None)
        if broken is None:
            return None
        slow, spread = self._levels[SLOW], self._spread(SLOW)
        if broken.pattern == "step":
            heights = [(value - self._levels[k]) / self._spread(k) for k in (self._best, SLOW)]
            return Event("step", slow, self._tail.chance(max(heights), self.number, self._spread(self._best)))
        if broken.pattern == "level":
            z = max(-ROUND, min(ROUND, (value - slow) / spread))
            averages = [average + (z - average) / n for average, n in zip(self._averages, AVERAGES, strict=True)]
            highest = max(average / self._average_spread(i) for i, average in enumerate(averages))
            return Event("level", slow, 1 - _NORMAL.cdf(highest))
        grown = (self._levels[TREND] - broken.usual) / self._trend_spread()
        return Event("trend", broken.usual, 1 - _NORMAL.cdf(grown))

    def add(self, value: float, *, exact: bool = False, pattern: str = "") -> None:
        """Learn from a value.

        Args:
            value: judged before.
            exact: it is no lower bound.
            pattern: that of the event that it is, if it is one. A step is an accident, and teaches only how high
                accidents are.
        """
        if not math.isfinite(value):
            return
        if self.number < self.quiet:
            self._begin(value, exact=exact)
            return
        residual = value - self._levels[self._best]
        value -= self.offset if exact else 0.0
        if exact and not pattern:
            room = ROUND * self._spread(self._best)
            self.offset = max(0.0, self.offset + 0.05 * (max(-room, min(room, residual)) - self.offset))
        self.number += 1
        z = (value - self._levels[self._best]) / self._spread(self._best)
        lasts = bool(self._away) and self._away[-1] > self._levels[SLOW]
        if z > BODY and not lasts:  # the rest of a blow-up that lasts is no burst of its own
            self._tail.add_burst(self.number, value - self._levels[self._best])
        if self._settles(value, is_event=bool(pattern)):
            return
        if pattern == "step":
            self._follow(value, with_levels=False)  # it may be the first of a wilder time
        else:
            self._learn(value, z)
        if pattern == "trend":
            self._past.clear()  # the next one is compared with the level of now
            self._lowest.clear()

    def state(self) -> dict[str, Any]:
        """Return what was learned, in plain types."""
        return {
            **{name: getattr(self, f"_{name}") for name in _SCALARS},
            **{name: list(getattr(self, f"_{name}")) for name in _LISTS},
            "number": self.number,
            "offset": self.offset,
            "tail": self._tail.state(),
            "bars": [*self._bars, *self._bars_for],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned."""
        state = {"lowest": [], **state}  # one of an earlier version has none
        lists = {name: [float(x) for x in state[name]] for name in _LISTS}
        scalars = {name: state[name] for name in _SCALARS}
        tail = Tail()
        tail.restore(state["tail"])
        self.number, self.offset, self._tail = int(state["number"]), float(state["offset"]), tail
        step, averages, trend, number, probability = state["bars"]
        self._bars = Bars(float(step), tuple(float(bar) for bar in averages), float(trend))
        self._bars_for = (int(number), float(probability))
        for name, value in {**lists, **scalars}.items():
            setattr(self, f"_{name}", value)
        self._past = deque(lists["past"], maxlen=LAG)
        self._lowest = deque(lists["lowest"], maxlen=LOWEST_OF)

    # Learning

    def _begin(self, value: float, *, exact: bool) -> None:
        """Keep the first values; when there are enough, begin from their median, which a burst moves little."""
        (self._first_exact if exact else self._first).append(value)
        self.number += 1
        if self.number < self.quiet:
            return
        bounds, exacts = self._first, self._first_exact
        self._first, self._first_exact = [], []
        self.offset = max(0.0, median(exacts) - median(bounds)) if bounds and exacts else 0.0
        first = [*bounds, *(x - self.offset for x in exacts)]
        middle = median(first)
        spread = max(1.4826 * median(abs(x - middle) for x in first), SMALLEST_SPREAD)
        self._levels, self._variances = [middle] * len(GAINS), [spread**2] * len(GAINS)
        self.number = self.quiet // 2
        for x in first[self.number :]:
            self.number += 1
            self._follow(x)

    def _learn(self, value: float, z: float) -> None:
        """Take in a value that is no accident."""
        slow = max(-ROUND, min(ROUND, (value - self._levels[SLOW]) / self._spread(SLOW)))
        for i, length in enumerate(AVERAGES):
            average = self._averages[i] + (slow - self._averages[i]) / length
            variance = self._average_variances[i]
            square = min(average * average, self._bars.averages[i] ** 2)  # or an event would excuse itself
            self._averages[i] = average
            self._average_variances[i] += (square - variance) * max(1 / (self.number + 4 * length), 1e-3)
        if len(self._past) == LAG:
            self._drift_count = min(self._drift_count + 1, 3000)
            drift = (self._levels[SLOW] - self._past[0]) ** 2
            drift = min(drift, self._bars.trend**2)
            self._drift += (drift - self._drift) / self._drift_count
        self._tail.add(z * self._doubt())
        self._follow(value)
        if self.number >= 100:
            self._past.append(self._levels[SLOW])
            if self.number % LOWEST_EVERY == 0:
                self._lowest.append(self._levels[SLOW])

    def _follow(self, value: float, *, with_levels: bool = True) -> None:
        """Move levels and spreads towards a value, and choose the level that predicts best."""
        n, levels, variances = self.number, self._levels, self._variances
        newest = 1 / n
        weight = max(newest, 1 / MEMORY)
        for k, gain in enumerate(GAINS):  # comparisons, not min and max: this is half of the time of a judgement
            variance, deviation = variances[k], value - levels[k]
            square, most, room = deviation * deviation, CLIP * CLIP * variance, ROUND * math.sqrt(variance)
            variance += weight * ((square if square < most else most) / CLIPPED_VARIANCE - variance)
            variances[k] = variance if variance > SMALLEST_SPREAD**2 / 4 else SMALLEST_SPREAD**2 / 4
            if with_levels:
                deviation = -room if deviation < -room else room if deviation > room else deviation
                levels[k] += (gain if gain > newest else newest) * deviation
        if n > 50 and n % 10 == 0:
            best = min(range(len(GAINS)), key=self._variances.__getitem__)
            if self._variances[best] < 0.93 * self._variances[self._best]:
                if SLOW in (best, self._best):
                    self._tail.begin_anew()  # deviations from a fast level have another tail
                self._best = best

    def _settles(self, value: float, *, is_event: bool) -> bool:
        """Whether values have been far from the slow level for so long that they are the new one."""
        z = (value - self._levels[SLOW]) / self._spread(SLOW)
        away, above = abs(z) > BODY or is_event, z > 0
        if not away or (self._away and (self._away[0] > self._levels[SLOW]) != above):
            self._away = []
        if not away:
            return False
        self._away.append(value)
        if len(self._away) < (SETTLED if above else FALLEN):
            return False
        self._tail.forget_bursts(self.number - len(self._away))  # the first of these values was none
        self._levels = [median(self._away)] * len(GAINS)
        self._averages = [0.0] * len(AVERAGES)
        self._away = []
        self._past.clear()
        if is_event:  # it was told; a level that crept up was not
            self._lowest.clear()
        return True

    # Limits

    def _spread(self, k: int) -> float:
        """Spread about a level: wider while it is known from few values."""
        return max(math.sqrt(self._variances[k]) * self._doubt(), SMALLEST_SPREAD)

    def _doubt(self) -> float:
        return 1 + 8 / self.number

    def _renew_bars(self, probability: float) -> None:
        """Compute the bars anew, from time to time."""
        number, known_for = self._bars_for
        if number >= 0 and known_for == probability and self.number < number + max(1, min(20, number // 10)):
            return
        alone = 1.0 if self._best == SLOW else 0.5  # of two levels that are compared with
        height = self._tail.height(
            probability * SHARES["step"] * alone, probability * BURST_SHARE, self.number, self._spread(self._best)
        )
        is_new = self.number < EARLY or (self.number < YOUNG and self._tail.looks_normal)
        if is_new and len(self._tail.bursts) < 2:
            height = min(height, max(EARLY_CEILING / self._spread(SLOW), 4.5))
        average = _deviations(probability * SHARES["level"] / len(AVERAGES))
        trend = _deviations(probability * SHARES["trend"]) * self._trend_spread()
        averages = tuple(average * self._average_spread(i) for i in range(len(AVERAGES)))
        self._bars = Bars(height, averages, min(max(TREND_FLOOR, trend), TREND_CEILING))
        self._bars_for = (self.number, probability)

    def _least_variance(self, i: int) -> float:
        """Variance of an average of deviations, by their correlation from one value to the next."""
        correlation = min(max(0.0, 1 - self._variances[0] / (2 * self._variances[SLOW])), 0.99)
        return min(1.0, (1 + correlation) / (1 - correlation) / (2 * AVERAGES[i] - 1))

    def _average_spread(self, i: int) -> float:
        return math.sqrt(max(self._average_variances[i], self._least_variance(i))) * self._doubt()

    def _trend_variance(self) -> float:
        """Variance of how far the slow level moves in LAG values: as seen so far, at first as its gain lets expect."""
        fast, slow = self._spread(self._best), self._spread(SLOW)
        prior = min(GAINS[self._best] * fast * math.sqrt(LAG + 50), 0.8 * slow) ** 2
        return (400 * prior + self._drift * self._drift_count) / (400 + self._drift_count)

    def _trend_spread(self) -> float:
        average = self._average_spread(AVERAGES.index(20)) * self._spread(SLOW)  # its gain is that of the trend's level
        return math.sqrt(self._trend_variance() + average**2)


def _deviations(probability: float) -> float:
    """The height that a normal value exceeds with this probability."""
    return -_NORMAL.inv_cdf(probability)


_SCALARS = ("best", "drift", "drift_count")
_LISTS = ("levels", "variances", "averages", "average_variances", "past", "lowest", "first", "first_exact", "away")

"""Baselines: learn the usual level and noise of a run from its values, and how far a value may stray from them.

A value is the logarithm of a positive quantity, such as D(S) over the learning rate. Four exponential averages follow
it, from the last value alone to the mean of the last hundred. The one that predicts best is the fast level, the slowest
one the slow level. An event is

- a step: a value above a level by more than the run's own tail allows (`TailModel`), and by a factor of 1.4;
- a level: an average that is further above the slow level than its learned mean square allows;
- a trend: an average that is as far above the slow level of 200 values ago, or a slow level eight times the lowest of
  the last 2,000 values.

Each of these is a limit for the next value, known before the value comes.

Tried and dropped: multiples of the third largest of the last 200 values, which growth raises with itself; a
generalised Pareto tail, which needs thousands of values before it beats a plain z-score on normal noise; ten shapes of
the tail instead of four, which told no more; 1.2 times the largest burst so far, which misses factors of 3 over bursts.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Iterator
from statistics import NormalDist, median
from typing import Any, Literal, NamedTuple

Pattern = Literal["step", "level", "trend"]

GAINS = (1.0, 0.3, 0.05, 0.01)
"""Gains of the exponential averages; SLOW is the index of the slowest."""
SLOW = 3
STATISTICS: tuple[tuple[Pattern, int], ...] = (("level", 1), ("level", 2), ("trend", 2))
"""Averages that are compared with an earlier level."""
SHARES: dict[Pattern, float] = {"step": 0.8, "level": 0.065, "trend": 0.07}
"""Share of each limit in the probability of a false alarm. Bursts have BURST_SHARE."""
BURST_SHARE = 0.3
LEAST_STEP, LEAST_TREND, LARGEST_TREND, LEAST_PAGE = (math.log(factor) for factor in (1.4, 1.75, 8, 3))
"""Smaller steps, trends and pages are none; growth beyond LARGEST_TREND is one even in a run that has always grown."""
MEMORY, LAG, LOWEST_EVERY, LOWEST_OF = 400, 200, 50, 40
"""Values over which a variance is averaged; values from a level to the one that a trend compares it with; the slow
level is stored once in LOWEST_EVERY values, LOWEST_OF times."""
CLIP, CLIPPED_VARIANCE, ROUND, BODY = 2.5, 0.9775599834528068, 3.0, 4.0
"""In spreads: deviations count for a variance up to CLIP (and E[min(z^2, CLIP^2)] = CLIPPED_VARIANCE for a normal z),
move an average by up to ROUND, and shape the tail up to BODY."""
SMALLEST_SPREAD = 1e-3
EARLY, EARLY_STEP = 100, math.log(6)
"""Before EARLY values no shape of the tail is known: such a step of D(S), at least 4.5 spreads high, is an event."""
SETTLED, FALLEN = 50, 20
"""Events in a row, or values in a row far below the slow level, that become the new normal."""
BURSTS, APART, FIRST_BURSTS, ENDED = 64, 10, 5, 0.005
"""Bursts that are remembered; values within which they count as one; until FIRST_BURSTS were seen, others of up to
USUAL_BURST are expected; bursts have ended if the silence since the last one is less likely than ENDED."""
USUAL_BURST, RECORD = math.log(4), math.log(1.3)
"""A burst that exceeds the largest one so far by RECORD is an event, however few have been seen."""

PRIOR = (0.82, 0.1, 0.04, 0.04)
"""Probabilities of the shapes before any value: normal, Gumbel, Student with 5 and with 3 degrees of freedom."""
LOG_MASSES = (0.22572801261596215, -1.0440308468479371, 0.0901918045335017, -0.01581995592981713)
"""Logarithm of the integral of each density, as `_log_densities` has it, from 0 to BODY."""
STUDENT_SPREADS = {5: 1.1976290220865722, 3: 1.365369690303907}
GUMBEL_MEAN, GUMBEL_SPREAD = 0.5772156649015329, 1.2077078576095135
"""A spread s has E[min((x - mean)^2, (CLIP s)^2)] = CLIPPED_VARIANCE s^2, as a normal distribution with spread s."""

_NORMAL = NormalDist()


def survivals(z: float) -> tuple[float, ...]:
    """Return P(Z > z) for each shape, with z >= 0 in its spreads."""
    return (
        0.5 * math.erfc(z / math.sqrt(2)),
        -math.expm1(-math.exp(-GUMBEL_MEAN - GUMBEL_SPREAD * z)),
        _student_survival(5, STUDENT_SPREADS[5] * z),
        _student_survival(3, STUDENT_SPREADS[3] * z),
    )


def _student_survival(n: int, t: float) -> float:
    """Return P(X > t) of a Student distribution with 3 or 5 degrees of freedom, by its series or its asymptote."""
    if t > 60:
        return 2 * math.sqrt(3) / (math.pi * t**3) if n == 3 else 200 / (3 * math.pi * math.sqrt(5) * t**5)
    u = t / math.sqrt(n)
    more = 1.0 if n == 3 else 1 + 2 / (3 * (1 + u * u))
    return 0.5 - (math.atan(u) + u / (1 + u * u) * more) / math.pi


def _log_densities(z: float) -> tuple[float, ...]:
    """Return the log density of each shape at z, without its constant."""
    x, square = GUMBEL_MEAN + GUMBEL_SPREAD * z, z * z
    five, three = (math.log1p(STUDENT_SPREADS[n] ** 2 / n * square) for n in (5, 3))
    return -0.5 * square, -x - math.exp(-x), -3 * five, -2 * three


class TailModel:
    """Tail of a series: a mixture of four shapes, and the run's own bursts.

    Bayes' rule weighs the shapes by how well each predicted the values of the body. Gumbel's distribution is that of a
    maximum of many values, as D(S) is. Bursts are values beyond the body: a run may repeat its own.
    """

    def __init__(self) -> None:
        self.scores = [math.log(p) for p in PRIOR]
        """Log weights of the shapes, up to a constant."""
        self.bursts: list[tuple[int, float]] = []
        """Number of the value, and its distance from its level: a size in spreads would inherit their errors."""

    def add(self, z: float) -> None:
        """Learn the shape from a value of the body."""
        if 0 < z < BODY:
            scores = [s + d - m for s, d, m in zip(self.scores, _log_densities(z), LOG_MASSES, strict=True)]
            best = max(scores)
            self.scores = [max(score - best, -30.0) for score in scores]

    def add_burst(self, number: int, size: float) -> None:
        """Learn from a value beyond the body. Bursts near each other are one, of the size of the largest."""
        if self._have_ended(number):
            self.bursts = []
        if not self.bursts or number - self.bursts[-1][0] > APART:
            self.bursts = [*self.bursts, (number, size)][-BURSTS:]
        elif size > self.bursts[-1][1]:
            self.bursts[-1] = (self.bursts[-1][0], size)

    def chance(self, z: float) -> float:
        """Return the probability that a value of the body is at least z spreads high."""
        weights = [math.exp(score) for score in self.scores]
        return sum(map(float.__mul__, weights, survivals(z))) / sum(weights)

    def largest_chance(self, z: float) -> float:
        """Return the same for the heaviest shape that the values so far do not rule out."""
        return max(chance for chance, score in zip(survivals(z), self.scores, strict=True) if score > -5)

    def height(self, probability: float, burst_probability: float, number: int, spread: float) -> float:
        """Return the height in spreads that a value exceeds with a given probability.

        Args:
            probability: of a value of the body.
            burst_probability: of a burst, for each value.
            number: values so far.
            spread: of the values, to convert the sizes of bursts.
        """
        weights, low, high = [math.exp(score) for score in self.scores], 0.0, BODY
        allowed = probability * sum(weights)
        while high < 4000 and sum(map(float.__mul__, weights, survivals(high))) > allowed:
            low, high = high, 2 * high
        for _ in range(12):
            middle = (low + high) / 2
            is_low = sum(map(float.__mul__, weights, survivals(middle))) > allowed
            low, high = (middle, high) if is_low else (low, middle)
        return max(high, self._burst_height(burst_probability, number, spread))

    def _since(self) -> int:
        """Return the number of the value after which all bursts are known."""
        return 0 if len(self.bursts) < BURSTS else self.bursts[0][0]

    def _have_ended(self, number: int) -> bool:
        """Return True if the silence since the last burst is too long for bursts that still come.

        Of m bursts that come at any time, the last is within the first part x of the time with probability x^m.
        """
        since, m = self._since(), len(self.bursts)
        return m > 1 and m * ((self.bursts[-1][0] - since) / max(number - since, 1)) ** m < ENDED

    def _burst_height(self, probability: float, number: int, spread: float) -> float:
        """Return what bursts exceed with this probability for each value, by how far apart the highest are."""
        m = len(self.bursts)
        if not m or self._have_ended(number):
            return 0.0
        rate = m / (number - self._since()) - self.chance(BODY)
        if rate <= 5 * probability:  # so rare that each may be reported
            return 0.0
        heights = sorted((max(size / spread, BODY) for _, size in self.bursts), reverse=True)
        expected = USUAL_BURST / spread if heights[0] > 1.5 * BODY and m < FIRST_BURSTS else 0.0
        if m < 2:
            return expected
        heights[0] = min(heights[0], 1.5 * heights[1])  # one accident excuses no other
        rank = probability / rate * (m + 1)
        if rank >= 1:  # between two of the bursts
            above, below = heights[min(int(rank), m) - 1], heights[min(int(rank) + 1, m) - 1]
            return above + (rank - int(rank)) * (below - above)
        beyond = heights[0] - BODY
        spacing = beyond / 2 if m < 3 else max(0.5, beyond / m, (heights[0] - heights[2]) / 1.5)
        return max(expected, heights[0] + min(spacing * math.log(1 / rank), RECORD / spread))


class Limit(NamedTuple):
    """Largest value that raises no event of a pattern."""

    value: float
    pattern: Pattern
    usual: float
    """The level that it is compared with."""


class Event(NamedTuple):
    """A value above a limit."""

    pattern: Pattern
    usual: float
    height: float
    """Spreads above a level."""
    chance: float | None
    """Probability of a value as high; None where an average was too high."""


class Baseline:
    """Usual level and noise of one series of a run.

    Args:
        min_history: values before there is a limit.
        floor: logarithm of the smallest factor over the usual that is an event.
    """

    def __init__(self, *, min_history: int = 20, floor: float = LEAST_STEP) -> None:
        self.min_history, self.floor = min_history, floor
        self.count = 0
        """Values so far."""
        self.offset = 0.0
        """Distance of exact values above lower bounds."""
        self.tail = TailModel()
        self._first: list[tuple[float, bool]] = []
        self._levels, self._variances, self._best = [0.0] * len(GAINS), [0.0] * len(GAINS), SLOW
        self._squares, self._counts = [0.0] * len(STATISTICS), [0] * len(STATISTICS)
        self._past: deque[float] = deque(maxlen=LAG)
        self._lowest: deque[float] = deque(maxlen=LOWEST_OF)
        self._outlier_run: list[float] = []
        self._records, self._recorded = [0.0, 0.0], -APART  # the largest deviations of the run, and when the last was
        self._thresholds: list[float] = []
        self._renewed = 0

    def limits(self, probability: float) -> Iterator[Limit]:
        """Yield the limits of the next value, with this probability of a false alarm."""
        if self.count < self.min_history:
            return
        self._renew_thresholds(probability)
        levels, thresholds, slow, spread = self._levels, self._thresholds, self._levels[SLOW], self._spread(SLOW)
        least = slow + self.floor
        yield Limit(max(least, slow + thresholds[-1] * spread), "step", slow)
        if self._best != SLOW:
            height = max(self.floor, thresholds[-1] * self._spread(self._best))
            yield Limit(max(least, levels[self._best] + height), "step", slow)
        for i, (pattern, k) in enumerate(STATISTICS):
            reference = self._reference(pattern)
            if reference is None or self.count * GAINS[k] < 10:
                continue
            needed = (reference + thresholds[i] - levels[k]) / GAINS[k]
            if needed < ROUND * spread:
                value = max(least, levels[k] + needed) if pattern == "level" else levels[k] + max(needed, 0.0)
                yield Limit(value, pattern, reference)
        if self._lowest:
            lowest = min(self._lowest)
            needed = (lowest + LARGEST_TREND - slow) / GAINS[SLOW]
            if needed < ROUND * spread:
                yield Limit(slow + max(needed, 0.0), "trend", lowest)

    def event(self, value: float, probability: float, *, exact: bool = False) -> Event | None:
        """Return the event that a value is, or None."""
        value -= self.offset if exact else 0.0
        broken = next((limit for limit in self.limits(probability) if value > limit.value), None)
        if broken is None:
            return None
        height = max((value - self._levels[k]) / self._spread(k) for k in (self._best, SLOW))
        return Event(broken.pattern, broken.usual, height, self._chance(height) if broken.pattern == "step" else None)

    def is_page(self, value: float, *, exact: bool = False) -> bool:
        """Return True if an event is three times the usual, its noise included, and beyond all that the run has shown.

        Its margin over the run's record shrinks with the number of values. The shape of the tail is the heaviest that
        is not ruled out yet: runs with heavy tails hide single steps of any size.
        """
        spread = self._spread(SLOW)
        deviation = value - (self.offset if exact else 0.0) - self._levels[SLOW]
        record = min(self._records[0], 1.5 * self._records[1])  # one accident excuses no other
        if deviation < max(LEAST_PAGE + 2 * spread, (1.2 + 10 / self.count) * record):
            return False
        return self.tail.largest_chance(deviation / spread) < 0.001 / self.count

    def add(self, value: float, *, exact: bool = False, pattern: str = "") -> None:
        """Learn from a value.

        Args:
            value: judged before.
            exact: it is exact, not a lower bound.
            pattern: pattern of its event, or empty. A step is an accident: it teaches only how high accidents are.
        """
        if not math.isfinite(value):
            return
        if self.count < self.min_history:
            self._begin(value, exact)
            return
        if exact:
            residual, room = value - self._levels[self._best], ROUND * self._spread(self._best)
            value -= self.offset
            if not pattern:
                self.offset = max(0.0, self.offset + 0.05 * (max(-room, min(room, residual)) - self.offset))
        self.count += 1
        slow, deviation = self._levels[SLOW], value - self._levels[self._best]
        z = deviation / self._spread(self._best)
        if value - slow > self._records[1]:
            self._note_record(value - slow)
        if z > BODY and not (self._outlier_run and self._outlier_run[-1] > slow):  # of a blow-up that lasts, its begin
            self.tail.add_burst(self.count, deviation)
        if self._settles(value, bool(pattern)):
            return
        if pattern == "step":
            self._follow(value, moves_levels=False)
            return
        self.tail.add(z * (1 + 8 / self.count))
        self._follow(value)
        self._learn_averages()
        if pattern == "trend":
            self._past.clear()  # the next one is compared with the level of now
            self._lowest.clear()

    def state(self) -> dict[str, Any]:
        """Return the history in plain types."""
        plain = {name: getattr(self, name) for name in _LEARNED}
        plain = {name: list(value) if isinstance(value, deque) else value for name, value in plain.items()}
        return copy.deepcopy(plain | vars(self.tail))

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned."""
        for name in _LEARNED:
            old, new = getattr(self, name), copy.copy(state[name])
            setattr(self, name, deque(new, old.maxlen) if isinstance(old, deque) else new)
        self._first = [(value, exact) for value, exact in state["_first"]]
        self.tail.scores, self.tail.bursts = list(state["scores"]), [(n, size) for n, size in state["bursts"]]

    # Learning

    def _begin(self, value: float, exact: bool) -> None:
        """Store the first values; when there are enough, begin from their median, which a burst moves little."""
        self._first.append((value, exact))
        self.count += 1
        if self.count < self.min_history:
            return
        bounds, exacts = ([v for v, e in self._first if e is flag] for flag in (False, True))
        self.offset = max(0.0, median(exacts) - median(bounds)) if bounds and exacts else 0.0
        values = bounds + [v - self.offset for v in exacts]
        middle = median(values)
        spread = max(1.4826 * median(abs(v - middle) for v in values), SMALLEST_SPREAD)
        self._levels, self._variances = [middle] * len(GAINS), [spread**2] * len(GAINS)
        self._first, self.count = [], self.min_history // 2
        for v in values[self.count :]:
            self.count += 1
            self._follow(v)

    def _follow(self, value: float, *, moves_levels: bool = True) -> None:
        """Move levels and variances towards a value, and choose the level that predicts best."""
        newest, levels, variances = 1 / self.count, self._levels, self._variances
        weight = max(newest, 1 / MEMORY)
        for k, gain in enumerate(GAINS):  # comparisons, not min and max: this is half of the time of a judgement
            variance, deviation = variances[k], value - levels[k]
            square, most, room = deviation * deviation, CLIP * CLIP * variance, ROUND * math.sqrt(variance)
            variance += weight * ((square if square < most else most) / CLIPPED_VARIANCE - variance)
            variances[k] = variance if variance > SMALLEST_SPREAD**2 / 4 else SMALLEST_SPREAD**2 / 4
            if moves_levels:
                deviation = -room if deviation < -room else room if deviation > room else deviation
                levels[k] += (gain if gain > newest else newest) * deviation
        if self.count > 50 and self.count % 10 == 0:
            best = min(range(len(GAINS)), key=variances.__getitem__)
            if variances[best] < 0.93 * variances[self._best]:
                self._best = best

    def _learn_averages(self) -> None:
        """Learn how far averages stray from their references in this run."""
        for i, (pattern, k) in enumerate(STATISTICS):
            reference = self._reference(pattern)
            if reference is None:
                continue
            square = (self._levels[k] - reference) ** 2
            if self._thresholds:
                square = min(square, self._thresholds[i] ** 2)  # or an event would excuse itself
            seen = self._squares[i] if self._counts[i] else self._least_square(k)
            self._counts[i] = min(self._counts[i] + 1, 3000 if pattern == "trend" else 1000)
            self._squares[i] = seen + (square - seen) / (self._counts[i] + (4 / GAINS[k] if pattern == "level" else 0))
        if self.count >= 100:
            self._past.append(self._levels[SLOW])
            if self.count % LOWEST_EVERY == 0:
                self._lowest.append(self._levels[SLOW])

    def _note_record(self, deviation: float) -> None:
        """Note one of the two largest deviations of the run; those near each other are one."""
        first, second = self._records
        is_same = self.count - self._recorded <= APART
        self._records = sorted([max(first, deviation), second] if is_same else [first, second, deviation])[:-3:-1]
        self._recorded = self.count

    def _settles(self, value: float, is_event: bool) -> bool:
        """Return True if values have been far from the slow level for so long that they are the new normal."""
        slow, run = self._levels[SLOW], self._outlier_run
        z = (value - slow) / self._spread(SLOW)
        if abs(z) <= BODY and not is_event:
            run.clear()
            return False
        if run and (run[0] > slow) != (z > 0):
            run.clear()
        run.append(value)
        if len(run) < (SETTLED if z > 0 else FALLEN):
            return False
        self.tail.bursts = [burst for burst in self.tail.bursts if burst[0] <= self.count - len(run)]
        self._levels = [median(run)] * len(GAINS)
        run.clear()
        self._past.clear()
        if is_event:
            self._lowest.clear()
        return True

    # Limits

    def _spread(self, k: int) -> float:
        """Return the spread about an average: wider while it is known from few values."""
        return max(math.sqrt(self._variances[k]), SMALLEST_SPREAD) * (1 + 8 / self.count)

    def _chance(self, height: float) -> float:
        """Return how likely a value is so high: by its body, or as a burst that is the largest of all so far."""
        bursts = len(self.tail.bursts)
        return max(self.tail.chance(height), 1 / self.count / bursts if bursts > 1 else 0.0)

    def _reference(self, pattern: Pattern) -> float | None:
        """Return the level that a statistic is compared with."""
        if pattern == "level":
            return self._levels[SLOW]
        return self._past[0] if len(self._past) == LAG else None

    def _least_square(self, k: int) -> float:
        """Return the mean square of an average if values were independent."""
        return self._variances[SLOW] * GAINS[k] / (2 - GAINS[k])

    def _root_mean_square(self, i: int) -> float:
        pattern, k = STATISTICS[i]
        least, count = self._least_square(k), self._counts[i]
        if pattern == "level":
            return math.sqrt(max(self._squares[i], least)) * (1 + 8 / self.count)
        walk = GAINS[self._best] * self._spread(self._best) * math.sqrt(LAG + 50)
        least += min(walk, 0.8 * self._spread(SLOW)) ** 2
        return math.sqrt((400 * least + count * self._squares[i]) / (400 + count))

    def _renew_thresholds(self, probability: float) -> None:
        """Update the thresholds of the statistics and the height of a step, every twenty values."""
        if self._thresholds and self.count < self._renewed + max(1, min(20, self._renewed // 10)):
            return
        share = SHARES["step"] * (1.0 if self._best == SLOW else 0.5)  # of two levels that are compared with
        spread = self._spread(self._best)
        height = self.tail.height(probability * share, probability * BURST_SHARE, self.count, spread)
        if self.count < EARLY and len(self.tail.bursts) < 2 and self.floor == LEAST_STEP:
            height = min(height, max(EARLY_STEP / self._spread(SLOW), 4.5))
        thresholds = []
        for i, (pattern, k) in enumerate(STATISTICS):
            z = -_NORMAL.inv_cdf(probability * SHARES[pattern])
            if pattern == "level":
                z += GAINS[k] * max(0.0, min(height, 12.0) - z)  # a short mean of a heavy tail is heavy too
            threshold = z * self._root_mean_square(i)
            thresholds.append(threshold if pattern == "level" else min(max(LEAST_TREND, threshold), LARGEST_TREND))
        self._thresholds, self._renewed = [*thresholds, height], self.count


_LEARNED = (
    *("count", "offset", "_first", "_levels", "_variances", "_best", "_squares", "_counts", "_past", "_lowest"),
    *("_outlier_run", "_records", "_recorded", "_thresholds", "_renewed"),
)
"""Attributes of a Baseline that a checkpoint has."""


class LearningRates:
    """Learning rates of a run: predicts the next one from the schedule so far.

    Schedules need no setting: they go on as they went (warm-up, cosine, cycles), they fall (decay, in steps or on a
    plateau), and a scheduler may return to a rate that the run has had (restarts). Two questions are asked of a rate.
    Did it jump from one step to the next? And is it above all rates so far, and has grown faster than the square of
    the time over the last 8, 32 or 128 steps? The second sees exponential growth, which looks straight from one step
    to the next, if it is at least 1 % a step. Slower growth is seen only where it begins.
    """

    ACCIDENT, SPANS, SAME, SMALL = 1.5, (8, 32, 128), 1.001, 0.01
    """A rate above the expected one by ACCIDENT is an accident; warm-ups by epochs have steps of up to 1.4. SPANS are
    numbers of records to look for growth in. Rates are the same up to SAME, and harmless below SMALL of the highest."""

    def __init__(self) -> None:
        self._last: deque[tuple[int, float]] = deque(maxlen=2 * max(self.SPANS))
        self._highest = 0.0

    def expected_rate(self, step: int, lr: float, *, scheduled: bool | None) -> float:
        """Return the learning rate; if it is an accident, the highest that earlier ones led to expect.

        Args:
            step: whose rate it is.
            lr: the rate.
            scheduled: whether the run's scheduler set it, if that is known.
        """
        if lr <= (self.SAME if scheduled else self.SMALL) * self._highest:
            return lr
        if len(self._last) > 2 and self._last[-1][1] > 0:
            (before, first), (last, second) = self._last[-2], self._last[-1]
            straight = second + abs(second - first) * (step - last) / (last - before)  # a schedule may turn upward
            if lr > self.ACCIDENT * straight:
                return straight
        if lr <= self._highest:  # growth is looked for above all rates so far
            return lr
        return min((bound for bound in self._grown() if 0 < self.ACCIDENT * bound < lr), default=lr)

    def add(self, step: int, lr: float, *, alerted: bool = False) -> None:
        """Store the rate of a step. After an alert about it, what follows is compared with it."""
        if lr < 0 or not math.isfinite(lr) or (self._last and step <= self._last[-1][0]):
            return
        if alerted:
            self._last.clear()
            self._last.extend([(step - 2, lr), (step - 1, lr)])
        self._highest = max(self._highest, lr)
        self._last.append((step, lr))

    def state(self) -> dict[str, Any]:
        """Return the rates in plain types."""
        return {"last": [list(rate) for rate in self._last], "highest": self._highest}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned."""
        self._last.clear()
        self._last.extend((int(step), float(lr)) for step, lr in state["last"])
        self._highest = float(state["highest"])

    def _grown(self) -> Iterator[float]:
        """Yield the rates that growth with the square of the time would have reached, at least the highest so far."""
        for span in self.SPANS:
            if len(self._last) >= 2 * span:
                first, second = (math.sqrt(self._last[-n][1]) for n in (2 * span, span))
                grown = second + abs(second - first)
                yield max(grown * grown, self._highest / self.ACCIDENT)  # ** would raise where this is infinite

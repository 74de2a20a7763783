"""Baselines: learn the usual level and noise of a run from its values, and how far a value may stray from them.

A value is the logarithm of a positive quantity, such as D(S) over the learning rate. Four exponential averages follow
it, from the last value alone to the mean of the last hundred. The one that predicts best is the fast level, the slowest
one the slow level. An event is

- a step: a value above a level by more than the noise of this run, its tail and its own bursts explain, and by a factor
  of 1.4;
- a level: an average that is further above the slow level than its learned mean square allows;
- a trend: an average that is as far above the slow level of 200 values ago, or a slow level eight times the lowest of
  the last 2,000 values.

Each of these is a limit for the next value, known before the value comes.

Tried and dropped: multiples of the third largest of the last 200 values, which growth raises with itself; a
generalised Pareto tail, which needs thousands of values before it beats a plain z-score on normal noise; four and ten
shapes of the tail instead of three, and quantiles of the bursts, which told no more.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from statistics import NormalDist, median
from typing import Any, Literal, NamedTuple

Pattern = Literal["step", "level", "trend"]

GAINS = (1.0, 0.3, 0.05, 0.01)
"""Gains of the exponential averages; SLOW is the index of the slowest."""
SLOW = 3
AVERAGES: tuple[tuple[Pattern, int], ...] = (("level", 1), ("level", 2), ("trend", 2), ("trend", SLOW))
"""Averages that are compared with an earlier level: the last one with the lowest, the others as their pattern says."""
SHARES: dict[Pattern, float] = {"step": 0.8, "level": 0.065, "trend": 0.07}
"""Share of each limit in the probability of a false alarm."""
LEAST_STEP, LEAST_TREND, LARGEST_TREND, LEAST_PAGE = (math.log(factor) for factor in (1.4, 1.75, 8, 3))
"""Smaller steps, trends and pages are none; growth beyond LARGEST_TREND is one even in a run that has always grown."""
MEMORY, LAG, LOWEST_EVERY, LOWEST_OF, LONGEST_GAP = 400, 200, 50, 40, 20
"""Values that a variance averages; values back to the level of a trend; the lowest level is of LOWEST_OF, one in
LOWEST_EVERY values; a value has the false alarms of the steps since the last one, LONGEST_GAP at most."""
CLIP, CLIPPED_VARIANCE, ROUND, BODY, BURST = 2.5, 0.9775599834528068, 3.0, 4.0, 6.0
"""In spreads: deviations count for a variance up to CLIP (and E[min(z^2, CLIP^2)] = CLIPPED_VARIANCE for a normal z),
move an average by up to ROUND, and shape the tail up to BODY. From BURST on, they are bursts."""
SMALLEST_SPREAD = 1e-3
EARLY, EARLY_STEP = 100, math.log(6)
"""Before EARLY values no shape of the tail is known: such a step of D(S), at least 4.5 spreads high, is an event."""
SETTLED, FALLEN = 50, 20
"""Events or values far from the slow level in a row that become the new normal; fewer if all are below it."""
BURSTS, APART, ENDED, USUAL_BURST, BEYOND = 64, 10, 0.005, math.log(4), math.log(1.2)
"""Bursts that are remembered; values within which they are one; they have ended if the silence since the last is less
likely than ENDED. One burst excuses others up to USUAL_BURST; BEYOND the largest, one is new."""

PRIOR = (0.86, 0.1, 0.04)
"""Probabilities of the tail's shapes before any value: normal, Gumbel (that of a maximum of many values, as D(S) is),
Student with 3 degrees of freedom. Bayes' rule then weighs them by how well each predicts the body."""
LOG_MASSES = (0.22572801261596215, -1.0440308468479371, -0.01581995592981713)
"""Logarithm of the integral of each density, as `log_densities` has it, from 0 to BODY."""
GUMBEL_MEAN, GUMBEL_SPREAD, STUDENT_SPREAD = 0.5772156649015329, 1.2077078576095135, 1.365369690303907
"""A spread s has E[min((x - mean)^2, (CLIP s)^2)] = CLIPPED_VARIANCE s^2, as a normal distribution with spread s."""

VERSION = 2  # of what checkpoints hold
_NORMAL = NormalDist()


def survivals(z: float) -> tuple[float, ...]:
    """Return P(Z > z) for each shape, with z >= 0 in its spreads."""
    normal, gumbel = 0.5 * math.erfc(z / math.sqrt(2)), -math.expm1(-math.exp(-GUMBEL_MEAN - GUMBEL_SPREAD * z))
    u = STUDENT_SPREAD / math.sqrt(3) * z
    student = 0.5 - (math.atan(u) + u / (1 + u * u)) / math.pi if u < 30 else 2 / (3 * math.pi * u**3)
    return normal, gumbel, student


def log_densities(z: float) -> tuple[float, ...]:
    """Return the log density of each shape at z, without its constant."""
    x = GUMBEL_MEAN + GUMBEL_SPREAD * z
    return -0.5 * z * z, -x - math.exp(-x), -2 * math.log1p(STUDENT_SPREAD**2 / 3 * z * z)


def level_and_spread(values: list[float]) -> tuple[float, float]:
    """Return the median and the scaled MAD of values, which a burst moves little."""
    middle = median(values)
    return middle, max(1.4826 * median(abs(value - middle) for value in values), SMALLEST_SPREAD)


class Learner:
    """What is learned from a run: attributes of plain values and of other learners, without an underscore."""

    def state(self) -> dict[str, Any]:
        """Return what was learned in plain types, for a checkpoint."""
        return {"version": VERSION} | {name: _plain(value) for name, value in vars(self).items() if name[0] != "_"}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned. Raise for that of another version: its contents differ."""
        if state.get("version") != VERSION:
            raise ValueError("the history was saved by another version of the rules: what is usual is learned anew")
        vars(self).update({name: _taken(vars(self)[name], state[name]) for name in state if name != "version"})


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    return value.state() if isinstance(value, Learner) else copy.deepcopy(value)


def _taken(mine: Any, saved: Any) -> Any:
    if isinstance(mine, Learner):
        mine.restore(saved)
        return mine
    if isinstance(mine, dict):
        return {name: _taken(mine.get(name), part) for name, part in saved.items()}
    return copy.deepcopy(saved)


class Event(NamedTuple):
    """A value above a limit."""

    pattern: Pattern
    usual: float  # the level that it is compared with
    height: float  # spreads above a level
    rarity: float | None = None  # steps among which one as high is expected by chance; None if an average was too high
    is_page: bool = False  # three times the usual, the noise included, and rarer than all that the run has shown


class Baseline(Learner):
    """Usual level and noise of one series of a run, with its share of the false alarms that are allowed."""

    def __init__(self, share: float = 1.0, min_history: int = 20, floor: float = LEAST_STEP) -> None:
        self._share, self._min_history, self._floor = share, min_history, floor  # floor: log of the smallest event
        self.count, self.step, self.gap = 0, 0, 1  # values so far, step of the last one, steps between two
        self.first: list[list[float]] = []  # values until there is enough history, and whether they are exact
        self.offset = 0.0  # distance of exact values above lower bounds
        self.levels, self.variances, self.best = [0.0] * len(GAINS), [0.0] * len(GAINS), SLOW
        self.squares = [0.0] * len(AVERAGES)
        self.past: list[float] = []  # slow levels
        self.lowest: list[float] = []
        self.outliers: list[float] = []  # the last values, if far from the slow level
        self.scores = [math.log(p) for p in PRIOR]  # log weights of the shapes of the tail, up to a constant
        self.bursts: list[list[float]] = []  # numbers of values, and their distances from their level
        self.height, self.burst, self.thresholds, self.renewed = 0.0, 0.0, [0.0] * len(AVERAGES), 0

    def limits(self, false_alarms: float) -> Iterator[tuple[float, Pattern, float]]:
        """Yield limits of the next value, their patterns and the usual levels, by the false alarms in 10,000 steps."""
        if self.count < self._min_history:
            return
        if not self.renewed or self.count >= self.renewed + max(1, min(20, self.renewed // 10)):
            self._renew(false_alarms / 1e4 * self._share * min(self.gap, LONGEST_GAP))
        levels, slow, spread = self.levels, self.levels[SLOW], self._spread(SLOW)
        least = slow + self._floor
        for k in {SLOW, self.best}:
            yield max(least, levels[k] + max(self._floor, self.burst, self.height * self._spread(k))), "step", slow
        for (pattern, k), reference, threshold in zip(AVERAGES, self._references(), self.thresholds, strict=True):
            if reference is not None and (pattern == "trend" or self.count * GAINS[k] >= 10):
                needed = (reference + threshold - levels[k]) / GAINS[k]
                if needed < ROUND * spread:
                    value = max(least, levels[k] + needed) if pattern == "level" else levels[k] + max(needed, 0.0)
                    yield value, pattern, reference

    def event(self, value: float, false_alarms: float, *, exact: bool = False) -> Event | None:
        """Return the event that a value is, or None."""
        value -= self.offset if exact else 0.0
        broken = next((limit for limit in self.limits(false_alarms) if value > limit[0]), None)
        if broken is None:
            return None
        _, pattern, usual = broken
        height = max((value - self.levels[k]) / self._spread(k) for k in (self.best, SLOW))
        if pattern != "step":
            return Event(pattern, usual, height)
        bursts, spread, above = len(self.bursts), self._spread(SLOW), value - self.levels[SLOW]
        chance = max(self._chance(height), 1 / self.count / bursts if bursts > 1 else 0.0)
        # By the heaviest shape that is not ruled out yet: runs with heavy tails hide single steps of any size.
        heaviest = max(p for p, score in zip(survivals(above / spread), self.scores, strict=True) if score > -8)
        is_page = above > max(LEAST_PAGE + 2 * spread, self.burst) and heaviest < 0.0002 / self.count
        return Event(pattern, usual, height, min(self.gap / max(chance, 1e-12), 1e12), is_page)

    def add(self, step: int, value: float, event: Event | None = None, *, exact: bool = False) -> None:
        """Learn from the value of a step and the event that it is. An accident teaches only how high accidents are."""
        if step > self.step:
            self.step, self.gap = step, step - self.step if self.count else 1
        if self.count < self._min_history:
            self._begin(value, exact)
            return
        if exact:
            residual, room = value - self.levels[self.best], ROUND * self._spread(self.best)
            value -= self.offset
            if event is None:
                self.offset = max(0.0, self.offset + 0.05 * (max(-room, min(room, residual)) - self.offset))
        self.count += 1
        deviation = value - self.levels[self.best]
        z = deviation / self._spread(self.best)
        if z > BURST and not (self.outliers and self.outliers[-1] > self.levels[SLOW]):  # the begin of a blow-up
            if not self.bursts or self.count - self.bursts[-1][0] > APART:
                self.bursts = [*self.bursts[1 - BURSTS :], [self.count, deviation]]
            self.bursts[-1][1] = max(self.bursts[-1][1], deviation)
        if self._settles(value, event is not None):
            return
        if event is not None and event.pattern == "step":
            self._follow(value, moves_levels=False)
            return
        if 0 < z * (1 + 8 / self.count) < BODY:
            densities = log_densities(z * (1 + 8 / self.count))
            scores = [s + d - m for s, d, m in zip(self.scores, densities, LOG_MASSES, strict=True)]
            self.scores = [max(score - max(scores), -30.0) for score in scores]
        self._follow(value)
        self._learn_averages()
        if event is not None and event.pattern == "trend":  # the next one is compared with the level of now
            self.past, self.lowest = [], []

    # Learning

    def _begin(self, value: float, exact: bool) -> None:
        """Store the first values; when there are enough, begin from their median."""
        self.first.append([value, float(exact)])
        self.count += 1
        if self.count < self._min_history:
            return
        bounds, exacts = ([v for v, e in self.first if e == flag] for flag in (0, 1))
        self.offset = max(0.0, median(exacts) - median(bounds)) if bounds and exacts else 0.0
        values, self.first = bounds + [v - self.offset for v in exacts], []
        level, spread = level_and_spread(values)
        self.levels, self.variances = [level] * len(GAINS), [spread**2] * len(GAINS)

    def _follow(self, value: float, *, moves_levels: bool = True) -> None:
        """Move levels and variances towards a value, and choose the level that predicts best."""
        newest, levels, variances = 1 / self.count, self.levels, self.variances
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
            if variances[best] < 0.93 * variances[self.best]:
                self.best = best

    def _learn_averages(self) -> None:
        """Learn how far averages stray from their references in this run."""
        for i, ((_, k), reference) in enumerate(zip(AVERAGES[:SLOW], self._references(), strict=False)):
            if reference is not None:
                square = min(
                    (self.levels[k] - reference) ** 2, CLIP**2 * self.squares[i]
                )  # growth hardly excuses itself
                self.squares[i] += (square - self.squares[i]) / (min(self.count, 2000) + 4 / GAINS[k])
        if self.count >= EARLY:
            self.past = [*self.past[1 - LAG :], self.levels[SLOW]]
            if self.count % LOWEST_EVERY == 0:
                self.lowest = [*self.lowest[1 - LOWEST_OF :], self.levels[SLOW]]

    def _settles(self, value: float, is_event: bool) -> bool:
        """Return True if values have been far from the slow level for so long that they are the new normal."""
        slow = self.levels[SLOW]
        is_far = abs(value - slow) > BODY * self._spread(SLOW) or is_event
        self.outliers = outliers = [*self.outliers, value] if is_far else []
        if len(outliers) < (FALLEN if outliers and max(outliers) < slow else SETTLED):
            return False
        self.bursts = [burst for burst in self.bursts if burst[0] <= self.count - len(outliers)]
        level, spread = level_and_spread(outliers)
        self.levels, self.variances = [level] * len(GAINS), [(spread * (1 + 8 / len(outliers))) ** 2] * len(GAINS)
        self.outliers, self.past, self.lowest = [], [], []
        return True

    # Limits

    def _largest_burst(self) -> float:
        """Return what a value exceeds that is no usual burst; 0 if the run has none, or none any more.

        Of m bursts that come at any time, the last is within the first part x of the time with probability x^m.
        """
        m = len(self.bursts)
        since = 0 if m < BURSTS else self.bursts[0][0]
        if m and m * ((self.bursts[-1][0] - since) / max(self.count - since, 1)) ** m < ENDED:
            self.bursts = []
        if not self.bursts:
            return 0.0
        *_, second, largest = sorted([0.0, *(size for _, size in self.bursts)])
        return min(largest, max(1.5 * second, USUAL_BURST)) + BEYOND * (1 + 1 / m)  # one accident excuses no other

    def _spread(self, k: int) -> float:
        """Return the spread about an average: wider while it is known from few values."""
        return max(math.sqrt(self.variances[k]), SMALLEST_SPREAD) * (1 + 8 / self.count)

    def _references(self) -> tuple[float | None, ...]:
        """Return the levels that averages are compared with; None where there is none yet."""
        slow, past = self.levels[SLOW], self.past
        return slow, slow, past[0] if len(past) == LAG else None, min(self.lowest, default=None)

    def _chance(self, z: float) -> float:
        """Return the probability that noise is at least z spreads high."""
        weights = [math.exp(score) for score in self.scores]
        return sum(map(float.__mul__, weights, survivals(z))) / sum(weights)

    def _renew(self, probability: float) -> None:
        """Renew the height of a step, in spreads, and the thresholds of the averages for this probability."""
        self.renewed, low, high = self.count, 1.0, 4096.0
        share = SHARES["step"] * (1.0 if self.best == SLOW else 0.5)  # of two levels that are compared with
        for _ in range(14):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if self._chance(middle) > probability * share else (low, middle)
        if self.count < EARLY and not self.bursts and self._floor == LEAST_STEP:
            high = min(high, max(EARLY_STEP / self._spread(SLOW), 4.5))
        self.height, self.burst, self.thresholds[SLOW] = high, self._largest_burst(), LARGEST_TREND
        tallest = max(high, self.burst / self._spread(self.best))
        for i, (pattern, k) in enumerate(AVERAGES[:SLOW]):
            z, least = -_NORMAL.inv_cdf(probability * SHARES[pattern]), self.variances[SLOW] * GAINS[k] / (2 - GAINS[k])
            if pattern == "level":
                z += GAINS[k] * max(0.0, min(tallest, 12.0) - z)  # a short mean of a heavy tail is heavy too
            elif self.count < EARLY + LAG:  # nothing is learned yet: the level may be a random walk
                walk = GAINS[self.best] * self._spread(self.best) * math.sqrt(LAG + 50)
                least += min(walk, 0.8 * self._spread(SLOW)) ** 2
            self.squares[i] = max(self.squares[i], least)
            threshold = z * math.sqrt(self.squares[i]) * (1 + 8 / self.count)
            self.thresholds[i] = threshold if pattern == "level" else min(max(LEAST_TREND, threshold), LARGEST_TREND)


class LearningRates(Learner):
    """Learning rates of a run: predicts the next one from the schedule so far.

    Schedules go on as they went (warm-up, cosine, cycles), fall (decay, steps, plateaus), or return to a rate that the
    run has had (restarts). Two questions are asked of a rate. Did it jump from one step to the next? And is it above
    all so far, and has grown faster than the square of the time over the last 8, 32 or 128 steps? The second sees
    exponential growth, which looks straight from one step to the next, if it is at least 1 % a step.
    """

    ACCIDENT, SPANS, SAME, SMALL = 1.5, (8, 32, 128), 1.001, 0.01
    """A rate above the expected one by ACCIDENT is an accident; warm-ups by epochs have steps of up to 1.4. SPANS are
    numbers of records to look for growth in. Rates are the same up to SAME, and harmless below SMALL of the highest."""

    def __init__(self) -> None:
        self.last: list[list[float]] = []
        self.highest = 0.0

    def expected_rate(self, step: int, lr: float, *, scheduled: bool | None) -> float:
        """Return the rate, which the scheduler may have set; if it is an accident, what earlier ones led to expect."""
        if lr <= (self.SAME if scheduled else self.SMALL) * self.highest:
            return lr
        if len(self.last) > 2 and self.last[-1][1] > 0:
            (before, first), (last, second) = self.last[-2:]
            straight = second + abs(second - first) * (step - last) / (last - before)  # a schedule may turn upward
            if lr > self.ACCIDENT * straight:
                return straight
        if lr > self.highest:  # growth is looked for above all rates so far
            for span in self.SPANS:
                if len(self.last) >= 2 * span:
                    first, second = (math.sqrt(self.last[-n][1]) for n in (2 * span, span))
                    grown = second + abs(second - first)
                    bound = max(grown * grown, self.highest / self.ACCIDENT)  # ** would raise where this is infinite
                    if 0 < self.ACCIDENT * bound < lr:
                        return bound
        return lr

    def add(self, step: int, lr: float, *, alerted: bool = False) -> None:
        """Store the rate of a step. After an alert about it, what follows is compared with it."""
        if lr < 0 or not math.isfinite(lr) or (self.last and step <= self.last[-1][0]):
            return
        if alerted:
            self.last = [[step - 2, lr], [step - 1, lr]]
        self.highest = max(self.highest, lr)
        self.last = [*self.last[1 - 2 * max(self.SPANS) :], [step, lr]]

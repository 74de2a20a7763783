"""How rare is a value so many spreads above its level? Learned from a run's own values: the shape of their tail.

Most values of a run form a body: a normal distribution, a Student distribution with a heavier tail, or a log-gamma
distribution with a heavier tail above than below. AdamW's steps have the last one: D(S) is the largest of many
distances, and large values of such a maximum are exponential (Gumbel's distribution is a log-gamma one). Which shape it
is, is learned by how well each predicted the values so far (Bayes' rule; only values within BODY spreads count, so that
a single accident teaches nothing). Some runs also have bursts of their own, beyond what their body explains. What a run
has shown several times is allowed to come again.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

CLIP = 2.5
"""Deviations count for the spread up to so many spreads: an accident does not widen it."""
CLIPPED_VARIANCE = 0.9775599834528068
"""E[min(z^2, CLIP^2)] of a normal z."""
BODY = 4.0
"""A value more than so many spreads above its level is no part of the body."""

STUDENTS = (16, 8, 5, 4, 3, 2)
"""Degrees of freedom of the Student distributions that a body may have, beside the normal one."""
STUDENT_SPREADS = (
    1.0555792145962477,
    1.1166007366659707,
    1.1976290220865722,
    1.2567754799252446,
    1.365369690303907,
    1.6259630035939796,
)
"""Their spreads: s with E[min((x - mean)^2, (CLIP s)^2)] = CLIPPED_VARIANCE s^2."""
GUMBELS = (2.0, 1.0, 0.5)
"""Exponents k of the log-gamma distributions: those of -log of a gamma variable of shape k; 1 is Gumbel's."""
GUMBEL_MEANS = (-0.42278433509846713, 0.5772156649015329, 1.9635100260214235)
GUMBEL_SPREADS = (0.7779053497317077, 1.2077078576095135, 2.017290364318857)
PRIOR = (0.58, 0.1, 0.08, 0.05, 0.04, 0.03, 0.02, 0.04, 0.03, 0.03)
"""How likely each is before anything was seen: the normal one, the Students, the log-gammas."""

GRID: tuple[float, ...] = tuple(0.1 * i for i in range(81)) + tuple(8.0 * 500.0 ** (i / 120) for i in range(1, 121))
"""Heights, in spreads, at which tails are tabulated: up to 4,000."""

BURSTS = 64
"""Bursts that are remembered."""
APART = 10
"""Values from its first for which a burst counts as one."""
MANY_BURSTS = 16
"""From so many on their heights show whether they have a largest."""
FIRST_BURSTS, USUAL_BURST = 5, math.log(4)
"""Until so many bursts were seen, others of up to this size are expected."""

ENDED = 0.005
"""Bursts after which there is a silence that is less likely than this have ended: those of a warm-up, for one."""
RECORD = math.log(1.2)
"""A burst that exceeds the largest one so far by this factor is an event, however few have been seen."""


def normal_survival(t: float) -> float:
    """P(X > t) of a normal variable."""
    return 0.5 * math.erfc(t / math.sqrt(2))


def student_survival(n: int, t: float) -> float:
    """P(X > t) of a Student distribution with n degrees of freedom."""
    if t < 0:
        return 1 - student_survival(n, -t)
    angle = math.atan2(t, math.sqrt(n))
    if t * t > 1e4 * n:  # the sums below would cancel
        log_density = math.lgamma((n + 1) / 2) - math.lgamma(n / 2) - 0.5 * math.log(n * math.pi)
        return math.exp(log_density + (n + 1) / 2 * math.log(n) - n * math.log(t)) / n
    square, sine = math.cos(angle) ** 2, math.sin(angle)
    if n % 2:
        terms = accumulate(range(1, (n - 1) // 2), lambda term, k: term * square * 2 * k / (2 * k + 1), initial=1.0)
        total = sum(terms) * math.cos(angle) * sine if n > 1 else 0.0
        return 0.5 - (angle + total) / math.pi
    terms = accumulate(range(1, n // 2), lambda term, k: term * square * (2 * k - 1) / (2 * k), initial=1.0)
    return 0.5 - 0.5 * sine * sum(terms)


def gumbel_survival(k: float, x: float) -> float:
    """P(X > x) of the log-gamma distribution with exponent 2, 1 or 0.5."""
    y = math.exp(min(-x, 700.0))
    if k == 0.5:
        return math.erf(math.sqrt(y))
    if k == 1:
        return -math.expm1(-y)
    return y * y / 2 if y < 1e-6 else 1 - (1 + y) * math.exp(-y)


def survivals(z: float) -> tuple[float, ...]:
    """P(Z > z) for each shape, with z in its spreads."""
    return (
        normal_survival(z),
        *(student_survival(n, s * z) for n, s in zip(STUDENTS, STUDENT_SPREADS, strict=True)),
        *(gumbel_survival(k, mean + s * z) for k, mean, s in _gumbels()),
    )


def _gumbels() -> Iterator[tuple[float, float, float]]:
    return zip(GUMBELS, GUMBEL_MEANS, GUMBEL_SPREADS, strict=True)


@functools.cache
def _tables() -> tuple[tuple[float, ...], ...]:
    """P(Z > height) for each height of the grid and each shape: (heights, shapes)."""
    return tuple(survivals(height) for height in GRID)


def _constants() -> tuple[float, ...]:
    """For each shape minus the logarithm of its part within BODY spreads, and of the constant of its density."""
    inside = [math.log(below - above) for below, above in zip(survivals(0.0), survivals(BODY), strict=True)]
    constants = (
        -0.5 * math.log(2 * math.pi),
        *(
            math.log(s) + math.lgamma((n + 1) / 2) - math.lgamma(n / 2) - 0.5 * math.log(n * math.pi)
            for n, s in zip(STUDENTS, STUDENT_SPREADS, strict=True)
        ),
        *(math.log(s) - math.lgamma(k) for k, _, s in _gumbels()),
    )
    return tuple(constant - mass for constant, mass in zip(constants, inside, strict=True))


_NORMAL, *_REST = _constants()
_STUDENTS = tuple(
    (s * s / n, (n + 1) / 2, constant)
    for n, s, constant in zip(STUDENTS, STUDENT_SPREADS, _REST[: len(STUDENTS)], strict=True)
)
"""Log density at z: third - second * log(1 + first * z^2)."""
_GUMBELS = tuple(
    (k, mean, s, constant) for (k, mean, s), constant in zip(_gumbels(), _REST[len(STUDENTS) :], strict=True)
)
"""Log density at z: fourth - first * x - exp(-x), with x = second + third * z."""


class Tail:
    """The tail of a series of deviations z, each in spreads of the series."""

    def __init__(self) -> None:
        self.scores: list[float]
        """Logarithms of how likely each shape is, up to a constant."""
        self.bursts: list[tuple[int, float]] = []
        """Deviations beyond the body: number of the value, and size. A size is no number of spreads: those are
        estimates, and their errors would be taken for larger bursts."""
        self.begin_anew()

    def add(self, z: float) -> None:
        """Learn from a value of the body."""
        if not 0 < z < BODY:
            return
        square = z * z
        densities = [_NORMAL - 0.5 * square]
        densities += [constant - power * math.log1p(scale * square) for scale, power, constant in _STUDENTS]
        for k, mean, spread, constant in _GUMBELS:
            x = mean + spread * z
            densities.append(constant - k * x - math.exp(-x))
        scores = list(map(float.__add__, self.scores, densities))
        best = max(scores)
        self.scores = [max(score - best, -30.0) for score in scores]

    @property
    def looks_normal(self) -> bool:
        """Whether the body so far makes a normal distribution more likely than it was before."""
        return self._weights()[0] > PRIOR[0]

    def begin_anew(self) -> None:
        """Forget the shape of the body, and bursts if there were few: deviations are now those from another level."""
        self.scores = [math.log(weight) for weight in PRIOR]
        self.bursts = self.bursts if len(self.bursts) >= FIRST_BURSTS else []

    def forget_bursts(self, number: int) -> None:
        """Forget the bursts after the value of this number."""
        self.bursts = [burst for burst in self.bursts if burst[0] <= number]

    def add_burst(self, number: int, size: float) -> None:
        """Learn from a value beyond the body. Values near each other are one burst, of the largest one's size.

        Args:
            number: of the value.
            size: its distance from its level.
        """
        if self._have_ended(number):
            self.bursts = []
        if not self.bursts or number - self.bursts[-1][0] > APART:
            self.bursts = [*self.bursts, (number, size)][-BURSTS:]
        elif size > self.bursts[-1][1]:
            self.bursts[-1] = (self.bursts[-1][0], size)

    def height(self, probability: float, burst_probability: float, number: int, spread: float) -> float:
        """Return the height that a value exceeds with a given probability, in spreads.

        Args:
            probability: of a value of the body.
            burst_probability: of a burst, for each value.
            number: values so far.
            spread: of the values, to know the size of a burst.
        """
        return max(self._body_height(probability), self._burst_height(burst_probability, number, spread))

    def chance(self, z: float, number: int, spread: float) -> float:
        """Return how likely a value is z spreads high: by its body, or by the bursts so far."""
        place = min(bisect_left(GRID, z), len(GRID) - 1)
        body = self._body_chance(_tables()[place])
        rate, heights = self._burst_rate(number, spread)
        if rate <= 0 or len(heights) < 2:
            return body
        rank = (sum(height >= z for height in heights) + 1) / (len(heights) + 1)
        beyond = max(0.0, z - heights[0]) / max(self._spacing(heights), 1e-9)
        return max(body, rate * rank * math.exp(-beyond))

    def state(self) -> dict[str, Any]:
        """Return what was learned, in plain types."""
        return {"scores": list(self.scores), "bursts": [list(burst) for burst in self.bursts]}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned. One of an earlier version is left out: it has other shapes."""
        if len(state["scores"]) != len(PRIOR):
            return
        self.scores = [float(score) for score in state["scores"]]
        self.bursts = [(int(number), float(size)) for number, size in state["bursts"]]

    def _weights(self) -> list[float]:
        weights = [math.exp(score) for score in self.scores]
        total = sum(weights)
        return [weight / total for weight in weights]

    def _body_chance(self, row: Sequence[float]) -> float:
        return math.fsum(weight * chance for weight, chance in zip(self._weights(), row, strict=True))

    def _body_height(self, probability: float) -> float:
        weights, tables = self._weights(), _tables()

        def excess(place: int) -> float:
            return sum(map(float.__mul__, weights, tables[place]))

        low, high = 0, len(GRID) - 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if excess(middle) > probability else (low, middle)
        above, below = excess(low), max(excess(high), 1e-300)
        share = math.log(above / probability) / math.log(above / below) if above > below else 1.0
        return GRID[low] + min(max(share, 0.0), 1.0) * (GRID[high] - GRID[low])

    def _burst_rate(self, number: int, spread: float) -> tuple[float, list[float]]:
        """How often there is a burst that the body does not explain, and the heights of bursts, the largest first."""
        m = len(self.bursts)
        if not m or number <= 0 or self._have_ended(number):
            return 0.0, []
        span = number - self._since()
        rate = m / span - self._body_chance(_tables()[int(10 * BODY)])
        heights = sorted((max(size / spread, BODY) for _, size in self.bursts), reverse=True)
        heights[0] = min(heights[0], 1.5 * (heights[1] if m > 1 else BODY))  # one accident excuses no other
        return rate, heights

    def _since(self) -> int:
        """The number of the value from which on the bursts are known."""
        return 0 if len(self.bursts) < BURSTS else self.bursts[0][0]

    def _have_ended(self, number: int) -> bool:
        """Whether the bursts were those of an earlier time: so long a silence is not theirs.

        Of m bursts that come at any time, the last is within the first part x of the time with probability x^m.
        """
        if len(self.bursts) < 2:
            return False
        since, m = self._since(), len(self.bursts)
        return m * ((self.bursts[-1][0] - since) / max(number - since, 1)) ** m < ENDED

    def _burst_height(self, probability: float, number: int, spread: float) -> float:
        """Return what bursts exceed with this probability for each value, by how far apart the highest three are."""
        rate, heights = self._burst_rate(number, spread)
        if rate <= probability:  # so rare that each may be told
            return 0.0
        m = len(heights)
        is_burst = max(size for _, size in self.bursts) > 1.5 * BODY * spread
        expected = USUAL_BURST / spread if is_burst and m < FIRST_BURSTS else 0.0
        if m < 2:
            return expected
        rank = probability / rate * (m + 1)
        if rank >= 1:
            above, below = heights[min(int(rank), m) - 1], heights[min(int(rank) + 1, m) - 1]
            return above + (rank - int(rank)) * (below - above)
        return max(expected, heights[0] + min(self._spacing(heights) * math.log(1 / rank), RECORD / spread))

    @staticmethod
    def _spacing(heights: Sequence[float]) -> float:
        """How much higher a burst is that comes e times more rarely."""
        m, largest = len(heights), heights[0] - BODY
        if m < 3:
            return largest / 2
        mean = sum(heights) / m - BODY
        even = largest / m  # bursts of all sizes up to a largest: the next record is near the last
        if m < MANY_BURSTS:
            return max(even, (heights[0] - heights[2]) / 1.5, mean / 2)
        return even if mean > 0.45 * largest else max(even, (heights[0] - heights[2]) / 1.5)

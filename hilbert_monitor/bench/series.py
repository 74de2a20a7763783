"""Do the blow-up rules work on any noise? Known faults are put into synthetic series, beside two usual detectors.

A series is the logarithm of D(S) over the learning rate in a run of 20,000 steps at a constant rate. Each noise has ten
such runs, with seeds on which nothing was tuned. The rules judge every step through their usual entry, `Judge.judge`,
and their alerts in these clean runs are false alarms. At 100 places of each run, from step 2,000 on, copies of the
judge go on with a fault in the series:

- a factor of 2, 3, 5 or 10 for 1, 5 or 20 steps. It counts as told if an alert comes within these steps.
- growth with a doubling every 5 to 300 steps. It counts as told if an alert comes before a factor of 4 is reached.

The opponents compare a value with the last 200: their mean and standard deviation (z-score), or their median and MAD
(median absolute deviation). For each noise, their thresholds give them as many false alarms on the same clean runs as
the rules had. Alarms within five steps of each other are one, for all three.

An opponent tells of a fault if its highest score within the fault is above its threshold. So a run can be measured
before the thresholds are known: it returns scores, and `series_summary` makes shares of them.
"""

from __future__ import annotations

import math
import multiprocessing
import pickle
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hilbert_monitor.runs.alerts import Judge
from hilbert_monitor.runs.record import Alert, StepRecord

WINDOW = 200
"""Values that the opponents compare with."""
BATCH = 5_000
"""Windows whose scores are computed at once: 8 MB."""
BOUND = 0.9
"""A lower bound over its exact value, in the series of bounds."""
EXACT_EVERY = 10
"""Steps from one exact value to the next there."""

Array = NDArray[np.float64]


class Detector(Protocol):
    """What judges a run, step by step."""

    def judge(self, record: StepRecord) -> list[Alert]:
        """Return the alerts of a record."""


@dataclass(frozen=True)
class Noise:
    """A kind of run without a fault."""

    name: str
    draw: Callable[[np.random.Generator, int], Array]
    """Returns the logarithms of so many exact values."""
    bounds: bool = False
    """Most steps have a lower bound only. Growth is not tried there."""


def _normal(spread: float) -> Noise:
    return Noise(f"normal {spread}", lambda rng, n: rng.normal(0, spread, n))


def _correlated(rho: float, spread: float) -> Noise:
    def draw(rng: np.random.Generator, n: int) -> Array:
        values, value = np.empty(n), rng.normal(0, spread)
        for i, shock in enumerate(rng.normal(0, spread * math.sqrt(1 - rho**2), n)):
            values[i] = value = rho * value + shock
        return values

    return Noise(f"AR({rho}) {spread}", draw)


def _student(scale: float) -> Noise:
    return Noise(f"Student t3 x {scale}", lambda rng, n: scale * rng.standard_t(3, n))


def _bursts(spread: float) -> Noise:
    """A run with bursts of its own, by a factor of 1.5 to 3, in one step of 300."""

    def draw(rng: np.random.Generator, n: int) -> Array:
        values, burst = rng.normal(0, spread, n), rng.random(n) < 1 / 300
        return values + np.where(burst, np.log(rng.uniform(1.5, 3, n)), 0)

    return Noise(f"bursts over {spread}", draw)


def _drift(spread: float, pace: float) -> Noise:
    """A random walk under the noise."""
    return Noise(
        f"drift {pace} under {spread}",
        lambda rng, n: rng.normal(0, spread, n) + np.cumsum(rng.normal(0, pace, n)),
    )


NOISES: dict[str, Noise] = {
    noise.name: noise
    for noise in (
        *map(_normal, (0.05, 0.1, 0.2, 0.3, 0.45, 0.6)),
        _correlated(0.95, 0.2),
        _correlated(0.95, 0.6),
        _correlated(0.7, 0.3),
        _student(0.2),
        _student(0.3),
        _bursts(0.05),
        _bursts(0.1),
        _drift(0.1, 0.005),
        _drift(0.2, 0.01),
        Noise("bounds of normal 0.1", lambda rng, n: rng.normal(0, 0.1, n), bounds=True),
    )
}


@dataclass(frozen=True)
class Path:
    """What is added to a series from a place on, and the faults that are the beginnings of it."""

    heights: Array
    faults: dict[str, int]
    """Names, and the numbers of steps in which an alert tells of the fault."""


def _path_of_factor(factor: float, lengths: Sequence[int]) -> Path:
    """Faults of one factor share a path: the short one is the beginning of the long one."""
    return Path(np.full(max(lengths), math.log(factor)), {_spike_name(factor, length): length for length in lengths})


def _path_of_growth(doubling: int) -> Path:
    steps = 2 * doubling - 1  # the last one before a factor of 4
    return Path(np.arange(1, steps + 1) * math.log(2) / doubling, {f"growth, x2 in {doubling} steps": steps})


def _spike_name(factor: float, length: int) -> str:
    return f"x{factor:g}, {length} step{'s' if length > 1 else ''}"


@dataclass(frozen=True)
class SeriesPlan:
    """Which series are drawn, and which faults are put into them."""

    noises: tuple[str, ...] = tuple(NOISES)
    seeds: tuple[int, ...] = tuple(range(2000, 2010))
    """Nothing was tuned on these."""
    steps: int = 20_000
    places: int = 100
    """Places of a run at which every fault begins."""
    first_place: int = 2_000
    factors: tuple[float, ...] = (2, 3, 5, 10)
    lengths: tuple[int, ...] = (1, 5, 20)
    doublings: tuple[int, ...] = (5, 20, 50, 100, 200, 300)

    @classmethod
    def quick(cls) -> SeriesPlan:
        """Return a plan that takes seconds."""
        noises = ("normal 0.1", "bounds of normal 0.1")
        return cls(noises, (0, 1), steps=1500, places=5, first_place=500, doublings=(5, 50))

    def paths(self, noise: Noise) -> Iterator[Path]:
        """What is put into runs of a noise."""
        for factor in self.factors:
            yield _path_of_factor(factor, self.lengths)
        if not noise.bounds:
            for doubling in self.doublings:
                yield _path_of_growth(doubling)

    def begins(self) -> list[int]:
        """The steps at which faults begin."""
        longest = max(*self.lengths, *(2 * doubling for doubling in self.doublings))
        return [int(step) for step in np.linspace(self.first_place, self.steps - longest, self.places)]


@dataclass
class SeriesRun:
    """One run of a noise: what the rules told, and the scores of the opponents."""

    noise: str
    seed: int
    steps: int
    alarms: list[int]
    """Clean steps with an alert of the rules."""
    seconds: float
    """Time that the rules took for the clean steps."""
    scores: dict[str, Array]
    """Scores of the clean steps from WINDOW on, of each opponent."""
    told: dict[str, NDArray[np.bool_]]
    """For each fault, the places at which the rules told of it."""
    highest: dict[str, dict[str, Array]]
    """For each fault and each opponent, the highest score within the fault at each place."""


def z_scores(values: Array, windows: Array) -> Array:
    """How many standard deviations values are above the mean of the windows before them."""
    scores: Array = (values - windows.mean(-1)) / windows.std(-1, ddof=1)
    return scores


def mad_scores(values: Array, windows: Array) -> Array:
    """How many MADs, scaled to the standard deviation of a normal, values are above the median of their windows."""
    middle = _median(windows)
    return (values - middle) / (1.4826 * _median(np.abs(windows - middle[:, None])))


OPPONENTS: dict[str, Callable[[Array, Array], Array]] = {"z-score": z_scores, "MAD": mad_scores}


def _median(windows: Array) -> Array:
    n = windows.shape[-1]
    middle = ((n - 1) // 2, n // 2)
    parts: Array = np.partition(windows, middle, axis=-1)
    return (parts[:, middle[0]] + parts[:, middle[1]]) / 2


def opponents_scores(x: Array) -> dict[str, Array]:
    """Return the scores of all values from WINDOW on, for each row.

    Args:
        x: (..., n) series.

    Returns:
        for each opponent (..., n - WINDOW).
    """
    windows = np.lib.stride_tricks.sliding_window_view(x, WINDOW, axis=-1)[..., :-1, :]
    shape, values = windows.shape[:-1], x[..., WINDOW:].reshape(-1)
    scores = {name: np.empty(values.size) for name in OPPONENTS}
    places = np.indices(shape).reshape(len(shape), -1)
    for start in range(0, values.size, BATCH):
        part = slice(start, start + BATCH)
        batch = windows[tuple(places[:, part])]
        for name, score in OPPONENTS.items():
            scores[name][part] = score(values[part], batch)
    return {name: score.reshape(shape) for name, score in scores.items()}


def generator(noise: str, seed: int) -> np.random.Generator:
    """Return the random numbers of a run: those of two noises have nothing to do with each other."""
    return np.random.default_rng([seed, zlib.crc32(noise.encode())])


def measure(name: str, seed: int, plan: SeriesPlan, detector: Callable[[], Detector] = Judge) -> SeriesRun:
    """Draw one run, judge it, and branch off with every fault at every place."""
    noise = NOISES[name]
    x = noise.draw(generator(name, seed), plan.steps)
    exact = np.arange(plan.steps) % EXACT_EVERY == 0 if noise.bounds else np.zeros(plan.steps, bool)
    if noise.bounds:
        x = x + np.where(exact, 0, math.log(BOUND))
    records = [_record(step, value, is_exact) for step, (value, is_exact) in enumerate(zip(x, exact, strict=True))]
    begins, judge = plan.begins(), detector()
    alarms, saved, seconds = [], [], 0.0
    for begin, end in zip([0, *begins], [*begins, plan.steps], strict=True):
        started = time.process_time()
        for record in records[begin:end]:
            if judge.judge(record):
                alarms.append(record.step)
        seconds += time.process_time() - started
        saved.append(pickle.dumps(judge))  # to load it is ten times as fast as a deep copy
    told: dict[str, NDArray[np.bool_]] = {}
    highest: dict[str, dict[str, Array]] = {}
    for path in plan.paths(noise):
        first = np.array([_first(pickle.loads(s), x, exact, t, path) for s, t in zip(saved[:-1], begins, strict=True)])
        scores = opponents_scores(
            np.stack([np.r_[x[t - WINDOW : t], x[t : t + len(path.heights)] + path.heights] for t in begins])
        )
        for fault, length in path.faults.items():
            told[fault] = first < length
            highest[fault] = {opponent: score[:, :length].max(1) for opponent, score in scores.items()}
    return SeriesRun(name, seed, plan.steps, alarms, seconds, opponents_scores(x), told, highest)


def _record(step: int, value: float, exact: bool) -> StepRecord:
    D = math.exp(value)
    return StepRecord(
        step=step,
        time=float(step),
        learning_rate=1.0,
        diameter=D if exact else None,
        diameter_lower=D,
        nonfinite_rows=0,
        scheduled=True,
    )


def _first(judge: Detector, x: Array, exact: NDArray[np.bool_], begin: int, path: Path) -> int:
    """Steps from the begin of a fault to the first alert; the length of the path if there is none."""
    for since, height in enumerate(path.heights):
        step = begin + since
        if judge.judge(_record(step, x[step] + height, bool(exact[step]))):
            return since
    return len(path.heights)


def run(
    plan: SeriesPlan, *, workers: int, after_each: Callable[[SeriesRun], Any] = lambda one: None
) -> list[SeriesRun]:
    """Measure all runs, in so many processes."""
    jobs = [(noise, seed) for seed in plan.seeds for noise in plan.noises]
    if workers == 1:
        runs = []
        for noise, seed in jobs:
            runs.append(measure(noise, seed, plan))
            after_each(runs[-1])
        return runs
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(measure, noise, seed, plan) for noise, seed in jobs]
        for future in as_completed(futures):
            after_each(future.result())
        return [future.result() for future in futures]

"""Blow-up rules on synthetic series with known faults, against z-score and MAD at equal false alarms.

A series is the logarithm of D(S) over the learning rate in a run of 20,000 steps at a constant rate. Each noise has
four such runs. The rules judge every step through their usual entry,
`Judge.judge`, and their alerts in these clean runs are false alarms. At 30 places of each run, from step 2,000 on,
copies of the judge go on with a fault in the series:

- a factor of 2, 3, 5 or 10 for 1, 5 or 20 steps. It counts as told if an alert comes within these steps.
- growth with a doubling every 5 to 300 steps. It counts as told if an alert comes before a factor of 4 is reached.

Three tables follow from this: the faults above, one accident after 400 to 900 clean steps of 80 runs, and the false
notices of all series of a run together (D(S), two series of the panel, twelve layers) in 15 runs of 20,000 clean steps.
Baselines are in the first two. False pages are counted in all clean steps.

Constants were chosen on seeds below 10,000. A first run on clean seeds 13,000 to 13,014 had 1.07 false notices in
10,000 steps over Student t3 x 0.3. The shares of layers and panel were made smaller for that, and the clean seeds are
new since.

The baselines compare a value with the last 200: their mean and standard deviation (z-score), or their median and MAD
(median absolute deviation). For each noise, their thresholds give them as many false alarms on the same clean runs as
the rules had. Alarms within five steps of each other are one, for all three. A baseline tells of a fault if its highest
score within the fault is above its threshold. A cell (noise, fault) is lost if a baseline tells of more faults than the
rules, by more than two standard errors.
"""

from __future__ import annotations

import math
import pickle
import time
import zlib
from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hilbert_monitor.runs.alerts import Judge, LayerJudge
from hilbert_monitor.runs.record import Alert, Layer, LayerRecord, StepRecord

from .measure import Result, in_processes

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]
WINDOW, BATCH = 200, 5_000
"""Values that the baselines compare with, and windows whose scores are computed at once: 8 MB."""
BOUND, EXACT_EVERY = 0.9, 10
"""In the series of bounds: a lower bound over its exact value, and steps from one exact value to the next."""
APART = 5
"""Alarms at most so many steps apart are one."""
DIAL, CONFIDENCE = 1.0, 0.99
"""False alarms in 10,000 steps that the rules are allowed, and how sure we are if we say that there are more."""
ALIKE: dict[str, Any] = {"learning_rate": 1.0, "nonfinite_rows": 0, "scheduled": True}
"""What all records have."""
TOLD, LOST = "shares told, summed", "lost cells, share told"
FACTORS, LENGTHS = (2, 3, 5, 10), (1, 5, 20)


# Series


def _normal(spread: float, rng: np.random.Generator, n: int) -> Array:
    return rng.normal(0, spread, n)


def _correlated(rho: float, spread: float, rng: np.random.Generator, n: int) -> Array:
    values, value = np.empty(n), rng.normal(0, spread)
    for i, shock in enumerate(rng.normal(0, spread * math.sqrt(1 - rho**2), n)):
        values[i] = value = rho * value + shock
    return values


def _student(scale: float, rng: np.random.Generator, n: int) -> Array:
    return scale * rng.standard_t(3, n)


def _bursts(spread: float, rng: np.random.Generator, n: int) -> Array:
    """A run with bursts of its own, by a factor of 1.5 to 3, in one step of 300."""
    values, burst = rng.normal(0, spread, n), rng.random(n) < 1 / 300
    return values + np.where(burst, np.log(rng.uniform(1.5, 3, n)), 0)


def _drift(pace: float, spread: float, rng: np.random.Generator, n: int) -> Array:
    """A random walk under the noise."""
    return rng.normal(0, spread, n) + np.cumsum(rng.normal(0, pace, n))


BOUNDS = "bounds of normal 0.1"
"""A noise of which most steps have a lower bound only. Growth is not tried there."""
NOISES: dict[str, Callable[[np.random.Generator, int], Array]] = {
    **{f"normal {spread}": partial(_normal, spread) for spread in (0.05, 0.1, 0.2, 0.3, 0.45, 0.6)},
    **{f"AR(0.95) {spread}": partial(_correlated, 0.95, spread) for spread in (0.2, 0.6)},
    "AR(0.7) 0.3": partial(_correlated, 0.7, 0.3),
    **{f"Student t3 x {scale}": partial(_student, scale) for scale in (0.2, 0.3)},
    **{f"bursts over {spread}": partial(_bursts, spread) for spread in (0.05, 0.1)},
    **{f"drift {pace} under {spread}": partial(_drift, pace, spread) for pace, spread in ((0.005, 0.1), (0.01, 0.2))},
    BOUNDS: partial(_normal, 0.1),
}
"""Kinds of runs without a fault: each draws the logarithms of so many exact values."""


@dataclass(frozen=True)
class Plan:
    """Which series are drawn, and where faults are put into them."""

    noises: tuple[str, ...] = tuple(NOISES)
    seeds: tuple[int, ...] = tuple(range(12_000, 12_004))
    steps: int = 20_000
    places: int = 30
    first_place: int = 2_000
    doublings: tuple[int, ...] = (5, 20, 50, 100, 200, 300)
    clean_seeds: tuple[int, ...] = tuple(range(43_000, 43_015))
    short_seeds: tuple[int, ...] = tuple(range(17_000, 17_080))

    def begins(self) -> list[int]:
        """The steps at which faults begin."""
        longest = max(*LENGTHS, *(2 * doubling for doubling in self.doublings))
        return [int(step) for step in np.linspace(self.first_place, self.steps - longest, self.places)]

    def paths(self, noise: str) -> Iterator[tuple[Array, dict[str, int]]]:
        """What is added to a series from a place on, and the faults that are beginnings of it, with their lengths."""
        for factor in FACTORS:
            names = {f"x{factor}, {length} step{'s' if length > 1 else ''}": length for length in LENGTHS}
            yield np.full(max(LENGTHS), math.log(factor)), names
        for doubling in () if noise == BOUNDS else self.doublings:
            length = 2 * doubling - 1  # the last step before a factor of 4
            yield np.arange(1, length + 1) * math.log(2) / doubling, {f"growth, x2 in {doubling} steps": length}


QUICK = Plan(
    ("normal 0.1", BOUNDS),
    (0, 1),
    steps=1500,
    places=5,
    first_place=500,
    doublings=(5, 50),
    clean_seeds=(2, 3),
    short_seeds=tuple(range(4, 9)),
)


def series(noise: str, seed: int, steps: int) -> tuple[Array, Flags]:
    """Return a clean series, and which of its values are exact ones among bounds."""
    x = NOISES[noise](np.random.default_rng([seed, zlib.crc32(noise.encode())]), steps)
    if noise != BOUNDS:
        return x, np.zeros(steps, bool)
    exact = np.arange(steps) % EXACT_EVERY == 0
    return x + np.where(exact, 0, math.log(BOUND)), exact


# One run


@dataclass
class SeriesRun:
    """One run of a noise: what the rules told, and the scores of the baselines.

    Alarms are clean steps with an alert of the rules, and seconds the processor time that these steps took them. Scores
    are those of the clean steps from WINDOW on. For each fault, told are the places at which the rules told of it, and
    highest is the highest score of each baseline within the fault at each place.
    """

    noise: str
    steps: int
    alarms: list[int]
    false_pages: int
    seconds: float
    scores: dict[str, Array]
    told: dict[str, Flags]
    highest: dict[str, dict[str, Array]]


def measure(noise: str, seed: int, plan: Plan, detector: Callable[[], Judge] = Judge) -> SeriesRun:
    """Draw one run, judge it, and branch off with every fault at every place."""
    x, exact = series(noise, seed, plan.steps)
    records = [_record(step, value, is_exact) for step, (value, is_exact) in enumerate(zip(x, exact, strict=True))]
    begins, judge = plan.begins(), detector()
    one = SeriesRun(noise, plan.steps, [], 0, 0.0, baseline_scores(x), {}, {})
    saved = []
    for begin, end in zip([0, *begins], [*begins, plan.steps], strict=True):
        started = time.process_time()
        for record in records[begin:end]:
            alerts = judge.judge(record)
            one.alarms += [record.step] if alerts else []
            one.false_pages += _pages(alerts)
        one.seconds += time.process_time() - started
        saved.append(pickle.dumps(judge))  # to load it is ten times as fast as a deep copy
    for heights, faults in plan.paths(noise):
        first = np.array([_first(pickle.loads(s), x, exact, t, heights) for s, t in zip(saved, begins, strict=False)])
        faulty = [np.r_[x[t - WINDOW : t], x[t : t + len(heights)] + heights] for t in begins]
        scores = baseline_scores(np.stack(faulty))
        for fault, length in faults.items():
            one.told[fault] = first < length
            one.highest[fault] = {name: score[:, :length].max(1) for name, score in scores.items()}
    return one


def _record(step: int, value: float, exact: bool, **more: Any) -> StepRecord:
    D = math.exp(value)
    return StepRecord(step=step, time=float(step), diameter=D if exact else None, diameter_lower=D, **ALIKE, **more)


def _first(judge: Judge, x: Array, exact: Flags, begin: int, heights: Array) -> int:
    """Steps from the begin of a fault to the first alert; the length of the fault if there is none."""
    for since, height in enumerate(heights):
        step = begin + since
        if judge.judge(_record(step, x[step] + height, bool(exact[step]))):
            return since
    return len(heights)


# Short runs, and clean runs of all series


@dataclass
class ShortRun:
    """One run of 400 to 900 clean steps and an accident: like a SeriesRun, with what was paged, of single steps."""

    noise: str
    steps: int
    alarms: list[int]
    false_pages: int
    scores: dict[str, Array]
    told: dict[str, bool]
    paged: dict[str, bool]
    highest: dict[str, dict[str, float]]


def measure_short(noise: str, seed: int) -> ShortRun:
    """Draw a short run, judge it, and try each factor in its last step."""
    steps = int(np.random.default_rng(seed).integers(400, 900))
    x, exact = series(noise, seed, steps + 1)
    judge, one = Judge(), ShortRun(noise, steps, [], 0, baseline_scores(x[:steps]), {}, {}, {})
    for step in range(steps):
        alerts = judge.judge(_record(step, x[step], bool(exact[step])))
        one.alarms += [step] if alerts else []
        one.false_pages += _pages(alerts)
    saved = pickle.dumps(judge)
    for factor in FACTORS:
        fault, value = f"x{factor}, 1 step", x[steps] + math.log(factor)
        alerts = pickle.loads(saved).judge(_record(steps, value, bool(exact[steps])))
        one.told[fault], one.paged[fault] = bool(alerts), bool(_pages(alerts))
        scores = baseline_scores(np.r_[x[steps - WINDOW : steps], value][None])
        one.highest[fault] = {name: float(score[0, 0]) for name, score in scores.items()}
    return one


def measure_clean(noise: str, seed: int, steps: int) -> tuple[str, int, list[int], int]:
    """Judge a clean run of all series; return its noise, its steps, the steps with an alert and the false pages.

    The panel is measured every 100 steps, twelve layers every 10, each with a noise of its own.
    """
    x, exact = series(noise, seed, steps)
    draw = np.random.default_rng([seed, 7, zlib.crc32(noise.encode())])
    panel, logits = (np.exp(NOISES[noise](draw, steps // 100 + 1)) for _ in range(2))
    layers = np.exp(np.stack([NOISES[noise](draw, steps // 10 + 1) for _ in range(12)], 1))
    judge, layer_judge, alarms, pages = Judge(), LayerJudge(), list[int](), 0
    for step in range(steps):
        at, more = step // 100, {}
        if step % 100 == 0:
            more = {"perturbation_rms": panel[at], "precision_loss_rms": logits[at]}
        alerts = judge.judge(_record(step, x[step], bool(exact[step]), **more))
        if step % 10 == 0:
            found = enumerate(layers[step // 10])
            named = {str(i): Layer(kind="matrix", step=size, weight=1.0, lr=1.0) for i, size in found}
            alerts += layer_judge.judge(LayerRecord(step=step, time=float(step), layers=named))
        alarms += [step] if alerts else []
        pages += _pages(alerts)
    return noise, steps, alarms, pages


def _pages(alerts: Sequence[Alert]) -> int:
    return sum(alert.severity == "page" for alert in alerts)


# Baselines


def _z_scores(values: Array, windows: Array) -> Array:
    """How many standard deviations values are above the mean of the windows before them."""
    scores: Array = (values - windows.mean(-1)) / windows.std(-1, ddof=1)
    return scores


def _mad_scores(values: Array, windows: Array) -> Array:
    """How many MADs, scaled to the standard deviation of a normal, values are above the median of their windows."""
    middle: Array = np.median(windows, -1)
    scores: Array = (values - middle) / (1.4826 * np.median(np.abs(windows - middle[:, None]), -1))
    return scores


BASELINES: dict[str, Callable[[Array, Array], Array]] = {"z-score": _z_scores, "MAD": _mad_scores}


def baseline_scores(x: Array) -> dict[str, Array]:
    """Return for each baseline the scores (..., n - WINDOW) of all values of series (..., n) from WINDOW on."""
    windows = np.lib.stride_tricks.sliding_window_view(x, WINDOW, axis=-1)[..., :-1, :]
    shape, values = windows.shape[:-1], x[..., WINDOW:].reshape(-1)
    scores = {name: np.empty(values.size) for name in BASELINES}
    places = np.indices(shape).reshape(len(shape), -1)
    for start in range(0, values.size, BATCH):
        part = slice(start, start + BATCH)
        batch = windows[tuple(places[:, part])]
        for name, score in BASELINES.items():
            scores[name][part] = score(values[part], batch)
    return {name: score.reshape(shape) for name, score in scores.items()}


def count_alarms(steps: Iterable[int]) -> int:
    """Count alarms at sorted steps of a run; those at most APART steps apart are one."""
    steps = list(steps)
    return bool(steps) + sum(after - before > APART for before, after in pairwise(steps))


def threshold(runs: Sequence[Array], alarms: int) -> float:
    """Return the lowest threshold with which the scores of clean runs give at most so many alarms.

    It goes down from the highest score, until there is one alarm too many.
    """
    scores = np.concatenate(runs)
    steps = np.concatenate([np.arange(len(one)) + i * (len(one) + APART + 1) for i, one in enumerate(runs)])
    above: list[int] = []
    for i in np.argsort(-scores):
        if count_alarms(above) > alarms:  # the score itself is not above the threshold that it would be
            break
        limit = float(scores[i])
        insort(above, int(steps[i]))
    return limit


# Comparison


@dataclass(frozen=True)
class Cell:
    """One fault in one noise: the shares told, and how far we are behind the better baseline in standard errors."""

    fault: str
    ours: float
    baselines: dict[str, float]
    behind: float


def cell(fault: str, ours: Flags, others: dict[str, Flags], threshold_errors: dict[str, float]) -> Cell:
    """Compare who told of a fault, place by place; `threshold_errors` are errors of the baselines' shares.

    Their thresholds are known from a number n of false alarms only. So the error is half of what lies between the
    thresholds for n - sqrt(n) and n + sqrt(n).
    """
    shares = {name: float(told.mean()) for name, told in others.items()}
    best = max(shares, key=lambda name: shares[name])
    difference, places = others[best].astype(float) - ours, len(ours)
    paired = max(float(difference.std(ddof=1)) / math.sqrt(places), 1 / places)  # as if one place differed
    behind = float(difference.mean()) / math.hypot(paired, threshold_errors[best])
    return Cell(fault, float(ours.mean()), shares, behind)


def compare(runs: Sequence[SeriesRun | ShortRun]) -> tuple[int, dict[str, float], list[Cell]]:
    """Return the false alarms in all runs of a noise, the thresholds of the baselines for as many, and the cells.

    Alarms of short runs count from WINDOW on, where the baselines begin.
    """
    alarms = sum(count_alarms(s for s in r.alarms if s >= WINDOW or isinstance(r, SeriesRun)) for r in runs)
    scores = {name: [one.scores[name] for one in runs] for name in BASELINES}
    limits, strict, lenient = (
        {name: threshold(scores[name], round(number)) for name in BASELINES}
        for number in (alarms, max(alarms - math.sqrt(alarms), 0), alarms + max(math.sqrt(alarms), 1))
    )
    cells = []
    for fault in runs[0].told:
        ours = np.concatenate([np.atleast_1d(one.told[fault]) for one in runs])
        highest = {
            name: np.concatenate([np.atleast_1d(one.highest[fault][name]) for one in runs]) for name in BASELINES
        }
        others = {name: highest[name] > limits[name] for name in BASELINES}
        unsure = {name: (score > lenient[name]) & (score <= strict[name]) for name, score in highest.items()}
        errors = {name: float(places.mean()) / 2 for name, places in unsure.items()}
        cells.append(cell(fault, ours, others, errors))
    return alarms, limits, cells


def poisson_tail(count: int, mean: float) -> float:
    """Return the probability of at least so many events where so many are the mean."""
    return 1 - sum(math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) for k in range(count))


def run(*, quick: bool) -> list[Result]:
    """Measure all series, print the shares of all cells, and return sums of them, false alarms and lost cells."""
    plan = QUICK if quick else Plan()
    jobs = [(noise, seed, plan) for seed in plan.seeds for noise in plan.noises]
    runs = in_processes(measure, jobs, workers=1 if quick else None, after_each=lambda r: print("judged", r.noise))
    judgement = sum(one.seconds for one in runs) / sum(one.steps for one in runs)
    print(f"A judgement took {judgement * 1e6:.1f} microseconds. Percentages told, ours / z-score / MAD:")
    results = [r for noise in plan.noises for r in _results(noise, [one for one in runs if one.noise == noise])]
    short_jobs = [(noise, seed) for noise in plan.noises for seed in plan.short_seeds]
    shorts = in_processes(measure_short, short_jobs, workers=1 if quick else None)
    print("After 400 to 900 steps, percentages told, ours / z-score / MAD:")
    for noise in plan.noises:
        results += _results(f"{noise}, short", [one for one in shorts if one.noise == noise])
    for subject, name in dict.fromkeys((r.subject, r.baseline) for r in results if r.subject != LOST):
        rows = [r for r in results if (r.subject, r.baseline) == (subject, name)]
        ours, theirs = sum(r.ours for r in rows), sum(r.baseline_value for r in rows)
        results.append(Result(subject, "all noises", ours, name, theirs, "", more_is_better=subject == TOLD))
    print(sum(r.subject == LOST for r in results), "cells are lost")
    clean_jobs = [(noise, seed, plan.steps) for noise in plan.noises for seed in plan.clean_seeds]
    clean = in_processes(measure_clean, clean_jobs, workers=1 if quick else None)
    for noise in plan.noises:
        own = [one for one in clean if one[0] == noise]
        alarms, steps = sum(count_alarms(steps) for _, _, steps, _ in own), sum(one[1] for one in own)
        results.append(Result("false notices of all series", noise, alarms, "the dial", steps / 1e4 * DIAL, ""))
    judged: list[SeriesRun | ShortRun] = [*runs, *shorts]
    pages = [(one.noise, one.steps, one.false_pages) for one in judged]
    pages += [(noise, steps, false) for noise, steps, _, false in clean]
    steps, count = sum(p[1] for p in pages), sum(p[2] for p in pages)
    note = ", ".join(noise for noise, _, false in pages if false)
    results.append(Result("false pages", f"{steps:,} steps", count, "one in a million", steps / 1e6, "", note))
    return results


def _results(noise: str, runs: Sequence[SeriesRun | ShortRun]) -> Iterator[Result]:
    """Compare on one noise, and print its cells."""
    alarms, limits, cells = compare(runs)
    texts = ["/".join(f"{100 * share:.0f}" for share in (c.ours, *c.baselines.values())) for c in cells]
    print(f"{noise}:", "; ".join(f"{c.fault} {text}" for c, text in zip(cells, texts, strict=True)))
    for name, limit in limits.items():
        ours, theirs = sum(c.ours for c in cells), sum(c.baselines[name] for c in cells)
        yield Result(TOLD, noise, ours, name, theirs, "", f"of {len(cells)}; threshold {limit:.3g}", True)
    allowed = sum(one.steps for one in runs) / 1e4 * DIAL
    note = "above the dial" if poisson_tail(alarms, allowed) < 1 - CONFIDENCE else ""
    yield Result("false alarms in clean series", noise, alarms, "the dial", allowed, "", note)
    for c in cells:
        if c.behind > 2:
            name, share = max(c.baselines.items(), key=lambda item: item[1])
            yield Result(LOST, f"{noise}: {c.fault}", c.ours, name, share, "", f"{c.behind:.1f} standard errors", True)

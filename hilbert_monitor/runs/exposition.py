"""Prometheus samples of runs, from their records: served by the run's own process, or by the service from its log.

A gauge shows only the last step before a scrape. What must not be lost between two scrapes is counted as well:
blow-ups, steps that were not finite or were held back, and every row diameter, in a histogram.
"""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal

from prometheus_client import CollectorRegistry as CollectorRegistry
from prometheus_client import core
from prometheus_client.exposition import choose_encoder as choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from .alerts import SEVERITIES
from .process_bound import ProcessBound
from .reader import RECENT_STEPS, STALLED_AFTER, STATUSES, stall_limit
from .record import METRICS, Alert, RunInfo, StepRecord, measured


@dataclass(frozen=True, slots=True)
class Family:
    """A family of samples in Prometheus. Its labels come besides `run` and `head`."""

    name: str
    kind: Literal["gauge", "counter", "histogram", "info"]
    help: str
    labels: tuple[str, ...] = ()

    @property
    def exported(self) -> str:
        """Name in Prometheus."""
        return f"hilbert_{self.name}" + {"counter": "_total", "info": "_info"}.get(self.kind, "")


RULE = ("kind", "severity")
# fmt: off
FAMILIES = (
    Family("run", "info", "What the run is, in labels: its name, model, seed, validation panel, host and versions."),
    Family("run_status", "gauge", "1 for the state that the run is in, 0 for the others.", ("status",)),
    Family("run_start_timestamp_seconds", "gauge", "When the present attempt at the run began, since the epoch."),
    Family("heartbeat_timestamp_seconds", "gauge", "When training last made a step or validated, since the epoch."),
    Family("stalled_after_seconds", "gauge", "Age of the heartbeat from which on the run counts as stalled."),
    Family("step", "gauge", "Number of the last optimizer step."),
    Family("steps", "counter", "Optimizer steps that were recorded."),
    *(Family(metric.name, "counter", metric.help) for metric in METRICS if metric.counted),
    Family("step_diameter_distribution", "histogram",
        "Row diameters D(S) of all steps: exact where that was computed, else the certified lower bound."),
    Family("blowups", "counter",
        "Blow-ups: steps that broke one of the monitor's rules, by the rule's kind and its severity, page or notice.",
        RULE),
    Family("blowup_value", "gauge", "Value measured at the last blow-up of each kind and severity.", RULE),
    Family("blowup_expected", "gauge",
        "Usual value before the last blow-up of each kind and severity, at its learning rate; the ceiling for kind"
        " ceiling, the expected learning rate for kind rate, 0 for kind nonfinite.", RULE),
    Family("blowup_step", "gauge", "Step of the last blow-up of each kind and severity.", RULE),
    Family("nonfinite_increments", "counter", "Steps whose increment of the LM head held a nan or an infinity."),
    Family("skipped_steps", "counter", "Steps at which the optimizer moved nothing."),
    Family("clipped_steps", "counter", "Steps of which a TrustRegion held something back."),
    Family("monitor_seconds", "counter", "Seconds that the monitor's measurements took, by part.", ("part",)),
    Family("monitor_failures", "counter",
        "Failures of the monitor, by the part that raised an exception or the sink that dropped records.", ("sink",)),
)
# fmt: on

_ENDS = (
    10 ** (n / parts)
    for first, last, parts in ((-6, -5, 4), (-5, 0, 12), (0, 2, 4))
    for n in range(first * parts, last * parts)
)
BUCKETS = (*(float(f"{end:.3e}") for end in _ENDS), 100.0, math.inf)
"""Upper ends of the histogram's buckets: twelve to a decade from 1e-5 to 1, where the steps of runs are, each 1.21
times the one before; four to a decade elsewhere, from 1e-6 to 100."""


@dataclass(kw_only=True)
class Samples:
    """The state of one run, as Prometheus samples are made of it."""

    info: RunInfo
    status: str = "running"
    heartbeat: float = 0.0
    """Time of the last step or validation, in seconds since the epoch."""
    stalled_after: float = STALLED_AFTER
    step: int | None = None
    steps: int = 0
    skipped: int = 0
    nonfinite: int = 0
    clipped: int = 0
    latest: dict[str, float] = field(default_factory=dict)
    """The last number of each metric, by its name."""
    seconds: Counter[str] = field(default_factory=Counter)
    buckets: list[int] = field(default_factory=lambda: [0] * len(BUCKETS))
    """Number of diameters in each bucket, not cumulative."""
    total: float = 0.0
    """Sum of the diameters."""
    alerts: dict[tuple[str, str], Alert] = field(default_factory=dict)
    """The last blow-up of each kind and severity."""
    blowups: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)


class RunSamples(ProcessBound):
    """Collects the samples of a run while it is trained: a sink of its records and alerts, safe between threads.

    `failures` returns how often each part or sink has failed. `stalled_after` is the number of seconds without a
    heartbeat after which the run counts as stalled; slow steps get more.
    """

    def __init__(
        self,
        info: Callable[[], RunInfo],
        *,
        failures: Callable[[], Mapping[str, int]] = dict,
        stalled_after: float = STALLED_AFTER,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._info, self._failures, self._clock, self._lock = info, failures, clock, threading.Lock()
        self._samples = Samples(info=info(), heartbeat=clock(), stalled_after=stalled_after)
        self._times, self._measured_at = deque[float](maxlen=RECENT_STEPS), dict[str, int]()
        self.bind_to_process()

    def write(self, record: StepRecord | Alert) -> None:
        """Take a record or an alert. A second record of a step replaces its values and is not counted again."""
        if self.inherited:
            return
        with self._lock:
            if isinstance(record, Alert):
                key = record.kind, record.severity
                self._samples.blowups[key] += 1
                if record.step >= self._samples.alerts.get(key, record).step:  # an alert may be late
                    self._samples.alerts[key] = record
            else:
                self._take(record)

    def alive(self) -> None:
        """Note that training is busy although it makes no step."""
        self._samples.heartbeat = self._clock()

    def end(self, status: str) -> None:
        """Note how the run ended."""
        self._samples.status = status
        self.alive()

    def samples(self) -> Samples:
        """Return a copy of the present state."""
        with self._lock:
            samples = copy(self._samples)
            for name in ("latest", "seconds", "buckets", "alerts", "blowups"):
                setattr(samples, name, copy(getattr(samples, name)))
            samples.stalled_after = stall_limit(tuple(self._times), self._samples.stalled_after)
        samples.info, samples.failures = self._info(), Counter(self._failures())
        return samples

    def _take(self, record: StepRecord) -> None:
        samples = self._samples
        samples.heartbeat = self._clock()
        for metric, value in measured(record):
            if record.step >= self._measured_at.get(metric.name, record.step):  # a record may be late
                samples.latest[metric.name] = float(value)
                self._measured_at[metric.name] = record.step
        if samples.step is not None and record.step <= samples.step:
            return
        self._times.append(record.time)
        samples.step, samples.steps = record.step, samples.steps + 1
        samples.skipped += bool(record.skipped)
        samples.nonfinite += bool(record.nonfinite_rows)
        samples.clipped += bool(record.held_share)
        samples.seconds.update(record.seconds)
        diameter = record.diameter if record.diameter is not None else record.diameter_lower
        if diameter is not None and math.isfinite(diameter):
            samples.buckets[bisect_left(BUCKETS, diameter)] += 1
            samples.total += diameter


class Exposition(Collector):
    """A Prometheus collector. It does not register itself. `runs` returns the samples of the present runs."""

    def __init__(self, runs: Callable[[], Iterable[Samples]]) -> None:
        self.runs = runs

    def describe(self) -> Iterator[core.Metric]:
        """Yield the families without samples."""
        yield from _families(()).values()

    def collect(self) -> Iterator[core.Metric]:
        """Yield the families with the samples of all runs."""
        yield from _families(self.runs()).values()


def _families(runs: Iterable[Samples]) -> dict[str, Any]:
    gauges = [Family(metric.exposed or metric.name, "gauge", metric.help) for metric in METRICS if not metric.counted]
    families = {}
    for family in (*FAMILIES, *gauges):
        labels = ["run", "head", *family.labels]
        make = getattr(core, f"{family.kind.title()}MetricFamily")
        families[family.name] = make(f"hilbert_{family.name}", family.help, labels=labels)
    for run in runs:
        who = (run.info.id, run.info.head_optimizer or "unknown")
        for name, labels, *sample in _samples(run):
            families[name].add_metric([*who, *labels], *sample)
    return families


def _samples(run: Samples) -> Iterator[tuple[Any, ...]]:
    """Yield the samples of a run: the name of a family, labels besides `run` and `head`, value."""
    yield "run", (), _about(run.info)
    counts = zip(map(floatToGoString, BUCKETS), map(float, accumulate(run.buckets)), strict=True)
    yield "step_diameter_distribution", (), list(counts), run.total
    for metric in METRICS:
        if metric.name in run.latest:
            yield metric.exposed or metric.name, (), run.latest[metric.name]
    for status in STATUSES:
        yield "run_status", (status,), float(run.status == status)
    yield "run_start_timestamp_seconds", (), run.info.started
    yield "heartbeat_timestamp_seconds", (), run.heartbeat
    yield "stalled_after_seconds", (), run.stalled_after
    if run.step is not None:
        yield "step", (), run.step
    yield "steps", (), run.steps
    yield "nonfinite_increments", (), run.nonfinite
    yield "skipped_steps", (), run.skipped
    yield "clipped_steps", (), run.clipped
    known = {(kind, severity) for kind, severities in SEVERITIES.items() for severity in severities}
    for key in {*known, *run.blowups}:  # from zero: a counter that appears with its first count has no increase
        yield "blowups", key, run.blowups[key]
    for key, alert in run.alerts.items():
        yield "blowup_value", key, alert.value
        yield "blowup_step", key, alert.step
        if alert.expected is not None:
            yield "blowup_expected", key, alert.expected
    for part, seconds in run.seconds.items():
        yield "monitor_seconds", (part,), seconds
    for sink, count in run.failures.items():
        yield "monitor_failures", (sink,), count


def _about(info: RunInfo) -> dict[str, str]:
    labels = {"name": info.name, "model": info.model, "seed": info.seed, "panel": info.panel_hash, "host": info.host}
    labels |= {"attempt": info.attempt, "ranks": info.world_size, "port": info.port}
    labels |= {"torch": info.versions.get("torch"), "version": info.versions.get("hilbert_monitor")}
    return {name: "" if value is None else str(value) for name, value in labels.items()}

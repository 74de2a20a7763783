"""What the service gives Prometheus: the addresses of runs that serve their own metrics, and the metrics of the others.

A run is in one of the two, never in both. A run whose process is gone is no target: it is exported from its log, so
that its end is seen although nobody ever scraped it. A log that is still being read is not exported: its counters would
grow as it is read, and rules would take that for steps.
"""

from __future__ import annotations

import ipaddress
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
import numpy as np

from hilbert_monitor.runs.exposition import BUCKETS, CollectorRegistry, Exposition, Samples, choose_encoder
from hilbert_monitor.runs.reader import LIVE, LOST_AFTER, RECENT_STEPS, STALLED_AFTER, stall_limit
from hilbert_monitor.runs.record import METRICS, RunInfo
from hilbert_monitor.runs.run import Run
from hilbert_monitor.runs.table import SECONDS, Floats, Table, present

RECENT, RECENT_TROUBLE = 600.0, 3600.0
"""Seconds for which a run that has ended is still exported, so that scrapes see how it ended. One that failed or was
killed is exported as long as rules tell of it: the service may have been away when it happened."""
LINGERING = 60.0
"""Seconds for which a run that has ended is still a target: its process waits for a last scrape."""


class PrometheusExport:
    """The metrics of live runs, and of those that ended just now.

    Args:
        runs: returns the present runs.
        everything: whether to export runs too that serve their own metrics, for a Prometheus that cannot reach them.
    """

    def __init__(self, runs: Callable[[], Iterable[Run]], *, everything: bool = False) -> None:
        self.runs, self.everything = runs, everything
        self._registry = CollectorRegistry()
        self._registry.register(Exposition(lambda: [samples(run) for run in self._exported()]))

    def metrics(self, accept: str) -> tuple[bytes, str]:
        """The metrics in the format that was asked for, and its content type."""
        encode, kind = choose_encoder(accept)
        return encode(self._registry), kind

    def targets(self) -> list[dict[str, Any]]:
        """The runs that serve their own metrics, in the format of Prometheus' http_sd."""
        return [
            {
                "targets": [_address(run.info)],
                "labels": {
                    "__scheme__": "https" if run.info.scheme == "https" else "http",
                    "__meta_hilbert_run": run.id,
                    "__meta_hilbert_head": run.info.head_optimizer,
                },
            }
            for run in self.runs()
            if self._is_target(run)
        ]

    def _exported(self) -> Iterator[Run]:
        """The runs that are exported from their logs. A copy of a run that is there too is no run of its own."""
        runs = list(self.runs())
        folders = {run.id for run in runs}
        for run in runs:
            seconds = RECENT_TROUBLE if run.status in ("failed", "killed") else RECENT
            is_copy = run.info.id != run.id and run.info.id in folders
            is_read = not run.problem and run.indexed == 1.0
            if is_read and not is_copy and not self._is_target(run) and _is_recent(run, seconds):
                yield run

    def _is_target(self, run: Run) -> bool:
        """Whether Prometheus scrapes the run itself."""
        if self.everything or run.problem or run.status == "killed" or not _address(run.info):
            return False
        return _is_recent(run, LINGERING)


def _is_recent(run: Run, seconds: float) -> bool:
    """Whether a run is live, or ended less than so many seconds ago. That it was killed may be noticed late."""
    if run.status in LIVE:
        return True
    late = max(LOST_AFTER, 4 * run.info.heartbeat) if run.status == "killed" else 0.0
    return abs(time.time() - run.state.ended) < seconds + late


def samples(run: Run) -> Samples:
    """The samples of a run, from its log."""
    table = run.table
    latest = {metric.name: table.last(metric.field) for metric in METRICS}
    diameters = _diameters(table)
    places = np.searchsorted(BUCKETS, diameters)
    return Samples(
        info=msgspec.structs.replace(run.info, id=run.id),  # of the folder, as everywhere in the service
        status=run.status,
        heartbeat=run.heartbeat,
        stalled_after=stalled_after(run),
        step=run.state.step,
        steps=len(table),
        skipped=_count(table, "skipped"),
        nonfinite=_count(table, "nonfinite_rows"),
        clipped=_count(table, "held_share"),
        latest={name: value for name, value in latest.items() if value is not None},
        seconds=Counter({name: _sum(values) for name, values in _parts(table)}),
        buckets=np.bincount(places, minlength=len(BUCKETS)).tolist(),
        total=float(diameters.sum()),
        alerts={(alert.kind, alert.severity): alert for alert in run.alerts},
        blowups=Counter((alert.kind, alert.severity) for alert in run.alerts),
    )


def stalled_after(run: Run) -> float:
    """Seconds without a step after which a run counts as stalled."""
    first = int(np.searchsorted(run.table.steps, run.info.first_step, "right"))  # of the present attempt
    times = run.table.column("time")[max(first, len(run.table) - RECENT_STEPS) :]
    return stall_limit(times.tolist(), STALLED_AFTER if run.info.stalled_after is None else run.info.stalled_after)


def _diameters(table: Table) -> Floats:
    """The exact diameter of every step, or its lower bound where that was not computed."""
    exact, lower = table.column("diameter"), table.column("diameter_lower")
    diameters = np.where(present(exact), exact, lower)
    return diameters[np.isfinite(diameters)]


def _count(table: Table, name: str) -> int:
    values = table.columns.get(name)
    return 0 if values is None else int(np.count_nonzero(present(values) & (values != 0)))


def _parts(table: Table) -> Iterator[tuple[str, Floats]]:
    for name, values in table.columns.items():
        if name.startswith(SECONDS):
            yield name.removeprefix(SECONDS), values


def _sum(values: Floats) -> float:
    return float(values[present(values)].sum())


def _address(info: RunInfo) -> str:
    """The address at which a run serves its metrics; empty if it serves none, or only to another machine than this."""
    if info.port is None:
        return ""
    loopback = _loopback(info.address)
    if not loopback:
        return f"{info.host}:{info.port}"
    return f"{loopback}:{info.port}" if info.host == socket.gethostname() else ""


def _loopback(address: str) -> str:
    """An address that only its own machine reaches, as in a URL; empty for any other."""
    try:
        number = ipaddress.ip_address(address)
    except ValueError:
        return "127.0.0.1" if address in ("", "localhost") else ""
    return "" if not number.is_loopback else f"[{number}]" if number.version == 6 else str(number)

"""Is the service quick with many long runs? Each figure stands beside a limit that it should keep, or an opponent.

The service is the real one: `hilbert-monitor serve` in its own process, asked over loopback. The logs are in the
system's file cache, as they are for runs that were just written.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from hilbert_monitor.service.following.index import Index

from . import service_opponents as opponents
from .measure import BenchResult, seconds
from .service_client import TICK, Listener, Service, Usage, ask, fetch_comparison, listen, paint, visit
from .service_runs import RECORD_BYTES, SHORT_RUN_BYTES, ContinuedRun, make_runs, make_short_runs

MEMORY = 1 << 30
"""Limit of the service's memory in bytes."""
PAUSE = 0.05
"""Seconds between two records, where many are written in a row."""
OURS = "hilbert-monitor serve"


@dataclass(frozen=True)
class ServiceLoad:
    """How much work the service is given."""

    runs: int = 200
    records: int = 25_000
    """Records of each run."""
    refreshes: int = 20
    """Records that are written one at a time, each followed by a request."""
    listeners: int = 100
    """Browsers that are connected at once."""
    written: int = 50
    """Records that are written while the browsers listen."""
    opponent_runs: int = 5
    """Runs that are also given to TensorBoard."""
    folders: int = 10_000
    """Short runs of another folder."""
    short: int = 20
    """Records of each of these."""
    million: int = 1_000_000
    """Records of one long run in a folder of its own."""
    idle: float = 20.0
    """Seconds for which the service is left alone."""

    @classmethod
    def quick(cls) -> ServiceLoad:
        """Return a load that takes seconds."""
        few = cls(runs=4, records=300, refreshes=3, listeners=8, written=10, opponent_runs=2)
        return replace(few, folders=30, million=3000, idle=1.0)

    @property
    def bytes(self) -> int:
        """Room on the disk that the load takes at most."""
        long = (self.runs + 3 * self.opponent_runs) * self.records + self.million
        short = self.folders * (self.short * RECORD_BYTES + SHORT_RUN_BYTES)
        return long * RECORD_BYTES + short + (64 << 20)


@contextmanager
def prepare(load: ServiceLoad) -> Iterator[ServiceBench]:
    """Give a bench in a temporary folder, of which nothing is left afterwards.

    Raises:
        RuntimeError: if the disk has no room for it.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hilbert-monitor-bench-")))
        free = shutil.disk_usage(folder).free
        if free < load.bytes:
            raise RuntimeError(
                f"the runs of this bench need {load.bytes / 1e9:.1f} GB, and {folder.parent} has {free / 1e9:.1f} GB:"
                " make room there, or set TMPDIR to a folder with more"
            )
        yield ServiceBench(folder, load, stack)


class ServiceBench:
    """The jobs on the service. Each builds on the one before: run them in order, and each once.

    Args:
        folder: folder for all files.
        load: how much work.
        stack: gets the calls that end the processes which are started here.
    """

    def __init__(self, folder: Path, load: ServiceLoad, stack: ExitStack) -> None:
        self.load = load
        self.remarks: list[str] = []
        """A sentence for each figure that could not be measured."""
        self._folder, self._root, self._stack = folder, folder / "runs", stack
        self._many = f"{load.runs:,} runs of {load.records:,} records"
        self._panels = 0

    def jobs(self) -> list[tuple[str, Callable[[], Iterable[BenchResult]]]]:
        """Return the labels and the jobs."""
        return [
            (f"making {self._many}", self._make),
            ("first indexing", self._first_indexing),
            ("a later start", self._later_start),
            ("first paint in a browser", self._paint),
            ("a record more", self._refresh),
            ("many browsers", self._browsers),
            ("TensorBoard", self._opponents),
            (f"{self.load.folders:,} short runs", self._folders),
            (f"one run of {self.load.million:,} records", self._one_long_run),
        ]

    def _make(self) -> Iterator[BenchResult]:
        make_runs(self._root, self.load.runs, self.load.records)
        yield from ()

    def _serve(self, root: Path | None = None) -> Service:
        service = Service(root or self._root, self._folder / "service.log", self._folder / "cache")
        self._stack.callback(service.stop)
        return service

    def _caught_up(self, health: dict[str, Any]) -> bool:
        return bool(health["progress"] == 1 and health["runs"] == self.load.runs)

    # Starts

    def _first_indexing(self) -> Iterator[BenchResult]:
        service = self._serve()
        duration, usage = service.until(self._caught_up), service.usage()
        service.stop()
        speed = f"{self.load.runs * self.load.records / duration:,.0f} records/s"
        note = f"{speed}; {usage.processor:.1f} s of processor time" if usage else speed
        yield _limited("service start", f"first indexing of {self._many}", duration, 60, note)
        yield from self._memory("peak memory of the first indexing", usage)

    def _later_start(self) -> Iterator[BenchResult]:
        service = self._serve()
        yield _limited("service start", "first answer of a later start", service.until(), 2)
        duration = service.until(self._caught_up)
        yield _limited("service start", f"{self._many} there again, from the cache", duration, 10)
        first = visit(service.port)
        self._panels = sum(bool(figure["data"]) for figure in first.answer["figures"].values())
        counted = len(first.answer["counted"])
        note = (
            f"page and scripts {_ms(first.files)}, runs {_ms(first.runs)}, comparison of {counted} runs"
            f" {_ms(first.compare)}; {first.size / 2**20:.1f} MiB were sent"
        )
        yield _limited("first paint", "all that the page fetches, one after the other", first.seconds, 1, note)
        service.stop()

    def _paint(self) -> Iterator[BenchResult]:
        """Measure in a service that was just started, and has computed nothing yet."""
        service = self._serve()
        service.until(self._caught_up)
        loads = paint(service.port, self._panels)
        service.stop()
        if isinstance(loads, str):
            self.remarks.append(f"The first paint in Chromium was not measured: {loads}.")
            return
        compiling = "most of it plotly.js, 4.5 MB that a browser has to compile; until then there are sketches"
        for name, load, note in (("first", loads[0], compiling), ("third", loads[2], "its compiled code is kept")):
            yield _limited("first paint", f"the large figures in Chromium, {name} load", load.figures, 1)
            yield _limited("first paint", f"{self._panels} panels drawn in Chromium, {name} load", load.plots, 1, note)

    def _memory(self, case: str, usage: Usage | None) -> Iterator[BenchResult]:
        if usage is None:
            self.remarks.append(f"The {case} was not measured: that takes a /proc, as Linux has.")
        else:
            note = f"{usage.own / 2**20:.0f} MiB of it its own at the end, the rest files that are mapped"
            yield BenchResult("service memory", case, OURS, usage.peak, "limit", MEMORY, note, "B")

    # Runs that continue

    def _refresh(self) -> Iterator[BenchResult]:
        self._service, self._run = self._serve(), ContinuedRun(self._root, 0, self.load.records)
        self._stack.callback(self._run.close)
        self._service.until(self._caught_up)
        fetch_comparison(self._service.port)
        answers, events = asyncio.run(_refreshes(self._service, self._run, self.load.refreshes))
        case = f"comparison of {self.load.runs:,} runs, one with a new record"
        yield _limited("refresh", case, statistics.median(answers), 0.1, _spread(answers))
        yield _limited("refresh", "from a record's write to its event", statistics.median(events), 1, _spread(events))

    def _browsers(self) -> Iterator[BenchResult]:
        few, many = (
            asyncio.run(_listening_cost(self._service, self._run, count, self.load.written))
            for count in (1, self.load.listeners)
        )
        if few and many:
            case = f"{self.load.written} records written, {self.load.listeners} browsers connected: "
            note = f"each browser got each record once; the log grew by {many.growth / 2**10:.1f} KiB"
            yield BenchResult("browsers", f"{case}bytes read", OURS, many.read, "1 browser", few.read, note, "B")
            yield BenchResult("browsers", f"{case}processor time", OURS, many.processor, "1 browser", few.processor)
        else:
            self.remarks.append("What many browsers cost was not measured: that takes a /proc, as Linux has.")
        duration, usage = asyncio.run(_stop(self._service, self.load.listeners))
        yield _limited("browsers", f"from Ctrl-C to the end, {self.load.listeners} connected", duration, 1)
        yield from self._memory("peak memory of all this after a later start", usage)

    # Many folders, and a very long log

    def _folders(self) -> Iterator[BenchResult]:
        load, root = self.load, self._folder / "many"
        make_short_runs(root, load.folders, load.short)
        service = self._serve(root)
        duration = service.until(lambda health: health["progress"] == 1 and health["runs"] == load.folders)
        before = service.usage()
        case = f"first indexing of {load.folders:,} folders of {load.short} records"
        note = f"{before.processor:.1f} s of processor time" if before else ""
        yield _limited("service folders", case, duration, 30, note)
        whole, page = ask(service.port, "/api/runs"), ask(service.port, "/api/runs?limit=100")
        note = "answers of the list of runs"
        yield BenchResult(
            "service folders", "a page of 100 runs", OURS, len(page), "all of them", len(whole), note, "B"
        )
        time.sleep(load.idle / 4)
        before = service.usage()
        time.sleep(load.idle)
        after = service.usage()
        if before and after:
            used = max(after.processor - before.processor, TICK)
            case = f"processor time of {load.idle:.0f} s in which nothing happens"
            yield _limited("service folders", case, used, 0.02 * load.idle, f"{used / load.idle:.1%} of a core")
        run = ContinuedRun(root, 0, load.short)
        (written,) = run.write()
        seen = _moment_it_runs(service.port, run.id)
        yield _limited("service folders", "a finished run is continued: until it is seen", seen - written, 10)
        run.close()
        service.stop()
        yield from self._memory(f"peak memory with {load.folders:,} folders", after)

    def _one_long_run(self) -> Iterator[BenchResult]:
        root = self._folder / "long"
        make_runs(root, 1, self.load.million)
        service = self._serve(root)
        service.until(lambda health: health["progress"] == 1 and health["runs"] == 1)
        yield from self._memory(f"peak memory, one run of {self.load.million:,} records", service.usage())
        service.stop()

    # TensorBoard

    def _opponents(self) -> Iterator[BenchResult]:
        count, records = self.load.opponent_runs, self.load.records
        root, events = self._folder / "few", self._folder / "events"
        if not opponents.installed():
            self.remarks.append("TensorBoard is not installed: the time it takes to load runs was not measured.")
            return
        make_runs(root, count, records)
        ours = seconds(lambda: Index(root).refresh(), repeat=3)
        index = Index(root)
        index.refresh()
        table = next(iter(index.runs.values())).table
        scalars = opponents.write_events(table, events, count)
        server_seconds = opponents.ingest(events, records)
        theirs, loaded = opponents.accumulate(events)
        if loaded != scalars * count:
            raise RuntimeError(f"TensorBoard loaded {loaded} of {scalars * count} scalars")
        case = f"{count} runs of {records:,} records, {loaded:,} numbers"
        yield BenchResult("scalars of TensorBoard", case, "index", ours, "EventAccumulator", theirs)
        if server_seconds is not None:
            note = "TensorBoard's program in Rust, its start included"
            yield BenchResult("scalars of TensorBoard", case, "index", ours, "data server", server_seconds, note)


class ListeningCost(NamedTuple):
    """What the service used while browsers listened."""

    read: int
    """Bytes that it read."""
    processor: float
    """Seconds of processor time."""
    growth: int
    """Bytes that were added to the log meanwhile."""


async def _refreshes(service: Service, run: ContinuedRun, count: int) -> tuple[list[float], list[float]]:
    """Write records one by one. Return the seconds of each comparison after it, and from each write to its event."""
    answers, events, version = [], [], -1
    async with listen(service.port, 1) as (listener,):
        for _ in range(count):
            (moment,) = run.write()
            events.append(await asyncio.wait_for(listener.until(run.step), 60) - moment)
            duration, answer = fetch_comparison(service.port)
            if answer["version"] <= version:
                raise RuntimeError("the comparison does not have the record that was written last")
            version = answer["version"]
            answers.append(duration)
    return answers, events


async def _listening_cost(service: Service, run: ContinuedRun, count: int, records: int) -> ListeningCost | None:
    """Write records while so many listeners listen, and measure; each listener must get each record once."""
    async with listen(service.port, count) as listeners:
        before, size, first = service.usage(), run.size, run.step + 1
        ends = [asyncio.create_task(listener.until(run.step + records)) for listener in listeners]
        await asyncio.to_thread(run.write, records, pause=PAUSE)
        await asyncio.wait_for(asyncio.gather(*ends), 120)
        after = service.usage()
    _refuse_gaps(listeners, list(range(first, first + records)))
    if before is None or after is None:
        return None
    return ListeningCost(after.read - before.read, max(after.processor - before.processor, TICK), run.size - size)


def _refuse_gaps(listeners: list[Listener], steps: list[int]) -> None:
    wrong = sum(listener.steps != steps for listener in listeners)
    if wrong:
        raise RuntimeError(f"{wrong} of {len(listeners)} listeners did not get each record once and in order")


async def _stop(service: Service, count: int) -> tuple[float, Usage | None]:
    """Stop the service while so many listen. Return the seconds that takes, and what it used before."""
    async with listen(service.port, count):
        usage = service.usage()
        return await asyncio.to_thread(service.stop), usage


def _moment_it_runs(port: int, id: str, patience: float = 120.0) -> float:
    """When the service shows a run as running, in seconds since the epoch.

    Raises:
        RuntimeError: if it does not for so many seconds.
    """
    deadline = time.monotonic() + patience
    while (status := json.loads(ask(port, f"/api/runs/{id}"))["summary"]["status"]) != "running":
        if time.monotonic() > deadline:
            raise RuntimeError(f"the service shows run '{id}' as {status}, {patience:g} s after it was continued")
        time.sleep(0.01)
    return time.time()


def _limited(subject: str, case: str, amount: float, limit: float, note: str = "") -> BenchResult:
    return BenchResult(subject, case, OURS, amount, "limit", limit, note)


def _ms(amount: float) -> str:
    return f"{amount * 1e3:.0f} ms"


def _spread(times: list[float]) -> str:
    return f"median of {len(times)}; the worst {_ms(max(times))}"

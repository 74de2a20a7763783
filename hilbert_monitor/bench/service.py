"""Is the service quick with many long runs? Each figure beside the limit it has to keep, or an opponent.

The service is the real one: `hilbert-monitor serve` in a process of its own, asked over loopback. Logs are in the
system's file cache, as they are for runs that were just written.
"""

from __future__ import annotations

import asyncio
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hilbert_monitor.service.following.index import Index

from . import service_opponents as opponents
from .measure import Comparison, seconds
from .service_client import TICK, Listener, Service, Usage, compare, listeners, paint, visit
from .service_runs import RECORD_BYTES, GoingOn, make_runs

MEMORY = 1 << 30
PAUSE = 0.05
"""Seconds between two records, where many are written."""
OURS = "hilbert-monitor serve"


@dataclass(frozen=True)
class Sizes:
    """How much is tried."""

    runs: int = 200
    records: int = 25_000
    refreshes: int = 20
    """Records that are written one at a time, each asked for."""
    listeners: int = 100
    written: int = 50
    """Records that are written while these listen."""
    opponent_runs: int = 5

    @classmethod
    def quick(cls) -> Sizes:
        """Return ones that take seconds."""
        return cls(runs=4, records=300, refreshes=3, listeners=8, written=10, opponent_runs=2)

    @property
    def bytes(self) -> int:
        """Room on the disk, at most."""
        return (self.runs + 3 * self.opponent_runs) * self.records * RECORD_BYTES + (64 << 20)


@contextmanager
def prepared(sizes: Sizes) -> Iterator[Bench]:
    """A bench in a temporary folder, with nothing left of it afterwards. RuntimeError says that there is no room."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hilbert-monitor-bench-")))
        free = shutil.disk_usage(folder).free
        if free < sizes.bytes:
            raise RuntimeError(
                f"the runs of this bench need {sizes.bytes / 1e9:.1f} GB, and {folder.parent} has {free / 1e9:.1f} GB:"
                " make room there, or set TMPDIR to a folder with more"
            )
        yield Bench(folder, sizes, stack)


class Bench:
    """The jobs, which follow from each other: they are run in order, and each once.

    Args:
        folder: for all that is made.
        sizes: how much.
        stack: what ends the processes that are started here.
    """

    def __init__(self, folder: Path, sizes: Sizes, stack: ExitStack) -> None:
        self.sizes, self.remarks = sizes, list[str]()
        """What could not be measured, in sentences."""
        self._folder, self._root, self._stack = folder, folder / "runs", stack
        self._many = f"{sizes.runs:,} runs of {sizes.records:,} records"
        self._panels = 0

    def jobs(self) -> list[tuple[str, Callable[[], Iterable[Comparison]]]]:
        """Names and jobs."""
        return [
            (f"making {self._many}", self._make),
            ("first indexing", self._first_indexing),
            ("a later start", self._later_start),
            ("first paint in a browser", self._paint),
            ("a record more", self._refresh),
            ("many browsers", self._browsers),
            ("TensorBoard", self._opponents),
        ]

    def _make(self) -> Iterator[Comparison]:
        make_runs(self._root, self.sizes.runs, self.sizes.records)
        yield from ()

    def _serve(self) -> Service:
        service = Service(self._root, self._folder / "service.log")
        self._stack.callback(service.stop)
        return service

    def _caught_up(self, health: dict[str, Any]) -> bool:
        return bool(health["progress"] == 1 and health["runs"] == self.sizes.runs)

    # Starts

    def _first_indexing(self) -> Iterator[Comparison]:
        service = self._serve()
        took, used = service.until(self._caught_up), service.usage()
        service.stop()
        speed = f"{self.sizes.runs * self.sizes.records / took:,.0f} records/s"
        note = f"{speed}; {used.processor:.1f} s of processor time" if used else speed
        yield _limited("service start", f"first indexing of {self._many}", took, 60, note)
        yield from self._memory("peak memory of the first indexing", used)

    def _later_start(self) -> Iterator[Comparison]:
        service = self._serve()
        yield _limited("service start", "first answer of a later start", service.until(), 2)
        took = service.until(self._caught_up)
        yield _limited("service start", f"{self._many} there again, from the cache", took, 10)
        first = visit(service.port)
        self._panels = sum(bool(figure["data"]) for figure in first.answer["figures"].values())
        counted = len(first.answer["counted"])
        note = (
            f"page and scripts {_ms(first.files)}, runs {_ms(first.runs)}, comparison of {counted} runs"
            f" {_ms(first.compare)}; {first.size / 2**20:.1f} MiB were sent"
        )
        yield _limited("first paint", "all that the page fetches, one after the other", first.seconds, 1, note)
        service.stop()

    def _paint(self) -> Iterator[Comparison]:
        """In a service that was just started: nothing is worked out yet."""
        service = self._serve()
        service.until(self._caught_up)
        drawn = paint(service.port, self._panels)
        service.stop()
        if isinstance(drawn, str):
            self.remarks.append(f"The first paint in Chromium was not measured: {drawn}.")
        else:
            yield _limited("first paint", "the large figures in Chromium", drawn[0], 1)
            note = "most of it plotly.js, 4.5 MB that a browser has to compile"
            yield _limited("first paint", f"{self._panels} panels drawn in Chromium", drawn[1], 1, note)

    def _memory(self, case: str, used: Usage | None) -> Iterator[Comparison]:
        if used is None:
            self.remarks.append(f"The {case} was not measured: that takes a /proc, as Linux has.")
        else:
            note = f"{used.own / 2**20:.0f} MiB of it its own at the end, the rest files that are mapped"
            yield Comparison("service memory", case, OURS, used.peak, "limit", MEMORY, note, "B")

    # Runs that go on

    def _refresh(self) -> Iterator[Comparison]:
        self._service, self._run = self._serve(), GoingOn(self._root, 0, self.sizes.records)
        self._stack.callback(self._run.close)
        self._service.until(self._caught_up)
        compare(self._service.port)
        answers, events = asyncio.run(_refreshes(self._service, self._run, self.sizes.refreshes))
        case = f"comparison of {self.sizes.runs:,} runs, one with a new record"
        yield _limited("refresh", case, statistics.median(answers), 0.1, _of(answers))
        yield _limited("refresh", "from a record's write to its event", statistics.median(events), 1, _of(events))

    def _browsers(self) -> Iterator[Comparison]:
        few, many = (
            asyncio.run(_heard(self._service, self._run, count, self.sizes.written))
            for count in (1, self.sizes.listeners)
        )
        if few and many:
            case = f"{self.sizes.written} records written, {self.sizes.listeners} browsers connected: "
            note = f"each browser got each record once; the log grew by {many.grown / 2**10:.1f} KiB"
            yield Comparison("browsers", f"{case}bytes read", OURS, many.read, "1 browser", few.read, note, "B")
            yield Comparison("browsers", f"{case}processor time", OURS, many.processor, "1 browser", few.processor)
        else:
            self.remarks.append("What many browsers cost was not measured: that takes a /proc, as Linux has.")
        ended = asyncio.run(_stopped(self._service, self.sizes.listeners))
        yield _limited("browsers", f"from Ctrl-C to the end, {self.sizes.listeners} connected", ended[0], 1)
        yield from self._memory("peak memory of all this after a later start", ended[1])

    # TensorBoard

    def _opponents(self) -> Iterator[Comparison]:
        count, records = self.sizes.opponent_runs, self.sizes.records
        root, events = self._folder / "few", self._folder / "events"
        if not opponents.installed():
            self.remarks.append("TensorBoard is not installed: the time it takes to load runs was not measured.")
            return
        make_runs(root, count, records)
        ours = seconds(lambda: Index(root).refresh(), repeat=3)
        index = Index(root)
        index.refresh()
        table = next(iter(index.runs.values())).table
        written = opponents.write_events(table, events, count)
        ingested = opponents.ingest(events, records)
        theirs, loaded = opponents.accumulate(events)
        if loaded != written * count:
            raise RuntimeError(f"TensorBoard loaded {loaded} of {written * count} scalars")
        case = f"{count} runs of {records:,} records, {loaded:,} numbers"
        yield Comparison("scalars of TensorBoard", case, "index", ours, "EventAccumulator", theirs)
        if ingested is not None:
            note = "TensorBoard's program in Rust, its start included"
            yield Comparison("scalars of TensorBoard", case, "index", ours, "data server", ingested, note)


class Heard(NamedTuple):
    """What the service did while some listened."""

    read: int
    """Bytes."""
    processor: float
    """Seconds."""
    grown: int
    """Bytes that the log grew by."""


async def _refreshes(service: Service, run: GoingOn, count: int) -> tuple[list[float], list[float]]:
    """Write records one by one; seconds of the answer that follows each, and from its write to its event."""
    answers, events, version = [], [], -1
    async with listeners(service.port, 1) as (listener,):
        for _ in range(count):
            (written,) = run.write()
            events.append(await asyncio.wait_for(listener.until(run.step), 60) - written)
            took, answer = compare(service.port)
            if answer["version"] <= version:
                raise RuntimeError("the comparison does not have the record that was written last")
            version = answer["version"]
            answers.append(took)
    return answers, events


async def _heard(service: Service, run: GoingOn, count: int, records: int) -> Heard | None:
    """What the service did while records were written and so many listened. Each must have got each record once."""
    async with listeners(service.port, count) as found:
        before, size, first = service.usage(), run.size, run.step + 1
        ends = [asyncio.create_task(one.until(run.step + records)) for one in found]
        await asyncio.to_thread(run.write, records, pause=PAUSE)
        await asyncio.wait_for(asyncio.gather(*ends), 120)
        after = service.usage()
    _refuse_gaps(found, list(range(first, first + records)))
    if before is None or after is None:
        return None
    return Heard(after.read - before.read, max(after.processor - before.processor, TICK), run.size - size)


def _refuse_gaps(found: list[Listener], steps: list[int]) -> None:
    wrong = sum(one.steps != steps for one in found)
    if wrong:
        raise RuntimeError(f"{wrong} of {len(found)} listeners did not get each record once and in order")


async def _stopped(service: Service, count: int) -> tuple[float, Usage | None]:
    """Seconds that the service takes to end while so many listen, and what it has used until then."""
    async with listeners(service.port, count):
        used = service.usage()
        return await asyncio.to_thread(service.stop), used


def _limited(subject: str, case: str, amount: float, limit: float, note: str = "") -> Comparison:
    return Comparison(subject, case, OURS, amount, "limit", limit, note)


def _ms(amount: float) -> str:
    return f"{amount * 1e3:.0f} ms"


def _of(times: list[float]) -> str:
    return f"median of {len(times)}; the worst {_ms(max(times))}"

"""The dashboard on many long runs: starts, memory, answers and paint against limits, loading against TensorBoard.

The service is the real one: `hilbert-monitor serve` in its own process, asked over loopback. The logs are in the
system's file cache, as they are for runs that were just written. This takes Linux, for
its /proc, and 5.5 GB in the folder of temporary files. Without Chromium or TensorBoard their figures are left out.
"""

from __future__ import annotations

import gzip
import http.client
import importlib
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, Self

import numpy as np

from hilbert_monitor.runs.log import RunWriter
from hilbert_monitor.runs.reader import INFO, STEPS
from hilbert_monitor.runs.record import Alert, RunInfo, StepRecord
from hilbert_monitor.runs.table import Table, present
from hilbert_monitor.service.following.index import Index

from .measure import Result, collect, seconds

HOST = "127.0.0.1"
PATIENCE, MEMORY, SHORT = 900.0, 1 << 30, 20
"""Seconds that a service may take to become ready, the limit of its memory in bytes, and records of a short run."""
TICK = 1 / os.sysconf("SC_CLK_TCK")  # seconds: the smallest difference of processor time
OPTIMIZERS, PATTERNS = ("AdamW", "RowNorm"), 3
"""Those of the runs, and how many runs of each have their own records; further ones have the bytes of one of these."""
VOCABULARY, WIDTH, RATE, PACE = 50_257, 768, 4e-3, 0.6
"""Sizes of the runs, the learning rate, and the seconds from one step to the next."""


@dataclass(frozen=True)
class Load:
    """How much work the service is given."""

    runs: int = 200
    records: int = 25_000  # of each run
    refreshes: int = 20  # records that are written one at a time, each followed by a request
    listeners: int = 100  # browsers that are connected at once
    written: int = 50  # records that are written while the browsers listen
    tensorboard_runs: int = 5  # that are also given to TensorBoard
    folders: int = 10_000  # short runs of another folder
    million: int = 1_000_000  # records of one long run in a folder of its own
    idle: float = 20.0  # seconds for which the service is left alone


QUICK = Load(4, 300, 3, 8, 10, tensorboard_runs=2, folders=30, million=3000, idle=1.0)


def run(*, quick: bool) -> list[Result]:
    """Measure 200 runs of 25,000 records, then 10,000 short ones and one of a million records."""
    with tempfile.TemporaryDirectory(prefix="hilbert-monitor-bench-") as name:
        return collect(_results(Path(name), QUICK if quick else Load()))


def _results(folder: Path, load: Load) -> Iterator[Result]:
    root = folder / "runs"
    make_runs(root, load.runs, load.records)
    yield from _starts(root, load)
    yield from _continued(root, load)
    yield from _tensorboard(folder, load)
    yield from _folders(folder / "many", load)
    make_runs(folder / "long", 1, load.million)
    with Service(folder / "long") as service:
        service.until(1)
        yield _memory(f"one run of {load.million:,} records", service.usage())


def _limited(subject: str, case: str, took: float, limit: float, note: str = "") -> Result:
    return Result(subject, case, took, "limit", limit, "s", note)


def _memory(case: str, usage: Usage) -> Result:
    note = f"{usage.own / 2**20:.0f} MiB of it its own at the end, the rest files that are mapped"
    return Result("memory at its peak", case, usage.peak, "limit", MEMORY, "B", note)


def _starts(root: Path, load: Load) -> Iterator[Result]:
    """First indexing, a later start from the cache, and what a browser fetches and paints."""
    many = f"{load.runs:,} runs of {load.records:,} records"
    with Service(root) as service:
        took, usage = service.until(load.runs), service.usage()
    note = f"{load.runs * load.records / took:,.0f} records/s; {usage.processor:.1f} s of processor time"
    yield _limited("start", f"first indexing of {many}", took, 60, note)
    yield _memory("first indexing", usage)
    with Service(root) as service:
        yield _limited("start", "first answer of a later start", service.until(), 2)
        yield _limited("start", f"{many} there again, from the cache", service.until(load.runs), 10)
        took, size, answer = visit(service.port)
    panels = sum(bool(figure["data"]) for figure in answer["figures"].values())
    note = f"comparison of {len(answer['counted'])} runs included; {size / 2**20:.1f} MiB were sent"
    yield _limited("first paint", "all that the page fetches, one after the other", took, 1, note)
    with Service(root) as service:  # a new one, which has computed nothing yet
        service.until(load.runs)
        loads = paint(service.port, panels)
    for name, (figures, plots) in zip(("first", "third"), loads[::2], strict=False):
        yield _limited("first paint", f"the large figures in Chromium, {name} load", figures, 1)
        yield _limited("first paint", f"{panels} panels drawn in Chromium, {name} load", plots, 1)


def _continued(root: Path, load: Load) -> Iterator[Result]:
    """One run goes on, while one browser and then many listen."""
    writer, rest = continued(root, load.records)
    with Service(root) as service, closing(writer):
        service.until(load.runs)
        ask(service.port, "/api/compare")
        answers, events = _refreshes(service.port, writer, islice(rest, load.refreshes))
        note = f"median of {load.refreshes}; the worst {max(answers) * 1e3:.0f} ms and {max(events) * 1e3:.0f} ms"
        yield _limited("refresh", f"comparison of {load.runs:,} runs after a new record", median(answers), 0.1, note)
        yield _limited("refresh", "from a record's write to its event", median(events), 1)
        few, many = (_bytes_read(service, writer, [*islice(rest, load.written)], n) for n in (1, load.listeners))
        case = f"{load.written} records written, {load.listeners} browsers connected: bytes read"
        yield Result("browsers", case, many, "1 browser", few, "B", "each browser got each record once")
        yield _memory("all this, after a later start", service.usage())


def _refreshes(port: int, writer: RunWriter, records: Iterable[StepRecord]) -> tuple[list[float], list[float]]:
    """Write records one by one. Return the seconds of each comparison after it, and from each write to its event."""
    answers, events, versions, stream = [], [], [-1], listen(port)
    next(stream)
    for record in records:
        moment = time.perf_counter()
        writer.write(record)
        while next(stream) != record.step:
            pass
        seen = time.perf_counter()
        content = ask(port, "/api/compare")
        answers.append(time.perf_counter() - seen)
        events.append(seen - moment)
        versions.append(json.loads(plain(content))["version"])
    assert versions == sorted(set(versions)), "a comparison does not have the record that was written last"
    return answers, events


def _bytes_read(service: Service, writer: RunWriter, records: list[StepRecord], count: int) -> int:
    """Write records while so many listen; return the bytes that the service read. Each must get each record once."""
    with ThreadPoolExecutor(count) as pool:
        streams = [listen(service.port) for _ in range(count)]
        for stream in streams:
            next(stream)
        before = service.usage()
        heard = [pool.submit(list, islice(stream, len(records))) for stream in streams]
        for record in records:
            writer.write(record)
            time.sleep(0.05)
        steps = [future.result() for future in heard]
    assert all(one == [record.step for record in records] for one in steps), "a listener missed a record"
    return service.usage().read - before.read


def _folders(root: Path, load: Load) -> Iterator[Result]:
    """Many short runs: first indexing, the list of runs, what idling costs, and one run that goes on."""
    make_short_runs(root, load.folders)
    subject = f"{load.folders:,} folders of {SHORT} records"
    with Service(root) as service:
        took, before = service.until(load.folders), service.usage()
        yield _limited(subject, "first indexing", took, 30, f"{before.processor:.1f} s of processor time")
        page, whole = (len(plain(ask(service.port, f"/api/runs{query}"))) for query in ("?limit=100", ""))
        yield Result(subject, "a page of 100 runs", page, "all of them", whole, "B")
        time.sleep(load.idle / 4)
        before = service.usage()
        time.sleep(load.idle)
        after = service.usage()
        used = max(after.processor - before.processor, TICK)
        case = f"processor time of {load.idle:.0f} s in which nothing happens"
        yield _limited(subject, case, used, 0.02 * load.idle, f"{used / load.idle:.1%} of a core")
        writer, rest = continued(root, SHORT)
        with closing(writer):
            written = time.perf_counter()
            writer.write(next(rest))
            status, took = "", 0.0
            while status != "running" and took < 120:
                time.sleep(0.01)
                status = json.loads(plain(ask(service.port, f"/api/runs/{writer.id}")))["summary"]["status"]
                took = time.perf_counter() - written
            yield _limited(subject, "a finished run is continued: until it is seen", took, 10)
        yield _memory(subject, after)


def _tensorboard(folder: Path, load: Load) -> Iterator[Result]:
    """Load the same numbers by our index and by TensorBoard's two readers."""
    if find_spec("tensorboard") is None:
        print("TensorBoard is not installed: the time it takes to load runs was not measured")
        return
    root, events, count = folder / "few", folder / "events", load.tensorboard_runs
    make_runs(root, count, load.records)
    ours = seconds(lambda: Index(root).refresh(), repeat=3)
    index = Index(root)
    index.refresh()
    scalars = count * write_events(next(iter(index.runs.values())).table, events, count)
    theirs, loaded = accumulate(events)
    assert loaded == scalars, f"TensorBoard loaded {loaded} of {scalars} scalars"
    case = f"{count} runs of {load.records:,} records, {loaded:,} numbers"
    yield Result("loading", case, ours, "TensorBoard's EventAccumulator", theirs)
    if find_spec("tensorboard_data_server") is not None:
        server = ingest(events, load.records, count)
        yield Result("loading", case, ours, "TensorBoard's data server", server, "s", "in Rust; its start included")


def records_of(head: str, seed: int, count: int, *, began: float) -> Iterator[StepRecord]:
    """Yield records of a synthetic run as the monitor writes them by default: bounds at every step, the rest rarely."""
    rng = np.random.default_rng([OPTIMIZERS.index(head), seed])
    step = np.arange(1, count + 1)
    rate = RATE * np.minimum(1, step / (0.04 * count)) * (0.55 + 0.45 * np.cos(math.pi * step / count))
    adamw = head == "AdamW"  # a few of its rows move much further than the others; RowNorm's by the learning rate
    norm = rate * (8 * np.exp(0.15 * rng.standard_t(3, count).clip(-8, 8)) if adamw else rng.uniform(0.97, 1, count))
    ceiling = 2 * rate * (math.sqrt(WIDTH) * 7.27 if adamw else 1)
    diameter = norm * rng.uniform(1.6, 1.9, count)
    loss = 3 + 6 / np.sqrt(step) + 0.02 * rng.standard_normal(count)
    tokens = (VOCABULARY * rng.random((count, 4)) ** 6).astype(int)
    noise = rng.uniform(0.9, 1.2, (count, 4))
    panel = max(1, min(500, count // 10))
    columns = (step, rate, norm, ceiling, diameter, loss, tokens, noise)
    for n, lr, row, bound, D, train_loss, ids, f in zip(*(column.tolist() for column in columns), strict=True):
        times = {"learning_rate": 2e-6 * f[0], "increment": 0.021 * f[1], "rules": 3e-6 * f[2]}
        values: dict[str, Any] = {"pair": (ids[0], ids[1]), "pair_text": (f" token{ids[0]}", f"token{ids[1]}")}
        if n % 10 == 0 or n % panel == 0:
            values |= {"diameter": D, "diameter_lower": D, "diameter_upper": D, "row_norm": row, "row_token": ids[2]}
            values |= {"gradient_row_token": ids[3], "gradient_row_norm": 0.01 * f[0], "gradient_balance": 1e-8 * f[1]}
            times |= {"diameter": 0.08 * f[3], "gradient": 0.004 * f[2]}
        else:
            values |= {"diameter_lower": 0.98 * D, "diameter_upper": 1.04 * D}
            times["bracket"] = 0.012 * f[3]
        if n % panel == 0:
            values |= {"perturbation_rms": 3 * D, "perturbation_max": 12 * D, "hidden_norm": 27.7 * f[2]}
            values |= {"perturbation_pair": (ids[2], ids[3]), "validation_loss": 3 + 6 / n**0.5 + 0.01 * f[3]}
            values["perturbation_pair_text"] = (f" token{ids[2]}", f"token{ids[3]}")
            times["panel"] = 0.9 * f[0]
        values |= {"time": began + n * PACE, "tokens": n * 524_288, "train_loss": train_loss, "learning_rate": lr}
        yield StepRecord(step=n, ceiling=bound, nonfinite_rows=0, seconds=times, share=0.012 * f[1], **values)


def _info(head: str, seed: int, records: int) -> RunInfo:
    config = {"size": "bench", "width": WIDTH, "vocab_size": VOCABULARY, "updates": records, "lr": RATE}
    panel: dict[str, Any] = {"panel_hash": "5ab1e", "panel_size": 8192, "config": config}
    return RunInfo(name=f"{head.lower()}-seed{seed}", head_optimizer=head, seed=seed, model="Decoder", **panel)


def make_runs(root: Path, count: int, records: int) -> None:
    """Write finished runs of both optimizers, in pairs by seed: the first few record by record, then copies."""
    began, middle, lines = time.time() - records * PACE, records // 2, dict[tuple[str, int], bytes]()
    message = f"step {middle}: D(S) = 0.2 is 5.0 times what the last steps had"
    alert = Alert(step=middle, time=began + middle * PACE, kind="diameter", value=0.2, expected=0.04, message=message)
    for place in range(count):
        head, seed = OPTIMIZERS[place % 2], place // 2
        with closing(RunWriter.open(root, _info(head, seed, records))) as writer:
            writer.describe(started=began)
            if seed < PATTERNS:
                for record in records_of(head, seed, records, began=began):
                    writer.write(record)
                lines[head, seed] = (writer.folder / STEPS).read_bytes().partition(b"\n")[2]
            else:
                with (writer.folder / STEPS).open("ab") as file:
                    file.write(lines[head, seed % PATTERNS])
            if head == "AdamW":
                writer.alert(alert)


def make_short_runs(root: Path, count: int) -> None:
    """Write many short, finished runs in moments: copies of two that RunWriter writes, under ids of their own."""
    make_runs(root, 2, SHORT)
    ids = sorted(path.name for path in root.iterdir())
    for place in range(2, count):
        id = ids[place % 2]
        folder = root / f"{id}-{place // 2 + 1}"  # as RunWriter numbers runs of one name
        shutil.copytree(root / id, folder, copy_function=shutil.copyfile)
        info = (folder / INFO).read_bytes()
        (folder / INFO).write_bytes(info.replace(f'"id":"{id}"'.encode(), f'"id":"{folder.name}"'.encode()))


def continued(root: Path, records: int) -> tuple[RunWriter, Iterator[StepRecord]]:
    """Go on with the first run that `make_runs` wrote; return its writer, and records that come next."""
    whole = records_of("AdamW", 0, 2 * records + 10_000, began=time.time() - records * PACE)
    rest = list(islice(whole, records, records + 1000))  # made now, because writes are timed
    return RunWriter.open(root, _info("AdamW", 0, records), first_step=records), iter(rest)


class Usage(NamedTuple):
    """What a process has used so far."""

    peak: int  # bytes of memory at most, with mapped files
    own: int  # bytes that it holds now and that no file backs
    read: int  # bytes read from files
    processor: float  # seconds


class Service:
    """A process of `hilbert-monitor serve`. The cache and the output are beside the folder of the runs."""

    def __init__(self, root: Path) -> None:
        self._log = root.parent / "service.log"
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            self.port: int = probe.getsockname()[1]
        options = [root, "--port", self.port, "--cache", root.parent / "cache"]
        command = [sys.executable, "-m", "hilbert_monitor", "serve", *map(str, options)]
        with self._log.open("wb") as log:
            self._began = time.perf_counter()
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """End it as Ctrl-C does."""
        self._process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        self._process.kill()
        self._process.wait()

    def until(self, runs: int | None = None) -> float:
        """Wait until it answers, or has read all that there is of so many runs; return the seconds since its start."""
        pause = 0.005
        while True:
            with suppress(OSError, http.client.HTTPException):
                health = json.loads(plain(ask(self.port, "/healthz")))
                if runs is None or (health["progress"] == 1 and health["runs"] == runs):
                    return time.perf_counter() - self._began
                pause = 0.05  # it is up: do not keep it from its work
            if self._process.poll() is not None or time.perf_counter() - self._began > PATIENCE:
                raise RuntimeError(f"the service is not ready: {self._log.read_text(errors='replace')[-500:]}")
            time.sleep(pause)

    def usage(self) -> Usage:
        """Return what it has used so far."""
        files = [Path(f"/proc/{self._process.pid}/{name}").read_text() for name in ("status", "io", "stat")]
        peak, own, read = (int(found) for found in re.findall(r"(?:VmHWM|RssAnon|rchar):\s+(\d+)", "".join(files)))
        ticks = sum(map(int, files[2].rpartition(")")[2].split()[11:13]))
        return Usage(peak << 10, own << 10, read, ticks * TICK)


def fetch(connection: http.client.HTTPConnection, path: str) -> bytes:
    """Return the answer at a path as it was sent, which may be compressed."""
    connection.request("GET", path, headers={"Accept-Encoding": "gzip"})
    answer = connection.getresponse()
    content = answer.read()
    assert answer.status == 200, f"the service answered {answer.status} to {path}: {content[:200]!r}"
    return content


def ask(port: int, path: str) -> bytes:
    """Fetch a path on a new connection."""
    with closing(http.client.HTTPConnection(HOST, port, timeout=120)) as connection:
        return fetch(connection, path)


def plain(content: bytes) -> bytes:
    """Return an answer uncompressed."""
    return gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content


def visit(port: int) -> tuple[float, int, dict[str, Any]]:
    """Fetch what a browser fetches on its first visit; return seconds, bytes that were sent, and the comparison."""
    with closing(http.client.HTTPConnection(HOST, port, timeout=120)) as connection:
        began = time.perf_counter()
        paths, contents = ["/"], list[bytes]()
        for path in paths:  # the page, and all files that it, or one of those, names
            contents.append(fetch(connection, path))
            if not path.endswith("plotly.min.js"):
                names = re.findall(rb"""["'](?:/static/\w+|\.)/([\w.-]+\.(?:js|css))""", plain(contents[-1]))
                paths += [new for name in dict.fromkeys(names) if (new := f"/static/{name.decode()}") not in paths]
        contents += [fetch(connection, path) for path in ("/api/themes", "/api/runs", "/api/compare")]
        took = time.perf_counter() - began
    return took, sum(map(len, contents)), json.loads(plain(contents[-1]))


def listen(port: int) -> Iterator[int]:
    """Listen to events as a browser does: yield 0 after a first one, then the steps of the records that come."""
    with closing(http.client.HTTPConnection(HOST, port, timeout=120)) as connection:
        connection.request("GET", "/api/events")
        answer, name = connection.getresponse(), b""
        answer.readline()
        yield 0
        while line := answer.readline():
            field, _, value = line.partition(b":")
            name = value.strip() if field == b"event" else name
            if field == b"data" and name == b"records":
                yield from [record["step"] for record in json.loads(value).get("records", ())]
    raise RuntimeError("the service ended its stream of events")


# Scripts: milliseconds since the navigation began, once the page shows its large figures, or so many plots
FIGURES = """() => document.querySelector(".card b")?.textContent && performance.now()"""
PLOTS = """count => {
    const plots = [...document.querySelectorAll(".js-plotly-plot")];
    return plots.filter(plot => plot.querySelector(".trace, .gl-canvas")).length >= count && performance.now();
}"""


def paint(port: int, panels: int) -> list[tuple[float, float]]:
    """Load the page in Chromium three times; return the seconds until its large figures, and its panels, were there."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if find_spec("playwright") is None or program is None:
        print("there is no playwright or no Chromium: the first paint was not measured")
        return []
    from playwright.sync_api import sync_playwright

    loads = []  # one profile on disk, as a user has: Chromium keeps compiled code there that it has met twice
    with sync_playwright() as playwright, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options: dict[str, Any] = {"executable_path": program, "viewport": {"width": 1280, "height": 900}}
        browser = playwright.chromium.launch_persistent_context(profile, **options)
        for _ in range(3):
            page = browser.new_page()
            page.goto("about:blank")
            page.goto(f"http://{HOST}:{port}/", wait_until="commit")
            figures = page.wait_for_function(FIGURES, polling="raf", timeout=60_000).json_value()
            plots = page.wait_for_function(PLOTS, arg=panels, polling="raf", timeout=60_000).json_value()
            loads.append((float(figures) / 1e3, float(plots) / 1e3))
            page.wait_for_timeout(1500)  # for Chromium to store what it keeps
            page.close()
        browser.close()
    return loads


def write_events(table: Table, folder: Path, copies: int) -> int:
    """Write copies of a run's numbers, each as a TensorBoard event; return how many numbers one copy has."""
    from torch.utils.tensorboard import SummaryWriter

    columns = {name: (values.tolist(), present(values)) for name, values in table.columns.items() if name != "time"}
    count, writer = 0, SummaryWriter(folder / "run0")
    for row, (step, moment) in enumerate(zip(table.steps.tolist(), table.column("time").tolist(), strict=True)):
        for name in [name for name, (_, exists) in columns.items() if exists[row]]:
            writer.add_scalar(name, columns[name][0][row], step, moment)
            count += 1
    writer.close()
    for copy in range(1, copies):
        shutil.copytree(folder / "run0", folder / f"run{copy}")
    return count


def accumulate(folder: Path) -> tuple[float, int]:
    """Load all points of a folder's runs with TensorBoard's own reader; return the seconds, and how many there are."""
    module = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    start, count = time.perf_counter(), 0
    for run in sorted(folder.iterdir()):
        reader: Any = module.EventAccumulator(str(run), size_guidance={"scalars": 0, "tensors": 0})
        reader.Reload()
        count += sum(len(reader.Scalars(tag)) for tag in reader.Tags()["scalars"])
    return time.perf_counter() - start, count


def ingest(folder: Path, last: int, runs: int) -> float:
    """Load all points of so many runs, up to a last step, with TensorBoard's data server; return the seconds."""
    module = importlib.import_module("tensorboard.data.server_ingester")
    local = importlib.import_module("tensorboard.util.grpc_util").ChannelCredsType.LOCAL
    context = importlib.import_module("tensorboard.context").RequestContext()
    start = time.perf_counter()
    options = {"reload_interval": 0, "channel_creds_type": local, "samples_per_plugin": {"scalars": 0}}
    ingester = module.SubprocessServerDataIngester(module.get_server_binary(), str(folder), **options)
    ingester.start()
    there: list[bool] = []
    while sum(there) < runs and time.perf_counter() - start < 600:
        time.sleep(0.01)
        scalars = ingester.data_provider.list_scalars(context, experiment_id="", plugin_name="scalars")
        there = [tags["train_loss"].max_step == last for tags in scalars.values() if "train_loss" in tags]
    return time.perf_counter() - start

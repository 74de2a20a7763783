"""A service in its own process, and what asks it: a client, hundreds of listeners, and a real browser."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

HOST = "127.0.0.1"
PATIENCE = 900.0
"""Seconds that a service may take to become ready."""
TICK = 1 / os.sysconf("SC_CLK_TCK")
"""Smallest difference of processor time that the system measures, in seconds."""


class Usage(NamedTuple):
    """What a process has used so far."""

    peak: int
    """Most bytes of memory, with mapped files."""
    own: int
    """Bytes of memory that it holds now and that no file backs."""
    read: int
    """Bytes read from files."""
    processor: float
    """Seconds of processor time."""


class Service:
    """`hilbert-monitor serve`, from its start to its end.

    Args:
        root: folder of the runs.
        log: file for its output.
        cache: folder of its cache.
    """

    def __init__(self, root: Path, log: Path, cache: Path) -> None:
        self._log, self.port = log, _free_port()
        command = [sys.executable, "-m", "hilbert_monitor", "serve", root, "--port", self.port, "--cache", cache]
        with log.open("wb") as file:
            self._began = time.perf_counter()
            self._process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def until(self, ready: Callable[[dict[str, Any]], bool] = lambda health: True) -> float:
        """Wait until its health satisfies `ready`; return the seconds since its start."""
        pause = 0.005
        while True:
            with suppress(OSError, http.client.HTTPException):
                connection = http.client.HTTPConnection(HOST, self.port, timeout=10)
                try:
                    if ready(json.loads(fetch(connection, "/healthz"))):
                        return time.perf_counter() - self._began
                    pause = 0.05  # it is up: do not keep it from its work
                finally:
                    connection.close()
            self._refuse_end()
            time.sleep(pause)

    def usage(self) -> Usage | None:
        """Return what it has used so far; None where the system has no /proc."""
        folder = Path(f"/proc/{self._process.pid}")
        try:
            status = _pairs((folder / "status").read_text())
            ticks = (folder / "stat").read_text().rpartition(")")[2].split()[11:13]
            read = int(_pairs((folder / "io").read_text())["rchar"])
        except (OSError, KeyError):
            return None
        own, peak = (int(status[name].split()[0]) << 10 for name in ("RssAnon", "VmHWM"))
        return Usage(peak, own, read, sum(map(int, ticks)) * TICK)

    def stop(self) -> float:
        """End it as Ctrl-C does; return the seconds that takes."""
        began = time.perf_counter()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        return time.perf_counter() - began

    def _refuse_end(self) -> None:
        ended = self._process.poll() is not None
        if ended or time.perf_counter() - self._began > PATIENCE:
            lines = self._log.read_text(errors="replace").strip().splitlines()
            raise RuntimeError(
                f"the service {'ended' if ended else 'was not ready in time'}; the last that it said:"
                f" {lines[-1] if lines else 'nothing'}"
            )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _pairs(text: str) -> dict[str, str]:
    return {name: value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}


# A client


def fetch(connection: http.client.HTTPConnection, path: str) -> bytes:
    """Return the answer at a path as it was sent, which may be compressed."""
    connection.request("GET", path, headers={"Accept-Encoding": "gzip"})
    answer = connection.getresponse()
    content = answer.read()
    if answer.status != 200:
        raise RuntimeError(f"the service answered {answer.status} to {path}: {content[:200]!r}")
    return content


class Visit(NamedTuple):
    """The requests of a first visit to the page, one after the other."""

    files: float
    """Seconds for the page, its scripts and styles."""
    runs: float
    """Seconds for the list of runs."""
    compare: float
    """Seconds for the comparison."""
    size: int
    """Bytes that the service sent."""
    answer: dict[str, Any]
    """The comparison."""

    @property
    def seconds(self) -> float:
        """Seconds for everything."""
        return self.files + self.runs + self.compare


def visit(port: int) -> Visit:
    """Fetch what a browser fetches when it opens the page for the first time."""
    connection = http.client.HTTPConnection(HOST, port, timeout=120)
    try:
        began = time.perf_counter()
        size = sum(len(content) for content in _files(connection))
        files = time.perf_counter()
        size += len(fetch(connection, "/api/themes")) + len(fetch(connection, "/api/runs"))
        runs = time.perf_counter()
        content = fetch(connection, "/api/compare")
        compared = time.perf_counter()
    finally:
        connection.close()
    answer = json.loads(_plain(content))
    return Visit(files - began, runs - files, compared - runs, size + len(content), answer)


def ask(port: int, path: str) -> bytes:
    """Return the answer at a path, fetched on a new connection."""
    connection = http.client.HTTPConnection(HOST, port, timeout=120)
    try:
        return _plain(fetch(connection, path))
    finally:
        connection.close()


def fetch_comparison(port: int) -> tuple[float, dict[str, Any]]:
    """Fetch the comparison on a new connection; return the seconds that takes, and the answer."""
    connection = http.client.HTTPConnection(HOST, port, timeout=120)
    try:
        began = time.perf_counter()
        content = fetch(connection, "/api/compare")
        return time.perf_counter() - began, json.loads(_plain(content))
    finally:
        connection.close()


def _files(connection: http.client.HTTPConnection) -> list[bytes]:
    """Fetch the page, and all files that it, or one of those, names."""
    paths, contents = ["/"], list[bytes]()
    for path in paths:
        contents.append(fetch(connection, path))
        if not path.endswith("plotly.min.js"):
            names = re.findall(rb"""["'](?:/static/\w+|\.)/([\w.-]+\.(?:js|css))""", _plain(contents[-1]))
            paths += [new for name in dict.fromkeys(names) if (new := f"/static/{name.decode()}") not in paths]
    return contents


def _plain(content: bytes) -> bytes:
    return gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content


# Listeners


class Listener:
    """A stream of the service's events, like that of a browser."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader, self._partial = reader, b""
        self.steps: list[int] = []
        """Steps of the records that came."""

    async def until(self, step: int) -> float:
        """Listen until the record of a step has come; return the moment in seconds since the epoch."""
        while step not in self.steps[-1:]:
            for name, data in await self.next_events():
                if name == "records":
                    self.steps += [record["step"] for record in json.loads(data).get("records", ())]
        return time.time()

    async def next_events(self) -> list[tuple[str, str]]:
        """Read the next chunk; return names and data of the events that it completes."""
        size = int(await self._reader.readline(), 16)  # of a chunk
        if not size:
            raise RuntimeError("the service ended its stream of events")
        self._partial += await self._reader.readexactly(size)
        await self._reader.readline()
        *complete, self._partial = self._partial.split(b"\n\n")
        events = [_pairs(event.decode()) for event in complete]
        return [(event.get("event", ""), event.get("data", "")) for event in events]


@asynccontextmanager
async def listen(port: int, count: int) -> AsyncIterator[list[Listener]]:
    """Connect so many listeners, each of which has got a first event."""
    writers = []
    try:
        listeners = []
        for _ in range(count):
            reader, writer = await asyncio.open_connection(HOST, port)
            writers.append(writer)
            writer.write(f"GET /api/events HTTP/1.1\r\nHost: {HOST}:{port}\r\n\r\n".encode())
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
            if b" 200 " not in head.partition(b"\r\n")[0]:
                raise RuntimeError(f"the service has no stream of events: {head[:100]!r}")
            listeners.append(Listener(reader))
            await asyncio.wait_for(listeners[-1].next_events(), 30)
        yield listeners
    finally:
        for writer in writers:
            writer.close()


# A browser

FIGURES = """() => document.querySelector(".card b")?.textContent && performance.now()"""
"""Script: milliseconds since the navigation began, once the page shows its large figures."""
PLOTS = """count => {
    const plots = [...document.querySelectorAll(".js-plotly-plot")];
    return plots.filter(plot => plot.querySelector(".trace, .gl-canvas")).length >= count && performance.now();
}"""
"""Script: milliseconds since the navigation began, once so many plots have curves."""


LOADS = 3
"""Times that the page is loaded: Chromium keeps the compiled code of a script that it has met twice."""
SETTLE = 1.5
"""Seconds after a load for Chromium to store what it keeps."""


class Paint(NamedTuple):
    """When a load of the page showed what it is for, in seconds since it began."""

    figures: float
    """The large figures."""
    plots: float
    """The panels, drawn by Plotly."""


def paint(port: int, panels: int) -> list[Paint] | str:
    """Load the page in Chromium, several times in one new profile; return the loads, or why they cannot be measured."""
    try:
        from playwright.sync_api import Error, sync_playwright
    except ImportError:
        return "playwright is not installed"
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    try:
        with sync_playwright() as playwright, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
            # a profile on disk, as a user has: a private window keeps no compiled code
            browser = playwright.chromium.launch_persistent_context(
                profile, executable_path=program, viewport={"width": 1280, "height": 900}
            )
            loads = list[Paint]()
            for _ in range(LOADS):
                page = browser.new_page()
                page.goto("about:blank")
                page.goto(f"http://{HOST}:{port}/", wait_until="commit")
                figures = page.wait_for_function(FIGURES, polling="raf", timeout=60_000).json_value()
                plots = page.wait_for_function(PLOTS, arg=panels, polling="raf", timeout=60_000).json_value()
                loads.append(Paint(float(figures) / 1e3, float(plots) / 1e3))
                page.wait_for_timeout(1e3 * SETTLE)
                page.close()
            browser.close()
            return loads
    except Error as error:
        return str(error).strip().splitlines()[0]

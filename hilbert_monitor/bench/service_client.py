"""A service in a process of its own, and what asks it: a client, listeners by the hundred, and a real browser."""

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
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

HOST = "127.0.0.1"
PATIENCE = 900.0
"""Seconds that a service has for what it is waited for."""


TICK = 1 / os.sysconf("SC_CLK_TCK")
"""Seconds of processor time, at least, that the system tells apart."""


class Usage(NamedTuple):
    """What a process has used so far."""

    peak: int
    """Bytes of memory, mapped files included."""
    own: int
    """Bytes of memory that it holds now and that no file backs."""
    read: int
    """Bytes, from files."""
    processor: float
    """Seconds."""


class Service:
    """`hilbert-monitor serve`, from its start to its end.

    Args:
        root: folder of the runs.
        log: where it may write what it says.
    """

    def __init__(self, root: Path, log: Path) -> None:
        self._log, self.port = log, _free_port()
        command = [sys.executable, "-m", "hilbert_monitor", "serve", str(root), "--port", str(self.port)]
        with log.open("wb") as file:
            self._began = time.perf_counter()
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )

    def until(self, ready: Callable[[dict[str, Any]], bool] = lambda health: True) -> float:
        """Wait until its health is as asked for; seconds since its start."""
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
        """What it has used so far; None where there is no /proc to tell."""
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
        """End it as Ctrl-C does; the seconds that took."""
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
            said = self._log.read_text(errors="replace").strip().splitlines()
            raise RuntimeError(
                f"the service {'ended' if ended else 'was not ready in time'}; the last that it said:"
                f" {said[-1] if said else 'nothing'}"
            )


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        port: int = taken.getsockname()[1]
        return port


def _pairs(text: str) -> dict[str, str]:
    return {name: value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}


# A client


def fetch(connection: http.client.HTTPConnection, path: str) -> bytes:
    """What an address answers, as it was sent: compressed, if it can be."""
    connection.request("GET", path, headers={"Accept-Encoding": "gzip"})
    answer = connection.getresponse()
    content = answer.read()
    if answer.status != 200:
        raise RuntimeError(f"the service answered {answer.status} to {path}: {content[:200]!r}")
    return content


class Visit(NamedTuple):
    """What a first visit to the page fetches, one after the other."""

    files: float
    """Seconds of the page, its scripts and styles."""
    runs: float
    compare: float
    size: int
    """Bytes that were sent."""
    answer: dict[str, Any]
    """Of the comparison."""

    @property
    def seconds(self) -> float:
        """Of all of it."""
        return self.files + self.runs + self.compare


def visit(port: int) -> Visit:
    """Fetch what a browser does that opens the page for the first time."""
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


def compare(port: int) -> tuple[float, dict[str, Any]]:
    """Seconds that the comparison takes, and what it is, on a connection of its own."""
    connection = http.client.HTTPConnection(HOST, port, timeout=120)
    try:
        began = time.perf_counter()
        content = fetch(connection, "/api/compare")
        return time.perf_counter() - began, json.loads(_plain(content))
    finally:
        connection.close()


def _files(connection: http.client.HTTPConnection) -> list[bytes]:
    """The page, and all files that it, or one of them, names."""
    paths, found = ["/"], list[bytes]()
    for path in paths:
        found.append(fetch(connection, path))
        if not path.endswith("plotly.min.js"):
            named = re.findall(rb"""["'](?:/static|\.)/([\w.-]+\.(?:js|css))""", _plain(found[-1]))
            paths += [new for name in dict.fromkeys(named) if (new := f"/static/{name.decode()}") not in paths]
    return found


def _plain(content: bytes) -> bytes:
    return gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content


# Listeners


class Listener:
    """A stream of the service's events, as a browser has one."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader, self._begun = reader, b""
        self.steps: list[int] = []
        """Of the records that came."""

    async def until(self, step: int) -> float:
        """Listen until the record of a step has come; the moment, in seconds since the epoch."""
        while step not in self.steps[-1:]:
            for name, data in await self._some():
                if name == "records":
                    self.steps += [record["step"] for record in json.loads(data).get("records", ())]
        return time.time()

    async def _some(self) -> list[tuple[str, str]]:
        """The events of the next piece of the answer that holds any."""
        size = int(await self._reader.readline(), 16)  # of a chunk
        if not size:
            raise RuntimeError("the service ended its stream of events")
        self._begun += await self._reader.readexactly(size)
        await self._reader.readline()
        *whole, self._begun = self._begun.split(b"\n\n")
        fields = [_pairs(event.decode()) for event in whole]
        return [(one.get("event", ""), one.get("data", "")) for one in fields]


@asynccontextmanager
async def listeners(port: int, count: int) -> AsyncIterator[list[Listener]]:
    """So many listeners, each greeted."""
    writers = []
    try:
        found = []
        for _ in range(count):
            reader, writer = await asyncio.open_connection(HOST, port)
            writers.append(writer)
            writer.write(f"GET /api/events HTTP/1.1\r\nHost: {HOST}:{port}\r\n\r\n".encode())
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
            if b" 200 " not in head.partition(b"\r\n")[0]:
                raise RuntimeError(f"the service has no stream of events: {head[:100]!r}")
            found.append(Listener(reader))
            await asyncio.wait_for(found[-1]._some(), 30)
        yield found
    finally:
        for writer in writers:
            writer.close()


# A browser

TOLD = """() => document.querySelector(".card b")?.textContent && performance.now()"""
"""Milliseconds since the navigation began, once the large figures stand there."""
DRAWN = """count => {
    const plots = [...document.querySelectorAll(".js-plotly-plot")];
    return plots.filter(plot => plot.querySelector(".trace, .gl-canvas")).length >= count && performance.now();
}"""
"""Milliseconds since the navigation began, once so many plots have curves."""


def paint(port: int, panels: int) -> tuple[float, float] | str:
    """Seconds until Chromium shows the page's figures, and so many panels; or why that was not measured."""
    try:
        from playwright.sync_api import Error, sync_playwright
    except ImportError:
        return "playwright is not installed"
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=program)
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            page.goto("about:blank")
            page.goto(f"http://{HOST}:{port}/", wait_until="commit")
            told = page.wait_for_function(TOLD, polling="raf", timeout=60_000).json_value()
            drawn = page.wait_for_function(DRAWN, arg=panels, polling="raf", timeout=60_000).json_value()
            browser.close()
            return float(told) / 1e3, float(drawn) / 1e3
    except Error as error:
        return str(error).strip().splitlines()[0]

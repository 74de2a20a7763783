"""The page in a real browser: Chromium, visitors whose pages are watched, and what is drawn as plotly has it."""

import json
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import sync_playwright

from tests.support.programs import needs

PATIENCE = 30.0
"""Seconds after which what was waited for will not come: machines that test are busy."""
COMPARED = ("loss", "diameter", "perturbation", "ratio")
OF_A_RUN = ("diameter", "saturation", "perturbation", "loss", "learning_rate", "cost")
WIDE = {"viewport": {"width": 1280, "height": 900}}
VIOLATIONS = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) => window.violations.push(event.violatedDirective));
"""


class Visitor:
    """Somebody's own browser. What no page of ours may do, and did, is in `troubles`."""

    def __init__(self, browser, base, **options):
        self.base, self.host, self.troubles = base.partition("?")[0].rstrip("/"), urlsplit(base).netloc, []
        self.context = browser.new_context(**options)
        self.context.set_default_timeout(1000 * PATIENCE)
        self.context.add_init_script(VIOLATIONS)
        note = self.troubles.append
        self.context.on("console", lambda said: said.type in ("error", "warning") and note(f"console: {said.text}"))
        self.context.on("weberror", lambda thrown: note(f"error: {thrown.error}"))
        self.context.on("requestfailed", self._failed)
        self.context.on("response", lambda got: got.status >= 400 and note(f"{got.status}: {got.url}"))
        self.context.on("request", self._asked)
        self.context.on("dialog", self._spoken_to)

    def open(self, path="/"):
        """A new tab."""
        page = self.context.new_page()
        page.goto(self.base + path)
        return page

    def leave(self):
        """Close all tabs, while there is still a service that they could ask."""
        for page in self.context.pages:
            self.troubles += page.evaluate("window.violations ?? []")
        self.context.close()

    def _failed(self, request):
        if "ERR_ABORTED" not in (request.failure or ""):  # the browser left, or began a download
            self.troubles.append(f"failed: {request.url}, {request.failure}")

    def _asked(self, request):
        place = urlsplit(request.url)
        if place.scheme not in ("data", "blob") and place.netloc != self.host:
            self.troubles.append(f"somebody else was asked: {request.url}")

    def _spoken_to(self, dialog):
        self.troubles.append(f"dialog: {dialog.message}")
        dialog.dismiss()


@pytest.fixture(
    scope="module", name="chromium"
)  # while it is open its loop is the thread's: later tests could not run their own
def chromium_fixture():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=needs("chromium"), args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(name="visit")
def visit_fixture(chromium):
    """Visitors of a service. In the end none of them may have seen any trouble, unless `troubled` ones."""
    visitors = []

    def make(base, troubled=False, **options):
        visitor = Visitor(chromium, base, **options)
        visitors.append((visitor, troubled))
        return visitor

    yield make
    for visitor, troubled in visitors:
        visitor.leave()
        assert troubled or not visitor.troubles


def go(page, path):
    """Go to another view within the document, as a link of ours does."""
    page.evaluate("(path) => (history.pushState(null, '', path), dispatchEvent(new PopStateEvent('popstate')))", path)


def until(page, script, argument=None, timeout=PATIENCE):
    """Ask a page until its answer is true, and return it. (What playwright has for it needs eval.)"""
    deadline = time.monotonic() + timeout
    while not (found := page.evaluate(script, argument)):
        assert time.monotonic() < deadline, f"{script} {argument}: still {found!r}; {said(page)[:2000]}"
        page.wait_for_timeout(20)
    return found


def said(page):
    """The text of a page as it is seen."""
    return page.evaluate("document.body.innerText")


def says(page, text):
    """Wait until a page says something."""
    until(page, "(text) => document.body.innerText.includes(text)", text)


def drawn(page, *panels):
    """Wait until panels are drawn, those of the comparison if none are named."""
    script = """(panels) => panels.every((panel) => {
        const plot = document.querySelector(`[data-panel=${panel}] .plot`);
        return plot?.querySelector(".main-svg") && plot._fullLayout?.xaxis?._length;
    })"""
    until(page, script, list(panels or COMPARED))


def traces(page, panel):
    """What a panel draws: its traces, each with name, x, y and whether it is hidden."""
    script = """(panel) => (document.querySelector(`[data-panel=${panel}] .plot`).data ?? []).map((trace) => ({
        name: trace.name, group: trace.legendgroup, x: trace.x, y: trace.y, mode: trace.mode,
        hidden: trace.visible === false}))"""
    return page.evaluate(script, panel)


def ranges(page, *panels):
    """The x ranges of panels."""
    script = """(panels) => panels.map((panel) =>
        [...document.querySelector(`[data-panel=${panel}] .plot`).layout.xaxis.range])"""
    return page.evaluate(script, list(panels or COMPARED))


def plotted(page, panel, condition):
    """Wait until a condition holds of a panel's plot, with its `data`, its `layout` and its `range` of x."""
    place = f"document.querySelector('[data-panel={panel}] .plot')"
    until(page, f"(({{data = [], layout = {{}}}}, range = layout.xaxis?.range ?? []) => {condition})({place} ?? {{}})")


def drag(page, panel, first, last):
    """Drag out a range of x across a panel."""
    page.locator(f"[data-panel={panel}] .plot").scroll_into_view_if_needed()
    script = """([panel, ...ends]) => {
        const plot = document.querySelector(`[data-panel=${panel}] .plot`), {xaxis, yaxis} = plot._fullLayout;
        const {left, top} = plot.getBoundingClientRect();
        return [...ends.map((x) => left + xaxis._offset + xaxis.d2p(x)), top + yaxis._offset + yaxis._length / 2];
    }"""
    left, right, height = page.evaluate(script, [panel, first, last])
    page.mouse.move(left, height)
    page.mouse.down()
    page.mouse.move((left + right) / 2, height, steps=4)
    page.mouse.move(right, height, steps=4)
    page.mouse.up()


def hover(page, panel):
    """Move the pointer to and fro over the middle of a panel until it says what is there."""
    page.locator(f"[data-panel={panel}] .plot").scroll_into_view_if_needed()
    box = page.locator(f"[data-panel={panel}] .nsewdrag").bounding_box()
    deadline = time.monotonic() + PATIENCE
    while not page.locator(f"[data-panel={panel}] .hoverlayer text").count():
        assert time.monotonic() < deadline, f"nothing is said of {panel}"
        page.mouse.move(box["x"] + box["width"] * (0.4 + time.monotonic() % 0.2), box["y"] + box["height"] / 2)


def is_live(page):
    """Wait until events come in."""
    until(page, "document.querySelector('#live').dataset.status === 'live'")


WRITER = """
import json, sys, time
from hilbert_monitor.runs.log import RunWriter
from hilbert_monitor.runs.record import Alert, RunInfo
from tests.support.services import record
root, about = sys.argv[1], json.loads(sys.argv[2])
writer = RunWriter.open(root, RunInfo(**about))
print(writer.id, flush=True)
for line in sys.stdin:
    kind, given = json.loads(line)
    if kind == "record":
        writer.write(record(**given))
    else:
        writer.alert(Alert(**given))
    print(time.time(), flush=True)
writer.close()
"""


class Training:
    """A run that another process writes."""

    def __init__(self, process):
        self._process, self.id = process, process.stdout.readline().strip()

    def write(self, step, **changes):
        """A record; returns when it was written."""
        return self._send("record", {"step": step, "time": time.time(), **changes})

    def alert(self, **about):
        """An alert; returns when it was written."""
        return self._send("alert", about)

    def _send(self, kind, about):
        self._process.stdin.write(json.dumps([kind, about]) + "\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())


@contextmanager
def training(root, **about):
    """A process that writes a run, and ends it with the block."""
    usual = {"head_optimizer": "RowNorm", "model": "GPT", "seed": 0, "panel_hash": "panel"}
    command = [sys.executable, "-c", WRITER, str(root), json.dumps(usual | about)]
    place = Path(__file__).parents[2]
    with subprocess.Popen(command, cwd=place, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Training(process)
        finally:
            process.stdin.close()
            process.wait()

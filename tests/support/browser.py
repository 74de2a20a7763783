"""The page in a real browser: fixtures that start Chromium and open pages, functions that wait and read plots.

`training` is a run that another process writes, for tests of the live page.
"""

import json
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Error, sync_playwright

from tests.support.programs import needs

PATIENCE = 120.0
"""Seconds to wait for anything on a page. It is long because test machines are busy."""
COMPARE_PANELS = ("loss", "diameter", "perturbation", "ratio")
RUN_PANELS = ("diameter", "saturation", "perturbation", "loss", "learning_rate", "cost")
WIDE = {"viewport": {"width": 1280, "height": 900}}
PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}
VIOLATIONS = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) => window.violations.push(event.violatedDirective));
"""


class Visitor:
    """A browser context with its own cookies. It collects in `troubles` what no page of ours may do.

    These are console messages, errors, failed requests, requests to other hosts, dialogs and violations of the content
    security policy.
    """

    def __init__(self, browser, base, **options):
        self.base, self.host, self.troubles = base.partition("?")[0].rstrip("/"), urlsplit(base).netloc, []
        self.context = browser.new_context(**options)
        self.context.set_default_timeout(1000 * PATIENCE)
        self.context.add_init_script(VIOLATIONS)
        note = self.troubles.append
        self.context.on(
            "console", lambda message: message.type in ("error", "warning") and note(f"console: {message.text}")
        )
        self.context.on("weberror", lambda error: note(f"error: {error.error}"))
        self.context.on("requestfailed", self._on_failed_request)
        self.context.on(
            "response", lambda response: response.status >= 400 and note(f"{response.status}: {response.url}")
        )
        self.context.on("request", self._on_request)
        self.context.on("dialog", self._on_dialog)

    def open(self, path="/"):
        """Open a path in a new tab, and return the page."""
        page = self.context.new_page()
        page.goto(self.base + path)
        return page

    def leave(self):
        """Close all tabs. Call it while the service still runs: requests of the pages would fail otherwise."""
        for page in self.context.pages:
            self.troubles += page.evaluate("window.violations ?? []")
        self.context.close()

    def _on_failed_request(self, request):
        if "ERR_ABORTED" not in (request.failure or ""):  # the browser left, or began a download
            self.troubles.append(f"failed: {request.url}, {request.failure}")

    def _on_request(self, request):
        url = urlsplit(request.url)
        if url.scheme not in ("data", "blob") and url.netloc != self.host:
            self.troubles.append(f"request to another host: {request.url}")

    def _on_dialog(self, dialog):
        self.troubles.append(f"dialog: {dialog.message}")
        dialog.dismiss()


@pytest.fixture(scope="module", name="chromium")
def chromium_fixture():
    """A Chromium. It is closed after each module: its event loop blocks those of other tests in the thread."""
    with sync_playwright() as playwright:
        shell = shutil.which("chromium-headless-shell")  # the same engine without a browser's own windows around it
        browser = playwright.chromium.launch(executable_path=shell or needs("chromium"), args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(name="visit")
def visit_fixture(chromium):
    """A function that makes Visitors. At the end of the test it fails if one has troubles.

    A visitor made with `troubled=True` may have them.
    """
    visitors = []

    def make(base, troubled=False, **options):
        visitor = Visitor(chromium, base, **options)
        visitors.append((visitor, troubled))
        return visitor

    yield make
    for visitor, troubled in visitors:
        visitor.leave()
        assert troubled or not visitor.troubles, visitor.troubles


@contextmanager
def staying(browser, base, path, **options):
    """A visitor with one tab, for the tests of a module that leave nothing behind: plotly takes seconds to start."""
    visitor = Visitor(browser, base, **options)
    visitor.open(path)
    yield visitor
    visitor.leave()


@pytest.fixture(name="page")
def page_fixture(visitor):
    """The tab of the module's own `visitor`, who must have had no troubles after the test."""
    (page,) = visitor.context.pages
    yield page
    visitor.context.unroute_all()
    assert not visitor.troubles, visitor.troubles


def go(page, path):
    """Go to another view within the document, as the links on the page do."""
    page.evaluate("(path) => (history.pushState(null, '', path), dispatchEvent(new PopStateEvent('popstate')))", path)


def until(page, script, argument=None, timeout=PATIENCE):
    """Ask a script again and again until its result is true, and return the result.

    Playwright's own `wait_for_function` needs eval, which the content security policy forbids. The page asks by itself:
    a question from here takes four processes.
    """
    asking = f"""async (argument) => {{
        for (let left = 50; ; left--) {{
            const asked = ({script}), result = typeof asked === "function" ? asked(argument) : asked;
            if (result || !left) return result;
            await new Promise((resolve) => setTimeout(resolve, 20));
        }}
    }}"""
    deadline = time.monotonic() + timeout
    while not (result := _asked(page, asking, argument)):
        assert time.monotonic() < deadline, f"{script} {argument}: still {result!r}; {visible_text(page)[:2000]}"
    return result


def _asked(page, asking, argument):
    try:
        return page.evaluate(asking, argument)
    except Error as error:
        if "Execution context was destroyed" not in error.message:  # the page went elsewhere meanwhile
            raise


def visible_text(page):
    """The text that a page shows."""
    return page.evaluate("document.body.innerText")


def wait_for_text(page, text):
    """Wait until a page shows a text."""
    until(page, "(text) => document.body.innerText.includes(text)", text)


def wait_for_panels(page, *panels):
    """Wait until panels are drawn; by default all panels of the comparison."""
    script = """(panels) => panels.every((panel) => {
        const plot = document.querySelector(`[data-panel=${panel}] .plot`);
        return plot?.querySelector(".main-svg") && plot._fullLayout?.xaxis?._length;
    })"""
    until(page, script, list(panels or COMPARE_PANELS))


def traces(page, panel):
    """The traces of a panel: name, legend group, x, y, mode, and whether each is hidden."""
    script = """(panel) => {
        const all = document.querySelector(`[data-panel=${panel}] .plot`).data ?? [];
        return JSON.stringify(all.map(({name = null, legendgroup: group = null, x = null, y = null, mode = null,
            visible}) => ({name, group, x, y, mode, hidden: visible === false})));
    }"""
    return json.loads(page.evaluate(script, panel))  # as text: Playwright takes a list apart, number by number


def ranges(page, *panels):
    """The visible x ranges of panels; by default of all panels of the comparison."""
    script = """(panels) => panels.map((panel) =>
        [...document.querySelector(`[data-panel=${panel}] .plot`).layout.xaxis.range])"""
    return page.evaluate(script, list(panels or COMPARE_PANELS))


def wait_for_plot(page, panel, condition):
    """Wait until a JavaScript condition on a panel's `data`, `layout` and x `range` is true."""
    plot = f"document.querySelector('[data-panel={panel}] .plot')"
    until(page, f"(({{data = [], layout = {{}}}}, range = layout.xaxis?.range ?? []) => {condition})({plot} ?? {{}})")


def drag(page, panel, first, last):
    """Drag the pointer across a panel from one x coordinate to another, which zooms in."""
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
    """Move the pointer over the middle of a panel until a hover text appears."""
    page.locator(f"[data-panel={panel}] .plot").scroll_into_view_if_needed()
    box = page.locator(f"[data-panel={panel}] .nsewdrag").bounding_box()
    deadline = time.monotonic() + PATIENCE
    while not page.locator(f"[data-panel={panel}] .hoverlayer text").count():
        assert time.monotonic() < deadline, f"{panel} shows no hover text"
        page.mouse.move(box["x"] + box["width"] * (0.4 + time.monotonic() % 0.2), box["y"] + box["height"] / 2)


def wait_until_live(page):
    """Wait until the page receives live events."""
    until(page, "document.querySelector('#live').dataset.status === 'live'")


WRITER = """
import json, sys, time
from hilbert_monitor.runs.log import RunWriter
from hilbert_monitor.runs.record import Alert, RunInfo
from tests.support.records import record
root, info = sys.argv[1], json.loads(sys.argv[2])
writer = RunWriter.open(root, RunInfo(**info))
print(writer.id, flush=True)
for line in sys.stdin:
    kind, fields = json.loads(line)
    if kind == "record":
        writer.write(record(**fields))
    else:
        writer.alert(Alert(**fields))
    print(time.time(), flush=True)
writer.close()
"""


class Training:
    """A run that another process writes on request."""

    def __init__(self, process):
        self._process, self.id = process, process.stdout.readline().strip()

    def write(self, step, **changes):
        """Write a record, and return the time at which it was written."""
        return self._send("record", {"step": step, "time": time.time(), **changes})

    def alert(self, **fields):
        """Write an alert, and return the time at which it was written."""
        return self._send("alert", fields)

    def _send(self, kind, fields):
        self._process.stdin.write(json.dumps([kind, fields]) + "\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())


@contextmanager
def training(root, **info):
    """Start a process that writes a run. The run ends with the block."""
    defaults = {"head_optimizer": "RowNorm", "model": "GPT", "seed": 0, "panel_hash": "panel"}
    command = [sys.executable, "-c", WRITER, str(root), json.dumps(defaults | info)]
    repository = Path(__file__).parents[2]
    with subprocess.Popen(command, cwd=repository, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Training(process)
        finally:
            process.stdin.close()
            process.wait()

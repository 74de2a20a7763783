import socket
import threading
import time
from contextlib import ExitStack, contextmanager
from urllib.parse import urlsplit

import pytest

from hilbert_monitor.runs.log import RunWriter
from hilbert_monitor.runs.record import RunInfo
from hilbert_monitor.service.following.index import Index
from hilbert_monitor.service.web.server import Server, background, bind
from tests.support.browser import (  # noqa: F401
    WIDE,
    chromium_fixture,
    drag,
    go,
    traces,
    training,
    until,
    visit_fixture,
    wait_for_panels,
    wait_for_plot,
    wait_until_live,
)
from tests.support.services import record, running_service, write_run

LATEST = 3.0
"""Seconds in which a record must be on the screen. One is promised; machines that test do other things too."""
STEPS, SPIKE = 25_000, 17_321


def steps_of(page, panel):
    """The steps that a panel draws, of the curve that has most of them."""
    return max((trace["x"] for trace in traces(page, panel) if trace["mode"] != "markers"), key=len)


def seen(page, panel, step):
    """Wait until a panel draws a step; the time."""
    wait_for_plot(page, panel, f"data.some((trace) => trace.x?.includes({step}))")
    return time.time()


def last_step(page, id, step):
    """Wait until the table says that a run is at a step; the time."""
    script = """([id, step]) => [...document.querySelectorAll("tr[data-run]")]
        .some((row) => row.dataset.run === id && row.querySelector('[data-label="Last step"]').innerText === step)"""
    until(page, script, [id, f"{step:,}"])
    return time.time()


# A run that goes on


def test_a_record_of_another_process_is_on_the_screen_within_a_second(tmp_path, visit, capsys):
    write_run(tmp_path, "before", [record(s) for s in range(1, 60)], head_optimizer="AdamW")
    with training(tmp_path, name="live") as run, running_service(tmp_path, "--port", 0) as (_, url, _):
        run.write(1)
        run.write(2)
        visitor = visit(url, **WIDE)
        views = {
            "compare": (visitor.open("/?group=run"), lambda page, step: seen(page, "ratio", step)),
            "run": (visitor.open(f"/runs/{run.id}"), lambda page, step: seen(page, "diameter", step)),
            "runs": (visitor.open("/runs"), lambda page, step: last_step(page, run.id, step)),
        }
        for page, shows in views.values():
            shows(page, 2)
            wait_until_live(page)
        step, took = 2, {name: [] for name in views}
        for number in range(9):
            for name, (page, shows) in views.items():
                step += 1
                written = run.write(step)
                took[name].append(shows(page, step) - written)
            if number >= 2 and all(sorted(times)[1] < LATEST for times in took.values()):
                break
        for page, shows in views.values():
            shows(page, step)
        assert steps_of(views["run"][0], "diameter") == list(range(1, step + 1))
        visitor.leave()
    with capsys.disabled():
        print(
            f"\nseconds from a record to the screen: { {name: [round(one, 2) for one in took[name]] for name in took} }"
        )
    for name, times in took.items():
        assert sorted(times)[1] < LATEST, (name, times)  # the second: a busy machine may hold up any of them


def test_runs_appear_grow_blow_up_on_a_banner_and_end_by_themselves(tmp_path, visit):
    with background(tmp_path, cache=False) as place:
        visitor = visit(place.url, **WIDE)
        table, compare = visitor.open("/runs"), visitor.open("/")
        wait_until_live(table)
        wait_until_live(compare)
        with training(tmp_path, name="one", head_optimizer="AdamW") as first, training(tmp_path, name="hot") as second:
            for step in range(1, 6):
                first.write(step, diameter=0.6 / step)
                second.write(step, diameter=0.2 / step)
            last_step(table, first.id, 5)
            last_step(table, second.id, 5)
            seen(compare, "ratio", 5)
            assert "3.0\u00d7" in compare.locator(".card[data-metric=diameter]").inner_text()
            until(table, "document.querySelectorAll('tr[data-state=running]').length === 2")
            blow_up(second, visitor, compare)
        until(table, "document.querySelectorAll('tr[data-state=finished]').length === 2")
        until(table, "document.querySelector('#counts').innerText.includes('2 finished')")
        visitor.leave()


def blow_up(run, visitor, page):
    """Let a run blow up: it is on a banner until that is dismissed, and is then again."""
    assert page.locator("#banner .banner-inner").count() == 0
    run.alert(
        step=4, time=time.time(), kind="diameter", value=9.0, severity="page", message="D(S) is three times that."
    )
    until(page, "document.querySelector('#banner .banner-inner')?.innerText.includes('three times that')")
    assert "hot blew up at step 4" in page.locator("#banner").inner_text()
    later = visitor.open("/alerts")
    until(later, "document.querySelector('#banner').innerText.includes('three times that')")
    until(later, "document.querySelector('main .alert[data-kind=diameter]')")
    page.locator("#banner").get_by_role("link", name="Show the step").click()
    until(page, f"location.pathname === '/runs/{run.id}' && location.search.includes('step=4')")
    wait_for_plot(page, "diameter", "layout.shapes?.some((one) => one.x0 === 4)")
    page.locator("#banner").get_by_role("button").click()
    until(page, "!document.querySelector('#banner .banner-inner')")
    page.reload()
    wait_for_panels(page, "diameter")
    wait_until_live(page)
    assert page.locator("#banner .banner-inner").count() == 0
    run.alert(step=5, time=time.time(), kind="diameter", value=9.5, severity="page", message="And again.")
    until(page, "document.querySelector('#banner').innerText.includes('And again')")


# Connections


@pytest.mark.sweep
def test_a_page_goes_on_when_the_server_was_started_anew(tmp_path, visit):
    writer = RunWriter.open(tmp_path, RunInfo(name="live", head_optimizer="RowNorm", model="GPT"))
    for step in range(1, 6):
        writer.write(record(step))
    with ExitStack() as first, ExitStack() as second:
        _, url, _ = first.enter_context(running_service(tmp_path, "--port", 0))
        visitor = visit(url, troubled=True, **WIDE)
        run, compare, table = visitor.open(f"/runs/{writer.id}"), visitor.open("/"), visitor.open("/runs")
        for page in (run, compare):
            page.evaluate("window.same = true")
            seen(page, "diameter", 5)
            wait_until_live(page)
        last_step(table, writer.id, 5)
        first.close()
        for page in (run, compare):
            until(page, "document.querySelector('#live').innerText.includes('connection lost')")
        writer.write(record(6))
        second.enter_context(running_service(tmp_path, "--port", urlsplit(url).port))
        for page in (run, compare):
            wait_until_live(page)
            seen(page, "diameter", 6)
        last_step(table, writer.id, 6)
        writer.write(record(7))
        last_step(table, writer.id, 7)
        for page in (run, compare):
            seen(page, "diameter", 7)
            assert steps_of(page, "diameter") == list(range(1, 8))
            assert page.evaluate("window.same"), "the page was loaded anew"
        visitor.leave()
    writer.close()


class Cable:
    """A way to a server that can be cut. What a browser asks for the stream with is kept."""

    def __init__(self, port):
        self.port, self.asked, self.whole = port, [], True
        self._ends, self._server = [], socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.getsockname()[1]}/"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                near, _ = self._server.accept()
            except OSError:
                return
            if not self.whole:
                near.close()
                continue
            far = socket.create_connection(("127.0.0.1", self.port))
            self._ends += [near, far]
            threading.Thread(target=self._carry, args=(near, far), daemon=True).start()
            threading.Thread(target=self._carry, args=(far, near), daemon=True).start()

    def _carry(self, source, target):
        try:
            while data := source.recv(1 << 16):
                if data.startswith(b"GET /api/events"):
                    self.asked.append(data.decode())
                target.sendall(data)
        except OSError:
            pass
        for end in (source, target):
            end.close()

    def cut(self):
        """Drop all connections, and let none in until `mend`."""
        self.whole = False
        ends, self._ends = self._ends, []
        for end in ends:
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                end.close()

    def mend(self):
        self.whole = True

    def close(self):
        self._server.close()
        self.cut()


@pytest.mark.sweep
def test_a_dropped_connection_goes_on_where_it_was(tmp_path, visit):
    with background(tmp_path, cache=False) as place, training(tmp_path, name="live") as run:
        for step in range(1, 4):
            run.write(step)
        cable = Cable(place.port)
        visitor = visit(cable.url, troubled=True, **WIDE)
        page = visitor.open(f"/runs/{run.id}")
        seen(page, "diameter", 3)
        wait_until_live(page)
        run.write(4)
        seen(page, "diameter", 4)
        cable.cut()
        until(page, "document.querySelector('#live').dataset.status === 'lost'")
        run.write(5)
        cable.mend()
        seen(page, "diameter", 5)
        wait_until_live(page)
        run.write(6)
        seen(page, "diameter", 6)
        assert steps_of(page, "diameter") == list(range(1, 7))
        (_, *again) = cable.asked
        assert again, "it did not ask for the stream again"
        assert all("after=" in one or "last-event-id:" in one.lower() for one in again)
        visitor.leave()
        cable.close()


@contextmanager
def indexed(root):
    """A service and its index."""
    index, place = Index(root), bind("127.0.0.1", 0, None)
    server = Server(index, None, place.hosts)
    thread = threading.Thread(target=server.run, args=([place.socket],), daemon=True)
    index.start()
    thread.start()
    try:
        yield place.url, index
    finally:
        server.should_exit = True
        thread.join()
        index.stop()


@pytest.mark.sweep
def test_eight_tabs_share_one_stream_and_no_late_answer_undoes_what_it_told(tmp_path, visit):
    with indexed(tmp_path) as (url, index), training(tmp_path, name="live") as run:
        run.write(1)
        visitor = visit(url, **WIDE)
        tabs = [visitor.open("/runs") for _ in range(8)]
        for page in tabs:
            last_step(page, run.id, 1)
            wait_until_live(page)
        assert index.feed.listeners == 1
        run.write(2)
        for page in tabs:
            last_step(page, run.id, 2)
        tabs[0].close()
        run.write(3)
        for page in tabs[1:]:
            last_step(page, run.id, 3)
        assert index.feed.listeners == 1

        first, held = tabs[1], []  # an answer that was under way does not undo an event
        visitor.context.route("**/api/runs", lambda route: held.append((route, route.fetch())))
        page = visitor.open("/runs")
        wait_until_live(page)
        run.write(4)
        last_step(first, run.id, 4)
        until(page, "document.querySelector('#counts').innerText.includes('1 running')")
        for route, answer in held:
            route.fulfill(response=answer)
        last_step(page, run.id, 4)
        visitor.leave()


# A spike of one step


@pytest.fixture(scope="module")
def spiked(tmp_path_factory):
    """A service over a long run in which one step is not as the others."""
    root = tmp_path_factory.mktemp("spiked")
    steps = (record(s, diameter=0.9 if s == SPIKE else 1e-3 + 1e-4 * (s % 7)) for s in range(1, STEPS + 1))
    write_run(root, "long", steps)
    with background(root, cache=False) as place:
        yield place.url


def test_a_spike_of_one_step_is_seen_at_every_zoom(spiked, visit):
    page = visit(spiked, **WIDE).open("/")
    for path in ("/", "/runs/long"):
        go(page, "/alerts")
        go(page, path)
        look_closer(page)


def look_closer(page):
    """Zoom in on the spike, which is seen all along."""

    def peak():
        points = [(y, x) for one in traces(page, "diameter") for x, y in zip(one["x"], one["y"], strict=True) if y]
        return max(points)

    def near(reach):
        return [x for x in steps_of(page, "diameter") if abs(x - SPIKE) <= reach]

    wait_for_panels(page, "loss", "diameter", "perturbation")
    coarse, count = near(400), len(steps_of(page, "diameter"))
    assert peak() == (0.9, SPIKE)
    assert count < STEPS / 5
    for reach in (4000, 500):
        drag(page, "diameter", SPIKE - reach, SPIKE + reach)
        wait_for_plot(page, "loss", f"range[1] - range[0] < {2.5 * reach}")
        wait_for_plot(
            page,
            "diameter",
            f"data.some(({{x}}) => x?.filter((x) => Math.abs(x - {SPIKE}) <= 400).length > {len(coarse)})",
        )
        assert peak() == (0.9, SPIKE)
        assert len(near(400)) > len(coarse)
        coarse = near(400)
    wait_for_plot(page, "loss", f"data.some(({{x}}) => x?.includes({SPIKE - 3}))")
    assert near(400) == list(range(SPIKE - 400, SPIKE + 401))
    assert "x0=" in page.url

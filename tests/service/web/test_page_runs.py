"""The pages of runs and alerts in a browser: columns, ticked runs, notes, tags, the archive, acknowledged alerts."""

import shutil
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest

from hilbert_monitor.runs.record import Alert
from hilbert_monitor.service.web.server import background
from tests.support.browser import (  # noqa: F401
    WIDE,
    chromium_fixture,
    staying,
    training,
    until,
    visit_fixture,
    wait_for_text,
)
from tests.support.services import IMAGE, SCRIPT, record, write_run

ATTACK = """([url, kind]) => fetch(url, {
    method: "POST",
    mode: kind.endsWith("json") ? "cors" : "no-cors",
    credentials: "include",
    headers: {"Content-Type": kind},
    body: '{"runs": ["a"], "note": "gotcha"}',
}).catch(() => 0)"""
LRS = {"a": 0.1, "b": 0.02, "c": 0.3}


def alert(step):
    return Alert(
        step=step, time=1_700_000_000.0 + step, kind="diameter", value=0.8, expected=0.03, message=f"of {step}"
    )


def write_three(root):
    for name, lr in LRS.items():
        alerts = [alert(2), alert(3)] if name == "b" else []
        steps = [record(s, gauge_waste=lr) for s in (1, 2, 3)]
        write_run(root, name, steps, alerts, config={"optimizer": {"lr": lr}, "batch": 8})
    return root


@pytest.fixture
def root(tmp_path):
    return write_three(tmp_path / "runs")


@pytest.fixture(scope="module")
def visitor(chromium, tmp_path_factory):
    """One browser and one service over three runs, for tests that leave the alerts as they are."""
    folder = tmp_path_factory.mktemp("shared")
    with (
        background(write_three(folder / "runs"), cache=False, data=folder / "data") as place,
        staying(chromium, place.url, "/runs", **WIDE) as visitor,
    ):
        yield visitor


@pytest.fixture
def view(visitor):
    """A function that loads a path in the tab that is open, which remembers nothing. Runs are brought back after."""
    (page,) = visitor.context.pages

    def load(path="/runs"):
        page.evaluate("localStorage.clear()")
        page.goto(visitor.base + path)
        until(page, "document.querySelector('#live').dataset.status === 'live'")
        return page

    yield load
    visitor.context.unroute_all()
    archive(page, *LRS, archived=False)
    assert not visitor.troubles


@pytest.fixture
def open_page(root, tmp_path, visit):
    """A function that opens a path of a service over three runs."""
    visitors = []
    with background(root, cache=False, data=tmp_path / "data") as place:

        def make(path="/runs", troubled=False, **options):
            visitor = visit(place.url, troubled=troubled, **(WIDE | options))
            visitors.append(visitor)
            page = visitor.open(path)
            until(page, "document.querySelector('#live').dataset.status === 'live'")
            return page

        yield make
        for visitor in visitors:
            for page in visitor.context.pages:
                page.close()


def listed(page):
    return page.evaluate("[...document.querySelectorAll('tr[data-run]')].map((row) => row.dataset.run)")


def wait_for_runs(page, *ids):
    until(
        page,
        "(ids) => [...document.querySelectorAll('tr[data-run]')].map((r) => r.dataset.run).join() === ids",
        ",".join(ids),
    )


def query(page):
    return parse_qs(urlsplit(page.url).query)


def test_columns_of_settings_and_last_values_are_chosen_sorted_and_in_the_address(view):
    page = view()
    wait_for_runs(page, "c", "b", "a")
    page.locator("details.columns summary").click()
    legends = "[...document.querySelectorAll('.columns legend')].map((one) => one.textContent)"
    until(page, f"{legends}.includes('Settings that differ')")
    differ = page.locator(".columns fieldset", has_text="Settings that differ")
    assert differ.locator("input").evaluate_all("(all) => all.map((one) => one.value)") == ["optimizer.lr"]
    page.locator(".columns input[value='optimizer.lr']").check()
    page.locator(".columns input[value='last:gauge_waste']").check()
    page.locator(".columns input[value='model']").uncheck()
    assert query(page) == {"show": ["optimizer.lr", "last:gauge_waste"], "hide": ["model"]}
    until(page, "document.querySelector('tr[data-run=b]').textContent.includes('0.02')")
    assert page.locator("th[data-key=model]").count() == 0
    for _ in range(2):
        page.locator("th[data-key='optimizer.lr'] button").click()
    wait_for_runs(page, "c", "a", "b")
    same = view(f"/runs?{urlsplit(page.url).query}")
    wait_for_runs(same, "c", "a", "b")
    until(same, "document.querySelector('th[data-key=\"optimizer.lr\"]').ariaSort === 'descending'")


def test_any_number_of_runs_is_ticked_and_compared(view):
    page = view()
    wait_for_runs(page, "c", "b", "a")
    page.get_by_label("Tick all runs that are listed").check()
    wait_for_text(page, "3 runs ticked")
    page.locator("tr[data-run=b] .pick input").uncheck()
    wait_for_text(page, "2 runs ticked")
    page.get_by_role("link", name="Compare these").click()
    until(page, "location.pathname === '/'")
    assert query(page) == {"model": ["GPT"], "runs": ["c,a"]}
    wait_for_text(page, "Runs: 2 of 3")


def test_the_filter_compares_and_excludes(view):
    page = view()
    for text, ids in (("lr>0.05", ["c", "a"]), ("-lr>0.2", ["b", "a"]), ("alerts>0 OR lr=0.3", ["c", "b"])):
        page.locator("#filter").fill(text)
        wait_for_runs(page, *ids)


def test_a_note_and_tags_are_written_and_shown_as_text(view, visitor, visit):
    page, stranger = view(), visit(visitor.base, **WIDE)
    other, run = stranger.open("/runs"), stranger.open("/runs/a")
    for one in (other, run):
        until(one, "document.querySelector('#live').dataset.status === 'live'")
    page.locator("tr[data-run=a]").hover()
    page.get_by_role("button", name="Note and tags of a").click()
    page.get_by_label("Note", exact=True).fill(f"{SCRIPT} {IMAGE}")
    page.get_by_label("Tags", exact=True).fill("baseline, to keep")
    page.get_by_role("button", name="Save").click()
    for one in (page, other):
        wait_for_text(one, IMAGE)
        assert SCRIPT in one.locator("tr[data-run=a] .note").inner_text()
        assert one.locator("tr[data-run=a] .note *").count() == 0
    wait_for_text(run, IMAGE)
    run.get_by_role("button", name="Note and tags").click()
    run.get_by_label("Note", exact=True).fill("of the run's page")
    run.get_by_role("button", name="Save").click()
    wait_for_text(other, "of the run's page")
    page.get_by_role("link", name="to keep").click()
    wait_for_runs(page, "a")
    assert query(page) == {"q": ['tag:"to keep"']}


def test_a_change_that_is_refused_says_why_in_the_dialog(view, visitor):
    page = view()
    page.locator("tr[data-run=a]").hover()
    page.get_by_role("button", name="Note and tags of a").click()
    page.get_by_label("Tags", exact=True).fill("x" * 50)
    page.get_by_role("button", name="Save").click()
    until(page, "document.querySelector('.remark .refusal').textContent.includes('40 characters')")
    visitor.troubles.clear()


def test_archived_runs_are_hidden_unless_asked_for(view):
    page = view("/runs?tick=b")
    until(page, "document.title === '(2) Runs · hilbert-monitor'")
    page.get_by_role("button", name="Archive").click()
    wait_for_runs(page, "c", "a")
    until(page, "document.title === 'Runs · hilbert-monitor'")
    page.locator(".chip", has_text="archived").click()
    wait_for_runs(page, "c", "b", "a")
    assert query(page)["archived"] == ["1"]
    page.get_by_role("button", name="Bring back").click()
    page.locator(".chip", has_text="archived").click()
    wait_for_runs(page, "c", "b", "a")


def test_alerts_are_acknowledged_with_a_name_and_fold_away(open_page):
    page, run = open_page("/alerts"), open_page("/runs/b")
    until(page, "document.querySelectorAll('ol.alerts.wide:not(.past ol) > li').length === 2")
    until(page, "document.title === '(2) Alerts · hilbert-monitor'")
    page.get_by_label("Acknowledge as").fill("Ada")
    page.get_by_role("button", name="Acknowledge", exact=True).first.click()
    wait_for_text(page, "1 open alert")
    until(page, "document.title === '(1) Alerts · hilbert-monitor'")
    assert "acknowledged by Ada" not in page.evaluate("document.body.innerText")
    page.locator(".past summary").click()
    wait_for_text(page, "acknowledged by Ada")
    wait_for_text(run, "acknowledged by Ada")
    until(run, "document.title.startsWith('(1) b')")
    page.get_by_role("button", name="Undo").click()
    wait_for_text(page, "2 alerts")
    page.get_by_role("button", name="Acknowledge these 2").click()
    wait_for_text(page, "No alert is open")
    until(page, "document.title === 'Alerts · hilbert-monitor'")
    until(run, "document.querySelectorAll('.part.alerts [data-acknowledged]').length === 2")


class Stranger(BaseHTTPRequestHandler):
    """A page of another origin of the same site, without a content security policy."""

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>a page elsewhere</title>")

    def log_message(self, *_):
        """Say nothing."""


@pytest.fixture
def elsewhere():
    with ThreadingHTTPServer(("127.0.0.1", 0), Stranger) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_page_elsewhere_cannot_change_anything_through_a_visitors_browser(view, elsewhere, visit):
    page = view()
    victim = page.url.partition("/runs")[0]
    stranger = visit(elsewhere, troubled=True)
    attacker = stranger.open("/")
    for kind in ("application/json", "text/plain", "application/x-www-form-urlencoded"):
        attacker.evaluate(ATTACK, [f"{victim}/api/remarks", kind])
    answered = [trouble for trouble in stranger.troubles if "NotSameOrigin" in trouble]
    assert len(answered) >= 2, "the requests without a preflight have reached the service"
    attacker.close()
    page.reload()
    wait_for_runs(page, "c", "b", "a")
    assert "gotcha" not in page.evaluate("document.body.innerText")


@pytest.mark.sweep
def test_a_long_list_shows_its_first_rows_first_and_where_nothing_can_be_kept_nothing_is_offered(root, visit):
    for number in range(207):
        write_run(root, f"run {number}")
    with background(root, cache=False, data=False) as place:
        visitor = visit(place.url, troubled=True, **WIDE)
        page = visitor.open("/runs?tick=a")
        wait_for_text(page, "1 run ticked")
        wait_for_text(page, "210 runs")
        until(page, "document.querySelectorAll('tr[data-run]').length === 200")
        wait_for_text(page, "Show more: 10 are left")
        page.evaluate("scrollTo(0, document.body.scrollHeight)")
        until(page, "document.querySelectorAll('tr[data-run]').length === 210")
        assert page.get_by_role("button", name="Archive").count() == 0
        assert page.locator(".pencil").count() == 0
        page.goto(visitor.base + "/alerts")
        wait_for_text(page, "2 alerts")
        assert page.get_by_role("button", name="Acknowledge").count() == 0
        assert visitor.troubles == []


# The archive and the comparison


def archive(page, *runs, archived=True):
    """Archive runs as another visitor would."""
    answer = page.request.post(
        urlsplit(page.url)._replace(path="/api/remarks", query="").geturl(),
        data={"runs": [*runs], "archived": archived},
    )
    assert answer.ok


@pytest.mark.sweep
def test_a_run_that_somebody_archives_leaves_the_comparison(view):
    page = view("/")
    until(page, "document.querySelector('.selection summary').innerText === 'Runs: all 3'")
    archive(page, "b")
    until(page, "document.querySelector('.selection summary').innerText === 'Runs: all 2'")
    until(page, "!document.querySelector('.values').innerText.includes('0.02')")
    page.reload()
    until(page, "document.querySelector('.values').innerText.includes('0.3')")
    until(page, "document.querySelector('.selection summary').innerText === 'Runs: all 2'")
    archive(page, "b", archived=False)
    until(page, "document.querySelector('.values').innerText.includes('0.02')")


@pytest.mark.sweep
def test_an_archived_run_that_was_chosen_stays_when_the_others_are_ticked(view):
    page = view("/")
    archive(page, "b")
    page.goto(page.url + "?runs=a,b")
    until(page, "document.querySelector('.selection summary').innerText === 'Runs: 2 of 3'")
    page.locator(".selection summary").click()
    page.locator(".choices [value=c]").check()
    until(page, "document.querySelector('.selection summary').innerText === 'Runs: all 3'")
    assert sorted(query(page)["runs"][0].split(",")) == ["a", "b", "c"]
    page.get_by_role("button", name="All runs").click()
    until(page, "document.querySelector('.selection summary').innerText === 'Runs: all 2'")
    assert "runs" not in query(page)


def test_where_all_runs_are_archived_the_pages_say_so_and_show_them(view):
    page = view("/")
    archive(page, *LRS)
    wait_for_text(page, "All runs are archived: tick some in Runs to compare them.")
    page.get_by_role("link", name="Runs", exact=True).click()
    page.get_by_role("button", name="Show 3 archived runs").click()
    wait_for_runs(page, "c", "b", "a")


@pytest.mark.sweep
def test_a_late_answer_does_not_undo_what_an_event_told_since(view):
    page = view("/")
    late = []

    def answer_late(route):
        if route.request.method != "GET" or late:
            return route.continue_()
        late.append((route, route.fetch()))
        return None

    page.context.route("**/api/remarks", answer_late)
    page.evaluate("dispatchEvent(new PageTransitionEvent('pageshow', {persisted: true}))")  # asks for all anew
    while not late:
        page.wait_for_timeout(50)
    archive(page, *LRS)
    wait_for_text(page, "All runs are archived")
    route, answer = late[0]
    route.fulfill(response=answer)
    page.wait_for_timeout(500)
    assert "All runs are archived" in page.evaluate("document.body.innerText")


def test_runs_whose_names_have_commas_are_compared(root, open_page):
    for name, copy in (("a", "lr=0.1,wd=50%"), ("b", "lr=0.2,wd=%2C")):
        shutil.copytree(root / name, root / copy)
    page = open_page("/runs")
    for name in ("lr=0.1,wd=50%", "lr=0.2,wd=%2C"):  # what is asked of a run that is not indexed yet is refused
        wait_for_text(page, name)
        page.get_by_role("row").filter(has_text=name).get_by_role("checkbox").check()
    page.get_by_role("link", name="Compare these").click()
    until(page, "document.querySelector('.selection summary')?.innerText === 'Runs: 2 of 5'")
    wait_for_text(page, "lr=0.02 (1 run)")
    assert "There is no run" not in page.evaluate("document.body.innerText")


# Alerts by the keyboard


@pytest.mark.sweep
def test_the_focus_goes_on_to_the_next_alert(open_page):
    page = open_page("/alerts")
    button = page.get_by_role("button", name="Acknowledge", exact=True).first
    button.focus()
    page.keyboard.press("Enter")
    wait_for_text(page, "1 open alert")
    until(page, "document.activeElement.closest('.alert')?.innerText.includes('of 2')")
    page.keyboard.press("Enter")
    wait_for_text(page, "No alert is open")
    until(page, "document.activeElement.matches('h1')")


@pytest.mark.sweep
def test_the_focus_stays_when_another_alert_comes_and_an_archived_run_is_on_no_banner(root, open_page):
    with training(root, name="hot") as run:
        run.write(1)
        page = open_page("/alerts")
        page.locator(".alert", has_text="of 2").get_by_role("link", name="step 2").focus()
        run.alert(step=1, time=time.time(), kind="diameter", severity="page", value=9.0, pair=(11, 198), message="far")
        wait_for_text(page, "3 alerts")
        until(page, "document.activeElement.innerText === 'step 2'")
        assert "token 11 and token 198" in page.locator(".alert", has_text="far").inner_text()
        until(page, "document.querySelector('#banner').innerText.includes('hot blew up')")
        archive(page, run.id)
        until(page, "!document.querySelector('#banner .banner-inner')")

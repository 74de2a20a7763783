"""The page around its views: first paint, theme, the bar on a phone, and whether it is live."""

import signal
import time

import pytest

from hilbert_monitor.service.web.server import background
from tests.support.browser import (  # noqa: F401
    PHONE,
    WIDE,
    chromium_fixture,
    go,
    page_fixture,
    staying,
    until,
    visit_fixture,
    wait_for_panels,
    wait_until_live,
)
from tests.support.clock import at_best
from tests.support.services import record, running_service, write_run

DARK = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g)[0] < 60"
GROUNDS = """
window.grounds = new Set();
const look = () => {
    if (document.body) window.grounds.add(getComputedStyle(document.body).backgroundColor);
    requestAnimationFrame(look);
};
look();
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A service over a pair of runs, seven that failed, with long names, and one with long labels."""
    root = tmp_path_factory.mktemp("pair")
    for head in ("AdamW", "RowNorm"):
        write_run(root, head, [record(s) for s in range(1, 51)], head_optimizer=head)
    for seed in range(1, 8):
        write_run(root, f"a-{'long-' * 8}lost-run-{seed}", [record(1)], error=ValueError("lost"), seed=seed)
    long = [record(s, train_loss=1e6 + s / 100, validation_loss=1e6 + s / 100) for s in range(1, 51)]
    write_run(root, "wide", long, model="Wide")
    with background(root, cache=False) as place:
        yield place.url


@pytest.fixture(scope="module")
def visitor(chromium, served):
    with staying(chromium, served, "/alerts", **WIDE) as visitor:
        yield visitor


# First paint


@pytest.mark.sweep
def test_curves_are_sketched_until_plotly_is_there(visitor, page):
    held = []
    visitor.context.route("**/plotly.min.js", lambda route: held.append(route))
    page.goto(f"{visitor.base}/?model=GPT", wait_until="commit")
    until(page, "document.querySelectorAll('.panel .sketch path').length > 4")
    assert page.evaluate("typeof Plotly") == "undefined"
    until(page, "document.querySelector('[data-panel=diameter] .plot').ariaLabel.includes('RowNorm')")
    sizes = """[...document.querySelectorAll("[data-panel=diameter] .sketch path")].map((one) => one.getBBox())
        .map(({width, height}) => [width, height])"""
    wide = [height for width, height in page.evaluate(sizes) if width > 0.9]
    assert len(wide) >= 2
    assert all(0.5 < height <= 1 for height in wide)
    count = page.locator("[data-panel=diameter] .sketch path").count()
    page.locator("[data-panel=diameter] .legend [data-key=AdamW]").click()
    until(page, "document.querySelectorAll('[data-panel=diameter] .sketch path').length < " + str(count))
    held[0].continue_()
    wait_for_panels(page)
    until(page, "!document.querySelector('.sketch')")


def test_plotly_is_fetched_again_after_a_failure_before_the_page_was_there(visitor, page):
    attempts = []

    def fail_first(route):
        attempts.append(route)
        return route.abort() if len(attempts) == 1 else route.continue_()

    visitor.context.route("**/plotly.min.js", fail_first)
    page.goto(f"{visitor.base}/?model=GPT")
    wait_for_panels(page)
    assert len(attempts) == 2
    visitor.troubles.clear()


def test_labels_that_need_more_room_than_usual_get_it(page):
    go(page, "/runs/wide")
    wait_for_panels(page, "saturation", "loss", "diameter")
    within = """name => {
        const plot = document.querySelector(`[data-panel=${name}] .plot`);
        const left = [...plot.querySelectorAll(".ytick")].map((label) => label.getBoundingClientRect().left);
        return [Math.min(...left) - plot.getBoundingClientRect().left, plot._fullLayout._size.l];
    }"""
    (free, margin), (other_free, usual) = (page.evaluate(within, name) for name in ("loss", "diameter"))
    assert free >= 0
    assert other_free >= 0
    assert margin > usual, "only the panel whose labels are long has more room"


# Light and dark


@pytest.mark.sweep
def test_a_theme_is_chosen_remembered_and_never_flashes(served, visit):
    visitor = visit(served, color_scheme="light", **WIDE)
    visitor.context.add_init_script(GROUNDS)
    page = visitor.open("/?model=GPT")
    wait_for_panels(page)
    other = visitor.open("/runs")
    button = page.locator("#theme-button")
    assert "as the system" in button.get_attribute("aria-label")
    assert not page.evaluate(DARK)
    button.click()
    assert "light" in button.get_attribute("aria-label")
    page.emulate_media(color_scheme="dark")
    assert not page.evaluate(DARK)
    page.emulate_media(color_scheme="light")
    button.click()
    until(page, DARK)
    until(page, "getComputedStyle(document.querySelector('[data-panel] .xtick text')).fill.match(/\\d+/g)[0] > 120")
    until(other, DARK)
    page.reload()
    wait_for_panels(page)
    assert page.evaluate("[...grounds]") == ["rgb(18, 20, 23)"]
    button.click()
    until(page, f"!({DARK})")
    assert "as the system" in button.get_attribute("aria-label")
    page.reload()
    assert not page.evaluate(DARK)


# A phone


def test_a_phone_has_the_counts_the_theme_and_the_help(served, visit):
    page = visit(served, **PHONE).open("/runs")
    until(page, "document.querySelectorAll('#counts a').length === 2")
    for place in ("#counts a", "#theme-button", "#help-button", "#live"):
        assert page.locator(place).first.is_visible(), place
    assert page.locator("#counts a").first.get_attribute("title") == "7 runs failed"
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.locator("#help-button").tap()
    until(page, "document.querySelector('#help').open")
    assert "two fingers" in page.locator("#help").inner_text()


def test_a_long_note_is_folded_and_opens(page):
    go(page, "/?model=GPT")
    until(page, "document.querySelector('.notes .folded')")
    note = page.locator(".notes li", has_text="in no mean")
    assert "long-lost-run-7" not in note.inner_text()
    height = note.bounding_box()["height"]
    note.locator("summary").click()
    assert "long-lost-run-7" in note.inner_text()
    assert note.bounding_box()["height"] > height
    note.locator("summary").click()
    assert "long-lost-run-7" not in note.inner_text()


# Whether it is live


@pytest.mark.sweep
def test_a_service_that_is_stopped_is_not_live_for_more_than_seconds(tmp_path, visit):
    write_run(tmp_path, "a", [record(1)])
    with running_service(tmp_path, "--port", 0) as (process, url, _):
        visitor = visit(url, troubled=True, **WIDE)
        page = visitor.open("/runs")
        wait_until_live(page)
        page.wait_for_timeout(7000)
        assert page.evaluate("document.querySelector('#live').dataset.status") == "live"
        assert page.evaluate("document.getAnimations().length") == 0, "a page that is left open takes no processor time"

        def seconds_until_it_is_said():
            process.send_signal(signal.SIGSTOP)
            stopped = time.monotonic()
            until(page, "document.querySelector('#live').dataset.status === 'lost'")
            took = time.monotonic() - stopped
            process.send_signal(signal.SIGCONT)
            wait_until_live(page)
            return took

        assert at_best(seconds_until_it_is_said, 10) < 10
        write_run(tmp_path, "b", [record(1)])
        until(page, "document.querySelectorAll('tr[data-run]').length === 2")
        visitor.leave()

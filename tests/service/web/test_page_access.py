"""The page for everybody: contrast, screen readers, the keyboard, a finger."""

import json
import time
from urllib.request import Request, urlopen

import pytest

from hilbert_monitor.runs.log import RunWriter
from hilbert_monitor.runs.record import Alert, RunInfo
from hilbert_monitor.service.web.server import background
from tests.support.browser import (  # noqa: F401
    COMPARE_PANELS,
    PATIENCE,
    PHONE,
    RUN_PANELS,
    WIDE,
    chromium_fixture,
    drag,
    go,
    ranges,
    staying,
    training,
    until,
    visit_fixture,
    wait_for_panels,
    wait_for_plot,
)
from tests.support.contrast import contrasts
from tests.support.services import record, write_run, write_zoo

LEAST = 4.5


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    """A service over runs of every kind, one with two attempts and alerts among them."""
    root = tmp_path_factory.mktemp("zoo")
    write_zoo(root)
    blown = Alert(
        step=50,
        time=5.0,
        kind="diameter",
        value=9.0,
        expected=3.0,
        severity="page",
        pair=(1, 2),
        message="Three times.",
    )
    steps = [record(s) for s in range(1, 101)]
    write_run(root, "again", steps, [blown], OSError("the machine went down"), config={"lr": 0.1}, model="Resumed")
    writer = RunWriter.open(root, RunInfo(name="again", head_optimizer="RowNorm", model="Resumed"), first_step=60)
    for step in range(61, 121):
        writer.write(record(step))
    writer.close()
    with background(root, cache=False, data=tmp_path_factory.mktemp("data")) as place:
        url, said = place.url.rstrip("/"), {"runs": ["failed"], "note": "lost", "tag": ["baseline"], "archived": True}
        while b'"failed"' not in urlopen(f"{url}/api/runs").read():
            time.sleep(0.05)
        urlopen(Request(f"{url}/api/remarks", json.dumps(said).encode(), {"Content-Type": "application/json"})).read()
        yield place.url


@pytest.fixture(scope="module")
def visitor(chromium, zoo):
    with staying(chromium, zoo, "/alerts", **WIDE) as visitor:
        yield visitor


@pytest.fixture(scope="module")
def caller(chromium, zoo):
    """One with a phone."""
    with staying(chromium, zoo, "/alerts", **PHONE) as visitor:
        yield visitor


@pytest.fixture
def view(visitor):
    """Views of the zoo, made anew in a tab that is open."""

    def show(path):
        (page,) = visitor.context.pages
        go(page, "/alerts")
        go(page, path)
        return page

    yield show
    assert not visitor.troubles


VIEWS = {
    "/?model=GPT&hidden=AdamW&x0=10&x1=90": COMPARE_PANELS,
    "/?model=GPT&axis=tokens&group=run": COMPARE_PANELS,
    "/runs?q=status:finished&sort=diameter&a=AdamW-0&b=RowNorm-0": (),
    "/runs?q=nothing-has-this": (),
    "/runs": (),
    "/runs?archived=1&tick=failed": (),
    "/runs/again?step=50": RUN_PANELS,
    "/runs/failed?step=2": ("diameter",),
    "/runs/empty": (),
    "/runs/broken": (),
    "/runs/nobody": (),
    "/alerts": (),
    "/nowhere": (),
}


# Contrast


@pytest.mark.few(1)
@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
def test_every_text_has_contrast(zoo, visit, size):
    page, weak = visit(zoo, reduced_motion="reduce", **size).open("/"), {}
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        count = 0
        for path, panels in VIEWS.items():
            go(page, path)
            until(
                page,
                "document.querySelector('main h1, main h2') && !document.querySelector('.is-loading:not([hidden])')",
            )
            if panels:
                wait_for_panels(page, *panels)
            texts = [one for one in contrasts(page) if one["where"] != "button.pencil" or size is PHONE]  # on hover
            count += len(texts)
            weak |= too_weak(texts, scheme, path)
        assert count > 500
        page.keyboard.press("?")
        texts = contrasts(page)
        assert any(one["text"] == "Keyboard" for one in texts)
        weak |= too_weak(texts, scheme, "help")
        page.keyboard.press("Escape")
    assert not weak


def too_weak(texts, *place):
    return {(*place, one["where"], one["text"]): round(one["ratio"], 2) for one in texts if one["ratio"] < LEAST}


# Screen readers


def label(page, panel):
    return page.locator(f"[data-panel={panel}] .plot").get_attribute("aria-label")


def test_a_plot_tells_its_last_values_and_its_range(view):
    page = view("/?model=GPT")
    wait_for_panels(page)
    text = label(page, "diameter")
    assert text.startswith("Row diameter D(S). ")
    assert "AdamW: 0.01 \u00b1 0, 2 runs at 100 updates, between 0.01 and 1." in text
    page.locator("[data-panel=diameter] .legend [data-key=AdamW]").click()
    until(page, "!document.querySelector('[data-panel=diameter] .plot').ariaLabel.includes('AdamW')")
    go(page, "/runs/again")
    wait_for_panels(page, *RUN_PANELS)
    assert "1 mark of alerts." in label(page, "diameter")
    assert "0.42 % at 120 updates, between 0.42 % and 50 %." in label(page, "saturation")


@pytest.mark.sweep
def test_the_account_of_a_plot_is_renewed_with_its_data(tmp_path, visit):
    with background(tmp_path, cache=False) as place, training(tmp_path, name="live") as run:
        run.write(1, learning_rate=0.25)
        visitor = visit(place.url, **WIDE)
        page = visitor.open(f"/runs/{run.id}")
        wait_for_panels(page, "learning_rate")
        assert "learning rate: 0.25 at 1 updates" in label(page, "learning_rate")
        run.write(2, learning_rate=0.125)
        until(
            page, "document.querySelector('[data-panel=learning_rate] .plot').ariaLabel.includes('0.125 at 2 updates')"
        )
        visitor.leave()


# The keyboard


def test_arrow_keys_move_through_the_values_of_a_plot(view):
    page = view("/?model=GPT")
    wait_for_panels(page)
    spoken = page.locator("[data-panel=diameter] .spoken")

    page.locator("[data-panel=diameter] .plot").focus()
    page.keyboard.press("ArrowRight")
    until(page, "document.querySelector('[data-panel=diameter] .spoken').textContent")
    name = spoken.text_content().partition(":")[0]
    assert "at 100 updates" in spoken.text_content()
    until(page, "document.querySelector('[data-panel=diameter] .hoverlayer').textContent.includes('100 updates')")
    until(page, "document.querySelectorAll('.hairline.on').length === 3")
    page.keyboard.press("ArrowLeft")
    until(page, "document.querySelector('[data-panel=diameter] .hoverlayer').textContent.includes('99 updates')")
    assert "at 99 updates" in spoken.text_content()
    page.keyboard.press("Home")
    until(page, "document.querySelector('[data-panel=diameter] .spoken').textContent.includes('at 1 updates')")
    names = {name}
    for _ in range(3):
        said = spoken.text_content()
        page.keyboard.press("ArrowDown")
        until(page, "(said) => document.querySelector('[data-panel=diameter] .spoken').textContent !== said", said)
        names.add(spoken.text_content().partition(":")[0])
    assert {"AdamW", "RowNorm"} <= names
    page.keyboard.press("Escape")
    until(page, "!document.querySelector('.hairline.on')")


# Zoom


def drag_down(page, panel):
    """Drag the pointer down the middle of a panel, from a quarter to three quarters of its height."""
    page.locator(f"[data-panel={panel}] .plot").scroll_into_view_if_needed()
    box = page.locator(f"[data-panel={panel}] .nsewdrag").bounding_box()
    middle = box["x"] + box["width"] / 2
    page.mouse.move(middle, box["y"] + box["height"] / 4)
    page.mouse.down()
    page.mouse.move(middle, box["y"] + box["height"] / 2, steps=4)
    page.mouse.move(middle, box["y"] + 3 * box["height"] / 4, steps=4)
    page.mouse.up()


def heights(page, panel):
    return page.evaluate(
        "(panel) => document.querySelector(`[data-panel=${panel}] .plot`)._fullLayout.yaxis.range.map(Number)", panel
    )


def test_a_view_can_be_left_while_the_cursor_is_on_a_plot(view):
    page = view("/runs/again")
    wait_for_panels(page, "diameter")
    page.locator("[data-panel=diameter] .plot").focus()
    page.keyboard.press("Tab")
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("ArrowLeft")
    until(page, "document.querySelector('[data-panel=diameter] .spoken').textContent")
    go(page, "/?model=GPT")
    wait_for_panels(page)


@pytest.mark.sweep
@pytest.mark.parametrize("scale", ["log", "linear"])
def test_a_panel_zooms_in_y_alone_until_a_double_click(view, scale):
    page = view(f"/?model=GPT&scale={scale}")
    wait_for_panels(page)
    whole, other, across = heights(page, "diameter"), heights(page, "perturbation"), ranges(page)
    drag_down(page, "diameter")
    until(page, "location.search.includes('y=diameter:')")
    low, high = heights(page, "diameter")
    assert high - low == pytest.approx((whole[1] - whole[0]) / 2, rel=0.1)
    assert heights(page, "perturbation") == other
    assert ranges(page) == across
    page.wait_for_timeout(500)
    if scale == "log":
        page.reload()
        wait_for_panels(page)
        assert heights(page, "diameter") == pytest.approx([low, high], rel=1e-3)
    drag(page, "diameter", 20, 60)
    wait_for_plot(page, "ratio", "range[0] > 10")
    assert heights(page, "diameter") == pytest.approx([low, high], rel=1e-3)
    page.locator("[data-panel=loss] .nsewdrag").dblclick()
    until(page, "!/[?&](x0|y)=/.test(location.search)")
    wait_for_plot(page, "ratio", "range[1] > 90")
    until(
        page,
        "(whole) => document.querySelector('[data-panel=diameter] .plot')._fullLayout.yaxis.range[0] === whole",
        whole[0],
    )
    assert ranges(page) == across


def spread(page, panel, *, down=False):
    """Put two fingers on a panel, and spread them from a fifth of its width, or height, to three fifths."""
    page.locator(f"[data-panel={panel}] .plot").scroll_into_view_if_needed()
    box = page.locator(f"[data-panel={panel}] .nsewdrag").bounding_box()
    touch = page.context.new_cdp_session(page)

    def fingers(kind, apart):
        across, along = (0.0, apart / 2) if down else (apart / 2, 0.0)
        points = [
            {
                "id": finger,
                "x": box["x"] + box["width"] * (0.5 + side * across),
                "y": box["y"] + box["height"] * (0.5 + side * along),
            }
            for finger, side in enumerate((-1, 1))
        ]
        touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points if kind != "touchEnd" else []})

    fingers("touchStart", 0.2)
    for apart in (0.3, 0.4, 0.5, 0.6):
        fingers("touchMove", apart)
    fingers("touchEnd", 0.6)


@pytest.mark.sweep
def test_two_fingers_zoom_on_a_phone_and_two_taps_show_the_whole_range(caller):
    (page,) = caller.context.pages
    go(page, "/alerts")
    go(page, "/?model=GPT")
    wait_for_panels(page)
    whole, height = ranges(page), heights(page, "diameter")
    spread(page, "diameter")
    until(page, "location.search.includes('x1=')")
    wait_for_plot(page, "ratio", "range[0] > 20")
    first, last = ranges(page)[0]
    assert last - first == pytest.approx((whole[0][1] - whole[0][0]) / 3, rel=0.1)
    assert all(one == ranges(page)[0] for one in ranges(page))
    spread(page, "diameter", down=True)
    until(page, "location.search.includes('y=diameter:')")
    low, high = heights(page, "diameter")
    assert high - low < (height[1] - height[0]) / 2.5
    box = page.locator("[data-panel=diameter] .nsewdrag").bounding_box()
    deadline = time.monotonic() + PATIENCE
    while "x0=" in page.url:  # on a busy machine two taps may be too far apart
        assert time.monotonic() < deadline
        for _ in range(2):
            page.touchscreen.tap(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    assert "y=" not in page.url
    wait_for_plot(page, "ratio", "range[1] > 90")
    assert ranges(page) == whole
    assert not caller.troubles

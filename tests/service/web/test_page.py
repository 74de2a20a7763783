import re
import shutil
import time
from urllib.parse import parse_qs, quote, urlsplit

import pytest

from hilbert_monitor.runs.log import RunWriter
from hilbert_monitor.runs.record import Alert, RunInfo
from hilbert_monitor.service.web.server import background
from tests.support.browser import (  # noqa: F401
    COMPARE_PANELS,
    RUN_PANELS,
    WIDE,
    Visitor,
    chromium_fixture,
    drag,
    go,
    hover,
    ranges,
    traces,
    until,
    visible_text,
    visit_fixture,
    wait_for_panels,
    wait_for_plot,
    wait_for_text,
    wait_until_live,
)
from tests.support.services import IMAGE, SCRIPT, record, running_service, write_run, write_zoo

HOSTILE = f"{IMAGE}{SCRIPT}<b>bold</b><a href=//else.where>"
PHONE = {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "has_touch": True}


def write_more(root):
    """To the zoo: a run as hostile as can be, one that was gone on with, two without a common panel, and odd ones."""
    blown = [
        Alert(
            step=step,
            time=time.time() + step,
            kind=HOSTILE,
            value=9.0,
            expected=3.0,
            severity="page",
            pair=(1, 2),
            message=HOSTILE,
        )
        for step in (2, 3)
    ]
    evil = {"head_optimizer": HOSTILE, "model": HOSTILE, "panel_hash": HOSTILE, "remarks": (HOSTILE,)}
    steps = [record(s, pair_text=(HOSTILE, f"\u202e{HOSTILE}")) for s in range(1, 9)]
    id = write_run(root, HOSTILE, steps, blown, ValueError(HOSTILE), config={HOSTILE: {HOSTILE: [HOSTILE]}}, **evil)
    shutil.copytree(root / id, root / f"{IMAGE} two")
    write_run(root, "again", [record(s) for s in range(1, 11)], error=OSError("the machine went down"), model="Resumed")
    writer = RunWriter.open(root, RunInfo(name="again", head_optimizer="RowNorm", model="Resumed"), first_step=6)
    for step in range(7, 13):
        writer.write(record(step))
    writer.close()
    for head, panel in (("AdamW", "one"), ("RowNorm", "two")):
        write_run(
            root,
            f"apart {head}",
            [record(s) for s in range(1, 9)],
            model="Apart",
            head_optimizer=head,
            panel_hash=panel,
        )
    write_run(root, "bare", [record(s, pair_text=None) for s in range(1, 11)], model="Bare")
    for name in ("good", "nan", "far", "stopped"):
        at = {"nan": float("nan"), "far": 1e300}.get(name, 1e9)
        write_run(root, name, [record(s, time=at) for s in (1, 2)], model="Odd")
    info, end = root / "nan" / "info.jsonl", root / "stopped" / "end.jsonl"
    info.write_text(re.sub(r'"started":[^,]*', '"started":"nan"', info.read_text()))
    end.write_text(end.read_text().replace("}", ',"stopped":"SIGTERM"}'))


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    """A service over runs of every kind; `live` has not ended."""
    root = tmp_path_factory.mktemp("zoo")
    write_zoo(root)
    write_more(root)
    live = RunWriter.open(root, RunInfo(name="live", head_optimizer="RowNorm", model="Live", last_step=14_500))
    for step in range(1, 101):
        live.write(record(step, time=time.time() + 0.5 * step))
    with background(root, cache=False) as place:
        yield place.url
    live.close()


@pytest.fixture(scope="module")
def visitor(chromium, zoo):
    """One browser for tests that leave nothing behind but where they are: plotly takes a second to start."""
    found = Visitor(chromium, zoo, **WIDE)
    found.open("/alerts")
    yield found
    found.leave()


@pytest.fixture
def view(visitor):
    """Views of the zoo, made anew in a tab that is open."""

    def show(path):
        page, *_ = visitor.context.pages
        go(page, "/alerts")
        go(page, path)
        return page

    yield show
    assert not visitor.troubles


VIEWS = {
    "/?model=GPT": COMPARE_PANELS,
    "/?model=GPT&group=run&axis=time&smooth=0.5&scale=linear&x0=0.001&x1=0.02": COMPARE_PANELS,
    "/runs": (),
    "/runs?q=status:finished&sort=diameter&a=AdamW-0&b=RowNorm-0": (),
    "/runs/RowNorm-0": RUN_PANELS,
    "/runs/failed?step=2": ("diameter",),
    "/runs/empty": (),
    "/runs/broken": (),
    "/runs/nobody": (),
    "/alerts": (),
}


def settled(page, panels=()):
    """Wait until a view shows what it is going to show."""
    until(page, "document.querySelector('main h1, main h2') && !document.querySelector('.is-loading:not([hidden])')")
    if panels:
        wait_for_panels(page, *panels)


def light(colour):
    """How light a colour is, from 0 to 255."""
    return sum(map(float, re.findall(r"[\d.]+", colour)[:3])) / 3


GROUND = "getComputedStyle(document.body).backgroundColor"
INKS = (
    "[...document.querySelectorAll('[data-panel] .xtick text')].map("
    "(label) => getComputedStyle(label).fill.match(/[\\d.]+/g)[0])"
)


# How it looks


def test_every_view_is_drawn_without_a_word_on_the_console_and_follows_the_system(zoo, visit):
    visitor = visit(zoo, color_scheme="light", **WIDE)
    page = visitor.open("/?model=GPT")
    wait_for_panels(page)
    for path, panels in VIEWS.items():
        go(page, path)
        settled(page, panels)
        wait_until_live(page)
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            if panels:  # the plots follow the ground
                until(page, f"(dark) => {INKS}.every((ink) => dark === ink > 120)", scheme == "dark")
            assert (light(page.evaluate(GROUND)) < 60) == (scheme == "dark"), path
        page.emulate_media(color_scheme="light")
        assert not visitor.troubles, path


@pytest.mark.sweep
def test_a_page_that_turns_dark_while_it_is_drawn_has_no_light_plot(zoo, visit):
    page = visit(zoo, color_scheme="light", **WIDE).open("/runs/RowNorm-0")
    until(page, "document.querySelectorAll('[data-panel] .xtick').length")
    page.emulate_media(color_scheme="dark")
    wait_for_panels(page, *RUN_PANELS)
    until(page, f"{INKS}.every((ink) => ink > 120)")


def test_nothing_is_wider_than_a_phone(zoo, visit):
    page = visit(zoo, **PHONE).open("/")
    hostile = f"/runs/{quote(f'{IMAGE} two')}"
    for path, panels in {**VIEWS, hostile: ("diameter",), f"/?model={quote(HOSTILE)}": ("diameter",)}.items():
        go(page, path)
        settled(page, panels)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, path
        assert page.evaluate("document.querySelector('header').scrollWidth") <= 360, path


# What others wrote


BY_ID = f"/runs/{quote(f'{IMAGE} two')}"


def test_what_others_wrote_is_shown_as_text_in_every_view(visitor, view):
    name, ids = quote(HOSTILE, safe=""), f"{quote(HOSTILE)},{quote(f'{IMAGE} two')}"
    for path, panels in {
        "/runs": (),
        f"/?model={name}&group=run": ("diameter",),
        f"/?model={name}&runs={ids}": ("diameter",),
        f"{BY_ID}?step=2": ("diameter", "loss", "cost"),
        "/alerts": (),
        f"/alerts?kind={name}&run={name}": (),
        f"/runs/{name}": (),
    }.items():
        page = view(path)
        settled(page, panels)
        until(page, "document.querySelector('main').textContent.includes('<img src=x onerror')")
        made = (
            "main img, main script, svg a, svg img, [href^='//'], h1 b, h2 b, .alert b b, td b b, .legend b, .token b"
        )
        assert page.evaluate("(made) => document.querySelectorAll(made).length", made) == 0, path
        assert not visitor.troubles, path


def test_a_hostile_run_shows_all_that_it_wrote(view):
    page = view(BY_ID)
    settled(page, ("diameter",))
    for place in (
        "h1",
        ".run-line",
        ".trouble",
        ".alert .kind",
        ".alert .message",
        "td, th .token",
        ".settings",
        ".remarks",
    ):
        until(
            page,
            "(place) => [...document.querySelectorAll(place)].some((one) => one.textContent.includes('<img'))",
            place,
        )
    until(page, "[...document.querySelectorAll('.token i')].some((one) => one.textContent === 'U+202E')")
    hover(page, "diameter")


# Compare


def test_runs_over_one_panel_have_a_factor_and_a_ratio(view):
    page = view("/?model=GPT")
    wait_for_panels(page)
    assert "50.0\u00d7" in page.locator(".card[data-metric=diameter]").inner_text()
    (ratio,) = [trace for trace in traces(page, "ratio") if trace["name"] == "D(S)"]
    assert ratio["y"] == pytest.approx([50.0] * 100)
    assert "2 pairs" in visible_text(page)


def test_runs_over_different_panels_have_no_ratio_and_the_page_says_why(view):
    page = view("/?model=Apart")
    wait_for_panels(page, "loss", "diameter", "perturbation")
    until(page, "document.querySelector('.notes').innerText.includes('panel')")
    assert traces(page, "ratio") == []
    assert page.locator(".notes").is_visible()
    assert page.locator("[data-panel=ratio] .none").is_visible()
    assert "\u00d7" not in page.locator(".card[data-metric=perturbation_rms]").inner_text()


def test_a_name_in_a_legend_hides_its_curves_in_every_panel(view):
    page = view("/?model=GPT")
    wait_for_panels(page)

    def shown(panel):
        return {trace["name"] for trace in traces(page, panel) if not trace["hidden"]}

    page.locator("[data-panel=diameter] .legend [data-key=AdamW]").click()
    wait_for_plot(page, "perturbation", "data.every((one) => (one.visible === false) === (one.name === 'AdamW'))")
    assert shown("diameter") == shown("perturbation") == {"RowNorm", "Muon"}
    assert parse_qs(urlsplit(page.url).query)["hidden"] == ["AdamW"]
    assert page.locator("[data-panel=loss] .legend [data-key=AdamW]").get_attribute("aria-pressed") == "false"
    page.locator("[data-panel=loss] .legend [data-key=AdamW]").click()
    wait_for_plot(page, "perturbation", "data.every((one) => one.visible !== false)")
    assert "hidden" not in page.url
    page.locator("[data-panel=diameter] .legend [data-key=Muon]").dblclick()
    wait_for_plot(page, "diameter", "data.filter((one) => one.visible !== false).length === 1")
    assert shown("diameter") == {"Muon"}


def test_each_seed_has_its_line_when_asked_for(view):
    page = view("/?model=GPT")
    wait_for_panels(page)
    before = len(traces(page, "diameter"))
    page.get_by_label("Each seed").check()
    wait_for_plot(page, "diameter", f"data.length > {before}")
    assert "seeds=1" in page.url


def test_a_hovered_x_is_marked_in_the_other_panels(view):
    page = view("/?model=GPT")
    wait_for_panels(page)
    hover(page, "loss")
    until(page, "document.querySelectorAll('.hairline.on').length === 3")
    until(page, "document.querySelector('[data-panel=loss] .hoverlayer').textContent.includes('updates')")


def test_the_runs_that_take_part_are_chosen_with_boxes(view):
    page = view("/?model=GPT")
    wait_for_panels(page)
    page.locator(".selection summary").click()
    page.locator(".selection input[value=AdamW-1]").uncheck()
    wait_for_text(page, "1 pair by seed")
    assert "AdamW-1" not in page.url
    page.get_by_role("button", name="All runs").click()
    wait_for_text(page, "2 pairs by seed")


def test_the_address_holds_all_that_the_page_shows(zoo, view, visit):
    page = view("/?model=GPT")
    wait_for_panels(page)
    for name, value in (("axis", "tokens"), ("scale", "linear"), ("group", "run")):
        page.locator(f"label:has(input[name={name}][value={value}])").click()
    page.locator("#smooth").fill("0.5")
    until(page, "document.querySelector('[data-panel=diameter] .legend [data-key=AdamW-0]')")
    page.locator("[data-panel=diameter] .legend [data-key=AdamW-0]").click()
    wait_for_plot(page, "diameter", "layout.yaxis.type !== 'log'")
    drag(page, "perturbation", 20_000, 60_000)
    until(page, "location.search.includes('x1=')")

    def picture(page):
        wait_for_panels(page)
        wait_for_plot(page, "ratio", "range[0] > 10000 && Math.min(...data[0].x) > 10000")
        hidden = {(trace["group"], trace["hidden"]) for panel in COMPARE_PANELS for trace in traces(page, panel)}
        controls = page.evaluate(
            "[...document.querySelectorAll('.controls input')].map((one) => [one.value, one.checked])"
        )
        return controls, ranges(page), hidden, [len(trace["x"]) for trace in traces(page, "diameter")]

    mine = picture(page)
    assert mine == picture(visit(zoo, **WIDE).open(page.url.removeprefix(zoo.rstrip("/"))))
    assert ("AdamW-0", True) in mine[2]
    assert ("AdamW-1", False) in mine[2]
    page.go_back()
    wait_for_plot(page, "ratio", "!location.search.includes('x1=') && range[1] > 90000")
    assert "axis=tokens" in page.url
    page.go_forward()
    assert picture(page) == mine


def test_a_dragged_range_is_every_panels_until_a_double_click(view):
    page = view("/?model=GPT")
    wait_for_panels(page)
    whole = ranges(page)
    drag(page, "diameter", 20, 60)
    wait_for_plot(page, "ratio", "range[0] > 10")
    found = ranges(page)
    assert all(one == found[0] for one in found)
    assert found[0] == pytest.approx([20, 60], abs=2)
    query = parse_qs(urlsplit(page.url).query)
    assert [float(query["x0"][0]), float(query["x1"][0])] == pytest.approx(found[0])
    page.locator("[data-panel=loss] .nsewdrag").dblclick()
    until(page, "!location.search.includes('x0=')")
    wait_for_plot(page, "ratio", "range[1] > 90")
    assert ranges(page) == whole


def test_a_panel_can_be_had_as_csv_and_as_png(view, tmp_path):
    page = view("/?model=GPT&x0=10&x1=19")
    wait_for_panels(page)
    panel = page.locator("[data-panel=diameter]")
    with page.expect_download() as download:
        panel.get_by_role("link", name="CSV").click()
    assert download.value.suggested_filename == "GPT-diameter.csv"
    head, *rows = download.value.path().read_text().splitlines()
    assert "step" in head or "updates" in head
    assert len(rows) >= 10
    with page.expect_download() as download:
        panel.get_by_role("button", name="PNG").click()
    assert download.value.suggested_filename == "GPT-diameter.png"
    assert download.value.path().read_bytes().startswith(b"\x89PNG")
    assert "x0=10" in page.url


# A run


def test_a_run_shows_bracket_ceiling_bound_tokens_cost_and_configuration(view):
    page = view("/runs/RowNorm-0")
    wait_for_panels(page, *RUN_PANELS)
    names = {panel: " ".join(trace["name"] for trace in traces(page, panel)) for panel in RUN_PANELS}
    assert "ceiling" in names["diameter"].lower()
    assert "bound" in names["perturbation"].lower()
    assert "max" in names["perturbation"].lower()
    counts = page.locator("table.tokens tbody td[data-label=Steps]").all_inner_texts()
    assert [int(text.split()[0]) for text in counts] == [34, 33, 33]
    assert "“t1”" in page.locator("table.tokens tbody tr").first.inner_text()
    assert "seven↵lines" in page.locator("table.tokens").inner_text()
    assert "deep.a" in page.locator(".settings").inner_text()
    assert "500 ms" in page.locator(".part.cost").inner_text()


def test_tokens_without_texts_are_shown_by_their_ids(view):
    page = view("/runs/bare")
    until(page, "document.querySelector('table.tokens tbody tr')")
    text = page.locator(".part.tokens").inner_text()
    assert "token 1" in text
    assert "token 7" in text
    assert "\u201c" not in text


def test_a_run_shows_its_pace_and_the_time_that_is_left(view):
    page = view("/runs/live")
    until(page, "document.querySelector('.stats').innerText.includes('tokens a second')")
    stats = " ".join(page.locator(".stats").inner_text().split())
    assert "2 steps a second 2,000 tokens a second 2 h left" in stats
    assert "step 100 of 14,500" in page.locator(".run-line").inner_text()


def test_a_link_to_a_step_marks_it_and_shows_its_alert(view):
    page = view("/runs/failed?step=2")
    wait_for_panels(page, "diameter")
    until(page, "document.querySelector('.marked .alert[data-kind=nonfinite]')")
    wait_for_plot(page, "diameter", "layout.shapes.some((one) => one.x0 === 2)")
    assert page.locator("li[data-step='2'][data-here]").count() == 1
    assert "ValueError" in page.locator(".trouble").inner_text()
    page.get_by_role("button", name="Whole run").click()
    until(page, "!location.search.includes('step') && !document.querySelector('.marked').innerText")


def test_a_run_that_was_gone_on_with_shows_its_attempts(view):
    page = view("/runs/again")
    wait_for_panels(page, "diameter", "learning_rate")
    until(page, "document.querySelectorAll('.attempts tbody tr').length === 2")
    assert "resumed from step 6" in page.locator(".attempts").inner_text()
    assert "2 attempts" in page.locator(".run-line").inner_text()
    (curve,) = [trace for trace in traces(page, "learning_rate") if trace["mode"] != "markers"][:1]
    assert curve["x"] == list(range(1, 13))
    page.get_by_role("link", name="resumed from step 6").click()
    wait_for_plot(page, "diameter", "layout.shapes.some((one) => one.x0 === 6)")
    page.go_back()
    until(page, "!location.search")


@pytest.mark.parametrize(("id", "word"), [("nobody", "no such run"), ("broken", "unreadable"), ("empty", "finished")])
def test_a_run_without_curves_says_what_is_the_matter(view, id, word):
    wait_for_text(view(f"/runs/{id}"), word)


def test_an_address_of_no_view_is_answered_with_a_sentence(visitor, view):
    page = view("/?axis=nonsense")
    wait_for_text(page, "That cannot be shown")
    assert visitor.troubles
    assert all("422" in trouble for trouble in visitor.troubles)
    visitor.troubles.clear()
    page.get_by_role("link", name="Show it without these settings").click()
    wait_for_panels(page, "loss")


# The table and the alerts


def listed(page):
    return page.evaluate("[...document.querySelectorAll('tr[data-run]')].map((row) => row.dataset.run)")


def test_runs_are_filtered_by_text_and_by_field(view):
    page = view("/runs")
    until(page, "document.querySelectorAll('tr[data-run]').length > 10")
    for text, found in (
        ("lr=0.2", ["failed"]),
        ("status:finished seed:1", ["AdamW-1", "RowNorm-1"]),
        ("muon fail", ["failed"]),
    ):
        page.locator("#filter").fill(text)
        until(page, "(found) => document.querySelectorAll('tr[data-run]').length === found", len(found))
        assert sorted(listed(page)) == found
    assert parse_qs(urlsplit(page.url).query)["q"] == ["muon fail"]
    page.locator("#filter").fill("nothing has this")
    wait_for_text(page, "No run matches")
    page.get_by_role("button", name="Show all runs").click()
    until(page, "document.querySelectorAll('tr[data-run]').length > 10")
    page.locator(".chip", has_text="unreadable").click()
    until(page, "document.querySelectorAll('tr[data-run]').length === 1")
    assert listed(page) == ["broken"]


def test_the_table_is_sorted_by_its_heads(view):
    page = view("/runs?q=GPT")
    until(page, "document.querySelectorAll('tr[data-run]').length > 4")
    page.locator("th[data-key=diameter] button").click()
    until(page, "document.querySelector('th[data-key=diameter]').ariaSort === 'ascending'")
    assert [id.partition("-")[0] for id in listed(page)[:4]] == ["RowNorm", "RowNorm", "AdamW", "AdamW"]
    page.locator("th[data-key=diameter] button").click()
    until(page, "document.querySelector('th[data-key=diameter]').ariaSort === 'descending'")
    assert listed(page)[0] == "failed"
    assert listed(page)[1].startswith("AdamW")


def test_an_address_with_a_filter_lists_no_other_runs_while_it_waits_for_the_answer(visitor, view):
    held = []
    visitor.context.route(lambda url: "/api/runs?q=" in url, lambda route: held.append(route))
    page = view("/runs?q=GPT&sort=diameter")
    while not held:
        page.wait_for_timeout(20)
    page.wait_for_timeout(200)
    assert listed(page) == []
    held[0].continue_()
    until(page, "document.querySelectorAll('tr[data-run]').length > 4")
    assert not {"live", "bare"} & {*listed(page)}
    visitor.context.unroute_all()


def test_two_ticked_runs_show_how_they_differ(view):
    page = view("/runs")
    for id in ("AdamW-0", "failed"):
        page.locator(f"tr[data-run='{id}'] .pick input").check()
    until(page, "document.querySelector('.difference table')")
    rows = {row.split("\t")[0].strip() for row in page.locator(".difference tbody tr").all_inner_texts()}
    assert "lr" in {row.splitlines()[0] for row in rows}
    assert parse_qs(urlsplit(page.url).query) == {"tick": ["AdamW-0", "failed"]}
    page.get_by_role("button", name="Clear").click()
    until(page, "!document.querySelector('.difference table')")
    assert page.locator(".actions").inner_text() == ""
    older = view("/runs?a=AdamW-0&b=failed")
    until(older, "document.querySelector('.difference table')")


def test_alerts_are_newest_first_and_lead_to_their_step(view):
    page = view("/alerts")
    until(page, "document.querySelectorAll('.alert').length === 5")
    times = page.evaluate("[...document.querySelectorAll('.alert time')].map((one) => Number(one.dataset.at))")
    assert times == sorted(times, reverse=True)
    page.locator(".alert[data-kind=nonfinite] a.step").click()
    until(page, "location.pathname === '/runs/failed' && location.search.includes('step=2')")
    until(page, "document.querySelector('.marked .alert[data-kind=nonfinite]')")


# The keyboard


def test_the_keyboard_skips_the_bar_reaches_everything_and_has_shortcuts(visitor, view):
    page = view("/alerts")
    page.goto(visitor.base + "/runs")
    until(page, "document.querySelector('tr[data-run]')")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    assert page.locator(".skip").bounding_box()["y"] >= 0
    page.keyboard.press("Enter")
    until(page, "document.activeElement.id === 'main'")
    assert page.locator("tr[data-run]").count() > 10
    page.keyboard.press("Tab")
    until(page, "document.activeElement.closest('main')")

    page.goto(visitor.base + "/?model=GPT&x0=10&x1=20")
    wait_for_panels(page)
    reached = set()
    name = """(({tagName, name, className, dataset, id}) =>
        `${tagName} ${dataset.key ?? dataset.view ?? (name || id || className)}`)(document.activeElement)"""
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(page.evaluate(name))
    wanted = {
        "A runs",
        "INPUT axis",
        "INPUT scale",
        "INPUT group",
        "INPUT smooth",
        "BUTTON AdamW",
        "A tool",
        "BUTTON help-button",
    }
    assert wanted <= reached, reached

    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("0")
    until(page, "!location.search.includes('x0')")
    page.keyboard.press("g")
    page.keyboard.press("r")
    until(page, "location.pathname === '/runs'")
    page.keyboard.press("/")
    until(page, "document.activeElement.id === 'filter'")
    page.keyboard.type("g r?")
    until(page, "location.search.includes('q=')")
    assert page.locator("#filter").input_value() == "g r?"
    page.keyboard.press("Escape")
    until(page, "document.activeElement.id !== 'filter'")
    page.keyboard.press("?")
    until(page, "document.querySelector('#help').open")
    page.keyboard.press("Escape")
    until(page, "!document.querySelector('#help').open")
    page.keyboard.press("g")
    page.keyboard.press("a")
    until(page, "location.pathname === '/alerts'")
    page.keyboard.press("g")
    page.keyboard.press("c")
    until(page, "location.pathname === '/' && location.search.includes('model=GPT')")
    wait_for_panels(page)


# Odd runs


def test_a_time_that_is_no_number_empties_no_table_and_a_stopped_run_is_named(view):
    page = view("/runs")
    until(page, "document.querySelectorAll('tr[data-run]').length > 10")
    assert {"good", "nan", "far", "stopped"} < {*listed(page)}
    page.locator(".chip", has_text="stopped").click()
    until(page, "document.querySelectorAll('tr[data-run]').length === 1")
    assert listed(page) == ["stopped"]
    for name in ("nan", "far"):
        page = view(f"/runs/{name}")
        wait_for_panels(page, "loss")
        assert "step 2" in visible_text(page)


# Nothing there, and nobody let in


@pytest.mark.sweep
def test_an_empty_folder_says_what_to_do(tmp_path, visit):
    with background(tmp_path, cache=False) as place:
        visitor = visit(place.url, **WIDE)
        page = visitor.open("/")
        wait_for_text(page, f"No runs in {tmp_path} yet")
        assert f'HilbertMonitor(run_dir="{tmp_path}")' in visible_text(page)
        assert "demo/runs" in visible_text(page)
        for key, text in (("r", f"No runs in {tmp_path} yet"), ("a", "No step has blown up.")):
            page.keyboard.press("g")
            page.keyboard.press(key)
            wait_for_text(page, text)
        page.keyboard.press("g")
        page.keyboard.press("c")
        wait_until_live(page)
        write_run(tmp_path, "first", [record(s) for s in range(1, 9)])
        wait_for_panels(page, "loss", "diameter")
        assert "No runs" not in visible_text(page)
        visitor.leave()


@pytest.mark.sweep
def test_a_page_without_the_token_says_where_to_find_it(tmp_path, visit):
    write_run(tmp_path, "a", [record(s) for s in range(1, 9)])
    with running_service(tmp_path, "--port", 0, "--token", "sesame-sesame-sesame") as (_, url, _):
        visitor = visit(url, troubled=True, **WIDE)
        page = visitor.open("/")
        wait_for_text(page, "open the link that 'hilbert-monitor serve' printed")
        visitor.troubles.clear()
        page.goto(visitor.base + "/?token=sesame-sesame-sesame&scale=log")
        wait_for_panels(page, "loss", "diameter")
        wait_until_live(page)
        assert "sesame" not in page.url
        assert "scale=log" in page.url
        assert visitor.troubles == []
        visitor.context.clear_cookies()
        page.keyboard.press("g")
        page.keyboard.press("a")
        wait_for_text(page, "This page needs its token")

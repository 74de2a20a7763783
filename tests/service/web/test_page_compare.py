"""The page that compares runs, in a real browser: sweeps, pauses, axes, and what a reader can choose."""

import math
import re
from itertools import pairwise
from urllib.parse import parse_qs, urlsplit

import pytest

from hilbert_monitor.service.web.server import background
from tests.support.browser import (  # noqa: F401
    WIDE,
    Visitor,
    chromium_fixture,
    drag,
    go,
    ranges,
    traces,
    until,
    visible_text,
    wait_for_panels,
    wait_for_plot,
    wait_for_text,
)
from tests.support.services import record, write_run

BEGAN = 1_700_000_000.0


def steps(diameter, count=60, pace=1.0, pause=0, **more):
    """Records whose D(S) is given, by a number or by a function of the step; `pause` is a step after ten hours."""
    for step in range(1, count + 1):
        late = 36_000 if pause and step >= pause else 0
        D = diameter(step) if callable(diameter) else diameter
        changes = {name: value(step) if callable(value) else value for name, value in more.items()}
        yield record(
            step,
            **{
                "time": BEGAN + pace * step + late,
                "diameter": D,
                "perturbation_rms": 3 * D,
                "train_loss": 3 + 1 / step,
                "validation_loss": 3.0 if step % 10 == 0 else None,
                **changes,
            },
        )


def write_models(root):
    """A folder of runs of several models, one for each question."""

    def write(model, optimizer, seed, records, error=None, name="", **config):
        settings = {"size": model, **config}
        write_run(
            root,
            name or f"{model} {optimizer} {seed}",
            records,
            error=error,
            head_optimizer=optimizer,
            seed=seed,
            config=settings,
        )

    write("mixed", "AdamW", 0, steps(10.5), lr=0.001, batch=16)
    write("mixed", "AdamW", 1, steps(1120.7), lr=0.1, batch=64)
    write("mixed", "RowNorm", 0, steps(1.0), lr=0.001, batch=16)
    write("mixed", "RowNorm", 1, steps(1.0), lr=0.001, batch=16)
    for optimizer, factor in (("AdamW", 8.0), ("RowNorm", 2.0), ("Muon", 1.0)):
        for lr in (0.1, 0.2, 0.4):
            for seed in (0, 1):
                name = f"{optimizer} at {lr}, {seed}"
                write("sweep", optimizer, seed, steps(factor * lr, count=20), name=name, lr=lr)
    for seed in (0, 1):
        spike = (lambda step: 3.0 if step == 31 else 0.1) if seed == 0 else 0.1
        write("paused", "AdamW", seed, steps(spike, pace=10 + 20 * seed, pause=31 if seed == 0 else 0))
    write("single", "Lion", 0, steps(0.25))
    write("single", "Lion", 1, steps(0.75))
    wild = {"train_loss": 1000.0, "validation_loss": 1000.0}
    for seed in (0, 1):
        write("broken", "AdamW", seed, steps(lambda step: 0.5 - 0.005 / step, ceiling=0.5))
    write("broken", "AdamW", 2, steps(0.5, **wild), ValueError("lost"))
    for decades in (0.02, 0.6, 1.2, 1.5, 1.9, 2.3, 7.0, 40.0):
        spread = lambda step, decades=decades: 0.013 * 10 ** (decades * (step - 1) / 59)  # noqa: E731
        write(f"decades {decades}", "AdamW", 0, steps(spread))


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    root = tmp_path_factory.mktemp("compare")
    write_models(root)
    with background(root, cache=False) as place:
        yield place.url


@pytest.fixture(scope="module")
def visitor(chromium, service):
    """One browser for all tests, as plotly takes a second to start."""
    visitor = Visitor(chromium, service, **WIDE)
    visitor.open("/alerts")
    yield visitor
    visitor.leave()


@pytest.fixture
def show(visitor):
    """A function that shows a view in a tab that is open, made anew, and waits for its panels."""

    def show(path, *panels):
        (page,) = visitor.context.pages
        go(page, "/alerts")
        go(page, path)
        wait_for_panels(page, *panels)
        return page

    yield show
    assert not visitor.troubles


@pytest.fixture
def compare(show):
    """A function that shows the comparison of a model."""
    return lambda query, *panels: show(f"/?{query}", *(panels or ("loss", "diameter")))


def legend(page, panel):
    return page.locator(f"[data-panel={panel}] .legend button").all_inner_texts()


def labels(page, panel):
    """The labels of a panel's y axis."""
    return page.locator(f"[data-panel={panel}] .ytick text").all_text_contents()


# Seeds of one


def test_runs_with_other_settings_are_no_seeds_of_one_and_the_headline_says_so(compare):
    page = compare("model=mixed", "diameter", "ratio")
    assert page.locator(".card[data-metric=diameter] b").inner_text() == "10.5×"  # noqa: RUF001
    assert "1 pair by seed and panel" in page.locator(".lede").inner_text()
    assert "Grouped by batch and lr." in page.locator(".lede").inner_text()
    assert legend(page, "diameter") == ["AdamW, batch=16, lr=0.001", "AdamW, batch=64, lr=0.1", "RowNorm"]
    assert page.locator(".values tbody th").all_inner_texts() == legend(page, "diameter")


def test_a_sweep_shows_the_least_and_the_largest_ratio(compare):
    page = compare("model=sweep&base=AdamW,+lr=0.1", "diameter", "ratio")
    assert "least and largest of 8" in page.locator(".card[data-metric=diameter]").inner_text()
    assert page.locator(".card[data-metric=diameter] b").inner_text() == "0.25–8.0×"  # noqa: RUF001
    assert "18 runs in 9 groups" in page.locator(".lede").inner_text()


def test_one_optimizer_alone_has_its_values_as_the_headline(compare):
    page = compare("model=single")
    assert page.locator(".card b").all_inner_texts() == ["0.5", "1.5", "3.0000"]
    assert "Lion, 2 runs" in page.locator(".card[data-metric=diameter]").inner_text()


# What a reader chooses


def test_the_sides_of_the_ratio_are_chosen_and_kept_in_the_address(compare):
    page = compare("model=sweep", "ratio")
    page.locator(".choose summary").click()
    page.locator("select[name=base]").select_option("AdamW, lr=0.4")
    page.locator("select[name=over]").select_option("Muon, lr=0.1")
    until(page, "document.querySelector('[data-panel=ratio] h3').innerText === 'AdamW, lr=0.4 / Muon, lr=0.1'")
    assert page.locator(".card[data-metric=diameter] b").inner_text() == "32.0×"  # noqa: RUF001
    assert "also differ in lr (0.4 against 0.1)" in page.locator(".notes").inner_text()
    query = parse_qs(urlsplit(page.url).query)
    assert (query["base"], query["over"]) == (["AdamW, lr=0.4"], ["Muon, lr=0.1"])
    again = compare(urlsplit(page.url).query, "ratio")
    until(again, "document.querySelector('.card[data-metric=diameter] b')?.innerText === '32.0\u00d7'")


def test_groups_are_coloured_by_a_setting(compare):
    page = compare("model=sweep")
    page.locator(".choose summary").click()
    assert page.locator("select[name=by] option").nth(1).inner_text() == "lr"
    page.locator("select[name=by]").select_option("lr")
    wait_for_plot(page, "diameter", "new Set(data.map((one) => one.line.color).filter(Boolean)).size === 3")
    assert "by=lr" in page.url


def test_any_metric_has_a_panel_on_request(compare):
    page = compare("model=sweep")
    page.locator(".choose summary").click()
    page.get_by_label("Add a panel").select_option("efficiency_lower")
    wait_for_panels(page, "loss", "efficiency_lower")
    assert traces(page, "efficiency_lower")[0]["y"][0] == 0.4
    assert "panels=efficiency_lower" in page.url
    with page.expect_download() as download:
        page.locator("[data-panel=efficiency_lower]").get_by_role("link", name="CSV").click()
    assert "efficiency_lower" in download.value.path().read_text()
    page.get_by_role("button", name="Step efficiency lower").click()
    until(page, "!document.querySelector('[data-panel=efficiency_lower]') && !location.search.includes('panels')")


def test_a_range_can_be_dragged_out_on_a_logarithmic_x(compare):
    page = compare("model=sweep", "loss", "diameter", "perturbation", "ratio")
    page.locator(".choose summary").click()
    page.get_by_label("Logarithmic x").check()
    wait_for_plot(page, "diameter", "layout.xaxis.type === 'log'")
    assert ranges(page, "diameter")[0] == pytest.approx([0, math.log10(20)], abs=0.05)
    drag(page, "diameter", 2, 10)
    until(page, "location.search.includes('x1=')")
    query = parse_qs(urlsplit(page.url).query)
    assert [float(query["x0"][0]), float(query["x1"][0])] == pytest.approx([2, 10], rel=0.05)
    wait_for_plot(page, "loss", "range[0] > 0.2 && range[1] < 1.1")


def test_a_range_on_a_logarithmic_x_keeps_its_small_end(compare):
    page = compare("model=paused&axis=time&logx=1&group=run")
    drag(page, "diameter", 0.003, 10.16)
    until(page, "location.search.includes('x1=')")
    assert float(parse_qs(urlsplit(page.url).query)["x0"][0]) == pytest.approx(0.003, rel=0.05)


@pytest.mark.few(1)
@pytest.mark.parametrize(("first", "last"), [(2, 9), (2, 21), (2, 60), (1, 400), (1, 60_000)])
def test_labels_of_a_logarithmic_x_do_not_run_into_each_other(compare, first, last):
    page = compare(f"model=sweep&axis=tokens&logx=1&x0={1000 * first}&x1={1000 * last}")
    for width in (390, 1280):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_timeout(300)  # Plotly follows the window's size
        places = page.evaluate(
            """[...document.querySelectorAll('[data-panel=diameter] .xtick text')]
            .map((one) => one.getBoundingClientRect()).map(({left, right}) => [left, right])
            .sort((a, b) => a[0] - b[0])"""
        )
        assert len(places) > 1
        assert all(right < left for (_, right), (left, _) in pairwise(places)), (width, places)


def test_a_headline_of_contrasts_that_read_alike_is_one_number(compare):
    page = compare("model=sweep")
    until(page, "document.querySelector('[data-metric=diameter] b')?.innerText === '4.0\\u00d7'")
    assert page.locator("[data-metric=difference] b").inner_text() == "+0.0000"


def test_runs_are_found_by_their_settings_in_the_list(compare):
    page = compare("model=sweep")
    page.locator(".selection summary").click()
    page.get_by_label("Find runs").fill("lr=0.4 rownorm")
    until(page, "document.querySelectorAll('.choices input[type=checkbox]').length === 2")
    page.get_by_role("button", name="Only the 2 runs found").click()
    wait_for_text(page, "Runs: 2 of 18")
    until(page, "document.querySelectorAll('[data-panel=diameter] .legend button').length === 1")


# Wall time


def test_a_pause_is_a_gap_and_not_a_ramp(compare):
    page = compare("model=paused&axis=time")
    (mean,) = [trace for trace in traces(page, "diameter") if None in trace["y"]]
    gap = mean["y"].index(None)
    assert mean["y"][gap - 1] == pytest.approx(0.1)
    assert mean["y"][gap + 1] == pytest.approx(1.55)
    assert mean["x"][gap + 1] - mean["x"][gap - 1] == pytest.approx(5.0, abs=0.1)
    assert mean["x"] == sorted(mean["x"])
    run = compare("model=paused&axis=time&group=run")
    assert [trace["y"].count(None) for trace in traces(run, "diameter")] == [1, 0]


def test_the_page_of_a_run_has_the_gap_too(show):
    page = show("/runs/paused-AdamW-0?axis=time", "diameter", "loss")
    (line,) = [trace for trace in traces(page, "diameter") if trace["name"] == "D(S), exact"]
    assert line["y"].index(None) == 30
    assert len([trace for trace in traces(page, "diameter") if trace["name"] == "bracket"]) == 4


# What is drawn, and on which axis


def test_runs_in_no_mean_are_not_called_drawn_unless_they_are(compare):
    page = compare("model=broken")
    assert "In no mean, and not drawn: broken AdamW 2" in visible_text(page)
    page.get_by_label("Each seed").check()
    wait_for_text(page, "In no mean, and drawn as dotted lines: broken AdamW 2")


def test_the_loss_axis_makes_no_room_for_curves_that_are_not_drawn(compare):
    page = compare("model=broken")
    assert page.evaluate("document.querySelector('[data-panel=loss] .plot').layout.yaxis.range[1]") < 5


def test_no_two_ticks_of_shares_read_alike(show):
    page = show("/runs/broken-AdamW-0", "diameter", "saturation")
    shown = labels(page, "saturation")
    assert len(shown) > 1
    assert len({*shown}) == len(shown)


@pytest.mark.few(2)
@pytest.mark.parametrize("decades", [0.02, 0.6, 1.2, 1.5, 1.9, 2.3, 7.0, 40.0])
def test_a_logarithmic_axis_has_several_readable_labels_whatever_its_range(compare, decades):
    page = compare(f"model=decades {decades}")
    shown = labels(page, "diameter")
    assert 2 <= len({*shown}) == len(shown) <= 14
    plain = [text.replace("\u200b", "") for text in shown]
    assert all(re.fullmatch(r"[\d.]+(e-?\d+)?|10\u2212?\d*", text) for text in plain), shown
    sizes = "(all) => [...document.querySelectorAll(all)].map((one) => parseFloat(getComputedStyle(one).fontSize))"
    assert min(page.evaluate(sizes, "[data-panel=diameter] .ytick text")) >= 10

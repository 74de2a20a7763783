"""The page that shows what a diameter buys, in a real browser; and its answers."""

import pytest

from hilbert_monitor.service.web.server import background
from tests.support.browser import (  # noqa: F401
    WIDE,
    chromium_fixture,
    go,
    traces,
    until,
    visible_text,
    visit_fixture,
    wait_for_panels,
    wait_for_text,
)
from tests.support.services import client_of, record, write_run
from tests.support.swept_runs import write_point, write_sweep


@pytest.fixture(scope="module", name="url")
def url_fixture(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    write_sweep(root)
    with background(root, port=0) as server:
        yield server.url


def test_the_page_draws_the_curves_and_has_their_numbers(url, visit):
    page = visit(url, **WIDE).open("/")
    page.locator("nav a", has_text="Diameter").click()
    wait_for_panels(page, "loss", "made")
    drawn = {trace["name"]: trace for trace in traces(page, "loss") if trace["mode"] == "lines+markers"}
    assert {*drawn} == {"AdamW, rows held", "AdamW, scaled", "RowNorm, by its rate"}
    assert drawn["AdamW, scaled"]["x"] == [0.25, 0.5, 1, 2, 4, 8, 16]
    wait_for_text(page, "66 runs on 4 curves")
    text = visible_text(page)
    assert "4.830 \u00b1 0.030" in text  # AdamW scaled to four times: 4.80, 4.83, 4.86
    assert "AdamW without a limit: 4.620 \u00b1 0.020, at a usual diameter of 7\u00d7." in text
    page.locator("[data-panel=loss] .legend button", has_text="AdamW, scaled").click()
    until(page, "() => document.querySelector('[data-panel=loss] .plot').data.some((trace) => trace.visible === false)")
    go(page, "/runs")
    wait_for_text(page, "AdamW, scaled 4.0 2")


@pytest.mark.sweep
def test_without_a_sweep_the_bar_has_no_link_and_the_page_says_how_to_make_one(visit, tmp_path):
    write_run(tmp_path, "ordinary", [record(1), record(2)])
    with background(tmp_path, port=0) as server:
        visitor = visit(server.url, **WIDE)
        page = visitor.open("/diameter")
        wait_for_text(page, "hilbert-monitor bench diameter-curve")
        assert page.locator("#diameter-link").is_hidden()
        visitor.leave()


def test_answers_name_models_curves_and_points(tmp_path):
    write_sweep(tmp_path, allowed=(1.0, 2.0), seeds=(0, 1))
    write_point(tmp_path, "RowNorm, by its rate", 1.0, 0, loss=2.0, model="later")
    with client_of(tmp_path) as client:
        answer = client.get("/api/diameter", params={"model": "Decoder"}).json()
        assert client.get("/api/diameter").json()["model"] == "later"
        assert client.get("/api/diameter", params={"model": "none"}).json()["curves"] == []
        rows = client.get("/api/diameter.csv", params={"model": "Decoder"}).text.splitlines()
        assert {run["sweep"] for run in client.get("/api/runs").json()["runs"]} == {True}
    assert answer["models"] == ["Decoder", "later"]
    assert answer["curves"][0]["name"] == "AdamW"
    assert answer["curves"][0]["points"][0]["allowed"] is None
    assert {*answer["figures"]} == {"loss", "made"}
    assert rows[0].split(",")[:3] == ["curve", "allowed", "runs"]
    assert len(rows) == 1 + 1 + 3 * 2

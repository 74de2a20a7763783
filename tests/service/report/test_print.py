"""The report in a real browser: on the screen, without JavaScript, saved as SVG, and on paper."""

import re
import zlib
from xml.etree import ElementTree

import pytest

from tests.service.report.test_report import invoke, page_of, write_six_runs
from tests.support.browser import (  # noqa: F401
    chromium_fixture,
    page_fixture,
    staying,
    until,
    visible_text,
    visit_fixture,
)

VISIBLE = "(name) => [...document.querySelectorAll(name)].filter((element) => element.checkVisibility()).length"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder of six runs."""
    folder = tmp_path_factory.mktemp("report") / "runs"
    write_six_runs(folder)
    return folder


@pytest.fixture(scope="module")
def report(runs):
    """The address of their report."""
    place = runs.parent / "report.html"
    place.write_text(page_of(runs))
    return place.as_uri()


@pytest.fixture(scope="module")
def visitor(chromium, report):
    with staying(chromium, report, "", color_scheme="dark", viewport={"width": 680, "height": 950}) as visitor:
        drawn(visitor.context.pages[0])
        yield visitor


def drawn(page):
    """Wait until plotly has drawn the four figures."""
    until(page, "document.querySelectorAll('.plot .main-svg').length >= 4")
    return page


def visible(page, *names):
    return [page.evaluate(VISIBLE, name) for name in names]


def test_a_figure_is_saved_as_the_file_that_the_command_writes(page, runs, tmp_path):
    with page.expect_download() as download:
        page.locator("figure").nth(1).get_by_role("button", name="Save as SVG").click()
    assert download.value.suggested_filename == "diameter.svg"
    invoke("report", runs, "--out", tmp_path / "again.html", "--figures", tmp_path / "figures")
    saved, written = (ElementTree.parse(path) for path in (download.value.path(), tmp_path / "figures/diameter.svg"))
    assert ElementTree.canonicalize(ElementTree.tostring(saved.getroot())) == ElementTree.canonicalize(
        ElementTree.tostring(written.getroot())
    )


def test_without_javascript_the_figures_are_there(visit, report):
    page = visit(report, java_script_enabled=False).open("")
    assert page.locator(".drawing svg").first.is_visible()
    assert not page.locator(".plot").first.is_visible()
    assert not page.locator(".save").first.is_visible()


def test_on_paper_figures_are_vectors_in_light_colours_without_controls(page):
    assert visible(page, ".plot", ".save", ".drawing") == [4, 4, 0]
    page.emulate_media(media="print")
    assert visible(page, ".plot", ".save", ".modebar", ".drawing") == [0, 0, 0, 4]
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate("getComputedStyle(document.body).color") == "rgb(0, 0, 0)"
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    for height in page.evaluate("[...document.querySelectorAll('figure')].map((figure) => figure.offsetHeight)"):
        assert 100 < height < 400, "two of them are side by side, and none is cut"
    assert set(
        page.evaluate("[...document.querySelectorAll('figure')].map((f) => getComputedStyle(f).breakInside)")
    ) == {"avoid"}
    page.emulate_media(media="screen")
    for size in ("A4", "Letter"):
        pdf = page.pdf(format=size)
        assert b"/Subtype /Image" not in pdf
        streams = [_inflated(stream) for stream in re.findall(rb"stream\r?\n(.*?)\r?\nendstream", pdf, re.S)]
        assert sum(stream.count(b" l\n") for stream in streams) > 40, "curves are lines"
    assert visible(page, ".plot", ".save", ".drawing") == [4, 4, 0], "the screen is as before"


def _inflated(stream):
    try:
        return zlib.decompress(stream)
    except zlib.error:
        return b""


def test_on_a_phone_nothing_is_wider_than_the_screen(page):
    page.set_viewport_size({"width": 390, "height": 800})
    page.reload()
    drawn(page)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert "Figure 4." in visible_text(page)

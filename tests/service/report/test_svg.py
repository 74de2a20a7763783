"""Figures as SVG: what is drawn is where the axes say, and any text and any number makes a file that opens."""

import itertools
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hilbert_monitor.service.report.svg import HEIGHT, svg

SVG = "{http://www.w3.org/2000/svg}"


def trace(x, y, **changes):
    line = {"color": "#123456", "width": 2.5}
    return {"x": x, "y": y, "mode": "lines", "line": line, "name": "a", "showlegend": True} | changes


def figure(*traces, **yaxis):
    x, y = {"title": {"text": "updates"}, "exponentformat": "B"}, {"title": {"text": "D(S)"}} | yaxis
    return {"data": list(traces), "layout": {"xaxis": x, "yaxis": y}}


def parsed(*args, **options):
    return ElementTree.fromstring(svg(figure(*args, **options)))


def texts(root):
    return ["".join(element.itertext()) for element in root.iter(f"{SVG}text")]


def paths(root, color):
    """The points of the paths with this stroke or fill, in one list for each part of a path."""
    found = [p.get("d") for p in root.iter(f"{SVG}path") if color in (p.get("stroke"), p.get("fill"))]
    parts = [part for path in found for part in path.rstrip("Z").split("M")[1:]]
    return [[tuple(map(float, point.split())) for point in part.split("L")] for part in parts]


def heights(root):
    """The y coordinate of each grid line, by the text of its tick."""
    grid = [points[0][1] for points in paths(root, "#e7e8ea")]
    return dict(zip(texts(root), grid, strict=False))


@pytest.mark.parametrize(
    ("values", "axis", "ticks"),
    [
        ([0.001, 0.01, 0.1, 1.0], {"type": "log"}, ["10−3", "10−2", "10−1", "100"]),  # noqa: RUF001
        ([0.0, 5.0, 10.0, 15.0], {"rangemode": "tozero"}, ["0", "5", "10", "15"]),
        ([0.8, 0.85, 0.9, 0.95], {"tickformat": ".0%"}, ["80%", "85%", "90%", "95%"]),
        ([3.0, 4.0, 5.0, 6.0], {"range": [2.5, 6.5]}, ["3", "4", "5", "6"]),
    ],
)
def test_values_are_drawn_at_the_height_of_their_ticks(values, axis, ticks):
    root = parsed(trace([1, 2, 3, 4], values), **axis)
    (line,) = paths(root, "#123456")[:1]
    assert [y for _, y in line] == pytest.approx([heights(root)[tick] for tick in ticks], abs=0.11)
    steps = [b[0] - a[0] for a, b in itertools.pairwise(line)]
    assert max(steps) - min(steps) < 0.3, "equal distances on the x axis"


def test_both_axes_have_their_titles_and_the_legend_its_names():
    root = parsed(trace([1, 2], [1, 2], name="AdamW"), trace([1, 2], [1, 2], name="R &amp; D", legendrank=1))
    assert {"updates", "D(S)", "AdamW", "R & D"} <= set(texts(root))
    assert texts(root)[-2:] == ["R & D", "AdamW"]
    assert "AdamW" not in texts(parsed(trace([1, 2], [1, 2], name="AdamW", showlegend=False)))


def test_a_long_legend_takes_no_room_from_the_curves():
    names = [f"AdamW, lr={number}, weight_decay=0.1" for number in range(20)]
    roots = [parsed(*(trace([1, 2], [1, 2], name=name) for name in names[:count])) for count in (3, 20)]
    few, many = (float(next(root.iter(f"{SVG}rect")).get("height")) for root in roots)
    assert many >= few > 100
    assert len([text for text in texts(roots[1]) if text in names]) == 20
    low = max(float(element.get("y")) for element in roots[1].iter(f"{SVG}text"))
    assert low < float(roots[1].get("viewBox").split()[3])


def test_a_name_that_is_too_long_for_the_figure_is_cut():
    (name,) = [text for text in texts(parsed(trace([1, 2], [1, 2], name="lr=0.0003, " * 20))) if text.startswith("lr")]
    assert name.endswith("…")
    assert 50 < len(name) < 70


def test_a_gap_stays_a_gap_and_a_band_is_between_its_edges():
    root = parsed(trace([1, 2, 3, 4, 5], [1, 1, None, 1, 1]))
    assert [len(part) for part in paths(root, "#123456")[:2]] == [2, 2]
    edge = {"line": {"width": 0}, "showlegend": False}
    fill = {"fill": "tonexty", "fillcolor": "rgba(1,2,3,0.18)"}
    root = parsed(trace([1, 2], [1, 1], **edge), trace([1, 2], [2, 2], **edge, **fill), range=[0, 3])
    (band,) = paths(root, "#010203")
    at = heights(root)
    assert [y for _, y in band] == pytest.approx([at["1"], at["1"], at["2"], at["2"]], abs=0.11)
    assert {p.get("fill-opacity") for p in root.iter(f"{SVG}path") if p.get("fill") == "#010203"} == {"0.18"}


def test_marks_stand_at_the_top_and_a_second_axis_is_left_out():
    marker = {"symbol": "triangle-down", "color": "#D0312D"}
    marks = {"x": [2], "y": [0.97], "mode": "markers", "marker": marker, "yaxis": "y2", "name": "alerts"}
    root = parsed(trace([1, 3], [1, 2]), marks | {"showlegend": True}, trace([1, 3], [5e9, 6e9], yaxis="y3", name="c"))
    assert "alerts" in texts(root)
    assert "c" not in texts(root)
    (triangle, _) = paths(root, "#D0312D")
    top = float(next(root.iter(f"{SVG}rect")).get("y"))
    assert max(y for _, y in triangle) < top + 0.1 * HEIGHT
    assert not [text for text in texts(root) if "B" in text], "the numbers of the second axis have no tick"


numbers = st.floats(allow_nan=False, allow_infinity=False)


@given(
    st.lists(st.tuples(numbers, st.none() | numbers), max_size=6),
    st.text(max_size=30),
    st.sampled_from([{}, {"range": [0.0, 1.0]}, {"rangemode": "tozero"}, {"type": "log"}]),
)
def test_any_numbers_and_any_name_make_a_file_that_opens(points, name, axis):
    if "type" in axis:
        points = [(x, None if y is None or y <= 0 else y) for x, y in points]
    text = svg(figure(trace([x for x, _ in points], [y for _, y in points], name=name, mode="lines+markers"), **axis))
    text.encode()
    root = ElementTree.fromstring(text)
    drawn = " ".join(path.get("d") for path in root.iter(f"{SVG}path"))
    assert not re.search("nan|inf", drawn)
    assert all(abs(float(number)) < 20_000 for number in re.findall(r"[-\d.]+", drawn))

"""The figures of one run: every curve of its records, and everything that went wrong, in its place."""

import csv
import json
import math

import plotly.graph_objects as go
import pytest

from hilbert_monitor.runs.reader import Batch
from hilbert_monitor.runs.record import Alert, RunInfo, StepRecord
from hilbert_monitor.runs.run import Run
from hilbert_monitor.runs.table import TableBuilder
from hilbert_monitor.service.figures import run_figures as service
from hilbert_monitor.service.figures.downsampling import POINTS
from hilbert_monitor.service.figures.plot_options import PlotOptions
from hilbert_monitor.service.following.text import csv_lines

BEGAN = 1_000_000.0
UPDATES = PlotOptions(axis="updates")
HOSTILE = "<b onclick=x>" * 100


def table(records):
    columns = TableBuilder()
    columns.append(Batch(records=list(records), keep=None, torn=0, offset=0))
    return columns.table


def run_of(records, infos, alerts=()):
    return Run(id="a", info=infos[-1], attempts=tuple(infos), table=table(records), alerts=tuple(alerts))


def record(step, **values):
    """A step of 36 seconds and 100 tokens."""
    return StepRecord(step=step, time=BEGAN + 36 * step, **{"tokens": 100 * step, **values})


def drawn(records, options=UPDATES, attempts=1, alerts=(), **info):
    infos = [
        RunInfo(id="a", attempt=n, first_step=10 * n - 10, started=BEGAN + 360 * (n - 1), **info)
        for n in range(1, attempts + 1)
    ]
    figures = service.figures(run_of(records, infos, alerts), options)
    json.dumps(figures, allow_nan=False)
    return {name: go.Figure(figure) for name, figure in figures.items()}


def trace(figure, name):
    """The strongest trace of a name."""
    return [t for t in figure.data if t.name == name][-1]


def alert(step, kind="blow-up", **values):
    return Alert(**{"step": step, "time": BEGAN + 36 * step, "kind": kind, "value": 2.5, **values})


def test_a_figure_without_a_curve_is_left_out():
    assert drawn([]) == {}
    assert list(drawn([record(1, train_loss=1.0)])) == ["loss"]
    assert list(drawn([record(1, diameter=1.0, ceiling=2.0)])) == ["diameter", "saturation"]
    assert service.figures(Run(id="a")) == {}


def test_all_figures_are_there_when_a_run_measures_all():
    whole = {"train_loss": 1.0, "learning_rate": 0.1, "share": 0.01, "seconds": {"diameter": 0.5}}
    whole |= {"diameter": 1.0, "ceiling": 2.0, "perturbation_rms": 0.5, "hidden_norm": 3.0, "hidden_norm_rms": 2.0}
    whole |= {"spectral_norm": 1.5, "gauge_waste": 0.1, "moment_efficiency_lower": 0.7, "moment_efficiency_upper": 0.8}
    whole |= {"log_z_rms": 9.0, "precision_loss_rms": 0.01, "layer_step": 0.02, "layer_ratio": 1.1}
    assert tuple(drawn([record(1, **whole)])) == tuple(service.PANELS)


def test_the_diameter_stands_in_its_bracket_below_its_ceiling():
    records = [record(s, diameter_lower=s, diameter_upper=2.0 * s, ceiling=100.0) for s in (1, 2, 3)]
    records += [record(4, diameter=5.0, diameter_lower=5.0, diameter_upper=5.0), record(5, diameter_lower=1.0)]
    figure = drawn(records)["diameter"]
    lower, upper = (t for t in figure.data if t.name == "bracket")
    assert (list(lower.x), list(lower.y), list(upper.y)) == ([1, 2, 3, 4], [1, 2, 3, 5], [2, 4, 6, 5])
    assert upper.fill == "tonexty"
    assert list(trace(figure, "D(S), exact").y) == [5.0]
    assert (list(trace(figure, "ceiling").y), trace(figure, "ceiling").line.dash) == ([100.0] * 3, "dash")
    assert figure.layout.yaxis.type == "log"


def test_saturation_is_the_diameter_over_its_ceiling_where_there_are_both():
    records = [record(1, diameter=1.0, ceiling=4.0), record(2, diameter=1.0), record(3, ceiling=1.0)]
    records += [record(4, diameter=1.0, ceiling=0.0), record(5, diameter=3.0, ceiling=4.0)]
    line = trace(drawn(records)["saturation"], "D(S) / ceiling")
    assert (list(line.x), list(line.y)) == ([1, 5], [0.25, 0.75])


def test_the_perturbation_has_the_bound_of_the_diameter_and_the_hidden_states():
    records = [record(1, perturbation_rms=1.0, perturbation_max=2.0, diameter=3.0, hidden_norm=5.0)]
    records += [record(2, perturbation_rms=1.5, hidden_norm=5.0)]
    figure = drawn(records)["perturbation"]
    assert list(trace(figure, "Hilbert RMS").y) == [1.0, 1.5]
    assert list(trace(figure, "maximum").y) == [2.0]
    assert list(trace(figure, "bound D(S) max|h|").y) == [15.0]


def test_the_cost_has_each_part_and_the_share():
    records = [record(s, share=0.01 * s, seconds={"a": 0.5, "b": 0.25}) for s in (1, 2)]
    figure = drawn(records)["cost"]
    assert list(trace(figure, "a").y) == [0.5, 0.5]
    assert (list(trace(figure, "share of the time").y), figure.layout.yaxis3.side) == ([0.01, 0.02], "right")


@pytest.mark.parametrize(("axis", "place"), [("updates", 20), ("tokens", 2000), ("time", 0.2)])
def test_alerts_and_attempts_stand_where_they_happened(axis, place):
    figures = drawn(
        [record(s, diameter=1.0, train_loss=1.0) for s in range(1, 31)], PlotOptions(axis=axis), 3, [alert(20, "spike")]
    )
    for figure in figures.values():
        marks = trace(figure, "alerts")
        assert list(marks.x) == pytest.approx([place])
        assert list(marks.customdata) == ["spike at step 20: 2.5"]
        assert [shape.label.text for shape in figure.layout.shapes] == ["attempt 2", "attempt 3"]
        assert [shape.x0 for shape in figure.layout.shapes] == pytest.approx([place / 2, place])


def test_what_is_not_finite_is_a_gap_with_a_cross_that_names_it():
    records = [record(s, train_loss=v) for s, v in ((11, 1.0), (12, math.nan), (13, -math.inf), (14, 2.0))]
    figure = drawn(records)["loss"]
    assert list(trace(figure, "training").y) == [1.0, None, None, 2.0]
    marks = trace(figure, "not finite")
    assert (list(marks.x), marks.yaxis, marks.marker.symbol) == ([12, 13], "y2", "x")
    assert list(marks.customdata) == ["train_loss nan at step 12", "train_loss -inf at step 13"]
    assert figure.layout.yaxis2.range == (0, 1)


def test_a_run_of_nan_alone_has_a_figure_that_says_so():
    figure = drawn([record(s, diameter=math.nan) for s in range(1, 2000)])["diameter"]
    marks = trace(figure, "not finite")
    assert len(marks.x) <= service.MARKS
    assert (marks.customdata[0], marks.customdata[-1]) == ("diameter nan at step 1", "diameter nan at step 1,999")


def test_a_missing_value_is_no_gap_and_has_no_cross():
    figure = drawn([record(1, train_loss=1.0), record(2), record(3, train_loss=2.0)])["loss"]
    assert list(trace(figure, "training").x) == [1, 3]
    assert not [t for t in figure.data if t.name == "not finite"]


def test_a_spike_of_one_step_survives_and_a_range_is_fine():
    records = [record(s, diameter=50.0 if s == 17_777 else 1.0 + s % 7) for s in range(1, 20_001)]
    line = trace(drawn(records)["diameter"], "D(S), exact")
    assert len(line.x) <= POINTS
    assert line.x[line.y.index(50.0)] == 17_777
    near = trace(drawn(records, PlotOptions(axis="updates", x0=17_700, x1=17_800))["diameter"], "D(S), exact")
    assert list(near.x) == list(range(17_699, 17_802))


def test_marks_out_of_range_are_left_out():
    records = [record(s, diameter=1.0 if s != 5 else math.nan) for s in range(1, 101)]
    options = PlotOptions(axis="updates", x0=50, x1=60)
    figure = drawn(records, options, 2, [alert(5), alert(55)])["diameter"]
    assert list(trace(figure, "alerts").x) == [55]
    assert not [t for t in figure.data if t.name == "not finite"]
    assert not figure.layout.shapes


def test_a_smooth_curve_has_its_own_behind_it():
    figure = drawn([record(s, diameter=float(s)) for s in (1, 2)], PlotOptions(axis="updates", smooth=0.5))["diameter"]
    raw, smooth = (t for t in figure.data if t.name == "D(S), exact")
    assert (list(raw.y), list(smooth.y)) == ([1.0, 2.0], pytest.approx([1.0, 2.5 / 1.5]))
    assert raw.opacity < smooth.opacity


def test_tokens_are_the_axis_if_every_record_has_them():
    assert list(trace(drawn([record(3, diameter=1.0)], PlotOptions())["diameter"], "D(S), exact").x) == [300]
    records = [record(3, diameter=1.0), record(4, tokens=None, diameter=1.0)]
    assert list(trace(drawn(records, PlotOptions())["diameter"], "D(S), exact").x) == [3, 4]
    shown = drawn(records, PlotOptions(axis="tokens"), alerts=[alert(4)])["diameter"]
    assert list(trace(shown, "D(S), exact").x) == [300]


def test_hostile_texts_stay_texts():
    records = [record(1, diameter=1.0, seconds={HOSTILE: 0.5}), record(2, seconds={HOSTILE: math.nan})]
    figures = drawn(records, alerts=[alert(1, HOSTILE, value=math.nan)], head_optimizer=HOSTILE)
    assert set(figures) == {"diameter", "cost"}
    texts = [text for f in figures.values() for t in f.data for text in (t.name, t.meta, *(t.customdata or ()))]
    assert not [text for text in texts if text and ("<" in text or len(text) > 400)]


def test_absurd_numbers_are_drawn_or_left_out_but_never_raise():
    records = [record(1, diameter=1e308, hidden_norm=1e308, tokens=10**30, seconds={"a": 1e308})]
    for axis in ("updates", "tokens", "time"):
        assert drawn(records, PlotOptions(axis=axis, smooth=0.9), alerts=[alert(2**80, time=math.inf)])
    assert drawn([record(s, train_loss=(-1) ** s * 1e308) for s in range(1, 99)])


def test_the_table_of_a_panel_has_every_value():
    records = [record(s, diameter=1.0 / s if s % 2 else None, ceiling=math.nan) for s in range(1, 3001)]
    lines = service.curves("diameter", run_of(records, [RunInfo(started=BEGAN)]), PlotOptions(axis="updates", x1=2500))
    rows = list(csv.DictReader("".join(csv_lines(*lines)).splitlines()))
    assert list(rows[0]) == ["step", "tokens", "hours", "diameter", "ceiling"]
    assert [r["diameter"] for r in rows] == [str(1.0 / s) if s % 2 else "" for s in range(1, 2501)]
    assert (rows[9]["step"], rows[9]["tokens"], float(rows[9]["hours"]), rows[9]["ceiling"]) == (
        "10",
        "1000",
        0.1,
        "nan",
    )


@pytest.mark.parametrize("panel", tuple(service.PANELS))
def test_the_table_of_an_empty_run_has_a_header(panel):
    header, rows = service.curves(panel, Run(id="a"))
    assert header[:3] == ("step", "tokens", "hours")
    assert list(rows) == []

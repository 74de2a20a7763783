"""What a diameter buys, from logs: which runs count, their means and deviations, and what the figures draw."""

import math
from statistics import mean, stdev

import pytest

from hilbert_monitor.service.figures.diameter_curves import diameter_sweeps, loss_figure, made_figure, multiple
from hilbert_monitor.service.report import summary
from tests.support.services import record, write_run
from tests.support.swept_runs import write_point, write_sweep


def sweeps_of(root):
    return diameter_sweeps(run.series for run in summary.load(root))


@pytest.fixture(scope="module", name="root")
def root_fixture(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    write_sweep(root)
    write_run(root, "another run", [record(1)], model="Decoder")
    return root


def test_points_are_means_over_seeds_in_the_order_of_their_diameters(root):
    (sweep,) = sweeps_of(root)
    assert list(sweep.curves) == ["AdamW", "AdamW, rows held", "AdamW, scaled", "RowNorm, by its rate"]
    points = sweep.curves["AdamW, scaled"]
    assert [point.allowed for point in points] == [0.25, 0.5, 1, 2, 4, 8, 16]
    losses = [5.0 - 0.05 * 4 + 0.03 * seed for seed in range(3)]
    assert points[4].loss.mean == pytest.approx(mean(losses))
    assert points[4].loss.deviation == pytest.approx(stdev(losses))
    assert [point.made.mean for point in points] == pytest.approx([0.25, 0.5, 1, 2, 4, 7, 7])
    assert sweep.curves["AdamW"][0].allowed == math.inf
    assert sweep.runs == 66
    assert not sweep.notes


def test_the_last_finished_run_of_a_seed_counts_and_others_are_told_of(tmp_path):
    write_point(tmp_path, "AdamW, scaled", 1.0, 0, loss=9.0)
    write_point(tmp_path, "AdamW, scaled", 1.0, 0, loss=4.0)
    write_point(tmp_path, "AdamW, scaled", 1.0, 1, loss=math.nan)
    write_point(tmp_path, "AdamW, scaled", 1.0, 2, loss=1.0, error=RuntimeError("lost"))
    (sweep,) = sweeps_of(tmp_path)
    (point,) = sweep.curves["AdamW, scaled"]
    assert (point.loss.mean, point.loss.runs, len(point.runs)) == (4.0, 1, 2)
    (note,) = sweep.notes
    assert "AdamW, scaled at 1\u00d7: 1 of 2" in note


def test_every_model_has_curves_of_its_own_and_ordinary_runs_have_none(tmp_path):
    for model in ("b", "a"):
        write_point(tmp_path, "RowNorm", 2.0, 0, loss=3.0, model=model)
    assert [sweep.model for sweep in sweeps_of(tmp_path)] == ["a", "b"]
    assert diameter_sweeps([]) == []


def test_a_figure_has_a_band_and_a_line_for_each_curve_and_a_level_for_runs_without_a_limit(root):
    (sweep,) = sweeps_of(root)
    figure = loss_figure(sweep)
    lines = {trace["name"]: trace for trace in figure["data"] if trace["line"]["width"] > 1}
    assert list(lines) == ["AdamW, no limit", "AdamW, rows held", "AdamW, scaled", "RowNorm, by its rate"]
    rows = sweep.curves["AdamW, rows held"]
    assert lines["AdamW, rows held"]["y"] == [point.loss.mean for point in rows]
    assert lines["AdamW, no limit"]["y"] == [sweep.curves["AdamW"][0].loss.mean] * 7
    lower, upper = (
        trace for trace in figure["data"] if trace["name"] == "AdamW, rows held" and not trace["line"]["width"]
    )
    assert upper["fill"] == "tonexty"
    assert [(a + b) / 2 for a, b in zip(lower["y"], upper["y"], strict=True)] == pytest.approx(
        lines["AdamW, rows held"]["y"]
    )
    assert figure["layout"]["xaxis"]["ticktext"][:3] == ["1/4\u00d7", "1/2\u00d7", "1\u00d7"]
    assert len({lines[name]["line"]["dash"] for name in ("AdamW, rows held", "AdamW, scaled")}) == 2
    diagonal = made_figure(sweep)["data"][-1]
    assert diagonal["x"] == diagonal["y"]


@pytest.mark.parametrize(("allowed", "text"), [(0.25, "1/4"), (0.3, "0.3"), (1.0, "1"), (16.0, "16"), (2.5, "2.5")])
def test_multiples_are_written_as_fractions_where_they_are(allowed, text):
    assert multiple(allowed) == f"{text}\u00d7"
    assert multiple(math.inf) == "no limit"

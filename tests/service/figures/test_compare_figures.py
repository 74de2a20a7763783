"""What the figures show: exact values, bands that an axis has room for, spikes that survive."""

import csv
import json
import math
import statistics
from types import SimpleNamespace

import numpy as np
import plotly.graph_objects as go
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hilbert_monitor.service.figures import compare_figures as service
from hilbert_monitor.service.figures.downsampling import POINTS, thin
from hilbert_monitor.service.figures.plot_options import PlotOptions
from hilbert_monitor.service.figures.series import RunSeries, Series
from hilbert_monitor.service.figures.style import INK, UNIFIED, template
from hilbert_monitor.service.following.text import csv_lines

SEEDS = PlotOptions(seeds=True)


def valid(panel):
    """A panel that plotly takes, and that is JSON."""

    def draw(runs, view=SEEDS, aside=()):
        figure = panel(runs, view, aside)
        json.dumps(figure, allow_nan=False)
        return go.Figure(figure)

    return draw


figures = SimpleNamespace(**{name: valid(panel) for name, panel in service.PANELS.items()})


def curve(values, every=10, pace=36.0):
    """Values every so many steps, each of which takes some seconds and has 100 tokens."""
    steps = [every * (i + 1) for i in range(len(values))]
    return Series(steps, [100.0 * step for step in steps], [5e8 + pace * step for step in steps], values, 5e8)


def run(optimizer="AdamW", seed=0, panel="p", **curves):
    made = {name: curve(values) for name, values in curves.items()}
    return RunSeries(id=f"{optimizer}-{seed}", optimizer=optimizer, seed=seed, panel_hash=panel, **made)


def mean_of(figure, optimizer):
    """The one trace that the legend names so."""
    (trace,) = [t for t in figure.data if t.name == optimizer and t.showlegend]
    return trace


def edges_of(figure, optimizer):
    upper = next(i for i, t in enumerate(figure.data) if t.fill == "tonexty" and t.name == optimizer)
    return figure.data[upper - 1], figure.data[upper]


def test_mean_and_band_are_the_pointwise_mean_and_sample_deviation():
    values = [[3.0, 2.0], [5.0, 2.5], [4.0, 6.0]]
    runs = [run(seed=seed, validation_loss=v) for seed, v in enumerate(values)]
    figure = figures.loss(runs)
    mean, (lower, upper) = mean_of(figure, "AdamW"), edges_of(figure, "AdamW")
    assert list(mean.x) == [1000, 2000]
    assert list(mean.y) == [4.0, 3.5]
    deviations = [statistics.stdev(column) for column in zip(*values, strict=True)]
    assert list(upper.y) == pytest.approx([4 + deviations[0], 3.5 + deviations[1]])
    assert list(lower.y) == pytest.approx([4 - deviations[0], 3.5 - deviations[1]])
    faint = [t for t in figure.data if t.opacity == 0.35]
    assert [list(t.y) for t in faint] == values


def test_a_single_run_is_one_line_without_a_band():
    (trace,) = figures.diameter([run(diameter=[0.5, 0.25])]).data
    assert (list(trace.y), trace.fill, trace.showlegend, trace.opacity) == ([0.5, 0.25], None, True, 1.0)


def test_curves_can_be_drawn_against_updates():
    (trace,) = figures.diameter([run(diameter=[0.5, 0.25])], PlotOptions(axis="updates")).data
    assert list(trace.x) == [10, 20]


@given(st.lists(st.tuples(*[st.floats(0, 1e6)] * 3), min_size=1, max_size=20))
def test_what_stands_on_a_logarithmic_axis_is_positive(columns):
    runs = [run(seed=seed, diameter=list(values)) for seed, values in enumerate(zip(*columns, strict=True))]
    figure = figures.diameter(runs)
    assert all(value is None or value > 0 for trace in figure.data for value in trace.y)


def test_the_lower_edge_is_half_the_smallest_value_where_the_deviation_exceeds_the_mean():
    runs = [run(seed=seed, diameter=[value]) for seed, value in enumerate([0.01, 0.01, 10.0])]
    lower, upper = edges_of(figures.diameter(runs), "AdamW")
    assert list(lower.y) == [0.005]
    assert upper.y[0] == pytest.approx(10.02 / 3 + statistics.stdev([0.01, 0.01, 10.0]))


def test_nan_and_infinities_are_gaps_and_leave_the_mean_to_the_others():
    figure = figures.loss([run(seed=0, validation_loss=[1.0, math.nan]), run(seed=1, validation_loss=[3.0, 4.0])])
    assert list(mean_of(figure, "AdamW").y) == [2.0, 4.0]
    assert mean_of(figure, "AdamW").customdata[1] == "(one run)"
    assert list(figure.data[0].y) == [1.0, None]
    assert "NaN" not in figure.to_json()


def test_a_run_set_aside_is_drawn_but_in_no_mean():
    runs = [run(seed=seed, diameter=[value]) for seed, value in enumerate([1.0, 3.0, 100.0])]
    figure = figures.diameter(runs, aside={"AdamW-2"})
    assert list(mean_of(figure, "AdamW").y) == [2.0]
    assert [t.line.dash for t in figure.data if t.opacity == 0.35] == ["solid", "solid", "dot"]


def test_the_ratio_is_of_the_means_wherever_both_have_one():
    base = [run(seed=s, diameter=[d, 8.0], perturbation_rms=[6.0]) for s, d in enumerate([10.0, 30.0])]
    ours = [run("RowNorm", seed=s, diameter=[d], perturbation_rms=[3.0]) for s, d in enumerate([1.0, 3.0])]
    diameter, rms = figures.ratio([*base, *ours]).data
    assert (list(diameter.x), list(diameter.y), list(rms.y)) == ([1000], [10.0], [2.0])


def test_different_panels_have_neither_ratio_nor_mean():
    runs = [run("RowNorm", seed=0, perturbation_rms=[3.0]), run(seed=0, panel="q", perturbation_rms=[6.0])]
    assert not figures.ratio(runs).data
    mixed = [run(seed=0, perturbation_rms=[3.0]), run(seed=1, panel="q", perturbation_rms=[6.0])]
    assert [list(t.y) for t in figures.perturbation(mixed).data] == [[3.0], [6.0]]


def test_a_group_toggles_as_one_and_has_one_entry_in_the_legend():
    runs = [run(name, seed, diameter=[1.0, 2.0]) for name in ("AdamW", "RowNorm") for seed in range(3)]
    figure = figures.diameter(runs)
    assert {t.legendgroup for t in figure.data} == {"AdamW", "RowNorm"}
    assert [t.name for t in figure.data if t.showlegend] == ["AdamW", "RowNorm"]


def test_colours_are_fixed_by_optimizer():
    for runs in ([run("RowNorm", diameter=[1.0])], [run(diameter=[1.0]), run("RowNorm", diameter=[1.0])]):
        assert mean_of(figures.diameter(runs), "RowNorm").line.color == service.colour("RowNorm")
    assert service.colour("Lion") == service.colour("Lion")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_template_is_one_of_plotlys_and_has_the_themes_ink(theme):
    assert go.layout.Template(template(theme)).layout.font.color == INK[theme][0]


@pytest.mark.parametrize("panel", service.PANELS)
@pytest.mark.parametrize("group", ["optimizer", "run"])
def test_every_figure_stands_no_runs(panel, group):
    figure = valid(service.PANELS[panel])(
        [], PlotOptions(group=group, smooth=0.5, scale="log", axis="time", x0=1, x1=2)
    )
    assert not figure.data
    assert not list(service.curves(panel, [])[1])


def test_markup_in_names_is_text():
    hostile = RunSeries(id="a", name="<b>x</b>" * 2000, optimizer="<a href='http://x'>y</a>", diameter=curve([1.0]))
    for view in (PlotOptions(), PlotOptions(group="run"), PlotOptions(smooth=0.5, seeds=True)):
        for shown in service.diameter([hostile], view)["data"]:
            assert "<" not in shown["name"] + shown["meta"] + shown["legendgroup"]
            assert len(shown["meta"]) < 400


# Thinning


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=400), st.integers(4, 60))
def test_thinning_keeps_ends_and_extremes_within_its_limit(values, points):
    kept = thin([np.array(values)], points).tolist()
    assert len(kept) <= points
    assert (kept[0], kept[-1]) == (0, len(values) - 1)
    assert {min(values), max(values)} <= {values[i] for i in kept}
    assert kept == sorted(set(kept))


@pytest.mark.parametrize("place", [0, 1, 17_777, 19_999])
def test_a_spike_of_one_step_survives(place):
    values = [1.0] * 20_000
    values[place] = 50.0
    runs = [run(seed=0, diameter=values), run(seed=1, diameter=[1.0] * 20_000)]
    figure = figures.diameter(runs)
    assert max(len(trace.y) for trace in figure.data) <= POINTS
    assert max(mean_of(figure, "AdamW").y) == 25.5
    assert max(figure.data[0].y) == 50.0


def test_the_loss_axis_is_not_pressed_flat_by_the_start():
    values = [11.0, *[3.0 + 1 / i for i in range(1, 100)]]
    low, high = figures.loss([run(validation_loss=values)]).layout.yaxis.range
    assert low < 3.0101 < high < 4


@given(
    st.lists(st.one_of(st.floats(), st.sampled_from([math.nan, math.inf, 0.0])), min_size=100, max_size=500),
    st.integers(20, 60),
)
def test_what_stands_out_of_its_surroundings_survives_thinning(values, points):
    column = np.array(values)
    kept = set(thin([column, np.zeros(len(column))], points).tolist())
    stretch = math.ceil(len(column) / ((points - 2) // 4)) + 1  # no bucket is longer
    finite = np.where(np.isfinite(column), column, math.nan)
    for i in np.flatnonzero(np.isfinite(column)):
        others = np.delete(finite[max(i - stretch, 0) : i + stretch + 1], min(i, stretch))
        others = others[~np.isnan(others)]
        if (others < column[i]).all() or (others > column[i]).all():
            assert i in kept


def test_a_stretch_of_nothing_stays_a_gap():
    values = np.ones(20_000)
    values[5_000:10_000] = math.nan
    assert np.isnan(values[thin([values])]).sum() > 100


# Views


def strongest(figure):
    return {t.name: t for t in figure.data if t.showlegend}


def test_without_seeds_a_group_has_its_mean_and_band_alone():
    runs = [run(seed=seed, diameter=[1.0 + seed]) for seed in range(3)]
    assert len(figures.diameter(runs, PlotOptions()).data) == 3
    assert len(figures.diameter(runs, SEEDS).data) == 6


def test_run_by_run_every_run_has_a_line_and_a_name_in_a_shade_of_its_own():
    runs = [run(name, seed, diameter=[1.0, 2.0 + seed]) for name in ("AdamW", "RowNorm") for seed in range(9)]
    figure = figures.diameter(runs, PlotOptions(group="run"))
    assert [t.name for t in figure.data] == [r.id for r in runs]
    assert all(t.showlegend for t in figure.data)
    assert len({(t.line.color, t.line.dash) for t in figure.data}) == 18
    assert len({t.legendgroup for t in figure.data}) == 18
    assert figure.data[0].line.color == service.colour("AdamW")


def test_run_by_run_the_training_loss_toggles_with_its_run():
    runs = [run(seed=seed, train_loss=[1.0, 2.0], validation_loss=[3.0]) for seed in range(2)]
    figure = figures.loss([*runs, run("RowNorm", train_loss=[1.0])], PlotOptions(group="run"))
    assert [t.legendgroup for t in figure.data if t.showlegend] == ["RowNorm-0", "AdamW-0", "AdamW-1"]
    assert len(figure.data) == 5


def test_more_runs_than_a_legend_has_room_for_are_named_by_optimizer():
    runs = [run(name, seed, diameter=[1.0]) for name in ("AdamW", "RowNorm") for seed in range(20)]
    figure = figures.diameter(runs, PlotOptions(group="run"))
    assert len(figure.data) == 40
    assert list(strongest(figure)) == ["AdamW", "RowNorm"]


def test_few_lines_have_one_hover_text_and_many_have_their_own():
    few, many = ([run(seed=s, diameter=[1.0]) for s in range(n)] for n in (3, UNIFIED + 1))
    assert figures.diameter(few).layout.hovermode == "x unified"
    figure = figures.diameter(many)
    assert figure.layout.hovermode == "closest"
    assert all("%{x" in t.hovertemplate for t in figure.data if t.hoverinfo != "skip")


def average(values, weight):
    """The moving average as it is defined."""
    found = []
    for t in range(len(values)):
        weights = [weight ** (t - i) for i in range(t + 1)]
        found.append(sum(w * v for w, v in zip(weights, values, strict=False)) / sum(weights))
    return found


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=60), st.sampled_from([0.001, 0.1, 0.5, 0.9, 0.99, 0.999]))
def test_a_smooth_line_is_the_debiased_moving_average_before_its_raw_one(values, weight):
    raw, smooth = figures.diameter([run(diameter=values)], PlotOptions(smooth=weight, scale="linear")).data
    assert list(raw.y) == values
    assert raw.opacity < smooth.opacity
    assert list(smooth.y) == pytest.approx(average(values, weight), rel=1e-9, abs=1e-9)


def test_a_long_curve_is_smoothed_as_a_short_one_is():
    values = np.random.default_rng(0).normal(size=4000)
    expected, state, weights = [], 0.0, 0.0
    for value in values.tolist():
        state, weights = 0.6 * state + value, 0.6 * weights + 1
        expected.append(state / weights)
    series = Series(np.arange(4000), [], [], values)
    assert series.smoothed(0.6).tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_smoothing_passes_over_what_is_not_finite():
    _, smooth = figures.diameter([run(diameter=[1.0, math.nan, 3.0])], PlotOptions(smooth=0.5)).data
    assert smooth.y[1] is None
    assert (smooth.y[0], smooth.y[2]) == pytest.approx((1.0, (0.5 * 1 + 3) / 1.5))


def test_the_mean_of_smooth_curves_has_the_mean_as_it_is_behind_it():
    values = [[1.0, 5.0, 1.0], [3.0, 3.0, 9.0]]
    runs = [run(seed=seed, diameter=v) for seed, v in enumerate(values)]
    figure = figures.diameter(runs, PlotOptions(smooth=0.5))
    smooth = [average(v, 0.5) for v in values]
    mean = mean_of(figure, "AdamW")
    assert list(mean.y) == pytest.approx([sum(pair) / 2 for pair in zip(*smooth, strict=True)])
    (raw,) = [t for t in figure.data if t.opacity == 0.35]
    assert list(raw.y) == [2.0, 4.0, 5.0]


def test_validation_losses_are_few_and_stay_as_they_are():
    values = [5.0, 4.0, 3.5]
    (line,) = figures.loss([run(validation_loss=values)], PlotOptions(smooth=0.9)).data
    assert list(line.y) == values


def test_a_spike_is_still_there_behind_a_smooth_mean():
    values = [1.0] * 20_000
    values[7_777] = 50.0
    runs = [run(seed=0, diameter=values), run(seed=1, diameter=[1.0] * 20_000)]
    figure = figures.diameter(runs, PlotOptions(smooth=0.99))
    assert max(max(v for v in t.y if v) for t in figure.data if t.opacity == 0.35) == 25.5


def test_scales_can_be_chosen_and_what_is_not_positive_is_a_gap_on_a_logarithmic_one():
    runs = [run(validation_loss=[-1.0, 0.0, 2.0], diameter=[0.0, 1.0])]
    loss, diameter = figures.loss(runs, PlotOptions(scale="log")), figures.diameter(runs, PlotOptions(scale="linear"))
    assert (loss.layout.yaxis.type, list(loss.data[0].y)) == ("log", [None, None, 2.0])
    assert (diameter.layout.yaxis.type, list(diameter.data[0].y)) == (None, [0.0, 1.0])


def test_a_range_has_its_points_and_a_neighbour_on_either_side():
    runs = [run(diameter=[1.0] * 100)]
    view = PlotOptions(axis="updates", x0=305, x1=400)
    figure = figures.diameter(runs, view)
    assert list(figure.data[0].x) == [300, *range(310, 401, 10), 410]
    assert list(figure.layout.xaxis.range) == [305, 400]
    between = figures.diameter(runs, PlotOptions(axis="updates", x0=301, x1=302)).data[0]
    assert list(between.x) == [300, 310]


def test_a_range_is_drawn_finely():
    values = np.random.default_rng(0).random(20_000).tolist()
    line = figures.diameter([run(diameter=values)], PlotOptions(axis="updates", x0=50_010, x1=51_000)).data[0]
    assert list(line.y) == values[4999:5101]


def test_wall_time_is_in_hours_since_the_run_began():
    (line,) = figures.diameter([run(diameter=[0.5, 0.25])], PlotOptions(axis="time")).data
    assert list(line.x) == [0.1, 0.2]  # 10 and 20 steps of 36 s


def test_runs_of_different_pace_are_averaged_by_step_at_their_mean_time():
    slow, fast = (
        RunSeries(id=i, optimizer="AdamW", seed=n, diameter=curve(values, pace=pace))
        for n, (i, values, pace) in enumerate([("slow", [1.0, 2.0], 54.0), ("fast", [3.0, 6.0, 9.0], 36.0)])
    )
    mean = mean_of(figures.diameter([slow, fast], PlotOptions(axis="time")), "AdamW")
    assert list(mean.y) == [2.0, 4.0, 9.0]
    assert list(mean.x) == pytest.approx([0.125, 0.25, 0.3])


def test_a_mean_whose_time_goes_back_has_a_gap_there():
    slow, fast = (
        RunSeries(id=i, optimizer="AdamW", seed=n, diameter=curve(values, pace=pace))
        for n, (i, values, pace) in enumerate([("slow", [1.0, 2.0], 720.0), ("fast", [3.0, 6.0, 9.0], 36.0)])
    )
    mean = mean_of(figures.diameter([slow, fast], PlotOptions(axis="time")), "AdamW")
    assert list(mean.y) == [2.0, 4.0, None, 9.0]
    assert len(mean.customdata) == len(mean.x) == 4


def test_points_without_tokens_are_left_out_of_an_axis_of_tokens():
    series = Series([1, 2, 3], [10.0, math.nan, 30.0], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0])
    only = RunSeries(id="a", diameter=series)
    assert list(figures.diameter([only], PlotOptions(axis="tokens")).data[0].x) == [10, 30]
    assert list(figures.diameter([only]).data[0].x) == [1, 2, 3]


def test_the_ratio_is_drawn_over_pairs_alone():
    runs = [run(seed=0, diameter=[8.0]), run(seed=7, diameter=[800.0]), run("RowNorm", seed=0, diameter=[2.0])]
    (line,) = figures.ratio(runs).data
    assert list(line.y) == [4.0]
    apart = [run(seed=0, diameter=[8.0]), run("RowNorm", seed=1, diameter=[2.0])]
    assert not figures.ratio(apart).data
    assert not figures.ratio(runs, aside={"RowNorm-0"}).data


def test_a_pair_counts_only_where_both_have_a_value():
    base = [run(seed=0, diameter=[8.0, 8.0]), run(seed=1, diameter=[100.0, 4.0])]
    ours = [run("RowNorm", seed=0, diameter=[2.0, 2.0]), run("RowNorm", seed=1, diameter=[math.nan, 4.0])]
    assert list(figures.ratio([*base, *ours]).data[0].y) == [4.0, 2.0]


def test_a_zoom_outlives_new_data_but_not_another_axis():
    runs = [run(diameter=[1.0, 2.0])]
    one, more, other = (
        figures.diameter(r, v).layout.to_plotly_json()
        for r, v in ((runs, SEEDS), ([run(diameter=[1.0])], SEEDS), (runs, PlotOptions(axis="time")))
    )
    assert one["uirevision"] == more["uirevision"] == other["uirevision"]
    assert one["xaxis"]["uirevision"] == more["xaxis"]["uirevision"] != other["xaxis"]["uirevision"]


def test_a_group_that_was_toggled_is_known_again_after_another_came():
    few, more = (figures.diameter([run(name, diameter=[1.0]) for name in names]) for names in ("b", "ab"))
    assert few.data[0].uid == more.data[1].uid != more.data[0].uid


def test_a_figure_of_a_run_that_grew_has_the_new_point():
    old = run(seed=0, diameter=[1.0, 2.0])
    other = run(seed=1, diameter=[3.0, 4.0])
    assert list(mean_of(figures.diameter([old, other]), "AdamW").y) == [2.0, 3.0]
    grown = run(seed=0, diameter=[1.0, 2.0, 7.0])
    assert list(mean_of(figures.diameter([grown, other]), "AdamW").y) == [2.0, 3.0, 7.0]
    assert list(mean_of(figures.diameter([other, grown]), "AdamW").y) == [2.0, 3.0, 7.0]


@given(
    st.lists(st.lists(st.one_of(st.floats(), st.floats(-10, 10)), max_size=5), max_size=4),
    st.builds(
        PlotOptions,
        axis=st.sampled_from([None, "updates", "tokens", "time"]),
        smooth=st.sampled_from([0.0, 0.5, 0.999]),
        scale=st.sampled_from(["auto", "log", "linear"]),
        group=st.sampled_from(["optimizer", "run"]),
        seeds=st.booleans(),
        x0=st.none() | st.floats(-10, 5000),
        x1=st.none() | st.floats(-10, 5000),
    ),
)
def test_whatever_was_measured_every_view_is_a_figure_and_a_table(values, view):
    runs = [
        run(name, seed, train_loss=v, validation_loss=v, diameter=v, perturbation_rms=v)
        for seed, v in enumerate(values)
        for name in ("AdamW", "RowNorm")
    ]
    for name, panel in service.PANELS.items():
        json.dumps(panel(runs, view), allow_nan=False)
        rows_of(name, runs, view)


# Every value


def rows_of(panel, runs, view=SEEDS, aside=()):
    text = "".join(csv_lines(*service.curves(panel, runs, view, aside)))
    return list(csv.DictReader(text.splitlines()))


def test_the_table_of_a_panel_has_every_value_and_the_means():
    values = np.random.default_rng(0).random((2, 5000))
    rows = rows_of("diameter", [run(seed=seed, diameter=v.tolist()) for seed, v in enumerate(values)])
    assert [float(r["value"]) for r in rows if r["run"] == "AdamW-1"] == values[1].tolist()
    means = [r for r in rows if r["run"] == "mean"]
    assert [float(r["value"]) for r in means] == pytest.approx(values.mean(axis=0))
    assert [float(r["deviation"]) for r in means] == pytest.approx(values.std(axis=0, ddof=1))
    assert (rows[0]["step"], rows[0]["tokens"], float(rows[0]["hours"]), rows[0]["seed"]) == ("10", "1000", 0.1, "0")


def test_the_table_obeys_range_smoothing_and_groups():
    view = PlotOptions(axis="updates", x0=20, x1=30, smooth=0.5, group="run")
    rows = rows_of("loss", [run(validation_loss=[1.0, 2.0, 4.0, 8.0], train_loss=[5.0])], view)
    assert [(r["metric"], r["step"], r["value"]) for r in rows] == [
        ("validation_loss", "20", "2.0"),
        ("validation_loss", "30", "4.0"),
    ]
    assert [float(r["smoothed"]) for r in rows] == pytest.approx(average([1.0, 2.0, 4.0], 0.5)[1:])


def test_the_table_of_ratios_has_how_many_pairs_they_are_of():
    runs = [run(seed=0, diameter=[8.0, 4.0]), run("RowNorm", seed=0, diameter=[2.0])]
    (row,) = rows_of("ratio", runs)
    assert row == {
        "metric": "diameter",
        "step": "",
        "tokens": "1000",
        "hours": "",
        "ratio": "4.0",
        "smoothed": "",
        "pairs": "1",
    }


def test_nan_and_formulas_in_a_table_are_what_they_are():
    bad = RunSeries(id="=1+1", optimizer="@x", seed=1, diameter=curve([math.nan, math.inf]))
    rows = rows_of("diameter", [bad], PlotOptions(group="run"))
    assert [(r["run"], r["optimizer"], r["value"]) for r in rows] == [("'=1+1", "'@x", "nan"), ("'=1+1", "'@x", "inf")]

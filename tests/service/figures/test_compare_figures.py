"""Figures that compare runs: exact values, bands, legends, hover texts, smoothing and ranges."""

import json
import math
import statistics
from types import SimpleNamespace

import numpy as np
import plotly.graph_objects as go
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hilbert_monitor.runs.run import Curve
from hilbert_monitor.runs.table import Table
from hilbert_monitor.service.figures import compare_figures
from hilbert_monitor.service.figures.compare_tables import panel_table
from hilbert_monitor.service.figures.comparison import Comparison, compare
from hilbert_monitor.service.figures.downsampling import POINTS
from hilbert_monitor.service.figures.plot_options import Choices, PlotOptions
from hilbert_monitor.service.figures.style import UNIFIED, colour
from tests.support.run_series import curve, make_run, moving_average, run_of

SEEDS = PlotOptions(seeds=True)
NOTHING = Comparison(model="", groups=(), optimizers={}, contrasts=(), excluded=(), notes=())


def compared(runs, **choices):
    """The live comparison of runs of one model."""
    return next(iter(compare(runs, live=True, choices=Choices(**choices))), NOTHING)


def checked(panel):
    """A function of compare_figures, for runs of one model, whose result is checked to be JSON and a valid figure."""

    def draw(runs, options=SEEDS, **choices):
        figure = panel(compared(runs, **choices), options)
        json.dumps(figure, allow_nan=False)
        return go.Figure(figure)

    return draw


figures = SimpleNamespace(**{name: checked(panel) for name, panel in compare_figures.PANELS.items()})


def mean_of(figure, optimizer):
    """The trace with the legend entry of an optimizer."""
    (trace,) = [t for t in figure.data if t.name == optimizer and t.showlegend]
    return trace


def edges_of(figure, optimizer):
    """The traces of the lower and the upper edge of an optimizer's band."""
    upper = next(i for i, t in enumerate(figure.data) if t.fill == "tonexty" and t.name == optimizer)
    return figure.data[upper - 1], figure.data[upper]


def test_mean_and_band_are_the_pointwise_mean_and_sample_deviation():
    values = [[3.0, 2.0], [5.0, 2.5], [4.0, 6.0]]
    runs = [make_run(seed=seed, validation_loss=v) for seed, v in enumerate(values)]
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
    (trace,) = figures.diameter([make_run(diameter=[0.5, 0.25])]).data
    assert (list(trace.y), trace.fill, trace.showlegend, trace.opacity) == ([0.5, 0.25], None, True, 1.0)


def test_curves_can_be_drawn_against_updates():
    (trace,) = figures.diameter([make_run(diameter=[0.5, 0.25])], PlotOptions(axis="updates")).data
    assert list(trace.x) == [10, 20]


@given(st.lists(st.tuples(*[st.floats(0, 1e6)] * 3), min_size=1, max_size=20))
def test_values_on_a_logarithmic_axis_are_positive(columns):
    runs = [make_run(seed=seed, diameter=list(values)) for seed, values in enumerate(zip(*columns, strict=True))]
    figure = figures.diameter(runs)
    assert all(value is None or value > 0 for trace in figure.data for value in trace.y)


def test_the_lower_edge_is_half_the_smallest_value_where_the_deviation_exceeds_the_mean():
    runs = [make_run(seed=seed, diameter=[value]) for seed, value in enumerate([0.01, 0.01, 10.0])]
    lower, upper = edges_of(figures.diameter(runs), "AdamW")
    assert list(lower.y) == [0.005]
    assert upper.y[0] == pytest.approx(10.02 / 3 + statistics.stdev([0.01, 0.01, 10.0]))


def test_nan_and_infinities_are_gaps_and_are_left_out_of_the_mean():
    figure = figures.loss(
        [make_run(seed=0, validation_loss=[1.0, math.nan]), make_run(seed=1, validation_loss=[3.0, 4.0])]
    )
    assert list(mean_of(figure, "AdamW").y) == [2.0, 4.0]
    assert mean_of(figure, "AdamW").customdata[1] == "(one run)"
    assert list(figure.data[0].y) == [1.0, None]
    assert "NaN" not in figure.to_json()


def test_an_excluded_run_is_drawn_but_enters_no_mean():
    runs = [make_run(seed=seed, diameter=[value]) for seed, value in enumerate([1.0, 3.0])]
    runs.append(make_run(seed=2, diameter=[100.0], status="failed"))
    figure = figures.diameter(runs)
    assert list(mean_of(figure, "AdamW").y) == [2.0]
    assert [t.line.dash for t in figure.data if t.opacity == 0.35] == ["solid", "solid", "dot"]


def test_the_ratio_is_that_of_the_means_where_both_optimizers_have_one():
    baseline = [make_run(seed=s, diameter=[d, 8.0], perturbation_rms=[6.0]) for s, d in enumerate([10.0, 30.0])]
    candidate = [make_run("RowNorm", seed=s, diameter=[d], perturbation_rms=[3.0]) for s, d in enumerate([1.0, 3.0])]
    diameter, rms = figures.ratio([*baseline, *candidate]).data
    assert (list(diameter.x), list(diameter.y), list(rms.y)) == ([1000], [10.0], [2.0])


def test_different_panels_have_neither_ratio_nor_mean():
    runs = [make_run("RowNorm", seed=0, perturbation_rms=[3.0]), make_run(seed=0, panel="q", perturbation_rms=[6.0])]
    assert not figures.ratio(runs).data
    mixed = [make_run(seed=0, perturbation_rms=[3.0]), make_run(seed=1, panel="q", perturbation_rms=[6.0])]
    assert [list(t.y) for t in figures.perturbation(mixed).data] == [[3.0], [6.0]]


def test_a_group_toggles_as_one_and_has_one_entry_in_the_legend():
    runs = [make_run(name, seed, diameter=[1.0, 2.0]) for name in ("AdamW", "RowNorm") for seed in range(3)]
    figure = figures.diameter(runs)
    assert {t.legendgroup for t in figure.data} == {"AdamW", "RowNorm"}
    assert [t.name for t in figure.data if t.showlegend] == ["AdamW", "RowNorm"]


@pytest.mark.parametrize("panel", compare_figures.PANELS)
@pytest.mark.parametrize("group", ["optimizer", "run"])
def test_without_runs_every_figure_and_table_is_empty(panel, group):
    figure = getattr(figures, panel)([], PlotOptions(group=group, smooth=0.5, scale="log", axis="time", x0=1, x1=2))
    assert not figure.data
    assert not list(panel_table(panel, NOTHING)[1])


def test_markup_in_names_is_escaped():
    hostile = run_of("a", name="<b>x</b>" * 2000, optimizer="<a href='http://x'>y</a>", diameter=curve([1.0]))
    for options in (PlotOptions(), PlotOptions(group="run"), PlotOptions(smooth=0.5, seeds=True)):
        for trace in compare_figures.diameter(compared([hostile]), options)["data"]:
            assert "<" not in trace["name"] + trace["meta"] + trace["legendgroup"]
            assert len(trace["meta"]) < 400


@pytest.mark.parametrize("place", [0, 1, 17_777, 19_999])
def test_a_spike_of_one_step_survives(place):
    values = [1.0] * 20_000
    values[place] = 50.0
    runs = [make_run(seed=0, diameter=values), make_run(seed=1, diameter=[1.0] * 20_000)]
    figure = figures.diameter(runs)
    assert max(len(trace.y) for trace in figure.data) <= POINTS
    assert max(mean_of(figure, "AdamW").y) == 25.5
    assert max(figure.data[0].y) == 50.0


def test_the_range_of_the_loss_axis_leaves_out_the_start():
    values = [11.0, *[3.0 + 1 / i for i in range(1, 100)]]
    low, high = figures.loss([make_run(validation_loss=values)]).layout.yaxis.range
    assert low < 3.0101 < high < 4


# Options


def test_without_seeds_a_group_has_only_its_mean_and_band():
    runs = [make_run(seed=seed, diameter=[1.0 + seed]) for seed in range(3)]
    assert len(figures.diameter(runs, PlotOptions()).data) == 3
    assert len(figures.diameter(runs, SEEDS).data) == 6


def test_grouped_by_run_every_run_has_its_own_line_name_and_shade():
    runs = [make_run(name, seed, diameter=[1.0, 2.0 + seed]) for name in ("AdamW", "RowNorm") for seed in range(9)]
    figure = figures.diameter(runs, PlotOptions(group="run"))
    assert [t.name for t in figure.data] == [r.id for r in runs]
    assert all(t.showlegend for t in figure.data)
    assert len({(t.line.color, t.line.dash) for t in figure.data}) == 18
    assert len({t.legendgroup for t in figure.data}) == 18
    assert figure.data[0].line.color == colour("AdamW")


def test_grouped_by_run_the_training_loss_toggles_with_its_run():
    runs = [make_run(seed=seed, train_loss=[1.0, 2.0], validation_loss=[3.0]) for seed in range(2)]
    figure = figures.loss([*runs, make_run("RowNorm", train_loss=[1.0])], PlotOptions(group="run"))
    assert [t.legendgroup for t in figure.data if t.showlegend] == ["RowNorm-0", "AdamW-0", "AdamW-1"]
    assert len(figure.data) == 5


def test_more_runs_than_a_legend_has_room_for_are_named_by_optimizer():
    runs = [make_run(name, seed, diameter=[1.0]) for name in ("AdamW", "RowNorm") for seed in range(20)]
    figure = figures.diameter(runs, PlotOptions(group="run"))
    assert len(figure.data) == 40
    assert [t.name for t in figure.data if t.showlegend] == ["AdamW", "RowNorm"]


def test_few_lines_share_one_hover_box_and_many_have_one_each():
    few, many = ([make_run(seed=s, diameter=[1.0]) for s in range(n)] for n in (3, UNIFIED + 1))
    assert figures.diameter(few).layout.hovermode == "x unified"
    figure = figures.diameter(many)
    assert figure.layout.hovermode == "closest"
    assert all("%{x" in t.hovertemplate for t in figure.data if t.hoverinfo != "skip")


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=60), st.sampled_from([0.001, 0.1, 0.5, 0.9, 0.99, 0.999]))
def test_a_smoothed_line_is_the_moving_average_with_the_raw_values_behind_it(values, weight):
    raw, smooth = figures.diameter([make_run(diameter=values)], PlotOptions(smooth=weight, scale="linear")).data
    assert list(raw.y) == values
    assert raw.opacity < smooth.opacity
    assert list(smooth.y) == pytest.approx(moving_average(values, weight), rel=1e-9, abs=1e-9)


def test_smoothing_skips_values_that_are_not_finite():
    _, smooth = figures.diameter([make_run(diameter=[1.0, math.nan, 3.0])], PlotOptions(smooth=0.5)).data
    assert smooth.y[1] is None
    assert (smooth.y[0], smooth.y[2]) == pytest.approx((1.0, (0.5 * 1 + 3) / 1.5))


def test_the_mean_of_smoothed_curves_has_the_unsmoothed_mean_behind_it():
    values = [[1.0, 5.0, 1.0], [3.0, 3.0, 9.0]]
    runs = [make_run(seed=seed, diameter=v) for seed, v in enumerate(values)]
    figure = figures.diameter(runs, PlotOptions(smooth=0.5))
    smooth = [moving_average(v, 0.5) for v in values]
    mean = mean_of(figure, "AdamW")
    assert list(mean.y) == pytest.approx([sum(pair) / 2 for pair in zip(*smooth, strict=True)])
    (raw,) = [t for t in figure.data if t.opacity == 0.35]
    assert list(raw.y) == [2.0, 4.0, 5.0]


def test_validation_losses_are_never_smoothed():
    values = [5.0, 4.0, 3.5]
    (line,) = figures.loss([make_run(validation_loss=values)], PlotOptions(smooth=0.9)).data
    assert list(line.y) == values


def test_a_spike_is_still_visible_behind_a_smoothed_mean():
    values = [1.0] * 20_000
    values[7_777] = 50.0
    runs = [make_run(seed=0, diameter=values), make_run(seed=1, diameter=[1.0] * 20_000)]
    figure = figures.diameter(runs, PlotOptions(smooth=0.99))
    assert max(max(v for v in t.y if v) for t in figure.data if t.opacity == 0.35) == 25.5


def test_a_chosen_scale_is_used_and_nonpositive_values_are_gaps_on_a_logarithmic_one():
    runs = [make_run(validation_loss=[-1.0, 0.0, 2.0], diameter=[0.0, 1.0])]
    loss, diameter = figures.loss(runs, PlotOptions(scale="log")), figures.diameter(runs, PlotOptions(scale="linear"))
    assert (loss.layout.yaxis.type, list(loss.data[0].y)) == ("log", [None, None, 2.0])
    assert (diameter.layout.yaxis.type, list(diameter.data[0].y)) == (None, [0.0, 1.0])


def test_a_range_has_its_points_and_one_more_on_either_side():
    runs = [make_run(diameter=[1.0] * 100)]
    options = PlotOptions(axis="updates", x0=305, x1=400)
    figure = figures.diameter(runs, options)
    assert list(figure.data[0].x) == [300, *range(310, 401, 10), 410]
    assert list(figure.layout.xaxis.range) == [305, 400]
    between = figures.diameter(runs, PlotOptions(axis="updates", x0=301, x1=302)).data[0]
    assert list(between.x) == [300, 310]


def test_a_short_range_of_a_long_curve_has_every_point():
    values = np.random.default_rng(0).random(20_000).tolist()
    line = figures.diameter([make_run(diameter=values)], PlotOptions(axis="updates", x0=50_010, x1=51_000)).data[0]
    assert list(line.y) == values[4999:5101]


def test_the_time_axis_is_in_hours_since_the_run_started():
    (line,) = figures.diameter([make_run(diameter=[0.5, 0.25])], PlotOptions(axis="time")).data
    assert list(line.x) == [0.1, 0.2]  # 10 and 20 steps of 36 s


def test_runs_of_different_pace_are_averaged_by_step_at_their_mean_time():
    slow, fast = (
        run_of(i, optimizer="AdamW", seed=n, diameter=curve(values, pace=pace))
        for n, (i, values, pace) in enumerate([("slow", [1.0, 2.0], 54.0), ("fast", [3.0, 6.0, 9.0], 36.0)])
    )
    mean = mean_of(figures.diameter([slow, fast], PlotOptions(axis="time")), "AdamW")
    assert list(mean.y) == [2.0, 4.0, None, 9.0]  # the slow run ends, and the mean time jumps
    assert list(mean.x) == pytest.approx([0.125, 0.25, 0.3, 0.3])


def test_a_mean_whose_time_jumps_back_has_a_gap_there():
    slow, fast = (
        run_of(i, optimizer="AdamW", seed=n, diameter=curve(values, pace=pace))
        for n, (i, values, pace) in enumerate([("slow", [1.0, 2.0], 720.0), ("fast", [3.0, 6.0, 9.0], 36.0)])
    )
    mean = mean_of(figures.diameter([slow, fast], PlotOptions(axis="time")), "AdamW")
    assert list(mean.y) == [2.0, 4.0, None, 9.0]
    assert len(mean.customdata) == len(mean.x) == 4


def test_points_without_a_token_count_are_left_out_of_a_token_axis():
    series = Curve([1, 2, 3], [10.0, math.nan, 30.0], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0])
    only = run_of("a", diameter=series)
    assert list(figures.diameter([only], PlotOptions(axis="tokens")).data[0].x) == [10, 30]
    assert list(figures.diameter([only]).data[0].x) == [1, 2, 3]


def test_the_ratio_is_over_pairs_only():
    runs = [
        make_run(seed=0, diameter=[8.0]),
        make_run(seed=7, diameter=[800.0]),
        make_run("RowNorm", seed=0, diameter=[2.0]),
    ]
    (line,) = figures.ratio(runs).data
    assert list(line.y) == [4.0]
    apart = [make_run(seed=0, diameter=[8.0]), make_run("RowNorm", seed=1, diameter=[2.0])]
    assert not figures.ratio(apart).data
    again = make_run("RowNorm", seed=8, status="running", diameter=[2.0])
    assert not figures.ratio([*runs[:1], make_run("RowNorm", seed=0, status="failed", diameter=[2.0]), again]).data


def test_a_pair_counts_only_where_both_have_a_value():
    baseline = [make_run(seed=0, diameter=[8.0, 8.0]), make_run(seed=1, diameter=[100.0, 4.0])]
    candidate = [
        make_run("RowNorm", seed=0, diameter=[2.0, 2.0]),
        make_run("RowNorm", seed=1, diameter=[math.nan, 4.0]),
    ]
    assert list(figures.ratio([*baseline, *candidate]).data[0].y) == [4.0, 2.0]


def test_a_zoom_survives_new_data_but_not_another_axis():
    runs = [make_run(diameter=[1.0, 2.0])]
    one, more, other = (
        figures.diameter(r, v).layout.to_plotly_json()
        for r, v in ((runs, SEEDS), ([make_run(diameter=[1.0])], SEEDS), (runs, PlotOptions(axis="time")))
    )
    assert one["uirevision"] == more["uirevision"] == other["uirevision"]
    assert one["xaxis"]["uirevision"] == more["xaxis"]["uirevision"] != other["xaxis"]["uirevision"]


def test_a_trace_keeps_its_uid_when_another_group_is_added():
    few, more = (figures.diameter([make_run(name, diameter=[1.0]) for name in names]) for names in ("b", "ab"))
    assert few.data[0].uid == more.data[1].uid != more.data[0].uid


def test_the_mean_has_the_new_point_of_a_run_that_grew():
    old = make_run(seed=0, diameter=[1.0, 2.0])
    other = make_run(seed=1, diameter=[3.0, 4.0])
    assert list(mean_of(figures.diameter([old, other]), "AdamW").y) == [2.0, 3.0]
    grown = make_run(seed=0, diameter=[1.0, 2.0, 7.0])
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
def test_any_values_and_options_give_a_figure_and_a_table(values, options):
    runs = [
        make_run(name, seed, train_loss=v, validation_loss=v, diameter=v, perturbation_rms=v)
        for seed, v in enumerate(values)
        for name in ("AdamW", "RowNorm")
    ]
    for name, panel in compare_figures.PANELS.items():
        json.dumps(panel(compared(runs), options), allow_nan=False)
        list(panel_table(name, compared(runs), options)[1])


# Groups, sides and metrics


def sweep(lrs=(0.1, 0.2), **more):
    """Two optimizers with two seeds at each learning rate. D(S) is the learning rate, and four times it for AdamW."""
    return [
        make_run(name, seed, id=f"{name} {lr} {seed}", config={"lr": lr}, diameter=[factor * lr] * 3, **more)
        for name, factor in (("AdamW", 4.0), ("RowNorm", 1.0))
        for lr in lrs
        for seed in (0, 1)
    ]


def test_runs_with_different_settings_have_means_of_their_own_in_tones_of_one_colour():
    figure = figures.diameter(sweep(), PlotOptions())
    means = {t.name: (t.y[0], t.line.color) for t in figure.data if t.showlegend}
    assert {name: y for name, (y, _) in means.items()} == {
        "AdamW, lr=0.1": 0.4,
        "AdamW, lr=0.2": 0.8,
        "RowNorm, lr=0.1": 0.1,
        "RowNorm, lr=0.2": 0.2,
    }
    assert len({color for _, color in means.values()}) == 4


def test_the_colour_says_the_value_of_a_chosen_key_and_the_dash_the_optimizer():
    lines = {t.name: t.line for t in figures.diameter(sweep(), PlotOptions(), by="lr").data if t.showlegend}
    assert lines["AdamW, lr=0.1"].color == lines["RowNorm, lr=0.1"].color != lines["RowNorm, lr=0.2"].color
    assert lines["AdamW, lr=0.1"].dash == lines["AdamW, lr=0.2"].dash != lines["RowNorm, lr=0.2"].dash
    by_run = figures.diameter(sweep(), PlotOptions(group="run"), by="lr")
    assert len({t.line.color for t in by_run.data}) > 2


def test_every_setting_has_a_ratio_of_its_own():
    figure = figures.ratio(sweep())
    assert [(t.name, t.y[0]) for t in figure.data] == [
        (f"D(S), AdamW, lr={lr} / RowNorm, lr={lr}", pytest.approx(4.0)) for lr in (0.1, 0.2)
    ]
    (only,) = figures.ratio(sweep(), baseline="RowNorm, lr=0.1", candidate="AdamW, lr=0.2").data
    assert (only.name, only.y[0]) == ("D(S)", pytest.approx(1 / 8))


def test_many_groups_have_no_bands_and_fewer_points():
    many = figures.diameter(sweep([n / 100 for n in range(1, 11)]), PlotOptions())
    assert len(many.data) == 20
    assert not [t for t in many.data if t.fill]


def test_any_metric_of_the_catalogue_has_a_panel_on_its_own_axis_and_in_its_unit():
    table = Table(
        np.arange(1, 4), {"efficiency_lower": np.array([0.4, 0.5, 0.6]), "row_norm": np.array([1.0, 2.0, 4.0])}
    )
    run = run_of("a", optimizer="AdamW", table=table)
    options = PlotOptions(axis="updates")
    shares, norms, none = (
        checked(compare_figures.metric_panel(name))([run], options)
        for name in ("efficiency_lower", "row_norm", "spectral_norm")
    )
    assert (list(shares.data[0].y), shares.layout.yaxis.tickformat) == ([0.4, 0.5, 0.6], ".6~%")
    assert (list(norms.data[0].y), norms.layout.yaxis.type) == ([1.0, 2.0, 4.0], "log")
    assert not none.data
    _, rows = panel_table("efficiency_lower", compared([run]), PlotOptions(axis="updates", group="run"))
    assert [row[7] for row in rows] == [0.4, 0.5, 0.6]


def test_a_run_in_no_mean_is_drawn_only_where_each_run_has_a_line():
    runs = [make_run(seed=0, diameter=[1.0]), make_run(seed=1, diameter=[9.0], status="failed")]
    for options, drawn in ((PlotOptions(), 1), (PlotOptions(seeds=True), 2), (PlotOptions(group="run"), 2)):
        assert len(figures.diameter(runs, options).data) == drawn


def test_the_loss_axis_has_room_for_what_is_drawn_and_for_nothing_else():
    calm = [3.0 + 1 / (i + 1) for i in range(50)]
    runs = [make_run(seed=seed, train_loss=calm) for seed in (0, 1)]
    wild = make_run(seed=2, train_loss=[1000.0] * 50, status="failed")
    assert figures.loss([*runs, wild], PlotOptions()).layout.yaxis.range[1] < 4
    assert figures.loss([*runs, wild], PlotOptions(group="run")).layout.yaxis.range[1] > 1000


# Axes


def test_a_line_over_time_has_a_gap_at_a_pause_and_the_band_too():
    def paused(seed):
        steps = np.arange(1, 41)
        times = 5e8 + 10.0 * steps + 36_000 * (steps > 20)
        values = np.linspace(1, 2, 40) + seed
        return run_of(str(seed), optimizer="AdamW", seed=seed, diameter=Curve(steps, [], times, values, 5e8))

    line = figures.diameter([paused(0)], PlotOptions(axis="time")).data[0]
    assert [i for i, y in enumerate(line.y) if y is None] == [20]
    both = figures.diameter([paused(0), paused(1)], PlotOptions(axis="time"))
    assert [i for i, y in enumerate(mean_of(both, "AdamW").y) if y is None] == [20]
    assert [len(t.x) for t in both.data if t.fill] == [20, 20]
    updates = figures.diameter([paused(0)], PlotOptions(axis="updates")).data[0]
    assert None not in updates.y


def test_both_ends_of_a_gap_are_drawn_however_long_the_curve_is():
    steps = np.arange(1, 50_001)
    times = 5e8 + steps + 1e6 * (steps > 33_333)
    run = run_of("a", optimizer="AdamW", diameter=Curve(steps, [], times, np.ones(50_000), 5e8))
    line = figures.diameter([run], PlotOptions(axis="time")).data[0]
    gap = line.y.index(None)
    assert (line.x[gap - 1], line.x[gap + 1]) == pytest.approx((33_333 / 3600, (33_334 + 1e6) / 3600), abs=1e-4)


def test_x_may_be_logarithmic():
    figure = figures.diameter([make_run(diameter=[1.0] * 5000)], PlotOptions(log_x=True, x0=10, x1=1000))
    assert (figure.layout.xaxis.type, figure.layout.xaxis.range) == ("log", None)

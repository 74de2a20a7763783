"""What the figures show: exact values, bands that an axis has room for, spikes that survive."""

import json
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hilbert_monitor.service import figures
from hilbert_monitor.service.series import RunSeries, Series

ALL = [figures.loss, figures.diameter, figures.perturbation, figures.ratios]


def curve(values, every=10):
    steps = [every * (i + 1) for i in range(len(values))]
    return Series(steps, [100.0 * step for step in steps], values)


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
    (trace,) = figures.diameter([run(diameter=[0.5, 0.25])], axis="updates").data
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
    ours = [run("RowNorm", seed=0, diameter=[2.0], perturbation_rms=[3.0])]
    diameter, rms = figures.ratios([*base, *ours]).data
    assert (list(diameter.x), list(diameter.y), list(rms.y)) == ([1000], [10.0], [2.0])


def test_different_panels_have_neither_ratio_nor_mean():
    runs = [run("RowNorm", seed=0, perturbation_rms=[3.0]), run(seed=0, panel="q", perturbation_rms=[6.0])]
    assert not figures.ratios(runs).data
    mixed = [run(seed=0, perturbation_rms=[3.0]), run(seed=1, panel="q", perturbation_rms=[6.0])]
    assert [list(t.y) for t in figures.perturbation(mixed).data] == [[3.0], [6.0]]


def test_a_group_toggles_as_one_and_has_one_entry_in_the_legend():
    runs = [run(name, seed, diameter=[1.0, 2.0]) for name in ("AdamW", "RowNorm") for seed in range(3)]
    figure = figures.diameter(runs)
    assert {t.legendgroup for t in figure.data} == {"AdamW", "RowNorm"}
    assert [t.name for t in figure.data if t.showlegend] == ["AdamW", "RowNorm"]


def test_colours_are_fixed_by_optimizer():
    for runs in ([run("RowNorm", diameter=[1.0])], [run(diameter=[1.0]), run("RowNorm", diameter=[1.0])]):
        assert mean_of(figures.diameter(runs), "RowNorm").line.color == figures.colour("RowNorm")
    assert figures.colour("Lion") == figures.colour("Lion")


@pytest.mark.parametrize("draw", ALL)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_figure_has_both_themes_and_stands_no_runs(draw, theme):
    figure = draw([], theme=theme)
    assert figure.layout.template.layout.font.color == figures.INK[theme][0]
    assert not figure.data


def test_markup_in_names_is_text():
    hostile = RunSeries(id="a", name="<b>x</b>" * 2000, optimizer="<a href='http://x'>y</a>", diameter=curve([1.0]))
    shown = json.loads(figures.diameter([hostile]).to_json())["data"][0]
    assert "<" not in shown["name"] + shown["meta"] + shown["legendgroup"]
    assert len(shown["meta"]) < 400


# Thinning


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=400), st.integers(4, 60))
def test_thinning_keeps_ends_and_extremes_within_its_limit(values, points):
    kept = figures.thin([values], points)
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
    assert max(len(trace.y) for trace in figure.data) <= figures.POINTS
    assert max(mean_of(figure, "AdamW").y) == 25.5
    assert max(figure.data[0].y) == 50.0


def test_the_loss_axis_is_not_pressed_flat_by_the_start():
    values = [11.0, *[3.0 + 1 / i for i in range(1, 100)]]
    low, high = figures.loss([run(validation_loss=values)]).layout.yaxis.range
    assert low < 3.0101 < high < 4

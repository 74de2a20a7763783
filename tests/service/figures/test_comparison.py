"""Means and deviations over seeds, ratios and paired differences; which runs are counted, and what the notes say."""

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hilbert_monitor.runs.run import Curve
from hilbert_monitor.service.figures.axes import axes, axis_of
from hilbert_monitor.service.figures.comparison import compare
from hilbert_monitor.service.figures.contrasts import CurrentRatio
from hilbert_monitor.service.figures.final_values import SampleStatistics, sample_statistics
from tests.support.run_series import make_run, run_of

DIAMETERS = {"AdamW": [0.5, 0.25, 0.75], "RowNorm": [0.015625, 0.03125, 0.046875]}


# Statistics


def test_one_value_has_no_deviation():
    assert sample_statistics([2.0]) == SampleStatistics(2.0, None, 1)
    assert sample_statistics([]) == SampleStatistics()


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=8))
def test_mean_and_deviation_agree_with_the_statistics_module(values):
    result = sample_statistics(values)
    assert result.mean == pytest.approx(statistics.fmean(values), rel=1e-9, abs=1e-6)
    assert result.deviation == pytest.approx(statistics.stdev(values), rel=1e-6, abs=1e-6)


@given(st.randoms(use_true_random=False))
def test_the_order_of_the_runs_does_not_matter(shuffler):
    rng = random.Random(7)
    runs = [
        make_run(o, s, validation_loss=[rng.random()], diameter=[rng.random()], perturbation_rms=[rng.random()])
        for o in ("AdamW", "RowNorm", "Lion")
        for s in range(4)
    ]
    shuffled = runs[:]
    shuffler.shuffle(shuffled)
    assert compare(shuffled) == compare(runs)


@given(st.floats(1e-6, 1e6))
def test_scaling_the_diameters_scales_means_and_deviations_but_not_ratios(c):
    def scaled_by(factor):
        finals = [(o, s, factor * d) for o, ds in DIAMETERS.items() for s, d in enumerate(ds)]
        return compare([make_run(o, s, diameter=[d]) for o, s, d in finals])[0]

    one, scaled = scaled_by(1.0), scaled_by(c)
    for name in DIAMETERS:
        before, after = one.optimizers[name]["step_diameter"], scaled.optimizers[name]["step_diameter"]
        assert after.mean == pytest.approx(c * before.mean)
        assert after.deviation == pytest.approx(c * before.deviation)
    assert scaled.ratios["step_diameter"] == pytest.approx(16.0)


def test_the_checkpoints_where_rownorm_is_below_are_counted():
    losses = {"AdamW": [[5, 4, 3], [5, 4, 3]], "RowNorm": [[4, 5, 2], [5, 4, 3]]}
    runs = [make_run(o, s, validation_loss=values) for o, both in losses.items() for s, values in enumerate(both)]
    (comparison,) = compare(runs)
    assert (comparison.below, comparison.checkpoints) == (2, 3)


def test_the_losses_of_a_pair_are_compared_at_their_last_common_step():
    pair = [make_run(validation_loss=[5.0, 4.0, 1.0]), make_run("RowNorm", validation_loss=[5.5, 4.25])]
    assert compare(pair, live=True)[0].difference.mean == 0.25


def test_a_missing_value_or_a_zero_denominator_gives_no_ratio():
    (comparison,) = compare([make_run(diameter=[1.0]), make_run("RowNorm", diameter=[0.0])])
    assert comparison.optimizers["AdamW"]["perturbation_rms"] == SampleStatistics()
    assert comparison.ratios == {"step_diameter": None, "perturbation_rms": None}


# Which runs are counted


def test_once_a_run_is_finished_only_finished_ones_count():
    runs = [make_run(seed=0, diameter=[1.0]), make_run(seed=1, diameter=[9.0], status="killed")]
    (comparison,) = compare(runs)
    assert comparison.optimizers["AdamW"]["step_diameter"] == SampleStatistics(1.0, None, 1)
    assert [run.seed for run in comparison.excluded] == [1]
    assert "Not finished, or without a value, and therefore in no mean: AdamW-1." in comparison.notes
    (unfinished,) = compare([make_run(seed=s, diameter=[1.0 + s], status="running") for s in range(2)])
    assert unfinished.optimizers["AdamW"]["step_diameter"].mean == 1.5
    assert unfinished.notes == ("No run is finished: these are the last values so far.",)


def test_in_a_live_comparison_running_and_finished_runs_count():
    runs = [make_run(seed=0, diameter=[1.0]), make_run(seed=1, status="running", diameter=[3.0])]
    (report,), (live,) = compare(runs), compare(runs, live=True)
    assert report.optimizers["AdamW"]["step_diameter"].mean == 1.0
    assert live.optimizers["AdamW"]["step_diameter"].mean == 2.0
    assert (live.excluded, live.notes) == ((), ())


def test_in_a_live_comparison_a_broken_run_counts_only_if_its_optimizer_has_no_other():
    runs = [make_run(seed=0, status="running", diameter=[1.0]), make_run(seed=1, status="failed", diameter=[3.0])]
    (comparison,) = compare([*runs, make_run("RowNorm", status="killed", diameter=[0.5])], live=True)
    assert comparison.optimizers["AdamW"]["step_diameter"].mean == 1.0
    assert [run.id for run in comparison.excluded] == ["AdamW-1"]
    assert comparison.pairs == (("AdamW-0", "RowNorm-0"),)
    assert comparison.notes == ("Broken off, and therefore in no mean: AdamW-1.",)


def test_of_two_runs_with_the_same_seed_the_later_counts():
    old, new = (make_run(diameter=[d], id=id, started=t) for d, id, t in ((1.0, "b", 1.0), (2.0, "a", 2.0)))
    (comparison,) = compare([new, old])
    assert comparison.optimizers["AdamW"]["step_diameter"] == SampleStatistics(2.0, None, 1)
    assert comparison.excluded == (old,)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_last_value_that_is_not_finite_is_left_out_and_noted(value):
    runs = [make_run(seed=0, validation_loss=[2.0]), make_run(seed=1, validation_loss=[value])]
    (comparison,) = compare([*runs, make_run("RowNorm", 1, validation_loss=[3.0])])
    assert comparison.optimizers["AdamW"]["validation_loss"] == SampleStatistics(2.0, None, 1)
    assert comparison.difference == SampleStatistics()
    assert any("not finite" in note and "AdamW-1" in note for note in comparison.notes)


# Pairs and panels


def test_the_current_ratio_is_over_the_pairs_that_have_come_farthest():
    baseline = [
        make_run(seed=0, diameter=[9.0, 8.0, 7.0]),
        make_run(seed=1, diameter=[9.0]),
        make_run(seed=2, diameter=[1e6] * 9),
    ]
    candidates = [
        make_run("RowNorm", seed=0, diameter=[1.0, 2.0]),
        make_run("RowNorm", seed=1, diameter=[1.0, 1.0, 1.0]),
    ]
    (comparison,) = compare([*baseline, *candidates], live=True)
    assert comparison.pairs == (("AdamW-0", "RowNorm-0"), ("AdamW-1", "RowNorm-1"))
    assert comparison.current_ratios["diameter"] == CurrentRatio(4.0, 20, 1)
    assert comparison.current_ratios["perturbation_rms"] == CurrentRatio()


def test_a_step_where_one_run_of_a_pair_is_nan_has_no_current_ratio():
    pair = [make_run(diameter=[9.0, 8.0]), make_run("RowNorm", diameter=[3.0, math.nan])]
    assert compare(pair, live=True)[0].current_ratios["diameter"] == CurrentRatio(3.0, 10, 1)


def test_runs_with_different_panels_have_no_ratio_of_hilbert_rms_and_are_no_pair():
    runs = [
        make_run("AdamW", diameter=[8.0], perturbation_rms=[4.0], validation_loss=[3.0]),
        make_run("RowNorm", panel="q", diameter=[2.0], perturbation_rms=[1.0], validation_loss=[3.0]),
    ]
    (comparison,) = compare(runs)
    assert comparison.ratios == {"step_diameter": 4.0, "perturbation_rms": None}
    assert comparison.difference == SampleStatistics()
    assert "AdamW and RowNorm have different panels: there is no ratio of their Hilbert RMS." in comparison.notes
    assert any("no paired difference" in note for note in comparison.notes)


def test_in_a_live_comparison_one_note_says_that_panels_differ():
    runs = [make_run(diameter=[8.0], perturbation_rms=[4.0]), make_run("RowNorm", panel="q", diameter=[2.0])]
    (comparison,) = compare([*runs, make_run("RowNorm", panel="r", seed=1, perturbation_rms=[1.0])], live=True)
    assert (comparison.pairs, comparison.current_ratios["diameter"]) == ((), CurrentRatio())
    assert [note for note in comparison.notes if "no ratio is drawn" in note] == [
        "The runs of AdamW and RowNorm were measured on different panels: there is no paired difference, and no ratio "
        "is drawn."
    ]


def test_one_optimizer_with_two_panels_has_no_mean_of_hilbert_rms():
    (comparison,) = compare(
        [make_run(seed=s, panel=p, perturbation_rms=[1.0], diameter=[1.0]) for s, p in enumerate("pq")]
    )
    assert comparison.optimizers["AdamW"]["perturbation_rms"] == SampleStatistics()
    assert comparison.optimizers["AdamW"]["step_diameter"].runs == 2
    assert any("their Hilbert RMS has no mean" in note for note in comparison.notes)


def test_a_note_says_that_seeds_differ():
    (comparison,) = compare([make_run(seed=0, diameter=[8.0]), make_run("RowNorm", seed=1, diameter=[2.0])], live=True)
    start = "No run of RowNorm has the seed and the panel of one of AdamW"
    assert any(note.startswith(start) for note in comparison.notes)


def test_several_runs_without_a_seed_are_all_counted_and_never_paired():
    runs = [make_run("AdamW", None, id=id, validation_loss=[loss]) for id, loss in (("a", 1.0), ("b", 2.0))]
    (comparison,) = compare([*runs, make_run("RowNorm", None, id="c", validation_loss=[1.0])])
    assert comparison.optimizers["AdamW"]["validation_loss"].runs == 2
    assert comparison.difference == SampleStatistics()
    assert (comparison.below, comparison.checkpoints) == (1, 1)


def pairs_of(runs):
    """The pairs of runs of one model."""
    (comparison,) = compare(runs, live=True)
    return comparison.pairs


def test_runs_without_a_seed_are_paired_if_they_are_the_only_ones():
    single = [make_run(seed=None), make_run("RowNorm", seed=None)]
    assert len(pairs_of(single)) == 1
    assert pairs_of([*single, make_run(seed=None, id="another")]) == ()
    assert pairs_of([make_run(seed=None), make_run("RowNorm", seed=0)]) == ()


def test_runs_of_different_models_are_not_paired():
    comparisons = compare([make_run(model="a"), make_run("RowNorm", model="b")])
    assert [comparison.pairs for comparison in comparisons] == [(), ()]


# Axes


def test_an_axis_exists_if_every_point_has_an_x_coordinate_on_it():
    complete = make_run(diameter=[1.0, 2.0])
    assert axes([complete]) == ("updates", "tokens", "time")
    without_tokens = run_of("x", diameter=Curve([1], [], [1.0], [1.0]))
    assert axes([complete, without_tokens]) == ("updates", "time")
    assert (axis_of([complete]), axis_of([complete, without_tokens])) == ("tokens", "updates")

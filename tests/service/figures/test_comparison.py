"""Means, deviations and pairs of live runs, against loops that say what they are."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hilbert_monitor.runs.log import News, RunState
from hilbert_monitor.runs.record import RunInfo, StepRecord
from hilbert_monitor.service.figures.averages import align, pointwise
from hilbert_monitor.service.figures.comparison import Current, axes, axis_of, compare, pair_up
from hilbert_monitor.service.figures.series import Loaded, RunSeries, Series, run_series
from hilbert_monitor.service.following.columns import Columns
from hilbert_monitor.service.following.text import cell

VALUES = st.one_of(st.floats(-1e3, 1e3), st.sampled_from([math.nan, math.inf, -math.inf]))
CURVE = st.dictionaries(st.integers(1, 12), VALUES, max_size=12)


def series(values):
    """A curve of {step: value}, where a step has ten tokens and takes a second."""
    steps = sorted(values)
    return Series(steps, [10.0 * s for s in steps], [100.0 + s for s in steps], [values[s] for s in steps], 100.0)


def run(optimizer="AdamW", seed=0, panel="p", status="running", id="", model="m", **curves):
    made = {name: series(dict(enumerate(values, 1))) for name, values in curves.items()}
    about = {"optimizer": optimizer, "seed": seed, "panel_hash": panel, "status": status, "model": model}
    return RunSeries(id=id or f"{optimizer}-{seed}-{panel}", **about, **made)


@given(st.lists(CURVE, max_size=6), st.sampled_from(["updates", "tokens", "time"]))
def test_pointwise_means_and_deviations_are_those_of_a_loop(curves, axis):
    at = {}
    for curve in curves:
        for step, value in sorted(curve.items()):
            if math.isfinite(value):
                at.setdefault(step, []).append(value)
    found = pointwise([series(curve) for curve in curves], axis)
    unit = {"updates": 1, "tokens": 10, "time": 1 / 3600}[axis]
    assert found.x.tolist() == pytest.approx([unit * step for step in sorted(at)])
    for place, step in enumerate(sorted(at)):
        values = at[step]
        assert found.runs[place] == len(values)
        assert found.mean[place] == pytest.approx(sum(values) / len(values), abs=1e-9)
        deviation = statistics.stdev(values) if len(values) > 1 else math.nan
        assert found.deviation[place] == pytest.approx(deviation, abs=1e-6, nan_ok=True)
        assert found.smallest[place] == min((v for v in values if v > 0), default=math.inf)


@given(st.lists(st.lists(st.integers(-20, 20), max_size=10), min_size=1, max_size=5))
def test_aligned_arrays_are_found_again_among_all_keys(arrays):
    keys, places = align([np.array(array, np.int64) for array in arrays])
    assert set(keys.tolist()) == {key for array in arrays for key in array}
    assert [keys[place].tolist() for place in places] == arrays


def test_live_runs_count_be_they_finished_or_not():
    runs = [run(seed=0, status="finished", diameter=[1.0]), run(seed=1, status="running", diameter=[3.0])]
    (report,), (live,) = compare(runs), compare(runs, live=True)
    assert report.optimizers["AdamW"]["step_diameter"].mean == 1.0
    assert live.optimizers["AdamW"]["step_diameter"].mean == 2.0
    assert (live.aside, live.notes) == ((), ())


def test_a_live_run_that_broke_off_counts_only_where_its_optimizer_has_no_other():
    runs = [run(seed=0, status="running", diameter=[1.0]), run(seed=1, status="failed", diameter=[3.0])]
    (found,) = compare([*runs, run("RowNorm", seed=0, status="killed", diameter=[0.5])], live=True)
    assert found.optimizers["AdamW"]["step_diameter"].mean == 1.0
    assert [one.id for one in found.aside] == ["AdamW-1-p"]
    assert found.pairs == (("AdamW-0-p", "RowNorm-0-p"),)
    assert found.notes == ("Broken off, and therefore in no mean: AdamW-1-p.",)


def test_losses_of_a_pair_are_compared_where_both_have_one():
    pair = [run(validation_loss=[5.0, 4.0, 1.0]), run("RowNorm", validation_loss=[5.5, 4.25])]
    assert compare(pair, live=True)[0].difference.mean == 0.25


def test_the_current_ratio_is_of_the_pairs_that_have_come_farthest():
    base = [run(seed=0, diameter=[9.0, 8.0, 7.0]), run(seed=1, diameter=[9.0]), run(seed=2, diameter=[1e6] * 9)]
    ours = [run("RowNorm", seed=0, diameter=[1.0, 2.0]), run("RowNorm", seed=1, diameter=[1.0, 1.0, 1.0])]
    (found,) = compare([*base, *ours], live=True)
    assert found.pairs == (("AdamW-0-p", "RowNorm-0-p"), ("AdamW-1-p", "RowNorm-1-p"))
    assert found.current["diameter"] == Current(4.0, 2, 1)
    assert found.current["perturbation_rms"] == Current()


def test_a_step_that_one_of_the_pairs_lost_is_not_shared():
    pair = [run(diameter=[9.0, 8.0]), run("RowNorm", diameter=[3.0, math.nan])]
    assert compare(pair, live=True)[0].current["diameter"] == Current(3.0, 1, 1)


def test_different_panels_make_no_pair_and_one_sentence_says_so():
    runs = [run(diameter=[8.0], perturbation_rms=[4.0]), run("RowNorm", panel="q", diameter=[2.0])]
    (found,) = compare([*runs, run("RowNorm", panel="r", seed=1, perturbation_rms=[1.0])], live=True)
    assert (found.pairs, found.current["diameter"]) == ((), Current())
    said = [note for note in found.notes if "no ratio is drawn" in note]
    assert said == [
        "The runs of AdamW and RowNorm were measured on different panels: there is no paired difference, and no ratio "
        "is drawn."
    ]


def test_different_seeds_make_no_pair_and_the_sentence_is_another():
    (found,) = compare([run(seed=0, diameter=[8.0]), run("RowNorm", seed=1, diameter=[2.0])], live=True)
    assert any(note.startswith("No run of RowNorm has the seed and the panel of one of AdamW") for note in found.notes)


def test_runs_without_a_seed_are_a_pair_if_they_are_the_only_ones():
    alone = [run(seed=None), run("RowNorm", seed=None)]
    assert len(pair_up(alone)) == 1
    assert pair_up([*alone, run(seed=None, id="another")]) == []
    assert pair_up([run(seed=None), run("RowNorm", seed=0)]) == []


def test_runs_of_different_models_are_no_pair():
    assert pair_up([run(model="a"), run("RowNorm", model="b")]) == []


def test_an_axis_is_there_if_every_point_has_a_place_on_it():
    whole = run(diameter=[1.0, 2.0])
    assert axes([whole]) == ("updates", "tokens", "time")
    lost = RunSeries(id="x", diameter=Series([1], [], [1.0], [1.0]))
    assert axes([whole, lost]) == ("updates", "time")
    assert (axis_of([whole]), axis_of([whole, lost])) == ("tokens", "updates")


# Loading


def table(*records):
    columns = Columns()
    columns.take(News(records=list(records), attempts=[], torn=0, offset=0))
    return columns.table


STATE = RunState(status="running", step=2, time=0.0)
RECORDS = [StepRecord(step=s, time=1000.0 + s, tokens=s * 10, train_loss=float(s)) for s in (1, 2, 3)]


def test_a_curve_has_the_records_that_have_a_value_be_it_nan():
    records = [StepRecord(step=s, time=1e3, diameter=d) for s, d in ((1, 0.5), (2, None), (3, math.nan))]
    found = run_series(RunInfo(id="a"), STATE, table(*records)).diameter
    assert found.steps.tolist() == [1, 3]
    assert found.values.tolist() == pytest.approx([0.5, math.nan], nan_ok=True)


def test_a_column_that_every_record_has_is_not_copied():
    made = table(*RECORDS)
    assert np.shares_memory(run_series(RunInfo(id="a"), STATE, made).train_loss.values, made.columns["train_loss"])


@pytest.mark.parametrize(("began", "hours"), [(500.0, 501 / 3600), (None, 0.0), (0.0, 0.0), (2000.0, 0.0)])
def test_wall_time_begins_with_the_first_attempt_or_else_the_first_record(began, hours):
    found = run_series(RunInfo(id="a"), STATE, table(*RECORDS), began).train_loss
    assert found.along("time")[0] == pytest.approx(hours)


def test_a_run_is_loaded_anew_only_if_its_records_are_others():
    loaded, info, one = Loaded(), RunInfo(id="a"), table(*RECORDS)
    first = loaded.get("a", info, STATE, one)
    assert loaded.get("a", info, STATE, one) is first
    ended = loaded.get("a", info, RunState(status="finished", step=3, time=0.0), one)
    assert (ended.status, ended.train_loss) == ("finished", first.train_loss)
    assert loaded.get("a", info, STATE, table(*RECORDS)).train_loss is not first.train_loss
    loaded.forget([])
    assert loaded.get("a", info, STATE, one) is not first


def test_a_run_goes_by_the_name_of_its_folder_though_it_is_a_copy():
    loaded = Loaded()
    assert [loaded.get(key, RunInfo(id="a"), STATE, table(*RECORDS)).id for key in ("a", "copy")] == ["a", "copy"]


@pytest.mark.parametrize(
    "text", ["=1", "+1", "-1", "@a", "\t=1", "\r=1", "\n=1", "\uff1d1", "\uff0b1", "\uff0d1", "\uff20a"]
)
def test_no_cell_is_a_formula(text):
    assert cell(text) == "'" + text


@pytest.mark.parametrize("value", [-1.5, None, "a=1", "", 3])
def test_what_is_no_formula_is_left_alone(value):
    assert cell(value) is value

"""The curves of a run: loading them from records, caching them, and smoothing."""

import math

import numpy as np
import pytest

from hilbert_monitor.runs.log import RunWriter
from hilbert_monitor.runs.reader import Batch, RunReader, RunState
from hilbert_monitor.runs.record import RunInfo, StepRecord
from hilbert_monitor.service.figures.series import RunSeriesCache, Series, pauses, read_run, run_series
from hilbert_monitor.service.following.columns import Columns
from hilbert_monitor.service.following.snapshot import model_of

STATE = RunState(status="running", step=2, time=0.0)
RECORDS = [StepRecord(step=s, time=1000.0 + s, tokens=s * 10, train_loss=float(s)) for s in (1, 2, 3)]


def table(*records):
    columns = Columns()
    columns.take(Batch(records=list(records), keep=None, torn=0, offset=0))
    return columns.table


def test_a_curve_has_the_records_with_a_value_even_if_it_is_nan():
    records = [StepRecord(step=s, time=1e3, diameter=d) for s, d in ((1, 0.5), (2, None), (3, math.nan))]
    curve = run_series(RunInfo(id="a"), STATE, table(*records)).diameter
    assert curve.steps.tolist() == [1, 3]
    assert curve.values.tolist() == pytest.approx([0.5, math.nan], nan_ok=True)


def test_a_column_without_gaps_is_not_copied():
    records = table(*RECORDS)
    curve = run_series(RunInfo(id="a"), STATE, records).train_loss
    assert np.shares_memory(curve.values, records.columns["train_loss"])


@pytest.mark.parametrize(("started", "hours"), [(500.0, 501 / 3600), (None, 0.0), (0.0, 0.0), (2000.0, 0.0)])
def test_the_time_axis_starts_with_the_first_attempt_or_else_the_first_record(started, hours):
    curve = run_series(RunInfo(id="a"), STATE, table(*RECORDS), started).train_loss
    assert curve.x("time")[0] == pytest.approx(hours)


def test_curves_are_in_the_order_of_their_steps_after_a_record_was_amended(tmp_path):
    writer = RunWriter.open(tmp_path, RunInfo(name="amended"))
    for step, diameter in ((10, 15.5), (20, 10.5), (30, 5.5), (40, 0.5)):
        writer.write(StepRecord(step=step, time=float(step), tokens=1000 * step, diameter=diameter))
    writer.write(StepRecord(step=20, time=0.0, diameter=7.0))
    writer.close()
    curve = read_run(RunReader(writer.folder)).diameter
    assert list(curve.steps) == [10, 20, 30, 40]
    assert list(curve.values) == [15.5, 7.0, 5.5, 0.5]
    assert curve.last == 0.5
    assert math.isnan(curve.tokens[1])


@pytest.mark.parametrize(
    ("info", "model"),
    [
        ({"config": {"size": "640M"}}, "640M"),
        ({"config": {"parameters": 379_184_640}, "model": "Decoder"}, "380M"),
        ({"config": {"size": "190M", "parameters": 7}}, "190M, 7 parameters"),
        ({"config": {"parameters": 1234}, "model": "Decoder"}, "Decoder, 1,234 parameters"),
        ({"config": {"size": ["odd"], "parameters": True}, "model": "Decoder"}, "Decoder"),
        ({}, "model"),
    ],
)
def test_the_model_is_named_by_size_or_parameters_or_class(info, model):
    assert model_of(RunInfo(**info)) == model


# The cache


def test_curves_are_made_again_only_for_a_new_table():
    cache, info, records = RunSeriesCache(), RunInfo(id="a"), table(*RECORDS)
    first = cache.get("a", info, STATE, records)
    assert cache.get("a", info, STATE, records) is first
    ended = cache.get("a", info, RunState(status="finished", step=3, time=0.0), records)
    assert (ended.status, ended.train_loss) == ("finished", first.train_loss)
    assert cache.get("a", info, STATE, table(*RECORDS)).train_loss is not first.train_loss
    cache.keep_only([])
    assert cache.get("a", info, STATE, records) is not first


def test_a_copied_run_has_the_id_of_its_own_folder():
    cache = RunSeriesCache()
    assert [cache.get(id, RunInfo(id="a"), STATE, table(*RECORDS)).id for id in ("a", "copy")] == ["a", "copy"]


# Smoothing


def test_a_long_curve_is_smoothed_like_a_short_one():
    values = np.random.default_rng(0).normal(size=4000)
    expected, total, weights = [], 0.0, 0.0
    for value in values.tolist():
        total, weights = 0.6 * total + value, 0.6 * weights + 1
        expected.append(total / weights)
    series = Series(np.arange(4000), [], [], values)
    assert series.smoothed(0.6).tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)


# Pauses


def paused_at(steps, hours):
    return np.flatnonzero(pauses(np.array(steps), np.array(hours))).tolist()


def test_a_pause_is_far_longer_than_its_steps_take():
    steps = np.arange(1, 101)
    hours = steps / 360
    assert paused_at(steps, hours) == []
    assert paused_at(steps, hours + 10 * (steps > 50)) == [50]
    assert paused_at(steps, hours + 10 * (steps > 50) + 10 * (steps > 60)) == [50, 60]


def test_seldom_measured_steps_are_no_pause():
    steps = np.array([1, 2, 3, 4, 500, 501])
    assert paused_at(steps, steps / 360) == []


def test_a_long_validation_in_a_long_run_is_no_pause():
    steps = np.arange(1, 10_001)
    assert paused_at(steps, steps / 3600 + (steps // 500) / 60) == []


def test_a_clock_that_goes_back_breaks_the_line():
    assert paused_at([1, 2, 3, 4], [0.1, 0.2, 0.1, 0.2]) == [2]


@pytest.mark.parametrize("hours", [[], [1.0], [1.0, 1.0], [1.0, 1.0, 1.0], [0.0, 5.0]])
def test_few_points_or_a_clock_that_stands_still_have_no_pause(hours):
    assert paused_at(range(len(hours)), hours) == []

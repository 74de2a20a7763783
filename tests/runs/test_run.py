"""A run for people and programs: what load_run reads, its curves, settings, speed and model."""

import dataclasses
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hilbert_monitor import load_run, load_runs
from hilbert_monitor.runs.log import RunWriter
from hilbert_monitor.runs.reader import Batch, RunState
from hilbert_monitor.runs.record import Alert, RunInfo, StepRecord
from hilbert_monitor.runs.run import Run, Speed, settings
from hilbert_monitor.runs.table import MISSING, Table, TableBuilder

STORED = Path(__file__).parents[1] / "golden" / "runs"
RECORDS = [StepRecord(step=s, time=1000.0 + s, tokens=s * 10, train_loss=float(s)) for s in (1, 2, 3)]


def table_of(*records):
    builder = TableBuilder()
    builder.append(Batch(records=list(records), keep=None, torn=0, offset=0))
    return builder.table


def test_a_run_is_loaded_with_its_columns_alerts_settings_and_state(tmp_path):
    info = RunInfo(
        name="my run", head_optimizer="AdamW", seed=3, last_step=50, config={"optimizer": {"lr": 0.1, "betas": [0.9]}}
    )
    writer = RunWriter.open(tmp_path, info)
    for step, diameter in ((10, 15.5), (20, 10.5), (30, 5.5), (40, None)):
        writer.write(StepRecord(step=step, time=float(step), tokens=1000 * step, diameter=diameter, ceiling=20.0))
    writer.write(StepRecord(step=20, time=0.0, diameter=7.0))
    writer.alert(Alert(step=10, time=0.0, kind="diameter", value=15.5))
    writer.close(RuntimeError("no"))
    for name in ("steps.jsonl", "alerts.jsonl"):
        with open(writer.folder / name, "a") as file:
            file.write("torn\n")
    run = load_run(writer.folder)
    assert run.torn == 2
    assert (run.id, run.label, run.optimizer, run.seed) == ("my-run", "my run", "AdamW", 3)
    assert (run.status, run.step, run.last_step, run.state.message) == ("failed", 40, 50, "no")
    assert run.settings == {"optimizer.lr": "0.1", "optimizer.betas": "[0.9]"}
    assert [alert.step for alert in run.alerts] == [10]
    assert run.table.steps.tolist() == [10, 20, 30, 40]
    assert run.table.column("diameter")[:3].tolist() == [15.5, 7.0, 5.5]
    assert run.table.column("saturation")[2] == 5.5 / 20.0
    curve = run.curve("diameter")
    assert (curve.steps.tolist(), curve.values.tolist(), curve.last) == ([10, 20, 30], [15.5, 7.0, 5.5], 5.5)
    assert math.isnan(curve.tokens[1])
    assert len(run.curve("validation_loss")) == 0
    assert [one.id for one in load_runs(tmp_path)] == [one.id for one in load_runs(writer.folder)] == ["my-run"]


def test_loading_runs_needs_no_torch():
    code = (
        "import sys; from hilbert_monitor import load_runs\n"
        f"runs = load_runs({str(STORED)!r})\n"
        "print(len(runs), runs[0].curve('diameter').values.shape, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    count, *_, has_torch = done.stdout.split()
    assert (count, has_torch) == ("5", "False")


def test_what_is_no_run_is_refused_and_a_broken_run_costs_no_other(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="not the folder of a run"):
        load_run(tmp_path)
    with pytest.raises(ValueError, match="there is no folder"):
        load_runs(tmp_path / "nowhere")
    for name in ("a", "b"):
        RunWriter.open(tmp_path, RunInfo(name=name)).close()
    (tmp_path / "a" / "steps.jsonl").unlink()
    (tmp_path / "a" / "steps.jsonl").symlink_to("/dev/zero")
    broken, whole = load_runs(tmp_path)
    assert (broken.id, broken.status, whole.status) == ("a", "unreadable", "finished")
    assert "not a regular file" in broken.problem


# Curves


def test_a_curve_has_the_records_with_a_value_even_if_it_is_nan():
    records = [StepRecord(step=s, time=1e3, diameter=d) for s, d in ((1, 0.5), (2, None), (3, math.nan))]
    curve = Run(id="a", table=table_of(*records)).curve("diameter")
    assert curve.steps.tolist() == [1, 3]
    assert curve.values.tolist() == pytest.approx([0.5, math.nan], nan_ok=True)


def test_a_column_without_gaps_is_not_copied_and_a_curve_is_made_once():
    run = Run(id="a", table=table_of(*RECORDS))
    curve = run.curve("train_loss")
    assert np.shares_memory(curve.values, run.table.columns["train_loss"])
    ended = dataclasses.replace(run, state=RunState(status="finished", step=3, time=0.0))
    assert ended.curve("train_loss") is curve


def test_points_without_a_place_on_an_axis_are_left_out_of_it():
    records = [StepRecord(step=s, time=3600.0 * s, tokens=t, train_loss=1.0) for s, t in ((1, None), (2, 7), (3, 9))]
    curve = Run(id="a", table=table_of(*records)).curve("train_loss")
    for axis, has_all, places in (("updates", True, [1, 2, 3]), ("time", True, [0, 1, 2]), ("tokens", False, [7, 9])):
        assert (curve.has_x(axis), curve.with_x(axis).x(axis).tolist()) == (has_all, places)


@pytest.mark.parametrize(("started", "hours"), [(500.0, 501 / 3600), (None, 0.0), (0.0, 0.0), (2000.0, 0.0)])
def test_the_time_axis_starts_with_the_first_attempt_or_else_the_first_record(started, hours):
    attempts = () if started is None else (RunInfo(started=started), RunInfo(started=1e9))
    curve = Run(id="a", attempts=attempts, table=table_of(*RECORDS)).curve("train_loss")
    assert curve.x("time")[0] == pytest.approx(hours)


# What a run is


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
    assert Run(id="a", info=RunInfo(**info)).model == model


def test_settings_are_flat_texts_and_equal_numbers_are_equal():
    deep = {}
    for _ in range(2000):
        deep = {"x": deep}
    info = RunInfo(config={"a": {"b": 1.0, "c": "text"}, "long": "x" * 900, "deep": [deep]}, versions={"torch": "2"})
    run = Run(id="a", info=info)
    assert (run.settings["a.b"], run.settings["a.c"], len(run.settings["long"])) == ("1", "text", 500)
    assert run.settings["deep"]
    assert settings(info)["a.b"] == "1.0"
    assert settings(info)["versions.torch"] == run.environment["versions.torch"] == "2"


# Speed


def table(times, steps=None, tokens=1000):
    times = np.asarray(times, np.float64)
    steps = np.arange(1, len(times) + 1) if steps is None else np.asarray(steps)
    return Table(steps, {"time": times, "tokens": tokens * steps.astype(np.float64)})


def speed_of(table):
    return Run(id="a", table=table).speed


NIGHT = 0.25 * np.arange(400)
NIGHT[150:] += 8 * 3600
NIGHT[310:] += 3600


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        (0.25 * np.arange(400), 4.0),
        (NIGHT, 4.0),  # a night without a step does not count
        (np.cumsum(np.where(np.arange(1000) % 50 == 0, 25.5, 0.5)), 1.0),  # regular validation does
        (np.cumsum(np.where(np.arange(20_000) < 14_000, 1.0, 0.1)), 10.0),  # of the newest records
    ],
)
def test_steps_and_tokens_a_second(times, expected):
    speed = speed_of(table(times))
    assert speed == (pytest.approx(expected, rel=0.1), pytest.approx(1000 * expected, rel=0.1))


def test_a_speed_needs_two_moments_and_counts_the_steps_between_records():
    assert speed_of(table([0.0, 5.0, 10.0], steps=[10, 20, 30])).steps == pytest.approx(2.0)
    for times in ([], [1.0], [1.0, 1.0], [2.0, 1.0], [np.nan, 1.0], [MISSING, MISSING], [0.0, np.inf]):
        assert speed_of(table(times)) == Speed(None, None)
    one = table([0.0, 1.0, 2.0])
    assert speed_of(Table(one.steps, {"time": one.columns["time"]})) == (pytest.approx(1.0), None)

"""The sweep over diameters: real runs of a few steps, from the command to the table, and again after a kill."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hilbert_monitor.bench import curve_summary, diameter_curve
from hilbert_monitor.bench.diameter_curve import CURVES, Calibration, CurvePlan, head_rate
from hilbert_monitor.bench.small_run import SmallRun
from hilbert_monitor.cli import app
from hilbert_monitor.runs.diameter_sweep import SweepPoint, sweep_point
from hilbert_monitor.runs.log import find_runs

pytestmark = pytest.mark.usefixtures("less_text")
TINY = replace(CurvePlan.quick(), allowed=(0.5,), seeds=(0,), sgd_rates=(1.0,))


@pytest.fixture(scope="module")
def swept(less_text, tmp_path_factory):
    """A folder with a whole sweep, and what the command printed and wrote."""
    folder = tmp_path_factory.mktemp("sweep")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CurvePlan, "quick", classmethod(lambda cls: TINY))
        patch.setattr("os.cpu_count", lambda: 1)
        command = ["bench", "diameter-curve", "--quick", "--runs", str(folder / "runs")]
        result = CliRunner().invoke(app, [*command, "--json", str(folder / "curve.json")], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return folder / "runs", result.output, json.loads((folder / "curve.json").read_text())["results"]


def test_the_command_makes_a_run_for_every_point_and_prints_their_losses(swept):
    runs, output, rows = swept
    infos = [reader.info for reader in find_runs(runs)]
    assert {info.config["diameter_sweep"]["curve"] for info in infos} == {*CURVES, "AdamW"}
    assert {info.head_optimizer for info in infos} == {"AdamW", "RowNorm", "SGD"}
    assert len(rows) == len(CURVES) + 1
    for row in rows:
        assert row["curve"] in output
        assert f"{row['loss']['mean']:.3f}" in output


def test_what_was_held_made_no_step_over_what_was_allowed(swept):
    """Reference: the diameters that the monitor recorded, beside the limits of their steps."""
    held = [r for r in find_runs(swept[0]) if r.info.config["diameter_sweep"]["curve"] in diameter_curve.HOLDS]
    assert len(held) == 3
    for reader in held:
        records = list(reader.steps())
        assert len(records) == TINY.sizes.steps
        for record in records:
            assert record.trust_limit == 0.5 * TINY.unit(record.step - 1)
            assert record.made_diameter <= record.trust_limit
        assert any(record.diameter > record.trust_limit for record in records if record.diameter is not None)


def test_a_sweep_that_died_goes_on_with_the_runs_that_are_missing(swept, tmp_path):
    runs = tmp_path / "runs"
    shutil.copytree(swept[0], runs)
    readers = {reader.info.name: Path(reader.folder) for reader in find_runs(runs)}
    lost = readers.pop("sgd-rows-held-0.5x-seed0")
    shutil.rmtree(lost)
    before = {name: (folder / "steps.jsonl").stat().st_mtime_ns for name, folder in readers.items()}
    made: list[str] = []
    diameter_curve.run(TINY, runs, workers=1, after_each=made.append)
    assert len(made) == len(readers) + 1
    after = {r.info.name: (Path(r.folder) / "steps.jsonl").stat().st_mtime_ns for r in find_runs(runs)}
    assert {name: after[name] for name in before} == before
    assert "sgd-rows-held-0.5x-seed0" in after
    first, second = (
        next(row.loss.mean for row in curve_summary.summarize(folder) if row.curve == "SGD, rows held")
        for folder in (swept[0], runs)
    )
    assert first == second


def test_rates_are_those_that_make_the_allowed_diameter():
    plan = CurvePlan()
    calibration = Calibration(usual=10.0, sgd_rate=3.0, sgd_losses={})
    rates = {curve: head_rate(curve, 4.0, plan, calibration) for curve in (*CURVES, "AdamW")}
    assert rates["RowNorm, by its rate"] == pytest.approx(4 * 1.6384 / 64)
    assert rates["AdamW, rows held"] == rates["AdamW, scaled"] == rates["AdamW"] == pytest.approx(2.048 / 64)
    assert rates["AdamW, by its rate"] == pytest.approx(0.4 * 2.048 / 64)
    assert rates["SGD, rows held"] == 3.0
    assert plan.unit(0) == 0
    assert plan.unit(30) == pytest.approx(2 * 1.6384 / 64)
    points = list(plan.points())
    assert len(points) == len({(point, seed) for point, seed in points}) == 3 * (7 * 5 + 1)


@pytest.mark.parametrize("name", ["AdamW", "RowNorm", "SGD"])
def test_the_head_alone_has_another_optimizer_and_no_decay(name):
    run = SmallRun(0, TINY.sizes, lambda model: diameter_curve.optimizer(model, name, 0.5))
    owners = [type(owner).__name__ for owner in run.optimizer.optimizers]
    assert owners == ["Muon", "AdamW", name]
    owner = run.optimizer.owner(run.model.lm_head.weight)
    (group,) = owner.param_groups
    assert (group["lr"], group["weight_decay"], group["name"]) == (0.5, 0.0, "head")


def test_a_run_says_which_point_it_is_and_what_makes_no_sense_is_no_point():
    for point in (SweepPoint("AdamW, scaled", 0.25, 0.05), SweepPoint("AdamW", math.inf, 0.05)):
        entry = point.as_config()["diameter_sweep"]
        assert sweep_point({f"diameter_sweep.{key}": str(value) for key, value in entry.items()}) == point
    assert sweep_point({}) is None
    whole = {"diameter_sweep.curve": "a", "diameter_sweep.allowed": "2", "diameter_sweep.unit": "1"}
    for key, value in (("curve", ""), ("allowed", "x"), ("allowed", "-1"), ("allowed", "nan"), ("unit", "0")):
        assert sweep_point(whole | {f"diameter_sweep.{key}": value}) is None

"""The doctor on this machine: every claim holds, and with a real fault in it each one is found to fail."""

import dataclasses
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from hilbert_monitor import HilbertMonitor, Probe, geometry
from hilbert_monitor.cli import app
from hilbert_monitor.doctor import ddp, exactness, increment, interference, other_work, overhead, report
from hilbert_monitor.doctor.device import CheckSizes, choose
from hilbert_monitor.doctor.finding import CLAIMS, Check, Finding, Outcome, examine
from hilbert_monitor.doctor.other_work import OtherWork
from hilbert_monitor.doctor.overhead import StepCost
from tests.support.references import all_pairs_diameter, deltas, length
from tests.support.warm import warm_ranks_fixture  # noqa: F401

CPU = torch.device("cpu")
SMALL = CheckSizes(cloud=(700, 16, 64), updates=4, head=(300, 16), turns=1, patience=300)


def doctor(*args):
    result = CliRunner().invoke(app, ["doctor", *map(str, args)], env={"COLUMNS": "200", "NO_COLOR": "1"})
    return result, re.sub(r"[│╭╮╰╯─\s]+", " ", result.output)


@pytest.fixture
def only(monkeypatch):
    """A doctor that checks one claim, on small sizes."""

    def run(room, sizes=SMALL):
        monkeypatch.setattr(report, "ROOMS", (room,))
        monkeypatch.setattr(CheckSizes, "of", lambda *_, **__: sizes)
        return doctor("--device", "cpu")

    return run


def verdicts(room, sizes=SMALL):
    findings = [examine(check) for check in room.checks(CPU, sizes)]
    return {f.case: f.verdict for f in findings}, " ".join(f.measured for f in findings)


def assert_failed(outcome, claim, words):
    result, text = outcome
    assert result.exit_code == 1, text
    assert f"1 claim failed: {claim}; please open an issue with --json's output" in text
    assert words in text
    assert "Traceback" not in text


# All of it


@pytest.mark.usefixtures("warm_ranks")
def test_every_claim_holds_here_and_the_json_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(overhead, "LIMIT", 5.0)  # the machine of a test has other things to do
    quick = dataclasses.replace(CheckSizes.of(CPU, quick=True), head=(512, 32), updates=4)
    monkeypatch.setattr(CheckSizes, "of", lambda *_, **__: quick)  # a larger head takes half a minute to be timed
    result, text = doctor("--quick", "--device", "cpu", "--json", tmp_path / "doctor.json")
    assert result.exit_code == 0, text
    assert "every claim holds on" in text
    document = json.loads((tmp_path / "doctor.json").read_text())
    assert set(document["machine"]) >= {"processor", "threads", "torch"}
    assert document["failed"] == []
    assert document["device"]["type"] == "cpu"
    assert {f["claim"] for f in document["findings"]} == set(CLAIMS)
    for finding in document["findings"]:
        assert finding["verdict"] == "ok", finding
        assert finding["case"].split(",")[0] in text
        assert finding["seconds"] >= 0


@pytest.mark.skipif(torch.cuda.is_available() or torch.backends.mps.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cuda", f"--device cuda: this torch sees no CUDA device (torch {torch.__version__}): install a CUDA build"),
        ("mps", "--device mps: this torch sees no Apple GPU"),
        ("toaster", "--device toaster: torch knows no such device"),
        ("meta", "--device meta: the checks know cpu, cuda and mps"),
    ],
)
def test_a_device_that_is_not_there_is_one_sentence(name, words):
    result, text = doctor("--device", name)
    assert result.exit_code == 2
    assert words in text
    assert "Traceback" not in text
    assert choose(None) == CPU


def test_a_gpu_of_too_high_a_number_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="sees 2 CUDA devices, numbered from 0"):
        choose("cuda:2")
    assert choose("cuda:1") == torch.device("cuda", 1)
    assert choose(None) == torch.device("cuda", 0)


def test_json_into_a_missing_folder_is_refused_before_anything_runs(tmp_path):
    result, text = doctor("--json", tmp_path / "no" / "out.json")
    assert result.exit_code == 2
    assert "does not exist" in text


def test_a_check_that_raises_has_failed_by_the_first_line_of_it_and_the_others_go_on(monkeypatch):
    def broken():
        raise RuntimeError("CUDA error: [no kernel]\nCompile with `TORCH_USE_CUDA_DSA`")

    checks = [
        Check("exactness", "broken", broken),
        Check("DDP", "mute", lambda: (_ for _ in ()).throw(KeyError)),
        Check("overhead", "fine", lambda: Outcome("ok", "1 %")),
        Check("increment", "left out", lambda: Outcome("skipped", "no GPU")),
    ]
    monkeypatch.setattr(report, "all_checks", lambda *_: checks)
    result, text = doctor("--device", "cpu")
    assert result.exit_code == 1
    assert "2 claims failed: exactness, DDP; please open an issue" in text
    assert "RuntimeError: CUDA error: [no kernel] FAILED" in text
    assert "KeyError: without a message FAILED" in text
    assert "1 % ok" in text
    assert "no GPU skipped" in text
    assert "DSA" not in text


def test_what_was_skipped_is_counted_in_the_last_sentence():
    findings = [Finding("DDP", "a", "ok", "", 0.0), Finding("DDP", "b", "skipped", "", 0.0)]
    assert report.conclusion(findings, CPU).endswith(", 1 of its checks skipped")


def test_nothing_of_a_device_is_touched_before_its_checks_run():
    cuda = torch.device("cuda", 0)
    names = {check.case for check in increment.checks(cuda, SMALL)}
    assert "AdamW capturable, lr a tensor" in names
    for room in (exactness, interference, overhead):
        assert all(callable(check.call) for check in room.checks(cuda, CheckSizes.of(cuda, quick=False)))


# Exactness


def test_the_references_are_those_of_the_tests():
    draw = torch.Generator().manual_seed(0)
    S, H = (torch.randn(n, 12, generator=draw) + 3 for n in (400, 50))
    assert exactness.all_pairs(S, block=64) == pytest.approx(all_pairs_diameter(S), rel=1e-12)
    assert exactness.length(S, (3, 5)) == length(S, (3, 5))
    torch.testing.assert_close(exactness.plain_perturbation(S, H, block=7), deltas(S, H))


FAULTS = {
    "another pair": ("row_diameter", lambda found, S: dataclasses.replace(found, pair=(0, 1))),
    "one pair too short": ("row_diameter", lambda found, S: dataclasses.replace(found, lower=found.lower * (1 - 1e-6))),
    "a bound too low": ("row_diameter_bracket", lambda found, S: dataclasses.replace(found, upper=found.lower * 0.99)),
    "TF32": ("hilbert_perturbation", lambda found, S: dataclasses.replace(found, delta=found.delta * (1 + 1e-4))),
    "other tokens": ("hilbert_perturbation", lambda found, S: dataclasses.replace(found, pair=(0, 1))),
}


@pytest.mark.sweep
@pytest.mark.parametrize(("function", "fault"), FAULTS.values(), ids=FAULTS)
def test_a_wrong_geometry_is_not_exact(only, monkeypatch, function, fault):
    right = getattr(geometry, function)
    monkeypatch.setattr(geometry, function, lambda S, *args: fault(right(S, *args), S))
    assert_failed(only(exactness), "exactness", "limit")


def test_products_in_low_precision_are_found(only, monkeypatch):
    """Geometry that does not keep autocast out."""

    def careless(S, H):
        found, change = geometry_perturbation(S, H), H @ S.T
        return dataclasses.replace(found, delta=(change.amax(1) - change.amin(1)).float())

    geometry_perturbation = geometry.hilbert_perturbation
    monkeypatch.setattr(geometry, "hilbert_perturbation", careless)
    found, _ = verdicts(exactness)
    assert {case for case, verdict in found.items() if verdict != "ok"} == {
        case for case in found if "panel" in case and "autocast" in case
    }


def test_a_setting_that_is_not_put_back_is_found(monkeypatch):
    def careless(S):
        torch.backends.mkldnn.matmul.fp32_precision = "ieee"
        return right(S)

    right = geometry.row_diameter
    before = torch.backends.mkldnn.matmul.fp32_precision
    monkeypatch.setattr(geometry, "row_diameter", careless)
    found, text = verdicts(exactness)
    assert found["points on a sphere, TF32 allowed"] == "FAILED"
    assert "was not put back" in text
    torch.backends.mkldnn.matmul.fp32_precision = before


# Increments


@pytest.mark.sweep
def test_an_increment_that_is_off_by_a_percent_is_found_with_every_optimizer(monkeypatch):
    right = Probe.increment
    monkeypatch.setattr(Probe, "increment", lambda self: 1.01 * right(self))
    found, _ = verdicts(increment)
    assert all(verdict == "FAILED" for case, verdict in found.items() if "overflow" not in case)
    assert len(found) >= 13


def test_a_step_that_overflows_and_is_not_told_is_found(only, monkeypatch):
    monkeypatch.setattr(increment, "_cases", lambda device: {})  # the optimizers without a scaler
    monkeypatch.setattr("hilbert_monitor.monitor.increment.IncrementSource._skipped", lambda self: ("", None))
    assert_failed(only(increment), "increment", "weights unmoved, on record: a step, a step, a step FAILED")


def test_a_probe_that_raises_is_found(only, monkeypatch):
    def broken(S):
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype")

    monkeypatch.setattr("hilbert_monitor.monitor.measure.row_diameter", broken)
    assert_failed(only(increment), "increment", "TypeError: Cannot convert a MPS Tensor")


# Non-interference


class Draws(HilbertMonitor):
    """Takes a random number from the run."""

    def on_train_batch_end(self, *args):
        super().on_train_batch_end(*args)
        torch.rand(())


class Touches(HilbertMonitor):
    """Moves one weight by one unit in the last place."""

    def on_train_end(self, trainer, module):
        super().on_train_end(trainer, module)
        weight = module.model.lm_head.weight.data
        weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(torch.inf))


class Idle(HilbertMonitor):
    """Measures nothing, which is no way to leave a run alone."""

    def on_train_start(self, *_):
        pass


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Draws, "weights, optimizer state, random numbers: DIFFERENT"),
        (Touches, "weights: DIFFERENT"),
        (Idle, "0 diameters, 0 panels"),
    ],
)
def test_a_monitor_that_interferes_or_does_nothing_is_found(only, monkeypatch, kind, words):
    made = interference.monitor

    def faulty(sink):
        monitor = made(sink)
        monitor.__class__ = kind
        return monitor

    monkeypatch.setattr(interference, "monitor", faulty)
    monkeypatch.setattr(interference, "HEADS", ("rownorm",))
    assert_failed(only(interference), "non-interference", words)


def test_a_training_that_is_not_reproducible_is_skipped_and_says_so(only, monkeypatch):
    asked = []

    def chaotic(*_):
        asked.append(torch.are_deterministic_algorithms_enabled())
        return {"weights": [torch.tensor(len(asked))]}, []

    monkeypatch.setattr(interference, "train", chaotic)
    result, text = only(interference)
    assert result.exit_code == 0
    assert "training itself is not reproducible on this device" in text
    assert "4 of its checks skipped" in text
    assert asked[:6] == [False] * 3 + [True] * 3
    assert not torch.are_deterministic_algorithms_enabled()


def test_two_runs_that_are_equal_by_chance_convict_nobody():
    runs = iter([1, 2, 1, 3])
    assert interference.compare_runs(lambda _: ({"weights": [torch.tensor(next(runs))]}, [])) is None


def test_the_sign_of_zero_and_a_nan_are_bits_too():
    def state(x):
        return {"weights": [torch.tensor([x])]}

    assert interference.differing(state(0.0), state(-0.0)) == ["weights"]
    assert not interference.differing(state(float("nan")), state(float("nan")))


# DDP


def hangs(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)


def raises(rank, *_):
    if rank == 1:
        raise ValueError("no weights here\nat all")
    hangs()


def drifts(rank, world, *args):
    """Ranks that agree neither with each other nor with one process."""
    trained = TRAIN(rank, world, *args)
    factor = 1.01 if world > 1 else 1.0
    return ddp.Trained([factor * x for x in trained.numbers], [w + rank for w in trained.weights])


TRAIN = ddp.train


@pytest.mark.sweep
def test_processes_that_hang_are_a_failure_within_the_time(only, monkeypatch):
    monkeypatch.setattr(ddp, "train", hangs)
    start = time.perf_counter()
    outcome = only(ddp, dataclasses.replace(SMALL, patience=2))
    assert time.perf_counter() - start < 300
    assert_failed(outcome, "DDP", "TimeoutError: no answer from 2 of 2 processes within 2 s")
    assert not multiprocessing.active_children()


@pytest.mark.usefixtures("warm_ranks")
def test_a_rank_that_raises_is_named_and_one_that_hangs_then_is_not_waited_for(only, monkeypatch):
    monkeypatch.setattr(ddp, "train", raises)
    outcome = only(ddp, dataclasses.replace(SMALL, patience=300))
    assert_failed(outcome, "DDP", "RuntimeError: rank 1: ValueError: no weights here FAILED")
    assert not multiprocessing.active_children()


@pytest.mark.sweep
@pytest.mark.usefixtures("warm_ranks")
def test_ranks_that_drift_apart_are_found(only, monkeypatch):
    monkeypatch.setattr(ddp, "train", drifts)
    outcome = only(ddp)
    assert_failed(outcome, "DDP", "ranks [1] DIFFERENT")
    assert "off by 1e-02 at most" in outcome[1]


@pytest.mark.parametrize(
    ("kind", "gpus", "words"),
    [
        ("cpu", 4, "2 processes on the CPU over gloo"),
        ("cuda", 1, "2 processes on the CPU over gloo, for want of a second GPU"),
        ("cuda", 3, "3 GPUs over NCCL"),
    ],
)
def test_where_the_ranks_run_is_said(monkeypatch, kind, gpus, words):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert [check.case for check in ddp.checks(torch.device(kind), SMALL)] == [words]


def test_a_number_that_only_one_side_measured_is_far_off():
    assert ddp._relative(float("nan"), 1.0) == ddp._relative(1.0, float("nan")) == float("inf")
    assert ddp._relative(float("nan"), float("nan")) == 0


# Overhead


def timed(*shares):
    """Measurements with these shares, one after the other."""
    left = list(shares)

    def measure(*_):
        return StepCost(1 + left.pop(0), 1.0, "")

    return measure


def test_an_overhead_above_the_limit_is_measured_again_before_it_has_failed(only, monkeypatch):
    monkeypatch.setattr(overhead, "step_cost", timed(0.03, 0.01, 0.015))
    result, text = only(overhead)
    assert result.exit_code == 0, text
    assert "1.00% (limit 2%), after 3.00% at first" in text
    assert "1.50% (limit 2%): a step" in text
    monkeypatch.setattr(OtherWork, "is_much", False)
    monkeypatch.setattr(overhead, "step_cost", timed(0.03, 0.04, 0.01))
    assert_failed(only(overhead), "overhead", "3.00% (limit 2%)")


@pytest.mark.sweep
def test_an_overhead_on_a_busy_machine_is_not_known_unless_it_is_small(only, monkeypatch):
    """Other programs that are really there."""
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in os.sched_getaffinity(0)]
    measure = timed(0.03, 0.04, 0.01)

    def slowly(*_):
        began = time.perf_counter()
        while time.perf_counter() - began < 0.7:
            pass
        return measure()

    try:
        monkeypatch.setattr(overhead, "step_cost", slowly)
        result, text = only(overhead)
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
    assert result.exit_code == 0, text
    assert "not known: the machine is busy (load " in text
    assert "cores, other programs take" in text
    assert "no claim fails on" in text
    assert "and not known is: overhead;" in text
    assert "1.00% (limit 2%): a step" in text


def test_work_of_ones_own_is_not_that_of_others(monkeypatch):
    stat = {"busy": 100.0}
    monkeypatch.setattr(other_work, "_busy_seconds", lambda: stat["busy"])
    with OtherWork() as others:
        began, used = time.perf_counter(), sum(os.times()[:4])
        while time.perf_counter() - began < 0.3:
            pass
        stat["busy"] += sum(os.times()[:4]) - used
    assert others.cores < 0.2
    assert not others.is_much
    with OtherWork() as others:
        time.sleep(0.1)
        stat["busy"] += 0.1 * len(os.sched_getaffinity(0))
    assert others.is_much
    monkeypatch.undo()
    monkeypatch.setattr(other_work, "STAT", Path("nowhere"))
    monkeypatch.setattr(other_work, "_load", lambda: 1000.0)
    with OtherWork() as others:
        pass
    assert (others.cores, others.is_much) == (None, True)


@pytest.mark.parametrize("head", ["adamw", "rownorm"])
def test_time_that_a_probe_takes_is_seen(monkeypatch, head):
    waited = []

    def slow(self, *args, **kwargs):
        waited.append(5.0)
        return right(self, *args, **kwargs)

    def clock():  # without the time that other programs take
        return time.process_time() + sum(waited)

    right = Probe.record
    monkeypatch.setattr(Probe, "record", slow)
    monkeypatch.setattr("hilbert_monitor.doctor.overhead.time", SimpleNamespace(perf_counter=clock))
    cost = overhead.step_cost(CPU, 128, 16, 1, head)
    assert 4.5 < cost.monitored - cost.plain < 10

import math

import numpy as np
import pytest
import torch

from benchmarks import detection, faults, guard
from benchmarks.data import StepChange, TrialSizes
from benchmarks.detection import BASELINES, BOUNDS, WINDOW, cell, count_alarms, measure, series, threshold

QUICK = detection.QUICK
TINY = TrialSizes(steps=20, vocab_size=512, width=32, context=16, batch=4, validation=8, one_file_in=40)


class Fixed:
    """A detector with a fixed limit, which sees whether a branch goes on where its run was."""

    next = 0

    def judge(self, record):
        assert record.step == self.next, "records come in their order, in branches too"
        self.next += 1
        return ["alert"] if record.diameter_lower > 1.9 else []


def test_a_threshold_gives_as_many_alarms_as_asked_for():
    scores = [np.random.default_rng(seed).normal(size=3000) for seed in range(4)]
    for n in (0, 3, 20):
        assert sum(count_alarms(np.flatnonzero(one > threshold(scores, n)).tolist()) for one in scores) == n


def test_clean_series_and_faults_are_judged_step_by_step():
    one, (x, _) = measure("normal 0.1", 3, QUICK, Fixed), series("normal 0.1", 3, QUICK.steps)
    assert one.alarms == np.flatnonzero(np.exp(x) > 1.9).tolist() == []
    assert np.flatnonzero(series(BOUNDS, 3, 100)[1]).tolist() == list(range(0, 100, 10))
    for factor, length in [(2, 1), (2, 5), (3, 1)]:
        expected = [bool((factor * np.exp(x[t : t + length]) > 1.9).any()) for t in QUICK.begins()]
        assert one.told[f"x{factor}, {length} step{'s' * (length > 1)}"].tolist() == expected
    begin = QUICK.begins()[2]
    window, value = x[begin - WINDOW : begin], x[begin] + math.log(2)
    above, mad = value - np.median(window), np.median(abs(window - np.median(window)))
    expected = (value - window.mean()) / window.std(ddof=1), above / (1.4826 * mad)
    assert [one.highest["x2, 1 step"][name][2] for name in BASELINES] == pytest.approx(expected)


def test_a_cell_is_lost_if_the_better_baseline_is_more_than_two_errors_ahead():
    ours, told = np.arange(100) >= 10, np.ones(100, bool)
    for error in (0, 0.06):
        one = cell("x", ours, {"z-score": told, "MAD": ours}, {"z-score": error, "MAD": 9})
        assert one.behind == pytest.approx(0.1 / math.sqrt(0.1 * 0.9 / 99 + error**2))


def test_a_fault_is_in_the_gradient_or_the_rate_that_it_names():
    run, found = guard.GuardedRun(guard.NOTHING, "adamw", 0, TINY, 1.0), {}
    for name, fault in faults.FAULTS.items():
        run.backward(fault(run, 0))
        norms = torch.linalg.vector_norm(run.model.lm_head.weight.grad, dim=1)
        found[name] = float(norms.max() / norms.median())
    assert found["a poisoned row of the gradient"] > 1000
    assert {n for n, x in found.items() if not math.isfinite(x)} == {"fp16 overflow to inf", "a nan in the gradient"}
    run.step()  # its rate is zero
    fault = guard.GUARD_FAULTS["the head's rate x100, 20 steps"]
    usual = {group["name"]: group["lr"] for group in run.optimizer.param_groups}
    with run.update(fault(run, 19)):
        rates = {group["name"]: group["lr"] for group in run.optimizer.param_groups}
    assert rates == {**usual, "head": 100 * usual["head"]}
    assert fault(run, 20) == faults.FAULTS["learning rate x10, one step"](run, 1) == StepChange()


def test_a_branch_goes_on_as_its_run_and_the_trust_region_holds_a_step():
    clean = guard.GuardedRun(guard.REGION, "adamw", 0, TINY, 1e9)
    for _ in range(3):
        clean.step()
    twin, held = clean.branch(), clean.branch()
    held.limit = 0.05
    for run, rate in ((clean, 1.0), (twin, 1.0), (held, 100.0)):
        run.step(StepChange(rate=rate))
    assert clean.validation_loss() == twin.validation_loss()
    assert held.region.last.made_upper <= 0.05 < held.region.last.asked_upper
    assert (twin.held, held.held) == (0, 1)

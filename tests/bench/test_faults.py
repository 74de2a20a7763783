"""The short version of the fault table: real runs, real faults, and runs that branch without a trace."""

import math
from dataclasses import replace

import pytest
import torch

from hilbert_monitor.bench.fault_summary import summarize
from hilbert_monitor.bench.faults import FAULTS, Branch, Spikes, TrialPlan, run
from hilbert_monitor.bench.small_run import StepChange
from hilbert_monitor.bench.trial_runs import TrialRun

SIZES = replace(TrialPlan.quick().sizes, steps=90)
QUICK = replace(TrialPlan.quick(), sizes=SIZES, fault_steps=(75,), horizon=2)
LOUD = {
    "learning rate x10, one step",
    "learning rate x3, for good",
    "fp16 overflow to inf",
    "a nan in the gradient",
}


pytestmark = pytest.mark.usefixtures("less_text")


@pytest.fixture(scope="module")
def summary(less_text):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield summarize(run(QUICK, workers=1))
    torch.set_num_threads(threads)


@pytest.mark.sweep
def test_every_visible_fault_is_reported_in_its_step_and_clean_steps_are_silent(summary):
    assert summary.false_alarms == []
    assert summary.measured == 4 * QUICK.sizes.steps  # two heads, a run with faults and one without
    assert summary.reported == summary.visible >= 8
    assert {cell.fault for cell in summary.cells if cell.visible} >= LOUD


@pytest.mark.sweep
def test_what_the_increment_does_not_show_is_counted_as_invisible(summary):
    """RowNorm divides every row by its norm: nothing but the learning rate, or no number, changes D(S)."""
    quiet = [cell for cell in summary.cells if cell.head == "rownorm" and cell.fault not in LOUD]
    assert len(quiet) == 3
    for cell in quiet:
        assert (cell.visible, cell.reported) == (0, 0)
        assert cell.diameter_ratio == pytest.approx(1, abs=0.1)


@pytest.mark.sweep
def test_a_branch_goes_on_as_the_run_itself_and_leaves_it_alone():
    trial_run = TrialRun("adamw", 0, QUICK.sizes)
    for _ in range(3):
        trial_run.step()
    branch = trial_run.branch()
    faulty = trial_run.branch()
    faulty.step(FAULTS["a nan in the gradient"](faulty, 0))
    for _ in range(3):
        a, b = trial_run.step(reference=True), branch.step(reference=True)
        assert (a.loss, a.gradient_norm, a.diameter, a.perturbation) == (
            b.loss,
            b.gradient_norm,
            b.diameter,
            b.perturbation,
        )
        assert a.record.diameter_lower == b.record.diameter_lower


def test_the_monitor_sees_what_the_fp64_reference_sees():
    trial_run = TrialRun("rownorm", 1, QUICK.sizes)
    for _ in range(9):
        trial_run.step()
    result = trial_run.step(StepChange(rate=2.0), reference=True)
    assert result.record.diameter == pytest.approx(result.diameter, rel=1e-4)


def test_a_spike_detector_scores_by_the_median_and_calls_no_number_infinite():
    spikes = Spikes()
    assert [spikes.score(2.0) for _ in range(20)] == [-math.inf] * 20
    assert spikes.score(2.0 * math.e) == pytest.approx(1.0)
    assert spikes.score(math.nan) == math.inf


@pytest.mark.parametrize(
    ("diameter", "perturbation", "visible"),
    [(1.9, 1.0, False), (2.0, 1.0, True), (1.0, 0.5, True), (1.0, math.nan, True), (0.6, 1.7, False)],
)
def test_what_is_visible_was_fixed_beforehand(diameter, perturbation, visible):
    assert Branch("", "", 0, 0, diameter, perturbation, None, [], []).visible == visible

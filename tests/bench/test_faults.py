"""The short version of the fault table: real runs, real faults, and a bed that branches without a trace."""

import math

import pytest
import torch

from hilbert_monitor.bench.faults import FAULTS, Branch, Plan, Spikes, run, summary
from hilbert_monitor.bench.trial_runs import Bed, Spoil

QUICK = Plan.quick()
LOUD = {
    "learning rate x10, one step",
    "learning rate x3, for good",
    "fp16 overflow to inf",
    "a nan in the gradient",
}


@pytest.fixture(scope="module")
def found():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield summary(run(QUICK, workers=1))
    torch.set_num_threads(threads)


@pytest.mark.filterwarnings("ignore:hilbert_monitor. identity not exact")
def test_every_visible_fault_is_reported_in_its_step_and_clean_steps_are_silent(found):
    assert found.false_alarms == []
    assert found.measured == 2 * QUICK.config.steps
    assert found.reported == found.visible >= 8
    assert {cell.fault for cell in found.cells if cell.visible} >= LOUD


def test_what_the_increment_does_not_show_is_counted_as_invisible(found):
    """RowNorm divides every row by its norm: nothing but the learning rate, or no number, changes D(S)."""
    quiet = [cell for cell in found.cells if cell.head == "rownorm" and cell.fault not in LOUD]
    assert len(quiet) == 3
    for cell in quiet:
        assert (cell.visible, cell.reported) == (0, 0)
        assert cell.diameter_ratio == pytest.approx(1, abs=0.1)


def test_a_branch_goes_on_as_the_run_itself_and_leaves_it_alone():
    bed = Bed("adamw", 0, QUICK.config)
    for _ in range(3):
        bed.step()
    branch = bed.branch()
    spoiled = bed.branch()
    spoiled.step(FAULTS["a nan in the gradient"](spoiled, 0))
    for _ in range(3):
        a, b = bed.step(reference=True), branch.step(reference=True)
        assert (a.loss, a.gradient_norm, a.diameter, a.perturbation) == (
            b.loss,
            b.gradient_norm,
            b.diameter,
            b.perturbation,
        )
        assert a.record.diameter_lower == b.record.diameter_lower


def test_the_monitor_sees_what_the_fp64_reference_sees():
    bed = Bed("rownorm", 1, QUICK.config)
    for _ in range(9):
        bed.step()
    outcome = bed.step(Spoil(rate=2.0), reference=True)
    assert outcome.record.diameter == pytest.approx(outcome.diameter, rel=1e-4)


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

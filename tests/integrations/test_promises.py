"""What the monitor promises, under every trainer that has an adapter."""

import math
import re
import warnings
from functools import cache
from importlib.util import find_spec

import pytest
import torch

from hilbert_monitor.runs.reader import RunReader
from tests.support.adapters import ADAPTERS, UPDATES, Run, rank_environment, train
from tests.support.ranks import in_ranks
from tests.support.references import all_pairs_diameter
from tests.support.sinks import Recorder
from tests.support.tried import OURS, tried

pytestmark = pytest.mark.filterwarnings("ignore")
HUGGING_FACE = {"trainer": "Hugging Face Trainer", "libraries": ["transformers", "accelerate"]}
TRAINERS = {
    "watch": {"trainer": "own loop, by watch"},
    "accelerate": {"trainer": "Accelerate, by watch", "libraries": ["accelerate"]},
    "fabric": {"trainer": "Fabric", "libraries": ["lightning"]},
    "lightning": {"trainer": "Lightning", "libraries": ["lightning"]},
    "transformers": HUGGING_FACE,
    "transformers, not attached": HUGGING_FACE,
}
each_adapter = pytest.mark.parametrize("adapter", ADAPTERS)


def log_of(folder):
    (run,) = (folder / "runs").iterdir()
    return RunReader(run)


class Failing:
    def write(self, record):
        raise OSError("no space left on device")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """By adapter: a run without dropout, one of whose sinks fails; and the records that another sink was given."""

    @cache
    def run_by(adapter):
        kept = Recorder()
        options = {"sinks": [Failing(), kept], "diameter_every": 1}
        return train(adapter, Run(tmp_path_factory.mktemp("whole"), options, dropout=0.0)), kept.records

    return run_by


@each_adapter
def test_diameters_are_those_of_copies_of_the_weights_and_training_is_the_same_to_the_bit(adapter, tmp_path):
    kept = Recorder()
    watched = train(adapter, Run(tmp_path, {"sinks": [kept]}))
    after = torch.get_rng_state()
    plain = train(adapter, Run(tmp_path, None))
    assert torch.equal(after, torch.get_rng_state())
    for one, other in zip(watched.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(watched.optimizer.state.values(), plain.optimizer.state.values(), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in other)
    assert not watched.failures
    assert [record.step for record in kept.records] == list(range(1, UPDATES + 1))
    for record in kept.records:
        D = all_pairs_diameter(watched.changes[record.step])
        assert record.diameter_lower * (1 - 1e-5) <= D <= record.diameter_upper * (1 + 1e-5)
        assert (record.diameter is not None) == (record.step % 2 == 0)
        assert record.diameter is None or record.diameter == pytest.approx(D, rel=1e-5)
        assert math.isfinite(record.train_loss)
        assert record.tokens == record.step * 8 * 9
        assert record.validation_loss == (1.5 if record.step % 3 == 0 else None)
    assert kept.records[-1].perturbation_rms > 0
    log = log_of(tmp_path)
    assert (log.state().status, log.info.panel_size) == ("finished", 40)
    tried(model=OURS, optimizer="AdamW", **TRAINERS[adapter])


def test_all_trainers_make_the_same_run_with_the_same_records(whole):
    pytest.importorskip("accelerate")
    runs = [whole(adapter)[1] for adapter in ADAPTERS]
    changes = whole(ADAPTERS[0])[0].changes
    names = ("diameter_upper", "train_loss", "learning_rate", "tokens", "validation_loss")
    for adapter, records in zip(ADAPTERS[1:], runs[1:], strict=True):
        for one, other in zip(records, runs[0], strict=True):
            values = [[getattr(record, name) or 0.0 for name in names] for record in (one, other)]
            assert values[0] == pytest.approx(values[1], rel=1e-5), (adapter, one.step)
            lengths = [
                float((changes[one.step][[i]] - changes[one.step][[j]]).norm()) for i, j in (one.pair, other.pair)
            ]
            assert lengths[0] == pytest.approx(lengths[1], rel=1e-5)  # two pairs may tie
        # The same positions of the same text: others would give another number.
        assert records[-1].perturbation_rms == pytest.approx(runs[0][-1].perturbation_rms, rel=1e-5), adapter


@pytest.mark.few(2)
@each_adapter
def test_records_go_on_through_a_resume_as_if_there_had_been_none(adapter, whole, tmp_path):
    first, second = Recorder(), Recorder()
    for kept, more in ((first, {"stop_at": 3}), (second, {"resumes": 1})):
        train(adapter, Run(tmp_path, {"sinks": [kept], "diameter_every": 1}, dropout=0.0, **more))
    assert [record.step for record in second.records] == [4, 5, 6]
    _, expected = whole(adapter)
    for one, other in zip([*first.records, *second.records], expected, strict=True):
        assert (one.step, one.tokens) == (other.step, other.tokens)
        assert one.diameter == pytest.approx(other.diameter, rel=1e-6)
    assert second.records[-1].perturbation_rms == pytest.approx(expected[-1].perturbation_rms, rel=1e-5)
    log = log_of(tmp_path)
    assert log.info.attempt == 2
    assert [record.step for record in log.steps()] == list(range(1, UPDATES + 1))


def said(caught):
    return [str(warning.message) for warning in caught if "hilbert_monitor" in str(warning.message)]


@each_adapter
def test_an_increment_that_is_not_finite_is_an_alert_in_its_step_and_can_stop_the_run_which_says_why(adapter, tmp_path):
    told = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = train(adapter, Run(tmp_path, {"on_blowup": [told.append, "stop"]}, broken=4))
    assert [alert.step for alert in told] == [4]
    assert [alert.step for alert in log_of(tmp_path).alerts()] == [4]
    assert run.steps == 4
    (sentence,) = said(caught)
    assert 'step 4: stopping training (on_blowup="stop"): ' in sentence
    assert re.search(r"\d rows? of the increment (is|are) not finite, that of token", sentence)
    assert "look at the batch" in sentence


@each_adapter
def test_a_short_run_whose_head_rests_says_so_at_its_end(adapter, tmp_path):
    run = Run(tmp_path, {})
    run.head.requires_grad_(False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(adapter, run)
    (sentence,) = said(caught)
    assert f"lm_head' has not moved in {UPDATES} updates; it is frozen" in sentence


@each_adapter
def test_a_sink_that_fails_costs_the_run_nothing(adapter, whole):
    run, _ = whole(adapter)
    assert run.steps == UPDATES
    log = log_of(run.folder)
    assert log.state().status == "finished"
    assert [record.step for record in log.steps()] == list(range(1, UPDATES + 1))


def runs_of_a_rank(rank, world, folder, adapters):
    """Runs by each adapter, one after the other: processes take longer to start."""
    rank_environment(rank, world)
    return {adapter: run_of_a_rank(rank, world, adapter, folder / adapter) for adapter in adapters}


def run_of_a_rank(rank, world, adapter, folder):
    torch.manual_seed(1)
    runs = []
    for options in (None, {"sinks": [kept := Recorder()]}):
        run = train(adapter, Run(folder, options, rank=rank, world=world))
        runs.append([p.detach().clone() for p in run.model.parameters()])
    same = all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    records = [(record.step, record.diameter, record.perturbation_rms) for record in kept.records]
    return same, records, [all_pairs_diameter(run.changes[step]) for step in sorted(run.changes)]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """The folder of the runs of two processes, and what each has of them."""
    folder, accelerate = tmp_path_factory.mktemp("two"), find_spec("accelerate")
    adapters = [name for name in ADAPTERS if accelerate or not name.startswith(("accelerate", "transformers"))]
    return folder, in_ranks(runs_of_a_rank, folder, folder, adapters)


@pytest.mark.sweep
@each_adapter
def test_two_processes_measure_together_and_train_as_without(adapter, two):
    folder, ranks = two
    if adapter not in ranks[0]:
        pytest.skip("needs accelerate")
    (same, records, changes), (other_same, other_records, other_changes) = (rank[adapter] for rank in ranks)
    assert same
    assert other_same
    assert [step for step, _, _ in records] == list(range(1, UPDATES + 1))
    assert other_records == []
    assert changes == other_changes
    for step, diameter, _ in records:
        assert diameter is None or diameter == pytest.approx(changes[step - 1], rel=1e-5)
    assert records[-1][2] > 0
    assert log_of(folder / adapter).info.world_size == 2
    tried(model=OURS, optimizer="AdamW", strategy="DDP, 2 ranks", **TRAINERS[adapter])

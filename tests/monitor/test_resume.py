"""Runs that are resumed: their logs, and the history of their rules."""

import math
import random
import time

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from hilbert_monitor import Advanced, HilbertMonitor
from hilbert_monitor.runs.alerts import Judge, alerts_of
from hilbert_monitor.runs.reader import RunReader, find_runs
from hilbert_monitor.runs.record import StepRecord
from tests.support.blowups import fit, monitor
from tests.support.sinks import Recorder
from tests.support.training import Module, Text
from tests.support.warm import Program, warm_ranks_fixture  # noqa: F401

SCRIPT = """
import sys, time, warnings
warnings.simplefilter("ignore")
import lightning, torch
from lightning.pytorch.callbacks import ModelCheckpoint
from hilbert_monitor import Advanced, HilbertMonitor
from tests.support.blowups import Module, fit
class Slow(lightning.Callback):
    def on_train_batch_end(self, trainer, *_):
        time.sleep(0.02)
        print(trainer.global_step, flush=True)
saver = ModelCheckpoint(dirpath="saved", every_n_train_steps=5, save_last=True, enable_version_counter=False)
last = sys.argv[1] if len(sys.argv) > 1 else None
fit(Module("rownorm"), HilbertMonitor(panel_size=50, perturbation_every=7), saver, Slow(), steps=30, checkpoint=last)
"""


def test_a_killed_run_that_is_resumed_goes_on_in_the_same_log():
    program, deadline = Program("-c", SCRIPT), time.monotonic() + 300
    while "23" not in program.output.split() and time.monotonic() < deadline:
        time.sleep(0.005)
    program.kill()
    (run,) = find_runs("runs")
    assert run.state(time.time()).status == "killed"
    assert max(r.step for r in run.steps()) in (21, 22, 23, 24)  # the one that was being written may be lost
    resumed = Program("-c", SCRIPT, "saved/last.ckpt")
    assert resumed.wait() == 0, resumed.output
    (run,) = find_runs("runs")
    assert [info.first_step for info in run.attempts] == [0, 20]
    assert [r.step for r in run.steps()] == list(range(1, 31))
    assert run.state(time.time()).status == "finished"


class Restarts(Module):
    """Has warm restarts every 25 steps, and by a factor another learning rate than the recipe's."""

    factor = 1.0

    def configure_optimizers(self):
        optimizer = AdamW(self.parameters(), lr=1e-3)
        schedule = LambdaLR(optimizer, lambda t: self.factor * (1.02 - t % 25 / 25))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@pytest.mark.parametrize(("factor", "steps", "told"), [(1.0, 80, []), (10.0, 70, [62])])
def test_a_resumed_run_restarts_in_silence_is_told_of_another_rate_and_a_replay_says_the_same(
    tmp_path, factor, steps, told
):
    saver = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=60, enable_version_counter=False)
    fit(Restarts(), monitor(perturbation_every=0), saver, steps=60)
    module, alerts = Restarts(), []
    module.factor = factor
    watch = monitor(perturbation_every=0, on_blowup=[alerts.append])
    fit(module, watch, steps=steps, checkpoint=saver.best_model_path)
    (run,) = find_runs("runs")
    assert len(run.attempts) == 2
    assert [a.step for a in alerts] == [a.step for a in alerts_of(run.steps())] == told


def test_a_second_fit_goes_on_where_the_first_was_and_undoes_nothing():
    watch, module = monitor(run_name="twice"), Module("torch")
    trainer = fit(module, watch, steps=6)
    trainer.fit_loop.epoch_loop.max_steps = 10
    trainer.fit(module, DataLoader(Text(0), batch_size=4), DataLoader(Text(1, 8), batch_size=4))
    run = RunReader("runs/twice")
    assert [r.step for r in run.steps()] == list(range(1, 11))
    assert [info.first_step for info in run.attempts] == [0, 6]


def test_a_branch_with_a_name_of_its_own_leaves_its_parent_alone(tmp_path):
    saver = ModelCheckpoint(
        dirpath=tmp_path / "saved", every_n_train_steps=4, enable_version_counter=False, save_top_k=-1
    )
    fit(Module("torch"), monitor(run_name="base"), saver, steps=12)
    middle = next(path for path in (tmp_path / "saved").iterdir() if "step=4" in path.name)
    fit(Module("torch"), monitor(run_name="branch"), steps=6, checkpoint=middle)
    assert [r.step for r in RunReader("runs/base").steps()] == list(range(1, 13))
    assert [r.step for r in RunReader("runs/branch").steps()] == [5, 6]


@pytest.mark.parametrize(("factor", "severity"), [(2.2, "notice"), (50, "page")])
def test_a_page_is_responded_to_and_a_notice_is_only_logged(factor, severity):
    """A resumed run whose steps are so many times what its history says."""
    alerts, kept, module = [], Recorder(), Module("torch")
    watch = HilbertMonitor(
        panel_size=50, on_blowup=alerts.append, run_name="resumed", advanced=Advanced(immediate=True)
    )
    watch.options.sinks = (kept,)
    trainer = fit(module, watch, steps=2)
    last = kept.records[-1]
    draw, judge = random.Random(1), Judge()
    for step in range(-200, 3):
        usual = last.diameter_lower / factor * math.exp(draw.gauss(0, 0.01))
        judge.judge(StepRecord(step=step, time=0.0, diameter_lower=usual, learning_rate=last.learning_rate))
    watch.session.load_state_dict({"step": 2, "tokens": 8, "history": judge.state()})
    trainer.fit_loop.epoch_loop.max_steps = 3
    trainer.fit(module, DataLoader(Text(0), batch_size=4), DataLoader(Text(1, 8), batch_size=4))
    logged = [(a.step, a.kind, a.severity) for run in find_runs("runs") for a in run.alerts()]
    assert logged == [(3, "diameter", severity)]
    assert [a.severity for a in alerts] == (["page"] if severity == "page" else [])


@pytest.mark.parametrize("history", [None, {"baselines": {}}])
def test_a_history_that_cannot_be_read_costs_the_history_alone(history):
    watch, kept = HilbertMonitor(panel_size=50, run_dir=None, on_blowup=[]), Recorder()
    watch.options.sinks = (kept,)
    module = Module("torch")
    trainer = fit(module, watch, steps=2)
    watch.session.load_state_dict({"step": 2, "tokens": 8, "history": history})
    trainer.fit_loop.epoch_loop.max_steps = 4
    with pytest.warns(UserWarning, match="history failed"):
        trainer.fit(module, DataLoader(Text(0), batch_size=4), DataLoader(Text(1, 8), batch_size=4))
    assert [r.step for r in kept.records] == [1, 2, 3, 4]

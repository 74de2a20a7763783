"""A run with the monitor: what it leaves on disk, and what happens when a step blows up."""

import json
import math
import os
import random
import resource
import signal
import threading
import time
import warnings
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from hilbert_monitor import HilbertMonitor
from hilbert_monitor.runs.alerts import Judge, alerts_of
from hilbert_monitor.runs.reader import RunReader, find_runs
from hilbert_monitor.runs.record import StepRecord
from tests.support.sinks import Recorder
from tests.support.training import Module, Text
from tests.support.warm import Program, warm_ranks_fixture  # noqa: F401

JUMP, STEPS = 23, 30
"""The step at which the learning rate is ten times what it was, not one that is due; and the last."""


class Jumps(Module):
    """Has an accident with its learning rate."""

    def configure_optimizers(self):
        optimizer = AdamW(self.parameters(), lr=1e-3)
        schedule = LambdaLR(optimizer, lambda t: 10.0 if t + 1 == JUMP else 1.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fit(module, *callbacks, steps=STEPS, checkpoint=None, **options):
    torch.manual_seed(1)
    given = {
        "accelerator": "cpu",
        "max_steps": steps,
        "max_epochs": -1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in callbacks),
        "callbacks": list(callbacks),
    } | options
    trainer = lightning.Trainer(**given)
    trainer.fit(module, DataLoader(Text(0), batch_size=4), DataLoader(Text(1, 8), batch_size=4), ckpt_path=checkpoint)
    return trainer


def monitor(**options):
    return HilbertMonitor(**{"diameter_every": 10, "panel_size": 50, "on_blowup": [], "strict": True} | options)


def test_a_run_leaves_its_info_its_steps_its_alerts_and_that_it_finished():
    kept = Recorder()
    fit(Jumps(), monitor(sinks=[kept], run_name="the first", config={"width": 16}))
    (run,) = find_runs("runs")
    steps = list(run.steps())
    assert [r.step for r in steps] == list(range(1, STEPS + 1))
    assert {r.step: r for r in kept.records} == {r.step: r for r in steps}
    assert [(a.step, a.kind) for a in run.alerts()][:1] == [(JUMP, "rate")]
    assert [a.step for a in alerts_of(steps)][:1] == [JUMP]
    info = run.info
    assert (info.id, info.name, info.head_optimizer, info.config) == ("the-first", "the first", "AdamW", {"width": 16})
    assert (info.model, info.panel_size, len(info.panel_hash)) == ("Jumps", 50, 64)
    assert info.versions["torch"] == torch.__version__
    assert run.state(time.time()).status == "finished"


def test_a_step_that_blows_up_is_measured_though_nothing_is_due_and_without_a_run_dir_nothing_is_written():
    kept = Recorder()
    fit(Jumps(), monitor(sinks=[kept], run_dir=None))
    exact = [r.step for r in kept.records if r.diameter is not None]
    assert exact == [10, 20, JUMP, STEPS]
    assert [r.step for r in kept.records if r.perturbation_rms is not None] == [JUMP, STEPS]
    assert not os.listdir()


def test_a_run_that_raises_has_failed_with_what_it_raised():
    class Fails(Module):
        def training_step(self, tokens, index):
            if index == 5:
                raise ArithmeticError("the loss is gone")
            return super().training_step(tokens, index)

    with pytest.raises(ArithmeticError):
        fit(Fails("torch"), monitor())
    (run,) = find_runs("runs")
    state = run.state(time.time())
    assert (state.status, state.error, state.message) == ("failed", "ArithmeticError", "the loss is gone")
    assert [r.step for r in run.steps()] == [1, 2, 3, 4, 5]


def test_a_warning_is_the_default_and_a_function_is_called():
    alerts = []
    said = f"step {JUMP}: the learning rate is 0.01, 10 times the 0.001 that earlier ones led to expect: "
    with pytest.warns(UserWarning, match=said):
        fit(Jumps(), HilbertMonitor(perturbation_every=0, run_dir=None, on_blowup=["warn", alerts.append]))
    assert [(a.step, a.kind) for a in alerts] == [(JUMP, "rate")]


def test_a_function_that_raises_does_not_end_the_run():
    def fails(alert):
        raise RuntimeError("nobody home")

    with pytest.warns(UserWarning, match=r"response to a blow-up failed \(RuntimeError: nobody home\)"):
        trainer = fit(Jumps(), HilbertMonitor(run_dir=None, panel_size=50, on_blowup=fails))
    assert trainer.global_step == STEPS


def test_stop_ends_training_with_the_step_that_blew_up_and_checkpoint_saves_it():
    trainer = fit(Jumps(), monitor(on_blowup=["stop", "checkpoint"], run_name="x"))
    assert trainer.global_step == JUMP
    assert RunReader("runs/x").state(time.time()).status == "finished"
    saved = torch.load(f"runs/x/blow-up-step-{JUMP}.ckpt", weights_only=True)
    assert saved["global_step"] == JUMP


@pytest.mark.parametrize(("actions", "number"), [("stop", 1), (["warn", "stop"], 2)])
def test_a_run_that_stops_says_once_what_the_step_was(actions, number):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(Jumps(), monitor(on_blowup=actions, run_dir=None))
    told = [str(warning.message) for warning in caught if f"step {JUMP}: " in str(warning.message)]
    assert len(told) == number
    assert f'step {JUMP}: training is to end here, as on_blowup="stop" asks' in told[-1]
    assert [text.count("led to expect") for text in told] == ([1] if number == 1 else [1, 0])


@pytest.mark.usefixtures("warm_ranks")
def test_stop_and_checkpoint_take_both_of_two_ranks(tmp_path):
    """Rank zero measures; the other learns of it in the same step, or one of them would wait for ever."""
    fit(
        Jumps(),
        monitor(on_blowup=["stop", "checkpoint"], run_name="two", run_dir=str(tmp_path / "runs")),
        strategy="ddp_spawn",
        devices=2,
    )
    run = RunReader(tmp_path / "runs" / "two")
    assert [r.step for r in run.steps()][-1] == JUMP
    assert run.state(time.time()).status == "finished"
    assert run.info.world_size == 2
    blown = next(r for r in run.steps() if r.step == JUMP)
    assert blown.perturbation_rms > 0
    saved = torch.load(tmp_path / "runs" / "two" / f"blow-up-step-{JUMP}.ckpt", weights_only=True)
    assert saved["global_step"] == JUMP


class FullDisk(lightning.Callback):
    """Rank zero cannot write more than a few bytes to any file during the step that blows up."""

    def on_train_batch_start(self, trainer, *_):
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        if trainer.is_global_zero and trainer.global_step in (JUMP - 1, JUMP):
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100 if trainer.global_step == JUMP - 1 else most, most))


@pytest.mark.sweep
@pytest.mark.usefixtures("warm_ranks")
def test_a_checkpoint_that_cannot_be_written_makes_nobody_wait(tmp_path):
    trainer = fit(
        Jumps(),
        FullDisk(),
        HilbertMonitor(panel_size=50, on_blowup=["checkpoint"], run_name="full", run_dir=str(tmp_path / "runs")),
        strategy="ddp_spawn",
        devices=2,
        default_root_dir=tmp_path,
    )
    assert trainer.state.finished
    run = RunReader(tmp_path / "runs" / "full")
    assert {*range(1, STEPS + 1)} - {r.step for r in run.steps()} <= {JUMP, JUMP + 1}  # no room for those either
    assert run.state(time.time()).status == "finished"
    assert not (run.folder / f"blow-up-step-{JUMP}.ckpt").exists()


@pytest.fixture
def hook():
    """A real server; `hook.delay` is how long it takes to answer."""
    posts = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            posts.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            server.released.wait(server.delay)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.delay, server.posts, server.released = 0.0, posts, threading.Event()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.released.set()
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_webhook_is_sent_what_slack_takes(hook):
    fit(Jumps(), monitor(on_blowup=f"http://127.0.0.1:{hook.server_port}/x", run_name="posted", perturbation_every=0))
    (post,) = hook.posts
    assert post["text"].startswith(f"hilbert-monitor: run posted, step {JUMP}: the learning rate is 0.01, ")
    assert (post["run"], post["alert"]["step"], post["alert"]["kind"]) == ("posted", JUMP, "rate")


@pytest.mark.sweep
def test_a_webhook_that_does_not_answer_costs_no_step(hook):
    hook.delay = 300.0
    start = time.monotonic()
    fit(Jumps(), monitor(on_blowup=f"http://127.0.0.1:{hook.server_port}/x", run_dir=None))
    assert time.monotonic() - start < 150
    assert len(hook.posts) == 1


def test_a_webhook_that_is_not_there_is_warned_of_once():
    with pytest.warns(UserWarning, match=r"the webhook failed \(URLError"):
        fit(Jumps(), monitor(on_blowup="http://127.0.0.1:9/x", run_dir=None))


def test_an_unknown_response_is_refused_in_one_sentence():
    with pytest.raises(ValueError, match=r"on_blowup takes .* got 'shout'"):
        fit(Jumps(), monitor(on_blowup="shout"))


def test_a_run_log_that_cannot_be_opened_costs_the_log_and_not_the_run(tmp_path):
    (tmp_path / "runs").write_text("this is no folder")
    with pytest.warns(UserWarning, match="the run log failed") as seen:
        trainer = fit(Jumps(), HilbertMonitor(panel_size=50, on_blowup=[]))
    assert trainer.global_step == STEPS
    assert sum("the run log failed" in str(w.message) for w in seen) == 1


def test_two_runs_of_one_name_at_once_have_two_logs():
    class Second(lightning.Callback):
        def on_train_batch_start(self, trainer, module, batch, index):
            if index == 2:
                fit(Module("torch"), HilbertMonitor(panel_size=50, run_name="same"), steps=3)

    with pytest.warns(UserWarning, match="run 'same' is being written by another process: this is 'same-2'"):
        fit(Module("torch"), Second(), HilbertMonitor(panel_size=50, run_name="same"), steps=6)
    assert {run.info.id: len(list(run.steps())) for run in find_runs("runs")} == {"same": 6, "same-2": 3}


SCRIPT = """
import sys, time, warnings
warnings.simplefilter("ignore")
import lightning, torch
from lightning.pytorch.callbacks import ModelCheckpoint
from hilbert_monitor import HilbertMonitor
from tests.monitor.test_blowups import fit, Module
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


def test_the_rules_go_on_with_their_history_after_a_resume(tmp_path):
    saver = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=JUMP - 3, enable_version_counter=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(Jumps(), monitor(run_dir=None), saver, steps=JUMP - 3)
        alerts = []
        fit(Jumps(), monitor(run_dir=None, on_blowup=alerts.append), checkpoint=saver.best_model_path)
    assert alerts[0].step == JUMP


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
    watch = HilbertMonitor(panel_size=50, on_blowup=alerts.append, run_name="resumed", immediate=True)
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


def test_a_seed_that_is_no_number_is_left_out(monkeypatch):
    for name, seed in (("a", "-7"), ("b", "\u00b2"), ("c", "--7")):
        monkeypatch.setenv("PL_GLOBAL_SEED", seed)
        fit(Jumps(), monitor(run_name=name))
    assert [run.info.seed for run in find_runs("runs")] == [-7, None, None]

"""What a run writes, what sinks and `decode` may do to it, and the actions on a blow-up."""

import json
import sys
import threading
import time
import warnings
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
import pytest
import torch
from torch.optim import SGD

from hilbert_monitor import HilbertMonitor, watch
from hilbert_monitor.monitor import outputs
from hilbert_monitor.monitor.outputs import QueuedSink, RunOutputs, TokenTexts
from hilbert_monitor.monitor.runtime import Guard
from hilbert_monitor.monitor.session import MonitorOptions
from hilbert_monitor.monitor.watch import PlainLoop
from hilbert_monitor.runs.alerts import alerts_of
from hilbert_monitor.runs.reader import RunReader, find_runs
from hilbert_monitor.runs.record import Alert, RunInfo, StepRecord
from tests.support.blowups import JUMP, STEPS, Jumps, Overwrites, fit, monitor
from tests.support.decoders import Plain
from tests.support.sinks import Recorder, Sink, panics
from tests.support.training import Module, V
from tests.support.warm import warm_ranks_fixture  # noqa: F401


def said_in(function):
    """The texts of the warnings in a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    return [str(warning.message) for warning in caught]


def fails(*_):
    raise RuntimeError("nobody home")


# The log


def test_a_run_leaves_its_info_its_steps_its_alerts_and_that_it_finished():
    kept = Recorder()
    fit(Jumps(), monitor(sinks=[kept], run_name="the first", config={"width": 16}))
    (run,) = find_runs("runs")
    steps, info = list(run.steps()), run.info
    assert [r.step for r in steps] == list(range(1, STEPS + 1))
    assert {r.step: r for r in kept.records} == {r.step: r for r in steps}
    assert [r.step for r in steps if r.diameter is not None] == [10, 20, JUMP, STEPS]  # what blows up is measured
    assert [r.step for r in steps if r.perturbation_rms is not None] == [JUMP, STEPS]
    assert [(a.step, a.kind) for a in run.alerts()][:1] == [(JUMP, "rate")]
    assert [a.step for a in alerts_of(steps)][:1] == [JUMP]
    assert (info.id, info.name, info.head_optimizer, info.config) == ("the-first", "the first", "AdamW", {"width": 16})
    assert (info.model, info.panel_size, len(info.panel_hash)) == ("Jumps", 50, 64)
    assert info.versions["torch"] == torch.__version__
    assert run.state(time.time()).status == "finished"


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


@pytest.mark.parametrize(
    ("options", "trial"), [({"run_dir": None}, False), ({}, True)], ids=["no run_dir", "fast_dev_run"]
)
def test_nothing_is_written_without_a_run_dir_or_in_a_fast_dev_run(options, trial, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kept = Recorder()
    fit(Jumps(), monitor(sinks=[kept], **options), steps=3, fast_dev_run=trial)
    assert kept.records
    assert not list(tmp_path.iterdir())


def test_a_log_that_cannot_be_opened_costs_the_log_and_not_the_run(tmp_path):
    (tmp_path / "file").write_text("this is no folder")
    kept = Recorder()
    watched = HilbertMonitor(panel_size=50, on_blowup=[], run_dir=str(tmp_path / "file" / "runs"), sinks=[kept])
    said = said_in(lambda: fit(Jumps(), watched))
    assert sum("the run log failed (NotADirectoryError" in text for text in said) == 1
    assert len(kept.records) == STEPS


# Sinks


def test_a_sink_that_raises_or_exits_gets_the_next_record_and_the_end_is_in_its_thread():
    records, threads = [], []

    def write(record):
        records.append(record)
        sys.exit()

    sink = QueuedSink(Sink(write), name="a sink")
    for number in range(3):
        sink.write(number)
    sink.end(lambda: threads.append(threading.current_thread().name))
    with pytest.warns(UserWarning, match=r"a sink failed \(SystemExit: \)"):
        sink.join()
    assert (records, threads, sink.failures) == ([0, 1, 2], ["hilbert-monitor a sink"], 3)


def test_a_sink_that_falls_behind_drops_records_and_says_so_once():
    free, records = threading.Event(), []
    sink = QueuedSink(Sink(lambda record: (free.wait(60), records.append(record))), name="a slow sink", room=2)
    said = said_in(lambda: [sink.write(number) for number in range(9)])
    assert said == ["hilbert_monitor: a slow sink has fallen behind, records are dropped"]
    free.set()
    sink.end()
    sink.join(60)
    assert len(records) == 9 - sink.dropped <= 3  # two that waited, and perhaps one that was being written


def test_sinks_that_hang_are_named_and_all_together_get_a_few_seconds(monkeypatch):
    monkeypatch.setattr(outputs, "CLOSE", 3.0)
    free = threading.Event()
    out = opened(sinks=[Sink(lambda record: free.wait(120)) for _ in range(8)])
    out.put(StepRecord(step=1, time=0.0))
    began = time.monotonic()
    with pytest.warns(UserWarning, match="Sink is still busy at the end of the run, its last records may be lost"):
        out.close()
    assert time.monotonic() - began < 8 * 3.0  # not one after the other
    free.set()


def opened(**options):
    """The outputs of a run that is not trained."""
    model = Plain(V, 16)
    loop = PlainLoop(model, SGD(model.parameters(), lr=0.1))
    out = RunOutputs(loop, MonitorOptions(**{"run_dir": None} | options), Guard())
    out.open(RunInfo(), first_step=0)
    return out


def page(**fields):
    return Alert(**{"step": 1, "time": time.time(), "kind": "rate", "severity": "page", "value": 1.0, **fields})


# Texts of tokens


class Decoder:
    """A decoder that takes its time, and notes which tokens it was asked for and where."""

    def __init__(self, seconds=0.0):
        self.seconds, self.tokens, self.threads = seconds, [], set()
        self.free = threading.Event()

    def __call__(self, token):
        self.tokens.append(token)
        self.threads.add(threading.current_thread().name)
        self.free.wait(self.seconds)
        return f"<{token}>"


def texts_of(pair):
    return pair and tuple(f"<{token}>" for token in pair)


@pytest.fixture
def patient(monkeypatch):
    """Records and alerts that wait for their texts, however busy the machine is."""
    monkeypatch.setattr(outputs, "PATIENCE", 300.0)
    monkeypatch.setattr(outputs, "BRIEF_PATIENCE", 300.0)


@pytest.mark.usefixtures("patient")
def test_every_record_has_its_texts_and_decode_is_called_once_for_a_token_in_one_thread():
    decode, kept = Decoder(), Recorder()
    fit(Module("torch"), monitor(diameter_every=1, perturbation_every=2, decode=decode, sinks=[kept], run_name="texts"))
    steps = list(RunReader("runs/texts").steps())
    assert [record.step for record in steps] == list(range(1, STEPS + 1))
    assert steps == kept.records
    assert all(record.pair_text == texts_of(record.pair) for record in steps)
    assert all(record.perturbation_pair_text == texts_of(record.perturbation_pair) for record in steps)
    assert sum(record.perturbation_pair_text is not None for record in steps) == STEPS / 2
    assert len(decode.tokens) == len(set(decode.tokens))
    assert decode.threads == {"hilbert-monitor decode"}


@pytest.mark.sweep
def test_a_decoder_that_hangs_costs_texts_and_neither_records_nor_time():
    decode, kept, began = Decoder(60), Recorder(), time.monotonic()
    fit(Module("torch"), monitor(diameter_every=1, decode=decode, sinks=[kept], run_name="slow"), steps=12)
    assert time.monotonic() - began < 100  # its tokens would take two minutes a step
    decode.free.set()
    run = RunReader("runs/slow")
    steps = list(run.steps())
    assert [record.step for record in steps] == list(range(1, 13))
    assert run.state(time.time()).status == "finished"
    assert len(kept.records) == 12
    assert all(record.pair_text in (None, texts_of(record.pair)) for record in steps)
    assert sum(record.pair_text is None for record in steps)


def test_a_clock_that_is_set_back_makes_nobody_wait_for_a_text(monkeypatch):
    decode, now = Decoder(300.0), time.time()
    texts = TokenTexts(decode, Guard())
    record = StepRecord(step=1, time=now, pair=(1, 2))
    texts.ask(record)
    monkeypatch.setattr(time, "time", lambda: now - 3600.0)
    began = time.monotonic()
    assert texts.complete(record).pair_text is None
    assert time.monotonic() - began < 100
    decode.free.set()


def test_a_decoder_that_fails_costs_the_texts_and_is_asked_once_for_a_token():
    asked = []

    def decode(token):
        asked.append(token)
        raise KeyError(token)

    kept = Recorder()
    watched = monitor(diameter_every=1, decode=decode, sinks=[kept], strict=False)
    said = said_in(lambda: fit(Module("torch"), watched, steps=6))
    assert len(asked) == len(set(asked)) == watched.session.guard.failures["decode"]
    assert sum("decode failed (KeyError" in text for text in said) == 1
    assert all(record.pair_text is None and record.diameter > 0 for record in kept.records)
    with pytest.raises(KeyError):
        fit(Module("torch"), monitor(diameter_every=1, decode=decode), steps=6)


@pytest.mark.usefixtures("patient")
def test_texts_that_are_no_strings_are_made_strings():
    kept = Recorder()
    out = opened(decode=torch.tensor, sinks=[kept])
    out.put(StepRecord(step=1, time=0.0, pair=(3, 5)))
    out.close()
    assert kept.records[0].pair_text == ("tensor(3)", "tensor(5)")


# Actions on a blow-up


class Unhashable(list):
    """A callable without a hash."""

    def __call__(self, alert):
        self.append(alert)


def test_a_warning_is_the_default_and_any_callable_is_called():
    alerts, unhashable = [], Unhashable()
    said = f"step {JUMP}: the learning rate is 0.01, 10 times the 0.001 that earlier ones led to expect: "
    with pytest.warns(UserWarning, match=said):
        fit(Jumps(), monitor(perturbation_every=0, run_dir=None, on_blowup=["warn", alerts.append, unhashable]))
    assert [(a.step, a.kind) for a in alerts] == [(JUMP, "rate")]
    assert unhashable == alerts
    assert MonitorOptions().on_blowup == "warn"


def test_functions_that_fail_panic_or_exit_do_not_end_the_run():
    actions = [fails, panics, lambda alert: sys.exit(3)]
    with pytest.warns(UserWarning, match=r"response to a blow-up failed \(RuntimeError: nobody home\)"):
        trainer = fit(Jumps(), watched := monitor(run_dir=None, on_blowup=actions, strict=False))
    assert trainer.global_step == STEPS
    assert watched.session.guard.failures["response to a blow-up"] == 3


def test_a_function_that_takes_long_is_warned_of_once_with_its_seconds(monkeypatch):
    monkeypatch.setattr(outputs, "SLOW", 0.2)

    def dawdles(alert):
        time.sleep(0.3)

    said = said_in(lambda: fit(Jumps(), monitor(on_blowup=[dawdles, dawdles], run_dir=None)))
    (warning,) = [text for text in said if "took" in text]
    assert "dawdles, a response to a blow-up, took " in warning


@pytest.mark.parametrize(("actions", "number"), [(["stop", "checkpoint"], 1), (["warn", "stop"], 2)])
def test_stop_ends_training_with_the_step_that_blew_up_says_so_once_and_checkpoint_saves_it(actions, number):
    trainers = []
    said = said_in(lambda: trainers.append(fit(Jumps(), monitor(on_blowup=actions, run_name="x"))))
    assert trainers[0].global_step == JUMP
    assert RunReader("runs/x").state(time.time()).status == "finished"
    told = [text for text in said if f"step {JUMP}: " in text]
    assert len(told) == number
    assert f'step {JUMP}: stopping training (on_blowup="stop")' in told[-1]
    assert [text.count("led to expect") for text in told] == ([1] if number == 1 else [1, 0])
    if "checkpoint" in actions:
        assert torch.load(f"runs/x/blow-up-step-{JUMP}.ckpt", weights_only=True)["global_step"] == JUMP


@pytest.mark.usefixtures("warm_ranks")
def test_stop_and_checkpoint_take_both_of_two_ranks(tmp_path):
    """Rank zero measures; the other learns of it in the same step, or one of them would wait for ever."""
    watched = monitor(on_blowup=["stop", "checkpoint"], run_name="two", run_dir=str(tmp_path / "runs"))
    fit(Jumps(), watched, strategy="ddp_spawn", devices=2)
    run = RunReader(tmp_path / "runs" / "two")
    steps = {record.step: record for record in run.steps()}
    assert max(steps) == JUMP
    assert steps[JUMP].perturbation_rms > 0
    assert (run.state(time.time()).status, run.info.world_size) == ("finished", 2)
    assert torch.load(run.folder / f"blow-up-step-{JUMP}.ckpt", weights_only=True)["global_step"] == JUMP


@pytest.fixture
def hook():
    """A real server; `hook.delay` is how long it takes to answer."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            server.posts.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            server.released.wait(server.delay)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.delay, server.posts, server.released = 0.0, [], threading.Event()
        server.url = f"http://127.0.0.1:{server.server_port}/x"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.released.set()
        server.shutdown()
        thread.join()


@pytest.mark.usefixtures("patient")
def test_an_alert_has_its_texts_wherever_it_goes_and_a_webhook_is_sent_what_slack_takes(hook):
    alerts = []
    options = {"decode": Decoder(), "on_blowup": ["warn", alerts.append, hook.url], "run_name": "alerts"}
    with pytest.warns(UserWarning, match=rf"step {JUMP}: .* between tokens \d+ '<\d+>' and \d+ '<\d+>'"):
        fit(Overwrites(), monitor(perturbation_every=0, **options), steps=JUMP + 1)
    alert, post = alerts[0], hook.posts[0]
    assert alert.kind == "ceiling"
    assert alert.pair_text == texts_of(alert.pair)
    assert f"tokens {alert.pair[0]} '<{alert.pair[0]}>' and {alert.pair[1]} '<{alert.pair[1]}>'" in alert.message
    assert list(RunReader("runs/alerts").alerts()) == alerts
    assert [msgspec.convert(one["alert"], Alert) for one in hook.posts] == alerts
    assert post["run"] == "alerts"
    assert post["text"] == f"hilbert-monitor: run alerts, step {JUMP}: {alert.message}"


@pytest.mark.sweep
def test_a_webhook_that_does_not_answer_costs_no_step(hook):
    hook.delay, began = 300.0, time.monotonic()
    fit(Jumps(), monitor(on_blowup=hook.url, run_dir=None))
    assert time.monotonic() - began < 150
    assert len(hook.posts) == 1


def test_a_webhook_that_is_not_there_is_warned_of_once_and_every_failure_is_counted():
    out = opened(on_blowup="http://127.0.0.1:9/x")

    def blow_up():
        out.write(StepRecord(step=1, time=0.0), [page(message="one"), page(message="two")], final=False)
        out.close()

    (warning,) = said_in(blow_up)
    assert "the webhook failed (URLError" in warning
    assert out.failures()["the webhook"] == 2


@pytest.mark.parametrize("action", ["shout", {"stop": True}, "json.nothing"])
def test_an_unknown_action_is_refused_in_one_sentence(action):
    model = Plain(V, 16)
    with pytest.raises(ValueError, match=r"on_blowup takes .* got (?s:.)*(shout|stop|nothing)"):
        watch(model, SGD(model.parameters(), lr=0.1), on_blowup=action)

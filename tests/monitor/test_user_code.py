"""Functions of the user that are slow, hang, fail or panic: they cost texts, records or panels, and never the run."""

import functools
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import lightning
import msgspec
import pytest
import torch
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from hilbert_monitor import HilbertMonitor
from hilbert_monitor.monitor import loader_items, measurement, responses
from hilbert_monitor.monitor.runtime import Guard
from hilbert_monitor.monitor.sinks import QueuedSink
from hilbert_monitor.monitor.token_texts import TokenTexts
from hilbert_monitor.runs.reader import RunReader
from hilbert_monitor.runs.record import Alert, StepRecord
from tests.support.decoders import Plain
from tests.support.sinks import Recorder
from tests.support.training import UPDATES, Module, Text, V, fit
from tests.support.warm import warm_ranks_fixture  # noqa: F401


class Panic(BaseException):
    """As a Rust extension raises it."""


# What is caught, and what passes


class Handler:
    """Handlers of every form."""

    def __init__(self, error):
        self.error = error

    def __call__(self, number, frame):
        raise self.error

    def method(self, number, frame):
        raise self.error

    def three(self, extra, number, frame):
        raise self.error


@pytest.fixture
def usr2():
    before = signal.getsignal(signal.SIGUSR2)
    yield functools.partial(signal.signal, signal.SIGUSR2)
    signal.signal(signal.SIGUSR2, before)


@pytest.mark.few(6)
@pytest.mark.parametrize("user_code", [False, True])
@pytest.mark.parametrize("error", [SystemExit(3), Panic(), TimeoutError("preempted")], ids=repr)
@pytest.mark.parametrize("form", ["function", "object", "method", "partial"])
def test_what_a_signal_handler_raises_while_the_monitor_works_ends_the_run(form, error, user_code, usr2):
    handler = Handler(error)
    handlers = {
        "function": lambda number, frame: handler(number, frame),
        "object": handler,
        "method": handler.method,
        "partial": functools.partial(handler.three, 1),
    }
    usr2(handlers[form])
    guard = Guard()
    with pytest.raises(type(error)), guard("panel", user_code=user_code):
        signal.raise_signal(signal.SIGUSR2)
    assert not guard.failures


def removes_itself(number, frame):
    signal.signal(number, signal.SIG_IGN)
    raise TimeoutError("preempted")


def removes_its_arguments(*arguments):
    del arguments
    raise TimeoutError("preempted")


@pytest.mark.parametrize("handler", [removes_itself, removes_its_arguments])
def test_what_a_signal_handler_raises_that_has_removed_itself_ends_the_run(handler, usr2):
    usr2(handler)
    guard = Guard()
    with pytest.raises(TimeoutError), guard("panel", user_code=True):
        signal.raise_signal(signal.SIGUSR2)
    assert not guard.failures


def test_a_handler_that_is_installed_while_the_run_trains_and_removes_itself_ends_it(usr2, monkeypatch):
    def interrupted(S):
        usr2(lambda number, frame: removes_itself(number, None))
        os.kill(os.getpid(), signal.SIGUSR2)
        time.sleep(5)

    monkeypatch.setattr(measurement, "row_diameter", interrupted)
    with pytest.raises(TimeoutError, match="preempted"):
        fit(Module("torch"), quick())


def test_a_function_that_is_given_a_number_and_some_frame_is_no_signal_handler():
    def fails(number, frame):
        raise ValueError("of the user")

    guard = Guard()
    with pytest.warns(UserWarning, match="panel failed"), guard("panel", user_code=True):
        fails(15, sys._getframe().f_back)
    assert guard.failures == {"panel": 1}


class Interrupted(Plain):
    """Gets a signal in its forward pass, which the panel alone makes, once the head has been called."""

    def forward(self, tokens):
        logits = super().forward(tokens)
        os.kill(os.getpid(), signal.SIGUSR2)
        time.sleep(5)
        return logits


def test_a_stop_that_arrives_in_the_forward_pass_of_the_panel_ends_the_run(usr2):
    """Other failures of that pass do not matter there."""
    usr2(removes_itself)
    module = Module("torch")
    module.model = Interrupted(V, 16)
    with pytest.raises(TimeoutError, match="preempted"):
        fit(module, quick(perturbation_every=2))


@pytest.mark.parametrize("error", [KeyboardInterrupt, GeneratorExit], ids=lambda error: error.__name__)
def test_an_interrupt_from_the_keyboard_and_the_end_of_a_generator_pass(error):
    with pytest.raises(error), Guard()("panel", user_code=True):
        raise error


@pytest.mark.parametrize("error", [SystemExit, Panic], ids=lambda error: error.__name__)
def test_what_is_no_exception_is_caught_around_functions_of_the_user_alone(error):
    guard = Guard()
    with pytest.warns(UserWarning, match=rf"panel failed \({error.__name__}: "), guard("panel", user_code=True):
        raise error
    assert guard.failures == {"panel": 1}
    with pytest.raises(error), guard("rules"):
        raise error
    with pytest.raises(error), Guard(strict=True)("panel", user_code=True):
        raise error


# Whole runs


def panics(*_):
    raise Panic("a panic in Rust")


def exits(*_):
    sys.exit(3)


class Sink:
    def __init__(self, write):
        self.write = write


class Fragile(Text):
    """Validation data whose items cannot be had for the panel."""

    def __init__(self, fail):
        super().__init__(1)
        self.fail = fail

    def __getitem__(self, index):
        asked_by = {frame.filename for frame in traceback.extract_stack()}
        return self.fail() if loader_items.__file__ in asked_by else super().__getitem__(index)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("fail", [panics, exits])
def test_functions_that_panic_or_exit_do_not_end_the_run(fail):
    kept = Recorder()
    monitor = HilbertMonitor(
        diameter_every=1, perturbation_every=3, panel_size=20, hidden=fail, decode=fail, sinks=[Sink(fail), kept]
    )
    trainer = fit(Module("torch"), monitor)
    assert trainer.global_step == UPDATES
    assert len(kept.records) == UPDATES
    assert all(record.diameter > 0 for record in kept.records)
    assert monitor.session.guard.failures["panel"] == UPDATES / 3 + 1  # once more at the end
    assert monitor.session.guard.failures["decode"] > 0


def test_a_validation_set_that_panics_when_the_panel_is_taken_costs_the_panel():
    monitor = quick(perturbation_every=2)
    torch.manual_seed(1)
    options = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(max_steps=3, enable_checkpointing=False, callbacks=[monitor], **options)
    loaders = DataLoader(Text(0), batch_size=4), DataLoader(Fragile(panics), batch_size=4)
    with pytest.warns(UserWarning, match=r"panel failed \(Panic: a panic in Rust\)"):
        trainer.fit(Module("torch"), *loaders)
    assert trainer.global_step == 3


def quick(**options):
    return HilbertMonitor(**{"diameter_every": 1, "perturbation_every": 0, "panel_size": 20} | options)


def test_a_sink_whose_thread_is_told_to_exit_goes_on_with_the_next_record():
    records = []

    def write(record):
        records.append(record)
        sys.exit()

    sink = QueuedSink(Sink(write), name="a sink")
    for number in range(3):
        sink.write(number)
    with pytest.warns(UserWarning, match=r"a sink failed \(SystemExit: \)"):
        sink.close(last=sys.exit)
    assert records == [0, 1, 2]
    assert sink.failures == 4


def test_the_exit_of_a_signal_handler_that_arrives_while_a_step_is_measured_ends_the_run(usr2, monkeypatch):
    def interrupted(S):
        os.kill(os.getpid(), signal.SIGUSR2)
        time.sleep(1)

    usr2(lambda *_: sys.exit(7))
    monkeypatch.setattr(measurement, "row_diameter", interrupted)
    with pytest.raises(SystemExit) as end:
        fit(Module("torch"), quick())
    assert end.value.code == 7


def only_on(rank, fail):
    if int(os.environ.get("LOCAL_RANK", 0)) == rank:
        fail()


def decode_on_rank_zero(token):
    only_on(0, panics)
    return str(token)


def hidden_on_rank_one(module, batch):
    only_on(1, panics)
    return module.model.hidden(batch)


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.usefixtures("warm_ranks")
def test_panics_on_one_of_two_ranks_end_neither(tmp_path):
    monitor = quick(
        perturbation_every=4,
        decode=decode_on_rank_zero,
        hidden=hidden_on_rank_one,
        run_dir=str(tmp_path / "runs"),
        run_name="two",
    )
    fit(Module("torch"), monitor, strategy="ddp_spawn", devices=2)
    run = RunReader(tmp_path / "runs" / "two")
    steps = list(run.steps())
    assert run.info.world_size == 2
    assert run.info.last_step == UPDATES
    assert [record.step for record in steps] == list(range(1, UPDATES + 1))
    assert all(record.diameter > 0 and record.perturbation_rms is None for record in steps)
    assert run.state(time.time()).status == "finished"


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
    monkeypatch.setitem(TokenTexts.complete.__kwdefaults__, "patience", 300.0)
    monkeypatch.setattr(responses, "SOON", 300.0)


@pytest.mark.usefixtures("patient")
def test_a_quick_decoder_is_called_once_for_a_token_in_its_own_thread_and_every_record_has_its_texts():
    decode, kept = Decoder(), Recorder()
    fit(Module("torch"), quick(perturbation_every=2, decode=decode, sinks=[kept], run_name="texts"))
    steps = list(RunReader("runs/texts").steps())
    assert [record.step for record in steps] == list(range(1, UPDATES + 1))
    assert steps == kept.records
    assert all(record.pair_text == texts_of(record.pair) for record in steps)
    assert all(record.perturbation_pair_text == texts_of(record.perturbation_pair) for record in steps)
    assert sum(record.perturbation_pair_text is not None for record in steps) == UPDATES / 2
    assert len(decode.tokens) == len(set(decode.tokens))
    assert decode.threads == {"hilbert-monitor decode"}


@pytest.mark.sweep
@pytest.mark.parametrize("seconds", [5, 60], ids=["slow", "hangs"])
def test_a_slow_decoder_costs_texts_and_neither_records_nor_time(seconds):
    decode, kept, starts = Decoder(seconds), Recorder(), []

    class Clock(lightning.Callback):
        def on_train_batch_start(self, *_):
            starts.append(time.monotonic())

    fit(Module("torch"), quick(decode=decode, sinks=[kept], run_name="slow"), Clock())
    end = time.monotonic()
    decode.free.set()
    steps = list(RunReader("runs/slow").steps())
    assert [record.step for record in steps] == list(range(1, UPDATES + 1))
    assert RunReader("runs/slow").state(time.time()).status == "finished"
    assert len(kept.records) == UPDATES
    assert all(record.pair_text in (None, texts_of(record.pair)) for record in steps)
    assert sum(record.pair_text is None for record in steps)  # it was slow
    assert starts[-1] - starts[0] < 50  # its tokens would have taken ten seconds a step
    assert end - starts[-1] < 50


def test_a_decoder_that_fails_costs_the_texts_and_is_asked_once_for_a_token():
    asked = []

    def decode(token):
        asked.append(token)
        raise KeyError(token)

    kept, monitor = Recorder(), quick(decode=decode)
    monitor.options.sinks = (kept,)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        fit(Module("torch"), monitor)
    assert len(asked) == len(set(asked)) == monitor.session.guard.failures["decode"]
    assert sum("decode failed (KeyError" in str(warning.message) for warning in seen) == 1
    assert all(record.pair_text is None and record.diameter > 0 for record in kept.records)
    with pytest.raises(KeyError):
        fit(Module("torch"), quick(decode=decode, strict=True))


@pytest.mark.usefixtures("patient")
def test_texts_that_are_no_strings_are_made_strings():
    texts = TokenTexts(torch.tensor, Guard())
    record = texts.complete(StepRecord(step=1, time=time.time(), pair=(3, 5)))
    assert record.pair_text == ("tensor(3)", "tensor(5)")
    texts.close()


@pytest.mark.usefixtures("patient")
def test_old_texts_are_forgotten_and_asked_for_again(monkeypatch):
    monkeypatch.setattr("hilbert_monitor.monitor.token_texts.ROOM", 4)
    decode = Decoder()
    texts = TokenTexts(decode, Guard())
    for step, pair in enumerate([(1, 2), (3, 4), (1, 2), (5, 6), (1, 2)]):
        record = texts.complete(StepRecord(step=step, time=time.time(), pair=pair))
        assert record.pair_text == texts_of(pair)
    assert decode.tokens.count(1) == 2
    assert len(texts._texts) == 4
    texts.close()


# Blow-ups


class Jumps(Module):
    """Has a learning rate that is ten times too large in update 25."""

    def configure_optimizers(self):
        optimizer = AdamW(self.parameters(), lr=1e-3)
        schedule = LambdaLR(optimizer, lambda t: 10.0 if t == 24 else 1.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Overwrites(Module):
    """Writes to the optimizer's state before update 25: D(S) exceeds the optimizer's ceiling."""

    def configure_optimizers(self):
        return AdamW(self.parameters(), lr=1e-3)

    def on_before_optimizer_step(self, optimizer):
        if self.trainer.global_step == 24:
            for state in optimizer.state.values():
                state["exp_avg"].mul_(1e4)


def blow_up(module=Jumps, **options):
    """A run of 26 updates with a blow-up."""
    torch.manual_seed(1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=26,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[HilbertMonitor(perturbation_every=0, **options)],
    )
    trainer.fit(module(), DataLoader(Text(0), batch_size=4))
    return trainer


@pytest.mark.usefixtures("patient")
def test_the_texts_are_in_the_alert_wherever_it_goes():
    posts, alerts = [], []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self):
            posts.append(msgspec.json.decode(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Hook) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        with pytest.warns(UserWarning, match=r"step 25: .* between tokens \d+ '<\d+>' and \d+ '<\d+>'"):
            blow_up(Overwrites, decode=Decoder(), on_blowup=["warn", alerts.append, address], run_name="alerts")
        server.shutdown()
    alert = alerts[0]
    assert alert.kind == "ceiling"
    assert alert.pair_text == texts_of(alert.pair)
    assert f"tokens {alert.pair[0]} '<{alert.pair[0]}>' and {alert.pair[1]} '<{alert.pair[1]}>'" in alert.message
    assert list(RunReader("runs/alerts").alerts()) == alerts
    assert [msgspec.convert(post["alert"], Alert) for post in posts] == alerts
    assert alert.message in posts[0]["text"]


@pytest.mark.sweep
def test_a_function_that_takes_long_is_warned_of_once_with_its_seconds(monkeypatch):
    monkeypatch.setattr(responses, "SLOW", 0.2)

    def dawdles(alert):
        time.sleep(0.3)

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        blow_up(on_blowup=[dawdles, dawdles], run_dir=None)
    (warning,) = [str(w.message) for w in seen if "took" in str(w.message)]
    assert "dawdles, a response to a blow-up, took 0.3 s, and training waited for it" in warning


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_responses_that_panic_or_exit_do_not_end_the_run():
    assert blow_up(on_blowup=[panics, exits], run_dir=None).global_step == 26


# Disks


def test_a_folder_that_cannot_be_written_costs_the_log_and_not_the_run(tmp_path):
    (tmp_path / "file").write_text("")
    kept = Recorder()
    with pytest.warns(UserWarning, match=r"the run log failed \(NotADirectoryError"):
        fit(Module("torch"), quick(run_dir=str(tmp_path / "file" / "runs"), sinks=[kept]))
    assert len(kept.records) == UPDATES


def test_a_sink_that_is_not_done_at_the_end_is_named():
    free = threading.Event()
    sink = QueuedSink(Sink(lambda record: free.wait(60)), name="a slow sink", room=1)
    for record in range(3):
        sink.write(record)
    start = time.monotonic()
    with pytest.warns(UserWarning, match="a slow sink is still busy at the end of the run, its last records may be"):
        sink.close(0.3)
    assert time.monotonic() - start < 30
    free.set()

"""Functions of the user that fail or panic: they cost texts, records or panels, and never the run."""

import functools
import os
import signal
import sys
import time

import pytest

from hilbert_monitor import HilbertMonitor
from hilbert_monitor.monitor import measure
from hilbert_monitor.monitor.runtime import Guard
from tests.support.decoders import Plain
from tests.support.sinks import Panic, Recorder, Sink, panics
from tests.support.training import UPDATES, Module, V, fit
from tests.support.warm import warm_ranks_fixture  # noqa: F401

# What is caught, and what passes


class Handler:
    """Handlers that are objects and methods."""

    def __call__(self, number, frame):
        stops(number, frame)

    def method(self, number, frame):
        stops(number, frame)


def stops(number, frame):
    raise TimeoutError("preempted")


def removes_itself(number, frame):
    signal.signal(number, signal.SIG_IGN)
    raise TimeoutError("preempted")


def removes_its_arguments(*arguments):
    del arguments
    raise TimeoutError("preempted")


HANDLERS = {
    "function": (stops, TimeoutError),
    "object": (Handler(), TimeoutError),
    "method": (Handler().method, TimeoutError),
    "partial": (functools.partial(lambda extra, number, frame: stops(number, frame), 1), TimeoutError),
    "exits": (lambda number, frame: sys.exit(3), SystemExit),
    "panics": (panics, Panic),
    "removes itself": (removes_itself, TimeoutError),
    "removes its arguments": (removes_its_arguments, TimeoutError),
}


@pytest.fixture
def usr2():
    before = signal.getsignal(signal.SIGUSR2)
    yield functools.partial(signal.signal, signal.SIGUSR2)
    signal.signal(signal.SIGUSR2, before)


@pytest.mark.parametrize("user_code", [False, True])
@pytest.mark.parametrize(("handler", "error"), HANDLERS.values(), ids=HANDLERS)
def test_what_a_signal_handler_raises_while_the_monitor_works_ends_the_run(handler, error, user_code, usr2):
    usr2(handler)
    guard = Guard()
    with pytest.raises(error), guard("panel", user_code=user_code):
        signal.raise_signal(signal.SIGUSR2)
    assert not guard.failures


def test_a_handler_that_is_installed_while_the_run_trains_and_removes_itself_ends_it(usr2, monkeypatch):
    def interrupted(S):
        usr2(lambda number, frame: removes_itself(number, None))
        os.kill(os.getpid(), signal.SIGUSR2)
        time.sleep(5)

    monkeypatch.setattr(measure, "row_diameter", interrupted)
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


def exits(*_):
    sys.exit(3)


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


def quick(**options):
    return HilbertMonitor(**{"diameter_every": 1, "perturbation_every": 0, "panel_size": 20} | options)

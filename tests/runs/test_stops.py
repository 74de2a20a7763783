"""Requested stops: which exceptions come from a signal."""

import functools
import os
import signal
import time

import pytest

from hilbert_monitor.runs.log import RunWriter
from hilbert_monitor.runs.reader import RunReader
from hilbert_monitor.runs.record import RunInfo
from tests.support.forks import outcome
from tests.support.run_logs import step


class SIGTERMException(SystemExit):
    """Named as Lightning's."""


def by(number, handler):
    """Install a handler of a signal, and send that."""
    signal.signal(number, handler)
    os.kill(os.getpid(), number)
    time.sleep(5)


def raising(error, then=None):
    def handle(number, frame):
        if then is not None:  # as handlers do that want no second signal to come through
            signal.signal(number, then)
        raise error

    return handle


def dropping_its_arguments(number, frame):
    del number, frame
    raise SystemExit(0)


def by_a_handler_that_calls_that_of_another_signal():
    end = raising(TimeoutError("slow"))
    signal.signal(signal.SIGTERM, end)
    by(signal.SIGALRM, lambda *arguments: end(*arguments))


def raised(error):
    raise error


@pytest.mark.parametrize(
    ("work", "stopped"),
    [
        (lambda: raised(KeyboardInterrupt()), "SIGINT"),
        (lambda: raised(SIGTERMException()), "SIGTERM"),
        (lambda: raised(SystemExit(143)), "SIGTERM"),
        (lambda: raised(SystemExit(130)), "SIGINT"),
        (lambda: os.kill(os.getpid(), signal.SIGINT) or time.sleep(5), "SIGINT"),
        (lambda: by(signal.SIGTERM, raising(KeyboardInterrupt())), "SIGTERM"),
        (lambda: by(signal.SIGTERM, raising(SystemExit(0))), "SIGTERM"),
        (lambda: by(signal.SIGTERM, raising(RuntimeError("preempted"))), "SIGTERM"),
        (lambda: by(signal.SIGTERM, lambda *arguments: raised(SystemExit(1))), "SIGTERM"),
        (lambda: by(signal.SIGTERM, functools.partial(lambda error, *_: raised(error), SystemExit(1))), "SIGTERM"),
        (lambda: by(signal.SIGTERM, raising(SystemExit(0), then=signal.SIG_IGN)), "SIGTERM"),
        (lambda: by(signal.SIGTERM, dropping_its_arguments), "SIGTERM"),
        (lambda: by(signal.SIGALRM, raising(TimeoutError("slow"), then=signal.SIG_DFL)), ""),
        (by_a_handler_that_calls_that_of_another_signal, ""),
        (lambda: raised(SystemExit(1)), ""),
        (lambda: raised(SystemExit("143")), ""),
        (lambda: raised(ValueError()), ""),
    ],
)
def test_a_stop_that_a_signal_asked_for_is_no_failure_and_can_be_resumed(tmp_path, work, stopped):
    def child():
        writer = RunWriter.open(tmp_path, RunInfo(name="a"))
        writer.write(step(1))
        try:
            work()
        except BaseException as error:
            writer.close(error)

    assert outcome(child) == 0
    reader = RunReader(tmp_path / "a")
    assert (reader.end.stopped, reader.state().status) == (stopped, "stopped" if stopped else "failed")
    assert bool(reader.end.error) != bool(stopped)
    again = RunWriter.open(tmp_path, RunInfo(name="a"))
    assert (again.id, again.info.attempt) == ("a", 2)
    again.close(RuntimeError("a worker was killed"), stopped="SIGTERM")
    assert (reader.state().status, reader.state().error) == ("stopped", "RuntimeError")

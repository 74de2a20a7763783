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


def by_handler(number, error):
    """Let a handler of a signal raise an error, by a real signal."""

    def handle(number, frame):
        raise error

    signal.signal(number, handle)
    os.kill(os.getpid(), number)
    time.sleep(5)


def by_a_handler_of_any_arguments(number, error):
    signal.signal(number, functools.partial(lambda error, *arguments: (_ for _ in ()).throw(error), error))
    os.kill(os.getpid(), number)
    time.sleep(5)


def by_a_handler_that_removes_itself(number, error, then):
    """As handlers do that want no second signal to come through."""

    def handle(number, frame):
        signal.signal(number, then)
        raise error

    signal.signal(number, handle)
    os.kill(os.getpid(), number)
    time.sleep(5)


def by_a_handler_that_calls_another(number, error):
    """The one is called for an alarm, and calls the one for SIGTERM too."""

    def end(number, frame):
        raise error

    signal.signal(signal.SIGTERM, end)
    signal.signal(number, lambda *arguments: end(*arguments))
    os.kill(os.getpid(), number)
    time.sleep(5)


def by_a_handler_that_drops_its_arguments(number, error):
    def handle(number, frame):
        del number, frame
        raise error

    signal.signal(number, handle)
    os.kill(os.getpid(), number)
    time.sleep(5)


def raised(error):
    raise error


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("work", "stopped"),
    [
        (lambda: raised(KeyboardInterrupt()), "SIGINT"),
        (lambda: raised(SIGTERMException()), "SIGTERM"),
        (lambda: raised(SystemExit(143)), "SIGTERM"),
        (lambda: raised(SystemExit(130)), "SIGINT"),
        (lambda: os.kill(os.getpid(), signal.SIGINT) or time.sleep(5), "SIGINT"),
        (lambda: by_handler(signal.SIGTERM, KeyboardInterrupt()), "SIGTERM"),
        (lambda: by_handler(signal.SIGTERM, SystemExit(0)), "SIGTERM"),
        (lambda: by_handler(signal.SIGTERM, RuntimeError("preempted")), "SIGTERM"),
        (lambda: by_a_handler_of_any_arguments(signal.SIGTERM, SystemExit(1)), "SIGTERM"),
        (lambda: by_a_handler_that_removes_itself(signal.SIGTERM, SystemExit(0), signal.SIG_IGN), "SIGTERM"),
        (lambda: by_a_handler_that_removes_itself(signal.SIGTERM, SystemExit(1), signal.SIG_DFL), "SIGTERM"),
        (lambda: by_a_handler_that_removes_itself(signal.SIGALRM, TimeoutError("slow"), signal.SIG_DFL), ""),
        (lambda: by_a_handler_that_calls_another(signal.SIGALRM, TimeoutError("slow")), ""),
        (lambda: by_a_handler_that_drops_its_arguments(signal.SIGTERM, SystemExit(0)), "SIGTERM"),
        (lambda: by_handler(signal.SIGALRM, TimeoutError("slow")), ""),
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

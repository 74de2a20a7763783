"""Python programs in processes of their own that start warm: forked from a server that has loaded torch and Lightning.

Loading them takes a fresh interpreter some seconds of processor time. Each process that runs tests has one server, from
the first program on. A program sees nothing of the tests: neither their modules nor their state. Its environment is its
own, but torch has read what it reads at its import.
"""

import contextlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time

import pytest
import torch

PRELOADED = [
    *("pytest", "hypothesis", "scipy", "transformers", "jsonargparse", "torch._dynamo", "lightning"),
    *("hilbert_monitor.monitor.callback", "hilbert_monitor.pretrain.train", "hilbert_monitor.cli"),
    "tests.support.frozen",
]
METHOD = "forkserver"
"""How they start, as multiprocessing calls it."""

multiprocessing.set_forkserver_preload(PRELOADED)


@pytest.fixture(name="warm_ranks")
def warm_ranks_fixture(monkeypatch):
    """Processes that the doctor or Lightning's ddp_spawn would spawn start warm.

    Lightning's own start by a fork server would not do: there the ranks share the memory of their weights.
    """
    start = torch.multiprocessing.start_processes

    def start_warm(*args, start_method, **kwargs):
        assert start_method == "spawn"
        return start(*args, start_method=METHOD, **kwargs)

    def context(method):
        return multiprocessing.get_context(METHOD if method == "spawn" else method)

    monkeypatch.setattr(torch.multiprocessing, "start_processes", start_warm)
    monkeypatch.setattr(torch.multiprocessing, "get_context", context)


class Program:
    """A program, as `python ARGUMENTS` would start it in this folder.

    Args:
        arguments: a file, or `-m` and a module, or `-c` and code; then the program's own.
        env: its environment; by default that of the tests.
    """

    def __init__(self, *arguments, env=None):
        with tempfile.NamedTemporaryFile(prefix="program-", delete=False) as file:
            self._path = file.name
        environment = dict(os.environ if env is None else env)
        arguments = [str(argument) for argument in arguments]
        context = multiprocessing.get_context(METHOD)
        self.process = context.Process(target=_run, args=(arguments, environment, self._path))
        self.process.start()

    @property
    def output(self):
        """What it has printed so far, errors included."""
        with open(self._path) as file:
            return file.read()

    def wait(self, timeout=300):
        """Wait for its end, and return its exit code."""
        self.process.join(timeout)
        if self.process.is_alive():
            self.kill()
            raise TimeoutError(f"it did not end within {timeout} s: {self.output}")
        return self.process.exitcode

    def lines(self):
        """Yield the lines that it prints as they come, until it ends."""
        with open(self._path) as file:
            rest, alive = "", True
            while alive:
                time.sleep(0.02)
                alive = self.process.is_alive()
                *lines, rest = (rest + file.read()).split("\n")
                yield from lines

    def kill(self):
        """End it at once, and wait for that."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()


class Forked:
    """What a warm program starts in place of a `subprocess.Popen` of Python: a fork of itself, with torch loaded."""

    def __init__(self, command, *, stdout, stderr, env):
        assert command[0] == sys.executable
        assert stderr == subprocess.STDOUT
        context = multiprocessing.get_context("fork")
        self._process = context.Process(target=_run, args=(command[1:], env, stdout.name))
        self._process.start()
        self.kill = self._process.kill

    def poll(self):
        """Its exit code, or None."""
        return self._process.exitcode

    def wait(self, timeout=None):
        """Wait for its end, and return its exit code."""
        self._process.join(timeout)
        if self._process.is_alive():
            raise subprocess.TimeoutExpired(self._process.name, timeout)
        return self._process.exitcode

    def send_signal(self, number):
        """Send it a signal."""
        os.kill(self._process.pid, number)


def _run(arguments, environment, path):
    os.environ.clear()
    os.environ.update(environment)
    with open(path, "wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    elif arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")

"""What the tests of run logs share: records, processes that write and die, and runs made by hand."""

import contextlib
import errno
import json
import os
import signal
import time
import warnings

from hilbert_monitor.runs.log import RunWriter
from hilbert_monitor.runs.reader import RunReader
from hilbert_monitor.runs.record import Alert, RunInfo, StepRecord
from tests.support.forks import forked


def step(number, **fields):
    return StepRecord(step=number, time=1000.0 + number, **fields)


def alert(number, **fields):
    return Alert(step=number, time=0.0, kind="spike", value=2.0, **fields)


def numbers(folder):
    return [record.step for record in RunReader(folder).steps()]


@contextlib.contextmanager
def living_writer(root, name="a", *, orphan=False, **options):
    """A process that has opened a run, written a step and lives until it is killed. Yields its id, and its orphan's."""
    here, there = os.pipe()

    def work():
        warnings.simplefilter("ignore")
        writer = RunWriter.open(root, RunInfo(name=name), **options)
        writer.write(step(options.get("first_step", 0) + 1))
        if orphan:
            forked(lambda: live(os.getpid()))
            time.sleep(600)
        live(0)

    def live(worker):
        os.write(there, f"{worker}\n".encode())
        time.sleep(600)

    pid = forked(work)
    os.close(there)
    with open(here) as pipe:
        worker = int(pipe.readline())
    try:
        yield pid, worker
    finally:
        kill(pid)
        if worker:
            os.kill(worker, signal.SIGKILL)


def kill(pid):
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def by_hand(folder, *, owner=b"", attempt=1, **fields):
    """A run that no process writes; `owner` is the content of its heartbeat."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "info.jsonl", "a") as file:
        file.write(json.dumps({"id": folder.name, "attempt": attempt, **fields}) + "\n")
    (folder / "steps.jsonl").touch()
    (folder / "heartbeat").write_bytes(owner)
    return folder


def aged(path, moment):
    os.utime(path, (moment, moment))


def no_locks(fd, operation):
    """In place of fcntl.flock, as on a file system without locks."""
    raise OSError(errno.ENOLCK, "no locks available")

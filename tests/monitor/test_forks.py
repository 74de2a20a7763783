"""Children that are forked from a run that is watched: they leave it alone, and never wait for its locks."""

import contextlib
import os
import signal
import sys
import threading
import time

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

import hilbert_monitor
from hilbert_monitor import Prometheus, TrustRegion
from hilbert_monitor.monitor.outputs import QueuedSink, TokenTexts
from hilbert_monitor.monitor.runtime import Guard
from hilbert_monitor.runs import process_bound
from hilbert_monitor.runs.exposition import CollectorRegistry
from hilbert_monitor.runs.reader import RunReader
from hilbert_monitor.runs.record import Alert, StepRecord
from tests.support.decoders import Plain, batch, loss_of, seeded
from tests.support.forks import forked, outcome
from tests.support.loops import only_run, steps, watched
from tests.support.ports import free_port
from tests.support.sinks import Recorder
from tests.support.training import Text

LAYER_STEP = 10  # the first step at which layers are measured


def locks(item):
    """The locks that an object has as attributes, by class and name."""
    for name, value in vars(item).items():
        value = value._cond if isinstance(value, threading.Event) else value
        if hasattr(value, "acquire"):
            yield f"{type(item).__name__}.{name}", value


@contextlib.contextmanager
def every_lock_held():
    """Hold all locks of all runs in another thread, and yield their names."""
    held = {name: lock for item in process_bound._objects for name, lock in locks(item)}
    taken, done = threading.Event(), threading.Event()

    def hold():
        with contextlib.ExitStack() as stack:
            for item in tuple(process_bound._objects):
                for _, lock in locks(item):
                    stack.enter_context(lock)
            taken.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    assert taken.wait(30)
    try:
        yield set(held)
    finally:
        done.set()
        thread.join()


@pytest.fixture
def run(tmp_path):
    """A run that uses every output, after its layers were measured."""
    run, model, optimizer = watched(
        run_dir=str(tmp_path / "runs"),
        sinks=[Recorder()],
        panel_size=50,
        panel=[batch(number) for number in range(2)],
        decode=str,
        layers=True,
        on_blowup=["warn", "http://127.0.0.1:9/"],
        prometheus=Prometheus(port=0, registry=CollectorRegistry(), linger=0.0),
    )
    run.start()
    steps(run, model, optimizer, range(LAYER_STEP), loss=1.0)
    yield run, model, optimizer
    run.close()


def test_a_forked_child_waits_for_no_lock_of_its_parents_run(run, tmp_path):
    run, model, optimizer = run

    def use():
        assert run.session.outputs is None
        steps(run, model, optimizer, range(LAYER_STEP), loss=1.0)
        run.log_validation(1.0)
        run.heartbeat()
        assert run.state_dict()["step"] == LAYER_STEP  # as of the fork
        run.close(RuntimeError("a child's own"))

    def use_outputs():  # as a child does that is forked by a function of the user's that we call
        outputs.write(record, [alert], final=False)
        outputs.put(record)
        outputs.alive()
        outputs.close()

    outputs = run.session.outputs
    record = StepRecord(step=99, time=0.0, pair=(1, 2))
    alert = Alert(step=99, time=0.0, kind="spike", value=1.0, expected=0.1, message="large")
    with every_lock_held() as names:
        assert names >= {
            "LineFile._guard",
            "RunSamples._lock",
            "Exporter._last_scrape",
            "TokenTexts._changed",
        }
        children = [forked(use), forked(use_outputs), forked(run._close_at_exit)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert codes == [0, 0, 0]
    assert only_run(tmp_path / "runs").state().status == "running"
    steps(run, model, optimizer, range(1))
    run.close()
    log = only_run(tmp_path / "runs")
    assert log.state().status == "finished"
    assert [record.step for record in log.steps()] == [*range(1, LAYER_STEP + 2)]
    assert [record.step for record in RunReader(log.folder).layers()] == [LAYER_STEP]


def test_a_forked_child_can_watch_a_run_itself(run, tmp_path):
    _, model, optimizer = run

    def train():
        own = hilbert_monitor.watch(
            model, optimizer, run_dir=str(tmp_path / "own"), prometheus=Prometheus(port=0), decode=str, strict=True
        )
        with own:
            steps(own, model, optimizer, range(3))

    with every_lock_held():
        assert outcome(train) == 0
    log = only_run(tmp_path / "own")
    assert (log.state().status, len(list(log.steps()))) == ("finished", 3)
    assert len(list(only_run(tmp_path / "runs").steps())) == LAYER_STEP


class Worker(Dataset):
    """Text whose samples tell how many files and sockets of a run their loader's worker has open."""

    def __init__(self, folder, port):
        self.text, self.folder, self.port = Text(0), str(folder), port

    def __len__(self):
        return len(self.text)

    def __getitem__(self, index):
        assert torch.utils.data.get_worker_info() is not None
        links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)]
        assert not [link for link in links if link.startswith(self.folder)]
        with open("/proc/self/net/tcp") as sockets:
            listening = {row.split()[9] for row in sockets if row.split()[1].endswith(f":{self.port:04X}")}
        assert not [link for link in links if link.removeprefix("socket:[").rstrip("]") in listening]
        return self.text[index]


def _is_open(fd):
    return os.path.lexists(f"/proc/self/fd/{fd}")


def test_workers_of_a_loader_leave_a_watched_run_alone(tmp_path):
    kept = Recorder()
    model, port = Plain(37, 16), free_port()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = hilbert_monitor.watch(
        model, optimizer, run_dir=str(tmp_path), sinks=[kept], prometheus=Prometheus(port=port), strict=True
    )
    data = Worker(tmp_path, port)
    with run:
        for _ in range(2):  # an epoch each, with workers of its own
            for tokens in DataLoader(data, batch_size=8, num_workers=2, multiprocessing_context="fork"):
                cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
                optimizer.step()
                run.step()
    log = only_run(tmp_path)
    assert (log.state().status, len(list(log.steps())), len(kept.records)) == ("finished", 12, 12)


def test_a_trust_region_also_holds_the_steps_of_a_forked_child():
    model = seeded(Plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=50.0)

    def step():
        loss_of(model, 0).backward()
        optimizer.step()
        optimizer.zero_grad()

    def train():
        step()
        assert region.step == 2
        assert region.last.made_upper <= 0.02 < region.last.asked_lower

    with TrustRegion(limit=0.02).watch(model, optimizer) as region:
        step()
        assert outcome(train) == 0


class ForkingSink:
    """A sink that forks when it gets a step, and whose child leaves by returning, raising or exiting."""

    def __init__(self, leave):
        self.leave, self.child, self.process, self.own = leave, None, os.getpid(), 0

    def write(self, record):
        if os.getpid() != self.process:
            os._exit(99)  # a child has no records
        self.own += 1
        if self.child is None:
            self.child = os.fork()
            if self.child == 0:
                signal.alarm(60)
                self.leave()


def _exit():
    sys.exit(3)


def _raise():
    raise ValueError("a child's own")


@pytest.mark.parametrize(
    ("leave", "code"), [(lambda: None, 0), (_exit, 3), (_raise, 1)], ids=["return", "exit", "raise"]
)
def test_a_child_that_a_sink_forks_ends_without_the_parents_records(leave, code):
    sink = ForkingSink(leave)
    queued = QueuedSink(sink)
    for number in range(5):
        queued.write(number)
    queued.end()
    queued.join()
    assert sink.own == 5
    assert os.waitstatus_to_exitcode(os.waitpid(sink.child, 0)[1]) == code


def test_a_child_that_decode_forks_ends():
    children = []

    def decode(token):
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            sys.exit(3)
        children.append(child)
        return str(token)

    texts = TokenTexts(decode, Guard())
    record = StepRecord(step=1, time=time.time(), pair=(1, 2))
    texts.ask(record)
    assert texts.complete(record, patience=60.0).pair_text == ("1", "2")
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [3, 3]


def test_a_child_that_a_response_forks_can_exit():
    guard = Guard()

    def respond():
        with guard("response to a blow-up", user_code=True):
            sys.exit(0)

    respond()  # a function of the user's cannot end the run

    def fork_within():
        with guard("response to a blow-up", user_code=True):
            child = os.fork()
            if child == 0:
                sys.exit(3)
        return child

    owner = os.getpid()
    try:
        child = fork_within()
        if os.getpid() != owner:
            os._exit(99)
    except SystemExit as end:
        os._exit(end.code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3

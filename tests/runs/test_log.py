"""The writer of run logs, with real processes, real kills, real short writes and full disks."""

import cProfile
import fcntl
import functools
import json
import multiprocessing
import os
import pstats
import random
import re
import resource
import shutil
import subprocess
import sys
import threading
import time
import warnings

import msgspec
import pytest

from hilbert_monitor.monitor.outputs import Sink
from hilbert_monitor.runs.files import Owner, encode_line, is_locked
from hilbert_monitor.runs.log import RunWriter
from hilbert_monitor.runs.reader import RunReader, find_runs
from hilbert_monitor.runs.record import Layer, LayerRecord, RunInfo
from tests.support.forks import forked, outcome
from tests.support.run_logs import aged, alert, by_hand, kill, living_writer, no_locks, numbers, step


def layers(number):
    return LayerRecord(step=number, time=0.0, layers={"a": Layer(kind="matrix", step=0.1, weight=1.0)})


def open_files():
    return len(os.listdir("/proc/self/fd"))


def test_a_writer_is_a_sink_and_what_it_writes_is_read(begin, tmp_path):
    writer = begin("my run")
    assert isinstance(writer, Sink)
    records = [step(1, diameter=0.5, pair=(3, 4), pair_text=("a", "\u00e9")), step(2, seconds={"diameter": 0.1})]
    for record in records:
        writer.write(record)
    writer.alert(alert(2, pair=(1, 2), message="Step 2 was large."))
    (reader,) = find_runs(tmp_path)
    assert reader.steps() == records
    assert reader.alerts() == [alert(2, pair=(1, 2), message="Step 2 was large.")]
    assert (reader.info.id, reader.info.name, reader.info.attempt) == ("my-run", "my run", 1)
    assert (writer.id, writer.folder) == (reader.info.id, reader.folder)
    assert reader.info.pid == json.loads((writer.folder / "heartbeat").read_text())["pid"] == os.getpid()


def test_the_files_are_lines_of_json_in_which_nan_is_not_what_was_not_measured(begin):
    writer = begin()
    writer.write(step(1, train_loss=float("nan"), diameter=float("-inf")))
    lines = (writer.folder / "steps.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"attempt": 1, "first_step": 0},
        {"step": 1, "time": 1001.0, "train_loss": "nan", "diameter": "-inf"},
    ]
    (record,) = RunReader(writer.folder).steps()
    assert repr((record.train_loss, record.diameter, record.ceiling)) == "(nan, -inf, None)"


def test_a_record_that_could_not_be_read_back_is_refused_and_costs_no_other(begin):
    writer = begin()
    with pytest.raises(TypeError, match=r"StepRecord cannot be read back .*: give it plain values"):
        writer.write(step(1, diameter=object()))
    writer.write(step(2))
    assert numbers(writer.folder) == [2]


def test_what_becomes_known_later_is_a_further_line_of_the_same_attempt(begin):
    writer = begin()
    writer.describe(panel_hash="cafe", panel_size=8192)
    writer.describe(remarks=("The head is tied.",))
    (info,) = RunReader(writer.folder).attempts
    assert (info.panel_hash, info.panel_size, info.remarks) == ("cafe", 8192, ("The head is tied.",))
    with pytest.raises(ValueError, match="attempt of a run cannot change"):
        writer.describe(attempt=3)


def test_a_closed_writer_takes_nothing_and_closes_once(begin):
    writer = begin()
    writer.close()
    writer.close(ValueError("late"))
    with pytest.raises(OSError, match="is closed"):
        writer.write(step(1))
    assert RunReader(writer.folder).state().status == "finished"


def test_what_a_run_cannot_begin_with_is_refused_and_leaves_nothing_that_counts(begin, tmp_path):
    for wrong in ({"first_step": -1}, {"heartbeat": 0.0}):
        with pytest.raises(ValueError, match="".join(wrong)):
            begin(**wrong)
    with pytest.raises(TypeError, match="RunInfo cannot be read back"):
        begin(RunInfo(name="a", seed="seven"))
    assert find_runs(tmp_path) == []
    assert begin(strict=True, private=True).folder.stat().st_mode & 0o777 == 0o700


# Crashes and full disks


@pytest.mark.parametrize("kills", [24, pytest.param(200, marks=pytest.mark.sweep)])
def test_kill_9_at_any_moment_loses_no_record_that_was_written(tmp_path, kills):
    chance = random.Random(1)
    for round_ in range(kills):
        folder = tmp_path / f"r{round_ // 4}"
        before = len(numbers(folder))
        here, there = os.pipe()

        def work(name=folder.name, first=before, pipe=there):
            os.write(pipe, b".")
            writer = RunWriter.open(tmp_path, RunInfo(name=name), first_step=first)
            for number in range(first + 1, first + 100_000):
                writer.write(step(number, train_loss=number / 2, pair_text=("a" * 100, "b" * 100)))
                os.write(pipe, b".")

        pid = forked(work)
        os.close(there)
        assert os.read(here, 1) == b"."
        time.sleep(0.03 * chance.random() ** 2)
        kill(pid)
        with open(here, "rb") as pipe:
            written = len(pipe.read())
        reader = RunReader(folder)
        records = reader.steps()
        assert [record.step for record in records] == list(range(1, len(records) + 1))
        assert len(records) in (before + written, before + written + 1)
        assert all(record.train_loss == record.step / 2 for record in records)
        assert reader.torn <= round_ % 4  # Linux may cut short the write that a kill comes into


def room(folder, size):
    """Let this process make no file larger than what the steps now have, and a little; None for no limit."""
    limit = os.path.getsize(folder / "steps.jsonl") + (size or 0) if folder.exists() else size
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY if size is None else limit, -1))


LOST = step(2, skipped="y" * 40)
WHOLE = len(encode_line(LOST))


@pytest.mark.parametrize("size", [0, 1, WHOLE, WHOLE + 1])
def test_a_full_disk_costs_records_and_writing_resumes_when_there_is_room(tmp_path, size):
    def work():
        writer = RunWriter.open(tmp_path, RunInfo(name="a"))
        writer.write(step(1))
        room(writer.folder, size)
        aged(writer.folder / "steps.jsonl", 1.0)
        failures = 0
        for _ in range(4):
            try:
                writer.write(LOST)
            except OSError:
                failures += 1
        assert failures == (4 if size <= WHOLE else 3)
        assert os.stat(writer.folder / "steps.jsonl").st_mtime > 1.0  # a run with a full disk is not stalled
        room(writer.folder, None)
        writer.write(step(6))
        writer.write(step(7))
        writer.close()

    assert outcome(work) == 0
    reader = RunReader(tmp_path / "a")
    assert [record.step for record in reader.steps()] == ([1, 6, 7] if size <= WHOLE else [1, 2, 6, 7])
    assert reader.torn == 0
    for name in ("info.jsonl", "steps.jsonl", "alerts.jsonl", "end.jsonl"):
        assert all(json.loads(line) for line in (tmp_path / "a" / name).read_text().splitlines())


def test_layers_on_a_full_disk_cost_no_file_descriptors(tmp_path):
    def work():
        writer = RunWriter.open(tmp_path, RunInfo(name="a"))
        before = open_files()
        resource.setrlimit(resource.RLIMIT_FSIZE, (1, -1))
        for _ in range(20):
            with pytest.raises(OSError, match=r"room|large"):
                writer.layers(layers(1))
        assert open_files() <= before + 1
        room(writer.folder, None)
        writer.layers(layers(2))
        writer.close()

    assert outcome(work) == 0
    assert RunReader(tmp_path / "a").layers() == [layers(2)]


def test_a_run_that_finds_no_room_to_begin_is_begun_when_there_is(tmp_path):
    def work():
        before = open_files()  # a fork closes the ports of exporters that other tests left
        for size in (0, 5, 40, 100):
            room(tmp_path / "a", size)
            with pytest.raises(OSError, match=r"room|large"):
                RunWriter.open(tmp_path, RunInfo(name="a", model="m" * 500), first_step=3)
            assert find_runs(tmp_path) == []
        assert open_files() == before
        room(tmp_path / "a", None)
        RunWriter.open(tmp_path, RunInfo(name="a", model="m" * 500), first_step=3).write(step(4))

    assert outcome(work) == 0
    assert numbers(tmp_path / "a") == [4]
    assert RunReader(tmp_path / "a").info.attempt == 1


FULL = """
import os, subprocess, sys
from contextlib import suppress
from pathlib import Path
from hilbert_monitor.runs.log import RunWriter
from hilbert_monitor.runs.reader import RunReader
from hilbert_monitor.runs.record import Alert, RunInfo, StepRecord

disk = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "none", str(disk)], check=True)
errors = [RuntimeError("no space " * 1000), KeyboardInterrupt(), RuntimeError("\\N{SNOWMAN}\\0" * 2000), None]
for attempt, error in enumerate(errors, 1):
    writer = RunWriter.open(disk, RunInfo(name="a"), first_step=attempt)
    filler = os.open(disk / "filler", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    written = attempt
    with suppress(OSError):
        for written in range(attempt, 100_000):
            os.write(filler, b"x" * 1000)
            writer.write(StepRecord(step=written + 1, time=0.0, pair_text=("a" * 700, "b" * 700)))
    with suppress(OSError):
        while os.write(filler, b"x"):  # to the last byte
            pass
    for kind in "xyz":
        with suppress(OSError):
            writer.alert(Alert(step=2, time=0.0, kind=kind * 500, value=1.0))
    writer.close(error)
    reader = RunReader(disk / "a")
    state = reader.state()
    kind = "finished" if error is None else "failed" if isinstance(error, RuntimeError) else "stopped"
    assert (state.status, reader.end.attempt, reader.info.attempt) == (kind, attempt, attempt), (attempt, state)
    assert state.message[:3900] == (str(error)[:3900] if kind == "failed" else ""), state.message[:80]
    last = max((record.step for record in reader.steps()), default=attempt)
    assert last in (written, written + 1) and reader.torn == 0, (last, written)
    assert not (disk / "a" / "reserve").exists()
    os.close(filler)
    os.remove(disk / "filler")
"""


@pytest.mark.skipif(
    subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode != 0, reason="cannot mount a disk here"
)
def test_a_disk_that_is_full_at_the_end_still_gets_the_line_of_the_end(tmp_path):
    done = subprocess.run(
        ["unshare", "-rm", sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["steps.jsonl", "alerts.jsonl", "info.jsonl", "end.jsonl"])
def test_a_torn_last_line_does_not_swallow_what_the_next_attempt_writes(begin, name):
    writer = begin()
    for number in (1, 2, 3):
        writer.write(step(number))
        writer.alert(alert(number))
    writer.close(RuntimeError())
    with open(writer.folder / name, "a") as file:
        file.write('{"step": 2, "id": "a", "atte')
    again = begin(first_step=1)
    again.write(step(2, tokens=7))
    again.alert(alert(2, message="again"))
    reader = RunReader(writer.folder)
    assert reader.steps() == [step(1), step(2, tokens=7)]
    assert reader.alerts() == [alert(1), alert(2, message="again")]
    assert (again.id, reader.info.attempt, reader.state().status) == ("a", 2, "running")
    again.close()
    assert reader.state().status == "finished"


# The process that writes


def test_a_second_process_with_the_name_of_a_living_one_is_numbered_or_refused(begin, tmp_path):
    with living_writer(tmp_path):
        with pytest.warns(UserWarning, match="run 'a' is being written by another process: this is 'a-2'"):
            second = begin()
        with pytest.warns(UserWarning, match="this is 'a-3'"):
            assert begin(first_step=7).id == "a-3"
        with pytest.raises(RuntimeError, match=r"run 'a\S*' is being written .*: give this run a name of its own$"):
            begin(strict=True)
        with warnings.catch_warnings(action="error"), pytest.raises(UserWarning, match="a-4"):
            begin()
        assert is_locked(tmp_path / "a-4" / "steps.jsonl") is False
        shutil.rmtree(tmp_path / "a-4")
        second.write(step(1))
        assert RunReader(tmp_path / "a").info.attempt == 1
    second.close()
    assert begin(strict=True).id == "a"


@pytest.mark.parametrize("first_step", [0, 1])
def test_a_requeued_job_resumes_the_log_of_its_killed_process_though_a_worker_outlives_it(begin, tmp_path, first_step):
    with living_writer(tmp_path, orphan=True) as (pid, worker):
        reader = RunReader(tmp_path / "a")
        assert reader.state().status == "running"
        kill(pid)
        os.kill(worker, 0)
        assert (reader.state().status, reader.state().step) == ("killed", 1)
        writer = begin(first_step=first_step, strict=True)
    assert (writer.id, writer.info.attempt) == ("a", 2)
    assert numbers(writer.folder) == [1][:first_step]


def test_a_forked_process_neither_writes_nor_ends_the_run_of_its_parent(begin):
    writer = begin()

    def work():
        writer.close(RuntimeError("a worker's own"))
        for use in (
            lambda: writer.write(step(1)),
            lambda: writer.layers(layers(1)),
            lambda: writer.alert(alert(1)),
            writer.progress,
            writer.describe,
        ):
            with pytest.raises(OSError, match="write from the process that opened it"):
                use()

    assert outcome(work) == 0
    reader = RunReader(writer.folder)
    assert (reader.state().status, reader.end) == ("running", None)
    writer.write(step(2))
    assert numbers(writer.folder) == [2]


def test_readers_and_copies_in_the_same_process_neither_take_nor_lose_the_lock(begin, tmp_path):
    writer, looking = begin(), threading.Event()
    shutil.copytree(writer.folder, tmp_path / "copy")
    list(RunReader(writer.folder).steps())
    assert outcome(lambda: RunWriter.open(tmp_path, RunInfo(name="a"), strict=True)) != 0
    writer.close(RuntimeError())

    def look():
        while not looking.is_set():
            is_locked(writer.folder / "steps.jsonl")

    looker = threading.Thread(target=look)
    looker.start()
    try:
        for _ in range(10):
            again = begin(strict=True)
            assert again.id == "a"
            again.close(RuntimeError())
    finally:
        looking.set()
        looker.join()


def test_where_there_are_no_locks_the_heartbeat_decides_and_the_user_is_told(begin, tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.warns(UserWarning, match="no locks in .*: only a heartbeat tells"):
        first = begin(heartbeat=0.1)
    with pytest.warns() as warned:
        assert begin(heartbeat=0.1).id == "a-2"
    assert "run 'a' is being written by another process: this is 'a-2'" in str(warned[-1].message)
    with living_writer(tmp_path, "b") as (pid, _):
        kill(pid)
    before = time.monotonic()
    with pytest.warns(UserWarning, match="no locks"):
        assert begin("b").info.attempt == 2
    assert time.monotonic() - before < 3.0  # its process is seen to be gone
    by_hand(tmp_path / "c", owner="host \u00b2\n".encode(), name="c", heartbeat=0.2)
    with pytest.warns(UserWarning, match="no locks"):
        assert begin("c").info.attempt == 2  # another machine's, which was watched for half a second
    first.close(RuntimeError())
    with pytest.warns(UserWarning, match="no locks"):
        assert begin("a").id == "a"  # it has said that it ended


def test_a_process_that_has_lost_its_run_writes_nothing_more(begin, monkeypatch):
    """As one that was stopped for long, while another machine without its locks resumed the run."""
    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.warns(UserWarning, match="no locks"):
        writer = begin(heartbeat=0.05)
    writer.write(step(1))
    with open(writer.folder / "heartbeat", "w") as file:
        file.write('{"token": "another"}')
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            writer.progress()
        except OSError:
            break
        time.sleep(0.01)
    for write, record in ((writer.write, step(2)), (writer.alert, alert(2)), (writer.layers, layers(2))):
        with pytest.raises(OSError, match="now written by another process"):
            write(record)
    writer.close()
    assert numbers(writer.folder) == [1]
    assert RunReader(writer.folder).end is None


@pytest.mark.sweep
@pytest.mark.parametrize("locks", [True, False])
@pytest.mark.parametrize("before", ["nothing", "a killed run"])
def test_processes_that_start_at_once_never_share_a_log(tmp_path, before, locks):
    def work(number, start):
        warnings.simplefilter("ignore")
        fcntl.flock = fcntl.flock if locks else no_locks
        while time.time() < start:
            pass
        writer = RunWriter.open(root, RunInfo(name="a", seed=number), heartbeat=0.2)
        for n in range(1, 121):
            writer.write(step(n, tokens=number))
        opened.release()
        closing.acquire()  # a run that has ended would be resumed
        writer.close()

    for round_ in range(4):
        root = tmp_path / str(round_)
        if before == "a killed run":
            gone = encode_line(msgspec.structs.replace(Owner.new(), pid=2**30))
            by_hand(root / "a", owner=gone, name="a", heartbeat=0.2)
        opened, closing = multiprocessing.Semaphore(0), multiprocessing.Semaphore(0)
        pids = [forked(functools.partial(work, number, time.time() + 0.2)) for number in range(4)]
        assert all(opened.acquire(timeout=60) for _ in pids)
        for _ in pids:
            closing.release()
        assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0] * 4
        readers = find_runs(root)
        assert [reader.folder.name for reader in readers] == ["a", "a-2", "a-3", "a-4"]
        assert {reader.info.seed for reader in readers} == {0, 1, 2, 3}
        for reader in readers:
            assert [(r.step, r.tokens) for r in reader.steps()] == [(n, reader.info.seed) for n in range(1, 121)]
            assert reader.torn == 0


# Names


def test_a_finished_run_is_resumed_but_not_begun_again_and_a_failed_one_is(begin):
    begin().close()
    assert begin(first_step=5).info.attempt == 2
    begin("b").close()
    with warnings.catch_warnings(action="error"):
        second = begin("b", strict=True)
    second.write(step(1))
    second.close(RuntimeError())
    assert begin("b", first_step=5).id == second.id == "b-2", "the unfinished one is meant"
    begin("c").close(RuntimeError())
    again = begin("c")
    assert (again.id, again.info.attempt, numbers(again.folder)) == ("c", 2, [])


def test_an_id_says_exactly_which_run_is_resumed(begin):
    first = begin()
    with pytest.warns(UserWarning, match="a-2"):
        begin().close(RuntimeError())
    first.close()
    for info, attempt in ((RunInfo(id="a-2", name="a"), 2), (RunInfo(id="a", name="a"), 2), (RunInfo(id="a"), 3)):
        writer = begin(info, first_step=1)
        assert (writer.id, writer.info.attempt) == (info.id, attempt)
        writer.close(RuntimeError())


@pytest.mark.sweep
@pytest.mark.parametrize("first_step", [0, 1])
def test_a_run_begins_with_as_few_calls_among_many_others_as_among_few(tmp_path, first_step):
    calls = []
    for others in (100, 2000):
        root = tmp_path / str(others)
        for n in range(others):
            folder = by_hand(root / ("a" if n == 0 else f"a-{n + 1}"), name="a")
            (folder / "end.jsonl").write_text('{"attempt": 1, "time": 1.0}\n')
        profile = cProfile.Profile()
        writer = profile.runcall(RunWriter.open, root, RunInfo(name="a"), first_step=first_step)
        writer.close()
        assert writer.id == f"a-{others + (first_step == 0)}"
        calls.append(pstats.Stats(profile).total_calls)
    assert calls[1] < 1.1 * calls[0]


def test_the_newest_unfinished_run_of_a_name_is_resumed_and_an_old_one_by_its_id(begin, tmp_path):
    for n in range(1, 101):
        folder = by_hand(tmp_path / ("a" if n == 1 else f"a-{n}"), name="a")
        if n not in (1, 80, 90):
            (folder / "end.jsonl").write_text('{"attempt": 1, "time": 1.0}\n')
        aged(folder / "heartbeat", 0.0)
    for info, expected in (("a", "a-90"), ("a", "a-80"), ("a", "a-101"), (RunInfo(id="a", name="a"), "a")):
        writer = begin(info)
        assert writer.id == expected
        writer.close()


def test_a_number_whose_run_was_deleted_is_not_taken_before_a_run_that_can_be_resumed(begin, tmp_path):
    for name in ("a", "a-2", "a-4"):
        by_hand(tmp_path / name, name="a")
    for name in ("a-2", "a-4"):
        (tmp_path / name / "end.jsonl").write_text('{"attempt": 1, "time": 1.0}\n')
    assert [begin().id, begin("a", first_step=1).id] == ["a", "a-4"]


def test_a_folder_of_something_else_is_left_alone(begin, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "model.ckpt").touch()
    (tmp_path / "b").touch()
    (tmp_path / "c").symlink_to("nowhere")
    (tmp_path / "d").mkdir()
    assert [begin(name).id for name in "abcd"] == ["a-2", "b-2", "c-2", "d"]
    assert os.listdir(tmp_path / "a") == ["model.ckpt"]


ODD = '/x\\y:z*"<>|?.-'


@pytest.mark.parametrize("name", ["..", "../../x", ODD, "\x00\n\x1b[31m", "\U0001f600", "\ud800", "n" * 10_000])
def test_any_name_makes_a_folder_of_its_own_and_is_found_again(begin, tmp_path, name):
    writer, shown = begin(name), name.encode("utf-8", "backslashreplace").decode()
    assert writer.folder.parent == tmp_path
    assert os.listdir(tmp_path) == [writer.id]
    assert re.fullmatch(r"[A-Za-z0-9_=+][A-Za-z0-9._=+-]{0,79}", writer.id)
    assert RunReader(writer.folder).info.name == shown
    writer.close(RuntimeError(name))
    assert RunReader(writer.folder).state().message == (shown if len(name) < 4000 else shown[:3997] + "...")
    assert begin(name).id == writer.id


def test_names_that_make_one_file_name_are_different_runs(begin):
    for name, expected in (("x/y", "x-y"), ("x y", "x-y-2"), ("x/y", "x-y"), ("x y", "x-y-2")):
        writer = begin(name)
        assert writer.id == expected
        writer.close(RuntimeError())


def test_runs_without_a_name_differ_and_draw_from_no_generator_of_the_run(begin):
    before = random.getstate()
    writers = [begin(RunInfo(head_optimizer="RowNorm" * times, seed=3)) for times in (1, 1, 100, 100)]
    assert random.getstate() == before
    assert len({writer.id for writer in writers}) == 4
    assert "-RowNorm-seed3-" in writers[0].id

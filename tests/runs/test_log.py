"""The run log, with real processes, real kills and real short writes."""

import collections
import contextlib
import errno
import fcntl
import functools
import itertools
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hilbert_monitor.monitor.sinks import Sink
from hilbert_monitor.runs import _lines
from hilbert_monitor.runs._reader import as_record
from hilbert_monitor.runs.log import RunReader, RunWriter, _file_name, _last_number, find_runs
from hilbert_monitor.runs.record import Alert, RunInfo, StepRecord
from tests.support.draws import draws
from tests.support.forks import forked, outcome

FILES = ["info.jsonl", "steps.jsonl", "alerts.jsonl", "end.jsonl", "heartbeat"]


@pytest.fixture
def begin(tmp_path):
    """Opens writers under one root, and closes those that a test leaves open."""
    opened = []

    def open_run(name="a", **options):
        opened.append(RunWriter.open(tmp_path, RunInfo(name=name), **options))
        return opened[-1]

    yield open_run
    for writer in opened:
        writer.close()


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


def by_hand(folder, *, host="elsewhere", pid=1, attempt=1, **fields):
    """A run that no process writes."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "info.jsonl", "a") as file:
        file.write(json.dumps({"id": folder.name, "host": host, "pid": pid, "attempt": attempt, **fields}) + "\n")
    for name in ("steps.jsonl", "heartbeat"):
        (folder / name).touch()
    return folder


def aged(path, moment):
    os.utime(path, (moment, moment))


# What is written is read


def test_a_writer_is_a_sink_and_what_it_writes_is_read(begin, tmp_path):
    writer = begin("my run")
    assert isinstance(writer, Sink)
    records = [step(1, diameter=0.5, pair=(3, 4), pair_text=("a", "\u00e9")), step(2, seconds={"diameter": 0.1})]
    for record in records:
        writer.write(record)
    writer.alert(alert(2, pair=(1, 2), message="Step 2 was large."))
    (reader,) = find_runs(tmp_path)
    assert list(reader.steps()) == records
    assert reader.alerts() == [alert(2, pair=(1, 2), message="Step 2 was large.")]
    assert (reader.info.id, reader.info.name, reader.info.attempt) == ("my-run", "my run", 1)
    assert (writer.id, writer.folder) == (reader.info.id, reader.folder)
    assert reader.info.pid == os.getpid()
    assert (writer.folder / "heartbeat").read_text().split() == [reader.info.host, str(os.getpid())]
    assert reader.torn == 0


def test_the_files_are_lines_of_json_that_a_person_can_read(begin):
    writer = begin()
    writer.write(step(1, train_loss=float("nan")))
    lines = (writer.folder / "steps.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"attempt": 1, "first_step": 0},
        {"step": 1, "time": 1001.0, "train_loss": "nan"},
    ]


floats = st.none() | st.floats()
texts = st.text(st.characters() | st.sampled_from("\ud800\udfff\n\r\x00\u2028\U0001f600"), max_size=8)
pairs = st.none() | st.tuples(st.integers(0, 2**31), st.integers(0, 2**31))
records = st.builds(
    StepRecord,
    step=st.integers(0, 2**53),
    time=st.floats(),
    skipped=texts,
    tokens=st.none() | st.integers(0, 2**62),
    train_loss=floats,
    diameter=floats,
    ceiling=floats,
    pair=pairs,
    pair_text=st.none() | st.tuples(texts, texts),
    nonfinite_rows=st.none() | st.integers(0, 9),
    seconds=st.dictionaries(texts, st.floats(), max_size=3),
)


@given(records)
def test_any_record_survives_and_only_lone_surrogates_become_their_escapes(record):
    line = _lines.line_of(record)
    assert b"\n" not in line
    (item,) = _lines.items(line + b"\n", as_record)
    escaped = repr(record)
    for code in {ord(c) for text in _texts_of(record) for c in text if 0xD800 <= ord(c) < 0xE000}:
        escaped = escaped.replace(f"\\u{code:x}", f"\\\\u{code:x}")
    assert repr(item) == escaped


def _texts_of(record):
    return [record.skipped, *(record.pair_text or ()), *record.seconds]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), None, 0.0])
def test_what_is_no_number_stays_apart_from_what_was_not_measured(begin, value):
    writer = begin()
    writer.write(step(1, diameter=value))
    writer.alert(alert(1, expected=value))
    assert repr(next(RunReader(writer.folder).steps()).diameter) == repr(value)
    assert repr(RunReader(writer.folder).alerts()[0].expected) == repr(value)


def test_fields_of_newer_versions_are_ignored_and_missing_ones_have_their_defaults(begin):
    writer = begin()
    with open(writer.folder / "steps.jsonl", "a") as file:
        file.write('{"step": 1, "time": 2.0, "curvature": [1, {"a": null}]}\n')
    assert list(RunReader(writer.folder).steps()) == [StepRecord(step=1, time=2.0)]


def test_two_records_on_a_line_are_no_record(tmp_path):
    lines = '{"step": 1, "time": 2.0}{"step": 2, "time": 2.0}\n{"step": 3, "time": 2.0}\n'
    (tmp_path / "steps.jsonl").write_text(lines)
    reader = RunReader(tmp_path)
    assert [record.step for record in reader.steps()] == [3]
    assert reader.torn == 1


def test_a_record_that_could_not_be_read_back_is_refused_and_costs_no_other(begin):
    writer = begin()
    with pytest.raises(TypeError, match=r"StepRecord cannot be read back .*: give it plain values"):
        writer.write(step(1, diameter=object()))
    writer.write(step(2))
    assert numbers(writer.folder) == [2]


class Unprintable:
    def __repr__(self):
        raise RuntimeError("no")


def test_settings_that_json_does_not_know_are_kept_as_text(tmp_path):
    loop = []
    loop.append(loop)
    config = {
        "path": Path("/x/y"),
        "class": StepRecord,
        "bad": Unprintable(),
        "long": Path("z" * 10_000),
        "loop": loop,
        "nan": float("nan"),
        "huge": 10**5000,
        (1, 2): {3: None},
        "text": "\ud800\x00\U0001f600",
        "set": {1},
        "list": [True, 1, 1.5, None, ("a",)],
    }
    writer = RunWriter.open(tmp_path, RunInfo(name="a", config=config))
    config = RunReader(writer.folder).info.config
    writer.close()
    assert config["path"] == "/x/y"
    assert "StepRecord" in config["class"]
    assert config["bad"] == "<Unprintable that cannot be shown>"
    assert len(config["long"]) == 1000
    assert config["nan"] == "nan"
    assert config["huge"] == "<int that cannot be shown>"
    assert config["(1, 2)"] == {"3": None}
    assert config["text"] == "\\ud800\x00\U0001f600"
    assert config["list"] == [True, 1, 1.5, None, ["a"]]
    assert config["set"] == [1]


def test_what_becomes_known_later_is_a_further_line_of_the_same_attempt(begin):
    writer = begin()
    writer.describe(panel_hash="cafe", panel_size=8192)
    writer.describe(remarks=("The head is tied.",))
    (info,) = RunReader(writer.folder).attempts
    assert (info.panel_hash, info.panel_size, info.remarks) == ("cafe", 8192, ("The head is tied.",))
    assert info == writer.info
    with pytest.raises(ValueError, match="attempt of a run cannot change"):
        writer.describe(attempt=3)
    with pytest.raises(TypeError):
        writer.describe(nonsense=3)


def test_a_closed_writer_takes_nothing_and_closes_once(begin):
    writer = begin()
    writer.close()
    writer.close(ValueError("late"))
    with pytest.raises(OSError, match="is closed"):
        writer.write(step(1))
    assert RunReader(writer.folder).state().status == "finished"


def test_a_run_that_cannot_be_described_leaves_nothing_that_counts(tmp_path):
    with pytest.raises(TypeError, match="RunInfo cannot be read back"):
        RunWriter.open(tmp_path, RunInfo(name="a", seed="seven"))
    assert find_runs(tmp_path) == []
    assert numbers(tmp_path / "a") == []
    RunWriter.open(tmp_path, RunInfo(name="a", seed=7), strict=True).close()
    assert [reader.info.id for reader in find_runs(tmp_path)] == ["a"]


def test_a_run_begins_at_no_negative_step(begin):
    with pytest.raises(ValueError, match="first_step=-1"):
        begin(first_step=-1)


# Attempts


def test_a_later_attempt_undoes_what_earlier_ones_did_beyond_its_first_step(begin):
    for first, last in ((0, 5), (3, 6), (2, 4)):
        writer = begin(first_step=first)
        for number in range(first + 1, last + 1):
            writer.write(step(number, tokens=first))
            writer.alert(alert(number, message=str(first)))
        writer.close(RuntimeError())
    reader = RunReader(writer.folder)
    assert [(r.step, r.tokens) for r in reader.steps()] == [(1, 0), (2, 0), (3, 2), (4, 2)]
    assert [(a.step, a.message) for a in reader.alerts()] == [(1, "0"), (2, "0"), (3, "2"), (4, "2")]
    assert [(info.attempt, info.first_step) for info in reader.attempts] == [(1, 0), (2, 3), (3, 2)]


lines = st.lists(
    st.one_of(
        *3 * [st.tuples(st.just("step"), st.integers(0, 5))],
        *2 * [st.tuples(st.just("attempt"), st.integers(0, 5))],
        st.tuples(st.just("torn"), st.sampled_from(['{"step": 3, "ti', "\x00\x00", "[1, 2]", '{"time": 3}', "\ud800"])),
        st.just(("empty", 0)),
    ),
    min_size=4,
    max_size=20,
)


def model(written):
    """What counts, by the rule and not by the reader."""
    places, alerts, torn = {}, [], 0
    for place, (kind, value) in enumerate(written):
        if kind == "step":
            places[value] = place
            alerts.append((value, place))
        elif kind == "attempt":
            places = {number: place for number, place in places.items() if number <= value}
            alerts = [(number, place) for number, place in alerts if number <= value]
        torn += kind == "torn"
    return places, alerts, torn


def text_of(written):
    for place, (kind, value) in enumerate(written):
        if kind == "step":
            line = json.dumps({"step": value, "time": 0.0, "tokens": place, "value": place, "kind": "spike"})
        elif kind == "attempt":
            line = json.dumps({"attempt": 2, "first_step": value})
        else:
            line = value if kind == "torn" else ""
        yield (line + "\n").encode("utf-8", "surrogatepass")


@settings(deadline=None, max_examples=draws(100))
@given(written=lines, cuts=st.lists(st.integers(0, 600), max_size=3))
def test_any_sequence_of_attempts_reads_as_the_rule_says_at_once_and_when_followed(tmp_path_factory, written, cuts):
    folder = tmp_path_factory.mktemp("run")
    reader, data = RunReader(folder), b"".join(text_of(written))
    places, alerts, torn = model(written)
    seen, offset, seen_torn = {}, 0, 0
    for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(data)], strict=True):
        with open(folder / "steps.jsonl", "ab") as file:
            file.write(data[start:end])
        for news in reader.follow(offset):
            if news.keep is not None:
                seen = {number: place for number, place in seen.items() if number <= news.keep}
            seen |= {record.step: record.tokens for record in news.records}
            offset, seen_torn = news.offset, seen_torn + news.torn
    assert seen == places
    assert (offset, seen_torn) == (len(data), torn)
    pairs = [(record.step, record.tokens) for record in reader.steps()]
    assert sorted(pairs) == sorted(places.items())
    assert [place for _, place in pairs] == sorted(places.values())
    (folder / "alerts.jsonl").write_bytes(data)
    assert [(a.step, a.value) for a in reader.alerts()] == alerts
    assert reader.state(0.0).step == (
        max(places) if places else min((v for k, v in written if k == "attempt"), default=0) or None
    )
    assert reader.torn == 2 * torn


def test_a_log_of_many_blocks_reads_as_one(begin):
    writer = begin()
    with open(writer.folder / "steps.jsonl", "ab") as file:
        for number in range(1, 6001):
            file.write(_lines.line_of(step(number, skipped="x" * (number % 300))) + b"\n")
            if number in (1, 2500, 6000):
                file.write(b'{"step": 1, "tim\n')
        file.write(b'{"attempt": 2, "first_step": 5000}\n' + _lines.line_of(step(1, tokens=7)) + b"\n")
    reader = RunReader(writer.folder)
    records = list(reader.steps())
    assert [record.step for record in records] == [*range(2, 5001), 1]
    assert (records[-1].tokens, reader.torn) == (7, 3)
    *_, news = reader.follow()
    assert news.offset == os.path.getsize(writer.folder / "steps.jsonl")
    assert all(len(record.skipped) == record.step % 300 for record in records[:-1])
    assert len(list(reader.follow())) > 3


def test_a_log_is_followed_byte_by_byte_and_never_half_a_record(begin):
    writer = begin()
    reader, offset, seen = RunReader(writer.folder), 0, []
    data = b"".join(_lines.line_of(step(number)) + b"\n" for number in range(1, 6))
    with open(writer.folder / "steps.jsonl", "ab", buffering=0) as file:
        for byte in data:
            file.write(bytes([byte]))
            for news in reader.follow(offset):
                seen, offset = seen + news.records, news.offset
            assert len(seen) == (writer.folder / "steps.jsonl").read_bytes().count(b"\n") - 1
    assert seen == [step(number) for number in range(1, 6)]
    assert list(reader.follow(offset)) == []


def test_a_log_that_was_replaced_is_followed_from_its_beginning(begin):
    writer = begin()
    writer.write(step(1))
    (news,) = RunReader(writer.folder).follow(10**6)
    assert news.records == [step(1)]
    assert news.keep == 0


# Crashes and full disks


def test_kill_9_at_any_moment_loses_no_record_that_was_written(tmp_path):
    chance = random.Random(1)
    for round_ in itertools.count():
        counts = [len(numbers(reader.folder)) for reader in find_runs(tmp_path)] if round_ >= 40 else []
        if len(counts) >= 10 and sum(counts) > 200:
            break  # a busy machine may need more rounds
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
        records = list(reader.steps())
        assert [record.step for record in records] == list(range(1, len(records) + 1))
        assert len(records) in (before + written, before + written + 1)
        assert all(record.train_loss == record.step / 2 for record in records)
        assert reader.torn <= round_ % 4  # Linux may cut short the write that a kill comes into


def room(folder, size):
    """Let this process make no file larger than what the steps now have, and a little."""
    limit = os.path.getsize(folder / "steps.jsonl") + size if folder.exists() else size
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


NO_LIMIT = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


LOST = step(2, skipped="y" * 40)
WHOLE = len(_lines.line_of(LOST))


@pytest.mark.few(3)
@pytest.mark.parametrize("size", [0, 1, 30, WHOLE - 1, WHOLE, WHOLE + 1, WHOLE + 2, WHOLE + 30])
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
        assert os.stat(writer.folder / "steps.jsonl").st_mtime > 1.0
        resource.setrlimit(resource.RLIMIT_FSIZE, NO_LIMIT)
        writer.write(step(6))
        writer.write(step(7))
        writer.close()

    assert outcome(work) == 0
    reader = RunReader(tmp_path / "a")
    steps = [record.step for record in reader.steps()]
    assert steps == ([1, 6, 7] if size <= WHOLE else [1, 2, 6, 7])
    assert reader.torn == 0
    for name in FILES[:-1]:
        assert all(json.loads(line) for line in (tmp_path / "a" / name).read_text().splitlines())


FULL = """
import os, subprocess, sys
from pathlib import Path
from hilbert_monitor.runs.log import RunReader, RunWriter
from hilbert_monitor.runs.record import Alert, RunInfo, StepRecord

disk = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "none", str(disk)], check=True)
errors = [RuntimeError("no space " * 1000), KeyboardInterrupt(), RuntimeError("\\N{SNOWMAN}" * 4000), None]
for attempt, error in enumerate(errors, 1):
    writer = RunWriter.open(disk, RunInfo(name="a"), first_step=attempt)
    filler = os.open(disk / "filler", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    written = attempt
    try:
        for written in range(attempt, 100_000):
            os.write(filler, b"x" * 1000)
            writer.write(StepRecord(step=written + 1, time=0.0, pair_text=("a" * 700, "b" * 700)))
    except OSError:
        pass
    try:
        while os.write(filler, b"x"):  # to the last byte
            pass
    except OSError:
        pass
    for kind in "xyz":
        try:
            writer.alert(Alert(step=2, time=0.0, kind=kind * 500, value=1.0))
        except OSError:
            pass
    writer.close(error)
    reader = RunReader(disk / "a")
    state = reader.state()
    kind = "finished" if error is None else "failed" if isinstance(error, RuntimeError) else "stopped"
    assert (state.status, reader.end.attempt, reader.info.attempt) == (kind, attempt, attempt), (attempt, state)
    assert state.message[:900] == (str(error)[:900] if kind == "failed" else ""), state.message[:80]
    last = max((record.step for record in reader.steps()), default=attempt)
    assert last in (written, written + 1) and reader.torn == 0, (last, written)
    assert b" " * 100 not in (disk / "a" / "end.jsonl").read_bytes()
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


def test_room_for_the_end_that_a_killed_attempt_took_is_used_by_the_next(tmp_path):
    for attempt in (1, 2, 3):
        with living_writer(tmp_path) as (pid, _):
            kill(pid)
        assert RunReader(tmp_path / "a").state().status == "killed"
        assert RunReader(tmp_path / "a").info.attempt == attempt
        assert (tmp_path / "a" / "end.jsonl").read_bytes() == b" " * 8192
    writer = RunWriter.open(tmp_path, RunInfo(name="a"))
    writer.close(RuntimeError())
    [line] = (tmp_path / "a" / "end.jsonl").read_text().splitlines()
    assert json.loads(line)["attempt"] == 4


def test_a_run_that_finds_no_room_to_begin_is_begun_when_there_is(tmp_path):
    def work():
        files = len(os.listdir("/proc/self/fd"))  # a fork closes the ports of exporters that other tests left
        for size in (0, 5, 40, 100):
            room(tmp_path / "a", size)
            with pytest.raises(OSError, match=r"room|large"):
                RunWriter.open(tmp_path, RunInfo(name="a", model="m" * 500), first_step=3)
            assert find_runs(tmp_path) == []
        assert len(os.listdir("/proc/self/fd")) == files
        resource.setrlimit(resource.RLIMIT_FSIZE, NO_LIMIT)
        writer = RunWriter.open(tmp_path, RunInfo(name="a", model="m" * 500), first_step=3)
        writer.write(step(4))
        assert writer.id == "a"

    assert outcome(work) == 0
    assert numbers(tmp_path / "a") == [4]
    assert RunReader(tmp_path / "a").info.attempt == 1


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
    assert list(reader.steps()) == [step(1), step(2, tokens=7)]
    assert reader.alerts() == [alert(1), alert(2, message="again")]
    assert (again.id, reader.info.attempt) == ("a", 2)
    assert reader.state().status == "running"
    again.close()
    assert reader.state().status == "finished"


# Whose log it is


@pytest.mark.sweep
def test_a_second_process_with_the_name_of_a_living_one_is_numbered_or_refused(begin, tmp_path):
    with living_writer(tmp_path):
        with pytest.warns(UserWarning, match="run 'a' is being written by another process: this is 'a-2'"):
            second = begin()
        with pytest.warns(UserWarning, match="this is 'a-3'"):
            assert begin(first_step=7).id == "a-3"
        with pytest.raises(RuntimeError, match=r"run 'a\S*' is being written .*: give this run a name of its own$"):
            begin(strict=True)
        second.write(step(1))
        assert sorted(os.listdir(tmp_path)) == ["a", "a-2", "a-3"]
        assert RunReader(tmp_path / "a").info.attempt == 1
    second.close()
    assert begin(strict=True).id == "a"


def test_a_warning_that_is_an_error_leaves_no_lock_behind(begin, tmp_path):
    with living_writer(tmp_path), warnings.catch_warnings(action="error"), pytest.raises(UserWarning, match="a-2"):
        begin()
    assert _lines.is_locked(tmp_path / "a-2" / "steps.jsonl") is False


@pytest.mark.sweep
def test_writers_in_threads_of_one_process_never_share_a_log(tmp_path):
    writers, start = [], threading.Barrier(6)

    def work():
        start.wait()
        writers.append(RunWriter.open(tmp_path, RunInfo(name="a")))

    threads = [threading.Thread(target=work) for _ in range(6)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len({writer.id for writer in writers}) == 6
    for writer in writers:
        writer.close()


@pytest.mark.parametrize("first_step", [0, 1])
def test_a_requeued_job_goes_on_in_the_log_of_its_killed_process(begin, tmp_path, first_step):
    with living_writer(tmp_path) as (pid, _):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        writer = begin(first_step=first_step, strict=True)
    assert (writer.id, writer.info.attempt) == ("a", 2)
    assert numbers(writer.folder) == [1][:first_step]


def test_a_worker_that_outlives_its_killed_parent_does_not_hold_the_log(begin, tmp_path):
    with living_writer(tmp_path, orphan=True) as (pid, worker):
        kill(pid)
        os.kill(worker, 0)
        assert RunReader(tmp_path / "a").state().status == "killed"
        assert begin(first_step=1, strict=True).info.attempt == 2


def test_a_forked_process_neither_writes_nor_ends_the_run_of_its_parent(begin):
    writer = begin()

    def work():
        writer.close(RuntimeError("a worker's own"))
        for use in (lambda: writer.write(step(1)), lambda: writer.alert(alert(1)), writer.progress, writer.describe):
            with pytest.raises(OSError, match="write from the process that opened it"):
                use()

    assert outcome(work) == 0
    reader = RunReader(writer.folder)
    assert reader.state().status == "running"
    assert reader.end is None
    writer.write(step(2))
    assert numbers(writer.folder) == [2]


def test_a_fork_in_the_middle_of_a_write_leaves_a_child_that_does_not_hang(begin):
    writer = begin()

    def work():
        with pytest.raises(OSError, match="forked"):
            writer.write(step(1))

    with writer._steps._guard:
        assert outcome(work) == 0


def test_readers_and_copies_in_the_same_process_neither_take_nor_lose_the_lock(begin, tmp_path):
    writer = begin()
    shutil.copytree(writer.folder, tmp_path / "copy")
    list(RunReader(writer.folder).steps())
    assert outcome(lambda: RunWriter.open(tmp_path, RunInfo(name="a"), strict=True)) != 0
    writer.close(RuntimeError())
    looking = threading.Event()

    def look():
        while not looking.is_set():
            _lines.is_locked(writer.folder / "steps.jsonl")

    lookers = [threading.Thread(target=look) for _ in range(2)]
    for looker in lookers:
        looker.start()
    try:
        for _ in range(10):
            again = begin(strict=True)
            assert again.id == "a"
            again.close(RuntimeError())
    finally:
        looking.set()
        for looker in lookers:
            looker.join()


def test_a_finished_run_is_gone_on_with_but_not_begun_again(begin):
    begin().close()
    assert begin(first_step=5).info.attempt == 2
    RunWriter.close(begin("b"))
    with warnings.catch_warnings(action="error"):
        second = begin("b", strict=True)
    assert second.id == "b-2"
    second.close(RuntimeError())
    assert begin("b", first_step=5).id == "b-2", "the unfinished one is meant"


def test_a_failed_run_begun_again_is_a_new_attempt(begin):
    first = begin()
    first.write(step(1))
    first.close(RuntimeError())
    assert RunReader(first.folder).state().status == "failed"
    assert begin().info.attempt == 2
    assert numbers(first.folder) == []


def test_an_id_says_exactly_which_run_is_gone_on_with(begin, tmp_path):
    first = begin()
    with pytest.warns(UserWarning, match="a-2"):
        begin().close(RuntimeError())
    first.close()
    for id_ in ("a-2", "a"):
        writer = RunWriter.open(tmp_path, RunInfo(id=id_, name="a"), first_step=1)
        assert (writer.id, writer.info.attempt) == (id_, 2)
        writer.close(RuntimeError())
    writer = RunWriter.open(tmp_path, RunInfo(id="a"), first_step=1)
    assert (writer.id, writer.info.attempt) == ("a", 3)
    writer.close()


@contextlib.contextmanager
def file_operations(monkeypatch):
    """Counts what a block asks of the file system: files opened, looked up and made, and names listed in folders."""
    counts = collections.Counter()

    def counted(name, call):
        def counting(*args, **options):
            counts[name] += 1
            result = call(*args, **options)
            counts["names listed"] += len(result) if name == "listdir" else 0
            return result

        return counting

    for name in ("open", "mkdir", "stat", "lstat", "listdir", "scandir"):
        monkeypatch.setattr(os, name, counted(name, getattr(os, name)))
    yield counts
    monkeypatch.undo()


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["its own", "that of all"])
@pytest.mark.parametrize("first_step", [0, 1])
def test_a_run_begins_as_fast_among_many_others_as_among_few(tmp_path, monkeypatch, name, first_step):
    def operations(others):
        root = tmp_path / str(others)
        for n in range(others):
            number = "" if name == "that of all" and n == 0 else f"-{n + 1}"
            folder = by_hand(root / f"a{number}", name="a" if name == "that of all" else f"a{number}")
            (folder / "end.jsonl").write_text('{"attempt": 1, "time": 1.0}\n')
        with file_operations(monkeypatch) as counts:
            writer = RunWriter.open(root, RunInfo(name="a" if name == "that of all" else "b"), first_step=first_step)
        writer.close()
        return writer.id, counts

    many_id, many = operations(2000)
    few_id, few = operations(100)
    if name == "that of all":
        assert (many_id, few_id) == (("a-2001", "a-101") if first_step == 0 else ("a-2000", "a-100"))
    assert many.total() <= few.total() + 16, f"{many} among 2,000 others, {few} among 100"


def test_the_newest_unfinished_run_of_a_name_is_resumed_and_an_old_one_by_its_id(tmp_path):
    for n in range(1, 101):
        folder = by_hand(tmp_path / ("a" if n == 1 else f"a-{n}"), name="a")
        if n not in (1, 80, 90):
            (folder / "end.jsonl").write_text('{"attempt": 1, "time": 1.0}\n')
        aged(folder / "heartbeat", 0.0)
    for info, expected in (
        (RunInfo(name="a"), "a-90"),
        (RunInfo(name="a"), "a-80"),
        (RunInfo(name="a"), "a-101"),
        (RunInfo(id="a", name="a"), "a"),
    ):
        writer = RunWriter.open(tmp_path, info, first_step=0)
        assert writer.id == expected
        writer.close()


def test_a_number_whose_run_was_deleted_is_not_taken_before_a_run_that_can_be_resumed(begin, tmp_path):
    for name in ("a", "a-2", "a-4"):
        by_hand(tmp_path / name, name="a")
    for name in ("a-2", "a-4"):
        (tmp_path / name / "end.jsonl").write_text('{"attempt": 1, "time": 1.0}\n')
    assert [begin().id, begin("a", first_step=1).id] == ["a", "a-4"]


@pytest.mark.few(6)
@pytest.mark.parametrize("last", [*range(20), 63, 64, 65, 1000])
def test_the_last_number_is_found_in_few_lookups(last):
    lookups = []
    assert _last_number(lambda n: not lookups.append(n) and n <= last) == last
    assert len(lookups) <= 2 * max(last, 1).bit_length()


def test_names_that_make_one_file_name_are_different_runs(begin):
    for name, expected in (("x/y", "x-y"), ("x y", "x-y-2"), ("x/y", "x-y"), ("x y", "x-y-2")):
        writer = begin(name)
        assert writer.id == expected
        writer.close(RuntimeError())


def test_a_folder_of_something_else_is_left_alone(begin, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "model.ckpt").touch()
    (tmp_path / "b").touch()
    (tmp_path / "c").symlink_to("nowhere")
    (tmp_path / "d").mkdir()
    assert [begin(name).id for name in "abcd"] == ["a-2", "b-2", "c-2", "d"]
    assert os.listdir(tmp_path / "a") == ["model.ckpt"]


def test_where_there_are_no_locks_the_heartbeat_decides_and_the_user_is_told(begin, tmp_path, monkeypatch):
    def no_locks(fd, operation):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.warns(UserWarning, match="no locks in .*: only a heartbeat tells"):
        first = begin()
    assert RunReader(first.folder).state().status == "running"
    with pytest.warns() as warned:
        assert begin().id == "a-2"
    assert "run 'a' is being written by another process: this is 'a-2'" in str(warned[-1].message)
    with living_writer(tmp_path, "b") as (pid, _):
        kill(pid)
    assert RunReader(tmp_path / "b").state().status == "killed"
    with pytest.warns(UserWarning, match="no locks"):
        assert begin("b").info.attempt == 2
    by_hand(tmp_path / "c", name="c")
    with pytest.warns():
        assert begin("c").id == "c-2"
    aged(tmp_path / "c" / "heartbeat", time.time() - 61)
    with pytest.warns(UserWarning, match="no locks"):
        assert begin("c").info.attempt == 2
    first.close(RuntimeError())
    with pytest.warns(UserWarning, match="no locks"):
        assert begin("a").id == "a"  # at once: it has said that it ended
    assert sorted(path.name for path in first.folder.glob("claim-*")) == ["claim-1", "claim-2"]


@pytest.mark.sweep
@pytest.mark.parametrize("before", ["nothing", "a killed run"])
def test_without_locks_processes_that_start_at_once_never_share_a_log(tmp_path, before):
    def no_locks(fd, operation):
        raise OSError(errno.ENOLCK, "no locks available")

    def work(number, start):
        warnings.simplefilter("ignore")
        fcntl.flock = no_locks
        while time.time() < start:
            pass
        writer = RunWriter.open(root, RunInfo(name="a", seed=number), heartbeat=0.2)
        for n in range(1, 121):
            writer.write(step(n, tokens=number))
        opened.release()
        closing.acquire()  # a run that has ended would be gone on with
        writer.close()

    for round_ in range(4):
        root = tmp_path / str(round_)
        if before == "a killed run":
            folder = by_hand(root / "a", name="a", host=socket.gethostname(), pid=2**22 + 1)
            (folder / "claim-1").write_text(f"{socket.gethostname()} {2**22 + 1}\n")
        opened, closing = multiprocessing.Semaphore(0), multiprocessing.Semaphore(0)
        start = time.time() + 0.2
        pids = [forked(functools.partial(work, number, start)) for number in range(4)]
        assert all(opened.acquire(timeout=60) for _ in pids)
        for _ in pids:
            closing.release()
        assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0] * 4
        readers = find_runs(root)
        assert sorted(reader.folder.name for reader in readers) == ["a", "a-2", "a-3", "a-4"]
        for reader in readers:
            assert [(record.step, record.tokens) for record in reader.steps()] == [
                (n, reader.info.seed) for n in range(1, 121)
            ]
            assert reader.torn == 0
        assert {reader.info.seed for reader in readers} == {0, 1, 2, 3}


def test_without_locks_a_run_that_finds_no_room_leaves_one_claim_however_often_it_tries(tmp_path):
    def no_locks(fd, operation):
        raise OSError(errno.ENOLCK, "no locks available")

    def work():
        warnings.simplefilter("ignore")
        fcntl.flock = no_locks
        for _ in range(5):
            room(tmp_path / "a", 40)
            with pytest.raises(OSError, match=r"room|large"):
                RunWriter.open(tmp_path, RunInfo(name="a", model="m" * 500))
        resource.setrlimit(resource.RLIMIT_FSIZE, NO_LIMIT)
        writer = RunWriter.open(tmp_path, RunInfo(name="a", model="m" * 500))
        assert (writer.id, RunWriter.open(tmp_path, RunInfo(name="a")).id) == ("a", "a-2")

    assert outcome(work) == 0
    assert sorted(path.name for path in (tmp_path / "a").glob("claim-*")) == ["claim-1"]


# Names

WILD = [
    "..",
    ".",
    "/",
    "../../x",
    "a/b\\c",
    "\x00\n\x1b[31m",
    "\U0001f600",
    "\ud800",
    "n" * 10_000,
    " ",
    "-rf",
    "CON",
    "~",
]


@pytest.mark.parametrize("name", WILD)
def test_any_name_makes_a_folder_of_its_own_and_is_found_again(begin, tmp_path, name):
    writer = begin(name)
    assert writer.folder.parent == tmp_path
    assert os.listdir(tmp_path) == [writer.id]
    assert RunReader(writer.folder).info.name == name.encode("utf-8", "backslashreplace").decode()
    writer.close(RuntimeError(name))
    assert RunReader(writer.folder).state().message == name.encode("utf-8", "backslashreplace").decode()[:3997] + (
        "..." if len(name) > 4000 else ""
    )
    assert begin(name).id == writer.id


@given(texts | st.text(max_size=200))
def test_ids_are_safe_file_names(text):
    name = _file_name(text)
    assert 0 < len(name) <= 80
    assert name.isascii()
    assert name[0] not in "-."
    assert not set(name) & set('/\\ \n\x00:*?"<>|')


def test_runs_without_a_name_differ_and_draw_from_no_generator_of_the_run(tmp_path):
    before = random.getstate()
    infos = [RunInfo(head_optimizer="RowNorm" * times, seed=3) for times in (1, 1, 100, 100)]
    writers = [RunWriter.open(tmp_path, info) for info in infos]
    assert random.getstate() == before
    assert len({writer.id for writer in writers}) == 4
    assert "-RowNorm-seed3-" in writers[0].id
    for writer in writers:
        writer.close()


# States


def test_a_run_is_running_then_finished_or_failed_and_running_again(begin):
    writer = begin()
    reader = RunReader(writer.folder)
    state = reader.state()
    assert (state.status, state.step, state.time) == ("running", None, writer.info.started)
    writer.write(step(1))
    state = reader.state()
    assert (state.status, state.step, state.time) == ("running", 1, 1001.0)
    writer.close(ZeroDivisionError("by zero"))
    state = reader.state()
    assert (state.status, state.error, state.message, state.step) == ("failed", "ZeroDivisionError", "by zero", 1)
    again = begin(first_step=1)
    assert (reader.state().status, reader.state().step) == ("running", 1)
    again.close()
    assert reader.state().status == "finished"


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


def by_a_handler_of_two_signals_that_drops_the_frame(number, error):
    def handle(number, frame):
        del frame
        raise error

    signal.signal(signal.SIGTERM, handle)
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
        (lambda: by_a_handler_of_two_signals_that_drops_the_frame(signal.SIGINT, SystemExit(0)), "SIGINT"),
        (lambda: by_a_handler_of_two_signals_that_drops_the_frame(signal.SIGALRM, TimeoutError("slow")), ""),
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


def test_a_signal_without_a_handler_leaves_a_killed_run(tmp_path):
    with living_writer(tmp_path) as (pid, _):
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)
    assert RunReader(tmp_path / "a").state().status == "killed"


def test_an_exception_that_cannot_be_shown_is_still_a_failure(begin):
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError

        __repr__ = __str__

    writer = begin()
    writer.close(Mute())
    state = RunReader(writer.folder).state()
    assert (state.status, state.error) == ("failed", "Mute")


def test_a_killed_process_is_known_at_once_on_its_own_host(tmp_path):
    with living_writer(tmp_path) as (pid, _):
        reader = RunReader(tmp_path / "a")
        assert reader.state().status == "running"
        kill(pid)
        assert reader.state().status == "killed"
        assert reader.state().step == 1


def test_on_another_host_only_the_heartbeat_tells(tmp_path):
    folder = by_hand(tmp_path / "a")
    aged(folder / "heartbeat", 1000.0)
    aged(folder / "steps.jsonl", 1000.0)
    assert RunReader(folder).state(1059.0).status == "running"
    assert RunReader(folder).state(1061.0).status == "killed"
    assert RunReader(folder, lost_after=100).state(1061.0).status == "running"
    by_hand(folder, heartbeat=50.0)
    aged(folder / "heartbeat", 1000.0)
    assert RunReader(folder).state(1190.0).status == "running", "a slow heart is waited for"
    assert RunReader(folder).state(1201.0).status == "killed"
    (folder / "heartbeat").unlink()
    assert RunReader(folder).state(1000.0).status == "killed"


def test_on_its_own_host_the_lock_tells_whatever_process_has_the_number(begin, tmp_path):
    reused = by_hand(tmp_path / "b", host=socket.gethostname(), pid=os.getpid())
    assert RunReader(reused).state().status == "killed"
    (reused / "steps.jsonl").unlink()
    assert RunReader(reused).state().status == "stalled", "without a lock the process is asked for"
    for pid in (2**30, 2**70, 0):
        by_hand(reused, host=socket.gethostname(), pid=pid)
        (reused / "steps.jsonl").unlink()
        assert RunReader(reused).state().status == "killed"
    living = by_hand(begin().folder, host=socket.gethostname(), pid=2**30)
    assert RunReader(living).state().status == "running"


def test_two_who_look_at_once_do_not_take_each_other_for_a_writer(begin):
    writer = begin()
    writer.close(RuntimeError())
    with open(writer.folder / "steps.jsonl") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        assert _lines.is_locked(writer.folder / "steps.jsonl") is False


def test_a_heartbeat_from_the_future_is_no_sign_of_life_until_it_moves(tmp_path):
    folder = by_hand(tmp_path / "a")
    for name in ("heartbeat", "steps.jsonl"):
        aged(folder / name, 5000.0)
    reader = RunReader(folder)
    for now in (1000.0, 1400.0, 4990.0, 5010.0):
        state = reader.state(now)
        assert state.status == "killed", now
        assert "from the future (1970-01-01 01:23:20 UTC)" in state.message
        assert "clock of 'elsewhere'" in state.message
    aged(folder / "heartbeat", 9000.0)
    assert reader.state(5015.0).status == "running"
    assert reader.state(5015.0).message == ""
    assert reader.state(5080.0).status == "killed", "it has not moved for more than a minute"
    aged(folder / "heartbeat", 100.0)
    assert reader.state(5085.0).status == "running", "a clock that is behind can move as well"


def test_a_heartbeat_a_little_ahead_is_a_sign_of_life(tmp_path):
    folder = by_hand(tmp_path / "a")
    aged(folder / "heartbeat", 1059.0)
    aged(folder / "steps.jsonl", 1059.0)
    assert RunReader(folder).state(1000.0).status == "running"
    aged(folder / "heartbeat", 1061.0)
    assert RunReader(folder).state(1000.0).status == "killed"


def test_a_change_long_before_the_look_is_as_old_as_it_says(tmp_path):
    folder = by_hand(tmp_path / "a")
    reader = RunReader(folder)
    for beat, now, status in ((1000.0, 1010.0, "running"), (1020.0, 1200.0, "killed"), (1190.0, 1201.0, "running")):
        for name in ("heartbeat", "steps.jsonl"):
            aged(folder / name, beat)
        assert reader.state(now).status == status, now


def test_on_its_own_host_the_lock_tells_whatever_time_the_heartbeat_has(begin):
    writer = begin(heartbeat=60)
    aged(writer.folder / "heartbeat", time.time() + 3600)
    assert RunReader(writer.folder).state().status == "running"
    writer.close()


def test_a_living_run_without_a_step_for_long_is_stalled_until_it_makes_progress(begin):
    writer = begin()
    reader = RunReader(writer.folder)
    now = time.time()
    aged(writer.folder / "steps.jsonl", now - 299)
    assert reader.state(now).status == "running"
    aged(writer.folder / "steps.jsonl", now - 301)
    assert reader.state(now).status == "stalled"
    assert RunReader(writer.folder, stalled_after=1000).state(now).status == "running"
    writer.progress()
    assert reader.state(now).status == "running"
    aged(writer.folder / "steps.jsonl", now - 301)
    writer.write(step(1))
    assert reader.state(now).status == "running"
    for asked, status in ((3600.0, "running"), (10.0, "stalled")):
        writer.describe(stalled_after=asked)
        aged(writer.folder / "steps.jsonl", now - (3599 if asked > 10 else 11))
        assert reader.state(now).status == status


@pytest.mark.parametrize(
    ("moments", "allowed"),
    [
        ((0, 100, 200, 300, 500, float("nan"), 600, 700), 2000),  # twenty of its steps
        ((0, 1, 2, 3, 903, 904, 905), 1800),  # twice the time of a validation
    ],
)
def test_a_slow_run_is_given_the_time_that_its_steps_and_pauses_take(begin, moments, allowed):
    writer = begin()
    for number, moment in enumerate(moments, start=1):
        writer.write(StepRecord(step=number, time=moment))
    now, reader = time.time(), RunReader(writer.folder)
    for age, status in ((allowed - 1, "running"), (allowed + 1, "stalled")):
        aged(writer.folder / "steps.jsonl", now - age)
        assert reader.state(now).status == RunReader(writer.folder).state(now).status == status


def test_a_state_follows_the_log_and_a_pause_is_forgotten_after_a_hundred_steps(begin):
    writer = begin()
    reader, moment = RunReader(writer.folder), 0.0
    for number in range(1, 121):
        moment += 9000.0 if number == 10 else 1.0
        writer.write(StepRecord(step=number, time=moment))
        assert (reader.state(0.0).step, reader.state(0.0).time) == (number, moment)
    now = time.time()
    aged(writer.folder / "steps.jsonl", now - 301)
    assert reader.state(now).status == "stalled"


def test_the_heart_beats_until_the_run_is_closed(begin):
    writer = begin(heartbeat=0.02)
    path = writer.folder / "heartbeat"
    for _ in range(2):
        aged(path, 1.0)
        deadline = time.monotonic() + 60
        while path.stat().st_mtime == 1.0:
            assert time.monotonic() < deadline
            time.sleep(0.005)
    writer.close()
    time.sleep(0.1)
    aged(path, 1.0)
    time.sleep(0.1)
    assert path.stat().st_mtime == 1.0


def test_a_heart_beats_on_when_its_folder_is_gone(begin, tmp_path):
    writer = begin(heartbeat=0.01)
    shutil.rmtree(writer.folder)
    time.sleep(0.05)
    assert any(thread.name == "hilbert-monitor a" for thread in threading.enumerate())
    assert find_runs(tmp_path) == []


junk = st.binary(max_size=60) | st.sampled_from(
    [
        b"{}\n",
        b'{"id":"a"}\n',
        b'{"id":"a","attempt":"x"}\n',
        b"[" * 5000 + b"\n",
        b'{"id":"a","pid":99999999999999999999}\n',
    ]
)


@settings(deadline=None)
@given(st.lists(junk, min_size=5, max_size=5))
def test_no_file_is_too_strange_to_be_judged(tmp_path_factory, contents):
    folder = tmp_path_factory.mktemp("run")
    for name, content in zip(FILES, contents, strict=True):
        (folder / name).write_bytes(content)
    reader = RunReader(folder)
    assert reader.state(time.time()).status in ("running", "finished", "failed", "stalled", "killed")
    assert isinstance(reader.info, RunInfo)
    assert [*reader.steps(), *reader.alerts()] == []


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_folders_and_pipes_in_place_of_files_are_judged_too(tmp_path, make):
    files = len(os.listdir("/proc/self/fd"))
    for name in FILES:
        make(tmp_path / name)
    assert RunReader(tmp_path).state(0.0).status in ("running", "killed", "stalled")
    assert find_runs(tmp_path) == []
    assert len(os.listdir("/proc/self/fd")) == files


def test_what_is_no_run_is_not_found(begin, tmp_path):
    assert find_runs(tmp_path / "nowhere") == []
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "steps.jsonl").write_text('{"attempt": 1, "first_step": 0}\n')
    (tmp_path / "half" / "info.jsonl").write_text('{"id": "ha')
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "info.jsonl").write_text('{"title": "something else"}\n')
    (tmp_path / "note.txt").touch()
    begin("b")
    begin("a")
    assert [reader.info.id for reader in find_runs(tmp_path)] == ["a", "b"]
    assert find_runs(tmp_path, lost_after=7.0)[0].lost_after == 7.0


def test_reading_changes_nothing_on_disk(begin):
    writer = begin(heartbeat=60)
    writer.write(step(1))
    folder = writer.folder
    (folder / "alerts.jsonl").unlink()
    (folder / "end.jsonl").unlink()

    def trace():
        return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir()}

    before = trace()
    reader = RunReader(folder)
    assert [*reader.steps(), *reader.alerts(), *reader.follow(), reader.state(), reader.info]
    assert trace() == before


def test_a_child_forked_while_a_run_is_opened_does_not_hold_its_lock(tmp_path, monkeypatch):
    opened, forked_meanwhile, really_open = threading.Event(), threading.Event(), os.open

    def slow(path, flags, *args, **options):  # as a network file system may be
        fd = really_open(path, flags, *args, **options)
        if flags & os.O_APPEND and not opened.is_set():
            opened.set()
            forked_meanwhile.wait(60)
        return fd

    monkeypatch.setattr(os, "open", slow)
    writers = []
    opening = threading.Thread(target=lambda: writers.append(RunWriter.open(tmp_path, RunInfo(name="a"))))
    opening.start()
    assert opened.wait(60)
    child = forked(lambda: time.sleep(100))
    try:
        forked_meanwhile.set()
        opening.join()
        writers[0].close(RuntimeError("a crash"))
        assert _lines.is_locked(tmp_path / "a" / "steps.jsonl") is False
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)

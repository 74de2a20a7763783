"""The reader of run logs: the records that count, and the states of a run."""

import fcntl
import json
import os
import shutil
import threading
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hilbert_monitor.runs import files
from hilbert_monitor.runs.alerts import Judge, alerts_of
from hilbert_monitor.runs.files import Owner, encode_line
from hilbert_monitor.runs.log import RunWriter
from hilbert_monitor.runs.reader import RunReader, find_runs
from hilbert_monitor.runs.record import LayerRecord, RunInfo, StepRecord
from tests.support.draws import draws
from tests.support.run_logs import aged, alert, by_hand, no_locks, numbers, step

FILES = ["info.jsonl", "steps.jsonl", "alerts.jsonl", "end.jsonl", "heartbeat"]


def test_fields_of_newer_versions_are_ignored_and_missing_ones_have_their_defaults(begin):
    writer = begin()
    with open(writer.folder / "steps.jsonl", "a") as file:
        file.write('{"step": 1, "time": 2.0, "curvature": [1, {"a": null}]}\n')
    assert list(RunReader(writer.folder).steps()) == [StepRecord(step=1, time=2.0)]


# Attempts


def test_a_later_attempt_undoes_what_earlier_ones_did_beyond_its_first_step(begin):
    for first, last in ((0, 5), (3, 6), (2, 4), (3, 3)):
        writer = begin(first_step=first)
        for number in range(first + 1, last + 1):
            writer.write(step(number, tokens=first))
            writer.alert(alert(number, message=str(first)))
            writer.layers(LayerRecord(step=number, time=float(first), layers={}))
        writer.close(RuntimeError())
    reader = RunReader(writer.folder)
    assert [(r.step, r.tokens) for r in reader.steps()] == [(1, 0), (2, 0), (3, 2)]
    assert [(a.step, a.message) for a in reader.alerts()] == [(1, "0"), (2, "0"), (3, "2")]
    assert [(r.step, r.time) for r in reader.layers()] == [(1, 0.0), (2, 0.0), (3, 2.0)]
    assert [(info.attempt, info.first_step) for info in reader.attempts] == [(1, 0), (2, 3), (3, 2), (4, 3)]


TORN = ['{"step": 3, "ti', "\x00\x00", "[1, 2]", '{"time": 3}', "\ud800", "[" * 5000, 2 * '{"step": 3, "time": 0.0}']
lines = st.lists(
    st.one_of(
        *3 * [st.tuples(st.just("step"), st.integers(0, 5))],
        *2 * [st.tuples(st.just("attempt"), st.integers(0, 5))],
        st.tuples(st.just("torn"), st.sampled_from(TORN)),
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
        for batch in reader.follow(offset):
            if batch.keep is not None:
                seen = {number: place for number, place in seen.items() if number <= batch.keep}
            seen |= {record.step: record.tokens for record in batch.records}
            offset, seen_torn = batch.offset, seen_torn + batch.torn
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
    assert reader.torn == torn


def test_a_log_of_many_blocks_reads_as_one(begin):
    writer = begin()
    with open(writer.folder / "steps.jsonl", "ab") as file:
        for number in range(1, 6001):
            file.write(files.encode_line(step(number, skipped="x" * (number % 300))) + b"\n")
            if number in (1, 2500, 6000):
                file.write(b'{"step": 1, "tim\n')
        file.write(b'{"attempt": 2, "first_step": 5000}\n' + files.encode_line(step(1, tokens=7)) + b"\n")
    reader = RunReader(writer.folder)
    records = reader.steps()
    assert [record.step for record in records] == [*range(2, 5001), 1]
    assert (records[-1].tokens, reader.torn) == (7, 3)
    *_, batch = reader.follow()
    assert batch.offset == os.path.getsize(writer.folder / "steps.jsonl")
    assert all(len(record.skipped) == record.step % 300 for record in records[:-1])
    assert len(list(reader.follow())) > 3


def test_a_log_that_was_replaced_is_followed_from_its_beginning(begin):
    writer = begin()
    writer.write(step(1))
    (batch,) = RunReader(writer.folder).follow(10**6)
    assert batch.records == [step(1)]
    assert batch.keep == 0


# States


class Mute(Exception):
    def __str__(self):
        raise RuntimeError

    __repr__ = __str__


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
    for error, status in ((Mute(), "failed"), (None, "finished")):
        again = begin(first_step=1)
        assert (reader.state().status, reader.state().step) == ("running", 1)
        again.close(error)
        assert (reader.state().status, reader.state().error) == (status, "Mute" if error else "")


def test_on_another_machine_the_heartbeat_tells_by_its_changes(tmp_path):
    folder = by_hand(tmp_path / "a", host="elsewhere")
    reader = RunReader(folder)
    for beat, now, status in (
        (400.0, 1000.0, "running"),  # a first look, ten minutes behind our clock
        (400.0, 1059.0, "running"),
        (400.0, 1061.0, "killed"),
        (401.0, 1100.0, "running"),
        (9000.0, 1120.0, "running"),
        (100.0, 1140.0, "running"),
        (100.0, 1201.0, "killed"),
    ):
        for name in ("heartbeat", "steps.jsonl"):
            aged(folder / name, beat)
        assert reader.state(now).status == status, (beat, now)
    assert reader.state(1201.0).ended == 100.0
    for first in (100.0, 9000.0):  # a first look at a time far from ours
        aged(folder / "heartbeat", first)
        reader = RunReader(folder)
        assert reader.state(5000.0).status == "killed"
        for name in ("heartbeat", "steps.jsonl"):
            aged(folder / name, first + 5)
        assert [reader.state(now).status for now in (5005.0, 5064.0, 5066.0)] == ["running", "running", "killed"]
    by_hand(folder, heartbeat=50.0)
    aged(folder / "heartbeat", 400.0)
    reader = RunReader(folder)
    assert [reader.state(now).status for now in (1000.0, 1190.0, 1201.0)] == ["running", "running", "killed"]
    (folder / "heartbeat").unlink()
    assert reader.state(1202.0).status == "killed"


def test_files_that_lag_ten_minutes_are_neither_killed_nor_stalled_while_they_change(tmp_path):
    folder, reader = by_hand(tmp_path / "a"), RunReader(tmp_path / "a")
    for moment in range(0, 1000, 5):
        for name in ("heartbeat", "steps.jsonl"):
            aged(folder / name, 1e6 - 600.0 + moment)
        assert reader.state(1e6 + moment).status == "running"
    for moment in range(1000, 1600, 5):
        aged(folder / "heartbeat", 1e6 - 600.0 + moment)
        assert reader.state(1e6 + moment).status == ("stalled" if moment - 995 > 300 else "running")


def test_machines_of_one_name_are_told_apart(tmp_path):
    """Containers may have the host name of another machine, and process numbers of their own."""
    here = Owner.new()
    for owner, status in (
        (here, "killed"),  # nobody holds the lock that this machine would see
        (msgspec.structs.replace(here, machine="another"), "running"),
    ):
        folder = by_hand(tmp_path / owner.machine[:8], owner=encode_line(owner), pid=os.getpid())
        assert RunReader(folder).state().status == status


def test_without_locks_the_process_is_asked_for(tmp_path, monkeypatch):
    here = Owner.new()
    folder = by_hand(tmp_path / "a", owner=encode_line(here))
    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert RunReader(folder).state().status == "running"
    by_hand(folder, owner=encode_line(msgspec.structs.replace(here, pid=2**30)))
    assert RunReader(folder).state().status == "killed"


def test_two_who_look_at_once_do_not_take_each_other_for_a_writer(begin):
    begin().close(RuntimeError())
    with open(begin().folder / "alerts.jsonl") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        assert files.is_locked(file.name) is False


def test_a_living_run_without_a_step_for_long_is_stalled_until_it_makes_progress(begin):
    writer = begin()
    reader, now = RunReader(writer.folder), time.time()
    for age, status in ((299, "running"), (301, "stalled")):
        aged(writer.folder / "steps.jsonl", now - age)
        assert reader.state(now).status == status
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
        ((0, 9000, *range(9001, 9110)), 300),  # a pause is forgotten after a hundred steps
    ],
)
def test_a_slow_run_is_given_the_time_that_its_steps_and_pauses_take(begin, moments, allowed):
    writer = begin()
    reader = RunReader(writer.folder)
    for number, moment in enumerate(moments, start=1):
        writer.write(StepRecord(step=number, time=moment))
        assert reader.state().step == number
    now = time.time()
    for age, status in ((allowed - 1, "running"), (allowed + 1, "stalled")):
        aged(writer.folder / "steps.jsonl", now - age)
        assert reader.state(now).status == RunReader(writer.folder).state(now).status == status


def test_a_heart_beats_until_the_run_is_closed_also_when_its_folder_is_gone(begin, tmp_path):
    def is_beating():
        return any(thread.name == "hilbert-monitor a" for thread in threading.enumerate())

    writer = begin(heartbeat=0.01)
    aged(writer.folder / "heartbeat", 1.0)
    deadline = time.monotonic() + 60
    while (writer.folder / "heartbeat").stat().st_mtime == 1.0 and time.monotonic() < deadline:
        time.sleep(0.005)
    shutil.rmtree(writer.folder)
    time.sleep(0.05)
    assert is_beating()
    assert find_runs(tmp_path) == []
    writer.close()
    while is_beating():
        assert time.monotonic() < deadline
        time.sleep(0.005)


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
    open_files = len(os.listdir("/proc/self/fd"))
    for name in FILES:
        make(tmp_path / name)
    assert RunReader(tmp_path).state(0.0).status in ("running", "killed", "stalled")
    assert find_runs(tmp_path) == []
    assert len(os.listdir("/proc/self/fd")) == open_files


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


# Runs of before


def test_runs_of_the_version_before_open_and_are_resumed(tmp_path):
    """A run with numbered claims and blanks in end.jsonl, killed in its second attempt."""
    shutil.copytree(Path(__file__).parent / "run_of_before", tmp_path / "old")
    reader = RunReader(tmp_path / "old")
    for path in tmp_path.glob("old/*"):
        aged(path, 1.0)
    assert [(info.attempt, info.first_step) for info in reader.attempts] == [(1, 0), (2, 3)]
    assert [record.step for record in reader.steps()] == [1, 2, 3, 4, 5]
    assert [alert.step for alert in reader.alerts()] == [2, 5]
    assert [record.step for record in reader.layers()] == [2, 5]
    assert (reader.state().status, reader.torn) == ("killed", 0)
    writer = RunWriter.open(tmp_path, RunInfo(name="old"), first_step=4)
    assert (writer.id, writer.info.attempt, numbers(writer.folder)) == ("old", 3, [1, 2, 3, 4])
    writer.close(RuntimeError("no"))
    assert (reader.state().status, reader.state().message) == ("failed", "no")


def test_replaying_a_log_gives_the_alerts_of_its_run(begin):
    judge, writer = Judge(), begin()
    stored = RunReader(Path(__file__).parents[1] / "golden" / "runs" / "accident").steps()
    for record in [*stored, StepRecord(step=500, time=0.0, learning_rate=1e-3, diameter=1.0, nonfinite_rows=3)]:
        writer.write(record)
        for found in judge.judge(record):
            writer.alert(found)
    reader = RunReader(writer.folder)
    assert "nonfinite" in {found.kind for found in reader.alerts()}
    assert list(alerts_of(reader.steps())) == reader.alerts()

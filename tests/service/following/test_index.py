"""The index follows real logs, whatever is done to them."""

import asyncio
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from hilbert_monitor.runs.log import RunWriter
from hilbert_monitor.runs.reader import RunReader
from hilbert_monitor.runs.record import Alert, RunInfo, StepRecord
from hilbert_monitor.service.following import follower
from hilbert_monitor.service.following import index as indexing
from hilbert_monitor.service.following.index import Index
from tests.support.run_logs import by_hand


def write(root, name="run", steps=10, first=1, **about):
    writer = RunWriter.open(root, RunInfo(name=name, head_optimizer="AdamW", **about))
    for step in range(first, first + steps):
        writer.write(StepRecord(step=step, time=time.time(), train_loss=1 / step, diameter=float(step)))
    return writer


def heard(index, after):
    """All events since an id."""

    async def take():
        index.feed.publish("end", {})
        events = []
        async for event in index.feed.listen(after):
            if event.name == "end":
                return events
            events.append((event.name, json.loads(event.data)))
        return events

    return asyncio.run(take())


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def now(index):
    return f"{index.feed.epoch}-{index.feed._count}"


@pytest.fixture
def root(tmp_path):
    return tmp_path / "runs"


def test_a_folder_that_comes_into_being_later_is_found(root):
    index = Index(root)
    index.refresh()
    assert dict(index.runs) == {}
    assert index.progress == 1.0
    write(root).close()
    index.refresh()
    assert [run.status for run in index.runs.values()] == ["finished"]


def test_records_arrive_once_each_and_in_order(root):
    index = Index(root)
    writer = write(root, steps=3)
    index.refresh()
    start = now(index)
    for step in range(4, 30):
        writer.write(StepRecord(step=step, time=0, diameter=math.inf if step == 7 else 1.0))
        if step % 5 == 0:
            index.refresh()
    index.refresh()
    events = heard(index, start)
    records = [record for name, data in events if name == "records" for record in data["records"]]
    assert [record["step"] for record in records] == list(range(4, 30))
    assert records[3]["diameter"] == "inf"
    assert index.runs["run"].table.steps.tolist() == list(range(1, 30))
    assert index.runs["run"].status == "running"
    assert events[-1][1]["summary"]["step"] == 29
    writer.close()
    index.refresh()
    assert index.runs["run"].status == "finished"


def test_a_resume_drops_what_it_undoes(root):
    write(root, steps=20).close()
    index = Index(root)
    index.refresh()
    start = now(index)
    writer = RunWriter.open(root, RunInfo(id="run", name="run"), first_step=12)
    writer.write(StepRecord(step=13, time=0, diameter=99.0))
    index.refresh()
    assert index.runs["run"].table.steps.tolist() == list(range(1, 14))
    assert index.runs["run"].table.last("diameter") == 99.0
    assert [info.first_step for info in index.runs["run"].attempts] == [0, 12]
    assert [data["keep"] for name, data in heard(index, start) if name == "records"] == [12]
    writer.close()


def test_alerts_are_told_when_they_come_and_not_again(root):
    writer = write(root)
    writer.alert(Alert(step=1, time=0, kind="diameter", value=1.0))
    index = Index(root)
    index.refresh()
    start = now(index)
    writer.alert(Alert(step=5, time=0, kind="diameter", value=math.nan))
    for _ in range(3):
        index.refresh()
        writer.write(StepRecord(step=30, time=0))
    alerts = [data for name, data in heard(index, start) if name == "alert"]
    assert [(data["run"], data["status"], data["alert"]["step"]) for data in alerts] == [("run", "running", 5)]
    assert [alert.step for alert in index.runs["run"].alerts] == [1, 5]
    writer.close()


def test_a_long_piece_is_told_as_one_to_load_anew(root):
    writer = write(root)
    index = Index(root)
    index.refresh()
    start = now(index)
    for step in range(11, 400):
        writer.write(StepRecord(step=step, time=0))
    index.refresh()
    assert [data for name, data in heard(index, start) if name == "records"] == [{"run": "run", "reload": True}]
    assert len(index.runs["run"].table) == 399
    writer.close()


def test_long_logs_are_caught_up_with_in_pieces_and_do_not_delay_others(root, monkeypatch):
    monkeypatch.setattr(indexing, "BEHIND", 4000)
    write(root, "long", steps=3000).close()
    short = write(root, "short", steps=2)
    index = Index(root)
    index.refresh(0.0)
    assert len(index.runs["short"].table) == 2
    assert index.progress < 1
    seen = []
    while index.progress < 1:
        short.write(StepRecord(step=len(seen) + 3, time=0))
        index.refresh(0.005)
        assert len(index.runs["short"].table) == len(seen) + 3
        seen.append(index.runs["long"].indexed)
    assert seen == sorted(seen)
    assert index.runs["long"].table.steps.tolist() == list(range(1, 3001))
    short.close()


def test_without_news_nothing_is_read_or_told(root, monkeypatch):
    write(root).close()
    index = Index(root)
    index.refresh()
    version, start = index.version, now(index)
    monkeypatch.setattr(RunReader, "state", lambda *_: pytest.fail("asked"))
    for _ in range(5):
        index.refresh()
    assert (index.version, heard(index, start)) == (version, [])


def test_a_run_in_trouble_is_told_of_once(root):
    write(root).close()
    index = Index(root)
    index.refresh()
    shutil.rmtree(root / "run")
    index.refresh()
    version, start = index.version, now(index)
    for _ in range(5):
        index.refresh()
    assert (index.version, heard(index, start)) == (version, [])


def test_a_killed_process_is_seen_without_a_word_from_it(root):
    code = (
        "import sys, time; from hilbert_monitor.runs.log import RunWriter; from hilbert_monitor.runs.record import *\n"
        "w = RunWriter.open(sys.argv[1], RunInfo(name='run')); w.write(StepRecord(step=1, time=time.time()))\n"
        "print('written', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(root)], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        index = Index(root)
        index.refresh()
        assert index.runs["run"].status == "running"
        process.kill()
    time.sleep(1.1)
    index.refresh()
    assert index.runs["run"].status == "killed"


# What is no run


def problem(root, name):
    index = Index(root)
    index.refresh()
    return index.runs[name].problem if name in index.runs else None


def test_a_folder_of_other_things_is_no_run(root):
    (root / "checkpoints").mkdir(parents=True)
    (root / "checkpoints" / "a.ckpt").write_text("x")
    (root / "notes.txt").write_text("x")
    assert problem(root, "checkpoints") is None


def test_files_of_another_program_are_said_to_be(root):
    (root / "theirs").mkdir(parents=True)
    (root / "theirs" / "info.jsonl").write_text('{"something": "else"}\n')
    (root / "theirs" / "steps.jsonl").write_text("not json\n")
    assert problem(root, "theirs") == "its info.jsonl is not one of ours"


def test_binary_garbage_in_the_middle_costs_its_lines_alone(root):
    writer = write(root)
    with (writer.folder / "steps.jsonl").open("ab") as file:
        file.write(b"\x00\xff{{{\n[1,2]\n" + b"9" * 5000 + b"\n")
    writer.write(StepRecord(step=11, time=0))
    index = Index(root)
    index.refresh()
    assert len(index.runs["run"].table) == 11
    assert index.runs["run"].torn == 3
    assert index.runs["run"].problem == ""
    writer.close()


def test_a_log_that_may_not_be_read_says_so():
    with tempfile.TemporaryDirectory() as folder:  # pytest's are for the user alone who runs it
        os.chmod(folder, 0o755)
        write(folder).close()
        (Path(folder) / "run" / "steps.jsonl").chmod(0)
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)  # root may read everything
        try:
            assert problem(Path(folder), "run") == "it cannot be read: Permission denied"
        finally:
            os.seteuid(user)


@pytest.mark.few(6)
@pytest.mark.parametrize("name", ["info.jsonl", "steps.jsonl", "alerts.jsonl", "end.jsonl"])
@pytest.mark.parametrize("obstacle", ["pipe", "folder", "zero", "out", "loop"])
def test_what_is_not_a_plain_file_is_not_read(root, tmp_path, name, obstacle):
    write(root).close()
    path = root / "run" / name
    path.unlink()
    if obstacle == "pipe":
        os.mkfifo(path)
    elif obstacle == "folder":
        path.mkdir()
    elif obstacle == "zero":
        path.symlink_to("/dev/zero")
    elif obstacle == "out":
        (tmp_path / "secret").write_text('{"id": "secret", "name": "secret"}\n')
        path.symlink_to(tmp_path / "secret")
    else:
        path.symlink_to(path)
    sentence = problem(root, "run")
    assert sentence
    assert "secret" not in sentence


def test_a_run_behind_a_link_out_of_the_folder_is_not_followed(root, tmp_path):
    write(tmp_path / "elsewhere", "hidden").close()
    root.mkdir()
    (root / "link").symlink_to(tmp_path / "elsewhere" / "hidden")
    assert "leads out" in problem(root, "link")
    index = Index(root)
    index.refresh()
    assert len(index.runs["link"].table) == 0


def test_a_run_behind_a_link_within_the_folder_is_followed(root):
    write(root).close()
    (root / "latest").symlink_to("run")
    assert problem(root, "latest") == ""


def test_a_run_that_vanishes_is_shown_as_gone_and_comes_back(root, tmp_path, monkeypatch):
    write(root).close()
    index = Index(root)
    index.refresh()
    shutil.move(root / "run", tmp_path / "away")
    index.refresh()
    assert "gone" in index.runs["run"].problem
    assert len(index.runs["run"].table) == 10
    shutil.move(tmp_path / "away", root / "run")
    index.refresh()
    assert index.runs["run"].status == "finished"
    shutil.rmtree(root / "run")
    index.refresh()
    monkeypatch.setattr(indexing, "REMEMBERED", -1.0)
    start = now(index)
    index.refresh()
    assert dict(index.runs) == {}
    assert heard(index, start) == [("gone", {"id": "run"})]


@pytest.mark.parametrize("steps", [3, 50, 80])
def test_a_log_that_is_replaced_by_another_is_read_anew(root, steps):
    write(root, steps=50).close()
    index = Index(root)
    index.refresh()
    shutil.rmtree(root / "run")
    writer = write(root, steps=steps)
    writer.write(StepRecord(step=steps, time=0, train_loss=77.0))
    writer.close()
    index.refresh()
    assert index.runs["run"].table.steps.tolist() == list(range(1, steps + 1))
    assert index.runs["run"].table.last("train_loss") == 77.0
    assert index.runs["run"].problem == ""


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 9223372036854775808, "time": 1.0}',
        '{"step": 12, "time": 1.0, "tokens": 1%s}' % ("0" * 400),
        '{"step": 12, "time": "nan", "train_loss": "inf"}',
    ],
    ids=["step", "tokens", "time"],
)
def test_one_line_costs_at_most_itself(root, line):
    write(root, "a").close()
    live = write(root, "z", steps=3)
    bad = write(root, "bad", steps=3)
    index = Index(root, every=0.01)
    index.refresh()
    index.start()
    with (bad.folder / "steps.jsonl").open("a") as file:
        file.write(line + "\n")
    bad.write(StepRecord(step=13, time=0.0))
    live.write(StepRecord(step=4, time=0.0))
    wait_until(lambda: len(index.runs["z"].table) == 4 and index.runs["bad"].table.steps[-1] == 13)
    assert index.problem == ""
    index.stop()
    run = index.runs["bad"]
    assert (run.status, index.runs["a"].status) == ("running", "finished")
    assert (run.table.steps.tolist(), run.torn) in [([1, 2, 3, 13], 1), ([1, 2, 3, 12, 13], 0)]
    bad.close()
    live.close()


def test_a_run_that_breaks_any_part_is_shown_as_unreadable_and_comes_back(root, monkeypatch):
    write(root, "bad").close()
    write(root, "good").close()
    with monkeypatch.context() as patch:
        patch.setattr(follower, "summary", failing_for("bad", follower.summary))
        index = Index(root)
        index.refresh()
        assert "bad" not in index.runs or index.runs["bad"].problem
        assert index.runs["good"].status == "finished"
    index.refresh()
    assert index.runs["bad"].status == "finished"
    assert len(index.runs["bad"].table) == 10


def failing_for(name, function):
    def failing(run):
        if run.id == name and not run.problem:
            raise KeyError("anything")
        return function(run)

    return failing


def test_a_link_to_itself_or_into_a_closed_folder_hides_no_run():
    with tempfile.TemporaryDirectory() as folder:  # pytest's are for the user alone who runs it
        os.chmod(folder, 0o755)
        root, closed = Path(folder) / "runs", Path(folder) / "closed"
        for name in "amz":
            write(root, name).close()
        (root / "loop").symlink_to("loop")
        (root / "nowhere").symlink_to("not there")
        (closed / "inside").mkdir(parents=True)
        (root / "link").symlink_to(closed / "inside")
        closed.chmod(0)
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)  # root may read everything
        try:
            index = Index(root)
            index.refresh()
        finally:
            os.seteuid(user)
            closed.chmod(0o700)
        assert {id for id, run in index.runs.items() if not run.problem} == {"a", "m", "z"}
        assert {id for id, run in index.runs.items() if run.problem} <= {"link"}


# Many runs


def test_a_resumed_run_is_seen_although_only_a_few_at_rest_are_looked_at(root, monkeypatch):
    monkeypatch.setattr(indexing, "LOOKS", 2)
    for number in range(6):
        write(root, f"run{number}").close()
    index = Index(root)
    index.refresh()
    assert not index._awake
    writer = RunWriter.open(root, RunInfo(id="run3", name="run3"), first_step=10)
    writer.write(StepRecord(step=11, time=time.time()))
    for _ in range(3):
        index.refresh(rested=False)
    assert index.runs["run3"].status == "running"
    writer.write(StepRecord(step=12, time=time.time()))
    index.refresh(rested=False)  # awake again: the next record is seen at once
    assert len(index.runs["run3"].table) == 12
    writer.close()


def test_runs_at_rest_cost_one_look_each(root, monkeypatch):
    for number in range(20):
        write(root, f"run{number}").close()
        os.utime(root / f"run{number}" / "end.jsonl")
    for path in root.glob("*/end.jsonl"):
        path.write_text(f'{{"attempt":1,"time":{time.time() - 1e5}}}\n')
    os.utime(root, (1e9, 1e9))
    index = Index(root)
    index.refresh()
    calls = []
    for name in ("stat", "lstat", "open", "scandir"):
        monkeypatch.setattr(os, name, counted(getattr(os, name), calls))
    index.refresh(rested=False)
    assert len(calls) <= 21  # the root, and a file of each run


def counted(function, calls):
    return lambda *arguments, **options: calls.append(function) or function(*arguments, **options)


def test_a_killed_run_at_rest_wakes_by_its_heartbeat(root):
    folder, old = by_hand(root / "run"), time.time() - 1000
    os.utime(folder / "heartbeat", (old, old))
    index = Index(root)
    index.refresh()
    assert index.runs["run"].status == "killed"
    index.refresh(rested=False)
    assert not index._awake
    os.utime(folder / "heartbeat")
    index.refresh(rested=False)
    index._followed["run"]._asked = 0.0  # its state is determined again after seconds
    index.refresh()
    assert index.runs["run"].status == "running"


def test_many_changes_replace_the_mapping_once(root):
    for number in range(5):
        write(root, f"run{number}").close()
    index, mappings = Index(root), []

    class Watched(Index):
        def __setattr__(self, name, value):
            if name == "runs":
                mappings.append(value)
            super().__setattr__(name, value)

    index.__class__ = Watched
    index.refresh()
    assert len(index.runs) == 5
    assert len(mappings) == 1


def test_one_broken_run_does_not_hide_the_others(root, monkeypatch):
    write(root, "bad").close()
    write(root, "good").close()
    follow = RunReader.follow

    def failing(self, offset=0):
        if self.folder.name == "bad":
            raise OSError(5, "Input/output error")
        return follow(self, offset)

    monkeypatch.setattr(RunReader, "follow", failing)
    index = Index(root)
    index.refresh()
    assert index.runs["bad"].problem == "it cannot be read: Input/output error"
    assert index.runs["good"].status == "finished"


@pytest.mark.sweep
@pytest.mark.skipif(sys.platform != "linux", reason="the peak of memory is read from /proc")
def test_a_line_without_an_end_takes_no_memory(root):
    writer = write(root)
    with (writer.folder / "steps.jsonl").open("ab") as file:
        for _ in range(80):
            file.write(b"x" * (1 << 20))
        file.write(b"\n")
    writer.write(StepRecord(step=11, time=0))
    writer.close()
    code = (
        "import sys; from pathlib import Path; from hilbert_monitor.service.following.index import Index\n"
        "i = Index(Path(sys.argv[1])); i.refresh()\n"
        "peak = [line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')]\n"
        "print(len(i.runs['run'].table), i.runs['run'].torn, *peak)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(root)], capture_output=True, text=True, check=True)
    rows, torn, memory = map(int, done.stdout.split())
    assert (rows, torn) == (11, 1)
    assert memory < 160 << 10  # KiB; the line alone has 80 MiB


def test_a_thread_follows_and_ends(root):
    index = Index(root, every=0.02)
    index.start()
    writer = write(root)
    deadline = time.monotonic() + 60
    while not ("run" in index.runs and len(index.runs["run"].table) == 10) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(index.runs["run"].table) == 10
    index.stop()
    assert not index._thread.is_alive()
    writer.close()

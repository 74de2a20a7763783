"""The cache is never the truth: whatever happens to it, the table is that of the log."""

import os

import numpy as np
import pytest

from hilbert_monitor.runs.log import RunWriter
from hilbert_monitor.runs.reader import STEPS, RunReader
from hilbert_monitor.runs.record import RunInfo, StepRecord
from hilbert_monitor.runs.table import TableBuilder
from hilbert_monitor.service.following import follower
from hilbert_monitor.service.following.cache import Cache, CachedTable, cache_folder
from hilbert_monitor.service.following.index import Index


@pytest.fixture(autouse=True)
def _short_logs_too(monkeypatch):
    monkeypatch.setattr(follower, "SHORT", 0)


@pytest.fixture
def run(tmp_path):
    writer = RunWriter.open(tmp_path / "runs", RunInfo(name="run"))
    for step in range(1, 300):
        writer.write(StepRecord(step=step, time=step, train_loss=1 / step, pair=(1, step), pair_text=("a", "b")))
    writer.close()
    return writer.folder


def cached(folder):
    columns, offset = TableBuilder(), 0
    for news in RunReader(folder).follow():
        columns.append(news)
        offset = news.offset
    return CachedTable(columns.table, offset, 0)


def equal(a, b):
    return (
        np.array_equal(a.steps, b.steps)
        and a.columns.keys() == b.columns.keys()
        and all(np.array_equal(a.columns[name].view(int), b.columns[name].view(int)) for name in a.columns)
        and a.texts.items() >= b.texts.items()
    )


def test_what_was_saved_is_loaded(run, tmp_path):
    cache, saved = Cache.open(tmp_path / "cache"), cached(run)
    stored = cache.save("run", run / STEPS, saved)
    assert equal(stored, saved.table)
    assert not stored.steps.flags.writeable, "the columns that are used from then on are those on the disk"
    loaded = cache.load("run", run / STEPS)
    assert equal(loaded.table, saved.table)
    assert (loaded.offset, loaded.torn) == (saved.offset, 0)
    assert not loaded.table.steps.flags.writeable


def test_a_table_from_the_disk_grows(run, tmp_path):
    cache = Cache.open(tmp_path / "cache")
    cache.save("run", run / STEPS, cached(run))
    loaded = cache.load("run", run / STEPS)
    columns = TableBuilder(loaded.table)
    writer = RunWriter.open(tmp_path / "runs", RunInfo(id="run", name="run"), first_step=200)
    writer.write(StepRecord(step=201, time=0, train_loss=7.0))
    writer.close()
    for news in RunReader(run).follow(loaded.offset):
        columns.append(news)
    assert equal(columns.table, cached(run).table)
    assert columns.table.last("train_loss") == 7.0


@pytest.mark.parametrize("harm", ["rewritten", "shorter", "garbage", "cut", "other columns", "folder"])
def test_a_cache_that_does_not_fit_is_as_good_as_none(run, tmp_path, harm):
    cache = Cache.open(tmp_path / "cache")
    cache.save("run", run / STEPS, cached(run))
    if harm == "rewritten":
        text = (run / STEPS).read_text().replace('"train_loss":1.0', '"train_loss":2.0')
        (run / STEPS).write_text(text)
    elif harm == "shorter":
        (run / STEPS).write_bytes((run / STEPS).read_bytes()[:1000])
    elif harm == "garbage":
        (tmp_path / "cache" / "run.json").write_bytes(b"\xff{")
    elif harm == "cut":
        os.truncate(tmp_path / "cache" / "run.npy", 500)
    elif harm == "other columns":
        np.save(tmp_path / "cache" / "run.npy", np.zeros((2, 5)))
    else:
        (tmp_path / "cache" / "run.npy").unlink()
        (tmp_path / "cache" / "run.npy").mkdir()
    index = Index(tmp_path / "runs", cache=tmp_path / "cache")
    index.refresh()
    assert equal(index.runs["run"].table, cached(run).table)


def test_no_room_for_a_cache_is_one_line_in_the_log_and_no_error(run, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    index = Index(tmp_path / "runs", cache=tmp_path / "file" / "cache")
    index.refresh()
    assert len(index.runs["run"].table) == 299
    assert [message.split(" (")[0] for message in caplog.messages] == [f"no cache in '{tmp_path}/file/cache'"]


def test_the_folder_is_for_its_user_alone(tmp_path, monkeypatch):
    assert Cache.open(tmp_path / "new" / "cache") is not None
    assert (tmp_path / "new" / "cache").stat().st_mode & 0o777 == 0o700
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    assert Cache.open(tmp_path / "open") is None
    (tmp_path / "link").symlink_to(tmp_path / "new" / "cache")
    assert Cache.open(tmp_path / "link") is None
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert Cache.open(tmp_path / "new" / "cache") is None


@pytest.mark.parametrize("name", ["run.json", "run.npy", "run.npy.{pid}.part"])
def test_a_planted_link_is_not_written_through(run, tmp_path, name):
    (tmp_path / "cache").mkdir(mode=0o700)
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "cache" / name.format(pid=os.getpid())).symlink_to(tmp_path / "victim")
    Index(tmp_path / "runs", cache=tmp_path / "cache").refresh()
    assert (tmp_path / "victim").read_text() == "mine"
    assert Cache.open(tmp_path / "cache").load("run", run / STEPS) is not None


def test_a_planted_link_is_not_read_through(run, tmp_path):
    cache = Cache.open(tmp_path / "cache")
    cache.save("run", run / STEPS, cached(run))
    (tmp_path / "cache" / "run.json").rename(tmp_path / "elsewhere.json")
    (tmp_path / "cache" / "run.json").symlink_to(tmp_path / "elsewhere.json")
    assert cache.load("run", run / STEPS) is None


def test_the_default_folder_is_the_users_and_differs_by_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("HILBERT_MONITOR_CACHE", str(tmp_path / "mine"))
    assert cache_folder(tmp_path / "runs").parent == tmp_path / "mine"
    monkeypatch.delenv("HILBERT_MONITOR_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    ours = cache_folder(tmp_path / "runs")
    assert ours.parent == tmp_path / "xdg" / "hilbert-monitor"
    assert cache_folder(tmp_path / "others").parent == ours.parent
    assert cache_folder(tmp_path / "others") != ours == cache_folder(tmp_path / "a" / ".." / "runs")
    assert cache_folder(tmp_path / "runs", tmp_path / "chosen").parent == tmp_path / "chosen"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder(tmp_path / "runs").parent == tmp_path / ".cache" / "hilbert-monitor"
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert cache_folder(tmp_path / "runs") is None


def test_tables_of_runs_that_are_gone_are_removed(run, tmp_path):
    cache = Cache.open(tmp_path / "cache")
    cache.save("gone", run / STEPS, cached(run))
    index = Index(tmp_path / "runs", cache=tmp_path / "cache")
    index.refresh()
    assert {path.name for path in (tmp_path / "cache").iterdir()} == {"run.json", "run.npy"}


def test_tables_beyond_the_files_that_may_be_open_are_loaded_into_memory(run, tmp_path, monkeypatch):
    monkeypatch.setattr("hilbert_monitor.service.following.cache.MAPPED", 0.0)
    cache = Cache.open(tmp_path / "cache")
    cache.save("run", run / STEPS, cached(run))
    files = len(os.listdir("/proc/self/fd"))
    loaded = cache.load("run", run / STEPS)
    assert len(os.listdir("/proc/self/fd")) == files
    assert equal(loaded.table, cached(run).table)


def test_nothing_is_parsed_twice(run, tmp_path, monkeypatch):
    first = Index(tmp_path / "runs", cache=tmp_path / "cache")
    first.refresh()
    read = []
    follow = RunReader.follow
    monkeypatch.setattr(RunReader, "follow", lambda self, offset=0: read.append(offset) or follow(self, offset))
    second = Index(tmp_path / "runs", cache=tmp_path / "cache")
    for _ in range(3):
        second.refresh()
    assert read == []
    assert equal(second.runs["run"].table, first.runs["run"].table)

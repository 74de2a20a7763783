"""Values as JSON, lines that may be torn, files on a full disk, and the heartbeat."""

import errno
import os
import re
import threading
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hilbert_monitor.runs.files import (
    LineFile,
    Owner,
    decode_lines,
    encode_line,
    is_locked,
    read_blocks,
    to_json,
)
from hilbert_monitor.runs.reader import as_record
from hilbert_monitor.runs.record import Layer, LayerRecord, StepRecord
from tests.support.forks import forked, outcome
from tests.support.run_logs import kill, step

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
    line = encode_line(record)
    assert b"\n" not in line
    (item,) = decode_lines(line + b"\n", as_record)
    assert repr(item) == re.sub(r"\\u(?=d[89a-f])", r"\\\\u", repr(record))


class Unprintable:
    def __repr__(self):
        raise RuntimeError("no")


def test_values_that_json_has_no_form_for_become_text():
    loop = []
    loop.append(loop)
    cases = (
        (Path("/x/y"), "/x/y"),
        (Unprintable(), "<Unprintable that cannot be shown>"),
        (float("nan"), "nan"),
        (10**5000, "<int that cannot be shown>"),
        ({(1, 2): {3: None}}, {"(1, 2)": {"3": None}}),
        ("\ud800\x00\U0001f600", "\\ud800\x00\U0001f600"),
        ([True, 1, 1.5, None, ("a",), {1}], [True, 1, 1.5, None, ["a"], [1]]),
    )
    for value, expected in cases:
        assert to_json(value) == expected, value
    assert len(to_json(Path("z" * 10_000))) == 1000
    assert msgspec.json.encode(to_json(loop))
    nested = LayerRecord(step=1, time=0.0, layers={"a": Layer(kind="vector", step=float("nan"), weight=1.0)})
    assert to_json(nested.layers) == {"a": {"kind": "vector", "step": "nan", "weight": 1.0}}


def test_a_line_without_an_end_takes_no_memory(tmp_path):
    path = tmp_path / "steps.jsonl"
    with path.open("wb") as file:
        file.truncate(1 << 26)  # zeros, and no newline
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + encode_line(step(1)) + b"\n")
    blocks = [block for _, block in read_blocks(path)]
    assert sum(map(len, blocks)) < (1 << 24) + (1 << 18)
    assert decode_lines(b"".join(blocks), as_record)[-1] == step(1)


def test_a_file_that_opens_but_cannot_be_read_stays_open_no_longer(tmp_path, monkeypatch):
    def broken(*_):  # as a network file system may be
        raise OSError(errno.ESTALE, "stale file handle")

    (tmp_path / "steps.jsonl").write_bytes(b"{")
    monkeypatch.setattr(os, "pread", broken)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="stale"):
        LineFile(tmp_path / "steps.jsonl")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_fork_in_the_middle_of_a_write_leaves_a_child_that_does_not_hang(tmp_path):
    file, written = LineFile(tmp_path / "steps.jsonl"), threading.Event()

    def work():
        with pytest.raises(OSError, match="forked"):
            file.append(b"child")

    def write():
        while not written.is_set():
            file.append(b"x" * 1000)

    writing = threading.Thread(target=write)
    writing.start()
    assert [outcome(work) for _ in range(10)] == [0] * 10
    written.set()
    writing.join()
    file.close()


def test_a_child_that_is_forked_while_a_file_is_opened_does_not_hold_its_lock(tmp_path, monkeypatch):
    opened, forked_meanwhile, really_open = threading.Event(), threading.Event(), os.open

    def slow(path, flags, *args, **options):  # as a network file system may be
        fd = really_open(path, flags, *args, **options)
        if flags & os.O_APPEND and not opened.is_set():
            opened.set()
            forked_meanwhile.wait(60)
        return fd

    monkeypatch.setattr(os, "open", slow)
    files = []
    opening = threading.Thread(target=lambda: files.append(LineFile(tmp_path / "steps.jsonl")))
    opening.start()
    assert opened.wait(60)
    child = forked(lambda: time.sleep(100))
    try:
        forked_meanwhile.set()
        opening.join()
        assert files[0].lock()
        files[0].close()
        assert is_locked(tmp_path / "steps.jsonl") is False
    finally:
        kill(child)


# The heartbeat


def test_an_owner_is_gone_only_if_its_own_machine_and_container_say_so():
    here = Owner.new()
    gone = forked(lambda: None)
    os.waitpid(gone, 0)
    assert not here.is_gone
    replace = msgspec.structs.replace
    for pid in (gone, 2**30, 2**70, 0, -1):
        assert replace(here, pid=pid).is_gone
        assert not replace(here, pid=pid, processes="pid:[1]").is_gone
        assert not replace(here, pid=pid, machine="another").is_gone
    assert here.is_on_this_machine
    assert not Owner().is_on_this_machine
    assert not Owner().is_gone

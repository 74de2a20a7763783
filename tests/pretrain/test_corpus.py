"""The demo's text: made once, read back, split by file, and refused in one sentence where there is none."""

import sysconfig

import numpy as np
import pytest

from hilbert_monitor.pretrain import corpus as module
from hilbert_monitor.pretrain.corpus import corpus, standard_library


@pytest.fixture
def files(tmp_path):
    """Sixty small files, each with a word of its own."""
    paths = [tmp_path / f"{i:02}.py" for i in range(60)]
    for i, path in enumerate(paths):
        path.write_text(f"def function_{i}(argument):\n    return argument + {i}\n" * 5 + f"word{i:02}\n")
    return paths


def test_every_file_is_on_one_side_and_its_text_can_be_read_back(files, tmp_path):
    made = corpus(files, 300, cache=tmp_path / "cache")
    train, held_out = (made.tokenizer.decode(side.tolist()) for side in (made.train, made.validation))
    sides = [(f"word{i:02}" in train, f"word{i:02}" in held_out) for i in range(60)]
    assert set(sides) == {(True, False), (False, True)}
    assert 1 <= sum(out for _, out in sides) <= 15
    assert made.vocab_size <= 300
    assert max(made.train.max(), made.validation.max()) < made.vocab_size


def test_what_was_made_once_is_read_back_and_other_texts_are_made_anew(files, tmp_path, monkeypatch):
    first = corpus(files, 300, cache=tmp_path / "cache")
    monkeypatch.setattr(module, "_tokenize", lambda *_: pytest.fail("made again"))
    again = corpus(files, 300, cache=tmp_path / "cache")
    assert np.array_equal(first.train, again.train)
    assert first.tokenizer_json == again.tokenizer_json
    files[3].write_text("something else")
    with pytest.raises(pytest.fail.Exception, match="made again"):
        corpus(files, 300, cache=tmp_path / "cache")


def test_a_cache_that_cannot_be_written_is_done_without(files, tmp_path):
    (tmp_path / "cache").write_text("a file")
    assert len(corpus(files, 300, cache=tmp_path / "cache").train)


def test_the_standard_library_has_text_and_none_of_its_tests():
    found = standard_library()
    assert any(path.name == "argparse.py" for path in found)
    assert not any({"test", "tests", "site-packages"} & set(path.parts[-3:]) for path in found)
    assert 5e6 < sum(path.stat().st_size for path in found) < 5e7


def test_a_python_without_its_sources_is_told_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"no sources of its standard library .* give text files .* --text"):
        standard_library()


@pytest.mark.parametrize("size", [256, 65_537])
def test_a_vocabulary_that_does_not_fit_is_refused(files, size):
    with pytest.raises(ValueError, match=str(size).replace("65537", "65.?537")):
        corpus(files, size)

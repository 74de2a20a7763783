"""Text to shards and back: documents, tokenizers, held-out text, and bad input."""

import json
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from typer.testing import CliRunner

from hilbert_monitor.cli import app
from hilbert_monitor.pretrain import text as module
from hilbert_monitor.pretrain.data import TRAIN, VALIDATION, find_shards, write_shard
from hilbert_monitor.pretrain.text import (
    END,
    load_decoder,
    pieces,
    standard_library,
    text_files,
    tokenize,
    train_tokenizer,
)
from tests.support.draws import draws

WORDS = ["the", "cat", "sat", "on", "a", "mat,", "Ünïcode", "猫", "too;\r\n\tno", "'cat's", "1234", "mats", "\n\n"]


def text(seed, words=200):
    return " ".join(np.random.default_rng(seed).choice(WORDS, words))


def write(folder, texts):
    folder.mkdir(exist_ok=True)
    for i, content in enumerate(texts):
        (folder / f"{i:03}.txt").write_bytes(content.encode())
    return folder


def tokens_of(out, pattern):
    return np.concatenate([shard.read(0, shard.tokens) for shard in find_shards(out, pattern)])


def documents_of(out, pattern):
    """Read documents back from the shards."""
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    whole = tokenizer.decode(tokens_of(out, pattern).tolist(), skip_special_tokens=False)
    assert whole.startswith(END)
    return whole.split(END)[1:]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return write(tmp_path_factory.mktemp("text"), map(text, range(40)))


@pytest.fixture(scope="module")
def made(texts, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "shards"
    return out, tokenize([texts], out, vocab_size=300, shard_tokens=1000, validation=0.2)


def test_text_comes_back_from_its_shards(made):
    out, result = made
    assert sorted(p.name for p in out.iterdir() if p.suffix != ".bin") == ["tokenizer.json"]
    *full, last = [shard.tokens for shard in find_shards(out, TRAIN)]
    assert full == [1000] * (result.train_tokens // 1000)
    assert 0 < last < 1000
    assert result.shards == len(full) + 1 + len(find_shards(out, VALIDATION))
    train, held_out = documents_of(out, TRAIN), documents_of(out, VALIDATION)
    assert sorted(train + held_out) == sorted(map(text, range(40)))
    assert train == [x for x in map(text, range(40)) if x in train]
    assert 3 <= len(held_out) <= 15
    counts = len(tokens_of(out, TRAIN)), len(tokens_of(out, VALIDATION))
    assert counts == (result.train_tokens, result.validation_tokens)
    assert result.vocab_size == 300
    expected = train_tokenizer(train, 300)  # held-out documents do not train it
    assert json.loads(expected.to_str()) == json.loads((out / "tokenizer.json").read_text())


def test_the_same_text_makes_the_same_files_and_equal_documents_stay_together(texts, made, tmp_path):
    out, _ = made
    tokenize([texts], tmp_path / "again", vocab_size=300, shard_tokens=1000, validation=0.2)
    for path in out.iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()
    twins = write(tmp_path / "twins", [text(i % 20) for i in range(40)])
    tokenize([twins], tmp_path / "two", vocab_size=300, validation=0.3)
    assert not set(documents_of(tmp_path / "two", TRAIN)) & set(documents_of(tmp_path / "two", VALIDATION))


@pytest.mark.parametrize(("number", "fraction"), [(2, 0.001), (2, 0.999), (5, 0.0001)])
def test_if_a_side_would_be_empty_the_last_document_is_held_out(tmp_path, number, fraction):
    write(tmp_path / "t", map(text, range(number)))
    tokenize([tmp_path / "t"], tmp_path / "o", vocab_size=300, validation=fraction)
    assert documents_of(tmp_path / "o", VALIDATION) == [text(number - 1)]


@given(st.lists(st.text("ab \n", max_size=400), max_size=6))
@settings(max_examples=draws(60), deadline=None)
def test_pieces_of_documents_are_the_documents(tmp_path_factory, documents):
    path = tmp_path_factory.mktemp("pieces") / "t.txt"
    path.write_bytes(END.join(documents).encode())
    read, ticks = [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE", 64)
        for piece in pieces(path, ticks.append):
            assert len(piece.text) <= 128 or not piece.text.strip() or not piece.text[:-64].strip()
            if piece.starts:
                read.append("")
            read[-1] += piece.text
    assert read == [x for x in documents if x.strip()]
    assert sum(ticks) == path.stat().st_size


def test_a_long_document_in_pieces_has_the_tokens_of_the_whole(tmp_path, monkeypatch):
    lines = "\n".join(text(i, 10).replace("\r\n\t", "").replace("\n", "") + "." for i in range(60)).replace("\n ", "\n")
    write(tmp_path / "t", [lines])
    tokenize([tmp_path / "t"], tmp_path / "whole", vocab_size=400, validation=0)
    monkeypatch.setattr(module, "PIECE", 256)
    assert len(list(pieces(tmp_path / "t" / "000.txt"))) > 5
    tokenize([tmp_path / "t"], tmp_path / "pieces", vocab_size=400, validation=0)
    assert tokens_of(tmp_path / "pieces", TRAIN).tolist() == tokens_of(tmp_path / "whole", TRAIN).tolist()
    assert not list((tmp_path / "pieces").glob(VALIDATION))
    assert tokens_of(tmp_path / "whole", TRAIN).tolist().count(0) == 1


def test_files_of_folders_come_once_and_in_order(tmp_path):
    for name in ("b.txt", "a.md", "c.py", "d.bin", "sub/e.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    found = text_files([tmp_path / "c.py", tmp_path, tmp_path / "d.bin"])
    assert [path.name for path in found] == ["c.py", "a.md", "b.txt", "e.txt", "d.bin"]


def test_the_standard_library_is_a_text_without_its_tests():
    found = standard_library()
    assert any(path.name == "argparse.py" for path in found)
    assert found == sorted(found)
    assert not any({"test", "tests", "site-packages"} & set(path.parts[-3:]) for path in found)


# Tokenizers


def saved(tmp_path, change=lambda vocabulary: None):
    """Write a tokenizer as JSON, with a change."""
    vocabulary = json.loads(train_tokenizer(map(text, range(5)), 300).to_str())
    change(vocabulary)
    (tmp_path / "mine.json").write_text(json.dumps(vocabulary))
    return tmp_path / "mine.json"


def far_end(vocabulary):
    vocabulary["model"]["vocab"][END] = vocabulary["added_tokens"][0]["id"] = 40_000


def test_a_given_tokenizer_encodes_whole_documents_without_its_special_tokens(texts, tmp_path):
    path = saved(tmp_path, far_end)
    plain, awkward = Tokenizer.from_file(str(path)), Tokenizer.from_file(str(path))
    awkward.enable_truncation(8)  # as downloaded files have it
    awkward.enable_padding(length=5000)
    awkward.post_processor = TemplateProcessing(single=f"{END} $A {END}", special_tokens=[(END, 40_000)])
    awkward.save(str(path))
    tokenize([texts], tmp_path / "o", tokenizer=path, validation=0)
    expected = [[40_000, *plain.encode(text(i)).ids] for i in range(40)]
    assert tokens_of(tmp_path / "o", TRAIN).tolist() == list(chain(*expected))
    assert load_decoder(tmp_path / "o")(40_000) == END


def test_a_decoder_prints_every_token(made):
    out, result = made
    decode = load_decoder(str(out))
    assert decode(0) == END
    assert decode(Tokenizer.from_file(str(out / "tokenizer.json")).token_to_id("Ġcat")) == " cat"
    assert all(isinstance(decode(i), str) and decode(i) for i in range(result.vocab_size))
    assert decode(result.vocab_size) == "<300>"


# The command


def command(*arguments):
    result = CliRunner().invoke(app, ["tokenize", *map(str, arguments)], env={"COLUMNS": "400"})
    assert "Traceback" not in result.output
    return result.exit_code, " ".join(result.output.replace("│", " ").split())


def without_end(vocabulary):
    del vocabulary["model"]["vocab"][END]
    vocabulary["added_tokens"] = []


BAD_INPUT = [
    (("--vocab-size", 65_537), "vocab_size must be 257 to 65,536, bytes and an end of text among them, got 65537"),
    (("--vocab-size", 256), "got 256"),
    (("--validation", 1), "must be at least 0 and below 1, got 1.0"),
    (("--validation", "nan"), "must be at least 0 and below 1, got nan"),
    (("--shard-tokens", 1), "at least two tokens"),
    (("--vocab-size", 300, "--tokenizer", "x.json"), "a tokenizer that is given is not trained: drop one of the two"),
    (("--tokenizer", "nowhere.json"), "there is no nowhere.json"),
    (("nowhere.txt",), "nowhere.txt does not exist: give text files"),
    (dict.clear, "mine.json is not a tokenizer"),
    (without_end, "mine.json has no token <|endoftext|>, which separates documents"),
    (lambda v: v["model"]["vocab"].update({"too far": 65_536}), "mine.json has a vocabulary of 65,537, but tokens of"),
    ([], "has no .txt, .py, .md file"),
    (["", " \n"], "found no text in 2 files"),
    (["alone"], "there is one document"),
]


@pytest.mark.parametrize(("case", "message"), BAD_INPUT, ids=[message for _, message in BAD_INPUT])
def test_bad_input_is_refused_in_one_sentence_before_a_folder_is_made(texts, tmp_path, case, message):
    if isinstance(case, list):
        arguments = (write(tmp_path / "t", case),)
    else:
        arguments = texts, *(("--tokenizer", saved(tmp_path, case)) if callable(case) else case)
    code, output = command(*arguments, "--out", tmp_path / "o")
    assert code == 2
    assert message in output
    assert not (tmp_path / "o").exists()


def test_shards_of_an_earlier_call_are_replaced_only_by_force_and_others_never(texts, tmp_path):
    out = tmp_path / "o"
    code, output = command(texts, "--out", out, "--vocab-size", 300, "--shard-tokens", 1000)
    assert code == 0
    assert f"{len(tokens_of(out, TRAIN)):,} tokens to train on" in output
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    _, output = command(texts, "--out", out, "--vocab-size", 280)
    assert f"has {len(before) - 1} shards already: choose another folder, or replace them (--force)" in output
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert command(texts, "--out", out, "--vocab-size", 280, "--force")[0] == 0
    names = ["text_train_000000.bin", "text_val_000000.bin", "tokenizer.json"]
    assert sorted(path.name for path in out.iterdir()) == names
    write_shard(out / "fineweb_val_000000.bin", [1, 2])
    _, output = command(texts, "--out", out, "--force")
    assert "has shards that this command did not write, such as fineweb_val_000000.bin" in output


def test_a_failure_half_way_leaves_the_old_files(texts, tmp_path, monkeypatch):
    out = tmp_path / "o"
    tokenize([texts], out, vocab_size=300)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    write_six = iter([*[module.write_shard] * 5, None])  # calling None fails
    monkeypatch.setattr(module, "write_shard", lambda *arguments: next(write_six)(*arguments))
    with pytest.raises(TypeError):
        tokenize([texts], out, vocab_size=300, shard_tokens=100, force=True)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before

"""Text to shards and back: documents, tokenizers, what is held out, and what is refused."""

import json
import os
import signal
import subprocess
import sys
import time
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from typer.testing import CliRunner

from hilbert_monitor.cli import app
from hilbert_monitor.pretrain import tokenization
from hilbert_monitor.pretrain.data import TrainingLoader
from hilbert_monitor.pretrain.shards import TRAIN, VALIDATION, find_shards, write_shard
from hilbert_monitor.pretrain.tokenization import END, load_decoder, load_tokenizer, pieces, tokenize, train_tokenizer
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
    return np.concatenate([shard.read(0, shard.tokens, 2**16) for shard in find_shards(out, pattern)])


def documents_of(out, pattern):
    """Documents, read back from the shards."""
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


def test_text_comes_back_from_its_shards(texts, made):
    out, result = made
    train, held = documents_of(out, TRAIN), documents_of(out, VALIDATION)
    assert sorted(train + held) == sorted(text(i) for i in range(40))
    assert train == [x for x in map(text, range(40)) if x in train]
    assert 3 <= len(held) <= 15
    assert (len(tokens_of(out, TRAIN)), len(tokens_of(out, VALIDATION))) == (
        result.train_tokens,
        result.validation_tokens,
    )
    assert result.vocab_size == 300


def test_shards_are_full_but_for_the_last_and_the_loader_reads_them(made):
    out, result = made
    sizes = [shard.tokens for shard in find_shards(out, TRAIN)]
    assert sizes[:-1] == [1000] * (result.train_tokens // 1000)
    assert 0 < sizes[-1] < 1000
    assert result.shards == len(sizes) + len(find_shards(out, VALIDATION))
    assert sorted(p.name for p in out.iterdir() if p.suffix != ".bin") == ["tokenizer.json"]
    loader = TrainingLoader(out, context=16, global_batch=4, micro_batch=2, vocab_size=result.vocab_size)
    assert next(iter(loader))[0].shape == (2, 16)


def test_the_same_text_makes_the_same_files_and_twins_stay_together(texts, made, tmp_path):
    out, _ = made
    tokenize([texts], tmp_path / "again", vocab_size=300, shard_tokens=1000, validation=0.2)
    for path in out.iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()
    twins = write(tmp_path / "twins", [text(i % 20) for i in range(40)])
    tokenize([twins], tmp_path / "two", vocab_size=300, validation=0.3)
    assert not set(documents_of(tmp_path / "two", TRAIN)) & set(documents_of(tmp_path / "two", VALIDATION))


def test_held_out_documents_do_not_train_the_tokenizer(made):
    out, _ = made
    expected = train_tokenizer(documents_of(out, TRAIN), 300)
    assert json.loads(expected.to_str()) == json.loads((out / "tokenizer.json").read_text())


@pytest.mark.parametrize(("number", "fraction"), [(2, 0.001), (2, 0.999), (5, 0.0001)])
def test_of_few_documents_the_last_is_held_out(tmp_path, number, fraction):
    write(tmp_path / "t", map(text, range(number)))
    tokenize([tmp_path / "t"], tmp_path / "o", vocab_size=300, validation=fraction)
    assert documents_of(tmp_path / "o", VALIDATION) == [text(number - 1)]


def test_nothing_is_held_out_if_so_asked(tmp_path):
    write(tmp_path / "t", [text(0)])
    assert tokenize([tmp_path / "t"], tmp_path / "o", vocab_size=300, validation=0).validation_tokens == 0
    assert not list((tmp_path / "o").glob(VALIDATION))


def test_a_file_is_as_many_documents_as_it_has_ends_of_text(tmp_path):
    documents = [text(i) for i in range(10)]
    write(tmp_path / "t", [END.join(["", *documents[:6], " \n"]), END.join(documents[6:])])
    tokenize([tmp_path / "t"], tmp_path / "o", vocab_size=300, validation=0)
    assert documents_of(tmp_path / "o", TRAIN) == documents


@given(st.lists(st.text("ab \n", max_size=400), max_size=6))
@settings(max_examples=draws(60), deadline=None)
def test_pieces_of_documents_are_the_documents(tmp_path_factory, documents):
    path = tmp_path_factory.mktemp("pieces") / "t.txt"
    path.write_bytes(END.join(documents).encode())
    read = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenization, "PIECE", 64)
        for piece in pieces(path):
            assert len(piece.text) <= 128 or not piece.text.strip() or not piece.text[:-64].strip()
            if piece.starts:
                read.append("")
            read[-1] += piece.text
    assert read == [x for x in documents if x.strip()]


def test_a_long_document_in_pieces_has_the_tokens_of_the_whole(tmp_path, monkeypatch):
    lines = "\n".join(text(i, 10).replace("\r\n\t", "").replace("\n", "") + "." for i in range(60)).replace("\n ", "\n")
    write(tmp_path / "t", [lines])
    tokenize([tmp_path / "t"], tmp_path / "whole", vocab_size=400, validation=0)
    monkeypatch.setattr(tokenization, "PIECE", 256)
    assert len(list(pieces(tmp_path / "t" / "000.txt"))) > 5
    tokenize([tmp_path / "t"], tmp_path / "pieces", vocab_size=400, validation=0)
    assert tokens_of(tmp_path / "pieces", TRAIN).tolist() == tokens_of(tmp_path / "whole", TRAIN).tolist()
    assert tokens_of(tmp_path / "whole", TRAIN).tolist().count(0) == 1


def test_long_documents_in_one_file_stay_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenization, "PIECE", 64)
    documents = [text(i) for i in range(4)]
    write(tmp_path / "t", [END.join(documents)])
    read = list(pieces(tmp_path / "t" / "000.txt"))
    assert len(read) > 20
    assert sum(piece.starts for piece in read) == 4
    tokenize([tmp_path / "t"], tmp_path / "o", vocab_size=300, validation=0)
    assert documents_of(tmp_path / "o", TRAIN) == documents


def test_the_part_held_out_is_about_that_part(tmp_path):
    write(tmp_path / "t", [END.join(f"number {i}" for i in range(400))])
    tokenize([tmp_path / "t"], tmp_path / "o", vocab_size=300, validation=0.5)
    assert 160 <= len(documents_of(tmp_path / "o", VALIDATION)) <= 240


def test_bars_count_the_bytes_of_the_files(texts, tmp_path):
    big, read = tmp_path / "big.txt", []
    big.write_text("a line\n" * 400_000)  # read in three parts
    for path in [*texts.iterdir(), big]:
        list(pieces(path, read.append))
    assert sum(read) == sum(path.stat().st_size for path in [*texts.iterdir(), big])


def test_files_of_folders_are_found_once_and_in_order(tmp_path):
    for name in ("b.txt", "a.md", "c.py", "d.bin", "sub/e.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    found = tokenization.text_files([tmp_path / "c.py", tmp_path, tmp_path / "d.bin"])
    assert [path.name for path in found] == ["c.py", "a.md", "b.txt", "e.txt", "d.bin"]


# tokenizers


def saved(tmp_path, change=lambda tokenizer: None, vocab_size=300):
    tokenizer = train_tokenizer(map(text, range(5)), vocab_size)
    change(tokenizer)
    tokenizer.save(str(tmp_path / "mine.json"))
    return tmp_path / "mine.json"


def awkward(tokenizer):
    """As files come: with truncation, padding and a token that is put before every text."""
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=5000)
    tokenizer.post_processor = TemplateProcessing(single=f"{END} $A {END}", special_tokens=[(END, 0)])


@pytest.mark.parametrize("change", [lambda _: None, awkward])
def test_a_given_tokenizer_is_used_as_it_is(texts, tmp_path, change):
    path = saved(tmp_path, change)
    tokenize([texts], tmp_path / "o", tokenizer=path, validation=0)
    plain = train_tokenizer(map(text, range(5)), 300)
    expected = [[plain.token_to_id(END), *plain.encode(text(i)).ids] for i in range(40)]
    assert tokens_of(tmp_path / "o", TRAIN).tolist() == list(chain(*expected))


def test_the_end_of_text_may_have_any_number(texts, tmp_path):
    vocabulary = json.loads(saved(tmp_path).read_text())
    ids = vocabulary["model"]["vocab"]
    ids[END] = vocabulary["added_tokens"][0]["id"] = 40_000
    (tmp_path / "mine.json").write_text(json.dumps(vocabulary))
    result = tokenize([texts], tmp_path / "o", tokenizer=tmp_path / "mine.json", validation=0)
    assert tokens_of(tmp_path / "o", TRAIN)[0] == 40_000
    assert result.vocab_size == 40_001
    assert load_decoder(tmp_path / "o")(40_000) == END


def test_a_decoder_prints_every_token(made):
    out, result = made
    decode = load_decoder(str(out))
    assert decode(0) == END
    plain = Tokenizer.from_file(str(out / "tokenizer.json"))
    assert decode(plain.token_to_id("Ġcat")) == " cat"
    assert all(isinstance(decode(i), str) and decode(i) for i in range(result.vocab_size))
    assert decode(result.vocab_size) == "<300>"


def without_end(tokenizer_json):
    vocabulary = json.loads(tokenizer_json)
    del vocabulary["model"]["vocab"][END]
    vocabulary["added_tokens"] = []
    return json.dumps(vocabulary)


def too_large(tokenizer_json):
    vocabulary = json.loads(tokenizer_json)
    vocabulary["model"]["vocab"]["too far"] = 65_536
    return json.dumps(vocabulary)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without_end, "mine.json has no token <|endoftext|>, which separates documents"),
        (
            too_large,
            "mine.json has a vocabulary of 65,537, but tokens of shards are uint16: give one of at most",
        ),
        (lambda _: "{}", "mine.json is not a tokenizer"),
    ],
)
def test_a_tokenizer_that_cannot_make_shards_is_refused(tmp_path, change, said):
    path = saved(tmp_path)
    path.write_text(change(path.read_text()))
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        load_tokenizer(path)
    assert said in str(caught.value)


def test_a_tokenizer_that_is_missing_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no tokenizer\.json in"):
        load_decoder(tmp_path)


# the command


def command(*arguments):
    result = CliRunner().invoke(app, ["tokenize", *map(str, arguments)], env={"COLUMNS": "400"})
    return result.exit_code, " ".join(result.output.replace("│", " ").split())


def test_the_command_makes_shards_and_says_how_many_tokens(texts, tmp_path):
    code, said = command(texts, "--out", tmp_path / "o", "--vocab-size", 300, "--shard-tokens", 5000)
    assert code == 0
    number = len(tokens_of(tmp_path / "o", TRAIN))
    assert f"{number:,} tokens to train on" in said
    assert "a vocabulary of 300" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--vocab-size", 65_537], "vocab_size must be 257 to 65,536, bytes and an end of text among them, got 65537"),
        (["--vocab-size", 0], "got 0"),
        (["--validation", 1], "must be at least 0 and below 1, got 1.0"),
        (["--validation", "nan"], "must be at least 0 and below 1, got nan"),
        (["--shard-tokens", 1], "at least two tokens"),
        (
            ["--vocab-size", 300, "--tokenizer", "x.json"],
            "a tokenizer that is given is not trained: drop one of the two",
        ),
        (["--tokenizer", "nowhere.json"], "there is no nowhere.json"),
        (["nowhere.txt"], "nowhere.txt does not exist: give text files"),
    ],
)
def test_the_command_refuses_in_one_sentence_and_makes_no_folder(texts, tmp_path, arguments, said):
    code, output = command(texts, "--out", tmp_path / "o", *arguments)
    assert code == 2
    assert said in output
    assert "Traceback" not in output
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ([], "has no .txt, .py, .md file"),
        (["", " \n"], "found no text in 2 files"),
        (["alone"], "there is one document"),
    ],
)
def test_too_little_text_is_refused(tmp_path, texts, said):
    write(tmp_path / "t", texts)
    code, output = command(tmp_path / "t", "--out", tmp_path / "o")
    assert code == 2
    assert said in output


def test_shards_that_are_there_are_replaced_only_if_so_asked(texts, tmp_path):
    out = tmp_path / "o"
    assert command(texts, "--out", out, "--vocab-size", 300, "--shard-tokens", 1000)[0] == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    code, said = command(texts, "--out", out, "--vocab-size", 280)
    assert code == 2
    assert f"has {len(before) - 1} shards already: choose another folder, or replace them (--force)" in said
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert command(texts, "--out", out, "--vocab-size", 280, "--force")[0] == 0
    assert sorted(path.name for path in out.iterdir()) == [
        "text_train_000000.bin",
        "text_val_000000.bin",
        "tokenizer.json",
    ]
    write_shard(out / "fineweb_val_000000.bin", [1, 2])
    code, said = command(texts, "--out", out, "--force")
    assert code == 2
    assert "has shards that this command did not write, such as fineweb_val_000000.bin" in said


def test_a_failure_half_way_leaves_what_was_there(texts, made, tmp_path, monkeypatch):
    out = tmp_path / "o"
    tokenize([texts], out, vocab_size=300)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    monkeypatch.setattr(tokenization, "PIECE", 2000)
    real, calls = tokenization.token_ids, []

    def fails(*arguments):
        calls.append(1)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(tokenization, "token_ids", fails)
    with pytest.raises(KeyboardInterrupt):
        tokenize([texts], out, vocab_size=300, shard_tokens=100, force=True)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


@pytest.mark.sweep
def test_a_command_that_is_killed_leaves_no_shard_that_a_loader_would_find(tmp_path):
    write(tmp_path / "t", [text(i, 20_000) for i in range(30)])
    arguments = ["--out", str(tmp_path / "o"), "--vocab-size", "300", "--shard-tokens", "5000"]
    code = "from hilbert_monitor.cli import app; app()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "tokenize", str(tmp_path / "t"), *arguments], stdout=subprocess.DEVNULL
    )
    until = time.monotonic() + 300
    while not list(tmp_path.glob("o/.unfinished-*/*.bin")) and time.monotonic() < until and process.poll() is None:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    with pytest.raises(FileNotFoundError, match="no file in"):
        find_shards(tmp_path / "o", TRAIN)
    assert not (tmp_path / "o" / "tokenizer.json").exists()

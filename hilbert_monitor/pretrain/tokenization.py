"""Turns text into token shards, with a byte-level BPE tokenizer trained on it or a given one, and tokens into text."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .shards import LIMIT, TRAIN, VALIDATION, ShardWriter, write_whole

if TYPE_CHECKING:
    from rich.console import Console
    from tokenizers import Tokenizer

END = "<|endoftext|>"
"""Token before every document. In a text file it separates documents."""
TOKENIZER = "tokenizer.json"
VOCAB_SIZE = 8192
"""Tokens of a tokenizer that is trained, by default."""
KINDS = (".txt", ".py", ".md")
"""Suffixes of the files in a folder that are read as text."""
PIECE = 2**20
"""Characters read at a time; a longer document is tokenized in pieces."""
_NAME = "text"
Tick = Callable[[int], None]
"""Called with the number of bytes that were read."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A document, or the next part of a long one."""

    text: str
    starts: bool
    """Whether this is the start of a document."""


@dataclass(frozen=True, slots=True)
class Tokenized:
    """Numbers of tokens and of shards that were written, and the size of the vocabulary."""

    train_tokens: int
    validation_tokens: int
    shards: int
    vocab_size: int


def tokenize(
    paths: Sequence[Path],
    out: Path,
    *,
    vocab_size: int = VOCAB_SIZE,
    tokenizer: Path | None = None,
    shard_tokens: int = 100_000_000,
    validation: float = 0.05,
    force: bool = False,
    console: Console | None = None,
) -> Tokenized:
    """Write shards of text, and the tokenizer beside them. All files appear at the end, or none.

    Neither the text nor its tokens are in memory as a whole. Files are read once to tokenize them, and once before that
    if a tokenizer is trained.

    Args:
        paths: text files, or folders of them.
        out: folder for the shards.
        vocab_size: tokens of a byte-level BPE that is trained on the training documents.
        tokenizer: a tokenizer.json to use instead.
        shard_tokens: tokens in a shard.
        validation: fraction of the documents to hold out, chosen by a hash of their text.
        force: whether to replace shards of an earlier call.
        console: where to draw a progress bar.
    """
    _check(vocab_size, shard_tokens, validation)
    _check_out(out, force)
    files = text_files(paths)
    held_out = _chooser(files, validation)
    encoder = None if tokenizer is None else load_tokenizer(tokenizer)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".unfinished-") as folder, _Bars(files, console) as bars:
        if encoder is None:
            tick = bars.add("training a tokenizer")
            text = (piece.text for piece, is_held_out in _split(files, held_out, tick) if not is_held_out)
            encoder = train_tokenizer(text, vocab_size)
        summary = _write(_split(files, held_out, bars.add("tokenizing")), encoder, Path(folder), shard_tokens)
        write_whole(Path(folder) / TOKENIZER, encoder.to_str().encode())
        _move(Path(folder), out)
    return summary


def text_files(paths: Iterable[Path]) -> list[Path]:
    """Return the given files, and the text files below the given folders in the order of their names; each once."""
    files: dict[Path, None] = {}
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist: give text files, or folders of them")
        inside = sorted(p for p in path.rglob("*") if p.suffix in KINDS and p.is_file()) if path.is_dir() else [path]
        if not inside:
            raise FileNotFoundError(f"{path} has no {', '.join(KINDS)} file: give text files, or folders of them")
        files.update((p.resolve(), None) for p in inside)
    return list(files)


def pieces(path: Path, tick: Tick = lambda _: None) -> Iterator[Piece]:
    """Yield the documents of a file, which `END` separates, without empty ones.

    A document longer than `PIECE` characters comes in pieces. They end at the end of a line, where a token ends too.
    """
    rest, starts, read = "", True, 0
    with path.open("rb") as raw, TextIOWrapper(raw, encoding="utf-8", errors="replace", newline="") as file:
        while chunk := file.read(PIECE):
            tick(raw.tell() - read)
            read = raw.tell()
            *documents, rest = (rest + chunk).split(END)
            for text in documents:
                if text.strip() or not starts:
                    yield Piece(text, starts)
                starts = True
            if len(rest) > PIECE and rest.strip():
                at = _cut(rest)
                yield Piece(rest[:at], starts)
                rest, starts = rest[at:], False
    if rest.strip() or not starts:
        yield Piece(rest, starts)


def _cut(text: str) -> int:
    """Return where to cut a long text: after the last line that is not empty and is not followed by a blank.

    If there is none, the cut is before what may be the beginning of an `END`.
    """
    ends = [match.end() for match in re.finditer(r"\S\n(?=\S)", text)]
    return ends[-1] if ends else len(text) - len(END)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE like GPT-2's. It has fewer tokens than asked for if the text has too few pairs."""
    from tokenizers import ByteLevelBPETokenizer, Tokenizer

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        iter(texts), vocab_size=vocab_size, min_frequency=2, special_tokens=[END], show_progress=False
    )
    return Tokenizer.from_str(bpe.to_str())


def load_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer.json; refuse one that has no `END`, or ids that do not fit in uint16."""
    tokenizer = _read(path)
    if tokenizer.token_to_id(END) is None:
        raise ValueError(f"{path.name} has no token {END}, which separates documents: add it as a special token")
    if (size := vocabulary(tokenizer)) > LIMIT:
        raise ValueError(
            f"{path.name} has a vocabulary of {size:,}, but tokens of shards are uint16: give one of at most {LIMIT:,}"
        )
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def vocabulary(tokenizer: Tokenizer) -> int:
    """Return the size of the vocabulary: one more than the largest id."""
    return 1 + max(tokenizer.get_vocab().values(), default=-1)


def token_ids(tokenizer: Tokenizer, parts: Sequence[Piece]) -> Iterator[NDArray[np.uint16]]:
    """Yield the tokens of each piece, with an `END` before the start of a document."""
    end = tokenizer.token_to_id(END)
    encodings = tokenizer.encode_batch([piece.text for piece in parts], add_special_tokens=False)
    for piece, encoding in zip(parts, encodings, strict=True):
        yield np.array([end, *encoding.ids] if piece.starts else encoding.ids, dtype=np.uint16)


def load_decoder(folder: Path | str) -> Callable[[int], str]:
    """Return a function from a token of a folder's shards to its text, or to ``<number>`` if there is no such token."""
    tokenizer = _read(Path(folder) / TOKENIZER)

    def decode(token: int) -> str:
        if tokenizer.id_to_token(token) is None:
            return f"<{token}>"
        text: str = tokenizer.decode([token], skip_special_tokens=False)
        return text

    return decode


def _read(path: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    if not path.is_file():
        raise FileNotFoundError(f"there is no {path.name} in {path.parent}: give the tokenizer that made the tokens")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises plain Exception
        raise ValueError(f"{path.name} is not a tokenizer of Hugging Face's tokenizers ({error})") from None


def _check(vocab_size: int, shard_tokens: int, validation: float) -> None:
    check_vocabulary(vocab_size)
    if shard_tokens < 2:
        raise ValueError(f"a shard has at least two tokens, a token and its next, got {shard_tokens}")
    if not 0 <= validation < 1:
        raise ValueError(f"the fraction of the documents to hold out must be at least 0 and below 1, got {validation}")


def check_vocabulary(size: int) -> None:
    """Refuse a vocabulary that has no room for all bytes, or does not fit in uint16."""
    if not 257 <= size <= LIMIT:
        raise ValueError(f"vocab_size must be 257 to {LIMIT:,}, bytes and an end of text among them, got {size}")


def _check_out(out: Path, force: bool) -> None:
    shards = [path for pattern in (TRAIN, VALIDATION) for path in out.glob(pattern)]
    if strange := [path for path in shards if not path.name.startswith(f"{_NAME}_")]:
        raise FileExistsError(
            f"{out} has shards that this command did not write, such as {strange[0].name}: choose another folder"
        )
    if shards and not force:
        raise FileExistsError(
            f"{out} has {len(shards)} shards already: choose another folder, or replace them (--force)"
        )


def _chooser(files: Sequence[Path], fraction: float) -> Callable[[int, str], bool]:
    """Return a function from a document's number and beginning to whether it is held out: if it has a small hash.

    So equal documents go to one side. If one side would get none, the last document is held out instead. Files are read
    only until each side has a document.
    """

    def small(_: int, text: str) -> bool:
        digest = hashlib.sha256(text.encode("utf-8", "replace")).digest()
        return int.from_bytes(digest[:8], "big") < fraction * 2**64

    documents, sides = 0, set()
    for documents, piece in enumerate(_documents(files), 1):  # noqa: B007
        sides.add(small(0, piece.text))
        if not fraction or len(sides) == 2:
            return small
    if not documents:
        raise ValueError(f"found no text in {len(files)} files: give files that have some")
    if documents == 1:
        raise ValueError(
            f"there is one document alone, and none to hold out: give more files, put {END} between documents, or hold"
            " out none (--validation 0)"
        )
    return lambda number, _: number == documents - 1


def _documents(files: Iterable[Path]) -> Iterator[Piece]:
    return (piece for path in files for piece in pieces(path) if piece.starts)


def _split(files: Iterable[Path], held_out: Callable[[int, str], bool], tick: Tick) -> Iterator[tuple[Piece, bool]]:
    """Yield all pieces, and for each whether its document is held out."""
    number, is_held_out = -1, False
    for path in files:
        for piece in pieces(path, tick):
            if piece.starts:
                number += 1
                is_held_out = held_out(number, piece.text)
            yield piece, is_held_out


def _write(parts: Iterable[tuple[Piece, bool]], tokenizer: Tokenizer, folder: Path, shard_tokens: int) -> Tokenized:
    with (
        ShardWriter(folder, f"{_NAME}_train", shard_tokens) as train,
        ShardWriter(folder, f"{_NAME}_val", shard_tokens) as validation,
    ):
        for batch in _batches(parts):
            tokens = token_ids(tokenizer, [piece for piece, _ in batch])
            for (_, is_held_out), ids in zip(batch, tokens, strict=True):
                (validation if is_held_out else train).add(ids)
    shards = len(train.shards) + len(validation.shards)
    return Tokenized(train.tokens, validation.tokens, shards, vocabulary(tokenizer))


def _batches(parts: Iterable[tuple[Piece, bool]]) -> Iterator[list[tuple[Piece, bool]]]:
    """Yield lists of pieces with about `PIECE` characters together; a list is tokenized in parallel."""
    batch: list[tuple[Piece, bool]] = []
    size = 0
    for piece, is_held_out in parts:
        batch.append((piece, is_held_out))
        size += len(piece.text)
        if size >= PIECE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _move(folder: Path, out: Path) -> None:
    """Replace the shards of a folder by those of another."""
    for pattern in (TRAIN, VALIDATION):
        for old in out.glob(pattern):
            old.unlink()
    for path in sorted(folder.iterdir()):
        os.replace(path, out / path.name)


class _Bars:
    """Progress bars over the bytes of files, one for each time that they are read; none without a console."""

    def __init__(self, files: Sequence[Path], console: Console | None) -> None:
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn()
        times = TimeElapsedColumn(), TimeRemainingColumn()
        self._progress = Progress(*columns, *times, console=console, disable=console is None, transient=True)
        self._total = sum(path.stat().st_size for path in files)

    def add(self, label: str) -> Tick:
        """Add a bar; return the function that advances it by a number of bytes."""
        task = self._progress.add_task(label, total=self._total)
        return lambda read: self._progress.advance(task, read)

    def __enter__(self) -> _Bars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

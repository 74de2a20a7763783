"""Text to shards: documents, a byte-level BPE trained on them or a tokenizer that is given, and tokens back to text."""

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
"""Stands before every document; in a text file it separates documents."""
TOKENIZER = "tokenizer.json"
VOCAB_SIZE = 8192
"""Tokens of a tokenizer that is trained, by default."""
KINDS = (".txt", ".py", ".md")
"""Files of a folder that are text."""
PIECE = 2**20
"""Characters read at a time; a longer document is tokenized in pieces."""
_NAME = "text"
Tick = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Piece:
    """Text of a document, all of it or the next part of a long one."""

    text: str
    starts: bool
    """Whether a document begins with it."""


@dataclass(frozen=True, slots=True)
class Tokenized:
    """What was made: numbers of tokens and of shards, and the size of the vocabulary."""

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
    """Make shards of text, and keep the tokenizer beside them. All appear at the end, or none.

    Neither the text nor its tokens are held in memory as a whole: files are read once to be tokenized, and once before
    if a tokenizer is trained.

    Args:
        paths: text files, or folders of them.
        out: folder for the shards.
        vocab_size: tokens of a byte-level BPE that is trained on the documents not held out.
        tokenizer: a tokenizer.json to use instead.
        shard_tokens: tokens to a shard.
        validation: part of the documents that is held out, by a hash of their text.
        force: whether shards that were made here before are replaced.
        console: where a progress bar is drawn.
    """
    _check(vocab_size, shard_tokens, validation)
    _check_out(out, force)
    files = text_files(paths)
    held_out = _chooser(files, validation)
    given = None if tokenizer is None else load_tokenizer(tokenizer)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".unfinished-") as folder, _Bars(files, console) as bars:
        if given is None:
            tick = bars.add("training a tokenizer")
            text = (piece.text for piece, aside in _sided(files, held_out, tick) if not aside)
            given = train_tokenizer(text, vocab_size)
        made = _write(_sided(files, held_out, bars.add("tokenizing")), given, Path(folder), shard_tokens)
        write_whole(Path(folder) / TOKENIZER, given.to_str().encode())
        _move(Path(folder), out)
    return made


def text_files(paths: Iterable[Path]) -> list[Path]:
    """Return files as they are and the text files below folders in the order of their names, each once."""
    found: dict[Path, None] = {}
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist: give text files, or folders of them")
        inside = sorted(p for p in path.rglob("*") if p.suffix in KINDS and p.is_file()) if path.is_dir() else [path]
        if not inside:
            raise FileNotFoundError(f"{path} has no {', '.join(KINDS)} file: give text files, or folders of them")
        found.update((p.resolve(), None) for p in inside)
    return list(found)


def pieces(path: Path, tick: Tick = lambda _: None) -> Iterator[Piece]:
    """Read the documents of a file, which `END` separates; those without text are left out.

    A document longer than `PIECE` characters comes in pieces, cut at the end of a line, where byte-level BPE cuts too.
    """
    rest, starts, read = "", True, 0
    with path.open("rb") as raw, TextIOWrapper(raw, encoding="utf-8", errors="replace", newline="") as file:
        while chunk := file.read(PIECE):
            tick(raw.tell() - read)
            read = raw.tell()
            *ended, rest = (rest + chunk).split(END)
            for text in ended:
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
    """Where to cut a long text: after its last line that is neither empty nor followed by blanks.

    Without one, before what may be the beginning of an `END`.
    """
    ends = [found.end() for found in re.finditer(r"\S\n(?=\S)", text)]
    return ends[-1] if ends else len(text) - len(END)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE as GPT-2's; it has fewer tokens than asked for if the text has too few pairs."""
    from tokenizers import ByteLevelBPETokenizer, Tokenizer

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        iter(texts), vocab_size=vocab_size, min_frequency=2, special_tokens=[END], show_progress=False
    )
    return Tokenizer.from_str(bpe.to_str())


def load_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer.json that can make shards: it has an `END`, and ids that fit in uint16."""
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
    """Size of the vocabulary: one more than the largest id."""
    return 1 + max(tokenizer.get_vocab().values(), default=-1)


def token_ids(tokenizer: Tokenizer, some: Sequence[Piece]) -> Iterator[NDArray[np.uint16]]:
    """Return the tokens of each piece, with an `END` before those that a document begins with."""
    end = tokenizer.token_to_id(END)
    encodings = tokenizer.encode_batch([piece.text for piece in some], add_special_tokens=False)
    for piece, encoding in zip(some, encodings, strict=True):
        yield np.array([end, *encoding.ids] if piece.starts else encoding.ids, dtype=np.uint16)


def load_decoder(folder: Path | str) -> Callable[[int], str]:
    """Return what turns a token of a folder's shards into text; a number without a token is written ``<number>``."""
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
    except Exception as error:  # tokenizers raises no other class
        raise ValueError(f"{path.name} is not a tokenizer of Hugging Face's tokenizers ({error})") from None


def _check(vocab_size: int, shard_tokens: int, validation: float) -> None:
    check_vocabulary(vocab_size)
    if shard_tokens < 2:
        raise ValueError(f"a shard has at least two tokens, a token and its next, got {shard_tokens}")
    if not 0 <= validation < 1:
        raise ValueError(f"the part of the documents held out must be at least 0 and below 1, got {validation}")


def check_vocabulary(size: int) -> None:
    """Refuse a size of a byte-level BPE that has no room for all bytes, or does not fit in uint16."""
    if not 257 <= size <= LIMIT:
        raise ValueError(f"vocab_size must be 257 to {LIMIT:,}, bytes and an end of text among them, got {size}")


def _check_out(out: Path, force: bool) -> None:
    there = [path for pattern in (TRAIN, VALIDATION) for path in out.glob(pattern)]
    if strange := [path for path in there if not path.name.startswith(f"{_NAME}_")]:
        raise FileExistsError(f"{out} has shards of another make, {strange[0].name} among them: choose another folder")
    if there and not force:
        raise FileExistsError(
            f"{out} has {len(there)} shards already: choose another folder, or replace them (--force)"
        )


def _chooser(files: Sequence[Path], fraction: float) -> Callable[[int, str], bool]:
    """Return which documents are held out, by number and beginning: those with a small hash, so that twins go together.

    If that leaves nothing on one side, it is the last document. Reads until there is one on each side, no further.
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


def _sided(files: Iterable[Path], held_out: Callable[[int, str], bool], tick: Tick) -> Iterator[tuple[Piece, bool]]:
    """Return all pieces, and for each whether its document is held out."""
    number, aside = -1, False
    for path in files:
        for piece in pieces(path, tick):
            if piece.starts:
                number += 1
                aside = held_out(number, piece.text)
            yield piece, aside


def _write(some: Iterable[tuple[Piece, bool]], tokenizer: Tokenizer, folder: Path, shard_tokens: int) -> Tokenized:
    with (
        ShardWriter(folder, f"{_NAME}_train", shard_tokens) as train,
        ShardWriter(folder, f"{_NAME}_val", shard_tokens) as validation,
    ):
        for batch in _batches(some):
            tokens = token_ids(tokenizer, [piece for piece, _ in batch])
            for (_, aside), ids in zip(batch, tokens, strict=True):
                (validation if aside else train).add(ids)
    shards = len(train.shards) + len(validation.shards)
    return Tokenized(train.tokens, validation.tokens, shards, vocabulary(tokenizer))


def _batches(some: Iterable[tuple[Piece, bool]]) -> Iterator[list[tuple[Piece, bool]]]:
    """Pieces in lists of about `PIECE` characters, which are tokenized in parallel."""
    held: list[tuple[Piece, bool]] = []
    size = 0
    for piece, aside in some:
        held.append((piece, aside))
        size += len(piece.text)
        if size >= PIECE:
            yield held
            held, size = [], 0
    if held:
        yield held


def _move(folder: Path, out: Path) -> None:
    """Put what is finished in the place of what was there."""
    for pattern in (TRAIN, VALIDATION):
        for old in out.glob(pattern):
            old.unlink()
    for path in sorted(folder.iterdir()):
        os.replace(path, out / path.name)


class _Bars:
    """Progress over the bytes of files, one bar for each time that they are read; none without a console."""

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

    def add(self, said: str) -> Tick:
        """Return what to call with a number of bytes."""
        task = self._progress.add_task(said, total=self._total)
        return lambda read: self._progress.advance(task, read)

    def __enter__(self) -> _Bars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

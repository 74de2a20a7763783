"""Text to token shards and back, with a given or trained byte-level BPE tokenizer."""

from __future__ import annotations

import hashlib
import os
import re
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .data import LIMIT, TRAIN, VALIDATION, Shard, write_shard, write_whole

if TYPE_CHECKING:
    from rich.console import Console
    from tokenizers import Tokenizer

END = "<|endoftext|>"
"""Token before every document. In a text file it separates documents."""
TOKENIZER = "tokenizer.json"
VOCAB_SIZE = 8192
"""Default vocabulary of a tokenizer that is trained."""
KINDS = (".txt", ".py", ".md")
"""Suffixes of text files in a folder."""
PIECE = 2**20
"""Characters read at a time. A longer document is tokenized in pieces."""
_NAME = "text"
Tick = Callable[[int], None]
"""Function that advances a progress bar by a number of bytes."""


class Piece(NamedTuple):
    """A document, or the next part of a long one."""

    text: str
    starts: bool
    """True at the start of a document."""


class Tokenized(NamedTuple):
    """Numbers of tokens and shards written, and the size of the vocabulary."""

    train_tokens: int
    validation_tokens: int
    shards: int
    vocab_size: int


def tokenize(
    paths: Iterable[Path],
    out: Path,
    *,
    vocab_size: int = VOCAB_SIZE,
    tokenizer: Path | None = None,
    shard_tokens: int = 100_000_000,
    validation: float = 0.05,
    force: bool = False,
    console: Console | None = None,
) -> Tokenized:
    """Write shards of text, and their tokenizer. All files appear at the end, or none.

    Neither the whole text nor all tokens are in memory at once. Training a tokenizer reads the files once more.

    Args:
        paths: text files, or folders of them.
        out: folder for the shards.
        vocab_size: vocabulary of a byte-level BPE that is trained on the training documents.
        tokenizer: a tokenizer.json to use instead.
        shard_tokens: tokens per shard.
        validation: fraction of the documents to hold out, chosen by a hash of their text.
        force: replace the shards of an earlier call.
        console: where to draw progress bars.
    """
    if not 257 <= vocab_size <= LIMIT:
        raise ValueError(f"vocab_size must be 257 to {LIMIT:,}, bytes and an end of text among them, got {vocab_size}")
    if shard_tokens < 2:
        raise ValueError(f"a shard has at least two tokens, a token and its next, got {shard_tokens}")
    if not 0 <= validation < 1:
        raise ValueError(f"the fraction of the documents to hold out must be at least 0 and below 1, got {validation}")
    _check_out(out, force)
    files = text_files(paths)
    is_held_out = _split_rule(files, validation)
    encoder = None if tokenizer is None else load_tokenizer(tokenizer)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".unfinished-") as folder, _progress(files, console) as add_bar:
        if encoder is None:
            parts = _split(files, is_held_out, add_bar("training a tokenizer"))
            encoder = train_tokenizer((piece.text for piece, held_out in parts if not held_out), vocab_size)
        summary = _write(_split(files, is_held_out, add_bar("tokenizing")), encoder, Path(folder), shard_tokens)
        write_whole(Path(folder) / TOKENIZER, encoder.to_str().encode())
        for old in [path for pattern in (TRAIN, VALIDATION) for path in out.glob(pattern)]:
            old.unlink()
        for new in sorted(Path(folder).iterdir()):
            new.replace(out / new.name)
    return summary


def _check_out(out: Path, force: bool) -> None:
    shards = [path for pattern in (TRAIN, VALIDATION) for path in out.glob(pattern)]
    if foreign := [path for path in shards if not path.name.startswith(f"{_NAME}_")]:
        raise FileExistsError(
            f"{out} has shards that this command did not write, such as {foreign[0].name}: choose another folder"
        )
    if shards and not force:
        raise FileExistsError(
            f"{out} has {len(shards)} shards already: choose another folder, or replace them (--force)"
        )


# Files and documents


def text_files(paths: Iterable[Path]) -> list[Path]:
    """Return the given files, and the text files in the given folders ordered by name. No file comes twice."""
    files: dict[Path, None] = {}
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist: give text files, or folders of them")
        inside = sorted(p for p in path.rglob("*") if p.suffix in KINDS and p.is_file()) if path.is_dir() else [path]
        if not inside:
            raise FileNotFoundError(f"{path} has no {', '.join(KINDS)} file: give text files, or folders of them")
        files.update((p.resolve(), None) for p in inside)
    return list(files)


def standard_library() -> list[Path]:
    """Return the sources of Python's standard library without its tests: a text that every machine has."""
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3"}
    files: list[Path] = []
    for folder, subfolders, names in os.walk(sysconfig.get_path("stdlib")):
        subfolders[:] = set(subfolders) - skipped
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    if len(files) < 20:
        raise FileNotFoundError(
            f"Python {sys.version.split()[0]} has no sources of its standard library here ({len(files)} files found):"
            " give text files of your own with --text"
        )
    return sorted(files)


def pieces(path: Path, tick: Tick = lambda _: None) -> Iterator[Piece]:
    """Yield the documents of a file, which `END` separates. Skip empty ones.

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
    """Return where to cut a long text: after its last full line that no blank follows, or before a partial `END`."""
    ends = [match.end() for match in re.finditer(r"\S\n(?=\S)", text)]
    return ends[-1] if ends else len(text) - len(END)


def _split_rule(files: Sequence[Path], fraction: float) -> Callable[[int, str], bool]:
    """Return a function that is true if a document, given by number and beginning, is held out.

    It holds out documents with a small hash, so equal documents are on the same side. If a side would be empty, it
    holds out only the last document. Files are read only until each side has a document.
    """

    def small_hash(_: int, text: str) -> bool:
        digest = hashlib.sha256(text.encode("utf-8", "replace")).digest()
        return int.from_bytes(digest[:8], "big") < fraction * 2**64

    documents, sides = 0, set()
    for text in (piece.text for path in files for piece in pieces(path) if piece.starts):
        documents += 1
        sides.add(small_hash(0, text))
        if not fraction or len(sides) == 2:
            return small_hash
    if not documents:
        raise ValueError(f"found no text in {len(files)} files: give files that have some")
    if documents == 1:
        raise ValueError(
            f"there is one document, and none to hold out: give more files, put {END} between documents, or hold out"
            " none (--validation 0)"
        )
    return lambda number, _: number == documents - 1


def _split(files: Iterable[Path], is_held_out: Callable[[int, str], bool], tick: Tick) -> Iterator[tuple[Piece, bool]]:
    """Yield all pieces, each with True if its document is held out."""
    number, held_out = -1, False
    for piece in (piece for path in files for piece in pieces(path, tick)):
        if piece.starts:
            number += 1
            held_out = is_held_out(number, piece.text)
        yield piece, held_out


# Tokens


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE like GPT-2's. Its vocabulary is smaller than asked for if the text has too few pairs."""
    from tokenizers import ByteLevelBPETokenizer, Tokenizer

    bpe = ByteLevelBPETokenizer()
    options = {"min_frequency": 2, "special_tokens": [END], "show_progress": False}
    bpe.train_from_iterator(iter(texts), vocab_size=vocab_size, **options)
    return Tokenizer.from_str(bpe.to_str())


def load_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer.json. Refuse one without `END`, or with ids that do not fit in uint16."""
    tokenizer = _read_tokenizer(path)
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


def load_decoder(folder: Path | str) -> Callable[[int], str]:
    """Return a function from a token id of a folder's shards to its text, ``<id>`` for an unknown one."""
    tokenizer = _read_tokenizer(Path(folder) / TOKENIZER)

    def decode(token: int) -> str:
        if tokenizer.id_to_token(token) is None:
            return f"<{token}>"
        return tokenizer.decode([token], skip_special_tokens=False)

    return decode


def _read_tokenizer(path: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    if not path.is_file():
        raise FileNotFoundError(f"there is no {path.name} in {path.parent}: give the tokenizer that made the tokens")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises plain Exception
        raise ValueError(f"{path.name} is not a tokenizer of Hugging Face's tokenizers ({error})") from None


class _ShardWriter:
    """Writer of a stream of tokens into shards ``name_000000.bin``, ``name_000001.bin``, ... of a folder."""

    def __init__(self, folder: Path, name: str, size: int) -> None:
        self.shards: list[Shard] = []
        self._folder, self._name, self._size = folder, name, size
        self._buffer: list[NDArray[np.uint16]] = []
        self._buffered = 0

    def add(self, tokens: NDArray[np.uint16]) -> None:
        while len(tokens):
            part = tokens[: self._size - self._buffered]
            self._buffer.append(part)
            self._buffered += len(part)
            if self._buffered == self._size:
                self.flush()
            tokens = tokens[len(part) :]

    def flush(self) -> int:
        """Write the tokens in memory, if any, as a shard. Return the number of tokens in all shards."""
        if self._buffer:
            path = self._folder / f"{self._name}_{len(self.shards):06}.bin"
            self.shards.append(write_shard(path, np.concatenate(self._buffer)))
            self._buffer, self._buffered = [], 0
        return sum(shard.tokens for shard in self.shards)


def _write(parts: Iterable[tuple[Piece, bool]], tokenizer: Tokenizer, folder: Path, shard_tokens: int) -> Tokenized:
    """Tokenize pieces, in parallel, and write their shards."""
    train, validation = (_ShardWriter(folder, f"{_NAME}_{kind}", shard_tokens) for kind in ("train", "val"))
    end = tokenizer.token_to_id(END)
    for batch in _batches(parts):
        encodings = tokenizer.encode_batch([piece.text for piece, _ in batch], add_special_tokens=False)
        for (piece, held_out), encoding in zip(batch, encodings, strict=True):
            ids = [end, *encoding.ids] if piece.starts else encoding.ids
            (validation if held_out else train).add(np.array(ids, dtype=np.uint16))
    counts = train.flush(), validation.flush()
    return Tokenized(*counts, len(train.shards) + len(validation.shards), vocabulary(tokenizer))


def _batches(parts: Iterable[tuple[Piece, bool]]) -> Iterator[list[tuple[Piece, bool]]]:
    """Yield lists of pieces with about `PIECE` characters together."""
    batch: list[tuple[Piece, bool]] = []
    size = 0
    for part in parts:
        batch.append(part)
        size += len(part[0].text)
        if size >= PIECE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@contextmanager
def _progress(files: Sequence[Path], console: Console | None) -> Iterator[Callable[[str], Tick]]:
    """Yield a function that adds a progress bar over the bytes of the files. Without a console it draws nothing."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn()
    total = sum(path.stat().st_size for path in files)
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console, transient=True) as progress:

        def add(label: str) -> Tick:
            task = progress.add_task(label, total=total)
            return lambda read: progress.advance(task, read)

        yield add

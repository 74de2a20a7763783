"""A real text that every machine has: the sources of Python's standard library, and a BPE tokenizer trained on them."""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .tokenization import VOCAB_SIZE, Piece, check_vocabulary, token_ids, train_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

HELD_OUT = 20
"""One file in this many is for validation."""
_FORMAT = 1


@dataclass(frozen=True)
class Corpus:
    """Tokens to train on, tokens of other files to validate on, and their tokenizer."""

    train: NDArray[np.uint16]
    validation: NDArray[np.uint16]
    tokenizer_json: str

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of this text."""
        from tokenizers import Tokenizer

        return Tokenizer.from_str(self.tokenizer_json)

    @property
    def vocab_size(self) -> int:
        """Number of tokens of the tokenizer."""
        size: int = self.tokenizer.get_vocab_size()
        return size

    def decode(self, token: int) -> str:
        """Return the text of a token."""
        text: str = self.tokenizer.decode([token], skip_special_tokens=False)
        return text


def standard_library() -> list[Path]:
    """Return the Python files of the standard library without its tests, in the order of their names."""
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3"}
    files = []
    for folder, subfolders, names in os.walk(sysconfig.get_path("stdlib")):
        subfolders[:] = set(subfolders) - skipped  # os.walk goes into what is left
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    files.sort()
    if len(files) < HELD_OUT:
        raise FileNotFoundError(
            f"Python {sys.version.split()[0]} has no sources of its standard library here ({len(files)} files found):"
            " give text files of your own with --text"
        )
    return files


def corpus(files: Sequence[Path], vocab_size: int = VOCAB_SIZE, *, cache: Path | None = None) -> Corpus:
    """Train a tokenizer on files and tokenize them, or read the result of an earlier call on the same texts.

    Args:
        files: text files. About one in twenty, chosen by a hash of its text, is held out for validation.
        vocab_size: tokens of the tokenizer, at most 65,536.
        cache: folder for the results; by default the user's cache.
    """
    check_vocabulary(vocab_size)
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in files]
    digests = [hashlib.sha256(text.encode("utf-8", "replace")).digest() for text in texts]
    key = hashlib.sha256(b"".join(digests) + f"{vocab_size} {_FORMAT}".encode()).hexdigest()[:16]
    path = (cache or _cache()) / f"corpus-{key}.npz"
    if path.exists():
        with np.load(path) as arrays:
            return Corpus(arrays["train"], arrays["validation"], str(arrays["tokenizer"]))
    held_out = [digest[0] % HELD_OUT == 0 for digest in digests]
    if all(held_out) or not any(held_out):
        held_out = [i == len(files) - 1 for i in range(len(files))]
    result = _tokenize(texts, held_out, vocab_size)
    _store(result, path)
    return result


def _tokenize(texts: Sequence[str], held_out: Sequence[bool], vocab_size: int) -> Corpus:
    train, validation = (
        [text for text, out in zip(texts, held_out, strict=True) if out is side] for side in (False, True)
    )
    tokenizer = train_tokenizer(train, vocab_size)

    def tokens(documents: Sequence[str]) -> NDArray[np.uint16]:
        ids = token_ids(tokenizer, [Piece(text, starts=True) for text in documents])
        return np.concatenate([np.empty(0, np.uint16), *ids])

    return Corpus(tokens(train), tokens(validation), tokenizer.to_str())


def _store(result: Corpus, path: Path) -> None:
    """Write the whole file or none. If the cache cannot be written, do without it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".npz", delete=False) as file:
            np.savez(file, train=result.train, validation=result.validation, tokenizer=np.array(result.tokenizer_json))
        os.replace(file.name, path)
    except OSError:
        return


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "hilbert-monitor"

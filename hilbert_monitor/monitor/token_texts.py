"""Adds the texts of tokens to records and alerts, outside the training thread.

The user's `decode` may be slow, fail or hang. It is called in a thread of its own, once for each token. Those who write
records wait for a text until the record is `PATIENCE` seconds old, and then write it without: so texts can be missing,
and records can not.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import msgspec

from hilbert_monitor.runs.alerts import with_texts
from hilbert_monitor.runs.process_bound import ProcessBound, end_child
from hilbert_monitor.runs.record import Alert, StepRecord

from .runtime import Guard
from .sinks import Sink

PATIENCE = 1.0
"""Age of a record, in seconds, at which it is written without its texts."""
ROOM = 65_536
"""Texts that are remembered, and tokens that may wait for theirs."""
PAIRS = ("pair", "perturbation_pair")
"""Fields of records that hold tokens. The texts are in the field of that name with `_text` at its end."""

Item = TypeVar("Item")


class TokenTexts(ProcessBound):
    """The texts of tokens.

    Args:
        decode: makes a token's text from its id; None for no texts.
        guard: counts what it raises.
    """

    def __init__(self, decode: Callable[[int], str] | None, guard: Guard) -> None:
        self.decode, self.guard = decode, guard
        self.error: BaseException | None = None
        """What `decode` raised first."""
        self._texts: dict[int, str | None] = {}  # None: it cannot be decoded
        self._wanted: dict[int, None] = {}  # in the order in which they were asked for
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        self.bind_to_process()

    def ask(self, item: StepRecord | Alert) -> None:
        """Have the tokens of a record or an alert decoded, without waiting."""
        if self.decode is not None and not self.inherited:
            with self._changed:
                self._want({token for name in PAIRS for token in getattr(item, name, None) or ()})

    def complete(self, item: Item, *, patience: float = PATIENCE) -> Item:
        """Return a record or an alert with its texts, as far as they are known when it is `patience` seconds old."""
        if self.decode is None or self.inherited or not isinstance(item, StepRecord | Alert):
            return item
        missing = {name: pair for name in PAIRS if (pair := getattr(item, name, None)) and not _text(item, name)}
        texts = self._known({token for pair in missing.values() for token in pair}, item.time + patience)
        known = {name: _both(texts, pair) for name, pair in missing.items()}
        if isinstance(item, Alert):
            pair_text = known.get("pair")
            return item if pair_text is None else with_texts(item, pair_text)  # type: ignore[return-value]
        return msgspec.structs.replace(item, **{f"{name}_text": text for name, text in known.items()})

    def close(self) -> None:
        """End the thread, once `decode` lets it."""
        if self.inherited:
            return
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _known(self, tokens: Iterable[int], until: float) -> dict[int, str | None]:
        """The texts of tokens that are known at a time, in seconds since the epoch, or as soon as all are."""
        tokens = set(tokens)
        with self._changed:
            self._want(tokens)
            self._changed.wait_for(lambda: self._closed or tokens <= self._texts.keys(), until - time.time())
            return {token: self._texts.get(token) for token in tokens}

    def _want(self, tokens: Iterable[int]) -> None:
        unknown = [t for t in tokens if t not in self._texts and t not in self._wanted]
        if unknown and not self._closed and len(self._wanted) < ROOM:
            self._wanted |= dict.fromkeys(unknown)
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="hilbert-monitor decode", daemon=True)
                self._thread.start()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._wanted)
                if self._closed:
                    return
                token = next(iter(self._wanted))
            text = self._decode(token)
            if self.inherited:
                end_child()
            with self._changed:
                del self._wanted[token]
                self._texts[token] = text
                if len(self._texts) > ROOM:
                    del self._texts[next(iter(self._texts))]
                self._changed.notify_all()

    def _decode(self, token: int) -> str | None:
        assert self.decode is not None
        try:
            return str(self.decode(token))
        except BaseException as error:  # a panic or SystemExit of the user's code; signals go to the main thread
            if self.inherited:
                end_child(error)
            self.error = self.error or error
            self.guard.count("decode", error)
            return None


class SinkWithTexts(Generic[Item]):
    """Completes records and alerts before a sink gets them.

    Args:
        sink: that gets them.
        texts: completes them.
    """

    def __init__(self, sink: Sink[Item], texts: TokenTexts) -> None:
        self.sink, self.texts = sink, texts

    def write(self, record: Item) -> None:
        """Write the record with its texts."""
        self.sink.write(self.texts.complete(record))


def _text(item: Any, name: str) -> tuple[str, str] | None:
    text: tuple[str, str] | None = getattr(item, f"{name}_text")
    return text


def _both(texts: dict[int, str | None], pair: tuple[int, int]) -> tuple[str, str] | None:
    first, second = texts[pair[0]], texts[pair[1]]
    return None if first is None or second is None else (first, second)

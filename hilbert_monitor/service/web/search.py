"""The filter of runs: what a reader types, and which runs it finds.

adamw warmup            both words occur in a run's names, settings, tags or note
"weight decay"          the phrase does
lr=0.1   status:failed  a field has exactly this value; lr>0.01 and <, <=, >=, != compare numbers
-adamw   -lr=0.1        excludes runs
adamw OR rownorm        either; OR parts the whole filter
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import NamedTuple

from hilbert_monitor.runs.run import Run
from hilbert_monitor.runs.table import DERIVED, NUMBERS

from .notebook import NOTHING, Remarks

PIECE = re.compile(r'(?:[^\s"]|"[^"]*"?)+')
"""A part of a filter: blanks end it, but not within quotes."""
FIELD = re.compile(r'([^"=:<>!]+)(!=|>=|<=|[=:<>])(.+)', re.DOTALL)
"""A part that asks for a field: its name, how it is compared, and with what."""
RELATIONS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}


class Term(NamedTuple):
    """One condition of a filter."""

    text: str
    """All of it, without quotes."""
    key: str = ""
    """The field that it asks for; empty for a word or a phrase."""
    relation: str = ""
    value: str = ""
    is_excluded: bool = False


Filter = tuple[tuple[Term, ...], ...]
"""Alternatives, each with conditions that must all be true."""


def parse(text: str) -> Filter:
    """The filter that a text means. Every text means one; an empty one has no alternatives."""
    alternatives: list[list[Term]] = [[]]
    for piece in PIECE.findall(text):
        if piece == "OR":
            alternatives.append([])
        elif term := _term(piece.lower()):
            alternatives[-1].append(term)
    return tuple(tuple(terms) for terms in alternatives if terms)


def _term(piece: str) -> Term | None:
    is_excluded = piece.startswith("-") and len(piece) > 1
    piece = piece[1:] if is_excluded else piece
    text, field = piece.replace('"', ""), FIELD.fullmatch(piece)
    if field and (value := field[3].replace('"', "")):
        return Term(text, field[1], field[2], value, is_excluded)
    return Term(text, is_excluded=is_excluded) if text else None


class SearchedRun:
    """A run as a filter sees it. What it has is worked out only when a condition asks for it.

    Args:
        run: the run.
        settings: its settings, by key.
        remarks: what people say about it.
    """

    def __init__(self, run: Run, settings: Mapping[str, str], remarks: Remarks = NOTHING) -> None:
        self.run, self.settings, self.remarks = run, settings, remarks

    def matches(self, wanted: Filter) -> bool:
        """Whether a filter finds the run. One without alternatives finds every run."""
        return not wanted or any(all(self._is_true(term) for term in terms) for terms in wanted)

    def _is_true(self, term: Term) -> bool:
        return self._holds(term) != term.is_excluded

    def _holds(self, term: Term) -> bool:
        if not term.key:
            return any(term.text in text for text in self._texts) or any(
                term.text in f"{key}={text}" for key, text in self._settings.items()
            )
        if term.relation in RELATIONS:
            bound, compare = _number(term.value), RELATIONS[term.relation]
            return bound is not None and any(compare(number, bound) for number in self._numbers(term.key))
        if term.relation == "!=":
            return not self._has(term.key, term.value)
        return self._has(term.key, term.value) or any(term.text in text for text in self._texts)

    def _has(self, key: str, value: str) -> bool:
        """Whether a field has a value, or the note a text."""
        if key == "note":
            return value in self.remarks.note.lower()
        number = _number(value)
        return any(text == value for text in self._values(key)) or (
            number is not None and any(one == number for one in self._numbers(key))
        )

    def _values(self, key: str) -> Iterator[str]:
        """The texts of a field: a name of the run, a tag, or a setting by its key or the end of its key."""
        if key in ("tag", "tags"):
            yield from (tag.lower() for tag in self.remarks.tags)
        if key in self._names:
            yield self._names[key]
        yield from (text for name, text in self._settings.items() if name == key or name.endswith(f".{key}"))

    def _numbers(self, key: str) -> Iterator[float]:
        """The numbers of a field; for a field of records, the last one."""
        for text in self._values(key):
            if (number := _number(text)) is not None:
                yield number
        if key == "step" and self.run.state.step is not None:
            yield float(self.run.state.step)
        elif key == "alerts":
            yield float(len(self.run.alerts))
        elif (key in NUMBERS or key in DERIVED) and (last := self.run.table.last(key)) is not None:
            yield last

    @cached_property
    def _names(self) -> dict[str, str]:
        info, state = self.run.info, self.run.state
        names = {
            "id": self.run.id,
            "name": info.name,
            "optimizer": info.head_optimizer or "unknown",
            "model": self.run.model,
            "status": self.run.status,
            "seed": "" if info.seed is None else str(info.seed),
            "panel_hash": info.panel_hash,
            "error": state.error,
            "host": info.host,
            "archived": "true" if self.remarks.archived else "false",
        }
        return {key: text.lower() for key, text in names.items()}

    @cached_property
    def _texts(self) -> list[str]:
        """Where words are looked for, beside the settings."""
        names = [self._names[key] for key in ("id", "name", "optimizer", "model", "status")]
        return [*names, self.remarks.note.lower(), *(tag.lower() for tag in self.remarks.tags)]

    @cached_property
    def _settings(self) -> dict[str, str]:
        return {key.lower(): text.lower() for key, text in self.settings.items()}


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None

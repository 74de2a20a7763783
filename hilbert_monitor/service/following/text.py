"""Makes texts of unknown origin safe for a page, a figure or a spreadsheet."""

from __future__ import annotations

import csv
import html
import io
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from hilbert_monitor.runs.run import clip as clip

FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""Characters that a spreadsheet takes for the start of a formula. The last four are full-width forms of the first."""


def label(text: str, limit: int = 60) -> str:
    """A text for a figure: cut, and escaped, as plotly would read markup in it."""
    return html.escape(clip(text, limit), quote=False)


def cell(value: Any) -> Any:
    """A value for a CSV file. A text that a spreadsheet would take for a formula gets an apostrophe in front."""
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else value


def csv_lines(header: Sequence[str], rows: Iterable[Sequence[Any]], at_once: int = 2000) -> Iterator[str]:
    """A CSV file in pieces. No cell can act as a formula."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(header)
    yield text.getvalue()
    for piece in _pieces(rows, at_once):
        text.seek(0)
        text.truncate()
        writer.writerows([cell(value) for value in row] for row in piece)
        yield text.getvalue()


def _pieces(rows: Iterable[Sequence[Any]], at_once: int) -> Iterator[list[Sequence[Any]]]:
    rest = iter(rows)
    while piece := list(islice(rest, at_once)):
        yield piece

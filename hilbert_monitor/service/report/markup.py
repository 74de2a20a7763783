"""Pieces of HTML that the sections of a report share: escaped texts, tables and numbers.

Run names, tokens, settings and error messages come from outside. `text` escapes them and cuts long ones.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence

from hilbert_monitor.service.figures.final_values import SampleStatistics
from hilbert_monitor.service.figures.style import colour
from hilbert_monitor.service.following.published import Figure
from hilbert_monitor.service.following.text import clip

DASH, MINUS, TIMES, SPACE = "\u2013", "\u2212", "\u00d7", "\u00a0"
"""The last is a space where no line breaks: a number stays on one line."""

Value = SampleStatistics | Figure
"""A mean with its deviation, of these runs or of the paper's."""


def text(value: object, limit: int = 100) -> str:
    """A text from outside, escaped and cut to a length."""
    return html.escape(clip(str(value), limit))


def plural(count: int, noun: str) -> str:
    """A count with its noun: "1 run", "2 runs"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


# Tables


def table(heads: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]], caption: str = "") -> str:
    """A table. A row is the HTML of its header and of its cells."""
    head = "".join(f'<th scope="col">{name}</th>' for name in heads)
    body = "".join(f'<tr><th scope="row">{header}</th>{_cells(heads, cells)}</tr>' for header, cells in rows)
    top = f"<caption>{caption}</caption>" if caption else ""
    return f"<table>{top}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cells(heads: Sequence[str], cells: Sequence[str]) -> str:
    """Cells that carry the name of their column. On a phone each row is a list, where the names are shown."""
    contents = (f"<div>{cell}</div>" if cell else "" for cell in cells)
    return "".join(f'<td data-label="{head}">{content}</td>' for head, content in zip(heads[1:], contents, strict=True))


def dot(optimizer: str) -> str:
    """A dot in an optimizer's colour."""
    return f'<i class="dot" style="background:{colour(optimizer)}"></i>'


def optimizer_cell(optimizer: str) -> str:
    """A table cell with an optimizer's dot and name."""
    return f"{dot(optimizer)}<span>{text(optimizer, 40)}</span>"


# Numbers


def fixed(value: Value) -> str:
    """3.1588 ± 0.0027."""
    mean = with_minus(f"{value.mean:.4f}")
    return mean if value.deviation is None else f"{mean}{SPACE}±{SPACE}{value.deviation:.4f}"


def signed_fixed(value: Value) -> str:
    """+0.0153 ± 0.0027."""
    return ("+" if value.mean is not None and value.mean >= 0 else "") + fixed(value)


def scientific(value: Value) -> str:
    """(2.870 ± 0.140) times a power of ten, as in the paper."""
    mean, power = value.mean or 0.0, math.floor(math.log10(abs(value.mean))) if value.mean else 0
    unit = 10.0**power
    number = f"{mean / unit:.3f}"
    if value.deviation is not None:
        number = f"({number}{SPACE}±{SPACE}{value.deviation / unit:.3f})"
    return f"{number}{SPACE}{TIMES}{SPACE}10<sup>{with_minus(str(power))}</sup>"


def factor(value: Value) -> str:
    """45.1 with a multiplication sign."""
    return f"{value.mean:,.1f}{TIMES}"


def signed(number: float) -> str:
    """+0.0153."""
    return with_minus(f"{number:+.4f}")


def absolute_difference(ours: float, paper: float) -> str:
    """How far our number is from the paper's: +0.0012."""
    return signed(ours - paper)


def relative_difference(ours: float, paper: float) -> str:
    """How far our number is from the paper's, in percent: +10.0 %."""
    return with_minus(f"{100 * (ours / paper - 1):+.1f} %")


def with_minus(number: str) -> str:
    """A number with a minus sign in place of a hyphen."""
    return number.replace("-", MINUS)

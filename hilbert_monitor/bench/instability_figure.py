"""The picture of the study of instabilities: how often each signal came first, beside chance."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from .instability_alarms import LEADS, Lead

SHADES = ("#c6d9f0", "#6ea0d6", "#1f4e8c")
"""Of a lead of at least each of LEADS; a longer lead is drawn over a shorter one."""
LEFT, SCALE, ROW, TOP = 230, 480, 24, 64
"""Pixels: of the names, of 100 %, of a signal, and above the first."""


def drawing(leads: list[Lead]) -> str:
    """Return an SVG with a bar for each signal, the one that came first most often on top."""
    ordered = sorted(leads, key=lambda lead: (-lead.recall(LEADS[1]), -lead.recall(LEADS[0])))
    width, height = LEFT + SCALE + 40, TOP + ROW * len(ordered) + 12
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        ' font-family="sans-serif" font-size="13" fill="#222">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        *_legend(),
        *(part for place, lead in enumerate(ordered) for part in _bar(lead, TOP + ROW * place)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _legend() -> Iterator[str]:
    yield f'<text x="{LEFT}" y="18">Share of the instabilities that an alarm preceded, by at least</text>'
    words = [*(f"{lead} update{'s' * (lead > 1)}" for lead in LEADS), f"chance, {LEADS[1]} updates"]
    for place, (word, shade) in enumerate(zip(words, (*SHADES, "#c0392b"), strict=True)):
        x, thickness = LEFT + 115 * place, 3 if shade not in SHADES else 14
        yield f'<rect x="{x}" y="28" width="{thickness}" height="14" fill="{shade}"/>'
        yield f'<text x="{x + thickness + 6}" y="40">{word}</text>'
    for percent in range(0, 101, 25):
        x = LEFT + SCALE * percent // 100
        yield f'<text x="{x}" y="58" font-size="11" text-anchor="middle" fill="#666">{percent} %</text>'


def _bar(lead: Lead, y: int) -> Iterator[str]:
    yield f'<text x="{LEFT - 10}" y="{y + 16}" text-anchor="end">{escape(lead.signal)}</text>'
    yield f'<rect x="{LEFT}" y="{y + 4}" width="{SCALE}" height="16" fill="#f4f4f4"/>'
    for least, shade in zip(LEADS, SHADES, strict=True):
        yield f'<rect x="{LEFT}" y="{y + 4}" width="{SCALE * lead.recall(least):.1f}" height="16" fill="{shade}"/>'
    chance = LEFT + SCALE * lead.chance_recall(1)
    yield f'<rect x="{chance - 1.5:.1f}" y="{y + 2}" width="3" height="20" fill="#c0392b"/>'

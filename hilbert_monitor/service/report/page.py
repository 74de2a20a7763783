"""The report as one HTML file. It contains its script, plotly.js and its style, and loads nothing from the network."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from importlib.resources import files
from typing import Any

from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]

from hilbert_monitor import __version__
from hilbert_monitor.runs.run import Run
from hilbert_monitor.service.figures.comparison import Comparison
from hilbert_monitor.service.figures.style import Figure, Theme, template

from .illustrations import Illustration, illustrations
from .markup import plural
from .model_section import model_section
from .run_sections import alerts_section, efficiency_section, remarks_section, runs_section
from .settings_section import settings_section, software_section
from .svg import extra_rows

POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
"""The content security policy: the browser loads nothing from anywhere, whatever a run's texts contain."""

STYLE, SCRIPT = (files(__package__).joinpath(name).read_text("utf-8") for name in ("report.css", "report.js"))
HEIGHT, ROW = 380, 19
"""Pixels of a figure on the page, and of each row of its legend beyond two."""
THEMES: tuple[Theme, ...] = ("light", "dark")


def page(runs: Sequence[Run], comparisons: Sequence[Comparison], *, now: float | None = None) -> str:
    """The HTML of the report.

    Args:
        runs: the runs.
        comparisons: their comparisons, one per model.
        now: the time to print, in seconds since the epoch; by default the current time.
    """
    illustrated = illustrations(runs, comparisons)
    made = f"{time.strftime('%d %B %Y, %H:%M', time.localtime(now))}, hilbert-monitor {__version__}"
    body = [
        f"<header><h1>LM-head step geometry</h1><p>{plural(len(runs), 'run')}, {made}</p></header>",
        *_model_sections(comparisons, illustrated),
        runs_section(runs, counted={run.id for c in comparisons for run in c.counted}),
        efficiency_section(runs),
        alerts_section(runs),
        remarks_section(runs),
        settings_section(runs),
        software_section(runs),
    ]
    figures = [_on_page(one.figure) for some in illustrated for one in some]
    data = _script_json({"figures": figures, "themes": {theme: template(theme) for theme in THEMES}})
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            f"<title>LM-head step geometry</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>",
            *body,
            "</main>",
            f'<script type="application/json" id="figures">{data}</script>',
            f"<script>{get_plotlyjs()}</script>\n<script>{SCRIPT}</script>\n</body>\n</html>\n",
        ]
    )


def _model_sections(comparisons: Sequence[Comparison], illustrated: Sequence[Sequence[Illustration]]) -> Iterator[str]:
    first = 1
    for c, some in zip(comparisons, illustrated, strict=True):
        yield model_section(c, some, first=first, with_title=len(comparisons) > 1)
        first += len(some)


def _on_page(figure: Figure) -> Figure:
    """A figure with its height on the page."""
    return {**figure, "layout": {**figure["layout"], "height": HEIGHT + ROW * extra_rows(figure)}}


def _script_json(value: Any) -> str:
    """JSON for a script element, which it cannot close because it contains no "<"."""
    return json.dumps(value, allow_nan=False).replace("<", "\\u003c")

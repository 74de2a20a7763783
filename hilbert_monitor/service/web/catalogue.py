"""The script /static/catalogue.js: lists that the page shares with Python, written here so that none stands twice."""

from __future__ import annotations

from typing import Any

import msgspec

from hilbert_monitor.runs.run import SHOWN_STATUSES
from hilbert_monitor.service.figures.compare_figures import METRIC_PANELS
from hilbert_monitor.service.figures.run_figures import PANELS
from hilbert_monitor.service.figures.style import COLOURS

NAME = "catalogue.js"


def script() -> bytes:
    """A JavaScript module with a constant for each list."""
    panels = [
        {"key": panel.name, "title": panel.title, "about": panel.help, "none": panel.if_empty}
        for panel in PANELS.values()
    ]
    metrics = [
        {"key": field, "title": metric.name.replace("_", " ").capitalize(), "about": metric.help}
        for field, metric in METRIC_PANELS.items()
    ]
    constants: dict[str, tuple[str, Any]] = {
        "RUN_PANELS": ("The panels of a run's page.", panels),
        "METRICS": ("The metrics that runs can be compared by, beside those that always are.", metrics),
        "STATES": ("The states of a run, in the order in which they want attention.", SHOWN_STATUSES),
        "COLOURS": ("The colours of optimizers.", COLOURS),
    }
    lines = [
        f"/** {about} */\nexport const {name} = {msgspec.json.encode(value).decode()};"
        for name, (about, value) in constants.items()
    ]
    return ("/* Written by the service from its catalogue. */\n\n" + "\n\n".join(lines) + "\n").encode()

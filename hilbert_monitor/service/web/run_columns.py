"""Columns that a reader may add to the table of runs: settings, and the last values of what is measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from sys import intern
from typing import Any

from hilbert_monitor.runs.files import to_json
from hilbert_monitor.runs.record import METRICS, RunInfo
from hilbert_monitor.runs.run import Run, settings

LAST = "last:"
"""What the name of a column of last values begins with; any other name is the key of a setting."""
KEYS = 2000
"""Settings that are listed, at most."""


class SettingsIndex:
    """The settings of runs, worked out once for each attempt."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[RunInfo, dict[str, str]]] = {}

    def of(self, run: Run) -> dict[str, str]:
        """The settings of a run as a flat list of keys and texts."""
        known = self._known.get(run.id)
        if known is None or known[0] is not run.info:
            known = run.info, {intern(key): text for key, text in settings(run.info).items()}
            self._known[run.id] = known
        return known[1]

    def forget_others(self, runs: Mapping[str, Run]) -> None:
        """Forget runs that are gone."""
        if len(self._known) > len(runs):
            self._known = {id: known for id, known in self._known.items() if id in runs}


def available(runs: Mapping[str, Run], index: SettingsIndex) -> dict[str, Any]:
    """The columns that there are: settings, those that differ between runs first, and fields of records."""
    values: dict[str, set[str]] = {}
    counts: dict[str, int] = {}
    for run in runs.values():
        for key, text in index.of(run).items():
            values.setdefault(key, set()).add(text)
            counts[key] = counts.get(key, 0) + 1
    varying = {key for key in values if len(values[key]) > 1 or counts[key] < len(runs)}
    keys = sorted(values, key=lambda key: (key not in varying, key))[:KEYS]
    fields = {metric.field: metric for metric in METRICS}
    return {
        "settings": [{"name": key, "runs": counts[key], "values": len(values[key])} for key in keys],
        "fields": [
            {"name": f"{LAST}{field}", "label": metric.label, "about": metric.help} for field, metric in fields.items()
        ],
    }


def cells(runs: Iterable[Run], names: Sequence[str], index: SettingsIndex) -> dict[str, dict[str, Any]]:
    """The cells of some columns by the id of their run; runs that have none are left out."""
    columns: dict[str, dict[str, Any]] = {name: {} for name in names}
    for run in runs:
        for name, column in columns.items():
            is_last = name.startswith(LAST)
            cell = run.table.last(name.removeprefix(LAST)) if is_last else index.of(run).get(name)
            if cell is not None:
                column[run.id] = to_json(cell)
    return columns

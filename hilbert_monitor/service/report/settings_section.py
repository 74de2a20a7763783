"""The sections of a report about how the runs were made: settings, those that differ first, and software."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from hilbert_monitor.runs.run import Run, settings
from hilbert_monitor.service.following.text import clip

from .markup import DASH, plural, text

SETTINGS = 200
"""The largest number of settings in a table."""
NAMES = 6
"""The largest number of runs that a value names."""
VERSIONS = "versions."

Values = Mapping[str, Sequence[Run]]
"""The values of a setting, and the runs that have each."""


def settings_section(runs: Sequence[Run]) -> str:
    """The settings: first those that are not the same in all runs, then those that are."""
    values = {key: some for key, some in _values(runs).items() if not key.startswith(VERSIONS)}
    differing = {key: some for key, some in values.items() if len(some) > 1}
    shared = {key: some for key, some in values.items() if len(some) == 1}
    if not values:
        return ""
    if len(runs) == 1:
        return f"<section><h2>Settings</h2>{_table(shared, runs)}</section>"
    first = _table(differing, runs, "What differs between the runs") or "<p>All runs have the same settings.</p>"
    return f"<section><h2>Settings</h2>{first}{_table(shared, runs, 'What all runs share')}</section>"


def software_section(runs: Sequence[Run]) -> str:
    """The versions of the programs that the runs were made with, as far as they say."""
    versions = {key.removeprefix(VERSIONS): some for key, some in _values(runs).items() if key.startswith(VERSIONS)}
    return f"<section><h2>Software</h2>{_table(versions, runs)}</section>" if versions else ""


def differences(runs: Sequence[Run]) -> list[str]:
    """The keys of the settings that differ between runs, but for those of their software."""
    return [key for key, some in _values(runs).items() if len(some) > 1 and not key.startswith(VERSIONS)]


def item_of_runs(value: str, limit: int, some: Sequence[Run], runs: Sequence[Run]) -> str:
    """A list item: a text, and the names of those runs that it is about."""
    names = f" <small>{_names(some, runs)}</small>" if len(runs) > 1 else ""
    return f"<li>{text(value, limit)}{names}</li>"


def _names(some: Sequence[Run], runs: Sequence[Run]) -> str:
    if len(some) == len(runs):
        return "all runs"
    names = ", ".join(clip(run.label, 40) for run in some[:NAMES])
    if len(some) > NAMES:
        names = f"{plural(len(some), 'run')}, such as {names}"
    return text(names, 400)


def _values(runs: Sequence[Run]) -> dict[str, Values]:
    """The values of each setting, by key."""
    all_settings = [settings(run.info) for run in runs]
    return {key: _of_key(key, runs, all_settings) for key in sorted({key for own in all_settings for key in own})}


def _of_key(key: str, runs: Sequence[Run], all_settings: Sequence[Mapping[str, str]]) -> Values:
    values: dict[str, list[Run]] = {}
    for run, own in zip(runs, all_settings, strict=True):
        values.setdefault(own.get(key, DASH), []).append(run)
    return values


def _table(values: Mapping[str, Values], runs: Sequence[Run], title: str = "") -> str:
    """A table with a row for each key; empty without one."""
    if not values:
        return ""
    rows = "".join(_rows(values, runs))
    cut = f"<p>The first {SETTINGS} of {len(values):,}.</p>" if len(values) > SETTINGS else ""
    caption = f"<caption>{title}</caption>" if title else ""
    return f'{cut}<table class="settings">{caption}<tbody>{rows}</tbody></table>'


def _rows(values: Mapping[str, Values], runs: Sequence[Run]) -> Iterator[str]:
    for key in list(values)[:SETTINGS]:
        of_value = values[key]
        if len(of_value) == 1:
            cell = text(next(iter(of_value)), 200)
        else:
            cell = "<ul>" + "".join(item_of_runs(value, 200, some, runs) for value, some in of_value.items()) + "</ul>"
        yield f'<tr><th scope="row">{text(key)}</th><td>{cell}</td></tr>'

"""The settings of a run as a flat list of keys and texts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from hilbert_monitor.runs.record import RunInfo

from .text import clip

DEPTH = 8
"""Levels of a configuration that become keys; deeper levels are one text."""
TEXT = 500
"""Characters of a value, or of a key, at most."""
COUNT = 2000
"""Settings of a run, at most."""
WHOLE = re.compile(r"-?\d+\.0")
"""A whole number that is written as a fraction."""


def settings(info: RunInfo) -> dict[str, str]:
    """A run's configuration and what it ran on, flat: {"optimizer.lr": "0.1"}."""
    return _texts({**info.config, **_environment(info)})


def configuration(info: RunInfo) -> dict[str, str]:
    """A run's configuration alone, flat. Equal numbers have equal texts, also 0 and 0.0."""
    return {key: _same_number(text) for key, text in _texts(info.config).items()}


def environment(info: RunInfo) -> dict[str, str]:
    """What a run ran on: versions, ranks, panel. Flat."""
    return _texts(_environment(info))


def _environment(info: RunInfo) -> dict[str, Any]:
    return {"versions": info.versions, "ranks": info.world_size, "panel": info.panel_hash}


def _same_number(text: str) -> str:
    return text[: -len(".0")] if WHOLE.fullmatch(text) else text


def _texts(values: dict[str, Any]) -> dict[str, str]:
    texts: dict[str, str] = {}
    for key, text in _flat(values):
        texts.setdefault(clip(key, TEXT), clip(text, TEXT))
        if len(texts) == COUNT:
            break
    return texts


def _flat(values: dict[str, Any], prefix: str = "", depth: int = DEPTH) -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, dict) and value and depth:
            yield from _flat(value, f"{prefix}{key}.", depth - 1)
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else _json(value)


def _json(value: Any) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except RecursionError:
        return "nested too deeply to be shown"

"""Turns any Python value into one that JSON can hold."""

from __future__ import annotations

import math
import os
from typing import Any


def clean(text: str) -> str:
    """Make text that UTF-8 can hold: lone surrogates become their escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def shown(value: object, limit: int = 1000) -> str:
    """Any object as text of at most `limit` characters, also an object whose repr fails."""
    try:
        text = value if isinstance(value, str) else str(value) if isinstance(value, os.PathLike) else repr(value)
    except Exception:
        text = f"<{type(value).__name__} that cannot be shown>"
    return clean(text if len(text) <= limit else text[: limit - 3] + "...")


def plain(value: Any, depth: int = 16) -> Any:
    """The value as JSON can hold it; what JSON has no form for becomes text."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else repr(float(value))
    if isinstance(value, int):
        return int(value) if abs(value) < 2**63 else shown(value)
    if depth and isinstance(value, dict):
        return {_key(key): plain(item, depth - 1) for key, item in value.items()}
    if depth and isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item, depth - 1) for item in value]
    return shown(value)


def _key(key: object) -> str:
    return clean(key) if isinstance(key, str) else shown(key)

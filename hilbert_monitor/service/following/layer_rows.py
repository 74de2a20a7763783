"""The layers of a run, read from its file when somebody asks for them, and again only if the file has changed."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from hilbert_monitor.runs.reader import LAYERS, RunReader
from hilbert_monitor.runs.record import LayerRecord


def layers_of(folder: Path) -> tuple[LayerRecord, ...]:
    """The layers of a run that count; none for a run that has no file, or one that cannot be read."""
    try:
        about = (folder / LAYERS).stat()
    except OSError:
        return ()
    return _read(folder, about.st_mtime_ns, about.st_size)


@lru_cache(maxsize=32)
def _read(folder: Path, changed: int, size: int) -> tuple[LayerRecord, ...]:
    try:
        return tuple(RunReader(folder).layers())
    except OSError:
        return ()

"""What the bench and the doctor print and write alike: a progress bar, the machine, a JSON document."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .measure import machine


def progress_bar(console: Console) -> Progress:
    """Return a progress bar that counts jobs and disappears when they are done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


def show_machine(console: Console) -> None:
    """Print the machine that the figures belong to."""
    console.print(" | ".join(f"{name} {value}" for name, value in machine().items()), style="dim")


def write_document(path: Path, **fields: Any) -> None:
    """Write the machine and the fields as one JSON document."""
    path.write_text(json.dumps({"machine": machine(), **fields}, indent=2) + "\n")

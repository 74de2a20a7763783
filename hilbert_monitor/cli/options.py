"""What several commands share: options, and how a docstring becomes a help text."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer


def help_text(command: Callable[..., None]) -> str:
    """Join the lines of each paragraph of a command's docstring: the terminal breaks them where its width ends."""
    paragraphs = (inspect.getdoc(command) or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def _in_a_folder(path: Path | None) -> Path | None:
    """Refuse a file whose folder does not exist, before the work that it would be lost with."""
    if path is not None and not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"the folder of {path} does not exist: create it first")
    return path


def output(help: str, **settings: Any) -> Any:
    """Return an option for a file, or a folder, that a command writes when its work is done."""
    return typer.Option(help=help, callback=_in_a_folder, **settings)


JsonFile = Annotated[Path | None, output("Also write the results to this file, as JSON.")]
Quick = Annotated[bool, typer.Option("--quick", help="Use small sizes, only to see that it runs.")]

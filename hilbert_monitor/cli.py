"""The command line. Commands import what they need when they run, so that ``--help`` is quick."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import __version__

app = typer.Typer(
    help="Exact step geometry of the language-model head.", no_args_is_help=True, pretty_exceptions_enable=False
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"hilbert-monitor {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Exact step geometry of the language-model head."""


@app.command()
def bench(
    increment: Annotated[
        list[Path] | None,
        typer.Option(help="Measure on this saved increment instead of made ones; may be given several times."),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Also write the results to this file, as JSON.")] = None,
    quick: Annotated[bool, typer.Option(help="Small sizes, a few seconds: to see that it runs.")] = False,
) -> None:
    """Time the geometry against its opponents: all pairs, a bare matmul, one pass over the matrix.

    Example: hilbert-monitor bench --increment step50.pt --json bench.json
    """
    from rich.console import Console

    from .bench import suite

    console = Console()
    if json is not None and not json.absolute().parent.is_dir():
        raise typer.BadParameter(f"the folder of {json} does not exist: create it first", param_hint="--json")
    try:
        jobs = list(suite.geometry_jobs(increment or [], quick=quick))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--increment") from None
    results = suite.run(jobs, console)
    suite.show(results, console)
    if json is not None:
        suite.write_json(results, json)
        console.print(f"written to {json}")

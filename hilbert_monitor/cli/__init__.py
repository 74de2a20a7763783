"""The command line, one module per command.

A command imports what it needs when it runs, so that ``--help`` is quick.
"""

from __future__ import annotations

from typing import Annotated

import typer

from hilbert_monitor import __version__

from . import demo, doctor, inspect, pretrain, report, serve, tokenize
from .options import help_text

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hilbert-monitor {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Measure how far each optimizer step moves the head of a language model, and watch it live."""


COMMANDS = (
    *(demo.demo, pretrain.pretrain, tokenize.tokenize),
    *(serve.serve, report.report, inspect.inspect, doctor.doctor),
)
for command in COMMANDS:
    app.command(help=help_text(command))(command)

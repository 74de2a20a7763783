"""``hilbert-monitor serve``: the live dashboard."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

SHORTEST_TOKEN = 16
"""Characters of a token that a user gives, at least: whoever guesses it sees the runs."""


def serve(
    context: typer.Context,
    runs: Annotated[Path, typer.Argument(help="Folder of the runs, or of one run. It need not exist yet.")] = Path(
        "runs"
    ),
    host: Annotated[
        str, typer.Option(help="Address to listen at. An address that other machines reach gets a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen at; 0 for any free one.", min=0, max=65535)] = 8000,
    token: Annotated[
        str | None,
        typer.Option(
            help=f"Password that visitors must give, of at least {SHORTEST_TOKEN} characters. Given by the environment"
            " it is not printed.",
            envvar="HILBERT_MONITOR_TOKEN",
        ),
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option(
            help="Folder for a cache, which makes later starts quick; by default in the user's cache folder. Nothing is"
            " written beside the runs.",
            envvar="HILBERT_MONITOR_CACHE",
            file_okay=False,
        ),
    ] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Keep no cache.")] = False,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder for notes, tags and acknowledged alerts; by default in the user's data folder.",
            envvar="HILBERT_MONITOR_DATA",
            file_okay=False,
        ),
    ] = None,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Offer no notes, tags, archive and acknowledgements.")
    ] = False,
    reexport: Annotated[
        bool,
        typer.Option(
            "--reexport",
            help="Give Prometheus all runs at /metrics, also those with a port of their own. Use it if Prometheus"
            " scrapes no run itself.",
        ),
    ] = False,
    browser: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Show runs live in the browser until Ctrl-C: AdamW against RowNorm, each run, its tokens and its alerts.

    It never changes a run. On this machine it needs no token; for others, give --host and send them the link that it
    prints.

    Example: hilbert-monitor serve runs --port 8000
    """
    from hilbert_monitor.service.web import server

    if token is not None and len(token.strip()) < SHORTEST_TOKEN:
        raise typer.BadParameter(
            f"a token of {len(token.strip())} characters can be guessed: give at least {SHORTEST_TOKEN}, as"
            " 'openssl rand -hex 24' makes them, or none, and one is made up where it is needed",
            param_hint="--token",
        )
    if runs.exists() and not runs.is_dir():
        raise typer.BadParameter(f"{runs} is not a folder: give the one that runs are logged to")
    source = context.get_parameter_source("token")
    try:
        server.serve(
            runs,
            host=host,
            port=port,
            token=token,
            show_token=source is None or source.name != "ENVIRONMENT",
            cache=False if no_cache else cache or True,
            data=False if read_only else data or True,
            reexport=reexport,
            open_browser=browser,
        )
    except server.AddressError as error:
        raise typer.BadParameter(str(error)) from None

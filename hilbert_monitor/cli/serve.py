"""``hilbert-monitor serve``: the live dashboard."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def serve(
    runs: Annotated[Path, typer.Argument(help="Folder of the runs. It need not exist yet.")] = Path("runs"),
    host: Annotated[
        str, typer.Option(help="Address to listen at. An address that other machines reach gets a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen at; 0 for any free one.", min=0, max=65535)] = 8000,
    token: Annotated[
        str | None, typer.Option(help="Password that visitors must give.", envvar="HILBERT_MONITOR_TOKEN")
    ] = None,
    cache: Annotated[bool, typer.Option(help="Keep a cache beside the runs, which makes later starts quick.")] = True,
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

    It only reads. On this machine it needs no token; for others, give --host and send them the link that it prints.

    Example: hilbert-monitor serve runs --port 8000
    """
    from hilbert_monitor.service.web import server

    if token is not None and not token.strip():
        raise typer.BadParameter("a token has at least one character: drop it, or give one", param_hint="--token")
    if runs.exists() and not runs.is_dir():
        raise typer.BadParameter(f"{runs} is not a folder: give the one that runs are logged to")
    try:
        server.serve(runs, host=host, port=port, token=token, cache=cache, reexport=reexport, open_browser=browser)
    except server.AddressError as error:
        raise typer.BadParameter(str(error)) from None

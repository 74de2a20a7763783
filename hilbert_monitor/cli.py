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
    optim: Annotated[bool, typer.Option("--optim", help="Measure the optimizers instead of the geometry.")] = False,
) -> None:
    """Measure against opponents in the same run.

    The geometry against all pairs, a bare matmul and one pass over the matrix; monitored training steps against bare
    ones; the optimizers against torch's own and a plain loop.

    Example: hilbert-monitor bench --increment step50.pt --json bench.json
    """
    from rich.console import Console

    from .bench import suite

    console = Console()
    if json is not None and not json.absolute().parent.is_dir():
        raise typer.BadParameter(f"the folder of {json} does not exist: create it first", param_hint="--json")
    if optim and increment:
        raise typer.BadParameter(
            "the optimizers are not measured on an increment: drop one of the two", param_hint="--optim"
        )
    try:
        jobs = list(suite.optimizer_jobs(quick=quick) if optim else suite.geometry_jobs(increment or [], quick=quick))
        if not (optim or increment):
            jobs += suite.monitor_jobs(quick=quick)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--increment") from None
    results = suite.run(jobs, console)
    suite.show(results, console)
    if json is not None:
        suite.write_json(results, json)
        console.print(f"written to {json}")


@app.command()
def doctor(
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1 or mps; by default the best: cuda, or cpu.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Also write the findings to this file, as JSON.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes: to see that it runs.")] = False,
) -> None:
    """Check on this machine what the package claims, and say which claim fails.

    Exactness, increments, a run unchanged to the bit, DDP, and overhead. The exit code is 1 if any claim fails.

    Example: hilbert-monitor doctor --device cuda --json doctor.json
    """
    from rich.console import Console

    from .doctor import report
    from .doctor.device import Sizes, choose

    if json is not None and not json.absolute().parent.is_dir():
        raise typer.BadParameter(f"the folder of {json} does not exist: create it first", param_hint="--json")
    try:
        chosen = choose(device)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    console = Console()
    findings = report.run(report.all_checks(chosen, Sizes.of(chosen, quick=quick)), console)
    report.show(findings, chosen, console)
    if json is not None:
        report.write_json(findings, chosen, json)
        console.print(f"written to {json}")
    raise typer.Exit(1 if report.failed(findings) else 0)

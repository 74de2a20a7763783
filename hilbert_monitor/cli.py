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
    faults: Annotated[
        bool, typer.Option("--faults", help="Put faults into training runs, and see who notices them (ten minutes).")
    ] = False,
) -> None:
    """Measure against opponents in the same run.

    The geometry against all pairs, a bare matmul and one pass over the matrix; monitored training steps against bare
    ones; the optimizers against torch's own and a plain loop; the blow-up rules against spike detectors.

    Example: hilbert-monitor bench --increment step50.pt --json bench.json
    """
    from rich.console import Console

    from .bench import suite
    from .bench.faults import Plan

    console = Console()
    if json is not None and not json.absolute().parent.is_dir():
        raise typer.BadParameter(f"the folder of {json} does not exist: create it first", param_hint="--json")
    if bool(increment) + optim + faults > 1:
        raise typer.BadParameter("--increment, --optim and --faults measure different things: give one of them")
    if faults:
        found = suite.run_faults(Plan.quick() if quick else Plan(), console)
        suite.show_faults(found, console)
        if json is not None:
            suite.write_json(found, json)
            console.print(f"written to {json}")
        return
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


@app.command()
def tokenize(
    text: Annotated[list[Path], typer.Argument(help="Text files, or folders of .txt, .py and .md files.")],
    out: Annotated[Path, typer.Option(help="Folder for the shards and the tokenizer.", file_okay=False)],
    vocab_size: Annotated[
        int | None, typer.Option(help="Train a byte-level BPE with this many tokens, 8192 by default.")
    ] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Use this tokenizer.json instead.")] = None,
    shard_tokens: Annotated[int, typer.Option(help="Tokens to a shard.")] = 100_000_000,
    validation: Annotated[float, typer.Option(help="Part of the documents that is held out.")] = 0.05,
    force: Annotated[bool, typer.Option("--force", help="Replace the shards that were made there before.")] = False,
) -> None:
    """Make shards of tokens from text files, to train on.

    A file is a document, or several with <|endoftext|> between them. Nothing appears in the folder before all is done.

    Example: hilbert-monitor tokenize books/ --out shards --vocab-size 32000
    """
    from rich.console import Console

    from .pretrain import tokenization

    if vocab_size is not None and tokenizer is not None:
        raise typer.BadParameter(
            "a tokenizer that is given is not trained: drop one of the two", param_hint="--tokenizer"
        )
    console = Console()
    try:
        made = tokenization.tokenize(
            text,
            out,
            vocab_size=8192 if vocab_size is None else vocab_size,
            tokenizer=tokenizer,
            shard_tokens=shard_tokens,
            validation=validation,
            force=force,
            console=console,
        )
    except (ValueError, FileNotFoundError, FileExistsError) as error:
        raise typer.BadParameter(str(error)) from None
    console.print(
        f"{made.train_tokens:,} tokens to train on and {made.validation_tokens:,} to validate on, in {made.shards}"
        f" shards and a vocabulary of {made.vocab_size:,}, written to {out}",
        soft_wrap=True,
    )

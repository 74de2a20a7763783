"""The command line, ``hilbert-monitor``.

A command imports what it needs when it runs, so that ``--help`` is quick.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from inspect import getdoc
from pathlib import Path
from typing import Annotated, Any

import typer

from hilbert_monitor import __version__

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)


def _in_a_folder(path: Path | None) -> Path | None:
    """Refuse a file whose folder does not exist, before the work that it would be lost with."""
    if path is not None and not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"the folder of {path} does not exist: create it first")
    return path


def _output(help: str, **settings: Any) -> Any:
    """Return an option for a file, or a folder, that a command writes when its work is done."""
    return typer.Option(help=help, callback=_in_a_folder, **settings)


JsonFile = Annotated[Path | None, _output("Also write the results to this file, as JSON.")]


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


def demo(
    out: Annotated[Path, typer.Option(help="Folder for data, run logs, checkpoints and the report.")] = Path("demo"),
    steps: Annotated[int, typer.Option(help="Updates of each run.")] = 300,
    seeds: Annotated[int, typer.Option(help="Number of pairs to train, one after the other.", min=1)] = 1,
    text: Annotated[
        list[Path] | None, typer.Option(help="Text files or folders to train on, instead of Python's own sources.")
    ] = None,
    json: JsonFile = None,
    serve: Annotated[bool, typer.Option(help="Show the runs live in the browser, until Ctrl-C.")] = True,
    port: Annotated[
        int | None,
        typer.Option(help="Port of the dashboard. By default 8000, or a free one if that is taken.", min=0, max=65535),
    ] = None,
    change: Annotated[
        list[str] | None, typer.Option("--set", help="Override any number of the recipe, as in --set width=64.")
    ] = None,
) -> None:
    """Train a model with an AdamW head and one with a RowNorm head, and compare them: minutes on two CPU cores.

    Example: hilbert-monitor demo --steps 300 --json demo.json
    """
    from rich.console import Console

    from hilbert_monitor import demo as pairs
    from hilbert_monitor.pretrain import recipe as recipes
    from hilbert_monitor.service.web.server import AddressError

    console = Console()
    try:
        changes = recipes.parse_changes(change or [])
        if fixed := {"head", "head_lr", "seed"} & changes.keys():
            raise ValueError(f"--set {fixed.pop()}: the demo trains both heads, each at its own learning rate: drop it")
        recipe = recipes.recipe("demo", **{"updates": steps, **changes})
        with pairs.dashboard(out / "runs", port, console) if serve else nullcontext() as url:
            runs = pairs.train_pairs(out, recipe, seeds=seeds, texts=text or [], console=console)
            pairs.show(runs, recipe, console)
            if any(run.step for run in runs):
                console.print(f"curves: {pairs.write_report(out)}; run logs: {out / 'runs'}", soft_wrap=True)
            if json is not None:
                pairs.write_json(pairs.results(runs, out / "runs"), json)
                console.print(f"written to {json}", soft_wrap=True)
            if url is not None and all(run.step == recipe.updates for run in runs):
                with suppress(KeyboardInterrupt):
                    console.print(f"the dashboard stays at {url} until Ctrl-C", soft_wrap=True)
                    signal.pause()
    except (ValueError, FileNotFoundError, FileExistsError, AddressError) as error:
        raise typer.BadParameter(str(error)) from None
    except RuntimeError as error:
        console.print(str(error), style="red")
        raise typer.Exit(1) from None


def pretrain(
    size: Annotated[str, typer.Option(help="190M, 380M, 640M, or demo.")],
    data: Annotated[
        Path | None, typer.Option(help="Folder of the token shards; hilbert-monitor tokenize makes one.")
    ] = None,
    head: Annotated[str, typer.Option(help="Optimizer of the LM head: rownorm or adamw.")] = "rownorm",
    seed: Annotated[int, typer.Option(help="Seed of the weights and of the order of the data.")] = 0,
    devices: Annotated[
        int | None,
        typer.Option(
            help="Devices on each machine. By default all visible GPUs, or one CPU process; eight for --plan."
        ),
    ] = None,
    nodes: Annotated[int, typer.Option(help="Number of machines.")] = 1,
    strategy: Annotated[
        str,
        typer.Option(
            help="What devices share: ddp, the data; fsdp, also the parameters; tp=N, also each matrix, N devices."
        ),
    ] = "ddp",
    change: Annotated[
        list[str] | None,
        typer.Option("--set", help="Override any number of the recipe, as in --set width=64 --set updates=100."),
    ] = None,
    runs: Annotated[Path, typer.Option(help="Folder for the run logs.")] = Path("runs"),
    checkpoints: Annotated[Path, typer.Option(help="Folder for the checkpoints.")] = Path("checkpoints"),
    name: Annotated[str, typer.Option(help="Name of the run. By default its size, head and seed.")] = "",
    resume: Annotated[
        bool, typer.Option(help="Continue from the last checkpoint of this name, if there is one.")
    ] = True,
    accelerator: Annotated[str, typer.Option(help="auto, gpu or cpu.")] = "auto",
    plan: Annotated[
        bool, typer.Option("--plan", help="Print the memory, FLOPs, tokens and hours of the run, and stop.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print neither the recipe nor progress.")] = False,
) -> None:
    """Train a language model by the paper's recipe, with the monitor attached.

    Example: hilbert-monitor pretrain --size 190M --head rownorm --seed 0 --data fineweb100B --devices 8
    """
    import torch
    from rich.console import Console

    from hilbert_monitor.doctor import bf16
    from hilbert_monitor.pretrain import recipe as recipes
    from hilbert_monitor.pretrain.data import TRAIN, VALIDATION, find_shards

    console = Console()
    gpus = torch.cuda.device_count() if accelerator != "cpu" else 0
    if devices is None:
        devices = recipes.PAPER[size].devices if plan and size in recipes.PAPER else gpus or 1
    try:
        if not plan and gpus and devices > gpus:
            raise ValueError(f"--devices {devices}: torch sees {gpus} GPUs here: ask for no more")
        numbers = {"head": head, "seed": seed, "devices": devices, "nodes": nodes, "strategy": strategy}
        recipe = recipes.recipe(size, **numbers | recipes.parse_changes(change or []))
        if plan:
            from hilbert_monitor.pretrain import plan as plans

            plans.show(plans.plan(recipe), console)
            return
        if data is None:
            raise ValueError("give the folder of the token shards as --data; hilbert-monitor tokenize makes one")
        for pattern in (TRAIN, VALIDATION):
            find_shards(data, pattern)
        if not gpus and "16" in recipe.precision and not bf16.bf16_products_run():
            raise ValueError(
                f"the recipe trains in {recipe.precision}, but {bf16.CAUSE}: {bf16.REMEDY}, or train in fp32 with --set"
                " precision=32-true"
            )
    except (ValueError, FileNotFoundError) as error:
        raise typer.BadParameter(str(error)) from None
    from hilbert_monitor.pretrain.train import RunPaths, train

    paths = RunPaths(data, runs, checkpoints, name)
    if resume:
        try:
            paths.last_checkpoint(recipe)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
    if not quiet:
        console.print(recipe.as_dict())
    train(recipe, paths, accelerator=accelerator, resume=resume, quiet=quiet)


def tokenize(
    text: Annotated[list[Path], typer.Argument(help="Text files, or folders of .txt, .py and .md files.")],
    out: Annotated[Path, typer.Option(help="Folder for the shards and the tokenizer.", file_okay=False)],
    vocab_size: Annotated[
        int | None, typer.Option(help="Train a byte-level BPE tokenizer with this many tokens, 8192 by default.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Use this tokenizer.json instead of training a tokenizer.")
    ] = None,
    shard_tokens: Annotated[int, typer.Option(help="Tokens in each shard.")] = 100_000_000,
    validation: Annotated[float, typer.Option(help="Fraction of the documents to hold out for validation.")] = 0.05,
    force: Annotated[bool, typer.Option("--force", help="Replace the shards of an earlier call.")] = False,
) -> None:
    """Turn text files into token shards, the files that pretrain reads.

    A file is one document, or several with <|endoftext|> between them. The shards appear all at once, when all are
    done.

    Example: hilbert-monitor tokenize books/ --out shards --vocab-size 32000
    """
    from rich.console import Console

    from hilbert_monitor.pretrain import text as texts

    if vocab_size is not None and tokenizer is not None:
        raise typer.BadParameter(
            "a tokenizer that is given is not trained: drop one of the two", param_hint="--tokenizer"
        )
    console = Console()
    try:
        summary = texts.tokenize(
            text,
            out,
            vocab_size=texts.VOCAB_SIZE if vocab_size is None else vocab_size,
            tokenizer=tokenizer,
            shard_tokens=shard_tokens,
            validation=validation,
            force=force,
            console=console,
        )
    except (ValueError, FileNotFoundError, FileExistsError) as error:
        raise typer.BadParameter(str(error)) from None
    console.print(
        f"{summary.train_tokens:,} tokens to train on and {summary.validation_tokens:,} to validate on, in"
        f" {summary.shards} shards and a vocabulary of {summary.vocab_size:,}, written to {out}",
        soft_wrap=True,
    )


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


def report(
    runs: Annotated[Path, typer.Argument(help="Folder of the runs, or of one run.")],
    out: Annotated[Path, _output("The HTML page to write; it opens without a network.", dir_okay=False)] = Path(
        "report.html"
    ),
    csv: Annotated[
        Path | None, _output("Also write table.csv and curves.csv into this folder.", file_okay=False)
    ] = None,
    json: Annotated[Path | None, _output("Also write the numbers to this file, as JSON.")] = None,
    latex: Annotated[
        Path | None, _output("Also write the table to this file, in LaTeX with booktabs.", dir_okay=False)
    ] = None,
    figures: Annotated[
        Path | None, _output("Also write each figure into this folder, as an SVG.", file_okay=False)
    ] = None,
) -> None:
    """Compare runs on one page: the paper's table and figures, and the state of each run.

    It shows means and sample deviations over seeds for each optimizer of the LM head, ratios of AdamW to RowNorm, and
    differences over pairs that share seed, model, panel and settings. Then come the settings, those that differ first,
    and the versions of the software. The page prints well, with vector figures. For a single run it has the panels of
    that run.

    Example: hilbert-monitor report runs --out report.html --latex table.tex --figures figures
    """
    from rich.console import Console

    from hilbert_monitor.service.figures.comparison import compare
    from hilbert_monitor.service.report import illustrations, page, summary
    from hilbert_monitor.service.report import latex as latex_form

    try:
        loaded = summary.load(runs)
        comparisons = compare(loaded)
        out.write_text(page.page(loaded, comparisons), encoding="utf-8")
        if csv is not None:
            summary.write_csv(comparisons, csv)
        if json is not None:
            summary.write_json(loaded, comparisons, json)
        if latex is not None:
            latex.write_text(latex_form.tables(comparisons), encoding="utf-8")
        if figures is not None:
            illustrated = illustrations.illustrations(loaded, comparisons)
            illustrations.write_svg([one for some in illustrated for one in some], figures)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    except OSError as error:
        raise typer.BadParameter(f"cannot read or write: {error}") from None
    console = Console(soft_wrap=True, highlight=False, markup=False)
    for comparison in comparisons:
        console.print(summary.headline(comparison))
    console.print("written to " + ", ".join(str(path) for path in (out, csv, json, latex, figures) if path is not None))


def inspect(
    checkpoints: Annotated[list[Path], typer.Argument(help="Files or folders, in the order of the run.")],
    head: Annotated[
        str | None, typer.Option(help="Name of the head's tensor or module, where it cannot be found.")
    ] = None,
    vocab_size: Annotated[int | None, typer.Option(min=2, help="Rows that are tokens, if the head is padded.")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="A tokenizer.json; by default the one beside the weights.", exists=True)
    ] = None,
    figure: Annotated[
        Path | None, _output("Also draw the checkpoints over their updates: an .svg or an .html file.", dir_okay=False)
    ] = None,
    json: JsonFile = None,
    efficiency: Annotated[
        float, typer.Option(min=0, help="Seconds a checkpoint in which the step's efficiency is bracketed; 0 for none.")
    ] = 1.0,
    trust: Annotated[
        bool, typer.Option("--trust", help="Unpickle objects of any class. This runs code of the file.")
    ] = False,
) -> None:
    """Look at the LM head of checkpoints: nothing is attached, trained or changed.

    Reads Lightning checkpoints, Hugging Face folders, safetensors files and files of torch.save, and of each the head
    alone. It prints the head's row diameter with its two tokens, the norms of its rows, and its spectral norm. Where a
    checkpoint has its optimizer's moments, it prints the step that they would make next if the next gradient were zero:
    its diameter, how much of the optimizer's ceiling that is, and how much descent it makes. Several checkpoints become
    a table, and with --figure a figure. One that cannot be read is named at the end, and the exit code is then 2.

    Example: hilbert-monitor inspect runs/checkpoint-500 runs/checkpoint-1000 --figure heads.html
    """
    from rich.console import Console

    from hilbert_monitor.inspection import display
    from hilbert_monitor.inspection.look import look
    from hilbert_monitor.inspection.tensor_store import CheckpointError

    if figure is not None and figure.suffix.lower() not in (".svg", ".html"):
        raise typer.BadParameter(f"--figure takes a file that ends in .svg or .html, got {figure}")
    settings = {"head": head, "vocab_size": vocab_size, "tokenizer": tokenizer, "efficiency": efficiency}
    looks, bad = [], []
    for path in checkpoints:
        try:
            looks.append(look(path, trust=trust, **settings))  # type: ignore[arg-type]
        except CheckpointError as error:
            bad.append(f"{path}: {error}" if str(path) not in str(error) else str(error))
        except OSError as error:
            bad.append(f"cannot read: {error}")
    if not looks:
        raise typer.BadParameter("\n".join(bad))
    console = Console(highlight=False)
    display.show(looks, console)
    try:
        if json is not None:
            display.write_json(looks, json)
        if figure is not None:
            from hilbert_monitor.inspection.figure import write_figure

            write_figure(looks, figure)
    except OSError as error:
        raise typer.BadParameter(f"cannot write: {error}") from None
    if written := [str(path) for path in (json, figure) if path is not None]:
        console.print(f"written to {', '.join(written)}", soft_wrap=True, markup=False)
    if bad:
        raise typer.BadParameter("\n".join([*bad, f"the other {len(looks)} of {len(checkpoints)} are shown above"]))


def doctor(
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1 or mps. By default cuda if torch sees it, else cpu.")
    ] = None,
    json: Annotated[Path | None, _output("Also write the findings to this file, as JSON.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Use small sizes, only to see that it runs.")] = False,
) -> None:
    """Check on this machine what the package claims, and name each claim that fails.

    It checks that the numbers are exact, that the measured increments are those of the optimizers, that a monitored run
    is the same to the bit, that several processes agree, and what the monitor costs. On a processor whose bf16 products
    end the process it says so, and checks the rest without them. The exit code is 1 if a claim fails.

    Example: hilbert-monitor doctor --device cuda --json doctor.json
    """
    from rich.console import Console

    from hilbert_monitor.doctor import bf16

    asks_for_cpu = device is None or device.startswith("cpu")
    broken = asks_for_cpu and "torch" not in sys.modules and bf16.leave_out_broken_amx()

    from hilbert_monitor.doctor import report
    from hilbert_monitor.doctor.device import CheckSizes, choose

    try:
        chosen = choose(device)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    console = Console()
    findings = [bf16.broken_amx_finding()] if broken and chosen.type == "cpu" else []
    findings += report.run(report.all_checks(chosen, CheckSizes.of(chosen, quick=quick)), console)
    report.show(findings, chosen, console)
    if json is not None:
        report.write_json(findings, chosen, json)
        console.print(f"written to {json}", soft_wrap=True)
    raise typer.Exit(1 if report.failed(findings) else 0)


def _help_text(command: Callable[..., None]) -> str:
    """Join the lines of each paragraph of a command's docstring: the terminal breaks them where its width ends."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in (getdoc(command) or "").split("\n\n"))


for command in (demo, pretrain, tokenize, serve, report, inspect, doctor):
    app.command(help=_help_text(command))(command)

"""The command line. Commands import what they need when they run, so that ``--help`` is quick."""

from __future__ import annotations

import signal
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Annotated

import typer

from hilbert_monitor import __version__

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
    service: Annotated[
        bool, typer.Option("--service", help="Measure the service on 200 long runs (5 GB, some minutes).")
    ] = False,
    oracle: Annotated[
        bool, typer.Option("--oracle", help="Bracket the tension of a gradient, or of increments that are given.")
    ] = False,
) -> None:
    """Measure against opponents in the same run.

    The geometry against all pairs, a bare matmul and one pass over the matrix; monitored training steps against bare
    ones; the optimizers against torch's own and a plain loop; the blow-up rules against spike detectors; the service
    against its limits and TensorBoard; the bracket of the best descent against what was known before.

    Example: hilbert-monitor bench --increment step50.pt --json bench.json
    """
    from rich.console import Console

    from hilbert_monitor.bench.faults import TrialPlan
    from hilbert_monitor.bench.service import ServiceLoad

    from .bench import fault_summary, suite

    console = Console()
    if json is not None and not json.absolute().parent.is_dir():
        raise typer.BadParameter(f"the folder of {json} does not exist: create it first", param_hint="--json")
    given = {"--increment": increment and not oracle, "--optim": optim, "--faults": faults, "--service": service}
    chosen = [name for name, on in {**given, "--oracle": oracle}.items() if on]
    if len(chosen) > 1:
        raise typer.BadParameter(f"{' and '.join(chosen)} measure different things: give one of them")
    if oracle:
        try:
            found_gaps = suite.run_oracle(increment or [], console, quick=quick)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--increment") from None
        if json is not None:
            suite.write_json(found_gaps, json)
            console.print(f"written to {json}")
        return
    if service:
        try:
            results, remarks = suite.run_service(ServiceLoad.quick() if quick else ServiceLoad(), console)
        except RuntimeError as error:
            console.print(str(error), style="red", soft_wrap=True)
            raise typer.Exit(1) from None
        suite.show(results, console)
        for remark in remarks:
            console.print(remark, style="yellow", soft_wrap=True)
        if json is not None:
            suite.write_json(results, json)
            console.print(f"written to {json}")
        return
    if faults:
        found = suite.run_faults(TrialPlan.quick() if quick else TrialPlan(), console)
        fault_summary.show(found, console)
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

    from hilbert_monitor.doctor.device import CheckSizes, choose

    from .doctor import report

    if json is not None and not json.absolute().parent.is_dir():
        raise typer.BadParameter(f"the folder of {json} does not exist: create it first", param_hint="--json")
    try:
        chosen = choose(device)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    console = Console()
    findings = report.run(report.all_checks(chosen, CheckSizes.of(chosen, quick=quick)), console)
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


@app.command()
def pretrain(
    size: Annotated[str, typer.Option(help="190M, 380M, 640M, or demo.")],
    data: Annotated[Path | None, typer.Option(help="Folder of the token shards.")] = None,
    head: Annotated[str, typer.Option(help="Optimizer of the LM head: rownorm or adamw.")] = "rownorm",
    seed: Annotated[int, typer.Option(help="Of weights and data.")] = 0,
    devices: Annotated[
        int | None, typer.Option(help="Devices of a node; by default all visible GPUs, or one CPU process.")
    ] = None,
    nodes: Annotated[int, typer.Option(help="Machines.")] = 1,
    change: Annotated[
        list[str] | None,
        typer.Option("--set", help="Override any number of the recipe, as in --set width=64 --set updates=100."),
    ] = None,
    runs: Annotated[Path, typer.Option(help="Folder of the run logs.")] = Path("runs"),
    checkpoints: Annotated[Path, typer.Option(help="Folder of the checkpoints.")] = Path("checkpoints"),
    name: Annotated[str, typer.Option(help="What the run is called; by default size, head and seed.")] = "",
    resume: Annotated[bool, typer.Option(help="Go on from the last checkpoint of this name, if there is one.")] = True,
    accelerator: Annotated[str, typer.Option(help="auto, gpu or cpu.")] = "auto",
    plan: Annotated[bool, typer.Option("--plan", help="Print what the run would take, and do not run it.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
) -> None:
    """Run the paper's pretraining recipe.

    Example: hilbert-monitor pretrain --size 190M --head rownorm --seed 0 --data fineweb100B --devices 8
    """
    import torch
    from rich.console import Console

    from hilbert_monitor.pretrain.shards import TRAIN, VALIDATION, find_shards

    from .pretrain import recipes

    console = Console()
    gpus = torch.cuda.device_count() if accelerator != "cpu" else 0
    asked = (
        devices
        if devices is not None
        else (recipes.PAPER[size].devices if plan and size in recipes.PAPER else gpus or 1)
    )
    try:
        if not plan and gpus and asked > gpus:
            raise ValueError(f"--devices {asked}: torch sees {gpus} GPUs here: ask for no more")
        named = {"head": head, "seed": seed, "devices": asked, "nodes": nodes}
        recipe = recipes.recipe(size, **named | recipes.parse_changes(change or []))
        if plan:
            from hilbert_monitor.pretrain.plan import plan as projection
            from hilbert_monitor.pretrain.plan_tables import show as show_plan

            show_plan(projection(recipe), console)
            return
        if data is None:
            raise ValueError("give the folder of the token shards as --data; hilbert-monitor tokenize makes one")
        for pattern in (TRAIN, VALIDATION):
            find_shards(data, pattern)
    except (ValueError, FileNotFoundError) as error:
        raise typer.BadParameter(str(error)) from None
    from hilbert_monitor.pretrain.module import Places, train

    if not quiet:
        console.print(recipe.as_dict())
    train(recipe, Places(data, runs, checkpoints, name), accelerator=accelerator, resume=resume, quiet=quiet)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for data, run logs and checkpoints.")] = Path("demo"),
    steps: Annotated[int, typer.Option(help="Updates of each run.")] = 300,
    seeds: Annotated[int, typer.Option(help="Pairs to train, one after the other.")] = 1,
    text: Annotated[
        list[Path] | None, typer.Option(help="Text files or folders to train on, in place of Python's own sources.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Also write the results to this file, as JSON.")] = None,
    serve: Annotated[bool, typer.Option(help="Show the runs live in the browser, and go on until Ctrl-C.")] = True,
    port: Annotated[
        int | None, typer.Option(help="Of the dashboard; by default 8000, or any if that is taken.", min=0, max=65535)
    ] = None,
    change: Annotated[list[str] | None, typer.Option("--set", help="Override any number of the recipe.")] = None,
) -> None:
    """Train an AdamW head and a RowNorm head side by side, and compare them: minutes on two CPU cores.

    Example: hilbert-monitor demo --steps 300 --json demo.json
    """
    from rich.console import Console

    from hilbert_monitor.service.web.server import AddressError

    from . import demo as pair
    from .pretrain import recipes

    console = Console()
    if json is not None and not json.absolute().parent.is_dir():
        raise typer.BadParameter(f"the folder of {json} does not exist: create it first", param_hint="--json")
    try:
        overrides = recipes.parse_changes(change or [])
        if fixed := {"head", "head_lr", "seed"} & overrides.keys():
            raise ValueError(f"--set {fixed.pop()}: the demo trains both heads, each at its own learning rate: drop it")
        recipe = recipes.recipe("demo", **{"updates": steps, **overrides})
        with pair.dashboard(out / "runs", port, console) if serve else nullcontext() as url:
            done = pair.train_pairs(out, recipe, seeds=seeds, texts=text or [], console=console)
            pair.show(done, recipe, console)
            if any(one.step for one in done):
                console.print(f"curves: {pair.write_report(out)}; run logs: {out / 'runs'}", soft_wrap=True)
            if json is not None:
                pair.write_json(pair.results(done, out / "runs"), json)
                console.print(f"written to {json}")
            if url is not None and all(one.step == recipe.updates for one in done):
                console.print(f"the dashboard stays at {url} until Ctrl-C", soft_wrap=True)
                with suppress(KeyboardInterrupt):
                    signal.pause()
    except (ValueError, FileNotFoundError, AddressError) as error:
        raise typer.BadParameter(str(error)) from None
    except RuntimeError as error:
        console.print(str(error), style="red")
        raise typer.Exit(1) from None


@app.command()
def report(
    runs: Annotated[Path, typer.Argument(help="Folder of the runs, or of one run.")],
    out: Annotated[Path, typer.Option(help="The page; it needs no network.", dir_okay=False)] = Path("report.html"),
    csv: Annotated[
        Path | None, typer.Option(help="Also write table.csv and curves.csv into this folder.", file_okay=False)
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Also write the numbers to this file, as JSON.")] = None,
) -> None:
    """Compare runs: the paper's table and figures, and where each run stands, on one page.

    Means and sample deviations over seeds, by the optimizer of the LM head; ratios of AdamW to RowNorm; differences
    over pairs of one seed, model and panel.

    Example: hilbert-monitor report runs --out report.html --json report.json
    """
    from rich.console import Console

    from hilbert_monitor.service.figures.comparison import compare
    from hilbert_monitor.service.report import page
    from hilbert_monitor.service.report import summary as service

    for path, option in ((out, "--out"), (csv, "--csv"), (json, "--json")):
        if path is not None and not path.absolute().parent.is_dir():
            raise typer.BadParameter(f"the folder of {path} does not exist: create it first", param_hint=option)
    try:
        found = service.load(runs)
        compared = compare(run.series for run in found)
        out.write_text(page.page(found, compared), encoding="utf-8")
        if csv is not None:
            service.write_csv(compared, csv)
        if json is not None:
            service.write_json(found, compared, json)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    except OSError as error:
        raise typer.BadParameter(f"cannot read or write: {error}") from None
    console = Console(soft_wrap=True, highlight=False, markup=False)
    for comparison in compared:
        console.print(service.headline(comparison))
    console.print("written to " + ", ".join(str(path) for path in (out, csv, json) if path is not None))


@app.command()
def serve(
    runs: Annotated[Path, typer.Argument(help="Folder of the runs; it may come into being later.")] = Path("runs"),
    host: Annotated[
        str, typer.Option(help="Address to listen at. One that others can reach gets a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen at; 0 for any that is free.", min=0, max=65535)] = 8000,
    token: Annotated[
        str | None, typer.Option(help="What a visitor has to know.", envvar="HILBERT_MONITOR_TOKEN")
    ] = None,
    cache: Annotated[bool, typer.Option(help="Keep what was read beside the runs: later starts are quick.")] = True,
    reexport: Annotated[
        bool,
        typer.Option(
            "--reexport",
            help="Give Prometheus all runs at /metrics, also those with a port of their own: none is a target.",
        ),
    ] = False,
    browser: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Show runs live in the browser, until Ctrl-C: AdamW against RowNorm, each run, its tokens and its alerts.

    It only reads. On this machine it needs no token; for others, give --host and send them the link that it prints.

    Example: hilbert-monitor serve runs --port 8000
    """
    from hilbert_monitor.service.web import server as service

    if token is not None and not token.strip():
        raise typer.BadParameter("a token has at least one character: drop it, or give one", param_hint="--token")
    if runs.exists() and not runs.is_dir():
        raise typer.BadParameter(f"{runs} is not a folder: give the one that runs are logged to")
    try:
        service.serve(runs, host=host, port=port, token=token, cache=cache, reexport=reexport, open_browser=browser)
    except service.AddressError as error:
        raise typer.BadParameter(str(error)) from None

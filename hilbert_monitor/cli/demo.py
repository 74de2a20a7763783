"""``hilbert-monitor demo``: two small runs side by side, with a live dashboard."""

from __future__ import annotations

import signal
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Annotated

import typer

from .options import JsonFile


def demo(
    out: Annotated[Path, typer.Option(help="Folder for data, run logs and checkpoints.")] = Path("demo"),
    steps: Annotated[int, typer.Option(help="Updates of each run.")] = 300,
    seeds: Annotated[int, typer.Option(help="Number of pairs to train, one after the other.")] = 1,
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
    from hilbert_monitor.pretrain import recipes
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
    except (ValueError, FileNotFoundError, AddressError) as error:
        raise typer.BadParameter(str(error)) from None
    except RuntimeError as error:
        console.print(str(error), style="red")
        raise typer.Exit(1) from None

"""``hilbert-monitor pretrain``: one run of the paper's experiment."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def pretrain(
    size: Annotated[str, typer.Option(help="190M, 380M, 640M, or demo.")],
    data: Annotated[
        Path | None, typer.Option(help="Folder of the token shards; hilbert-monitor tokenize makes one.")
    ] = None,
    head: Annotated[str, typer.Option(help="Optimizer of the LM head: rownorm or adamw.")] = "rownorm",
    seed: Annotated[int, typer.Option(help="Seed of the weights and of the order of the data.")] = 0,
    devices: Annotated[
        int | None, typer.Option(help="Devices on each machine. By default all visible GPUs, or one CPU process.")
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
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress bar.")] = False,
) -> None:
    """Train a language model by the paper's recipe, with the monitor attached.

    Example: hilbert-monitor pretrain --size 190M --head rownorm --seed 0 --data fineweb100B --devices 8
    """
    import torch
    from rich.console import Console

    from hilbert_monitor.doctor import bf16
    from hilbert_monitor.pretrain import recipes
    from hilbert_monitor.pretrain.shards import TRAIN, VALIDATION, find_shards

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
    from hilbert_monitor.pretrain.module import Places, train

    places = Places(data, runs, checkpoints, name)
    if resume:
        try:
            places.last_checkpoint(recipe)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
    if not quiet:
        console.print(recipe.as_dict())
    train(recipe, places, accelerator=accelerator, resume=resume, quiet=quiet)

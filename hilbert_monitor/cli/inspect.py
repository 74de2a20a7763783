"""``hilbert-monitor inspect``: a look at the LM head of checkpoints, without attaching anything."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import JsonFile, output


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
        Path | None, output("Also draw the checkpoints over their updates: an .svg or an .html file.", dir_okay=False)
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

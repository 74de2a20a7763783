"""``hilbert-monitor tokenize``: text files to shards of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


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

    from hilbert_monitor.pretrain import tokenization

    if vocab_size is not None and tokenizer is not None:
        raise typer.BadParameter(
            "a tokenizer that is given is not trained: drop one of the two", param_hint="--tokenizer"
        )
    console = Console()
    try:
        summary = tokenization.tokenize(
            text,
            out,
            vocab_size=tokenization.VOCAB_SIZE if vocab_size is None else vocab_size,
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

"""A look at checkpoints on the terminal and as JSON: one in full, several as a table over steps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hilbert_monitor.runs.files import to_json

from .look import HeadLook, Pair, StepLook


def show(looks: Sequence[HeadLook], console: Console) -> None:
    """Print one checkpoint in full, or several as a table, by their updates where all tell them."""
    if all(each.step is not None for each in looks):
        looks = sorted(looks, key=lambda each: each.step or 0)  # a shell lists checkpoint-1000 before checkpoint-500
    if len(looks) == 1:
        _show_one(looks[0], console)
    else:
        _show_several(looks, console)
    for each in looks:
        for remark in each.remarks:
            console.print(Text(f"{each.path}: {remark}" if len(looks) > 1 else remark), soft_wrap=True)
    if any(each.next is not None for each in looks):
        console.print(Text(f"the next step assumes: {next(x.next.assumed for x in looks if x.next)}"), soft_wrap=True)


def write_json(looks: Sequence[HeadLook], path: Path) -> None:
    """Write a list with an object for each checkpoint."""
    path.write_text(json.dumps([to_json(asdict(each)) for each in looks], indent=2) + "\n", encoding="utf-8")


def _show_one(each: HeadLook, console: Console) -> None:
    table = Table.grid(padding=(0, 2))
    for name, value in _lines(each):
        table.add_row(Text(name, style="dim"), Text(value))
    console.print(Text(each.path, style="bold"), soft_wrap=True)
    console.print(table)


def _lines(each: HeadLook) -> list[tuple[str, str]]:
    stored = ", stored as (d, V)" if each.transposed else ""
    lines = [
        ("checkpoint", each.kind + ("" if each.step is None else f", after {each.step:,} updates")),
        ("head", f"{each.head}: {each.tokens:,} tokens x {each.width:,}, {each.dtype}{stored}{_more(each)}"),
        ("D(U)", f"{each.diameter:.4g}, tokens {tokens(each.pair, each.pair_text)}"),
        ("rows", f"norm {each.row_norm:.4g} on average; the mean row, which softmax does not see, {each.mean_row:.4g}"),
        ("spectral norm", f"{each.spectral_norm:.4g}"),
    ]
    if each.nonfinite_rows:
        lines.append(("not finite", f"rows that hold an infinity or a nan: {each.nonfinite_rows:,}"))
    return lines + ([] if each.next is None else _step_lines(each.next))


def _step_lines(step: StepLook) -> list[tuple[str, str]]:
    number = "" if step.count is None else f" number {step.count:,.0f}"
    saturation = "" if step.saturation is None else f", {step.saturation:.1%} of the ceiling {step.ceiling:.4g}"
    lines = [
        ("next step", f"{step.optimizer}{number} at learning rate {step.learning_rate:.4g}"),
        ("  its state", f"found {step.matched}"),
        ("  D(S)", f"{step.diameter:.4g}{saturation}, tokens {tokens(step.pair, step.pair_text)}"),
        ("  spectral norm", f"{step.spectral_norm:.4g}"),
        ("  gauge waste", f"{step.gauge_waste:.2%} of it shifts all rows alike"),
    ]
    if step.efficiency_lower is not None and step.efficiency_upper is not None:
        between = f"{step.efficiency_lower:.1%} to {step.efficiency_upper:.1%}"
        lines.append(("  efficiency", f"{between} of the best descent along the moment at this diameter"))
    return lines


def _more(each: HeadLook) -> str:
    tied = f", tied to {each.tied}" if each.tied and each.tied != each.head else ", tied: it is the embedding too"
    return (
        (tied if each.tied else "")
        + (", with a bias" if each.bias else "")
        + (f", logits scaled by {each.logit_scale:g}" if each.logit_scale != 1 else "")
    )


def _show_several(looks: Sequence[HeadLook], console: Console) -> None:
    first = looks[0]
    alike = all((x.head, x.tokens, x.width) == (first.head, first.tokens, first.width) for x in looks)
    for each in [first] if alike else looks:
        console.print(Text("; ".join(value for name, value in _lines(each) if name == "head")), soft_wrap=True)
    names = _names(looks)
    heads = _table("checkpoint", "updates", "D(U)", "row", "mean row", "spectral", "tokens of D(U)")
    for name, each in zip(names, looks, strict=True):
        heads.add_row(*map(Text, (name, *_cells(each))))
    console.print(heads)
    steps = _table("next step", "optimizer", "D(S)", "saturation", "efficiency", "tokens of D(S)")
    for name, each in zip(names, looks, strict=True):
        if each.next is not None:
            steps.add_row(*map(Text, (name, *_step_cells(each.next))))
    if steps.row_count:
        console.print(steps)


def _table(first: str, *columns: str) -> Table:
    """A table of numbers, between a name and a text that may take several lines."""
    *numbers, last = columns
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, overflow="fold")
    for column in numbers:
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column(last, overflow="fold")
    return table


def _names(looks: Sequence[HeadLook]) -> list[str]:
    """The last parts of the paths, or the whole paths where two have the same."""
    names = [Path(each.path).name for each in looks]
    return names if len(set(names)) == len(names) else [each.path for each in looks]


def _cells(each: HeadLook) -> tuple[str, ...]:
    numbers = (each.diameter, each.row_norm, each.mean_row, each.spectral_norm)
    step = "" if each.step is None else f"{each.step:,}"
    return step, *(f"{x:.4g}" for x in numbers), tokens(each.pair, each.pair_text)


def _step_cells(step: StepLook) -> tuple[str, ...]:
    saturation = "" if step.saturation is None else f"{step.saturation:.1%}"
    efficiency = "" if step.efficiency_lower is None else f"{step.efficiency_lower:.0%} - {step.efficiency_upper:.0%}"
    return step.optimizer, f"{step.diameter:.4g}", saturation, efficiency, tokens(step.pair, step.pair_text)


def tokens(pair: Pair, texts: tuple[str, str] | None) -> str:
    """Two tokens with their texts, if these are known."""
    if texts is None:
        return f"{pair[0]} and {pair[1]}"
    return " and ".join(f"{token} {text!r}" for token, text in zip(pair, texts, strict=True))

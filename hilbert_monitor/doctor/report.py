"""Runs all checks in their order, and prints and writes the findings."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from . import bf16, ddp, exactness, increment, interference, overhead
from .device import CheckSizes, device_name, machine
from .finding import CLAIMS, Check, Finding, examine

ROOMS = (exactness, increment, interference, ddp, overhead)
COLOURS = {"ok": "green", "FAILED": "bold red", "skipped": "yellow", "not known": "yellow"}


def all_checks(device: torch.device, sizes: CheckSizes) -> list[Check]:
    """Return every check of every claim."""
    if device.type == "cuda":  # CUDA reads it at its start: without it cuBLAS may not give the same bits twice
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return [check for room in ROOMS for check in room.checks(device, sizes)]


def run(checks: Sequence[Check], console: Console) -> list[Finding]:
    """Run the checks behind a progress bar; if one fails, the others still run."""
    findings = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(checks))
        for check in checks:
            progress.update(task, description=escape(f"{check.claim}: {check.case}"))
            findings.append(examine(check))
            progress.advance(task)
    return findings


def failed(findings: Iterable[Finding]) -> list[str]:
    """Return the claims that failed."""
    return list(dict.fromkeys(f.claim for f in findings if f.verdict == "FAILED"))


def show(findings: Sequence[Finding], device: torch.device, console: Console) -> None:
    """Print the machine, the findings by claim, and a conclusion."""
    console.print(" | ".join(f"{name} {value}" for name, value in machine().items()), style="dim")
    table = Table(title=f"Checked on {device_name(device)}", title_justify="left", show_lines=False)
    table.add_column("claim", ratio=2)
    table.add_column("measured", ratio=3)
    table.add_column("verdict", no_wrap=True)
    table.add_column("seconds", justify="right", no_wrap=True)
    for claim in dict.fromkeys(f.claim for f in findings):
        table.add_section()
        table.add_row(f"[bold]{claim}[/]\n[dim]{CLAIMS.get(claim, '')}")
        for f in (f for f in findings if f.claim == claim):
            colour = COLOURS[f.verdict]
            table.add_row(escape(f.case), escape(f.measured), f"[{colour}]{f.verdict}", f"{f.seconds:.1f}")
    console.print(table)
    console.print(escape(conclusion(findings, device)))


def conclusion(findings: Sequence[Finding], device: torch.device) -> str:
    """Return the findings in one sentence."""
    wrong = failed(findings)
    if wrong == [bf16.CLAIM]:
        return f"1 claim failed: {bf16.CLAIM}; {bf16.REMEDY}, as the other checks did"
    if wrong:
        claims = "1 claim" if len(wrong) == 1 else f"{len(wrong)} claims"
        return f"{claims} failed: {', '.join(wrong)}; please open an issue with --json's output"
    skipped = sum(f.verdict == "skipped" for f in findings)
    unknown = list(dict.fromkeys(f.claim for f in findings if f.verdict == "not known"))
    rest = f", {skipped} of its checks skipped" if skipped else ""
    if unknown:
        return f"no claim fails on {device_name(device)}, and not known is: {', '.join(unknown)}{rest}; see above why"
    return f"every claim holds on {device_name(device)}{rest}"


def write_json(findings: Sequence[Finding], device: torch.device, path: Path) -> None:
    """Write the machine, the device and the findings as one JSON document."""
    document = {
        "machine": machine(),
        "device": {"name": device_name(device), "type": str(device), "gpus": torch.cuda.device_count()},
        "failed": failed(findings),
        "findings": [f.as_dict() for f in findings],
    }
    path.write_text(json.dumps(document, indent=2) + "\n")

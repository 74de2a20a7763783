"""``hilbert-monitor doctor``: check on this machine what the package claims."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from .options import Quick, output


def doctor(
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1 or mps. By default cuda if torch sees it, else cpu.")
    ] = None,
    json: Annotated[Path | None, output("Also write the findings to this file, as JSON.")] = None,
    quick: Quick = False,
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

"""``hilbert-monitor report``: the paper's table and figures of some runs, on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import output


def report(
    runs: Annotated[Path, typer.Argument(help="Folder of the runs, or of one run.")],
    out: Annotated[Path, output("The HTML page to write; it opens without a network.", dir_okay=False)] = Path(
        "report.html"
    ),
    csv: Annotated[
        Path | None, output("Also write table.csv and curves.csv into this folder.", file_okay=False)
    ] = None,
    json: Annotated[Path | None, output("Also write the numbers to this file, as JSON.")] = None,
) -> None:
    """Compare runs on one page: the paper's table and figures, and the state of each run.

    It shows means and sample deviations over seeds for each optimizer of the LM head, ratios of AdamW to RowNorm, and
    differences over pairs that share seed, model, panel and settings.

    Example: hilbert-monitor report runs --out report.html --json report.json
    """
    from rich.console import Console

    from hilbert_monitor.service.figures.comparison import compare
    from hilbert_monitor.service.report import page, summary

    try:
        loaded = summary.load(runs)
        comparisons = compare(run.series for run in loaded)
        out.write_text(page.page(loaded, comparisons), encoding="utf-8")
        if csv is not None:
            summary.write_csv(comparisons, csv)
        if json is not None:
            summary.write_json(loaded, comparisons, json)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    except OSError as error:
        raise typer.BadParameter(f"cannot read or write: {error}") from None
    console = Console(soft_wrap=True, highlight=False, markup=False)
    for comparison in comparisons:
        console.print(summary.headline(comparison))
    console.print("written to " + ", ".join(str(path) for path in (out, csv, json) if path is not None))

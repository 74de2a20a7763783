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
    latex: Annotated[
        Path | None, output("Also write the table to this file, in LaTeX with booktabs.", dir_okay=False)
    ] = None,
    figures: Annotated[
        Path | None, output("Also write each figure into this folder, as an SVG.", file_okay=False)
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
        comparisons = compare(run.series for run in loaded)
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

"""The section of a report about one model: the main numbers, the paper's table and the figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from hilbert_monitor.service.figures import compare_figures
from hilbert_monitor.service.figures.comparison import BASELINE, CANDIDATE, Comparison
from hilbert_monitor.service.figures.contrasts import Contrast
from hilbert_monitor.service.figures.final_values import SampleStatistics
from hilbert_monitor.service.figures.looks import looks
from hilbert_monitor.service.figures.plot_options import PlotOptions
from hilbert_monitor.service.following.published import PAPER, Figure, Published

from .markup import (
    DASH,
    MINUS,
    TIMES,
    Value,
    absolute_difference,
    factor,
    fixed,
    plural,
    relative_difference,
    scientific,
    signed,
    signed_fixed,
    table,
    text,
)

HEADS = ("LM head", "Validation loss", "D(S)", "Hilbert RMS", "Runs")
RATIO = "ratio"
"""Stands for the title of the figure of ratios, which says what they are of."""
FIGURES = {
    "Loss": compare_figures.loss,
    "Row diameter of a step": compare_figures.diameter,
    "Hilbert RMS perturbation": compare_figures.perturbation,
    RATIO: compare_figures.ratio,
}


def model_section(c: Comparison, *, with_title: bool) -> tuple[str, list[dict[str, Any]]]:
    """The HTML of a model's section, and the plotly figures for the places that it has for them."""
    figures = _figures(c)
    title = f"<h2>{text(c.model)}</h2>" if with_title or c.model in PAPER else ""
    notes = "".join(f"<li>{text(note, 1000)}</li>" for note in filter(None, (c.about, *c.notes, *_length_notes(c))))
    notes = f'<ul class="notes">{notes}</ul>' if notes else ""
    section = f"{title}{_cards(c)}{_table(c)}{notes}{_figure_places(c, list(figures))}"
    return f'<section class="model">{section}</section>', list(figures.values())


def _length_notes(c: Comparison) -> Iterator[str]:
    """A note if these runs are shorter or longer than those of the paper beside which they are shown."""
    published, steps = PAPER.get(c.model), {run.step for run in c.counted if run.step is not None}
    if published and steps and steps != {published.updates}:
        updates = " to ".join(f"{step:,}" for step in sorted({min(steps), max(steps)}))
        yield f"The paper trained this model for {published.updates:,} updates, these runs made {updates}."


# The main numbers


def _cards(c: Comparison) -> str:
    """The two ratios and the difference in validation loss, in large type; nothing if there are several contrasts."""
    paper = _paper_of(c, c.contrast)
    cards = [
        _ratio_card(c.contrast, "step_diameter", "steps", "Row diameter D(S)", paper),
        _ratio_card(c.contrast, "perturbation_rms", "perturbation", "Hilbert RMS on the panel", paper),
        _difference_card(c.contrast, paper),
    ]
    content = "".join(cards)
    return f'<div class="hero">{content}</div>' if content else ""


def _paper_of(c: Comparison, contrast: Contrast) -> Published | None:
    """The paper's numbers of this model, if the contrast is the paper's."""
    return PAPER.get(c.model) if (contrast.baseline, contrast.candidate) == (BASELINE, CANDIDATE) else None


def _ratio_card(c: Contrast, metric: str, noun: str, title: str, paper: Published | None) -> str:
    ratio = c.ratios[metric]
    if ratio is None or ratio <= 0:
        return ""
    size, word = (ratio, "smaller") if ratio >= 1 else (1 / ratio, "larger")
    number = f"{size:,.{1 if size < 1000 else 0}f}{TIMES}"
    label = f"{word if size >= 1.05 else 'the'} {noun}"
    in_paper = f"; in the paper {paper.ratios[metric].mean}{TIMES}" if paper else ""
    return _card(number, label, f"{title}, {c.candidate} against {c.baseline}{in_paper}")


def _difference_card(c: Contrast, paper: Published | None) -> str:
    d = c.difference
    if d.mean is None:
        return ""
    deviation = f" ± {d.deviation:.4f}" if d.deviation is not None else ""
    below = f"; below at {c.below} of {plural(c.checkpoints, 'checkpoint')}" if c.checkpoints else ""
    in_paper = f"; in the paper {signed(paper.difference.mean)}" if paper else ""
    details = f"{c.candidate} minus {c.baseline}{deviation}, {plural(d.runs, 'pair')}{below}{in_paper}"
    return _card(signed(d.mean), "validation loss", details)


def _card(number: str, label: str, details: str) -> str:
    return f'<div class="card"><b>{text(number)}</b><span>{text(label)}</span><small>{text(details, 300)}</small></div>'


# The paper's table


def _table(c: Comparison) -> str:
    """The table of the paper, with the numbers of these runs."""
    paper, how = PAPER.get(c.model), looks(c.groups)
    rows = [
        (
            f'<i class="dot" style="background:{how[name].colour}"></i>{text(name)}',
            _optimizer_cells(name, metrics, paper),
        )
        for name, metrics in c.optimizers.items()
    ]
    for contrast in c.contrasts:
        rows += _contrast_rows(contrast, _paper_of(c, contrast))
    return table(HEADS, rows, "Final values: mean ± one sample standard deviation over seeds")


def _contrast_rows(c: Contrast, paper: Published | None) -> list[tuple[str, list[str]]]:
    """The ratios of two sides, and the difference of their losses."""
    ratios = [_ratio_cell(c.ratios[metric], paper.ratios[metric] if paper else None) for metric in c.ratios]
    difference = _with_paper(c.difference, paper.difference if paper else None, signed_fixed, absolute_difference)
    a, b = text(c.baseline), text(c.candidate)
    return [
        (f"{a} / {b}", ["", *ratios, plural(len(c.pairs), "pair") if c.pairs else ""]),
        (f"{b} {MINUS} {a}", [difference, "", "", plural(c.difference.runs, "pair")]),
    ]


def _optimizer_cells(name: str, metrics: dict[str, SampleStatistics], paper: Published | None) -> list[str]:
    published = paper.optimizers.get(name, {}) if paper else {}
    loss = _with_paper(metrics["validation_loss"], published.get("validation_loss"), fixed, absolute_difference)
    geometry = [
        _with_paper(metrics[metric], published.get(metric), scientific, relative_difference)
        for metric in ("step_diameter", "perturbation_rms")
    ]
    return [loss, *geometry, str(max(s.runs for s in metrics.values()))]


def _ratio_cell(ratio: float | None, paper: Figure | None) -> str:
    return _with_paper(SampleStatistics(ratio), paper, factor, relative_difference)


def _with_paper(
    ours: SampleStatistics,
    paper: Figure | None,
    number: Callable[[Value], str],
    difference: Callable[[float, float], str],
) -> str:
    """Our number; below it the paper's number, and the difference between the two.

    Args:
        ours: our number.
        paper: the paper's number, if it has one.
        number: writes either number.
        difference: writes the difference between them.
    """
    if ours.mean is None:
        return DASH
    if paper is None:
        return number(ours)
    here = f"<span>here {difference(ours.mean, paper.mean)}</span>"
    return f"{number(ours)}<small>paper {number(paper)}, {here}</small>"


# The figures


def _figures(c: Comparison) -> dict[str, dict[str, Any]]:
    """The figures that have a curve, by title."""
    titles = {RATIO: " over ".join(c.sides)}
    figures = {titles.get(title, title): draw(c, PlotOptions(seeds=True)) for title, draw in FIGURES.items()}
    figures = {title: figure for title, figure in figures.items() if figure["data"]}
    for figure in figures.values():
        del figure["layout"]["yaxis"]["title"]  # the page has the title above the figure
        figure["layout"]["height"] = 380
    return figures


def _figure_places(c: Comparison, titles: list[str]) -> str:
    """The elements that the page's script draws the figures into, in their order."""
    places = [
        f"<figure><h3>{text(title)}</h3>"
        f'<div class="plot" role="img" aria-label="{text(f"{title} of {c.model}")}"></div></figure>'
        for title in titles
    ]
    warning = "<noscript><p>The curves need JavaScript; the numbers above do not.</p></noscript>" if places else ""
    return f'{warning}<div class="figures">{"".join(places)}</div>'

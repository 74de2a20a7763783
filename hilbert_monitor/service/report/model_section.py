"""The section of a report about one model: the main numbers, the paper's table and the figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from hilbert_monitor.service.figures.comparison import BASELINE, CANDIDATE, Comparison
from hilbert_monitor.service.figures.contrasts import Contrast
from hilbert_monitor.service.figures.final_values import SampleStatistics
from hilbert_monitor.service.figures.looks import looks
from hilbert_monitor.service.following.published import PAPER, Figure, Published

from .illustrations import Illustration
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
from .sides import sides

HEADS = ("LM head", "Validation loss", "D(S)", "Hilbert RMS", "Runs")


def model_section(c: Comparison, some: Sequence[Illustration], *, first: int, with_title: bool) -> str:
    """The HTML of a model's section.

    Args:
        c: the comparison of its runs.
        some: its figures.
        first: the number of the first of them.
        with_title: whether the section needs a title, because there are several.
    """
    title = f"<h2>{text(c.model)}</h2>" if with_title or c.model in PAPER else ""
    notes = "".join(f"<li>{text(note, 1000)}</li>" for note in filter(None, (c.about, *c.notes, *_length_notes(c))))
    notes = f'<ul class="notes">{notes}</ul>' if notes else ""
    figures = "".join(_figure(one, number, c.model) for number, one in enumerate(some, first))
    section = f'{title}{_cards(c)}{_table(c)}{notes}<div class="figures">{figures}</div>'
    return f'<section class="model">{section}</section>'


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
    if len(c.contrasts) == 1:
        rows += _contrast_rows(c.contrast, _paper_of(c, c.contrast))
    else:
        rows += [_contrast_row(contrast) for contrast in c.contrasts]
    several = any(s.runs > 1 for metrics in c.optimizers.values() for s in metrics.values())
    return table(HEADS, rows, f"Final values{': mean ± one sample standard deviation over seeds' if several else ''}")


def _contrast_rows(c: Contrast, paper: Published | None) -> list[tuple[str, list[str]]]:
    """The ratios of two sides, and the difference of their losses, as the paper has them."""
    ratios = [_ratio_cell(c.ratios[metric], paper.ratios[metric] if paper else None) for metric in c.ratios]
    difference = _with_paper(c.difference, paper.difference if paper else None, signed_fixed, absolute_difference)
    a, b, shared = map(text, sides(c))
    return [
        (f"{a} / {b}{shared}", ["", *ratios, plural(len(c.pairs), "pair") if c.pairs else ""]),
        (f"{b} {MINUS} {a}{shared}", [difference, "", "", plural(c.difference.runs, "pair")]),
    ]


def _contrast_row(c: Contrast) -> tuple[str, list[str]]:
    """One of several contrasts, in one row: the difference of the losses, and the ratios."""
    a, b, shared = map(text, sides(c))
    ratios = [_ratio_cell(ratio, None) for ratio in c.ratios.values()]
    difference = _with_paper(c.difference, None, signed_fixed, absolute_difference)
    return f"{b} against {a}{shared}", [difference, *ratios, plural(c.difference.runs, "pair")]


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


def _figure(one: Illustration, number: int, model: str) -> str:
    """A place that the page's script draws a figure into, and its SVG for paper and for pages without a script."""
    label = f'role="img" aria-label="{text(f"{one.title} of {model}")}"'
    plot, drawing = f'<div class="plot" {label}></div>', f'<div class="drawing" {label}>{one.svg}</div>'
    caption = f"<b>Figure {number}. {text(one.title)}.</b> {text(one.caption, 1000)}"
    button = f'<button type="button" class="save" data-file="{one.name}.svg">Save as SVG</button>'
    return f"<figure>{plot}{drawing}<figcaption>{caption} {button}</figcaption></figure>"

"""The figures of a report with their captions: what a line is, what a band is, and over how many runs.

A comparison has those of the paper. A report of a single run has the panels of the run's page in their place.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hilbert_monitor.runs.run import Run
from hilbert_monitor.service.figures import compare_figures, run_figures
from hilbert_monitor.service.figures.comparison import Comparison
from hilbert_monitor.service.figures.final_values import METRIC_NAMES
from hilbert_monitor.service.figures.plot_options import PlotOptions
from hilbert_monitor.service.figures.run_panels import PANELS
from hilbert_monitor.service.figures.style import Figure

from .markup import plural
from .svg import svg

NAMED = 4
"""The largest number of optimizers whose runs a caption counts one by one."""


@dataclass(frozen=True, slots=True)
class Illustration:
    """A figure in plotly's form, with its texts."""

    name: str
    """Of its file, without an ending: letters, digits, dots, dashes and underscores."""
    title: str
    caption: str
    figure: Figure

    @property
    def svg(self) -> str:
        """The figure as an SVG."""
        return svg(self.figure, self.name)


def illustrations(runs: Sequence[Run], comparisons: Sequence[Comparison]) -> list[list[Illustration]]:
    """The figures of each comparison that have a curve."""
    if len(runs) == 1:
        panels = {name: figure for name, figure in run_figures.figures(runs[0]).items() if name != "cost"}
        if panels:
            return [_of_run(panels)]
    found = [_of_comparison(c) for c in comparisons]
    if len(found) < 2:
        return found
    names = stems([c.model for c in comparisons])
    return [[replace(one, name=f"{stem}-{one.name}") for one in some] for stem, some in zip(names, found, strict=True)]


def write_svg(some: Sequence[Illustration], folder: Path) -> None:
    """Write each figure as an SVG file into a folder, which is created if it does not exist."""
    folder.mkdir(parents=True, exist_ok=True)
    for one in some:
        (folder / f"{one.name}.svg").write_text(one.svg + "\n", encoding="utf-8")


def _of_comparison(c: Comparison) -> list[Illustration]:
    titles = {
        "loss": "Loss",
        "diameter": "Row diameter of a step",
        "perturbation": "Hilbert RMS perturbation",
        "ratio": " over ".join(c.sides),
    }
    drawn = {name: draw(c, PlotOptions(seeds=True)) for name, draw in compare_figures.PANELS.items()}
    return [
        Illustration(name, titles[name], " ".join(_caption(c, name, figure)), figure)
        for name, figure in drawn.items()
        if figure["data"]
    ]


def _of_run(panels: Mapping[str, Figure]) -> list[Illustration]:
    texts = {panel.name: (panel.title, panel.help) for panel in PANELS}
    return [Illustration(name, *texts[name], figure) for name, figure in panels.items()]


def stems(models: Sequence[str]) -> list[str]:
    """A part of a file name for each model, all of them different."""
    names: list[str] = []
    for number, model in enumerate(models, 1):
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", model)[:60].strip("-.") or "model"
        names.append(f"{name}-{number}" if name in names else name)
    return names


# Captions


def _caption(c: Comparison, name: str, figure: Figure) -> Iterator[str]:
    """The sentences of a caption."""
    if name == "ratio":
        pairs = f"over {plural(len(c.pairs), 'pair')} of runs with one seed, model and panel"
        yield f"The mean of {c.sides[0]} over that of {c.sides[1]}, of D(S) and of the Hilbert RMS, {pairs}."
        return
    field = {"loss": "validation_loss", "diameter": "diameter", "perturbation": "perturbation_rms"}[name]
    yield {
        "loss": "Validation loss, and thinner the mean training loss.",
        "diameter": "D(S), the largest distance between the rows that a step adds for two tokens.",
        "perturbation": "Root mean square, over the positions of the panel, of the Hilbert distance between the"
        " predictions before and after a step.",
    }[name]
    yield from _what_lines_are(c, field, has_bands=any("fill" in trace for trace in figure["data"]))
    if any(len(run.curve(field)) for run in c.excluded):
        yield "Dotted: runs that are in no mean."


def _what_lines_are(c: Comparison, field: str, *, has_bands: bool) -> Iterator[str]:
    """Over how many runs the lines are means, and what their bands are."""
    statistics = {name: metrics[METRIC_NAMES[field]] for name, metrics in c.optimizers.items()}
    counts = {name: s.runs for name, s in statistics.items() if s.mean is not None}
    noun = "run" if any(run.seed is None for run in c.counted) else "seed"
    if max(counts.values(), default=1) == 1:
        yield "Each line is one run."
        return
    yield f"Lines are means over {_counted(counts, noun)}; faint lines are single {noun}s."
    if has_bands:
        yield f"Bands are the mean ± one sample standard deviation over the {noun}s."
        if 1 in counts.values():
            yield f"A line of one {noun} has no band."


def _counted(counts: Mapping[str, int], noun: str) -> str:
    """How many runs the means are over: "3 seeds" if all are, or else "3 seeds of AdamW and 2 of Muon"."""
    low, high = min(counts.values()), max(counts.values())
    if low == high:
        return plural(low, noun)
    if len(counts) > NAMED:
        return f"{low} to {plural(high, noun)}"
    (name, count), *others = counts.items()
    *middle, last = (f"{count} of {name}" for name, count in others)
    return f"{', '.join([f'{plural(count, noun)} of {name}', *middle])} and {last}"

"""The paper's table in LaTeX, for the package booktabs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from hilbert_monitor.service.figures.comparison import Comparison
from hilbert_monitor.service.figures.final_values import SampleStatistics
from hilbert_monitor.service.following.published import PAPER
from hilbert_monitor.service.following.text import clip

from .illustrations import stems
from .markup import Value, plural
from .sides import sides

SPECIAL = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': "''",
    **{character: "\\" + character for character in "&%$#_{}"},
    **{character: f"{{{character}}}" for character in "[]*"},
}
"""How characters are written that LaTeX would take for commands, or would set as others. After the end of a row, a
bracket or a star would belong to it."""
UNKNOWN = re.compile(
    r"[^\x20-\x7e\u00c0-\u00cf\u00d1-\u00d6\u00d8-\u00dd\u00df-\u00ef\u00f1-\u00f6\u00f8-\u00fd\u00ff]"
)
"""Characters that the usual fonts of LaTeX do not have."""
PAPER_RUNS = "3"
"""The paper trained each model with three seeds."""


def tables(comparisons: Sequence[Comparison]) -> str:
    """A table for each model, to be included with \\input."""
    names = stems([c.model for c in comparisons])
    head = "% Made with hilbert-monitor report. Needs \\usepackage{booktabs}.\n"
    return head + "\n".join(_table(c, name) for c, name in zip(comparisons, names, strict=True))


def escape(text: str, limit: int = 80) -> str:
    """A text from outside as LaTeX sets it: cut to a length, and "?" for letters that its usual fonts do not have."""
    known = UNKNOWN.sub("?", re.sub(r"\s+", " ", clip(text, limit).replace("\u2026", "...")))
    return "".join(SPECIAL.get(character, character) for character in known)


def _table(c: Comparison, name: str) -> str:
    lines = [
        r"\begin{table}",
        r"  \centering",
        rf"  \caption{{{_caption(c)}}}",
        rf"  \label{{tab:lm-head-{name.replace('_', '-')}}}",
        r"  \begin{tabular}{lrrrr}",
        r"    \toprule",
        r"    LM head & Validation loss & $D(S)$ & Hilbert RMS & Runs \\",
        r"    \midrule",
        *(f"    {' & '.join(row)} \\\\" for row in _optimizer_rows(c)),
        *_comparing_rows(c),
        r"    \bottomrule",
        r"  \end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _caption(c: Comparison) -> str:
    """What the numbers are."""
    several = any(s.runs > 1 for metrics in c.optimizers.values() for s in metrics.values())
    spread = r": mean $\pm$ one sample standard deviation over seeds" if several else ""
    ratios = " Ratios of means, and differences, are over pairs of one seed and panel." if c.pairs else ""
    return f"Final values of {escape(c.model)}{spread}.{ratios}"


def _optimizer_rows(c: Comparison) -> Iterator[Sequence[str]]:
    """A row for each optimizer, and for those of the paper one with its numbers."""
    published = PAPER[c.model].optimizers if c.model in PAPER else {}
    for name, metrics in c.optimizers.items():
        runs = str(max(s.runs for s in metrics.values()))
        yield escape(name), *_numbers(metrics), runs
        if name in published:
            yield f"{escape(name)}, paper", *_numbers(published[name]), PAPER_RUNS


def _numbers(metrics: Mapping[str, Value]) -> Iterator[str]:
    yield _number(metrics["validation_loss"], _fixed)
    yield _number(metrics["step_diameter"], _scientific)
    yield _number(metrics["perturbation_rms"], _scientific)


def _comparing_rows(c: Comparison) -> Iterator[str]:
    """Ratios and difference of two sides in two rows, as in the paper; in one row if there are several contrasts."""
    if c.contrasts:
        yield r"    \midrule"
    for contrast in c.contrasts:
        a, b, shared = map(escape, sides(contrast))
        ratios = " & ".join(_number(SampleStatistics(ratio), _factor) for ratio in contrast.ratios.values())
        difference = _number(contrast.difference, lambda value: _fixed(value, "+"))
        pairs = plural(len(contrast.pairs), "pair") if contrast.pairs else ""
        if len(c.contrasts) > 1:
            yield rf"    {b} against {a}{shared} & {difference} & {ratios} & {pairs} \\"
        else:
            yield rf"    {a} / {b}{shared} & & {ratios} & {pairs} \\"
            yield rf"    {b} $-$ {a}{shared} & {difference} & & & {plural(contrast.difference.runs, 'pair')} \\"


# Numbers


def _number(value: Value, write: Callable[[Value], str]) -> str:
    return "--" if value.mean is None else f"${write(value)}$"


def _fixed(value: Value, sign: str = "") -> str:
    r"""3.1588 \pm 0.0027."""
    mean = f"{value.mean:{sign}.4f}"
    return mean if value.deviation is None else rf"{mean} \pm {value.deviation:.4f}"


def _scientific(value: Value) -> str:
    r"""(2.870 \pm 0.140) \times 10^{-2}."""
    mean = value.mean or 0.0
    power = math.floor(math.log10(abs(mean))) if mean else 0
    number = f"{mean / 10.0**power:.3f}"
    if value.deviation is not None:
        number = rf"({number} \pm {value.deviation / 10.0**power:.3f})"
    return rf"{number} \times 10^{{{power}}}"


def _factor(value: Value) -> str:
    r"""45.1\times."""
    return rf"{value.mean:,.1f}\times".replace(",", "{,}")

"""Writes what documents take from the code: tables, the text of examples, and the picture of blow-ups.

    python docs/generate.py            # write them
    python docs/generate.py --check    # exit with 1 if a document is not up to date

A document says where: `<!-- table: NAME -->` or `<!-- file: PATH -->` begins a part, and `<!-- end -->` ends it. What
stands between the two is replaced.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from hilbert_monitor.runs.exposition import FAMILIES
from hilbert_monitor.runs.record import METRICS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
RULES, RUNBOOKS = ROOT / "dashboards" / "prometheus" / "rules", ROOT / "dashboards" / "runbooks"
PART = re.compile(r"(<!-- (table|file): (\S+) -->\n).*?(<!-- end -->)", re.S)
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml"}

ORDER = (*("bracket", "diameter", "radius", "logits", "norms", "tension", "simplex"),)
"""Modules whose functions are in the geometry's table, in its order."""
COSTS = {
    "row_diameter": "on optimizers' increments about 20 reads of S; at worst all pairs",
    "row_diameter_bracket": "one pass over S",
    "deferred_bracket": "one pass over S, and no synchronization",
    "hilbert_perturbation": "on a CPU less than the product S H'; at worst a little more",
    "hilbert_distance": "one pass",
    "variation_seminorm": "one pass",
    "tv_bound": "one pass",
    "cross_entropy_change_bound": "one pass",
    "center_rows": "O(Vd)",
    "row_norm": "O(Vd)",
    "projected_row_norm": "O(Vd)",
    "step_efficiency": "none",
    "row_statistics": "one pass",
    "first_order_decrease": "one pass",
    "centred_decrease": "three passes",
    "jung_ratio": "none",
    "diameter_oracle": "ten seconds at 400 rows of 64; grows faster than V^2 d",
    "tension_bracket": "as long as you give it; half a second for a first answer",
    "fixed_cotangent_bound": "one pass",
    "backward_bound": "O(N)",
    "uniform_backward_bound": "O(N)",
}
"""Costs of functions whose docstring has no line that begins with `Cost:`."""

Function = Any
Table = Callable[[], Iterator[tuple[str, ...]]]


def metrics() -> Iterator[tuple[str, ...]]:
    """Everything that is exported to Prometheus."""
    yield "metric", "kind", "what"
    for metric in METRICS:
        if not metric.counted:
            yield f"`{metric.exported}`", "gauge", metric.help
    for family in FAMILIES:
        labels = "{" + ", ".join(family.labels) + "}" if family.labels else ""
        yield f"`{family.exported}{labels}`", family.kind, family.help


def fields() -> Iterator[tuple[str, ...]]:
    """The measured fields of a record, and their names in a Lightning logger."""
    yield "field", "in a logger", "what"
    for metric in METRICS:
        yield f"`{metric.field}`", f"`{metric.logged}`", metric.help


def alerts() -> Iterator[tuple[str, ...]]:
    """The alerts of Prometheus, a row for each rule."""
    yield "alert", "severity", "fires when"
    for path in sorted(RULES.glob("*.yml")):
        for group in yaml.safe_load(path.read_text())["groups"]:
            for rule in group["rules"]:
                if "alert" in rule:
                    link = f"[{rule['alert']}](../dashboards/runbooks/{rule['alert']}.md)"
                    yield link, rule["labels"]["severity"], meaning(rule["alert"], rule["labels"]["severity"])


def meaning(alert: str, severity: str) -> str:
    """When an alert fires: the first sentence of its runbook; for StepDiameterBlowUp, that of its severity."""
    text = (RUNBOOKS / f"{alert}.md").read_text()
    paragraphs = re.split(r"^## Meaning\s*", text, flags=re.M)[1].split("\n\n")
    own = [p for p in paragraphs if p.startswith(f"{severity.capitalize()}: ")]
    paragraph = own[0].partition(": ")[2] if own else paragraphs[0]
    return re.split(r"(?<=[.])\s", " ".join(paragraph.split()))[0].rstrip(".")


def arguments() -> Iterator[tuple[str, ...]]:
    """The arguments of HilbertMonitor, from its signature and its docstring."""
    from hilbert_monitor import HilbertMonitor

    text = (inspect.getdoc(HilbertMonitor) or "").partition("Args:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", text, re.M)
    parameters = inspect.signature(HilbertMonitor).parameters
    yield "argument", "default", "what"
    for name, what in entries:
        yield f"`{name}`", f"`{parameters[name].default!r}`".replace("'", '"'), " ".join(what.split())


def functions() -> Iterator[tuple[str, ...]]:
    """The functions of the geometry: what they compute and what they cost."""
    from hilbert_monitor import geometry

    yield "function", "what", "cost"
    public = [inspect.unwrap(value) for value in vars(geometry).values() if inspect.isfunction(value)]
    for function in sorted((function for function in public if room(function) in ORDER), key=place):
        parameters = inspect.signature(function).parameters.values()
        names = ", ".join(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
        text = inspect.getdoc(function) or ""
        cost = re.search(r"^Cost: *(.*?)(?:\n\n|\Z)", text, re.M | re.S)
        cost_text = " ".join(cost[1].split()) if cost else COSTS.get(function.__name__, "")
        yield f"`{function.__name__}({names})`", text.partition("\n")[0].rstrip("."), cost_text.rstrip(".")


def room(function: Function) -> str:
    """The module of a function, by its last name."""
    return function.__module__.rpartition(".")[2]


def place(function: Function) -> tuple[int, int]:
    """Where a function stands in its table: by module, then as in the module's text."""
    return ORDER.index(room(function)), function.__code__.co_firstlineno


def sizes() -> Iterator[tuple[str, ...]]:
    """The paper's runs, from the recipes."""
    from hilbert_monitor.pretrain import recipe as recipes

    yield (
        "size",
        "parameters",
        "width",
        "attention heads",
        "updates",
        "micro-batch x accumulation, on eight GPUs",
        "head's learning rate: AdamW",
        "RowNorm",
    )
    for size, preset in recipes.PAPER.items():
        rates = [f"{recipes.recipe(size, head=head).head_lr:.3e}" for head in recipes.HEADS]
        parameters, updates = preset.model.parameters, preset.resolved.updates
        numbers = [f"{number:,}" for number in (parameters, preset.width, preset.width // preset.head_dim, updates)]
        yield size, *numbers, f"{preset.micro_batch} x {preset.accumulation}", *rates


def tried() -> Iterator[tuple[str, ...]]:
    """What the tests have run, optimizers and then models with all else alike in one row.

    Tests write the file, see tests/support/tried.py.
    """
    yield "models", "optimizers of the head", "trainer", "precision", "strategy", "versions"
    optimizers: dict[tuple[str, ...], list[str]] = {}
    for entry in json.loads((ROOT / "docs" / "tried.json").read_text()):
        versions = ", ".join(f"{name} {number}" for name, number in entry["versions"].items())
        key = tuple(entry[name] for name in ("model", "trainer", "precision", "strategy"))
        optimizers.setdefault((*key, versions), []).append(entry["optimizer"])
    models: dict[tuple[str, ...], list[str]] = {}
    for (model, *rest), names in optimizers.items():
        models.setdefault((", ".join(sorted(set(names))), *rest), []).append(model)
    for key, names in sorted(models.items(), key=lambda row: (*row[0][1:], row[0][0])):
        yield ", ".join(sorted(names)), *key


TABLES: dict[str, Table] = {
    "metrics": metrics,
    "fields": fields,
    "alerts": alerts,
    "arguments": arguments,
    "functions": functions,
    "sizes": sizes,
    "tried": tried,
}


def table(make: Table) -> str:
    """A table in Markdown."""
    head, *rows = make()
    lines = [head, ("---",) * len(head), *(tuple(map(cell, row)) for row in rows)]
    return "\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines).replace("| --- ", "|---") + "\n\n"


def cell(text: str) -> str:
    """Text that neither ends a table's cell nor begins a tag."""
    return text.replace("|", r"\|") if text.startswith("`") else text.replace("|", r"\|").replace("<", "&lt;")


def included(path: str) -> str:
    """A file as a block of code."""
    return f"```{LANGUAGES[Path(path).suffix]}\n{(ROOT / path).read_text()}```\n"


def documented(text: str) -> str:
    """Return a document with all its parts as they should be."""

    def part(match: re.Match[str]) -> str:
        begin, kind, name, end = match.groups()
        return begin + (table(TABLES[name]) if kind == "table" else included(name)) + end

    return PART.sub(part, text)


def documents() -> list[Path]:
    """The documents that may have such parts."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blow_ups() -> str:
    """Draw a run with five accidents, and the notices and pages that the rules make of it, as SVG."""
    from hilbert_monitor.runs.alerts import Judge
    from hilbert_monitor.runs.record import StepRecord

    draw, judge = random.Random(7), Judge()
    steps, spikes = 6000, {900: 2.0, 1500: 6.0, 5600: 25.0}
    values, labelled = [], -60.0
    for t in range(steps):
        level = 2.0 if 2400 <= t < 2700 else 2 ** ((t - 4600) / 150) if 4600 <= t < 4900 else 1.0
        values.append(0.01 * level * spikes.get(t, 1.0) * math.exp(draw.gauss(0, 0.12)))

    def place(t: int, value: float) -> tuple[float, float]:
        return round(50 + 700 * t / steps, 1), round(210 - 95 * math.log10(value / 0.005), 1)

    marks = []
    for t, value in enumerate(values):
        record = StepRecord(step=t, time=float(t), learning_rate=1.0, scheduled=True, diameter_lower=value)
        for alert in judge.judge(record):
            x, y = place(t, value)
            filled = "#c0392b" if alert.severity == "page" else "none"
            name = alert.severity if alert.severity == "page" else f"{alert.severity}: {alert.pattern}"
            marks.append(f'<circle cx="{x}" cy="{y}" r="5" fill="{filled}" stroke="#c0392b" stroke-width="1.5"/>')
            if x > labelled + 60:
                marks.append(f'<text x="{x + 8}" y="{y - 6}" fill="#c0392b">{name}</text>')
                labelled = x
    line = " ".join(f"{x},{y}" for x, y in (place(t, value) for t, value in enumerate(values)))
    ticks = ""
    for value in (0.01, 0.02, 0.05, 0.1, 0.2):
        y = place(0, value)[1]
        ticks += f'<line x1="50" x2="750" y1="{y}" y2="{y}" stroke="#ddd"/>'
        ticks += f'<text x="44" y="{y + 4}" text-anchor="end">{value}</text>'
    labels = "".join(
        f'<text x="{place(t, 1)[0]}" y="232" text-anchor="middle">{t:,}</text>' for t in range(0, steps + 1, 1000)
    )
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 780 260" font-family="sans-serif" font-size="12"'
        f' fill="#333"><rect width="780" height="260" fill="#fff"/>{ticks}{labels}'
        f'<polyline points="{line}" fill="none" stroke="#0072B2" stroke-width="0.6"/>{"".join(marks)}'
        '<text x="400" y="252" text-anchor="middle">step</text>'
        '<text x="50" y="16">D(S) over the learning rate</text></svg>\n'
    )


def main() -> int:
    """Write the documents, or with --check only say which are not up to date."""
    parser = argparse.ArgumentParser(description="Writes the parts of documents that come from the code.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if one is not up to date")
    check = parser.parse_args().check
    stale = []
    for path in documents():
        text = path.read_text()
        new = documented(text)
        if new != text:
            stale.append(path.relative_to(ROOT).as_posix())
            if not check:
                path.write_text(new)
    picture = DOCS / "blow-ups.svg"
    if not picture.is_file() or picture.read_text() != blow_ups():
        stale.append("docs/blow-ups.svg")
        if not check:
            picture.write_text(blow_ups())
    if stale:
        print("not up to date:" if check else "wrote", ", ".join(stale))
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())

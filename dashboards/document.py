"""Writes the README's tables of metrics and alerts from the catalogue and the rules; `--check` only compares them.

python dashboards/document.py
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

from hilbert_monitor.runs.families import FAMILIES
from hilbert_monitor.runs.metrics import CATALOGUE

ROOT = Path(__file__).parents[1]
README, RULES = ROOT / "README.md", ROOT / "dashboards" / "prometheus" / "rules"
RUNBOOKS = "dashboards/runbooks"


def metrics() -> Iterator[str]:
    """The table of everything that Prometheus gets."""
    yield "| metric | kind | what |"
    yield "|---|---|---|"
    for metric in CATALOGUE:
        if not metric.counted:
            yield f"| `{metric.exported}` | gauge | {metric.help} |"
    for family in FAMILIES:
        labels = "{" + ", ".join(family.labels) + "}" if family.labels else ""
        yield f"| `{family.exported}{labels}` | {family.kind} | {family.help} |"


def alerts() -> Iterator[str]:
    """The table of the alerts, a row for each rule."""
    yield "| alert | severity | fires when |"
    yield "|---|---|---|"
    for path in sorted(RULES.glob("*.yml")):
        for group in yaml.safe_load(path.read_text())["groups"]:
            for rule in group["rules"]:
                if "alert" in rule:
                    name = f"[{rule['alert']}]({RUNBOOKS}/{rule['alert']}.md)"
                    yield f"| {name} | {rule['labels']['severity']} | {meaning(rule)} |"


def meaning(rule: dict[str, dict[str, str] | str]) -> str:
    """What an alert means, from its runbook, and how the rule knows it, from its label."""
    sources = {
        "verdict": " (by the rules in the training process)",
        "history": " (by PromQL alone, from the run's own last hour and learning rate)",
        "gauge": " (by the last step that was scraped)",
    }
    labels = rule["labels"]
    assert isinstance(labels, dict)
    return first_sentence(str(rule["alert"])) + sources.get(labels.get("source", ""), "")


def first_sentence(alert: str) -> str:
    """The first sentence of what a runbook says an alert means."""
    text = (ROOT / RUNBOOKS / f"{alert}.md").read_text()
    meaning = re.split(r"^## Meaning\s*", text, flags=re.M)[1].split("\n\n")[0]
    return re.split(r"(?<=[.])\s", " ".join(meaning.split()))[0].rstrip(".")


def with_tables(text: str) -> str:
    """The text of a README with both tables replaced."""
    for name, table in (("metrics", metrics()), ("alerts", alerts())):
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        assert after, f"the README has no {begin} ... {end}"
        text = f"{before}{begin}\n\n" + "\n".join(table) + f"\n\n{end}{after}"
    return text


def main() -> None:
    """Write the tables, or check them."""
    text = README.read_text()
    if "--check" in sys.argv:
        sys.exit(
            0 if with_tables(text) == text else "the README's tables are out of date: run python dashboards/document.py"
        )
    README.write_text(with_tables(text))


if __name__ == "__main__":
    main()

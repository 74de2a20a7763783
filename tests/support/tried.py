"""The table of what was run: tests that pass say what they have run, and a document shows it.

    TRIED=write python -m pytest tests/monitor/test_causal_models.py      # adds to docs/tried.json what passes
    python docs/generate.py                                               # writes the table

Without TRIED=write a test fails that runs what the file does not have. `tests/docs/test_tried.py` holds that the tests
that the file names exist.
"""

import json
import os
from importlib.metadata import version
from pathlib import Path

FILE = Path(__file__).parents[2] / "docs" / "tried.json"
OURS = "a decoder of ours"
"""The model of tests that need none of a library."""


def rows():
    """What the file has."""
    return json.loads(FILE.read_text()) if FILE.exists() else []


def tried(*, model, trainer, optimizer, precision="fp32", strategy="one process", libraries=()):
    """Note what the test that calls this has run, or check that it was noted.

    Args:
        model: class of the model.
        trainer: what ran the loop.
        optimizer: class of the one that moved the head.
        precision: fp32, bf16-mixed, bf16, and so on.
        strategy: one process, DDP, FSDP2, and so on.
        libraries: packages besides torch that take part, by the names under which they are installed.
    """
    test = os.environ["PYTEST_CURRENT_TEST"].partition("[")[0].partition(" ")[0]
    row = {
        "model": model, "trainer": trainer, "optimizer": optimizer, "precision": precision, "strategy": strategy,
        "test": test,
    }  # fmt: skip
    known = [{key: value for key, value in each.items() if key != "versions"} for each in rows()]
    if os.environ.get("TRIED") == "write":
        versions = {name: version(name).partition("+")[0] for name in ("torch", *libraries)}
        others = [each for each, same in zip(rows(), known, strict=True) if same != row]
        entries = sorted([*others, {**row, "versions": versions}], key=lambda each: [str(x) for x in each.values()])
        FILE.write_text("[\n" + ",\n".join(map(json.dumps, entries)) + "\n]\n")
        return
    assert row in known, f"docs/tried.json has no {row}: run this test with TRIED=write, then docs/generate.py"

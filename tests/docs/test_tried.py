"""The table of what was run names tests that exist and say so."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROWS = json.loads((ROOT / "docs" / "tried.json").read_text())


def test_every_row_is_of_a_test_that_exists_and_notes_what_it_runs():
    for test in {row["test"] for row in ROWS}:
        path, _, name = test.partition("::")
        body = re.search(rf"^def {name}\(.*?(?=^\S|\Z)", (ROOT / path).read_text(), re.M | re.S)
        assert body is not None, test
        assert "tried(" in body[0], test


def test_at_least_twenty_causal_models_of_transformers_were_run():
    models = {row["model"] for row in ROWS if "transformers" in row["versions"]}
    assert len({model for model in models if re.fullmatch(r"\w+(ForCausalLM|LMHeadModel)", model)}) >= 20

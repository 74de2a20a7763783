"""What the README shows is run, and what it names exists."""

import re
from pathlib import Path

import pytest
import torch

import hilbert_monitor
from hilbert_monitor import geometry

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", README, re.S))
def test_examples_run(code, capsys):
    torch.manual_seed(0)
    exec(compile(code, "README.md", "exec"), {})
    assert "D(S) = " in capsys.readouterr().out


def test_every_public_function_of_the_geometry_is_in_the_table_and_no_other():
    table = README.partition("## What it measures")[2].partition("All live in")[0]
    named = set(re.findall(r"`([a-z_]+)(?:\([^`]*\))?`", table))
    assert named == {name for name in geometry.__all__ if name.islower()}


def test_every_optimizer_name_in_its_table_is_public():
    table = README.partition("## Train with it")[2].partition("RowNorm and Muon keep")[0].rpartition("|---")[2]
    named = set(re.findall(r"^\| `(\w+)", table, re.M))
    assert named == {name for name, home in hilbert_monitor._HOMES.items() if home == "optim"}


def test_every_make_target_that_is_named_exists():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"`make ([a-z]+)", README)) <= targets

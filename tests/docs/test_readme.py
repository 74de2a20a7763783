"""What the README shows is run, and what it names exists."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer

import hilbert_monitor
from hilbert_monitor import geometry
from hilbert_monitor.cli import app
from hilbert_monitor.monitor.guard import Guard
from hilbert_monitor.monitor.responses import Responses

ROOT = Path(__file__).parents[2]
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


def test_every_command_and_option_that_is_named_exists():
    commands = typer.main.get_command(app).commands
    said = re.findall(r"(?:hilbert-monitor|-m hilbert_monitor) ([a-z]+)((?:[^\n`#]|\\\n)*)", README)
    assert {name for name, _ in said} >= {"bench", "doctor", "pretrain", "report", "tokenize"}
    for name, rest in said:
        known = {
            option for parameter in commands[name].params for option in (*parameter.opts, *parameter.secondary_opts)
        }
        assert set(re.findall(r"(?<!\S)--[a-z-]+", rest)) <= known, name


def test_every_action_on_a_blow_up_is_one_that_is_taken():
    table = README.partition("takes any of")[2].partition("`hilbert-monitor bench --faults`")[0]
    named = re.findall(r'^\| `"(.*?)"`', table, re.M)
    assert len(named) == 4
    for action in named:
        Responses(action, Guard(strict=True))


def test_pictures_that_are_shown_are_there():
    pictures = re.findall(r"\]\(([^)]*\.png)\)", README)
    assert pictures
    assert all((ROOT / picture).exists() for picture in pictures)


def test_tables_of_metrics_and_alerts_are_current():
    done = subprocess.run(
        [sys.executable, str(ROOT / "dashboards" / "document.py"), "--check"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")

"""The demo, as a command: a pair of runs, its dashboard, an interruption, a failure, bad input."""

import json
import os
import re
import signal
import time
import urllib.request
from pathlib import Path

import pytest
from typer.testing import CliRunner

import hilbert_monitor
from hilbert_monitor.cli import app
from hilbert_monitor.pretrain.data import write_shard
from hilbert_monitor.runs.reader import find_runs
from tests.support.warm import Program

SMALL = ["--set=vocab_size=300", "--set=width=32", "--set=blocks=1", "--set=head_dim=16", "--set=context=16"]
SMALL += ["--set=validation_tokens=512", "--set=panel_size=128"]
SMALL += ["--text", str(Path(hilbert_monitor.__file__).parent / "geometry")]  # the standard library takes ten seconds


WARM_RUNS = """
import sys
from types import SimpleNamespace
from hilbert_monitor import demo
from hilbert_monitor.__main__ import main
from tests.support.warm import Forked

demo.QUIET = 0.0
demo.subprocess = SimpleNamespace(**vars(demo.subprocess) | {"Popen": Forked})
main()
"""


def begin(*arguments, warm_runs=False):
    """The demo as a command. Its runs are fresh interpreters, as a user's are, or start as warm as the demo itself."""
    program = ["-c", WARM_RUNS] if warm_runs else ["-m", "hilbert_monitor"]
    return Program(*program, "demo", *arguments, *SMALL, env={**os.environ, "OMP_NUM_THREADS": "1"})


def test_the_demo_trains_a_pair_beside_its_dashboard_and_serves_on_until_it_is_told_to_end(tmp_path):
    out = tmp_path / "demo.json"
    demo = begin("--out", tmp_path / "demo", "--steps", 8, "--json", out, "--port", 0)
    try:
        lines = demo.lines()
        [address] = re.findall(r"live dashboard: (http://127\.0\.0\.1:\d+/)", next(lines))
        with urllib.request.urlopen(f"{address}healthz", timeout=60) as answer:
            assert json.load(answer)["status"] == "ok"
        said = []
        for line in lines:
            said.append(line)
            if "stays at" in line:
                break
        assert address in said[-1]
        assert "AdamW / RowNorm" in "\n".join(said)
        with urllib.request.urlopen(f"{address}api/runs", timeout=60) as answer:
            runs = json.load(answer)["runs"]
        assert sorted((run["optimizer"], run["status"], run["step"]) for run in runs) == [
            ("AdamW", "finished", 8),
            ("RowNorm", "finished", 8),
        ]
        os.kill(demo.process.pid, signal.SIGINT)
        assert demo.wait(120) == 0
        assert "Traceback" not in demo.output
    finally:
        demo.kill()
    found = json.loads(out.read_text())
    assert found.keys() == {"adamw", "rownorm", "ratios", "runs"}
    for head in ("adamw", "rownorm"):
        assert found[head].keys() == {"validation_loss", "step_diameter", "perturbation_rms"}
        assert all(value > 0 for value in found[head].values())
    assert found["ratios"]["step_diameter"] == pytest.approx(
        found["adamw"]["step_diameter"] / found["rownorm"]["step_diameter"]
    )
    runs = list(find_runs(found["runs"]))
    assert {r.info.head_optimizer for r in runs} == {"AdamW", "RowNorm"}
    assert len({r.info.panel_hash for r in runs}) == 1


def test_a_demo_that_is_interrupted_ends_cleanly_with_what_there_is(tmp_path):
    arguments = ["--out", tmp_path / "demo", "--steps", 5000, "--json", tmp_path / "out.json", "--no-serve"]
    demo = begin(*arguments, warm_runs=True)
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        runs = list(find_runs(tmp_path / "demo" / "runs"))
        if len(runs) == 2 and all(sum(1 for _ in run.steps()) > 25 for run in runs):
            break
        time.sleep(0.1)
    os.kill(demo.process.pid, signal.SIGINT)
    assert demo.wait() == 0, demo.output
    assert "ended early" in demo.output
    assert re.search(r"^steps of 5000: AdamW \d+, RowNorm \d+; [\d.]+ minutes left$", demo.output, re.MULTILINE)
    assert "Traceback" not in demo.output
    assert json.loads((tmp_path / "out.json").read_text())["ratios"]["step_diameter"] > 0
    states = [run.state(time.time()) for run in find_runs(tmp_path / "demo" / "runs")]
    assert [state.status for state in states] == ["stopped", "stopped"]


def test_a_run_of_the_demo_that_fails_is_told_in_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "sitecustomize.py").write_text("import sys\nif 'pretrain' in sys.argv: raise SystemExit('no room')\n")
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "demo"), "--steps", "8", *SMALL])
    assert result.exit_code == 1
    assert "run ended with an error: " in " ".join(result.output.split())
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--set=seed=1", "--set seed: the demo trains both heads"),
        ("--seeds=0", "Invalid value for '--seeds'"),
        ("--steps=8", "has shards that this command did not write, such as fineweb_val_000000.bin"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(tmp_path, argument, message):
    (tmp_path / "data").mkdir()
    write_shard(tmp_path / "data" / "fineweb_val_000000.bin", [1, 2])
    command = ["demo", "--out", str(tmp_path), "--no-serve", argument, *SMALL]
    result = CliRunner().invoke(app, command, env={"COLUMNS": "400"})
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("\u2502", " ").split())

"""The demo, as a command: a pair of runs, its dashboard, an interruption, a failure."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from typer.testing import CliRunner

import hilbert_monitor
from hilbert_monitor.cli import app
from hilbert_monitor.runs.log import find_runs

SMALL = ["--set=vocab_size=300", "--set=width=32", "--set=blocks=1", "--set=head_dim=16", "--set=context=16"]
SMALL += ["--set=validation_tokens=512", "--set=panel_size=128"]
SMALL += ["--text", str(Path(hilbert_monitor.__file__).parent / "geometry")]  # the standard library takes ten seconds


def begin(*arguments):
    """The demo as a command."""
    return subprocess.Popen(
        [sys.executable, "-m", "hilbert_monitor", "demo", *map(str, arguments), *SMALL],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"},
        text=True,
    )


def test_the_demo_trains_a_pair_beside_its_dashboard_and_serves_on_until_it_is_told_to_end(tmp_path):
    out = tmp_path / "demo.json"
    process = begin("--out", tmp_path / "demo", "--steps", 8, "--json", out, "--port", 0)
    try:
        [address] = re.findall(r"live dashboard: (http://127\.0\.0\.1:\d+/)", process.stdout.readline())
        with urllib.request.urlopen(f"{address}healthz", timeout=60) as answer:
            assert json.load(answer)["status"] == "ok"
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "stays at" in line:
                break
        assert address in lines[-1]
        assert "AdamW / RowNorm" in "".join(lines)
        with urllib.request.urlopen(f"{address}api/runs", timeout=60) as answer:
            runs = json.load(answer)["runs"]
        assert sorted((run["optimizer"], run["status"], run["step"]) for run in runs) == [
            ("AdamW", "finished", 8),
            ("RowNorm", "finished", 8),
        ]
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0
        assert "Traceback" not in process.stdout.read()
    finally:
        process.kill()
        process.wait()
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
    process = begin("--out", tmp_path / "demo", "--steps", 5000, "--json", tmp_path / "out.json", "--no-serve")
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        runs = list(find_runs(tmp_path / "demo" / "runs"))
        if len(runs) == 2 and all(sum(1 for _ in run.steps()) > 25 for run in runs):
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert "ended early" in said
    assert "Traceback" not in said
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

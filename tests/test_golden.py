"""What the product does today, frozen: numbers, logs and answers, through public names, the command line and HTTP.

`tests/golden/runs` are run folders, and `tests/golden/*.json` what the product makes of them and of fixed inputs.
A change of these files is a change of behaviour, and goes into the CHANGELOG. To make it:

    HILBERT_MONITOR_GOLDEN=write make test ARGS=tests/test_golden.py

Floats are compared to the digits that the arithmetic allows, never by a hash: processors round differently.
The unit tests of the Prometheus rules (`dashboards/prometheus/tests`) are frozen behaviour too.
"""

import csv
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from hilbert_monitor import Muon, RowNorm
from hilbert_monitor.geometry import (
    hilbert_perturbation,
    row_diameter,
    row_diameter_bracket,
)
from hilbert_monitor.runs.alerts import Judge, Rules
from hilbert_monitor.runs.record import StepRecord
from tests.support.ports import free_port

FOLDER = Path(__file__).parent / "golden"
WRITES = os.environ.get("HILBERT_MONITOR_GOLDEN") == "write"
RUNS = ("accident", "adamw-0", "adamw-1", "rownorm-0", "rownorm-1")


def check(name, found, rel=1e-9):
    """Compare plain values with those that are stored, or store them."""
    path = FOLDER / f"{name}.json"
    if WRITES:
        path.write_text(json.dumps(found, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
    expected = json.loads(path.read_text())
    differences = list(differing("", json.loads(json.dumps(found)), expected, rel))
    assert not differences, f"{len(differences)} values are not as in {path.name}: {differences[:10]}"


def differing(place, found, expected, rel):
    """Yield the places at which two values of plain types differ."""
    if isinstance(found, dict) and isinstance(expected, dict):
        for key in sorted(found.keys() | expected.keys()):
            missing = object()
            yield from differing(f"{place}.{key}", found.get(key, missing), expected.get(key, missing), rel)
    elif isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        for number, pair in enumerate(zip(found, expected, strict=True)):
            yield from differing(f"{place}[{number}]", *pair, rel)
    elif isinstance(found, float) and isinstance(expected, float):
        if not math.isclose(found, expected, rel_tol=rel):
            yield place, found, expected
    elif found != expected:
        yield place, found, expected


# Geometry


def increments():
    """Small increments, by name: (V, d) in fp32."""
    draw = torch.Generator().manual_seed(0)
    normal = torch.randn(300, 8, generator=draw)
    yield "normal", normal
    yield "heavy tail", normal * torch.rand(300, 1, generator=draw).clamp(min=1e-3) ** -1.5
    yield "unit rows", normal / normal.norm(dim=1, keepdim=True)
    yield "common shift", normal + 100
    yield "two far rows", torch.cat([1e-3 * normal, torch.tensor([[3.0] + 7 * [0.0], [-4.0] + 7 * [0.0]])])
    yield "ties", torch.eye(8)[torch.arange(300) % 8]
    yield "one row", normal[:1]
    yield "denormal", 1e-40 * normal


def test_diameters_bounds_and_perturbations():
    found = {}
    for name, S in increments():
        H = torch.randn(40, 8, generator=torch.Generator().manual_seed(1))
        exact, bounds, panel = row_diameter(S), row_diameter_bracket(S), hilbert_perturbation(S, H)
        distances = torch.cdist(S.double(), S.double(), compute_mode="donot_use_mm_for_euclid_dist")
        largest = float(distances.max())
        # A difference of two fp32 rows is exact to a few roundings of its own size.
        assert exact.value == exact.lower == pytest.approx(largest, rel=1e-6, abs=1e-44)
        assert bounds.lower <= exact.value <= exact.upper <= bounds.upper
        i, j = exact.pair
        assert float(distances[i, j]) == pytest.approx(largest, rel=1e-6, abs=1e-44)
        found[name] = {
            "pair": None if name == "ties" else list(exact.pair),
            "value": exact.value,
            "rms": float(panel.rms),
            "max": float(panel.max),
            "bounds are within": bounds.upper <= 1.5 * bounds.lower,
        }
    check("geometry", found, rel=1e-4)  # sums of fp32 products around 100


# Optimizers, in units of the learning rate


def gradients(steps, shape, size):
    draw = torch.Generator().manual_seed(2)
    return [size * torch.randn(shape, generator=draw, dtype=torch.float64) for _ in range(steps)]


def rownorm_weights(W, grads, lr, beta=0.95, eps=1e-8):
    """RowNorm as in the paper: a bias-corrected average, each row divided by its norm."""
    average = torch.zeros_like(W)
    for t, G in enumerate(grads, 1):
        average = beta * average + (1 - beta) * G
        direction = average / (1 - beta**t)
        W = W - lr * direction / (direction.norm(dim=1, keepdim=True) + eps)
    return W


def muon_weights(W, grads, lr, beta=0.95, decay=0.1, eps=1e-5):
    """Muon as in the paper: Nesterov momentum, five Newton-Schulz steps, sqrt(max(1, m/n))."""
    buffer = torch.zeros_like(W)
    for G in grads:
        buffer = beta * buffer + G
        X = G + beta * buffer
        tall = X.shape[0] > X.shape[1]
        X = X.T if tall else X
        X = X / (X.norm() + eps)
        for _ in range(5):
            A = X @ X.T
            X = 3.4445 * X + (-4.7750 * A + 2.0315 * A @ A) @ X
        X = X.T if tall else X
        W = W * (1 - lr * decay) - lr * max(1, W.shape[0] / W.shape[1]) ** 0.5 * X
    return W


@pytest.mark.parametrize(
    ("make", "reference", "shape", "size"),
    [
        (lambda p, lr: RowNorm([p], lr), rownorm_weights, (50, 6), 1.0),
        (lambda p, lr: RowNorm([p], lr), rownorm_weights, (50, 6), 1e-7),  # where eps is a tenth of a row's norm
        (lambda p, lr: Muon([p], lr=lr), muon_weights, (12, 8), 1.0),
        (lambda p, lr: Muon([p], lr=lr), muon_weights, (8, 20), 1e-6),  # where eps is as large as the norm
    ],
    ids=["RowNorm", "RowNorm, small gradients", "Muon, tall", "Muon, wide, small gradients"],
)
def test_steps_follow_the_papers_equations(make, reference, shape, size):
    lr, grads = 1e-2, gradients(10, shape, size)
    start = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    weight = torch.nn.Parameter(start.float())
    optimizer = make(weight, lr)
    for G in grads:
        weight.grad = G.float()
        optimizer.step()
    error = (weight.detach().double() - reference(start.float().double(), grads, lr)).abs().max()
    # Ten steps of size lr in fp32: roundings of the weight (6e-8 a step) and of the direction.
    assert float(error) < 1e-3 * lr


# The recipe

TINY = {
    "vocab_size": 128,
    "width": 32,
    "blocks": 1,
    "head_dim": 16,
    "context": 16,
    "global_batch": 8,
    "micro_batch": 4,
    "validation_tokens": 512,
    "panel_size": 64,
    "updates": 40,
    "validation_every": 20,
    "diameter_every": 5,
    "perturbation_every": 10,
}


def write_shard(path, tokens):
    """Write tokens in the format of the FineWeb shards: 256 integers, then two bytes a token."""
    header = np.zeros(256, dtype="<i4")
    header[:3] = 20240520, 1, len(tokens)  # magic, version
    path.write_bytes(header.tobytes() + tokens.astype("<u2").tobytes())


ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("HILBERT_MONITOR_TOKEN")}


def hilbert_monitor(*arguments):
    """Run a command; return what it printed."""
    command = [sys.executable, "-m", "hilbert_monitor", *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=200).stdout


@pytest.mark.parametrize("head", ["adamw", "rownorm"])
def test_forty_updates_of_the_recipe(head, tmp_path):
    draw = np.random.default_rng(0)
    for name, size in (("fineweb_train_0.bin", 30_000), ("fineweb_val_0.bin", 4_000)):
        write_shard(tmp_path / name, np.cumsum(draw.integers(0, 5, size)) % 128)
    changes = [part for name, value in TINY.items() for part in ("--set", f"{name}={value}")]
    places = ["--data", tmp_path, "--runs", tmp_path / "runs", "--checkpoints", tmp_path / "checkpoints"]
    hilbert_monitor(
        *("pretrain", "--size", "demo", "--head", head, "--accelerator", "cpu", "--quiet", "--name", "run"),
        *(*places, *changes),
    )
    lines = (tmp_path / "runs" / "run" / "steps.jsonl").read_text().splitlines()
    records = {record["step"]: record for record in map(json.loads, lines) if "step" in record}
    assert [*records] == [*range(1, 41)]
    names = ("train_loss", "validation_loss", "learning_rate", "tokens", "diameter", "perturbation_rms")
    trace = {name: {str(step): records[step].get(name) for step in records} for name in names}
    # Noise of 1.2e-7 of their RMS in all gradients that are not zero moves these by 2e-7 in 40 updates, and another
    # instruction set by as much. A changed number of the recipe moves them by more than 1e-4.
    check(f"recipe-{head}", trace, rel=1e-4)


# Run folders


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """Fetch from a service of the stored runs: path -> text."""
    root, port = tmp_path_factory.mktemp("golden") / "runs", free_port()
    shutil.copytree(FOLDER / "runs", root)
    for end in root.glob("*/end.jsonl"):  # the metrics are those of runs that ended just now
        end.write_text(re.sub(r'"time":[\d.]+', f'"time":{time.time()}', end.read_text()))
    command = [
        sys.executable,
        "-m",
        "hilbert_monitor",
        "serve",
        str(root),
        "--port",
        str(port),
        "--reexport",
        "--no-cache",
    ]
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=ENVIRONMENT) as process:

        def get(path):
            with direct.open(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
                return answer.read().decode()

        def ready():
            try:
                return json.loads(get("/healthz"))["progress"] == 1.0
            except (urllib.error.URLError, ConnectionError):
                return False

        deadline = time.monotonic() + 60
        while not ready():
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.1)
        yield get
        process.terminate()


def without(value, names):
    """Return plain values without entries of these names, wherever they are."""
    if isinstance(value, dict):
        return {key: without(item, names) for key, item in value.items() if key not in names}
    return [without(item, names) for item in value] if isinstance(value, list) else value


def test_answers_of_the_service(service):
    paths = {
        "runs": "/api/runs",
        "run": "/api/runs/accident",
        "records": "/api/runs/accident/records?fields=diameter,diameter_upper,pair.0,validation_loss&last=40",
        "layers": "/api/runs/accident/layers",
        "alerts": "/api/alerts",
        "difference": "/api/difference?a=adamw-0&b=rownorm-0",
        "columns": "/api/columns",
        "cells": "/api/columns/cells?name=lr&name=last:diameter",
    }
    machine = {"root", "version", "age", "progress"}  # of this machine and moment
    check("answers", {name: without(json.loads(service(path)), machine) for name, path in paths.items()})


def test_figures_of_a_comparison(service):
    answer = json.loads(service("/api/compare"))
    traces = {
        panel: [(trace.get("name"), len(trace.get("x", ()))) for trace in figure["data"]]
        for panel, figure in answer["figures"].items()
    }
    rest = without(answer, {"figures", "version", "themes"})
    check("compare", {"traces": traces, "answer": rest})
    run = json.loads(service("/api/runs/rownorm-0/figures"))
    traces = {name: [trace.get("name") for trace in figure["data"]] for name, figure in run["figures"].items()}
    check("run-figures", traces)


def numbers(cells):
    """Return cells as numbers where they are."""
    return [float(cell) if re.fullmatch(r"-?[\d.]+(e[-+]?\d+)?", cell) else cell for cell in cells]


def test_csv_files(service):
    found = {}
    for name, path in {
        "records": "/api/runs/rownorm-0/records?format=csv",
        "panel": "/api/runs/rownorm-0/panels/diameter.csv",
        "compare": "/api/compare/diameter.csv",
    }.items():
        header, *rows = csv.reader(io.StringIO(service(path)))
        found[name] = {"header": header, "rows": len(rows), "first": numbers(rows[0]), "last": numbers(rows[-1])}
    check("csv", found)


def test_metrics_that_prometheus_scrapes(service):
    lines = service("/metrics").splitlines()
    families = sorted(line for line in lines if line.startswith(("# TYPE hilbert_", "# HELP hilbert_")))
    moment = re.compile(r"hilbert_(service|follow|heartbeat|build|cache|scrape)")
    samples = [line.rpartition(" ") for line in lines if line.startswith("hilbert_") and not moment.match(line)]
    kept = {name: float(value) for name, _, value in samples if 'run="rownorm-0"' in name or 'run="accident"' in name}
    check("metrics", {"families": families, "samples": {k: v if math.isfinite(v) else str(v) for k, v in kept.items()}})


def test_a_stored_run_is_judged_as_it_was():
    """Records give the same alerts when they are replayed, and every field of a record is read."""
    judge, alerts, known = Judge(Rules()), [], set()
    lines = (FOLDER / "runs" / "accident" / "steps.jsonl").read_text().splitlines()
    for line in lines[lines.index('{"attempt":2,"first_step":20}') + 1 :]:
        values = json.loads(line)
        record = msgspec.convert(values, StepRecord)
        assert values.keys() <= set(StepRecord.__struct_fields__)
        if record.step not in known:  # a second line of a step has its validation loss
            known.add(record.step)
            alerts += [msgspec.to_builtins(alert) for alert in judge.judge(record)]
    check("alerts", alerts)


def test_a_report_of_the_stored_runs(tmp_path):
    out, numbers = tmp_path / "report.html", tmp_path / "numbers.json"
    hilbert_monitor("report", FOLDER / "runs", "--out", out, "--json", numbers)
    assert "rownorm-0" in out.read_text()
    check("report", without(json.loads(numbers.read_text()), {"version", "made", "root"}))

"""Write folders of runs, and start the service on them, in this process or in another."""

import math
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager

from starlette.testclient import TestClient

from hilbert_monitor.runs.log import RunWriter
from hilbert_monitor.runs.record import Alert, RunInfo
from hilbert_monitor.service.following.index import Index
from hilbert_monitor.service.web.app import create_app
from tests.support.records import record

SCRIPT = "<script>alert(1)</script>"
FORMULA = "=cmd|' /C calc'!A0"
IMAGE = "<img src=x onerror=alert(1)>"


def write_run(root, name, records=(), alerts=(), error=None, **info):
    """Write a run that has ended, and return its id."""
    defaults = {"head_optimizer": "RowNorm", "model": "GPT", "seed": 0, "panel_hash": "panel"}
    writer = RunWriter.open(root, RunInfo(name=name, **(defaults | info)))
    for step in records:
        writer.write(step)
    for alert in alerts:
        writer.alert(alert)
    writer.close(error)
    return writer.id


def write_zoo(root):
    """Write one run of every kind: healthy, failed, hostile, copied, empty and broken; and a folder that is no run."""
    for seed in (0, 1):
        for head, factor in (("AdamW", 50.0), ("RowNorm", 1.0)):
            steps = [
                record(s, diameter=factor * 0.02 / s, validation_loss=11.0 / s if s % 10 == 0 else None)
                for s in range(1, 101)
            ]
            write_run(
                root, f"{head} {seed}", steps, head_optimizer=head, seed=seed, config={"lr": 0.1, "deep": {"a": [1]}}
            )
    lost = [record(1), record(2, train_loss=math.nan, diameter=math.inf, pair=None, pair_text=None)]
    blown = Alert(step=2, time=5.0, kind="nonfinite", value=math.inf, expected=math.nan, message="two\nlines")
    write_run(root, "failed", lost, [blown], ValueError("lost"), head_optimizer="Muon", config={"lr": 0.2})
    hostile = [record(s, pair_text=(SCRIPT, FORMULA)) for s in range(1, 20)]
    id = write_run(
        root, SCRIPT, hostile, head_optimizer=FORMULA, model=SCRIPT, config={SCRIPT: FORMULA}, remarks=(SCRIPT,)
    )
    shutil.copytree(root / id, root / IMAGE)
    shutil.copytree(root / id, root / FORMULA.replace("/", ""))
    write_run(root, "empty", head_optimizer="Muon", seed=None)
    (root / "broken").mkdir()
    (root / "broken" / "info.jsonl").write_bytes(b"\x00\xff{]\n" * 3)
    (root / "broken" / "steps.jsonl").write_bytes(b'{"step": 1e999}\n[[[[\n')
    (root / "foreign").mkdir()
    (root / "foreign" / "notes.txt").write_text("not a run")


@contextmanager
def client_of(root, **options):
    """A test client of the service over a folder, in this process. Its `index` has read the runs once."""
    index = Index(root)
    index.refresh()
    app = create_app(index, **options)
    with TestClient(app, base_url="http://127.0.0.1:8000", client=("127.0.0.1", 50000)) as client:
        client.index = index
        yield client


@contextmanager
def running_service(*arguments):
    """Run `hilbert-monitor serve` in another process: yields the process, its URL and the first line of its output."""
    command = [sys.executable, "-m", "hilbert_monitor", "serve", *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        first = process.stdout.readline()
        url = re.search(r"http://\S+", first)
        assert url, first
        yield process, url[0], first
    finally:
        process.kill()
        process.wait()
        process.stdout.close()

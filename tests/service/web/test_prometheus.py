"""What the service gives Prometheus, against what the runs themselves would export."""

import math
import os
import socket
import subprocess
import sys
import time

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parsed_openmetrics
from starlette.testclient import TestClient

from hilbert_monitor.runs.exposition import Exposition, RunSamples
from hilbert_monitor.runs.log import RunWriter
from hilbert_monitor.runs.record import Alert, RunInfo, StepRecord
from hilbert_monitor.service.following import index as indexing
from hilbert_monitor.service.following.index import Index
from hilbert_monitor.service.web import prometheus as scraped
from hilbert_monitor.service.web.app import create_app

HERE = socket.gethostname()


@pytest.fixture
def root(tmp_path):
    return tmp_path / "runs"


def begin(root, name, **about):
    return RunWriter.open(root, RunInfo(name=name, head_optimizer="AdamW", **about))


def client(root, **options):
    index = Index(root)
    index.refresh()
    return TestClient(create_app(index, **options), base_url="http://localhost")


def names(text):
    return {line.split('run="')[1].split('"')[0] for line in text.splitlines() if line.startswith("hilbert_run_info")}


def records():
    for step in range(1, 60):
        yield StepRecord(
            step=step,
            time=1e9 + step,
            tokens=100 * step,
            train_loss=math.nan if step == 30 else 1 / step,
            diameter=0.01 * step if step % 10 == 0 else None,
            diameter_lower=0.01 * step,
            ceiling=1.0,
            perturbation_rms=0.5 / step if step % 20 == 0 else None,
            hidden_norm_rms=3.0 if step % 20 == 0 else None,
            nonfinite_rows=3 if step == 31 else 0,
            skipped="overflow" if step == 12 else "",
            seconds={"increment": 0.25, **({"panel": 0.5} if step % 20 == 0 else {})},
        )


def test_a_log_says_what_the_run_itself_would_have_said(root):
    writer = begin(root, "run", seed=3, stalled_after=7.0)
    itself = RunSamples(lambda: writer.info, stalled_after=7.0)
    for item in (*records(), Alert(step=31, time=0.0, kind="diameter", value=2.0, expected=1.0)):
        itself.write(item)
        (writer.alert if isinstance(item, Alert) else writer.write)(item)
    registry = CollectorRegistry()
    registry.register(Exposition(lambda: [itself.samples()]))
    own, exported = (
        {line for line in text.splitlines() if not line.startswith("hilbert_heartbeat")}
        for text in (generate_latest(registry).decode(), client(root).get("/metrics").text)
    )
    assert own == exported
    assert 'hilbert_stalled_after_seconds{head="AdamW",run="run"} 20.0' in own
    writer.close()


def test_a_run_of_slow_steps_does_not_count_as_stalled(root):
    first = begin(root, "run")
    first.write(StepRecord(step=1, time=0.0))
    first.close()
    writer = RunWriter.open(root, RunInfo(id="run", name="run", head_optimizer="AdamW"), first_step=1)
    for step in range(2, 6):  # the hours between two attempts are no pace
        writer.write(StepRecord(step=step, time=1e6 + 420.0 * step))
    assert 'hilbert_stalled_after_seconds{head="AdamW",run="run"} 8400.0' in client(root).get("/metrics").text
    old = time.time() - 430
    os.utime(root / "run" / "steps.jsonl", (old, old))
    assert 'run="run",status="running"} 1.0' in client(root).get("/metrics").text
    writer.close()


def test_the_patience_that_a_run_asks_for_decides_its_state(root):
    writers = [begin(root, "hasty", stalled_after=10.0), begin(root, "patient", stalled_after=1e4), begin(root, "none")]
    old = time.time() - 400
    for writer in writers:
        os.utime(writer.folder / "steps.jsonl", (old, old))
    text = client(root).get("/metrics").text
    for name, status in (("hasty", "stalled"), ("patient", "running"), ("none", "stalled")):
        assert f'run="{name}",status="{status}"}} 1.0' in text
    for writer in writers:
        writer.close()


def test_a_log_that_is_still_being_read_is_not_exported(root, monkeypatch):
    monkeypatch.setattr(indexing, "BEHIND", 4000)
    writer = begin(root, "run")
    for record in [*records()] * 40:
        writer.write(record)
    index = Index(root)
    index.refresh(0.0)
    service = TestClient(create_app(index), base_url="http://localhost")
    parts = 0
    while index.runs.get("run") is None or index.runs["run"].indexed < 1:
        assert names(service.get("/metrics").text) == set()
        index.refresh(2e-4)  # a block of the log
        parts += 1
    assert parts > 2
    assert names(service.get("/metrics").text) == {"run"}
    writer.close()


def test_a_run_with_a_port_is_a_target_and_is_not_told_of_again(root):
    writers = [begin(root, "own", port=9464, address="0.0.0.0"), begin(root, "none")]
    service = client(root)
    assert service.get("/api/prometheus/targets").json() == [
        {
            "targets": [f"{HERE}:9464"],
            "labels": {"__scheme__": "http", "__meta_hilbert_run": "own", "__meta_hilbert_head": "AdamW"},
        }
    ]
    assert names(service.get("/metrics").text) == {"none"}
    everything = client(root, reexport=True)
    assert everything.get("/api/prometheus/targets").json() == []
    assert names(everything.get("/metrics").text) == {"own", "none"}
    for writer in writers:
        writer.close()


@pytest.mark.parametrize(("scheme", "told"), [("https", "https"), ("http", "http"), ("file", "http")])
def test_a_target_says_whether_it_speaks_tls(root, scheme, told):
    writer = begin(root, "run", port=9464, scheme=scheme)
    (target,) = client(root).get("/api/prometheus/targets").json()
    assert target["labels"]["__scheme__"] == told
    writer.close()


def test_a_killed_run_is_no_target_and_is_told_of_from_its_log(root):
    code = (
        "import sys, os, signal\n"
        "from hilbert_monitor.runs.log import RunWriter\n"
        "from hilbert_monitor.runs.record import RunInfo, StepRecord\n"
        "w = RunWriter.open(sys.argv[1], RunInfo(name='run', head_optimizer='AdamW', port=9464, heartbeat=5.0))\n"
        "w.write(StepRecord(step=1, time=0.0)); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, root], check=False)
    old = time.time() - 7200  # it had been stalled for long
    os.utime(root / "run" / "steps.jsonl", (old, old))

    def seen(ago):
        moment = time.time() - ago
        os.utime(root / "run" / "heartbeat", (moment, moment))
        service = client(root)
        assert service.get("/api/prometheus/targets").json() == []
        return 'run="run",status="killed"} 1.0' in service.get("/metrics").text

    assert seen(0)
    assert seen(3600)  # on another host it takes a minute until the process counts as gone
    assert not seen(3700)


def test_a_run_with_a_port_is_a_target_while_it_lingers_and_then_told_of_from_its_log(root, monkeypatch):
    writer = begin(root, "run", port=9464)
    writer.close(RuntimeError("no"))
    service, now = client(root), time.time()
    for later, targets, exported in ((0, 1, set()), (100, 0, {"run"}), (700, 0, set())):
        monkeypatch.setattr(scraped.time, "time", lambda later=later: now + later)
        assert len(service.get("/api/prometheus/targets").json()) == targets
        assert names(service.get("/metrics").text) == exported


def test_a_stopped_run_says_so(root):
    writer = begin(root, "run")
    writer.close()
    end = root / "run" / "end.jsonl"
    end.write_text(end.read_text().replace("}", ',"stopped":"SIGTERM"}'))
    assert 'run="run",status="stopped"} 1.0' in client(root).get("/metrics").text


@pytest.mark.parametrize(
    ("address", "here", "target"),
    [
        ("127.0.0.1", True, "127.0.0.1:9000"),
        ("::1", True, "127.0.0.1:9000"),
        ("localhost", True, "127.0.0.1:9000"),
        ("", True, "127.0.0.1:9000"),
        ("127.0.0.1", False, ""),
        ("0.0.0.0", False, "far:9000"),
        ("10.1.2.3", True, f"{HERE}:9000"),
    ],
)
def test_a_target_is_where_it_can_be_reached(address, here, target):
    assert scraped._address(RunInfo(host=HERE if here else "far", port=9000, address=address)) == target
    assert scraped._address(RunInfo(host=HERE, address=address)) == ""


def test_a_run_that_listens_to_another_machine_alone_is_told_of_from_its_log(root, monkeypatch):
    writer = begin(root, "far", port=9464, address="127.0.0.1")
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    service = client(root)
    assert service.get("/api/prometheus/targets").json() == []
    assert names(service.get("/metrics").text) == {"far"}
    writer.close()


def test_how_a_run_ended_is_told_for_a_while_and_then_no_more(root):
    writer = begin(root, "run")
    writer.write(StepRecord(step=1, time=0.0))
    writer.close(RuntimeError("no"))
    assert 'hilbert_run_status{head="AdamW",run="run",status="failed"} 1.0' in client(root).get("/metrics").text
    end = root / "run" / "end.jsonl"
    end.write_text(f'{{"attempt":1,"time":{time.time() - 3600}}}\n')
    assert names(client(root).get("/metrics").text) == set()


def test_what_cannot_be_read_is_not_told_of(root):
    (root / "bad").mkdir(parents=True)
    (root / "bad" / "info.jsonl").write_text("nonsense\n")
    assert names(client(root).get("/metrics").text) == set()


def test_openmetrics_is_told_to_who_asks_for_it(root):
    writer = begin(root, "run")
    writer.write(StepRecord(step=1, time=0.0, diameter=0.5))
    answer = client(root).get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert "hilbert_step_diameter" in {family.name for family in parsed_openmetrics(answer.text)}
    writer.close()


def test_metrics_and_targets_need_the_token(root):
    service = client(root, token="secret", allowed_hosts=None)
    for path in ("/metrics", "/api/prometheus/targets", "/runbooks/StepDiameterBlowUp"):
        assert service.get(path).status_code == 401
        assert service.get(path, headers={"Authorization": "Bearer secret"}).status_code == 200


def test_a_runbook_is_served_and_no_other_file(root):
    service = client(root)
    assert "Mitigation" in service.get("/runbooks/StepDiameterBlowUp").text
    for name in ("Nothing", "..%2F..%2Fpyproject.toml", "StepDiameterBlowUp.md"):
        assert service.get(f"/runbooks/{name}").status_code == 404

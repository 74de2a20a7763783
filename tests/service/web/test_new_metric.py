"""A metric is one field of the record: it is everywhere, and no other file has to know of it."""

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SETUP = """
import importlib.util, json, sys
from pathlib import Path

FIELDS = (
    '    head_temperature: Annotated[float | None, Metric("head_temperature_celsius", panel="learning_rate",'
    ' label="temperature", help="Temperature of the LM head.")] = None\\n'
    '    head_sensors: Annotated[int | None, Metric("head_sensors", panel="rows", label="sensors", help="Sensors.")]'
    ' = None\\n'
)
FORMULA = (
    '    Metric("sensor_share", field="sensor_share", panel="shares", label="share of a sensor", unit="ratio",'
    ' help="Share of a sensor.", formula=lambda head_temperature, head_sensors: head_temperature / head_sensors), '
)
spec = importlib.util.find_spec("hilbert_monitor.runs.record")
record = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
text = Path(spec.origin).read_text().replace("    seconds: dict", FIELDS + "    seconds: dict")
text = text.replace("FORMULAS = (SATURATION,", "FORMULAS = (" + FORMULA + "SATURATION,")
exec(compile(text, spec.origin, "exec"), record.__dict__)
StepRecord = record.StepRecord
"""
WHERE_IT_IS = """
from starlette.testclient import TestClient
from hilbert_monitor.runs.log import RunWriter
from hilbert_monitor.runs.record import RunInfo
from hilbert_monitor.service.following.index import Index
from hilbert_monitor.service.web.app import create_app

root, project = Path(sys.argv[1]), Path(sys.argv[2])
writer = RunWriter.open(root, RunInfo(name="run", head_optimizer="AdamW"))
for step in (1, 2, 3):
    writer.write(StepRecord(step=step, time=float(step), head_temperature=20.0 * step, head_sensors=4))
index = Index(root)
index.refresh()
client = TestClient(create_app(index), base_url="http://localhost")
sys.path[:0] = [str(project / "docs"), str(project / "dashboards" / "grafana")]
import generate, run as grafana
from hilbert_monitor.runs.table import NUMBERS, WHOLE

figures = client.get("/api/runs/run/figures").json()["figures"]
print(json.dumps({
    "logged": {metric.logged: value for metric, value in record.measured(StepRecord(
        step=1, time=0.0, head_temperature=20.0, head_sensors=4))},
    "numbers": NUMBERS,
    "whole": sorted(WHOLE),
    "records": client.get("/api/runs/run/records").json()["columns"],
    "records csv": client.get("/api/runs/run/records?format=csv").text,
    "panel csv": client.get("/api/runs/run/panels/learning_rate.csv").text,
    "shares csv": client.get("/api/runs/run/panels/shares.csv").text,
    "legends": {name: [trace["name"] for trace in figure["data"]] for name, figure in figures.items()},
    "metrics": client.get("/metrics").text,
    "openapi": client.get("/api/openapi.json").text,
    "grafana": json.dumps(grafana.run()),
    "table": generate.table(generate.TABLES["metrics"]).splitlines(),
}))
writer.close()
"""


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    command = [sys.executable, "-c", SETUP + WHERE_IT_IS, str(tmp_path_factory.mktemp("runs")), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def header(text):
    return next(csv.reader(io.StringIO(text)))


def test_loggers_have_it(places):
    assert places["logged"]["hilbert/head_temperature_celsius"] == 20.0
    assert places["logged"]["hilbert/sensor_share"] == 5.0


def test_the_columns_of_the_service_have_it(places):
    assert {"head_temperature", "head_sensors"} <= {*places["numbers"]}
    assert "head_sensors" in places["whole"]
    assert places["records"]["head_temperature"] == [20.0, 40.0, 60.0]
    assert {"head_temperature", "head_sensors"} <= {*header(places["records csv"])}


def test_the_panel_that_it_names_draws_it(places):
    assert places["legends"] == {"learning_rate": ["temperature"], "shares": ["share of a sensor"]}
    assert header(places["panel csv"]) == ["step", "tokens", "hours", "head_temperature"]
    assert header(places["shares csv"]) == ["step", "tokens", "hours", "sensor_share"]


def test_prometheus_has_it_with_its_help(places):
    assert "# HELP hilbert_head_temperature_celsius Temperature of the LM head.\n" in places["metrics"]
    assert 'hilbert_head_temperature_celsius{head="AdamW",run="run"} 60.0' in places["metrics"]
    assert 'hilbert_sensor_share{head="AdamW",run="run"} 15.0' in places["metrics"]


def test_grafana_asks_for_it(places):
    for name in ("head_temperature_celsius", "head_sensors", "sensor_share"):
        assert f"hilbert_{name}{{" in places["grafana"]


def test_documents_describe_it(places):
    assert "| `hilbert_head_temperature_celsius` | gauge | Temperature of the LM head. |" in places["table"]
    assert "Temperature of the LM head." in places["openapi"]

"""From a training step to a page of somebody on call, with the real programs.

Runs train in processes of their own and serve their metrics; the service tells Prometheus where they are; Prometheus
has the rules that we ship; Alertmanager posts to a webhook here.
"""

import contextlib
import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from tests.support.programs import needs

ROOT = Path(__file__).parents[2]
RULES = ROOT / "dashboards" / "prometheus" / "rules"


def get(url):
    with urllib.request.urlopen(url, timeout=5) as answer:
        return json.load(answer)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


def until(condition, patience, what):
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if found := condition():
                return found
        time.sleep(0.25)
    raise AssertionError(f"waited {patience} s for {what}")


@contextlib.contextmanager
def running(command, log, **options):
    """A program, ended by its id at the end of the block."""
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, **options)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Page:
    """A webhook that keeps what Alertmanager posts: (alert, run, status) and all of it."""

    def __init__(self):
        self.posted = posted = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                posted.extend(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["alerts"])
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/"

    def told(self):
        return {(alert["labels"]["alertname"], alert["labels"]["run"]) for alert in self.posted}


class Cluster:
    """The service, Prometheus and Alertmanager over one folder of runs."""

    def __init__(self, folder, stack):
        self.runs, self.folder, self.stack = folder / "runs", folder, stack
        self.page = Page()
        stack.callback(self.page.server.shutdown)
        ports = self.service, self.prometheus, self.alertmanager = [free_port() for _ in range(3)]
        prometheus, alertmanager = needs("prometheus"), needs("prometheus-alertmanager")
        self._configure()
        self._run("service", [sys.executable, "-m", "hilbert_monitor", "serve", str(self.runs), f"--port={ports[0]}"])
        self._run(
            "prometheus",
            [
                prometheus,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'tsdb'}",
                f"--web.listen-address=127.0.0.1:{self.prometheus}",
            ],
        )
        self._run(
            "alertmanager",
            [
                alertmanager,
                f"--config.file={folder / 'alertmanager.yml'}",
                f"--storage.path={folder / 'alertmanager'}",
                f"--web.listen-address=127.0.0.1:{self.alertmanager}",
                "--cluster.listen-address=",
            ],
        )
        until(lambda: get(f"http://127.0.0.1:{self.service}/healthz"), 30, "the service")
        until(lambda: self.query("1"), 30, "Prometheus")

    def train(self, name, fault=""):
        """A run in a process of its own."""
        command = [sys.executable, "-m", "tests.support.oncall_run", name, str(self.runs), fault]
        return self._run(name, command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})

    def query(self, expression):
        """The samples of an expression now."""
        url = f"http://127.0.0.1:{self.prometheus}/api/v1/query?query={urllib.request.quote(expression)}"
        return get(url)["data"]["result"]

    def _run(self, name, command, **options):
        return self.stack.enter_context(running(command, self.folder / f"{name}.log", **options))

    def _configure(self):
        service = f"127.0.0.1:{self.service}"
        prometheus = {
            "global": {
                "scrape_interval": "1s",
                "scrape_timeout": "1s",
                "evaluation_interval": "1s",
                "external_labels": {"hilbert_url": f"http://{service}"},
            },
            "rule_files": [str(RULES / "*.yml")],
            "alerting": {"alertmanagers": [{"static_configs": [{"targets": [f"127.0.0.1:{self.alertmanager}"]}]}]},
            "scrape_configs": [
                {
                    "job_name": "hilbert-runs",
                    "http_sd_configs": [{"url": f"http://{service}/api/prometheus/targets", "refresh_interval": "1s"}],
                },
                {"job_name": "hilbert-service", "static_configs": [{"targets": [service]}]},
            ],
        }
        hook = {"url": self.page.url, "send_resolved": False}
        alertmanager = {
            "route": {
                "receiver": "page",
                "group_by": ["alertname", "run"],
                "group_wait": "0s",
                "group_interval": "1s",
            },
            "receivers": [{"name": "page", "webhook_configs": [hook]}],
        }
        (self.folder / "prometheus.yml").write_text(json.dumps(prometheus))
        (self.folder / "alertmanager.yml").write_text(json.dumps(alertmanager))


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """What was posted of four runs that train side by side: clean, with an accident, failing, and killed."""
    folder = tmp_path_factory.mktemp("oncall")
    with contextlib.ExitStack() as stack:
        cluster = Cluster(folder, stack)
        runs = {name: cluster.train(name, fault) for name, fault in FAULTS.items()}
        until(
            lambda: cluster.query('hilbert_step{run="killed"} > 60'), 120, "the run that will be killed to be scraped"
        )
        cluster.doubled = cluster.query('count by (run) (hilbert_run_info{run=~"clean|killed"}) > 1')
        cluster.workers = children(runs["killed"].pid)
        os.kill(runs["killed"].pid, signal.SIGKILL)
        runs["killed"].wait()
        cluster.killed = time.monotonic()
        for name in ("clean", "accident", "failing"):
            runs[name].wait(180)
        until(lambda: ("RunStalled", "killed") in cluster.page.told(), 180, "the killed run to be reported")
        cluster.stalled_after = time.monotonic() - cluster.killed
        until(lambda: ("RunFailed", "failing") in cluster.page.told(), 30, "the failed run to be reported")
        cluster.ended = {name: process.returncode for name, process in runs.items()}
        yield cluster


FAULTS = {"clean": "", "accident": "rate", "failing": "error", "killed": "wait"}


def children(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_a_clean_run_fires_nothing(story):
    assert story.ended["clean"] == 0
    assert [told for told in story.page.told() if told[1] == "clean"] == []


def test_an_accident_of_the_learning_rate_fires_the_step_diameter_and_nothing_else(story):
    assert story.ended["accident"] == 0
    assert {told for told in story.page.told() if told[1] == "accident"} == {("StepDiameterBlowUp", "accident")}


def test_the_page_says_what_happened_and_where_to_look(story):
    [alert] = [a for a in story.page.posted if a["labels"]["run"] == "accident"][:1]
    said = alert["annotations"]
    assert "accident" in said["summary"]
    assert "AdamW" in said["description"]
    step = said["dashboard"].rpartition("=")[2]
    assert int(step) in (161, 162)
    with urllib.request.urlopen(said["dashboard"], timeout=5) as answer:
        assert b"hilbert-monitor" in answer.read()
    with urllib.request.urlopen(said["runbook_url"], timeout=5) as answer:
        assert "Mitigation" in answer.read().decode()


def test_a_run_that_fails_is_reported_as_failed_and_not_as_stalled(story):
    assert story.ended["failing"] != 0
    assert {told for told in story.page.told() if told[1] == "failing"} == {("RunFailed", "failing")}


def test_a_run_that_is_killed_is_reported_by_the_age_of_its_heartbeat(story):
    assert story.workers  # it had loader workers, which can hold what they inherited
    assert {told for told in story.page.told() if told[1] == "killed"} == {("RunStalled", "killed")}
    assert story.stalled_after > 15


def test_no_run_is_counted_twice(story):
    assert story.doubled == []


def test_series_of_runs_that_ended_go_away(story):
    until(lambda: story.query('hilbert_step{run="clean",job="hilbert-runs"}') == [], 90, "the series to be stale")

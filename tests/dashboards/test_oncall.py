"""From a training step to a page of somebody on call, with the real programs.

Runs train in processes of their own; the service tells Prometheus and VictoriaMetrics where they are, and exports what
has only a log. Both systems have the settings and rules that we ship, with shorter waits, and tell one Alertmanager,
which posts to a webhook here.
"""

import contextlib
import http.server
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from tests.support.logged_runs import LONG, write_long
from tests.support.ports import free_port
from tests.support.programs import needs
from tests.support.warm import Program

ROOT = Path(__file__).parents[2]
DASHBOARDS = ROOT / "dashboards"
SYSTEMS = ("prometheus", "victoriametrics")
TRAINED = ("clean", "accident", "stopped", "killed")
LOGGED = ("plain", "long", "slow", "stuck", "early")
TOKEN = "a-token-of-some-length"
on_both = pytest.mark.parametrize("system", SYSTEMS)
long = pytest.mark.sweep
"""A test of the story, which takes two minutes."""


def get(url):
    with urllib.request.urlopen(url, timeout=60) as answer:
        return json.load(answer)


def read(url):
    """The text of a page of the service, or of a run."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {TOKEN}"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read().decode()


PATIENCE = 240
"""Seconds to wait for anything, on a machine that is busy."""


def until(condition, what, patience=PATIENCE):
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if found := condition():
                return found
        time.sleep(0.1)
    raise AssertionError(f"waited {patience} s for {what}")


class Page:
    """A webhook that keeps what Alertmanager posts."""

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
        self.address = f"127.0.0.1:{self.server.server_port}"

    def told(self, system):
        """Each alert that a system told of, with its run."""
        labels = [alert["labels"] for alert in self.posted]
        return {(one["alertname"], one.get("run", "")) for one in labels if one["system"] == system}


class Cluster:
    """The service, Prometheus, VictoriaMetrics with vmalert, and Alertmanager over one folder of runs."""

    def __init__(self, folder, stack):
        self.runs, self.folder, self.stack, self.page = folder / "runs", folder, stack, Page()
        stack.callback(self.page.server.shutdown)
        self.service, self.alertmanager, prometheus, victoria, vmalert = (free_port() for _ in range(5))
        self.ports = {"prometheus": prometheus, "victoriametrics": victoria}
        rules, settings = self._settings()
        self.serve()
        self.run(
            "prometheus",
            needs("prometheus"),
            f"--config.file={settings}",
            f"--storage.tsdb.path={folder / 'tsdb'}",
            f"--web.listen-address=127.0.0.1:{prometheus}",
        )
        self.run(
            "victoriametrics",
            needs("victoria-metrics"),
            f"-promscrape.config={settings}",
            "-promscrape.config.strictParse=false",
            "-promscrape.httpSDCheckInterval=1s",
            "-search.latencyOffset=1s",
            f"-storageDataPath={folder / 'victoria'}",
            f"-httpListenAddr=127.0.0.1:{victoria}",
        )
        until(lambda: self.query("victoriametrics", "1"), "VictoriaMetrics")
        self.run(
            "vmalert",
            needs("vmalert"),
            f"-rule={rules}",
            *(f"-{way}.url=http://127.0.0.1:{victoria}" for way in ("datasource", "remoteWrite", "remoteRead")),
            "-remoteWrite.flushInterval=500ms",
            f"-notifier.url=http://127.0.0.1:{self.alertmanager}",
            f"-external.label=hilbert_url={self.address}",
            "-external.label=system=victoriametrics",
            "-evaluationInterval=2s",
            f"-httpListenAddr=127.0.0.1:{vmalert}",
        )
        self.run(
            "alertmanager",
            needs("prometheus-alertmanager"),
            f"--config.file={folder / 'alertmanager.yml'}",
            f"--storage.path={folder / 'alertmanager'}",
            f"--web.listen-address=127.0.0.1:{self.alertmanager}",
            "--cluster.listen-address=",
        )
        until(lambda: self.query("prometheus", "1"), "Prometheus")

    def _settings(self):
        """Our settings with other addresses and shorter waits: the file of the rules, and that of Prometheus."""
        (self.folder / "token").write_text(TOKEN)
        short = {"for: 30s": "for: 1s", "for: 1m": "for: 3s", "for: 3m": "for: 12s", '"firing"}[5m]': '"firing"}[15s]'}
        addresses = {
            "service:8000": f"127.0.0.1:{self.service}",
            "alertmanager:9093": f"127.0.0.1:{self.alertmanager}",
            "webhook:5001": self.page.address,
            "/run/secrets/hilbert_monitor_token": str(self.folder / "token"),
            "${HILBERT_URL}": f"{self.address}\n    system: prometheus",
            "rules/*.yml": str(self.folder / "hilbert.yml"),
            "evaluation_interval: 15s": "evaluation_interval: 2s",
            ": 15s": ": 1s",
            "group_wait: 5s": "group_wait: 2s",
            "group_interval: 1m": "group_interval: 1s",
        }
        for name in ("prometheus/rules/hilbert.yml", "prometheus/prometheus.yml", "alertmanager/alertmanager.yml"):
            text = (DASHBOARDS / name).read_text()
            for old, new in (short if "rules" in name else addresses).items():
                text = text.replace(old, new)
            (self.folder / Path(name).name).write_text(text)
        return self.folder / "hilbert.yml", self.folder / "prometheus.yml"

    def serve(self):
        """Start the service, which forgets targets that have ended sooner than usual, and wait until it answers."""
        code = "from hilbert_monitor.service.web import prometheus; prometheus.LINGERING = 3.0"
        code += "; from hilbert_monitor.cli import app; app()"
        arguments = ["serve", self.runs, f"--port={self.service}", f"--token={TOKEN}"]
        self.serving = self.run("service", sys.executable, "-c", code, *arguments)
        until(lambda: get(f"{self.address}/healthz"), "the service")

    def run(self, name, *command):
        """Start a program; it is ended with the cluster."""
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen([*map(str, command)], stdout=log, stderr=log, start_new_session=True)
        self.stack.callback(end, process)
        return process

    def module(self, module, *arguments):
        """Start one of our modules. What it has started is its process group, and is ended with the cluster."""
        program = Program("-m", f"tests.support.{module}", *arguments, env={**os.environ, "OMP_NUM_THREADS": "1"})
        self.stack.callback(kill, program.process.pid)
        return program

    def log(self, name):
        """Start a run that has only a log, and wait until it is written."""
        program = self.module("logged_runs", self.runs, name)
        until(lambda: "ready\n" in program.output, f"the log of {name}")
        return program

    def query(self, system, expression):
        """The samples of an expression now."""
        query = urllib.request.quote(expression)
        return get(f"http://127.0.0.1:{self.ports[system]}/api/v1/query?nocache=1&query={query}")["data"]["result"]

    @property
    def address(self):
        """Where the service is."""
        return f"http://127.0.0.1:{self.service}"

    def place(self, run):
        """Where a run serves its metrics."""
        return self.query("prometheus", f'hilbert_step{{run="{run}",job="hilbert-runs"}}')[0]["metric"]["instance"]

    def wait_told(self, alert, run):
        """Wait until both systems have told of an alert."""
        for system in SYSTEMS:
            until(lambda system=system: (alert, run) in self.page.told(system), f"{system}: {alert} {run}")

    def wait_for(self, expression, what):
        """Wait until an expression has a value on both systems."""
        for system in SYSTEMS:
            until(lambda system=system: self.query(system, expression), f"{what} on {system}")


def end(process):
    """End a program, and what it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGCONT)
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(10)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def kill(group):
    """Kill a process group, unless it has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def told_by(training, between):
    """A number of each run that a program of `oncall_run` has told of."""
    return dict(re.findall(rf"^(\w+){between}(-?\d+)$", training.output, re.MULTILINE))


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """Runs of all kinds side by side, the service away for a while, and what was posted of it."""
    folder = tmp_path_factory.mktemp("oncall")
    certificate, key = folder / "cert.pem", folder / "key.pem"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    subprocess.run([*make, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    assert Program("-c", "pass").wait() == 0  # torch is loaded while nobody scrapes yet
    with contextlib.ExitStack() as stack:
        write_long(folder / "runs")
        cluster = Cluster(folder, stack)
        training = cluster.module("oncall_run", cluster.runs, certificate, key, *TRAINED)
        missed = cluster.module("oncall_run", cluster.runs, certificate, key, "missed")
        logged = {name: cluster.log(name) for name in LOGGED}
        logged["early"].kill()
        killed = time.monotonic()
        cluster.wait_told("RunKilled", "early")
        cluster.early_after = time.monotonic() - killed
        cluster.wait_told("RunStalled", "stuck")

        until(lambda: len(told_by(training, " ")) == len(TRAINED), "the runs")
        pids = told_by(training, " ")
        for name, number in (("stopped", signal.SIGTERM), ("killed", signal.SIGKILL)):
            cluster.wait_for(f'hilbert_step{{run="{name}",job="hilbert-runs"}} > 20', f"steps of {name}")
            cluster.workers = Path(f"/proc/{pids[name]}/task/{pids[name]}/children").read_text().split()
            cluster.metrics = [read(f"http://{cluster.place(name)}/metrics"), read(f"{cluster.address}/metrics")]
            cluster.doubled = {system: cluster.query(system, DOUBLED) for system in SYSTEMS}
            os.kill(int(pids[name]), number)
        killed = time.monotonic()
        cluster.wait_told("RunKilled", "killed")
        cluster.killed_after = time.monotonic() - killed
        assert training.wait() == 0
        cluster.ended = told_by(training, " = ")
        cluster.wait_told("RunFailed", "accident")
        cluster.wait_told("LearningRateJump", "accident")
        cluster.scraped = {system: cluster.query(system, SEEN) for system in SYSTEMS}

        cluster.before = {system: cluster.page.told(system) for system in SYSTEMS}
        cluster.wait_for('hilbert_step{run="missed",job="hilbert-runs"} > 20', "steps of missed")
        end(cluster.serving)
        cluster.wait_told("MonitorServiceDown", "")  # after 12 s: for longer than `plain` may be silent
        os.kill(int(told_by(missed, " ")["missed"]), signal.SIGKILL)
        cluster.wait_for('up{job="hilbert-runs",run="missed"} == 0', "the end of missed")
        time.sleep(20)  # for longer than a process may not answer
        cluster.silent = {system: cluster.page.told(system) - cluster.before[system] for system in SYSTEMS}
        cluster.serve()
        cluster.wait_told("RunKilled", "missed")
        cluster.wait_for(f'hilbert_steps_total{{run="long"}} > {LONG}', "the long log")
        time.sleep(5)
        cluster.away = {system: cluster.page.told(system) - cluster.before[system] for system in SYSTEMS}

        os.kill(logged["plain"].process.pid, signal.SIGSTOP)
        cluster.log("early")  # goes on, and still nobody listens at its port
        cluster.wait_told("RunStalled", "plain")
        cluster.wait_told("RunUnreachable", "early")
        cluster.wait_for('ALERTS{alertname="RunUnreachable",alertstate="firing",run="early"}', "the alert")
        cluster.firing = {
            system: cluster.query(system, 'ALERTS{alertstate="firing",run="early"}') for system in SYSTEMS
        }
        yield cluster


DOUBLED = "count by (run) (hilbert_run_info) > 1"
SEEN = 'group by (run) (last_over_time(hilbert_step{job="hilbert-runs"}[10m]))'


def says_what_happened(cluster, system):
    wanted = {"alertname": "LearningRateJump", "run": "accident", "system": system}
    said = next(alert for alert in cluster.page.posted if wanted.items() <= alert["labels"].items())["annotations"]
    assert "accident" in said["summary"]
    assert re.search(
        r"head AdamW, step 11[12]: the learning rate is [\d.]+, expected at most [\d.]+", said["description"]
    )
    for link, text in (("dashboard", "hilbert-monitor"), ("runbook_url", "Mitigation")):
        assert text in read(said[link])
    assert re.search(r"/runs/accident\?step=11[12]$", said["dashboard"])


def test_a_blow_up_of_a_training_run_is_a_page_that_says_what_happened(tmp_path):
    with contextlib.ExitStack() as stack:
        cluster = Cluster(tmp_path, stack)
        cluster.module("oncall_run", cluster.runs, "-", "-", "accident")
        cluster.wait_told("LearningRateJump", "accident")
        for system in SYSTEMS:
            says_what_happened(cluster, system)


def told_of(story, system, run):
    return {alert for alert, of in story.page.told(system) if of == run}


@long
@on_both
def test_a_run_with_tls_is_scraped_and_a_run_that_finishes_fires_nothing(story, system):
    assert story.ended["clean"] == "0"
    assert "clean" in {one["metric"]["run"] for one in story.scraped[system]}
    assert told_of(story, system, "clean") == set()


@long
@on_both
def test_an_accident_of_the_rate_and_an_exception_are_told_and_nothing_else(story, system):
    assert story.ended["accident"] == "1"
    assert told_of(story, system, "accident") == {"LearningRateJump", "RunFailed"}


@long
@on_both
def test_the_page_says_what_happened_and_where_to_look(story, system):
    says_what_happened(story, system)


@long
@on_both
def test_a_requested_stop_pages_nobody(story, system):
    assert told_of(story, system, "stopped") == set()
    assert "stopped" in {one["metric"]["run"] for one in story.scraped[system]}


@long
@on_both
def test_a_run_that_is_killed_is_told_once_and_soon(story, system):
    assert story.workers  # it had loader workers, which can hold what they inherited
    assert story.ended["killed"] == "-9"
    assert told_of(story, system, "killed") == {"RunKilled"}
    assert story.killed_after < 80  # and not by its silence, of which it may have 90 s


@long
@on_both
def test_a_run_that_is_killed_before_it_was_scraped_is_told_until_it_goes_on(story, system):
    assert story.early_after < 80
    assert {one["metric"]["alertname"] for one in story.firing[system]} == {"RunUnreachable"}


@long
@on_both
def test_a_patient_run_is_left_alone_and_another_as_slow_has_stalled(story, system):
    assert told_of(story, system, "slow") == set()
    assert told_of(story, system, "stuck") == {"RunStalled"}


@long
@on_both
def test_a_service_that_is_away_is_told_once_and_no_run_is_blamed(story, system):
    assert story.silent[system] == {("MonitorServiceDown", "")}


@long
@on_both
def test_a_run_that_is_killed_while_the_service_is_away_is_told_once_it_is_back_and_nothing_else(story, system):
    assert story.away[system] == {("MonitorServiceDown", ""), ("RunKilled", "missed")}


@long
@on_both
def test_a_log_that_a_service_reads_anew_tells_no_news(story, system):
    assert told_of(story, system, "long") == set()


@long
@on_both
def test_a_run_that_stalls_once_the_service_is_back_is_told(story, system):
    assert told_of(story, system, "plain") == {"RunStalled"}


@long
@on_both
def test_no_run_is_counted_twice(story, system):
    assert story.doubled[system] == []


@long
def test_promtool_has_nothing_to_say_of_the_metrics_of_a_run_and_of_the_service(story):
    for text in story.metrics:
        assert "hilbert_step_diameter_distribution_bucket" in text
        done = subprocess.run([needs("promtool"), "check", "metrics"], input=text, capture_output=True, text=True)
        assert (done.returncode, done.stdout + done.stderr) == (0, "")

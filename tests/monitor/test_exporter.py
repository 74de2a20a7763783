"""A run's own metrics, scraped over real sockets while it trains."""

import errno
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.request

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest

from hilbert_monitor import HilbertMonitor
from hilbert_monitor.monitor.exporter import Exporter, Prometheus
from hilbert_monitor.runs.exposition import RunSamples
from hilbert_monitor.runs.log import find_runs
from hilbert_monitor.runs.record import RunInfo, StepRecord
from tests.support.sinks import Recorder
from tests.support.training import UPDATES, Module, fit


def get(port, *, accept="", scheme="http", context=None, timeout=5):
    request = urllib.request.Request(f"{scheme}://localhost:{port}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=timeout, context=context) as answer:
        return answer.read().decode()


@pytest.fixture
def samples():
    run = RunSamples(lambda: RunInfo(id="run", head_optimizer="AdamW"))
    run.write(StepRecord(step=1, time=0.0, diameter=0.25))
    return run


class Scraper:
    """A sink that scrapes the run it is of, as often as it has a record."""

    def __init__(self, monitor):
        self.monitor, self.texts = monitor, []

    def write(self, record):
        self.texts.append(get(self.monitor.session.outputs._exporter.port))


def test_a_run_serves_its_metrics_while_it_trains(tmp_path):
    monitor = HilbertMonitor(
        panel_size=50, prometheus=Prometheus(port=0, linger=0.1), strict=True, run_dir=str(tmp_path), run_name="scraped"
    )
    scraper = Scraper(monitor)
    monitor.options.sinks = (scraper,)
    module = Module("adamw")
    fit(module, monitor)
    assert len(scraper.texts) >= UPDATES
    last = scraper.texts[-1]
    assert f'hilbert_step{{head="AdamW",run="scraped"}} {UPDATES}.0' in last
    assert 'hilbert_run_status{head="AdamW",run="scraped",status="running"} 1.0' in scraper.texts[0]
    assert "hilbert_perturbation_rms{" in last
    assert "hilbert_validation_loss{" in last
    [run] = find_runs(tmp_path)
    assert f'port="{run.info.port}"' in last
    assert f'host="{run.info.host}"' in last


def test_the_metrics_are_gone_when_the_run_has_ended_and_nobody_scraped(tmp_path):
    monitor, kept = HilbertMonitor(panel_size=50, prometheus_port=0, strict=True), Recorder()
    monitor.options.sinks = (kept,)
    began = time.monotonic()
    fit(Module("adamw"), monitor)
    [run] = find_runs("runs")
    with pytest.raises(OSError, match="refused"):
        get(run.info.port)
    assert time.monotonic() - began < 25  # the linger of 30 s was not waited for


def test_training_is_the_same_with_and_without_metrics():
    weights = []
    for port in (None, 0):
        module = Module("adamw")
        fit(module, HilbertMonitor(panel_size=50, prometheus_port=port, strict=True, run_dir=None))
        weights.append(module.model.lm_head.weight.detach().clone())
    assert weights[0].equal(weights[1])


def test_both_formats_are_served(samples):
    exporter = Exporter(samples, Prometheus(port=0))
    assert "# EOF" not in get(exporter.port)
    assert get(exporter.port, accept="application/openmetrics-text; version=1.0.0").endswith("# EOF\n")
    exporter.stop()


def test_a_port_that_is_taken_gives_the_next_one_and_says_so_once(samples):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.warns(UserWarning, match=f"port {port} is taken: the metrics are at port") as said:
            exporter = Exporter(samples, Prometheus(port=port))
        assert len(said) == 1
        assert exporter.port > port
        assert "hilbert_step_diameter" in get(exporter.port)
        exporter.stop()


def test_it_listens_on_this_machine_alone_unless_told_otherwise(samples):
    exporter = Exporter(samples, Prometheus(port=0))
    assert exporter._server.server_address[0] == "127.0.0.1"
    exporter.stop()
    exporter = Exporter(samples, Prometheus(port=0, address="0.0.0.0"))
    assert exporter._server.server_address[0] == "0.0.0.0"
    exporter.stop()


def test_tls(samples, tmp_path):
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    make += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(make, check=True, capture_output=True)
    exporter = Exporter(samples, Prometheus(port=0, tls=(str(certificate), str(key))))
    context = ssl.create_default_context(cafile=str(certificate))
    assert "hilbert_step_diameter" in get(exporter.port, scheme="https", context=context)
    with pytest.raises(OSError, match=r"closed|reset|refused|HTTP"):
        get(exporter.port)
    exporter.stop()


def test_a_registry_of_ones_own_can_be_given(samples):
    registry = CollectorRegistry()
    exporter = Exporter(samples, Prometheus(port=None, registry=registry))
    assert exporter.port is None
    assert b"hilbert_step_diameter" in generate_latest(registry)
    exporter.end("finished")
    assert b'status="finished"} 1.0' in generate_latest(registry)
    deadline = time.monotonic() + 10
    while b"hilbert_step_diameter" in generate_latest(registry) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert b"hilbert_step_diameter" not in generate_latest(registry)


def test_importing_registers_nothing():
    before = generate_latest(REGISTRY)
    assert b"hilbert" not in before


def test_after_the_end_it_waits_for_one_more_scrape_and_goes(samples):
    exporter = Exporter(samples, Prometheus(port=0, linger=20.0))
    port = exporter.port
    get(port)
    began = time.monotonic()
    exporter.end("finished")
    assert time.monotonic() - began < 1  # whoever ends it does not wait
    assert 'status="finished"} 1.0' in get(port)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            get(port, timeout=1)
            time.sleep(0.05)
        except OSError:
            break
    assert time.monotonic() - began < 10


def test_a_process_that_was_scraped_stays_for_its_last_scrape():
    code = (
        "from hilbert_monitor.monitor.exporter import Exporter, Prometheus\n"
        "from hilbert_monitor.runs.exposition import RunSamples\n"
        "from hilbert_monitor.runs.record import RunInfo\n"
        "e = Exporter(RunSamples(lambda: RunInfo(id='run')), Prometheus(port=0, linger=30))\n"
        "print(e.port, flush=True); input(); e.end('failed')"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as process:
        port = int(process.stdout.readline())
        get(port)
        process.stdin.write("\n")
        process.stdin.flush()
        time.sleep(0.5)
        assert process.poll() is None
        assert 'status="failed"} 1.0' in get(port)
        assert process.wait(10) == 0


def test_a_killed_process_frees_its_port_though_its_forked_workers_live():
    code = (
        "import os, time\n"
        "from hilbert_monitor.monitor.exporter import Exporter, Prometheus\n"
        "from hilbert_monitor.runs.exposition import RunSamples\n"
        "from hilbert_monitor.runs.record import RunInfo\n"
        "e = Exporter(RunSamples(lambda: RunInfo(id='run')), Prometheus(port=0))\n"
        "child = os.fork()\n"
        "if not child: time.sleep(60); os._exit(0)\n"
        "print(e.port, child, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        port, child = map(int, process.stdout.readline().split())
        try:
            assert "hilbert_run_info" in get(port)
            process.kill()
            process.wait()
            os.kill(child, 0)  # it lives
            with pytest.raises(OSError, match=os.strerror(errno.ECONNREFUSED)):
                get(port)
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_port_that_cannot_be_had_costs_the_metrics_and_not_the_run(tmp_path):
    monitor, kept = HilbertMonitor(panel_size=50, prometheus=Prometheus(port=0, address="203.0.113.7")), Recorder()
    monitor.options.sinks = (kept,)
    with pytest.warns(UserWarning, match="exporter failed"):
        fit(Module("adamw"), monitor)
    assert len(kept.records) == UPDATES
    assert monitor.session.guard.failures["exporter"] == 1


def test_what_fails_is_counted_by_its_name(samples):
    class Bad:
        def write(self, record):
            raise OSError("disk full")

    monitor = HilbertMonitor(panel_size=50, prometheus=Prometheus(port=0, linger=0.1))
    scraper = Scraper(monitor)
    monitor.options.sinks = (Bad(), scraper)
    with pytest.warns(UserWarning, match="Bad failed"):
        fit(Module("adamw"), monitor)
    assert 'hilbert_monitor_failures_total{head="AdamW",run="' in scraper.texts[-1]
    assert 'sink="Bad"' in scraper.texts[-1]


def test_a_scrape_never_holds_up_a_step(samples):
    """Two hundred scrapes while records are written: every count is whole."""
    exporter = Exporter(samples, Prometheus(port=0))
    thread = threading.Thread(target=lambda: [get(exporter.port) for _ in range(50)])
    thread.start()
    for step in range(2, 2000):
        samples.write(StepRecord(step=step, time=0.0, diameter=0.1))
    thread.join()
    assert 'hilbert_steps_total{head="AdamW",run="run"} 1999.0' in get(exporter.port)
    exporter.stop()

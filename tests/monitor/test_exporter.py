"""A run's own metrics, scraped over real sockets while it trains."""

import contextlib
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

import lightning
import pytest
from prometheus_client import REGISTRY, CollectorRegistry, Gauge, generate_latest

from hilbert_monitor import HilbertMonitor
from hilbert_monitor.monitor import metrics_server
from hilbert_monitor.monitor.exporter import Exporter, Prometheus
from hilbert_monitor.runs.exposition import RunSamples
from hilbert_monitor.runs.reader import find_runs
from hilbert_monitor.runs.record import RunInfo, StepRecord
from tests.support.sinks import Recorder
from tests.support.training import UPDATES, Module, fit


def get(port, *, accept="", scheme="http", context=None, timeout=60):
    request = urllib.request.Request(f"{scheme}://localhost:{port}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=timeout, context=context) as answer:
        return answer.read().decode()


@pytest.fixture
def samples():
    run = RunSamples(lambda: RunInfo(id="run", head_optimizer="AdamW"))
    run.write(StepRecord(step=1, time=0.0, diameter=0.25))
    return run


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """Files of a certificate for localhost, and of its key."""
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "cert.pem", folder / "key.pem"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    make += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(make, check=True, capture_output=True)
    return str(certificate), str(key)


class Scraper:
    """A sink that scrapes the run it is of, as often as it has a record."""

    def __init__(self, monitor):
        self.monitor, self.texts = monitor, []

    def write(self, record):
        self.texts.append(get(self.monitor.session.outputs._exporter.port))


def test_a_run_serves_its_metrics_while_it_trains(tmp_path):
    monitor = HilbertMonitor(
        panel_size=50,
        prometheus=Prometheus(port=0, linger=0.1),
        stalled_after=1234.0,
        strict=True,
        run_dir=str(tmp_path),
        run_name="scraped",
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
    assert 'hilbert_stalled_after_seconds{head="AdamW",run="scraped"} 1234.0' in last
    assert (run.info.stalled_after, run.info.scheme, run.info.address) == (1234.0, "http", "127.0.0.1")


def test_the_metrics_are_gone_when_the_run_has_ended_and_nobody_scraped(tmp_path):
    patient = Prometheus(port=0, linger=300.0)
    monitor, kept = HilbertMonitor(panel_size=50, prometheus=patient, strict=True), Recorder()
    monitor.options.sinks = (kept,)
    began = time.monotonic()
    fit(Module("adamw"), monitor)
    [run] = find_runs("runs")
    with pytest.raises(OSError, match="refused"):
        get(run.info.port)
    assert time.monotonic() - began < 150  # the linger was not waited for


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


def test_tls(samples, certificate):
    exporter = Exporter(samples, Prometheus(port=0, tls=certificate))
    context = ssl.create_default_context(cafile=certificate[0])
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
    deadline = time.monotonic() + 60
    while b"hilbert_step_diameter" in generate_latest(registry) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert b"hilbert_step_diameter" not in generate_latest(registry)


def test_importing_registers_nothing():
    before = generate_latest(REGISTRY)
    assert b"hilbert" not in before


def test_after_the_end_it_waits_for_one_more_scrape_and_goes(samples):
    exporter = Exporter(samples, Prometheus(port=0, linger=120.0))
    port = exporter.port
    get(port)
    began = time.monotonic()
    exporter.end("finished")
    assert time.monotonic() - began < 30  # whoever ends it does not wait
    assert 'status="finished"} 1.0' in get(port)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            get(port)
            time.sleep(0.05)
        except OSError:
            break
    assert time.monotonic() - began < 60


@pytest.mark.sweep
def test_a_process_that_was_scraped_stays_for_its_last_scrape():
    code = (
        "from hilbert_monitor.monitor.exporter import Exporter, Prometheus\n"
        "from hilbert_monitor.runs.exposition import RunSamples\n"
        "from hilbert_monitor.runs.record import RunInfo\n"
        "e = Exporter(RunSamples(lambda: RunInfo(id='run')), Prometheus(port=0, linger=300))\n"
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
        assert process.wait(100) == 0


def test_a_killed_process_frees_its_port_though_its_forked_workers_live():
    code = (
        "import os, time\n"
        "from hilbert_monitor.monitor.exporter import Exporter, Prometheus\n"
        "from hilbert_monitor.runs.exposition import RunSamples\n"
        "from hilbert_monitor.runs.record import RunInfo\n"
        "e = Exporter(RunSamples(lambda: RunInfo(id='run')), Prometheus(port=0))\n"
        "here, there = os.pipe()\n"
        "child = os.fork()\n"
        "if not child: os.write(there, b'.'); time.sleep(600); os._exit(0)\n"
        "os.read(here, 1)\n"  # os.fork has returned in the child, and its copy of the socket is closed
        "print(e.port, child, flush=True); time.sleep(600)"
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


# What a client, a registry or a certificate does to a run


class Annoys(lightning.Callback):
    """Connects to the run's exporter, says `words` and stays; after every step it scrapes like Prometheus."""

    def __init__(self, words, context):
        self.words, self.context, self.client, self.texts = words, context, None, []

    def on_train_batch_end(self, trainer, *_):
        (monitor,) = [callback for callback in trainer.callbacks if isinstance(callback, HilbertMonitor)]
        port = monitor.session.outputs._exporter.port
        if self.client is None:
            self.client = socket.create_connection(("127.0.0.1", port))
            self.client.sendall(self.words)
            time.sleep(0.2)
        self.texts.append(get(port, scheme="http" if self.context is None else "https", context=self.context))


@pytest.mark.parametrize(
    ("secure", "words"), [(True, b""), (False, b"GET /metr")], ids=["tls, silent", "plain, half a request"]
)
def test_a_client_that_connects_and_stops_delays_neither_scrapes_nor_the_end_of_the_run(
    secure, words, certificate, tmp_path
):
    annoys = Annoys(words, ssl.create_default_context(cafile=certificate[0]) if secure else None)
    settings = Prometheus(port=0, tls=certificate if secure else None, linger=0.5, stalled_after=90.0)
    monitor = HilbertMonitor(perturbation_every=0, prometheus=settings, run_dir=str(tmp_path))
    before = {thread for thread in threading.enumerate() if not thread.daemon}
    run = threading.Thread(target=fit, args=(Module("torch"), monitor, annoys), daemon=True)
    run.start()
    run.join(300)
    assert not run.is_alive()
    assert len(annoys.texts) >= UPDATES
    assert "hilbert_step{" in annoys.texts[-1]
    for thread in [t for t in threading.enumerate() if not t.daemon and t not in before]:
        thread.join(60)  # the linger; then nothing keeps the process
        assert not thread.is_alive()
    annoys.client.close()
    [found] = find_runs(tmp_path)
    assert (found.info.scheme, found.info.stalled_after) == ("https" if secure else "http", 90.0)


@pytest.mark.sweep
def test_clients_that_stay_silent_are_let_go_and_too_many_are_turned_away(samples, monkeypatch):
    monkeypatch.setattr(metrics_server, "PATIENCE", 0.5)
    monkeypatch.setattr(metrics_server, "CONNECTIONS", 3)
    exporter = Exporter(samples, Prometheus(port=0))
    silent = [socket.create_connection(("127.0.0.1", exporter.port)) for _ in range(5)]
    for client in silent:
        client.settimeout(60)
        assert client.recv(1) == b""  # the server has closed it
    text, deadline = "", time.monotonic() + 60
    while not text and time.monotonic() < deadline:
        with contextlib.suppress(OSError):  # a place is free a moment after its connection was closed
            text = get(exporter.port)
    assert "hilbert_step_diameter" in text
    exporter.stop()


def test_runs_that_share_a_registry_are_both_in_it(samples):
    registry = CollectorRegistry()
    other = RunSamples(lambda: RunInfo(id="next", head_optimizer="AdamW"))
    settings = Prometheus(registry=registry)
    first, second = Exporter(samples, settings), Exporter(other, settings)
    text = generate_latest(registry).decode()
    assert text.count("# TYPE hilbert_run_info ") == 1
    assert 'run="run"' in text
    assert 'run="next"' in text
    first.stop()
    first.stop()
    text = generate_latest(registry).decode()
    assert 'run="run"' not in text
    assert 'run="next"' in text
    second.stop()
    assert b"hilbert" not in generate_latest(registry)


def test_a_registry_with_metrics_of_the_same_names_costs_the_metrics_and_leaves_no_port_open(samples):
    registry = CollectorRegistry()
    Gauge("hilbert_step_diameter", "of somebody else", registry=registry)
    before = threading.active_count()
    with pytest.raises(ValueError, match="Duplicated"):
        Exporter(samples, Prometheus(port=0, registry=registry))
    assert threading.active_count() == before


def test_a_certificate_that_cannot_be_used_is_named_and_nothing_is_asked_at_the_terminal(
    samples, certificate, tmp_path
):
    registry = CollectorRegistry()
    locked = str(tmp_path / "locked.pem")
    lock = ["openssl", "rsa", "-aes256", "-passout", "pass:secret", "-in", certificate[1], "-out", locked]
    subprocess.run(lock, check=True, capture_output=True)
    for tls, words in [(("no.pem", "key.pem"), "No such file"), ((certificate[0], locked), "has a password")]:
        with pytest.raises(ValueError, match=rf"tls=\('.*', '{tls[1]}'\): cannot read .*{words}"):
            Exporter(samples, Prometheus(port=0, tls=tls, registry=registry))
    assert b"hilbert" not in generate_latest(registry)

"""A run's own metrics, scraped over real sockets."""

import contextlib
import socket
import ssl
import subprocess
import threading
import time
import urllib.request

import lightning
import pytest
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest

from hilbert_monitor import Advanced, HilbertMonitor
from hilbert_monitor.monitor import prometheus
from hilbert_monitor.monitor.prometheus import Exporter, Prometheus
from hilbert_monitor.runs.exposition import RunSamples
from hilbert_monitor.runs.reader import find_runs
from hilbert_monitor.runs.record import RunInfo, StepRecord
from tests.support.sinks import Recorder
from tests.support.training import UPDATES, Module, fit


def get(port, *, accept="", context=None, host="localhost"):
    address = f"{'http' if context is None else 'https'}://{host}:{port}/metrics"
    with urllib.request.urlopen(
        urllib.request.Request(address, headers={"Accept": accept}), timeout=60, context=context
    ) as answer:
        return answer.read().decode()


def samples_of(name="run"):
    run = RunSamples(lambda: RunInfo(id=name, head_optimizer="AdamW"))
    run.write(StepRecord(step=1, time=0.0, diameter=0.25))
    return run


@pytest.fixture
def export():
    """Export a run; stop at the end of the test."""
    with contextlib.ExitStack() as stack:

        def start(samples=None, **settings):
            exporter = Exporter(samples or samples_of(), Prometheus(**({"port": 0} | settings)))
            stack.callback(exporter.stop)
            return exporter

        yield start


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """Files of a certificate for localhost, and of its key."""
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "cert.pem", folder / "key.pem"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    make += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(make, check=True, capture_output=True)
    return str(certificate), str(key)


# Runs


class Scraper(lightning.Callback):
    """Scrapes the run after every step."""

    def __init__(self, context=None):
        self.context, self.texts = context, []

    def on_train_batch_end(self, trainer, *_):
        (monitor,) = [callback for callback in trainer.callbacks if isinstance(callback, HilbertMonitor)]
        self.texts.append(get(monitor.session.outputs.exporter.port, context=self.context))


def test_a_run_serves_its_metrics_while_it_trains_and_trains_as_without_them(tmp_path):
    settings, scraper = Prometheus(port=0, linger=0.1), Scraper()
    options = {"panel_size": 50, "strict": True, "run_dir": str(tmp_path), "run_name": "scraped"}
    module, plain = Module("adamw"), Module("adamw")
    fit(module, HilbertMonitor(prometheus=settings, advanced=Advanced(stalled_after=1234.0), **options), scraper)
    fit(plain)
    assert module.model.lm_head.weight.equal(plain.model.lm_head.weight)
    [run], last = find_runs(tmp_path), scraper.texts[-1]
    assert 'hilbert_run_status{head="AdamW",run="scraped",status="running"} 1.0' in scraper.texts[-1]
    assert f'hilbert_step{{head="AdamW",run="scraped"}} {UPDATES}.0' in last
    assert 'hilbert_stalled_after_seconds{head="AdamW",run="scraped"} 1234.0' in last
    assert f'port="{run.info.port}"' in last
    assert f'host="{run.info.host}"' in last
    assert "hilbert_perturbation_rms{" in last
    assert "hilbert_validation_loss{" in last
    assert (run.info.stalled_after, run.info.scheme, run.info.address) == (1234.0, "http", "127.0.0.1")


def test_a_run_that_nobody_scraped_does_not_linger():
    began = time.monotonic()
    fit(Module("adamw"), HilbertMonitor(panel_size=50, prometheus=Prometheus(port=0, linger=300.0), strict=True))
    [run] = find_runs("runs")
    with pytest.raises(OSError, match="refused"):
        get(run.info.port)
    assert time.monotonic() - began < 150


def test_an_address_that_cannot_be_had_costs_the_metrics_and_not_the_run():
    kept = Recorder()
    monitor = HilbertMonitor(panel_size=50, prometheus=Prometheus(port=0, address="203.0.113.7"), sinks=[kept])
    with pytest.warns(UserWarning, match="exporter failed"):
        fit(Module("adamw"), monitor)
    assert len(kept.records) == UPDATES
    assert monitor.session.guard.failures["exporter"] == 1


@pytest.mark.parametrize(
    ("secure", "words"), [(True, b""), (False, b"GET /metr")], ids=["tls, silent", "plain, half a request"]
)
def test_a_client_that_connects_and_stops_delays_neither_scrapes_nor_the_end_of_the_run(
    secure, words, certificate, tmp_path, monkeypatch
):
    monkeypatch.setattr(prometheus, "TIMEOUT", 1000.0)

    class Annoys(Scraper):
        client = None

        def on_train_batch_end(self, trainer, *arguments):
            if self.client is None:
                self.client = socket.create_connection(("127.0.0.1", monitor.session.outputs.exporter.port))
                self.client.sendall(words)
                time.sleep(0.2)
            super().on_train_batch_end(trainer, *arguments)

    annoys = Annoys(ssl.create_default_context(cafile=certificate[0]) if secure else None)
    settings = Prometheus(port=0, tls=certificate if secure else None, linger=0.5)
    monitor = HilbertMonitor(
        perturbation_every=0, prometheus=settings, run_dir=str(tmp_path), advanced=Advanced(stalled_after=90.0)
    )
    before = {thread for thread in threading.enumerate() if not thread.daemon}
    run = threading.Thread(target=fit, args=(Module("torch"), monitor, annoys), daemon=True)
    run.start()
    run.join(150)
    assert not run.is_alive()
    assert len(annoys.texts) >= UPDATES
    assert "hilbert_step{" in annoys.texts[-1]
    for thread in [t for t in threading.enumerate() if not t.daemon and t not in before]:
        thread.join(60)  # the linger; then nothing keeps the process
        assert not thread.is_alive()
    annoys.client.close()
    [found] = find_runs(tmp_path)
    assert (found.info.scheme, found.info.stalled_after) == ("https" if secure else "http", 90.0)


# The exporter


def test_both_formats_are_served(export):
    port = export().port
    assert "# EOF" not in get(port)
    assert get(port, accept="application/openmetrics-text; version=1.0.0").endswith("# EOF\n")


def test_a_port_that_is_taken_gives_the_next_one_and_says_so_once(export):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.warns(UserWarning, match=f"port {port} is taken: the metrics are at port") as said:
            exporter = export(port=port)
        assert len(said) == 1
        assert exporter.port > port
        assert "hilbert_step_diameter" in get(exporter.port)


def test_it_listens_at_the_loopback_address_alone_unless_told_otherwise(export):
    assert "hilbert_step_diameter" in get(export(address="0.0.0.0").port, host="127.0.0.2")
    with pytest.raises(OSError, match="refused"):
        get(export().port, host="127.0.0.2")


def test_tls_needs_a_certificate_and_a_key_without_a_password(export, certificate, tmp_path):
    port = export(tls=certificate).port
    assert "hilbert_step_diameter" in get(port, context=ssl.create_default_context(cafile=certificate[0]))
    with pytest.raises(OSError, match=r"closed|reset|refused|HTTP"):
        get(port)
    registry, locked = CollectorRegistry(), str(tmp_path / "locked.pem")
    lock = ["openssl", "rsa", "-aes256", "-passout", "pass:secret", "-in", certificate[1], "-out", locked]
    subprocess.run(lock, check=True, capture_output=True)
    for tls, words in [(("no.pem", "key.pem"), "No such file"), ((certificate[0], locked), "has a password")]:
        with pytest.raises(ValueError, match=rf"tls=\('.*', '{tls[1]}'\) takes two PEM files.*{words}"):
            export(tls=tls, registry=registry)
    assert b"hilbert" not in generate_latest(registry)


def test_a_registry_takes_one_run_at_a_time(export):
    registry = CollectorRegistry()
    first = export(port=None, registry=registry)
    assert first.port is None
    assert b'run="run"' in generate_latest(registry)
    before = threading.active_count()
    with pytest.raises(ValueError, match="the registry has another run or metrics of these names: give each its own"):
        export(samples_of("next"), registry=registry)
    assert threading.active_count() == before  # nothing is served
    first.end("finished")  # waits for one more scrape, unless the next run needs the registry
    assert b"hilbert_run_status" in generate_latest(registry)
    export(samples_of("next"), port=None, registry=registry)
    text = generate_latest(registry)
    assert b'run="run"' not in text
    assert b'run="next"' in text
    assert b"hilbert" not in generate_latest(REGISTRY)  # importing registers nothing


def test_after_the_end_it_waits_for_one_more_scrape_and_goes(export):
    exporter = export(linger=120.0)
    get(exporter.port)
    began = time.monotonic()
    exporter.end("finished")
    assert time.monotonic() - began < 30  # whoever ends it does not wait
    assert 'status="finished"} 1.0' in get(exporter.port)
    assert gone(exporter.port) < began + 60


def test_after_a_stop_the_metrics_stay_for_two_seconds_at_most(export):
    exporter = export(linger=300.0)
    get(exporter.port)
    began = time.monotonic()
    exporter.end("stopped")
    for thread in threading.enumerate():
        if thread.name == "hilbert-monitor last scrape":
            thread.join(100)
    assert 1 < time.monotonic() - began < 100  # there was time for one more scrape
    assert gone(exporter.port) < began + 100


def gone(port):
    """The time at which nobody listens at a port, within a minute."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            break
        time.sleep(0.05)
    return time.monotonic()


@pytest.mark.sweep
def test_the_server_closes_connections_that_stay_silent_or_are_too_many(export, certificate, monkeypatch):
    monkeypatch.setattr(prometheus, "TIMEOUT", 0.5)
    monkeypatch.setattr(prometheus, "CONNECTIONS", 3)
    port = export(tls=certificate).port
    context = ssl.create_default_context(cafile=certificate[0])
    for client in [socket.create_connection(("127.0.0.1", port)) for _ in range(5)]:
        client.settimeout(60)
        assert client.recv(1) == b""  # the server has closed it
        client.close()
    text, deadline = "", time.monotonic() + 60
    while not text and time.monotonic() < deadline:
        with contextlib.suppress(OSError):  # a place is free a moment after its connection was closed
            text = get(port, context=context)
    assert "hilbert_step_diameter" in text

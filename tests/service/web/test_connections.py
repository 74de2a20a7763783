"""The service under clients that connect and say nothing, or half of something: real sockets, a real process."""

import http.client
import json
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, closing, contextmanager, suppress
from urllib.parse import urlsplit

import pytest

from hilbert_monitor.service.following.index import Index
from hilbert_monitor.service.web import connections
from hilbert_monitor.service.web.server import Server, bind
from tests.support.browser import chromium_fixture, visit_fixture, wait_for_text, wait_until_live  # noqa: F401
from tests.support.services import record, running_service, write_run

HALF = b"GET /api/runs HTTP/1.1\r\nHost: localhost\r\nX-Slow: "
HALVES = 300
LISTENERS = 500
FILES = 256


@contextmanager
def narrow_service(root, *arguments):
    """A service in a process that may have few files open: its URL, and a function that returns its output so far."""
    command = [sys.executable, "-m", "hilbert_monitor", "serve", str(root), "--port", "0", *arguments]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES)),
        )

        def text():
            output.seek(0)
            return output.read()

        try:
            deadline = time.monotonic() + 120
            while "Ctrl-C" not in text():
                assert time.monotonic() < deadline
                time.sleep(0.05)
            yield next(word for word in text().split() if word.startswith("http://")), text
        finally:
            process.kill()
            process.wait()


def half_open(stack, url, count, sent=HALF):
    """Connections on which half a request was sent."""
    place, opened = ("127.0.0.1", urlsplit(url).port), []
    for _ in range(count):
        one = stack.enter_context(closing(socket.create_connection(place, timeout=60)))
        one.sendall(sent)
        opened.append(one)
    return opened


def ask(url, path, timeout=60.0, **headers):
    with closing(http.client.HTTPConnection("127.0.0.1", urlsplit(url).port, timeout=timeout)) as connection:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()


def is_closed(one, within):
    """Whether the other side closes a connection within some seconds."""
    one.settimeout(within)
    with suppress(ConnectionError):
        try:
            while one.recv(4096):
                pass
        except TimeoutError:
            return False
    return True


def wait_for_event(streams, name):
    """Read streams until each has had an event of a name."""
    deadline = time.monotonic() + 120
    for stream in streams:
        heard = b""
        while b"event: " + name + b"\n" not in heard:
            assert time.monotonic() < deadline
            piece = stream.recv(1 << 16)
            assert piece, "a listener was cut off"
            heard += piece


@pytest.mark.sweep
def test_half_sent_requests_lock_nobody_out(tmp_path, visit):
    write_run(tmp_path / "runs", "a", [record(1)])
    with narrow_service(tmp_path / "runs") as (url, output), ExitStack() as stack:
        half_open(stack, url, HALVES)
        for _ in range(20):
            assert ask(url, "/api/runs")[0] == 200
        visitor = visit(url, troubled=True)  # for when the service has gone
        page = visitor.open("/runs")
        wait_for_text(page, "1 run")
        wait_until_live(page)
        half_open(stack, url, HALVES)
        assert page.evaluate("document.querySelector('#live').dataset.status") == "live"
        page.reload()
        wait_for_text(page, "1 run")
        assert visitor.troubles == []
        text = output()
    assert "Traceback" not in text
    assert len(text) < 2000, text[:5000]
    assert text.count("connections") == 1


@pytest.mark.sweep
def test_what_is_no_http_is_logged_once_and_who_has_no_token_locks_nobody_out(tmp_path):
    secret = "open-sesame-open-sesame"
    with narrow_service(tmp_path, "--token", secret) as (url, output), ExitStack() as stack:
        for text in (
            b"\x16\x03\x01 tls\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\n",
        ):
            for _ in range(50):
                with closing(socket.create_connection(("127.0.0.1", urlsplit(url).port), timeout=60)) as one:
                    one.sendall(text)
                    one.recv(100)
        assert output().count("Invalid HTTP request") == 1
        assert len(output()) < 2000
        half_open(stack, url, HALVES)
        half_open(stack, url, HALVES, b"")
        half_open(stack, url, HALVES, b"POST /api/runs/a/notes HTTP/1.1\r\nHost: h\r\nContent-Length: 100\r\n\r\n{")
        for _ in range(5):
            assert ask(url, "/api/runs", Authorization=f"Bearer {secret}")[0] == 200
        assert len(output()) < 2000


@pytest.fixture
def impatient(tmp_path, monkeypatch):
    """A service in this process that gives a request half a second to arrive."""
    monkeypatch.setattr(connections, "PATIENCE", 0.5)
    place = bind("127.0.0.1", 0, None)
    server = Server(Index(tmp_path), None, place.hosts)
    thread = threading.Thread(target=server.run, args=([place.socket],), daemon=True)
    thread.start()
    yield place.url
    server.should_exit = True
    thread.join(60)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "sent",
    [b"", HALF, b"POST /api/runs/a/notes HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{"],
    ids=["nothing", "half a head", "half a body"],
)
def test_a_request_that_does_not_arrive_in_time_is_dropped(impatient, sent):
    with ExitStack() as stack:
        (slow,) = half_open(stack, impatient, 1, sent)
        assert is_closed(slow, 60)


@pytest.mark.sweep
def test_bytes_that_trickle_in_buy_no_time(impatient):
    with ExitStack() as stack:
        (slow,) = half_open(stack, impatient, 1)
        began = time.monotonic()
        with suppress(ConnectionError):
            while time.monotonic() - began < 30:
                slow.sendall(b"x")
                time.sleep(0.05)
        assert time.monotonic() - began < 30


def four_requests_on_one_connection(url):
    """Whether they are answered, over more time than a request may take."""
    with closing(http.client.HTTPConnection("127.0.0.1", urlsplit(url).port, timeout=60)) as connection:
        try:
            for _ in range(4):
                connection.request("GET", "/healthz")
                assert connection.getresponse().read()
                time.sleep(0.3)
        except ConnectionError:
            return False
    return True


@pytest.mark.sweep
def test_a_stream_and_a_second_request_outlast_the_time_limit(impatient):
    assert any(four_requests_on_one_connection(impatient) for _ in range(5))  # a busy machine may ask too late
    with ExitStack() as stack:
        (stream,) = half_open(stack, impatient, 1, b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        while b"hello" not in stream.recv(4096):
            pass
        assert not is_closed(stream, 1.5)


@pytest.mark.sweep
def test_five_hundred_listeners_hear_everything(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2 * LISTENERS:
        pytest.skip("this machine does not allow so many files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * LISTENERS), hard))
    with running_service(tmp_path, "--port", 0) as (_, url, _), ExitStack() as stack:
        streams = half_open(stack, url, LISTENERS, b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        wait_for_event(streams, b"hello")
        half_open(stack, url, HALVES)
        write_run(tmp_path, "new", [record(1)])
        wait_for_event(streams, b"run")
        assert json.loads(ask(url, "/healthz")[1])["runs"] == 1

import gc
import http.client
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing
from urllib.parse import urlsplit

import pytest
from starlette.testclient import TestClient
from typer.testing import CliRunner

from hilbert_monitor.cli import app
from hilbert_monitor.runs.log import RunWriter
from hilbert_monitor.runs.record import RunInfo
from hilbert_monitor.service.following.index import Index
from hilbert_monitor.service.web.app import create_app
from hilbert_monitor.service.web.server import AddressError, Server, background, bind
from tests.support.clock import at_best
from tests.support.services import record, running_service, write_run

LISTENERS = 20
SECRET = "open-sesame-open-sesame"


def cpu_seconds(pid):
    """What a process has computed so far."""
    with open(f"/proc/{pid}/stat") as file:
        times = file.read().rpartition(")")[2].split()[11:13]
    return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")


def ask(url, path, **headers):
    place = urlsplit(url)
    with closing(http.client.HTTPConnection("127.0.0.1", place.port, timeout=60)) as connection:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def wait_for_runs(url, count):
    deadline = time.monotonic() + 60
    while json.loads(ask(url, "/healthz")[1])["runs"] < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Listener:
    """One open stream of events, read by hand."""

    def __init__(self, url, path="/api/events", **headers):
        self.connection = http.client.HTTPConnection("127.0.0.1", urlsplit(url).port, timeout=60)
        self.connection.request("GET", path, headers=headers)
        self.answer = self.connection.getresponse()
        assert self.answer.headers.get_content_type() == "text/event-stream"

    def event(self):
        """The next one as its lines say it; None at the end."""
        fields = {}
        while line := self.answer.readline():
            text = line.decode().rstrip("\n")
            if not text and fields:
                return fields
            name, _, value = text.partition(": ")
            if name:
                fields[name] = value
        return None

    def until(self, name):
        """All events up to the first of a name."""
        events = []
        while not events or events[-1]["event"] != name:
            event = self.event()
            assert event is not None, "the stream has ended"
            events.append(event)
        return events

    def close(self):
        self.connection.close()


# A process of its own


def test_the_service_is_up_within_two_seconds_and_says_where_first(tmp_path):
    with running_service(tmp_path, "--port", 0) as (process, url, first):
        status, text = ask(url, "/healthz")
        worked = cpu_seconds(process.pid)
        assert status == 200
        assert json.loads(text)["status"] == "ok"
        assert str(tmp_path) in first
    assert worked < 2, worked  # of the processor's time: a busy machine may take longer by the clock


@pytest.mark.few(1)
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_the_service_ends_within_a_second_whoever_is_connected(tmp_path, how):
    write_run(tmp_path, "a", [record(1)])

    def seconds_to_the_end():
        with running_service(tmp_path, "--port", 0) as (process, url, _):
            listeners = [Listener(url) for _ in range(LISTENERS)]
            assert all(listener.event()["event"] == "hello" for listener in listeners)
            idle = socket.create_connection(("127.0.0.1", urlsplit(url).port))
            began = time.monotonic()
            process.send_signal(how)
            process.wait(timeout=60)
            took = time.monotonic() - began
            for one in (*listeners, idle):
                one.close()
            assert "Traceback" not in process.stdout.read()
            assert process.returncode == (0 if how == signal.SIGINT else -signal.SIGTERM)
            return took

    assert at_best(seconds_to_the_end, 2) < 2


def test_the_service_never_loads_torch(tmp_path):
    script = (
        "import sys\n"
        "from hilbert_monitor.service.web import server, app\n"
        "from hilbert_monitor.service.following.index import Index\n"
        f"app.create_app(Index(__import__('pathlib').Path({str(tmp_path)!r})))\n"
        "heavy = {'torch', 'lightning', 'transformers', 'plotly.graph_objects'}\n"
        "print(sorted(heavy & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout.strip() == "[]"


def test_an_address_that_others_can_reach_gets_a_token(tmp_path):
    with running_service(tmp_path, "--port", 0, "--host", "0.0.0.0") as (_, url, _):
        token = urlsplit(url).query.removeprefix("token=")
        assert len(token) >= 20
        assert ask(url, "/api/runs")[0] == 401
        assert ask(url, "/api/runs", Authorization=f"Bearer {token}")[0] == 200
        assert ask(url, f"/?token={token}")[0] == 303
        assert ask(url, "/healthz")[0] == 200


def test_the_output_never_has_what_visitors_send(tmp_path):
    with running_service(tmp_path, "--port", 0, "--token", SECRET) as (process, url, first):
        assert f"token={SECRET}" in first
        assert ask(url, "/?token=guess")[0] == 401
        assert ask(url, f"/?token={SECRET}")[0] == 303
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
    assert "guess" not in rest
    assert SECRET not in rest


@pytest.mark.sweep
def test_a_token_from_the_environment_is_not_printed(tmp_path, monkeypatch):
    monkeypatch.setenv("HILBERT_MONITOR_TOKEN", SECRET)
    with running_service(tmp_path, "--port", 0, "--host", "0.0.0.0") as (process, url, first):
        assert ask(url, "/api/runs")[0] == 401
        assert ask(url, "/api/runs", Authorization=f"Bearer {SECRET}")[0] == 200
        process.send_signal(signal.SIGINT)
        output = first + process.stdout.read()
    assert SECRET not in output
    assert "?token=TOKEN" in output


def test_a_token_that_can_be_guessed_is_refused(tmp_path):
    result = CliRunner().invoke(app, ["serve", str(tmp_path)], env={"HILBERT_MONITOR_TOKEN": "x" * 15})
    assert result.exit_code == 2
    assert "15 characters can be guessed" in " ".join(result.output.split())


def test_nothing_is_written_beside_the_runs(tmp_path):
    root, caches = tmp_path / "runs", tmp_path / "caches"
    write_run(root, "a", [record(step) for step in range(1, 500)])
    (root / ".hilbert-monitor").mkdir()
    (tmp_path / "victim").write_text("mine")
    for name in ("a.json", "a.npy"):  # in the folder that was once the cache
        (root / ".hilbert-monitor" / name).symlink_to(tmp_path / "victim")
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    with background(root, cache=caches) as place:
        wait_for_runs(place.url, 1)
        deadline = time.monotonic() + 60
        while not [*caches.glob("*/a.json")]:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before
    assert (tmp_path / "victim").read_text() == "mine"


def healthy(client, status=200):
    """Wait for an answer of this status, and return it."""
    deadline = time.monotonic() + 60
    while (answer := client.get("/healthz")).status_code != status:
        assert time.monotonic() < deadline, answer.text
        time.sleep(0.02)
    return answer


@pytest.mark.sweep
def test_a_service_whose_index_is_dead_or_stuck_says_so(tmp_path, monkeypatch):
    index = Index(tmp_path, every=0.01)
    monkeypatch.setattr("hilbert_monitor.service.following.index.STUCK", 0.3)
    with TestClient(create_app(index), base_url="http://localhost") as client:
        assert client.get("/healthz").status_code == 200  # not started
        index.start()
        time.sleep(0.5)
        healthy(client)
        with index._pass:  # a disk that does not answer
            answer = healthy(client, 503)
        assert "does their disk answer" in answer.json()["detail"]
        with monkeypatch.context() as patch:
            patch.setattr(index, "_thread", threading.Thread())
            assert "has ended" in client.get("/healthz").json()["detail"]
    index.stop()


@pytest.mark.sweep
def test_a_folder_that_is_not_there_yet_is_waited_for(tmp_path):
    root = tmp_path / "later"
    with running_service(root, "--port", 0) as (process, url, _):
        assert "no folder" in process.stdout.readline()
        assert json.loads(ask(url, "/api/runs")[1])["runs"] == []
        write_run(root, "a", [record(1)])
        deadline = time.monotonic() + 60
        while not json.loads(ask(url, "/api/runs")[1])["runs"]:
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.mark.sweep
def test_the_folder_of_one_run_is_served_as_that_run(tmp_path):
    for name in ("a", "b"):
        write_run(tmp_path / "runs", name, [record(step) for step in range(1, 500)])
    caches, link = tmp_path / "caches", tmp_path / "link"
    link.symlink_to(tmp_path / "runs" / "a")
    with background(tmp_path / "runs", cache=caches) as place:
        wait_for_runs(place.url, 2)
    with background(tmp_path / "runs" / "a", cache=caches) as place:
        assert_only_a(place.url, tmp_path / "runs" / "a")
    with running_service(link, "--port", 0, "--cache", caches) as (_, url, first):
        assert str(link) in first
        assert_only_a(url, link)
    assert len([*caches.glob("*/b.json")]) == 1, "the cache of the whole folder is left alone"


def assert_only_a(url, given):
    wait_for_runs(url, 1)
    time.sleep(0.5)
    answer = json.loads(ask(url, "/api/runs")[1])
    assert [run["id"] for run in answer["runs"]] == ["a"]
    assert answer["root"] == str(given)
    assert ask(url, "/api/runs/b")[0] == 404


def test_runs_one_level_deeper_are_pointed_at(tmp_path):
    write_run(tmp_path / "demo" / "runs", "a", [record(1)])
    (tmp_path / "demo" / "data").mkdir()
    with running_service(tmp_path / "demo", "--port", 0) as (process, _, _):
        assert f"but in '{tmp_path / 'demo' / 'runs'}': serve that folder" in process.stdout.readline()


def test_a_port_that_is_taken_is_named_in_a_sentence(tmp_path):
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        port = other.getsockname()[1]
        with pytest.raises(AddressError, match=rf"port {port} .*--port 0"):
            bind("127.0.0.1", port, None)
        result = CliRunner().invoke(app, ["serve", str(tmp_path), "--port", str(port)])
    assert result.exit_code == 2
    assert str(port) in result.output


def test_an_address_of_nobody_is_named_in_a_sentence():
    with pytest.raises(AddressError, match="nowhere"):
        bind("nowhere.invalid", 0, None)


def test_what_is_no_folder_is_refused(tmp_path):
    (tmp_path / "file").touch()
    assert CliRunner().invoke(app, ["serve", str(tmp_path / "file")]).exit_code == 2


# The stream


@pytest.fixture
def live(tmp_path):
    """A service, and a run that is being written."""
    writer = RunWriter.open(tmp_path, RunInfo(name="live", head_optimizer="RowNorm"))
    writer.write(record(1))
    with background(tmp_path, cache=False) as place:
        wait_for_runs(place.url, 1)
        yield place.url, writer
    writer.close()


def test_a_record_is_heard_of_within_a_second(live):
    url, writer = live
    steps = itertools.count(2)

    def seconds_to_be_heard():
        step, began = next(steps), time.monotonic()
        writer.write(record(step, train_loss=float("nan")))
        (*_, event) = listener.until("records")
        took = time.monotonic() - began
        news = json.loads(event["data"])
        assert [one["step"] for one in news["records"]] == [step]
        assert news["records"][0]["train_loss"] == "nan"
        return took

    with closing(Listener(url)) as listener:
        hello = listener.event()
        assert hello["event"] == "hello"
        assert int(hello["retry"]) > 0
        assert at_best(seconds_to_be_heard, 1) < 1


@pytest.mark.few(1)
@pytest.mark.parametrize("how", ["header", "parameter", "both"])
def test_who_comes_back_gets_what_was_missed_once(live, how):
    url, writer = live
    with closing(Listener(url)) as listener:
        old = listener.event()["id"]
        writer.write(record(2))
        last = listener.until("records")[-1]["id"]
    for step in (3, 4):
        writer.write(record(step))
    query = "" if how == "header" else f"?after={last if how == 'parameter' else old}"
    headers = {} if how == "parameter" else {"Last-Event-ID": last}
    steps = []
    with closing(Listener(url, f"/api/events{query}", **headers)) as listener:
        while not steps or steps[-1] < 4:
            (*_, event) = listener.until("records")
            steps += [one["step"] for one in json.loads(event["data"])["records"]]
    assert steps == [3, 4]


def test_an_id_of_another_server_begins_anew(live):
    with closing(Listener(live[0], "/api/events?after=abc-17")) as listener:
        assert listener.event()["event"] == "reset"


def test_a_new_run_appears_by_itself(live, tmp_path):
    with closing(Listener(live[0])) as listener:
        listener.event()
        write_run(tmp_path, "new", [record(1)])
        while (event := json.loads(listener.until("run")[-1]["data"]))["id"] != "new":
            pass
    assert event["summary"]["label"] == "new"


def test_the_stream_is_not_held_back_to_be_compressed(live):
    with closing(Listener(live[0], **{"Accept-Encoding": "gzip"})) as listener:
        assert "content-encoding" not in listener.answer.headers
        assert listener.event()["event"] == "hello"


def test_listeners_that_leave_are_let_go(tmp_path):
    index, place = Index(tmp_path), bind("127.0.0.1", 0, None)
    server = Server(index, None, place.hosts)
    thread = threading.Thread(target=server.run, args=([place.socket],), daemon=True)
    thread.start()
    listeners = [Listener(place.url) for _ in range(5)]
    for listener in listeners:
        listener.event()
    assert index.feed.listeners == 5
    for listener in listeners:
        listener.close()
    deadline = time.monotonic() + 60
    while index.feed.listeners:
        assert time.monotonic() < deadline
        index.feed.publish("progress", {})
        gc.collect()  # a generator that is cut off while it waits to send is closed when it is collected
        time.sleep(0.02)
    server.should_exit = True
    thread.join(60)
    assert not thread.is_alive()


def test_the_service_in_the_background_ends_with_its_block(tmp_path):
    before = signal.getsignal(signal.SIGINT)

    def seconds_to_the_end():
        with background(tmp_path) as place:
            listener = Listener(place.url)
            assert listener.event()["event"] == "hello"
            assert signal.getsignal(signal.SIGINT) is before
            began = time.monotonic()
        took = time.monotonic() - began
        listener.close()
        with pytest.raises(OSError):  # noqa: PT011
            socket.create_connection(("127.0.0.1", place.port), timeout=1)
        return took

    assert at_best(seconds_to_the_end, 2) < 2

"""Notes, tags, archive and acknowledgements: how they are kept, and who may change them."""

import json
import math
import os
import shutil
import time

import pytest

from hilbert_monitor.runs.record import Alert
from hilbert_monitor.service.web.notebook import Notebook, data_folder
from hilbert_monitor.service.web.security import LARGEST
from tests.support.services import IMAGE, SCRIPT, client_of, record, write_run

TOKEN = "open-sesame-open-sesame"
ALERTS = [
    Alert(step=2, time=5.0, kind="diameter", value=1.0, message="two"),
    Alert(step=3, time=math.nan, kind="nonfinite", value=math.inf, message="three"),
]


@pytest.fixture
def root(tmp_path):
    root = tmp_path / "runs"
    write_run(root, "a", [record(s) for s in (1, 2, 3)], ALERTS, config={"lr": 0.1})
    write_run(root, "b", [record(1)], ALERTS[:1], config={"lr": 0.2})
    return root


@pytest.fixture
def data(tmp_path):
    return tmp_path / "data"


@pytest.fixture
def client(root, data):
    with client_of(root, notebook=Notebook(data)) as client:
        yield client


def say(client, status=200, path="/api/remarks", **change):
    answer = client.post(path, json=change)
    assert answer.status_code == status, answer.text
    return answer.json()


def acknowledge(client, status=200, **change):
    return say(client, status, "/api/acknowledgements", **change)


def found(client, q):
    return {run["id"] for run in client.get("/api/runs", params={"q": q}).json()["runs"]}


# What is kept


def test_a_note_tags_and_the_archive_are_kept_and_found(client, root, data):
    assert client.get("/api/remarks").json() == {"offered": True, "problem": "", "runs": {}}
    say(client, runs=["a"], note=" the good\none ", tag=["baseline", "to keep"])
    say(client, runs=["b"], archived=True)
    expected = {"note": "the good\none", "tags": ["baseline", "to keep"], "archived": False, "acknowledged": []}
    assert client.get("/api/remarks").json()["runs"]["a"] == expected
    assert client.get("/api/runs/a").json()["remarks"] == expected
    for q, ids in (
        ("tag:baseline", {"a"}),
        ('tag:"to keep"', {"a"}),
        ("tag:base", set()),
        ("note:good", {"a"}),
        ('"to keep"', {"a"}),
        ("-tag:baseline", {"b"}),
        ("archived:true", {"b"}),
        ("-archived:true", {"a"}),
    ):
        assert found(client, q) == ids, q
    with client_of(root, notebook=Notebook(data)) as another:
        assert another.get("/api/remarks").json()["runs"]["a"] == expected
    say(client, runs=["a", "b"], tag=["x"], untag=["baseline"], note="", archived=False)
    runs = client.get("/api/remarks").json()["runs"]
    assert (runs["a"]["tags"], runs["a"]["note"], runs["b"]["tags"]) == (["to keep", "x"], "", ["x"])
    say(client, runs=["b"], untag=["x"])
    assert "b" not in client.get("/api/remarks").json()["runs"]


def test_archived_runs_are_left_out_of_comparisons_unless_they_are_named(client):
    def compared(**query):
        return client.get("/api/compare", params=query).json()["models"]

    assert compared() == [{"name": "GPT", "runs": 2}]
    say(client, runs=["b"], archived=True)
    assert compared() == [{"name": "GPT", "runs": 1}]
    assert compared(runs="a,b") == [{"name": "GPT", "runs": 2}]
    assert {run["id"] for run in client.get("/api/runs").json()["runs"]} == {"a", "b"}


def test_alerts_are_acknowledged_and_that_can_be_undone(client):
    began = time.time()
    alerts = client.get("/api/alerts").json()["alerts"]
    assert [alert["acknowledged"] for alert in alerts] == [None] * 3
    keys = [{key: alert[key] for key in ("step", "kind", "time")} for alert in alerts if alert["run"] == "a"]
    assert {key["time"] for key in keys} == {5.0, "nan"}
    acknowledge(client, run="a", alerts=keys[:1], by=" Ada ")
    acknowledge(client, run="a", alerts=keys, by="Bob")
    seen = client.get("/api/runs/a").json()["alerts"]
    assert {alert["acknowledged"]["by"] for alert in seen} == {"Ada", "Bob"}, "the first keeps its name"
    assert all(alert["acknowledged"]["at"] >= began for alert in seen)
    still = client.get("/api/alerts?state=open").json()
    assert ([alert["run"] for alert in still["alerts"]], still["count"], still["acknowledged"]) == (["b"], 1, 2)
    assert client.get("/api/alerts?state=acknowledged").json()["count"] == 2
    assert client.get("/api/alerts").json()["count"] == 3
    acknowledge(client, run="a", undo=True)
    assert client.get("/api/alerts?state=open").json()["count"] == 3
    acknowledge(client, run="b")
    assert client.get("/api/remarks").json()["runs"]["b"]["acknowledged"][0]["by"] == ""
    say(client, runs=["a"], archived=True)
    assert client.get("/api/alerts?state=open").json()["count"] == 0, "an archived run asks for nobody"
    assert client.get("/api/alerts?state=open&run=a").json()["count"] == 2


def test_everybody_is_told_of_a_change(client):
    before = client.index.feed._count
    say(client, runs=["a"], note="x")
    (event,) = client.index.feed._since(before)
    assert event.name == "remarks"
    assert json.loads(event.data)["runs"]["a"]["note"] == "x"


def test_two_services_on_one_folder_do_not_lose_each_others_remarks(root, data):
    with client_of(root, notebook=Notebook(data)) as one, client_of(root, notebook=Notebook(data)) as other:
        say(one, runs=["a"], note="of one")
        say(other, runs=["b"], note="of the other")
        for client in (one, other):
            runs = client.get("/api/remarks").json()["runs"]
            assert (runs["a"]["note"], runs["b"]["note"]) == ("of one", "of the other")


def test_another_run_in_a_folder_of_the_same_name_has_no_remarks(client, root):
    say(client, runs=["a"], note="old", archived=True)
    shutil.rmtree(root / "a")
    write_run(root, "a", [record(1)])
    client.index.refresh()
    assert client.get("/api/remarks").json()["runs"] == {}
    say(client, runs=["a"], tag=["new"])
    assert client.get("/api/remarks").json()["runs"]["a"]["note"] == ""


def test_nothing_is_written_beside_the_runs(client, root):
    before = {path: path.stat().st_mtime_ns for path in [root, *root.rglob("*")]}
    say(client, runs=["a"], note="x", tag=["y"], archived=True)
    acknowledge(client, run="a")
    assert {path: path.stat().st_mtime_ns for path in [root, *root.rglob("*")]} == before


def test_where_nothing_can_be_written_nothing_is_offered(root, tmp_path, caplog):
    (tmp_path / "file").touch()
    for notebook in (Notebook(), Notebook(tmp_path / "file" / "x")):
        with client_of(root, notebook=notebook) as client:
            answer = client.get("/api/remarks").json()
            assert (answer["offered"], answer["runs"]) == (False, {})
            assert answer["problem"]
            assert answer["problem"] in say(client, 403, runs=["a"], note="x")["detail"]
    assert "--data names another" in caplog.text


@pytest.mark.parametrize("content", [b"{", b'{"format":99,"runs":{}}', b"\xff\x00"])
def test_a_notebook_that_is_not_ours_is_left_as_it_is(root, data, content):
    data.mkdir(mode=0o700)
    (data / "notebook.json").write_bytes(content)
    with client_of(root, notebook=Notebook(data)) as client:
        assert not client.get("/api/remarks").json()["offered"]
        say(client, 403, runs=["a"], note="x")
    assert (data / "notebook.json").read_bytes() == content


def test_a_disk_that_is_full_changes_nothing(client, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    say(client, runs=["a"], note="before")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert "No space left" in say(client, 503, runs=["a"], note="after")["detail"]
    assert client.get("/api/remarks").json()["runs"]["a"]["note"] == "before"


def test_the_data_folder_is_the_users_and_one_for_each_folder_of_runs(tmp_path, monkeypatch):
    monkeypatch.delenv("HILBERT_MONITOR_DATA")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))
    place = data_folder(tmp_path / "runs")
    assert place.parent == tmp_path / "share" / "hilbert-monitor"
    assert data_folder(tmp_path / "others") != place
    Notebook(place)
    assert place.stat().st_mode & 0o777 == 0o700


# What others send


def test_what_is_sent_is_kept_as_text(client):
    say(client, runs=["a"], note=f"{SCRIPT}{IMAGE}\u202eé", tag=[SCRIPT[:40], "é/ü", "../.."])
    answer = client.get("/api/remarks").json()["runs"]["a"]
    assert answer["note"].startswith(SCRIPT + IMAGE)
    assert answer["tags"] == [SCRIPT[:40], "é/ü", "../.."]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({}, "runs"),
        ({"runs": []}, "runs"),
        ({"runs": ["a"] * 10_001}, "runs"),
        ({"runs": "a"}, "runs"),
        ({"runs": ["a"], "note": "x" * 4001}, "note"),
        ({"runs": ["a"], "note": 7}, "note"),
        ({"runs": ["a"], "tag": ["x" * 41]}, "0"),
        ({"runs": ["a"], "tag": ["a,b"]}, "0"),
        ({"runs": ["a"], "tag": [""]}, "0"),
        ({"runs": ["a"], "tag": [str(n) for n in range(21)]}, "tag"),
        ({"runs": ["a"], "archived": "yes"}, "archived"),
        ({"runs": ["a"], "began": 0}, "began"),
        ([], "body"),
        ("x", "body"),
    ],
)
def test_a_change_that_is_wrong_is_refused_in_a_sentence(client, change, word):
    answer = client.post("/api/remarks", json=change)
    assert answer.status_code == 422
    assert word in answer.json()["detail"]
    assert len(answer.json()["detail"]) < 700


@pytest.mark.few(3)
@pytest.mark.parametrize("id", ["../a", "a/../b", "..%2fa", "nobody", "a\x00", "", "é" * 200, "/etc/passwd"])
def test_ids_are_looked_up_among_the_runs_alone(client, id):
    assert "There is no run" in say(client, 404, runs=["a", id], note="x")["detail"]
    assert "There is no run" in acknowledge(client, 404, run=id)["detail"]
    assert client.get("/api/remarks").json()["runs"] == {}, "nor is the other run changed"


def test_an_alert_that_the_run_does_not_have_is_refused(client):
    assert "no alert" in acknowledge(client, 404, run="b", alerts=[{"step": 3, "kind": "x", "time": 1.0}])["detail"]


def test_more_tags_than_a_run_may_have_are_refused(client):
    say(client, runs=["a"], tag=[str(n) for n in range(20)])
    assert "at most 20 tags" in say(client, 422, runs=["a"], tag=["one more"])["detail"]


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"\xff\xff", b"[" * 100_000, b'{"runs": ["a"], "note": "\\ud800"}', b'{"runs": ["a"], "note": "x"'],
)
def test_what_is_no_json_is_refused(client, body):
    answer = client.post("/api/remarks", content=body, headers={"content-type": "application/json"})
    assert answer.status_code in (400, 422)
    assert client.get("/api/remarks").json()["runs"] == {}


# Pages elsewhere


CHANGE = json.dumps({"runs": ["a"], "note": "from elsewhere"})


def post(client, status, **headers):
    headers = {"content-type": "application/json"} | {key.replace("_", "-"): text for key, text in headers.items()}
    answer = client.post("/api/remarks", content=CHANGE, headers=headers)
    assert answer.status_code == status, answer.text
    assert "access-control-allow-origin" not in answer.headers
    return answer.json()["detail"] if status != 200 else ""


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "http://127.0.0.1:8001"},
        {"origin": "http://localhost:8000"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:8000.evil.example"},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
        {"sec_fetch_site": "none"},
        {"sec_fetch_site": "cross-site", "origin": "http://127.0.0.1:8000"},
    ],
)
def test_pages_elsewhere_change_nothing(client, headers):
    assert "another page" in post(client, 403, **headers)
    assert client.get("/api/remarks").json()["runs"] == {}


@pytest.mark.parametrize(
    "headers",
    [{}, {"origin": "http://127.0.0.1:8000", "sec_fetch_site": "same-origin"}, {"origin": "HTTP://127.0.0.1:8000"}],
)
def test_our_own_pages_and_programs_do(client, headers):
    post(client, 200, **headers)


@pytest.mark.parametrize(
    "kind",
    ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "", "application/jsonx"],
)
def test_what_a_form_of_another_page_can_send_is_refused(client, kind):
    assert "application/json" in post(client, 415, content_type=kind)


def test_a_page_elsewhere_gets_no_permission_to_ask(client):
    asked = {"origin": "http://evil.example", "access-control-request-method": "POST"}
    answer = client.options("/api/remarks", headers=asked | {"access-control-request-headers": "content-type"})
    assert answer.status_code == 403
    assert "access-control-allow-origin" not in answer.headers


def test_a_large_body_is_refused_before_it_is_read(client):
    answer = client.post("/api/remarks", content=b"x" * (10 << 20), headers={"content-type": "application/json"})
    assert answer.status_code == 413
    assert f"{LARGEST:,}" in answer.json()["detail"]

    def chunks():
        yield b"{}"

    unmeasured = client.post("/api/remarks", content=chunks(), headers={"content-type": "application/json"})
    assert unmeasured.status_code == 411


def test_other_machines_need_a_token(root, data):
    with client_of(root, notebook=Notebook(data), allowed_hosts=None) as client:
        transport = client._transport
        transport.client = ("192.0.2.7", 1)
        assert "--token" in post(client, 403)
    with client_of(root, notebook=Notebook(data), token=TOKEN, allowed_hosts=None) as client:
        client._transport.client = ("192.0.2.7", 1)
        assert "token" in post(client, 401)
        post(client, 401, origin="http://127.0.0.1:8000", sec_fetch_site="same-origin")
        post(client, 200, authorization=f"Bearer {TOKEN}")
        client.get("/", params={"token": TOKEN})
        post(client, 200, origin="http://127.0.0.1:8000", sec_fetch_site="same-origin")
        post(client, 403, origin="http://127.0.0.1:9999", sec_fetch_site="same-site")


@pytest.mark.parametrize("body", [b"{", b"\xff\xfe", b"{'runs': ['a']}"])
def test_a_body_that_is_no_json_is_refused_with_a_sentence(client, body):
    answer = client.post("/api/remarks", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422
    assert answer.json()["detail"] == "The body is no JSON: /api/openapi.json says what it may hold."

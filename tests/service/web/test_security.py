import re

import pytest

from hilbert_monitor.service.following.index import Index
from hilbert_monitor.service.web.app import create_app
from tests.support.services import client_of, write_zoo

TOKEN = "a token; with=all & sorts, é"
PATHS = ["/", "/runs", "/runs/AdamW-0", "/alerts", "/static/index.html", "/static/plotly.min.js", "/api/runs"]
PATHS += ["/api/runs/AdamW-0", "/api/compare", "/api/compare/loss.csv", "/api/events", "/api/openapi.json", "/nothing"]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("zoo")
    write_zoo(root)
    return root


@pytest.fixture(scope="module")
def client(root):
    with client_of(root) as client:
        yield client


@pytest.fixture
def closed(root):
    """A service with a token, at a client that does not follow where it is sent."""
    with client_of(root, token=TOKEN, allowed_hosts=None) as client:
        client.follow_redirects = False
        yield client


# Headers


@pytest.mark.parametrize("path", ["/", "/static/index.html", "/api/runs", "/api/nothing", "/nothing", "/healthz"])
def test_every_answer_says_what_a_browser_may_do_with_it(client, path):
    headers = client.get(path).headers
    policy = headers["content-security-policy"]
    for part in (
        "default-src 'self'",
        "script-src 'self'",
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data: blob:",
        "frame-ancestors 'none'",
    ):
        assert part in [one.strip() for one in policy.split(";")]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-frame-options"] == "DENY"
    assert headers["referrer-policy"] == "no-referrer"
    assert "access-control-allow-origin" not in headers


def test_a_fault_of_ours_has_the_headers_and_no_details(root):
    index = Index(root)
    index.runs = None
    with client_of(root) as client:
        client.app = create_app(index)
        answer = type(client)(client.app, "http://127.0.0.1", raise_server_exceptions=False).get("/api/runs")
    assert answer.status_code == 500
    assert answer.headers["x-frame-options"] == "DENY"
    assert "Traceback" not in answer.text
    assert "NoneType" not in answer.text


def test_answers_of_the_api_are_not_stored(client):
    for path in ("/api/runs", "/api/compare", "/api/nothing", "/healthz"):
        assert client.get(path).headers["cache-control"] == "no-store"


# The name that is asked for


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:8000", "localhost:1", "LOCALHOST", "[::1]", "[::1]:8000"])
def test_names_of_this_machine_are_answered(client, host):
    assert client.get("/api/runs", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil", "", "[::1"]
)
def test_other_names_that_point_here_are_not(client, host):
    for path in ("/", "/api/runs", "/healthz"):
        answer = client.get(path, headers={"host": host})
        assert answer.status_code == 400
        assert "localhost" in answer.text


# Tokens


@pytest.mark.parametrize("path", PATHS)
def test_without_the_token_there_is_nothing(closed, path):
    for options in (
        {},
        {"params": {"token": "wrong"}},
        {"params": {"token": ""}},
        {"headers": {"authorization": "Bearer wrong"}},
        {"headers": {"authorization": "Basic " + TOKEN.encode().hex()}},
        {"headers": {"cookie": "hilbert_monitor_8000=wrong; hilbert_monitor_80=\x7f"}},
    ):
        answer = closed.get(path, **options)
        assert answer.status_code == 401
        assert "hilbert-monitor serve" in answer.text
        assert "set-cookie" not in answer.headers
        assert TOKEN not in answer.text


def test_health_needs_no_token_and_says_nothing_of_the_runs(closed):
    answer = closed.get("/healthz")
    assert answer.status_code == 200
    assert answer.json().keys() == {"status", "version", "runs", "progress"}


def test_a_program_sends_the_token_in_a_header(closed):
    headers = {b"authorization": f"Bearer {TOKEN}".encode()}
    assert closed.get("/api/runs", headers=headers).status_code == 200
    with client_of(closed.index.root, token="plain", allowed_hosts=None) as client:
        assert client.get("/api/runs", headers={"authorization": "bearer plain"}).status_code == 200


def test_a_browser_gives_the_token_once(closed):
    first = closed.get("/runs/AdamW-0", params={"axis": "tokens", "token": TOKEN, "q": "a b&c"})
    assert first.status_code == 303
    assert first.headers["location"] == "/runs/AdamW-0?axis=tokens&q=a+b%26c"
    cookie = first.headers["set-cookie"]
    assert cookie.startswith("hilbert_monitor_8000=")
    assert "HttpOnly" in cookie
    assert "SameSite" in cookie
    assert "token" not in cookie
    assert closed.get(first.headers["location"]).status_code == 200
    assert closed.get("/api/runs").status_code == 200
    again = closed.get("/", params={"token": TOKEN})  # the link once more: the token leaves the address again
    assert (again.status_code, again.headers["location"]) == (303, "/")


@pytest.mark.parametrize(
    "path", ["//evil.example/", "/\\evil.example/", "///evil.example", "/%2f%2fevil.example", "/%5cevil.example"]
)
def test_the_way_back_leads_to_this_server(closed, path):
    answer = closed.get(f"http://127.0.0.1:8000{path}", params={"token": TOKEN})
    assert answer.status_code == 303
    assert re.match(r"/[^/\\]", answer.headers["location"] + "x")


def test_the_ticket_is_found_among_cookies_of_other_services(closed):
    closed.get("/", params={"token": TOKEN})
    ticket = closed.cookies["hilbert_monitor_8000"]
    closed.cookies.clear()
    others = f'a="\\"{"x;" * 20}"; hilbert_monitor_8000={ticket}; b'
    assert closed.get("/api/runs", headers={"cookie": others}).status_code == 200


def test_a_header_of_escaped_quotes_is_refused_at_once(closed):
    answer = closed.get("/api/runs", headers={"cookie": 'a="' + '\\"' * 60_000})
    assert answer.status_code == 431
    assert "delete cookies" in answer.text


def test_the_ticket_is_found_in_a_second_header_and_behind_an_old_one(closed):
    closed.get("/", params={"token": TOKEN})
    ticket = f"hilbert_monitor_8000={closed.cookies['hilbert_monitor_8000']}"
    closed.cookies.clear()
    for cookies in (["a=b", ticket], [f"hilbert_monitor_8000=old; {ticket}"]):
        answer = closed.get("/api/runs", headers=[("cookie", cookie) for cookie in cookies])
        assert answer.status_code == 200


def test_a_program_with_the_token_may_send_any_cookies(closed):
    headers = {"authorization": f"Bearer {TOKEN}".encode(), "cookie": b"a=" + b"x" * 20_000}
    assert closed.get("/api/runs", headers=headers).status_code == 200


def test_a_cookie_of_another_token_is_refused(root, closed):
    closed.get("/", params={"token": TOKEN})
    assert closed.get("/api/runs").status_code == 200
    with client_of(root, token="another", allowed_hosts=None) as other:
        other.cookies = closed.cookies
        assert other.get("/api/runs").status_code == 401


# Files


@pytest.mark.parametrize("path", ["/", "/runs", "/alerts", "/runs/anything", "/runs/..", "/runs/%00", "/runs/<script>"])
def test_pages_are_one_file_whatever_run_they_name(client, path):
    answer = client.get(f"http://127.0.0.1:8000{path}")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.text == client.get("/").text
    assert "__VERSION__" not in answer.text
    head = client.head(f"http://127.0.0.1:8000{path}")
    assert (head.status_code, head.text) == (200, "")


@pytest.mark.parametrize(
    "name",
    [
        "../app.py",
        "0123456789abcdef/app.py",
        "a/b/main.js",
        "..%2fapp.py",
        "%2e%2e/app.py",
        "app.py",
        "",
        "/etc/passwd",
        "index.html%00",
        "static",
    ],
)
def test_other_files_are_not_served(client, name):
    answer = client.get(f"http://127.0.0.1:8000/static/{name}")
    assert answer.status_code == 404
    assert "import" not in answer.text


def test_a_version_of_a_file_is_kept_for_ever_and_others_are_asked_for_again(client):
    page = client.get("/").text
    version = re.search(r"/static/([0-9a-f]+)/plotly\.min\.js", page)[1]
    for name in ("plotly.min.js", "main.js", "api.js"):  # scripts import each other from the same folder
        assert "immutable" in client.get(f"/static/{version}/{name}").headers["cache-control"]
    assert client.get("/static/0123456789abcdef/main.js").headers["cache-control"] == "no-cache"
    loose = client.get("/static/plotly.min.js")
    assert loose.headers["cache-control"] == "no-cache"
    known = client.get("/static/plotly.min.js", headers={"if-none-match": loose.headers["etag"]})
    assert (known.status_code, known.content) == (304, b"")
    assert client.get("/static/index.html").headers["etag"] != loose.headers["etag"]


def test_the_page_preloads_exactly_the_modules_that_are_imported(client):
    page = client.get("/").text
    preloaded = re.findall(r'<link rel="modulepreload" href="/static/\w+/([\w.]+)">', page)
    imported = ["main.js"]
    for name in imported:
        names = re.findall(r'from "\./(\w+\.js)"', client.get(f"/static/{name}").text)
        imported += [one for one in names if one not in imported]
    assert sorted(preloaded) == sorted(imported[1:])


def test_plotly_is_compiled_while_it_arrives(client):
    script = client.get("/static/plotly.min.js").text
    hint, _, plotly = script.partition("\n")
    assert hint == "//# allFunctionsCalledOnLoad"
    assert plotly.startswith("/**\n* plotly.js v")


def test_large_answers_are_compressed_for_those_who_understand(client):
    packed = client.get("/static/plotly.min.js", headers={"accept-encoding": "gzip"})
    plain = client.get("/static/plotly.min.js", headers={"accept-encoding": "identity"})
    assert packed.headers["content-encoding"] == "gzip"
    assert "content-encoding" not in plain.headers
    assert packed.content == plain.content
    assert int(packed.headers["content-length"]) < int(plain.headers["content-length"]) / 3
    assert plain.headers["content-type"] == "text/javascript; charset=utf-8"

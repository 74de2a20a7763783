"""What can be known of the containers without a container engine, with the real programs where there are any."""

import json
import re
import shlex
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

import pytest
import typer
import yaml

from hilbert_monitor import __version__
from hilbert_monitor.cli import app
from hilbert_monitor.runs.log import RunWriter
from hilbert_monitor.runs.record import RunInfo
from tests.support.containers import DOCKER, ROOT, VARIABLE, build, compose, instructions, mounts
from tests.support.ports import free_port
from tests.support.programs import needs
from tests.support.services import record, write_run

DASHBOARDS = ROOT / "dashboards"
DOCKERFILES = [DOCKER / "Dockerfile", DOCKER / "Dockerfile.train"]
SECRETS = {"HILBERT_MONITOR_TOKEN": "a-token-of-some-length", "GRAFANA_ADMIN_PASSWORD": "a-password"}
COMPOSE = compose(**SECRETS)
SERVICES = COMPOSE["services"]
PROMETHEUS = DASHBOARDS / "prometheus" / "prometheus.yml"
ALERTMANAGER = DASHBOARDS / "alertmanager" / "alertmanager.yml"
KUBERNETES = DASHBOARDS / "kubernetes"

each_service = pytest.mark.parametrize("name", SERVICES)
each_dockerfile = pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)


def last(dockerfile, keyword):
    """The last of an instruction in the final image, as a list if it is one."""
    found = [rest for key, rest in instructions(dockerfile)[-1] if key == keyword][-1]
    start = found.find("[")
    return json.loads(found[start:]) if start >= 0 else found


def run(*command, **options):
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)


@contextmanager
def running(*command, **options):
    """A program in a process of its own, ended with the block."""
    process = subprocess.Popen(
        [str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def ask(url, token=None, data=None):
    """Status and text of an answer."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except urllib.error.URLError:
        return 0, ""


def wait_for(found, what, seconds=120):
    """Ask again and again until there is an answer."""
    deadline = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(0.1)
    return value


# The service's image, by the very commands of its Dockerfile


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    """Folder of the programs that the build stage makes, in a virtual environment that was empty before."""
    folder = tmp_path_factory.mktemp("image")
    build(instructions(DOCKER / "Dockerfile")[0], folder)
    return folder / "opt" / "venv" / "bin"


@contextmanager
def serving(image, runs, **env):
    """The image's own command, at a free port of loopback and over these runs: its address."""
    command = last(DOCKER / "Dockerfile", "ENTRYPOINT") + last(DOCKER / "Dockerfile", "CMD")
    changed = {"/runs": str(runs), "0.0.0.0": "127.0.0.1", "8000": "0"}
    program, *arguments = [changed.get(word, word) for word in command]
    with running(image / program, *arguments, env=env) as process:
        yield re.search(r"http://[^/]+", process.stdout.readline())[0]


def test_the_image_has_no_torch(image):
    assert run(image / "python", "-c", "import hilbert_monitor, fastapi").returncode == 0
    assert "No module named 'torch'" in run(image / "python", "-c", "import torch").stderr


def test_the_image_serves_every_page_and_wants_its_token(image, tmp_path):
    for head in ("AdamW", "RowNorm"):
        id = write_run(tmp_path, head, [record(step) for step in range(1, 30)], head_optimizer=head)
    token = SECRETS["HILBERT_MONITOR_TOKEN"]
    with serving(image, tmp_path, HILBERT_MONITOR_TOKEN=token) as url:
        assert ask(f"{url}/healthz")[0] == 200
        assert ask(f"{url}/api/runs")[0] == 401
        wait_for(lambda: json.loads(ask(f"{url}/healthz")[1])["runs"] == 2, "both runs are read")
        paths = json.loads(ask(f"{url}/api/openapi.json", token)[1])["paths"]
        plain = [path.replace("{id}", id) for path in paths if "events" not in path]
        answers = {path: ask(url + path, token)[0] for path in ["/", *plain] if "{" not in path}
    assert len(answers) > 8
    assert answers["/"] == answers["/api/compare"] == answers[f"/api/runs/{id}/figures"] == 200
    assert max(answers.values()) < 500, answers


def test_the_healthcheck_of_the_image_sees_whether_the_service_answers(image, tmp_path):
    python, *arguments = last(DOCKER / "Dockerfile", "HEALTHCHECK")

    def healthy(url):
        return run(image / python, *(part.replace("http://127.0.0.1:8000", url) for part in arguments)).returncode == 0

    with serving(image, tmp_path) as url:
        assert healthy(url)
    assert not healthy(url)


def test_the_image_writes_reports(image, tmp_path):
    write_run(tmp_path / "runs", "a", [record(step) for step in range(1, 30)])
    done = run(image / "hilbert-monitor", "report", tmp_path / "runs", "--out", tmp_path / "report.html")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "report.html").stat().st_size > 100_000


def test_port_user_and_healthcheck_of_the_image_agree():
    final = DOCKER / "Dockerfile"
    command = last(final, "CMD")
    assert last(final, "EXPOSE") == command[command.index("--port") + 1] == "8000"
    assert "127.0.0.1:8000/healthz" in last(final, "HEALTHCHECK")[-1]


# Dockerfiles


@each_dockerfile
def test_hadolint_finds_nothing(dockerfile):
    done = run(Path(sys.executable).parent / "hadolint", dockerfile)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@each_dockerfile
def test_an_image_begins_with_a_pinned_one_and_ends_without_root(dockerfile):
    stages = instructions(dockerfile)
    assert all(re.search(r":v?\d+\.\d+\.\d+", rest) for stage in stages for key, rest in stage if key == "FROM")
    assert re.fullmatch(r"[1-9]\d+:[1-9]\d+", last(dockerfile, "USER"))
    assert last(dockerfile, "ENTRYPOINT") == ["hilbert-monitor"]


@each_dockerfile
def test_what_an_image_copies_is_there_and_not_ignored(dockerfile):
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    for stage in instructions(dockerfile):
        for keyword, rest in stage:
            if keyword == "COPY" and "--from" not in rest:
                for source in rest.split()[:-1]:
                    verdicts = [rule for rule in ignored if fnmatch(source, rule.lstrip("!"))]
                    assert (ROOT / source).exists()
                    assert verdicts[-1].startswith("!"), source


@pytest.mark.parametrize(("name", "extra"), [("Dockerfile", "serve"), ("Dockerfile.train", "all")])
def test_an_image_installs_its_extra_in_the_versions_that_are_tested(name, extra):
    commands = [rest for stage in instructions(DOCKER / name) for key, rest in stage if key == "RUN"]
    (install,) = [shlex.split(command) for command in commands if f".[{extra}]" in command]
    assert {"--constraint=constraints.txt", "--build-constraint=constraints.txt", f".[{extra}]"} <= set(install)


# The compose file


def test_the_compose_file_follows_the_schema():
    command = Path(sys.executable).parent / "check-jsonschema"
    done = run(command, "--builtin-schema", "vendor.compose-spec", DOCKER / "compose.yml")
    assert done.returncode == 0, done.stdout


def test_there_is_no_default_password():
    text = (DOCKER / "compose.yml").read_text()
    assert {name for name, kind, _ in VARIABLE.findall(text) if kind == "?"} == set(SECRETS)
    for service in SERVICES.values():
        for name, value in service.get("environment", {}).items():
            if re.search("TOKEN|PASSWORD|SECRET|KEY", name):
                assert value in SECRETS.values(), name


@each_service
def test_a_service_is_pinned(name):
    image, tag = SERVICES[name]["image"].rsplit(":", 1)
    assert re.fullmatch(r"v?\d+\.\d+\.\d+(-slim-\w+)?", tag)
    if "build" in SERVICES[name]:
        assert (image.startswith("hilbert-monitor"), tag) == (True, __version__)


@each_service
def test_a_service_may_do_little(name):
    service = SERVICES[name]
    forbidden = {"privileged", "cap_add", "devices", "network_mode", "pid", "ipc", "userns_mode"}
    assert not forbidden & service.keys()
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert re.match(r"[1-9]\d*:\d+$", service["user"])
    assert service.get("read_only") or name in ("prometheus", "demo")
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
    assert service["restart"] == ("no" if name == "demo" else "unless-stopped")


@each_service
def test_a_service_has_a_limit_of_memory(name):
    assert re.fullmatch(r"\d+[mg]", SERVICES[name]["deploy"]["resources"]["limits"]["memory"])


def test_the_service_keeps_its_cache_where_it_may_write():
    deployment, *_ = yaml.safe_load_all((KUBERNETES / "service.yml").read_text())
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    folder = SERVICES["service"]["environment"]["HILBERT_MONITOR_CACHE"]
    assert {"name": "HILBERT_MONITOR_CACHE", "value": folder} in container["env"]
    assert ("cache", folder, "rw") in mounts(SERVICES["service"])
    assert {"name": "cache", "mountPath": folder} in container["volumeMounts"]
    assert "emptyDir" in next(volume for volume in pod["volumes"] if volume["name"] == "cache")
    assert "memory" in container["resources"]["limits"]
    final = dict(instructions(DOCKER / "Dockerfile")[-1])
    data = SERVICES["service"]["environment"]["HILBERT_MONITOR_DATA"]
    assert f"--mode=1777 {folder} {data}" in final["RUN"]  # RUNS_USER may be anybody
    assert f"HILBERT_MONITOR_CACHE={folder} HILBERT_MONITOR_DATA={data}" in final["ENV"]
    assert ("data", data, "rw") in mounts(SERVICES["service"])


@each_service
def test_a_service_is_checked_where_it_listens(name):
    service = SERVICES[name]
    if "healthcheck" in service:
        command = " ".join(service["healthcheck"]["test"])
    else:
        command = " ".join(last(DOCKER / Path(service["build"]["dockerfile"]).name, "HEALTHCHECK"))
    checked = re.findall(r"http://127\.0\.0\.1:(\d+)/", command)
    assert checked or name == "demo"
    for port in service.get("ports", ()):
        assert port.rsplit(":", 1)[1] == checked[0]


@each_service
def test_what_a_service_mounts_is_there(name):
    for source, target, mode in mounts(SERVICES[name]):
        assert target.startswith("/")
        if source.startswith("."):
            assert (DOCKER / source).resolve().exists(), source
            assert mode == "ro"
        else:
            assert source in COMPOSE["volumes"]


@pytest.mark.parametrize("variable", ["RUNS", "BIND", "HILBERT_URL", "DEMO_STEPS", "RUNS_USER"])
def test_a_setting_that_the_compose_file_describes_is_used(variable):
    text = (DOCKER / "compose.yml").read_text()
    assert re.search(rf"^#   {variable} ", text, re.MULTILINE)
    assert f"${{{variable}:-" in text


def test_runs_may_be_a_folder_of_the_host():
    services = compose(**SECRETS, RUNS="/data/runs", BIND="10.0.0.1")["services"]
    assert ("/data/runs", "/runs", "ro") in mounts(services["service"])
    assert services["grafana"]["ports"] == ["10.0.0.1:3000:3000"]


def in_container(name, path):
    """The file of the tree that a service sees at a path."""
    for source, target, _ in mounts(SERVICES[name]):
        if source.startswith(".") and Path(path).is_relative_to(target):
            return (DOCKER / source / Path(path).relative_to(target)).resolve()
    raise AssertionError(f"{name} mounts nothing at {path}")


@pytest.mark.parametrize(("name", "file"), [("prometheus", PROMETHEUS), ("alertmanager", ALERTMANAGER)])
def test_a_program_is_given_our_settings_and_a_volume(name, file):
    flags = dict(flag.removeprefix("--").split("=", 1) for flag in SERVICES[name]["command"])
    assert in_container(name, flags["config.file"]) == file
    kept = flags.get("storage.tsdb.path") or flags["storage.path"]
    assert any(target == kept and source in COMPOSE["volumes"] for source, target, _ in mounts(SERVICES[name]))


def test_grafana_finds_its_dashboards_and_prometheus():
    provisioning = in_container("grafana", "/etc/grafana/provisioning")
    providers = yaml.safe_load(next((provisioning / "dashboards").glob("*.yml")).read_text())["providers"]
    assert all(list(in_container("grafana", one["options"]["path"]).glob("*.json")) for one in providers)


def test_the_webhook_runs_a_script_that_is_mounted():
    python, script, port = SERVICES["webhook"]["entrypoint"]
    assert (python, in_container("webhook", script)) == ("python", DOCKER / "webhook.py")
    assert f"127.0.0.1:{port}/" in SERVICES["webhook"]["healthcheck"]["test"][-1]
    assert SERVICES["webhook"]["image"] == instructions(DOCKER / "Dockerfile")[-1][0][1]  # one Python to download


def addresses():
    """Who asks whom, by our settings."""
    prometheus, alertmanager = (yaml.safe_load(file.read_text()) for file in (PROMETHEUS, ALERTMANAGER))
    for job in prometheus["scrape_configs"]:
        yield from (("prometheus", target) for one in job.get("static_configs", ()) for target in one["targets"])
        yield from (("prometheus", one["url"].split("/")[2]) for one in job.get("http_sd_configs", ()))
    for one in prometheus["alerting"]["alertmanagers"]:
        yield "prometheus", one["static_configs"][0]["targets"][0]
    yield "alertmanager", alertmanager["receivers"][0]["webhook_configs"][0]["url"].split("/")[2]
    for file in (DASHBOARDS / "grafana" / "provisioning" / "datasources").glob("*.yml"):
        yield from (("grafana", one["url"].split("/")[2]) for one in yaml.safe_load(file.read_text())["datasources"])


def test_every_address_in_our_settings_is_a_service_that_can_be_reached():
    found = set(addresses())
    assert len(found) == 4
    for asking, address in found:
        name, port = address.split(":")
        own = SERVICES[name]
        assert set(SERVICES[asking]["networks"]) & set(own["networks"])
        ports = [p.rsplit(":", 1)[1] for p in own.get("ports", ())] or own["entrypoint"][-1:]
        assert port in ports, address


def test_prometheus_is_given_the_token_of_the_service():
    files = set(re.findall(r"credentials_file: (\S+)", PROMETHEUS.read_text()))
    (name,) = SERVICES["prometheus"]["secrets"]
    assert files == {f"/run/secrets/{name}"}
    variable = COMPOSE["secrets"][name]["environment"]
    assert variable in SERVICES["service"]["environment"]
    (option,) = [p for p in typer.main.get_command(app).commands["serve"].params if p.name == "token"]
    assert option.envvar == variable
    assert not SERVICES["prometheus"].get("read_only")  # compose writes such a secret into the container's root


def test_the_links_of_alerts_begin_where_the_service_is_published():
    host, outside, _ = SERVICES["service"]["ports"][0].split(":")
    assert SERVICES["prometheus"]["environment"]["HILBERT_URL"] == f"http://localhost:{outside}"
    assert host == "127.0.0.1"


def test_the_demo_trains_into_the_runs_that_are_served():
    command = SERVICES["demo"]["command"]
    place = {source: target for source, target, _ in mounts(SERVICES["demo"])}
    assert place["runs"] == f"{command[command.index('--out') + 1]}/runs"
    assert "runs" in [source for source, _, _ in mounts(SERVICES["service"])]
    assert any(f" {place['runs']}" in rest for _, rest in instructions(DOCKER / "Dockerfile.train")[-1])
    assert SERVICES["demo"]["profiles"] == ["demo"]


@pytest.mark.parametrize("command", [SERVICES["demo"]["command"], last(DOCKER / "Dockerfile", "CMD")], ids=" ".join)
def test_the_commands_of_the_images_have_options_that_exist(command):
    name, *arguments = command
    typer.main.get_command(app).commands[name].make_context(name, arguments)


def test_the_command_in_the_training_image_has_options_that_exist():
    text = (DOCKER / "Dockerfile.train").read_text()
    name, *arguments = shlex.split(re.search(r"hilbert-monitor-train (pretrain .*)", text)[1])
    typer.main.get_command(app).commands[name].make_context(name, arguments)


# Prometheus and Alertmanager, the real ones


def rewritten(folder, **changes):
    """Prometheus' folder with other addresses in its settings."""
    made = shutil.copytree(PROMETHEUS.parent, folder / "prometheus")
    (folder / "token").write_text(SECRETS["HILBERT_MONITOR_TOKEN"] + "\n")
    text = PROMETHEUS.read_text().replace("/run/secrets/hilbert_monitor_token", str(folder / "token"))
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    (made / PROMETHEUS.name).write_text(text)
    return made / PROMETHEUS.name


def test_promtool_accepts_the_settings_and_finds_the_rules(tmp_path):
    done = run(needs("promtool"), "check", "config", rewritten(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    rules = list((PROMETHEUS.parent / "rules").glob("*.yml"))
    assert rules
    assert done.stdout.count(" rules found") == len(rules)


@pytest.mark.parametrize("receiver", ["webhook", "slack", "email"])
def test_amtool_accepts_every_receiver_also_those_in_comments(tmp_path, receiver):
    text = re.sub(r"^  # (?=- name|  )", "  ", ALERTMANAGER.read_text(), flags=re.MULTILINE)
    assert f"\n  - name: {receiver}\n" in text
    (tmp_path / "alertmanager.yml").write_text(text.replace("receiver: webhook", f"receiver: {receiver}"))
    done = run(needs("amtool"), "check-config", tmp_path / "alertmanager.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 receivers" in done.stdout


def test_a_notification_uses_annotations_that_every_alert_has():
    used = set(re.findall(r"Annotations\.(\w+)", ALERTMANAGER.read_text()))
    assert used
    for file in (PROMETHEUS.parent / "rules").glob("*.yml"):
        rules = [rule for group in yaml.safe_load(file.read_text())["groups"] for rule in group["rules"]]
        assert all(used <= rule["annotations"].keys() for rule in rules if "alert" in rule)


@pytest.mark.sweep
def test_prometheus_gets_in_with_the_token_and_reads_a_live_run(tmp_path):
    program, port = needs("prometheus"), free_port()
    runs, token = tmp_path / "runs", SECRETS["HILBERT_MONITOR_TOKEN"]
    writer = RunWriter.open(runs, RunInfo(name="live", head_optimizer="RowNorm"))
    writer.write(record(1, time=time.time()))
    serve = [sys.executable, "-m", "hilbert_monitor", "serve", runs, "--port", 0, "--token", token]
    with running(*serve) as service:
        url = re.search(r"http://([^/]+)", service.stdout.readline())
        config = rewritten(tmp_path, **{"service:8000": url[1], ": 15s": ": 1s"})
        flags = [flag for flag in SERVICES["prometheus"]["command"] if "retention" in flag or "feature" in flag]
        where = [f"--config.file={config}", f"--storage.tsdb.path={tmp_path}/data"]
        listen = f"--web.listen-address=127.0.0.1:{port}"
        with running(program, *where, listen, *flags, env={"HILBERT_URL": "http://here:1"}):
            api = f"http://127.0.0.1:{port}"

            def series():
                status, text = ask(f"{api}/api/v1/query?query=hilbert_run_info")
                return json.loads(text)["data"]["result"] if status == 200 else []

            def lists_of_targets():
                text = ask(f"{api}/metrics")[1]
                tried, failed = (
                    float(re.search(rf'^prometheus_sd_refresh_{name}{{mechanism="http"}} (.*)$', text, re.MULTILINE)[1])
                    for name in ("duration_seconds_count", "failures_total")
                )
                return tried - failed  # on a busy machine one may not come within its second

            (found,) = wait_for(series, "the run in Prometheus")
            wait_for(lists_of_targets, "targets by HTTP")
            settings = ask(f"{api}/api/v1/status/config")[1]
    writer.close()
    assert (found["metric"]["job"], found["metric"]["run"]) == ("hilbert-service", writer.id)
    assert "hilbert_url: http://here:1" in settings


def test_alertmanager_tells_the_webhook_of_a_cause_and_not_of_what_follows_from_it(tmp_path):
    program, port, hook = needs("prometheus-alertmanager"), free_port(), free_port()
    text = (
        ALERTMANAGER.read_text()
        .replace("webhook:5001", f"127.0.0.1:{hook}")
        .replace("group_wait: 5s", "group_wait: 1s")
    )
    (tmp_path / "alertmanager.yml").write_text(text)
    where = [f"--config.file={tmp_path}/alertmanager.yml", f"--storage.path={tmp_path}/data"]
    listen = [f"--web.listen-address=127.0.0.1:{port}", "--cluster.listen-address="]
    alerts = [
        {"alertname": "RunFailed", "run": "a", "severity": "critical"},
        {"alertname": "RunStalled", "run": "a", "severity": "critical"},
        {"alertname": "MonitorFailing", "run": "a", "severity": "warning", "status": "killed"},
        {"alertname": "RunUnreachable", "run": "c", "severity": "critical"},
        {"alertname": "RunStalled", "run": "c", "severity": "critical"},
        {"alertname": "RunKilled", "run": "d", "severity": "critical"},
        {"alertname": "RunUnreachable", "run": "d", "severity": "critical"},
        {"alertname": "RunStalled", "run": "d", "severity": "critical"},
        {"alertname": "StepDiameterBlowUp", "run": "a", "severity": "warning", "kind": "x"},
        {"alertname": "StepDiameterBlowUp", "run": "a", "severity": "critical"},
        {"alertname": "RunStalled", "run": "b", "severity": "critical"},
    ]
    body = json.dumps([{"labels": labels, "annotations": {"summary": "two\nlines"}} for labels in alerts]).encode()
    with running(sys.executable, DOCKER / "webhook.py", hook) as webhook, running(program, *where, *listen):
        wait_for(lambda: ask(f"http://127.0.0.1:{hook}/")[0] == 200, "the webhook")
        assert ask(f"http://127.0.0.1:{hook}/", data=b"{}")[0] == 400
        wait_for(lambda: ask(f"http://127.0.0.1:{port}/-/ready")[0] == 200, "Alertmanager")
        assert ask(f"http://127.0.0.1:{port}/api/v2/alerts", data=body)[0] == 200
        told = [json.loads(webhook.stdout.readline()) for _ in range(6)]
        time.sleep(2)
        webhook.kill()
        assert webhook.stdout.read() == ""
    said = sorted((one["alertname"], one["run"], one["severity"]) for one in told)
    assert said == [
        ("MonitorFailing", "a", "warning"),
        ("RunFailed", "a", "critical"),
        ("RunKilled", "d", "critical"),
        ("RunStalled", "b", "critical"),
        ("RunUnreachable", "c", "critical"),
        ("StepDiameterBlowUp", "a", "critical"),
    ]
    assert {(one["status"], one["summary"]) for one in told} == {("firing", "two\nlines")}
    assert [one["labels"]["status"] for one in told if "status" in one["labels"]] == ["killed"]


# Kubernetes


def test_the_rules_for_kubernetes_are_the_rules():
    made = list(yaml.safe_load_all(run("sh", KUBERNETES / "rules.sh", check=True).stdout))
    files = sorted((PROMETHEUS.parent / "rules").glob("*.yml"))
    assert [one["spec"] for one in made] == [yaml.safe_load(file.read_text()) for file in files]
    assert all(re.fullmatch(r"[a-z0-9-]+", one["metadata"]["name"]) for one in made)


def test_what_kubernetes_runs_fits_together():
    deployment, service, monitor = yaml.safe_load_all((KUBERNETES / "service.yml").read_text())
    pod = deployment["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    labels = pod["metadata"]["labels"].items()
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels
    assert service["spec"]["selector"].items() <= labels
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert container["image"] == SERVICES["service"]["image"]
    assert str(container["ports"][0]["containerPort"]) == last(DOCKER / "Dockerfile", "EXPOSE")
    assert container["ports"][0]["name"] == service["spec"]["ports"][0]["targetPort"]
    assert monitor["spec"]["endpoints"][0]["port"] == service["spec"]["ports"][0]["name"]
    assert container["env"][0]["name"] in SERVICES["service"]["environment"]
    secret = {key: container["env"][0]["valueFrom"]["secretKeyRef"][key] for key in ("name", "key")}
    assert monitor["spec"]["endpoints"][0]["authorization"]["credentials"] == secret


def test_kubernetes_has_the_jobs_that_prometheus_has_elsewhere():
    jobs = {job["job_name"] for job in yaml.safe_load(PROMETHEUS.read_text())["scrape_configs"]}
    (pods,) = yaml.safe_load_all((KUBERNETES / "podmonitor.yml").read_text())
    *_, services = yaml.safe_load_all((KUBERNETES / "service.yml").read_text())
    assert pods["spec"]["namespaceSelector"] == {"any": True}  # training pods are mostly in another namespace
    ends = pods["spec"]["podMetricsEndpoints"] + services["spec"]["endpoints"]
    assert {end["relabelings"][0]["replacement"] for end in ends} == jobs

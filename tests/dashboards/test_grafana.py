"""Grafana's dashboards: up to date, clean by the linter's rules, and each query full on a Prometheus that scraped runs.

Grafana does not run here. What it would do to a query, filling in variables, is done by `filled`.
"""

import copy
import json
import math
import re
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
import yaml

from hilbert_monitor.runs.exposition import FAMILIES
from hilbert_monitor.runs.reader import STATUSES
from hilbert_monitor.runs.record import METRICS
from hilbert_monitor.service.figures.style import COLOURS
from tests.support.grafana_rules import RULES, panels, query_variables, targets
from tests.support.ports import free_port
from tests.support.programs import needs
from tests.support.warm import Program

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "dashboards" / "grafana"
BOARDS = {name: json.loads((FOLDER / f"{name}.json").read_text()) for name in ("compare", "run")}


def expressions(board):
    return [target["expr"] for _, target in targets(board)] + [a["expr"] for a in board["annotations"]["list"]]


both = pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)


# The files


def test_the_files_are_what_the_generator_writes():
    made = subprocess.run([sys.executable, FOLDER / "generate.py", "--check"], capture_output=True, text=True)
    assert made.returncode == 0, made.stdout + made.stderr


def test_check_says_which_file_is_stale_and_leaves_it(tmp_path):
    copied = shutil.copytree(FOLDER, tmp_path / "grafana")
    (copied / "run.json").write_text("{}")
    made = subprocess.run([sys.executable, copied / "generate.py", "--check"], capture_output=True, text=True)
    assert (made.returncode, made.stdout) == (1, "not up to date: run.json\n")
    assert (copied / "run.json").read_text() == "{}"


def test_a_metric_that_the_catalogue_does_not_have_is_an_error(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    from panels import Scope

    with pytest.raises(LookupError, match="no metric 'hilbert_step_temperature'"):
        Scope(runs='run="$run"').now("step_temperature")


def test_every_metric_of_the_catalogue_is_shown_somewhere():
    shown = {name for board in BOARDS.values() for e in expressions(board) for name in re.findall(r"hilbert_\w+", e)}
    wanted = {m.exported for m in METRICS if m.panel is not None} | {f.exported for f in FAMILIES}
    assert {name.removesuffix("_bucket") for name in shown} == wanted


@both
def test_what_is_said_of_a_metric_is_what_the_catalogue_says(board):
    helps = {entry.exported: entry.help for entry in (*METRICS, *FAMILIES)}
    for panel in panels(board):
        if panel["title"] != "Validation panels":  # counts labels of the run's info, which says nothing of them
            first = re.search(r"hilbert_\w+", panel["targets"][0]["expr"])[0].removesuffix("_bucket")
            told = [text for text in helps.values() if text in panel["description"]]
            assert helps[first] in told or panel["title"] == "State", panel["title"]


@both
def test_a_dashboard_keeps_its_address_and_refreshes(board):
    assert board["uid"] in ("hilbert-compare", "hilbert-run")
    assert (board["refresh"], board["time"]["from"], board["schemaVersion"]) == ("10s", "now-6h", 39)
    assert "id" not in board
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


@both
def test_panels_do_not_overlap(board):
    taken = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {(x + place["x"], y + place["y"]) for x in range(place["w"]) for y in range(place["h"])}
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_links_lead_to_dashboards_and_variables_that_exist():
    known = {board["uid"]: {v["name"] for v in board["templating"]["list"]} for board in BOARDS.values()}
    for board in BOARDS.values():
        here = {v["name"] for v in board["templating"]["list"]}
        links = re.findall(r'/d/([\w-]+)\?([^"]*)', json.dumps(board))
        assert links
        for uid, rest in links:
            assert set(re.findall(r"var-(\w+)=", rest)) <= known[uid]
            assert set(re.findall(r"\$\{(\w+):queryparam\}", rest)) <= known[uid] & here
    compare = [link for p in panels(BOARDS["compare"]) for link in p["fieldConfig"]["defaults"].get("links", [])]
    assert any("/d/hilbert-run?" in link["url"] and "var-run=" in link["url"] for link in compare)


@both
def test_links_lead_to_the_service_and_to_runbooks_that_exist(board):
    (service,) = [variable for variable in board["templating"]["list"] if variable["name"] == "service"]
    assert service["query"] == "http://localhost:8000"
    assert any(link["url"].startswith("${service}/") for link in board["links"])
    books = {path.stem for path in (ROOT / "dashboards" / "runbooks").glob("*.md")}
    shown = {
        link["url"].removeprefix("${service}/runbooks/"): panel["title"]
        for panel in panels(board)
        for link in panel.get("links", ())
    }
    assert {*shown} <= books
    assert {"StepDiameterBlowUp", "HilbertPerturbationBlowUp"} <= {*shown}
    if board["uid"] == "hilbert-run":
        assert books - {*shown} == {"RunFailed", "RunUnreachable", "MonitorServiceDown"}  # about no panel


def test_every_state_of_a_run_has_its_colour():
    (panel,) = [p for p in panels(BOARDS["run"]) if p["title"] == "State over time"]
    assert [look["matcher"]["options"] for look in panel["fieldConfig"]["overrides"]] == [*STATUSES]


@both
def test_an_override_is_for_a_series_that_there_is(board):
    for panel in panels(board):
        organized = [t["options"]["renameByName"] for t in panel.get("transformations", []) if t["id"] == "organize"]
        legends = [re.sub(r"\\\{\\\{\w+\\\}\\\}", ".+", re.escape(t["legendFormat"])) for t in panel["targets"]]
        names = [*legends, *(re.escape(title) for columns in organized for title in columns.values())]
        for look in panel["fieldConfig"]["overrides"]:
            wanted = [p["value"] for p in look["properties"] if p["id"] == "custom.fillBelowTo"]
            if look["matcher"]["id"] == "byName":
                wanted.append(look["matcher"]["options"])
            for name in wanted:
                assert any(re.fullmatch(pattern, name) for pattern in names), (panel["title"], name)


def test_heads_have_their_colours_wherever_runs_are_compared():
    for title in ("Validation loss", "Training loss", "D(S)", "Hilbert RMS"):
        (panel,) = [p for p in panels(BOARDS["compare"]) if p["title"] == title]
        for head, colour in COLOURS.items():
            (look,) = [o for o in panel["fieldConfig"]["overrides"] if head in o["matcher"]["options"]]
            assert re.search(look["matcher"]["options"].strip("/"), f"{head} some-run")
            assert look["properties"] == [{"id": "color", "value": {"mode": "shades", "fixedColor": colour}}]


def test_what_spans_decades_has_a_logarithmic_axis():
    logarithmic = {m.exported for m in METRICS if m.log}
    for board in BOARDS.values():
        for panel in panels(board):
            if panel["type"] == "timeseries" and " / " not in panel["title"]:
                names = set(re.findall(r"hilbert_\w+", panel["targets"][0]["expr"]))
                scale = panel["fieldConfig"]["defaults"]["custom"]["scaleDistribution"]["type"]
                assert (scale == "log") == bool(names & logarithmic), panel["title"]


def test_provisioning_needs_no_clicks():
    source = yaml.safe_load((FOLDER / "provisioning/datasources/prometheus.yml").read_text())["datasources"][0]
    assert (source["type"], source["isDefault"]) == ("prometheus", True)
    assert source["uid"] not in json.dumps(BOARDS)
    scraping = yaml.safe_load((ROOT / "dashboards/prometheus/prometheus.yml").read_text())
    assert source["jsonData"]["timeInterval"] == scraping["global"]["scrape_interval"]
    provider = yaml.safe_load((FOLDER / "provisioning/dashboards/hilbert.yml").read_text())["providers"][0]
    assert (provider["type"], provider["options"]["path"]) == ("file", "/var/lib/grafana/dashboards")


# The rules of Grafana's dashboard-linter

EXCLUDED = yaml.safe_load((FOLDER / ".lint").read_text())["exclusions"]


def is_excluded(rule, board, title):
    excluded = EXCLUDED.get(rule)
    entries = excluded.get("entries", [{}]) if excluded else []
    return any(e.get("dashboard", board["title"]) == board["title"] and e.get("panel", title) == title for e in entries)


@both
@pytest.mark.parametrize("rule", RULES)
def test_the_linter_has_nothing_against_it(rule, board):
    found = [(title, text) for title, text in RULES[rule](board) if not is_excluded(rule, board, title)]
    assert not found


def test_every_exclusion_has_a_reason_and_is_needed():
    for rule, excluded in EXCLUDED.items():
        assert excluded["reason"]
        for entry in excluded.get("entries", [{}]):
            found = [(b["title"], title) for b in BOARDS.values() for title, _ in RULES[rule](b)]
            assert any(entry.get("dashboard", b) == b and entry.get("panel", t) == t for b, t in found), (rule, entry)


BREAKS = {
    "template-datasource-rule": lambda b: b["templating"]["list"].pop(0),
    "template-job-rule": lambda b: query_variables(b)["job"].update(multi=False),
    "template-label-promql-rule": lambda b: query_variables(b)["job"].update(query="label_value(up, job)"),
    "template-on-time-change-reload-rule": lambda b: query_variables(b)["run"].update(refresh=1),
    "panel-datasource-rule": lambda b: panels(b)[0].update(datasource={"type": "prometheus", "uid": "mine"}),
    "panel-title-description-rule": lambda b: panels(b)[0].update(description=""),
    "panel-units-rule": lambda b: panels(b)[0]["fieldConfig"]["defaults"].pop("unit"),
    "panel-no-targets-rule": lambda b: panels(b)[0].update(targets=[]),
    "target-promql-rule": lambda b: panels(b)[0]["targets"][0].update(expr=" "),
    "target-rate-interval-rule": lambda b: panels(b)[0]["targets"][0].update(expr="rate(hilbert_steps_total[5m])"),
    "target-job-rule": lambda b: panels(b)[0]["targets"][0].update(expr='hilbert_step{run="$run"}'),
    "target-counter-agg-rule": lambda b: panels(b)[0]["targets"][0].update(expr="hilbert_steps_total{}"),
    "uneditable-dashboard": lambda b: b.update(editable=True),
}


@pytest.mark.sweep
@pytest.mark.parametrize("rule", BREAKS)
def test_a_rule_finds_what_it_is_for(rule):
    board = copy.deepcopy(BOARDS["run"])
    before = len([*RULES[rule](board)])
    BREAKS[rule](board)
    assert len([*RULES[rule](board)]) > before


@pytest.mark.sweep
def test_every_rule_that_is_not_excluded_altogether_was_seen_to_find_something():
    assert {*BREAKS} == {rule for rule in RULES if "entries" in EXCLUDED.get(rule, {"entries": ()})}


# On a real Prometheus that scrapes real runs

HEADS = ("AdamW", "RowNorm", "RMSprop")
STEPS, FAULT = 60, 40
JOBS = ("hilbert-runs", "hilbert-service")
"""Both scrape the same runs, as a service does that another Prometheus's targets are known to."""
PLAIN = {
    "hilbert_attention_logit_max": "its model has no attention",
    "hilbert_change_diameter": "its weight decay is known",
}
FP32 = PLAIN | dict.fromkeys(
    ("hilbert_stored_diameter", "hilbert_moved_share", "hilbert_precision_loss_rms"), "its head is in fp32"
)
FREE = dict.fromkeys(
    ("hilbert_trust_limit", "hilbert_made_diameter", "hilbert_held_share"), "no trust region holds its steps"
)
LACKS = {
    "AdamW": {"hilbert_step_diameter_rounding": "its increments are formed from its state", **FP32},
    "RowNorm": {"hilbert_step_diameter_rounding": "it says itself what its increments are", **FP32, **FREE},
    "RMSprop": {
        "hilbert_step_diameter_ceiling": "there is no theorem for it",
        "hilbert_step_diameter_saturation": "it has no ceiling",
        "hilbert_moment_efficiency_lower": "it keeps no average of its gradients",
        "hilbert_moment_efficiency_upper": "it keeps no average of its gradients",
        "hilbert_layer_ratio_max": "it keeps no average of its gradients",
        **PLAIN,
        **FREE,
    },
}


def train(folder, ports, address):
    """Train a run for each head, the next inside the last step of the one before, so that all of them stay: run in a
    process of its own, and never ends. Before its fault each waits until the Prometheus at the address knows it."""
    import lightning
    import torch
    from torch.utils.data import DataLoader

    from hilbert_monitor import HilbertMonitor, TrustRegion
    from tests.support.training import Module, Text

    class Broken:
        def write(self, record):
            if record.step > FAULT:
                raise OSError("disk full")

    class Own(Module):
        """The head of RMSprop is in bf16, so that what it stores is measured too."""

        def __init__(self, make):
            super().__init__(make)
            self.model.lm_head.to(torch.bfloat16 if make == "rmsprop" else torch.float32)

        def forward(self, tokens):
            head = self.model.lm_head
            return head(self.dropout(self.model.hidden(tokens)).to(head.weight.dtype))

        def configure_optimizers(self):
            if self.make == "rmsprop":
                return torch.optim.RMSprop(self.parameters(), lr=1e-3)
            return super().configure_optimizers()

    class Course(lightning.Callback):
        """A learning rate that is twenty times too high for a step, and what comes after the last."""

        def __init__(self, name, then):
            self.name, self.then = name, then

        def on_train_batch_start(self, trainer, module, batch, index):
            if trainer.global_step == FAULT:
                self.wait_for_a_scrape()
            for group in trainer.optimizers[0].param_groups:
                group["lr"] *= {FAULT: 20.0, FAULT + 1: 1 / 20}.get(trainer.global_step, 1.0)

        def on_train_batch_end(self, trainer, module, outputs, batch, index):
            time.sleep(0.01)
            if trainer.global_step == STEPS:
                self.then()

        def wait_for_a_scrape(self):
            known, deadline = f'count(hilbert_step{{run="{self.name}"}})', time.time() + 120
            while Prometheus(address, 0, time.time()).instant(known).get(()) != len(JOBS):
                assert time.time() < deadline, f"no scrape of {self.name}"
                time.sleep(0.1)

    def fit(heads, ports):
        if not heads:
            time.sleep(3600)
        monitor = HilbertMonitor(
            diameter_every=1,
            perturbation_every=20,
            panel_size=50,
            run_dir=folder,
            run_name=f"{heads[0]} 1",
            sinks=[Broken()],
            efficiency=True,
            layers=True,
            prometheus=ports[0],
        )
        regions = [TrustRegion(limit=0.05)] if heads[0] == "AdamW" else []
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_steps=STEPS + 1,
            max_epochs=-1,
            val_check_interval=6,
            limit_val_batches=2,
            callbacks=[monitor, *regions, Course(f"{heads[0]}-1", lambda: fit(heads[1:], ports[1:]))],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
        )
        data = DataLoader(Text(0), batch_size=4, shuffle=True, drop_last=True)
        trainer.fit(Own(heads[0].lower()), data, DataLoader(Text(1), batch_size=4))

    fit(HEADS, ports)


@contextmanager
def running(command, log, **options):
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, **options)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@dataclass
class Prometheus:
    address: str
    begin: float
    end: float = 0.0

    def ask(self, path, **parameters):
        with urlopen(f"{self.address}/api/v1/{path}?{urlencode(parameters, doseq=True)}", timeout=60) as answer:
            return json.load(answer)["data"]

    def instant(self, expr):
        found = self.ask("query", query=expr, time=self.end)["result"]
        return {tuple(sorted(s["metric"].items())): float(s["value"][1]) for s in found}

    def drawn(self, expr):
        found = self.ask("query_range", query=expr, start=self.begin, end=self.end, step="500ms")["result"]
        return [float(value) for series in found for _, value in series["values"]]

    def values(self, variable, chosen):
        """What a variable can be, given those before it."""
        matched = re.fullmatch(r"label_values\((.*), (\w+)\)", filled(variable["query"], chosen))
        return self.ask(f"label/{matched[2]}/values", **{"match[]": matched[1]})


def settled_until():
    """No scrape of before is still under way, whose end in vain would be told at its beginning."""
    return time.time() - 2


def filled(expr, chosen):
    """A query as Grafana would send it. `All` of a variable is its allValue."""
    for name, value in {"__rate_interval": "3s", "__range": "10m", **chosen}.items():
        expr = expr.replace(f"${name}", value)
    assert "$" not in expr
    return expr


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory):
    program, folder = needs("prometheus"), tmp_path_factory.mktemp("grafana")
    *ports, own = (free_port() for _ in range(len(HEADS) + 1))
    target = {"static_configs": [{"targets": [f"127.0.0.1:{port}" for port in ports]}]}
    config = {
        "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms"},
        "scrape_configs": [{"job_name": job, **target} for job in JOBS],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    served = [program, "--config.file", folder / "prometheus.yml", "--storage.tsdb.path", folder / "data"]
    found = Prometheus(f"http://127.0.0.1:{own}", time.time())
    arguments = str(folder / "runs"), ports, found.address
    code = f"from tests.dashboards.test_grafana import train; train(*{arguments!r})"
    with (
        running([*served, "--web.listen-address", f"127.0.0.1:{own}"], folder / "prometheus.log"),
        ExitStack() as stack,
    ):
        trained = Program("-c", code)
        stack.callback(trained.kill)
        done = f"count(hilbert_step == {STEPS})"

        def all_there():
            found.end = settled_until()
            with suppress(OSError):
                return found.instant(done).get(()) == len(HEADS) * len(JOBS)

        for _ in range(1500):
            time.sleep(0.2)
            assert trained.process.is_alive(), trained.output
            if all_there():
                time.sleep(1)
                if all_there():  # also then: on a busy machine a scrape may come too late
                    break
        else:
            pytest.fail(trained.output + (folder / "prometheus.log").read_text())
        yield found


EVERY = {"job": ".+", "head": ".+", "run": ".+"}


def choices(name):
    """The values of the variables that a dashboard is looked at with, and what is missing then."""
    return [({**EVERY, "run": f"{head}-1"}, LACKS[head]) for head in HEADS] if name == "run" else [(EVERY, {})]


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("name", "panel"),
    [pytest.param(n, p, id=f"{n}: {p['title']}") for n, b in BOARDS.items() for p in panels(b)],
)
def test_every_query_of_a_panel_finds_something(prometheus, name, panel):
    for chosen, lacks in choices(name):
        for target in panel["targets"]:
            expr = filled(target["expr"], chosen)
            found = [*prometheus.instant(expr).values()] if target["instant"] else prometheus.drawn(expr)
            missing = any(f"{metric}{{" in expr for metric in lacks)
            assert any(math.isfinite(value) for value in found) != missing, expr


@both
def test_variables_have_values_and_all_of_them_by_default(prometheus, board):
    found = {name: prometheus.values(variable, EVERY) for name, variable in query_variables(board).items()}
    assert found == {"job": [*JOBS], "head": sorted(HEADS), "run": sorted(f"{head}-1" for head in HEADS)}
    chosen = {"job": "(hilbert-runs|hilbert-service)", "head": "(RowNorm)"}
    assert prometheus.values(query_variables(board)["run"], chosen) == ["RowNorm-1"]


@pytest.mark.parametrize("name", BOARDS)
def test_blow_ups_are_marked_where_they_were(prometheus, name):
    (marks,) = BOARDS[name]["annotations"]["list"]
    patient = {"__rate_interval": "10s"}  # on a busy machine scrapes may be missing for seconds
    for chosen, _ in choices(name):
        assert prometheus.drawn(filled(marks["expr"], chosen | patient))
    assert len(prometheus.drawn(filled(marks["expr"], EVERY | patient))) < len(prometheus.drawn("hilbert_step"))


@pytest.mark.sweep
@pytest.mark.parametrize("name", BOARDS)
def test_a_run_that_two_jobs_scrape_is_not_doubled(prometheus, name):
    settled = replace(prometheus, end=prometheus.end + 4)  # nothing has changed since the last scrapes of both
    while settled_until() < settled.end or settled.instant("min(min_over_time(up[4s]))").get(()) != 1:
        time.sleep(0.2)
        settled.end = max(settled.end, settled_until())
    for chosen, _ in choices(name):
        for panel, target in targets(BOARDS[name]):
            one, two = (
                settled.instant(filled(target["expr"], {**chosen, "job": jobs})) for jobs in (JOBS[0], "|".join(JOBS))
            )
            assert one == pytest.approx(two, rel=1e-6, nan_ok=True), panel["title"]


def test_the_ratio_is_that_of_the_two_heads(prometheus):
    for title, metric in (("D(S)", "hilbert_step_diameter"), ("Hilbert RMS", "hilbert_perturbation_rms")):
        (panel,) = [p for p in panels(BOARDS["compare"]) if p["title"] == f"{title}, AdamW / RowNorm"]
        (ratio,) = prometheus.instant(filled(panel["targets"][0]["expr"], EVERY)).values()
        above, below = (
            prometheus.instant(f'{metric}{{head="{head}", job="{JOBS[0]}"}}').popitem()[1] for head in HEADS[:2]
        )
        assert ratio == pytest.approx(above / below)


def test_the_table_has_each_run_once_with_its_state(prometheus):
    (panel,) = [p for p in panels(BOARDS["compare"]) if p["title"] == "Runs"]
    for target in panel["targets"]:
        found = [dict(labels) for labels in prometheus.instant(filled(target["expr"], EVERY))]
        assert sorted(labels["run"] for labels in found) == sorted(f"{head}-1" for head in HEADS)
        assert {labels.get("status", "running") for labels in found} == {"running"}


# What no run of a few seconds shows: promtool knows of other times


def judged(tmp_path, expr, series, expected):
    """Whether a query gives what is expected, an hour after series of one value a minute began."""
    case = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": filled(expr, {**EVERY, "__range": "6h"}),
                "eval_time": "1h",
                "exp_samples": [{"labels": labels, "value": value} for labels, value in expected.items()],
            }
        ],
    }
    (tmp_path / "case.yml").write_text(yaml.safe_dump({"rule_files": [], "tests": [case]}))
    told = subprocess.run(
        [needs("promtool"), "test", "rules", "case.yml"], cwd=tmp_path, capture_output=True, text=True
    )
    assert told.returncode == 0, told.stdout + told.stderr


def column(title, index):
    (panel,) = [p for p in panels(BOARDS["compare"]) if p["title"] == title]
    return panel["targets"][index]["expr"]


def test_the_state_of_a_run_is_that_of_its_last_attempt_also_when_it_has_ended(tmp_path):
    def attempt(instance, began, running, failed, finished):
        labels = f'job="hilbert-runs",instance="{instance}",run="a",head="AdamW"'
        return {
            f"hilbert_run_start_timestamp_seconds{{{labels}}}": began,
            f'hilbert_run_status{{{labels},status="running"}}': running,
            f'hilbert_run_status{{{labels},status="failed"}}': failed,
            f'hilbert_run_status{{{labels},status="finished"}}': finished,
        }

    first = attempt("one:1", "5x9 stale", "1x8 0 stale", "0x8 1 stale", "0x9 stale")
    second = attempt("two:2", "_x20 9x9 stale", "_x20 1x8 0 stale", "_x20 0x9 stale", "_x20 0x8 1 stale")
    ended = {'{head="AdamW", run="a", status="finished"}': 9000}
    judged(tmp_path, column("Runs", 1), first | second, ended)
    judged(tmp_path, column("Runs", 1), first, {'{head="AdamW", run="a", status="failed"}': 5000})


def test_the_ratio_is_there_for_runs_that_were_trained_one_after_the_other(tmp_path):
    series = {
        'hilbert_step_diameter{job="hilbert-runs",run="a",head="AdamW"}': "9 8 6 stale",
        'hilbert_step_diameter{job="hilbert-runs",run="b",head="AdamW"}': "9 8 2 stale",
        'hilbert_step_diameter{job="hilbert-runs",run="c",head="RowNorm"}': "_x20 3 2 stale",
    }
    judged(tmp_path, column("D(S), AdamW / RowNorm", 0), series, {"{}": 2})

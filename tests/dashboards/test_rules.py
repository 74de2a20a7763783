"""Prometheus rules: valid, tested by promtool, true to the catalogue, each alert with its runbook."""

import functools
import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from hilbert_monitor.runs.alerts import KINDS
from hilbert_monitor.runs.exposition import FAMILIES
from hilbert_monitor.runs.reader import STALLED_AFTER, STATUSES
from hilbert_monitor.runs.record import METRICS
from tests.support.programs import needs

DASHBOARDS = Path(__file__).parents[2] / "dashboards"
PROMETHEUS, RUNBOOKS = DASHBOARDS / "prometheus", DASHBOARDS / "runbooks"
RULES = PROMETHEUS / "rules" / "hilbert.yml"
TESTS = sorted((PROMETHEUS / "tests").glob("*.yml"))
ALERTS = {
    "StepDiameterBlowUp",
    "StepDiameterAboveCeiling",
    "LearningRateJump",
    "HilbertPerturbationBlowUp",
    "LogitPrecisionLoss",
    "LayerBlowUp",
    "IncrementNotFinite",
    "RunStalled",
    "RunKilled",
    "RunFailed",
    "RunUnreachable",
    "MonitorServiceDown",
    "MonitorOverheadHigh",
    "MonitorFailing",
}
HEADINGS = ["Meaning", "Impact", "Diagnosis", "Mitigation"]


parsed = functools.cache(yaml.safe_load)
"""What a text says in YAML, read once."""


def promtool(*arguments):
    return subprocess.run([needs("promtool"), *map(str, arguments)], capture_output=True, text=True, timeout=600)


def rules(kind):
    return [rule for group in parsed(RULES.read_text())["groups"] for rule in group["rules"] if kind in rule]


def cases():
    """All cases of the promtool tests: what is asked, and the alerts that are expected."""
    for path in TESTS:
        for test in parsed(path.read_text())["tests"]:
            for case in test["alert_rule_test"]:
                yield case["alertname"], case.get("exp_alerts") or []


def expressions():
    """Everything in PromQL: of rules, and what annotations and runbooks ask."""
    for rule in [*rules("record"), *rules("alert")]:
        yield rule["expr"]
        yield from rule.get("annotations", {}).values()
    yield from queries()


def queries():
    """What the runbooks ask."""
    for path in sorted(RUNBOOKS.glob("*.md")):
        yield from re.findall(r"```promql\n(.*?)```", path.read_text(), re.S)


# What they name


def test_states_and_kinds_that_are_named_exist():
    for label, known in (("status", STATUSES), ("kind", KINDS)):
        texts = [*expressions(), *(path.read_text() for path in TESTS)]
        named = [names for text in texts for names in re.findall(rf'\b{label}=~?\\?"([\w|]+)', text)]
        assert named
        assert {name for names in named for name in names.split("|")} <= {*known}


def test_the_runbook_knows_the_patience_of_a_run():
    text = (RUNBOOKS / "RunStalled.md").read_text()
    assert f"({STALLED_AFTER:g} s)" in text


# promtool


def test_promtool_finds_no_fault_in_the_rules():
    done = promtool("check", "rules", "--lint=all", "--lint-fatal", RULES)
    assert done.returncode == 0, done.stdout + done.stderr


def test_vmalert_loads_the_rules():
    done = subprocess.run([needs("vmalert"), "-dryRun", f"-rule={RULES}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.few("blowups", "monitor")
@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.stem)
def test_promtool_passes(path, tmp_path):
    about = parsed(path.read_text())
    assert about["rule_files"] == ["../rules/hilbert.yml"]
    asked = {case["alertname"] for test in about["tests"] for case in test["alert_rule_test"]}
    groups = [group for group in parsed(RULES.read_text())["groups"] if asked & alerts_of(group)]
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": groups}))
    (tmp_path / "test.yml").write_text(json.dumps(about | {"rule_files": ["rules.yml"]}))
    done = promtool("test", "rules", tmp_path / "test.yml")
    assert done.returncode == 0, done.stdout + done.stderr


def alerts_of(group):
    return {rule["alert"] for rule in group["rules"] if "alert" in rule}


def test_a_group_reads_what_it_records_itself():
    """So that no group is needed to judge another's alerts."""
    for group in parsed(RULES.read_text())["groups"]:
        recorded = {rule["record"] for rule in group["rules"] if "record" in rule}
        asked = re.findall(r"\brun:hilbert_\w+:\w+", " ".join(rule["expr"] for rule in group["rules"]))
        assert {*asked} <= recorded, group["name"]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("test", "old", "new"),
    [
        (
            "a verdict fires",
            'kind="diameter",severity="page"}[10m]) > 0',
            'kind="diameter",severity="page"}[10m]) > 1e9',
        ),
        ("a verdict fires", 'kind="diameter",severity="page"}[10m])', 'kind="diameter",severity="page"}[1m])'),
        (
            "a scrape gap",
            "stdvar_over_time(hilbert_blowups_total[5m]) > 0",
            "stdvar_over_time(hilbert_blowups_total[5m]) >= 9",
        ),
        (
            "a verdict fires",
            "max by (run, head, kind, severity) (\n                increase",
            "sum without (job) (\n                increase",
        ),
        ("resumed twice", '_info{attempt="1"}', "_info"),
        ("a blow-up before", "_start_timestamp_seconds) < 300", "_start_timestamp_seconds) < 0"),
        (
            "above the ceiling",
            'kind="ceiling",severity="page"}[10m]) > 0',
            'kind="ceiling",severity="page"}[10m]) > 1e9',
        ),
        ("a learning rate that jumps", 'kind="rate",severity="page"', 'kind="rate",severity="notice"'),
        ("a verdict fires", 'kind="diameter",severity="notice"', 'kind="diameter"'),
        ("a learning rate that jumps", 'kind="diameter",severity="page"}[10m]) > 0', 'kind="diameter"}[10m]) > 0'),
        (
            "the perturbation",
            'kind="perturbation",severity="notice"}[10m]) > 0',
            'kind="perturbation",severity="notice"}[10m]) > 1e9',
        ),
        ("a nan, between", "(max_over_time(hilbert_nonfinite_rows[10m])) > 0", "(hilbert_nonfinite_rows) > 1e9"),
        ("a nan, between", "(max_over_time(hilbert_nonfinite_rows[10m])) > 0", "(hilbert_nonfinite_rows) >= 0"),
        ("a process that answers", "[6h]", "[1h]"),
        ("a run that finished", "finished|stopped|failed", "stopped|failed"),
        ("a run that finished", "finished|stopped|failed", "finished|failed"),
        ("a run that failed", "finished|stopped|failed", "finished|stopped"),
        ("a run that finished", "for: 1m", "for: 0s"),
        (
            "a process that answers",
            "seen > on (run, head) run:hilbert_stalled",
            "seen > on (run, head) 0 * run:hilbert_stalled",
        ),
        (
            "a process that answers",
            "seen > on (run, head) run:hilbert_stalled",
            "seen > on (run, head) 100 * run:hilbert_stalled",
        ),
        ("a run that failed", ":ended6h)\n            >= on", ":ended6h)\n            >= bool on"),
        ("a run that failed", "< 3600", "< 36000"),
        ("the service tells", "finished|stopped|failed|killed", "finished|stopped|failed"),
        ("the service tells", "for: 30s", "for: 0s"),
        ("the service tells", 'unless on (run)\n            up{job="hilbert-runs", run!=""}', ""),
        ("the service tells", 'ended6h{status!="killed"}', "ended6h"),
        ("a service that is away", "[6h:1m]", "[5m:1m]"),
        ("a service that is away", "up == 1\n              )", "up\n              )"),
        ("a service that is away", "up == 1\n              )", "up == 2\n              )"),
        ("a service that is away", 'alertstate="firing"}[5m]', 'alertstate="firing"}[1m]'),
        ("a service that is away", 'alertstate="firing"}[5m]', 'alertstate="firing"}[1h]'),
        ("the service tells", 'timestamp_seconds{job!="hilbert-service"}', "timestamp_seconds"),
        (
            "a service that has left",
            'max by (job) (last_over_time(up{job="hilbert-service"}[6h])) >= 0',
            'max by (job) (up{job="hilbert-service"}) >= 0',
        ),
        ("a service that has left", "ALERTS{", "ALERTS_FOR_STATE{"),
        ("without a service", "for: 3m", "for: 30s"),
        ("without a service", "topk by", "bottomk by"),
        ("without a service", 'run=""}) == 0\n                )', 'run=""}) == 2\n                )'),
        ("without a service", 'up{job="hilbert-runs"} offset 6h', 'up{job="hilbert-runs"} offset 12h'),
        ("without a service", 'up{job="hilbert-runs"} offset 6h', 'up{job="hilbert-runs"}'),
        ("without a service", "or vector(-Inf)", ""),
        ("measuring is dear", "rate15m > 0.05", "rate15m > 0.02"),
        ("measuring is dear", "rate15m > 0.05", "rate15m > 0.08"),
        ("measuring is dear", "for: 15m", "for: 5m"),
        ("measuring is dear", "max by (run, head) (sum without (part)", "sum by (run, head) (sum without (part)"),
        (
            "a sink that fails",
            "sink) (hilbert_monitor_failures_total) > 0",
            "sink) (hilbert_monitor_failures_total) > 9",
        ),
        ("a sink that fails", "[1h] offset 15m", "[15m]"),
    ],
)
def test_a_rule_that_is_wrong_fails_its_test(tmp_path, test, old, new):
    assert old in RULES.read_text()
    done = tried(tmp_path, test, RULES.read_text().replace(old, new))
    assert done.returncode == 1
    assert "alertname: " in done.stdout + done.stderr  # an alert was not as expected: the rules themselves are valid


def tried(folder, name, text):
    """Run the one test of this name on a text of the rules."""
    for path in TESTS:
        found = [test for test in parsed(path.read_text())["tests"] if test["name"].startswith(name)]
        if found:
            about = {"rule_files": ["rules.yml"], "evaluation_interval": "30s", "tests": found}
            (folder / "rules.yml").write_text(json.dumps({"groups": with_name(text, path.stem)}))
            (folder / "test.yml").write_text(json.dumps(about))
            return promtool("test", "rules", folder / "test.yml")
    raise AssertionError(f"no test begins with {name!r}")


def with_name(text, name):
    return [group for group in parsed(text)["groups"] if group["name"] == f"hilbert-{name}"]


# What belongs together


def test_the_alerts_are_those_that_the_documents_promise():
    assert {rule["alert"] for rule in rules("alert")} == ALERTS


@pytest.mark.parametrize("rule", rules("alert"), ids=lambda rule: rule["alert"])
def test_an_alert_says_what_whom_to_ask_and_where_to_look(rule):
    notes, name = rule["annotations"], rule["alert"]
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    assert set(notes) == {"summary", "description", "dashboard", "runbook_url"}
    assert notes["runbook_url"] == "{{ $externalLabels.hilbert_url }}/runbooks/" + name
    assert (RUNBOOKS / f"{name}.md").is_file()
    assert "expected" in notes["description"]
    if name == "MonitorServiceDown":  # it is about no run, and there is nobody to show its runbook
        assert f"dashboards/runbooks/{name}.md" in notes["description"]
        return
    assert "$labels.run" in notes["summary"]
    assert "$labels.run" in notes["description"]
    assert "/runs/{{ $labels.run }}" in notes["dashboard"]
    if name != "RunUnreachable":  # nothing of it was scraped
        assert "$labels.head" in notes["description"]
        assert re.search("printf|humanize", notes["description"])
        assert "?step=" in notes["dashboard"]


def test_every_runbook_has_its_alert_and_four_headings():
    assert {path.stem for path in RUNBOOKS.glob("*.md")} == ALERTS
    for path in RUNBOOKS.glob("*.md"):
        text = path.read_text()
        assert text.startswith(f"# {path.stem}\n\nLook first: ")
        assert re.match(r"# \w+\n\nLook first: .*\n(.*\n)?Wake somebody: (yes|no|for)\b", text), path.name
        assert re.findall(r"^## (.*)$", text, re.M) == HEADINGS, path.name


def test_every_query_of_a_runbook_is_valid(tmp_path):
    asked = [{"record": f"run:asked{number}:last", "expr": text} for number, text in enumerate(queries())]
    (tmp_path / "asked.yml").write_text(json.dumps({"groups": [{"name": "asked", "rules": asked}]}))
    done = promtool("check", "rules", tmp_path / "asked.yml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_metric_that_is_asked_for_is_one_that_is_exported():
    exported = {metric.exported for metric in METRICS if not metric.counted}
    for family in FAMILIES:
        parts = ("_bucket", "_sum", "_count") if family.kind == "histogram" else ("",)
        exported |= {family.exported + part for part in parts}
    recorded = {rule["record"] for rule in rules("record")}
    labels = {"hilbert_url"}
    for text in expressions():
        asked = set(re.findall(r"\brun:hilbert_\w+:\w+", text))
        assert asked <= recorded
        names = set(re.findall(r"(?<!:)\bhilbert_\w+", re.sub(r"run:hilbert_\w+:\w+", "", text)))
        assert names <= exported | labels


def test_every_recording_is_named_by_level_metric_and_operation_and_is_used():
    asked = "\n".join(expressions())
    for rule in rules("record"):
        assert re.fullmatch(r"run:hilbert_[a-z_]+:[a-z0-9_]+", rule["record"])
        assert re.search(re.escape(rule["record"]) + r"\b", asked), rule["record"]


@pytest.mark.parametrize("rule", rules("alert"), ids=lambda rule: rule["alert"] + rule["labels"]["severity"])
def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not(rule):
    asked = [(name, alerts) for name, alerts in cases() if name == rule["alert"]]
    assert [name for name, alerts in asked if not alerts]
    told = [alert["exp_labels"] for _, alerts in asked for alert in alerts]
    assert [labels for labels in told if rule["labels"].items() <= labels.items()]

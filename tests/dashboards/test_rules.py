"""Prometheus rules: valid, tested by promtool, true to the catalogue, each alert with its runbook."""

import json
import math
import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from hilbert_monitor.runs.alerts import KINDS
from hilbert_monitor.runs.exposition import Exposition, RunSamples
from hilbert_monitor.runs.families import FAMILIES
from hilbert_monitor.runs.metrics import CATALOGUE
from hilbert_monitor.runs.record import RunInfo, StepRecord
from hilbert_monitor.runs.states import STALLED_AFTER, STATUSES
from tests.support.programs import needs

DASHBOARDS = Path(__file__).parents[2] / "dashboards"
PROMETHEUS, RUNBOOKS = DASHBOARDS / "prometheus", DASHBOARDS / "runbooks"
RULES = PROMETHEUS / "rules" / "hilbert.yml"
TESTS = sorted((PROMETHEUS / "tests").glob("*.yml"))
ALERTS = {
    "StepDiameterBlowUp",
    "StepDiameterAboveCeiling",
    "HilbertPerturbationBlowUp",
    "IncrementNotFinite",
    "RunStalled",
    "RunFailed",
    "MonitorOverheadHigh",
    "MonitorFailing",
}
HEADINGS = ["Meaning", "Impact", "Diagnosis", "Mitigation"]


def promtool(*arguments):
    return subprocess.run([needs("promtool"), *map(str, arguments)], capture_output=True, text=True, timeout=300)


def rules(kind):
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"] if kind in rule]


def cases():
    """All cases of the promtool tests: what is asked, and the alerts that are expected."""
    for path in TESTS:
        for test in yaml.safe_load(path.read_text())["tests"]:
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


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.stem)
def test_promtool_passes(path):
    done = promtool("test", "rules", path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("tested", "old", "new"),
    [
        ("blowups", 'increase5m{kind="diameter"} > 0', 'increase5m{kind="diameter"} > 1e9'),
        ("blowups", 'increase5m{kind="diameter"} > 0', 'increase5m{kind="diameter"} >= 0'),
        ("blowups", "increase(hilbert_blowups_total[5m])", "hilbert_blowups_total"),
        ("blowups", "max by (run, head, kind) (increase(", "sum without (job) (increase("),
        ("blowups", '_info{attempt="1"}', "_info"),
        ("blowups", "_start_timestamp_seconds) < 300", "_start_timestamp_seconds) < 0"),
        ("blowups", "keep_firing_for: 10m", "keep_firing_for: 0s"),
        ("blowups", 'increase5m{kind="ceiling"} > 0', 'increase5m{kind="ceiling"} > 1e9'),
        ("blowups", "1.01 * max", "1.0 * max"),
        ("blowups", "1.01 * max", "2 * max"),
        ("blowups", "1.01 * max", "1.01 * min"),
        ("blowups", 'increase5m{kind="perturbation"} > 0', 'increase5m{kind="perturbation"} >= 0'),
        ("blowups", "(hilbert_nonfinite_rows) > 0", "(hilbert_nonfinite_rows) > 1e9"),
        ("blowups", "(hilbert_nonfinite_rows) > 0", "(hilbert_nonfinite_rows) >= 0"),
        ("history", "> 3 * run", "> 11 * run"),
        ("history", "> 3 * run", "> 0.9 * run"),
        ("history", "> 2.5 * run", "> 3.5 * run"),
        ("history", "(max_over_time(hilbert_learning_rate[5m]))", "(hilbert_learning_rate)"),
        ("history", "run:hilbert_learning_rate:max5m < run:hilbert_learning_rate:foreseen", "vector(0) > 1"),
        ("history", "usual\n          *", "max5m\n          *"),
        ("history", "_start_timestamp_seconds) > 1200", "_start_timestamp_seconds) > 0"),
        ("runs", "[6h]", "[1h]"),
        ("runs", 'status=~"finished|failed"', 'status=~"failed"'),
        ("runs", 'status=~"finished|failed"', 'status=~"finished"'),
        ("runs", "for: 1m", "for: 0s"),
        ("runs", "last6h > run:hilbert_stalled", "last6h > 0 * run:hilbert_stalled"),
        ("runs", "last6h > run:hilbert_stalled", "last6h > 100 * run:hilbert_stalled"),
        ("runs", "ended6h)\n            >=", "ended6h)\n            > bool"),
        ("runs", ">= on (run, head)", "> bool on (run, head)"),
        ("runs", "< 3600", "< 36000"),
        ("monitor", "rate15m > 0.05", "rate15m > 0.02"),
        ("monitor", "rate15m > 0.05", "rate15m > 0.08"),
        ("monitor", "for: 15m", "for: 5m"),
        ("monitor", "max by (run, head) (sum without (part)", "sum by (run, head) (sum without (part)"),
        ("monitor", "sink) (hilbert_monitor_failures_total) > 0", "sink) (hilbert_monitor_failures_total) > 9"),
        ("monitor", "[1h] offset 15m", "[15m]"),
    ],
)
def test_a_rule_that_is_wrong_fails_its_tests(tmp_path, tested, old, new):
    assert old in RULES.read_text()
    done = tried(tmp_path, tested, RULES.read_text().replace(old, new))
    assert done.returncode == 1
    assert "alertname: " in done.stdout + done.stderr  # an alert was not as expected: the rules themselves are valid


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.stem)
def test_a_group_passes_its_tests_by_itself(tmp_path, path):
    done = tried(tmp_path, path.stem, RULES.read_text())
    assert done.returncode == 0, done.stdout + done.stderr


def tried(folder, tested, text):
    """Run the tests of one group on a text of the rules, the other groups left out."""
    for name in ("rules", "tests"):
        (folder / name).mkdir()
    groups = [group for group in yaml.safe_load(text)["groups"] if group["name"] == f"hilbert-{tested}"]
    (folder / "rules" / RULES.name).write_text(json.dumps({"groups": groups}))
    shutil.copy(PROMETHEUS / "tests" / f"{tested}.yml", folder / "tests")
    return promtool("test", "rules", folder / "tests" / f"{tested}.yml")


# The rule that looks at history, on runs that are made step by step

HOURS, SCRAPE = 3, 15
PEAK = 3e-3


def warm_up(part):
    """Linear over a third of the run, then cosine to a tenth of the peak."""
    return part * 3 if part < 1 / 3 else 0.1 + 0.45 * (1 + math.cos(math.pi * (part - 1 / 3) * 1.5))


def steps_down(part):
    """A fifth after each quarter."""
    return 0.2 ** int(part * 4)


def constant(part):
    return 1.0


def series_of(name, rate, *, spread, pace, lr_fault=None, fault=None, seed=0):
    """The series that a Prometheus has of a run: steps every `pace` seconds, D(S) ten times the learning rate."""
    draw, now, last = random.Random(seed), 0.0, -1.0
    samples = RunSamples(lambda: RunInfo(id=name, head_optimizer="AdamW"), clock=lambda: now)
    exposition, found = Exposition(lambda: [samples.samples()]), {}
    end = HOURS * 3600
    for step in range(1, int(end / pace)):
        now = step * pace
        part = now / end
        lr = PEAK * rate(part) * (lr_fault(last, part) if lr_fault else 1)
        diameter = lr * 10 * math.exp(draw.gauss(0, spread)) * (fault(last, part) if fault else 1)
        samples.write(StepRecord(step=step, time=now, learning_rate=lr, diameter_lower=diameter))
        if now // SCRAPE > (now - pace) // SCRAPE:
            number = int(now // SCRAPE)
            for family in exposition.collect():
                for sample in family.samples:
                    if re.search("distribution|learning_rate|start_time", sample.name):
                        labels = ", ".join(f'{key}="{value}"' for key, value in sample.labels.items())
                        values = found.setdefault(f"{sample.name}{{{labels}}}", [])
                        values += ["_"] * (number - len(values)) + [f"{sample.value:.10g}"]
        last = part
    return [{"series": key, "values": " ".join(values)} for key, values in found.items()]


def once(factor, at):
    return lambda last, part: factor if last < at <= part else 1


def for_good(factor, at):
    return lambda last, part: factor if part >= at else 1


CALM = {
    "warm-up and cosine": (warm_up, {}),
    "steps down": (steps_down, {}),
    "constant": (constant, {}),
    "all steps alike": (warm_up, {"spread": 0.001}),
    "a minute a step": (warm_up, {"pace": 60.0}),
    "rates that double in a minute at the start": (lambda part: min(1.0, 2 ** (180 * part - 10)), {}),
    "a half more for one step": (constant, {"fault": once(1.5, 0.7)}),
}
BLOWN_UP = {
    "ten times the rate for one step of a warm-up": (warm_up, {"lr_fault": once(10, 0.2)}),
    "ten times the rate for one step of a decay": (warm_up, {"lr_fault": once(10, 0.9), "spread": 0.15}),
    "ten times the rate for good": (warm_up, {"lr_fault": for_good(10, 0.6)}),
    "three times the rate for good": (constant, {"lr_fault": for_good(3, 0.6), "spread": 0.1}),
    "thirty times the diameter for one step": (constant, {"fault": once(30, 0.7)}),
    "three times the diameter for good": (warm_up, {"fault": for_good(3, 0.7), "spread": 0.1}),
    "twenty times, a minute a step": (constant, {"fault": once(20, 0.7), "pace": 60.0}),
}


def test_history_follows_schedules_and_sees_what_they_do_not_explain(tmp_path):
    inputs = []
    for number, (name, (rate, more)) in enumerate({**CALM, **BLOWN_UP}.items()):
        inputs += series_of(name, rate, **{"spread": 0.3, "pace": 5.0, "seed": number} | more)
    fired = 'count by (run) (last_over_time(ALERTS{alertname="StepDiameterBlowUp",alertstate="firing"}[4h]))'
    expected = [{"labels": f'{{run="{name}"}}', "value": 1} for name in BLOWN_UP]
    test = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "30s",
        "tests": [
            {
                "interval": f"{SCRAPE}s",
                "input_series": inputs,
                "promql_expr_test": [{"expr": fired, "eval_time": f"{HOURS}h", "exp_samples": expected}],
            }
        ],
    }
    (tmp_path / "simulated.yml").write_text(json.dumps(test))
    done = promtool("test", "rules", tmp_path / "simulated.yml")
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]


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
    assert "$labels.run" in notes["summary"]
    for part in ("$labels.run", "$labels.head", "expected", "printf"):
        assert part in notes["description"] or (part == "printf" and "humanize" in notes["description"])
    assert "/runs/{{ $labels.run }}" in notes["dashboard"]
    assert "?step=" in notes["dashboard"]


def test_every_runbook_has_its_alert_and_four_headings():
    assert {path.stem for path in RUNBOOKS.glob("*.md")} == ALERTS
    for path in RUNBOOKS.glob("*.md"):
        text = path.read_text()
        assert text.startswith(f"# {path.stem}\n")
        assert re.findall(r"^## (.*)$", text, re.M) == HEADINGS, path.name


def test_every_query_of_a_runbook_is_valid(tmp_path):
    asked = [{"record": f"run:asked{number}:last", "expr": text} for number, text in enumerate(queries())]
    (tmp_path / "asked.yml").write_text(json.dumps({"groups": [{"name": "asked", "rules": asked}]}))
    done = promtool("check", "rules", tmp_path / "asked.yml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_metric_that_is_asked_for_is_one_that_is_exported():
    exported = {metric.exported for metric in CATALOGUE if not metric.counted}
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


@pytest.mark.parametrize("rule", rules("alert"), ids=lambda rule: rule["alert"] + rule["labels"].get("source", ""))
def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not(rule):
    asked = [(name, alerts) for name, alerts in cases() if name == rule["alert"]]
    assert [name for name, alerts in asked if not alerts]
    told = [alert["exp_labels"] for _, alerts in asked for alert in alerts]
    assert [labels for labels in told if rule["labels"].items() <= labels.items()]

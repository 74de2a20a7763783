"""The rules that look at history in PromQL, on series of runs made step by step: schedules, noise, faults."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import yaml

from hilbert_monitor.runs.exposition import BUCKETS
from tests.support.programs import needs

RULES = Path(__file__).parents[2] / "dashboards" / "prometheus" / "rules" / "hilbert.yml"
HOURS, SCRAPE, PACE = 4, 30, 5.0
"""Hours that a run takes, seconds between two scrapes, and seconds of a step."""
PEAK = 3e-3


# Learning rates as shares of the peak, by the share of the run that is over


def warm_up(part):
    """Linear over a quarter of the run, then cosine to a tenth of the peak."""
    return np.where(part < 0.25, part * 4, 0.1 + 0.45 * (1 + np.cos(np.pi * (part - 0.25) / 0.75)))


def restarts(part):
    """A short warm-up, then cosine to a twentieth of the peak, three times."""
    return np.minimum(1, part * 40) * (0.05 + 0.475 * (1 + np.cos(np.pi * (part * 3 % 1))))


def one_cycle(part):
    """Cosine up over a third of the run, and down again."""
    return np.where(
        part < 1 / 3, 0.04 + 0.48 * (1 - np.cos(3 * np.pi * part)), 0.5 + 0.5 * np.cos(np.pi * (part * 1.5 - 0.5))
    )


def steps_down(part):
    """A fifth after each quarter."""
    return 0.2 ** np.floor(part * 4)


def constant(part):
    return np.ones_like(part)


# Faults, as factors


def once(factor, at):
    return lambda part: np.where(np.arange(len(part)) == np.searchsorted(part, at), factor, 1.0)


def for_good(factor, at):
    return lambda part: np.where(part >= at, factor, 1.0)


def doubling(minutes, at):
    """Growth from a share of the run on."""
    return lambda part: 2 ** (np.maximum(0, part - at) * HOURS * 60 / minutes)


def none(part):
    return np.ones_like(part)


def series_of(
    name, rate, *, noise=0.1, pace=PACE, rate_fault=none, fault=none, seed=0, begin=0.0, end=1.0, instance="a"
):
    """What a Prometheus has of an attempt at a run between two shares of its time, D(S) ten times the learning rate."""
    part = np.arange(1, int(HOURS * 3600 / pace)) * pace / (HOURS * 3600)
    lr = np.maximum(PEAK * rate(part) * rate_fault(part), 1e-12)
    diameter = 10 * lr * fault(part) * np.exp(np.random.default_rng(seed).normal(0, noise, len(part)))
    counts = np.isfinite(diameter) & (part >= begin)
    places = np.where(counts, np.searchsorted(BUCKETS, diameter), len(BUCKETS))
    scrapes = np.arange(0, HOURS * 3600, SCRAPE)
    last = np.searchsorted(part * HOURS * 3600, scrapes, side="right")  # steps so far
    used = [*range(max(0, places.min() - 1), min(places.max() + 1, len(BUCKETS) - 1)), len(BUCKETS) - 1]
    totals = {f'bucket{{le="{BUCKETS[end]:g}", '.replace("inf", "+Inf"): places <= end for end in used}
    totals |= {"sum{": np.where(counts, diameter, 0), "count{": counts}
    values = {f"step_diameter_distribution_{key}": np.append(0, np.cumsum(each))[last] for key, each in totals.items()}
    values |= {"run_start_timestamp_seconds{": np.full(len(scrapes), begin * HOURS * 3600)}
    values |= {"learning_rate{": np.append(lr[0], lr)[last]}
    who = f'run="{name}", head="AdamW", job="hilbert-runs", instance="{instance}"}}'
    told = (scrapes >= begin * HOURS * 3600) & (scrapes < end * HOURS * 3600)
    return {
        f"hilbert_{key}{who}": [f"{value:.9g}" if seen else "_" for value, seen in zip(each, told, strict=True)]
        for key, each in values.items()
    }


def resumed(name, *, at, instance="a", after=1 / 40, **attempts):
    """Two attempts at a run, the second a little later with counters from zero, maybe at another address."""
    first, second = (attempts.pop(key) for key in ("first", "second"))
    series = series_of(name, **first, end=at)
    for key, values in series_of(name, **second, begin=at + after, instance=instance).items():
        before = series.get(key, ["_"] * len(values))
        series[key] = [new if new != "_" else old for old, new in zip(before, values, strict=True)]
    return series


CALM = {
    "warm-up and cosine": (warm_up, {"noise": 0.3}),
    "all steps alike": (warm_up, {"noise": 0.001}),
    "a minute a step": (warm_up, {"noise": 0.3, "pace": 60.0}),
    "restarts": (restarts, {"noise": 0.2}),
    "one cycle": (one_cycle, {"noise": 0.3}),
    "steps down": (steps_down, {"noise": 0.2}),
    "constant": (constant, {"noise": 0.3}),
    "rates that double in a minute at the start": (lambda part: np.minimum(1.0, 2 ** (240 * part - 10)), {}),
    "a half more for one step": (constant, {"fault": once(1.5, 0.7)}),
    "no diameters": (constant, {"fault": lambda part: np.full(len(part), np.nan)}),
}
NINEFOLD = {"first": {"rate": constant}, "second": {"rate": lambda part: np.full(len(part), 9.0)}}
RESUMED = {
    "resumed with nine times the rate": {"at": 0.5, **NINEFOLD},
    "resumed elsewhere with nine times the rate": {"at": 0.5, "instance": "b", **NINEFOLD},
}
BLOWN_UP = {
    "three times for one step": ("step", constant, {"fault": once(3, 0.7)}),
    "ten times for one step": ("step", warm_up, {"noise": 0.3, "fault": once(10, 0.7)}),
    "ten times for one step of a minute": ("step", constant, {"fault": once(10, 0.7), "pace": 60.0}),
    "ten times the rate for one step of a warm-up": ("step", warm_up, {"rate_fault": once(10, 0.2)}),
    "ten times the rate for one step of a decay": ("step", warm_up, {"noise": 0.2, "rate_fault": once(10, 0.9)}),
    "ten times for one step after a fall of the rate": ("step", steps_down, {"fault": once(10, 0.53)}),
    "twice for good": ("level", warm_up, {"noise": 0.2, "fault": for_good(2, 0.6)}),
    "twice for good, in noise": ("level", constant, {"noise": 0.3, "fault": for_good(2, 0.6)}),
    "three times the rate for good": ("level", constant, {"rate_fault": for_good(3, 0.6)}),
    "twice in ten minutes": ("trend", constant, {"noise": 0.3, "fault": doubling(10, 0.6)}),
    "twice in an hour": ("trend", warm_up, {"noise": 0.2, "fault": doubling(60, 0.4)}),
    "a rate that doubles in an hour": ("rate", constant, {"rate_fault": doubling(60, 0.4)}),
    "a rate that doubles in 20 minutes from the start": ("rate", lambda part: 2 ** (12 * part - 10), {}),
}


def tried(folder, text, names):
    """Let promtool judge whether rules of this text see what befell some runs, by its pattern, and nothing else."""
    cases = CALM | {name: case[1:] for name, case in BLOWN_UP.items()}
    runs = [
        series_of(name, rate, seed=i, **more) for i, (name, (rate, more)) in enumerate(cases.items()) if name in names
    ]
    runs += [resumed(name, **attempts) for name, attempts in RESUMED.items() if name in names]
    groups = [group for group in yaml.safe_load(text)["groups"] if group["name"] == "hilbert-history"]
    seen = {name: case[0] for name, case in BLOWN_UP.items() if name in names}
    asked = [fired(seen)]
    for pattern in {*seen.values()}:
        own = [name for name in seen if seen[name] == pattern]
        asked.append(fired(own, f', pattern="{pattern}", run=~"{"|".join(own)}"'))
    inputs = [{"series": key, "values": " ".join(values)} for run in runs for key, values in run.items()]
    test = {
        "rule_files": ["rules.yml"],
        "evaluation_interval": "1m",
        "tests": [{"interval": f"{SCRAPE}s", "input_series": inputs, "promql_expr_test": asked}],
    }
    (folder / "rules.yml").write_text(json.dumps({"groups": groups}))
    (folder / "test.yml").write_text(json.dumps(test))
    return subprocess.run([needs("promtool"), "test", "rules", folder / "test.yml"], capture_output=True, text=True)


def fired(names, more=""):
    """A question for the runs of alerts that fired, and the names that are expected."""
    alerts = f'ALERTS{{alertname="StepDiameterBlowUp", alertstate="firing"{more}}}'
    return {
        "expr": f"group by (run) (last_over_time({alerts}[{HOURS}h]))",
        "eval_time": f"{HOURS}h",
        "exp_samples": [{"labels": f'{{run="{name}"}}', "value": 1} for name in names],
    }


@pytest.mark.sweep
def test_history_follows_schedules_and_sees_what_they_do_not_explain(tmp_path):
    done = tried(tmp_path, RULES.read_text(), {*CALM, *RESUMED, *BLOWN_UP})
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ("noise_max5m ^ 3, 1.75)", "noise_max5m ^ 3, 9)", "three times for one step"),
        ("noise_max5m ^ 3, 1.75)", "noise_max5m ^ 3, 0.9)", "constant"),
        ("noise_mean5m ^ 3, 1.7)", "noise_mean5m ^ 3, 3)", "twice for good"),
        ("(2.5 * run", "(25 * run", "twice in an hour"),
        (
            "1.5 * run:hilbert_learning_rate:had1d",
            "9 * run:hilbert_learning_rate:had1d",
            "a rate that doubles in an hour",
        ),
        ("(3 * run", "(30 * run", "a rate that doubles in 20 minutes from the start"),
        ("(3 * run", "(2 * run", "one cycle"),
        ("(max_over_time(hilbert_learning_rate[5m]))", "(hilbert_learning_rate)", "steps down"),
        ("1.2 * run:hilbert_learning_rate:had1d", "0 * run:hilbert_learning_rate:had1d", "restarts"),
        ("max5m < on (run, head)", "max5m > on (run, head)", "three times the rate for good"),
        ("_seconds) > 1200", "_seconds) > 0", "resumed with nine times the rate"),
        ("_seconds) > 4800\n", "_seconds) > 0\n", "resumed elsewhere with nine times the rate"),
    ],
)
def test_history_with_another_number_is_wrong_about_a_run(tmp_path, old, new, name):
    assert old in RULES.read_text()
    done = tried(tmp_path, RULES.read_text().replace(old, new), {name})
    assert "exp:" in done.stdout + done.stderr, done.stdout + done.stderr

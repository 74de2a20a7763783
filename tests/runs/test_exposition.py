"""The Prometheus samples of a run, against the records themselves."""

import itertools
import math
import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parsed_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parsed
from prometheus_client.utils import floatToGoString as _go

from hilbert_monitor.runs.exposition import BUCKETS, FAMILIES, Exposition, RunSamples
from hilbert_monitor.runs.reader import STATUSES
from hilbert_monitor.runs.record import METRICS, Alert, RunInfo, StepRecord

INFO = RunInfo(id="a-run", name="a run", head_optimizer="AdamW", seed=3, port=9464, versions={"torch": "2.13"})
WHO = {"run": "a-run", "head": "AdamW"}

numbers = st.none() | st.floats(allow_nan=True, allow_infinity=True)
records = st.lists(
    st.builds(
        StepRecord,
        step=st.integers(1, 30),
        time=st.floats(0, 1e9),
        diameter=numbers,
        diameter_lower=numbers,
        train_loss=numbers,
        tokens=st.none() | st.integers(0, 10**12),
        nonfinite_rows=st.none() | st.integers(0, 3),
        skipped=st.sampled_from(["", "overflow"]),
        seconds=st.dictionaries(st.sampled_from(["increment", "panel"]), st.floats(0, 10)),
    ),
    max_size=30,
)


def scraped(*runs):
    registry = CollectorRegistry()
    registry.register(Exposition(lambda: [run.samples() for run in runs]))
    return generate_latest(registry).decode(), openmetrics(registry).decode()


def read(text):
    """The samples, by name and by labels besides the run's own."""
    samples = {}
    for family in parsed(text):
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items() - WHO.items())
            assert key not in samples
            samples[key] = sample.value
    return samples


def value(text, name, **labels):
    """The sample of that name and those labels, or None."""
    return (read(text) if isinstance(text, str) else text).get((name, frozenset(labels.items())))


@given(records)
def test_samples_are_those_of_the_records(written):
    run, first = RunSamples(lambda: INFO), {}
    for record in written:
        run.write(record)
        if record.step > max(first, default=0):
            first[record.step] = record
    text = read(scraped(run)[0])
    counted = list(first.values())
    assert value(text, "hilbert_steps_total") == len(counted)
    assert value(text, "hilbert_skipped_steps_total") == sum(bool(record.skipped) for record in counted)
    assert value(text, "hilbert_nonfinite_increments_total") == sum(bool(r.nonfinite_rows) for r in counted)
    last = [record.train_loss for record in sorted(written, key=lambda r: r.step) if record.train_loss is not None]
    assert repr(value(text, "hilbert_train_loss")) == repr(last[-1] if last else None)
    for part in ("increment", "panel"):
        spent = [record.seconds[part] for record in counted if part in record.seconds]
        total = value(text, "hilbert_monitor_seconds_total", part=part)
        assert total == pytest.approx(sum(spent)) if spent else total is None
    diameters = [r.diameter if r.diameter is not None else r.diameter_lower for r in counted]
    finite = [d for d in diameters if d is not None and math.isfinite(d)]
    assert value(text, "hilbert_step_diameter_distribution_count") == len(finite)
    ends = {end: value(text, "hilbert_step_diameter_distribution_bucket", le=_go(end)) for end in BUCKETS}
    assert ends == {end: sum(d <= end for d in finite) for end in BUCKETS}


def test_buckets_are_few_and_fine_where_runs_are():
    assert list(BUCKETS) == sorted({*BUCKETS})
    assert len(BUCKETS) <= 80
    fine = [end for end in BUCKETS if 1e-5 <= end <= 1]
    assert (fine[0], fine[-1]) == (1e-5, 1)
    assert max(after / before for before, after in itertools.pairwise(fine)) < 1.22  # the rules rely on it


def full_run():
    run = RunSamples(lambda: INFO, failures=lambda: {"the run log": 2})
    numbers = {metric.field: 1.0 for metric in METRICS if metric.formula is None} | {"tokens": 7, "nonfinite_rows": 1}
    run.write(StepRecord(step=1, time=0.0, seconds={"panel": 1.0}, **numbers))
    run.write(Alert(step=1, time=0.0, kind="diameter", value=2.0, expected=1.0))
    return run


def test_every_family_and_metric_is_there_with_its_help():
    families = {family.name: family for family in parsed(scraped(full_run())[0])}
    for metric in METRICS:
        if not metric.counted:
            assert families[metric.exported].documentation == metric.help
            assert families[metric.exported].samples
    for family in FAMILIES:
        name = f"hilbert_{family.name}" if family.kind == "counter" else family.exported
        assert families[name].samples, family.name
        labels = {label for sample in families[name].samples for label in sample.labels}
        assert {"run", "head", *family.labels} <= labels
    about = families["hilbert_run_info"].samples[0].labels
    assert (about["seed"], about["port"], about["torch"], about["ranks"]) == ("3", "9464", "2.13", "1")


def test_blowups_are_counted_from_zero_by_kind_and_severity():
    run, page = RunSamples(lambda: INFO), {"kind": "diameter", "severity": "page"}
    assert value(scraped(run)[0], "hilbert_blowups_total", **page) == 0
    for step in (4, 9):
        run.write(Alert(step=step, time=0.0, value=math.inf, expected=0.5, **page))
    run.write(Alert(step=11, time=0.0, kind="diameter", severity="notice", value=0.7, expected=0.5))
    text, _ = scraped(run)
    assert value(text, "hilbert_blowups_total", **page) == 2
    assert value(text, "hilbert_blowups_total", kind="diameter", severity="notice") == 1
    assert value(text, "hilbert_blowups_total", kind="ceiling", severity="page") == 0
    assert value(text, "hilbert_blowup_step", **page) == 9
    assert value(text, "hilbert_blowup_value", **page) == math.inf
    assert value(text, "hilbert_blowup_expected", **page) == 0.5
    run.write(Alert(step=5, time=0.0, value=1.0, **page))  # late
    assert value(scraped(run)[0], "hilbert_blowup_step", **page) == 9


def test_slow_steps_and_pauses_have_more_time_before_they_count_as_stalled():
    run, step = RunSamples(lambda: INFO, stalled_after=10.0), itertools.count(1)
    for count, seconds, allowed in ((3, 60.0, 1200), (56, 0.1, 120), (100, 0.1, 10)):
        for _ in range(count):
            number = next(step)
            run.write(StepRecord(step=number, time=60.0 * min(number, 3) + seconds * max(number - 3, 0)))
        assert value(scraped(run)[0], "hilbert_stalled_after_seconds") == pytest.approx(allowed)


def test_the_heartbeat_is_the_last_sign_of_life_and_the_status_says_how_the_run_ended():
    now = [100.0]
    run = RunSamples(lambda: INFO, clock=lambda: now[0])
    for moment, use in ((107.0, lambda: run.write(StepRecord(step=1, time=0.0))), (130.0, run.alive)):
        now[0] = moment
        use()
        now[0] = 200.0
        assert value(scraped(run)[0], "hilbert_heartbeat_timestamp_seconds") == moment
    run.end("failed")
    assert value(scraped(run)[0], "hilbert_heartbeat_timestamp_seconds") == 200
    text, _ = scraped(run)
    assert {s: value(text, "hilbert_run_status", status=s) for s in STATUSES} == {
        status: float(status == "failed") for status in STATUSES
    }


def test_both_formats_are_understood_with_several_runs_and_hostile_names():
    name = 'x"\n# HELP y\\ \u2028{}<b>'
    hostile, run = RunSamples(lambda: RunInfo(id=name, name=name, head_optimizer=name)), full_run()
    texts = scraped(hostile, run)
    for text, parse in zip(texts, (parsed, parsed_openmetrics), strict=True):
        families = {family.name: family for family in parse(text)}
        labels = [sample.labels for family in families.values() for sample in family.samples]
        assert {one["run"] for one in labels} == {name, "a-run"}
        assert families["hilbert_step_diameter"].samples[0].value == 1.0
        assert text.count("# TYPE hilbert_step_diameter gauge") == 1
    assert (families["hilbert_run"].type, families["hilbert_steps"].type) == ("info", "counter")
    assert texts[1].endswith("# EOF\n")


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_finds_nothing_to_say():
    run = full_run()
    run.write(StepRecord(step=2, time=0.0, diameter=math.nan))
    done = subprocess.run(["promtool", "check", "metrics"], input=scraped(run)[0], capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")

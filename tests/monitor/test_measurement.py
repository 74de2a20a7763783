"""The typed measurement of a step and the record that it makes."""

import dataclasses
import inspect
import math
import typing

import msgspec
import pytest
import torch
from hilbert_monitor.monitor.measurement import DiameterBounds, ExactDiameter, GradientRows, Measurement

from hilbert_monitor import HilbertMonitor, Probe, Prometheus
from hilbert_monitor.monitor import measurement
from hilbert_monitor.monitor.options import MonitorOptions
from hilbert_monitor.runs.record import StepRecord
from tests.support.decoders import Plain, loss_of, seeded
from tests.support.references import all_pairs_diameter, normal
from tests.support.training import UPDATES, Module, fit


def record_of(step: Measurement) -> StepRecord:
    return step.record(time=1.0, seconds={"diameter": 0.1}, share=0.5)


def test_every_field_of_a_part_is_a_field_of_the_record_with_a_fitting_type():
    expected = typing.get_type_hints(StepRecord)
    own = {name: kind for name, kind in typing.get_type_hints(Measurement).items() if name not in measurement.PARTS}
    parts = [typing.get_type_hints(part) for part in measurement.PARTS.values()]
    for name, kind in [item for part in (own, *parts) for item in part.items()]:
        allowed = set(typing.get_args(expected[name])) | {expected[name]}
        assert {kind} <= allowed or set(typing.get_args(kind)) <= allowed, name


def test_a_measurement_without_any_part_makes_a_record_of_what_is_known():
    record = record_of(Measurement(step=3, skipped="overflow", learning_rate=0.1))
    assert record == StepRecord(
        step=3, time=1.0, skipped="overflow", learning_rate=0.1, seconds={"diameter": 0.1}, share=0.5
    )


def test_what_the_parts_hold_is_in_the_record():
    S, G = normal(0, 40, 6), normal(1, 40, 6)
    bounds, exact, gradient = DiameterBounds.of(S), ExactDiameter.of(S), GradientRows.of(G)
    assert bounds.diameter_lower <= exact.diameter <= bounds.diameter_upper
    record = record_of(Measurement(step=1, bounds=exact, gradient=gradient))
    assert record.diameter == pytest.approx(all_pairs_diameter(S), rel=1e-6)
    assert record.pair == exact.pair
    assert record.row_norm == pytest.approx(float(S.norm(dim=1).max()))
    assert record.gradient_row_token == int(G.norm(dim=1).argmax())
    assert record.gradient_balance == pytest.approx(float(G.sum(0).norm() / G.norm(dim=1).sum()))
    assert msgspec.json.decode(msgspec.json.encode(record), type=StepRecord) == record


def test_bounds_that_are_not_exact_have_no_diameter():
    step = Measurement(step=1, bounds=DiameterBounds.of(normal(0, 40, 6)))
    assert step.exact is None
    assert record_of(step).diameter is None
    assert record_of(step).diameter_lower is not None


def test_padding_takes_part_in_the_balance_and_is_no_token():
    G = torch.zeros(4, 2)
    G[0], G[3] = torch.tensor([1.0, 0.0]), torch.tensor([-3.0, 0.0])
    rows = GradientRows.of(G, tokens=3)
    assert (rows.gradient_row_token, rows.gradient_row_norm) == (0, 1.0)
    assert rows.gradient_balance == pytest.approx(2 / 4)


@pytest.mark.parametrize("name", ["address", "tls", "registry", "stalled_after", "linger"])
def test_an_argument_that_moved_is_refused_with_its_new_form(name):
    with pytest.raises(TypeError, match=rf"prometheus_{name} has moved: give prometheus=Prometheus\(.*{name}="):
        HilbertMonitor(**{f"prometheus_{name}": None})


def test_an_argument_that_never_was_is_refused_as_python_does():
    with pytest.raises(TypeError, match="unexpected keyword argument 'diameter_evry'"):
        HilbertMonitor(diameter_evry=3)


def test_the_short_form_of_the_port_and_the_whole_settings_exclude_each_other():
    assert HilbertMonitor(prometheus_port=9464).options.prometheus == Prometheus(port=9464)
    with pytest.raises(ValueError, match="give one of the two"):
        HilbertMonitor(prometheus_port=9464, prometheus=Prometheus(port=9465))


def test_the_two_forms_of_the_patience_with_a_silent_run_are_one():
    exported = Prometheus(port=0, stalled_after=60.0)
    assert HilbertMonitor(prometheus=exported).options.patience == 60.0
    assert HilbertMonitor(prometheus=exported, stalled_after=60.0).options.patience == 60.0
    assert HilbertMonitor(prometheus=Prometheus(port=0), stalled_after=5.0).options.patience == 5.0
    assert HilbertMonitor(prometheus=Prometheus(port=0)).options.patience is None
    with pytest.raises(ValueError, match=r"stalled_after=5.0 and Prometheus\(stalled_after=60.0\) .*one of the two"):
        HilbertMonitor(prometheus=exported, stalled_after=5.0)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"port": 70000}, "between 0, .* and 65535, got 70000"),
        ({"port": "9464"}, "between 0, .* and 65535, got '9464'"),
        ({"port": 0, "tls": "cert.pem"}, "tls is a pair of files, a certificate and its key, got 'cert.pem'"),
        ({"port": 0, "linger": -1.0}, "linger is a number of seconds"),
        ({"port": 0, "linger": math.inf}, r"linger is .* from zero to \d+, such as 30, got inf"),
        ({"port": 0, "linger": 1e12}, r"linger is .* from zero to \d+, such as 30, got 1000000000000.0"),
        ({"address": "0.0.0.0"}, "needs a port=... to serve the metrics at, or a registry"),
    ],
)
def test_settings_of_prometheus_are_checked_when_they_are_made(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        Prometheus(**settings)


@pytest.mark.parametrize(
    ("option", "value", "sentence"),
    [
        ("diameter_every", -1, "diameter_every is a number of updates, 0 for never: .* at least 0, got -1"),
        ("diameter_every", 2.5, "a whole number of at least 0, got 2.5"),
        ("perturbation_every", -5, "perturbation_every is a number of updates, 0 for never: .* got -5"),
        ("panel_size", 0, "panel_size is a number of validation positions: a whole number of at least 1, got 0"),
        ("vocab_size", 0, "vocab_size is a number of rows of the head, or None for all: .* at least 1, got 0"),
        ("stalled_after", -1.0, "stalled_after is a number of seconds, zero or more, got -1.0"),
        ("on_blowup", "halt", 'takes "warn", "checkpoint", "stop", an http address, or a function .* got .halt.'),
        ("on_blowup", ["warn", "ftp://example.org/x"], "got 'ftp://example.org/x'"),
        ("on_blowup", ["no_such_module.function"], r"got 'no_such_module.function' \(ModuleNotFoundError"),
        ("on_blowup", None, "got None"),
    ],
)
def test_an_option_that_cannot_be_is_refused_when_the_callback_is_made(option, value, sentence):
    with pytest.raises(ValueError, match=sentence):
        HilbertMonitor(**{option: value})


def test_options_of_the_callback_and_of_the_session_have_the_same_defaults():
    callback = inspect.signature(HilbertMonitor).parameters
    fields = {field.name: field.default for field in dataclasses.fields(MonitorOptions)}
    assert fields.keys() - callback.keys() == {"named"}  # which the callback itself sets, for several heads
    for name in fields.keys() & callback.keys():
        assert callback[name].default == fields[name], name


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_search_that_fails_leaves_the_bounds(monkeypatch):
    def fails(S):
        raise RuntimeError("no search")

    monkeypatch.setattr(measurement, "row_diameter", fails)
    model = seeded(Plain, V=37, d=16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Probe(model, optimizer, diameter_every=1) as probe:
        loss_of(model, 0).backward()
        optimizer.step()
        record = probe.record()
    assert probe.guard.failures == {"diameter": 1}
    assert record.diameter is None
    assert 0 < record.diameter_lower <= record.diameter_upper


def test_a_second_run_inherits_neither_failures_nor_the_state_of_one_that_could_not_start():
    fit(Module("torch"), monitor := HilbertMonitor(run_dir=None, panel_size=50))
    session = monitor.session
    assert session.state_dict()["step"] == UPDATES
    session.guard.failures["panel"] = 3
    monitor.options.head = "no.such.module"
    with pytest.warns(UserWarning, match="start failed"):
        fit(Module("torch"), monitor)
    assert session.probe is None
    assert session.state_dict() == {}
    assert session.guard.failures == {"start": 1}

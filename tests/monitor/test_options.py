"""Options of the callback: refused when the callback is made, with a sentence that says what to give instead."""

import dataclasses
import inspect
import math

import pytest

from hilbert_monitor import Advanced, HilbertMonitor, Prometheus
from hilbert_monitor.monitor.session import MonitorOptions
from tests.support.training import UPDATES, Module, fit


def test_an_argument_that_never_was_is_refused_as_python_does():
    with pytest.raises(TypeError, match="unexpected keyword argument 'diameter_evry'"):
        HilbertMonitor(diameter_evry=3)


def test_a_port_stands_for_the_settings_of_prometheus():
    assert HilbertMonitor(prometheus=9464).options.prometheus == Prometheus(port=9464)
    with pytest.raises(TypeError, match="prometheus is a port or Prometheus"):
        HilbertMonitor(prometheus="9464")


def test_settings_that_few_runs_need_are_one_object_that_is_checked():
    monitor = HilbertMonitor(advanced=Advanced(immediate=True, secrets=["pin"]))
    assert (monitor.options.advanced.immediate, monitor.options.advanced.secrets) == (True, ["pin"])
    with pytest.raises(ValueError, match=r"stalled_after is a number of seconds, zero or more, got -1\.0"):
        Advanced(stalled_after=-1.0)
    with pytest.raises(TypeError, match=r"secrets is a list of names in the config, got 'pin': write \['pin'\]"):
        Advanced(secrets="pin")
    with pytest.raises(TypeError, match=r"advanced is Advanced\(...\), got dict"):
        HilbertMonitor(advanced={})


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
    assert fields.keys() == callback.keys()
    for name in fields:
        assert callback[name].default == fields[name], name


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

"""HilbertMonitor from a YAML file: LightningCLI reads every argument, prints it, reads it back, and trains with it."""

import csv
import dataclasses
import inspect
import logging

import lightning
import pytest
import yaml
from torch import Tensor
from torch.utils.data import DataLoader

from hilbert_monitor import Advanced, HilbertMonitor, Prometheus
from hilbert_monitor.runs.alerts import Rules
from tests.support.training import QUIET, Module, Text, V

pytest.importorskip("jsonargparse")
lightning_cli = pytest.importorskip("lightning.pytorch.cli")
LightningCLI, SaveConfigCallback = lightning_cli.LightningCLI, lightning_cli.SaveConfigCallback
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
UPDATES = 6
HERE = "tests.monitor.test_cli_yaml"

pytestmark = pytest.mark.filterwarnings("ignore:::jsonargparse")


class Data(lightning.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(Text(0, 24), batch_size=4)

    def val_dataloader(self):
        return DataLoader(Text(1, 24), batch_size=4)


class Prints:
    """A sink as the README has them: anything with write(record)."""

    def __init__(self, prefix: str = "D(S)"):
        self.prefix = prefix

    def write(self, record):
        print(self.prefix, record.step, record.diameter)


def decode(token: int) -> str:
    return f"<{token}>"


def states(module, batch) -> Tensor:
    return module.model.hidden(batch)


def bare_states(module, batch):
    return module.model.hidden(batch)


def written(folder, name="config.yaml", trainer=None, **arguments):
    """A config file with the monitor among the callbacks; return its path."""
    monitor = {"class_path": "hilbert_monitor.HilbertMonitor", "init_args": arguments}
    options = QUIET | {"default_root_dir": str(folder), "callbacks": [monitor]}
    path = folder / name
    path.write_text(yaml.safe_dump({"seed_everything": 1, "trainer": options | (trainer or {})}))
    return path


def cli(*arguments, **options):
    options = {"run": False, "save_config_callback": None, "parser_kwargs": {"exit_on_error": False}} | options
    return LightningCLI(Module, Data, args=[str(a) for a in arguments], **options)


def monitor_of(made):
    (found,) = [callback for callback in made.trainer.callbacks if isinstance(callback, HilbertMonitor)]
    return found


def printed(path, capsys):
    """What --print_config makes of a file."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        cli("--config", path, "--print_config")
    assert end.value.code in (0, None)
    return capsys.readouterr().out


def arguments_of(text):
    (monitor,) = yaml.safe_load(text)["trainer"]["callbacks"]
    return monitor["init_args"]


def told(alert):
    """What a user may want to do about a blow-up."""


ARGUMENTS = {
    "head": ["model.lm_head", None],
    "panel_size": [50],
    "diameter_every": [3, 0],
    "perturbation_every": [4, 0],
    "panel": ["loader", "paper", list(range(20)), [[1, 2, 3], [4, 5]]],
    "hidden": [None, f"{HERE}.states", f"{HERE}.bare_states"],
    "decay": [None, "decoupled", "coupled"],
    "vocab_size": [None, 30],
    "logit_scale": [0.5, 2],
    "decode": [None, f"{HERE}.decode"],
    "run_dir": [None, "elsewhere"],
    "run_name": [None, "first try"],
    "config": [None, {"width": 64, "data": {"shards": [1, 2]}}],
    "layers": [True, False],
    "efficiency": [True, False],
    "rules": [None, {"false_alarms_per_10k": 0.5}],
    "on_blowup": ["stop", ["warn", "checkpoint", "https://example.org/hook"], [f"{HERE}.told"], []],
    "sinks": [[], [{"class_path": f"{HERE}.Prints"}], [{"class_path": f"{HERE}.Prints", "init_args": {"prefix": "x"}}]],
    "prometheus": [None, 0, {"port": 0, "tls": ["cert.pem", "key.pem"], "linger": 0.0}],
    "strict": [False, True],
    "advanced": [{}, {"bounds": True, "immediate": True, "stalled_after": 3600.0, "secrets": ["pin"], "private": True}],
}
"""Every argument of the constructor, with values a config may give it."""

MADE = {f"{HERE}.states": states, f"{HERE}.bare_states": bare_states, f"{HERE}.decode": decode}


def test_the_list_of_arguments_is_the_constructors():
    assert [*ARGUMENTS] == list(inspect.signature(HilbertMonitor).parameters)


ROUNDS = [
    {name: values[k % len(values)] for name, values in ARGUMENTS.items()}
    for k in range(max(map(len, ARGUMENTS.values())))
]
"""Configs that have every value between them."""


@pytest.mark.parametrize("arguments", ROUNDS, ids=range(len(ROUNDS)))
def test_an_argument_is_read_printed_and_read_back(arguments, tmp_path, capsys):
    text = printed(written(tmp_path, **arguments), capsys)
    again = tmp_path / "again.yaml"
    again.write_text(text)
    monitor = monitor_of(cli("--config", again))
    for name, value in arguments.items():
        assert_got(monitor, name, value)


def assert_got(monitor, name, value):
    got = getattr(monitor.options, name)
    if name == "rules" and value is not None:
        assert got == Rules(**value)
    elif name == "advanced":
        assert dataclasses.replace(got, secrets=[*got.secrets]) == Advanced(**{"secrets": [], **value})
    elif name == "prometheus" and value == 0:
        assert got == Prometheus(port=0)
    elif name == "prometheus" and value is not None:
        assert got == Prometheus(**value | {"tls": tuple(value["tls"])})
    elif name == "sinks":
        assert [sink.prefix for sink in got] == [sink.get("init_args", {}).get("prefix", "D(S)") for sink in value]
    else:
        assert got == (MADE.get(value, value) if isinstance(value, str) else value), name


def test_the_printed_config_has_every_argument_and_its_default(tmp_path, capsys):
    found = arguments_of(printed(written(tmp_path), capsys))
    parameters = inspect.signature(HilbertMonitor).parameters
    defaults = {name: parameters[name].default for name in ARGUMENTS}
    found["advanced"] = Advanced(**found["advanced"] | {"secrets": tuple(found["advanced"]["secrets"])})
    assert {name: tuple(value) if name == "sinks" else value for name, value in found.items()} == defaults


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"diameter_evry": 3}, "'diameter_evry' is not accepted"),
        ({"diameter_every": "often"}, '"diameter_every":\\s+Expected a <class .int.>. Got value: often'),
        ({"decay": "none"}, 'decay is "decoupled"'),
        ({"panel": "laoder"}, 'panel takes "loader" or'),
        ({"on_blowup": "halt"}, 'on_blowup takes "warn", "checkpoint", "stop"'),
        ({"panel_size": 0}, "panel_size is a number of validation positions"),
    ],
    ids=str,
)
def test_what_is_wrong_in_the_file_is_named(arguments, said, tmp_path):
    with pytest.raises(Exception, match=said):
        cli("--config", written(tmp_path, **arguments))


def test_arguments_can_be_given_on_the_command_line_too(tmp_path):
    callback = "--trainer.callbacks+=hilbert_monitor.HilbertMonitor"
    options = ["--trainer.callbacks.diameter_every=7", "--trainer.callbacks.advanced.bounds=true"]
    monitor = monitor_of(cli("--trainer.accelerator=cpu", "--trainer.logger=false", callback, *options))
    assert (monitor.options.diameter_every, monitor.options.advanced.bounds) == (7, True)


@pytest.mark.few(1)
@pytest.mark.parametrize("panel", ["loader", [k % V for k in range(60)]], ids=["loader", "ids"])
def test_a_config_trains_logs_and_saves_a_config_that_trains_the_same(panel, tmp_path):
    measured = []
    arguments = {"head": "model.lm_head", "panel": panel, "panel_size": 50, "strict": True}
    logger = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": str(tmp_path)}}
    trainer = {"max_steps": UPDATES, "log_every_n_steps": 1, "logger": logger}
    config = written(tmp_path, trainer=trainer, diameter_every=2, perturbation_every=3, **arguments)
    for version in range(2):
        made = cli("fit", "--config", config, run=True, save_config_callback=SaveConfigCallback)
        assert made.trainer.global_step == UPDATES
        folder = tmp_path / "lightning_logs" / f"version_{version}"
        config = folder / "config.yaml"
        with (folder / "metrics.csv").open() as file:
            rows = list(csv.DictReader(file))
        columns = ("hilbert/step_diameter", "hilbert/perturbation_rms")
        measured.append([[float(row[name]) for row in rows if row.get(name)] for name in columns])
    diameters, perturbations = measured[0]
    assert len(diameters) == UPDATES / 2
    assert len(perturbations) == UPDATES / 3
    assert min(diameters + perturbations) > 0
    assert measured[0] == measured[1]

"""Training without the dashboard's packages, the dashboard without torch, and what is said when an extra is missing."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from hilbert_monitor._extras import EXTRAS, missing_extra
from tests.support.ports import free_port
from tests.support.warm import Program

ROOT = Path(__file__).parents[2]
PACKAGES = {extra: [name for name, home in EXTRAS.items() if home == extra] for extra in ("train", "serve")}

WITHOUT = """
import sys

class Blocks:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocks())
"""

FIT = """
import lightning, torch, urllib.request
from torch import nn
from hilbert_monitor import HilbertMonitor
from hilbert_monitor.runs.reader import find_runs

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.embed, self.lm_head = nn.Embedding(50, 8), nn.Linear(8, 50, bias=False)

    def forward(self, tokens):
        return self.lm_head(self.embed(tokens))

    def training_step(self, tokens, _):
        return nn.functional.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

class Scrape(lightning.Callback):
    def on_train_end(self, trainer, module):
        print(urllib.request.urlopen("http://127.0.0.1:PORT/metrics", timeout=10).read().decode())

text = torch.randint(50, (32, 9))
monitor = HilbertMonitor(panel_size=32, diameter_every=1, run_dir="runs", prometheus=PORT)
trainer = lightning.Trainer(max_steps=3, accelerator="cpu", logger=False, enable_checkpointing=False,
                            enable_progress_bar=False, callbacks=[Scrape(), monitor])
batches = torch.utils.data.DataLoader(text, batch_size=8)
trainer.fit(Model(), batches, batches)
(run,) = find_runs("runs")
print("records", [record.step for news in run.follow(0) for record in news.records])
"""

CATCH = """
try:
    from hilbert_monitor import {0}
except ModuleNotFoundError as error:
    print(error.name, error)
"""


def child(code, without=(), arguments=()):
    """Run code in a fresh interpreter that cannot import some packages."""
    command = [sys.executable, "-c", WITHOUT.format(names=set(without)) + code, *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_extras_are_those_of_the_project():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {extra: [Requirement(text).name for text in texts] for extra, texts in declared.items()}
    assert named.pop("all") == ["hilbert-monitor"]
    assert {extra: set(names) for extra, names in named.items()} == {e: set(names) for e, names in PACKAGES.items()}


def test_the_service_and_the_report_load_without_what_training_needs():
    code = "import hilbert_monitor.service.web.server, hilbert_monitor.service.report.page, hilbert_monitor.cli"
    done = child(code, without=PACKAGES["train"])
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.sweep
def test_a_run_is_fitted_logged_and_exported_without_what_the_dashboard_needs():
    names = set(PACKAGES["serve"])
    none_yet = f"import sys\nassert not {names} & sys.modules.keys()"  # though the monitor is loaded in a warm program
    fit = FIT.replace("PORT", str(free_port()))
    program = Program("-c", "\n".join([none_yet, WITHOUT.format(names=names), fit]))
    assert program.wait() == 0, program.output
    assert "records [1, 2, 3]" in program.output
    assert "\nhilbert_step_diameter{" in program.output


def test_a_name_that_needs_torch_names_the_extra():
    needed = {"RowNorm": "torch", "row_diameter": "torch", "HilbertMonitor": "lightning"}
    done = child("".join(CATCH.format(name) for name in needed), PACKAGES["train"])
    remedy = 'pip install "hilbert-monitor[train]"'
    said = [f"hilbert_monitor.{name} needs {one}, which is not installed: {remedy}" for name, one in needed.items()]
    assert done.stdout.splitlines() == [
        f"{one} {sentence}" for one, sentence in zip(needed.values(), said, strict=True)
    ]


@pytest.mark.parametrize(
    ("command", "extra"), [("serve runs", "serve"), ("report runs", "serve"), ("pretrain --size demo", "train")]
)
def test_a_command_whose_extra_is_missing_ends_with_one_sentence(command, extra):
    done = child("from hilbert_monitor.__main__ import main\nmain()", PACKAGES[extra], command.split())
    name, missing = command.split()[0], "|".join(PACKAGES[extra])
    remedy = f'pip install "hilbert-monitor[{extra}]"'
    assert (done.returncode, done.stdout) == (1, "")
    sentence = rf"hilbert-monitor {name} needs ({missing}), which is not installed: {re.escape(remedy)}\n"
    assert re.fullmatch(sentence, done.stderr), done.stderr


def test_help_needs_no_extra():
    done = child("from hilbert_monitor.__main__ import main\nmain()", EXTRAS, ["--help"])
    assert done.returncode == 0, done.stderr
    assert "serve" in done.stdout


def test_a_module_that_no_extra_installs_is_left_to_python():
    assert missing_extra("anything", ModuleNotFoundError("No module named 'nothing'", name="nothing")) is None
    done = child("from hilbert_monitor.__main__ import main\nmain()", ["rich"], ["serve"])
    assert "No module named 'rich'" in done.stderr

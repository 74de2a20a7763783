"""The callback in Lightning's Trainer on the emulated device: the CPU's records, also in bf16 and after a resume."""

import lightning
import pytest
import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch.utils.data import DataLoader

from hilbert_monitor import HilbertMonitor
from tests.support.emulation.device import NAME, EmulatedDevice
from tests.support.sinks import Recorder
from tests.support.training import Module, Text


class EmulatedAccelerator(Accelerator):
    """Lets Lightning train on the device."""

    def setup_device(self, device):
        assert device.type == NAME

    def teardown(self):
        pass

    @staticmethod
    def parse_devices(devices):
        return devices

    @staticmethod
    def get_parallel_devices(devices):
        return [torch.device(NAME, 0)]

    @staticmethod
    def auto_device_count():
        return 1

    @staticmethod
    def is_available():
        return True

    def get_device_stats(self, device):
        return {}

    @staticmethod
    def name():
        return NAME


def fit(*, emulated, updates=6, precision=None, checkpoint=None, path=None, make="torch"):
    """Train a small decoder with a monitor; return its records and what it said."""
    sink = Recorder()
    torch.manual_seed(1)
    module = Module(make)
    module.dropout = nn.Identity()
    monitor = HilbertMonitor(
        diameter_every=2, perturbation_every=3, panel_size=64, sinks=[sink], run_dir=None, strict=True
    )
    where = {"strategy": SingleDeviceStrategy(torch.device(NAME, 0), EmulatedAccelerator())} if emulated else {}
    plugins = [MixedPrecision(precision, NAME if emulated else "cpu")] if precision else []
    trainer = lightning.Trainer(
        **where or {"accelerator": "cpu"},
        plugins=plugins,
        max_steps=updates,
        max_epochs=-1,
        callbacks=[monitor],
        limit_val_batches=1,
        val_check_interval=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    loaders = DataLoader(Text(0, items=16), batch_size=4), DataLoader(Text(1), batch_size=4)
    trainer.fit(module, *loaders, ckpt_path=checkpoint, **({"weights_only": False} if checkpoint else {}))
    if path:
        trainer.save_checkpoint(path)
    return sink.records


def numbers(records):
    names = ("step", "diameter_lower", "diameter_upper", "diameter", "perturbation_rms", "radius", "train_loss")
    found = [{name: getattr(record, name) for name in names} for record in records]
    return [{name: value for name, value in values.items() if value is not None} for values in found]


@pytest.mark.few(1)
@pytest.mark.parametrize("make", ["torch", "rownorm"])
def test_records_are_the_cpus(make):
    with EmulatedDevice():
        found = fit(emulated=True, make=make)
    expected = fit(emulated=False, make=make)
    for ours, theirs in zip(numbers(expected), numbers(found), strict=True):
        # Bounds of a radius are up to 1 % apart. Of 37 * 16 gradients the least is some 600 times smaller than most and
        # its rounding, 10 * 2**-24, as much larger: 4e-4 of Adam's rate, and D(S) is eight times the rate.
        assert theirs.pop("radius", 0) == pytest.approx(ours.pop("radius", 0), rel=1e-2)
        assert theirs == pytest.approx(ours, rel=1e-3)


def test_a_run_in_bf16_is_measured():
    with EmulatedDevice():
        records = fit(emulated=True, precision="bf16-mixed")
    assert [r.step for r in records if r.perturbation_rms] == [3, 6]


@pytest.mark.sweep
def test_a_resumed_run_goes_on_where_it_was(tmp_path):
    with EmulatedDevice():
        whole = fit(emulated=True, updates=6)
        fit(emulated=True, updates=4, path=tmp_path / "run.ckpt")
        rest = fit(emulated=True, updates=6, checkpoint=tmp_path / "run.ckpt")
    assert [r.step for r in rest] == [5, 6]
    for ours, theirs in zip(numbers(whole[4:]), numbers(rest), strict=True):
        assert theirs == pytest.approx(ours, rel=1e-6)

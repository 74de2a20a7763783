"""A small training run with a fault, for the tests of alerts: `python -m tests.support.oncall_run NAME FOLDER [FAULT]`.

Faults: "rate" multiplies the learning rate by ten for one step; "error" raises an exception; "wait" trains with loader
workers until the process is killed.
"""

import logging
import sys
import time

import lightning
import torch
from torch.utils.data import DataLoader

from hilbert_monitor import HilbertMonitor, Prometheus
from tests.support.training import Module, Text

STEPS, FAULT = 240, 160


class Accident(lightning.Callback):
    """Causes the fault "rate" or "error" at step FAULT."""

    def __init__(self, kind):
        self.kind = kind

    def on_train_batch_start(self, trainer, module, batch, index):
        time.sleep(0.06)  # long enough to be scraped some twenty times
        if trainer.global_step == FAULT and self.kind == "error":
            raise RuntimeError("the disk of the data is gone")
        self._scale(trainer, 10.0)

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        self._scale(trainer, 0.1, after=1)

    def _scale(self, trainer, factor, after=0):
        if self.kind == "rate" and trainer.global_step == FAULT + after:
            for optimizer in trainer.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] *= factor


def main(name, folder, fault=""):
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    workers = 1 if fault == "wait" else 0
    monitor = HilbertMonitor(
        diameter_every=1,
        panel_size=50,
        perturbation_every=40,
        run_dir=folder,
        run_name=name,
        on_blowup=[],
        prometheus=Prometheus(port=0, stalled_after=15.0),
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=STEPS if fault != "wait" else 100_000,
        max_epochs=-1,
        val_check_interval=12,
        limit_val_batches=1,
        callbacks=[monitor, Accident(fault)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    train = DataLoader(Text(0, 192), batch_size=16, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
    trainer.fit(Module("torch"), train, DataLoader(Text(1), batch_size=4))


if __name__ == "__main__":
    main(*sys.argv[1:])

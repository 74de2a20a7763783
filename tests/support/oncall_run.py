"""Small training runs for the tests of alerts: `python -m tests.support.oncall_run FOLDER CERTIFICATE KEY NAME...`.

Each run has a process of its own, forked after torch was loaded; all are one process group. What happens in a run
follows from its name:

clean     serves its metrics by https, trains and finishes
accident  has ten times the learning rate for one step, and later an exception
stopped   trains until it gets SIGTERM
killed    trains with loader workers until it is killed
missed    trains until it is killed

"NAME PID" is printed as each begins, "NAME = CODE" as it ends, negative after a signal.
"""

import logging
import os
import sys
import time

import lightning
import torch
from torch.utils.data import DataLoader

from hilbert_monitor import Advanced, HilbertMonitor, Prometheus
from tests.support.training import Module, Text

STEPS, FAULT, ERROR = 160, 110, 150


class Course(lightning.Callback):
    """Takes its time, and causes what befalls the run."""

    def __init__(self, name):
        self.name = name

    def on_train_batch_start(self, trainer, module, batch, index):
        time.sleep(0.04 if self.name in ("clean", "accident") else 0.5)  # long enough to be scraped some times
        if self.name == "accident" and trainer.global_step == ERROR:
            raise RuntimeError("the disk of the data is gone")
        self._scale(trainer, 10.0)

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        self._scale(trainer, 0.1, after=1)

    def _scale(self, trainer, factor, after=0):
        if self.name == "accident" and trainer.global_step == FAULT + after:
            for optimizer in trainer.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] *= factor


def train(name, folder, certificate, key):
    tls = (certificate, key) if name == "clean" else None
    monitor = HilbertMonitor(
        diameter_every=1,
        panel_size=50,
        perturbation_every=40,
        run_dir=folder,
        run_name=name,
        on_blowup=[],
        prometheus=Prometheus(port=0, tls=tls),
        advanced=Advanced(stalled_after=90.0),
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=STEPS if name in ("clean", "accident") else 100_000,
        max_epochs=-1,
        val_check_interval=12,
        limit_val_batches=1,
        callbacks=[monitor, Course(name)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    workers = {"num_workers": 1, "persistent_workers": True} if name == "killed" else {}
    data = DataLoader(Text(0, 192), batch_size=16, shuffle=True, **workers)
    trainer.fit(Module("torch"), data, DataLoader(Text(1), batch_size=4))


def main(folder, certificate, key, *names):
    os.setpgrp()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    runs = {}
    for name in names:
        if (pid := os.fork()) == 0:
            train(name, folder, certificate, key)
            sys.exit()
        runs[pid] = name
        print(name, pid, flush=True)
    for _ in runs:
        pid, status = os.wait()
        print(runs[pid], "=", os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

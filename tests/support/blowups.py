"""Runs of Lightning's in which a step blows up."""

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from hilbert_monitor import HilbertMonitor
from tests.support.training import QUIET, Module, Text

JUMP, STEPS = 23, 30
"""The step that blows up, not one that is due; and the last."""


class Jumps(Module):
    """Has an accident with its learning rate."""

    def configure_optimizers(self):
        optimizer = AdamW(self.parameters(), lr=1e-3)
        schedule = LambdaLR(optimizer, lambda t: 10.0 if t + 1 == JUMP else 1.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Overwrites(Module):
    """Writes to the optimizer's state: D(S) exceeds the optimizer's ceiling, and the alert names two tokens."""

    def configure_optimizers(self):
        return AdamW(self.parameters(), lr=1e-3)

    def on_before_optimizer_step(self, optimizer):
        if self.trainer.global_step + 1 == JUMP:
            for state in optimizer.state.values():
                state["exp_avg"].mul_(1e4)


def fit(module, *callbacks, steps=STEPS, checkpoint=None, **options):
    """Train a module for some steps; return the trainer."""
    torch.manual_seed(1)
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    settings = {"max_steps": steps, "max_epochs": -1, "enable_checkpointing": saves}
    trainer = lightning.Trainer(callbacks=list(callbacks), **QUIET | settings | options)
    trainer.fit(module, DataLoader(Text(0), batch_size=4), DataLoader(Text(1, 8), batch_size=4), ckpt_path=checkpoint)
    return trainer


def monitor(**options):
    return HilbertMonitor(**{"panel_size": 50, "on_blowup": [], "strict": True} | options)

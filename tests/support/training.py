"""A small language model and its text, trained by Lightning in seconds."""

import logging

import lightning
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader, Dataset

from hilbert_monitor import pretraining_optimizer
from tests.support.decoders import Plain

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
V, UPDATES = 37, 12
QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}
"""Arguments of a Trainer that prints and writes nothing."""


class Text(Dataset):
    """Sequences of nine random tokens."""

    def __init__(self, seed, items=48):
        self.ids = torch.randint(0, V, (items, 9), generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return self.ids[index]


class Module(lightning.LightningModule):
    """A small decoder with dropout.

    Args:
        make: its optimizer: "adamw" or "rownorm" as in the paper, or torch's AdamW ("torch") or SGD ("sgd").
    """

    def __init__(self, make="adamw"):
        super().__init__()
        torch.manual_seed(0)
        self.model, self.make = Plain(V, 16), make
        self.dropout = nn.Dropout(0.2)

    def forward(self, tokens):
        return self.model.lm_head(self.dropout(self.model.hidden(tokens)))

    def loss(self, tokens):
        return nn.functional.cross_entropy(self(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())

    def training_step(self, tokens, _):
        return self.loss(tokens)

    def validation_step(self, tokens, _):
        self.log("val_loss", self.loss(tokens))

    def configure_optimizers(self):
        if self.make in ("adamw", "rownorm"):
            return pretraining_optimizer(self.model, self.make)
        kinds = {"torch": lambda p: AdamW(p, lr=1e-2), "sgd": lambda p: SGD(p, lr=0.1, momentum=0.9)}
        return kinds[self.make](self.parameters())


def fit(module, *callbacks, precision="32-true", accumulate=2, logger=False, **options):
    """Train a module for UPDATES updates, with a validation every six batches. Returns the trainer."""
    torch.manual_seed(1)
    given = {"precision": precision, "accumulate_grad_batches": accumulate, "logger": logger} | options
    given |= {"max_steps": UPDATES, "max_epochs": -1, "gradient_clip_val": 1.0}
    given |= {"val_check_interval": 6, "limit_val_batches": 2}
    trainer = lightning.Trainer(callbacks=list(callbacks), **QUIET | given)
    train = DataLoader(Text(0), batch_size=4, shuffle=True, drop_last=True)
    trainer.fit(module, train, DataLoader(Text(1), batch_size=4))
    return trainer

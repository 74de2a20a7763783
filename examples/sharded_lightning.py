"""A model that Lightning shards over two processes, by FSDP2: python examples/sharded_lightning.py"""

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard

from hilbert_monitor import HilbertMonitor


class LanguageModel(lightning.LightningModule):
    """An embedding, a layer and a head, each a part that FSDP2 shards."""

    def __init__(self, V=1001, d=64):
        super().__init__()
        torch.manual_seed(0)  # the same weights on every rank, before they are sharded
        self.model = nn.Sequential(nn.Embedding(V, d), nn.Linear(d, d), nn.ReLU(), nn.Linear(d, V, bias=False))

    def configure_model(self):
        """Shard the model; Lightning calls this on every rank."""
        for part in (self.model[3], self.model):
            fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def training_step(self, tokens, _):
        """Return the loss of a batch."""
        return nn.functional.cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def validation_step(self, tokens, i):
        """Log the loss of a batch."""
        self.log("val_loss", self.training_step(tokens, i), sync_dist=True)

    def configure_optimizers(self):
        """Return AdamW, whose moments are sharded as the weights are."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    text = torch.randint(1001, (512, 17), generator=torch.Generator().manual_seed(0))
    train, validation = (torch.utils.data.DataLoader(part, batch_size=8) for part in (text, text[:32]))
    trainer = lightning.Trainer(
        max_steps=20,
        accelerator="auto",
        devices=2,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        callbacks=[HilbertMonitor(head="model.3", panel_size=512, diameter_every=5, run_name="sharded")],
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(LanguageModel(), train, validation)

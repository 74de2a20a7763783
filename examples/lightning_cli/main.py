"""A LightningCLI program whose monitor stands in its YAML file.

python examples/lightning_cli/main.py fit --config examples/lightning_cli/config.yaml
"""

import lightning
import torch
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn
from torch.utils.data import DataLoader

VOCABULARY = 200


class LanguageModel(lightning.LightningModule):
    """A small language model.

    Args:
        width: of its hidden states.
        lr: learning rate.
    """

    def __init__(self, width: int = 32, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()  # kept with the run, and shown by the dashboard
        self.embed, self.lr = nn.Embedding(VOCABULARY, width), lr
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next tokens."""
        return self.lm_head(self.embed(tokens))

    def training_step(self, tokens: Tensor, _: int) -> Tensor:
        """Cross entropy of a batch."""
        return nn.functional.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def validation_step(self, tokens: Tensor, index: int) -> None:
        """Log the loss under a name that the monitor knows."""
        self.log("val_loss", self.training_step(tokens, index))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Any optimizer will do."""
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class RandomText(lightning.LightningDataModule):
    """Rows of random tokens."""

    def train_dataloader(self) -> DataLoader:
        """128 rows."""
        return DataLoader(torch.randint(VOCABULARY, (128, 17)), batch_size=8)

    def val_dataloader(self) -> DataLoader:
        """16 rows."""
        return DataLoader(torch.randint(VOCABULARY, (16, 17)), batch_size=8)


if __name__ == "__main__":
    LightningCLI(LanguageModel, RandomText)

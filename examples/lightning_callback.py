"""Attach HilbertMonitor to a Lightning trainer, and be told in the step in which a learning rate goes wrong.

python examples/lightning_callback.py && hilbert-monitor serve runs
"""

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hilbert_monitor import HilbertMonitor
from hilbert_monitor.runs.record import Alert

VOCABULARY, WIDTH, ACCIDENT = 500, 32, 45


class LanguageModel(lightning.LightningModule):
    """A small language model: the monitor finds its LM head by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next tokens."""
        return self.lm_head(self.body(self.embed(tokens)))

    def training_step(self, tokens: Tensor, _: int) -> Tensor:
        """Cross entropy of a batch."""
        return nn.functional.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def validation_step(self, tokens: Tensor, index: int) -> None:
        """Log the loss under a name that the monitor knows."""
        self.log("val_loss", self.training_step(tokens, index))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Any optimizer will do."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Accident(lightning.Callback):
    """Multiplies the learning rate by ten for one step, as a wrong schedule would."""

    def on_train_batch_start(self, trainer: lightning.Trainer, *_: object) -> None:
        """Set the learning rate of the step that follows."""
        factor = 10 if trainer.global_step + 1 == ACCIDENT else 1
        trainer.optimizers[0].param_groups[0]["lr"] = factor * 1e-3


def page_somebody(alert: Alert) -> None:
    """Stand in for whatever wakes people where you work."""
    print(f"step {alert.step}: {alert.message}")


def main() -> None:
    """Train for 60 steps on random text."""
    lightning.seed_everything(0)
    text = torch.randint(VOCABULARY, (512, 17))
    monitor = HilbertMonitor(
        panel_size=256,  # validation positions of the Hilbert perturbation
        perturbation_every=20,
        decode=lambda token: f"word-{token}",  # texts for the tokens of alerts and pages
        run_name="lightning-example",
        on_blowup=["warn", page_somebody],
    )
    trainer = lightning.Trainer(
        max_steps=60,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[monitor, Accident()],
    )
    trainer.fit(LanguageModel(), DataLoader(text[:480], batch_size=8), DataLoader(text[480:], batch_size=8))
    print("look at it with: hilbert-monitor serve runs")


if __name__ == "__main__":
    main()

"""A Hugging Face model inside a LightningModule needs nothing beyond the one line."""

import lightning
import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from hilbert_monitor import HilbertMonitor
from hilbert_monitor.runs.record import StepRecord


class GPT2(lightning.LightningModule):
    """GPT-2 with random weights and an untied head."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"vocab_size": 1000, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 2}
        config = GPT2Config(**sizes, tie_word_embeddings=False, bos_token_id=0, eos_token_id=0)
        self.model = GPT2LMHeadModel(config)

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
        """The model's own loss."""
        return self.model(**batch).loss

    def validation_step(self, batch: dict[str, torch.Tensor], _: int) -> None:
        """Log the loss under a name that the monitor knows."""
        self.log("val_loss", self.model(**batch).loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Any optimizer will do."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Print:
    """A sink: anything with write(record)."""

    def write(self, record: StepRecord) -> None:
        """Print what was measured exactly."""
        if record.diameter is not None:
            print(f"step {record.step}: D(S) = {record.diameter:.4f}, tokens {record.pair}")


def main() -> None:
    """Train for 20 steps on random text."""
    rows = torch.randint(1000, (64, 33))
    data = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row} for row in rows]
    trainer = lightning.Trainer(
        max_steps=20,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[HilbertMonitor(panel_size=256, sinks=[Print()])],
    )
    trainer.fit(GPT2(), DataLoader(data[:48], batch_size=8), DataLoader(data[48:], batch_size=8))


if __name__ == "__main__":
    main()

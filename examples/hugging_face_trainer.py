"""Hugging Face's Trainer, and any trainer made of it such as TRL's: one line more."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from hilbert_monitor.integrations.transformers import HilbertCallback
from hilbert_monitor.runs.record import StepRecord


class Print:
    """A sink: anything with write(record)."""

    def write(self, record: StepRecord) -> None:
        """Print what was measured exactly."""
        if record.diameter is not None:
            print(f"step {record.step}: D(S) = {record.diameter:.4f}, tokens {record.pair}")


def main() -> None:
    """Train for 20 steps on random text."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 1000, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, tie_word_embeddings=False, bos_token_id=0, eos_token_id=0))
    data = [{"input_ids": row, "labels": row} for row in torch.randint(1000, (96, 33))]
    arguments = TrainingArguments(
        output_dir="trainer",
        max_steps=20,
        eval_strategy="steps",
        eval_steps=10,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=data[:80], eval_dataset=data[80:])
    HilbertCallback(panel_size=256, sinks=[Print()], run_name="trainer").attach(trainer)  # the one line
    trainer.train()


if __name__ == "__main__":
    main()

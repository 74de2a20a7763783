"""TRL's SFTTrainer, which is made of Hugging Face's Trainer and empties its own metrics when it logs."""

import random

import pytest
import torch

from tests.support.references import all_pairs_diameter
from tests.support.sinks import Recorder
from tests.support.tried import tried

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
WORDS = [f"w{number}" for number in range(200)]


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def conversations(number):
    datasets, draw = pytest.importorskip("datasets"), random.Random(0)

    def text(length):
        return " ".join(draw.choice(WORDS) for _ in range(length))

    return datasets.Dataset.from_list(
        [{"prompt": f"{text(5)} ", "completion": text(draw.randint(4, 9))} for _ in range(number)]
    )


def train(folder, data, *callbacks):
    trl = pytest.importorskip("trl")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=203, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=1,
        tie_word_embeddings=False,
    )  # fmt: skip
    arguments = trl.SFTConfig(
        output_dir=str(folder), max_steps=4, per_device_train_batch_size=4, eval_strategy="steps", eval_steps=2,
        eval_on_start=True, logging_steps=2, report_to=[], use_cpu=True, bf16=False, save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    trainer = trl.SFTTrainer(
        transformers.GPT2LMHeadModel(config),
        arguments,
        train_dataset=data.select(range(16)),
        eval_dataset=data.select(range(16, 32)),
        processing_class=tokenizer(),
    )
    for callback in callbacks:
        callback.attach(trainer)
    trainer.heads = []

    class Copies(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, *_, model, **__):
            trainer.heads.append(model.lm_head.weight.detach().double().clone())

    trainer.add_callback(Copies())
    trainer.train()
    trainer.heads.append(trainer.model.lm_head.weight.detach().double())
    return trainer


def test_an_sft_trainer_has_its_records_and_reports_what_it_would_have(tmp_path):
    from hilbert_monitor.integrations.transformers import HilbertCallback

    kept, data = Recorder(), conversations(32)
    callback = HilbertCallback(
        diameter_every=2, perturbation_every=2, panel_size=60, sinks=[kept], run_dir=str(tmp_path / "runs"), strict=True
    )
    watched, plain = train(tmp_path, data, callback), train(tmp_path, data)
    weights = zip(watched.model.parameters(), plain.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in weights)
    assert [record.step for record in kept.records] == [1, 2, 3, 4]
    assert all(record.train_loss > 0 for record in kept.records)
    assert [record.step for record in kept.records if record.perturbation_rms] == [2, 4]
    for record in kept.records[1::2]:
        D = all_pairs_diameter(watched.heads[record.step] - watched.heads[record.step - 1])
        assert record.diameter == pytest.approx(D, rel=1e-4)
    rows = [
        [row for row in trainer.state.log_history if "hilbert/step_diameter" not in row and "loss" in row]
        for trainer in (watched, plain)
    ]
    assert rows[0] == rows[1]
    assert "mean_token_accuracy" in rows[0][0]
    tried(model="GPT2LMHeadModel", trainer="TRL SFTTrainer", optimizer="AdamW", libraries=["transformers", "trl"])

"""HilbertCallback: what is particular about Hugging Face's Trainer."""

import math
from contextlib import nullcontext

import pytest
import torch
from torch.utils.data import IterableDataset

from hilbert_monitor.runs.reader import RunReader
from tests.support.references import all_pairs_diameter
from tests.support.sinks import Recorder
from tests.support.tried import tried

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

pytestmark = pytest.mark.filterwarnings("ignore")
V, UPDATES = 211, 4


def gpt2(kind=None):
    config = transformers.GPT2Config(
        vocab_size=V, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
        tie_word_embeddings=False,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return (kind or transformers.GPT2LMHeadModel)(config)


def items(seed, number=32):
    rows = torch.randint(V, (number, 16), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row} for row in rows]


EVALUATION = items(1, 16)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(EVALUATION)


def trainer_of(folder, model=None, *, evaluation=EVALUATION, **arguments):
    defaults = {
        **{"max_steps": UPDATES, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "logging_steps": 2},
        **{"eval_strategy": "no" if evaluation is None else "steps", "eval_steps": 2, "save_strategy": "no"},
        "eval_on_start": evaluation is not None,
        **{"report_to": [], "use_cpu": True, "disable_tqdm": True, "lr_scheduler_type": "constant"},
    }
    args = transformers.TrainingArguments(output_dir=str(folder / "trainer"), **defaults | arguments)
    trainer = transformers.Trainer(model or gpt2(), args, train_dataset=items(0), eval_dataset=evaluation)
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def callback_of(folder, **options):
    defaults = {"diameter_every": 1, "perturbation_every": 2, "panel_size": 60, "strict": True}
    from hilbert_monitor.integrations.transformers import HilbertCallback  # loads the Trainer, which takes long

    return HilbertCallback(**{"run_dir": str(folder / "runs")} | defaults | options)


def only_run(folder):
    (run,) = (folder / "runs").iterdir()
    return RunReader(run)


@pytest.mark.few(1)
@pytest.mark.parametrize("arguments", [{"bf16": True}, {"gradient_checkpointing": True}], ids=str)
def test_precision_and_checkpointed_gradients_change_neither_the_numbers_nor_the_weights(arguments, tmp_path):
    kept, weights, runs = Recorder(), [], []
    for watched in (True, False):
        trainer = trainer_of(tmp_path, **arguments)
        head = trainer.model.lm_head.weight
        if watched:
            callback_of(tmp_path, sinks=[kept]).attach(trainer)

            class Copies(transformers.TrainerCallback):
                def on_pre_optimizer_step(self, *_, head=head, weights=weights, **__):
                    weights.append(head.detach().double().clone())

            trainer.add_callback(Copies())
        trainer.train()
        runs.append([p.detach() for p in trainer.model.parameters()])
        weights += [head.detach().double()] if watched else []
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    for record in kept.records:
        D = all_pairs_diameter(weights[record.step] - weights[record.step - 1])
        assert record.diameter == pytest.approx(D, rel=1e-4)
    assert kept.records[-1].perturbation_rms > 0
    tried(
        model="GPT2LMHeadModel", trainer="Hugging Face Trainer", optimizer="AdamW",
        precision="bf16-mixed" if "bf16" in arguments else "fp32", libraries=["transformers", "accelerate"],
    )  # fmt: skip


def test_a_forward_pass_that_never_forms_logits_has_its_panel(tmp_path):
    class WithoutLogits(transformers.GPT2LMHeadModel):
        """In training its loss is formed in parts that no module returns, as a fused kernel does."""

        def forward(self, input_ids, labels=None, attention_mask=None, **_):
            states = self.transformer(input_ids, attention_mask=attention_mask).last_hidden_state
            parts = [
                torch.nn.functional.cross_entropy(part @ self.lm_head.weight.T, following, reduction="sum")
                for part, following in zip(states[:, :-1], labels[:, 1:], strict=True)
            ]
            return {"loss": sum(parts) / labels[:, 1:].numel()}

    kept = Recorder()
    trainer = trainer_of(tmp_path, gpt2(WithoutLogits), prediction_loss_only=True)
    callback_of(tmp_path, sinks=[kept]).attach(trainer)
    trainer.train()
    assert kept.records[-1].perturbation_rms > 0
    assert "never calls the head" in " ".join(only_run(tmp_path).info.remarks)


def test_a_loss_that_is_not_finite_is_recorded_though_the_trainers_own_average_leaves_it_out(tmp_path):
    for attached in (True, False):
        kept, trainer = Recorder(), trainer_of(tmp_path, evaluation=None)
        callback = callback_of(tmp_path, sinks=[kept], run_dir=None, on_blowup=[])
        trainer.add_callback(callback)
        if attached:
            callback.attach(trainer)
        calls = []

        def break_third(module, args, output, calls=calls):
            calls.append(1)
            if len(calls) == 3:
                output["loss"] = output["loss"] * math.nan
            return output

        trainer.model.register_forward_hook(break_third)
        trainer.train()
        assert [math.isnan(record.train_loss) for record in kept.records][:3] == [False, False, True]
        assert all(math.isfinite(row["loss"]) for row in trainer.state.log_history if "loss" in row)


def test_an_attached_callback_logs_by_the_trainer_whose_own_loss_is_still_logged(tmp_path):
    trainer = trainer_of(tmp_path)
    told = []

    class Reporter(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **_):
            told.append((state.global_step, dict(logs)))

    trainer.add_callback(Reporter())
    callback_of(tmp_path, diameter_every=2).attach(trainer)
    trainer.train()
    assert [step for step, logs in told if "loss" in logs] == [2, 4]
    assert [step for step, logs in told if "hilbert/step_diameter" in logs] == [2, 4]
    assert [step for step, logs in told if "hilbert/perturbation_rms" in logs] == [2, 4]
    assert trainer.state.log_history[1].keys() & {"hilbert/step_diameter"}


@pytest.mark.parametrize("attached", [True, False])
def test_the_panel_of_a_stream_is_what_the_first_evaluation_delivers(attached, tmp_path):
    kept, trainer = Recorder(), trainer_of(tmp_path, evaluation=Stream(), eval_on_start=False)
    callback = callback_of(tmp_path, sinks=[kept])
    trainer.add_callback(callback)
    if attached:
        callback.attach(trainer)
    trainer.train()
    assert [record.step for record in kept.records if record.perturbation_rms is not None] == [4]
    assert only_run(tmp_path).info.panel_size == 60


def test_without_an_evaluation_set_one_sentence_asks_for_a_panel(tmp_path):
    for number, panel in enumerate(["loader", torch.arange(64).view(4, 16)]):
        kept, trainer = Recorder(), trainer_of(tmp_path, evaluation=None)
        callback_of(tmp_path / str(number), panel=panel, panel_size=40, sinks=[kept]).attach(trainer)
        with pytest.warns(UserWarning, match=r"no validation data .* as panel=\.\.\.") if not number else nullcontext():
            trainer.train()
        assert (kept.records[-1].perturbation_rms is not None) == (number == 1)
        assert kept.records[-1].diameter > 0


@pytest.mark.parametrize("attached", [True, False])
def test_a_run_that_an_exception_ended_has_failed_and_the_next_is_a_new_one(attached, tmp_path):
    """A callback that is not attached hears of the exception when the next run begins."""
    trainer = trainer_of(tmp_path, evaluation=None)
    callback = callback_of(tmp_path, perturbation_every=0)
    callback.attach(trainer) if attached else trainer.add_callback(callback)

    class Breaks(transformers.TrainerCallback):
        def on_step_begin(self, args, state, *_, **__):
            if state.global_step == 2:
                raise FloatingPointError("broken")

    trainer.add_callback(Breaks())
    with pytest.raises(FloatingPointError):
        trainer.train()
    if attached:
        assert (only_run(tmp_path).state().status, only_run(tmp_path).state().error) == ("failed", "FloatingPointError")
        assert callback.run is None
    trainer.remove_callback(Breaks)
    trainer.train()
    states = [RunReader(run).state() for run in (tmp_path / "runs").iterdir()]
    assert sorted(state.status for state in states) == ["failed", "finished"]


def test_a_blow_up_can_have_the_trainer_save_a_checkpoint(tmp_path):
    trainer = trainer_of(tmp_path, evaluation=None)
    callback_of(tmp_path, on_blowup=["checkpoint", "stop"]).attach(trainer)

    class Breaks(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, args, state, *_, **__):
            if state.global_step == 1:
                trainer.model.lm_head.weight.grad[0, 0] = math.nan

    trainer.add_callback(Breaks())
    trainer.train()
    assert trainer.state.global_step == 2
    folder = tmp_path / "trainer" / "checkpoint-2"
    assert torch.load(folder / "hilbert_monitor.pt", weights_only=True)["step"] == 2


def test_deepspeed_is_refused_in_a_sentence(tmp_path):
    trainer = trainer_of(tmp_path, evaluation=None)
    callback = callback_of(tmp_path)
    trainer.args.deepspeed = "config.json"
    with pytest.warns(
        UserWarning, match="nothing is measured under DeepSpeed, whose engine makes the optimizer's step"
    ):
        callback.on_train_begin(
            trainer.args, trainer.state, trainer.control, model=trainer.model, optimizer=trainer.create_optimizer()
        )
    callback.on_step_end(trainer.args, trainer.state, trainer.control)
    callback.on_train_end(trainer.args, trainer.state, trainer.control)
    assert not (tmp_path / "runs").exists()


def test_a_damaged_state_beside_a_checkpoint_is_one_sentence(tmp_path):
    arguments = {"evaluation": None, "save_strategy": "steps", "save_steps": 1}
    trainer = trainer_of(tmp_path, max_steps=1, **arguments)
    trainer.train()
    folder = tmp_path / "trainer" / "checkpoint-1"
    (folder / "hilbert_monitor.pt").write_bytes(b"no archive")
    again, kept = trainer_of(tmp_path, max_steps=2, **arguments), Recorder()
    callback_of(tmp_path, strict=False, perturbation_every=0, sinks=[kept]).attach(again)
    with pytest.warns(UserWarning, match=r"hilbert_monitor.pt cannot be read \(UnpicklingError\)"):
        again.train(resume_from_checkpoint=str(folder))
    assert [record.step for record in kept.records] == [2]


def test_a_panel_that_has_no_name_and_a_trainer_that_is_none_are_refused():
    from hilbert_monitor.integrations.transformers import HilbertCallback

    with pytest.raises(ValueError, match=r"folder of a run with a panel\.json, got 'train'"):
        HilbertCallback(panel="train")
    with pytest.raises(TypeError, match="takes a Trainer of transformers, got GPT2LMHeadModel"):
        HilbertCallback().attach(gpt2())

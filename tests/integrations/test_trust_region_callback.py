"""Hugging Face's Trainer with a TrustRegion, next to the monitor, and resumed."""

import warnings

import pytest
import torch

from hilbert_monitor import TrustRegion
from hilbert_monitor.runs.reader import find_runs
from tests.monitor.test_trust_region import diameter
from tests.support.adapters import ACCUMULATED, LR, ROWS, UPDATES, Model, items

transformers = pytest.importorskip("transformers")


def trained(folder, *, stop_at=None, resume_from=None, monitored=False):
    from hilbert_monitor.integrations.transformers import HilbertCallback, TrustRegionCallback

    model = Model(0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)
    region = TrustRegion(lambda step: 0.01 / step)

    class Stop(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_training_stop |= state.global_step == stop_at

    args = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=UPDATES,
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=ACCUMULATED,
        save_strategy="steps" if stop_at else "no",
        save_steps=stop_at or 1,
        train_sampling_strategy="sequential",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    callbacks = [TrustRegionCallback(region), Stop()]
    if monitored:
        callbacks.append(HilbertCallback(run_dir=str(folder / "runs"), diameter_every=1, strict=True))
    trainer = transformers.Trainer(
        model,
        args,
        train_dataset=items(0, ROWS * ACCUMULATED * UPDATES),
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)),
        callbacks=callbacks,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    weight, before, diameters = model.decoder.lm_head.weight, [], []
    optimizer.register_step_pre_hook(lambda *_: before.append(weight.detach().double().clone()))

    class Look(transformers.TrainerCallback):
        def on_step_end(self, *_, **__):
            diameters.append(diameter(weight.detach().double() - (1 - LR * 0.1) * before[-1]))

    trainer.add_callback(Look())
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trainer.train(resume_from_checkpoint=resume_from and str(resume_from))
    region.warned = [str(warning.message) for warning in warned if "TrustRegion" in str(warning.message)]
    return model.state_dict(), region, diameters


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that was never interrupted: its folder, weights, region and the diameters of its steps."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, *trained(folder, monitored=True)


@pytest.fixture
def checkpoint(tmp_path):
    """The checkpoint of a run that was stopped halfway."""
    trained(tmp_path, stop_at=UPDATES // 2)
    return tmp_path / f"checkpoint-{UPDATES // 2}"


def test_trainer_holds_every_step(whole):
    folder, _, region, diameters = whole
    assert region.step == region.clipped == len(diameters) == UPDATES
    assert all(held <= 0.01 / step * (1 + 1e-6) for step, held in enumerate(diameters, 1))
    (run,) = find_runs(folder / "runs")
    assert [record.trust_limit for record in run.steps()] == [0.01 / step for step in range(1, UPDATES + 1)]


def test_resumed_run_is_the_same_to_the_bit(whole, checkpoint):
    weights, region, _ = trained(checkpoint.parent, resume_from=checkpoint)
    assert region.state_dict() == whole[2].state_dict()
    assert region.warned == []
    assert all(torch.equal(whole[1][name], weights[name]) for name in weights)


def damage(checkpoint):
    (checkpoint / "trust_region.pt").write_bytes(b"damaged")
    return checkpoint


@pytest.mark.parametrize("move", [damage, lambda checkpoint: checkpoint.rename(checkpoint.parent / "elsewhere")])
def test_schedule_resumes_without_the_saved_counts(whole, checkpoint, move):
    folder = checkpoint.parent
    weights, region, _ = trained(folder, resume_from=move(checkpoint))
    assert [f"resumes at step {UPDATES // 2}" in text for text in region.warned] == [True]
    assert region.step == UPDATES
    assert all(torch.equal(whole[1][name], weights[name]) for name in weights)

"""Hugging Face's Trainer with a TrustRegion, with the monitor beside it, and resumed."""

import pytest
import torch

from hilbert_monitor import TrustRegion
from hilbert_monitor.runs.reader import find_runs
from tests.monitor.test_trust_region import diameter
from tests.support.adapters import ACCUMULATED, LR, ROWS, UPDATES, Model, items

transformers = pytest.importorskip("transformers")


def trained(folder, *, stop_at=None, resumes=False, monitored=False):
    from hilbert_monitor.integrations.transformers import HilbertCallback, RegionCallback

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
    callbacks = [RegionCallback(region), Stop()]
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
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{UPDATES // 2}") if resumes else None)
    return model.state_dict(), region, diameters


def test_trainer_holds_steps_and_goes_on_bit_for_bit(tmp_path):
    whole, region, diameters = trained(tmp_path / "whole", monitored=True)
    assert region.step == region.clipped == len(diameters) == UPDATES
    assert all(held <= 0.01 / step * (1 + 1e-6) for step, held in enumerate(diameters, 1))
    (run,) = find_runs(tmp_path / "whole" / "runs")
    assert [record.trust_limit for record in run.steps()] == [0.01 / step for step in range(1, UPDATES + 1)]
    trained(tmp_path / "half", stop_at=UPDATES // 2)
    resumed, other, _ = trained(tmp_path / "half", resumes=True)
    assert other.state_dict() == region.state_dict()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)

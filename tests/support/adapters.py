"""One small training run, made by each trainer that has an adapter: the same model, data, optimizer and updates.

The optimizer's own hooks copy the head around every step, so that what is compared knows nothing of the trainer.
"""

import logging
import os
from contextlib import contextmanager
from unittest.mock import Mock

import lightning
import pytest
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import hilbert_monitor
from hilbert_monitor import HilbertMonitor
from tests.support.decoders import Plain

ADAPTERS = ("watch", "accelerate", "fabric", "lightning", "transformers", "transformers, not attached")
V, UPDATES, ROWS, ACCUMULATED, LR = 23, 6, 4, 2, 1e-2
OPTIONS = {"diameter_every": 2, "perturbation_every": 3, "panel_size": 40, "strict": True}


class Model(nn.Module):
    """A decoder with dropout that returns its loss, as Hugging Face's do; labels are not shifted."""

    def __init__(self, dropout):
        super().__init__()
        torch.manual_seed(0)
        self.decoder, self.dropout = Plain(V, 6), nn.Dropout(dropout)

    def forward(self, input_ids, labels=None):
        logits = self.decoder.lm_head(self.dropout(self.decoder.hidden(input_ids)))
        if labels is None:
            return {"logits": logits}
        loss = nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def items(seed, number):
    rows = torch.randint(V, (number, 9), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row} for row in rows]


def loader(seed, number=ROWS * ACCUMULATED * UPDATES, rank=0, world=1):
    return DataLoader(items(seed, number * world)[rank * number :][:number], batch_size=ROWS)


class Run:
    """What a run needs and leaves.

    Args:
        folder: for checkpoints and logs.
        options: of the monitor; None for a run without it.
        stop_at: the update after which it is saved and ends.
        resumes: whether it goes on from there.
        broken: the update whose gradient has a nan.
        dropout: of the model; trainers draw their random numbers anew in a run that goes on.
        rank: of the process.
        world: how many processes there are.
    """

    def __init__(self, folder, options, *, stop_at=None, resumes=False, broken=None, dropout=0.1, rank=0, world=1):
        self.folder, self.stop_at, self.resumes, self.broken = folder, stop_at, resumes, broken
        self.options = None if options is None else OPTIONS | {"run_dir": str(folder / "runs")} | options
        self.rank, self.world = rank, world
        self.model = Model(dropout)
        self.head = self.model.decoder.lm_head.weight
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, weight_decay=0.1)
        self.optimizer.register_step_pre_hook(self._before)
        self.optimizer.register_step_post_hook(self._after)
        self.steps = 0 if not resumes else 3
        self.changes, self.failures = {}, None

    def _before(self, *_):
        self.steps += 1
        if self.steps == self.broken:
            self.head.grad[0, 0] = torch.nan
        self._weight = self.head.detach().double().clone()

    def _after(self, *_):
        self.changes[self.steps] = self.head.detach().double() - (1 - LR * 0.1) * self._weight

    @property
    def last(self):
        return self.stop_at or UPDATES

    @property
    def validation(self):
        return loader(1, 16)

    def batches(self):
        data = list(loader(0, rank=self.rank, world=self.world))
        return data[self.steps * ACCUMULATED : self.last * ACCUMULATED]


def train(adapter, run):
    """Train by an adapter's trainer; return the run, its model trained."""
    torch.manual_seed(1)
    with TRAINERS[adapter](run) as monitor:
        pass
    run.failures = None if monitor is None else monitor.guard.failures
    return run


def _loop(run, model, watched, backward, step):
    for number, batch in enumerate(run.batches(), 1):
        watched.begin_batch(batch, number)
        loss = model(**batch)["loss"]
        backward(loss)
        step(loss, number % ACCUMULATED == 0)
        if watched.should_stop:
            break


@contextmanager
def _watch(run):
    model = DistributedDataParallel(run.model) if run.world > 1 else run.model
    path = run.folder / "checkpoint.pt"
    saved = torch.load(path, weights_only=True) if run.resumes else None
    if saved:
        run.model.load_state_dict(saved["model"])
        run.optimizer.load_state_dict(saved["optimizer"])

    def loop(watched):
        def step(loss, last):
            if not last:
                watched.accumulate(loss)
                return
            nn.utils.clip_grad_norm_(run.model.parameters(), 0.5)
            run.optimizer.step()
            run.optimizer.zero_grad()
            watched.step(loss)
            if run.steps % 3 == 0:
                watched.log_validation(1.5)

        _loop(run, model, watched, lambda loss: (loss / ACCUMULATED).backward(), step)

    if run.options is None:
        loop(Mock(should_stop=False))
        yield None
        return
    state = saved and saved["monitor"]
    with hilbert_monitor.watch(
        model, run.optimizer, panel=run.validation, last_step=UPDATES, state=state, **run.options
    ) as watched:
        loop(watched)
        if run.stop_at:
            torch.save(_checkpoint(run) | {"monitor": watched.state_dict()}, path)
    yield watched.session


def _checkpoint(run):
    model, optimizer = run.model.state_dict(), run.optimizer.state_dict()
    return {"model": model, "optimizer": optimizer}


def _forget_accelerators(accelerate):
    """Forget the settings of earlier runs in this process."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


@contextmanager
def _accelerate(run):
    accelerate = pytest.importorskip("accelerate")
    _forget_accelerators(accelerate)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED)
    model, optimizer = accelerator.prepare(run.model, run.optimizer)
    path = run.folder / "checkpoint.pt"
    saved = torch.load(path, weights_only=True) if run.resumes else None
    if saved:
        run.model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])

    def loop(watched):
        for batch in run.batches():
            watched.begin_batch(batch)
            with accelerator.accumulate(model):
                loss = model(**batch)["loss"]
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
                watched.step(loss)
            if accelerator.sync_gradients and run.steps % 3 == 0:
                watched.log_validation(1.5)
            if watched.should_stop:
                break

    if run.options is None:
        loop(Mock(should_stop=False))
        yield None
        return
    options = run.options | {"last_step": UPDATES, "state": saved and saved["monitor"]}
    with hilbert_monitor.watch(model, optimizer, panel=run.validation, **options) as watched:
        loop(watched)
        if run.stop_at:
            torch.save(_checkpoint(run) | {"monitor": watched.state_dict()}, path)
    yield watched.session


@contextmanager
def _fabric(run):
    fabric = Fabric(accelerator="cpu", devices=run.world, strategy="ddp" if run.world > 1 else "auto")
    fabric.launch()
    model, optimizer = fabric.setup(run.model, run.optimizer)
    state = {"model": model, "optimizer": optimizer, "monitor": {}}
    if run.resumes:
        fabric.load(run.folder / "fabric.ckpt", state)

    def loop(watched):
        def step(loss, last):
            if last:
                fabric.clip_gradients(model, optimizer, max_norm=0.5)
                optimizer.step()
                optimizer.zero_grad()
                if run.steps % 3 == 0:
                    watched.log_validation(1.5)
                watched.step(loss)
            else:
                watched.accumulate(loss)

        _loop(run, model, watched, lambda loss: fabric.backward(loss / ACCUMULATED), step)

    if run.options is None:
        loop(Mock(should_stop=False))
        yield None
        return
    options = run.options | {"last_step": UPDATES, "state": state["monitor"] or None}
    options |= {"autocast": fabric.autocast, "log": fabric.log_dict}
    with hilbert_monitor.watch(model, optimizer, panel=run.validation, **options) as watched:
        loop(watched)
        if run.stop_at:
            state |= {"monitor": watched.state_dict()}
            fabric.save(run.folder / "fabric.ckpt", state)
    yield watched.session


class Module(lightning.LightningModule):
    def __init__(self, run):
        super().__init__()
        self.model, self.run = run.model, [run]

    def training_step(self, batch, _):
        return self.model(**batch)["loss"]

    def validation_step(self, batch, _):
        self.log("val_loss", 1.5, batch_size=ROWS)

    def configure_optimizers(self):
        return self.run[0].optimizer


@contextmanager
def _lightning(run):
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    monitor = None if run.options is None else HilbertMonitor(**run.options)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=run.world,
        strategy="ddp" if run.world > 1 else "auto",
        max_steps=run.last,
        accumulate_grad_batches=ACCUMULATED,
        gradient_clip_val=0.5,
        val_check_interval=3 * ACCUMULATED,
        num_sanity_val_steps=0,
        callbacks=[monitor] if monitor else [],
        logger=False,
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=run.folder,
    )
    path = str(run.folder / "lightning.ckpt") if run.resumes else None
    data = list(loader(0, rank=run.rank, world=run.world))
    data = data[run.steps * ACCUMULATED :] + data[: run.steps * ACCUMULATED]  # which a resumed run reads from the start
    data = DataLoader(data, batch_size=None)
    trainer.fit(Module(run), data, run.validation, ckpt_path=path, weights_only=False if path else None)
    if run.stop_at:
        trainer.save_checkpoint(run.folder / "lightning.ckpt")
    yield monitor and monitor.session


def _transformers(run, attached=True):
    transformers = pytest.importorskip("transformers")
    _forget_accelerators(pytest.importorskip("accelerate"))
    from hilbert_monitor.integrations.transformers import HilbertCallback

    args = transformers.TrainingArguments(
        output_dir=str(run.folder / "trainer"),
        max_steps=UPDATES,
        per_device_train_batch_size=ROWS,
        per_device_eval_batch_size=ROWS,
        gradient_accumulation_steps=ACCUMULATED,
        max_grad_norm=0.5,
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="steps" if run.stop_at else "no",
        save_steps=run.stop_at or 1,
        logging_steps=1,
        train_sampling_strategy="sequential",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=1,
    )

    class Stop(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_training_stop |= state.global_step == run.stop_at

    class Loss(transformers.Trainer):
        def prediction_step(self, *args, **kwargs):
            loss, *rest = super().prediction_step(*args, **kwargs)
            return torch.full_like(loss, 1.5), *rest

    data = items(0, ROWS * ACCUMULATED * UPDATES * run.world)
    if run.world > 1:  # Accelerate deals out batches in turn
        shares = [list(loader(0, rank=rank, world=run.world)) for rank in range(run.world)]
        data = [
            {name: batch[name][row] for name in batch}
            for together in zip(*shares, strict=True)
            for batch in together
            for row in range(ROWS)
        ]
    trainer = Loss(
        run.model,
        args,
        train_dataset=data,
        eval_dataset=items(1, 16),
        optimizers=(run.optimizer, torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: 1.0)),
        callbacks=[Stop()],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    session = None
    if run.options is not None:
        callback = HilbertCallback(**run.options)
        trainer.add_callback(callback)
        if attached:
            callback.attach(trainer)

        class Keep(transformers.TrainerCallback):
            def on_step_end(self, *_, **__):
                nonlocal session
                session = callback.run.session

        trainer.add_callback(Keep())
    torch.manual_seed(1)
    trainer.train(resume_from_checkpoint=str(run.folder / "trainer" / "checkpoint-3") if run.resumes else None)
    run.trainer = trainer
    return session


@contextmanager
def _attached(run):
    yield _transformers(run)


@contextmanager
def _not_attached(run):
    yield _transformers(run, attached=False)


TRAINERS = dict(zip(ADAPTERS, (_watch, _accelerate, _fabric, _lightning, _attached, _not_attached), strict=True))


def rank_environment(rank, world):
    """What torchrun tells a process, for trainers that ask for it."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0"}

"""HilbertMonitor under Lightning's ModelParallelStrategy: what DDP measures, on a model that FSDP2 shards."""

import logging
import os
import resource
import signal
import warnings

import lightning
import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy, SingleDeviceStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler

from hilbert_monitor import HilbertMonitor
from hilbert_monitor.runs.reader import RunReader
from tests.support.decoders import Plain
from tests.support.ranks import in_ranks
from tests.support.training import Module, Text, V, fit
from tests.support.tried import OURS, tried

JUMP, STEPS = 25, 27
"""The step at which the learning rate is ten times what it was, and the last."""
FIELDS = ("diameter", "diameter_lower", "row_norm", "perturbation_rms", "train_loss", "validation_loss")


class Jumps(lightning.LightningModule):
    """A small decoder with dropout that has an accident with its learning rate."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model = Plain(V, 16)
        self.dropout = nn.Dropout(0.2)

    def configure_model(self):
        if self.device_mesh is not None:
            for part in (*self.model.blocks, self.model.lm_head, self.model):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def loss(self, tokens):
        logits = self.dropout(self.model(tokens[:, :-1]))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def training_step(self, tokens, _):
        return self.loss(tokens)

    def validation_step(self, tokens, _):
        self.log("val_loss", self.loss(tokens), sync_dist=True)

    def configure_optimizers(self):
        optimizer = AdamW(self.parameters(), lr=1e-3)
        schedule = LambdaLR(optimizer, lambda t: 10.0 if t + 1 == JUMP else 1.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class FullDisk(lightning.Callback):
    """The second rank cannot write more than a few bytes to any file during the step that blows up."""

    def on_train_batch_start(self, trainer, *_):
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        if trainer.global_rank == 1 and trainer.global_step in (JUMP - 1, JUMP):
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100 if trainer.global_step == JUMP - 1 else most, most))


def train(rank, folder, strategy, *callbacks, checkpoint=None):
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp" if strategy == "ddp" else ModelParallelStrategy(2, 1),
        max_steps=STEPS,
        max_epochs=-1,
        gradient_clip_val=1.0,
        val_check_interval=6,
        logger=False,
        callbacks=list(callbacks),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    torch.manual_seed(rank)
    train, val = (
        DataLoader(data, batch_size=4, sampler=DistributedSampler(data, 2, rank, shuffle=False))
        for data in (Text(0), Text(1, 16))
    )
    module = Jumps()
    trainer.fit(module, train, val, ckpt_path=checkpoint)
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in module.parameters()]
    return [p.detach().clone() for p in whole]


def monitor(folder, name, **options):
    given = {"panel_size": 50, "perturbation_every": 7, "on_blowup": ["checkpoint"], "strict": True} | options
    return HilbertMonitor(run_name=name, run_dir=str(folder / "runs"), **given)


def runs_of_a_rank(rank, world, folder):
    os.environ["LOCAL_RANK"] = str(rank)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    full = monitor(folder, "full", strict=False)
    weights = {
        "ddp": train(rank, folder, "ddp", monitor(folder, "ddp")),
        "fsdp": train(rank, folder, "fsdp", monitor(folder, "fsdp")),
        "unwatched": train(rank, folder, "fsdp"),
        "full": train(rank, folder, "fsdp", FullDisk(), full),
    }
    saved = folder / "runs" / "fsdp" / f"blow-up-step-{JUMP}.ckpt"
    again = monitor(folder, "again", on_blowup=[])
    train(rank, folder, "fsdp", again, checkpoint=saved)
    return weights, full.session.guard.failures, again.session.probe.step


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Runs on two ranks, and their folder."""
    folder = tmp_path_factory.mktemp("two")
    return in_ranks(runs_of_a_rank, folder / "ranks", folder), folder


def records(folder, name):
    return list(RunReader(folder / "runs" / name).steps())


@pytest.mark.sweep
def test_rank_zero_records_what_it_records_under_ddp(two):
    _, folder = two
    sharded, replicated = records(folder, "fsdp"), records(folder, "ddp")
    assert [r.step for r in sharded] == list(range(1, STEPS + 1))
    for mine, theirs in zip(sharded, replicated, strict=True):
        assert (mine.tokens, mine.batch) == (theirs.tokens, theirs.batch)
        for field in FIELDS:
            value = getattr(theirs, field)
            assert getattr(mine, field) == (None if value is None else pytest.approx(value, rel=1e-3)), field
    assert RunReader(folder / "runs" / "fsdp").info.panel_hash == RunReader(folder / "runs" / "ddp").info.panel_hash
    for strategy in ("DDP, 2 ranks", "FSDP2, 2 ranks"):
        optimizer = RunReader(folder / "runs" / "fsdp").info.head_optimizer
        tried(model=OURS, trainer="Lightning", optimizer=optimizer, strategy=strategy, libraries=["lightning"])


@pytest.mark.sweep
def test_training_is_bit_for_bit_that_without_the_monitor(two):
    for weights, _, _ in two[0]:
        for name in ("fsdp", "full"):
            assert all(torch.equal(a, b) for a, b in zip(weights[name], weights["unwatched"], strict=True))


@pytest.mark.sweep
def test_a_blow_up_is_saved_by_all_ranks_in_a_folder_that_a_run_can_go_on_from(two):
    ranks, folder = two
    assert next(iter(RunReader(folder / "runs" / "fsdp").alerts())).step == JUMP
    assert len(list((folder / "runs" / "fsdp" / f"blow-up-step-{JUMP}.ckpt").glob("*.distcp"))) == 2
    assert [r.step for r in records(folder, "again")] == list(range(JUMP + 1, STEPS + 1))
    assert all(step == STEPS for _, _, step in ranks)


@pytest.mark.sweep
def test_one_rank_with_a_full_disk_costs_the_checkpoint_and_nothing_else(two):
    ranks, folder = two
    assert all(failures == {"checkpoint of a blow-up": 1} for _, failures, _ in ranks)
    assert [r.step for r in records(folder, "full")] == list(range(1, STEPS + 1))


class FSDPStrategy(SingleDeviceStrategy):
    """Stands for Lightning's, which needs a GPU."""


def test_under_the_older_fsdp_strategy_one_sentence_says_what_to_use_and_training_goes_on():
    watched = HilbertMonitor(panel_size=50, strict=True, run_dir=None)
    with pytest.warns(UserWarning, match="use ModelParallelStrategy, with fully_shard in configure_model") as told:
        trainer = fit(Module(), watched, strategy=FSDPStrategy(device=torch.device("cpu")))
    assert trainer.state.finished
    assert watched.session.probe is None
    assert len([w for w in told if "hilbert_monitor" in str(w.message)]) == 1

"""A run with the monitor ends bit for bit where one without it does, with everything switched on that runs have.

Dropout, batch norm, a spectral norm, a mixture that counts its calls and its experts' loads in any mode, accumulation,
bf16, clipping, a schedule, a shuffling loader with workers, data and a loss that draw from every generator, training
and validation data that share generators and a counter, validation in between, a logger and a progress bar: in one
process and in two.
"""

import csv
import logging
import os
import random

import lightning
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.optim import AdamW
from torch.utils.data import DataLoader, Dataset

from hilbert_monitor import HilbertMonitor, pretraining_optimizer, warmup_cosine
from tests.support.decoders import Plain
from tests.support.ranks import in_ranks
from tests.support.sinks import Recorder

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
V, UPDATES, ACCUMULATE = 37, 20, 2
SHORT = 5  # updates, with a validation before the last ones
MAKES = ("adamw", "rownorm", "torch")
TOGETHER = ("rownorm", "torch")  # a chain and a panel of the loader, AdamW for all and the paper's panel


class Augmentation:
    """Random numbers from generators of its own, and a counter: what training and validation data share."""

    def __init__(self):
        self.torch, self.numpy = torch.Generator().manual_seed(5), np.random.default_rng(5)
        self.legacy, self.python = np.random.RandomState(5), random.Random(5)
        self.count, self.cache = 0, {}

    def draw(self):
        self.count += 1
        number = float(torch.rand((), generator=self.torch)) + self.numpy.random() + self.legacy.rand()
        self.cache[self.count % 7] = number + self.python.random()
        return sum(self.cache.values()) + self.count / 10

    def state(self):
        states = self.torch.get_state(), self.numpy.bit_generator.state, self.legacy.get_state()[1:]
        return [*states, self.python.getstate(), self.count, self.cache]


class Text(Dataset):
    """Items that draw a random number from each generator."""

    def __init__(self, seed, items, augmentation):
        self.ids = torch.randint(0, V, (items, 10), generator=torch.Generator().manual_seed(seed))
        self.augmentation = augmentation

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        shift = V * (float(torch.rand(())) + random.random() + np.random.rand() + self.augmentation.draw())
        return (self.ids[index] + int(shift)) % V


class Mixture(nn.Module):
    """Two experts behind a noisy router. It counts calls and loads in any mode, and they change what it does."""

    def __init__(self, d):
        super().__init__()
        self.router, self.experts = spectral_norm(nn.Linear(d, 2, bias=False)), nn.Parameter(0.1 * torch.randn(2, d))
        self.register_buffer("load", torch.zeros(2))
        self.calls, self.recent, self.noise = 0, [], torch.Generator().manual_seed(3)

    def forward(self, x):
        bias = self.load / (1 + self.calls) - torch.rand(2, generator=self.noise)
        gates = (self.router(x) - 0.1 * bias).softmax(-1)
        self.load += gates.detach().float().flatten(0, -2).sum(0)
        self.load.data.mul_(0.99)
        self.calls += 1
        self.recent.append(float(self.load[0]))
        return x + (1 + len(self.recent) / 50) * (gates @ self.experts.to(gates.dtype))


class Module(lightning.LightningModule):
    def __init__(self, make, updates):
        super().__init__()
        self.make, self.updates = make, updates
        self.model, self.norm, self.dropout = Plain(V, 16, bias=False), nn.BatchNorm1d(16), nn.Dropout(0.2)
        self.mixture = Mixture(16)
        self.model.blocks.append(self.mixture)

    def forward(self, tokens):
        hidden = self.model.hidden(tokens)
        return self.model.lm_head(self.dropout(self.norm(hidden.flatten(0, 1)).view_as(hidden)))

    def loss(self, tokens):
        return nn.functional.cross_entropy(self(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())

    def training_step(self, tokens, _):
        loss = self.loss(tokens) * (1 + 0.1 * random.random() + 0.1 * np.random.rand())
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, tokens, _):
        self.log("val_loss", self.loss(tokens))

    def configure_optimizers(self):
        whole = self.make == "torch"
        optimizer = AdamW(self.parameters(), lr=1e-2) if whole else pretraining_optimizer(self, self.make)
        schedule = warmup_cosine(optimizer, total_steps=self.updates)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Everything(lightning.Callback):
    """Copies what a run leaves behind, when all other callbacks have finished."""

    def teardown(self, trainer, pl_module, stage):
        (optimizer,) = trainer.optimizers
        (schedule,) = [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]
        state = optimizer.state_dict()
        modules = dict(pl_module.named_modules())
        hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        self.found = {
            "weights": {name: p.detach().clone() for name, p in pl_module.named_parameters()},
            "buffers": {name: b.clone() for name, b in pl_module.named_buffers()},
            "mixture": [pl_module.mixture.calls, pl_module.mixture.recent, pl_module.mixture.noise.get_state()],
            "gradients": {n: None if p.grad is None else p.grad.clone() for n, p in pl_module.named_parameters()},
            "optimizer state": {str(k): dict(v) for k, v in state["state"].items()},
            "optimizer groups": [{k: v for k, v in g.items() if k != "params"} for g in state["param_groups"]],
            "schedule": {k: v for k, v in schedule.items() if isinstance(v, int | float | list)},
            "torch rng": torch.get_rng_state(),
            "numpy rng": np.random.get_state()[1:],
            "python rng": random.getstate(),
            "training flags": {name: module.training for name, module in modules.items()},
            "requires_grad": {name: p.requires_grad for name, p in pl_module.named_parameters()},
            "hooks": {(name, kind): len(getattr(m, kind)) for name, m in modules.items() for kind in hooks},
            "optimizer hooks": [len(o._optimizer_step_post_hooks) for o in (optimizer, *optimizers_in(optimizer))],
            "switches": (
                torch.is_grad_enabled(),
                torch.is_inference_mode_enabled(),
                torch.is_autocast_enabled("cpu"),
                torch.is_autocast_cache_enabled(),
                torch.get_float32_matmul_precision(),
                torch.backends.mkldnn.matmul.fp32_precision,
                torch.get_num_threads(),
                torch.are_deterministic_algorithms_enabled(),
                torch.get_default_dtype(),
            ),
            "progress": (trainer.global_step, trainer.current_epoch, trainer.fit_loop.batch_idx),
        }


def optimizers_in(optimizer):
    return getattr(optimizer, "optimizers", ())


def run(make, folder, *monitors, updates=UPDATES, workers=1, world=1):
    """Train, and return what is left: of this process, and of the log."""
    torch.manual_seed(0)
    module, everything, logger = Module(make, updates), Everything(), CSVLogger(folder, flush_logs_every_n_steps=1)
    augmentation = Augmentation()
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp" if world > 1 else "auto",
        devices=world,
        precision="bf16-mixed",
        max_steps=updates,
        max_epochs=-1,
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=0.5,
        val_check_interval=7 // world,  # and none after the last update: it would clear the gradients
        limit_val_batches=2,
        log_every_n_steps=1,
        callbacks=[*monitors, everything],
        logger=logger,
        enable_progress_bar=world == 1,  # its thread, a gloo process and a fork: CPython 3.11 can deadlock
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    # 30 batches to an epoch: the run has two, and its last update is not the last of an epoch
    fork = "fork" if workers else None  # a process that was spawned would spawn them too, for seconds
    options = {"num_workers": workers, "multiprocessing_context": fork, "drop_last": True}
    train = DataLoader(Text(0, 120, augmentation), batch_size=4, shuffle=True, **options)
    trainer.fit(module, train, DataLoader(Text(1, 40, augmentation), batch_size=4))
    log = logged(folder) if trainer.is_global_zero else None  # which rank zero may still be writing
    return everything.found | {"log": log, "data": augmentation.state()}


def logged(folder):
    """What the run itself wrote to the log."""
    path = folder / "lightning_logs" / "version_0" / "metrics.csv"
    with path.open() as file:
        rows = list(csv.DictReader(file))
    return {
        name: [(row["step"], row[name]) for row in rows if row.get(name)]
        for name in ("train_loss", "val_loss", "epoch")
    }


def differences(plain, watched):
    """Names of what differs in a bit."""
    return [name for name in plain if not same(plain[name], watched[name])]


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))
    if isinstance(a, np.ndarray):
        return a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def bits(x):
    return x.detach().contiguous().reshape(-1).view(torch.uint8)


def pair_of_runs(make, folder, world=1):
    """A run without the monitor, one with it, and the records of the second."""
    kept, panel = Recorder(), "paper" if make == "torch" else "loader"
    monitor = HilbertMonitor(
        diameter_every=5, perturbation_every=10, panel_size=50, panel=panel, sinks=[kept], strict=True
    )
    plain = run(make, folder / f"{make} alone", world=world)
    return plain, run(make, folder / f"{make} watched", monitor, world=world), kept.records


def check_records(records):
    assert [record.step for record in records] == list(range(1, UPDATES + 1))
    assert [r.step for r in records if r.diameter is not None] == list(range(5, UPDATES + 1, 5))
    assert [r.step for r in records if r.perturbation_rms is not None] == list(range(10, UPDATES + 1, 10))


@pytest.mark.few("rownorm")
@pytest.mark.parametrize("make", MAKES)
def test_one_process_ends_bit_for_bit_where_it_would_without_the_monitor(make, tmp_path):
    plain, watched, records = pair_of_runs(make, tmp_path)
    check_records(records)
    assert plain["progress"][0] == UPDATES
    assert len(plain["log"]["val_loss"]) == 5
    assert any(g is not None and bool(g.any()) for g in plain["gradients"].values())
    assert differences(plain, watched) == []


def all_pairs_of_runs(rank, world, folder, port):
    """In a process of its own, as torchrun starts it."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    os.environ |= {
        "TORCHELASTIC_RUN_ID": "test",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    return {make: pair_of_runs(make, folder, world) for make in TOGETHER}


@pytest.mark.sweep
def test_two_processes_end_bit_for_bit_where_they_would_without_the_monitor(tmp_path):
    first, second = in_ranks(all_pairs_of_runs, tmp_path / "ranks", tmp_path, 29511)
    for make in TOGETHER:
        for rank, (plain, watched, records) in enumerate((first[make], second[make])):
            assert plain["progress"][0] == UPDATES
            assert differences(plain, watched) == [], f"{make}, rank {rank}"
            if rank == 0:
                check_records(records)
            else:
                assert records == []  # rank zero writes
        assert same(first[make][0]["weights"], second[make][0]["weights"])


class Logging(lightning.LightningModule):
    """Is itself the model, and logs in its forward pass."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.lm_head = nn.Embedding(V, 16), nn.Linear(16, V)

    def forward(self, tokens):
        logits = self.lm_head(self.embed(tokens))
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def training_step(self, tokens, _):
        return self(tokens)

    def validation_step(self, tokens, _):
        self(tokens)

    def configure_optimizers(self):
        return AdamW(self.parameters())


def test_what_a_forward_pass_logs_is_not_logged_for_the_panel():
    logged = []
    for monitors in ([], [HilbertMonitor(diameter_every=2, perturbation_every=2, panel_size=20, strict=True)]):
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_epochs=2,
            callbacks=monitors,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
        )
        text = torch.randint(V, (24, 9), generator=torch.Generator().manual_seed(0))
        trainer.fit(Logging(), DataLoader(text, batch_size=4), DataLoader(text, batch_size=4))
        logged.append({name: float(value) for name, value in trainer.callback_metrics.items() if name != "D(S)"})
    assert set(logged[0]) == {"loss", "loss_step", "loss_epoch"}
    assert logged[0] == logged[1]


# The comparison notices a monitor that does not keep to itself


class DrawsFromTorch(HilbertMonitor):
    def on_train_batch_end(self, *args):
        super().on_train_batch_end(*args)
        torch.rand(1)


class DrawsFromNumpy(HilbertMonitor):
    def on_validation_end(self, *args):
        super().on_validation_end(*args)
        np.random.rand()


class DrawsFromPython(HilbertMonitor):
    def on_train_start(self, *args):
        super().on_train_start(*args)
        random.random()


class LeavesEval(HilbertMonitor):
    def on_train_batch_end(self, trainer, pl_module, *args):
        super().on_train_batch_end(trainer, pl_module, *args)
        pl_module.norm.eval()


class LeavesEvalAtTheEnd(HilbertMonitor):
    def on_train_end(self, trainer, pl_module):
        super().on_train_end(trainer, pl_module)
        pl_module.dropout.eval()


class AddsAUnitInTheLastPlace(HilbertMonitor):
    def on_train_end(self, trainer, pl_module):
        super().on_train_end(trainer, pl_module)
        weight = pl_module.model.lm_head.weight.detach()
        weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(9.0))


class ScalesTheMomentum(HilbertMonitor):
    def on_train_end(self, trainer, pl_module):
        super().on_train_end(trainer, pl_module)
        next(iter(trainer.optimizers[0].state_dict()["state"].values()))["momentum_buffer"].mul_(1 + 1e-6)


class FormsInTheGradient(HilbertMonitor):
    def on_train_end(self, trainer, pl_module):
        super().on_train_end(trainer, pl_module)
        pl_module.model.lm_head.weight.grad.zero_()


class Freezes(HilbertMonitor):
    def on_train_end(self, trainer, pl_module):
        super().on_train_end(trainer, pl_module)
        pl_module.norm.requires_grad_(False)


class LeavesAHook(HilbertMonitor):
    def on_train_start(self, trainer, pl_module):
        super().on_train_start(trainer, pl_module)
        pl_module.model.lm_head.register_forward_hook(lambda *_: None)


class NeverLetsGo(HilbertMonitor):
    def teardown(self, trainer, pl_module, stage):
        pass


class CountsACall(HilbertMonitor):
    def on_train_end(self, trainer, pl_module):
        super().on_train_end(trainer, pl_module)
        pl_module.mixture.calls += 1


class ReadsAnItem(HilbertMonitor):
    def on_train_start(self, trainer, pl_module):
        super().on_train_start(trainer, pl_module)
        trainer.val_dataloaders.dataset.augmentation.draw()


class TurnsTheCacheOff(HilbertMonitor):
    def on_train_end(self, trainer, pl_module):
        super().on_train_end(trainer, pl_module)
        torch.set_autocast_cache_enabled(False)


BROKEN = {
    DrawsFromTorch: {"torch rng", "weights", "log"},
    DrawsFromNumpy: {"numpy rng", "weights"},
    DrawsFromPython: {"python rng", "weights"},
    LeavesEval: {"training flags", "buffers", "weights"},
    LeavesEvalAtTheEnd: {"training flags"},
    AddsAUnitInTheLastPlace: {"weights"},
    ScalesTheMomentum: {"optimizer state"},
    FormsInTheGradient: {"gradients"},
    Freezes: {"requires_grad"},
    LeavesAHook: {"hooks"},
    NeverLetsGo: {"optimizer hooks"},
    CountsACall: {"mixture"},
    ReadsAnItem: {"data", "weights"},
    TurnsTheCacheOff: {"switches"},
}
"""Ways to interfere, and what must differ then."""


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """A short run without the monitor."""
    return run("rownorm", tmp_path_factory.mktemp("short"), updates=SHORT, workers=0)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", [HilbertMonitor, *BROKEN], ids=lambda kind: kind.__name__)
def test_a_monitor_that_interferes_is_noticed(kind, short, tmp_path):
    monitor = kind(diameter_every=2, perturbation_every=4, panel_size=20)
    try:
        found = set(differences(short, run("rownorm", tmp_path, monitor, updates=SHORT, workers=0)))
    finally:
        torch.set_autocast_cache_enabled(True)
    assert found >= BROKEN.get(kind, set())
    assert bool(found) == (kind in BROKEN)

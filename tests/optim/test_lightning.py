"""One optimizer in Lightning's automatic optimization: the weights of a hand-written loop, to the bit."""

import logging

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.nn.functional import cross_entropy

from hilbert_monitor import pretraining_optimizer, warmup_cosine
from hilbert_monitor.geometry import row_diameter
from tests.support.decoders import Plain

BATCHES, ACCUMULATE, CLIP = 24, 2, 0.5
UPDATES = BATCHES // ACCUMULATE

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Module(lightning.LightningModule):
    def __init__(self, head, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.model, self.head = Plain(37, 16, bias=True).to(dtype), head

    def training_step(self, tokens, _):
        return loss_of(self.model, tokens)

    def configure_optimizers(self):
        optimizer = pretraining_optimizer(self.model, self.head)
        scheduler = warmup_cosine(optimizer, UPDATES, warmup=0.25)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def loss_of(model, tokens):
    return cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


class Tokens:
    """Batches that know where they were."""

    at = 0

    def __iter__(self):
        data = batches()
        while self.at < BATCHES:
            self.at += 1
            yield data[self.at - 1]

    def __len__(self):
        return BATCHES

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def batches():
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(0, 37, (4, 9), generator=draw) for _ in range(BATCHES)]


def fit(module, folder, *, ckpt_path=None, precision="32-true", callbacks=(), **options):
    trainer = lightning.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        precision=precision,
        max_epochs=1,
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=CLIP,
        callbacks=list(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )

    trainer.fit(module, Tokens(), ckpt_path=ckpt_path)
    return [p.detach().clone() for p in module.parameters()]


def by_hand(head, precision="32-true"):
    """The same training without Lightning: autocast around the loss, accumulation, clipping, step, schedule."""
    torch.manual_seed(0)
    model = Plain(37, 16, bias=True).to(torch.bfloat16 if precision == "bf16-true" else torch.float32)
    optimizer = pretraining_optimizer(model, head)
    scheduler = warmup_cosine(optimizer, UPDATES, warmup=0.25)
    data = batches()
    for update in range(UPDATES):
        optimizer.zero_grad()
        for tokens in data[update * ACCUMULATE : (update + 1) * ACCUMULATE]:
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed", cache_enabled=False):
                loss = loss_of(model, tokens)
            (loss / ACCUMULATE).backward()
        nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], CLIP)
        optimizer.step()
        scheduler.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("head", ["rownorm", "adamw"])
def test_weights_equal_a_hand_written_loops(head, precision, tmp_path):
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    weights = fit(Module(head, dtype), tmp_path, precision=precision, enable_checkpointing=False)
    for a, b in zip(weights, by_hand(head, precision), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_a_run_resumed_from_the_middle_ends_bit_for_bit_where_the_whole_one_does(tmp_path, precision):
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=5, save_top_k=-1)
    whole = fit(Module("rownorm", dtype), tmp_path, precision=precision, callbacks=[saving])
    for step in (5, 10):
        options = {"precision": precision, "enable_checkpointing": False}
        again = fit(Module("rownorm", dtype), tmp_path, ckpt_path=tmp_path / f"step={step}.ckpt", **options)
        assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))


class Asks(Callback):
    """Asks the optimizer for the head's increment after every step."""

    def on_fit_start(self, trainer, pl_module):
        self.diameters = []
        (optimizer,) = trainer.optimizers
        head = pl_module.model.lm_head.weight
        optimizer.register_step_post_hook(
            lambda o, *_: self.diameters.append((row_diameter(o.increment(head)).value, o.param_groups[-1]["lr"]))
        )


def test_every_steps_diameter_is_within_twice_its_learning_rate_and_asking_changes_nothing(tmp_path):
    asks = Asks()
    weights = fit(Module("rownorm"), tmp_path, callbacks=[asks], enable_checkpointing=False)
    assert len(asks.diameters) == UPDATES
    assert asks.diameters[0] == (0.0, 0.0)
    assert all(0.5 * lr < diameter <= 2 * lr * (1 + 1e-6) for diameter, lr in asks.diameters[1:])
    assert all(torch.equal(a, b) for a, b in zip(weights, by_hand("rownorm"), strict=True))

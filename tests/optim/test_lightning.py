"""One optimizer in Lightning's automatic optimization: the weights of a hand-written loop, to the bit."""

import logging

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from hilbert_monitor import pretraining_optimizer, warmup_cosine
from tests.support.decoders import Plain

BATCHES, EPOCHS, ACCUMULATE, CLIP = 8, 3, 2, 0.5
UPDATES = BATCHES * EPOCHS // ACCUMULATE

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


def batches():
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(0, 37, (4, 9), generator=draw) for _ in range(BATCHES)]


def fit(module, folder, *, ckpt_path=None, precision="32-true", callbacks=(), **options):
    trainer = lightning.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        precision=precision,
        max_epochs=EPOCHS,
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=CLIP,
        callbacks=list(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, DataLoader(batches(), batch_size=None), ckpt_path=ckpt_path)
    return [p.detach().clone() for p in module.parameters()]


def by_hand(head, precision="32-true"):
    """The same training without Lightning: autocast around the loss, accumulation, clipping, step, schedule."""
    torch.manual_seed(0)
    model = Plain(37, 16, bias=True).to(torch.bfloat16 if precision == "bf16-true" else torch.float32)
    optimizer = pretraining_optimizer(model, head)
    scheduler = warmup_cosine(optimizer, UPDATES, warmup=0.25)
    data = EPOCHS * batches()
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
    saving = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    whole = fit(Module("rownorm", dtype), tmp_path, precision=precision, callbacks=[saving])
    for epoch in (0, 1):
        options = {"precision": precision, "enable_checkpointing": False}
        again = fit(Module("rownorm", dtype), tmp_path, ckpt_path=tmp_path / f"epoch={epoch}.ckpt", **options)
        assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))

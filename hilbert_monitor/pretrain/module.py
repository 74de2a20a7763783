"""Runs a recipe with Lightning: the module, the trainer, and a run from start to end."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils.data import DataLoader

from hilbert_monitor.monitor.callback import HilbertMonitor
from hilbert_monitor.monitor.trust_region import TrustRegion
from hilbert_monitor.optim import pretraining_optimizer, warmup_cosine

from .data import Batch, TrainingLoader, ValidationBlocks, validation_loader
from .model import Decoder
from .parallel import shard, trainer_strategy
from .recipes import Recipe
from .tokenization import TOKENIZER, load_decoder


class Pretraining(lightning.LightningModule):
    """The decoder of a recipe with its loss, optimizers and schedule."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.model = Decoder(recipe.model)
        self._compiled: Callable[..., Tensor] | None = torch.compile(self.model.loss) if recipe.compile else None
        self._shards = False

    def configure_model(self) -> None:
        """Shard the decoder, where the recipe asks for it."""
        if self.recipe.sharded and not self._shards:
            assert self.device_mesh is not None
            shard(self.model, self.device_mesh)
            self._shards = True

    def training_step(self, batch: Batch, _: int) -> Tensor:
        """Return the mean cross entropy of a micro-batch."""
        return (self._compiled or self.model.loss)(*batch, chunk=self.recipe.loss_chunk)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute gradients; of logits that tensor-parallel ranks share as torch wants it."""
        with loss_parallel() if self._shards and self.recipe.tensor_parallel > 1 else nullcontext():
            super().backward(loss, *args, **kwargs)

    def validation_step(self, batch: Batch, _: int) -> None:
        """Log the loss. Lightning averages it over the micro-batches of all ranks."""
        loss = self.model.loss(*batch, chunk=self.recipe.loss_chunk)
        self.log("val_loss", loss, sync_dist=True, batch_size=1)

    def configure_optimizers(self) -> Any:
        """Return the paper's optimizers in one chain, and its schedule."""
        r = self.recipe
        assert r.updates is not None
        optimizer = pretraining_optimizer(
            self.model,
            r.head,
            head_lr=r.head_lr,
            matrix_lr=r.matrix_lr,
            embedding_lr=r.embedding_lr,
            weight_decay=r.weight_decay,
        )
        schedule = warmup_cosine(optimizer, total_steps=r.updates, warmup=r.warmup, floor=r.final_rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the random state, which matters to a model with dropout."""
        checkpoint["torch_random_state"] = torch.get_rng_state()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the random state."""
        if "torch_random_state" in checkpoint:
            torch.set_rng_state(checkpoint["torch_random_state"])


class LastValidation(Callback):
    """Makes Lightning validate after the last update too, if that is not a multiple of the interval."""

    def __init__(self, recipe: Recipe) -> None:
        assert recipe.updates is not None
        self.last, self.batches = recipe.updates - 1, recipe.updates * recipe.accumulation

    def on_train_batch_start(self, trainer: lightning.Trainer, *_: Any) -> None:
        """Make the interval the whole run before the last update."""
        if trainer.global_step == self.last:
            trainer.val_check_batch = self.batches


class UpdateCheckpoint(ModelCheckpoint):
    """Saves after updates alone: Lightning's own saves again after the first micro-batch of a resumed update."""

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Note the update that the run goes on from."""
        super().on_train_start(trainer, pl_module)
        self._last_global_step_saved = trainer.global_step


@dataclass(frozen=True)
class Places:
    """The folders that a run reads from and writes to, and its name."""

    data: Path
    runs: Path = Path("runs")
    checkpoints: Path = Path("checkpoints")
    name: str = ""

    def run_name(self, recipe: Recipe) -> str:
        """Return the name of the run: the given one, or one of size, head and seed."""
        return self.name or f"{recipe.size}-{recipe.head}-seed{recipe.seed}"

    def last_checkpoint(self, recipe: Recipe) -> Path | None:
        """Return the newest checkpoint of a run: a file, or of a sharded model a folder that is complete.

        Raises:
            ValueError: if the run was saved under another strategy.
        """
        folder = self.checkpoints / self.run_name(recipe)
        file = folder / "last.ckpt"
        complete = list(folder.glob("*.ckpt/meta.pt"))  # Lightning writes it last
        if file.exists() if recipe.sharded else complete:
            raise ValueError(
                f"{folder} has checkpoints of another strategy than {recipe.strategy}: go on with the strategy of that"
                " run, or begin anew under another --name"
            )
        if not recipe.sharded:
            return file if file.exists() else None
        return max(complete, key=lambda path: path.stat().st_mtime).parent if complete else None


def train(
    recipe: Recipe,
    places: Places,
    *,
    accelerator: str = "auto",
    resume: bool = True,
    callbacks: Sequence[Callback] = (),
    monitor: dict[str, Any] | None = None,
    quiet: bool = False,
) -> lightning.Trainer:
    """Run a recipe, or continue it from its last checkpoint.

    Args:
        recipe: resolved.
        places: folders of data, logs and checkpoints.
        accelerator: as in Lightning.
        resume: continue from the last checkpoint of this name, if there is one.
        callbacks: further callbacks.
        monitor: further arguments of HilbertMonitor.
        quiet: show no progress bar and no model summary.
    """
    assert recipe.updates is not None
    name = places.run_name(recipe)
    lightning.seed_everything(recipe.seed, verbose=False)
    trainer = _trainer(recipe, places, accelerator, [*callbacks, *_watchers(recipe, places, name, monitor)], quiet)
    torch.manual_seed(recipe.seed + (0 if recipe.sharded else trainer.global_rank))  # DDP sends rank zero's weights
    module = Pretraining(recipe)
    last = places.last_checkpoint(recipe) if resume else None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*does not have many workers.*")
        warnings.filterwarnings("ignore", ".*`isinstance.treespec, LeafSpec.`.*")
        trainer.fit(module, *_loaders(recipe, places, trainer), ckpt_path=last)
    return trainer


def _loaders(recipe: Recipe, places: Places, trainer: lightning.Trainer) -> tuple[TrainingLoader, DataLoader[Batch]]:
    rank, world = trainer.global_rank // recipe.tensor_parallel, recipe.readers
    training = TrainingLoader(
        places.data,
        context=recipe.context,
        vocab_size=recipe.vocab_size,
        global_batch=recipe.global_batch,
        micro_batch=recipe.micro_batch,
        rank=rank,
        world=world,
        seed=recipe.seed,
        steps=recipe.updates,
        pin_memory=True,
    )
    blocks = ValidationBlocks(
        places.data, context=recipe.context, vocab_size=recipe.vocab_size, tokens=recipe.validation_tokens
    )
    return training, validation_loader(blocks, micro_batch=recipe.micro_batch, rank=rank, world=world, pin_memory=True)


def _watchers(recipe: Recipe, places: Places, name: str, monitor: dict[str, Any] | None) -> list[Callback]:
    assert recipe.updates is not None
    options: dict[str, Any] = {
        "panel_size": recipe.panel_size,
        "diameter_every": recipe.diameter_every,
        "perturbation_every": recipe.perturbation_every,
        "panel": recipe.panel,
        "efficiency": recipe.efficiency,
        "hidden": hidden_of,
        "decode": load_decoder(places.data) if (places.data / TOKENIZER).exists() else None,
        "run_dir": str(places.runs),
        "run_name": name,
        "config": recipe.as_dict(),
    }
    saver = UpdateCheckpoint(
        dirpath=places.checkpoints / name,
        every_n_train_steps=recipe.checkpoint_every,
        save_last=not recipe.sharded,  # a folder cannot be replaced at once: the new one has a name of its own
        save_top_k=1,
        save_on_train_epoch_end=False,
        enable_version_counter=False,
    )
    region = [] if recipe.trust_region is None else [TrustRegion(recipe.trust_region, how=recipe.trust_how)]
    return [HilbertMonitor(**options | (monitor or {})), *region, LastValidation(recipe), saver]


def hidden_of(module: Any, batch: Batch) -> Tensor:
    """Return what the head is given for a batch: a chunked loss never calls the head itself."""
    states: Tensor = module.model.hidden(batch[0])
    return states


def _trainer(
    recipe: Recipe, places: Places, accelerator: str, callbacks: list[Callback], quiet: bool
) -> lightning.Trainer:
    positions = recipe.readers * recipe.micro_batch * recipe.context
    return lightning.Trainer(
        accelerator=accelerator,
        devices=recipe.devices,
        num_nodes=recipe.nodes,
        strategy=trainer_strategy(recipe),
        precision=recipe.precision,
        max_steps=recipe.updates or -1,
        max_epochs=-1,
        accumulate_grad_batches=recipe.accumulation,
        gradient_clip_val=recipe.clip,
        val_check_interval=recipe.validation_every * recipe.accumulation,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=-(-recipe.panel_size // positions),  # the monitor takes its panel from these batches
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=not quiet,
        enable_model_summary=not quiet,
        default_root_dir=places.runs,
        use_distributed_sampler=False,
    )

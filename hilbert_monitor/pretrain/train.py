"""Training of a recipe with Lightning: its module, strategy, checkpoints and run."""

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
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from hilbert_monitor.monitor.callback import HilbertMonitor
from hilbert_monitor.monitor.trust_region import TrustRegion
from hilbert_monitor.optim import pretraining_optimizer, warmup_cosine

from .data import Batch, TrainingLoader, ValidationLoader, rescaled
from .model import Decoder
from .recipe import Recipe
from .text import TOKENIZER, load_decoder


@dataclass(frozen=True)
class RunPaths:
    """The folders that a run reads from and writes to, and its name."""

    data: Path
    runs: Path = Path("runs")
    checkpoints: Path = Path("checkpoints")
    name: str = ""

    def run_name(self, recipe: Recipe) -> str:
        """Return the name of the run. By default it has the size, head and seed."""
        return self.name or f"{recipe.size}-{recipe.head}-seed{recipe.seed}"

    def last_checkpoint(self, recipe: Recipe) -> Path | None:
        """Return the newest checkpoint of a run: a file, or a complete folder if the model is sharded.

        Raises:
            ValueError: if the run was saved under another strategy.
        """
        folder = self.checkpoints / self.run_name(recipe)
        file = folder / "last.ckpt"
        complete = list(folder.glob("*.ckpt/meta.pt"))  # Lightning writes it last
        if file.exists() if recipe.sharded else complete:
            raise ValueError(
                f"{folder} has checkpoints of another strategy than {recipe.strategy}: continue with the strategy of"
                " that run, or start a run with another --name"
            )
        if not recipe.sharded:
            return file if file.exists() else None
        return max(complete, key=lambda path: path.stat().st_mtime).parent if complete else None


class Pretraining(lightning.LightningModule):
    """The decoder of a recipe with its loss, optimizers and schedule."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.model = Decoder(recipe.model)
        self._compiled: Callable[..., Tensor] | None = torch.compile(self.model.loss) if recipe.compile else None
        self._is_sharded = False

    def configure_model(self) -> None:
        """Shard the decoder if the recipe does."""
        if self.recipe.sharded and not self._is_sharded:
            assert self.device_mesh is not None
            shard(self.model, self.device_mesh)
            self._is_sharded = True

    def training_step(self, batch: Batch, _: int) -> Tensor:
        """Return the mean cross entropy of a micro-batch."""
        return (self._compiled or self.model.loss)(*batch, chunk=self.recipe.loss_chunk)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute gradients, under torch's `loss_parallel` if ranks share the logits."""
        with loss_parallel() if self._is_sharded and self.recipe.tensor_parallel > 1 else nullcontext():
            super().backward(loss, *args, **kwargs)

    def validation_step(self, batch: Batch, _: int) -> None:
        """Log the loss. Lightning averages it over the micro-batches of all ranks."""
        loss = self.model.loss(*batch, chunk=self.recipe.loss_chunk)
        self.log("val_loss", loss, sync_dist=True, batch_size=1)

    def configure_optimizers(self) -> Any:
        """Return the paper's optimizers as one, and its schedule."""
        r = self.recipe
        assert r.updates is not None
        rates = {"head_lr": r.head_lr, "matrix_lr": r.matrix_lr, "embedding_lr": r.embedding_lr}
        optimizer = pretraining_optimizer(self.model, r.head, **rates, weight_decay=r.weight_decay)  # type: ignore[arg-type]
        schedule = warmup_cosine(optimizer, total_steps=r.updates, warmup=r.warmup, floor=r.final_rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Convert Lightning's counts of micro-batches if the run continues with another accumulation."""
        loops = checkpoint["loops"]["fit_loop"]
        [loader] = loops["state_dict"]["combined_loader"]
        progress = loops["epoch_loop.batch_progress"]
        for counts in (progress["total"], progress["current"]):
            unfinished = counts["ready"] - counts["completed"]  # Lightning saves before it counts the last one
            ready = rescaled(counts["ready"], loader["accumulation"], self.recipe.accumulation)
            counts.update(ready=ready, started=ready, processed=ready, completed=ready - unfinished)


def shard(model: Decoder, mesh: DeviceMesh) -> None:
    """Keep only this rank's shards of the parameters, as DTensors.

    Tensor parallelism splits the rows of q, k, v, gate, up and of the head, and the columns of out, down and of the
    embedding, so a rank has its own attention heads and tokens. The residual stream is whole on every rank. Then FSDP2
    splits the rows of all these matrices, with a unit for each block, one for the head, and one for the embedding.

    Args:
        model: a decoder with the same whole weights on every rank, so that a sharded run starts where a DDP run does.
        mesh: a mesh with dimensions data_parallel and tensor_parallel.
    """
    data, tensor = mesh["data_parallel"], mesh["tensor_parallel"]
    if tensor.size() > 1:
        plan: dict[str, ParallelStyle] = {
            "embed": ColwiseParallel(output_layouts=Replicate()),
            **{f"blocks.*.{name}": ColwiseParallel() for name in ("q", "k", "v", "gate", "up")},
            **{f"blocks.*.{name}": RowwiseParallel() for name in ("out", "down")},
            "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        }
        parallelize_module(model, tensor, plan, src_data_rank=None)  # None: send no weights
    if data.size() > 1:
        for part in (*model.blocks, model.lm_head, model):
            fully_shard(part, mesh=data)
        for part, method in ((model, "hidden"), (model, "loss"), (model.lm_head, "loss")):
            register_fsdp_forward_method(part, method)


class LastValidation(Callback):
    """Callback that makes Lightning validate after the last update too, if that is not a multiple of the interval."""

    def __init__(self, recipe: Recipe) -> None:
        assert recipe.updates is not None
        self.last, self.batches = recipe.updates - 1, recipe.updates * recipe.accumulation

    def on_train_batch_start(self, trainer: lightning.Trainer, *_: Any) -> None:
        """Set the interval to the whole run before the last update."""
        if trainer.global_step == self.last:
            trainer.val_check_batch = self.batches


class UpdateCheckpoint(ModelCheckpoint):
    """Checkpoints after updates only. Lightning's own also saves after the first micro-batch of a resumed update."""

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Record the update at which the run resumes."""
        super().on_train_start(trainer, pl_module)
        self._last_global_step_saved = trainer.global_step


def train(
    recipe: Recipe,
    paths: RunPaths,
    *,
    accelerator: str = "auto",
    resume: bool = True,
    callbacks: Sequence[Callback] = (),
    monitor: dict[str, Any] | None = None,
    quiet: bool = False,
) -> lightning.Trainer:
    """Run a recipe, or continue it from its last checkpoint, perhaps on another number of devices.

    Args:
        recipe: a resolved recipe.
        paths: folders of data, logs and checkpoints.
        accelerator: as in Lightning.
        resume: continue from the last checkpoint of this name, if there is one.
        callbacks: further callbacks.
        monitor: further arguments of HilbertMonitor.
        quiet: show no progress bar and no model summary.
    """
    r = recipe
    lightning.seed_everything(r.seed, verbose=False)
    strategy = ModelParallelStrategy(r.data_parallel, r.tensor_parallel) if r.sharded else "ddp"
    trainer = lightning.Trainer(
        accelerator=accelerator,
        devices=r.devices,
        num_nodes=r.nodes,
        strategy=strategy if r.world > 1 else "auto",
        precision=r.precision,
        max_steps=r.updates or -1,
        max_epochs=-1,
        accumulate_grad_batches=r.accumulation,
        gradient_clip_val=r.clip,
        val_check_interval=r.validation_every * r.accumulation,
        check_val_every_n_epoch=None,
        # enough batches for the monitor to collect its panel from
        num_sanity_val_steps=-(-r.panel_size // (r.data_parallel * r.micro_batch * r.context)),
        callbacks=[*callbacks, *_callbacks(r, paths, monitor or {})],
        logger=False,
        enable_progress_bar=not quiet,
        enable_model_summary=not quiet,
        default_root_dir=paths.runs,
        use_distributed_sampler=False,
    )
    torch.manual_seed(r.seed + (0 if r.sharded else trainer.global_rank))  # DDP sends rank zero's weights
    module, reader = Pretraining(r), trainer.global_rank // r.tensor_parallel
    loaders = TrainingLoader(paths.data, r, rank=reader), ValidationLoader(paths.data, r, rank=reader)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*`isinstance.treespec, LeafSpec.`.*")
        trainer.fit(module, *loaders, ckpt_path=paths.last_checkpoint(r) if resume else None)
    return trainer


def _callbacks(r: Recipe, paths: RunPaths, monitor: dict[str, Any]) -> list[Callback]:
    name = paths.run_name(r)
    options: dict[str, Any] = {
        "panel_size": r.panel_size,
        "diameter_every": r.diameter_every,
        "perturbation_every": r.perturbation_every,
        "panel": r.panel,
        "efficiency": r.efficiency,
        "hidden": _hidden,
        "decode": load_decoder(paths.data) if (paths.data / TOKENIZER).exists() else None,
        "run_dir": str(paths.runs),
        "run_name": name,
        "config": r.as_dict(),
    }
    checkpoint = UpdateCheckpoint(
        dirpath=paths.checkpoints / name,
        every_n_train_steps=r.checkpoint_every,
        save_last=not r.sharded,  # a folder cannot be replaced atomically, so each save has a new name
        save_top_k=1,
        save_on_train_epoch_end=False,
        enable_version_counter=False,
    )
    region = [] if r.trust_region is None else [TrustRegion(r.trust_region)]
    return [HilbertMonitor(**options | monitor), *region, LastValidation(r), checkpoint]


def _hidden(module: Any, batch: Batch) -> Tensor:
    """Return the hidden states of a batch. A chunked loss never calls the head, so the monitor cannot see them."""
    return module.model.hidden(batch[0])  # type: ignore[no-any-return]

"""A Lightning Trainer as a session sees it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import lightning
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.nn import Module
from torch.optim import Optimizer

from hilbert_monitor.runs.record import RunInfo, StepRecord, measured

from .hidden_states import AutocastFactory
from .runtime import Ranks


class LightningLoop:
    """A Lightning Trainer and its module, as a session sees them.

    Args:
        trainer: that fits.
        module: that is trained.
        progress_bar: whether the diameter is shown in the progress bar.
        label: name of the head in the names of what is logged, where several are watched.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, *, progress_bar: bool, label: str = "") -> None:
        self._trainer, self._module, self._progress_bar, self.label = trainer, module, progress_bar, label
        self.ranks = Ranks.of(module.device, trainer.world_size)

    @property
    def model(self) -> Module:
        """The module."""
        return self._module

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """Those of the trainer."""
        return self._trainer.optimizers

    @property
    def schedulers(self) -> Sequence[Any]:
        """Those of the trainer."""
        return [config.scheduler for config in self._trainer.lr_scheduler_configs]

    @property
    def updates(self) -> int:
        """The trainer's global step."""
        return self._trainer.global_step

    @property
    def last_update(self) -> float:
        """Global step at the end of training, as the trainer estimates it."""
        return self._trainer.estimated_stepping_batches

    @property
    def validates(self) -> bool:
        """Whether the trainer validates at all."""
        return self._trainer.enable_validation

    @property
    def keeps_log(self) -> bool:
        """Not in a fast_dev_run."""
        return not getattr(self._trainer, "fast_dev_run", False)

    @property
    def folder(self) -> str:
        """The trainer's default folder."""
        return str(self._trainer.default_root_dir)

    @property
    def autocast(self) -> AutocastFactory:
        """Makes the context of the trainer's precision."""
        return self._trainer.precision_plugin.forward_context

    def describe(self) -> RunInfo:
        """Name the module's class, its hyperparameters and the seed of `seed_everything`."""
        seed = os.environ.get("PL_GLOBAL_SEED", "")
        return RunInfo(
            model=type(self._module).__name__,
            seed=int(seed) if seed.removeprefix("-").isdecimal() else None,
            config=dict(self._module.hparams),
            versions={"lightning": lightning.__version__},
        )

    def log(self, record: StepRecord, *, final: bool) -> None:
        """Give a record to the trainer's loggers and the progress bar."""
        numbers = {metric.logged_of(self.label): float(value) for metric, value in measured(record)}
        for logger in self._trainer.loggers:
            logger.log_metrics(numbers, step=self._trainer.fit_loop.epoch_loop._batches_that_stepped)
        if self._progress_bar and not final and record.diameter is not None:
            self._module.log(
                f"D(S) {self.label}".strip(), record.diameter, prog_bar=True, logger=False, rank_zero_only=True
            )

    def make_checkpoint(self) -> Any:
        """Collect the trainer's checkpoint. Trainer.save_checkpoint would have the ranks wait for rank zero's disk."""
        return self._trainer._checkpoint_connector.dump_checkpoint(weights_only=False)

    def save_checkpoint(self, checkpoint: Any, path: str) -> None:
        """Write a checkpoint: on rank zero, or a folder of shards by all ranks together."""
        strategy = self._trainer.strategy
        if not isinstance(strategy, ModelParallelStrategy):
            strategy.save_checkpoint(checkpoint, path)
            return
        from torch.distributed.checkpoint.api import CheckpointException

        path = self._in_shared_folder(strategy.broadcast(path))
        try:
            strategy.save_checkpoint(checkpoint, path)
        except CheckpointException as error:  # raised on all ranks, and no Exception
            raise RuntimeError(f"could not write {path}: {error}") from error

    def _in_shared_folder(self, path: str) -> str:
        """Make the folder of a checkpoint where all ranks can: one that fails later would leave the others waiting."""
        failure: OSError | None = None
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
        except OSError as error:
            failure = error
        if not self.ranks.all_agree(failure is None):
            raise failure or OSError(f"another rank could not make the folder of {path}")
        return path

    def stop(self) -> None:
        """End training after this step."""
        self._trainer.should_stop = True

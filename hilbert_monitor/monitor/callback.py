"""HilbertMonitor: Lightning's hooks. Nothing is measured here."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import Any

import lightning
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from hilbert_monitor.runs.alerts import Rules
from hilbert_monitor.runs.record import Alert, RunInfo, StepRecord, measured

from .head import locate_head
from .hidden_states import AutocastFactory
from .panel import Batch, sample_indices, token_count
from .prometheus import Prometheus
from .runtime import Ranks, warn_user
from .session import Advanced, MonitorOptions, RunSession

VALIDATION_LOSSES = ("val_loss", "validation_loss", "val/loss", "valid_loss")
"""Names under which a validation loss is usually logged."""
MAYBE = 0.1
"""How much of an update a batch counts for, where the Trainer does not say whether there was one."""


class HilbertMonitor(Callback):
    """Measures the step geometry of a language model's head while it trains, and changes nothing.

    Example:
        ``Trainer(callbacks=[HilbertMonitor()])`` writes a run log and feeds the trainer's loggers. With metrics for
        Prometheus, and training stopped by a blow-up:
        ``HilbertMonitor(prometheus=9464, on_blowup=["warn", "stop"])``. Two heads take two monitors, each with its
        ``head=...``; they log under ``hilbert/HEAD/...``.

    Args:
        head: the LM head, its name or that of its weight; by default it is looked for.
        panel_size: validation positions of the Hilbert perturbation.
        diameter_every: updates between exact diameters; 0 for none.
        perturbation_every: updates between perturbations of the panel; 0 for none.
        panel: "loader" for the first positions that validation delivers, once for the whole run; "paper" for an equal
            part of the first validation batches of each rank, as in the paper; the folder of another run, to use its
            panel; or your own token ids.
        hidden: (module, batch) -> hidden states, for a model whose forward pass never calls its head.
        decay: how the head's optimizer uses weight_decay: "decoupled", "coupled", or the share of the weights that a
            step takes away, a number or a function of the parameter's group. By default what is known of its class.
        vocab_size: rows of the head that are tokens, if it is padded.
        logit_scale: factor between the head's output and the logits; by default that of the model's config, or 1.
        decode: makes a token's text from its id, in a thread of its own. A record waits a second for its texts at most.
        run_dir: folder of the run logs, in which this run gets one of its own; None for no log.
        run_name: what the run is called; its log goes on in the same folder if it is started again.
        config: settings to keep with the run; by default the module's hyperparameters. Values that look like secrets
            are masked: those of names with key, token, secret, password or credential, and passwords in URLs.
        efficiency: also measure, where the panel is, the step's descent as a share of the best possible at its
            diameter; it takes a second or two each time.
        layers: also measure every other layer in its own ruler, every tenth step: spectral norms of increments, and the
            largest attention logit with the panel.
        rules: what counts as a blow-up.
        on_blowup: how to respond to a page, besides logging it; notices are only logged. Any of "warn", "checkpoint"
            (save one beside the run log), "stop" (end training after this step, on all ranks), the address of a
            webhook, and a function of the alert, or its full name. Training waits for a function.
        sinks: where records go besides the trainer's loggers. Each has a thread of its own.
        prometheus: the port of the run's metrics, or `Prometheus` settings; by default they are not exported.
        strict: raise what fails, in place of counting it and warning once.
        advanced: settings that few runs need, see `Advanced`.
    """

    def __init__(
        self,
        head: str | Module | Parameter | None = None,
        panel_size: int = 8192,
        diameter_every: int = 10,
        perturbation_every: int = 500,
        *,
        panel: str | list[int] | list[list[int]] | Tensor = "loader",
        hidden: Callable[[Module, Batch], Any] | None = None,
        decay: str | float | Callable[[dict[str, Any]], Any] | None = None,
        vocab_size: int | None = None,
        logit_scale: float | None = None,
        decode: Callable[[int], str] | None = None,
        run_dir: str | None = "runs",
        run_name: str | None = None,
        config: dict[str, Any] | None = None,
        layers: bool = False,
        efficiency: bool = False,
        rules: Rules | None = None,
        on_blowup: str | list[Any] | Callable[[Alert], Any] = "warn",
        sinks: Iterable[Any] = (),
        prometheus: int | Prometheus | None = None,
        strict: bool = False,
        advanced: Advanced = Advanced(),  # noqa: B008
    ) -> None:
        given = locals()
        super().__init__()
        self.options = MonitorOptions(**{field.name: given[field.name] for field in fields(MonitorOptions)})
        self.session = RunSession(self.options)
        """What watches the run; its `probe` measures, its `guard` counts what failed."""
        self._updates = 0

    @property
    def state_key(self) -> str:
        """Key of the state in a checkpoint: made from `head`, so that several monitors have one each."""
        head = self.options.head
        return self._generate_state_key(head=head if head is None or isinstance(head, str) else id(head))

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Name a head that was given as a module or a parameter, so that a checkpoint finds its state again."""
        if self.options.head is not None and not isinstance(self.options.head, str):
            with self.session.guard("start"):
                self.options.head = locate_head(pl_module, self.options.head).name

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the head and its optimizer, and begin to watch: on all ranks, or on none."""
        self._updates = trainer.global_step
        if any(kind.__name__ == "FSDPStrategy" for kind in type(trainer.strategy).__mro__):
            warn_user(
                "nothing is measured under Lightning's FSDPStrategy, which flattens the head's rows: use"
                " ModelParallelStrategy, with fully_shard in configure_model"
            )
            return
        with self.session.guard("start"):
            label = self._label(trainer, pl_module) if len(_monitors(trainer)) > 1 else ""
            self.session.start(
                LightningLoop(trainer, pl_module, progress_bar=self.options.advanced.progress_bar, label=label)
            )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Note which batch the next step is made of."""
        with self.session.guard("batch"):
            self.session.begin_batch(batch_idx, sample_indices(batch))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Make the record of the step, if this batch ended with one, and hand it on."""
        session, updated = self.session, trainer.global_step > self._updates
        self._updates = trainer.global_step
        # In manual optimization the Trainer counts only steps that go through its wrappers.
        weight = 1.0 if updated else 0.0 if pl_module.automatic_optimization else MAYBE
        with session.guard("batch"):
            # Lightning has divided the loss by the number of micro-batches.
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            session.add_batch(loss=loss, tokens=token_count(batch) * _reader(trainer)[1])
        with session.guard("start"):
            session.look_again()
        with session.guard("increment"):
            if weight:
                scaler = getattr(trainer.precision_plugin, "scaler", None)
                scales_loss = scaler is not None and pl_module.automatic_optimization
                session.notice_update(weight=weight, scales_loss=scales_loss)
        with session.guard("record"):
            session.record(updated=bool(weight))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to collect what the validation delivers, if there is no panel yet."""
        session = self.session
        if trainer.state.fn == "fit" and session.panels.panel is None and self.options.perturbation_every:
            ranks = Ranks.of(pl_module.device, trainer.world_size)
            session.find_panel(ranks, updates=trainer.global_step, validates=True)
            session.panels.collect()

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Collect what the validation delivers."""
        self.session.heartbeat()
        if dataloader_idx == 0:
            with self.session.guard("panel"):
                self.session.panels.offer(batch)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the panel of what was collected, and note the validation loss."""
        with self.session.guard("panel"):
            self.session.panels.finish(
                ranks=Ranks.of(pl_module.device, trainer.world_size),
                reader=_reader(trainer)[0],
                more_to_come=trainer.sanity_checking,
            )
            self.session.update_panel()
        with self.session.guard("validation loss"):
            metrics = trainer.callback_metrics
            loss = next((metrics[name] for name in VALIDATION_LOSSES if name in metrics), None)
            if not trainer.sanity_checking and loss is not None:
                self.session.log_validation(float(loss))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure the last update, whenever training turned out to end."""
        with self.session.guard("record"):
            self.session.record(final=True)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let go of the optimizer and close the outputs."""
        self.session.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Let go of the optimizer and close the outputs, and say what ended the run."""
        # A worker or a peer that got the same signal may end first, with an error of its own.
        self.session.close(exception, stopped="SIGTERM" if getattr(trainer, "received_sigterm", False) else "")

    def state_dict(self) -> dict[str, Any]:
        """Return steps and tokens so far, the name of the log and the history of the rules, of plain types."""
        state: dict[str, Any] = {}
        with self.session.guard("checkpoint"):
            state = self.session.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting where the run was saved."""
        self.session.load_state_dict(state_dict)

    def _label(self, trainer: Trainer, module: LightningModule) -> str:
        """Name of the head, beside others that other monitors watch."""
        name, _, weight, _ = locate_head(module, self.options.head)
        probes = [monitor.session.probe for monitor in _monitors(trainer) if monitor is not self]
        if any(probe is not None and probe.head.weight is weight for probe in probes):
            raise ValueError(f"another HilbertMonitor watches the head '{name}': pass each a head=... of its own")
        return name


def _monitors(trainer: Trainer) -> list[HilbertMonitor]:
    return [callback for callback in getattr(trainer, "callbacks", ()) if isinstance(callback, HilbertMonitor)]


def _reader(trainer: Trainer) -> tuple[int, int]:
    """Number of this rank among those that read data of their own, and how many these are; tensor-parallel ranks share
    theirs."""
    sampler = trainer.distributed_sampler_kwargs or {}
    return sampler.get("rank", trainer.global_rank), sampler.get("num_replicas", trainer.world_size)


class LightningLoop:
    """A Lightning Trainer and its module, as a session sees them. `progress_bar` shows the diameter there."""

    def __init__(self, trainer: Trainer, module: LightningModule, *, progress_bar: bool, label: str = "") -> None:
        self._trainer, self._module, self._progress_bar, self.label = trainer, module, progress_bar, label
        self.model: Module = module
        self.ranks = Ranks.of(module.device, trainer.world_size)
        self.validates = trainer.enable_validation
        self.keeps_log = not getattr(trainer, "fast_dev_run", False)
        self.folder = str(trainer.default_root_dir)
        self.autocast: AutocastFactory | None = trainer.precision_plugin.forward_context

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

    def describe(self) -> RunInfo:
        """Name the module's class, its hyperparameters and the seed of `seed_everything`."""
        seed = os.environ.get("PL_GLOBAL_SEED", "")
        return RunInfo(
            model=type(self._module).__name__,
            seed=int(seed) if seed.removeprefix("-").isdecimal() else None,
            config=dict(self._module.hparams),
            versions={"lightning": lightning.__version__},
        )

    def log(self, record: StepRecord, *, behind: int, final: bool) -> None:
        """Give a record to the trainer's loggers and the progress bar."""
        numbers = {metric.logged_of(self.label): float(value) for metric, value in measured(record)}
        step = self._trainer.fit_loop.epoch_loop._batches_that_stepped - behind
        for logger in self._trainer.loggers:
            logger.log_metrics(numbers, step=step)
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

        path = strategy.broadcast(path)
        failure: OSError | None = None
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
        except OSError as error:
            failure = error
        if not self.ranks.all_agree(failure is None):  # a rank that fails later would leave the others waiting
            raise failure or OSError(f"another rank could not make the folder of {path}")
        try:
            strategy.save_checkpoint(checkpoint, path)
        except CheckpointException as error:  # raised on all ranks, and no Exception
            raise RuntimeError(f"could not write {path}: {error}") from error

    def stop(self) -> None:
        """End training after this step."""
        self._trainer.should_stop = True

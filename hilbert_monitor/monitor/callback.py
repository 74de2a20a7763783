"""HilbertMonitor: Lightning's hooks, wired to a probe. Nothing is measured here."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable
from typing import Any, Literal

import lightning
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from hilbert_monitor import __version__
from hilbert_monitor.runs.alerts import Judge, Rules
from hilbert_monitor.runs.metrics import values
from hilbert_monitor.runs.record import Alert, RunInfo, StepRecord

from .guard import Guard, tell
from .increment import Decay
from .outputs import Outputs, Scraping
from .panel import Batch, Panel, positions_of, token_ids, with_tensors
from .probe import Probe, find_head_module
from .ranks import Ranks
from .responses import Responses


class HilbertMonitor(Callback):
    """Measures the step geometry of a language model's head while it trains, and changes nothing.

    ``Trainer(callbacks=[HilbertMonitor()])``

    Args:
        head: the LM head or its name; by default it is looked for.
        panel_size: validation positions of the Hilbert perturbation.
        diameter_every: updates between exact diameters; 0 for none.
        perturbation_every: updates between perturbations of the panel; 0 for none.
        bracket: certified bounds of the diameter on every update; by default where they need no copy of the weights.
        panel: "loader" for the first positions of the validation data; "paper" for those that each rank's first
            validation batches hold, an equal part from each, as the paper's authors take them; or your own token ids.
        hidden: (module, batch) -> hidden states, for a model whose forward pass never calls its head.
        decay: how an optimizer that is not known uses weight_decay.
        vocab_size: rows of the head that are tokens, if it is padded.
        logit_scale: factor between the head's output and the logits.
        decode: makes a token's text from its id.
        run_dir: folder of the run logs, in which this run gets one of its own; None for no log.
        run_name: what the run is called; its log goes on in the same folder if it is started again.
        config: settings to keep with the run; by default the module's hyperparameters.
        efficiency: also measure, where the panel is, how much of what its diameter allows a step turns into descent: a
            second or two each time.
        rules: what counts as a blow-up.
        on_blowup: what to do about one, besides logging it. Any of "warn", "checkpoint" (save one beside the run log),
            "stop" (end training after this step, on all ranks), the address of a webhook, and a function of the alert,
            or its full name.
        sinks: where records go besides the trainer's loggers. Each has a thread of its own.
        prometheus_port: serve the run's metrics at /metrics of this port, from rank zero; the next free one if it is
            taken, 0 for any.
        prometheus_address: to listen at; "0.0.0.0" for a Prometheus on another machine.
        prometheus_tls: files of a certificate and its key, for https.
        prometheus_registry: register the metrics there; without a port, that is all.
        prometheus_stalled_after: seconds without a step or validation after which the run counts as stalled, unless
            twenty of its steps take longer.
        prometheus_linger: seconds that the metrics stay, at most, after the end, for a Prometheus that has been there.
        progress_bar: show the diameter in the progress bar.
        strict: raise what fails, in place of counting it and warning once.
    """

    def __init__(
        self,
        head: str | Module | None = None,
        panel_size: int = 8192,
        diameter_every: int = 10,
        perturbation_every: int = 500,
        *,
        bracket: bool | None = None,
        panel: Literal["loader", "paper"] | list[int] | list[list[int]] | Tensor = "loader",
        hidden: Callable[[Module, Batch], Any] | None = None,
        decay: Decay | None = None,
        vocab_size: int | None = None,
        logit_scale: float = 1.0,
        decode: Callable[[int], str] | None = None,
        run_dir: str | None = "runs",
        run_name: str | None = None,
        config: dict[str, Any] | None = None,
        efficiency: bool = False,
        rules: Rules | None = None,
        on_blowup: str | list[Any] | Callable[[Alert], Any] = "warn",
        sinks: Iterable[Any] = (),
        prometheus_port: int | None = None,
        prometheus_address: str = "127.0.0.1",
        prometheus_tls: tuple[str, str] | None = None,
        prometheus_registry: Any = None,
        prometheus_stalled_after: float = 300.0,
        prometheus_linger: float = 30.0,
        progress_bar: bool = True,
        strict: bool = False,
    ) -> None:
        super().__init__()
        self.head, self.panel_size, self.panel = head, panel_size, panel
        self.diameter_every, self.perturbation_every, self.bracket = diameter_every, perturbation_every, bracket
        self.hidden, self.decay, self.decode = hidden, decay, decode
        self.vocab_size, self.logit_scale = vocab_size, logit_scale
        self.sinks, self.progress_bar = tuple(sinks), progress_bar
        self.run_dir, self.run_name, self.config, self.rules = run_dir, run_name, config, rules
        self.on_blowup, self.efficiency = on_blowup, efficiency
        self.prometheus_port, self.prometheus_address = prometheus_port, prometheus_address
        self.prometheus_tls, self.prometheus_registry = prometheus_tls, prometheus_registry
        self.prometheus_stalled_after, self.prometheus_linger = prometheus_stalled_after, prometheus_linger
        self.guard = Guard(strict=strict)
        self.probe: Probe | None = None
        self.outputs: Outputs | None = None
        """Where the run is written, on rank zero while it trains."""
        self._responses: Responses | None = None
        self._described = (0, False)  # remarks, and whether there is a panel, that the log knows of
        self._resumed: dict[str, Any] = {}
        self._tokens = self._updates = 0
        self._loss: Tensor | None = None
        self._validation_loss: float | None = None
        self._panel: Panel | None = None
        self._kept: list[Any] | None = None

    # Lightning's hooks

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the head and its optimizer, and begin to watch: on all ranks, or on none."""
        started = False
        with self.guard("start"):
            self._start(trainer, pl_module)
            started = True
        if not Ranks.of(pl_module.device, trainer.world_size).unanimous(started):
            self._close()
            self.probe = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Make the record of the step, if this batch ended with one, and hand it on."""
        if self.probe is not None:
            with self.guard("batch"):
                self._note(trainer, pl_module, outputs, batch)
            with self.guard("record"):
                self._record(trainer, pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the panel, or begin to keep what the validation delivers."""
        if trainer.state.fn == "fit" and self._panel is None and self.perturbation_every:
            with self.guard("panel"):
                self._take_panel(trainer)
                self._kept = [] if self._panel is None else None

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Keep what the first validation delivers, where the data are a stream or the rule is the paper's."""
        if self.outputs is not None:
            self.outputs.alive()
        if self._kept is not None and dataloader_idx == 0:
            with self.guard("panel"):
                if self._still_missing(trainer) > 0:
                    self._kept.append(with_tensors(batch, lambda x: x.detach().cpu().clone()))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the validation loss, under whichever usual name it has."""
        if self._kept:
            with self.guard("panel"):
                self._take_kept(trainer)
        with self.guard("validation loss"):
            names = ("val_loss", "validation_loss", "val/loss", "valid_loss")
            found = next((trainer.callback_metrics[n] for n in names if n in trainer.callback_metrics), None)
            if not trainer.sanity_checking and found is not None:
                self._validated(trainer, float(found))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure the last update, whenever training turned out to end."""
        if self.probe is not None:
            with self.guard("record"):
                self._record(trainer, pl_module, final=True)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let go of the optimizer and close the sinks."""
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Let go of the optimizer and close the sinks, and say what ended the run."""
        self._close(exception)

    def state_dict(self) -> dict[str, Any]:
        """Steps and tokens so far, the name of the log and the history of the rules, of plain types."""
        if self.probe is None or self.probe.judge is None:
            return dict(self._resumed)
        return {
            "step": self.probe.step,
            "tokens": self._tokens,
            "run": self.outputs.id if self.outputs is not None else self._resumed.get("run", ""),
            "name": self.run_name or "",
            "history": self.probe.judge.state(),
        }

    @property
    def state_key(self) -> str:
        """Two monitors of one trainer, on two heads, have two states."""
        return self._generate_state_key(head=self.head) if isinstance(self.head, str) else type(self).__qualname__

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting where the run was saved."""
        self._resumed = dict(state_dict)

    # What they do

    def _start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step == 0:
            self._resumed = {}
        self._responses = Responses(self.on_blowup, self.guard, lambda: self.outputs.id if self.outputs else "")
        name, head = find_head_module(pl_module, self.head)
        with self.guard("panel"):
            if self._panel is None and self.perturbation_every:
                self._take_panel(trainer)
        self.probe = Probe(
            pl_module,
            _owner(trainer.optimizers, head.weight, name),
            head=head,
            panel=self._panel,
            diameter_every=self.diameter_every,
            perturbation_every=self.perturbation_every,
            bracket=self.bracket,
            hidden=self.hidden,
            autocast=trainer.precision_plugin.forward_context,
            decay=self.decay,
            vocab_size=self.vocab_size,
            logit_scale=self.logit_scale,
            decode=self.decode,
            judge=Judge(self.rules),
            efficiency=self.efficiency,
            world=trainer.world_size,
            strict=self.guard.strict,
        )
        if self._panel is None and not trainer.enable_validation:
            self.probe.perturbation_every = 0  # on every rank alike
        self.probe.step = self._resumed.get("step", trainer.global_step)
        with self.guard("last step"):
            self.probe.last = self.probe.step + trainer.estimated_stepping_batches - trainer.global_step
        self._tokens, self._updates = self._resumed.get("tokens", 0), trainer.global_step
        if self.probe.judge is not None and "history" in self._resumed:
            with self.guard("history"):  # a learning rate may be another on purpose now
                self.probe.judge.restore({**self._resumed["history"], "rates": []})
        if trainer.is_global_zero:
            with self.guard("outputs"):
                self._open(trainer, pl_module)
        self.probe.attach()

    def _open(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to write the run, in threads of their own: where a file system hangs, training does not."""
        assert self.probe is not None
        run_dir = None if getattr(trainer, "fast_dev_run", False) else self.run_dir
        scraping = Scraping(
            port=self.prometheus_port,
            address=self.prometheus_address,
            tls=self.prometheus_tls,
            registry=self.prometheus_registry,
            stalled_after=self.prometheus_stalled_after,
            linger=self.prometheus_linger,
        )
        self.outputs = Outputs(self.guard, sinks=self.sinks, run_dir=run_dir, scraping=scraping)
        self._described = len(self.probe.remarks), self._panel is not None
        self.outputs.open(self._describe(trainer, pl_module), first_step=self.probe.step)

    def _describe(self, trainer: Trainer, pl_module: LightningModule) -> RunInfo:
        """What is known of the run now."""
        assert self.probe is not None
        seed = os.environ.get("PL_GLOBAL_SEED", "")
        same = self.run_name in (None, self._resumed.get("name"))  # or it is a branch with a name of its own
        return RunInfo(
            id=self._resumed.get("run", "") if same else "",
            name=self.run_name or "",
            head_optimizer=type(self.probe.source.optimizer).__name__,
            model=type(pl_module).__name__,
            seed=int(seed) if seed.lstrip("-").isdigit() else None,
            config=dict(pl_module.hparams) if self.config is None else self.config,
            panel_hash="" if self._panel is None else self._panel.hash,
            panel_size=None if self._panel is None else self._panel.size,
            remarks=tuple(self.probe.remarks),
            versions={
                "hilbert_monitor": __version__,
                "torch": str(torch.__version__),
                "lightning": lightning.__version__,
                "python": platform.python_version(),
            },
            world_size=trainer.world_size,
        )

    def _take_panel(self, trainer: Trainer) -> None:
        """Take the panel from what is at hand, without iterating anything."""
        if not isinstance(self.panel, str):
            self._panel = Panel.of_tokens(self.panel, self.panel_size)
        elif trainer.val_dataloaders is not None and self.panel == "loader":
            self._panel = Panel.of_loader(trainer.val_dataloaders, self.panel_size)
        elif not trainer.enable_validation:
            tell(
                "found no validation data and measures the diameter alone: give the Trainer a validation loader, or"
                " token ids as panel=..."
            )
        if self.probe is not None:
            self.probe.panel = self._panel

    def _still_missing(self, trainer: Trainer) -> int:
        """Positions that this rank still lacks of its part."""
        return -(-self.panel_size // trainer.world_size) - sum(len(positions_of(batch)) for batch in self._kept or ())

    def _take_kept(self, trainer: Trainer) -> None:
        """Make the panel of what was kept; a sanity check that delivered too little is not the last word."""
        kept, missing = self._kept or [], self._still_missing(trainer)
        self._kept = None
        if missing > 0 and trainer.sanity_checking:
            return
        rank, world = trainer.global_rank, trainer.world_size
        self._panel = Panel.of_batches(kept, self.panel_size, rank=rank, world=world)
        if self.probe is not None:
            self.probe.panel = self._panel

    def _note(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any) -> None:
        """Add up the loss of the micro-batches of one update, and the tokens; notice an update that did not happen."""
        assert self.probe is not None
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor) and loss.numel() == 1:  # Lightning has divided it by the number of micro-batches
            self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()
        ids = token_ids(batch)
        if ids is not None:
            self._tokens += ids.numel() * trainer.world_size
        scaled = getattr(trainer.precision_plugin, "scaler", None) is not None and pl_module.automatic_optimization
        if scaled and trainer.global_step > self._updates and not self.probe.stepped:
            self.probe.skip("overflow")  # a GradScaler does not call step of an optimizer that is not fused
        self._updates = trainer.global_step

    def _record(self, trainer: Trainer, pl_module: LightningModule, *, final: bool = False) -> None:
        assert self.probe is not None
        if not final and not self.probe.stepped:
            return
        record = self.probe.record(
            final=final,
            train_loss=None if self._loss is None else float(self._loss),
            validation_loss=self._validation_loss,
            tokens=self._tokens,
        )
        self._loss = self._validation_loss = None
        found = [*self.probe.earlier(), *([(record, self.probe.alerts)] if record is not None else [])]
        if trainer.is_global_zero:
            for made, alerts in found:
                self._hand_on(trainer, pl_module, made, alerts, final)
        self._respond(trainer, [alert for _, alerts in found for alert in alerts], final)

    def _respond(self, trainer: Trainer, alerts: list[Alert], final: bool) -> None:
        """Do what is to be done about blow-ups; what takes all ranks, only while there is a next step."""
        assert self.probe is not None
        assert self._responses is not None
        self._responses.tell(alerts)
        if not final:
            folder = (self.outputs.folder if self.outputs is not None else None) or trainer.default_root_dir
            self._responses.act(trainer, alerts, self.probe.ranks, str(folder), self.probe.step)

    def _validated(self, trainer: Trainer, loss: float) -> None:
        """Add the validation loss to the record of the step before it, or keep it for the first."""
        amended = None if self.probe is None or self.probe.stepped else self.probe.amend(validation_loss=loss)
        if amended is None:
            self._validation_loss = loss
        elif self.outputs is not None:
            self.outputs.write(amended)

    def _hand_on(
        self, trainer: Trainer, pl_module: LightningModule, record: StepRecord, alerts: list[Alert], final: bool
    ) -> None:
        """Give a record, and what was said of it, to the log, the sinks and the loggers."""
        assert self.probe is not None
        known = len(self.probe.remarks), self._panel is not None
        if self.outputs is not None:
            with self.guard("run log"):
                if known != self._described:
                    self._described = known
                    self.outputs.describe(self._describe(trainer, pl_module))
            self.outputs.write(record, alerts)
        with self.guard("loggers"):
            self._log(trainer, pl_module, record, final)

    def _log(self, trainer: Trainer, pl_module: LightningModule, record: StepRecord, final: bool) -> None:
        numbers = {metric.logged: float(value) for metric, value in values(record)}
        for logger in trainer.loggers:
            logger.log_metrics(numbers, step=trainer.fit_loop.epoch_loop._batches_that_stepped)
        if self.progress_bar and not final and record.diameter is not None:
            pl_module.log("D(S)", record.diameter, prog_bar=True, logger=False, rank_zero_only=True)

    def _close(self, error: BaseException | None = None) -> None:
        if self.probe is not None:
            self._resumed = self.state_dict()
            self.probe.detach()
        hooks = self._responses.webhooks if self._responses is not None else []
        (self.outputs or Outputs(self.guard)).close(error, hooks)
        self.outputs = self._responses = None
        self._panel = self._kept = self._loss = self._validation_loss = None


def _owner(optimizers: list[Optimizer], weight: Tensor | Module, name: str) -> Optimizer:
    for optimizer in optimizers:
        if any(weight is p for group in optimizer.param_groups for p in group["params"]):
            return optimizer
    raise ValueError(f"no optimizer of this run moves the head '{name}': is it frozen?")

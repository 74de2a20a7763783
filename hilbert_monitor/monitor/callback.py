"""HilbertMonitor: Lightning's hooks. Nothing is measured here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.nn import Module, Parameter

from hilbert_monitor.runs.alerts import Rules
from hilbert_monitor.runs.record import Alert

from .head import locate_head
from .lightning_loop import LightningLoop
from .options import MonitorOptions, prometheus_settings
from .panel import Batch, sample_indices, token_count
from .prometheus import Prometheus
from .runtime import Ranks, warn_user
from .session import RunSession
from .several_heads import check_heads, options_of_each

VALIDATION_LOSSES = ("val_loss", "validation_loss", "val/loss", "valid_loss")
"""Names under which a validation loss is usually logged."""
MAYBE = 0.1
"""How much of an update a batch counts for, where the Trainer does not say whether there was one."""
SAVED = "hilbert_monitor"
"""Where a checkpoint has the states of the monitors, by their heads."""
MOVED = ("prometheus_address", "prometheus_tls", "prometheus_registry", "prometheus_stalled_after", "prometheus_linger")
"""Arguments that an earlier version had, now of `Prometheus`."""


class HilbertMonitor(Callback):
    """Measures the step geometry of a language model's head while it trains, and changes nothing.

    Example:
        ``Trainer(callbacks=[HilbertMonitor()])`` writes a run log and feeds the trainer's loggers. With metrics for
        Prometheus, and training stopped by a blow-up:
        ``HilbertMonitor(prometheus=Prometheus(port=9464, address="0.0.0.0"), on_blowup=["warn", "stop"])``

    Args:
        head: the LM head, its name or that of its weight; by default it is looked for. A list of names watches several,
            each with a run and records of its own.
        panel_size: validation positions of the Hilbert perturbation.
        diameter_every: updates between exact diameters; 0 for none.
        perturbation_every: updates between perturbations of the panel; 0 for none.
        bounds: certified bounds of the diameter on every update; by default where they need no copy of the weights.
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
        secrets: further names in `config` whose values are masked.
        private: let no other user read the run's folder (mode 0700). By default its mode follows the umask.
        efficiency: also measure, where the panel is, the step's descent as a share of the best possible at its
            diameter; it takes a second or two each time.
        layers: also measure every other layer in its own ruler, every tenth step: spectral norms of increments, and the
            largest attention logit with the panel.
        rules: what counts as a blow-up.
        on_blowup: how to respond to a page, besides logging it; notices are only logged. Any of "warn", "checkpoint"
            (save one beside the run log), "stop" (end training after this step, on all ranks), the address of a
            webhook, and a function of the alert, or its full name. Training waits for a function.
        sinks: where records go besides the trainer's loggers. Each has a thread of its own.
        prometheus_port: short for ``prometheus=Prometheus(port=...)``.
        prometheus: how the run's metrics are exported, see `Prometheus`; by default they are not.
        stalled_after: seconds without a step or validation after which the run counts as stalled, unless twenty of its
            steps, or twice its longest pause in the last hundred, take longer; by default 300.
        progress_bar: show the diameter in the progress bar.
        immediate: wait for an accelerator in every step, so that its record and alerts come in that step. By default
            it is not waited for in steps of which only bounds are measured, and these come when the next step is made.
            Anything in `on_blowup` that acts ("stop", "checkpoint", a function) implies it.
        strict: raise what fails, in place of counting it and warning once.
    """

    def __init__(
        self,
        head: str | Module | Parameter | list[str] | None = None,
        panel_size: int = 8192,
        diameter_every: int = 10,
        perturbation_every: int = 500,
        *,
        bounds: bool | None = None,
        panel: str | list[int] | list[list[int]] | Tensor = "loader",
        hidden: Callable[[Module, Batch], Any] | None = None,
        decay: str | float | Callable[[dict[str, Any]], Any] | None = None,
        vocab_size: int | None = None,
        logit_scale: float | None = None,
        decode: Callable[[int], str] | None = None,
        run_dir: str | None = "runs",
        run_name: str | None = None,
        config: dict[str, Any] | None = None,
        secrets: Sequence[str] = (),
        private: bool = False,
        efficiency: bool = False,
        layers: bool = False,
        rules: Rules | None = None,
        on_blowup: str | list[Any] | Callable[[Alert], Any] = "warn",
        sinks: Iterable[Any] = (),
        prometheus_port: int | None = None,
        prometheus: Prometheus | None = None,
        stalled_after: float | None = None,
        progress_bar: bool = True,
        immediate: bool = False,
        strict: bool = False,
        **moved: Any,
    ) -> None:
        _refuse(moved)
        super().__init__()
        self.progress_bar = progress_bar
        self.heads = check_heads(head) if isinstance(head, list | tuple) else []
        """Names of the heads, where several are watched."""
        options = MonitorOptions(
            head=None if isinstance(head, list | tuple) else head,
            panel_size=panel_size,
            diameter_every=diameter_every,
            perturbation_every=perturbation_every,
            bounds=bounds,
            panel=panel,
            hidden=hidden,
            decay=decay,
            vocab_size=vocab_size,
            logit_scale=logit_scale,
            decode=decode,
            run_dir=run_dir,
            run_name=run_name,
            config=config,
            secrets=secrets,
            private=private,
            efficiency=efficiency,
            layers=layers,
            rules=rules,
            on_blowup=on_blowup,
            sinks=sinks,
            prometheus=prometheus_settings(prometheus_port, prometheus),
            stalled_after=stalled_after,
            immediate=immediate,
            strict=strict,
        )
        self.beside: list[HilbertMonitor] = []
        """Monitors of the other heads, which join the Trainer's callbacks."""
        self._adopt(options)

    def _adopt(self, options: MonitorOptions) -> None:
        self.options = options
        self.session = RunSession(options)
        """What watches the run; its `probe` measures, its `guard` counts what failed."""
        self._updates = 0

    def _twin(self, options: MonitorOptions) -> HilbertMonitor:
        """A monitor of another head."""
        twin = copy(self)
        twin.heads, twin.beside = [], []
        twin._adopt(options)
        return twin

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let the monitors of further heads join, before any that saves checkpoints; refuse two monitors of one."""
        if self.heads:
            self._join(trainer)
        others = [monitor for monitor in _monitors(trainer) if monitor is not self]
        if len(others) + 1 < len(_monitors(trainer)):
            raise ValueError("the same HilbertMonitor stands twice among the Trainer's callbacks: remove one")
        head = self.options.head
        if any(
            head is other.options.head or (isinstance(head, str) and head == other.options.head) for other in others
        ):
            which = f"the head {head!r}" if isinstance(head, str) else "the same head"
            raise ValueError(f"two HilbertMonitors watch {which}: pass each a head=... of its own, or remove one")

    def _join(self, trainer: Trainer) -> None:
        """Watch the first of several heads, and let a monitor of each other one stand behind this one."""
        if not self.beside:
            own, *others = options_of_each(self.options, self.heads)
            self.beside = [self._twin(options) for options in others]
            self._adopt(own)
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        for place, monitor in enumerate(self.beside, callbacks.index(self) + 1):
            if not any(monitor is other for other in callbacks):
                callbacks.insert(place, monitor)

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
            self.session.start(LightningLoop(trainer, pl_module, progress_bar=self.progress_bar, label=label))

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
            self._add_batch(trainer, outputs, batch)
        with session.guard("start"):
            session.look_again()
        with session.guard("increment"):
            if weight and session.probe is not None and not session.probe.stepped:
                self._notice_update(trainer, pl_module, weight)
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
        self.session.alive()
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
                self.session.validated(float(loss))

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

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Save steps and tokens so far, the name of the log and the history of the rules, of plain types.

        Not as a state_dict: Lightning would refuse two monitors in words of its own.
        """
        with self.session.guard("checkpoint"):
            checkpoint.setdefault(SAVED, {})[self._key(pl_module)] = self.session.state_dict()

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Go on counting where the run was saved, also by an earlier version."""
        with self.session.guard("checkpoint"):
            earlier = checkpoint.get("callbacks", {}).get(self.state_key, {})
            self.session.load_state_dict(checkpoint.get(SAVED, {}).get(self._key(pl_module), earlier))

    @property
    def state_key(self) -> str:
        """Under which earlier versions saved their state."""
        head = self.options.head
        return self._generate_state_key(head=head) if isinstance(head, str) else type(self).__qualname__

    def _key(self, module: LightningModule) -> str:
        """Under which the state is saved: as `head` was given."""
        head = self.options.head
        return head if isinstance(head, str) else "" if head is None else locate_head(module, head).name

    def _label(self, trainer: Trainer, module: LightningModule) -> str:
        """Name of the head, beside others that other monitors watch."""
        name, _, weight, _ = locate_head(module, self.options.head)
        probes = [monitor.session.probe for monitor in _monitors(trainer) if monitor is not self]
        if any(probe is not None and probe.head.weight is weight for probe in probes):
            raise ValueError(f"another HilbertMonitor watches the head '{name}': pass each a head=... of its own")
        return name

    def _add_batch(self, trainer: Trainer, outputs: Any, batch: Any) -> None:
        """Note the loss and the tokens of a micro-batch."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        # Lightning has divided the loss by the number of micro-batches.
        loss = loss.detach() if isinstance(loss, Tensor) and loss.numel() == 1 else None
        self.session.add_batch(loss=loss, tokens=token_count(batch) * _reader(trainer)[1])

    def _notice_update(self, trainer: Trainer, pl_module: LightningModule, weight: float) -> None:
        """Note an update in which no hook saw a step."""
        probe = self.session.probe
        assert probe is not None
        is_scaled = getattr(trainer.precision_plugin, "scaler", None) is not None and pl_module.automatic_optimization
        self.session.notice_update(weight=0.0 if is_scaled else weight)
        if is_scaled and not probe.stepped:
            probe.skip("overflow")  # a GradScaler does not call step of an optimizer that is not fused


def _monitors(trainer: Trainer) -> list[HilbertMonitor]:
    """The monitors among a trainer's callbacks; they may be several, of several heads."""
    return [callback for callback in getattr(trainer, "callbacks", ()) if isinstance(callback, HilbertMonitor)]


def _reader(trainer: Trainer) -> tuple[int, int]:
    """Number of this rank among those that read data of their own, and how many these are; tensor-parallel ranks share
    theirs."""
    sampler = trainer.distributed_sampler_kwargs or {}
    return sampler.get("rank", trainer.global_rank), sampler.get("num_replicas", trainer.world_size)


def _refuse(moved: dict[str, Any]) -> None:
    """Refuse arguments that have moved or never were, as Python itself would."""
    for name in moved:
        if name in MOVED:
            field = name.removeprefix("prometheus_")
            raise TypeError(f"{name} has moved: give prometheus=Prometheus(port=..., {field}=...)")
        raise TypeError(f"HilbertMonitor.__init__() got an unexpected keyword argument {name!r}")

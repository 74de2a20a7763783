"""Everything around the measurement of one run: panel, log, rules, responses, exporter, sinks, and state to save.

It knows no training framework. A framework's adapter gives it a `TrainingLoop` and tells it what happens.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from hilbert_monitor import __version__
from hilbert_monitor.runs.alerts import Judge
from hilbert_monitor.runs.record import Alert, RunInfo, StepRecord
from hilbert_monitor.runs.stops import requested_stop

from .guard import Guard
from .head import NobodyMovesIt
from .head_place import find_head_place
from .hidden import AutocastFactory
from .layer_records import LayerRecords
from .layers import LayerWatch
from .options import MonitorOptions
from .outputs import Outputs
from .owners import owning_optimizer
from .panel_source import PanelSource
from .probe import Probe
from .ranks import Ranks
from .responses import Controls, Responses, acts
from .samples import SampleIndices
from .silence import Silence
from .token_texts import TokenTexts
from .verdict import Judged


class TrainingLoop(Controls, Protocol):
    """What a session needs of whatever trains the model."""

    @property
    def model(self) -> Module:
        """The model, as the loop calls it."""

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """Those among which one moves the head."""

    @property
    def schedulers(self) -> Sequence[Any]:
        """Those of the learning rate, as they are now."""

    @property
    def ranks(self) -> Ranks:
        """The processes that train together."""

    @property
    def updates(self) -> int:
        """Optimizer updates so far."""

    @property
    def last_update(self) -> float:
        """Updates at the end of training, or infinity."""

    @property
    def validation_loaders(self) -> Any:
        """Loaders of validation data, or None if they are not known yet."""

    @property
    def validates(self) -> bool:
        """Whether there will be a validation."""

    @property
    def keeps_log(self) -> bool:
        """Whether the run is worth a log; a trial of a few batches is not."""

    @property
    def folder(self) -> str:
        """Where the loop puts its files."""

    @property
    def autocast(self) -> AutocastFactory | None:
        """Makes the context in which the model runs its forward pass."""

    def describe(self) -> RunInfo:
        """Say what the loop knows of the run: model, seed, configuration, versions."""

    def log(self, record: StepRecord, *, final: bool) -> None:
        """Give a record to the loop's own loggers, on rank zero."""


@dataclass(frozen=True)
class Waiting:
    """A run whose head no optimizer has, so far."""

    loop: TrainingLoop
    why: str
    silence: Silence

    def reason(self, _updates: str) -> str:
        """Why nothing is measured, in a sentence."""
        return f"nothing is measured so far, and the head is watched as soon as an optimizer has it: {self.why}"


class MonitorSession:
    """Monitors the runs of one model, one after the other.

    Args:
        options: of the user.
    """

    def __init__(self, options: MonitorOptions) -> None:
        self.options = options
        self.guard = Guard(strict=options.strict)
        self.panels = PanelSource(options.panel, options.panel_size)
        self.probe: Probe | None = None
        self.outputs: Outputs | None = None
        """Where the run is written, on rank zero while it trains."""
        self._layers: LayerRecords | None = None
        self._loop: TrainingLoop | None = None
        self._waiting: Waiting | None = None
        self._responses: Responses | None = None
        self._texts: TokenTexts | None = None
        self._described = (0, False)  # number of remarks, and whether there is a panel, that the log knows of
        self._resumed: dict[str, Any] = {}
        self._tokens = 0
        self._loss: Tensor | None = None
        self._validation_loss: float | None = None

    # From the start of a run to its end

    def start(self, loop: TrainingLoop) -> None:
        """Find the head and its optimizer, and begin to watch: on all ranks, or on none."""
        self.guard.failures.clear()  # those of an earlier run
        self._waiting = None
        self._begin(loop)

    def look_again(self, *, weight: float = 1.0) -> None:
        """Begin to watch after all, if by now an optimizer has the head. Called on every rank after an update.

        Args:
            weight: how much of an update it is, where the loop cannot tell.
        """
        waiting = self._waiting
        if waiting is None:
            return
        waiting.silence.add(waiting.reason, weight)
        owned = False
        with self.guard("start"):
            head = find_head_place(waiting.loop.model, self.options.head).weight
            owned = owning_optimizer(waiting.loop.optimizers, head) is not None
        if waiting.loop.ranks.unanimous(owned):
            self._waiting = None
            self._begin(waiting.loop)

    def _begin(self, loop: TrainingLoop) -> None:
        self.probe, why = None, ""
        started = False
        with self.guard("panel", user_code=True):
            if self.panels.panel is None and self.options.perturbation_every:
                self.panels.take(loop.validation_loaders, validates=loop.validates, ranks=loop.ranks, model=loop.model)
        with self.guard("start"):
            try:
                self._start(loop)
                started = True
            except NobodyMovesIt as error:
                why = str(error)
        if not loop.ranks.unanimous(started):
            waits = loop.ranks.unanimous(bool(why))
            self.close()
            self.probe = None
            self._waiting = Waiting(loop, why, Silence(loop.ranks.rank)) if waits else None
            return
        assert self.probe is not None
        if not loop.ranks.unanimous(math.isfinite(self.probe.last)):
            self.probe.last = math.inf
        if not loop.validates and not loop.ranks.unanimous(self.panels.panel is not None):
            self.probe.perturbation_every = 0  # there is no panel, and none to come

    def begin_batch(self, index: int | None, samples: SampleIndices | None) -> None:
        """Note a micro-batch, before a step is made of it.

        Args:
            index: its number in the epoch.
            samples: indices of its samples, if they are known.
        """
        if self.probe is not None:
            self.probe.begin_batch(index, samples)

    def add_batch(self, *, loss: Tensor | None, tokens: int) -> None:
        """Note a micro-batch of the update that is being made.

        Args:
            loss: its part of the update's loss.
            tokens: its training tokens, over all ranks.
        """
        if loss is not None:
            self._loss = loss if self._loss is None else self._loss + loss
        self._tokens += tokens

    def record(self, *, final: bool = False) -> None:
        """Make the record of the update, if there was one, and hand it on. Called on every rank."""
        loop, probe = self._loop, self.probe
        if loop is None or probe is None or not (final or probe.stepped):
            return
        record = probe.record(
            final=final,
            train_loss=self._loss,
            validation_loss=self._validation_loss,
            tokens=self._tokens,
        )
        self._loss = self._validation_loss = None
        alerts = probe.alerts
        if self._layers is not None:
            record, more = self._layers.take(record, probe.step, self.outputs)
            alerts = [*alerts, *more]
            if not final:
                self._layers.go_on(probe.step + 1)
        self._pass_on(loop, probe, [(record, alerts)] if record is not None else [], final=final)

    def flush(self) -> None:
        """Hand on the records of steps that are still on the device. Called on any rank, at any time."""
        if self._loop is not None and self.probe is not None:
            self.probe.settle()
            self._pass_on(self._loop, self.probe, [], final=True)

    def _pass_on(self, loop: TrainingLoop, probe: Probe, latest: list[Judged], *, final: bool) -> None:
        judged = [*probe.earlier(), *latest]
        if loop.ranks.rank == 0:
            for one, alerts in judged:
                self._hand_on(loop, one, alerts, final=final)
        self._respond(loop, probe, [alert for _, alerts in judged for alert in alerts], final=final)

    def notice_update(self, *, weight: float = 1.0) -> None:
        """Look for the step of an update that no hook saw. Called on every rank."""
        if self.probe is not None and self._loop is not None:
            self.probe.notice_update(self._loop.optimizers, weight=weight)

    def validated(self, loss: float) -> None:
        """Add the validation loss to the record of the step before it, or keep it for the first."""
        self.flush()
        amended = None if self.probe is None or self.probe.stepped else self.probe.amend(validation_loss=loss)
        if amended is None:
            self._validation_loss = loss
        elif self.outputs is not None:
            self.outputs.write(self._named(amended))

    def alive(self) -> None:
        """Say that the run is doing something, though it makes no step."""
        if self.outputs is not None:
            self.outputs.alive()

    def update_panel(self) -> None:
        """Let the probe have the panel that was found."""
        if self.probe is not None:
            self.probe.panel = self.panels.panel

    def close(self, error: BaseException | None = None, *, stopped: str = "") -> None:
        """Let go of the optimizer and close the outputs; say what ended the run.

        Args:
            error: what ended it, if it did not end by itself.
            stopped: the signal that asked it to end, where the loop knows of one.
        """
        stopped = stopped or requested_stop(error)
        if self._waiting is not None:
            self._waiting.silence.tell()
        self._waiting = None
        if self.probe is not None:
            with self.guard("record"):
                self.flush()
            self._resumed = self.state_dict()
            self.probe.finish()
        if self._layers is not None:
            self._layers.close()
        self._layers = None
        webhooks = self._responses.webhooks if self._responses is not None else []
        (self.outputs or Outputs(self.guard)).close(error, webhooks, stopped=stopped)
        texts = self._texts
        self.outputs = self._responses = self._texts = self._loop = None
        self._loss = self._validation_loss = None
        self.panels.reset()
        if texts is not None:
            texts.close()
            if self.guard.strict and texts.error is not None and error is None:
                raise texts.error  # in its own thread it could stop nothing

    def state_dict(self) -> dict[str, Any]:
        """Steps and tokens so far, the name of the log and the history of the rules, of plain types."""
        if self.probe is None or self.probe.judge is None:
            return dict(self._resumed)
        with self.guard("record"):
            self.flush()
        layers = {} if self._layers is None else {"layers": self._layers.state()}
        return {
            "step": self.probe.step,
            "tokens": self._tokens,
            "run": self.outputs.id if self.outputs is not None else self._resumed.get("run", ""),
            "name": self.options.run_name or "",
            "history": self.probe.judge.state(),
            **layers,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting where the run was saved."""
        self._resumed = dict(state_dict)

    # How

    def _start(self, loop: TrainingLoop) -> None:
        options = self.options
        if loop.updates == 0:
            self._resumed = {}
        self._loop = loop
        self._texts = TokenTexts(options.decode, self.guard)
        self._responses = Responses(
            options.on_blowup, self.guard, lambda: self.outputs.id if self.outputs else "", self._texts
        )
        self.probe = Probe(
            loop.model,
            loop.optimizers,
            head=options.head,
            panel=self.panels.panel,
            diameter_every=options.diameter_every,
            perturbation_every=options.perturbation_every,
            bracket=options.bracket,
            hidden=options.hidden,
            autocast=loop.autocast,
            decay=options.decay,
            vocab_size=options.vocab_size,
            logit_scale=options.logit_scale,
            schedulers=self._schedulers,
            judge=Judge(options.rules),
            immediate=options.immediate or acts(options.on_blowup),
            side_stream=options.side_stream,
            efficiency=options.efficiency,
            attention=options.layers,
            world=loop.ranks.world,
            process_group=loop.ranks.group,
            guard=self.guard,
        )
        self._resume(loop, self.probe)
        if loop.ranks.rank == 0:
            with self.guard("outputs"):
                self._open(loop, self.probe)
        self.probe.attach()
        if options.layers and loop.ranks.rank == 0:
            with self.guard("layers"):
                head, note = self.probe.head.weight, self.probe.note
                layers = LayerWatch(loop.model, loop.optimizers, head, guard=self.guard, remark=note)
                self._layers = LayerRecords(layers, options.rules, self.probe.step + 1, self._resumed.get("layers"))

    def _schedulers(self) -> Sequence[Any]:
        """Those of the run, as they are now."""
        return () if self._loop is None else self._loop.schedulers

    def _resume(self, loop: TrainingLoop, probe: Probe) -> None:
        """Go on counting and judging where the run was saved."""
        probe.step, self._tokens = self._resumed.get("step", loop.updates), self._resumed.get("tokens", 0)
        with self.guard("last step"):
            probe.last = probe.step + loop.last_update - loop.updates
        if probe.judge is not None and "history" in self._resumed:
            with self.guard("history"):
                probe.judge.restore(self._resumed["history"])
                probe.judge.resumed()

    def _open(self, loop: TrainingLoop, probe: Probe) -> None:
        """Begin to write the run, in threads of their own: where a file system hangs, training does not."""
        run_dir = self.options.run_dir if loop.keeps_log else None
        self.outputs = Outputs(
            self.guard,
            sinks=self.options.sinks,
            run_dir=run_dir,
            prometheus=self.options.prometheus,
            texts=self._texts,
        )
        self._described = len(probe.remarks), self.panels.panel is not None
        self.outputs.open(self._describe(loop, probe), first_step=probe.step)

    def _describe(self, loop: TrainingLoop, probe: Probe) -> RunInfo:
        """What is known of the run now."""
        options, panel, info = self.options, self.panels.panel, loop.describe()
        same = options.run_name in (None, self._resumed.get("name"))  # or it is a branch with a name of its own
        versions = {
            "hilbert_monitor": __version__,
            "torch": str(torch.__version__),
            **info.versions,
            "python": platform.python_version(),
        }
        return msgspec.structs.replace(
            info,
            id=self._resumed.get("run", "") if same else "",
            name=options.run_name or "",
            head_optimizer=type(probe.source.optimizer).__name__,
            head_name=probe.head.name,
            config=info.config if options.config is None else options.config,
            panel_hash="" if panel is None else panel.hash,
            panel_size=None if panel is None else panel.size,
            remarks=tuple(probe.remarks),
            stalled_after=options.patience,
            last_step=int(probe.last) if math.isfinite(probe.last) else None,
            versions=versions,
            world_size=loop.ranks.world,
        )

    def _named(self, record: StepRecord) -> StepRecord:
        """The record with the name of its head, where several are watched."""
        if not self.options.named or self.probe is None:
            return record
        return msgspec.structs.replace(record, head=self.probe.head.name)

    def _hand_on(self, loop: TrainingLoop, record: StepRecord, alerts: list[Alert], *, final: bool) -> None:
        """Give a record and its alerts to the log, the sinks and the loggers."""
        assert self.probe is not None
        record = self._named(record)
        known = len(self.probe.remarks), self.panels.panel is not None
        if self.outputs is not None:
            with self.guard("run log"):
                if known != self._described:
                    self._described = known
                    self.outputs.describe(self._describe(loop, self.probe))
            with self.guard("outputs"):
                self.outputs.write(record, alerts)
        with self.guard("loggers"):
            loop.log(record, final=final)

    def _respond(self, loop: TrainingLoop, probe: Probe, alerts: list[Alert], *, final: bool) -> None:
        """Respond to blow-ups; what takes all ranks, only while there is a next step."""
        assert self._responses is not None
        self._responses.tell(alerts)
        if not final:
            folder = (self.outputs.folder if self.outputs is not None else None) or loop.folder
            self._responses.act(loop, alerts, probe.ranks, str(folder), probe.step)

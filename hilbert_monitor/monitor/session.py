"""The course of a run as the monitor sees it: from its start, over its updates, to its end, and the state to save.

It knows no training framework. A framework's adapter gives it a `TrainingLoop` and tells it what happens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from torch import Tensor

from hilbert_monitor.runs.alerts import Judge
from hilbert_monitor.runs.process_bound import ProcessBound
from hilbert_monitor.runs.record import StepRecord
from hilbert_monitor.runs.stops import requested_stop

from .head import NobodyMovesIt
from .head_place import find_head_place
from .layer_records import LayerRecords
from .layers import LayerWatch
from .options import MonitorOptions
from .outputs import RunOutputs
from .owners import owning_optimizer
from .panel_source import PanelSource
from .probe import Probe
from .run_description import describe_run
from .runtime import Guard
from .samples import SampleIndices
from .silence import Silence
from .training_loop import TrainingLoop
from .verdict import Judged


@dataclass(frozen=True)
class Waiting:
    """A run whose head no optimizer has, so far."""

    loop: TrainingLoop
    why: str
    silence: Silence

    def reason(self, _updates: str) -> str:
        """Why nothing is measured, in a sentence."""
        return f"nothing is measured so far, and the head is watched as soon as an optimizer has it: {self.why}"


_parents_runs: list[Any] = []
"""Runs that a forked child has dropped. Nothing of them is finalized, as a sink might then write its buffer again."""


class MonitorSession(ProcessBound):
    """Monitors the runs of one model, one after the other. A forked child starts without a run.

    Args:
        options: of the user.
    """

    def __init__(self, options: MonitorOptions) -> None:
        self.options = options
        self.guard = Guard(strict=options.strict)
        self.panels = PanelSource(options.panel, options.panel_size)
        self.probe: Probe | None = None
        self.outputs: RunOutputs | None = None
        """Where the run is written, while it trains."""
        self._described = (0, False)  # number of remarks, and whether there is a panel, that the log knows of
        self._layers: LayerRecords | None = None
        self._waiting: Waiting | None = None
        self._resumed: dict[str, Any] = {}
        self._tokens = 0
        self._loss: Tensor | None = None
        self._validation_loss: float | None = None

    # From the start of a run to its end

    def start(self, loop: TrainingLoop) -> None:
        """Find the head and its optimizer, and begin to watch: on all ranks, or on none."""
        self.bind_to_process()
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
        if waiting.loop.ranks.all_agree(owned):
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
        if not loop.ranks.all_agree(started):
            waits = loop.ranks.all_agree(bool(why))
            self.close()
            self.probe = None
            self._waiting = Waiting(loop, why, Silence(loop.ranks.rank)) if waits else None
            return
        assert self.probe is not None
        if not loop.ranks.all_agree(math.isfinite(self.probe.agenda.last)):
            self.probe.agenda.last = math.inf
        if not loop.validates and not loop.ranks.all_agree(self.panels.panel is not None):
            self.probe.agenda.perturbation_every = 0  # there is no panel, and none to come

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
        outputs, probe = self.outputs, self.probe
        if outputs is None or probe is None or not (final or probe.stepped):
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
            record, more = self._layers.take(record, probe.step, outputs)
            alerts = [*alerts, *more]
            if not final:
                self._layers.go_on(probe.step + 1)
        self._write([(record, alerts)] if record is not None else [], final=final)

    def flush(self) -> None:
        """Hand on the records of steps that are still on the device. Called on any rank, at any time."""
        if self.probe is not None and self.outputs is not None:
            self.probe.settle()
            self._write([], final=True)

    def _write(self, latest: list[Judged], *, final: bool) -> None:
        """Write the records that are ready, with their alerts, and the description of the run if it has changed."""
        probe, outputs = self.probe, self.outputs
        assert probe is not None
        assert outputs is not None
        judged = [*probe.earlier(), *latest]
        described = len(probe.remarks), self.panels.panel is not None
        with self.guard("run log"):
            if judged and described != self._described:
                self._described = described
                outputs.describe(describe_run(outputs.loop, probe, self.options, self.panels.panel, self._resumed))
        records = [(self._named(record), alerts) for record, alerts in judged]
        outputs.write(records, step=probe.step, final=final)

    def _named(self, record: StepRecord) -> StepRecord:
        """Return the record with the name of its head, if there are several."""
        if self.probe is None or not self.options.named:
            return record
        return msgspec.structs.replace(record, head=self.probe.head.name)

    def notice_update(self, *, weight: float = 1.0) -> None:
        """Look for the step of an update that no hook saw. Called on every rank."""
        if self.probe is not None and self.outputs is not None:
            self.probe.notice_update(self.outputs.loop.optimizers, weight=weight)

    def validated(self, loss: float) -> None:
        """Add the validation loss to the record of the step before it, or keep it for the first."""
        self.flush()
        amended = None if self.probe is None or self.probe.stepped else self.probe.amend(validation_loss=loss)
        if amended is None:
            self._validation_loss = loss
        elif self.outputs is not None:
            self.outputs.put(self._named(amended))

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
        try:
            if self.outputs is not None:
                self.outputs.close(error, stopped=stopped)
        finally:
            self.outputs = None
            self._loss = self._validation_loss = None
            self.panels.reset()

    def state_dict(self) -> dict[str, Any]:
        """Steps and tokens so far, the name of the log and the history of the rules, of plain types."""
        with self.guard("record"):
            self.flush()
        return self._state()

    def _state(self) -> dict[str, Any]:
        if self.probe is None or self.probe.judge is None:
            return dict(self._resumed)
        layers = {} if self._layers is None else {"layers": self._layers.state()}
        return {
            "step": self.probe.step,
            "tokens": self._tokens,
            "run": (self.outputs.id if self.outputs is not None else "") or self._resumed.get("run", ""),
            "name": self.options.run_name or "",
            "history": self.probe.judge.state(),
            **layers,
        }

    def on_fork(self) -> None:
        """Drop the run in the child. Its state as of the last record stays, for a child that saves a checkpoint."""
        _parents_runs.append((self.probe, self.outputs, self._layers))
        try:
            self._resumed = self._state()
        finally:
            self.probe = self.outputs = self._layers = self._waiting = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting where the run was saved."""
        self._resumed = dict(state_dict)

    # How

    def _start(self, loop: TrainingLoop) -> None:
        options = self.options
        if loop.updates == 0:
            self._resumed = {}
        self.outputs = RunOutputs(loop, options, self.guard)
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
            immediate=options.immediate or options.acts,
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
                self._described = len(self.probe.remarks), self.panels.panel is not None
                info = describe_run(loop, self.probe, options, self.panels.panel, self._resumed)
                self.outputs.open(info, first_step=self.probe.step)
        self.probe.attach()
        if options.layers and loop.ranks.rank == 0:
            with self.guard("layers"):
                head, note = self.probe.head.weight, self.probe.note
                layers = LayerWatch(loop.model, loop.optimizers, head, guard=self.guard, remark=note)
                self._layers = LayerRecords(layers, options.rules, self.probe.step + 1, self._resumed.get("layers"))

    def _schedulers(self) -> Sequence[Any]:
        """Those of the run, as they are now."""
        return () if self.outputs is None else self.outputs.loop.schedulers

    def _resume(self, loop: TrainingLoop, probe: Probe) -> None:
        """Go on counting and judging where the run was saved."""
        probe.step, self._tokens = self._resumed.get("step", loop.updates), self._resumed.get("tokens", 0)
        with self.guard("last step"):
            probe.agenda.last = probe.step + loop.last_update - loop.updates
        if probe.judge is not None and "history" in self._resumed:
            with self.guard("history"):
                probe.judge.restore(self._resumed["history"])

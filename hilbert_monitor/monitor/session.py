"""The course of a run as the monitor sees it: from its start, over its updates, to its end, and the state to save.

It knows no training framework. A framework's adapter gives it a `TrainingLoop` and tells it what happens.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from hilbert_monitor import __version__
from hilbert_monitor.runs.alerts import Judge
from hilbert_monitor.runs.files import to_json
from hilbert_monitor.runs.process_bound import ProcessBound
from hilbert_monitor.runs.record import RunInfo, StepRecord
from hilbert_monitor.runs.secrets import mask_secrets
from hilbert_monitor.runs.stops import requested_stop

from .head import NobodyMovesIt
from .layers import LayerMonitor
from .options import ON_ALL_RANKS, MonitorOptions
from .outputs import RunOutputs
from .panel import Panel, PanelCollector, SampleIndices
from .probe import Judged, Probe, is_sharded
from .runtime import Guard, Ranks, meet, warn_user
from .training_loop import TrainingLoop

_parents_runs: list[Any] = []
"""Runs that a forked child has dropped. Nothing of them is finalized, as a sink might then write its buffer again."""


class RunSession(ProcessBound):
    """Monitors the runs of one model, one after the other. A forked child starts without a run.

    Under DDP rank zero measures alone: the other ranks have no probe, and take part only in actions on a blow-up that
    all ranks take. Of a model with sharded parameters every rank has a probe.

    Args:
        options: of the user.
    """

    def __init__(self, options: MonitorOptions) -> None:
        self.options = options
        self.guard = Guard(strict=options.strict)
        self.panels = PanelCollector(options.panel, options.panel_size)
        self.probe: Probe | None = None
        self.outputs: RunOutputs | None = None
        """Where the run is written, while it trains."""
        self._described = (0, False)  # number of remarks, and whether there is a panel, that the log knows of
        self._layers: LayerMonitor | None = None
        self._waits_for_groups: int | None = None  # where no optimizer has the head: how many groups there are
        self._resumed: dict[str, Any] = {}
        self._tokens = 0
        self._loss: Tensor | None = None
        self._validation_loss: float | None = None

    # From the start of a run to its end

    def start(self, loop: TrainingLoop) -> None:
        """Find the head and its optimizer, and begin to watch: of a sharded model on all ranks, or on none."""
        self.bind_to_process()
        self.guard.failures.clear()  # those of an earlier run
        self.probe, self._waits_for_groups = None, None
        self.find_panel(loop.ranks, updates=loop.updates, validates=loop.validates)
        self.outputs = RunOutputs(loop, self.options, self.guard)
        if together := [action for action in self.options.actions if action in ON_ALL_RANKS]:
            self.outputs.alone = meet(loop.ranks, "actions", repr(together))
            if self.outputs.alone and loop.ranks.rank == 0:
                why = f"{self.outputs.alone}, and it takes all ranks"
                warn_user(f"on_blowup={together!r} is left out: {why}", stacklevel=4)
        self._begin(loop)

    def find_panel(self, ranks: Ranks, *, updates: int, validates: bool) -> None:
        """Take the panel that was given, or that of the run that goes on, if there is none yet. Called on every rank.

        Args:
            ranks: those that train together.
            updates: optimizer updates so far.
            validates: whether validation will deliver batches.
        """
        if updates == 0:
            self._resumed = {}
        if self.panels.panel is None and self.options.perturbation_every:
            with self.guard("panel", user_code=True):
                self.panels.take(self._resumed.get("panel"), validates=validates, ranks=ranks)

    def _begin(self, loop: TrainingLoop) -> None:
        sharded = is_sharded(loop.model)
        if loop.ranks.rank != 0 and not sharded:
            return
        if sharded and (apart := meet(loop.ranks, "sharded head", self.options.shared)):
            if loop.ranks.rank == 0:
                warn_user(f"nothing is measured: {apart}, and a sharded head takes all of them alike", stacklevel=4)
            return
        why, started = "", False
        with self.guard("start"):
            try:
                self._start_probe(loop)
                started = True
            except NobodyMovesIt as error:
                why = str(error)
        if not sharded or loop.ranks.all_agree(started):
            started = self.probe is not None
        else:
            why = why if loop.ranks.all_agree(bool(why)) else ""
            started = False
        if not started:
            if why and loop.ranks.rank == 0 and self._waits_for_groups is None:
                warn_user(
                    f"nothing is measured so far, and the head is watched as soon as an optimizer has it: {why}",
                    stacklevel=4,
                )
            self._stop_probe()
            self.probe = None
            self._waits_for_groups = self._groups() if why else None
            return
        assert self.probe is not None
        self._waits_for_groups = None
        schedule, has_panel = self.probe.schedule, self.panels.panel is not None
        if sharded and not loop.ranks.all_agree(math.isfinite(schedule.last)):
            schedule.last = math.inf
        if not loop.validates and not (loop.ranks.all_agree(has_panel) if sharded else has_panel):
            schedule.perturbation_every = 0  # there is no panel, and none to come

    def look_again(self) -> None:
        """Begin to watch after all, if the optimizers have got further groups, as when a head is unfrozen."""
        if self._waits_for_groups is not None and self.outputs is not None and self._groups() != self._waits_for_groups:
            self._begin(self.outputs.loop)

    def _groups(self) -> int:
        assert self.outputs is not None
        return sum(len(optimizer.param_groups) for optimizer in self.outputs.loop.optimizers)

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
        if loss is not None and self.probe is not None:
            self._loss = loss if self._loss is None else self._loss + loss
        self._tokens += tokens

    def record(self, *, final: bool = False, updated: bool = True) -> None:
        """Make the record of the update, if there was one, and hand it on. Called on every rank.

        Args:
            final: there is no next step.
            updated: the training loop has counted an update: the same on all ranks.
        """
        outputs, probe = self.outputs, self.probe
        if outputs is None:
            return
        if probe is not None and (final or probe.stepped):
            loss, self._loss = self._loss, None
            validation_loss, self._validation_loss = self._validation_loss, None
            with self.guard("record"):
                record = probe.record(
                    final=final, train_loss=loss, validation_loss=validation_loss, tokens=self._tokens
                )
                if self._layers is not None:
                    self._layers.end(probe.step)
                self._write([] if record is None else [(record, probe.alerts)], final=final)
                if self._layers is not None and not final:
                    self._layers.begin(probe.step + 1)
        if updated and not final:
            self._loss = None  # of an update that no hook saw
            outputs.act(0 if probe is None else probe.step)

    def flush(self) -> None:
        """Hand on the records of steps that are still on the device. Called on any rank, at any time."""
        if self.probe is not None and self.outputs is not None:
            self.probe.flush()
            self._write([], final=True)

    def _write(self, latest: list[Judged], *, final: bool) -> None:
        """Write the records that are ready, with their alerts, and the description of the run if it has changed."""
        probe, outputs = self.probe, self.outputs
        assert probe is not None
        assert outputs is not None
        judged = [*probe.earlier(), *latest]
        with self.guard("run log"):
            if judged and self._known != self._described:
                self._described = self._known
                outputs.describe(self._describe(probe, outputs.loop))
        for record, alerts in judged:
            if self._layers is not None:
                record, layers, more = self._layers.complete(record)
                alerts = [*alerts, *more]
                if layers is not None:
                    outputs.write_log(layers)
            outputs.write(self._labelled(record), alerts, final=final)

    @property
    def _known(self) -> tuple[int, bool]:
        return (0 if self.probe is None else len(self.probe.remarks)), self.panels.panel is not None

    def _labelled(self, record: StepRecord) -> StepRecord:
        """Return the record with the name of its head, if others have monitors too."""
        label = "" if self.outputs is None else self.outputs.loop.label
        return msgspec.structs.replace(record, head=label) if label else record

    def notice_update(self, *, weight: float = 1.0) -> None:
        """Look for the step of an update that no hook saw."""
        if self.probe is not None and self.outputs is not None:
            self.probe.notice_update(self.outputs.loop.optimizers, weight=weight)

    def log_validation(self, loss: float) -> None:
        """Add the validation loss to the record of the step before it, or keep it for the first."""
        self.flush()
        updated = None if self.probe is None or self.probe.stepped else self.probe.update_last(validation_loss=loss)
        if updated is None:
            self._validation_loss = loss
        elif self.outputs is not None:
            self.outputs.put(self._labelled(updated))

    def heartbeat(self) -> None:
        """Say that the run is doing something, though it makes no step."""
        if self.outputs is not None:
            self.outputs.alive()

    def update_panel(self) -> None:
        """Let the probe have the panel that was found, and save it in the run's folder."""
        panel = self.panels.panel
        if self.probe is not None and self.outputs is not None and panel is not self.probe.panel:
            self.probe.panel = panel
            if panel is not None:
                self.outputs.write_log(msgspec.json.encode(panel.saved))

    def close(self, error: BaseException | None = None, *, stopped: str = "") -> None:
        """Let go of the optimizer and close the outputs; say what ended the run.

        Args:
            error: what ended it, if it did not end by itself.
            stopped: the signal that asked it to end, where the loop knows of one.
        """
        stopped = stopped or requested_stop(error)
        self._waits_for_groups = None
        self._stop_probe()
        outputs, self.outputs = self.outputs, None
        self._loss = self._validation_loss = None
        self.panels.reset()
        if outputs is not None:
            outputs.close(error, stopped=stopped)

    def _stop_probe(self) -> None:
        if self.probe is not None:
            with self.guard("record"):
                self.flush()
            self._resumed = self.state_dict()
            self.probe.finish()
        if self._layers is not None:
            self._layers.close()
        self._layers = None

    def state_dict(self) -> dict[str, Any]:
        """Return steps and tokens, the name of the log, the panel and the history of the rules, of plain types."""
        with self.guard("record"):
            self.flush()
        return self._state()

    def _state(self) -> dict[str, Any]:
        if self.probe is None or self.probe.judge is None:
            return dict(self._resumed)
        more = {} if self._layers is None else {"layers": self._layers.state()}
        if self.probe.panel is not None:
            more["panel"] = self.probe.panel.saved
        return {
            "step": self.probe.step,
            "tokens": self._tokens,
            "run": (self.outputs.id if self.outputs is not None else "") or self._resumed.get("run", ""),
            "name": self.options.run_name or "",
            "history": self.probe.judge.state(),
            **more,
        }

    def on_fork(self) -> None:
        """Drop the run in the child. Its state as of the last record stays, for a child that saves a checkpoint."""
        _parents_runs.append((self.probe, self.outputs, self._layers))
        try:
            self._resumed = self._state()
        finally:
            self.probe = self.outputs = self._layers = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting where the run was saved."""
        self._resumed = dict(state_dict)

    # How

    def _start_probe(self, loop: TrainingLoop) -> None:
        options, outputs = self.options, self.outputs
        assert outputs is not None
        self.probe = probe = Probe(
            loop.model,
            loop.optimizers,
            head=options.head,
            diameter_every=options.diameter_every,
            perturbation_every=options.perturbation_every,
            bounds=options.advanced.bounds,
            hidden=options.hidden,
            autocast=loop.autocast,
            decay=options.decay,
            vocab_size=options.vocab_size,
            logit_scale=options.logit_scale,
            schedulers=self._schedulers,
            judge=Judge(options.rules),
            immediate=options.advanced.immediate or options.acts,
            efficiency=options.efficiency,
            attention=options.layers,
            process_group=loop.ranks.group,
            guard=self.guard,
        )
        probe.step, self._tokens = self._resumed.get("step", loop.updates), self._resumed.get("tokens", 0)
        with self.guard("last step"):
            probe.schedule.last = probe.step + loop.last_update - loop.updates
        if probe.judge is not None and "history" in self._resumed:
            with self.guard("history"):
                probe.judge.restore(self._resumed["history"])
        if loop.ranks.rank == 0:
            with self.guard("outputs"):
                self._described = self._known
                outputs.open(self._describe(probe, loop), first_step=probe.step)
        with self.guard("panel"):
            self.update_panel()
        probe.attach()
        if options.layers and loop.ranks.rank == 0:
            with self.guard("layers"):
                self._layers = LayerMonitor(
                    loop.model,
                    loop.optimizers,
                    probe.head.weight,
                    guard=self.guard,
                    remark=probe.note,
                    decay=options.decay,
                    rules=options.rules,
                    history=self._resumed.get("layers"),
                )
                self._layers.begin(probe.step + 1)

    def _schedulers(self) -> Sequence[Any]:
        """Return those of the run, as they are now."""
        return () if self.outputs is None else self.outputs.loop.schedulers

    def _describe(self, probe: Probe, loop: TrainingLoop) -> RunInfo:
        """Return what is known of the run: what the loop says, and what the monitor watches it with."""
        info, options = loop.describe(), self.options
        config = info.config if options.config is None else options.config
        same = options.run_name in (None, self._resumed.get("name"))  # or it is a branch with a name of its own
        panel: Panel | None = self.panels.panel
        return msgspec.structs.replace(
            info,
            id=self._resumed.get("run", "") if same else "",
            name=options.run_name or "",
            head_optimizer=type(probe.head.source.optimizer).__name__,
            head_name=probe.head.name,
            config=mask_secrets(to_json(dict(config)), options.advanced.secrets),
            panel_hash="" if panel is None else panel.hash,
            panel_size=None if panel is None else panel.size,
            remarks=tuple(probe.remarks),
            stalled_after=options.advanced.stalled_after,
            last_step=int(probe.schedule.last) if math.isfinite(probe.schedule.last) else None,
            versions={
                "hilbert_monitor": __version__,
                "torch": str(torch.__version__),
                **info.versions,
                "python": platform.python_version(),
            },
            world_size=loop.ranks.world,
        )

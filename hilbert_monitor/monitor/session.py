"""The course of a run as the monitor sees it: from its start, over its updates, to its end, and the state to save.

It knows no training framework. A framework's adapter gives it a `TrainingLoop` and tells it what happens.
"""

from __future__ import annotations

import inspect
import math
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any, Protocol, TypeVar

import msgspec
import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from hilbert_monitor import __version__
from hilbert_monitor.runs.alerts import Judge, Rules
from hilbert_monitor.runs.files import to_json
from hilbert_monitor.runs.process_bound import ProcessBound
from hilbert_monitor.runs.record import RunInfo, StepRecord
from hilbert_monitor.runs.secrets import mask_secrets
from hilbert_monitor.runs.stops import requested_stop

from .head import NobodyMovesIt
from .hidden_states import AutocastFactory, HiddenStates
from .layers import LayerMonitor
from .optimizers import Decay
from .outputs import ON_ALL_RANKS, Action, RunOutputs, action_of
from .panel import NAMED, PanelChoice, PanelCollector, SampleIndices, check_panel_folder
from .probe import Judged, Probe, is_sharded
from .prometheus import Prometheus
from .runtime import Guard, Ranks, meet, warn_user

F = TypeVar("F", bound=Callable[..., Any])
KINDS: dict[str, tuple[Any, str]] = {
    "hidden": (Callable, "a function of the model and a batch"),
    "decode": (Callable, "a function of a token id, such as tokenizer.decode"),
    "config": (Mapping, "a dict, such as vars(args)"),
    "rules": (Rules, "Rules(false_alarms_per_10k=...)"),
    "prometheus": (Prometheus, "a port or Prometheus(port=...)"),
    "logit_scale": (Real, "a number"),
    "run_dir": (str | os.PathLike, "the path of a folder"),
    "run_name": (str, "a text"),
}
"""What an option that may be None is otherwise, as a type and in words."""


def _check_kind(name: str, value: Any, kind: Any, what: str) -> None:
    if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
        raise TypeError(f"{name} is {what}, or None, got {type(value).__name__} {value!r}")


@dataclass(frozen=True, kw_only=True)
class Advanced:
    """Settings that few runs need: ``HilbertMonitor(advanced=Advanced(immediate=True))``."""

    bounds: bool | None = None
    """Certified bounds of the diameter on every update; by default where they need no copy of the weights."""
    immediate: bool = False
    """Wait for an accelerator in every step, so that its record and alerts come in that step. By default it is not
    waited for in steps of which only bounds are measured, and these come when the next step is made. Anything in
    `on_blowup` that acts ("stop", "checkpoint", a function) implies it."""
    stalled_after: float | None = None
    """Seconds without a step or validation after which the run counts as stalled, unless twenty of its steps, or twice
    its longest pause in the last hundred, take longer; by default 300."""
    progress_bar: bool = True
    """Show the diameter in Lightning's progress bar."""
    secrets: Sequence[str] = ()
    """Names in `config` whose values are masked, besides those that look like secrets."""
    private: bool = False
    """Let no other user read the run's folder (mode 0700). By default its mode follows the umask."""

    def __post_init__(self) -> None:
        _check_kind("stalled_after", self.stalled_after, Real, "a number of seconds")
        if isinstance(self.secrets, str):
            raise TypeError(f"secrets is a list of names in the config, got {self.secrets!r}: write [{self.secrets!r}]")
        if self.stalled_after is not None and not self.stalled_after >= 0:
            raise ValueError(f"stalled_after is a number of seconds, zero or more, got {self.stalled_after!r}")


@dataclass(kw_only=True)
class MonitorOptions:
    """What a user chooses, whatever trains the model. `HilbertMonitor` documents each option."""

    head: str | Module | Parameter | None = None
    panel_size: int = 8192
    diameter_every: int = 10
    perturbation_every: int = 500
    panel: PanelChoice = "loader"
    hidden: HiddenStates | None = None
    decay: Decay | None = None
    vocab_size: int | None = None
    logit_scale: float | None = None
    decode: Callable[[int], str] | None = None
    run_dir: str | None = "runs"
    run_name: str | None = None
    config: dict[str, Any] | None = None
    layers: bool = False
    efficiency: bool = False
    rules: Rules | None = None
    on_blowup: Action | list[Any] = "warn"
    sinks: Iterable[Any] = ()
    prometheus: int | Prometheus | None = None
    strict: bool = False
    advanced: Advanced = Advanced()

    def __post_init__(self) -> None:
        if isinstance(self.head, list | tuple):
            raise ValueError(f"a monitor watches one head, got {self.head!r}: use one monitor for each")
        if isinstance(self.prometheus, int) and not isinstance(self.prometheus, bool):
            self.prometheus = Prometheus(port=self.prometheus)
        if not isinstance(self.advanced, Advanced):
            raise TypeError(f"advanced is Advanced(...), got {type(self.advanced).__name__} {self.advanced!r}")
        for name, (kind, what) in KINDS.items():
            _check_kind(name, getattr(self, name), kind, what)
        is_share = isinstance(self.decay, Real) and not isinstance(self.decay, bool) and 0 <= float(self.decay) <= 1
        if not (self.decay in (None, "decoupled", "coupled") or is_share or callable(self.decay)):
            raise ValueError(
                'decay is "decoupled", "coupled", the share of the weights that a step takes away, a function of the'
                f" parameter's group that returns it, or None, got {self.decay!r}"
            )
        if self.logit_scale is not None and not 0 < abs(self.logit_scale) < math.inf:
            raise ValueError(f"logit_scale is a number other than zero, or None, got {self.logit_scale!r}")
        if self.run_dir is not None:
            self.run_dir = os.path.expanduser(self.run_dir)
        for name, what, least in (
            ("diameter_every", "a number of updates, 0 for never", 0),
            ("perturbation_every", "a number of updates, 0 for never", 0),
            ("panel_size", "a number of validation positions", 1),
            ("vocab_size", "a number of rows of the head, or None for all", 1),
        ):
            value = getattr(self, name)
            if name == "vocab_size" and value is None:
                continue
            if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} is {what}: a whole number of at least {least}, got {value!r}")
        if isinstance(self.panel, str) and self.panel not in NAMED:
            check_panel_folder(self.panel)
        what = "sinks is a list of objects with write(record), got"
        if not isinstance(self.sinks, Iterable):
            raise TypeError(f"{what} {type(self.sinks).__name__}: write sinks=[...]")
        self.sinks = tuple(self.sinks)
        for sink in self.sinks:
            if not callable(getattr(sink, "write", None)):
                raise TypeError(f"{what} one with a {type(sink).__name__}, which has no write")
            if isinstance(sink, type):
                raise TypeError(f"{what} the class {sink.__name__}: make one, sinks=[{sink.__name__}(...)]")
        _ = self.actions  # refuses anything else

    @property
    def actions(self) -> list[Action]:
        """The actions on a blow-up, with functions in place of their names."""
        given = self.on_blowup if isinstance(self.on_blowup, list | tuple) else [self.on_blowup]
        return [action_of(action) for action in given]

    @property
    def shared(self) -> str:
        """What all ranks must have alike to measure together."""
        names = ("head", "panel_size", "diameter_every", "perturbation_every", "vocab_size", "logit_scale")
        values = [getattr(self, name) for name in (*names, "layers", "efficiency", "strict")]
        return repr([value if isinstance(value, str | Real | None) else type(value).__name__ for value in values])

    @property
    def acts(self) -> bool:
        """Whether an action on a blow-up may change the run, so that it has to come before the next step."""
        return any(callable(action) or action in ON_ALL_RANKS for action in self.actions)


def chosen_options(caller: str, given: dict[str, Any]) -> MonitorOptions:
    """Return the options given by name. Raise TypeError in the name of `caller` for one that does not exist."""
    names = {field.name for field in fields(MonitorOptions)}
    for name in given:
        if name not in names:
            close = get_close_matches(name, names, 1)
            hint = f": did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"{caller} got an unexpected keyword argument {name!r}{hint}")
    return MonitorOptions(**given)


def with_options(function: F) -> F:
    """Show the options in the signature of a function that takes them as ``**options``: for `help`, and for editors."""
    signature = inspect.signature(function)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    names = {p.name for p in own}
    options = [p for p in inspect.signature(MonitorOptions).parameters.values() if p.name not in names]
    function.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
    return function


class TrainingLoop(Protocol):
    """What a session needs of whatever trains the model."""

    model: Module  # as the loop calls it
    ranks: Ranks  # that train together
    validates: bool  # whether there will be a validation
    label: str  # name of the head in records and logs, where several heads have monitors; else empty
    keeps_log: bool  # whether the run is worth a log; a trial of a few batches is not
    folder: str  # where the loop puts its files
    autocast: AutocastFactory | None  # makes the context in which the model runs its forward pass

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """Those among which one moves the head."""

    @property
    def schedulers(self) -> Sequence[Any]:
        """Those of the learning rate, as they are now."""

    @property
    def updates(self) -> int:
        """Optimizer updates so far."""

    @property
    def last_update(self) -> float:
        """Updates at the end of training, or infinity."""

    def describe(self) -> RunInfo:
        """Say what the loop knows of the run: model, seed, configuration, versions."""

    def log(self, record: StepRecord, *, behind: int, final: bool) -> None:
        """Give a record to the loop's own loggers, on rank zero. `behind` steps were made since."""

    def make_checkpoint(self) -> Any:
        """Collect what a checkpoint holds; called on every rank."""

    def save_checkpoint(self, checkpoint: Any, path: str) -> None:
        """Write a checkpoint. Called on every rank; the path is that of rank zero."""

    def stop(self) -> None:
        """End training after this step."""


_parents_runs: list[Any] = []
"""Runs that a forked child has dropped. Nothing of them is finalized, as a sink might then write its buffer again."""


class RunSession(ProcessBound):
    """Monitors the runs of one model, one after the other. A forked child starts without a run.

    Under DDP rank zero measures alone: the other ranks have no probe, and take part only in actions on a blow-up that
    all ranks take. Of a model with sharded parameters every rank has a probe.
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
        """Take the panel that was given, or that of a run that goes on, if there is none yet. Called on every rank."""
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
        failed = not (loop.ranks.all_agree(started) if sharded else started)
        if failed and sharded and not loop.ranks.all_agree(bool(why)):
            why = ""
        if failed or self.probe is None:
            if why and loop.ranks.rank == 0 and self._waits_for_groups is None:
                so_far = "nothing is measured so far, and the head is watched as soon as an optimizer has it"
                warn_user(f"{so_far}: {why}", stacklevel=4)
            self._stop_probe()
            self.probe = None
            self._waits_for_groups = self._groups() if why else None
            return
        self._waits_for_groups = None
        schedule, has_panel = self.probe.schedule, self.panels.panel is not None
        if sharded:
            least, minus_most = loop.ranks.all_min([schedule.last, -schedule.last])
            schedule.last = least if least == -minus_most else math.inf
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
        """Note a micro-batch before the step: its number in the epoch, and the indices of its samples if known."""
        if self.probe is not None:
            self.probe.begin_batch(index, samples)

    def add_batch(self, *, loss: Any, tokens: int) -> None:
        """Note a micro-batch of the update: its part of the loss, if known, and its training tokens over all ranks."""
        if isinstance(loss, Tensor) and loss.numel() == 1 and self.probe is not None:
            self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()
        self._tokens += tokens

    def record(self, *, final: bool = False, updated: bool = True) -> None:
        """Make the record of the update, if there was one, and hand it on. Called on every rank.

        After a `final` one there is no next step. The loop tells whether it has `updated`: the same on all ranks.
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
                self._write(probe, outputs, [] if record is None else [(record, probe.alerts)], final=final)
                if self._layers is not None and not final:
                    self._layers.begin(probe.step + 1)
        if updated and not final:
            self._loss = None  # of an update that no hook saw
            outputs.act(0 if probe is None else probe.step)

    def flush(self) -> None:
        """Hand on the records of steps that are still on the device. Called on any rank, at any time."""
        if self.probe is not None and self.outputs is not None:
            self.probe.flush()
            self._write(self.probe, self.outputs, [], final=True)

    def _write(self, probe: Probe, outputs: RunOutputs, latest: list[Judged], *, final: bool) -> None:
        """Write the records that are ready, with their alerts, and the description of the run if it has changed."""
        judged = [*probe.earlier(), *latest]
        with self.guard("run log"):
            known = len(probe.remarks), self.panels.panel is not None
            if judged and known != self._described:
                self._described = known
                outputs.describe(self._describe(probe, outputs.loop))
        for record, alerts in judged:
            if self._layers is not None:
                record, layers, more = self._layers.complete(record)
                alerts = [*alerts, *more]
                if layers is not None:
                    outputs.write_log(layers)
            outputs.write(record, alerts, behind=probe.step - record.step, final=final)

    def notice_update(self, *, weight: float = 1.0, scales_loss: bool = False) -> None:
        """Note an update in which no hook saw a step: it was compiled, or a GradScaler left it out."""
        probe = self.probe
        if probe is None or probe.stepped or self.outputs is None:
            return
        probe.notice_update(self.outputs.loop.optimizers, weight=0.0 if scales_loss else weight)
        if scales_loss and not probe.stepped:
            probe.skip("overflow")  # a GradScaler does not call step of an optimizer that is not fused

    def log_validation(self, loss: float) -> None:
        """Add the validation loss to the record of the step before it, or keep it for the first."""
        self.flush()
        updated = None if self.probe is None or self.probe.stepped else self.probe.update_last(validation_loss=loss)
        if updated is None:
            self._validation_loss = loss
        elif self.outputs is not None:
            self.outputs.put(updated)

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
        """Let go of the optimizer and close the outputs; say what ended the run: an error or a signal, or itself."""
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
            with self.guard("record"):
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
        names = ("head", "diameter_every", "perturbation_every", "hidden", "decay", "vocab_size", "logit_scale")
        self.probe = probe = Probe(
            loop.model,
            loop.optimizers,
            **{name: getattr(options, name) for name in names},
            bounds=options.advanced.bounds,
            autocast=loop.autocast,
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
                self._described = len(probe.remarks), self.panels.panel is not None
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
        return () if self.outputs is None else self.outputs.loop.schedulers

    def _describe(self, probe: Probe, loop: TrainingLoop) -> RunInfo:
        info, options, panel = loop.describe(), self.options, self.panels.panel
        config = info.config if options.config is None else options.config
        same = options.run_name in (None, self._resumed.get("name"))  # or it is a branch with a name of its own
        ours = {"hilbert_monitor": __version__, "torch": str(torch.__version__)}
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
            versions=ours | info.versions | {"python": platform.python_version()},
            world_size=loop.ranks.world,
        )

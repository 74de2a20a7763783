"""`watch`: the whole monitor in a training loop of one's own. Adapters for other trainers are made of its `Watch`."""

from __future__ import annotations

import atexit
import dataclasses
import inspect
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from numbers import Integral
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module
from torch.optim import Optimizer

from hilbert_monitor.runs.record import RunInfo, StepRecord, measured

from .hidden_states import AutocastFactory, unwrapped
from .panel import Batch, GivenPanel, Panel, check_panel_folder, panel_from, sample_indices, token_count
from .probe import is_sharded
from .runtime import Ranks, compute_device, meet, warn_user
from .session import MonitorOptions, RunSession, chosen_options, with_options


def _check_arguments(given: dict[str, Any]) -> None:
    """Raise TypeError or ValueError for what cannot be an argument of `watch`."""
    model, optimizer, panel = given["model"], given["optimizer"], given["panel"]
    log, autocast, save_checkpoint = given["log"], given["autocast"], given["save_checkpoint"]
    if not isinstance(model, Module):
        raise TypeError(f"the model has to be a torch.nn.Module, got {_kind(model)}: watch(model, optimizer, ...)")
    several = optimizer if isinstance(optimizer, Sequence) else [optimizer]
    wrong = [_kind(one) for one in several if not hasattr(one, "param_groups")]
    if wrong or not several:
        raise TypeError(
            "the optimizer has to be the one that moves the head, or a list of optimizers, got"
            f" {wrong[0] if wrong else 'none'}: watch(model, optimizer, ...)"
        )
    if isinstance(panel, str | os.PathLike):
        check_panel_folder(panel)
    elif isinstance(panel, bytes) or not isinstance(panel, Panel | Tensor | Iterable | None):
        raise TypeError(
            f"panel takes token ids, batches or a DataLoader of validation text, got {_kind(panel)}: a text has to be"
            " tokenized first"
        )
    if log is not None and not callable(log):
        raise TypeError(f"log takes a function of a dict and a step, such as wandb.log, got {_kind(log)}")
    if autocast is not None and (not callable(autocast) or hasattr(autocast, "__enter__")):
        raise TypeError(
            f"autocast takes a function that makes a context, got {_kind(autocast)}: write lambda:"
            ' torch.autocast("cuda", torch.bfloat16)'
        )
    if save_checkpoint is not None and not callable(save_checkpoint):
        raise TypeError(f"save_checkpoint takes a function of a path, got {_kind(save_checkpoint)}")
    for name, what, least in (
        ("first_step", "a number of updates", 0),
        ("last_step", "a number of updates", 0),
        ("data_ranks", "a number of processes", 1),
        ("seed", "a whole number", None),
    ):
        value = given[name]
        if value is None:
            continue
        if not isinstance(value, Integral) or isinstance(value, bool):
            raise TypeError(f"{name} is {what}, got {value!r}")
        if least is not None and int(value) < least:
            raise ValueError(f"{name} is {what}, {'zero' if least == 0 else 'one'} or more, got {value!r}")


def _kind(value: Any) -> str:
    """A value by its class, or as it is where that says more."""
    return repr(value) if value is None or isinstance(value, str | int) else type(value).__name__


Log = Callable[..., Any]
"""Takes numbers by name, and the step if it has a place for it; or a tag, a number and the step, as TensorBoard's."""

DEEPSPEED = (
    "nothing is measured under DeepSpeed, whose engine makes the optimizer's step inside backward, on flattened"
    " weights: use FSDP2 or DDP"
)
FSDP1 = (
    "nothing is measured under FSDP1, which flattens the head's rows: use FSDP2 (fully_shard, or fsdp_version=2 in"
    " Accelerate)"
)


class PlainLoop:
    """A loop that tells what happens in it, and is not asked. The arguments are those of `watch`."""

    validates = False
    label = ""
    keeps_log = True

    def __init__(
        self,
        model: Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        schedulers: Any = (),
        autocast: AutocastFactory | None = None,
        scaler: Any = None,
        first_step: int = 0,
        last_step: int | None = None,
        log: Log | None = None,
        save_checkpoint: Callable[[str], Any] | None = None,
        seed: int | None = None,
        folder: str = ".",
        process_group: ProcessGroup | None = None,
    ) -> None:
        self.model, self.autocast, self.scaler = model, autocast, scaler
        self.optimizers = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
        self._schedulers = schedulers
        self.updates = first_step
        self.last_update: float = math.inf if last_step is None else last_step
        self.folder, self.seed = folder, None if seed is None else int(seed)
        self.should_stop = False
        self._log = None if log is None else in_numbers(log)
        self._save = save_checkpoint
        device = next((compute_device(p) for p in model.parameters()), torch.device("cpu"))
        self.ranks = Ranks.of(device, group=process_group)

    @property
    def schedulers(self) -> Sequence[Any]:
        """Those of the learning rate, without the wrappers that Accelerate puts around them."""
        given = self._schedulers
        several = list(given) if isinstance(given, Iterable) else [] if given is None else [given]
        return [getattr(one, "scheduler", one) for one in several]

    @property
    def in_between(self) -> bool:
        """Whether gradients are being accumulated, where the optimizers know: Accelerate's then make no step."""
        states = (getattr(optimizer, "gradient_state", None) for optimizer in self.optimizers)
        return not all(getattr(state, "sync_gradients", True) for state in states)

    @property
    def scales_loss(self) -> bool:
        """Whether a step may be left out because gradients overflowed."""
        scalers = [self.scaler, *(getattr(optimizer, "scaler", None) for optimizer in self.optimizers)]
        return any(scaler is not None for scaler in scalers)

    def refusal(self) -> str:
        """Why nothing can be measured, in a sentence; empty if it can."""
        parts = (*self.model.modules(), *self.optimizers)
        kinds = {cls.__name__ for part in parts for cls in type(part).__mro__}
        if any(kind.startswith("DeepSpeed") for kind in kinds):
            return DEEPSPEED
        return FSDP1 if "FullyShardedDataParallel" in kinds else ""

    def describe(self) -> RunInfo:
        """Name the model's class and the seed."""
        return RunInfo(model=type(unwrapped(self.model)).__name__, seed=self.seed)

    def log(self, record: StepRecord, *, behind: int, final: bool) -> None:
        """Give a record to the user's function."""
        if self._log is not None:
            self._log(logged_numbers(record), record.step)

    def make_checkpoint(self) -> Any:
        """Say that one can be made: the user's function does all of it."""
        return self._save

    def save_checkpoint(self, checkpoint: Any, path: str) -> None:
        """Call the user's function on every rank, with the path of rank zero."""
        checkpoint(self.ranks.gather(path)[0])

    def stop(self) -> None:
        """Ask the loop to end after this step."""
        self.should_stop = True


def logged_numbers(record: StepRecord) -> dict[str, float]:
    """Return the numbers of a record under the names that they have in every logger."""
    return {metric.logged: float(value) for metric, value in measured(record)}


def in_numbers(log: Log) -> Callable[[dict[str, float], int], None]:
    """Return how to give a logger's function several numbers of a step at once."""
    takes: Mapping[str, inspect.Parameter] = {}
    with suppress(TypeError, ValueError):  # a function written in C has none
        takes = inspect.signature(log).parameters
    if "tag" in takes:  # add_scalar of a SummaryWriter

        def one_by_one(numbers: dict[str, float], step: int) -> None:
            for name, value in numbers.items():
                log(name, value, step)

        return one_by_one
    if "step" in takes or any(p.kind is p.VAR_KEYWORD for p in takes.values()):
        return lambda numbers, step: log(numbers, step=step)
    places = [p for p in takes.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return (lambda numbers, step: log(numbers, step)) if len(places) > 1 else (lambda numbers, step: log(numbers))


class Watch:
    """A run that is watched, from `start` to `close` or within a ``with`` block. `watch` makes it.

    Every rank makes the same calls. What fails in one is counted and warned of, and costs the run nothing. Without a
    `panel` the session finds it. `data_ranks` read data of their own; by default all do.
    """

    def __init__(
        self,
        loop: PlainLoop,
        options: MonitorOptions,
        *,
        panel: GivenPanel | None = None,
        data_ranks: int | None = None,
    ) -> None:
        self.session = RunSession(dataclasses.replace(options))
        """What watches the run; its `probe` measures, its `guard` counts what failed."""
        self.loop = loop
        self._panel, self._data_ranks = panel, data_ranks or loop.ranks.world
        self._losses: list[Tensor] = []
        self._tokens = 0
        self._state: dict[str, Any] = {}
        self._running = self._asked = False
        self._signals = ExitStack()

    # The loop tells

    def begin_batch(self, batch: Batch, index: int | None = None) -> None:
        """Note a batch, or micro-batch, before the step that is made of it: its tokens and samples.

        Args:
            batch: as the loader delivers it. A dict or named tuple may name its samples, as "index" or the like.
            index: its number in the epoch.
        """
        with self.session.guard("batch"):
            self._tokens += token_count(batch)
            self.session.begin_batch(index, sample_indices(batch))

    def accumulate(self, loss: Tensor | float | None = None, *, tokens: int | None = None) -> None:
        """Note a micro-batch that no step follows yet. The record has the mean loss of an update's micro-batches.

        Args:
            loss: of this micro-batch, not divided by their number.
            tokens: of this micro-batch, if `begin_batch` was not told of it.
        """
        with self.session.guard("batch"):
            if loss is not None and self._running:
                self._losses.append(_one_number(loss))
            self._tokens += tokens or 0

    def step(self, loss: Tensor | float | None = None, *, tokens: int | None = None) -> None:
        """Make the record of an update, after ``optimizer.step()``, on every rank.

        Where an optimizer of Accelerate's has only accumulated gradients, this notes the micro-batch.

        Args:
            loss: of the update, or of its last micro-batch.
            tokens: of this rank in the update, if `begin_batch` was not told of them.
        """
        if not self._asked:
            self._asked = True
            warn_user(
                "run.step() came before the run is watched, and nothing is measured: use with watch(...) as run:, or"
                " call run.start() before the loop"
            )
        self.accumulate(loss, tokens=tokens)
        session = self.session
        if not self._running or self.loop.in_between:
            return
        self.loop.updates += 1
        with session.guard("start"):
            session.look_again()
        with session.guard("increment"):
            session.notice_update(scales_loss=self.loop.scales_loss)
        with session.guard("batch"):
            losses, tokens = self._losses, self._tokens
            self._losses, self._tokens = [], 0
            mean = torch.stack([one.to(losses[-1].device) for one in losses]).mean() if losses else None
            session.add_batch(loss=mean, tokens=tokens * self._data_ranks)
        with session.guard("record"):
            session.record()

    def log_validation(self, loss: Tensor | float) -> None:
        """Add a validation loss to the record of the step before it."""
        with self.session.guard("validation loss"):
            self.session.log_validation(float(loss))

    def heartbeat(self) -> None:
        """Say that the run is doing something, such as a long validation, though it makes no step."""
        self.session.heartbeat()

    @property
    def should_stop(self) -> bool:
        """Whether a response to a blow-up asks the loop to end, on all ranks: ``on_blowup="stop"``."""
        return self.loop.should_stop

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint should have: steps, tokens, name of the log, history of the rules; plain types."""
        return self.session.state_dict() or dict(self._state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where a run was saved. To be called before the run is watched."""
        if self._running:
            raise RuntimeError(
                "load_state_dict() came after the start of the run, whose log is open by then: call it before the with"
                " block, or give watch(..., state=...)"
            )
        what = "the state has to be what run.state_dict() returned"
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"{what}, got {_kind(state_dict)}: load the checkpoint, and give its part")
        if state_dict and not isinstance(state_dict.get("step"), int):
            keys = ", ".join(map(repr, list(state_dict)[:6]))
            raise ValueError(f'{what}, with a "step", got a dict with {keys}: give its part of the checkpoint')
        self._state = dict(state_dict)
        self.loop.updates = self._state.get("step", self.loop.updates)

    # From start to end

    def start(self) -> Watch:
        """Find the head and its optimizer, and begin to watch: on all ranks, or on none. A second call does nothing.

        Without a ``with`` block, `close` ends the run, and a SIGTERM does what it does without the monitor. A run that
        nobody closes ends with the process: it failed if an exception ended that, and is finished otherwise, also
        after a ``sys.exit`` of any code, which Python tells nobody of.
        """
        if self._running:
            return self
        self._asked = True
        session = self.session
        if refusal := self.loop.refusal():
            warn_user(refusal)
            return self
        if self._panel is not None and session.options.perturbation_every:
            with session.guard("panel", user_code=True):
                size, ranks = session.options.panel_size, self.loop.ranks
                if not is_sharded(self.loop.model) or meet(ranks, "panel", str(size)):
                    ranks = Ranks.of(ranks.device, 1)  # rank zero measures alone, unless ranks have parts of the model
                session.panels.panel = panel_from(self._panel, size, ranks=ranks, saved=self._state.get("panel"))
            if session.panels.panel is None:
                session.options.perturbation_every = 0
        session.load_state_dict(self._state)
        self._running = True
        atexit.register(self._close_at_exit)
        with session.guard("start"):
            session.start(self.loop)
        return self

    def close(self, error: BaseException | None = None) -> None:
        """Measure the last update, unless an `error` ended the run; let go of the optimizer and close the outputs."""
        self._signals.close()
        if not self._running:
            return
        self._running = False
        atexit.unregister(self._close_at_exit)
        if error is None:
            with self.session.guard("record"):
                self.session.record(final=True)
        self.session.close(error)

    def _close_at_exit(self) -> None:
        """Close what nobody has closed, with the exception that ends the process; Python keeps no SystemExit."""
        error = getattr(sys, "last_value", None)
        self._running = False
        self.session.close(error if isinstance(error, BaseException) else None)

    def __enter__(self) -> Watch:
        self._signals.enter_context(sigterm_raises())
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(error)


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Within the block, a SIGTERM raises SystemExit(143) in the main thread, where it would end the process at once.

    A handler of the user's own stays, and so does the default in other threads and in forked processes.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    owner = os.getpid()

    def end(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is end:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _one_number(loss: Any) -> Tensor:
    """A loss, or the mean of several, without its graph."""
    try:
        return torch.as_tensor(loss).detach().float().mean()
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"a loss is a number or a tensor, got {type(loss).__name__} {loss!r:.60}") from None


@with_options
def watch(
    model: Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    panel: GivenPanel | None = None,
    log: Log | None = None,
    schedulers: Any = (),
    last_step: int | None = None,
    first_step: int = 0,
    state: dict[str, Any] | None = None,
    autocast: AutocastFactory | None = None,
    scaler: Any = None,
    save_checkpoint: Callable[[str], Any] | None = None,
    seed: int | None = None,
    data_ranks: int | None = None,
    process_group: ProcessGroup | None = None,
    **options: Any,
) -> Watch:
    """Watch the LM head of a model in a training loop of one's own: what `HilbertMonitor` does in Lightning.

    Example:
        ::

            with hilbert_monitor.watch(model, optimizer, panel=validation_batches, prometheus=9464) as run:
                for batch in batches:
                    ...
                    optimizer.step()
                    run.step(loss=loss)

    Within the block a SIGTERM raises SystemExit(143), unless it has a handler: the run's log then says that it was
    stopped. What leaves the block is in the log too. ``run.start()`` and ``run.close(error)`` in place of the block
    leave SIGTERM as it is.

    Args:
        model: a language model, also inside DistributedDataParallel, sharded by FSDP2, or prepared by Accelerate.
        optimizer: the one that moves the head, or several of which one does.
        panel: validation text for the Hilbert perturbation: an iterable of batches (tensors, tuples, dicts), a
            DataLoader, token ids, or the folder of a run that has a panel. None measures the diameter alone.
        log: takes the numbers of each step, under the names that they have in Lightning's loggers: ``wandb.log``,
            ``trackio.log``, ``writer.add_scalar`` of TensorBoard's, or any function of a dict and a step.
        schedulers: of the learning rate. Records then say whether one of them set the rate of a step.
        last_step: the number of updates at the end of training: that update is measured like one that is due.
        first_step: updates that were made before, in a run that goes on without a `state`.
        state: what `state_dict()` returned, for a run that goes on.
        autocast: makes the context in which the model runs its forward pass, if it is one:
            ``lambda: torch.autocast("cuda", torch.bfloat16)``, or ``accelerator.autocast``.
        scaler: the GradScaler, if there is one: a step that it leaves out is recorded as skipped.
        save_checkpoint: saves a checkpoint at a path, on every rank, for ``on_blowup="checkpoint"``.
        seed: of the run. Runs that differ by it alone are averaged on the dashboard.
        data_ranks: ranks that read data of their own, if they are not all, for the number of tokens.
        process_group: the ranks that have the head, if they are not all: in a pipeline.
        **options: those of `HilbertMonitor`.
    """
    given = locals()
    chosen = chosen_options("watch()", options)
    _check_arguments(given)
    if "checkpoint" in chosen.actions and save_checkpoint is None:
        raise ValueError('on_blowup="checkpoint" needs save_checkpoint=..., a function that saves one at a path')
    if panel is None:
        chosen.perturbation_every = 0
    of_loop = {name: given[name] for name in inspect.signature(PlainLoop).parameters if name in given}
    loop = PlainLoop(**of_loop, folder=chosen.run_dir or ".")
    run = Watch(loop, chosen, panel=panel, data_ranks=data_ranks)
    if state is not None:
        run.load_state_dict(state)
    return run

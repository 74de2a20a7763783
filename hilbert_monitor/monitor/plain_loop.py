"""A training loop of the user's own, as a session sees it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.nn import Module
from torch.optim import Optimizer

from hilbert_monitor.runs.record import RunInfo, StepRecord, measured

from .hidden_states import AutocastFactory, unwrapped
from .runtime import Ranks, compute_device

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
        kinds = {cls.__name__ for part in self.model.modules() for cls in type(part).__mro__}
        kinds |= {cls.__name__ for optimizer in self.optimizers for cls in type(optimizer).__mro__}
        if any(kind.startswith("DeepSpeed") for kind in kinds):
            return DEEPSPEED
        return FSDP1 if "FullyShardedDataParallel" in kinds else ""

    def describe(self) -> RunInfo:
        """Name the model's class and the seed."""
        return RunInfo(model=type(unwrapped(self.model)).__name__, seed=self.seed)

    def log(self, record: StepRecord, *, final: bool) -> None:
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

"""What the monitor needs of whatever trains the model: a framework's adapter, or a loop of one's own, has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch.nn import Module
from torch.optim import Optimizer

from hilbert_monitor.runs.record import RunInfo, StepRecord

from .hidden_states import AutocastFactory
from .runtime import Ranks


class TrainingLoop(Protocol):
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
    def validates(self) -> bool:
        """Whether there will be a validation."""

    @property
    def label(self) -> str:
        """Name of the head in records and logs, where several heads have monitors; else empty."""

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

    def make_checkpoint(self) -> Any:
        """Collect what a checkpoint holds; called on every rank."""

    def save_checkpoint(self, checkpoint: Any, path: str) -> None:
        """Write a checkpoint. Called on every rank; the path is that of rank zero."""

    def stop(self) -> None:
        """End training after this step."""

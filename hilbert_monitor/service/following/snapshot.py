"""Snapshots: what the service knows of a run at one moment, and its line in a table of runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from hilbert_monitor.runs.log import RunState
from hilbert_monitor.runs.record import Alert, RunInfo
from hilbert_monitor.runs.states import Status

from .columns import Table
from .published import PAPER, model_of_size

ShownStatus = Literal[Status, "unreadable"]
SHOWN_STATUSES: tuple[ShownStatus, ...] = get_args(ShownStatus)
"""The states of a run, as the service shows them."""
UNKNOWN = RunState(status="killed", step=None, time=0.0)
"""The state of a run that cannot be read; its `problem` says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSnapshot:
    """A run as far as its log was read."""

    id: str
    """Name of the run's folder."""
    info: RunInfo
    """What the newest attempt says of the run."""
    attempts: tuple[RunInfo, ...] = ()
    state: RunState = UNKNOWN
    problem: str = ""
    """A sentence, if the log is broken, not one of ours, unreadable or gone; else empty."""
    table: Table = field(default_factory=Table)
    alerts: tuple[Alert, ...] = ()
    """Alerts that count, the oldest first."""
    torn: int = 0
    """Lines that were skipped because they were not whole."""
    heartbeat: float = 0.0
    """When training last made a step or validated, in seconds since the epoch."""
    indexed: float = 1.0
    """Share of the log that was read so far."""
    version: int = 0
    """Grows with every change."""

    @property
    def status(self) -> ShownStatus:
        """The state of the run, or that its log cannot be read."""
        return "unreadable" if self.problem else self.state.status


def model_of(info: RunInfo) -> str:
    """Return the model's name, by which runs are grouped for comparison.

    A model with as many parameters as one of the paper's has the paper's name for it. Otherwise the name is the `size`
    of the run's configuration, or else the model's class and its number of parameters. A `size` that is a name of the
    paper's, on a model with another number of parameters, gets that number added.
    """
    size, parameters = info.config.get("size"), info.config.get("parameters")
    is_counted = isinstance(parameters, int) and not isinstance(parameters, bool)
    if is_counted and (name := model_of_size(parameters)):
        return name
    is_sized = isinstance(size, (str, int)) and not isinstance(size, bool) and str(size).strip()
    label = str(size).strip() if is_sized else info.model or "model"
    return f"{label}, {parameters:,} parameters" if is_counted and (label in PAPER or not is_sized) else label


def summary(run: RunSnapshot) -> dict[str, Any]:
    """The line of a run in a table of runs; None where there is no value."""
    info, table, last = run.info, run.table, run.alerts[-1] if run.alerts else None
    tokens = table.last("tokens")
    return {
        "id": run.id,
        "name": info.name,
        "label": info.name or run.id,
        "optimizer": info.head_optimizer or "unknown",
        "model": model_of(info),
        "seed": info.seed,
        "panel_hash": info.panel_hash,
        "status": run.status,
        "problem": run.problem,
        "error": run.state.error,
        "message": run.state.message,
        "step": run.state.step,
        "tokens": None if tokens is None else int(tokens),
        "time": run.state.time,
        "started": info.started,
        "attempts": len(run.attempts),
        "alerts": len(run.alerts),
        "last_alert": None
        if last is None
        else {"step": last.step, "kind": last.kind, "severity": last.severity, "time": last.time},
        "train_loss": table.last("train_loss"),
        "validation_loss": table.last("validation_loss"),
        "diameter": table.last("diameter"),
        "perturbation_rms": table.last("perturbation_rms"),
        "learning_rate": table.last("learning_rate"),
        "saturation": table.last("saturation"),
        "version": run.version,
        "indexed": run.indexed,
        "torn": run.torn,
    }

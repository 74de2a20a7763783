"""Runs as tables and figures see them: series of numbers, already loaded."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from hilbert_monitor.runs.log import RunReader, RunState
from hilbert_monitor.runs.record import RunInfo

from .paper import PAPER, model_of_size


@dataclass(frozen=True, slots=True)
class Series:
    """One metric of one run, by step. A value may be nan or infinite; tokens are nan where they are not known."""

    steps: Sequence[int] = ()
    tokens: Sequence[float] = ()
    values: Sequence[float] = ()

    @property
    def last(self) -> float | None:
        """The value of the last record that has one."""
        return self.values[-1] if len(self.values) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSeries:
    """One run: what it is compared by, and its curves."""

    id: str
    name: str = ""
    optimizer: str = "unknown"
    """Of the LM head."""
    model: str = "model"
    """Equal for runs of one size, which alone are compared."""
    seed: int | None = None
    panel_hash: str = ""
    started: float = 0.0
    status: str = "finished"
    step: int | None = None
    """The last one."""
    validation_loss: Series = field(default_factory=Series)
    train_loss: Series = field(default_factory=Series)
    diameter: Series = field(default_factory=Series)
    perturbation_rms: Series = field(default_factory=Series)

    @property
    def label(self) -> str:
        """What the user calls it, or its id."""
        return self.name or self.id


CURVES = ("validation_loss", "train_loss", "diameter", "perturbation_rms")
"""Fields of a StepRecord that are Series of a RunSeries."""


def read_run(reader: RunReader, state: RunState | None = None) -> RunSeries:
    """Load a run's curves, by step: 24 bytes a value, so that a run of a million steps has room."""
    info, state = reader.info, state or reader.state()
    curves = {name: (array("q"), array("d"), array("d")) for name in CURVES}
    for record in reader.steps():
        for name, (steps, tokens, values) in curves.items():
            value = getattr(record, name)
            if value is not None:
                steps.append(record.step)
                tokens.append(math.nan if record.tokens is None else record.tokens)
                values.append(value)
    return RunSeries(
        id=info.id,
        name=info.name,
        optimizer=info.head_optimizer or "unknown",
        model=model_of(info),
        seed=info.seed,
        panel_hash=info.panel_hash,
        started=info.started,
        status=state.status,
        step=state.step,
        **{name: _by_step(*curve) for name, curve in curves.items()},
    )


def model_of(info: RunInfo) -> str:
    """The model's size, as its config or else its class says; the paper's name for it where the parameters are that.

    A run that takes the paper's name for another number of parameters does not get it.
    """
    size, parameters = info.config.get("size"), info.config.get("parameters")
    counted = isinstance(parameters, int) and not isinstance(parameters, bool)
    if counted and (name := model_of_size(parameters)):
        return name
    sized = isinstance(size, (str, int)) and not isinstance(size, bool) and str(size).strip()
    label = str(size).strip() if sized else info.model or "model"
    return f"{label}, {parameters:,} parameters" if counted and (label in PAPER or not sized) else label


def _by_step(steps: array[int], tokens: array[float], values: array[float]) -> Series:
    """A curve in the order of its steps: a record that was amended stands late in the log."""
    if any(after < before for before, after in pairwise(steps)):
        order = sorted(range(len(steps)), key=steps.__getitem__)
        steps = array("q", (steps[i] for i in order))
        tokens, values = (array("d", (column[i] for i in order)) for column in (tokens, values))
    return Series(steps, tokens, values)

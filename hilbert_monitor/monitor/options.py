"""What a user chooses of the monitor, whatever trains the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from torch.nn import Module, Parameter

from hilbert_monitor.runs.alerts import Rules

from .decay import Decay
from .exporter import Prometheus
from .hidden import HiddenStates
from .panel_source import PanelChoice
from .responses import Action, resolved


@dataclass(kw_only=True)
class MonitorOptions:
    """What a user chooses, whatever trains the model. `HilbertMonitor` documents each option."""

    head: str | Module | Parameter | None = None
    panel_size: int = 8192
    diameter_every: int = 10
    perturbation_every: int = 500
    bracket: bool | None = None
    panel: PanelChoice = "loader"
    hidden: HiddenStates | None = None
    decay: Decay | None = None
    vocab_size: int | None = None
    logit_scale: float | None = None
    decode: Callable[[int], str] | None = None
    run_dir: str | None = "runs"
    run_name: str | None = None
    config: dict[str, Any] | None = None
    efficiency: bool = False
    rules: Rules | None = None
    on_blowup: Action | list[Any] = "warn"
    sinks: Iterable[Any] = ()
    prometheus: Prometheus | None = None
    strict: bool = False

    def __post_init__(self) -> None:
        for name in ("diameter_every", "perturbation_every"):
            _check_count(name, getattr(self, name), "a number of updates, 0 for never", least=0)
        _check_count("panel_size", self.panel_size, "a number of validation positions", least=1)
        if self.vocab_size is not None:
            _check_count("vocab_size", self.vocab_size, "a number of rows of the head, or None for all", least=1)
        resolved(self.on_blowup)


def _check_count(name: str, value: Any, what: str, *, least: int) -> None:
    """Refuse what is no whole number, or too small."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} is {what}: a whole number of at least {least}, got {value!r}")

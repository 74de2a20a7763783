"""What a user chooses of the monitor, whatever trains the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from torch.nn import Module, Parameter

from hilbert_monitor.runs.alerts import Rules
from hilbert_monitor.runs.states import STALLED_AFTER

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
    stalled_after: float | None = None
    strict: bool = False

    def __post_init__(self) -> None:
        for name in ("diameter_every", "perturbation_every"):
            _check_count(name, getattr(self, name), "a number of updates, 0 for never", least=0)
        _check_count("panel_size", self.panel_size, "a number of validation positions", least=1)
        if self.vocab_size is not None:
            _check_count("vocab_size", self.vocab_size, "a number of rows of the head, or None for all", least=1)
        resolved(self.on_blowup)
        if self.stalled_after is not None and not self.stalled_after >= 0:
            raise ValueError(f"stalled_after is a number of seconds, zero or more, got {self.stalled_after!r}")
        if None not in (self.stalled_after, exported := self._exported_patience) and exported != self.stalled_after:
            raise ValueError(
                f"stalled_after={self.stalled_after!r} and Prometheus(stalled_after={exported!r}) mean the same: give"
                " one of the two"
            )

    @property
    def patience(self) -> float | None:
        """Seconds without a step after which the run counts as stalled; None for the usual ones."""
        return self._exported_patience if self.stalled_after is None else self.stalled_after

    @property
    def _exported_patience(self) -> float | None:
        settings = self.prometheus
        return None if settings is None or settings.stalled_after == STALLED_AFTER else settings.stalled_after


def _check_count(name: str, value: Any, what: str, *, least: int) -> None:
    """Refuse what is no whole number, or too small."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} is {what}: a whole number of at least {least}, got {value!r}")

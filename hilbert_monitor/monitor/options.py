"""What a user chooses of the monitor, whatever trains the model."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from importlib import import_module
from numbers import Integral, Real
from typing import Any, TypeVar

from torch.nn import Module, Parameter

from hilbert_monitor.runs.alerts import Rules
from hilbert_monitor.runs.reader import STALLED_AFTER
from hilbert_monitor.runs.record import Alert

from .hidden_states import HiddenStates
from .optimizers import Decay
from .panel import NAMED, PanelChoice, check_panel_folder
from .prometheus import Prometheus

Action = str | Callable[[Alert], Any]
ON_ALL_RANKS = ("checkpoint", "stop")
"""Actions on a blow-up that all ranks take together."""
F = TypeVar("F", bound=Callable[..., Any])
KINDS: dict[str, tuple[Any, str]] = {
    "hidden": (Callable, "a function of the model and a batch"),
    "decode": (Callable, "a function of a token id, such as tokenizer.decode"),
    "config": (Mapping, "a dict, such as vars(args)"),
    "rules": (Rules, "Rules(false_alarms_per_10k=...)"),
    "prometheus": (Prometheus, "Prometheus(port=...)"),
    "logit_scale": (Real, "a number"),
    "stalled_after": (Real, "a number of seconds"),
    "run_dir": (str | os.PathLike, "the path of a folder"),
    "run_name": (str, "a text"),
}
"""What an option that may be None is otherwise, as a type and in words."""


@dataclass(kw_only=True)
class MonitorOptions:
    """What a user chooses, whatever trains the model. `HilbertMonitor` documents each option."""

    head: str | Module | Parameter | None = None
    panel_size: int = 8192
    diameter_every: int = 10
    perturbation_every: int = 500
    bounds: bool | None = None
    panel: PanelChoice = "loader"
    hidden: HiddenStates | None = None
    decay: Decay | None = None
    vocab_size: int | None = None
    logit_scale: float | None = None
    decode: Callable[[int], str] | None = None
    run_dir: str | None = "runs"
    run_name: str | None = None
    config: dict[str, Any] | None = None
    secrets: Sequence[str] = ()
    private: bool = False
    efficiency: bool = False
    layers: bool = False
    rules: Rules | None = None
    on_blowup: Action | list[Any] = "warn"
    sinks: Iterable[Any] = ()
    prometheus: Prometheus | None = None
    stalled_after: float | None = None
    immediate: bool = False
    strict: bool = False
    named: bool = False
    """Whether records say which head they are of. Not an argument: set where several heads are watched."""

    def __post_init__(self) -> None:
        if isinstance(self.head, list | tuple):
            raise ValueError(
                f"one head is watched at a time, got {self.head!r}: HilbertMonitor(head=[...]) takes several, elsewhere"
                " watch each of them by itself"
            )
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
        for name in ("diameter_every", "perturbation_every"):
            _check_count(name, getattr(self, name), "a number of updates, 0 for never", least=0)
        _check_count("panel_size", self.panel_size, "a number of validation positions", least=1)
        if self.vocab_size is not None:
            _check_count("vocab_size", self.vocab_size, "a number of rows of the head, or None for all", least=1)
        if isinstance(self.panel, str) and self.panel not in NAMED:
            check_panel_folder(self.panel)
        if isinstance(self.secrets, str):
            raise TypeError(f"secrets is a list of names in the config, got {self.secrets!r}: write [{self.secrets!r}]")
        self.sinks = _checked_sinks(self.sinks)
        _ = self.actions  # refuses anything else
        if self.stalled_after is not None and not self.stalled_after >= 0:
            raise ValueError(f"stalled_after is a number of seconds, zero or more, got {self.stalled_after!r}")
        if None not in (self.stalled_after, exported := self._exported_patience) and exported != self.stalled_after:
            raise ValueError(
                f"stalled_after={self.stalled_after!r} and Prometheus(stalled_after={exported!r}) mean the same: give"
                " one of the two"
            )

    @property
    def actions(self) -> list[Action]:
        """The actions on a blow-up, with functions in place of their names."""
        given = self.on_blowup if isinstance(self.on_blowup, list | tuple) else [self.on_blowup]
        return [_action(action) for action in given]

    @property
    def acts(self) -> bool:
        """Whether an action on a blow-up may change the run, so that it has to come before the next step."""
        return any(callable(action) or action in ON_ALL_RANKS for action in self.actions)

    @property
    def patience(self) -> float | None:
        """Seconds without a step after which the run counts as stalled; None for the usual ones."""
        return self._exported_patience if self.stalled_after is None else self.stalled_after

    @property
    def _exported_patience(self) -> float | None:
        settings = self.prometheus
        return None if settings is None or settings.stalled_after == STALLED_AFTER else settings.stalled_after


def chosen_options(caller: str, given: dict[str, Any]) -> MonitorOptions:
    """Return the options that a user gave by name, with `prometheus_port` short for `prometheus`.

    Args:
        caller: what was called, for errors.
        given: names and values.

    Raises:
        TypeError: for a name that is no option, as Python itself would.
    """
    given = dict(given)
    names = {field.name for field in fields(MonitorOptions)} - {"named"}
    for name in given:
        if name not in {*names, "prometheus_port"}:
            close = get_close_matches(name, names, 1)
            hint = f": did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"{caller} got an unexpected keyword argument {name!r}{hint}")
    settings = prometheus_settings(given.pop("prometheus_port", None), given.pop("prometheus", None))
    return MonitorOptions(prometheus=settings, **given)


def prometheus_settings(port: int | None, settings: Prometheus | None) -> Prometheus | None:
    """Return the settings, given whole or by the port alone."""
    if port is not None and settings is not None:
        raise ValueError("prometheus_port is short for prometheus=Prometheus(port=...): give one of the two")
    return Prometheus(port=port) if port is not None else settings


def with_options(function: F, *, without: Collection[str] = ()) -> F:
    """Show the options in the signature of a function that takes them as ``**options``: for `help`, and for editors.

    Args:
        function: the function, or a class.
        without: options that it does not take.
    """
    signature = inspect.signature(function)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    names = {p.name for p in own} | {*without, "named"}
    port = inspect.Parameter("prometheus_port", inspect.Parameter.KEYWORD_ONLY, default=None)
    options = [p for p in (*inspect.signature(MonitorOptions).parameters.values(), port) if p.name not in names]
    function.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
    return function


def _action(action: Any) -> Any:
    """Return an action on a blow-up, or the function of that name."""
    if callable(action) or action in ("warn", *ON_ALL_RANKS):
        return action
    if isinstance(action, str) and action.startswith(("http://", "https://")):
        return action
    place, _, name = action.rpartition(".") if isinstance(action, str) else ("", "", "")
    why = ""
    if place:
        try:
            function = getattr(import_module(place), name, None)
        except Exception as error:  # the import runs code of the user
            function, why = None, f" ({type(error).__name__}: {error})"
        if callable(function):
            return function
    raise ValueError(
        'on_blowup takes "warn", "checkpoint", "stop", an http address, or a function of the alert or its full'
        f" name, got {action!r}{why}"
    )


def _checked_sinks(sinks: Any) -> tuple[Any, ...]:
    """The sinks, each of which can be written to."""
    what = "sinks is a list of objects with write(record), got"
    if not isinstance(sinks, Iterable):
        raise TypeError(f"{what} {type(sinks).__name__}: write sinks=[...]")
    several = tuple(sinks)
    for sink in several:
        if not callable(getattr(sink, "write", None)):
            raise TypeError(f"{what} one with a {type(sink).__name__}, which has no write")
        if isinstance(sink, type):
            raise TypeError(f"{what} the class {sink.__name__}: make one, sinks=[{sink.__name__}(...)]")
    return several


def _check_kind(name: str, value: Any, kind: Any, what: str) -> None:
    """Refuse what is of another kind."""
    if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
        raise TypeError(f"{name} is {what}, or None, got {type(value).__name__} {value!r}")


def _check_count(name: str, value: Any, what: str, *, least: int) -> None:
    """Refuse what is no whole number, or too small."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} is {what}: a whole number of at least {least}, got {value!r}")

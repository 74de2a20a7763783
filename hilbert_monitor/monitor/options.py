"""What a user chooses of the monitor, whatever trains the model."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from importlib import import_module
from numbers import Integral, Real
from typing import Any, TypeVar

from torch.nn import Module, Parameter

from hilbert_monitor.runs.alerts import Rules
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
    "prometheus": (Prometheus, "a port or Prometheus(port=...)"),
    "logit_scale": (Real, "a number"),
    "run_dir": (str | os.PathLike, "the path of a folder"),
    "run_name": (str, "a text"),
}
"""What an option that may be None is otherwise, as a type and in words."""


def _check_kind(name: str, value: Any, kind: Any, what: str) -> None:
    """Refuse what is of another kind."""
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
        for name in ("diameter_every", "perturbation_every"):
            _check_count(name, getattr(self, name), "a number of updates, 0 for never", least=0)
        _check_count("panel_size", self.panel_size, "a number of validation positions", least=1)
        if self.vocab_size is not None:
            _check_count("vocab_size", self.vocab_size, "a number of rows of the head, or None for all", least=1)
        if isinstance(self.panel, str) and self.panel not in NAMED:
            check_panel_folder(self.panel)
        self.sinks = _checked_sinks(self.sinks)
        _ = self.actions  # refuses anything else

    @property
    def actions(self) -> list[Action]:
        """The actions on a blow-up, with functions in place of their names."""
        given = self.on_blowup if isinstance(self.on_blowup, list | tuple) else [self.on_blowup]
        return [_action(action) for action in given]

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
    """Return the options that a user gave by name.

    Args:
        caller: what was called, for errors.
        given: names and values.

    Raises:
        TypeError: for a name that is no option, as Python itself would.
    """
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


def _check_count(name: str, value: Any, what: str, *, least: int) -> None:
    """Refuse what is no whole number, or too small."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} is {what}: a whole number of at least {least}, got {value!r}")

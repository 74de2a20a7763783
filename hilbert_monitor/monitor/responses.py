"""Responses to a blow-up: by rank zero, or by all ranks together."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any, Protocol

from hilbert_monitor.runs.record import Alert

from .runtime import Guard, Ranks, warn_user
from .sinks import QueuedSink, Webhook
from .token_texts import SinkWithTexts, TokenTexts

Action = str | Callable[[Alert], Any]
TOGETHER = {"checkpoint", "stop"}
"""Actions that take all ranks."""
CHECKPOINTS = 3
"""How many blow-ups of a run get a checkpoint."""
SOON = 0.1
"""Age of an alert, in seconds, at which a function gets it without the texts of its tokens: training waits for them."""
SLOW = 1.0
"""Seconds of a training step that a function may take without a warning."""


class Controls(Protocol):
    """What a response can make a training loop do, on all ranks together."""

    def make_checkpoint(self) -> Any:
        """Collect what a checkpoint holds; called on every rank."""

    def save_checkpoint(self, checkpoint: Any, path: str) -> None:
        """Write a checkpoint; called on every rank, whose path is that of rank zero: it writes, or all do."""

    def stop(self) -> None:
        """End training after this step."""


class Responses:
    """The actions that a user chose.

    Args:
        actions: one or several of "warn", "checkpoint", "stop", an http address, a function of the alert or its name.
        guard: for what fails in one.
        run: what the run is called, once it is known.
        texts: adds the texts of tokens to the alerts.
    """

    def __init__(
        self,
        actions: Action | list[Any],
        guard: Guard,
        run: Callable[[], str] = lambda: "",
        texts: TokenTexts | None = None,
    ) -> None:
        choices = resolved(actions)
        self.guard, self.run, self.texts = guard, run, texts or TokenTexts(None, guard)
        self.webhooks: list[QueuedSink[Alert]] = []
        self._together = {action for action in choices if isinstance(action, str)} & TOGETHER
        self._alone = [self._response(action) for action in choices if action not in TOGETHER]
        self._warns = "warn" in choices
        self._saved, self._slow, self._stopped = 0, False, False

    def tell(self, alerts: Sequence[Alert]) -> None:
        """Do what rank zero does by itself."""
        for alert in alerts:
            for respond in self._alone:
                with self.guard("response to a blow-up", user_code=True):
                    respond(alert)

    def act(self, controls: Controls, alerts: Sequence[Alert], ranks: Ranks, folder: str, step: int) -> None:
        """Do what takes all ranks, on all of them.

        Args:
            controls: of the training loop.
            alerts: what rank zero knows of.
            ranks: that train together.
            folder: for a checkpoint.
            step: for its name.
        """
        if not self._together or not ranks.from_rank_zero(bool(alerts)):
            return
        if "checkpoint" in self._together and self._saved < CHECKPOINTS:
            self._saved += 1
            self._save(controls, ranks, os.path.join(folder, f"blow-up-step-{step}.ckpt"))
        if "stop" in self._together:
            controls.stop()
            if ranks.rank == 0 and not self._stopped:
                self._tell_of_stop(alerts[0])

    def _tell_of_stop(self, alert: Alert) -> None:
        """Say once why training ends, with all that is known of the step unless a warning has just said it."""
        self._stopped = True
        why = "" if self._warns else f": {self.texts.complete(alert, patience=SOON).message}"
        warn_user(f'step {alert.step}: training is to end here, as on_blowup="stop" asks{why}', stacklevel=7)

    def _save(self, controls: Controls, ranks: Ranks, path: str) -> None:
        """Save a checkpoint, if every rank could make its part: one that fails must not leave the others waiting."""
        checkpoint = None
        with self.guard("checkpoint of a blow-up"):
            checkpoint = controls.make_checkpoint()
        if ranks.all_agree(checkpoint is not None):
            with self.guard("checkpoint of a blow-up"):
                controls.save_checkpoint(checkpoint, path)

    def _response(self, action: Action) -> Callable[[Alert], Any]:
        if callable(action):
            return partial(self._call, action)
        if action == "warn":
            return partial(self._call, lambda alert: warn_user(f"step {alert.step}: {alert.message}", stacklevel=7))
        webhook = SinkWithTexts(Webhook(action, run=self.run), self.texts)
        hook = QueuedSink[Alert](webhook, name="the webhook", room=64)
        self.webhooks.append(hook)
        return hook.write

    def _call(self, function: Callable[[Alert], Any], alert: Alert) -> None:
        """Call a function in the training step, for it may act on the trainer; warn of the first that takes long."""
        alert = self.texts.complete(alert, patience=SOON)
        start = time.perf_counter()
        try:
            function(alert)
        finally:
            seconds = time.perf_counter() - start
            if seconds > SLOW and not self._slow:
                self._slow = True
                name = getattr(function, "__qualname__", type(function).__name__)
                warn_user(
                    f"{name}, a response to a blow-up, took {seconds:.1f} s, and training waited for it", stacklevel=7
                )


def resolved(actions: Action | list[Any]) -> list[Action]:
    """Return the actions in a list, with functions in place of their names.

    Raises:
        ValueError: if one of them is none; the message says what may be given.
    """
    return [_resolved(action) for action in (actions if isinstance(actions, list | tuple) else [actions])]


def acts(actions: Action | list[Any]) -> bool:
    """Whether one of the actions may change the run, so that it has to come before the next step: all but telling."""
    return any(callable(action) or action in TOGETHER for action in resolved(actions))


def _resolved(action: Any) -> Any:
    if callable(action) or action in ("warn", *TOGETHER):
        return action
    if isinstance(action, str) and action.startswith(("http://", "https://")):
        return action
    place, _, name = action.rpartition(".") if isinstance(action, str) else ("", "", "")
    why = ""
    if place:
        try:
            function = getattr(import_module(place), name, None)
        except Exception as error:  # whatever the import of a user's module raises
            function, why = None, f" ({type(error).__name__}: {error})"
        if callable(function):
            return function
    raise ValueError(
        'on_blowup takes "warn", "checkpoint", "stop", an http address, or a function of the alert or its full'
        f" name, got {action!r}{why}"
    )

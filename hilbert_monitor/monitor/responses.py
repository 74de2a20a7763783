"""Responses to a blow-up: by rank zero, or by all ranks together."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Protocol

from hilbert_monitor.runs.record import Alert

from .guard import Guard, tell
from .ranks import Ranks
from .sinks import QueuedSink, Webhook

Action = str | Callable[[Alert], Any]
TOGETHER = {"checkpoint", "stop"}
"""Actions that take all ranks."""
CHECKPOINTS = 3
"""How many blow-ups of a run get a checkpoint."""


class Controls(Protocol):
    """What a response can make a training loop do, on all ranks together."""

    def make_checkpoint(self) -> Any:
        """Collect what a checkpoint holds; called on every rank."""

    def save_checkpoint(self, checkpoint: Any, path: str) -> None:
        """Write a checkpoint; called on every rank, of which rank zero writes."""

    def stop(self) -> None:
        """End training after this step."""


class Responses:
    """The actions that a user chose.

    Args:
        actions: one or several of "warn", "checkpoint", "stop", an http address, a function of the alert or its name.
        guard: for what fails in one.
        run: what the run is called, once it is known.
    """

    def __init__(self, actions: Action | list[Any], guard: Guard, run: Callable[[], str] = lambda: "") -> None:
        choices: list[Action] = list(actions) if isinstance(actions, list | tuple) else [actions]
        self.guard, self.run = guard, run
        self.webhooks: list[QueuedSink[Alert]] = []
        self._together = {action for action in choices if isinstance(action, str)} & TOGETHER
        self._alone = [self._response(action) for action in choices if action not in TOGETHER]
        self._saved = 0

    def tell(self, alerts: Sequence[Alert]) -> None:
        """Do what rank zero does by itself."""
        for alert in alerts:
            for respond in self._alone:
                with self.guard("response to a blow-up"):
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

    def _save(self, controls: Controls, ranks: Ranks, path: str) -> None:
        """Save a checkpoint, if every rank could make its part: one that fails must not leave the others waiting."""
        checkpoint = None
        with self.guard("checkpoint of a blow-up"):
            checkpoint = controls.make_checkpoint()
        if ranks.unanimous(checkpoint is not None):
            with self.guard("checkpoint of a blow-up"):
                controls.save_checkpoint(checkpoint, path)

    def _response(self, action: Action) -> Callable[[Alert], Any]:
        if callable(action):
            return action
        if action == "warn":
            return lambda alert: tell(f"step {alert.step}: {alert.message}", stacklevel=6)
        if action.startswith(("http://", "https://")):
            hook = QueuedSink(Webhook(action, run=self.run), name="the webhook", room=64)
            self.webhooks.append(hook)
            return hook.write
        place, _, name = action.rpartition(".")
        if not place or not callable(function := getattr(import_module(place), name, None)):
            raise ValueError(
                'on_blowup takes "warn", "checkpoint", "stop", an http address, or a function of the alert or its full'
                f" name, got {action!r}"
            )
        respond: Callable[[Alert], Any] = function
        return respond

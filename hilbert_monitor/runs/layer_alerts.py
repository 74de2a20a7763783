"""The rule for layers: each against its own history, all of them under one dial, and the first that moved by name."""

from __future__ import annotations

import math
from typing import Any

from .alerts import Rules
from .blow_ups import CALM
from .noise import MOST, Event, Noise
from .record import Alert, LayerRecord

SHARE = 0.2
"""Of the false alarms that are allowed, the share of all layers together."""


class LayerJudge:
    """Applies the rule to the layers of one run, in the order of their steps.

    A value is the logarithm of a layer's relative step over its learning rate. A blow-up begins with the first layer
    that is far above its history, and lasts until no layer has been for some measurements.

    Args:
        rules: the dial.
    """

    def __init__(self, rules: Rules | None = None) -> None:
        self.rules = rules or Rules()
        self._noises: dict[str, Noise] = {}
        self._last: int | None = None
        self._gap = 10
        self._calm = CALM

    def judge(self, record: LayerRecord) -> list[Alert]:
        """Return the alert of a record, if there is one, and add it to the history."""
        if self._last is not None and record.step > self._last:
            self._gap = record.step - self._last
        self._last = record.step
        chance = min(self.rules.false_alarms_per_10k / 1e4 * SHARE * self._gap / max(1, len(record.layers)), MOST)
        events: dict[str, tuple[Event, float]] = {}
        for name, layer in record.layers.items():
            value = layer.relative / layer.lr if layer.lr else layer.relative
            if not 0 < value < math.inf:
                continue
            noise = self._noises.setdefault(name, Noise(quiet=20, floor=math.log(1.4)))
            event = noise.event(math.log(value), chance)
            if event is not None:
                events[name] = event, value / math.exp(event.usual)
            noise.add(math.log(value), pattern="" if event is None else event.pattern)
        begins = bool(events) and self._calm >= CALM
        self._calm = 0 if events else self._calm + 1
        return [self._alert(record, events)] if begins else []

    def _alert(self, record: LayerRecord, events: dict[str, tuple[Event, float]]) -> Alert:
        """Name the layer that is least likely by chance."""
        name = min(events, key=lambda name: (events[name][0].chance, -events[name][1]))
        event, factor = events[name]
        layer, others = record.layers[name], len(events) - 1
        rarity = min(self._gap / max(event.chance, 1e-12), 1e12)
        more = f", and {others or 'no'} other layer{'s' * (others > 1)} with it"
        return Alert(
            step=record.step,
            time=record.time,
            kind="layer",
            value=layer.relative,
            expected=layer.relative / factor,
            pattern=event.pattern,
            rarity=rarity,
            message=f"{name} moved first: its step is {layer.relative:.3g} of its weight, {factor:.3g} times the usual"
            f" at its learning rate{more}: look at the gradient of this layer, and at what feeds it",
        )

    def state(self) -> dict[str, Any]:
        """Return the history in plain types, for a checkpoint."""
        noises = {name: noise.state() for name, noise in self._noises.items()}
        return {"noises": noises, "last": self._last, "gap": self._gap, "calm": self._calm}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over the history that `state` returned."""
        for name, saved in state["noises"].items():
            noise = self._noises[name] = Noise(quiet=20, floor=math.log(1.4))
            noise.restore(saved)
        self._last, self._gap, self._calm = state["last"], int(state["gap"]), int(state["calm"])

"""The layers of a run while it trains: measured, judged, written, and put into the records of their steps."""

from __future__ import annotations

from typing import Any

from hilbert_monitor.runs.alerts import LayerJudge, Rules
from hilbert_monitor.runs.record import Alert, StepRecord

from .layers import LayerWatch, with_layers
from .outputs import RunOutputs


class LayerRecords:
    """What becomes of the layers that a watch measures, on rank zero.

    Args:
        layers: measures them.
        rules: with the dial that they share.
        step: the first that is to be made.
        history: what `state` of an earlier attempt returned; None if there is none.
    """

    def __init__(self, layers: LayerWatch, rules: Rules | None, step: int, history: dict[str, Any] | None) -> None:
        self._layers, self._judge = layers, LayerJudge(rules)
        if history is not None:
            self._judge.restore(history)
        layers.begin(step)

    def take(
        self, record: StepRecord | None, step: int, outputs: RunOutputs | None
    ) -> tuple[StepRecord | None, list[Alert]]:
        """Write the layers of a step, if they were measured; return its record with them, and their alerts."""
        layers, alerts = self._layers, list[Alert]()
        with layers.guard("layers"):
            measured = layers.end(step) if layers.hooked else None
            if measured is not None and record is not None:
                alerts = self._judge.judge(measured)
                if outputs is not None:
                    outputs.write_log(measured)
                record = with_layers(record, measured, layers.spent())
        return record, alerts

    def go_on(self, step: int) -> None:
        """Note that a step is about to be made."""
        self._layers.begin(step)

    def state(self) -> dict[str, Any]:
        """Return the history of the layers, for a checkpoint."""
        return self._judge.state()

    def close(self) -> None:
        """Let go of the optimizers."""
        self._layers.end(0)

"""A step that is bounded on the device, and read by the host later: an accelerator's queue never runs dry for it.

On ordinary steps of a head on an accelerator the host asks the device for nothing. Bounds of D(S), the learning rate
where that is a tensor, the loss, and what else a record holds stay where they are, and travel to the host in one copy
behind an event. They are read before the next step moves anything, when they have long been there. If the rules then
find the bounds suspicious, the exact diameter is searched for: state and weights are still those of the step.

Of ranks that all have the head, rank zero does this alone, and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from hilbert_monitor.geometry import DiameterBracket, deferred_bracket, row_diameter_bracket

from .device_numbers import DeviceNumbers, Later
from .head import WatchedHead
from .head_rows import Matrix
from .head_step import HeadStep
from .measurement import DiameterBounds, Measurement, StoredStep
from .samples import SampleIndices

ReadRate = Callable[[], tuple[float | None, bool | None]]
"""Returns a learning rate, and whether a scheduler set it, once they have been read."""


@dataclass
class DeferredStep:
    """What is on its way to the host."""

    step: Measurement
    numbers: DeviceNumbers = field(default_factory=DeviceNumbers)
    S: Tensor | None = None
    """The increment, where it is lost before the numbers are read."""
    samples: list[SampleIndices] = field(default_factory=list)
    moment: tuple[float, float] = (0.0, 0.0)
    """Seconds since the epoch at its end, and since the record before it."""
    seconds: dict[str, float] = field(default_factory=dict)
    """What it has cost so far, by part."""
    _fill: list[Callable[[], None]] = field(default_factory=list)

    def take_loss(self, loss: float | Tensor | None) -> None:
        """Take the loss of the step."""
        if not isinstance(loss, Tensor):
            self.step.train_loss = loss
        elif hasattr(loss, "device_mesh"):
            self.step.train_loss = float(loss)
        else:
            read = self.numbers.add(loss)
            self._fill.append(lambda: setattr(self.step, "train_loss", read()[0]))

    def take_rate(self, read: ReadRate, head_step: HeadStep) -> None:
        """Take the learning rate of the step, and whether it was skipped on the device."""
        overflow = None if head_step.overflow is None else self.numbers.add(head_step.overflow)

        def fill() -> None:
            self.step.learning_rate, self.step.scheduled = read()
            if overflow is not None and any(overflow()):
                self.step.skipped = "overflow"

        self._fill.append(fill)

    def take_bounds(self, head: WatchedHead) -> None:
        """Form the increment, bound its diameter, and leave both on the device."""
        S, rounding = head.believed_increment()
        assert isinstance(S, Tensor)
        self.S = S if head.source.fleeting else None
        bounds = self._bracket(S)
        count = self._number(head.count)
        allowed = self._number(rounding)
        stored = self._stored(head)

        def fill() -> None:
            step = self.step
            if step.skipped:
                return
            step.increment_from = head.source.basis
            step.rounding = allowed() or None
            step.bounds = bounds(lambda: head.believed_increment().S if self.S is None else self.S)
            step.ceiling = head.ceiling(count=count(), lr=step.learning_rate)
            step.stored = stored()

        self._fill.append(fill)

    def _stored(self, head: WatchedHead) -> Callable[[], StoredStep | None]:
        """Bound the step that rounded weights really made."""
        if not head.has_stored:
            return lambda: None
        S = head.stored_increment()
        assert isinstance(S, Tensor)
        bounds, (moved, number) = self._bracket(S), head.source.moved()
        read = self.numbers.add(moved)
        return lambda: StoredStep.of(bounds(head.stored_increment), moved_share=read()[0] / number)

    def _bracket(self, S: Tensor) -> Callable[[Callable[[], Matrix]], DiameterBounds]:
        pending = deferred_bracket(S)
        read = self.numbers.add(pending.numbers)

        def bounds(again: Callable[[], Matrix]) -> DiameterBounds:
            bracket: DiameterBracket | None = pending.resolve(read())
            return DiameterBounds.of_bracket(row_diameter_bracket(again()) if bracket is None else bracket)

        return bounds

    def _number(self, x: float | Tensor) -> Callable[[], float]:
        if not isinstance(x, Tensor):
            return lambda: float(x)
        read: Later = self.numbers.add(x)
        return lambda: read()[0]

    def fill(self) -> None:
        """Complete the step with what has arrived; the host waits if it has not."""
        for fill in self._fill:
            fill()
        self._fill = []

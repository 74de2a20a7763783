"""The steps that the host has not read yet: the one that is being made, and the one before it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial

from torch import Tensor

from .deferred_step import DeferredStep
from .head import WatchedHead
from .head_step import HeadStep
from .measurement import Measurement
from .panel import Panel
from .records import Records
from .samples import SampleIndices
from .schedule import Schedule
from .side_stream import SideStream
from .step_meter import StepMeter


class Deferral:
    """Leaves ordinary steps on the device, and makes their records once the host has read them.

    A step is begun in its hook, sent to the host when the training loop asks for its record, and settled before the
    next one moves anything. Rank zero does all of it alone.

    Args:
        meter: measures, times, and keeps what fails from the run.
        records: makes the records, and has them judged.
        side_stream: whether what is measured runs on a stream of its own, beside the next forward pass. It then holds
            the memory of an increment during that pass.
    """

    def __init__(self, meter: StepMeter, records: Records, *, side_stream: bool = False) -> None:
        self._meter, self._records, self._has_side = meter, records, side_stream
        self._side: SideStream | None = None
        self._current: DeferredStep | None = None
        self._sent: DeferredStep | None = None

    def begin(
        self, head: WatchedHead, measurement: Measurement, step: HeadStep, schedule: Schedule, *, bounds: bool
    ) -> None:
        """Leave on the device what the host needs of a step.

        Args:
            head: that the step has moved.
            measurement: to be completed.
            step: as its hooks saw it.
            schedule: of the learning rate.
            bounds: whether its diameter is bounded.
        """
        self._current = deferred = DeferredStep(measurement)
        with self._meter.timed("learning_rate"):
            read = schedule.read_later(step.group_lr, schedule.rates(), deferred.numbers.add)
            deferred.take_rate(read, step)
        if bounds:
            with self._meter.timed("bracket"), self._queued(head):
                deferred.take_bounds(head)

    def send(self, loss: float | Tensor | None, samples: list[SampleIndices]) -> bool:
        """Send the step that was begun to the host; return whether there is one that nobody has read.

        Args:
            loss: of the step.
            samples: indices of the samples it was made of.
        """
        deferred, self._current = self._current, None
        if deferred is None:
            return False
        with self._meter.timed("bracket"):
            deferred.take_loss(loss)
            with self._side.queued() if self._side is not None else nullcontext():
                deferred.numbers.send()
        deferred.samples, deferred.moment = samples, self._records.moment()
        self._take_seconds(deferred)
        self._sent = deferred
        return True

    def settle(self, head: WatchedHead, panel: Panel | None) -> None:
        """Read all steps, and make the records of those that have been sent.

        Args:
            head: whose weights are still those that the last step left.
            panel: to be measured if the step is a blow-up.
        """
        if self._side is not None:
            self._side.join()
        sent, self._sent = self._sent, None
        if sent is not None:
            self._complete(sent, head, panel)
            self._take_seconds(sent)
            self._records.keep(self._records.make(sent.step, sent.seconds, sent.samples, sent.moment))
        current, self._current = self._current, None
        if current is not None:  # it has no record yet, and is made as if it had never been deferred
            current.numbers.send()
            self._complete(current, head, panel)

    def _queued(self, head: WatchedHead) -> AbstractContextManager[None]:
        """Where an increment is formed and bounded: not beside what clears or overwrites the gradient it is made of."""
        if not self._has_side or head.source.fleeting:
            return nullcontext()
        if self._side is None:
            self._side = SideStream(head.weight.device)
        return self._side.queued()

    def _complete(self, deferred: DeferredStep, head: WatchedHead, panel: Panel | None) -> None:
        step, meter, verdict = deferred.step, self._meter, self._records.verdict
        with meter.timed("bracket"):
            deferred.fill()
        with meter.timed("diameter"):
            suspicious = meter.is_suspicious(step, partial(verdict.suspects, step))
            if suspicious and (deferred.S is not None or head.source.formable):
                meter.search_alone(head, step, deferred.S)
        if panel is not None and meter.ranks.world == 1 and verdict.is_blow_up(step):
            meter.measure_panel(head, step, panel)
        meter.forget()

    def _take_seconds(self, deferred: DeferredStep) -> None:
        """Count what was measured since to a step."""
        for part, seconds in self._meter.seconds.items():
            deferred.seconds[part] = deferred.seconds.get(part, 0.0) + seconds
        self._meter.seconds.clear()

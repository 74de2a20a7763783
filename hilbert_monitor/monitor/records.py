"""Makes the records of measured steps, has them judged, and keeps those that nobody has asked for yet."""

from __future__ import annotations

import time

import msgspec

from hilbert_monitor.runs.record import Alert, StepRecord

from .measurement import Measurement
from .runtime import Guard
from .samples import SampleIndices, first_samples
from .verdict import Judged, Verdict


class Records:
    """The records of one run, in the order of its steps. Only rank zero's are judged.

    Args:
        verdict: asks the rules.
        guard: counts what fails.
        judges: whether this rank has the rules.
    """

    def __init__(self, verdict: Verdict, guard: Guard, *, judges: bool) -> None:
        self.verdict, self.guard, self._judges = verdict, guard, judges
        self.alerts: list[Alert] = []
        """What the rules said of the last record."""
        self.step: Measurement | None = None
        """Of which the last record was made."""
        self._last: StepRecord | None = None
        self._earlier: list[Judged] = []
        self._since = time.perf_counter()
        self.batch: int | None = None
        """Number in its epoch of the batch that the next step is made of."""
        self._samples: list[SampleIndices] = []  # of the batches since the last record

    def begin_batch(self, index: int | None, samples: SampleIndices | None) -> None:
        """Note a batch, or micro-batch, that the next step is made of, and indices of its samples."""
        self.batch = index
        if samples is not None:
            self._samples.append(samples)

    def end_batches(self) -> list[SampleIndices]:
        """Return the indices of the samples that were noted, and begin anew."""
        samples, self.batch, self._samples = self._samples, None, []
        return samples

    def moment(self) -> tuple[float, float]:
        """Seconds since the epoch, and since this was last asked, now that a step has ended."""
        now = time.perf_counter()
        elapsed, self._since = now - self._since, now
        return time.time(), elapsed

    def make(
        self,
        step: Measurement,
        seconds: dict[str, float],
        samples: list[SampleIndices] | None = None,
        moment: tuple[float, float] | None = None,
    ) -> StepRecord:
        """Make the record of a step, and have it judged.

        Args:
            step: as far as it was measured.
            seconds: what that has cost, by part.
            samples: indices of the samples it was made of; by default those noted last. They are read if there is an
                alert.
            moment: when the step ended; by default now.
        """
        indices = self._samples if samples is None else samples
        ended, elapsed = moment or self.moment()
        share = sum(seconds.values()) / elapsed if elapsed > 0 else None
        record, self.alerts = step.record(time=ended, seconds=dict(seconds), share=share), []
        if self._judges:
            with self.guard("rules"):
                record, self.alerts = self.verdict.of(record, lambda: self._read(indices))
                step.samples = record.samples
        self._last, self.step = record, step
        return record

    def keep(self, record: StepRecord) -> None:
        """Keep the record that was made last until somebody asks for it."""
        self._earlier.append((record, self.alerts))

    def earlier(self) -> list[Judged]:
        """Return the records that were kept, with their alerts."""
        earlier, self._earlier = self._earlier, []
        return earlier

    def amend(self, *, validation_loss: float) -> StepRecord | None:
        """Return the last record with what has become known of its step since, or None if there is no record yet."""
        if self._last is None or self.step is None:
            return None
        self.step.validation_loss = validation_loss
        self._last = msgspec.structs.replace(self._last, validation_loss=validation_loss)
        return self._last

    def _read(self, samples: list[SampleIndices]) -> tuple[int, ...] | None:
        indices: tuple[int, ...] | None = None
        if samples:
            with self.guard("samples"):
                indices = first_samples(samples)
        return indices

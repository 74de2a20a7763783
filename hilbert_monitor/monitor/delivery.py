"""Where the records of a run go: to its log, exporter and sinks, to the trainer's loggers, and to the responses."""

from __future__ import annotations

from typing import Any

import msgspec

from hilbert_monitor.runs.record import Alert, StepRecord

from .options import MonitorOptions
from .outputs import Outputs
from .panel_source import PanelSource
from .probe import Probe
from .responses import Responses
from .run_description import describe_run
from .runtime import Guard
from .token_texts import TokenTexts
from .training_loop import TrainingLoop
from .verdict import Judged


class Delivery:
    """Hands on the records of one run, and responds to its blow-ups. There is one on every rank.

    Args:
        loop: that trains it.
        options: of the user.
        guard: for what fails.
        panels: has the panel, once there is one.
        resumed: the state that the run goes on from, or nothing.
    """

    def __init__(
        self, loop: TrainingLoop, options: MonitorOptions, guard: Guard, panels: PanelSource, resumed: dict[str, Any]
    ) -> None:
        self.loop, self.options, self.guard = loop, options, guard
        self.outputs: Outputs | None = None
        """Where the run is written, on rank zero."""
        self._panels, self._resumed = panels, resumed
        self._texts = TokenTexts(options.decode, guard)
        self._responses = Responses(
            options.on_blowup, guard, lambda: self.outputs.id if self.outputs else "", self._texts
        )
        self._described = (0, False)  # number of remarks, and whether there is a panel, that the log knows of

    def open(self, probe: Probe) -> None:
        """Begin to write the run, in threads of their own: where a file system hangs, training does not."""
        self.outputs = Outputs(
            self.guard,
            sinks=self.options.sinks,
            run_dir=self.options.run_dir if self.loop.keeps_log else None,
            private=self.options.private,
            prometheus=self.options.prometheus,
            texts=self._texts,
        )
        self._described = self._known(probe)
        info = describe_run(self.loop, probe, self.options, self._panels.panel, self._resumed)
        self.outputs.open(info, first_step=probe.step)

    def pass_on(self, probe: Probe, latest: list[Judged], *, final: bool) -> None:
        """Hand on the records that are ready, and respond to their alerts. Called on every rank.

        Args:
            probe: that has records of earlier steps.
            latest: the record after them, with its alerts, if it is ready.
            final: there is no next step.
        """
        judged = [*probe.earlier(), *latest]
        if self.loop.ranks.rank == 0:
            for record, alerts in judged:
                self._hand_on(probe, record, alerts, final=final)
        self._respond(probe, [alert for _, alerts in judged for alert in alerts], final=final)

    def amend(self, probe: Probe, record: StepRecord) -> None:
        """Write a record again, of which more has become known."""
        if self.outputs is not None:
            self.outputs.write(self._named(probe, record))

    def close(self, error: BaseException | None, *, stopped: str) -> None:
        """Close the outputs; say what ended the run.

        Args:
            error: what ended it, if it did not end by itself.
            stopped: the signal that asked it to end, where it is known.
        """
        (self.outputs or Outputs(self.guard)).close(error, self._responses.webhooks, stopped=stopped)
        self._texts.close()

    @property
    def error(self) -> BaseException | None:
        """What the user's `decode` raised in its own thread, where it could stop nothing, if failures are raised."""
        return self._texts.error if self.guard.strict else None

    def _known(self, probe: Probe) -> tuple[int, bool]:
        return len(probe.remarks), self._panels.panel is not None

    def _named(self, probe: Probe, record: StepRecord) -> StepRecord:
        """The record with the name of its head, where several are watched."""
        return msgspec.structs.replace(record, head=probe.head.name) if self.options.named else record

    def _hand_on(self, probe: Probe, record: StepRecord, alerts: list[Alert], *, final: bool) -> None:
        """Give a record and its alerts to the log, the sinks and the loggers."""
        record, known = self._named(probe, record), self._known(probe)
        if self.outputs is not None:
            with self.guard("run log"):
                if known != self._described:
                    self._described = known
                    self.outputs.describe(
                        describe_run(self.loop, probe, self.options, self._panels.panel, self._resumed)
                    )
            with self.guard("outputs"):
                self.outputs.write(record, alerts)
        with self.guard("loggers"):
            self.loop.log(record, final=final)

    def _respond(self, probe: Probe, alerts: list[Alert], *, final: bool) -> None:
        """Respond to pages; what takes all ranks, only while there is a next step. Notices are logged, and no more."""
        alerts = [alert for alert in alerts if alert.severity == "page"]
        self._responses.tell(alerts)
        if not final:
            folder = (self.outputs.folder if self.outputs is not None else None) or self.loop.folder
            self._responses.act(self.loop, alerts, probe.ranks, str(folder), probe.step)

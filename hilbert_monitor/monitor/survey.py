"""When the parts of a step are measured: in its hook, at its record, or at the end of the run."""

from __future__ import annotations

from functools import partial

from .agenda import Agenda
from .head import WatchedHead
from .measurement import Measurement
from .panel import Panel
from .step_meter import StepMeter
from .verdict import Verdict


class Survey:
    """Has what is due of a step measured, when its time has come. Its methods are called on every rank.

    Args:
        agenda: says what is due.
        meter: measures it.
        verdict: asks the rules.
    """

    def __init__(self, agenda: Agenda, meter: StepMeter, verdict: Verdict) -> None:
        self._agenda, self._meter, self._verdict = agenda, meter, verdict
        self._ranks, self._guard = meter.ranks, meter.guard

    def in_hook(self, head: WatchedHead, step: Measurement) -> None:
        """Measure a step that was just made, unless it is whole only at its record."""
        if self._agenda.waits:
            return
        self._measure(head, step)
        fleeting = self._agenda.panel_is_due(step.step) and head.source.fleeting
        if fleeting and not self._meter.holds_increment:
            self._meter.take_increment(head, step)

    def at_record(self, head: WatchedHead, step: Measurement) -> None:
        """Drop what was measured in the hook, if something moved the weights after it; measure what is whole now."""
        self._check_weights(head, step)
        if self._agenda.waits:
            self._measure(head, step)

    def rest(self, head: WatchedHead, step: Measurement, panel: Panel | None, *, final: bool) -> bool:
        """Measure what waits for the record, or for the end of the run; return whether anything was due."""
        agenda = self._agenda
        if not final and not agenda.perturbation_every:
            return False
        formable, blew_up = self._ask(head, step, final=final)
        if not formable:
            return False
        due = False
        if final and agenda.diameter_every and not self._everybody_has(head, step.exact):
            due = True
            self._measure_diameter(head, step, exact=True)
        if not agenda.perturbation_every:
            return due
        panel_due = blew_up or final or agenda.panel_is_due(step.step)
        if panel_due and not (final and self._everybody_has(head, step.panel)):
            due = True
            self._meter.measure_panel(head, step, panel)
        return due

    def _everybody_has(self, head: WatchedHead, part: object) -> bool:
        """Whether every rank that measures has a part of the step. Called on all ranks."""
        return self._ranks.all_agree(part is not None or not head.measures)

    def _measure(self, head: WatchedHead, step: Measurement) -> None:
        """Measure a new step."""
        self._measure_diameter(head, step, exact=self._agenda.diameter_is_due(step.step))
        if self._agenda.panel_is_due(step.step):
            self._meter.measure_quality(head, step)

    def _measure_diameter(self, head: WatchedHead, step: Measurement, *, exact: bool) -> None:
        """Measure D(S) or its bounds."""
        if exact or self._agenda.bracket:
            suspects = partial(self._verdict.suspects, step)
            self._meter.measure_diameter(head, step, exact=exact, suspects=suspects)

    def _check_weights(self, head: WatchedHead, step: Measurement) -> None:
        stands, waited = False, self._agenda.waits
        with self._guard("increment"):
            stands = step.bounds is None or head.stands()
        if head.source.checks:
            mine, stands = stands, False
            with self._guard("increment"):
                stands = bool(head.agree(float(mine))[0])
                self._agenda.decide(head)
        if not stands:
            step.forget_increment()
            self._meter.forget()
        self._agenda.waits &= waited or not stands  # what was measured in the hook is not measured again

    def _ask(self, head: WatchedHead, step: Measurement, *, final: bool) -> tuple[bool, bool]:
        """Whether all that measure can form the increment, and whether it is a blow-up, as rank zero's rules say."""
        source = head.source
        formable, blew_up = not head.measures, self._ranks.rank != 0
        with self._guard("increment"):
            if head.measures:
                formable = not step.skipped and (source.formable if final else source.last is not None)
        with self._meter.timed("rules"):
            blew_up = blew_up or self._verdict.is_blow_up(step)
        everybody, rank_zero = self._ranks.all_min([float(formable), float(blew_up)])
        return bool(everybody), bool(rank_zero)

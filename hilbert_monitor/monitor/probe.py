"""The framework-free core: watches the LM head of a model in any training loop, and makes records of its steps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from hilbert_monitor.runs.alerts import Judge
from hilbert_monitor.runs.record import Alert, StepRecord

from .decay import Decay
from .deferral import Deferral
from .device_numbers import reads_later
from .guard import Guard
from .head import WatchedHead
from .head_place import find_head_place
from .head_rows import Matrix
from .head_step import HeadStep
from .hidden import AutocastFactory, HiddenStates, reshard
from .increment import IncrementSource
from .measurement import Measurement
from .owners import owning_optimizer, stepping_optimizer
from .panel import Panel
from .precision import seen_dtype
from .ranks import Ranks, compute_device
from .records import Records
from .remarks import Remarks
from .samples import SampleIndices
from .schedule import Schedule, Schedulers
from .silence import Silence, why_head_rests
from .step_meter import StepMeter
from .verdict import Judged, Verdict

CHECKED = 5
"""How many of the first steps are compared with what the weights did; later ones where D(S) or the panel is due."""


class Probe:
    """Measures the steps of an optimizer on a model's LM head.

    From ``attach`` to ``detach`` every step of the optimizer is seen by a hook; ``record`` returns the record of the
    last one. Observation changes nothing: weights, state, gradients, random numbers and training flags stay as they
    were.

    With several ranks there is a probe on each, and all of them measure together: each its part of the rows of a head
    that all have, or its shard of a DTensor. On an accelerator rank zero measures a head that all have alone.
    Rank zero has the records with their alerts.

    Args:
        model: a language model; a head that is tied to an embedding is measured too, with a remark.
        optimizer: the one that moves the head, a ChainedOptimizer, or several of which one does.
        head: the LM head, its name or that of its weight, or None to look for it.
        panel: validation positions for the Hilbert perturbation, the same on every rank; without it only the diameter
            is measured.
        diameter_every: steps between exact diameters; 0 for none.
        perturbation_every: steps between perturbations of the panel; 0 for none.
        bracket: bounds of the diameter on every step; by default where the increment is formed from state.
        hidden: how to get hidden states from a model that never calls its head: (model, batch) -> states. The passes of
            a sharded model wait for all ranks: there it has to run the model on each of them, and fail on all or none.
        autocast: makes the context in which the model runs its forward pass.
        decay: how an unknown optimizer uses weight_decay.
        vocab_size: rows of the head that are tokens, if it is padded.
        logit_scale: factor between the head's output and the logits; by default that of the model's config, or 1.
        efficiency: also bracket, where the panel is due, how much descent the step makes of its diameter.
        attention: also find the largest attention logit of the panel, see `attention`.
        schedulers: of the learning rate, one or several, or a function that returns them. Records then say whether the
            rate of a step was set by one.
        judge: blow-up rules. If the bounds of a step are higher than usual, its exact diameter is computed. If it is a
            blow-up, the panel is measured too. Give it on every rank.
        immediate: wait for the device in every step that is measured, so that `record` has its record. Otherwise an
            accelerator is not waited for in ordinary steps: `record` returns None, and `earlier` has the record after
            the next step has begun, or `settle` was called.
        side_stream: run what is not waited for on a stream of its own, beside the next forward pass.
        world: ranks that train together, if they are not those of torch.distributed: 1 for a process by itself.
        process_group: these ranks, if they are not all: in a pipeline, those of the stage that has the head.
        guard: counts what fails; by default one of its own.
        strict: raise failures instead of counting them. Ignored if `guard` is given.
    """

    def __init__(
        self,
        model: Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        head: str | Module | Parameter | None = None,
        panel: Panel | None = None,
        diameter_every: int = 10,
        perturbation_every: int = 500,
        bracket: bool | None = None,
        hidden: HiddenStates | None = None,
        autocast: AutocastFactory | None = None,
        decay: Decay | None = None,
        vocab_size: int | None = None,
        logit_scale: float | None = None,
        schedulers: Schedulers = None,
        judge: Judge | None = None,
        immediate: bool = True,
        side_stream: bool = False,
        efficiency: bool = False,
        attention: bool = False,
        world: int | None = None,
        process_group: ProcessGroup | None = None,
        guard: Guard | None = None,
        strict: bool = False,
    ) -> None:
        self.model, self.panel = model, panel
        reshard(model)  # after a validation its root may be gathered, in other parameters than the optimizer's
        self.ranks = Ranks.of(compute_device(find_head_place(model, head).weight), world, process_group)
        self._watched_head = partial(
            WatchedHead,
            model,
            head=head,
            decay=decay,
            vocab_size=vocab_size,
            logit_scale=logit_scale,
            ranks=self.ranks,
        )
        self.head = self._watched_head(optimizer)
        self.diameter_every, self.perturbation_every = diameter_every, perturbation_every
        self._bracket = bracket
        self._verdict = Verdict(judge)
        self.guard = guard or Guard(strict=strict)
        self.step = 0
        self.last = math.inf
        """Number of the last step, where it is known before: it is measured like one that is due."""
        self.immediate = immediate
        self._records = Records(self._verdict, self.guard, judges=self.ranks.rank == 0)
        self._remarks = Remarks()
        for text in self.head.remarks():
            self._remarks.inexact(text)
        self._meter = StepMeter(
            model,
            ranks=self.ranks,
            guard=self.guard,
            remark=self._remarks.inexact,
            efficiency=efficiency,
            attention=attention,
            hidden=hidden,
            autocast=autocast,
        )
        with self.guard("precision", user_code=True):
            if self.head.effective is None:  # nobody casts a weight that is computed
                self.source.seen_dtype = seen_dtype(model, self.head.weight, autocast)
        self._schedule = Schedule(schedulers, self.head.weight)
        self._end: Callable[[], None] | None = None
        self._current: Measurement | None = None  # of the step that has no record yet
        self._defers = False  # whether it is one that the host reads later, on all ranks
        self._deferral = Deferral(self._meter, self._records, side_stream=side_stream)
        self._batch: int | None = None
        self._samples: list[SampleIndices] = []  # of the batches since the last record
        self._rates = self._schedule.rates()  # at the end of the last update
        self._checked = 0  # steps that were compared with what the weights did
        self._silence = Silence(self.ranks.rank)
        self._decide()

    def _decide(self) -> None:
        """Note what follows from how increments are formed, where all ranks agree on it: one may find out more soon."""
        self.bracket: bool = self.source.basis == "state" if self._bracket is None else self._bracket
        """Whether bounds of the diameter are measured on every step."""
        self._waits = self.head.waits_for_record

    @property
    def judge(self) -> Judge | None:
        """The blow-up rules."""
        return self._verdict.judge

    @judge.setter
    def judge(self, judge: Judge | None) -> None:
        self._verdict.judge = judge

    @property
    def alerts(self) -> list[Alert]:
        """What the judge said of the last record."""
        return self._records.alerts

    @property
    def remarks(self) -> list[str]:
        """What a reader of the numbers should know, such as why the bound H D(S) on the perturbation is not tight."""
        return self._remarks.texts

    @property
    def source(self) -> IncrementSource:
        """Where increments of the head's weight come from."""
        return self.head.source

    # Hooks

    def attach(self) -> Probe:
        """Begin to watch."""
        self.detach()
        self._end = self.head.watch(
            self._on_step,
            measure=self._will_measure,
            check=self._will_check,
            guard=self.guard,
            doubt=self._note_doubt,
            before_step=self.settle,
            after_closure=lambda: self._may_defer and self.source.from_state,
        )
        self._finish_update()
        return self

    def detach(self) -> None:
        """End it; the optimizer is left without a trace."""
        self.settle()
        if self._end is not None:
            self._end()
        self._end = None
        self._meter.forget()
        self._rates = []
        self._schedule.forget()

    def __enter__(self) -> Probe:
        return self.attach()

    def __exit__(self, *_: object) -> None:
        self.finish()

    def finish(self) -> None:
        """End it for good: if nothing was measured, say why."""
        self.detach()
        self._silence.tell()

    @property
    def stepped(self) -> bool:
        """Whether there was a step since the last record."""
        return self._current is not None

    def begin_batch(self, index: int | None, samples: SampleIndices | None = None) -> None:
        """Note a batch, or micro-batch, that the next step is made of.

        Args:
            index: its number in the epoch.
            samples: indices of its samples. They are read only if the step has an alert: a GPU is not waited for.
        """
        self._batch = index
        if samples is not None:
            self._samples.append(samples)

    def skip(self, why: str) -> None:
        """Count a step that the training loop left out, such as one that a GradScaler skipped."""
        self._meter.forget()
        self._current = step = self._next_measurement(why)
        rates = [*self._rates, *self._schedule.rates()]
        step.learning_rate, step.scheduled = self._schedule.read(self.source.group.get("lr"), rates)

    def notice_update(self, optimizers: Sequence[Optimizer] = (), *, weight: float = 1.0) -> None:
        """Look for the step of an update that no hook saw: compiled, or made by an optimizer that is new.

        To be called on every rank, where the training loop counts an update and there was no step.

        Args:
            optimizers: those of the run, as they are now.
            weight: how much of an update it is, where the loop cannot tell.
        """
        self.settle()
        moved = False
        with self.guard("increment"):
            if self._follow(optimizers):
                self._current = self._next_measurement()
                return
            moved = self.head.moved_unseen()
        if self.ranks.unanimous(not moved):
            self._silence.add(partial(why_head_rests, self.head, ""), weight)
            return
        with self.guard("increment"):
            self._on_step(self.head.unseen(), seen=False)

    def _follow(self, optimizers: Sequence[Optimizer]) -> bool:
        """Watch another optimizer, if the head has moved to one."""
        owner = owning_optimizer(optimizers, self.head.weight)
        if owner is None or stepping_optimizer(owner, self.head.weight) is self.source.optimizer:
            return False
        self._note_doubt("the head has another optimizer, which is watched in place of the first")
        watching = self._end is not None
        self.detach()
        self.head = self._watched_head(optimizers)
        if watching:
            self.attach()
        return True

    def _finish_update(self) -> None:
        with self.guard("increment"):
            self._decide()
            self.head.finish_update(measure=self._will_measure())
        with self.guard("learning_rate"):
            self._rates = self._schedule.rates()

    def _next_measurement(self, skipped: str = "") -> Measurement:
        """Count a step, and begin to measure it."""
        self.step += 1
        self.source.steps.outcome = None  # of the step before
        return Measurement(step=self.step, skipped=skipped, batch=self._batch)

    def _will_measure(self) -> bool:
        due = self._due(self.step + 1, self.diameter_every) or self._due(self.step + 1, self.perturbation_every)
        return due or self.bracket

    def _will_check(self) -> bool:
        """Whether the next step is compared with what the weights do: an accelerator is waited for."""
        every = (self.diameter_every, self.perturbation_every)
        due = any(self._due(self.step + 1, steps) for steps in every)
        checks = self._will_measure() and (due or self._checked < CHECKED)
        self._checked += checks
        formed = not self.bracket or self.head.is_believed
        self.head.reads_later = self._may_defer and not (due or checks or self._waits) and formed
        return checks

    @property
    def _may_defer(self) -> bool:
        """Whether the host need not wait for the device in ordinary steps."""
        return not self.immediate and reads_later(self.ranks.device)

    def _due(self, step: int, every: int) -> bool:
        return every > 0 and (step % every == 0 or step == self.last)

    def _on_step(self, step: HeadStep, *, seen: bool = True) -> None:
        if self._current is not None:  # nobody asked for its record: several steps to a batch
            self._records.keep(self._finish(self._current))
        self._meter.forget()
        self._defers = seen and self.source.reads_later
        self._current = self._next_measurement(step.skipped)
        if self._defers and not step.skipped:
            self._silence.end()
            if self.ranks.rank == 0:
                self._deferral.begin(self.head, self._current, step, self._schedule, bounds=self.bracket)
            return
        with self._meter.timed("learning_rate"):
            self._note_rate(self._current, step, seen=seen)
        if step.skipped:
            self._silence.add(partial(why_head_rests, self.head, step.skipped))
        else:
            self._silence.end()
        if self._waits:
            return
        self._measure_step(self._current)
        panel_due = self._due(self.step, self.perturbation_every)
        if panel_due and self.source.fleeting and not self._meter.holds_increment:
            self._meter.take_increment(self.head, self._current)

    def settle(self) -> None:
        """Read what a device still has of earlier steps; their records are then in `earlier`.

        Called before a step moves anything. If the rules suspect the one before it, that is searched for its diameter.
        """
        self._deferral.settle(self.head, self.panel if self.perturbation_every else None)

    def _note_rate(self, measurement: Measurement, step: HeadStep, *, seen: bool) -> None:
        """Note the learning rate of a step, and whether a scheduler set it. One may have set the next rate since."""
        rates = [*([] if seen else self._rates), *self._schedule.rates()]
        in_group, measurement.scheduled = self._schedule.read(step.group_lr, rates)
        measurement.learning_rate = in_group if step.options.get("lr") is step.group_lr else step.lr

    # Measuring

    def _measure_step(self, step: Measurement) -> None:
        """Measure a new step: in its hook, or at its record where it is whole only then."""
        self._measure_diameter(step, exact=self._due(self.step, self.diameter_every))
        if self._due(self.step, self.perturbation_every):
            self._meter.measure_quality(self.head, step)

    def _measure_diameter(self, step: Measurement, *, exact: bool) -> None:
        """Measure D(S) or its bounds."""
        if exact or self.bracket:
            suspects = partial(self._verdict.suspects, step)
            self._meter.measure_diameter(self.head, step, exact=exact, suspects=suspects)

    def increment(self) -> Matrix | None:
        """S of the last step as it acts on the logits: scaled, padding dropped, extended by the bias. (V, d).

        With several ranks it is the rows of this one. None if the weights did something else than the optimizer's state
        says.
        """
        increment = self.head.increment()
        return None if increment is None else increment.S

    def _ask(self, step: Measurement, *, final: bool) -> tuple[bool, bool]:
        """Whether every rank can form the increment, and whether it is a blow-up, as the one with the rules says."""
        formable, blew_up = False, self.ranks.rank != 0
        with self.guard("increment"):
            formable = not step.skipped and (self.source.formable if final else self.source.last is not None)
        with self._meter.timed("rules"):
            blew_up = blew_up or self._verdict.is_blow_up(step)
        everybody, rank_zero = self.ranks.least([float(formable), float(blew_up)])
        return bool(everybody), bool(rank_zero)

    def note(self, text: str) -> None:
        """Add a sentence to the remarks of the run."""
        self._remarks.note(text)

    def _note_doubt(self, text: str) -> None:
        self._remarks.doubt(text, step=self.step + 1)

    # Records

    def record(
        self,
        *,
        final: bool = False,
        train_loss: float | Tensor | None = None,
        validation_loss: float | None = None,
        tokens: int | None = None,
    ) -> StepRecord | None:
        """Return the record of the last step, or None if there was none since the last call or it is read later.

        Called on every rank after every step: the perturbation is measured here, under the new weights.

        Args:
            final: the run has ended with that step: measure what has not been, also of a step already recorded.
            train_loss: loss of the step.
            validation_loss: if it was computed since the last record.
            tokens: training tokens so far.
        """
        step = self._current
        if step is not None and self._defers and not final:
            step.validation_loss, step.tokens = validation_loss, tokens
            return self._send(step, train_loss)
        self.settle()
        fresh = step is not None
        if step is None and final and self._records.step is not None:
            step = dataclasses.replace(self._records.step)
        if step is None:
            return None
        if fresh:
            self._check_weights(step)
            if self._waits:
                self._measure_step(step)
        fresh |= self._measure_rest(step, final=final)
        if not final:
            self._finish_update()
        if not fresh:
            return None
        step.train_loss = step.train_loss if train_loss is None else float(train_loss)
        step.validation_loss = step.validation_loss if validation_loss is None else validation_loss
        step.tokens = step.tokens if tokens is None else tokens
        record = self._finish(step)
        self._batch, self._samples = None, []
        return record

    def _send(self, step: Measurement, train_loss: float | Tensor | None) -> StepRecord | None:
        """Send what a step has on the device to the host. Where there is nothing, return its record."""
        with self.guard("increment"):
            self.head.stands()  # notes, on the device, whether something else has moved the weights
        self._finish_update()
        samples, self._batch, self._samples = self._samples, None, []
        step.outcome = self.source.steps.outcome
        if self._deferral.send(train_loss, samples):
            self._current = None
            return None
        step.train_loss = float(train_loss) if self.ranks.rank == 0 and train_loss is not None else None
        return self._finish(step, samples)

    def _check_weights(self, step: Measurement) -> None:
        """Drop what was measured in the hook of a step, if something moved the weights after it."""
        stands, waited = False, self._waits
        with self.guard("increment"):
            stands = step.bounds is None or self.head.stands()
        if self.source.checks:
            mine, stands = stands, False
            with self.guard("increment"):
                stands = bool(self.head.agree(float(mine))[0])
                self._decide()
        if not stands:
            step.forget_increment()
            self._meter.forget()
        self._waits &= waited or not stands  # what was measured in the hook is not measured again

    def _measure_rest(self, step: Measurement, *, final: bool) -> bool:
        """Measure what waits for the record, or for the end of the run; return whether anything was due."""
        if not final and not self.perturbation_every:
            return False
        formable, blew_up = self._ask(step, final=final)
        if not formable:
            return False
        due = False
        if final and self.diameter_every and not self.ranks.unanimous(step.exact is not None):
            due = True
            self._measure_diameter(step, exact=True)
        if not self.perturbation_every:
            return due
        panel_due = blew_up or final or self._due(self.step, self.perturbation_every)
        if panel_due and not (final and self.ranks.unanimous(step.panel is not None)):
            due = True
            self._meter.measure_panel(self.head, step, self.panel)
        return due

    def earlier(self) -> list[Judged]:
        """Return records, with their alerts, of steps that others followed before `record` returned theirs."""
        return self._records.earlier()

    def amend(self, *, validation_loss: float) -> StepRecord | None:
        """Return the last record with what has become known of its step since, or None if there is no record yet."""
        self.settle()
        return self._records.amend(validation_loss=validation_loss)

    def _finish(self, step: Measurement, samples: list[SampleIndices] | None = None) -> StepRecord:
        """Make the record of a step, and have it judged."""
        step.outcome = step.outcome or self.source.steps.outcome
        record = self._records.make(step, self._meter.seconds, self._samples if samples is None else samples)
        self._current = None
        self._meter.forget()
        self._meter.seconds.clear()
        return record

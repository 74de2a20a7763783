"""The framework-free core: watches the LM head of a model in any training loop, and makes records of its steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from hilbert_monitor.runs.alerts import Judge
from hilbert_monitor.runs.record import Alert, StepRecord

from .agenda import Agenda
from .decay import Decay
from .deferral import Deferral
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
from .records import Records
from .remarks import Remarks
from .runtime import Guard, Ranks, compute_device
from .samples import SampleIndices
from .schedule import Schedule, Schedulers
from .silence import Silence, why_head_rests
from .step_meter import StepMeter
from .survey import Survey
from .verdict import Judged, Verdict


class Probe:
    """Measures the steps of an optimizer on a model's LM head.

    From ``attach`` to ``detach`` every step of the optimizer is seen by a hook; ``record`` returns the record of the
    last one. Observation changes nothing: weights, state, gradients, random numbers and training flags stay as they
    were.

    With several ranks there is a probe on each. They measure a DTensor together, each its shard; a head that all have
    is measured by rank zero alone. Rank zero has the records with their alerts.

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
            WatchedHead, model, head=head, decay=decay, vocab_size=vocab_size, logit_scale=logit_scale, ranks=self.ranks
        )
        self.head = self._watched_head(optimizer)
        self.agenda = Agenda(
            diameter_every, perturbation_every, bracket=bracket, immediate=immediate, device=self.ranks.device
        )
        """What is due at which step."""
        self._verdict = Verdict(judge)
        self.guard = guard or Guard(strict=strict)
        self.step = 0
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
        self._survey = Survey(self.agenda, self._meter, self._verdict)
        self._schedule = Schedule(schedulers, self.head.weight)
        self._end: Callable[[], None] | None = None
        self._current: Measurement | None = None  # of the step that has no record yet
        self._defers = False  # whether it is one that the host reads later, on all ranks
        self._deferral = Deferral(self._meter, self._records, side_stream=side_stream)
        self._schedule.end_update()
        self._silence = Silence(self.ranks.rank)
        self.agenda.decide(self.head)

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
            measure=self._measures_next,
            check=lambda: self.agenda.begin(self.step + 1, self.head),
            guard=self.guard,
            doubt=self._note_doubt,
            before_step=self.settle,
            after_closure=lambda: self.agenda.may_defer and self.source.from_state,
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
        self._records.begin_batch(index, samples)

    def skip(self, why: str) -> None:
        """Count a step that the training loop left out, such as one that a GradScaler skipped."""
        self._meter.forget()
        self._current = step = self._next_measurement(why)
        rates = self._schedule.rates(since_update=True)
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
        if self.ranks.all_agree(not moved):
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
            self.agenda.decide(self.head)
            self.head.finish_update(measure=self._measures_next())
        with self.guard("learning_rate"):
            self._schedule.end_update()

    def _measures_next(self) -> bool:
        """Whether this rank measures the increment of the next step."""
        return self.head.measures and self.agenda.measures(self.step + 1)

    def _next_measurement(self, skipped: str = "") -> Measurement:
        """Count a step, and begin to measure it."""
        self.step += 1
        self.source.steps.outcome = None  # of the step before
        return Measurement(step=self.step, skipped=skipped, batch=self._records.batch)

    def _on_step(self, step: HeadStep, *, seen: bool = True) -> None:
        if self._current is not None:  # nobody asked for its record: several steps to a batch
            self._records.keep(self._finish(self._current))
        self._meter.forget()
        self._defers = seen and self.source.reads_later
        self._current = self._next_measurement(step.skipped)
        if self._defers and not step.skipped:
            self._silence.end()
            if self.ranks.rank == 0:
                self._deferral.begin(self.head, self._current, step, self._schedule, bounds=self.agenda.bracket)
            return
        with self._meter.timed("learning_rate"):
            rates = self._schedule.rates(since_update=not seen)
            in_group, self._current.scheduled = self._schedule.read(step.group_lr, rates)
            self._current.learning_rate = in_group if step.options.get("lr") is step.group_lr else step.lr
        if step.skipped:
            self._silence.add(partial(why_head_rests, self.head, step.skipped))
        else:
            self._silence.end()
        self._survey.in_hook(self.head, self._current)

    def settle(self) -> None:
        """Read what a device still has of earlier steps; their records are then in `earlier`.

        Called before a step moves anything. If the rules suspect the one before it, that is searched for its diameter.
        """
        self._deferral.settle(self.head, self.panel if self.agenda.perturbation_every else None)

    def increment(self) -> Matrix | None:
        """S of the last step as it acts on the logits: scaled, padding dropped, extended by the bias. (V, d).

        Of a sharded head it is the rows of this rank. None if the weights did something else than the optimizer's state
        says.
        """
        increment = self.head.increment()
        return None if increment is None else increment.S

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
            self._survey.at_record(self.head, step)
        fresh |= self._survey.rest(self.head, step, self.panel, final=final)
        if not final:
            self._finish_update()
        if not fresh:
            return None
        step.train_loss = step.train_loss if train_loss is None else float(train_loss)
        step.validation_loss = step.validation_loss if validation_loss is None else validation_loss
        step.tokens = step.tokens if tokens is None else tokens
        record = self._finish(step)
        self._records.end_batches()
        return record

    def _send(self, step: Measurement, train_loss: float | Tensor | None) -> StepRecord | None:
        """Send what a step has on the device to the host. Where there is nothing, return its record."""
        with self.guard("increment"):
            self.head.stands()  # notes, on the device, whether something else has moved the weights
        self._finish_update()
        samples = self._records.end_batches()
        step.outcome = self.source.steps.outcome
        if self._deferral.send(train_loss, samples):
            self._current = None
            return None
        step.train_loss = float(train_loss) if self.ranks.rank == 0 and train_loss is not None else None
        return self._finish(step, samples)

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
        record = self._records.make(step, self._meter.seconds, samples)
        self._current = None
        self._meter.forget()
        self._meter.seconds.clear()
        return record

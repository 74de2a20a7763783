"""The framework-free core: watches the LM head of a model in any training loop, and makes records of its steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakSet

import msgspec
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from hilbert_monitor.geometry import RowShards, deferred_bracket, row_diameter_bracket
from hilbert_monitor.geometry.bracket import DeferredBracket
from hilbert_monitor.runs.alerts import Judge, with_samples
from hilbert_monitor.runs.process_bound import ProcessBound
from hilbert_monitor.runs.record import Alert, StepRecord

from .deferred import DeferredStep, reads_later
from .head import Head
from .hidden_states import AutocastFactory, HiddenStates, reshard
from .increment import Basis, IncrementSource, StepPlan, held
from .measure import Fields, Measurer, bounds_of, limit_fields, stored_fields
from .optimizers import (
    Decay,
    LearningRate,
    OptimizerStep,
    Schedulers,
    inner_optimizers,
    on_steps,
    owner_of,
    stepping_optimizer,
    unknown_decay,
)
from .panel import Panel, SampleIndices
from .runtime import Guard, Ranks, compute_device, warn_user

Judged = tuple[StepRecord, list[Alert]]
"""A record, and the alerts that the rules raised about it."""

CHECKED = 5
"""How many of the first steps are compared with what the weights did; later ones where D(S) or the panel is due."""
SAMPLES = 64
"""Indices of samples that a record with an alert keeps."""
QUIET = 20
"""Updates in which nothing was measured, after which the user is told why."""
BEFORE_MEASURING = {"step", "skipped", "batch", "learning_rate", "scheduled"}
"""Fields of a record that do not depend on the increment."""

_probes: Any = WeakIdKeyDictionary()  # weak sets of those that watch a weight


def probes_of(weight: Tensor) -> list[Probe]:
    """Return the probes that watch a weight now: a TrustRegion lets them see a step before it writes to the weights."""
    return list(_probes.get(weight, ()))


class Schedule:
    """Plans what is measured of each step.

    Args:
        diameter_every: steps between exact diameters; 0 for none.
        perturbation_every: steps between perturbations of the panel; 0 for none.
        bounds: measure bounds of the diameter on every step; None for where the increment is formed from state.
        immediate: wait for the device in every step that is measured.
        device: of the head.
    """

    def __init__(
        self,
        diameter_every: int,
        perturbation_every: int,
        *,
        bounds: bool | None,
        immediate: bool,
        device: torch.device,
    ) -> None:
        self.diameter_every, self.perturbation_every = diameter_every, perturbation_every
        self.last = math.inf
        """Number of the last step, where it is known before: it is measured like one that is due."""
        self.may_defer = not immediate and reads_later(device)
        """Whether the host need not wait for the device in ordinary steps."""
        self.waits = False
        """Whether a step is whole, and can be measured, only when its record is made."""
        self._bounds, self._chosen, self._can_defer = bool(bounds), bounds, False
        self._checked = 0  # steps that were compared with what the weights did

    def decide(self, head: Head) -> None:
        """Note how increments are formed, where all ranks agree on it: one may find out more soon."""
        self._bounds = head.basis is Basis.STATE if self._chosen is None else self._chosen
        self.waits, self._can_defer = head.waits_for_record, head.can_defer

    def plan(self, step: int) -> StepPlan:
        """Return what is measured of a step."""
        exact, panel = self._is_due(step, self.diameter_every), self._is_due(step, self.perturbation_every)
        bounds, due = self._bounds, exact or panel
        check = (due or bounds) and (due or self._checked < CHECKED)
        defer = self.may_defer and not (due or check or self.waits) and (not bounds or self._can_defer)
        return StepPlan(exact=exact, panel=panel, bounds=bounds, check=check, defer=defer)

    def begin(self, plan: StepPlan) -> None:
        """Count a step that begins."""
        self._checked += plan.check

    def restart_checks(self) -> None:
        """Compare the first steps with the weights once more: another optimizer makes them."""
        self._checked = 0

    def _is_due(self, step: int, every: int) -> bool:
        return every > 0 and (step % every == 0 or step == self.last)


class Probe(ProcessBound):
    """Measures the steps of an optimizer on a model's LM head.

    From `attach` to `detach` hooks see every step of the optimizer; `record` returns the record of the last one.
    Observation changes nothing: weights, state, gradients, random numbers and training flags stay as they were.

    A model that every rank has whole is measured by one process alone, and nothing is sent. Of a model with sharded
    parameters there is a probe on each rank, and all of them make the same calls.

    Arguments that `HilbertMonitor` has too are documented there.

    Args:
        model: a language model.
        optimizer: the one that moves the head, a ChainedOptimizer, or several of which one does.
        panel: validation positions, the same on every rank; without it only the diameter is measured.
        bounds: measure bounds of the diameter on every step; by default where the increment is formed from state.
        hidden: (model, batch) -> hidden states. Of a sharded model it runs on each rank, and fails on all or none.
        autocast: makes the context in which the model runs its forward pass.
        attention: also find the largest attention logit of the panel, see `AttentionLogits`.
        schedulers: of the learning rate, one or several, or a function that returns them.
        judge: blow-up rules. A step whose bounds they suspect is searched for its diameter; of a blow-up the panel is
            measured too.
        immediate: wait for the device in every step that is measured. Otherwise `record` returns None for an ordinary
            step, and `earlier` has its record after the next step has begun, or `flush` was called.
        process_group: the ranks that train together, if they are not all: in a pipeline, those with the head.
        guard: counts what fails; by default one of its own, which raises if `strict`.
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
        bounds: bool | None = None,
        hidden: HiddenStates | None = None,
        autocast: AutocastFactory | None = None,
        decay: Decay | None = None,
        vocab_size: int | None = None,
        logit_scale: float | None = None,
        schedulers: Schedulers = None,
        judge: Judge | None = None,
        immediate: bool = True,
        efficiency: bool = False,
        attention: bool = False,
        process_group: ProcessGroup | None = None,
        guard: Guard | None = None,
        strict: bool = False,
    ) -> None:
        self.model, self.panel, self.judge = model, panel, judge
        self.guard = guard or Guard(strict=strict)
        reshard(model)  # after a validation its root may be gathered, in other parameters than the optimizer's
        self._make_head = partial(Head, model, head=head, decay=decay, vocab_size=vocab_size, logit_scale=logit_scale)
        self.head = self._make_head(optimizer)
        device = compute_device(self.head.weight)
        self.ranks = Ranks.of(device, None if is_sharded(model) else 1, process_group)
        self.schedule = Schedule(diameter_every, perturbation_every, bounds=bounds, immediate=immediate, device=device)
        """What is due at which step."""
        self.step = 0
        self.remarks: list[str] = []
        """What a reader of the numbers should know."""
        self.alerts: list[Alert] = []
        """Those of the last record."""
        self._make_measurer = partial(
            Measurer,
            model,
            ranks=self.ranks,
            guard=self.guard,
            remark=self._remark_inexact,
            efficiency=efficiency,
            attention=attention,
            hidden=hidden,
            autocast=autocast,
        )
        self._measurer = self._make_measurer(self.head)
        self._learning_rate = LearningRate(schedulers, self.head.weight)
        for text in self.head.remarks():
            self._remark_inexact(text)
        self._note_unknown_decay()
        self._plan = StepPlan()
        self._ends: list[Callable[[], None]] = []  # of hooks
        self._enders: list[Callable[[], None]] = []  # see a step that was made, if they have not yet
        self._outcome: Callable[[], Any] | None = None  # reads what a TrustRegion made of the step
        self._limited = False  # whether one holds the steps
        self._fields: Fields | None = None  # of the step that has no record yet
        self._deferred: DeferredStep | None = None  # that step, where the host reads it later
        self._sent: DeferredStep | None = None  # the step before it, on its way to the host
        self._last: tuple[StepRecord, Fields] | None = None
        self._earlier: list[Judged] = []
        self._since = time.perf_counter()
        self._batch: int | None = None  # number in its epoch of the batch that the next step is made of
        self._samples: list[SampleIndices] = []  # of the batches since the last record
        self._quiet: tuple[float, str] = (0.0, "")  # updates in which nothing was measured, and what they lacked
        self._spoke = False  # whether the user need not be told of these any more
        self._learning_rate.end_update()
        self.schedule.decide(self.head)

    # From start to end

    def attach(self) -> Probe:
        """Begin to watch."""
        self.detach()
        self.bind_to_process()
        by_optimizer: dict[int, list[IncrementSource]] = {}
        for source in self.head.sources:
            by_optimizer.setdefault(id(source.optimizer), []).append(source)
        self._ends = [self._hook(sources) for sources in by_optimizer.values()]
        _probes.setdefault(self.head.weight, WeakSet()).add(self)
        self._end_update()
        return self

    def detach(self) -> None:
        """End it; the optimizer is left without a trace."""
        self.flush()
        for end in self._ends:
            end()
        self._ends, self._enders = [], []
        _probes.get(self.head.weight, WeakSet()).discard(self)
        self.head.forget()
        self._measurer.forget()
        self._learning_rate.forget()

    def finish(self) -> None:
        """End it for good: if nothing was measured, say why."""
        self.detach()
        self._tell_why_quiet()

    def __enter__(self) -> Probe:
        return self.attach()

    def __exit__(self, *_: object) -> None:
        self.finish()

    # Hooks

    def _hook(self, sources: list[IncrementSource]) -> Callable[[], None]:
        """Watch the steps of the optimizer of some sources; return a function that ends it."""
        is_open = False

        def before() -> None:
            nonlocal is_open
            if not self.inherited:
                is_open = True
                self._before_step(sources)

        def after() -> None:
            nonlocal is_open
            if is_open and not self.inherited:  # or it was seen before a TrustRegion wrote to the weights
                is_open = False
                self._after_step(sources)

        def waits() -> bool:  # until the closure has run the device has no new work, and would run dry
            return self.schedule.may_defer and self.head.basis is Basis.STATE

        optimizer, param = sources[-1].optimizer, sources[-1].param
        self._enders.append(after)
        return on_steps((optimizer, *inner_optimizers(optimizer, param)), before, after, after_closure=waits)

    def _before_step(self, sources: list[IncrementSource]) -> None:
        with self.guard("increment"):
            self.flush()
        with self.guard("increment"):
            if self.head.source in sources or not self.stepped:  # else the bias follows with an optimizer of its own
                self._plan = self.schedule.plan(self.step + 1)
            if self.head.source in sources:
                self.schedule.begin(self._plan)
            for source in sources:
                source.begin(self._plan)

    def _after_step(self, sources: list[IncrementSource]) -> None:
        step = OptimizerStep("", {})
        with self.guard("increment"):
            try:
                for source in sources:
                    step = source.end()
            except BaseException:
                self.head.forget()
                raise
        if self.head.source in sources:
            with self.guard("increment"):  # also of a step that could not be noted: other ranks wait for this one there
                self._measure_step(step)

    def before_limit(self) -> None:
        """See the step that was made, before a TrustRegion writes to the weights."""
        for end in self._enders:
            end()

    def after_limit(self, outcome: Callable[[], Any] | None) -> None:
        """Note what a TrustRegion made of the step: a function that reads it, or None if it holds none any more."""
        if self.inherited:
            return
        self._outcome, self._limited = outcome, outcome is not None
        for source in self.head.sources:
            source.weights_limited(self._limited)

    # Steps

    @property
    def stepped(self) -> bool:
        """Whether there was a step since the last record."""
        return self._fields is not None

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
        self._measurer.forget()
        self._fields = self._count_step(why)
        reading = self._learning_rate.reading(self.head.source.group.get("lr"), since_update=True)
        self._fields["learning_rate"], self._fields["scheduled"] = reading.read()

    def notice_update(self, optimizers: Sequence[Optimizer] = (), *, weight: float = 1.0) -> None:
        """Look for the step of an update that no hook saw: compiled, or made by an optimizer that is new.

        To be called on every rank, where the training loop counts an update and there was no step.

        Args:
            optimizers: those of the run, as they are now.
            weight: how much of an update it is, where the loop cannot tell.
        """
        self.flush()
        moved = False
        with self.guard("increment"):
            if self._follow(optimizers):
                self._fields = self._count_step()
                return
            moved = self.head.source.moved_unseen()
        if self.ranks.all_agree(not moved):
            self._stay_quiet("", weight)
            return
        with self.guard("increment"):
            self._plan = self.schedule.plan(self.step + 1)
            self.head.end_unseen()
            assert self.head.source.last is not None
            self._measure_step(self.head.source.last, seen=False)

    def _follow(self, optimizers: Sequence[Optimizer]) -> bool:
        """Watch another optimizer, if the head has moved to one."""
        owner = owner_of(optimizers, self.head.weight)
        if owner is None or stepping_optimizer(owner, self.head.weight) is self.head.source.optimizer:
            return False
        self._remark_from_step("the head has another optimizer, which is watched in place of the first")
        watching = bool(self._ends)
        self.detach()
        self.head = self._make_head(optimizers)
        self._measurer = self._make_measurer(self.head)
        self.schedule.restart_checks()
        self._note_unknown_decay()
        if watching:
            self.attach()
        return True

    def _count_step(self, skipped: str = "") -> Fields:
        """Count a step, and return its first fields."""
        self.step += 1
        self._outcome = None  # of the step before
        return {"step": self.step, "skipped": skipped, "batch": self._batch}

    def _measure_step(self, step: OptimizerStep, *, seen: bool = True) -> None:
        """Measure a step that was just made, as far as it is whole."""
        if self._fields is not None:  # nobody asked for its record: several steps to a batch
            self._earlier.append((self._finish(self._fields), self.alerts))
        self._measurer.forget()
        self._fields = fields = self._count_step(step.skipped)
        self._drain_fallbacks()
        if self._plan.defer and seen and not step.skipped:
            self._begin_deferred(step, fields)
            return
        self._note_skip(step.skipped)
        with self._measurer.timed("learning_rate"):
            reading = self._learning_rate.reading(step.options.get("lr"), since_update=not seen)
            fields["learning_rate"], fields["scheduled"] = reading.read()
        if not self.schedule.waits:
            self._measure(fields)
            source = self.head.source
            lost = source.needs_gradient or (self._limited and source.basis is not Basis.STATE)
            if lost and self._plan.panel and not step.skipped:
                self._measurer.form_increment(hold=True)

    def _measure(self, fields: Fields) -> None:
        """Measure what is due of a new step, but for the panel."""
        if self._plan.exact or self._plan.bounds:
            self._measure_diameter(fields, exact=self._plan.exact)
        if self._plan.panel:
            fields |= self._measurer.quality(fields)

    def _measure_diameter(self, fields: Fields, *, exact: bool) -> None:
        if not fields["skipped"]:
            fields |= self._measurer.diameter(exact=exact, suspects=partial(self._suspects, fields))
        if fields.get("decay"):
            self._note_unknown_decay()
        self._drain_fallbacks()

    def increment(self) -> Tensor | None:
        """Return S of the last step as it acts on the logits: scaled, padding dropped, extended by the bias. (V, d).

        Of a sharded head it is the rows of this rank. None if the weights did something else than the optimizer's state
        says.
        """
        increment = self.head.increment()
        return None if increment is None else increment.S.rows.matrix()

    # The rules

    def _suspects(self, fields: Fields, bounds: Fields) -> bool:
        """Return whether the rules want to know the exact diameter of a step with these bounds."""
        lr, prefix = fields.get("learning_rate"), "stored_" if "stored_diameter_lower" in bounds else ""
        lower, upper = bounds.get(f"{prefix}diameter_lower"), bounds.get(f"{prefix}diameter_upper")
        if self.judge is None or lr is None or lower is None or upper is None:
            return False
        return self.judge.suspects(fields["step"], lr, lower, upper, scheduled=fields.get("scheduled"))

    def _is_blow_up(self, fields: Fields) -> bool:
        """Return whether the diameter of a step is more than the rules allow: that of what was stored, if another."""
        diameter, lr = fields.get("stored_diameter"), fields.get("learning_rate")
        diameter = fields.get("diameter") if diameter is None else diameter
        if self.judge is None or diameter is None or lr is None:
            return False
        limit = self.judge.limit(fields["step"], lr, scheduled=fields.get("scheduled"))
        return limit is not None and diameter > limit

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

        Called after every step: the perturbation is measured here, under the new weights.

        Args:
            final: the run has ended with that step: measure what has not been, also of a step already recorded.
            train_loss: loss of the step.
            validation_loss: if it was computed since the last record.
            tokens: training tokens so far.
        """
        given = {"validation_loss": validation_loss, "tokens": tokens}
        given = {name: value for name, value in given.items() if value is not None}
        if self._fields is not None and self._deferred is not None and not final:
            self._fields |= given
            self._send(self._fields, self._deferred, train_loss)
            return None
        self.flush()
        fields, fresh = self._fields, self._fields is not None
        if fields is None and final and self._last is not None:
            fields = dict(self._last[1])
        if fields is None:
            return None
        if fresh and not fields["skipped"]:
            with self.guard("increment"):
                self.head.end_missing()
        if fresh:
            self._check_weights(fields)
            if self.schedule.waits:
                self._measure(fields)
        fresh |= self._measure_rest(fields, final=final)
        if not final:
            self._end_update()
        if not fresh:
            return None
        fields |= given | ({} if train_loss is None else {"train_loss": float(train_loss)})
        record = self._finish(fields)
        self._end_batches()
        return record

    def earlier(self) -> list[Judged]:
        """Return records, with their alerts, of steps that others followed before `record` returned theirs."""
        earlier, self._earlier = self._earlier, []
        return earlier

    def update_last(self, *, validation_loss: float) -> StepRecord | None:
        """Return the last record with what has become known of its step since, or None if there is no record yet."""
        self.flush()
        if self._last is None:
            return None
        record, fields = self._last
        fields["validation_loss"] = validation_loss
        self._last = msgspec.structs.replace(record, validation_loss=validation_loss), fields
        return self._last[0]

    def _check_weights(self, fields: Fields) -> None:
        """Drop what was measured in the hook, if something moved the weights after it."""
        unchanged, waited = False, self.schedule.waits
        with self.guard("increment"):
            unchanged = "increment_from" not in fields or self.head.unchanged()
        if self._plan.check:
            mine, unchanged = unchanged, False
            with self.guard("increment"):
                unchanged = bool(self.head.agree(self.ranks, float(mine))[0])
                self.schedule.decide(self.head)
        if not unchanged:
            for name in fields.keys() - BEFORE_MEASURING:
                del fields[name]
            self._measurer.forget()
        self._drain_fallbacks()
        self.schedule.waits &= waited or not unchanged  # what was measured in the hook is not measured again

    def _measure_rest(self, fields: Fields, *, final: bool) -> bool:
        """Measure what waits for the record, or for the end of the run; return whether anything was due."""
        schedule, source = self.schedule, self.head.source
        if not final and not schedule.perturbation_every:
            return False
        formable, blew_up = False, self.ranks.rank != 0
        with self.guard("increment"):
            formable = not fields["skipped"] and (source.formable if final else source.last is not None)
        with self._measurer.timed("rules"):
            blew_up = blew_up or self._is_blow_up(fields)
        searched, measured = "diameter" in fields or "change_diameter" in fields, "perturbation_rms" in fields
        numbers = self.ranks.all_min([float(x) for x in (formable, blew_up, searched, measured)])
        everybody, blew_up, searched, measured = map(bool, numbers)
        if not everybody:
            return False
        due = False
        if final and schedule.diameter_every and not searched:
            due = True
            self._measure_diameter(fields, exact=True)
        panel = schedule.perturbation_every and (blew_up or final or self._plan.panel)
        if panel and not (final and measured):
            due = True
            fields |= self._measurer.panel(self.panel, fields)
        return due

    def _finish(
        self,
        fields: Fields,
        *,
        samples: list[SampleIndices] | None = None,
        seconds: dict[str, float] | None = None,
        moment: tuple[float, float] | None = None,
    ) -> StepRecord:
        """Make the record of a step, and have it judged.

        Args:
            fields: as far as it was measured.
            samples: indices of the samples it was made of; by default those noted last. They are read if there is an
                alert.
            seconds: what measuring has cost; by default since the last record.
            moment: when the step ended; by default now.
        """
        if self._outcome is not None:
            outcome = self._outcome()
            fields |= limit_fields(outcome.limit, outcome)
        spent = dict(self._measurer.seconds if seconds is None else seconds)
        ended, elapsed = moment or self._moment()
        share = sum(spent.values()) / elapsed if elapsed > 0 else None
        record, self.alerts = StepRecord(time=ended, seconds=spent, share=share, **fields), []
        if self.judge is not None and self.ranks.rank == 0:
            with self.guard("rules"):
                self.alerts = self.judge.judge(record)
                indices = self._read_samples(self._samples if samples is None else samples) if self.alerts else None
                if indices is not None:
                    fields["samples"] = indices
                    record = msgspec.structs.replace(record, samples=indices)
                    self.alerts = [with_samples(alert, indices) for alert in self.alerts]
        self._last = record, fields
        if seconds is None:
            self._fields = None
            self._measurer.forget()
            self._measurer.seconds.clear()
        return record

    def _moment(self) -> tuple[float, float]:
        """Return seconds since the epoch, and since this was last asked, now that a step has ended."""
        now = time.perf_counter()
        elapsed, self._since = now - self._since, now
        return time.time(), elapsed

    def _read_samples(self, samples: list[SampleIndices]) -> tuple[int, ...] | None:
        indices: tuple[int, ...] | None = None
        if samples:
            with self.guard("samples"):
                indices = _first_samples(samples)
        return indices

    def _end_batches(self) -> list[SampleIndices]:
        samples, self._batch, self._samples = self._samples, None, []
        return samples

    def _end_update(self) -> None:
        with self.guard("increment"):
            self.schedule.decide(self.head)
            self.head.end_update(self.schedule.plan(self.step + 1))
        with self.guard("learning_rate"):
            self._learning_rate.end_update()

    # Steps that the host reads later

    def flush(self) -> None:
        """Read what a device still has of earlier steps; their records are then in `earlier`.

        Called before a step moves anything. If the rules suspect the one before it, that is searched for its diameter.
        """
        sent, self._sent = self._sent, None
        if sent is not None:
            self._read(sent)
            self._take_seconds(sent)
            record = self._finish(sent.fields, samples=sent.samples, seconds=sent.seconds, moment=sent.moment)
            self._earlier.append((record, self.alerts))
        current, self._deferred = self._deferred, None
        if current is not None:  # it has no record yet, and is made as if it had never been deferred
            current.numbers.send()
            self._read(current)

    def _begin_deferred(self, step: OptimizerStep, fields: Fields) -> None:
        """Leave on the device what the host needs of a step."""
        head, plan = self.head, self._plan
        with self._measurer.timed("learning_rate"):
            rate = self._learning_rate.reading(step.options.get("lr"))
            self._deferred = deferred = DeferredStep(fields, step, rate, head.basis.name.lower())
            deferred.numbers.add("rate", rate.tensor())
            deferred.numbers.add("overflow", step.overflow)
        if not plan.bounds:
            return
        with self._measurer.timed("bracket"):
            increment = head.increment(check=False)
            assert increment is not None
            if head.source.needs_gradient:
                deferred.increment = increment = increment._replace(S=held(increment.S))
            deferred.bracket = deferred_bracket(increment.S.rows)
            deferred.numbers.add("bracket", deferred.bracket.numbers)
            deferred.numbers.add("rounding", increment.rounding)
            deferred.numbers.add("count", head.source.count)
            if head.has_stored:
                deferred.stored = deferred_bracket(head.stored_increment().rows)
                moved, deferred.weights = head.source.moved()
                deferred.numbers.add("stored", deferred.stored.numbers)
                deferred.numbers.add("moved", moved)

    def _send(self, fields: Fields, deferred: DeferredStep, loss: float | Tensor | None) -> None:
        """Send what a step has on the device to the host."""
        self._end_update()
        deferred.samples = self._end_batches()
        with self._measurer.timed("bracket"):
            if isinstance(loss, Tensor) and not hasattr(loss, "device_mesh"):
                deferred.numbers.add("train_loss", loss)
            elif loss is not None:
                fields["train_loss"] = float(loss)
            deferred.numbers.send()
        deferred.outcome, deferred.moment = self._outcome, self._moment()
        self._take_seconds(deferred)
        self._sent, self._deferred, self._fields = deferred, None, None
        self._measurer.forget()

    def _read(self, deferred: DeferredStep) -> None:
        """Complete the fields of a step with the numbers that have arrived."""
        head, fields, measurer = self.head, deferred.fields, self._measurer
        self._outcome = deferred.outcome or self._outcome
        with measurer.timed("bracket"):
            numbers = deferred.numbers.read()
            fields["learning_rate"], fields["scheduled"] = deferred.rate.read(numbers.get("rate"))
            if "train_loss" in numbers:
                fields["train_loss"] = numbers["train_loss"][0]
            if any(numbers.get("overflow", ())):
                fields["skipped"] = "overflow"
            elif deferred.bracket is not None:
                again = lambda: self._increment_again(deferred)  # noqa: E731
                fields |= bounds_of(_resolved(deferred.bracket, numbers["bracket"], again))
                ceiling = head.ceiling(lr=fields["learning_rate"], count=numbers["count"][0])
                rounding = numbers["rounding"][0] or None
                fields |= {"increment_from": deferred.basis, "rounding": rounding, "ceiling": ceiling}
                if deferred.stored is not None:
                    stored = bounds_of(_resolved(deferred.stored, numbers["stored"], head.stored_increment))
                    fields |= stored_fields(stored, numbers["moved"][0] / deferred.weights)
        self._note_skip(fields["skipped"])
        with measurer.timed("diameter"):
            if self._suspects(fields, fields) and (deferred.increment is not None or head.source.formable):
                fields |= measurer.search_alone(deferred.increment, fields)
        if self.schedule.perturbation_every and self.ranks.world == 1 and self._is_blow_up(fields):
            fields |= measurer.panel(self.panel, fields)
        measurer.forget()

    def _increment_again(self, deferred: DeferredStep) -> RowShards:
        increment = self.head.increment(check=False) if deferred.increment is None else deferred.increment
        assert increment is not None
        return increment.S

    def _take_seconds(self, deferred: DeferredStep) -> None:
        """Count what was measured since to a step."""
        for part, seconds in self._measurer.seconds.items():
            deferred.seconds[part] = deferred.seconds.get(part, 0.0) + seconds
        self._measurer.seconds.clear()

    # What the user is told

    def note(self, text: str) -> None:
        """Add a sentence to the remarks of the run."""
        if text not in self.remarks:
            self.remarks.append(text)
            warn_user(text, stacklevel=3)

    def _note_unknown_decay(self) -> None:
        for source in self.head.sources:
            if source.decay.share(source.group) is None:
                self.note(unknown_decay(source.optimizer))

    def _remark_inexact(self, text: str) -> None:
        """Note why the bound H D(S) on the perturbation is not tight."""
        if text not in self.remarks:
            self.remarks.append(text)
            warn_user(f"identity not exact, {text}", stacklevel=3)

    def _remark_from_step(self, text: str) -> None:
        """Note that D(S) is formed in another way than before, from this step on."""
        if not any(remark.endswith(text) for remark in self.remarks):
            step = self.step + (self._fields is None)
            self.remarks.append(f"from step {step} on: {text}")
            warn_user(f"step {step}: {text}", stacklevel=3)

    def _drain_fallbacks(self) -> None:
        for source in self.head.sources:
            while source.fallbacks:
                self._remark_from_step(source.fallbacks.pop(0))

    def _note_skip(self, skipped: str) -> None:
        """Count a step that was skipped; a step that moved something ends the count."""
        if skipped:
            self._stay_quiet(skipped)
        else:
            self._spoke = True

    def _stay_quiet(self, lacks: str, weight: float = 1.0) -> None:
        """Count an update in which nothing was measured, and say why if there were many.

        Args:
            lacks: what the optimizer's steps lack, or nothing if it makes none.
            weight: how much of an update it is, where the training loop cannot tell.
        """
        self._quiet = self._quiet[0] + weight, lacks
        if self._quiet[0] >= QUIET:
            self._tell_why_quiet()

    def _tell_why_quiet(self) -> None:
        updates, lacks = self._quiet
        head = self.head
        if not updates or self._spoke or self.ranks.rank != 0:
            return
        self._spoke = True
        if not head.weight.requires_grad:
            reason = "it is frozen, and is measured once it is not"
        elif lacks == "overflow":
            reason = "all were left out because gradients overflowed: look at the loss and its scale"
        elif lacks:
            reason = f"{lacks} reaches it: if the model trains another head, pass that as head=..."
        else:
            kind = type(head.source.optimizer).__name__
            reason = f"{kind}, which has it, makes no step: if another head is trained, pass that as head=..."
        number = max(1, round(updates))
        times = "1 update" if number == 1 else f"{number} updates"
        warn_user(f"the head '{head.name}' has not moved in {times}; {reason}", stacklevel=4)


def _first_samples(batches: list[SampleIndices]) -> tuple[int, ...]:
    """Read the first SAMPLES indices of some batches."""
    read: list[int] = []
    for indices in batches:
        first = indices[: SAMPLES - len(read)]
        read += first.tolist() if isinstance(first, Tensor) else first
    return tuple(read)


def is_sharded(model: Module) -> bool:
    """Return whether ranks have parts of a model's parameters, so that all of them measure together."""
    return any(hasattr(p, "device_mesh") for p in model.parameters())


def _resolved(bracket: DeferredBracket, numbers: list[float], again: Callable[[], RowShards]) -> Any:
    """Return the bounds that were left on a device; where they do not tell, bound the increment again."""
    found = bracket.resolve(numbers)
    return row_diameter_bracket(again()) if found is None else found

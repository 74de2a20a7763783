"""The framework-free core: watches the LM head of a model in any training loop, and makes records of its steps."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import msgspec
import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from hilbert_monitor.geometry import Interval
from hilbert_monitor.runs.alerts import Judge
from hilbert_monitor.runs.record import Alert, StepRecord

from . import panel_perturbation
from .decay import Decay, HeadStep
from .formulas import state_of
from .guard import Guard, tell
from .head import WatchedHead
from .hidden import AutocastFactory, HiddenStates, hidden_states
from .increment import IncrementSource, owning_optimizer, stepping_optimizer
from .measurement import DiameterBounds, ExactDiameter, GradientRows, Measurement, StoredStep
from .panel import Panel
from .ranks import Ranks
from .step_quality import backward_bound, head_diameter, increment_quality, step_quality

UNBALANCED = 0.01
"""|sum of the gradient's rows| / sum of their norms, from which on the loss is not that of a plain softmax."""

CHECKED = 5
"""How many of the first steps are compared with what the weights did; later ones where D(S) is exact."""
QUIET = 20
"""Updates in which the head did not move, after which a reader is told why."""

Judged = tuple[StepRecord, list[Alert]]
"""A record, and the alerts that the rules raised about it."""


class Probe:
    """Measures the steps of an optimizer on a model's LM head.

    From ``attach`` to ``detach`` every step of the optimizer is seen by a hook; ``record`` returns the record of the
    last one. Observation changes nothing: weights, state, gradients, random numbers and training flags stay as they
    were.

    Args:
        model: a language model; a head that is tied to an embedding is measured too, with a remark.
        optimizer: the one that moves the head, a ChainedOptimizer, or several of which one does.
        head: the LM head, its name or that of its weight, or None to look for it.
        panel: validation positions for the Hilbert perturbation; without it only the diameter is measured.
        diameter_every: steps between exact diameters; 0 for none.
        perturbation_every: steps between perturbations of the panel; 0 for none.
        bracket: bounds of the diameter on every step; by default where the increment is formed from state.
        hidden: how to get hidden states from a model that never calls its head: (model, batch) -> states.
        autocast: makes the context in which the model runs its forward pass.
        decay: how an unknown optimizer uses weight_decay.
        vocab_size: rows of the head that are tokens, if it is padded.
        logit_scale: factor between the head's output and the logits; by default that of the model's config, or 1.
        efficiency: also bracket, where the panel is due, how much descent the step makes of its diameter.
        judge: blow-up rules. If the bounds of a step allow a blow-up, its exact diameter is computed. If it is a
            blow-up, the panel is measured too. Give it on every rank.
        world: ranks that train together, if they are not those of torch.distributed: 1 for a process by itself.
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
        judge: Judge | None = None,
        efficiency: bool = False,
        world: int | None = None,
        guard: Guard | None = None,
        strict: bool = False,
    ) -> None:
        self.model, self.panel = model, panel
        self._watched_head = partial(
            WatchedHead, model, head=head, decay=decay, vocab_size=vocab_size, logit_scale=logit_scale
        )
        self.head = self._watched_head(optimizer)
        self.diameter_every, self.perturbation_every = diameter_every, perturbation_every
        self.bracket = self.source.from_state if bracket is None else bracket
        self.hidden, self.autocast = hidden, autocast
        self.judge, self.efficiency = judge, efficiency
        self.ranks = Ranks.of(self.head.weight.device, world)
        self.guard = guard or Guard(strict=strict)
        self.step = 0
        self.last = math.inf
        """Number of the last step, where it is known before: it is measured like one that is due."""
        self.alerts: list[Alert] = []
        """What the judge said of the last record."""
        self.remarks: list[str] = []
        """Reasons why the bound H D(S) on the perturbation is not tight."""
        for text in self.head.remarks():
            self._remark(text)
        self._end: Callable[[], None] | None = None
        self._current: Measurement | None = None  # of the step that has no record yet
        self._recorded: Measurement | None = None  # of the last record
        self._record: StepRecord | None = None
        self._earlier: list[Judged] = []
        self._increment: Tensor | None = None
        self._head_diameter: float | None = None
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._since = time.perf_counter()
        self._compared = False  # whether the logits of a batch were compared with the head's output
        self._first = 0  # step at which watching began
        self._quiet: float = 0  # updates in which the head did not move; from its first step on, not a number

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
        )
        self._first = self.step
        self._finish_update()
        return self

    def detach(self) -> None:
        """End it; the optimizer is left without a trace."""
        if self._end is not None:
            self._end()
        self._end = self._increment = None

    def __enter__(self) -> Probe:
        return self.attach()

    def __exit__(self, *_: object) -> None:
        self.detach()

    @property
    def stepped(self) -> bool:
        """Whether there was a step since the last record."""
        return self._current is not None

    def skip(self, why: str) -> None:
        """Count a step that the training loop left out, such as one that a GradScaler skipped."""
        self.step += 1
        self._increment, self._current = None, Measurement(step=self.step, skipped=why)
        lr = self.source.group.get("lr")
        self._current.learning_rate = None if lr is None else float(lr)

    def notice_update(self, optimizers: Sequence[Optimizer] = (), *, weight: float = 1.0) -> None:
        """Look for the step of an update that no hook saw: compiled, or made by an optimizer that is new.

        To be called on every rank, where the training loop counts an update and there was no step.

        Args:
            optimizers: those of the run, as they are now.
            weight: how much of an update it is, where the loop cannot tell.
        """
        step = None
        with self.guard("increment"):
            if self._follow(optimizers):
                self.step += 1
                self._current = Measurement(step=self.step)
                return
            step = self.head.unseen()
        if step is not None:
            self._on_step(step)
        else:
            self._note_quiet("", weight)

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
            self.head.finish_update(measure=self._will_measure())

    def _will_measure(self) -> bool:
        due = self._due(self.step + 1, self.diameter_every) or self._due(self.step + 1, self.perturbation_every)
        return due or self.bracket

    def _will_check(self) -> bool:
        """Whether the next step is compared with what the weights do: an accelerator is waited for."""
        early = self.step < self._first + CHECKED
        return self._will_measure() and (early or self._due(self.step + 1, self.diameter_every))

    def _due(self, step: int, every: int) -> bool:
        return every > 0 and (step % every == 0 or step == self.last)

    def _on_step(self, step: HeadStep) -> None:
        if self._current is not None:  # nobody asked for its record: several steps to a batch
            self._earlier.append((self._finish(self._current), self.alerts))
        self.step += 1
        self._increment, self._current = None, Measurement(step=self.step, skipped=step.skipped)
        with self._timed("learning_rate"):
            self._current.learning_rate = step.lr
        self._note_quiet(step.skipped)
        if self.head.waits_for_record:
            return
        self._measure_step(self._current)
        if self._increment is None and self._due(self.step, self.perturbation_every) and self.source.fleeting:
            with self._timed("increment"):
                self._increment = self._form_increment(self._current)

    # Measuring

    def _measure_step(self, step: Measurement) -> None:
        """Measure a new step: in its hook, or at its record where it is whole only then."""
        if step.skipped or step.bounds is not None:
            return
        self._measure_diameter(step, exact=self._due(self.step, self.diameter_every))
        if self.ranks.rank == 0 and self._due(self.step, self.perturbation_every):
            with self._timed("quality"):
                self._measure_quality(step)

    def _measure_diameter(self, step: Measurement, *, exact: bool) -> None:
        """Measure D(S) or its bounds, on the rank that writes."""
        if not (exact or self.bracket) or self.ranks.rank != 0:
            return
        S: Tensor | None = None
        with self._timed("increment"):
            S = self._form_increment(step)
        if S is None:
            return
        if not exact:
            with self._timed("bracket"):
                step.bounds, step.ceiling = DiameterBounds.of(S), self.head.ceiling()
                self._measure_stored(step, exact=False)
                upper = step.stored.stored_diameter_upper if step.stored else step.bounds.diameter_upper
                exact = self._is_blow_up(step, upper)
        if exact:
            with self._timed("diameter"):
                step.bounds, step.ceiling = ExactDiameter.of(S), self.head.ceiling()
                self._measure_stored(step, exact=True)
            if step.bounds is None:  # the search has failed
                with self._timed("bracket"):
                    step.bounds, step.ceiling = DiameterBounds.of(S), self.head.ceiling()
            self._increment = S  # for the panel, if it is due too
            with self._timed("gradient"):
                self._measure_gradient(step)

    def _measure_stored(self, step: Measurement, *, exact: bool) -> None:
        """Measure the step that rounded weights really made, where it is not the one intended."""
        if self.head.has_stored:
            S = self.head.stored_increment()
            step.stored = StoredStep.of(S, exact=exact, moved_share=self.source.moved_share())

    def increment(self) -> Tensor | None:
        """S of the last step as it acts on the logits: scaled, padding dropped, extended by the bias. (V, d).

        None if the weights did something else than the optimizer's state says.
        """
        increment = self.head.increment()
        return None if increment is None else increment.S

    def _form_increment(self, step: Measurement) -> Tensor | None:
        increment = self.head.increment()
        if increment is None:
            return None
        step.rounding, step.increment_from = increment.rounding, self.source.basis
        return increment.S

    def _measure_quality(self, step: Measurement) -> None:
        """Measure how good the step is, while its gradient is there. With a bias, no gradient has the shape of S."""
        if step.bounds is not None and step.bounds.nonfinite_rows:
            return
        if self._increment is None:
            self._increment = self._form_increment(step)
        S, head = self._increment, self.head
        if S is None:
            return
        if head.bias is not None or not (self.efficiency and step.bounds is not None):
            step.quality = increment_quality(S)
        else:
            bounds = Interval(step.bounds.diameter_lower, step.bounds.diameter_upper)
            state = {} if head.transposed else state_of(self.source.optimizer, head.weight)
            step.quality = step_quality(S, head.gradient(), state, bounds)
        if head.bias is None:
            self._head_diameter = head_diameter(head.logit_matrix(S.dtype), S)

    def _measure_gradient(self, step: Measurement) -> None:
        gradient = self.head.gradient()
        if gradient is None:
            return
        step.gradient = GradientRows.of(gradient, self.head.vocab_size)
        # An embedding's gradient is in that of a tied weight too.
        if step.gradient.gradient_balance > UNBALANCED and not self.head.tied:
            self._remark(
                "the rows of the head's gradient do not sum to zero, as those of a plain softmax cross entropy do:"
                " gradients clipped by value, a z-loss or soft-capped logits can be why"
            )

    def _measure_panel(self, step: Measurement) -> None:
        """Measure the panel: each rank takes its share, and all of them learn of a failure by one gather."""
        if self.panel is None and self.ranks.world == 1:
            return
        mine = panel_perturbation.failure()
        with self._timed("panel", user_code=True):
            mine = self._measure_share(step)
        step.panel = panel_perturbation.whole(self.ranks.gathered(mine))
        if step.panel is not None and step.bounds is not None and self._head_diameter is not None:
            with self._timed("quality"):
                step.backward_bound = backward_bound(
                    step.bounds.diameter_upper, self._head_diameter, step.panel.hidden_norm
                )

    def _measure_share(self, step: Measurement) -> Tensor:
        if self.panel is None:  # it is yet to be collected
            return panel_perturbation.failure()
        share = self.panel.share(self.ranks.rank, self.ranks.world)
        if not share.size:
            return panel_perturbation.nothing()
        S = self._form_increment(step) if self._increment is None else self._increment
        if S is None:
            return panel_perturbation.failure()
        H = hidden_states(
            self.model,
            self.head.module or self.head.weight,
            share,
            hidden=self.hidden,
            autocast=self.autocast,
            on_logits=self._compare_logits if not self._compared else None,
        )
        self._compared = True
        if self.head.bias is not None:
            H = torch.cat([H, H.new_ones(len(H), 1)], dim=1)
        return panel_perturbation.share(S, H)

    # Rules

    def _is_blow_up(self, step: Measurement, diameter: float | None) -> bool:
        """Whether a diameter of this step is more than the rules allow."""
        if self.judge is None or diameter is None or step.learning_rate is None:
            return False
        limit = self.judge.limit(self.step, step.learning_rate)
        return limit is not None and diameter > limit

    def _blew_up(self, step: Measurement) -> bool:
        """Whether the step is a blow-up, as the rank that measures it says."""
        if self.judge is None or not self.perturbation_every:
            return False
        mine = False
        with self._timed("rules"):
            stored = step.stored.stored_diameter if step.stored else None
            intended = step.exact.diameter if step.exact else None
            mine = self._is_blow_up(step, intended if stored is None else stored)
        return self.ranks.from_rank_zero(mine)

    def _remark(self, text: str) -> None:
        """Note once why the identity is not exact, and warn of it."""
        if text not in self.remarks:
            self.remarks.append(text)
            tell(f"identity not exact, {text}", stacklevel=3)

    def _compare_logits(self, output: Tensor, logits: Tensor) -> None:
        if text := self.head.explain(output, logits):
            self._remark(text)

    def _note_doubt(self, text: str) -> None:
        """Note that D(S) is formed in another way than before, and say so."""
        self.remarks.append(f"from step {self.step + 1} on: {text}")
        tell(f"step {self.step + 1}: {text}", stacklevel=3)

    def _note_quiet(self, why: str, weight: float = 1.0) -> None:
        """Count an update in which the head did not move; after some, say so once, and what may be the reason."""
        if not why and self._current is not None:
            self._quiet = math.nan  # it moves
        before, self._quiet = self._quiet, self._quiet + weight
        if not before < QUIET <= self._quiet:
            return
        name, kind = self.head.name, type(self.source.optimizer).__name__
        if not self.head.weight.requires_grad:
            reason = "it is frozen, and is measured once it is not"
        elif why:
            reason = f"{why} reaches it: if the model trains another head, pass that as head=..."
        else:
            reason = f"{kind}, which has it, makes no step: if another head is trained, pass that as head=..."
        tell(f"the head '{name}' has not moved in {QUIET} updates; {reason}", stacklevel=3)

    # Records

    def record(
        self,
        *,
        final: bool = False,
        train_loss: float | None = None,
        validation_loss: float | None = None,
        tokens: int | None = None,
    ) -> StepRecord | None:
        """Return the record of the last step, or None if there was none since the last call.

        Called on every rank after every step: the perturbation is measured here, under the new weights.

        Args:
            final: the run has ended with that step: measure what has not been, also of a step already recorded.
            train_loss: loss of the step.
            validation_loss: if it was computed since the last record.
            tokens: training tokens so far.
        """
        fresh, step = self._current is not None, self._current
        if step is None and final and self._recorded is not None:
            step = dataclasses.replace(self._recorded)
        if step is None:
            return None
        if fresh:
            with self.guard("increment"):
                self._check_weights(step)
            if self.head.waits_for_record:
                self._measure_step(step)
        formable = not final or self.ranks.unanimous(self.source.formable)
        if formable and not step.skipped:
            fresh |= self._measure_rest(step, final=final)
        if not final:
            self._finish_update()
        if not fresh:
            return None
        step.train_loss = step.train_loss if train_loss is None else train_loss
        step.validation_loss = step.validation_loss if validation_loss is None else validation_loss
        step.tokens = step.tokens if tokens is None else tokens
        return self._finish(step)

    def _check_weights(self, step: Measurement) -> None:
        """Drop what was measured in the hook of a step, if something moved the weights after it."""
        if step.bounds is not None and not self.head.stands():
            step.forget_increment()
            self._increment = self._head_diameter = None

    def _measure_rest(self, step: Measurement, *, final: bool) -> bool:
        """Measure what waits for the record, or for the end of the run; return whether anything was due."""
        due = False
        if final and self.diameter_every and step.exact is None:
            due = True
            self._measure_diameter(step, exact=True)
        panel_due = final or self._due(self.step, self.perturbation_every) or self._blew_up(step)
        if panel_due and self.perturbation_every and step.panel is None:
            due = True
            self._measure_panel(step)
        return due

    def earlier(self) -> list[Judged]:
        """Return records, with their alerts, of steps that others followed before `record` was called."""
        earlier, self._earlier = self._earlier, []
        return earlier

    def amend(self, *, validation_loss: float) -> StepRecord | None:
        """Return the last record with what has become known of its step since, or None if there is no record yet."""
        if self._record is None or self._recorded is None:
            return None
        self._recorded.validation_loss = validation_loss
        self._record = msgspec.structs.replace(self._record, validation_loss=validation_loss)
        return self._record

    def _finish(self, step: Measurement) -> StepRecord:
        """Make the record of a step, and have it judged."""
        now = time.perf_counter()
        spent = sum(self._seconds.values())
        share = spent / (now - self._since) if now > self._since else None
        record = step.record(time=time.time(), seconds=dict(self._seconds), share=share)
        self.alerts = []
        if self.judge is not None and self.ranks.rank == 0:
            with self._timed("rules"):
                self.alerts = self.judge.judge(record)
        self._record, self._recorded, self._current = record, step, None
        self._increment = self._head_diameter = None
        self._seconds, self._since = defaultdict(float), now
        return record

    @contextmanager
    def _timed(self, part: str, *, user_code: bool = False) -> Iterator[None]:
        """Time a part, and keep what it raises from the run."""
        start = time.perf_counter()
        with self.guard(part, user_code=user_code):
            yield
        self._seconds[part] += time.perf_counter() - start

"""Measures the parts of one step: what there is to form, to bound, to search and to run on the panel."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.nn import Module

from . import panel_perturbation
from .guard import Guard
from .head import WatchedHead
from .hidden import AutocastFactory, HiddenStates, hidden_states
from .measurement import DiameterBounds, ExactDiameter, GradientRows, Measurement, StoredStep
from .panel import Panel
from .ranks import Ranks
from .step_quality import backward_bound, head_diameter, head_quality

UNBALANCED = 0.01
"""|sum of the gradient's rows| / sum of their norms, from which on the loss is not that of a plain softmax."""


class StepMeter:
    """Measures one step after the other, times each part, and keeps what fails from the run.

    Args:
        model: a language model.
        ranks: those that train together.
        guard: counts what fails.
        remark: told why the identity is not exact.
        efficiency: also bracket how much descent the step makes of its diameter.
        hidden: how to get hidden states from a model that never calls its head.
        autocast: makes the context in which the model runs its forward pass.
    """

    def __init__(
        self,
        model: Module,
        *,
        ranks: Ranks,
        guard: Guard,
        remark: Callable[[str], None],
        efficiency: bool = False,
        hidden: HiddenStates | None = None,
        autocast: AutocastFactory | None = None,
    ) -> None:
        self.model, self.ranks, self.guard, self.remark = model, ranks, guard, remark
        self.efficiency, self.hidden, self.autocast = efficiency, hidden, autocast
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """What measuring has cost since the last record, by part."""
        self._increment: Tensor | None = None
        self._head_diameter: float | None = None
        self._compared = False  # whether the logits of a batch were compared with the head's output

    def forget(self) -> None:
        """Forget the step."""
        self._increment = self._head_diameter = None

    @property
    def holds_increment(self) -> bool:
        """Whether the increment of the step is at hand."""
        return self._increment is not None

    def take_increment(self, head: WatchedHead, step: Measurement) -> None:
        """Form the increment now: later it is lost."""
        with self.timed("increment"):
            self._increment = self._form(head, step)

    def measure_diameter(
        self, head: WatchedHead, step: Measurement, *, exact: bool, suspects: Callable[[float, float], bool]
    ) -> None:
        """Measure D(S), or its bounds; D(S) as well if the bounds are suspicious."""
        S: Tensor | None = None
        with self.timed("increment"):
            S = self._form(head, step)
        if S is None:
            return
        if not exact:
            with self.timed("bracket"):
                step.bounds, step.ceiling = DiameterBounds.of(S), head.ceiling()
                self._measure_stored(head, step, exact=False)
                exact = (
                    suspects(step.stored.stored_diameter_lower, step.stored.stored_diameter_upper)
                    if step.stored
                    else suspects(step.bounds.diameter_lower, step.bounds.diameter_upper)
                )
        if exact:
            with self.timed("diameter"):
                step.bounds, step.ceiling = ExactDiameter.of(S), head.ceiling()
                self._measure_stored(head, step, exact=True)
            if step.bounds is None:  # the search has failed
                with self.timed("bracket"):
                    step.bounds, step.ceiling = DiameterBounds.of(S), head.ceiling()
            self._increment = S  # for the panel, if it is due too
            with self.timed("gradient"):
                self._measure_gradient(head, step)

    def _measure_stored(self, head: WatchedHead, step: Measurement, *, exact: bool) -> None:
        """Measure the step that rounded weights really made, where it is not the one intended."""
        if not head.has_stored:
            return
        S = head.stored_increment() if head.source.basis == "state" else None
        bounds = step.bounds if S is None else ExactDiameter.of(S) if exact else DiameterBounds.of(S)
        if bounds is not None:
            step.stored = StoredStep.of(bounds, moved_share=head.source.moved_share())

    def _form(self, head: WatchedHead, step: Measurement) -> Tensor | None:
        increment = head.increment()
        if increment is None:
            return None
        step.rounding, step.increment_from = increment.rounding, head.source.basis
        return increment.S

    def measure_quality(self, head: WatchedHead, step: Measurement) -> None:
        """Measure how good the step is, while its gradient is there."""
        if step.bounds is not None and step.bounds.nonfinite_rows:
            return
        if self._increment is None:
            self._increment = self._form(head, step)
        if self._increment is None:
            return
        bounds = step.bounds if self.efficiency else None
        step.quality = head_quality(head, self._increment, bounds)
        if head.bias is None:
            self._head_diameter = head_diameter(head.logit_matrix(self._increment.dtype), self._increment)

    def _measure_gradient(self, head: WatchedHead, step: Measurement) -> None:
        gradient = head.gradient()
        if gradient is None:
            return
        step.gradient = GradientRows.of(gradient, head.vocab_size)
        # An embedding's gradient is in that of a tied weight too.
        if step.gradient.gradient_balance > UNBALANCED and not head.tied:
            self.remark(
                "the rows of the head's gradient do not sum to zero, as those of a plain softmax cross entropy do:"
                " gradients clipped by value, a z-loss or soft-capped logits can be why"
            )

    def measure_panel(self, head: WatchedHead, step: Measurement, panel: Panel | None) -> None:
        """Measure the panel: each rank takes its share, and all of them learn of a failure by one gather."""
        if panel is None and self.ranks.world == 1:
            return
        mine = panel_perturbation.failure()
        with self.timed("panel", user_code=True):
            mine = self._measure_share(head, step, panel)
        step.panel = panel_perturbation.whole(self.ranks.gathered(mine))
        if step.panel is not None and step.bounds is not None and self._head_diameter is not None:
            with self.timed("quality"):
                step.backward_bound = backward_bound(
                    step.bounds.diameter_upper, self._head_diameter, step.panel.hidden_norm
                )

    def _measure_share(self, head: WatchedHead, step: Measurement, panel: Panel | None) -> Tensor:
        if panel is None:  # it is yet to be collected
            return panel_perturbation.failure()
        share = panel.share(self.ranks.rank, self.ranks.world)
        if not share.size:
            return panel_perturbation.nothing()
        S = self._form(head, step) if self._increment is None else self._increment
        if S is None:
            return panel_perturbation.failure()
        H = hidden_states(
            self.model,
            head.module or head.weight,
            share,
            hidden=self.hidden,
            autocast=self.autocast,
            on_logits=None if self._compared else partial(self._compare_logits, head),
        )
        self._compared = True
        if head.bias is not None:
            H = torch.cat([H, H.new_ones(len(H), 1)], dim=1)
        return panel_perturbation.share(S, H)

    def _compare_logits(self, head: WatchedHead, output: Tensor, logits: Tensor) -> None:
        if text := head.explain(output, logits):
            self.remark(text)

    @contextmanager
    def timed(self, part: str, *, user_code: bool = False) -> Iterator[None]:
        """Time a part, and keep what it raises from the run."""
        start = time.perf_counter()
        with self.guard(part, user_code=user_code):
            yield
        self.seconds[part] += time.perf_counter() - start
